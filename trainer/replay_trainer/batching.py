"""Groups to tensors and tensors to log-probabilities, without losing a token.

A row is one completion behind its own copy of the prompt, always padded on the right:

    input_ids_BS         p p p c c c c . .        S: longest prompt + completion
                         p c c . . . . . .        T: longest completion
    completion_ids_BT    c c c c                  everything named _BT lines up with the completion's tokens,
                         c c . .                  whatever the length of the prompt

Padding on the right needs no care of the model: tokens stand at positions 0, 1, 2, … and a causal model never
looks to the right, whichever side its tokenizer pads on.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replay_client.rollout import RolloutGroup


@dataclass(frozen=True)
class Batch:
    """Completions as rows. Padding is 0 in every tensor; `mask_BT` says what counts."""

    input_ids_BS: Tensor
    """int64, prompt and completion, contiguous."""
    attention_mask_BS: Tensor
    """int64, 1 for prompt and completion."""
    position_ids_BS: Tensor
    """int64, 0, 1, 2, … from the left."""
    prompt_lengths_B: Tensor
    """int64, at least 1."""
    completion_lengths_B: Tensor
    """int64, may be 0."""
    completion_ids_BT: Tensor
    """int64"""
    mask_BT: Tensor
    """bool, tokens to train on: the completion, less what the group's loss_mask excludes."""
    rollout_logprobs_BT: Tensor
    """float32, the sampler's log-probabilities in nats; NaN where unknown."""
    advantages_B: Tensor
    """float32"""
    temperature_B: Tensor
    """float32, of the sampling, > 0."""
    group_B: Tensor
    """int64, which group of the batch the row comes from."""

    @property
    def num_rows(self) -> int:
        """B, the number of completions."""
        return self.input_ids_BS.shape[0]

    def select(self, rows: Tensor) -> Batch:
        """These rows, with the padding that none of them needs cut off."""
        longest = int((self.prompt_lengths_B + self.completion_lengths_B)[rows].max())
        longest_completion = max(int(self.completion_lengths_B[rows].max()), 1)
        return Batch(
            input_ids_BS=self.input_ids_BS[rows, :longest],
            attention_mask_BS=self.attention_mask_BS[rows, :longest],
            position_ids_BS=self.position_ids_BS[rows, :longest],
            prompt_lengths_B=self.prompt_lengths_B[rows],
            completion_lengths_B=self.completion_lengths_B[rows],
            completion_ids_BT=self.completion_ids_BT[rows, :longest_completion],
            mask_BT=self.mask_BT[rows, :longest_completion],
            rollout_logprobs_BT=self.rollout_logprobs_BT[rows, :longest_completion],
            advantages_B=self.advantages_B[rows],
            temperature_B=self.temperature_B[rows],
            group_B=self.group_B[rows],
        )


def to_batch(groups: Sequence[RolloutGroup], device: torch.device | str = "cpu") -> Batch:
    """All completions of all groups, in their order, one row each; G and every length may differ.

    No groups make a batch without rows; T is at least 1. A group without `sampling["temperature"]` was
    sampled at 1.

    Raises ValueError for an empty prompt (nothing would predict the first token) and for a temperature that is
    not above 0.
    """
    for index, group in enumerate(groups):
        if group.prompt_ids.size == 0:
            raise ValueError(f"group {index} (prompt_id {group.prompt_id!r}) has an empty prompt; add a first token")
        if not 0 < _temperature(group) < np.inf:
            raise ValueError(
                f"group {index} (prompt_id {group.prompt_id!r}) was sampled at temperature {_temperature(group)}; "
                f"the policy gradient needs samples at a temperature above 0"
            )
    group_B = np.repeat(np.arange(len(groups)), [group.group_size for group in groups])
    prompt_lengths_B = np.array([groups[g].prompt_ids.size for g in group_B], dtype=np.int64)
    completion_lengths_B = _per_row([group.completion_lengths for group in groups], np.int64)
    num_rows = len(group_B)
    num_tokens = max(int(completion_lengths_B.max(initial=0)), 1)
    num_columns = int((prompt_lengths_B + completion_lengths_B).max(initial=1))

    input_ids_BS = np.zeros((num_rows, num_columns), np.int64)
    completion_ids_BT = np.zeros((num_rows, num_tokens), np.int64)
    mask_BT = np.zeros((num_rows, num_tokens), np.bool_)
    rollout_logprobs_BT = np.zeros((num_rows, num_tokens), np.float32)
    row = 0
    for group in groups:
        prompt, start = group.prompt_ids.size, 0
        for length in group.completion_lengths.tolist():
            tokens = slice(start, start + length)
            input_ids_BS[row, :prompt] = group.prompt_ids
            input_ids_BS[row, prompt : prompt + length] = group.completion_ids[tokens]
            completion_ids_BT[row, :length] = group.completion_ids[tokens]
            mask_BT[row, :length] = True if group.loss_mask is None else group.loss_mask[tokens]
            rollout_logprobs_BT[row, :length] = group.rollout_logprobs[tokens]
            row, start = row + 1, start + length

    columns_S = np.arange(num_columns)
    position_ids_BS = np.broadcast_to(columns_S, (num_rows, num_columns)).copy()
    attention_mask_BS = (columns_S < (prompt_lengths_B + completion_lengths_B)[:, None]).astype(np.int64)

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Batch(
        input_ids_BS=tensor(input_ids_BS),
        attention_mask_BS=tensor(attention_mask_BS),
        position_ids_BS=tensor(position_ids_BS),
        prompt_lengths_B=tensor(prompt_lengths_B),
        completion_lengths_B=tensor(completion_lengths_B),
        completion_ids_BT=tensor(completion_ids_BT),
        mask_BT=tensor(mask_BT),
        rollout_logprobs_BT=tensor(rollout_logprobs_BT),
        advantages_B=tensor(_per_row([group.advantages for group in groups], np.float32)),
        temperature_B=tensor(np.array([_temperature(groups[g]) for g in group_B], dtype=np.float32)),
        group_B=tensor(group_B.astype(np.int64)),
    )


def micro_batches(batch: Batch, size: int) -> Iterator[tuple[Tensor, Batch]]:
    """Every row exactly once, at most `size` together: (indices of the rows, those rows).

    Longest first: rows of like length share a micro-batch, so little is padded, and a lack of memory shows at
    once.
    """
    lengths_B = batch.prompt_lengths_B + batch.completion_lengths_B
    order_B = lengths_B.argsort(descending=True, stable=True)
    for start in range(0, batch.num_rows, size):
        rows = order_B[start : start + size]
        yield rows, batch.select(rows)


def chosen_logprobs(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Log-probability of each completion token: (B, T) float32, in nats, 0 in padding.

        log softmax(logits / temperature)[token], with the temperature it was sampled at

    `model` is any causal language model of transformers; the gradient flows into it.
    """
    # A model without this argument counts from the left by itself.
    positions = (
        {"position_ids": batch.position_ids_BS} if "position_ids" in inspect.signature(model.forward).parameters else {}
    )
    logits_BSV = model(
        input_ids=batch.input_ids_BS, attention_mask=batch.attention_mask_BS, use_cache=False, **positions
    ).logits
    # The logits at position s predict token s + 1. Those before the end of the shortest prompt are of no use.
    first = int(batch.prompt_lengths_B.min()) - 1
    logits_BSV = logits_BSV[:, first:].float() / batch.temperature_B[:, None, None]
    next_ids_BS = batch.input_ids_BS.roll(-1, dims=1)[:, first:]
    logprobs_BS = logits_BSV.gather(-1, next_ids_BS[:, :, None]).squeeze(-1) - logits_BSV.logsumexp(dim=-1)

    tokens_T = torch.arange(batch.completion_ids_BT.shape[1], device=logprobs_BS.device)
    predicted_at_BT = (batch.prompt_lengths_B[:, None] - 1 - first) + tokens_T
    logprobs_BT = logprobs_BS.gather(1, predicted_at_BT.clamp(max=logprobs_BS.shape[1] - 1))
    return torch.where(tokens_T < batch.completion_lengths_B[:, None], logprobs_BT, 0.0)


def _per_row(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype)


def _temperature(group: RolloutGroup) -> float:
    return float(group.sampling.get("temperature", 1.0))
