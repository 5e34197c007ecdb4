"""What top_p, top_k and min_p kept: the trainer takes the softmax over it, as the sampler did, forward and backward."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_client.columns import OFFSETS, RAGGED
from replay_client.rollout import RolloutGroup
from replay_client.sampling_masks import SAMPLING_MASK, mask_column
from replay_client.scoring import group_advantages
from replay_client.testing import make_group
from replay_generator.engines import SamplingConfig
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.groups.assembly import assemble
from replay_generator.rollouts.rollout import PlayedRollout, Rollout, RolloutSequence
from replay_trainer import logprobs
from replay_trainer.batching import micro_batches, to_batch
from replay_trainer.groups import ModelLimits, why_unusable
from replay_trainer.logprobs import LogprobModel, chosen_logprobs
from replay_trainer.packing.sampling_masks import TokenMasks
from tests.kit.clients import FakeClient
from tests.kit.groups import in_pieces, make_sample
from tests.kit.models import assert_same_weights, loaded, make_model
from tests.kit.models import save_model as make_engine_model
from tests.kit.trainers import lines_of, make_trainer

NUCLEUS = {"temperature": 0.8, "top_p": 0.9}


def with_sets(group: RolloutGroup, *, unknown: tuple[int, ...] = (), seed: int = 0) -> RolloutGroup:
    """The group with a set for each token to train on, of 1 to 6 random tokens and its own."""
    random = np.random.default_rng(seed)
    masks = [
        sorted({int(token), *random.integers(3, 16, random.integers(0, 6)).tolist()})
        if trained and place not in unknown
        else []
        for place, (token, trained) in enumerate(zip(group.completion_ids, group.trained_mask, strict=True))
    ]
    group.extras, group.axes, group.sampling = mask_column(masks), {SAMPLING_MASK: RAGGED}, dict(NUCLEUS)
    return group


def groups() -> list[RolloutGroup]:
    """Groups of unequal lengths with tokens of tools, tokens whose set is unknown, and one that was not truncated."""
    return [
        with_sets(
            make_group(
                rewards=[1, 0, 1],
                prompt=[3, 4, 5],
                completions=[[8, 9], [], [10, 11, 12, 13]],
                loss_mask=[True, False, True, True, False, True],
            ),
            unknown=(3,),
        ),
        make_group(rewards=[0, 1], prompt=[14], completions=[[3], [4, 5, 6, 7, 8]], sampling={"temperature": 0.7}),
        with_sets(make_group(rewards=[0, 1], prompt=[14, 3], completions=[[6, 5, 4], [6, 5, 9]]), seed=1),
    ]


def by_hand(model: Any, group: RolloutGroup) -> list[torch.Tensor]:
    """The log-probabilities of each sequence, token by token: plain torch, and nothing of the trainer."""
    rows = []
    for sequence, ids in enumerate(group.completions()):
        whole = torch.tensor([*group.prompt_ids.tolist(), *ids.tolist()])
        logits = model(whole[None]).logits[0, len(group.prompt_ids) - 1 : -1] / group.sampling["temperature"]
        row = []
        for place, token in enumerate(ids.tolist()):
            logits_V = logits[place]
            if SAMPLING_MASK in group.extras:
                start, end = group.offsets_of(SAMPLING_MASK, sequence)[place : place + 2]
                kept = group.extra_of(SAMPLING_MASK, sequence)[start:end].tolist()
                others = [each for each in range(len(logits_V)) if kept and each not in kept]
                logits_V = logits_V.index_fill(0, torch.tensor(others, dtype=torch.long), -torch.inf)
            row.append(logits_V.log_softmax(-1)[token])
        rows.append(torch.stack(row) if row else torch.zeros(0))
    return rows


@pytest.mark.parametrize("chunk", [1, 50, 10**6])
@pytest.mark.parametrize("route", ["packed", "padded", "logits"])
def test_logprobs_and_gradient_are_those_of_a_plain_loop(monkeypatch, route, chunk):
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk)
    model, plain = LogprobModel(make_model()), make_model()
    model.route = route
    batch = to_batch(groups())
    ours_BT, entropy_BT = model(batch)
    upstream_BT = torch.randn(ours_BT.shape, generator=torch.Generator().manual_seed(0)) * batch.mask_BT
    rows = [row for group in groups() for row in by_hand(plain, group)]
    theirs_BT = torch.zeros_like(ours_BT)
    for index, row in enumerate(rows):
        theirs_BT[index, : len(row)] = row
    theirs_BT = theirs_BT * batch.mask_BT
    torch.testing.assert_close(ours_BT, theirs_BT, atol=1e-5, rtol=1e-5)
    assert (entropy_BT >= 0).all()
    (ours_BT * upstream_BT).sum().backward()
    (theirs_BT * upstream_BT).sum().backward()
    for mine, other in zip(model.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-5, rtol=1e-4)


def test_the_entropy_is_that_of_the_distribution_that_was_drawn_from():
    hidden, weight = torch.eye(3), torch.tensor([[2.0, 0, 0, 0, 1], [0, 3, 0, -2, 0], [0, 0, 1, 0, 0]]).T
    masks = TokenMasks(torch.tensor([0, 1, 4]), torch.tensor([0, 2, 3]), torch.tensor([2, 1, 0]), np.array([2, 1, 0]))
    logprobs_N, entropy_N = chosen_logprobs(hidden, weight, None, torch.tensor([0, 4, 2]), torch.ones(3), masks)
    first = torch.tensor([2.0, 0.0]).log_softmax(-1)
    last = torch.tensor([0.0, 0, 1, 0, 0]).log_softmax(-1)
    torch.testing.assert_close(logprobs_N, torch.stack([first[0], torch.tensor(0.0), last[2]]))
    expected = [-(row.exp() * row).sum() for row in (first, torch.zeros(1), last)]
    torch.testing.assert_close(entropy_N, torch.stack(expected))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 7, 12])
def test_a_micro_batch_takes_the_sets_of_its_rows(packed, max_tokens):
    model = LogprobModel(make_model())
    model.route = "packed" if packed else "padded"
    batch = to_batch(groups())
    with torch.no_grad():
        whole_BT, _ = model(batch)
        for rows, micro in micro_batches(batch, max_tokens, packed):
            part_BT, _ = model(micro)
            torch.testing.assert_close(part_BT, whole_BT[rows, : part_BT.shape[1]], atol=1e-5, rtol=1e-5)


def test_rollouts_in_pieces_train_as_those_in_one_sequence(tmp_path):
    whole, weights = groups()[0], []
    for group in (whole, in_pieces(whole, [[1], [], [1, 3]])):
        client = FakeClient([[make_sample(group)]])
        trainer = make_trainer(client, tmp_path / str(len(weights)), groups_per_step=1, max_steps=1)
        trainer.train()
        weights.append(trainer.model.state_dict())
    assert_same_weights(*weights, atol=1e-6, rtol=1e-4)
    assert not torch.equal(weights[0]["lm_head.weight"], make_model().lm_head.weight)


@pytest.fixture(scope="module")
def engine_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_model(tmp_path_factory.mktemp("engine") / "model")


def drawn_by_the_engine(folder: Path, sampling: SamplingConfig) -> RolloutGroup:
    async def draw() -> list[PlayedRollout]:
        engine = TransformersEngine(folder, seed=0)
        rollouts = []
        for completion in await engine.generate([3, 9, 4], sampling, 24):
            sequence = RolloutSequence([3, 9, 4])
            sequence.append_completion(completion)
            rollouts.append(PlayedRollout.of(Rollout([sequence])))
        await engine.close()
        return rollouts

    rewards = np.arange(24, dtype=np.float32) % 2
    advantages = group_advantages(rewards)
    return assemble(asyncio.run(draw()), 0, rewards=rewards, advantages=advantages, sampling=sampling.describe())


@pytest.mark.parametrize(
    ("options", "kl", "unknown"),
    [
        ({"top_p": 0.95}, (0, 1e-5), 0.0),
        ({"top_k": 4, "temperature": 0.7}, (0, 1e-5), 0.0),
        ({"min_p": 0.05}, (0, 1e-5), 0.0),
        ({"top_p": 0.6, "sampling_masks": 0}, (1e-2, math.inf), 1.0),
        ({"min_p": 0.05, "sampling_masks": 0}, (1e-2, math.inf), 1.0),
        ({}, (0, 1e-5), 0.0),
    ],
    ids=["top_p", "top_k", "min_p", "top_p, masks are switched off", "min_p, masks are switched off", "all tokens"],
)
def test_at_version_0_trainer_and_engine_agree_about_truncated_samples_or_the_trainer_says_how_many_it_misjudges(
    tmp_path, engine_model, options, kl, unknown
):
    group = drawn_by_the_engine(engine_model, SamplingConfig(max_tokens=20, **options))
    client = FakeClient([[make_sample(group)]])
    small = {"groups_per_step": 1, "max_steps": 1, "learning_rate": 0.0}
    make_trainer(client, tmp_path, model=loaded(engine_model), **small).train()
    (line,) = lines_of(tmp_path)
    assert kl[0] <= abs(line["correction/kl"]) < kl[1]
    assert line["correction/unknown_masks_fraction"] == unknown


def test_sets_that_are_larger_than_wanted_are_counted(tmp_path, engine_model):
    sampling = SamplingConfig(max_tokens=20, top_p=0.95)
    all_sizes = np.diff(drawn_by_the_engine(engine_model, sampling).extras[SAMPLING_MASK + OFFSETS])
    most = int(np.median(all_sizes))
    group = drawn_by_the_engine(engine_model, replace(sampling, sampling_masks=most))
    sizes = np.diff(group.extras[SAMPLING_MASK + OFFSETS])
    np.testing.assert_array_equal(sizes, np.where(all_sizes <= most, all_sizes, 0))
    assert 0 < (sizes == 0).mean() < 1
    make_trainer(
        FakeClient([[make_sample(group)]]), tmp_path, model=loaded(engine_model), groups_per_step=1, max_steps=1
    ).train()
    (line,) = lines_of(tmp_path)
    assert line["correction/unknown_masks_fraction"] == pytest.approx((sizes == 0).mean())


def test_raw_logprobs_are_those_of_all_tokens_and_need_no_sets():
    group = with_sets(make_group(completions=[[8, 9]]))
    group.sampling["logprobs_mode"] = "raw_logprobs"
    assert to_batch([group]).sampling_masks is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({SAMPLING_MASK: np.array([8, 9, 4], np.float32)}, "is float32 of the shape (3,) with the axis 'ragged:token'"),
        ({SAMPLING_MASK: np.array([8, 16, 4], np.int32)}, "holds the token 16, and the model has those from 0 to 15"),
        ({SAMPLING_MASK: np.array([8, -1, 4], np.int32)}, "holds the token -1"),
        ({SAMPLING_MASK: np.array([5, 9, 4], np.int32)}, "does not keep token 0, 8, which was drawn"),
    ],
    ids=["no ids", "beyond the vocabulary", "below 0", "masks of other tokens"],
)
def test_a_group_whose_sets_nobody_can_use_is_put_aside_with_the_reason(change, reason):
    group = make_group(rewards=[1.0, 0.0], completions=[[8, 9], [4]], logprobs=-1.0, sampling=dict(NUCLEUS))
    group.extras, group.axes = mask_column([[8], [9], [4]]), {SAMPLING_MASK: RAGGED}
    limits = ModelLimits(vocabulary=16)
    assert why_unusable(make_sample(group), limits) == ""
    group.extras = group.extras | change
    assert reason in why_unusable(make_sample(group), limits)
