"""Turns: the parts of each sequence, with the side that wrote each, and how many of its tokens are trained on.

A generator that plays rollouts of several turns writes the roles into `meta["turns"]`: for each of the S sequences
[[role, tokens], ...], from the first token of its prompt to its last token. Generators need not write them. If roles
are missing, or do not add up to the tokens, a sequence is cut where `trained_mask` changes, and its parts have no role.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from replay_client.rollout import Bool, RolloutGroup

MOST_ROLE = 40
"""Most characters of a role that are kept: a generator may write any text there."""


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """Tokens `start` to `stop` of a sequence; 0 is its first token after the prompt that all sequences share."""

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

    A group without roles, contexts and loss mask has no turns: all of its tokens are of one kind.
    """
    written_S = group.meta.get("turns")
    if not isinstance(written_S, list | tuple) or len(written_S) != group.num_sequences:
        if group.loss_mask is None and group.context_lengths is None:
            return [[] for _ in range(group.num_sequences)]
        written_S = [None] * group.num_sequences
    mask_T = group.trained_mask
    shared = int(group.prompt_ids.size)
    found = []
    for written, span in zip(written_S, group.sequence_spans(), strict=True):
        mask = mask_T[span]
        turns = _spans_of(written, mask, shared)
        found.append(_runs(mask) if turns is None else turns)
    return found


def _spans_of(written: Any, mask: Bool, shared: int) -> list[TurnSpan] | None:
    """The turns that the generator wrote down; None if they do not add up to the tokens of the sequence."""
    if not isinstance(written, list | tuple):
        return None
    turns = []
    stop = -shared
    for each in written:
        match each:
            case [str(role), int(tokens)] if tokens >= 0 and not isinstance(tokens, bool):
                start = stop
                stop += tokens
            case _:
                return None
        if stop > 0 or start >= 0:  # a turn that lies in the shared prompt is shown with the prompt
            start = max(0, start)
            turns.append(TurnSpan(role[:MOST_ROLE], start, stop, int(mask[start:stop].sum())))
    return turns if stop == mask.size else None


def _runs(mask: Bool) -> list[TurnSpan]:
    """The parts of a sequence between the places where its mask changes."""
    if not mask.size:
        return []
    changes = np.flatnonzero(np.diff(mask)) + 1
    edges = [0, *changes.tolist(), mask.size]
    turns = []
    for start, stop in pairwise(edges):
        trained = stop - start if mask[start] else 0
        turns.append(TurnSpan(None, start, stop, trained))
    return turns
