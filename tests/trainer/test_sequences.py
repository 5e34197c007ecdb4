"""A rollout of several sequences counts once: it trains the policy as one sequence with the same tokens would."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_client import RolloutGroup
from replay_client.testing import make_group
from replay_trainer import GRPOConfig, LossConfig, correct, from_padded, policy_loss, to_padded
from replay_trainer.batching import to_batch
from replay_trainer.correction import CorrectionConfig, Rejection
from replay_trainer.logprobs import LogprobModel
from replay_trainer.passes import Passes
from replay_trainer.ranks import Ranks
from tests.kit.clients import FakeClient
from tests.kit.groups import in_pieces, make_sample
from tests.kit.models import NEAR, assert_same_weights, make_model, poison
from tests.kit.trainers import lines_of, make_trainer, poisoned_sample

Cuts = Sequence[Sequence[int]]
FLAT = [
    make_group(
        rewards=[1.0, 0.0, 0.5],
        prompt=[3, 4],
        completions=[[5, 6, 7, 8, 9, 10], [11, 12], [13, 3, 14, 5]],
        logprobs=[-2.5, -3.0, math.nan, -2.0, -3.5, -2.6, -1.0, -4.0, -2.9, math.nan, -2.2, -2.4],
        loss_mask=[True, True, False, True, True, True, True, True, True, False, True, True],
        finish_reasons=("stop", "length", "stop"),
    ),
    make_group(rewards=[0.0, 1.0], prompt=[9], completions=[[4, 4, 8], [6, 7, 5, 12, 3]], logprobs=-2.8),
]
WAYS: dict[str, list[Cuts]] = {
    "one rollout in two": [[[3], [], []], [[], []]],
    "every turn alone": [[[2, 3], [1], [1, 2]], [[1, 2], [1, 3]]],
    "one token each": [[[1, 2, 3, 4, 5], [1], [1, 2, 3]], [[1, 2], [1, 2, 3, 4]]],
    "an empty sequence": [[[0, 3], [2], []], [[3, 3], []]],
}
HALVES = WAYS["every turn alone"]
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "bnpo": {"loss_type": "bnpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.05},
    "grpo": {"loss_type": "grpo"},
    "gspo": {"loss_type": "gspo"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 8},
    "grpo with a reference": {"loss_type": "grpo", "beta": 0.2},
    "gspo with a reference": {"loss_type": "gspo", "beta": 0.2},
    "sequence": {"correction": CorrectionConfig(level="sequence", clip_max=1.3)},
    "sequence normalized": {"correction": CorrectionConfig(level="sequence", batch_normalize=True)},
    "geometric": {"loss_type": "grpo", "correction": CorrectionConfig(level="geometric", action="mask", clip_max=1.1)},
    "rejection": {"correction": CorrectionConfig(rejection=Rejection("k1", "mean", high=1.2))},
    "rejection of the largest": {"correction": CorrectionConfig(rejection=Rejection("k2", "max", high=0.2))},
    "veto": {"correction": CorrectionConfig(veto=0.6)},
    "off-policy mask": {"correction": CorrectionConfig(objective="bypass", off_policy_mask_threshold=0.01)},
    "reinforce": {"correction": CorrectionConfig(level="geometric", objective="bypass_reinforce", rollout_penalty=0.1)},
    "dppo": {"correction": CorrectionConfig(dppo_mask_low=0.01, dppo_mask_high=0.01)},
}


@cache
def model_of(seed: int, packing: bool = True) -> LogprobModel:
    """A tiny model that nobody trains: it is made once."""
    return LogprobModel(make_model(seed=seed), packing)


def gradient_of(groups: Sequence[RolloutGroup], folder: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The gradient of a step of a tiny model by each of its weights, and its loss and metrics. Changes no weight."""
    config = GRPOConfig(output_dir=folder, device="cpu", **options)
    policy, reference = model_of(0, config.packing), model_of(1, config.packing) if config.beta else None
    passes, batch = (
        Passes(policy, reference, None, config, Ranks("cpu"), partitioned=False),
        to_batch(groups, teacher=config.teacher),
    )
    policy.zero_grad(set_to_none=True)
    with torch.no_grad():  # another policy is the old one, as after a first update, so that ratios are not 1
        old_BT, _ = model_of(2)(batch)
    _, loss, metrics = passes.backward(batch, old_BT)
    named = policy.model.named_parameters()
    gradients = {name: weight.grad.clone() for name, weight in named if weight.grad is not None}
    return gradients, {**metrics, "loss": loss}


def assert_same_gradient(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours[0], theirs[0], **NEAR)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("objective", ["decoupled", "bypass_reinforce"])
def test_a_step_with_normalized_weights_keeps_the_old_logprobs_that_it_was_given(tmp_path, objective):
    correction = CorrectionConfig(objective=objective, batch_normalize=True)
    config = GRPOConfig(output_dir=tmp_path, device="cpu", correction=correction)
    passes = Passes(model_of(0), None, None, config, Ranks("cpu"), partitioned=False)
    batch = to_batch(FLAT)
    given_BT = torch.full_like(batch.rollout_logprobs_BT, -2.0)
    old_BT, _, _ = passes.backward(batch, given_BT)
    assert torch.equal(old_BT, given_BT)


@pytest.mark.parametrize("size", [1, 1000], ids=["a row at a time", "all rows at once"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_rollouts_in_pieces_have_the_loss_and_the_gradient_of_rollouts_in_one_sequence(tmp_path, objective, size):
    options = OBJECTIVES[objective]
    whole = gradient_of(FLAT, tmp_path, **options)
    assert max(float(each.abs().max()) for each in whole[0].values()) > 1e-3
    for cuts in WAYS.values():
        pieces = list(map(in_pieces, FLAT, cuts))
        assert_same_gradient(gradient_of(pieces, tmp_path, max_tokens_per_micro_batch=size, **options), whole)


def by_hand(groups: Sequence[RolloutGroup], loss_type: str, teacher: str = "") -> tuple[torch.Tensor, Any]:
    """The loss of rollouts, sequence by sequence, and its gradient: plain torch, and nothing of the trainer.

    `teacher`: a column of log-probabilities, which judge the tokens with a weight of 0.5.
    """
    model, old_model, losses = make_model(), make_model(seed=2), []
    for group in groups:
        advantages_T = group.token_advantages
        for rollout in range(group.group_size):
            parts = []
            for sequence in np.flatnonzero(group.sequence_rollouts == rollout):
                span = group.sequence_spans()[sequence]
                ids, trained = torch.tensor([*group.prompt_ids, *group.completion_ids[span]]), group.trained_mask[span]
                logits = [each(ids[None]).logits[0, -1 - len(trained) : -1] for each in (model, old_model)]
                now, old = (each.log_softmax(-1).gather(-1, ids[-len(trained) :, None])[:, 0] for each in logits)
                A = (
                    np.full_like(now.detach(), group.advantages[rollout])
                    if advantages_T is None
                    else advantages_T[span]
                )
                if teacher:  # the reverse KL, token by token
                    A = A + 0.5 * (group.extras[teacher][span] - old.detach().numpy())
                known = map(torch.tensor, (group.rollout_logprobs[span], A))
                parts.append(torch.stack([now, old.detach(), *known])[:, trained])
            now, old, rollout_logprobs, A = torch.cat(parts, dim=1)
            c = ((now - old).mean() if loss_type == "gspo" else now - old).exp()
            w = (old - rollout_logprobs).nan_to_num(nan=0.0).exp().clamp(max=2.0)
            losses.append(-torch.minimum(c * A, c.clamp(0.8, 1.2) * A) * w)
    if loss_type in ("grpo", "gspo"):
        loss = sum(each.mean() for each in losses) / len(losses)
    else:
        per_token = torch.cat(losses)
        loss = per_token.sum() / (8 * len(losses) if loss_type == "dr_grpo" else len(per_token))
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    return loss, dict(zip(dict(model.named_parameters()), gradient, strict=True))


def agents() -> list[RolloutGroup]:
    """Rollouts whose sequences differ in more than their context: sub-agents, and a context that was compacted."""
    return [
        make_group(
            rewards=[1.0, 0.0],
            prompt=[3, 4],
            completions=[[5, 6, 7], [8, 9, 10, 11], [12, 3, 4, 13, 5, 6], [7, 8]],
            logprobs=[-2.5, -3.0, -2.0, math.nan, math.nan, -3.5, -2.6, *[math.nan] * 3, -2.9, -1.0, -2.2, -3.0, -2.4],
            loss_mask=[True, True, True, False, False, True, True, False, False, False, True, True, True, True, True],
            context_lengths=[0, 2, 3, 0],
            sequence_counts=[3, 1],
        ),
        make_group(
            rewards=[0.5, 0.5],
            prompt=[9],
            completions=[[4, 4, 8], [6, 7], [5, 12, 3]],
            logprobs=-2.8,
            sequence_counts=[1, 2],
            token_advantages=[0.5, -1.0, 0.25, 0.0, 2.0, -0.5, 1.0, 0.75],
        ),
    ]


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("size", [1, 14, 1000], ids=["a row at a time", "some rows", "all rows at once"])
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo", "gspo", "dr_grpo"])
def test_the_step_is_that_of_a_loop_over_sequences(tmp_path, loss_type, size, packing):
    options: dict[str, Any] = {"loss_type": loss_type, "max_completion_length": 8, "packing": packing}
    gradient, metrics = gradient_of(agents(), tmp_path, max_tokens_per_micro_batch=size, **options)
    loss, expected = by_hand(agents(), loss_type)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


@st.composite
def cut_groups(draw: st.DrawFn) -> list[tuple[RolloutGroup, Cuts]]:
    """Groups of one sequence for each rollout, and places to cut them at."""
    found = []
    for _ in range(draw(st.integers(1, 2))):
        lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
        masks = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
        advantages = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=sum(lengths), max_size=sum(lengths))
        group = make_group(
            rewards=[draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in lengths],
            prompt=draw(st.lists(st.integers(3, 15), min_size=1, max_size=3)),
            lengths=lengths,
            seed=draw(st.integers(0, 99)),
            loss_mask=masks,
            sampling={"temperature": draw(st.sampled_from([0.7, 1.0]))},
            token_advantages=draw(st.none() | advantages),
        )
        cuts = [sorted(draw(st.lists(st.integers(0, length), max_size=3))) for length in lengths]
        found.append((group, cuts))
    return found


@settings(max_examples=25, deadline=None)
@given(cut_groups(), st.sampled_from(sorted(OBJECTIVES)), st.integers(1, 40), st.booleans())
def test_however_rollouts_are_cut_the_step_is_the_same(tmp_path_factory, cut, objective, size, packing):
    folder, options = tmp_path_factory.getbasetemp(), OBJECTIVES[objective] | {"packing": packing}
    pieces = [in_pieces(group, cuts) for group, cuts in cut]
    whole = gradient_of([group for group, _ in cut], folder, **options)
    assert_same_gradient(gradient_of(pieces, folder, max_tokens_per_micro_batch=size, **options), whole)


def sgd_run(client: Any, folder: Path, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The trained model and the metrics of each step. With plain gradient descent the weights show the gradient."""
    few = {"groups_per_step": 2, "max_steps": 1, "max_tokens_per_micro_batch": 10, "max_grad_norm": math.inf}
    trainer = make_trainer(client, folder, **(few | {"learning_rate": 0.1} | options))
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.train()
    return trainer.model, lines_of(folder)


STEPS: dict[str, dict[str, Any]] = {
    "gspo": {"loss_type": "gspo", "num_iterations": 2},
    "grpo": {"loss_type": "grpo", "num_iterations": 2, "scale_rewards": "batch"},
    "truncated rollouts": {"mask_truncated_completions": True, "scale_rewards": "group"},
    "rollouts are rejected": {"correction": CorrectionConfig(level="geometric", veto=0.5, batch_normalize=True)},
}


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_every_metric_of_a_step_counts_a_rollout_once(tmp_path, options):
    trained = []
    for way, cuts in {"whole": None, **WAYS}.items():
        groups = FLAT if cuts is None else map(in_pieces, FLAT, cuts)
        samples = [make_sample(group, key=key) for key, group in enumerate(groups)]
        client = FakeClient([samples], pool=samples)
        model, (line,) = sgd_run(client, tmp_path / way, update_priorities=True, **options)
        counted = (name for name in line if "time/" not in name and "per_second" not in name)
        numbers = {name: math.nan if line[name] is None else line[name] for name in counted}
        trained.append((model, numbers, client.priorities))
    sequences = [numbers.pop("train/sequences") for _, numbers, _ in trained]
    assert sequences == [5, 6, 14, 20, 10]
    assert trained[0][1]["train/rows"] == 5
    for model, numbers, priorities in trained[1:]:
        assert_same_weights(model, trained[0][0], **NEAR)
        assert numbers == pytest.approx(trained[0][1], rel=1e-4, abs=1e-5, nan_ok=True)
        assert priorities == pytest.approx(trained[0][2], rel=1e-4)


def test_the_context_of_a_later_sequence_needs_no_log_probability(tmp_path):
    group = in_pieces(make_group(rewards=[1.0, 0.0], completions=[[5, 6, 7], [8, 9]], logprobs=-2.0), [[1, 2], [1]])
    _, (line,) = sgd_run(FakeClient([[make_sample(group)]]), tmp_path)
    assert line["train/tokens"] == 5
    assert line["correction/nan_fraction"] == 0.0


@pytest.mark.parametrize("scale", [None, "group", "batch"])
def test_a_group_with_token_advantages_trains_although_its_rewards_are_equal(tmp_path, scale):
    group = make_group(rewards=[1.0, 1.0], completions=[[5, 6], [7]], logprobs=-2.5, token_advantages=[1.0, -1.0, 0.5])
    client = FakeClient([[make_sample(group, key=1)]], pool=[make_sample(FLAT[1], key=2)])
    model, (line,) = sgd_run(client, tmp_path, groups_per_step=1, scale_rewards=scale)
    assert line["replay/groups_replaced"] == 0
    assert line["train/zero_variance_fraction"] == 0.0
    assert line["train/tokens"] == 3
    assert not torch.equal(model.lm_head.weight, make_model().lm_head.weight)


def test_padded_rows_join_to_rollouts_for_losses_and_corrections(tmp_path):
    expected, config = by_hand(agents(), "grpo")[0].item(), LossConfig("grpo")
    padded, model = to_padded(agents()), make_model()
    logits_BTV = [
        each(padded.input_ids_BS, attention_mask=padded.attention_mask_BS, position_ids=padded.position_ids_BS).logits[
            :, padded.prompt_ids_BP.shape[1] - 1 : -1
        ]
        for each in (model, make_model(seed=2))
    ]
    logprobs_BT, old_BT = (
        each.log_softmax(-1).gather(-1, padded.completion_ids_BT[..., None]).squeeze(-1) for each in logits_BTV
    )
    rows = padded.rollouts
    corrected = correct(rows.join(old_BT), rows.join(padded.rollout_logprobs_BT), rows.mask_JT)
    loss, _ = policy_loss(
        rows.join(logprobs_BT),
        rows.join(old_BT),
        rows.join(padded.advantages),
        rows.mask_JT,
        config,
        weights=corrected.weights,
        correction_mask=corrected.mask,
    )
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert padded.rollout_B is not None
    assert padded.rollout_B.tolist() == [0, 0, 0, 1, 2, 3, 3]


def test_groups_of_several_sequences_come_back_from_padded_tensors():
    groups = [*agents(), *map(in_pieces, FLAT, WAYS["every turn alone"])]
    for ours, theirs in zip(from_padded(to_padded(groups)), groups, strict=True):
        for name in ("sequence_counts", "rewards", "advantages"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        assert (ours.token_advantages is None) == (theirs.token_advantages is None)
        assert [ids.tolist() for ids in ours.prompts()] == [ids.tolist() for ids in theirs.prompts()]
        for a, b in zip(ours.sampled_spans(), theirs.sampled_spans(), strict=True):
            for name in ("completion_ids", "rollout_logprobs", "trained_mask", "token_advantages"):
                if (values := getattr(theirs, name)) is not None:
                    np.testing.assert_array_equal(getattr(ours, name)[a], values[b])


@pytest.mark.parametrize(
    ("rollouts", "fields", "words"),
    [
        ([0, 1, 0, 2, 3], {}, "rollout_B: the rows of a rollout must follow one another"),
        ([0, 0, 0, 1, 2], {}, "group_B has two values for the rollout 0 of rollout_B"),
        ([0, 0, 1, 2, 3], {}, "rewards_B has two values for the rollout 0 of rollout_B: give all rows"),
        ([0, 0, 1, 2, 3], {"rewards_B": [1.0, 1.0, 0, 0, 0]}, "advantages_B has two values for the rollout 0"),
    ],
)
def test_rows_that_cannot_be_one_rollout_are_refused(rollouts, fields, words):
    groups = [make_group(rewards=[1.0, 0.0]), make_group(rewards=[0.0, 1.0, 0.0])]
    changed = {name: torch.tensor(value) for name, value in fields.items()}
    with pytest.raises(ValueError, match=words):
        from_padded(replace(to_padded(groups), rollout_B=torch.tensor(rollouts), **changed))


@pytest.mark.parametrize("effect", ["nan", "memory"])
def test_a_rollout_in_pieces_that_makes_a_step_fail_leaves_it_with_its_group(tmp_path, effect):
    sound = [
        make_sample(in_pieces(group, cuts), key=key) for key, (group, cuts) in enumerate(zip(FLAT, HALVES, strict=True))
    ]
    bad = make_sample(in_pieces(poisoned_sample().group, [[1, 2], []]), key=77)
    models = {}
    for name, samples in {"without": sound, "with": [sound[0], bad, sound[1]]}.items():
        client = FakeClient([samples])
        options = {"loss_type": "gspo", "max_tokens_per_micro_batch": 1, "groups_per_step": len(samples)}
        trainer = make_trainer(client, tmp_path / name, max_steps=1, **options)
        poison(trainer.model, effect)
        trainer.train()
        models[name] = trainer.model
        assert [key for _, key in client.deleted if key == 77] == ([77, 77] if name == "with" else [])
    assert lines_of(tmp_path / "with")[0]["train/groups_unusable"] == 1
    assert_same_weights(models["with"], models["without"], **NEAR)


def test_a_rollout_in_pieces_is_shown_as_what_the_policy_wrote_in_them(tmp_path):
    group = make_group(
        rewards=[0.5, 0.5],
        prompt=[9],
        completions=[[4, 8], [6, 7], [5, 12, 3]],
        context_lengths=[0, 0, 2],
        logprobs=[-1.0, -1.0, -1.0, -1.0, math.nan, math.nan, -1.0],
        sequence_counts=[1, 2],
        token_advantages=[0.0, 0.0, 1.0, 3.0, 9.0, 9.0, 2.0],
    )
    make_trainer(FakeClient([[make_sample(group)]]), tmp_path, max_steps=1, log_completions=True).train()
    (shown,) = (json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines())
    assert shown["prompt"] == "9"  # step 1: the second rollout
    assert shown["completion"] == "6 7\n3"
    assert shown["reward"] == 0.5
    assert shown["advantage"] == 2.0


WAYS_TO_BE_RIGHT: dict[str, tuple[Sequence[Cuts] | None, dict[str, Any]]] = {
    "a sequence each": (None, {}),
    "several sequences": (WAYS["every turn alone"], {}),
    "in micro-batches of whole rollouts": (WAYS["every turn alone"], {"loss_type": "gspo"}),
    "advantages computed anew": (None, {"scale_rewards": "batch"}),
    "drifted groups left out": (None, {"replay_max_drift": 9.0}),
}


@pytest.mark.parametrize(("cuts", "options"), WAYS_TO_BE_RIGHT.values(), ids=WAYS_TO_BE_RIGHT)
def test_of_stored_groups_only_the_right_rollouts_are_trained_on_if_one_says_so(tmp_path, cuts, options):
    fresh, stored = FLAT if cuts is None else map(in_pieces, FLAT, cuts)
    # The second rollout of the stored group is right. It keeps the advantage that it had beside the wrong one.
    alone = replace(
        make_group(rewards=[1.0], prompt=[9], completions=[FLAT[1].completions()[1]], logprobs=-2.8),
        advantages=FLAT[1].advantages[1:],
    )
    if "scale_rewards" in options:
        # The trainer computes advantages from all rewards of the step, also from those that it then leaves out.
        std = np.concatenate([group.rewards for group in FLAT]).std(ddof=1) + 1e-4
        fresh = replace(fresh, advantages=((fresh.rewards - 0.5) / std).astype(np.float32))
        alone = replace(alone, advantages=np.array([0.5 / std], np.float32))

    def trained(name: str, pool: RolloutGroup, **own: Any) -> tuple[Any, dict[str, Any]]:
        client = FakeClient([[make_sample(fresh, key=1)]], pool=[make_sample(pool, key=2)])
        model, (line,) = sgd_run(client, tmp_path / name, replay_share=0.5, **own)
        return model, line

    model, line = trained("right", stored, replay_rollouts="right", **options)
    options = {name: value for name, value in options.items() if name != "scale_rewards"}
    expected, _ = trained("alone", alone, **options)
    whole, _ = trained("whole", stored, **options)
    assert_same_weights(model, expected, **NEAR)
    assert line["train/rows"] == 4
    with pytest.raises(AssertionError):
        assert_same_weights(whole, expected, **NEAR)
