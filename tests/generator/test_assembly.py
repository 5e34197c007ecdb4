"""A rollout is read and checked once, and its group is assembled once, whatever way the rollout came."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_client import RolloutGroup
from replay_client.columns import OFFSETS, RAGGED
from replay_generator import PromptError, Rollout, RolloutPolicy, RolloutSequence, Task
from replay_generator.engines import Completion
from replay_generator.groups.assembly import assemble
from replay_generator.groups.codec import decode_rollout, encode_rollout
from replay_generator.rollouts.played_sequence import check_sequences
from replay_generator.rollouts.rollout import PlayedRollout, single_turn
from replay_generator.testing import ScriptedEngine
from tests.kit.clients import RecordingClient
from tests.kit.engines import SAID
from tests.kit.generators import generate

numbers = st.floats(-9, 0, width=32) | st.just(float("nan"))


@st.composite
def arrays(draw: Any, n: int, read: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Extras of n tokens that were drawn after `read - n` others, and their axes. Some do not fit."""
    dtype = draw(st.sampled_from([np.float32, np.int16, np.float64, np.dtype("U1")]))
    width = draw(st.integers(1, 2))
    kind = draw(st.sampled_from(["none", "none", "token", "plain", "whole", "sequence", "bare", RAGGED]))
    if kind == "none":
        return {}, {}
    rows = {"whole": read - 1}.get(kind, n) + draw(st.sampled_from([0, 0, 0, 1]))
    extras = {"hidden": np.arange(rows * width).reshape(rows, width).astype(dtype)}
    if kind == "plain":
        return extras, {}
    if kind == "bare":
        return {"hidden": np.float32(1.0)}, {}
    if kind == RAGGED:
        counts = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        if draw(st.sampled_from([False, False, True])):
            offsets = offsets[::-1]
        extras = {"hidden": np.arange(int(max(offsets))).astype(dtype), "hidden" + OFFSETS: offsets}
    return extras, {"hidden": kind}


@st.composite
def sequences(draw: Any) -> RolloutSequence:
    sequence = RolloutSequence(draw(st.lists(st.integers(0, 9), min_size=0 if draw(st.booleans()) else 1, max_size=3)))
    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.integers(0, 3))
        if draw(st.booleans()):
            extras, axes = draw(arrays(n, len(sequence.token_ids) + n))
            logprobs = draw(st.lists(numbers, min_size=n, max_size=n))
            mask = draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n))
            versions = [draw(st.integers(0, 2))] * n
            sequence.append_completion(Completion([1] * n, logprobs, "1", "stop", versions, mask, extras, axes))
        else:
            sequence.append_observation([2] * n)
    damage = draw(st.sampled_from(["none"] * 9 + ["token_ids", "sampled_mask", "logprobs", "policy_versions", "short"]))
    if damage == "short":
        sequence.sampled_mask.append(True)
    elif damage != "none":
        value = draw(st.sampled_from([-1, 5, 0.5, "x", None, 1 << 40]))
        setattr(sequence, damage, [*getattr(sequence, damage)[:-1], value])
    return sequence


rollouts = st.lists(st.lists(sequences(), min_size=1, max_size=2).map(Rollout), min_size=1, max_size=3)


def error_of(call: Any) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def group_of(played: list[PlayedRollout]) -> RolloutGroup:
    numbers_G = np.zeros(len(played), np.float32)
    return assemble(played, 7, rewards=numbers_G, advantages=numbers_G)


@settings(max_examples=200, deadline=None)
@given(rollouts)
def test_what_is_checked_makes_a_group_and_what_is_refused_makes_none(made):
    try:
        played = [PlayedRollout.of(rollout) for rollout in made]
    except (TypeError, ValueError, OverflowError):
        return
    refused = error_of(lambda: check_sequences([sequence for each in played for sequence in each.sequences]))
    failed = error_of(lambda: group_of(played))
    if refused is None:
        assert failed is None
    elif failed is None:  # lists of several lengths, from which a group would take what it needs
        assert str(refused).startswith("a sequence has ")


@settings(max_examples=100, deadline=None)
@given(rollouts)
def test_rollouts_that_were_stored_make_the_group_of_those_that_were_played(made):
    try:
        played = [PlayedRollout.of(rollout) for rollout in made]
        group = group_of(played)
    except Exception:  # the test above says which
        return
    again = group_of([decode_rollout(encode_rollout(each)) for each in played])
    assert again.encode() == group.encode()


async def test_what_changes_in_a_rollout_after_it_has_ended_does_not_count():
    made: list[RolloutSequence] = []

    async def hook(task: Task, policy: RolloutPolicy) -> Rollout:
        sequence = RolloutSequence(task.prompt_ids)
        sequence.append_completion(await policy.generate(sequence.token_ids))
        made.append(sequence)
        return Rollout([sequence])

    def reward(row: Any, text: str, rollout: Rollout) -> float:
        for sequence in made:
            sequence.append_observation([9])
        rollout.sequences[0].logprobs[:] = ["a text"] * 3
        return 1.0

    client = RecordingClient()
    await generate(client, ScriptedEngine(completions=[SAID]), hook, reward=reward)
    group = client.inserts[0][0]
    assert group.completion_ids.tolist() == [7, 8] * 4
    np.testing.assert_allclose(group.rollout_logprobs, [-0.1, -0.2] * 4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss_mask": [True]}, "a sequence has 6 token_ids, 5 in sampled_mask, 6 logprobs and 6 policy_versions"),
        (
            {"extras": {"entropy": np.zeros(3)}},
            "'entropy' of a completion has 3 rows, and the sequence ends after 2 tokens",
        ),
        ({"extras": {"entropy": np.array(["a", "b"])}}, "has dtype <U1, not one of"),
        (
            {"extras": {"entropy": np.zeros(2)}, "axes": {"entropy": "sequence"}},
            "columns has 'entropy' with the axis 'sequence': put it into extras and axes",
        ),
    ],
    ids=["mask", "length", "dtype", "axis"],
)
async def test_a_completion_that_no_group_can_hold_loses_its_rollout_alone_with_and_without_a_hook(changes, says):
    async def hook(task: Task, policy: RolloutPolicy) -> Rollout:
        return await single_turn(task, policy)

    for plays in (single_turn, hook):
        client = RecordingClient()
        engine = ScriptedEngine(completions=[replace(SAID, **changes), SAID])
        stats = await generate(client, engine, plays, group_size=4, min_rollouts=2)
        group = client.inserts[0][0]
        assert group.group_size == 2
        assert stats["rollouts_failed"] == 2
        assert says in group.meta["failures"][0]
        with pytest.raises(PromptError, match="2 of 4 rollouts failed"):
            await generate(RecordingClient(), engine, plays, group_size=4)


DRAWN = replace(SAID, policy_versions=[0, 0])


def sequence_of(*completions_rows: np.ndarray, axis: str = "token") -> RolloutSequence:
    """A sequence with a completion of two tokens for each of these arrays, which are its extra "hidden"."""
    sequence = RolloutSequence([1])
    for rows in completions_rows:
        extras = {"hidden": rows}
        if axis == RAGGED:
            extras["hidden" + OFFSETS] = np.array([0, 0, len(rows)])
        sequence.append_completion(replace(DRAWN, extras=extras, axes={"hidden": axis}))
    return sequence


SHAPES = [((2,), (2, 2)), ((2, 2), (2,)), ((2, 2), (2, 1)), ((2, 1), (2, 2))]


@pytest.mark.parametrize("axis", ["token", RAGGED])
@pytest.mark.parametrize(("first", "second"), SHAPES)
def test_rows_of_two_shapes_are_one_error_in_one_sequence_and_in_two(first, second, axis):
    one = [sequence_of(np.ones(first), np.ones(second), axis=axis)]
    two = [sequence_of(np.ones(first), axis=axis), sequence_of(np.ones(second), axis=axis)]
    shapes = f"'hidden' has rows of the shape {first[1:]} in one completion, and {second[1:]} in another"
    for sequences in (one, two):
        with pytest.raises(ValueError, match=re.escape(shapes)):
            check_sequences([sequence.read() for sequence in sequences])


def test_the_only_row_of_a_completion_behind_the_end_of_its_sequence_is_an_error():
    sequence = sequence_of(np.ones(2))
    sequence.append_completion(replace(DRAWN.cut(0, ""), extras={"hidden": np.ones(1)}))
    with pytest.raises(ValueError, match="'hidden' of a completion has 1 row, and the sequence ends after 0 tokens"):
        check_sequences([sequence.read()])
