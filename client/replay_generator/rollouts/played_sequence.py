"""PlayedSequence: one sequence of a finished rollout as arrays. `groups/assembly.py` makes a group of such sequences.

* A sequence is read into arrays once: when its rollout is finished, or when its rollout is read from a table.
* `check_sequences` is the rule for the sequences that a group can hold. It checks the sequences of a rollout that has
  just ended, and the sequences of a whole group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_client.columns import OFFSETS, RAGGED, check_axes, check_row_axis, checked_columns
from replay_client.rollout import check_logprobs, check_tokens, vector
from replay_protos.words import counted

TOKENS = {"token_ids": np.int32, "sampled_mask": np.bool_, "logprobs": np.float32, "policy_versions": np.int64}
"""The attributes of a sequence with one value per token, and their dtypes. RolloutSequence and PlayedSequence both have
these attributes."""
DrawnExtras = Sequence[tuple[int, Mapping[str, npt.NDArray[Any]], Mapping[str, str]]]
"""The extra arrays of a sequence: one entry for each completion that has extras. An entry has the index in the sequence
of the completion's first token, the extras by name, and the axis of each extra by name (`Completion.axes`)."""
Columns = dict[str, tuple[str, list[Any]]]
"""The columns of several sequences, by name. A column consists of its axis, and of a list with one entry for each
sequence. An entry is an array. If the axis is "ragged:token", an entry is a pair of arrays: values and offsets.
`group_from_rows` takes this form."""


@dataclass(frozen=True)
class PlayedSequence:
    """The L tokens of a sequence. The first `head` tokens are its prompt, the others its completion."""

    head: int
    token_ids: npt.NDArray[np.int32]
    """(L,) all tokens of the sequence."""
    sampled_mask: npt.NDArray[np.bool_]
    """(L,) True for the tokens that the policy wrote."""
    logprobs: npt.NDArray[np.float32]
    """(L,) the log-probability of each token, in nats. NaN: unknown, or the policy did not write the token."""
    policy_versions: npt.NDArray[np.int64]
    """(L,) the policy version that drew each token. A token that the policy did not write has the version of the token
    before it, or -1 if no drawn token stands before it."""
    drawn: DrawnExtras
    """The extras of the completions in the sequence."""
    turns: Sequence[Any]
    """The turns of the sequence, as objects of `rollout.Turn`."""

    @classmethod
    def of(cls, head: int, drawn: DrawnExtras, turns: Sequence[Any], **parts: Sequence[Any]) -> PlayedSequence:
        """Makes a sequence from lists. `parts`: a list for each name of TOKENS, with one value for each token.

        Raises an error for values that are no numbers. Only `check` raises an error for lists of different lengths.
        """
        # A hook may have replaced a list by an array of any shape: `reshape(-1)` takes its values in order.
        token_ids = np.asarray(parts["token_ids"]).reshape(-1)
        return cls(
            head=head,
            token_ids=vector("token_ids", token_ids, np.int32),
            sampled_mask=np.array(parts["sampled_mask"], np.bool_).reshape(-1),
            logprobs=np.array(parts["logprobs"], np.float32).reshape(-1),
            policy_versions=np.array(parts["policy_versions"], np.int64).reshape(-1),
            drawn=[*drawn],
            turns=[*turns],
        )

    def check(self) -> None:
        """Raises ValueError if the attributes in TOKENS have different lengths, or if no group can hold the tokens or
        the log-probabilities."""
        lengths = [getattr(self, name).size for name in TOKENS]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"a sequence has {lengths[0]} token_ids, {lengths[1]} in sampled_mask, {lengths[2]} logprobs and "
                f"{lengths[3]} policy_versions"
            )
        prompt_ids = self.token_ids[: self.head]
        # `check_tokens` takes the lengths of all prompts of a group. Here there is one prompt.
        check_tokens(np.array([prompt_ids.size]), prompt_ids, self.token_ids[self.head :])
        check_logprobs(self.logprobs[self.head :])

    def columns(self) -> dict[str, tuple[str, Any]]:
        """The columns of this sequence, by name. A column has the values of one extra, from all completions.

        Each column is a pair of its axis and its values. The values have the form of an entry of Columns. Raises an
        error for values that do not fit the tokens.
        """
        axes: dict[str, str] = {}
        for _, extras, completion_axes in self.drawn:
            for name in extras:
                # An array of offsets is part of the column whose values it divides, and no column of its own.
                axis_of_values = completion_axes.get(name.removesuffix(OFFSETS))
                is_offsets = name not in completion_axes and axis_of_values == RAGGED
                if not is_offsets:  # the first completion that has the extra decides its axis
                    axes.setdefault(name, completion_axes.get(name, "token"))
        return {name: (axis, self._values(name, axis)) for name, axis in axes.items()}

    def _values(self, name: str, axis: str) -> Any:
        """The values of one column, in the form of an entry of Columns.

        A token for which no completion has a value gets 0. If the axis is "ragged:token", it gets an empty set.
        """
        # For each completion that has the extra: the row of its first token in the column, and its extras.
        parts = [(start - self.head, extras) for start, extras, _ in self.drawn if name in extras]
        size = self.token_ids.size - self.head  # the number of rows of the column: one for each token after the prompt
        if axis == RAGGED:
            counts = np.zeros(size, np.int64)  # the number of values of each token; 0: an empty set
            for start, extras in parts:
                part_counts = np.diff(extras[name + OFFSETS])
                counts[start : start + len(part_counts)] = part_counts
            offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
            # `parts` has the completions in the order of their tokens, so the values get this order too.
            values_of_parts = [np.asarray(extras[name]) for _, extras in parts]
            for values in values_of_parts:
                _check_row_shape(name, values, values_of_parts[0])
            return np.concatenate(values_of_parts), offsets
        if axis == "whole":
            # The values of each completion begin with the first token of the prompt, because the engine has read the
            # sequence from there. The values of a later completion replace those of an earlier one.
            parts = [(0, extras) for _, extras in parts]
            size = self.token_ids.size
        first_start, first_extras = parts[0]
        first = np.asarray(first_extras[name])
        if len(parts) == 1 and first_start == 0 and len(first) == size:
            return first  # without a copy, because a single completion has all values
        values = np.zeros((size, *first.shape[1:]), first.dtype)  # a token for which no completion has a value keeps 0
        for start, extras in parts:
            rows = np.asarray(extras[name])
            _check_row_shape(name, rows, first)
            # A single row would also fit into an empty slice, and be lost there.
            if start + len(rows) > size:
                raise ValueError(
                    f"{name!r} of a completion has {counted(len(rows), 'row')}, and the sequence ends after "
                    f"{counted(size - start, 'token')}"
                )
            values[start : start + len(rows)] = rows
        return values


def columns_of(sequences: Sequence[PlayedSequence]) -> Columns:
    """The columns of several sequences. If a sequence lacks a column that another one has, its values in this column
    are 0, or empty sets.

    Raises an error for values that do not fit the tokens, or that do not fit the values of another sequence.
    """
    columns_S = [sequence.columns() for sequence in sequences]
    # Name of a column -> its axis and values in the first sequence that has it. All sequences must fit these.
    firsts: dict[str, tuple[str, Any]] = {}
    for columns in columns_S:
        for name, column in columns.items():
            firsts.setdefault(name, column)
    merged: Columns = {}
    for name, (axis, first_values) in firsts.items():
        values_S = []
        for sequence, columns in zip(sequences, columns_S, strict=True):
            own_axis, values = columns.get(name, (axis, None))  # None: this sequence lacks the column
            if own_axis != axis:
                raise ValueError(f"{name!r} has the axis {axis!r} in one sequence, and {own_axis!r} in another")
            values_S.append(_fitted(sequence, name, axis, values, first_values))
        merged[name] = (axis, values_S)
    return merged


def _check_row_shape(name: str, values: npt.NDArray[Any], first: npt.NDArray[Any]) -> None:
    """Raises ValueError unless the rows of `values` have the shape of the rows of `first`.

    Without this check, NumPy would broadcast smaller rows to the shape of larger ones.
    """
    if values.shape[1:] != first.shape[1:]:
        raise ValueError(
            f"{name!r} has rows of the shape {first.shape[1:]} in one completion, and {values.shape[1:]} in another: "
            f"all rows of a column have one shape"
        )


def _fitted(sequence: PlayedSequence, name: str, axis: str, values: Any, first: Any) -> Any:
    """The values of a sequence in the column `name`, made to fit the values of the other sequences.

    `first`: the values of the first sequence that has the column. The result has their dtype and row shape, except that
    the values of ragged sets keep a wider dtype. `values` None: this sequence lacks the column, and gets 0, or empty
    sets. Raises ValueError for rows of another shape.
    """
    size = sequence.token_ids.size
    if axis != "whole":
        size -= sequence.head
    if axis == RAGGED:
        first_values, _ = first
        no_values = first_values[:0]  # an empty array of the wanted dtype and row shape
        if values is None:
            return no_values, np.zeros(size + 1, np.int32)
        ragged_values, offsets = values
        _check_row_shape(name, ragged_values, no_values)
        # `no_values` adds no rows, but makes `concatenate` widen the dtype if necessary.
        return np.concatenate([no_values, ragged_values]), offsets
    if values is None:
        return np.zeros((size, *first.shape[1:]), first.dtype)
    _check_row_shape(name, values, first)
    return values.astype(first.dtype, copy=False)


def check_sequences(sequences: Sequence[PlayedSequence]) -> None:
    """Raises an error if one of the sequences fits no group, or if the sequences do not fit together. The error is
    usually a ValueError, but values of a wrong type may raise any error.

    Checks first the tokens of each sequence, then the axes of the columns, then the columns of each sequence.
    """
    for sequence in sequences:
        sequence.check()
    columns = columns_of(sequences)
    axes = {name: axis for name, (axis, _) in columns.items()}
    for name, axis in axes.items():
        check_row_axis(name, axis)
    for number, sequence in enumerate(sequences):
        # The columns of this sequence by name. Offsets are separate entries here, because `check_axes` takes this form.
        extras: dict[str, npt.NDArray[Any]] = {}
        for name, (axis, values_S) in columns.items():
            if axis == RAGGED:
                values, offsets = values_S[number]
                extras[name] = values
                extras[name + OFFSETS] = offsets
            else:
                extras[name] = values_S[number]
        # The number of rows that a column of each axis must have.
        sizes = {"token": sequence.token_ids.size - sequence.head, "whole": sequence.token_ids.size}
        check_axes(checked_columns(extras), axes, sizes)
