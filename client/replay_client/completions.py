"""Completions: makes a group of completions that share one prompt, or of rows that each have a prompt of their own.

Axes: S sequences, G rollouts, P tokens of the prompt, T tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_client.columns import OFFSETS, RAGGED, check_row_axis
from replay_client.rollout import Int32, RolloutGroup, vector
from replay_protos.words import counted

Columns = Mapping[str, tuple[str, Sequence[Any]]]
"""Columns by name. The value of a name is the axis of the column, and a sequence with its entry for each of S rows."""


def group_from_completions(
    *,
    prompt_ids: npt.ArrayLike,
    completions: Iterable[npt.ArrayLike],
    logprobs: Iterable[npt.ArrayLike],
    rewards: npt.ArrayLike,
    advantages: npt.ArrayLike,
    **fields: Any,
) -> RolloutGroup:
    """A group of S completions, each given as one array of tokens and one of log-probabilities.

    `prompt_ids` (P,), `rewards` (G,) and `advantages` (G,) are arrays; `fields` are the other fields of RolloutGroup.
    Each completion is a rollout, so G = S, unless `sequence_counts` says how many completions make a rollout. Raises
    ValueError that names the field or completion.
    """
    tokens_S = [vector("completions", np.asarray(ids).reshape(-1), np.int32) for ids in completions]
    logprobs_S = [np.asarray(row, dtype=np.float32).reshape(-1) for row in logprobs]
    for index, (tokens, row) in enumerate(zip(tokens_S, logprobs_S, strict=True)):
        if tokens.size != row.size:
            sizes = f"{counted(tokens.size, 'token')} and {counted(row.size, 'log-probability')}"
            raise ValueError(f"completion {index} has {sizes}")
    # NumPy cannot concatenate an empty list.
    completion_ids = np.concatenate(tokens_S) if tokens_S else np.zeros(0, np.int32)
    rollout_logprobs = np.concatenate(logprobs_S) if logprobs_S else np.zeros(0, np.float32)
    return RolloutGroup(
        prompt_ids=np.asarray(prompt_ids),
        completion_ids=completion_ids,
        completion_lengths=np.array([tokens.size for tokens in tokens_S], dtype=np.int32),
        rollout_logprobs=rollout_logprobs,
        rewards=np.asarray(rewards, dtype=np.float32),
        advantages=np.asarray(advantages, dtype=np.float32),
        **fields,
    )


def group_from_rows(
    *,
    prompts: Iterable[npt.ArrayLike],
    completions: Iterable[npt.ArrayLike],
    logprobs: Iterable[npt.ArrayLike],
    rewards: npt.ArrayLike,
    advantages: npt.ArrayLike,
    loss_masks: Iterable[npt.ArrayLike] | None = None,
    token_advantages: Iterable[npt.ArrayLike] | None = None,
    columns: Columns | None = None,
    **fields: Any,
) -> RolloutGroup:
    """A group of S rows. Each row has its own prompt and completion.

    `logprobs`, `loss_masks` and `token_advantages` have an array for each row, with one value for each token of the
    completion.

    The common beginning of the prompts becomes `prompt_ids`, and the rest of each prompt becomes the context of its
    row. `RolloutGroup.prompts` returns the whole prompts again, and `sampled_spans` finds the completions.

    `columns` become `extras` with axes. The axis of a column says what its entry for a row is:

    "token": an array with one value for each token of the completion. "whole": an array with one value for each token
    of the prompt and of the completion; `prompt_ids` ends where these values begin to differ between the rows, even if
    the prompts agree further. "ragged:token": a pair of arrays, the values and the offsets into them, with one offset
    more than the completion has tokens. `row_of` returns the entries again.

    `fields` are the other fields of RolloutGroup. An extra in `fields` must have values for the contexts, too. For the
    other arguments and the errors, see `group_from_completions`.
    """
    prompts_S = [vector("prompts", np.asarray(ids).reshape(-1), np.int32) for ids in prompts]
    whole_columns = [rows for axis, rows in (columns or {}).values() if axis == "whole"]
    shared = _common_beginning(prompts_S, whole_columns)
    contexts_S = [ids[shared:] for ids in prompts_S]
    completions_S = [np.asarray(ids).reshape(-1) for ids in completions]
    logprobs_S = [np.asarray(row, dtype=np.float32).reshape(-1) for row in logprobs]
    lengths_S = [ids.size for ids in contexts_S]
    if any(lengths_S):
        fields["context_lengths"] = np.array(lengths_S, np.int32)
    if loss_masks is not None:
        masks_S = (np.asarray(row, np.bool_).reshape(-1) for row in loss_masks)
        fields["loss_mask"] = _behind(lengths_S, masks_S)
    if token_advantages is not None:
        advantages_S = (np.asarray(row, np.float32).reshape(-1) for row in token_advantages)
        fields["token_advantages"] = _behind(lengths_S, advantages_S)
    if columns:
        extras = dict(fields.get("extras", {}))
        axes = dict(fields.get("axes", {}))
        for name, (axis, rows) in columns.items():
            extras |= _column(name, axis, rows, shared, lengths_S)
            axes[name] = axis
        fields["extras"] = extras
        fields["axes"] = axes
    sequences: list[npt.NDArray[Any]] = []
    for context, completion in zip(contexts_S, completions_S, strict=True):
        sequences.append(_joined(context, completion))
    sequence_logprobs: list[npt.NDArray[Any]] = []
    for context, row in zip(contexts_S, logprobs_S, strict=True):
        unknown = np.full(context.size, np.nan)
        sequence_logprobs.append(_joined(unknown, row))
    return group_from_completions(
        prompt_ids=prompts_S[0][:shared] if prompts_S else (),
        completions=sequences,
        logprobs=sequence_logprobs,
        rewards=rewards,
        advantages=advantages,
        **fields,
    )


def _behind(contexts_S: Sequence[int], rows: Iterable[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """(T, ...) the values of all rows, each behind zeros for the tokens of its context.

    `contexts_S` has the lengths of the contexts.
    """
    pieces: list[npt.NDArray[Any]] = []
    for context, row in zip(contexts_S, rows, strict=True):
        pieces.append(np.zeros_like(row, shape=(context, *row.shape[1:])))
        pieces.append(row)
    return np.concatenate(pieces or [np.zeros(0)])  # NumPy cannot concatenate an empty list


def row_of(group: RolloutGroup, name: str, sequence: int) -> Any:
    """The entry that `columns` of `group_from_rows` had under this name for the row `sequence`.

    The arrays of the entry are views if possible.
    """
    axis = group.axes.get(name, "group")
    array = group.extra_of(name, sequence)
    context = 0 if group.context_lengths is None else int(group.context_lengths[sequence])
    if axis == "token":
        return array[context:]
    if axis == RAGGED:
        # The tokens of the context have no values, so the values stay whole and only their offsets are left out.
        return array, group.offsets_of(name, sequence)[context:]
    return array


def _column(
    name: str, axis: str, rows: Sequence[Any], shared: int, contexts_S: Sequence[int]
) -> dict[str, npt.NDArray[Any]]:
    """The array of a column, and its offsets if it is ragged, by their names in `extras`.

    `shared` is the number of tokens of the shared prompt, and `contexts_S` has the lengths of the contexts. A token of
    a context has the value 0, or no values in a ragged column.
    """
    check_row_axis(name, axis)
    if axis == "whole":
        rows_S = [np.asarray(row) for row in rows]
        of_shared_prompt = [row[:shared] for row in rows_S[:1]]  # equal in all rows, so the first row has them
        of_rows = [row[shared:] for row in rows_S]
        return {name: np.concatenate([*of_shared_prompt, *of_rows])}
    if axis == "token":
        return {name: _behind(contexts_S, map(np.asarray, rows))}
    # A ragged column has the values of all rows one after the other, and T + 1 offsets. The offsets of a row count from
    # its own first value, so add the number of values of the rows before.
    offsets = [np.zeros(1, np.int64)]
    start = 0
    for context, (_, offsets_of_row) in zip(contexts_S, rows, strict=True):
        row_offsets = np.asarray(offsets_of_row)
        if row_offsets.dtype.kind not in "iu":
            raise ValueError(f"columns has {name!r} with offsets of the type {row_offsets.dtype}: give integers")
        # In a narrow type of the row the sums could overflow, and NumPy adds uint64 and int64 as floats.
        row_ends = row_offsets[1:].astype(np.int64)
        # A token of the context has no values: its offset is 0, the end of what comes before the row.
        offsets.append(start + np.pad(row_ends, (context, 0)))
        start += int(row_offsets[-1])
    # The rows decide the type, by their first one, if that type can hold the last offset.
    dtype = np.asarray(rows[0][1]).dtype
    if start > np.iinfo(dtype).max:
        dtype = np.dtype(np.int64)
    values = [row_values for row_values, _ in rows]
    return {name: np.concatenate(values), name + OFFSETS: np.concatenate(offsets).astype(dtype)}


def _common_beginning(rows: list[Int32], columns: Sequence[Sequence[Any]] = ()) -> int:
    """The largest n for which the first n entries of all `rows` are equal, and of all rows in each of `columns` too."""
    shared = min((row.size for row in rows), default=0)
    for column in (rows, *columns):
        for row in column[1:]:
            if not shared:
                return 0
            differs: npt.NDArray[Any] = np.asarray(row)[:shared] != np.asarray(column[0])[:shared]
            # An entry of a column may be an array, and differs if any of its values does.
            positions = np.flatnonzero(differs.reshape(len(differs), -1).any(axis=1))
            if positions.size:
                shared = int(positions[0])
    return shared


def _joined(*arrays: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The arrays one after the other; an empty int32 array if all are empty.

    Empty arrays are left out: NumPy makes an empty list a float64 array, which would turn token ids into floats.
    """
    filled = [array for array in arrays if array.size]
    return np.concatenate(filled or [np.zeros(0, np.int32)])
