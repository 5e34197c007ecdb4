"""Groups to tensors, and a batch to micro-batches that fit a budget of tokens.

    prompt_ids_UP          q q q .         one row per group         P: longest prompt
    completion_ids_BT      c c c c         one row per completion    T: longest completion
                           c c . .         every tensor named _BT lines up with the tokens of the completions

A batch is padded on the right for the arithmetic of the loss. The model does not see this padding: it gets packed rows
(see logprobs.py), or rows of similar length if it cannot take packed ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replay_client.completions import group_from_rows
from replay_client.rollout import RolloutGroup

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackedGroup:
    """One group in a packed row."""

    start: int
    """Position of its first prompt token."""
    prompt: int
    """Tokens of the prompt."""
    completions: tuple[int, ...]
    """Tokens of each completion; they follow the prompt one after another."""


Layout = tuple[PackedGroup, ...]


@dataclass(frozen=True)
class Batch:
    """Completions as rows, prompts by group. Padding is 0 in every tensor; `mask_BT` marks the tokens to train on."""

    prompt_ids_UP: Tensor
    """int64"""
    completion_ids_BT: Tensor
    """int64"""
    mask_BT: Tensor
    """bool, tokens to train on: the group's `trained_mask`."""
    rollout_logprobs_BT: Tensor
    """float32, the sampler's log-probabilities in nats; NaN where unknown."""
    advantages_B: Tensor
    """float32"""
    temperature_B: Tensor
    """float32, temperature of the sampling, > 0."""
    prompt_lengths_U: Ints
    """At least 1, unless all rows of the group have contexts. Lengths and groups are NumPy arrays on the host, which
    cuts the batch by them."""
    completion_lengths_B: Ints
    """With the context of the row, which the mask leaves out; may be 0."""
    group_B: Ints
    """Index of the group that the row belongs to, ascending."""

    @property
    def num_rows(self) -> int:
        """B, the number of completions."""
        return self.completion_ids_BT.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.mask_BT.device

    def select(self, rows: Ints) -> Batch:
        """These rows, without padding that none of them needs. The prompts are unchanged."""
        longest = max(int(self.completion_lengths_B[rows].max(initial=1)), 1)
        index = torch.from_numpy(rows).to(self.device)
        return replace(
            self,
            completion_ids_BT=self.completion_ids_BT[index, :longest],
            mask_BT=self.mask_BT[index, :longest],
            rollout_logprobs_BT=self.rollout_logprobs_BT[index, :longest],
            advantages_B=self.advantages_B[index],
            temperature_B=self.temperature_B[index],
            completion_lengths_B=self.completion_lengths_B[rows],
            group_B=self.group_B[rows],
        )


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
    """Which tokens attend to which in a packed row; None: each row is one sequence."""
    predicts_N: Tensor
    """int64: positions in the flattened (R S) that predict the N tokens of mask_BT, row after row."""


def to_batch(groups: Sequence[RolloutGroup], device: torch.device | str = "cpu", mask_truncated: bool = False) -> Batch:
    """All completions of all groups, in their order, one row each. Group sizes and lengths may differ.

    No groups make a batch without rows; T is at least 1. The temperature is `sampling["temperature"]` of the group,
    default 1. `mask_truncated` excludes completions whose finish reason is "length" from the mask.

    Raises ValueError for an empty prompt (nothing would predict the first token), and for a temperature not above 0.
    """
    for index, group in enumerate(groups):
        if not group.prompt_lengths.all():
            raise ValueError(f"group {index} (prompt_id {group.prompt_id!r}) has an empty prompt; add a first token")
        if not 0 < _temperature(group) < np.inf:
            raise ValueError(
                f"group {index} (prompt_id {group.prompt_id!r}) was sampled at temperature {_temperature(group)}; "
                f"the policy gradient needs samples at a temperature above 0"
            )
    group_B = np.repeat(np.arange(len(groups)), [group.group_size for group in groups]).astype(np.int64)
    prompt_lengths_U = np.array([group.prompt_ids.size for group in groups], dtype=np.int64)
    completion_lengths_B = _joined([group.completion_lengths for group in groups], np.int64)
    shape = (len(group_B), max(int(completion_lengths_B.max(initial=0)), 1))

    prompt_ids_UP = np.zeros((len(groups), int(prompt_lengths_U.max(initial=1))), np.int64)
    completion_ids_BT = np.zeros(shape, np.int64)
    mask_BT = np.zeros(shape, np.bool_)
    rollout_logprobs_BT = np.zeros(shape, np.float32)
    row = 0
    for index, group in enumerate(groups):
        prompt_ids_UP[index, : group.prompt_ids.size] = group.prompt_ids
        trained_T = group.trained_mask
        start = 0
        for member, length in enumerate(group.completion_lengths.tolist()):
            tokens = slice(start, start + length)
            completion_ids_BT[row, :length] = group.completion_ids[tokens]
            if not (mask_truncated and group.finish_reasons and group.finish_reasons[member] == "length"):
                mask_BT[row, :length] = trained_T[tokens]
            rollout_logprobs_BT[row, :length] = group.rollout_logprobs[tokens]
            row, start = row + 1, start + length

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Batch(
        prompt_ids_UP=tensor(prompt_ids_UP),
        completion_ids_BT=tensor(completion_ids_BT),
        mask_BT=tensor(mask_BT),
        rollout_logprobs_BT=tensor(rollout_logprobs_BT),
        advantages_B=tensor(_joined([group.advantages for group in groups], np.float32)),
        temperature_B=tensor(np.array([_temperature(groups[g]) for g in group_B], dtype=np.float32)),
        prompt_lengths_U=prompt_lengths_U,
        completion_lengths_B=completion_lengths_B,
        group_B=group_B,
    )


def micro_batches(batch: Batch, max_tokens: int, packed: bool = True) -> Iterator[tuple[Ints, Batch]]:
    """Yield (indices, rows): every row once, at most `max_tokens` tokens of model input together.

    A row with more tokens than that comes alone. Packed, the rows of a group stay together as far as they fit, because
    they share one copy of their prompt. Otherwise rows of similar length come together, longest first; padding counts.
    """
    lengths_B = batch.completion_lengths_B
    prompts_B = batch.prompt_lengths_U[batch.group_B]
    order_B = np.arange(batch.num_rows)
    if not packed:
        order_B = np.argsort(-(lengths_B + prompts_B), kind="stable")
    rows: list[int] = []
    tokens = 0
    for row in order_B.tolist():
        if packed:
            shares_prompt = bool(rows) and batch.group_B[rows[-1]] == batch.group_B[row]
            larger = tokens + _inputs(int(lengths_B[row])) + (0 if shares_prompt else int(prompts_B[row]))
        else:
            larger = (len(rows) + 1) * int((lengths_B + prompts_B)[rows[0] if rows else row])
        if rows and larger > max_tokens:
            yield (chosen := np.array(rows, np.int64)), batch.select(chosen)
            rows, larger = [], _inputs(int(lengths_B[row])) + int(prompts_B[row])
        rows.append(row)
        tokens = larger
    if rows:
        yield (chosen := np.array(rows, np.int64)), batch.select(chosen)


def packed_input(batch: Batch) -> ModelInput:
    """All rows in one, each prompt once. The last token of a completion is left out: it predicts nothing."""
    completions, prompts = batch.completion_ids_BT.cpu().numpy(), batch.prompt_ids_UP.cpu().numpy()
    tokens: list[npt.NDArray[np.int64]] = []
    positions: list[npt.NDArray[np.int64]] = []
    segments: list[PackedGroup] = []
    predicts_BT = np.zeros(completions.shape, np.int64)
    start = 0
    for group in np.unique(batch.group_B).tolist():
        prompt = int(batch.prompt_lengths_U[group])
        tokens.append(prompts[group, :prompt])
        positions.append(np.arange(prompt))
        end, lengths = start + prompt, []
        for row in np.flatnonzero(batch.group_B == group).tolist():
            length = _inputs(int(batch.completion_lengths_B[row]))
            tokens.append(completions[row, :length])
            positions.append(np.arange(prompt, prompt + length))
            predicts_BT[row, 0] = start + prompt - 1
            predicts_BT[row, 1 : length + 1] = np.arange(end, end + length)
            end += length
            if length:
                lengths.append(length)
        segments.append(PackedGroup(start, prompt, tuple(lengths)))
        start = end

    def row_of(parts: list[npt.NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts))[None].to(batch.device)

    return ModelInput(
        input_ids_RS=row_of(tokens),
        position_ids_RS=row_of(positions),
        attention_mask_RS=None,
        layout=tuple(segments),
        predicts_N=torch.from_numpy(predicts_BT).to(batch.device)[batch.mask_BT],
    )


def padded_input(batch: Batch) -> ModelInput:
    """One row for each completion behind its own copy of the prompt, padded on the right.

    Tokens stand at positions 0, 1, 2, …, and a causal model never attends to the right. The padding side of the
    tokenizer therefore does not matter.
    """
    prompts_B = batch.prompt_lengths_U[batch.group_B]
    lengths_B = prompts_B + batch.completion_lengths_B
    R, S = batch.num_rows, int(lengths_B.max(initial=1))
    completions, prompts = batch.completion_ids_BT.cpu().numpy(), batch.prompt_ids_UP.cpu().numpy()
    input_ids_RS = np.zeros((R, S), np.int64)
    for row, (group, prompt, length) in enumerate(zip(batch.group_B, prompts_B, lengths_B, strict=True)):
        input_ids_RS[row, :prompt] = prompts[group, :prompt]
        input_ids_RS[row, prompt:length] = completions[row, : length - prompt]
    columns_S = np.arange(S)
    first_B = np.arange(R) * S + prompts_B - 1
    predicts_BT = torch.from_numpy(first_B[:, None] + np.arange(batch.mask_BT.shape[1]))

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(batch.device)

    return ModelInput(
        input_ids_RS=tensor(input_ids_RS),
        position_ids_RS=tensor(np.broadcast_to(columns_S, (R, S)).copy()),
        attention_mask_RS=tensor((columns_S < lengths_B[:, None]).astype(np.int64)),
        layout=None,
        predicts_N=predicts_BT.to(batch.device)[batch.mask_BT],
    )


def bare_group(prompt_ids: npt.ArrayLike, *completions: npt.ArrayLike, **fields: Any) -> RolloutGroup:
    """A group of these tokens; rewards, advantages and log-probabilities are 0."""
    rows = [np.asarray(completion, dtype=np.int32) for completion in completions]
    return RolloutGroup(
        prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
        completion_ids=np.concatenate(rows),
        completion_lengths=np.array([row.size for row in rows], np.int32),
        rollout_logprobs=np.zeros(sum(row.size for row in rows), np.float32),
        rewards=np.zeros(len(rows), np.float32),
        advantages=np.zeros(len(rows), np.float32),
        **fields,
    )


def _inputs(length: int) -> int:
    """Number of tokens of a completion in a packed row: all but the last."""
    return max(length - 1, 0)


def _temperature(group: RolloutGroup) -> float:
    return float(group.sampling.get("temperature", 1.0))


@dataclass(frozen=True)
class PaddedBatch:
    """B completions, each a row with its own copy of the prompt, for trainers that do not use GRPOTrainer.

        prompt_ids_BP        . p p p     padded on the left      P: longest prompt
        completion_ids_BT    c c c .     padded on the right     T: longest completion, at least 1
        input_ids_BS         . p p p c c c .                     S = P + T

    Padding is 0 in every tensor. The logits at position P - 1 + t predict completion token t: `logits[:, P - 1 : -1]`
    lines up with every (B, T) tensor.

    The context of a completion (RolloutGroup.context_lengths) is the end of its prompt here.
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
    """float32"""
    advantages_B: Tensor
    """float32"""
    group_B: Tensor
    """int64, index of the group that the row belongs to. The rows of a group follow one another."""
    temperature_B: Tensor
    """float32, temperature of the sampling, above 0. Divide logits by it."""

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
    """All completions of all groups, in their order, one row each. Group sizes and lengths may differ.

    The tensors are copies: the arrays of a decoded group are read-only. Raises ValueError for an empty prompt, and for
    a temperature not above 0.
    """
    batch = to_batch(groups, "cpu")
    prompts_B = _joined([group.prompt_lengths for group in groups], np.int64)
    lengths_B = _joined([group.sampled_lengths for group in groups], np.int64)
    P, T = int(prompts_B.max(initial=1)), max(int(lengths_B.max(initial=1)), 1)
    prompt_mask_BP = torch.from_numpy(np.arange(P) >= P - prompts_B[:, None])
    prompt_ids_BP = torch.zeros(prompt_mask_BP.shape, dtype=torch.int64)
    prompt_ids_BP[prompt_mask_BP] = torch.from_numpy(_joined([p for g in groups for p in g.prompts()], np.int64))
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
        rewards_B=torch.from_numpy(_joined([group.rewards for group in groups], np.float32)),
        advantages_B=batch.advantages_B,
        group_B=torch.from_numpy(batch.group_B),
        temperature_B=batch.temperature_B,
    )
    return PaddedBatch(**{name: tensor.to(device) for name, tensor in vars(padded).items()})


def from_padded(padded: PaddedBatch, **fields: Any) -> list[RolloutGroup]:
    """The groups of a padded batch, for example one that was made from the tensors of another trainer.

    `fields` are further fields of RolloutGroup that all groups share, such as policy_version. The prompts may be padded
    on either side; where those of a group differ, the common beginning is shared. Raises ValueError if the shapes
    differ, the rows of a group do not follow one another or differ in temperature, or a mask has a gap between tokens.
    """
    host = {name: tensor.detach().cpu().numpy() for name, tensor in vars(padded).items()}
    _check(host)
    prompts_B = _rows(host["prompt_ids_BP"], host["prompt_mask_BP"])
    completions_B, logprobs_B, masks_B = (
        _rows(host[name], host["completion_mask_BT"])
        for name in ("completion_ids_BT", "rollout_logprobs_BT", "loss_mask_BT")
    )
    groups = []
    for index in dict.fromkeys(host["group_B"].tolist()):
        rows = np.flatnonzero(host["group_B"] == index)
        first, last = int(rows[0]), int(rows[-1]) + 1
        temperatures = set(host["temperature_B"][rows].tolist())
        if last - first != rows.size or len(temperatures) > 1:
            raise ValueError(f"the rows of group {index} must follow one another and have one temperature")
        sampling = {"temperature": temperatures.pop(), **fields.get("sampling", {})}
        groups.append(
            group_from_rows(
                prompts=prompts_B[first:last],
                completions=completions_B[first:last],
                logprobs=logprobs_B[first:last],
                rewards=host["rewards_B"][rows],
                advantages=host["advantages_B"][rows],
                loss_masks=None if all(mask.all() for mask in masks_B[first:last]) else masks_B[first:last],
                **(fields | {"sampling": sampling}),
            )
        )
    return groups


def _check(host: dict[str, npt.NDArray[Any]]) -> None:
    """Raises ValueError unless the shapes agree and every mask is one run of tokens in each row."""
    sizes: dict[str, int] = {}
    for name, array in host.items():
        for axis, size in zip(name.rpartition("_")[2], array.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise ValueError(f"{name} has shape {array.shape}, and {axis} is {sizes[axis]} in the tensors before")
    for name in ("prompt_mask_BP", "completion_mask_BT"):
        mask = host[name] = host[name].astype(np.bool_)
        starts_B = (np.diff(mask.astype(np.int8), axis=1, prepend=0) == 1).sum(axis=1)
        if (starts_B > 1).any():
            raise ValueError(
                f"{name} has a gap in row {int(starts_B.argmax())}: padding belongs to the ends. Tokens that the "
                f"policy did not write are False in loss_mask_BT alone"
            )
    host["loss_mask_BT"] = host["loss_mask_BT"].astype(np.bool_)


def _rows(values: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> list[npt.NDArray[Any]]:
    return [row[kept] for row, kept in zip(values, mask, strict=True)]


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype)
