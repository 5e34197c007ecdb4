"""PaddedBatch: groups as padded (B, T) tensors and back, for trainers that do not use GRPOTrainer.

    prompt_ids_BP        . p p p     padded on the left      P: longest prompt
    completion_ids_BT    c c c .     padded on the right     T: longest completion, at least 1
    input_ids_BS         . p p p c c c .                     S = P + T

The logits at position P - 1 + t predict completion token t: `logits[:, P - 1 : -1]` lines up with every (B, T) tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replay_client.completions import group_from_rows
from replay_client.rollout import RolloutGroup
from replay_trainer.batching import to_batch


@dataclass(frozen=True)
class PaddedBatch:
    """B completions, each a row with its own copy of the prompt. Padding is 0 in every tensor.

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
