"""Turns of a sequence: as the generator wrote them down or, where it did not, the parts of the mask."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_client import RolloutGroup
from replay_client.testing import make_group
from replay_dashboard.turns import turns_of
from replay_generator import Rollout, RolloutSequence
from replay_generator.engines import Completion
from replay_generator.groups.assembly import assemble
from replay_generator.rollouts.rollout import PlayedRollout


def wrote(*token_ids: int, loss_mask: list[bool] | None = None) -> Completion:
    n = len(token_ids)
    return Completion(list(token_ids), [-1.0] * n, "", "stop", [0] * n, loss_mask=loss_mask)


def spans_of(group: RolloutGroup) -> list[list[tuple[str | None, int, int, int]]]:
    return [[(turn.role, turn.start, turn.stop, turn.trained) for turn in turns] for turns in turns_of(group)]


def test_the_turns_are_those_that_the_generator_wrote_down():
    agent = RolloutSequence([3, 4, 9])
    agent.append_completion(wrote(5, 6))
    agent.append_observation([7], role="tool")
    agent.append_completion(wrote(8, 8, 8, loss_mask=[True, False, True]))
    helper = RolloutSequence([3, 4])
    helper.append_completion(wrote(5))
    rollouts = [PlayedRollout.of(Rollout([agent, helper])), PlayedRollout.of(Rollout([helper]))]
    group = assemble(rollouts, 0, rewards=[1, 0], advantages=[1, -1])
    assert group.prompt_ids.tolist() == [3, 4]
    assert spans_of(RolloutGroup.decode(group.encode())) == [
        [("prompt", 0, 1, 0), ("assistant", 1, 3, 2), ("tool", 3, 4, 0), ("assistant", 4, 7, 2)],
        [("assistant", 0, 1, 1)],
        [("assistant", 0, 1, 1)],
    ]


@given(
    masks=st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=4),
    shared=st.integers(1, 4),
    data=st.data(),
)
def test_turns_cover_each_sequence_once_and_count_what_is_trained_on(masks, shared, data):
    told = None
    if data.draw(st.booleans(), label="the generator wrote them down"):
        told = []
        for mask in masks:
            whole = shared + len(mask)
            cuts = sorted({0, whole, *data.draw(st.lists(st.integers(1, whole), max_size=5), label="cuts")})
            told.append([[data.draw(st.sampled_from(["tool", "assistant"])), b - a] for a, b in pairwise(cuts)])
    group = make_group(
        prompt=[3] * shared,
        lengths=[len(mask) for mask in masks],
        loss_mask=[each for mask in masks for each in mask],
        meta={} if told is None else {"turns": told},
    )
    for mask, turns, span in zip(masks, turns_of(group), group.sequence_spans(), strict=True):
        assert [turn.start for turn in turns] == [0, *(turn.stop for turn in turns)][: len(turns)]
        assert sum(turn.stop - turn.start for turn in turns) == len(mask)
        assert [turn.trained for turn in turns] == [sum(mask[turn.start : turn.stop]) for turn in turns]
        assert all((turn.role is None) == (told is None) for turn in turns)
        if told is None:  # each part is of one kind, and its neighbours are of the other
            kinds = [turn.trained > 0 for turn in turns]
            assert all(turn.trained in (0, turn.stop - turn.start) for turn in turns)
            assert all(a != b for a, b in pairwise(kinds))
        assert group.trained_mask[span].tolist() == mask


RUNS = [(None, 0, 2, 2), (None, 2, 3, 0), (None, 3, 4, 1)]


@pytest.mark.parametrize(
    ("told", "spans"),
    [
        pytest.param([[["prompt", 2], ["assistant", 4]]], [("assistant", 0, 4, 3)], id="they fit"),
        pytest.param([[["prompt", 2], ["a" * 99, 4], ["", 0]]], [("a" * 40, 0, 4, 3), ("", 4, 4, 0)], id="long role"),
        pytest.param(None, RUNS, id="none"),
        pytest.param([[["prompt", 2], ["assistant", 3]]], RUNS, id="too few tokens"),
        pytest.param([[["prompt", 2], ["assistant", 1 << 62]]], RUNS, id="too many tokens"),
        pytest.param([[["prompt", 7], ["assistant", -1]]], RUNS, id="negative"),
        pytest.param([[["prompt", 2], ["assistant", "4"]]], RUNS, id="no number"),
        pytest.param([[["prompt", 2], ["assistant", 4, 1]]], RUNS, id="no pair"),
        pytest.param([["prompt", 2], ["assistant", 4]], RUNS, id="too many sequences"),
        pytest.param(["prompt"], RUNS, id="a text"),
        pytest.param({"turns": 1}, RUNS, id="a map"),
    ],
)
def test_without_turns_that_fit_the_parts_are_those_of_the_mask(told, spans):
    meta = {} if told is None else {"turns": told}
    assert spans_of(make_group(lengths=(4,), loss_mask=[1, 1, 0, 1], meta=meta)) == [spans]
