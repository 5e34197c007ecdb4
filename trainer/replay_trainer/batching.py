"""Groups to tensors, and a batch to micro-batches that fit a budget of tokens.

    prompt_ids_UP          q q q .         one row per group         P: longest prompt
    completion_ids_BT      c c c c         one row per completion    T: longest completion
                           c c . .         every tensor named _BT lines up with the tokens of the completions

A batch is padded on the right for the arithmetic of the loss. The model does not see this padding: it gets packed rows
(packing.py), or rows of similar length if it cannot take packed ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replay_client.rollout import RolloutGroup
from replay_trainer.packing import Layout, Segment

Ints = npt.NDArray[np.int64]


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
    completion_lengths_B = _per_row([group.completion_lengths for group in groups], np.int64)
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
        advantages_B=tensor(_per_row([group.advantages for group in groups], np.float32)),
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
    segments: list[Segment] = []
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
        segments.append(Segment(start, prompt, tuple(lengths)))
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


def _per_row(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype)


def _temperature(group: RolloutGroup) -> float:
    return float(group.sampling.get("temperature", 1.0))
