"""Scoring: advantages of a group, its replay priority, and whether its rewards differ. Needs only numpy."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


def _rewards(rewards_G: npt.ArrayLike) -> npt.NDArray[np.float64]:
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size == 0:
        raise ValueError(f"rewards must have shape (G,) with G >= 1, not {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, not {rewards.tolist()}")
    return rewards


def _std(rewards_G: npt.NDArray[np.float64]) -> float:
    # ddof=1 is Bessel's correction, which torch.std and TRL use. It divides by G - 1, which is 0 for one completion.
    return float(rewards_G.std(ddof=1)) if rewards_G.size > 1 else 0.0


def group_advantages(
    rewards_G: npt.ArrayLike, scale: Literal["group", "none"] = "group", eps: float = 1e-4
) -> FloatArray:
    """Advantages of the G completions of one prompt, float32 (G,).

    `scale="group"`: (r - mean) / (std + eps), std over the group with Bessel's correction (GRPO, arXiv 2402.03300).
    `scale="none"`: r - mean (Dr. GRPO, arXiv 2503.20783).

    Raises ValueError for rewards that are not finite or not one-dimensional, and for another `scale`.
    """
    rewards = _rewards(rewards_G)
    if scale not in ("group", "none"):
        raise ValueError(f"scale must be 'group' or 'none', not {scale!r}")
    divisor = _std(rewards) + eps if scale == "group" else 1.0
    return np.asarray((rewards - rewards.mean()) / divisor, dtype=np.float32)


def group_priority(rewards_G: npt.ArrayLike, advantages_G: npt.ArrayLike) -> float:
    """Replay priority of a group: sum |A| * std of the rewards; 0 for a group without variance (TRL's score)."""
    rewards = _rewards(rewards_G)
    if is_zero_variance(rewards):
        return 0.0
    return float(np.abs(np.asarray(advantages_G, dtype=np.float64)).sum() * _std(rewards))


def group_learnability(rewards_G: npt.ArrayLike) -> float:
    """Replay priority: the variance of the rewards, without Bessel's correction.

    For rewards of 0 and 1 this is p (1 - p), with p the share of completions that are right (learnability,
    arXiv 2502.12272).
    """
    rewards = _rewards(rewards_G)
    return 0.0 if is_zero_variance(rewards) else float(rewards.var())


def is_zero_variance(rewards_G: npt.ArrayLike, tolerance: float = 1e-6) -> bool:
    """Whether all rewards of a group are equal up to `tolerance` (max - min), so that it gives no gradient."""
    rewards = _rewards(rewards_G)
    return bool(rewards.max() - rewards.min() <= tolerance)
