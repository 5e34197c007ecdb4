"""Turns: the parts of each sequence, with the role that wrote each part, and how many of its tokens are trained on.

A generator that plays rollouts of several turns writes the turns into `meta["turns"]`: for each of the S sequences a
list of [role, number of tokens], from the first token of the prompt to the last token of the sequence. A generator need
not write them. If the turns of a sequence are missing, or do not add up to its tokens, the sequence is cut where
`trained_mask` changes, and its parts have no role.
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
    """Tokens `start` to `stop` of a sequence. Token 0 is the first token after the prompt that all sequences share."""

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

    If a group has no roles, no contexts and no loss mask, its sequences have no turns: the policy wrote all tokens.
    """
    written_S = group.meta.get("turns")
    if not isinstance(written_S, list | tuple) or len(written_S) != group.num_sequences:
        if group.loss_mask is None and group.context_lengths is None:
            return [[] for _ in range(group.num_sequences)]
        written_S = [None] * group.num_sequences  # no roles: cut the sequences by the mask
    mask_T = group.trained_mask
    prompt_length = int(group.prompt_ids.size)
    turns_S = []
    for written, span in zip(written_S, group.sequence_spans(), strict=True):
        mask = mask_T[span]
        turns = _spans_of(written, mask, prompt_length)
        turns_S.append(_runs(mask) if turns is None else turns)
    return turns_S


def _spans_of(written: Any, mask: Bool, prompt_length: int) -> list[TurnSpan] | None:
    """The turns of a sequence that the generator wrote down, after the shared prompt; None if they cannot be used.

    They cannot be used if they do not add up to the tokens of the sequence, or are not pairs of role and number.
    `mask` is the part of `trained_mask` for the sequence.
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
        if not is_inside_prompt:  # the page shows such turns as part of the prompt
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
