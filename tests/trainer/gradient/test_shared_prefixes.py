"""What sequences begin with alike is computed once, and nobody can tell from log-probabilities, losses or gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_client import RolloutGroup
from replay_client.testing import make_group
from replay_trainer.batching import micro_batches, packed_input, to_batch
from replay_trainer.logprobs import LogprobModel
from replay_trainer.packing.shared_prefixes import SharedPrefixes
from tests.kit.groups import in_pieces
from tests.trainer.test_batching import make_other_model
from tests.trainer.test_sequences import OBJECTIVES, assert_same_gradient, gradient_of

TOKENS = st.lists(st.integers(3, 15), max_size=4)


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    """Sequences of which each goes on from some prefix of an earlier one; the first from nothing."""
    rows = [draw(TOKENS)]
    for _ in range(draw(st.integers(0, 7))):
        earlier = draw(st.sampled_from(rows))
        rows.append(earlier[: draw(st.integers(0, len(earlier)))] + draw(TOKENS))
    return rows


@settings(max_examples=200, deadline=None)
@given(trees(), st.data())
def test_every_distinct_prefix_is_computed_once_and_every_sequence_is_whole(rows, data):
    chosen = np.array(sorted(data.draw(st.sets(st.sampled_from(range(len(rows)))))), np.int64)
    shared_prefixes = SharedPrefixes.of([np.array(row, np.int32) for row in rows]).select(chosen)
    sequences = [rows[i] for i in chosen]
    lengths_B = np.array([len(row) for row in sequences], np.int64)
    layout = shared_prefixes.layout(lengths_B)
    # A trie, as a set of its paths.
    assert sum(run.length for run in layout) == len(
        {tuple(row[:n]) for row in sequences for n in range(1, len(row) + 1)}
    )
    packed: list[list[int]] = []
    new = iter(layout)
    for row, shared in zip(shared_prefixes.order_B.tolist(), shared_prefixes.shared_B.tolist(), strict=True):
        if shared < len(sequences[row]):
            run = next(new)
            packed.append(sequences[row][shared:])
            assert run.length == len(packed[-1])
            assert [token for i, n in run.before for token in packed[i][:n]] + packed[-1] == sequences[row]
    assert next(new, None) is None


@st.composite
def tree_groups(draw: st.DrawFn) -> list[RolloutGroup]:
    """Groups whose sequences branch anywhere, with masks, several sequences a rollout, and prefixes in common."""
    system = draw(TOKENS)
    groups = []
    for _ in range(draw(st.integers(1, 2))):
        rows = draw(trees())
        counts = []
        while sum(counts) < len(rows):
            counts.append(draw(st.integers(1, len(rows) - sum(counts))))
        tokens = sum(map(len, rows))
        groups.append(
            make_group(
                prompt=system + draw(st.lists(st.integers(3, 15), min_size=1, max_size=3)),
                completions=rows,
                rewards=[draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in counts],
                logprobs=[-2.0 - draw(st.sampled_from([0.0, 0.5])) for _ in range(tokens)],
                loss_mask=[draw(st.booleans()) for _ in range(tokens)],
                sequence_counts=counts,
                sampling={"temperature": draw(st.sampled_from([0.7, 1.0]))},
            )
        )
    return groups


@cache
def exact_model(kind: str) -> LogprobModel:
    """A tiny model in float64. Its log-probabilities are rounded to float32, whose steps are 2e-7 at 3 nats."""
    return LogprobModel(make_other_model(kind).double())


def by_hand(model: Any, groups: Sequence[RolloutGroup], weights_N: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Log-probabilities of the trained tokens of each sequence alone, and the gradient of their weighted sum."""
    found = []
    for group in groups:
        for span in group.sequence_spans():
            ids, trained = torch.tensor([*group.prompt_ids, *group.completion_ids[span]]), group.trained_mask[span]
            if trained.any():
                logits = model(ids[None]).logits[0, -1 - len(trained) : -1] / group.sampling["temperature"]
                found.append(logits.log_softmax(-1).gather(-1, ids[-len(trained) :, None])[trained, 0])
    logprobs_N = torch.cat(found)
    return logprobs_N, torch.autograd.grad((logprobs_N * weights_N).sum(), list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("kind", ["qwen2", "sliding", "gpt2"])
@settings(max_examples=25, deadline=None)
@given(groups=tree_groups(), size=st.integers(1, 60), seed=st.integers(0, 99))
def test_a_shared_token_has_the_gradient_of_all_sequences_that_share_it(kind, groups, size, seed):
    policy, batch = exact_model(kind), to_batch(groups)
    assert policy.route == "packed"
    count = int(batch.mask_BT.sum())
    if not count:
        return
    weights_N = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logprobs_N, expected = by_hand(policy.model, groups, weights_N)
    weights_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float64).masked_scatter(batch.mask_BT, weights_N)
    found_BT, total, read = torch.zeros(batch.mask_BT.shape), torch.zeros(()), 0
    for rows, micro in micro_batches(batch, size):
        T = micro.mask_BT.shape[1]
        read += (tokens := packed_input(micro).input_ids_RS.numel())
        assert tokens <= size or micro.num_rows == 1
        micro_BT, _ = policy(micro)
        total = total + (micro_BT * weights_BT[rows, :T]).sum()
        found_BT[rows, :T] = micro_BT.detach()
    assert read <= batch.input_lengths_B.sum()
    torch.testing.assert_close(found_BT[batch.mask_BT].double(), logprobs_N.detach(), atol=1e-6, rtol=0)
    gradient = torch.autograd.grad(total, list(policy.parameters()), allow_unused=True)
    for ours, theirs in zip(gradient, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            # Log-probabilities are float32, so the weights of some tens of tokens leave some 1e-6 in a sum of them.
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(tree_groups(), st.sampled_from(sorted(OBJECTIVES)), st.integers(1, 60))
def test_a_step_that_shares_prefixes_is_that_of_padded_sequences(tmp_path_factory, groups, objective, size):
    folder, options = tmp_path_factory.getbasetemp(), OBJECTIVES[objective]
    if any(group.trained_mask.any() for group in groups):
        shared = gradient_of(groups, folder, max_tokens_per_micro_batch=size, **options)
        assert_same_gradient(shared, gradient_of(groups, folder, packing=False, **options))


def read(groups: Sequence[RolloutGroup]) -> list[int]:
    """The tokens that the model reads of these groups."""
    ids: list[int] = packed_input(to_batch(groups)).input_ids_RS[0].tolist()
    return ids


def test_turns_that_go_on_from_one_another_cost_no_more_than_one_sequence():
    whole = make_group(rewards=[1.0, 0.0], completions=[[5, 6, 7, 8, 9], [10, 11, 12]], logprobs=-2.0)
    assert read([in_pieces(whole, [[1, 3, 4], [2]])]) == [3, 4, 5, 6, 7, 8, 10, 11]
    assert read([whole]) == [3, 4, 5, 6, 7, 8, 10, 11]


def test_a_first_call_and_its_output_that_rollouts_have_in_common_are_read_once():
    group = make_group(
        completions=[[5, 6, 7, 8, 9], [5, 6, 7, 12, 13, 9], [5, 6, 7, 8, 10, 11]],
        loss_mask=[True, False, False, True, True] + 2 * [True, False, False, True, True, True],
    )
    assert sorted(read([group])) == [3, 4, 5, 6, 7, 8, 10, 12, 13]


def test_groups_with_one_system_prompt_share_it():
    groups = [make_group(prompt=[3, 4, 5, task], completions=[[6, 7], [8, 9]]) for task in (10, 11)]
    assert read(groups) == [3, 4, 5, 10, 6, 8, 11, 6, 8]


def test_equal_completions_are_read_once_and_each_has_its_advantage(tmp_path):
    twice = make_group(rewards=[1.0, 0.0, 1.0], completions=[[5, 6, 7], [5, 6, 7], [5, 6, 7]], logprobs=-2.0)
    assert read([twice]) == [3, 4, 5, 6]
    assert_same_gradient(gradient_of([twice], tmp_path), gradient_of([twice], tmp_path, packing=False))
    cancelled = make_group(rewards=[1.0, 0.0], completions=[[5, 6, 7], [5, 6, 7]], logprobs=-2.0)
    gradient, _ = gradient_of([cancelled], tmp_path)
    assert max(float(each.abs().max()) for each in gradient.values()) < 1e-6
