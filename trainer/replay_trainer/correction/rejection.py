"""RejectionMasks: which tokens leave the loss, by which rule."""

from __future__ import annotations

import torch
from torch import Tensor

from replay_trainer.correction.config import Rejection
from replay_trainer.correction.weights import Ratios, aggregate, at_least_float32


class RejectionMasks:
    """Bool masks of a batch: `kept_BT`, and what veto (B, 1), off-policy mask (B, 1) and DPPO mask (B, T) removed."""

    def __init__(self, ratios: Ratios, advantages: Tensor | None, logprobs: Tensor | None) -> None:
        """advantages: (B,) or (B, T). logprobs: (B, T) log θ; None: the old log-probabilities.

        Raises ValueError if a mask needs advantages and they are missing or have another shape.
        """
        config, mask_BT, log_BT = ratios.config, ratios.mask_BT, ratios.log_BT
        none_B1 = torch.zeros_like(mask_BT[:, :1])
        self.vetoed_B1 = none_B1
        if config.veto is not None:
            self.vetoed_B1 = (log_BT.exp() < config.veto).any(dim=1, keepdim=True)
        self.off_policy_B1, self.dppo_BT = none_B1, torch.zeros_like(mask_BT)
        if config.needs_advantages:
            self._judge_by_advantage(ratios, advantages, ratios.old_BT if logprobs is None else logprobs)
        self.kept_BT = mask_BT & ~self.vetoed_B1 & ~self.off_policy_B1 & ~self.dppo_BT
        for rejection in config.rejections:
            self.kept_BT = self.kept_BT & _accepted(log_BT, mask_BT, rejection)

    def _judge_by_advantage(self, ratios: Ratios, advantages: Tensor | None, current: Tensor) -> None:
        """The off-policy mask and the DPPO mask: the module of the package has their formulas."""
        config, mask_BT, known_BT = ratios.config, ratios.mask_BT, ratios.known_BT
        if advantages is None or advantages.shape not in (mask_BT.shape, mask_BT.shape[:1]):
            given = None if advantages is None else tuple(advantages.shape)
            raise ValueError(
                f"off_policy_mask_threshold and dppo_mask_low and _high need advantages of shape "
                f"{tuple(mask_BT.shape[:1])} or {tuple(mask_BT.shape)}, not {given}"
            )
        advantages_BT = advantages[:, None].expand_as(mask_BT) if advantages.ndim == 1 else advantages
        rollout_BT = torch.where(known_BT, ratios.rollout_BT, 0.0)
        current_BT = torch.where(known_BT, at_least_float32(current), 0.0)
        if config.off_policy_mask_threshold is not None:
            divergence_B1 = aggregate(rollout_BT - current_BT, mask_BT, "mean")
            negative_B1 = (mask_BT & (advantages_BT < 0)).any(dim=1, keepdim=True)
            self.off_policy_B1 = negative_B1 & (divergence_B1 > config.off_policy_mask_threshold)
        rise_BT = current_BT.exp() - rollout_BT.exp()
        if config.dppo_mask_high is not None:
            self.dppo_BT = self.dppo_BT | ((advantages_BT > 0) & (rise_BT > config.dppo_mask_high))
        if config.dppo_mask_low is not None:
            self.dppo_BT = self.dppo_BT | ((advantages_BT <= 0) & (rise_BT < -config.dppo_mask_low))


def _accepted(log_BT: Tensor, mask_BT: Tensor, rejection: Rejection) -> Tensor:
    """(B, T) bool, or (B, 1) where the rejection judges whole sequences. `Rejection` has the formulas."""
    if rejection.estimator == "k1":
        statistic_BU = aggregate(log_BT, mask_BT, rejection.aggregate).exp()
    elif rejection.estimator == "k2":
        statistic_BU = aggregate(log_BT.square() / 2, mask_BT, rejection.aggregate)
    else:
        # expm1 keeps the digits that exp(l) - 1 loses near the policy.
        statistic_BU = aggregate(log_BT.expm1() - log_BT, mask_BT, rejection.aggregate)
    low = -torch.inf if rejection.low is None else rejection.low
    high = torch.inf if rejection.high is None else rejection.high
    # A NaN is neither below nor above: it is an error of the model, which a rejection must not hide.
    return ~((statistic_BU < low) | (statistic_BU > high))
