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
"""Column name -> (axis of the column, its S entries, one for each row)."""


def group_from_completions(
    *,
    prompt_ids: npt.ArrayLike,
    completions: Iterable[npt.ArrayLike],
    logprobs: Iterable[npt.ArrayLike],
    rewards: npt.ArrayLike,
    advantages: npt.ArrayLike,
    **fields: Any,
) -> RolloutGroup:
    """Makes a group of S completions. Each is given as one array of tokens and one array of log-probabilities.

    `prompt_ids` (P,), `rewards` (G,) and `advantages` (G,) are arrays. `fields` are the other fields of RolloutGroup.
    Each completion is a rollout, so G = S, unless `sequence_counts` says how many completions each rollout has. Raises
    ValueError that names the field or completion.
    """
    tokens_S = [vector("completions", np.asarray(ids).reshape(-1), np.int32) for ids in completions]
    logprobs_S = [np.asarray(row, dtype=np.float32).reshape(-1) for row in logprobs]
    for index, (tokens, token_logprobs) in enumerate(zip(tokens_S, logprobs_S, strict=True)):
        if tokens.size != token_logprobs.size:
            sizes = f"{counted(tokens.size, 'token')} and {counted(token_logprobs.size, 'log-probability')}"
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
    """Makes a group of S rows. Each row has its own prompt and completion.

    `logprobs`, `loss_masks` and `token_advantages` have an array for each row, with one value for each token of the
    completion.

    The common beginning of the prompts becomes `prompt_ids`, and the rest of each prompt becomes the context of its
    row. `RolloutGroup.prompts` returns the whole prompts, and `RolloutGroup.sampled_spans` finds the completions.

    `columns` become `extras` with axes. `row_of` returns the entry of a row from the group. The axis of a column says
    what its entry for a row is:

    * "token": an array with one value for each token of the completion.
    * "whole": an array with one value for each token of the prompt and of the completion. If these values differ
      between the rows at a token of the common beginning, `prompt_ids` ends before this token.
    * "ragged:token": a pair of arrays, the values and the offsets into the values. There is one offset more than the
      completion has tokens.

    `fields` are the other fields of RolloutGroup. If `fields` has `extras`, they must have values for the tokens of the
    contexts too. For the other arguments and the errors, see `group_from_completions`.
    """
    prompts_S = [vector("prompts", np.asarray(ids).reshape(-1), np.int32) for ids in prompts]
    whole_columns = [rows for axis, rows in (columns or {}).values() if axis == "whole"]
    shared_size = _common_size(prompts_S, whole_columns)  # the tokens of the shared prompt
    contexts_S = [ids[shared_size:] for ids in prompts_S]
    completions_S = [np.asarray(ids).reshape(-1) for ids in completions]
    logprobs_S = [np.asarray(row, dtype=np.float32).reshape(-1) for row in logprobs]
    context_lengths_S = [context.size for context in contexts_S]
    if any(context_lengths_S):
        fields["context_lengths"] = np.array(context_lengths_S, np.int32)
    if loss_masks is not None:
        masks_S = (np.asarray(row, np.bool_).reshape(-1) for row in loss_masks)
        fields["loss_mask"] = _behind_contexts(context_lengths_S, masks_S)
    if token_advantages is not None:
        advantages_S = (np.asarray(row, np.float32).reshape(-1) for row in token_advantages)
        fields["token_advantages"] = _behind_contexts(context_lengths_S, advantages_S)
    if columns:
        extras = dict(fields.get("extras", {}))
        axes = dict(fields.get("axes", {}))
        for name, (axis, rows) in columns.items():
            extras |= _column(name, axis, rows, shared_size, context_lengths_S)
            axes[name] = axis
        fields["extras"] = extras
        fields["axes"] = axes
    sequences: list[npt.NDArray[Any]] = []
    for context, completion in zip(contexts_S, completions_S, strict=True):
        sequences.append(_joined(context, completion))
    sequence_logprobs: list[npt.NDArray[Any]] = []
    for context_length, completion_logprobs in zip(context_lengths_S, logprobs_S, strict=True):
        unknown = np.full(context_length, np.nan)  # the log-probabilities of the tokens of the context
        sequence_logprobs.append(_joined(unknown, completion_logprobs))
    return group_from_completions(
        prompt_ids=prompts_S[0][:shared_size] if prompts_S else (),
        completions=sequences,
        logprobs=sequence_logprobs,
        rewards=rewards,
        advantages=advantages,
        **fields,
    )


def _behind_contexts(context_lengths_S: Sequence[int], rows: Iterable[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Joins the values of all rows to one array (T, ...).

    The values of a row are for the tokens of its completion. In front of them, the result has a zero for each token of
    the row's context.
    """
    pieces: list[npt.NDArray[Any]] = []
    for context_length, row in zip(context_lengths_S, rows, strict=True):
        pieces.append(np.zeros_like(row, shape=(context_length, *row.shape[1:])))
        pieces.append(row)
    return np.concatenate(pieces or [np.zeros(0)])  # NumPy cannot concatenate an empty list


def row_of(group: RolloutGroup, name: str, sequence: int) -> Any:
    """The entry of the column `name` for the row `sequence`, as it was in the `columns` of `group_from_rows`.

    The arrays of the entry are views if possible.
    """
    axis = group.axes.get(name, "group")
    array = group.extra_of(name, sequence)
    context_length = 0 if group.context_lengths is None else int(group.context_lengths[sequence])
    if axis == "token":
        return array[context_length:]
    if axis == RAGGED:
        # The tokens of the context have offsets but no values. So leave out their offsets, and return all values.
        offsets = group.offsets_of(name, sequence)
        return array, offsets[context_length:]
    return array


def _column(
    name: str, axis: str, rows: Sequence[Any], shared_size: int, context_lengths_S: Sequence[int]
) -> dict[str, npt.NDArray[Any]]:
    """Makes the array of a column, and for a ragged column also its offsets. Returns them by their names in `extras`.

    `shared_size` is the number of tokens of the shared prompt. The tokens of a context get the value 0 with the axis
    "token", and no values in a ragged column.
    """
    check_row_axis(name, axis)
    if axis == "whole":
        rows_S = [np.asarray(row) for row in rows]
        pieces = [row[shared_size:] for row in rows_S]
        if rows_S:
            # The values for the shared prompt are equal in all rows, so take them from the first row.
            pieces.insert(0, rows_S[0][:shared_size])
        return {name: np.concatenate(pieces)}
    if axis == "token":
        values_S = map(np.asarray, rows)
        return {name: _behind_contexts(context_lengths_S, values_S)}
    # A ragged column has the values of all rows one after the other, and T + 1 offsets. The offsets of a row count from
    # its own first value, so add the number of values of the rows before.
    offsets = [np.zeros(1, np.int64)]
    start = 0  # the number of values of the rows before
    for context_length, (_, offsets_of_row) in zip(context_lengths_S, rows, strict=True):
        row_offsets = np.asarray(offsets_of_row)
        if row_offsets.dtype.kind not in "iu":
            raise ValueError(f"columns has {name!r} with offsets of the type {row_offsets.dtype}: give integers")
        # Add in int64: a narrow type could overflow, and NumPy adds uint64 and int64 as floats.
        row_ends = row_offsets[1:].astype(np.int64)
        # The offset behind each token is the end of its values. The tokens of the context have no values, so their ends
        # are 0, the beginning of the row's values.
        ends = np.pad(row_ends, (context_length, 0))
        offsets.append(start + ends)
        start += int(row_offsets[-1])
    values = np.concatenate([row_values for row_values, _ in rows])  # raises ValueError if there is no row
    # The result has the type of the first row's offsets, if this type can hold the last offset.
    dtype = np.asarray(rows[0][1]).dtype
    if start > np.iinfo(dtype).max:
        dtype = np.dtype(np.int64)
    return {name: values, name + OFFSETS: np.concatenate(offsets).astype(dtype)}


def _common_size(prompts: list[Int32], columns: Sequence[Sequence[Any]] = ()) -> int:
    """The number of tokens of the longest common beginning of all `prompts`.

    In each of `columns`, the values of all rows for these tokens must be equal too.
    """
    size = min((prompt.size for prompt in prompts), default=0)
    for column in (prompts, *columns):
        for row in column[1:]:
            if not size:
                return 0
            differs: npt.NDArray[Any] = np.asarray(row)[:size] != np.asarray(column[0])[:size]
            # The value for a token may be an array. It differs if any of its numbers does.
            positions = np.flatnonzero(differs.reshape(len(differs), -1).any(axis=1))
            if positions.size:
                size = int(positions[0])
    return size


def _joined(*arrays: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Joins the arrays one after the other. Returns an empty int32 array if all are empty.

    Empty arrays are left out, because NumPy makes an empty list a float64 array, which would turn token ids into
    floats.
    """
    filled = [array for array in arrays if array.size]
    return np.concatenate(filled or [np.zeros(0, np.int32)])
