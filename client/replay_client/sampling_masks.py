"""Sampling masks: the tokens that top_p, top_k or min_p kept when a token was drawn, as a column of a group.

    completion_ids            a      b    c           the T tokens of the completions
    sampling_mask             a d    -    c e f       the mask of each of these: int32 ids of the kept tokens
    sampling_mask/offsets   0      2    2        5    T + 1 offsets: where each mask begins and ends in the line above

An engine with top_p, top_k or min_p draws from the distribution over the kept tokens alone, and its log-probabilities
are relative to these tokens. A trainer that computes the softmax over all tokens finds a lower probability for each
token, by the factor 1 - (the probability of the tokens that were cut off). This bias does not vanish at staleness 0.
With the masks, engine and trainer compute the same log-probabilities.

Engines write the column, and trainers read it. An empty mask, like that of b above, means that the mask is unknown. A
mask is empty if the engine does not know it, if it has more tokens than the engine stores, or if the policy did not
draw the token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from replay_client.columns import OFFSETS, RAGGED, Array

if TYPE_CHECKING:
    from replay_client.rollout import RolloutGroup

SAMPLING_MASK = "sampling_mask"
"""The name of the column."""
TRUNCATING = ("top_p", "top_k", "min_p")
"""The settings of sampling that cut off a part of the vocabulary."""
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""The settings of sampling that change log-probabilities. Each is here with the value that changes nothing."""

CUT_OFF = -9000.0
"""Tokens with a processed log-probability of at most this value were cut off. vLLM reports -inf for them, and the JSON
of its server reports -9999."""


def truncates(sampling: Mapping[str, Any]) -> bool:
    """True if tokens are drawn from a part of the vocabulary, and their log-probabilities are relative to that part.

    `sampling` is the field of a group. If its `logprobs_mode` says that the log-probabilities are raw, the result is
    False: raw log-probabilities are relative to the whole vocabulary, whatever tokens sampling cut off.
    """
    if not _are_processed(sampling):
        return False
    if _is_above(1.0, sampling.get("top_p")):  # a top_p below 1 cuts tokens off
        return True
    return _is_above(sampling.get("top_k"), 0.0) or _is_above(sampling.get("min_p"), 0.0)


def other_sampling(drawn: Mapping[str, Any], assumed: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first setting that makes the log-probabilities of `drawn` differ from those of `assumed`; None: no setting.

    Returns the name of the setting and both values. `drawn` is the field `sampling` of a group, and `assumed` has the
    same form.
    """
    if not _are_processed(drawn):  # no setting changes raw log-probabilities, so treat all settings as absent
        drawn = {}
    for name, neutral in _NEUTRAL.items():
        drawn_value = _value_of(drawn, name, neutral)
        assumed_value = _value_of(assumed, name, neutral)
        if drawn_value != assumed_value:
            return name, drawn_value, assumed_value
    return None


def _are_processed(sampling: Mapping[str, Any]) -> bool:
    """True if the settings of sampling changed the log-probabilities, and not only the draws.

    This is so unless `logprobs_mode` says something else.
    """
    return bool(sampling.get("logprobs_mode", "processed_logprobs") == "processed_logprobs")


def _value_of(sampling: Mapping[str, Any], name: str, neutral: float) -> Any:
    """The value of a setting; `neutral` if the setting is absent, None, or -1, which means "off" for engines."""
    value = sampling.get(name)
    if value in (None, -1):
        return neutral
    return value


def _is_above(value: Any, bound: Any) -> bool:
    """True if both are numbers, and `value` is the greater one. A group of another program may have any values."""
    if not isinstance(value, int | float) or not isinstance(bound, int | float):
        return False
    return value > bound


def mask_column(masks: Iterable[Sequence[int]]) -> dict[str, Array]:
    """The column with the mask of each token: the arrays of values and of offsets, by their names in `extras`."""
    values: list[int] = []
    sizes = [0]  # the first offset is 0, and each mask adds its size to the next offset
    for mask in masks:
        values.extend(mask)
        sizes.append(len(mask))
    return {SAMPLING_MASK: np.array(values, np.int32), SAMPLING_MASK + OFFSETS: np.cumsum(sizes, dtype=np.int32)}


def mask_fields(masks: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The fields `extras` and `axes` of a Completion whose tokens have these masks. Empty if `masks` is empty.

    `masks` has one entry for each token.
    """
    if not masks:
        return {}
    return {"extras": mask_column(masks), "axes": {SAMPLING_MASK: RAGGED}}


def most_logprobs(limit: int, vocabulary: int) -> int:
    """The most log-probabilities of one token that vLLM returns. `limit` is its `max_logprobs`; -1: no limit."""
    return vocabulary if limit == -1 else min(limit, vocabulary)


def mask_of_logprobs(logprobs: Mapping[int, float], width: int) -> list[int]:
    """The tokens that were kept; an empty list if `logprobs` may lack some of them.

    `logprobs` has processed log-probabilities by the id of the token: the `width` highest ones, and that of the drawn
    token. If at least `width` of these tokens were kept, a token that is not in `logprobs` may have been kept too.
    """
    kept = [token for token, logprob in logprobs.items() if logprob > CUT_OFF]
    return [] if len(kept) >= width else kept


def unknown_masks(group: RolloutGroup) -> int:
    """The number of trained tokens that were drawn from a part of the vocabulary and have no sampling mask."""
    if not truncates(group.sampling):
        return 0
    unknown_T = group.trained_mask  # without the column, no mask is known
    if group.axes.get(SAMPLING_MASK) == RAGGED:
        mask_sizes_T = np.diff(group.extras[SAMPLING_MASK + OFFSETS])
        unknown_T = unknown_T & (mask_sizes_T == 0)
    return int(unknown_T.sum())


def why_no_masks(group: RolloutGroup, vocabulary: int | None = None) -> str:
    """The reason why no trainer can use the sampling masks of a group; empty: it can, or the group has no masks.

    `vocabulary` is the number of tokens that the model has; None: unknown.
    """
    if SAMPLING_MASK not in group.extras:
        return ""
    values = group.extras[SAMPLING_MASK]
    axis = group.axes.get(SAMPLING_MASK)
    if axis != RAGGED or values.ndim != 1 or values.dtype.kind not in "iu":
        found = f"is {values.dtype} of the shape {values.shape} with the axis {axis!r}"
        return f"its column {SAMPLING_MASK!r} {found}: an engine writes token ids there, with the axis {RAGGED!r}"
    least = int(values.min(initial=0))  # `initial` counts as one more value, because there may be none
    most = int(values.max(initial=0))
    if least < 0 or (vocabulary is not None and most >= vocabulary):
        up_to = "" if vocabulary is None else f" to {vocabulary - 1}"
        wrong_token = least if least < 0 else most
        return f"its column {SAMPLING_MASK!r} holds the token {wrong_token}, and the model has those from 0{up_to}"
    wrong_T = group.trained_mask & _lacks_drawn_token(group)
    if wrong_T.any():
        position = int(wrong_T.argmax())
        drawn = f"token {position}, {group.completion_ids[position]}, which was drawn"
        return f"its column {SAMPLING_MASK!r} does not keep {drawn}: it belongs to other tokens"
    return ""


def _lacks_drawn_token(group: RolloutGroup) -> npt.NDArray[np.bool_]:
    """(T,) True for each token of the group whose mask is known but does not contain the token itself."""
    values = group.extras[SAMPLING_MASK]
    offsets = group.extras[SAMPLING_MASK + OFFSETS]
    mask_sizes_T = np.diff(offsets)
    known_T = mask_sizes_T > 0
    contains_T = np.zeros(mask_sizes_T.size, np.bool_)  # True if the mask contains the drawn token
    if values.size:
        drawn_tokens = np.repeat(group.completion_ids, mask_sizes_T)  # for each value, the token drawn with its mask
        is_drawn_token = values == drawn_tokens
        # `reduceat` combines the values from each start up to the next start. These are the values of one mask, because
        # the masks in between are empty.
        starts = offsets[:-1][known_T]
        contains_T[known_T] = np.logical_or.reduceat(is_drawn_token, starts)
    return known_T & ~contains_T
