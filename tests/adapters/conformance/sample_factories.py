"""Samples as slime and Miles generate them, and whether two are equal in every field, bit by bit."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

LAYERS, EXPERTS = 4, 2


def make_samples(
    sample_class: Any, group_index: int, rewards: Sequence[float], *, key: str | None = None, **fields: Any
) -> list[Any]:
    """One prompt, whose completions have 1, 2, ... tokens."""
    samples = []
    for k, reward in enumerate(rewards):
        length = k + 1
        prompt = [10 + group_index, 11]
        samples.append(
            sample_class(
                **{
                    "group_index": group_index,
                    "index": 10 * group_index + k,
                    "prompt": f"prompt {group_index}",
                    "tokens": [*prompt, *range(20 + group_index, 20 + group_index + length)],
                    "response": f"response {group_index}/{k}",
                    "response_length": length,
                    "label": f"label {group_index}",
                    "reward": reward if key is None else {key: reward, "other": 5.0},
                    "loss_mask": [0] * (length > 1) + [1] * (length - (length > 1)),
                    "rollout_log_probs": [-0.1 * (group_index + 1)] * length,  # not a number of float32
                    "weight_versions": [str(group_index)],
                    "status": sample_class.Status.TRUNCATED if k else sample_class.Status.COMPLETED,
                    "metadata": {"of": group_index},
                    **fields,
                }
            )
        )
    return samples


def with_columns(sample: Any, seed: int = 0) -> Any:
    """The same sample with everything that a framework keeps of each token."""
    rng = np.random.default_rng(seed)
    tokens, length = len(sample.tokens), sample.response_length
    experts = rng.integers(0, 128, (tokens - 1, LAYERS, EXPERTS)).astype(np.int32)
    sample.teacher_log_probs = (-rng.exponential(size=length)).tolist()
    if hasattr(sample, "rollout_top_p_token_ids"):  # slime
        sizes = rng.integers(0, 5, length)
        sample.rollout_routed_experts = torch.from_numpy(experts)
        sample.rollout_top_p_token_ids = torch.from_numpy(rng.integers(0, 150_000, sizes.sum()).astype(np.int32))
        sample.rollout_top_p_token_offsets = torch.from_numpy(np.cumsum([0, *sizes]).astype(np.int32))
    else:  # Miles
        sample.rollout_routed_experts = experts
        sample.rollout_indexer_topk = rng.integers(0, 9_000, (tokens - 1, 2, 3)).astype(np.int32)
        sample.opd_reverse_kl = rng.normal(size=length).tolist()
    return sample


def own_prompt(sample: Any, k: int) -> Any:
    """The same sample behind a prompt of its own, with texts, rewards and attributes of its own."""
    sample.tokens = [
        *sample.tokens[: -sample.response_length],
        *[40 + k] * k,
        *sample.tokens[-sample.response_length :],
    ]
    sample.prompt = [{"role": "user", "content": f"prompt {k}"}]
    sample.metadata = {"turns": (1, k), "image": np.arange(6, dtype=np.float32).reshape(2, 3), 7: None}
    sample.train_metadata = {"loss": "sft"} if k else None
    sample.of_nobody = torch.full((2, k), 0.5, dtype=torch.bfloat16)
    return sample


def as_agents(samples: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """Rollouts of several samples, which share a rollout id: the first `counts[0]` samples are the first rollout."""
    rollouts, rest = [], list(samples)
    for rollout, count in enumerate(counts):
        part, rest = rest[:count], rest[count:]
        rollouts.append([dataclasses.replace(sample, rollout_id=900 + rollout) for sample in part])
    return rollouts


def equal(a: Any, b: Any) -> bool:
    """Whether two values are equal in type and in every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if dataclasses.is_dataclass(a) and not isinstance(a, enum.Enum):
        return equal(dict(sorted(vars(a).items())), dict(sorted(vars(b).items())))
    return bool(a == b)
