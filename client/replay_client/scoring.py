"""Scoring: computes advantages and replay priorities of groups, and tells if a group carries a gradient.

Needs only numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from replay_client.advantages import AdvantageFunction
    from replay_client.rollout import RolloutGroup

FloatArray = npt.NDArray[np.float32]
Scale = Literal["group", "batch", "none"]
"""How a trainer scales the differences r - (mean reward of the group). "group" and "batch": it divides them by
std + eps, with the std of the rewards of the group or of the batch. "none": it does not divide them."""

_EPS = 1e-4
"""Added to the std, so that a small std does not give huge advantages."""
_TOLERANCE = 1e-6
"""Rewards that differ by no more than this count as equal, because reward functions have rounding errors."""


def _rewards(rewards_G: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The rewards as an array (G,). Raises ValueError for another shape, for G = 0, and if a reward is not finite."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size == 0:
        raise ValueError(f"rewards must have shape (G,) with G >= 1, not {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, not {rewards.tolist()}")
    return rewards


def _std(rewards_G: npt.NDArray[np.float64]) -> float:
    """The standard deviation of the rewards of one group; 0 for a single reward."""
    # ddof=1 is Bessel's correction, which torch.std and TRL use. It divides by G - 1, which is 0 for one reward.
    return float(rewards_G.std(ddof=1)) if rewards_G.size > 1 else 0.0


def group_advantages(
    rewards_G: npt.ArrayLike,
    scale: Literal["group", "none"] = "group",
    eps: float = _EPS,
    *,
    advantages: str | AdvantageFunction | None = None,
    facts: Mapping[str, Any] | None = None,
) -> FloatArray:
    """Advantages of the G completions of one prompt, float32 (G,).

    `scale="group"`: (r - mean) / (std + eps), std over the group with Bessel's correction (GRPO, arXiv 2402.03300).
    `scale="none"`: r - mean (Dr. GRPO, arXiv 2503.20783).
    `advantages`: a function of your own that computes the advantages in the place of `scale`, or its name,
    "package.module:function"; see `replay_client.advantages`. `facts`: the other arguments of this function, by their
    names in `replay_client.advantages.FACTS`.

    Raises ValueError for rewards that are not finite or not one-dimensional, for an unknown `scale`, and for a function
    that fails or returns no advantages.
    """
    rewards = _rewards(rewards_G)
    if advantages is not None:
        # The import is here, because the rest of this module needs only numpy.
        from replay_client.advantages import advantages_by

        return advantages_by(advantages, rewards, facts or {})
    if scale not in ("group", "none"):
        raise ValueError(f"scale must be 'group' or 'none', not {scale!r}")
    divisor = _std(rewards) + eps if scale == "group" else 1.0
    return np.asarray((rewards - rewards.mean()) / divisor, dtype=np.float32)


def group_priority(rewards_G: npt.ArrayLike, advantages_G: npt.ArrayLike) -> float:
    """Replay priority of a group: (sum of |A|) * (std of the rewards), which is TRL's score. Equal rewards give 0.

    A single reward has no std, so the priority of a group of one rollout is its |A|.
    """
    rewards = _rewards(rewards_G)
    if rewards.size == 1:
        return float(np.abs(np.asarray(advantages_G, dtype=np.float64)).sum())
    if is_zero_variance(rewards):
        return 0.0
    return float(np.abs(np.asarray(advantages_G, dtype=np.float64)).sum() * _std(rewards))


def group_learnability(rewards_G: npt.ArrayLike) -> float:
    """Replay priority: the variance of the rewards, without Bessel's correction.

    For rewards of 0 and 1 this is p (1 - p), with p the share of completions that are right (learnability,
    arXiv 2502.12272).
    """
    rewards = _rewards(rewards_G)
    if is_zero_variance(rewards):
        return 0.0
    return float(rewards.var())


def is_zero_variance(rewards_G: npt.ArrayLike, tolerance: float = _TOLERANCE) -> bool:
    """True if all rewards of a group are equal up to `tolerance` (max - min)."""
    rewards = _rewards(rewards_G)
    return bool(rewards.max() - rewards.min() <= tolerance)


def carries_gradient(group: RolloutGroup, scale: Scale | None = None, teacher: str = "") -> bool:
    """True if a token that is trained on has an advantage other than 0, so that a step with this group can teach.

    The first of these rules that applies says which advantages count:

    * `teacher` is the column of extras that a trainer distils from; empty: the trainer does not distil. In a group with
      this column, every trained token has an advantage, whatever the rewards are: the difference between teacher and
      policy.
    * If the group has `token_advantages`, these count.
    * With a `scale`, the trainer computes the advantages of the rollouts anew: (r - mean of the group) / divisor. They
      are 0 for equal rewards and for a group of one rollout, whatever the divisor is.
    * With `scale=None`, the trainer uses the `advantages` in the group. A group of one rollout can have an advantage
      other than 0. So can a group with equal rewards, if its advantages were not computed from the rewards alone, but
      for example with a baseline.

    Raises ValueError for rewards that are not finite, and for an unknown `scale`.
    """
    if scale not in (None, "group", "batch", "none"):
        raise ValueError(f"scale must be 'group', 'batch', 'none' or None, not {scale!r}")
    # This check comes before all returns, because it raises ValueError for wrong rewards.
    equal_rewards = is_zero_variance(group.rewards)
    if teacher and teacher in group.extras:
        return bool(group.trained_mask.any())
    if group.token_advantages is not None:
        return bool(group.token_advantages[group.trained_mask].any())
    if scale is not None:
        if equal_rewards:
            return False
        # A division makes no advantage 0 that was not 0 before. So the advantages of "none" decide for every `scale`.
        undivided_G = group_advantages(group.rewards, scale="none")
        advantages_G = _zero_if_untrained(group, undivided_G)
        return bool(advantages_G.any())
    largest_error = 0.0
    if equal_rewards and group.group_size > 1:
        # Rewards that count as equal may differ by rounding errors up to _TOLERANCE. Their std is about 0, so their
        # advantages are these errors divided by about _EPS, and mean nothing.
        largest_error = _TOLERANCE / _EPS
    magnitudes_G = np.abs(trained_advantages(group))
    return bool((magnitudes_G > largest_error).any())


def trained_advantages(group: RolloutGroup) -> FloatArray:
    """(G,) the advantage of each rollout; 0 for a rollout without a token that is trained on.

    If the group has `token_advantages`, the value of a rollout is the mean |advantage| of its trained tokens instead.
    """
    advantages_T = group.token_advantages
    if advantages_T is None:
        return _zero_if_untrained(group, group.advantages)
    trained_T = group.trained_mask
    means_G: list[float] = []
    for span in group.rollout_spans():
        rollout_advantages = advantages_T[span]
        magnitudes = np.abs(rollout_advantages[trained_T[span]])
        means_G.append(magnitudes.mean(dtype=np.float64) if magnitudes.size else 0.0)
    return np.array(means_G, np.float32)


def trained_priority(group: RolloutGroup) -> float:
    """Replay priority of the trained rollouts of a group; 0 if the group carries no gradient.

    The priority is `group_priority` of the rewards and `trained_advantages`. If the group has `token_advantages`, the
    priority is the sum of the mean |advantage| of each rollout. It is not multiplied by the std of the rewards, because
    these advantages need not depend on the rewards, and may be large although all rewards are equal.

    Raises ValueError for rewards that are not finite.
    """
    if not carries_gradient(group):
        return 0.0
    advantages_G = trained_advantages(group)
    if group.token_advantages is not None:
        return float(advantages_G.sum(dtype=np.float64))
    return group_priority(group.rewards, advantages_G)


def _zero_if_untrained(group: RolloutGroup, advantages_G: FloatArray) -> FloatArray:
    """(G,) the advantages, but 0 for rollouts in which no token is trained on."""
    trained_T = group.trained_mask
    trained_G = [bool(trained_T[span].any()) for span in group.rollout_spans()]
    return np.where(trained_G, advantages_G, np.float32(0)).astype(np.float32)
