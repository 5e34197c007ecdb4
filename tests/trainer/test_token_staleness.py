"""Tokens that are too old for `max_token_staleness`: no loss, no denominator and no group lives on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_client import RolloutGroup, Sample
from replay_client.testing import make_group
from replay_trainer import GRPOConfig, without_stale_tokens
from replay_trainer.batching import to_batch
from replay_trainer.groups import GroupSource, ZeroVarianceReplacer
from replay_trainer.passes import Passes
from replay_trainer.ranks import Ranks
from replay_trainer.stopping import Stopping
from replay_trainer.token_staleness import VERSIONS, count_stale, is_stale, token_versions
from tests.kit.clients import FakeClient
from tests.kit.groups import in_pieces, make_sample, of_last_versions, with_versions
from tests.kit.models import make_model
from tests.kit.trainers import Killed, killed_in, lines_of, make_batches, make_trainer
from tests.trainer.test_sequences import model_of

NOW, BOUND = 20, 4
"""The version of the weights that the step starts with, and the most versions that a token may lag behind it."""
LIVE, STALE = True, False


def groups_and_masks() -> list[tuple[RolloutGroup, list[bool]]]:
    """Groups with tokens of the versions NOW - 8 to NOW, and which of the tokens count, written out."""
    spanning = make_group(
        rewards=[1.0, 0.0, 0.5],
        prompt=[3, 4],
        lengths=[9, 4, 5],
        seed=1,
        loss_mask=[True, True, False, True, True, True, True, True, False, *[True] * 9],
    )
    versions = [*range(NOW - 8, NOW + 1), *range(NOW - 8, NOW - 4), *range(NOW - 4, NOW + 1)]
    mask = [*[STALE] * 4, LIVE, LIVE, LIVE, LIVE, STALE, *[STALE] * 4, *[LIVE] * 5]
    live = make_group(rewards=[0.0, 1.0], prompt=[9], lengths=[3, 2], seed=2, version=NOW - BOUND)
    stale = make_group(rewards=[0.0, 1.0], prompt=[9], lengths=[2, 3], seed=3, version=NOW - BOUND - 1)
    return [(with_versions(spanning, versions), mask), (live, [LIVE] * 5), (stale, [STALE] * 5)]


OWN = "tests.trainer.own_losses"
LOSSES = ["dapo", "bnpo", "cispo", "grpo", "gspo", "dr_grpo", f"{OWN}:dapo", f"{OWN}:gspo", f"{OWN}:divides_by_length"]


def by_hand(loss_type: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and its gradient, rollout by rollout in plain torch. Tokens that do not count are never looked at."""
    model, old_model = make_model(), make_model(seed=2)
    losses = []
    for group, mask in groups_and_masks():
        for rollout, span in enumerate(group.rollout_spans()):
            ids = torch.tensor([*group.prompt_ids, *group.completion_ids[span]])
            positions = [token for token in range(span.stop - span.start) if mask[span.start + token]]
            if not positions:
                losses.append(torch.zeros(0))
                continue
            chosen = torch.tensor(positions) + len(group.prompt_ids)
            now, old = (
                each(ids[None]).logits[0, chosen - 1].log_softmax(-1).gather(-1, ids[chosen, None])[:, 0]
                for each in (model, old_model)
            )
            old = old.detach()
            sampled = torch.tensor(group.rollout_logprobs[span])[positions]
            weight = (old - sampled).exp().clamp(max=2.0)
            advantage = torch.tensor(group.advantages[rollout])
            ratio = (now - old).exp()
            if loss_type.endswith("gspo"):
                ratio = (now - old).mean().exp()
            unclipped = -ratio * advantage
            if loss_type == "cispo":
                loss = -ratio.detach().clamp(max=1.05) * advantage * now
            elif loss_type.endswith("divides_by_length"):
                loss = unclipped
            else:
                loss = torch.maximum(unclipped, -ratio.clamp(0.8, 1.2) * advantage)
            losses.append(loss * weight)
    if loss_type in ("grpo", "gspo", f"{OWN}:gspo"):
        total = sum(each.mean() for each in losses if len(each)) / len(losses)
    elif loss_type in ("dr_grpo", f"{OWN}:divides_by_length"):
        total = torch.cat(losses).sum() / (8 * len(losses))
    else:
        total = torch.cat(losses).sum() / len(torch.cat(losses))
    gradient = torch.autograd.grad(total, list(model.parameters()))
    return total.item(), dict(zip(dict(model.named_parameters()), gradient, strict=True))


def step_of(
    groups: Sequence[RolloutGroup], folder: Path, **options: Any
) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """The loss, the gradient and the metrics of a step of the trainer. Changes no weight."""
    config = GRPOConfig(output_dir=folder, device="cpu", max_token_staleness=BOUND, **options)
    policy = model_of(0, config.packing)
    passes = Passes(policy, None, None, config, Ranks("cpu"), partitioned=False)
    batch = to_batch(groups, oldest_version=config.oldest_version(NOW + 1))
    policy.zero_grad(set_to_none=True)
    with torch.no_grad():
        old_BT, _ = model_of(2)(batch)
    _, loss, metrics = passes.backward(batch, old_BT)
    gradient = {
        name: weight.grad.clone() for name, weight in policy.model.named_parameters() if weight.grad is not None
    }
    return loss, gradient, metrics


# ------------------------------------------------------------------------------------------------ the gradient


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("size", [12, 1000], ids=["micro-batches", "all rows at once"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_gradient_is_that_of_a_loop_that_looks_at_live_tokens_alone(tmp_path, loss_type, size, packing):
    options: dict[str, Any] = {"loss_type": loss_type, "max_completion_length": 8, "packing": packing}
    if loss_type == "cispo":
        options["epsilon_high"] = 1.05
    groups = [group for group, _ in groups_and_masks()]
    loss, gradient, _ = step_of(groups, tmp_path, max_tokens_per_micro_batch=size, **options)
    expected_loss, expected = by_hand(loss_type)
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    assert gradient.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(gradient[name], values, atol=1e-6, rtol=0, msg=name)
    assert max(float(values.abs().max()) for values in expected.values()) > 1e-3


@pytest.mark.parametrize("loss_type", ["dapo", "gspo"])
def test_rollouts_in_pieces_lose_the_same_tokens(tmp_path, loss_type):
    (group, _), *_ = groups_and_masks()
    cuts = [[2, 6], [1], [4]]
    pieces = in_pieces(group, cuts)
    versions = []
    for span, places in zip(group.sequence_spans(), cuts, strict=True):
        for end in [*places, span.stop - span.start]:
            versions += group.extras[VERSIONS][span.start : span.start + end].tolist()
    whole = step_of([group], tmp_path, loss_type=loss_type)
    cut = step_of([with_versions(pieces, versions)], tmp_path, loss_type=loss_type)
    assert cut[0] == pytest.approx(whole[0], abs=1e-6)
    for name, values in whole[1].items():
        torch.testing.assert_close(cut[1][name], values, atol=1e-6, rtol=0, msg=name)


def test_without_a_bound_every_token_counts(tmp_path):
    groups = [group for group, _ in groups_and_masks()]
    bounded = GRPOConfig(output_dir=tmp_path, max_token_staleness=BOUND)
    assert bounded.oldest_version(NOW + 1) == NOW - BOUND
    assert GRPOConfig(output_dir=tmp_path).oldest_version(NOW + 1) is None
    batch = to_batch(groups)
    assert int(batch.mask_BT.sum()) == sum(int(group.trained_mask.sum()) for group in groups)


def test_a_negative_bound_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"max_token_staleness must be .*, not -1"):
        GRPOConfig(output_dir=tmp_path, max_token_staleness=-1)


# ------------------------------------------------------------------------------------------------ the versions


def test_a_group_of_one_version_is_stale_as_a_whole_or_not_at_all():
    group = make_group(rewards=[1.0, 0.0], lengths=[2, 3], version=7)
    assert token_versions(group).tolist() == [7] * 5
    assert without_stale_tokens(group, 7) is group
    assert without_stale_tokens(group, None) is group
    assert not without_stale_tokens(group, 8).trained_mask.any()
    assert is_stale(group, 8)
    assert not is_stale(group, 7)
    assert not is_stale(group, None)


def test_a_token_of_unknown_version_has_that_of_its_group():
    group = with_versions(make_group(rewards=[1.0, 0.0], lengths=[2, 1]), [5, 9, 5])
    group.extras[VERSIONS] = np.array([-1, 9, -1])
    assert token_versions(group).tolist() == [5, 9, 5]


def test_a_group_without_anything_to_train_on_is_not_called_stale():
    assert not is_stale(make_group(rewards=[1.0, 0.0], completions=[[5], [6]], loss_mask=[False, False]), 3)


def test_tokens_that_nobody_trains_on_do_not_count_as_stale():
    group = with_versions(
        make_group(rewards=[1.0, 0.0], lengths=[2, 2], loss_mask=[False, True, True, True]), [5, 5, 5, 1]
    )
    assert count_stale([group], 5) == (1, 0)
    assert count_stale([group], 6) == (3, 2)
    assert count_stale([group], None) == (0, 0)


@pytest.mark.parametrize(
    ("column", "axis"),
    [(np.zeros(2, np.int64), "sequence"), (np.zeros((3, 2), np.int64), "token"), (np.zeros(3, np.float32), "token")],
    ids=["of sequences", "two a token", "no whole numbers"],
)
def test_a_column_that_says_no_version_of_each_token_makes_a_group_unusable(tmp_path, column, axis):
    group = make_group(rewards=[1.0, 0.0], lengths=[2, 1])
    odd = replace(group, extras={VERSIONS: column}, axes={VERSIONS: axis})
    batches = [[make_sample(group, key=1), make_sample(odd, key=2)]]
    options = {"groups_per_step": 2, "max_steps": 1}
    make_trainer(FakeClient(batches), tmp_path / "bounded", max_token_staleness=3, **options).train()
    (step,) = lines_of(tmp_path / "bounded", "steps.jsonl")
    (bad,) = step["unusable"]
    assert bad["key"] == 2
    assert bad["reason"].startswith(f"its column 'policy_versions' has the shape {column.shape}")
    make_trainer(FakeClient(batches), tmp_path / "unbounded", **options).train()
    assert lines_of(tmp_path / "unbounded")[0]["train/groups_unusable"] == 0


# ------------------------------------------------------------------------------------------------ a run


def spanning_batches(steps: int, lag: int = 8) -> list[list[Sample]]:
    """Batches of groups whose tokens have the last versions of the step that trains on them."""
    batches = []
    for current, batch in enumerate(make_batches(steps)):
        samples = []
        for sample in batch:
            samples.append(make_sample(of_last_versions(sample.group, current, lag), key=sample.info.key))
        batches.append(samples)
    return batches


def masked_by_hand(batches: Sequence[Sequence[Sample]], bound: int) -> list[list[Sample]]:
    """The same groups with a `loss_mask` that leaves out what is too old, and without a word about versions."""
    masked = []
    for current, batch in enumerate(batches):
        samples = []
        for sample in batch:
            live = [current - version <= bound for version in sample.group.extras[VERSIONS].tolist()]
            group = replace(sample.group, loss_mask=live, extras={}, axes={})
            samples.append(make_sample(group, key=sample.info.key))
        masked.append(samples)
    return masked


def trained(batches: Sequence[Sequence[Sample]], folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    options = {"groups_per_step": 3, "max_steps": len(batches), "learning_rate": 1e-2} | options
    trainer = make_trainer(FakeClient(batches), folder, **options)
    trainer.train()
    return dict(trainer.model.state_dict())


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_a_run_ends_with_the_weights_of_a_run_on_groups_that_were_masked_by_hand(tmp_path, packing):
    batches = spanning_batches(10)
    ours = trained(batches, tmp_path / "ours", max_token_staleness=2, packing=packing)
    theirs = trained(masked_by_hand(batches, 2), tmp_path / "theirs", packing=packing)
    assert_same(ours, theirs)
    lines = lines_of(tmp_path / "ours")
    assert lines[0]["train/tokens_stale"] == 0
    assert lines[-1]["train/tokens_stale"] > 0
    assert [line["train/tokens"] for line in lines] == [line["train/tokens"] for line in lines_of(tmp_path / "theirs")]
    whole = lines[-1]["train/tokens"] + lines[-1]["train/tokens_stale"]
    assert whole == sum(sample.group.num_tokens for sample in batches[-1])


def test_a_run_that_is_killed_and_resumed_masks_the_same_tokens(tmp_path):
    batches = spanning_batches(8)
    options = {"groups_per_step": 3, "max_steps": 8, "learning_rate": 1e-2, "max_token_staleness": 2}
    whole = trained(batches, tmp_path / "whole", **options)
    client = FakeClient(batches)
    with pytest.raises(Killed):
        make_trainer(client, tmp_path / "killed", on_step=killed_in(6), **options).train()
    resumed = make_trainer(client, tmp_path / "killed", resume=True, **options)
    resumed.train()
    assert_same(whole, dict(resumed.model.state_dict()))
    stale = [line["train/tokens_stale"] for line in lines_of(tmp_path / "killed")]
    assert stale == [line["train/tokens_stale"] for line in lines_of(tmp_path / "whole")]


def of_version(version: int, key: int, **fields: Any) -> Sample:
    fields = {"rewards": [1.0, 0.0], "completions": [[5, 6], [7]], "logprobs": -2.5} | fields
    return make_sample(make_group(version=version, **fields), key=key)


def test_a_rollout_without_a_live_token_is_counted(tmp_path):
    group = make_group(rewards=[1.0, 0.0], completions=[[5, 6], [7, 8]], logprobs=-2.5)
    old = [make_sample(with_versions(group, [0, 0, 0, 1]), key=key) for key in (1, 2)]
    options = {"groups_per_step": 1, "max_steps": 2, "max_token_staleness": 0}
    make_trainer(FakeClient([old[:1], old[1:]]), tmp_path, **options).train()
    first, second = lines_of(tmp_path)
    assert first["train/rollouts_stale"] == 0
    assert first["train/tokens_stale"] == 0
    assert second["train/rollouts_stale"] == 1
    assert second["train/tokens_stale"] == 3
    assert second["train/tokens"] == 1
    assert second["train/rows"] == 2
    assert second["replay/groups_stale"] == 0


def test_a_group_without_a_live_token_is_replaced_and_counted(tmp_path):
    batches = [[of_version(0, 1), of_version(0, 2)], [of_version(0, 3), of_version(1, 4)]]
    pool = [of_version(0, 100), of_version(1, 101)]
    options = {"groups_per_step": 2, "max_steps": 2, "max_token_staleness": 0}
    make_trainer(FakeClient(batches, pool), tmp_path, **options).train()
    first, second = lines_of(tmp_path)
    assert first["replay/groups_stale"] == 0
    assert first["replay/groups_zero_variance"] == 0
    assert second["replay/groups_stale"] == 1
    assert second["replay/groups_zero_variance"] == 1
    assert second["replay/groups_replaced"] == 1
    assert second["replay/groups_too_stale"] == 1  # key 100
    assert second["replay/groups_uninformative"] == 0
    assert second["train/tokens_stale"] == 0
    assert second["fresh/zero_variance_fraction"] == 0.5
    assert second["train/zero_variance_fraction"] == 0.0
    trained_on = [group["key"] for group in lines_of(tmp_path, "steps.jsonl")[1]["trained"]]
    assert trained_on == [101, 4]


@pytest.mark.parametrize(("rule", "left"), [("keep", 2), ("drop", 1)])
def test_a_stale_group_that_nothing_replaces_is_kept_or_dropped_as_one_without_variance(tmp_path, rule, left):
    batches = [[of_version(0, 1), of_version(0, 2)], [of_version(0, 3), of_version(1, 4)]]
    options = {"groups_per_step": 2, "max_steps": 2, "max_token_staleness": 0, "replay_on_empty": rule}
    make_trainer(FakeClient(batches), tmp_path, **options).train()
    _, second = lines_of(tmp_path)
    assert second["train/groups"] == left
    assert second["replay/groups_stale"] == 1
    assert second["replay/groups_missing"] == 1
    assert second["train/tokens_stale"] == (3 if rule == "keep" else 0)


def test_groups_that_carry_a_gradient_by_stale_tokens_alone_are_replaced(tmp_path):
    """The live token is one of a rollout whose advantage is 0."""
    group = make_group(rewards=[1.0, 0.0, 0.5], completions=[[5], [6], [7]], logprobs=-2.5)
    batches = [[of_version(0, 1)], [make_sample(with_versions(group, [0, 0, 1]), key=2)]]
    options = {"groups_per_step": 1, "max_steps": 2, "max_token_staleness": 0}
    make_trainer(FakeClient(batches, [of_version(1, 100)]), tmp_path, **options).train()
    _, second = lines_of(tmp_path)
    assert second["replay/groups_replaced"] == 1
    assert second["replay/groups_stale"] == 0


@pytest.mark.parametrize("loss_type", ["dapo", "gspo"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_a_step_of_stale_groups_alone_changes_no_weight(tmp_path, loss_type, packing):
    batches = [[of_version(0, 1)], [of_version(0, 2)]]
    options = {"groups_per_step": 1, "max_token_staleness": 0, "zero_variance": "none", "loss_type": loss_type}
    trainer = make_trainer(FakeClient(batches), tmp_path, max_steps=2, packing=packing, **options)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.train()
    one = make_trainer(FakeClient(batches), tmp_path / "one", max_steps=1, packing=packing, **options)
    one.optimizer = torch.optim.SGD(one.model.parameters(), lr=0.1)
    one.train()
    assert_same(dict(trainer.model.state_dict()), dict(one.model.state_dict()))
    _, second = lines_of(tmp_path)
    assert second["train/tokens"] == 0
    assert second["train/loss"] == 0
    assert second["train/grad_norm"] == 0
    assert second["train/groups_unusable"] == 0


def source_of(batches: Iterator[list[Sample]], folder: Path) -> GroupSource:
    ranks = Ranks("cpu")
    config = GRPOConfig(output_dir=folder, groups_per_step=2, zero_variance="dynamic", max_token_staleness=1)
    return GroupSource(batches, ZeroVarianceReplacer(FakeClient()), ranks, "run", config, Stopping(ranks))


def test_dynamic_sampling_draws_others_for_stale_groups_also_for_those_that_became_stale_as_they_waited(tmp_path):
    keys = itertools.count(1)
    versions = [[4, 3, 5], [4, 4, 5, 5], [5, 5, 5, 5]]
    batches = ([of_version(version, next(keys)) for version in batch] for batch in versions)
    source = source_of(batches, tmp_path)
    source.replacer.oldest_version = 4
    first = source.collect()
    assert [sample.info.key for sample in first.samples] == [1, 3]
    assert first.counts["groups_stale"] == 1
    assert first.counts["groups_dropped"] == 1
    second = source.collect()
    assert [sample.info.key for sample in second.samples] == [4, 5]
    assert [sample.info.key for sample in source.left] == [6, 7]
    source.left = [*second.samples, *source.left]
    source.replacer.oldest_version = 5
    third = source.collect()
    assert [sample.info.key for sample in third.samples] == [6, 7]
    assert third.counts["groups_stale"] == 2
    assert third.counts["groups_dropped"] == 2
    assert third.counts["groups_zero_variance"] == 0
