"""Sampling masks: the tokens that top_p, top_k or min_p kept when a token was drawn, as a column of a group.

    completion_ids            a      b    c
    sampling_mask             a d    -    c e f       values: int32 ids of vocabulary tokens
    sampling_mask/offsets   0      2    2        5    T + 1; an empty mask: unknown

An engine that truncates draws from the distribution over these tokens alone, and its log-probabilities are relative to
them. A trainer that takes all tokens instead finds each token less likely, by the probability that was cut off. That
is a bias: it does not vanish at staleness 0. With the masks, both compute the same number.

Engines write the column, and trainers read it. A mask is empty where the engine does not know it, where it has more
tokens than the engine stores, and where the policy did not draw the token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from replay_client.columns import OFFSETS, RAGGED, Array

if TYPE_CHECKING:
    from replay_client.rollout import RolloutGroup

SAMPLING_MASK = "sampling_mask"
"""The name of the column."""
TRUNCATING = ("top_p", "top_k", "min_p")
"""The settings of sampling that cut off a part of the vocabulary."""
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""The settings of sampling that change log-probabilities, with the values that change nothing."""

CUT_OFF = -9000.0
"""Processed log-probabilities below were cut off: they are -inf in vLLM, and -9999 in the JSON of its server."""


def truncates(sampling: Mapping[str, Any]) -> bool:
    """Whether tokens drawn like this come from a part of the vocabulary, with log-probabilities relative to it.

    `sampling`: that of a group. Raw log-probabilities are those of all tokens, whatever was drawn from.
    """
    if sampling.get("logprobs_mode", "processed_logprobs") != "processed_logprobs":
        return False
    return _above(1.0, sampling.get("top_p")) or any(_above(sampling.get(name), 0.0) for name in ("top_k", "min_p"))


def other_sampling(drawn: Mapping[str, Any], assumed: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first setting that makes log-probabilities of `drawn` other ones than those of `assumed`: its name, and both
    values; None: they are the same. `drawn` is as in a group. Raw log-probabilities are as without any setting."""
    if drawn.get("logprobs_mode", "processed_logprobs") != "processed_logprobs":
        drawn = {}
    for name, neutral in _NEUTRAL.items():
        a, b = (neutral if (value := each.get(name)) in (None, -1) else value for each in (drawn, assumed))
        if a != b:
            return name, a, b
    return None


def _above(a: Any, b: Any) -> bool:
    return isinstance(a, int | float) and isinstance(b, int | float) and a > b


def mask_column(masks: Iterable[Sequence[int]]) -> dict[str, Array]:
    """The mask of each token, in order, as values and offsets by their names."""
    counts, values = [0], list[int]()
    for each in masks:
        values.extend(each)
        counts.append(len(each))
    return {SAMPLING_MASK: np.array(values, np.int32), SAMPLING_MASK + OFFSETS: np.cumsum(counts, dtype=np.int32)}


def mask_fields(masks: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The fields `extras` and `axes` of a Completion with these masks, one for each of its tokens; without masks
    none."""
    return {"extras": mask_column(masks), "axes": {SAMPLING_MASK: RAGGED}} if masks else {}


def most_logprobs(limit: int, vocabulary: int) -> int:
    """The log-probabilities of a token that one may ask vLLM for. `limit`: its `max_logprobs`; -1: none."""
    return vocabulary if limit == -1 else min(limit, vocabulary)


def mask_of_logprobs(logprobs: Mapping[int, float], width: int) -> list[int]:
    """The tokens kept, where an engine tells the `width` highest processed log-probabilities and the chosen one.

    Empty if all of these were kept: there may be more.
    """
    kept = [token for token, logprob in logprobs.items() if logprob > CUT_OFF]
    return [] if len(kept) >= width else kept


def unknown_masks(group: RolloutGroup) -> int:
    """How many tokens to train on were drawn from a part of the vocabulary that the group does not know."""
    if not truncates(group.sampling):
        return 0
    unknown_T = group.trained_mask
    if group.axes.get(SAMPLING_MASK) == RAGGED:
        unknown_T = unknown_T & (np.diff(group.extras[SAMPLING_MASK + OFFSETS]) == 0)
    return int(unknown_T.sum())


def why_no_masks(group: RolloutGroup, vocabulary: int | None = None) -> str:
    """Why no trainer can use the sampling masks of a group; empty: it can, or there are none.

    `vocabulary`: tokens that the model has; None: unknown.
    """
    if SAMPLING_MASK not in group.extras:
        return ""
    values, axis = group.extras[SAMPLING_MASK], group.axes.get(SAMPLING_MASK)
    if axis != RAGGED or values.ndim != 1 or values.dtype.kind not in "iu":
        found = f"is {values.dtype} of the shape {values.shape} with the axis {axis!r}"
        return f"its column {SAMPLING_MASK!r} {found}: an engine writes token ids there, with the axis {RAGGED!r}"
    least, most = int(values.min(initial=0)), int(values.max(initial=0))
    if least < 0 or (vocabulary is not None and most >= vocabulary):
        last = "" if vocabulary is None else f" to {vocabulary - 1}"
        wrong = least if least < 0 else most
        return f"its column {SAMPLING_MASK!r} holds the token {wrong}, and the model has those from 0{last}"
    counts_T = np.diff(group.extras[SAMPLING_MASK + OFFSETS])
    known_T = counts_T > 0
    holds_T = np.zeros(counts_T.size, np.bool_)
    if values.size:
        starts = group.extras[SAMPLING_MASK + OFFSETS][:-1][known_T]
        holds_T[known_T] = np.logical_or.reduceat(values == np.repeat(group.completion_ids, counts_T), starts)
    wrong_T = group.trained_mask & known_T & ~holds_T
    if wrong_T.any():
        token = int(wrong_T.argmax())
        drawn = f"token {token}, {group.completion_ids[token]}, which was drawn"
        return f"its column {SAMPLING_MASK!r} does not keep {drawn}: it belongs to other tokens"
    return ""
