"""Ratios o/b of a batch, and the weights that the configured action makes of them.

Axis U counts the units of a row that have a ratio each: T tokens, or 1 where one ratio covers the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replay_trainer.correction.config import LOG_RATIO_LIMIT, Aggregate, CorrectionConfig, Level

_LOG_SUM_LIMIT = 80.0
"""Bound of the log-ratio of a whole sequence: its exponential is still finite in float32."""
_LEAST_MEAN = 1e-8
"""batch_normalize does not divide by a smaller mean weight."""
_AGGREGATE_OF_LEVEL: dict[Level, Aggregate] = {"token": "token", "sequence": "sum", "geometric": "mean"}


class Ratios:
    """Ratios and weights of a batch, all without gradient."""

    def __init__(self, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, config: CorrectionConfig) -> None:
        """All (B, T). Raises ValueError unless the shapes agree."""
        if old_logprobs.ndim != 2 or not old_logprobs.shape == rollout_logprobs.shape == mask.shape:
            raise ValueError(
                f"old_logprobs {tuple(old_logprobs.shape)}, rollout_logprobs {tuple(rollout_logprobs.shape)} and "
                f"mask {tuple(mask.shape)} must have one shape (B, T)"
            )
        self.config = config
        self.old_BT, self.rollout_BT = at_least_float32(old_logprobs), at_least_float32(rollout_logprobs)
        self.mask_BT = mask.bool()
        self.known_BT = self.mask_BT & ~self.rollout_BT.isnan()
        self.difference_BT = torch.where(self.known_BT, self.old_BT - self.rollout_BT, 0.0)
        self.log_BT = self.difference_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        log_BU = aggregate(self.log_BT, self.mask_BT, _AGGREGATE_OF_LEVEL[config.level])
        self.ratio_BU = log_BU.clamp(-_LOG_SUM_LIMIT, _LOG_SUM_LIMIT).exp()
        # The bounds themselves are inside.
        self.below_BU = self.ratio_BU < (-torch.inf if config.clip_min is None else config.clip_min)
        self.above_BU = self.ratio_BU > (torch.inf if config.clip_max is None else config.clip_max)
        self.clipped_BU = self._clip()

    def units(self, tokens_BT: Tensor) -> Tensor:
        """(B, U) bool: the units with at least one of these tokens."""
        return tokens_BT if self.config.level == "token" else tokens_BT.any(dim=1, keepdim=True)

    def totals(self) -> tuple[float, int]:
        """Sum and count of the weights before batch_normalize, over units."""
        counted_BU = self.units(self.mask_BT)
        return float(self.clipped_BU[counted_BU].sum(dtype=torch.float64)), int(counted_BU.sum())

    def weights(self, mean_weight: float | None) -> Tensor:
        """(B, T) weights, 0 outside the mask. batch_normalize divides by `mean_weight`, or by the batch's own mean."""
        weights_BU = self.clipped_BU
        if self.config.batch_normalize:
            counted = weights_BU[self.units(self.mask_BT)]
            mean = counted.mean() if mean_weight is None else weights_BU.new_tensor(mean_weight)
            # As in verl: a batch whose weights all vanish keeps vanishing weights.
            weights_BU = torch.where(mean > _LEAST_MEAN, weights_BU / mean, weights_BU)
        return torch.where(self.mask_BT, weights_BU, 0.0)

    def _clip(self) -> Tensor:
        """(B, U) ratios after the action."""
        config = self.config
        if config.action == "none":
            return self.ratio_BU
        if config.action == "truncate":
            return self.ratio_BU.clamp(min=config.clip_min, max=config.clip_max)
        return self.ratio_BU.masked_fill(self.below_BU | self.above_BU, 0.0)


def aggregate(values_BT: Tensor, mask_BT: Tensor, how: Aggregate) -> Tensor:
    """(B, T) unchanged for "token", else one value of each sequence, (B, 1). The values are 0 outside the mask."""
    if how == "token":
        return values_BT
    if how == "max":
        if values_BT.shape[1] == 0:  # amax refuses an empty axis
            return values_BT.new_full((len(values_BT), 1), -torch.inf)
        return values_BT.masked_fill(~mask_BT, -torch.inf).amax(dim=1, keepdim=True)
    sum_B1 = values_BT.sum(dim=1, keepdim=True)
    return sum_B1 if how == "sum" else sum_B1 / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)


def at_least_float32(values: Tensor) -> Tensor:
    """float64 stays as it is; every other type becomes float32."""
    return values if values.dtype == torch.float64 else values.float()
