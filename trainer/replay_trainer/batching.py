"""Converts groups to a batch of tensors, and splits a batch into micro-batches that fit a budget of tokens.

    prompt_ids_UP          q q q .         one row per group         P: longest prompt
    completion_ids_BT      c c c c         one row per sequence      T: longest sequence
                           c c . .         every tensor named _BT lines up with the tokens of the sequences

A batch is padded on the right for the arithmetic of the loss. The model does not see this padding: it gets packed rows
(see logprobs.py), or rows of similar length if it cannot take packed rows. A packed row has each shared prefix of its
sequences once (packing/shared_prefixes.py): the prompt of a group, and all other prefixes that sequences share.

The model reads sequences, and the loss counts rollouts. A rollout is one sequence, or several sequences with contexts
of their own (`RolloutGroup.sequence_counts`). So a batch has a row for each sequence, and `Rollouts` joins the rows of
a rollout before losses and correction see them. Losses and correction therefore treat a rollout of several sequences
like a rollout of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replay_client import group_from_completions, group_from_rows
from replay_client.rollout import MAX_LOGPROB, MAX_VALUE, RolloutGroup
from replay_trainer.config import Teacher
from replay_trainer.losses import distillation_advantages
from replay_trainer.packing.sampling_masks import SamplingMasks
from replay_trainer.packing.shared_prefixes import Ints, Layout, SharedPrefixes
from replay_trainer.token_staleness import without_stale_tokens


class Rollouts:
    """The tokens to train on, with one row for each rollout. Losses and correction take tensors of this form.

        mask_BT     . . 1 1     first sequence of a rollout, with a context     mask_BT here     1 1 1
                    . 1 . .     its second sequence                                              1 . .
                    1 . 1 .     another rollout                                                  1 1 .

    If each row is a whole rollout already, the rows stay as they are: nothing is computed or copied.
    """

    def __init__(self, mask_BT: Tensor, rollout_B: Ints) -> None:
        """mask_BT: (B, T) bool, the tokens to train on. rollout_B: the index of each row's rollout, ascending."""
        self._source_BT = mask_BT
        self.first_J = _first_rows(rollout_B)
        """The first row of each of the J rollouts."""
        self.joins = self.first_J.size < rollout_B.size
        """True if a rollout has several rows."""
        self.mask_JT = mask_BT
        """(J, T) bool, the tokens to train on."""
        if not self.joins:
            return
        num_rows_J = np.diff(self.first_J, append=rollout_B.size)
        # For each row, the index of its rollout among the J rollouts here.
        index_B = torch.from_numpy(np.repeat(np.arange(self.first_J.size), num_rows_J))
        # The number of tokens to train on in each rollout, over all its rows.
        num_tokens_J = mask_BT.new_zeros(self.first_J.size, dtype=torch.int64)
        num_tokens_J.index_add_(0, index_B.to(mask_BT.device), mask_BT.sum(dim=1))
        # `join` moves the tokens to train on to the first columns of their rollout, so the mask is True there.
        columns_T = torch.arange(max(int(num_tokens_J.max()), 1), device=mask_BT.device)
        self.mask_JT = columns_T < num_tokens_J[:, None]

    def join(self, values: Tensor) -> Tensor:
        """Converts values of rows to values of rollouts. Gradients flow through.

        A tensor (B, T) becomes (J, T), with 0 outside the mask. A tensor (B,) becomes (J,): all rows of a rollout must
        have the same value.
        """
        if not self.joins:
            return values
        if values.ndim == 1:
            return values[torch.from_numpy(self.first_J).to(values.device)]
        # Both masks are True for the same number of tokens, in the same order.
        return values.new_zeros(self.mask_JT.shape).masked_scatter(self.mask_JT, values[self._source_BT])


@dataclass(frozen=True)
class Batch:
    """Sequences as rows, and prompts by group. Padding is 0 in every tensor.

    Lengths and indices are NumPy arrays in host memory, because the CPU uses them to divide a batch into micro-batches.
    """

    prompt_ids_UP: Tensor
    """int64"""
    completion_ids_BT: Tensor
    """int64"""
    mask_BT: Tensor
    """bool, tokens to train on: the group's `trained_mask`."""
    rollout_logprobs_BT: Tensor
    """float32, the sampler's log-probabilities in nats; NaN where unknown."""
    advantages_B: Tensor
    """float32, the advantage of the rollout that the row belongs to."""
    token_advantages_BT: Tensor | None
    """float32, used instead of `advantages_B`; None: no group of the batch has token advantages."""
    temperature_B: Tensor
    """float32, temperature of the sampling, > 0."""
    rollout_tokens_B: Tensor
    """int64, the number of tokens to train on in the whole rollout that the row belongs to. If `select` has left out
    other rows of this rollout, their tokens still count."""
    prompt_lengths_U: Ints
    """The number of tokens of each prompt: at least 1, unless all rows of the group have contexts."""
    completion_lengths_B: Ints
    """The number of tokens of each completion, including the context of the row; may be 0. `mask_BT` is False for the
    context."""
    group_B: Ints
    """Index of the group that the row belongs to, ascending."""
    rollout_B: Ints
    """Index of the rollout that the row belongs to, over all groups of the batch, ascending."""
    shared_prefixes: SharedPrefixes
    """The shared prefixes of what the model reads for each row: the prompt, and the completion without its last
    token."""
    teacher_logprobs_BT: Tensor | None = None
    """float32, the teacher's log-probabilities in nats, finite inside the mask; None: there is no teacher."""
    teacher_weight: float = 0.0
    """The weight of the teacher in the advantages."""
    sampling_masks: SamplingMasks | None = None
    """For each completion token, the tokens of the vocabulary that top_p, top_k or min_p kept for its draw. None: every
    token of the batch was drawn from the whole vocabulary."""

    @property
    def num_rows(self) -> int:
        """B, the number of sequences."""
        return self.completion_ids_BT.shape[0]

    @property
    def input_lengths_B(self) -> Ints:
        """The number of tokens that the model reads for each sequence in a packed row.

        The last token of the completion does not count, because it predicts nothing.
        """
        lengths_B: Ints = self.prompt_lengths_U[self.group_B] + np.maximum(self.completion_lengths_B - 1, 0)
        return lengths_B

    @property
    def advantages(self) -> Tensor:
        """The advantages of the groups: (B, T) if a group of the batch has token advantages, otherwise (B,)."""
        if self.token_advantages_BT is not None:
            return self.token_advantages_BT
        return self.advantages_B

    def advantages_under(self, old_BT: Tensor) -> Tensor:
        """Returns the advantages for the loss, (B,) or (B, T), including those that a teacher adds.

        `old_BT`: log-probabilities of the policy before the update, in nats.
        """
        teacher_BT = self.teacher_logprobs_BT
        if teacher_BT is None:
            return self.advantages
        return distillation_advantages(self.advantages, old_BT, teacher_BT, self.mask_BT, self.teacher_weight)

    @cached_property
    def rollouts(self) -> Rollouts:
        """The tokens to train on with one row for each rollout."""
        return Rollouts(self.mask_BT, self.rollout_B)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.mask_BT.device

    def without_wrong(self, groups: Sequence[int]) -> Batch:
        """Returns the batch without the wrong rollouts of these groups: those with an advantage of 0 or less.

        `groups`: indices of groups. All sequences of a rollout stay or go together. The denominator of the loss counts
        only the rollouts that stay.
        """
        in_groups_B = np.isin(self.group_B, np.array(groups, np.int64))
        wrong_B = in_groups_B & ~(self.advantages_B.cpu().numpy() > 0)
        if not wrong_B.any():
            return self
        return self.select(np.flatnonzero(~wrong_B))

    def select(self, rows: Ints) -> Batch:
        """Returns the batch with only these rows. The completions are cut to the longest of them, and the prompts are
        unchanged."""
        longest = max(int(self.completion_lengths_B[rows].max(initial=1)), 1)
        rows_on_device = torch.from_numpy(rows).to(self.device)
        chosen: dict[str, Any] = {}
        for name, value in vars(self).items():
            if value is None:
                continue
            # The letters after the last "_" of a name are the axes. Fields without axis B, such as prompts, stay whole.
            if name.endswith("_BT"):
                chosen[name] = value[rows_on_device, :longest]
            elif name.endswith("_B") and isinstance(value, Tensor):
                chosen[name] = value[rows_on_device]
            elif name.endswith("_B"):
                chosen[name] = value[rows]
        chosen["shared_prefixes"] = self.shared_prefixes.select(rows)
        if self.sampling_masks is not None:
            chosen["sampling_masks"] = self.sampling_masks.select(rows, longest)
        part = replace(self, **chosen)
        part.check()
        return part

    def check(self) -> None:
        """Asserts the shapes and dtypes of the fields, and the order of the rows.

        Reads no values of tensors, so it does not wait for a GPU.
        """
        # The letter of each axis -> its size.
        sizes = dict(zip("UP", self.prompt_ids_UP.shape, strict=True))
        sizes |= dict(zip("BT", self.completion_ids_BT.shape, strict=True))
        for name, value in vars(self).items():
            if isinstance(value, Tensor | np.ndarray):
                axes = name.rpartition("_")[2]
                shape = tuple(sizes[axis] for axis in axes)
                assert tuple(value.shape) == shape, f"{name} has the shape {tuple(value.shape)}, not {shape}"
        assert self.mask_BT.dtype == torch.bool, self.mask_BT.dtype
        assert self.completion_ids_BT.dtype == self.prompt_ids_UP.dtype == torch.int64
        assert self.rollout_logprobs_BT.dtype == self.advantages.dtype == torch.float32
        assert int(self.completion_lengths_B.max(initial=1)) <= sizes["T"], "a completion is longer than its row"
        assert int(self.prompt_lengths_U.max(initial=0)) <= sizes["P"], "a prompt is longer than its row"
        assert (np.diff(self.group_B) >= 0).all(), self.group_B
        assert (np.diff(self.rollout_B) >= 0).all(), self.rollout_B
        assert int(self.group_B.max(initial=-1)) < sizes["U"], "a row belongs to a group that is not there"
        assert self.shared_prefixes.order_B.size == sizes["B"], (self.shared_prefixes.order_B.size, sizes["B"])


@dataclass(frozen=True)
class ModelInput:
    """R rows of S tokens for a model, and the positions in these rows that predict the completions."""

    input_ids_RS: Tensor
    """int64; R = 1 if the rows are packed."""
    position_ids_RS: Tensor
    """int64"""
    attention_mask_RS: Tensor | None
    """int64, 1 for tokens, 0 for padding; None without padding."""
    layout: Layout | None
    """The runs of a packed row, which tell attention what each token attends to; None: each row is one sequence."""
    predicts_N: Tensor
    """int64: for each of the N tokens that `mask_BT` marks, row after row, the position in the flattened (R S) that
    predicts it."""


def to_batch(
    groups: Sequence[RolloutGroup],
    device: torch.device | str = "cpu",
    mask_truncated: bool = False,
    advantages: Sequence[npt.NDArray[np.float32]] | None = None,
    teacher: Teacher | None = None,
    oldest_version: int | None = None,
) -> Batch:
    """Makes a batch with a row for each sequence, in the order of the groups. Group sizes and lengths may differ.

    An empty list of groups makes a batch without rows; T is at least 1. The temperature is `sampling["temperature"]` of
    the group, default 1.

    `mask_truncated`: excludes rollouts whose finish reason is "length" from the mask. `advantages`: for each group,
    (G,) advantages that are used instead of the group's `advantages`. If a group has `token_advantages`, these are used
    in any case. `teacher`: the teacher to distil from; None: there is no teacher. `oldest_version`: excludes tokens of
    earlier policy versions from the mask; None: no token is excluded.

    Raises ValueError for an empty prompt (nothing would predict the first token), for a temperature that is not above
    0, and for a column of the teacher that cannot be used.
    """
    for index, group in enumerate(groups):
        _check_trainable(index, group, teacher)
    groups = [without_stale_tokens(group, oldest_version) for group in groups]
    num_sequences_U = [group.num_sequences for group in groups]
    group_B = np.repeat(np.arange(len(groups)), num_sequences_U).astype(np.int64)
    # A group counts its rollouts from 0. The batch counts them over all groups, so add the group's first index.
    sizes_U = np.array([group.group_size for group in groups], np.int64)
    first_rollout_U = np.cumsum(sizes_U) - sizes_U
    rollout_in_group_B = _joined([group.sequence_rollouts for group in groups], np.int64)
    rollout_B = rollout_in_group_B + first_rollout_U[group_B]
    prompt_lengths_U = np.array([group.prompt_ids.size for group in groups], dtype=np.int64)
    completion_lengths_B = _joined([group.completion_lengths for group in groups], np.int64)
    T = max(int(completion_lengths_B.max(initial=0)), 1)
    inside_BT = np.arange(T) < completion_lengths_B[:, None]  # False for padding

    def in_rows(arrays_U: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> Tensor:
        """Returns one (B, T) tensor of values that each group has in one array, sequence after sequence."""
        values_BT = np.zeros(inside_BT.shape, dtype)
        values_BT[inside_BT] = _joined(arrays_U, dtype)
        return torch.from_numpy(values_BT).to(device)

    mask_BT = in_rows([group.trained_mask for group in groups], np.bool_)
    if mask_truncated:
        is_whole_J: list[bool] = []  # False for rollouts that the length limit cut off
        for group in groups:
            reasons = group.finish_reasons or [""] * group.group_size  # without reasons, no rollout counts as cut off
            is_whole_J += [reason != "length" for reason in reasons]
        mask_BT &= torch.tensor(is_whole_J, device=device)[rollout_B, None]  # (B, 1): one value for a whole row
    advantages_U = advantages or [group.advantages for group in groups]
    advantages_J = _joined(advantages_U, np.float32)
    token_advantages_BT = None
    if any(group.token_advantages is not None for group in groups):
        token_advantages_U = []
        for group, advantages_G in zip(groups, advantages_U, strict=True):
            token_advantages = group.token_advantages
            if token_advantages is None:  # each token has the advantage of its rollout
                token_advantages = np.repeat(advantages_G[group.sequence_rollouts], group.completion_lengths)
            token_advantages_U.append(token_advantages)
        token_advantages_BT = in_rows(token_advantages_U, np.float32)
    prompt_ids_UP = np.zeros((len(groups), int(prompt_lengths_U.max(initial=1))), np.int64)
    for index, group in enumerate(groups):
        prompt_ids_UP[index, : group.prompt_ids.size] = group.prompt_ids
    # The number of tokens to train on in each rollout: the sum over its rows.
    num_tokens_J = np.bincount(rollout_B, weights=mask_BT.sum(dim=1).cpu(), minlength=len(advantages_J))
    assert num_tokens_J.size == advantages_J.size, (num_tokens_J.size, advantages_J.size)
    temperature_U = np.array([_temperature(group) for group in groups], np.float32)
    teacher_logprobs_BT = None
    if teacher is not None:
        teacher_logprobs_BT = in_rows([group.extras[teacher.column] for group in groups], np.float32)

    batch = Batch(
        prompt_ids_UP=_on(device, prompt_ids_UP),
        completion_ids_BT=in_rows([group.completion_ids for group in groups], np.int64),
        mask_BT=mask_BT,
        rollout_logprobs_BT=in_rows([group.rollout_logprobs for group in groups], np.float32),
        advantages_B=_on(device, advantages_J[rollout_B]),
        token_advantages_BT=token_advantages_BT,
        temperature_B=_on(device, temperature_U[group_B]),
        rollout_tokens_B=_on(device, num_tokens_J.astype(np.int64)[rollout_B]),
        prompt_lengths_U=prompt_lengths_U,
        completion_lengths_B=completion_lengths_B,
        group_B=group_B,
        rollout_B=rollout_B,
        shared_prefixes=SharedPrefixes.of(_model_inputs(groups)),
        teacher_logprobs_BT=teacher_logprobs_BT,
        teacher_weight=teacher.weight if teacher is not None else 0.0,
        sampling_masks=SamplingMasks.of(groups, T),
    )
    batch.check()
    return batch


def _check_trainable(index: int, group: RolloutGroup, teacher: Teacher | None) -> None:
    """Raises ValueError if this group cannot be in a batch. `index`: the position of the group, for the error."""
    if not group.prompt_lengths.all():
        raise ValueError(f"group {index} (prompt_id {group.prompt_id!r}) has an empty prompt; add a first token")
    if not 0 < _temperature(group) < np.inf:
        raise ValueError(
            f"group {index} (prompt_id {group.prompt_id!r}) was sampled at temperature {_temperature(group)}; "
            f"the policy gradient needs samples at a temperature above 0"
        )
    if teacher is not None:
        reason = why_no_teacher(group, teacher.column)
        if reason:
            raise ValueError(f"group {index} (prompt_id {group.prompt_id!r}): {reason}")


def _model_inputs(groups: Sequence[RolloutGroup]) -> list[npt.NDArray[Any]]:
    """Returns the tokens that the model reads for each sequence: the prompt, and the completion without its last token.

    The last token is left out because it predicts nothing.
    """
    inputs = []
    for group in groups:
        for completion in group.completions():
            inputs.append(np.append(group.prompt_ids, completion[:-1]))
    return inputs


def why_no_teacher(group: RolloutGroup, column: str) -> str:
    """Returns the reason why the policy cannot be distilled from this column of the group; "" if it can be.

    Tokens that are not trained on may have any value, such as NaN.
    """
    values = group.extras.get(column)
    axis = group.axes.get(column)
    if values is None:
        return f"it has no column {column!r} of a teacher: let its table require it (requires = [{column!r}])"
    if axis != "token" or values.shape != (group.num_tokens,):
        return (
            f"its column {column!r} has the shape {values.shape} and the axis {axis!r}: a teacher writes one "
            f"log-probability for each of the {group.num_tokens} tokens of completion_ids, with the axis 'token'"
        )
    values_T = values.astype(np.float32)
    # A comparison with NaN is False, so `~(... <= MAX_VALUE)` is True for NaN.
    wrong_T = group.trained_mask & ~(np.abs(values_T) <= MAX_VALUE)
    # A log-probability is at most 0. MAX_LOGPROB is a little above 0 because of rounding.
    wrong_T |= group.trained_mask & (values_T > MAX_LOGPROB)
    if wrong_T.any():
        token = int(wrong_T.argmax())
        return f"its column {column!r} holds {values_T[token]:g} at token {token}, which must be finite and not above 0"
    return ""


def micro_batches(batch: Batch, max_tokens: int, packed: bool = True) -> Iterator[tuple[Ints, Batch]]:
    """Splits a batch. Yields (indices of rows, batch of these rows), with at most `max_tokens` tokens of model input.

    Every row is in one micro-batch. A row with more than `max_tokens` tokens is a micro-batch by itself. With `packed`,
    rows that begin alike are put together as far as they fit, because they share one copy of their prefix. Without
    `packed`, rows of similar length are put together, longest first, and padding counts as tokens.
    """
    parts = _packed_parts(batch, max_tokens) if packed else _padded_parts(batch, max_tokens)
    num_rows = 0
    for part in parts:
        rows = np.sort(np.array(part, np.int64))
        num_rows += rows.size
        yield rows, batch.select(rows)
    assert num_rows == batch.num_rows, "each row is in one micro-batch"


def _packed_parts(batch: Batch, max_tokens: int) -> Iterator[list[int]]:
    """Yields the rows of each micro-batch. Goes through the rows in the order of `SharedPrefixes.order_B`.

    In this order, a row may share its first tokens with the row before it. A micro-batch counts shared tokens once.
    """
    lengths_B = batch.input_lengths_B
    shared_prefixes = batch.shared_prefixes
    rows: list[int] = []
    tokens = 0
    for row, shared in zip(shared_prefixes.order_B.tolist(), shared_prefixes.shared_B.tolist(), strict=True):
        length = int(lengths_B[row])
        if rows and tokens + length - shared > max_tokens:
            yield rows
            rows = []
        if rows:
            tokens += length - shared
        else:  # the first row of a micro-batch shares no tokens, because the row before it is in another one
            tokens = length
        rows.append(row)
    if rows:
        yield rows


def _padded_parts(batch: Batch, max_tokens: int) -> Iterator[list[int]]:
    """Yields the rows of each micro-batch, longest first. All rows of a micro-batch are padded to the length of its
    first row."""
    lengths_B = batch.completion_lengths_B + batch.prompt_lengths_U[batch.group_B]
    rows: list[int] = []
    # `rows[0]` is the longest row of its micro-batch, so its length is the padded length of all rows there.
    for row in np.argsort(-lengths_B, kind="stable").tolist():
        # The micro-batch would have `len(rows) + 1` rows with this row.
        if rows and (len(rows) + 1) * int(lengths_B[rows[0]]) > max_tokens:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def packed_input(batch: Batch) -> ModelInput:
    """Returns all sequences in one row that has each shared prefix once.

    The last token of each sequence is left out, because it predicts nothing.
    """
    completions = batch.completion_ids_BT.cpu().numpy()
    prompts = batch.prompt_ids_UP.cpu().numpy()
    lengths_B = batch.input_lengths_B
    shared_prefixes = batch.shared_prefixes
    token_parts: list[npt.NDArray[np.int64]] = []
    position_parts: list[npt.NDArray[np.int64]] = []
    predicts_BT = np.zeros(completions.shape, np.int64)
    # For each token of the current sequence, its index in the packed row. The tokens that the sequence shares with the
    # sequence before it keep their indices.
    indices_S = np.zeros(int(lengths_B.max(initial=0)), np.int64)
    end = 0  # the number of tokens in the packed row so far
    # `shared`: how many of the sequence's first tokens are in the packed row already, from the sequence before it.
    for row, shared in zip(shared_prefixes.order_B.tolist(), shared_prefixes.shared_B.tolist(), strict=True):
        group = batch.group_B[row]
        input_length = int(lengths_B[row])  # the number of tokens that the model reads
        completion_length = int(batch.completion_lengths_B[row])  # this number includes the last token
        prompt_length = int(batch.prompt_lengths_U[group])  # the number of tokens of the prompt that the group shares
        prompt = prompts[group, :prompt_length]
        ids = np.concatenate((prompt, completions[row, : input_length - prompt_length]))
        token_parts.append(ids[shared:])
        position_parts.append(np.arange(shared, input_length))
        num_new = input_length - shared
        indices_S[shared:input_length] = np.arange(end, end + num_new)
        end += num_new
        # Completion token t is predicted by the token before it, at position prompt_length - 1 + t of the sequence.
        # Without a shared prompt, nothing predicts token 0. It is a token of a context, which the mask leaves out.
        first = 0 if prompt_length else 1
        predicting = slice(prompt_length - 1 + first, prompt_length - 1 + completion_length)
        predicts_BT[row, first:completion_length] = indices_S[predicting]

    def row_of(parts: list[npt.NDArray[np.int64]]) -> Tensor:
        """Joins the parts to one row: (1, S)."""
        return torch.from_numpy(np.concatenate(parts))[None].to(batch.device)

    layout = shared_prefixes.layout(lengths_B)
    assert sum(run.length for run in layout) == end, "attention and embeddings see rows of different lengths"
    return ModelInput(
        input_ids_RS=row_of(token_parts),
        position_ids_RS=row_of(position_parts),
        attention_mask_RS=None,
        layout=layout,
        predicts_N=torch.from_numpy(predicts_BT).to(batch.device)[batch.mask_BT],
    )


def padded_input(batch: Batch) -> ModelInput:
    """Returns one row for each sequence: its own copy of the prompt, then the completion, then padding.

    The padding side of the tokenizer does not matter, because the tokens are at positions 0, 1, 2, … and a causal model
    never attends to the right.
    """
    prompt_lengths_B = batch.prompt_lengths_U[batch.group_B]
    lengths_B = prompt_lengths_B + batch.completion_lengths_B
    assert lengths_B.shape == (batch.num_rows,), lengths_B.shape
    R = batch.num_rows
    S = int(lengths_B.max(initial=1))
    completions = batch.completion_ids_BT.cpu().numpy()
    prompts = batch.prompt_ids_UP.cpu().numpy()
    input_ids_RS = np.zeros((R, S), np.int64)
    for row, (group, prompt_length, length) in enumerate(zip(batch.group_B, prompt_lengths_B, lengths_B, strict=True)):
        input_ids_RS[row, :prompt_length] = prompts[group, :prompt_length]
        input_ids_RS[row, prompt_length:length] = completions[row, : length - prompt_length]
    columns_S = np.arange(S)
    # `predicts_BT[b, t]` is the index into the flattened `input_ids_RS` of the position that predicts completion token
    # t of row b. For token 0 this is the last position of the prompt, and for token t it is t positions later. An entry
    # means nothing if token t is padding, or if no prompt comes before token 0. `mask_BT` drops these entries below.
    prompt_ends_B = np.arange(R) * S + prompt_lengths_B - 1
    predicts_BT = torch.from_numpy(prompt_ends_B[:, None] + np.arange(batch.mask_BT.shape[1]))

    return ModelInput(
        input_ids_RS=_on(batch.device, input_ids_RS),
        position_ids_RS=_on(batch.device, np.broadcast_to(columns_S, (R, S)).copy()),
        attention_mask_RS=_on(batch.device, (columns_S < lengths_B[:, None]).astype(np.int64)),
        layout=None,
        predicts_N=predicts_BT.to(batch.device)[batch.mask_BT],
    )


def bare_group(prompt_ids: npt.ArrayLike, *completions: npt.ArrayLike, **fields: Any) -> RolloutGroup:
    """Returns a group of these tokens. Its rewards, advantages and log-probabilities are 0."""
    zeros_G = np.zeros(len(completions), np.float32)
    return group_from_completions(
        prompt_ids=prompt_ids,
        completions=completions,
        logprobs=[np.zeros(np.size(completion)) for completion in completions],
        rewards=zeros_G,
        advantages=zeros_G,
        **fields,
    )


def _on(device: torch.device | str, array: npt.NDArray[Any]) -> Tensor:
    """Returns the array as a tensor on the device."""
    return torch.from_numpy(array).to(device)


def _temperature(group: RolloutGroup) -> float:
    return float(group.sampling.get("temperature", 1.0))


@dataclass(frozen=True)
class PaddedBatch:
    """B sequences, each a row with its own copy of the prompt, for trainers that do not use GRPOTrainer.

        prompt_ids_BP        . p p p     padded on the left      P: longest prompt
        completion_ids_BT    c c c .     padded on the right     T: longest completion, at least 1
        input_ids_BS         . p p p c c c .                     S = P + T

    Padding is 0 in every tensor. The logits at position P - 1 + t predict completion token t: `logits[:, P - 1 : -1]`
    lines up with every (B, T) tensor.

    If a completion begins with context tokens (`RolloutGroup.context_lengths`), these tokens are not in
    `completion_ids_BT` here but at the end of the completion's row of `prompt_ids_BP`.

    A rollout of several sequences has several rows, but losses and corrections take one row for each rollout. If a loss
    or a correction counts rollouts, or takes a mean or a ratio over a rollout, apply `rollouts.join` to every tensor
    first. If both treat each token by itself (dapo with a correction of tokens), the result is the same without
    `rollouts.join`.
    """

    prompt_ids_BP: Tensor
    """int64"""
    prompt_mask_BP: Tensor
    """bool, True for prompt tokens."""
    completion_ids_BT: Tensor
    """int64"""
    completion_mask_BT: Tensor
    """bool, True for completion tokens, including those that the policy did not write."""
    loss_mask_BT: Tensor
    """bool, True for tokens to train on: the response mask of `correct` and `policy_loss`."""
    rollout_logprobs_BT: Tensor
    """float32, the sampler's log-probabilities in nats; NaN where unknown."""
    rewards_B: Tensor
    """float32, the reward of the rollout that the row belongs to."""
    advantages_B: Tensor
    """float32, the advantage of the rollout that the row belongs to. Give `advantages` to the loss, and not these."""
    group_B: Tensor
    """int64, index of the group that the row belongs to. The rows of a group are adjacent."""
    temperature_B: Tensor
    """float32, temperature of the sampling, above 0. Divide the logits of a row by its temperature."""
    rollout_B: Tensor | None = None
    """int64, index of the rollout that the row belongs to. The rows of a rollout are adjacent. None: each row is a
    rollout."""
    token_advantages_BT: Tensor | None = None
    """float32, used instead of `advantages_B`; None: no group has token advantages."""

    @property
    def advantages(self) -> Tensor:
        """The advantages for the loss: (B, T) token advantages if a group of the batch has any, otherwise (B,)."""
        if self.token_advantages_BT is not None:
            return self.token_advantages_BT
        return self.advantages_B

    @property
    def rollouts(self) -> Rollouts:
        """The tokens to train on with one row for each rollout."""
        rollout_B = np.arange(len(self.group_B))
        if self.rollout_B is not None:
            rollout_B = self.rollout_B.cpu().numpy()
        return Rollouts(self.loss_mask_BT.bool(), rollout_B)

    @property
    def input_ids_BS(self) -> Tensor:
        """(B, P + T) int64: prompts and completions for the model."""
        return torch.cat([self.prompt_ids_BP, self.completion_ids_BT], dim=1)

    @property
    def attention_mask_BS(self) -> Tensor:
        """(B, P + T) int64: 1 for tokens, 0 for padding."""
        return torch.cat([self.prompt_mask_BP, self.completion_mask_BT], dim=1).long()

    @property
    def position_ids_BS(self) -> Tensor:
        """(B, P + T) int64: positions that count tokens and skip the padding on the left."""
        return (self.attention_mask_BS.cumsum(dim=1) - 1).clamp(min=0)


def to_padded(groups: Sequence[RolloutGroup], device: torch.device | str = "cpu") -> PaddedBatch:
    """Makes a padded batch with a row for each sequence, in the order of the groups.

    Group sizes and lengths may differ. The tensors are copies, because the arrays of a decoded group are read-only.

    Raises ValueError for an empty prompt, and for a temperature that is not above 0.
    """
    batch = to_batch(groups, "cpu")
    # The number of tokens of each row: in the prompt with the context of the row, and after this context.
    prompt_lengths_B = _joined([group.prompt_lengths for group in groups], np.int64)
    sampled_lengths_B = _joined([group.sampled_lengths for group in groups], np.int64)
    P = int(prompt_lengths_B.max(initial=1))
    T = max(int(sampled_lengths_B.max(initial=1)), 1)
    prompt_mask_BP = torch.from_numpy(np.arange(P) >= P - prompt_lengths_B[:, None])
    prompt_ids_BP = torch.zeros(prompt_mask_BP.shape, dtype=torch.int64)
    prompts_B: list[npt.NDArray[Any]] = []  # the prompt of each row, with the row's context
    for group in groups:
        prompts_B += group.prompts()
    prompt_ids_BP[prompt_mask_BP] = torch.from_numpy(_joined(prompts_B, np.int64))
    completion_mask_BT = torch.from_numpy(np.arange(T) < sampled_lengths_B[:, None])
    # The rows of `batch` begin with their contexts. Sampled token t of a row is t columns after the row's context.
    context_lengths_B = batch.completion_lengths_B - sampled_lengths_B
    columns_BT = torch.from_numpy(context_lengths_B[:, None] + np.arange(T))

    def sampled(values_BT: Tensor) -> Tensor:
        """Moves the values of the sampled tokens to the first columns. Leaves out the values of contexts."""
        last_column = values_BT.shape[1] - 1
        # Columns after the last one are padding, so it does not matter which value `gather` reads for them.
        sampled_BT = values_BT.gather(1, columns_BT.clamp(max=last_column))
        return sampled_BT.masked_fill(~completion_mask_BT, 0)

    rewards_J = _joined([group.rewards for group in groups], np.float32)
    token_advantages_BT = None
    if batch.token_advantages_BT is not None:
        token_advantages_BT = sampled(batch.token_advantages_BT)
    padded = PaddedBatch(
        prompt_ids_BP=prompt_ids_BP,
        prompt_mask_BP=prompt_mask_BP,
        completion_ids_BT=sampled(batch.completion_ids_BT),
        completion_mask_BT=completion_mask_BT,
        loss_mask_BT=sampled(batch.mask_BT),
        rollout_logprobs_BT=sampled(batch.rollout_logprobs_BT),
        rewards_B=torch.from_numpy(rewards_J[batch.rollout_B]),
        advantages_B=batch.advantages_B,
        group_B=torch.from_numpy(batch.group_B),
        temperature_B=batch.temperature_B,
        rollout_B=torch.from_numpy(batch.rollout_B),
        token_advantages_BT=token_advantages_BT,
    )
    moved = {name: tensor.to(device) for name, tensor in vars(padded).items() if tensor is not None}
    return PaddedBatch(**moved)


def from_padded(padded: PaddedBatch, **fields: Any) -> list[RolloutGroup]:
    """Returns the groups of a padded batch, for example one that was made from the tensors of another trainer.

    `fields` are further fields of RolloutGroup that all groups share, such as policy_version. The prompts may be padded
    on either side. If the prompts of a group differ, their common beginning becomes the prompt of the group. Token
    advantages that are equal to the advantages of their rollouts are left out.

    Raises ValueError if the shapes differ, if the rows of a group or of a rollout are not adjacent, if the rows of a
    group differ in temperature, if the rows of a rollout differ in reward or advantage, or if a mask has a gap between
    tokens.
    """
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in vars(padded).items() if tensor is not None}
    arrays.setdefault("rollout_B", np.arange(len(arrays["group_B"])))  # without this tensor, each row is a rollout
    _check(arrays)
    completion_mask_BT = arrays["completion_mask_BT"]
    prompts_B = _rows(arrays["prompt_ids_BP"], arrays["prompt_mask_BP"])
    completions_B = _rows(arrays["completion_ids_BT"], completion_mask_BT)
    logprobs_B = _rows(arrays["rollout_logprobs_BT"], completion_mask_BT)
    masks_B = _rows(arrays["loss_mask_BT"], completion_mask_BT)
    groups = []
    for group_index in dict.fromkeys(arrays["group_B"].tolist()):
        rows = np.flatnonzero(arrays["group_B"] == group_index)
        first = int(rows[0])
        end = int(rows[-1]) + 1
        temperatures = set(arrays["temperature_B"][rows].tolist())
        # If other rows lie between the first row and the last row of the group, the span has more rows than the group.
        if end - first != rows.size or len(temperatures) > 1:
            raise ValueError(f"the rows of group {group_index} must follow one another and have one temperature")
        # For each rollout of the group: its first row, and its number of rows.
        first_G = first + _first_rows(arrays["rollout_B"][rows])
        num_rows_G = np.diff(first_G, append=end)
        has_one_row_each = bool((num_rows_G == 1).all())
        loss_masks: list[npt.NDArray[Any]] | None = masks_B[first:end]
        if all(mask.all() for mask in masks_B[first:end]):
            loss_masks = None  # a group without masks trains on all its sampled tokens
        sampling = {"temperature": temperatures.pop(), **fields.get("sampling", {})}
        group = group_from_rows(
            prompts=prompts_B[first:end],
            completions=completions_B[first:end],
            logprobs=logprobs_B[first:end],
            rewards=arrays["rewards_B"][first_G],
            advantages=arrays["advantages_B"][first_G],
            loss_masks=loss_masks,
            sequence_counts=None if has_one_row_each else num_rows_G,
            **(fields | {"sampling": sampling}),
        )
        group_arrays = {name: array[rows] for name, array in arrays.items()}
        groups.append(_with_token_advantages(group, group_arrays))
    return groups


def _with_token_advantages(group: RolloutGroup, arrays: Mapping[str, npt.NDArray[Any]]) -> RolloutGroup:
    """Returns the group with the token advantages of its rows.

    Returns the group itself if the padded batch has no token advantages, or if each token has the advantage of its
    rollout. `arrays`: the rows of this group in the tensors of the padded batch, by the name of the tensor.
    """
    token_advantages_BT = arrays.get("token_advantages_BT")
    if token_advantages_BT is None:
        return group
    mask_BT = arrays["completion_mask_BT"]
    same_BT = token_advantages_BT == arrays["advantages_B"][:, None]
    if same_BT[mask_BT].all():
        return group
    advantages_T = np.zeros(group.num_tokens, np.float32)
    for span, row_advantages in zip(group.sampled_spans(), _rows(token_advantages_BT, mask_BT), strict=True):
        advantages_T[span] = row_advantages
    return replace(group, token_advantages=advantages_T)


def _check(arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Checks the arrays of a padded batch, by name, and converts its masks to bool.

    Raises ValueError if the shapes disagree, if the prompt mask or the completion mask has a gap in a row, if the rows
    of a rollout are not adjacent, or if they differ in group, reward or advantage.
    """
    sizes: dict[str, int] = {}  # the letter of an axis -> its size in the first array with this axis
    for name, array in arrays.items():
        # The letters after the last "_" of a name are the axes.
        for axis, size in zip(name.rpartition("_")[2], array.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise ValueError(f"{name} has shape {array.shape}, and {axis} is {sizes[axis]} in the tensors before")
    for name in ("prompt_mask_BP", "completion_mask_BT"):
        mask = arrays[name].astype(np.bool_)
        arrays[name] = mask
        # The number of runs of True in each row: a run starts where the mask changes from 0 to 1.
        num_runs_B = (np.diff(mask.astype(np.int8), axis=1, prepend=0) == 1).sum(axis=1)
        if (num_runs_B > 1).any():
            raise ValueError(
                f"{name} has a gap in row {int(num_runs_B.argmax())}: padding belongs to the ends. Tokens that the "
                f"policy did not write are False in loss_mask_BT alone"
            )
    arrays["loss_mask_BT"] = arrays["loss_mask_BT"].astype(np.bool_)
    rollout_B = arrays["rollout_B"]
    first_J = _first_rows(rollout_B)
    # A rollout whose rows are not adjacent begins at several rows.
    if np.unique(rollout_B[first_J]).size < first_J.size:
        raise ValueError("rollout_B: the rows of a rollout must follow one another")
    # Compare each row from row 1 on with the row before it.
    same_rollout = rollout_B[1:] == rollout_B[:-1]
    for name in ("group_B", "rewards_B", "advantages_B"):
        values_B = arrays[name]
        disagrees = same_rollout & (values_B[1:] != values_B[:-1])
        if disagrees.any():
            raise ValueError(
                f"{name} has two values for the rollout {rollout_B[1:][disagrees][0]} of rollout_B: give all rows of a "
                f"rollout the same"
            )


def _first_rows(rollout_B: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Returns the first row of each of the J rollouts: each row whose index differs from that of the row before."""
    begins_B = np.ones(rollout_B.size, np.bool_)
    begins_B[1:] = rollout_B[1:] != rollout_B[:-1]
    return np.flatnonzero(begins_B)


def _rows(values: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> list[npt.NDArray[Any]]:
    """Returns for each row the values at which the mask is True."""
    return [row_values[row_mask] for row_values, row_mask in zip(values, mask, strict=True)]


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Concatenates the arrays. The result is empty if there are none."""
    # The empty first array is there because `np.concatenate` needs at least one array.
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype)
