"""Turns: the parts of each sequence, with the role that wrote each part, and the number of tokens that are trained on.

A generator that plays rollouts of several turns writes the turns into `meta["turns"]`. For each of the S sequences,
there is a list of [role, number of tokens], from the first token of the prompt to the last token of the sequence. Not
every generator writes turns. If the turns of a sequence are missing, or do not add up to its tokens, the sequence is
cut where `trained_mask` changes, and its parts have no role.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from replay_client.rollout import Bool, RolloutGroup

MOST_ROLE = 40
"""Most characters of a role that are kept, because a generator may write any text there."""


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """The tokens of a sequence from `start` to `stop` - 1. Token 0 is the first one after the shared prompt."""

    role: str | None
    """The role that the generator gave the writer: "assistant", "tool" or another. None: the group has no roles."""
    start: int
    stop: int
    trained: int
    """Tokens of the turn that the trainer trains on."""

    def document(self) -> dict[str, Any]:
        return {"role": self.role, "start": self.start, "stop": self.stop, "trained": self.trained}


def turns_of(group: RolloutGroup) -> list[list[TurnSpan]]:
    """The turns of each of the S sequences, without the shared prompt.

    If a group has no roles, no contexts and no loss mask, the policy wrote all tokens. Then the lists are empty.
    """
    written_S = group.meta.get("turns")
    if not isinstance(written_S, list | tuple) or len(written_S) != group.num_sequences:
        if group.loss_mask is None and group.context_lengths is None:
            return [[] for _ in range(group.num_sequences)]
        written_S = [None] * group.num_sequences  # there are no roles, so the mask alone cuts the sequences
    mask_T = group.trained_mask
    prompt_length = int(group.prompt_ids.size)
    turns_S = []
    for written, span in zip(written_S, group.sequence_spans(), strict=True):
        mask = mask_T[span]
        turns = _spans_of(written, mask, prompt_length)
        if turns is None:
            turns = _runs(mask)
        turns_S.append(turns)
    return turns_S


def _spans_of(written: Any, mask: Bool, prompt_length: int) -> list[TurnSpan] | None:
    """Reads the turns that a generator has written for a sequence. Returns those after the shared prompt.

    Returns None if they do not add up to the tokens of the sequence, or are not pairs of role and number. `mask` is the
    part of `trained_mask` for the sequence.
    """
    if not isinstance(written, list | tuple):
        return None
    turns = []
    stop = -prompt_length  # the tokens of the shared prompt have indices below 0
    for turn in written:
        match turn:
            case [str(role), int(tokens)] if tokens >= 0 and not isinstance(tokens, bool):
                start = stop
                stop += tokens
            case _:
                return None
        is_inside_prompt = stop <= 0 and start < 0
        if is_inside_prompt:  # the page shows such a turn as part of the prompt
            continue
        start = max(0, start)
        trained = int(mask[start:stop].sum())
        turns.append(TurnSpan(role[:MOST_ROLE], start, stop, trained))
    if stop != mask.size:
        return None
    return turns


def _runs(mask: Bool) -> list[TurnSpan]:
    """The parts of a sequence between the places where its mask changes."""
    if not mask.size:
        return []
    changes = np.flatnonzero(np.diff(mask)) + 1
    edges = [0, *changes.tolist(), mask.size]
    turns = []
    for start, stop in pairwise(edges):
        trained = stop - start if mask[start] else 0
        turns.append(TurnSpan(role=None, start=start, stop=stop, trained=trained))
    return turns
