"""Moments: the sums and extremes behind the metrics of a correction. The moments of parts of a batch can be added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replay_trainer.correction.rejection import RejectionMasks
from replay_trainer.correction.weights import Ratios

_MEANS = {
    "ratio_mean": ("ratio", "units"),
    "weight_mean": ("weight", "units"),
    "clipped_fraction": ("clipped", "units"),
    "above_max_fraction": ("above", "units"),
    "below_min_fraction": ("below", "units"),
    "masked_token_fraction": ("masked_tokens", "tokens"),
    "masked_sequence_fraction": ("masked_sequences", "sequences"),
    "rejected_token_fraction": ("rejected_tokens", "tokens"),
    "rejected_sequence_fraction": ("rejected_sequences", "sequences"),
    "vetoed_sequence_fraction": ("vetoed_sequences", "sequences"),
    "off_policy_sequence_fraction": ("off_policy_sequences", "sequences"),
    "dppo_token_fraction": ("dppo_tokens", "tokens"),
    "k3_kl": ("k3", "tokens"),
    "logprob_diff_mean": ("distance", "tokens"),
    "nan_fraction": ("unknown", "response_tokens"),
}
"""Metric: the sum and the count that it is the quotient of."""


@dataclass(frozen=True)
class Moments:
    """Sums and extremes over the known tokens, units and sequences of a batch."""

    sums: dict[str, float]
    minima: dict[str, float]
    maxima: dict[str, float]

    @classmethod
    def of(cls, ratios: Ratios, masks: RejectionMasks) -> Moments:
        """The moments of one batch, in float64: squares of ratios leave the range of float32."""
        config, mask_BT, known_BT, kept_BT = ratios.config, ratios.mask_BT, ratios.known_BT, masks.kept_BT
        unit_BU, known_B1 = ratios.units(known_BT), known_BT.any(dim=1, keepdim=True)
        outside_BU = ratios.below_BU | ratios.above_BU
        masked_BT = outside_BU & known_BT if config.action == "mask" else torch.zeros_like(known_BT)
        counts = {
            "response_tokens": mask_BT,
            "unknown": mask_BT & ~known_BT,
            "tokens": known_BT,
            "units": unit_BU,
            "sequences": known_B1,
            "clipped": outside_BU & unit_BU if config.action != "none" else torch.zeros_like(unit_BU),
            "above": ratios.above_BU & unit_BU,
            "below": ratios.below_BU & unit_BU,
            "masked_tokens": masked_BT,
            "masked_sequences": (masked_BT == known_BT).all(dim=1, keepdim=True) & known_B1,
            "rejected_tokens": known_BT & ~kept_BT,
            "rejected_sequences": ~kept_BT.any(dim=1, keepdim=True) & known_B1,
            "vetoed_sequences": masks.vetoed_B1 & known_B1,
            "off_policy_sequences": masks.off_policy_B1 & known_B1,
            "dppo_tokens": masks.dppo_BT & known_BT,
        }
        # One transfer from the device instead of one for each count.
        totals = torch.stack([mask.sum() for mask in counts.values()]).tolist()
        difference_N = ratios.difference_BT[known_BT].cpu().double()
        log_N = ratios.log_BT[known_BT].cpu().double()
        ratio_M, weight_M = (each[unit_BU].cpu().double() for each in (ratios.ratio_BU, ratios.clipped_BU))
        sums = {
            "ratio": ratio_M,
            "weight": weight_M,
            "weight_squares": weight_M.square(),
            "difference": difference_N,
            "distance": difference_N.abs(),
            "k3": log_N.expm1() - log_N,
            "ratio_squares": log_N.exp().square(),
        }
        return cls(
            sums=dict(zip(counts, totals, strict=True)) | {name: float(values.sum()) for name, values in sums.items()},
            minima={"ratio": _min(ratio_M), "weight": _min(weight_M)},
            maxima={"ratio": -_min(-ratio_M), "weight": -_min(-weight_M), "distance": -_min(-difference_N.abs())},
        )

    @classmethod
    def of_parts(cls, parts: Sequence[Moments]) -> Moments:
        """The moments of a batch from those of its parts; at least one."""
        return cls(
            sums={name: sum(part.sums[name] for part in parts) for name in parts[0].sums},
            minima={name: min(part.minima[name] for part in parts) for name in parts[0].minima},
            maxima={name: max(part.maxima[name] for part in parts) for name in parts[0].maxima},
        )

    def metrics(self) -> dict[str, float]:
        """As documented at `correct`."""
        total = self.sums

        def mean(name: str, count: str) -> float:
            return total[name] / total[count] if total[count] else math.nan

        squares = total["units"] * total["weight_squares"]
        extremes = {
            "ratio_min": (self.minima["ratio"], "units"),
            "ratio_max": (self.maxima["ratio"], "units"),
            "weight_min": (self.minima["weight"], "units"),
            "weight_max": (self.maxima["weight"], "units"),
            "logprob_diff_max": (self.maxima["distance"], "tokens"),
        }
        return {
            **{metric: mean(name, count) for metric, (name, count) in _MEANS.items()},
            **{metric: value if total[count] else math.nan for metric, (value, count) in extremes.items()},
            "ess": total["weight"] ** 2 / squares if squares else math.nan,
            "kl": -mean("difference", "tokens"),
            "chi2": mean("ratio_squares", "tokens") - 1,
        }


def _min(values_N: Tensor) -> float:
    return float(values_N.amin()) if values_N.numel() else math.inf
