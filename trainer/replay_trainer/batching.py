"""Groups to tensors, and a batch to micro-batches that fit a budget of tokens.

    prompt_ids_UP          q q q .         one row per group         P: longest prompt
    completion_ids_BT      c c c c         one row per sequence      T: longest sequence
                           c c . .         every tensor named _BT lines up with the tokens of the sequences

A batch is padded on the right for the arithmetic of the loss. The model does not see this padding: it gets packed rows
(see logprobs.py), or rows of similar length if it cannot take packed ones. A packed row has each shared prefix of its
sequences once (packing/shared_prefixes.py): the prompt of a group, and whatever else they share.

The model reads sequences, and the loss counts rollouts. A rollout is one sequence, or several with contexts of their
own (`RolloutGroup.sequence_counts`). So a batch has a row for each sequence, and `Rollouts` joins the rows of a rollout
before losses and correction see them: to them, a rollout in pieces is the same as one in a single sequence.
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
    """The tokens to train on, with one row for each rollout: what losses and correction take.

        mask_BT     . . 1 1     first sequence of a rollout, with a context     mask_BT here     1 1 1
                    . 1 . .     its second sequence                                              1 . .
                    1 . 1 .     another rollout                                                  1 1 .

    Where each row is a rollout already, rows stay as they are: nothing is computed or copied.
    """

    def __init__(self, mask_BT: Tensor, rollout_B: Ints) -> None:
        """mask_BT: (B, T) bool. rollout_B: the rollout of each row, ascending."""
        self._source_BT = mask_BT
        self.first_J = np.flatnonzero(np.diff(rollout_B, prepend=-1))
        """The first row of each of the J rollouts."""
        self.joins = self.first_J.size < rollout_B.size
        """True if a rollout has several rows."""
        self.mask_JT = mask_BT
        """(J, T) bool, the tokens to train on."""
        if self.joins:
            rows_J = np.diff(self.first_J, append=rollout_B.size)
            rows_B = torch.from_numpy(np.repeat(np.arange(self.first_J.size), rows_J))
            tokens_J = mask_BT.new_zeros(self.first_J.size, dtype=torch.int64)
            tokens_J.index_add_(0, rows_B.to(mask_BT.device), mask_BT.sum(dim=1))
            columns_T = torch.arange(max(int(tokens_J.max()), 1), device=mask_BT.device)
            self.mask_JT = columns_T < tokens_J[:, None]

    def join(self, values: Tensor) -> Tensor:
        """(B, T) values as (J, T), 0 outside the mask; (B,) values of the rollouts as (J,). Gradients flow through."""
        if not self.joins:
            return values
        if values.ndim == 1:
            return values[torch.from_numpy(self.first_J).to(values.device)]
        return values.new_zeros(self.mask_JT.shape).masked_scatter(self.mask_JT, values[self._source_BT])


@dataclass(frozen=True)
class Batch:
    """Sequences as rows, prompts by group. Padding is 0 in every tensor; `mask_BT` marks the tokens to train on."""

    prompt_ids_UP: Tensor
    """int64"""
    completion_ids_BT: Tensor
    """int64"""
    mask_BT: Tensor
    """bool, tokens to train on: the group's `trained_mask`."""
    rollout_logprobs_BT: Tensor
    """float32, the sampler's log-probabilities in nats; NaN where unknown."""
    advantages_B: Tensor
    """float32, of the rollout that the row belongs to."""
    token_advantages_BT: Tensor | None
    """float32, in the place of `advantages_B`; None: no group of the batch has any."""
    temperature_B: Tensor
    """float32, temperature of the sampling, > 0."""
    rollout_tokens_B: Tensor
    """int64, tokens to train on of the whole rollout that the row belongs to. A part of a batch may lack some of its
    rows."""
    prompt_lengths_U: Ints
    """At least 1, unless all rows of the group have contexts. Lengths and indices are NumPy arrays on the host, which
    cuts the batch by them."""
    completion_lengths_B: Ints
    """With the context of the row, which the mask leaves out; may be 0."""
    group_B: Ints
    """Index of the group that the row belongs to, ascending."""
    rollout_B: Ints
    """Index of the rollout that the row belongs to, over all groups of the batch, ascending."""
    shared_prefixes: SharedPrefixes
    """The order in which rows that begin alike follow one another, as the model reads them: their prompt, and all of
    their completion but its last token."""
    teacher_logprobs_BT: Tensor | None = None
    """float32, log-probabilities of a teacher in nats, finite inside the mask. None: the batch distils from none."""
    teacher_weight: float = 0.0
    """The weight of the teacher in the advantages."""
    sampling_masks: SamplingMasks | None = None
    """The tokens that top_p, top_k or min_p kept for each token; None: all tokens of the batch were drawn from all."""

    @property
    def num_rows(self) -> int:
        """B, the number of sequences."""
        return self.completion_ids_BT.shape[0]

    @property
    def input_lengths_B(self) -> Ints:
        """Tokens of each row in a packed row: the last token of a completion predicts nothing."""
        lengths_B: Ints = self.prompt_lengths_U[self.group_B] + np.maximum(self.completion_lengths_B - 1, 0)
        return lengths_B

    @property
    def advantages(self) -> Tensor:
        """(B,) or (B, T), the advantages of the groups."""
        return self.advantages_B if self.token_advantages_BT is None else self.token_advantages_BT

    def advantages_under(self, old_BT: Tensor) -> Tensor:
        """(B,) or (B, T), the advantages for the loss, if the policy had the log-probabilities `old_BT` before the
        update."""
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
        """The batch without the rollouts of `groups` whose advantage is not above 0.

        All sequences of a rollout go together. The other groups keep all rollouts. The denominator of the loss counts
        the tokens that are left.
        """
        in_groups_B = np.isin(self.group_B, np.array(groups, np.int64))
        wrong_B = in_groups_B & ~(self.advantages_B.cpu().numpy() > 0)
        if not wrong_B.any():
            return self
        return self.select(np.flatnonzero(~wrong_B))

    def select(self, rows: Ints) -> Batch:
        """These rows, without padding that none of them needs. The prompts are unchanged."""
        longest = max(int(self.completion_lengths_B[rows].max(initial=1)), 1)
        index = torch.from_numpy(rows).to(self.device)
        chosen: dict[str, Any] = {}
        for name, value in vars(self).items():
            if value is None or name == "rollouts":
                continue
            # The last letters of a name are the axes.
            if name.endswith("_BT"):
                chosen[name] = value[index, :longest]
            elif name.endswith("_B"):
                chosen[name] = value[index if isinstance(value, Tensor) else rows]
        chosen["shared_prefixes"] = self.shared_prefixes.select(rows)
        if self.sampling_masks is not None:
            chosen["sampling_masks"] = self.sampling_masks.select(rows, longest)
        part = replace(self, **chosen)
        part.check()
        return part

    def check(self) -> None:
        """Asserts axes, types and order of the rows. It looks at nothing on a device, so it waits for none."""
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
    """Rows of tokens for a model, and the positions that predict the completions. R rows of S tokens."""

    input_ids_RS: Tensor
    """int64; R = 1 where packed."""
    position_ids_RS: Tensor
    """int64"""
    attention_mask_RS: Tensor | None
    """int64, 1 for tokens, 0 for padding; None without padding."""
    layout: Layout | None
    """The tokens that each token of a packed row attends to; None: each row is one sequence."""
    predicts_N: Tensor
    """int64: positions in the flattened (R S) that predict the N tokens of mask_BT, row after row."""


def to_batch(
    groups: Sequence[RolloutGroup],
    device: torch.device | str = "cpu",
    mask_truncated: bool = False,
    advantages: Sequence[npt.NDArray[np.float32]] | None = None,
    teacher: Teacher | None = None,
    oldest_version: int | None = None,
) -> Batch:
    """All sequences of all groups, in their order, one row each. Group sizes and lengths may differ.

    No groups make a batch without rows; T is at least 1. The temperature is `sampling["temperature"]` of the group,
    default 1. `mask_truncated` excludes rollouts whose finish reason is "length" from the mask. `advantages`: (G,) of
    each group, which replace its own; the `token_advantages` of a group come before both. `teacher`: the teacher to
    distil from; None: none. `oldest_version` excludes tokens of earlier policy versions from the mask; None: no
    tokens.

    Raises ValueError for an empty prompt (nothing would predict the first token), for a temperature not above 0, and
    for a column of the teacher that nobody can distil from.
    """
    for index, group in enumerate(groups):
        _check_trainable(index, group, teacher)
    groups = [without_stale_tokens(group, oldest_version) for group in groups]
    rollouts_U = [group.sequence_rollouts for group in groups]
    sizes_U = np.array([group.group_size for group in groups], np.int64)
    group_B = np.repeat(np.arange(len(groups)), [len(rollouts_S) for rollouts_S in rollouts_U]).astype(np.int64)
    rollout_B = _joined(rollouts_U, np.int64) + (np.cumsum(sizes_U) - sizes_U)[group_B]
    prompt_lengths_U = np.array([group.prompt_ids.size for group in groups], dtype=np.int64)
    completion_lengths_B = _joined([group.completion_lengths for group in groups], np.int64)
    shape = (len(group_B), max(int(completion_lengths_B.max(initial=0)), 1))
    inside_BT = np.arange(shape[1]) < completion_lengths_B[:, None]

    def in_rows(arrays_U: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> Tensor:
        """(T,) of each group as (B, T): a group has its tokens in the order of its rows."""
        values_BT = np.zeros(shape, dtype)
        values_BT[inside_BT] = _joined(arrays_U, dtype)
        return torch.from_numpy(values_BT).to(device)

    mask_BT = in_rows([group.trained_mask for group in groups], np.bool_)
    if mask_truncated:
        # True for each rollout that was not cut off at its length limit.
        whole_J: list[bool] = []
        for group in groups:
            reasons_G = group.finish_reasons or [""] * group.group_size
            whole_J += [reason != "length" for reason in reasons_G]
        mask_BT &= torch.tensor(whole_J, device=device)[rollout_B, None]
    advantages_U = advantages or [group.advantages for group in groups]
    advantages_J = _joined(advantages_U, np.float32)
    token_advantages_BT = None
    if any(group.token_advantages is not None for group in groups):
        tokens_U: list[npt.NDArray[np.float32]] = []
        for group, advantages_G in zip(groups, advantages_U, strict=True):
            if group.token_advantages is not None:
                tokens_U.append(group.token_advantages)
            else:
                advantages_S = advantages_G[group.sequence_rollouts]
                tokens_U.append(np.repeat(advantages_S, group.completion_lengths))
        token_advantages_BT = in_rows(tokens_U, np.float32)
    prompt_ids_UP = np.zeros((len(groups), int(prompt_lengths_U.max(initial=1))), np.int64)
    for index, group in enumerate(groups):
        prompt_ids_UP[index, : group.prompt_ids.size] = group.prompt_ids
    tokens_J = np.bincount(rollout_B, weights=mask_BT.sum(dim=1).cpu(), minlength=len(advantages_J))
    assert tokens_J.size == advantages_J.size, (tokens_J.size, advantages_J.size)
    # The last token of a completion is no input of the model.
    input_ids_B = [np.append(group.prompt_ids, ids[:-1]) for group in groups for ids in group.completions()]
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
        temperature_B=_on(device, np.array([_temperature(groups[g]) for g in group_B], dtype=np.float32)),
        rollout_tokens_B=_on(device, tokens_J.astype(np.int64)[rollout_B]),
        prompt_lengths_U=prompt_lengths_U,
        completion_lengths_B=completion_lengths_B,
        group_B=group_B,
        rollout_B=rollout_B,
        shared_prefixes=SharedPrefixes.of(input_ids_B),
        teacher_logprobs_BT=teacher_logprobs_BT,
        teacher_weight=0.0 if teacher is None else teacher.weight,
        sampling_masks=SamplingMasks.of(groups, shape[1]),
    )
    batch.check()
    return batch


def _check_trainable(index: int, group: RolloutGroup, teacher: Teacher | None) -> None:
    """Raises ValueError if `to_batch` cannot make rows of the group, which stands at `index` of the groups."""
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


def why_no_teacher(group: RolloutGroup, column: str) -> str:
    """The reason why no trainer can distil from this column of the group; empty: it can.

    Tokens outside the mask may be NaN.
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
    # A comparison with NaN is False.
    wrong_T = group.trained_mask & ~(np.abs(values_T) <= MAX_VALUE)
    wrong_T |= group.trained_mask & (values_T > MAX_LOGPROB)
    if wrong_T.any():
        token = int(wrong_T.argmax())
        return f"its column {column!r} holds {values_T[token]:g} at token {token}, which must be finite and not above 0"
    return ""


def micro_batches(batch: Batch, max_tokens: int, packed: bool = True) -> Iterator[tuple[Ints, Batch]]:
    """Yield (indices, rows): every row once, at most `max_tokens` tokens of model input together.

    A row with more tokens than that comes alone. Packed, rows that begin alike come together as far as they fit: they
    share one copy of their prefix. Otherwise rows of similar length come together, longest first; padding counts.
    """
    shared_B = batch.shared_prefixes.shared_B
    if packed:
        lengths_B = batch.input_lengths_B
        order_B = batch.shared_prefixes.order_B
    else:
        lengths_B = batch.completion_lengths_B + batch.prompt_lengths_U[batch.group_B]
        order_B = np.argsort(-lengths_B, kind="stable")
    assert order_B.size == batch.num_rows, "each row is in one micro-batch"
    rows: list[int] = []
    tokens = 0
    for place, row in enumerate(order_B.tolist()):
        length = int(lengths_B[row])
        if packed:
            larger = tokens + length - int(shared_B[place])
        else:
            larger = (len(rows) + 1) * int(lengths_B[rows[0] if rows else row])
        if rows and larger > max_tokens:
            chosen = np.sort(np.array(rows, np.int64))
            yield chosen, batch.select(chosen)
            rows = []
        tokens = larger if rows else length
        rows.append(row)
    if rows:
        chosen = np.sort(np.array(rows, np.int64))
        yield chosen, batch.select(chosen)


def packed_input(batch: Batch) -> ModelInput:
    """All rows in one, each shared prefix once. The last token of a row is left out: it predicts nothing there."""
    completions = batch.completion_ids_BT.cpu().numpy()
    prompts = batch.prompt_ids_UP.cpu().numpy()
    lengths_B = batch.input_lengths_B
    shared_prefixes = batch.shared_prefixes
    tokens: list[npt.NDArray[np.int64]] = []
    positions: list[npt.NDArray[np.int64]] = []
    predicts_BT = np.zeros(completions.shape, np.int64)
    # For each token of the current row, its index in the packed row. A row begins with the tokens that it shares with
    # the row before, so their indices stay.
    places_S = np.zeros(int(lengths_B.max(initial=0)), np.int64)
    end = 0
    for row, shared in zip(shared_prefixes.order_B.tolist(), shared_prefixes.shared_B.tolist(), strict=True):
        group = batch.group_B[row]
        inputs = int(lengths_B[row])
        length = int(batch.completion_lengths_B[row])
        prompt = int(batch.prompt_lengths_U[group])
        ids = np.concatenate((prompts[group, :prompt], completions[row, : inputs - prompt]))
        tokens.append(ids[shared:])
        positions.append(np.arange(shared, inputs))
        places_S[shared:inputs] = np.arange(end, end + inputs - shared)
        end += inputs - shared
        # Nothing predicts the first token of a row without a shared prompt. That token belongs to a context.
        first = 0 if prompt else 1
        predicts_BT[row, first:length] = places_S[prompt - 1 + first : prompt - 1 + length]

    def row_of(parts: list[npt.NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts))[None].to(batch.device)

    layout = shared_prefixes.layout(lengths_B)
    assert sum(run.length for run in layout) == end, "attention and embeddings see rows of different lengths"
    return ModelInput(
        input_ids_RS=row_of(tokens),
        position_ids_RS=row_of(positions),
        attention_mask_RS=None,
        layout=layout,
        predicts_N=torch.from_numpy(predicts_BT).to(batch.device)[batch.mask_BT],
    )


def padded_input(batch: Batch) -> ModelInput:
    """One row for each completion behind its own copy of the prompt, padded on the right.

    Tokens stand at positions 0, 1, 2, …, and a causal model never attends to the right. The padding side of the
    tokenizer therefore does not matter.
    """
    prompts_B = batch.prompt_lengths_U[batch.group_B]
    lengths_B = prompts_B + batch.completion_lengths_B
    assert lengths_B.shape == (batch.num_rows,), lengths_B.shape
    R = batch.num_rows
    S = int(lengths_B.max(initial=1))
    completions = batch.completion_ids_BT.cpu().numpy()
    prompts = batch.prompt_ids_UP.cpu().numpy()
    input_ids_RS = np.zeros((R, S), np.int64)
    for row, (group, prompt, length) in enumerate(zip(batch.group_B, prompts_B, lengths_B, strict=True)):
        input_ids_RS[row, :prompt] = prompts[group, :prompt]
        input_ids_RS[row, prompt:length] = completions[row, : length - prompt]
    columns_S = np.arange(S)
    first_B = np.arange(R) * S + prompts_B - 1
    predicts_BT = torch.from_numpy(first_B[:, None] + np.arange(batch.mask_BT.shape[1]))

    return ModelInput(
        input_ids_RS=_on(batch.device, input_ids_RS),
        position_ids_RS=_on(batch.device, np.broadcast_to(columns_S, (R, S)).copy()),
        attention_mask_RS=_on(batch.device, (columns_S < lengths_B[:, None]).astype(np.int64)),
        layout=None,
        predicts_N=predicts_BT.to(batch.device)[batch.mask_BT],
    )


def bare_group(prompt_ids: npt.ArrayLike, *completions: npt.ArrayLike, **fields: Any) -> RolloutGroup:
    """A group of these tokens; rewards, advantages and log-probabilities are 0."""
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

    The context of a completion (RolloutGroup.context_lengths) is the end of its prompt here.

    A rollout of several sequences has several rows. Losses and corrections take one row for each rollout: those that
    count rollouts, or take a mean or a ratio over one, need `rollouts.join` of every tensor. Those of single tokens
    alone (dapo with a correction of tokens) are the same without it.
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
    """float32, the advantage of the rollout that the row belongs to. The loss takes `advantages`."""
    group_B: Tensor
    """int64, index of the group that the row belongs to. The rows of a group follow one another."""
    temperature_B: Tensor
    """float32, temperature of the sampling, above 0. Divide logits by it."""
    rollout_B: Tensor | None = None
    """int64, index of the rollout that the row belongs to. The rows of a rollout follow one another. None: each row is
    a rollout."""
    token_advantages_BT: Tensor | None = None
    """float32, the advantages of tokens, which replace `advantages_B`; None: no group has any."""

    @property
    def advantages(self) -> Tensor:
        """(B,) or (B, T), the advantages for the loss: the token advantages if a group has some."""
        return self.advantages_B if self.token_advantages_BT is None else self.token_advantages_BT

    @property
    def rollouts(self) -> Rollouts:
        """The tokens to train on with one row for each rollout."""
        rows_B = np.arange(len(self.group_B)) if self.rollout_B is None else self.rollout_B.cpu().numpy()
        return Rollouts(self.loss_mask_BT.bool(), rows_B)

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
    """All sequences of all groups, in their order, one row each. Group sizes and lengths may differ.

    The tensors are copies: the arrays of a decoded group are read-only. Raises ValueError for an empty prompt, and for
    a temperature not above 0.
    """
    batch = to_batch(groups, "cpu")
    prompts_B = _joined([group.prompt_lengths for group in groups], np.int64)
    lengths_B = _joined([group.sampled_lengths for group in groups], np.int64)
    P = int(prompts_B.max(initial=1))
    T = max(int(lengths_B.max(initial=1)), 1)
    prompt_mask_BP = torch.from_numpy(np.arange(P) >= P - prompts_B[:, None])
    prompt_ids_BP = torch.zeros(prompt_mask_BP.shape, dtype=torch.int64)
    prompt_ids = _joined([prompt for group in groups for prompt in group.prompts()], np.int64)
    prompt_ids_BP[prompt_mask_BP] = torch.from_numpy(prompt_ids)
    completion_mask_BT = torch.from_numpy(np.arange(T) < lengths_B[:, None])
    # A context is part of the prompt here.
    columns_BT = torch.from_numpy((batch.completion_lengths_B - lengths_B)[:, None] + np.arange(T))

    def sampled(values_BT: Tensor) -> Tensor:
        last = values_BT.shape[1] - 1
        return values_BT.gather(1, columns_BT.clamp(max=last)).masked_fill(~completion_mask_BT, 0)

    padded = PaddedBatch(
        prompt_ids_BP=prompt_ids_BP,
        prompt_mask_BP=prompt_mask_BP,
        completion_ids_BT=sampled(batch.completion_ids_BT),
        completion_mask_BT=completion_mask_BT,
        loss_mask_BT=sampled(batch.mask_BT),
        rollout_logprobs_BT=sampled(batch.rollout_logprobs_BT),
        rewards_B=torch.from_numpy(_joined([group.rewards for group in groups], np.float32)[batch.rollout_B]),
        advantages_B=batch.advantages_B,
        group_B=torch.from_numpy(batch.group_B),
        temperature_B=batch.temperature_B,
        rollout_B=torch.from_numpy(batch.rollout_B),
        token_advantages_BT=None if batch.token_advantages_BT is None else sampled(batch.token_advantages_BT),
    )
    on_device: dict[str, Any] = {}
    for name, tensor in vars(padded).items():
        on_device[name] = None if tensor is None else tensor.to(device)
    return PaddedBatch(**on_device)


def from_padded(padded: PaddedBatch, **fields: Any) -> list[RolloutGroup]:
    """The groups of a padded batch, for example one that was made from the tensors of another trainer.

    `fields` are further fields of RolloutGroup that all groups share, such as policy_version. The prompts may be padded
    on either side; where those of a group differ, the common beginning is shared. Raises ValueError if the shapes
    differ, the rows of a group or of a rollout do not follow one another, those of a group differ in temperature or
    those of a rollout in reward or advantage, or a mask has a gap between tokens. Token advantages that are those of
    the rollouts are left out.
    """
    host = {name: tensor.detach().cpu().numpy() for name, tensor in vars(padded).items() if tensor is not None}
    host.setdefault("rollout_B", np.arange(len(host["group_B"])))
    _check(host)
    prompts_B = _rows(host["prompt_ids_BP"], host["prompt_mask_BP"])
    completions_B = _rows(host["completion_ids_BT"], host["completion_mask_BT"])
    logprobs_B = _rows(host["rollout_logprobs_BT"], host["completion_mask_BT"])
    masks_B = _rows(host["loss_mask_BT"], host["completion_mask_BT"])
    groups = []
    for index in dict.fromkeys(host["group_B"].tolist()):
        rows = np.flatnonzero(host["group_B"] == index)
        first = int(rows[0])
        end = int(rows[-1]) + 1
        temperatures = set(host["temperature_B"][rows].tolist())
        if end - first != rows.size or len(temperatures) > 1:
            raise ValueError(f"the rows of group {index} must follow one another and have one temperature")
        first_G = first + np.flatnonzero(np.diff(host["rollout_B"][rows], prepend=-1))
        counts_G = np.diff(first_G, append=end)
        sampling = {"temperature": temperatures.pop(), **fields.get("sampling", {})}
        masks_S = masks_B[first:end]
        group = group_from_rows(
            prompts=prompts_B[first:end],
            completions=completions_B[first:end],
            logprobs=logprobs_B[first:end],
            rewards=host["rewards_B"][first_G],
            advantages=host["advantages_B"][first_G],
            loss_masks=None if all(mask.all() for mask in masks_S) else masks_S,
            sequence_counts=None if (counts_G == 1).all() else counts_G,
            **(fields | {"sampling": sampling}),
        )
        groups.append(_with_token_advantages(group, {name: array[rows] for name, array in host.items()}))
    return groups


def _with_token_advantages(group: RolloutGroup, host: Mapping[str, npt.NDArray[Any]]) -> RolloutGroup:
    """The group with the token advantages of its rows, if any of them is not the advantage of its rollout."""
    values_BT = host.get("token_advantages_BT")
    mask_BT = host["completion_mask_BT"]
    if values_BT is None:
        return group
    if (values_BT == host["advantages_B"][:, None])[mask_BT].all():
        return group
    advantages_T = np.zeros(group.num_tokens, np.float32)
    for span, values in zip(group.sampled_spans(), _rows(values_BT, mask_BT), strict=True):
        advantages_T[span] = values
    return replace(group, token_advantages=advantages_T)


def _check(host: dict[str, npt.NDArray[Any]]) -> None:
    """Raises ValueError unless the shapes agree and every mask is one run of tokens in each row."""
    sizes: dict[str, int] = {}
    for name, array in host.items():
        for axis, size in zip(name.rpartition("_")[2], array.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise ValueError(f"{name} has shape {array.shape}, and {axis} is {sizes[axis]} in the tensors before")
    for name in ("prompt_mask_BP", "completion_mask_BT"):
        mask = host[name].astype(np.bool_)
        host[name] = mask
        starts_B = (np.diff(mask.astype(np.int8), axis=1, prepend=0) == 1).sum(axis=1)
        if (starts_B > 1).any():
            raise ValueError(
                f"{name} has a gap in row {int(starts_B.argmax())}: padding belongs to the ends. Tokens that the "
                f"policy did not write are False in loss_mask_BT alone"
            )
    host["loss_mask_BT"] = host["loss_mask_BT"].astype(np.bool_)
    first_J = np.flatnonzero(np.diff(host["rollout_B"], prepend=-1))
    rollout_B = host["rollout_B"]
    if np.unique(rollout_B[first_J]).size < first_J.size:
        raise ValueError("rollout_B: the rows of a rollout must follow one another")
    for name in ("group_B", "rewards_B", "advantages_B"):
        values_B = host[name]
        same_B = (rollout_B[1:] != rollout_B[:-1]) | (values_B[1:] == values_B[:-1])
        if not same_B.all():
            raise ValueError(
                f"{name} has two values for the rollout {rollout_B[1:][~same_B][0]} of rollout_B: give all rows of a "
                f"rollout the same"
            )


def _rows(values: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> list[npt.NDArray[Any]]:
    return [row[kept] for row, kept in zip(values, mask, strict=True)]


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype)
