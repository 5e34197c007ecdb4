"""`correct`: importance weights, rejection and metrics of one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from replay_trainer.correction.config import LOG_RATIO_LIMIT, Aggregate, CorrectionConfig, Level, Rejection

_LOG_SUM_LIMIT = 80.0
"""Bound of the log-ratio of a whole sequence, in nats. exp(80) is still finite in float32."""
_LEAST_MEAN = 1e-8
"""batch_normalize does not divide the weights by a mean weight of this or less."""
_AGGREGATE_OF_LEVEL: dict[Level, Aggregate] = {"token": "token", "sequence": "sum", "geometric": "mean"}


class Ratios:
    """The ratios o/b of a batch, and the weights that the configured action makes of these ratios; without gradient.

    A unit is the part of a row that has one ratio. Axis U counts the units of a row: T units if each token has a ratio,
    1 unit if one ratio covers the whole sequence.
    """

    def __init__(self, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, config: CorrectionConfig) -> None:
        """All tensors are (B, T). Raises ValueError unless the shapes agree."""
        shapes = [tuple(old_logprobs.shape), tuple(rollout_logprobs.shape), tuple(mask.shape)]
        if len(set(shapes)) > 1 or mask.ndim != 2:
            raise ValueError(f"old_logprobs, rollout_logprobs and mask must have one shape (B, T), not {shapes}")
        self.config = config
        self.old_BT = at_least_float32(old_logprobs)
        self.rollout_BT = at_least_float32(rollout_logprobs)
        self.mask_BT = mask.bool()
        self.known_BT = self.mask_BT & ~self.rollout_BT.isnan()
        """bool, the tokens of the mask whose log b is known."""
        self.difference_BT = torch.where(self.known_BT, self.old_BT - self.rollout_BT, 0.0)
        """log o - log b for the known tokens; 0 for all other tokens."""
        self.log_BT = self.difference_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        """The l in the docstring of the package."""
        log_BU = aggregate(self.log_BT, self.mask_BT, _AGGREGATE_OF_LEVEL[config.level])
        self.ratio_BU = log_BU.clamp(-_LOG_SUM_LIMIT, _LOG_SUM_LIMIT).exp()
        """ρ of each unit."""
        assert self.ratio_BU.shape[1] in (1, mask.shape[1]), "U is one unit, or one for each token"
        clip_min = -torch.inf if config.clip_min is None else config.clip_min
        clip_max = torch.inf if config.clip_max is None else config.clip_max
        # A ratio that is equal to a bound is inside.
        self.below_BU = self.ratio_BU < clip_min
        self.above_BU = self.ratio_BU > clip_max
        self.clipped_BU = self._clip()
        """The ratios after the action: the weights before batch_normalize."""

    def units(self, tokens_BT: Tensor) -> Tensor:
        """(B, U) bool: the units with at least one of these tokens."""
        if self.config.level == "token":
            return tokens_BT
        return tokens_BT.any(dim=1, keepdim=True)

    def weights(self, mean_weight: float | None) -> Tensor:
        """(B, T) weights, 0 outside the mask.

        With batch_normalize, the weights are divided by `mean_weight`; None: by their mean over the units of the mask.
        """
        weights_BU = self.clipped_BU
        if self.config.batch_normalize:
            if mean_weight is None:
                counted_BU = self.units(self.mask_BT)
                mean = weights_BU[counted_BU].mean()
            else:
                mean = weights_BU.new_tensor(mean_weight)
            # As in verl: if the mean is about 0, the weights stay as they are.
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
    """Aggregates the values of the tokens of each sequence to one value. Returns (B, 1), or for "token" the (B, T)
    values unchanged. `values_BT` must be 0 outside the mask."""
    if how == "token":
        return values_BT
    if how == "max":
        if values_BT.shape[1] == 0:  # amax refuses an empty axis
            return values_BT.new_full((len(values_BT), 1), -torch.inf)
        return values_BT.masked_fill(~mask_BT, -torch.inf).amax(dim=1, keepdim=True)
    sum_B1 = values_BT.sum(dim=1, keepdim=True)
    if how == "sum":
        return sum_B1
    tokens_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return sum_B1 / tokens_B1


def at_least_float32(values: Tensor) -> Tensor:
    """The values in float32, or unchanged if they are in float64."""
    return values if values.dtype == torch.float64 else values.float()


class RejectionMasks:
    """Decides which tokens of a batch stay in the loss. All masks are bool.

    `kept_BT` has the tokens that stay. `vetoed_B1` has the sequences that the veto removed, `off_policy_B1` the
    sequences that the off-policy mask removed, and `dppo_BT` the tokens that the DPPO mask removed.
    """

    def __init__(self, ratios: Ratios, advantages: Tensor | None, logprobs: Tensor | None) -> None:
        """advantages: (B,) or (B, T). logprobs: (B, T) log θ; None: the old log-probabilities.

        Raises ValueError if a mask needs advantages and they are missing or have another shape.
        """
        config = ratios.config
        mask_BT = ratios.mask_BT
        log_BT = ratios.log_BT
        none_B1 = torch.zeros_like(mask_BT[:, :1])
        self.vetoed_B1 = none_B1
        if config.veto is not None:
            self.vetoed_B1 = (log_BT.exp() < config.veto).any(dim=1, keepdim=True)
        self.off_policy_B1 = none_B1
        self.dppo_BT = torch.zeros_like(mask_BT)
        if config.needs_advantages:
            self._judge_by_advantage(ratios, advantages, ratios.old_BT if logprobs is None else logprobs)
        self.kept_BT = mask_BT & ~self.vetoed_B1 & ~self.off_policy_B1 & ~self.dppo_BT
        for rejection in config.rejections:
            self.kept_BT = self.kept_BT & _accepted(log_BT, mask_BT, rejection)
        assert self.kept_BT.shape == mask_BT.shape, (self.kept_BT.shape, mask_BT.shape)
        assert self.kept_BT.dtype == torch.bool, self.kept_BT.dtype

    def _judge_by_advantage(self, ratios: Ratios, advantages: Tensor | None, current: Tensor) -> None:
        """Sets the off-policy mask and the DPPO mask. The docstring of the package has their formulas.

        `current`: (B, T) log θ. A token whose log b is unknown counts as one that θ and b give the same probability.
        """
        config = ratios.config
        mask_BT = ratios.mask_BT
        known_BT = ratios.known_BT
        if advantages is None or advantages.shape not in (mask_BT.shape, mask_BT.shape[:1]):
            shape = None if advantages is None else tuple(advantages.shape)
            raise ValueError(
                f"off_policy_mask_threshold and dppo_mask_low and _high need advantages of shape "
                f"{tuple(mask_BT.shape[:1])} or {tuple(mask_BT.shape)}, not {shape}"
            )
        advantages_BT = advantages
        if advantages.ndim == 1:
            advantages_BT = advantages[:, None].expand_as(mask_BT)
        rollout_BT = torch.where(known_BT, ratios.rollout_BT, 0.0)
        current_BT = torch.where(known_BT, at_least_float32(current), 0.0)
        if config.off_policy_mask_threshold is not None:
            divergence_B1 = aggregate(rollout_BT - current_BT, mask_BT, "mean")
            negative_B1 = (mask_BT & (advantages_BT < 0)).any(dim=1, keepdim=True)
            self.off_policy_B1 = negative_B1 & (divergence_B1 > config.off_policy_mask_threshold)
        rise_BT = current_BT.exp() - rollout_BT.exp()  # p_θ - p_b
        if config.dppo_mask_high is not None:
            self.dppo_BT = self.dppo_BT | ((advantages_BT > 0) & (rise_BT > config.dppo_mask_high))
        if config.dppo_mask_low is not None:
            self.dppo_BT = self.dppo_BT | ((advantages_BT <= 0) & (rise_BT < -config.dppo_mask_low))


def _accepted(log_BT: Tensor, mask_BT: Tensor, rejection: Rejection) -> Tensor:
    """The tokens that a rejection keeps: (B, T) bool, or (B, 1) if the rejection judges whole sequences.

    `Rejection` has the formulas.
    """
    if rejection.estimator == "k1":
        statistic_BU = aggregate(log_BT, mask_BT, rejection.aggregate).exp()
    elif rejection.estimator == "k2":
        statistic_BU = aggregate(log_BT.square() / 2, mask_BT, rejection.aggregate)
    else:
        # expm1 keeps the digits that exp(l) - 1 loses if l is near 0.
        statistic_BU = aggregate(log_BT.expm1() - log_BT, mask_BT, rejection.aggregate)
    low = -torch.inf if rejection.low is None else rejection.low
    high = torch.inf if rejection.high is None else rejection.high
    # Both comparisons are False for a NaN, so the token is kept: a NaN is an error of the model that must stay visible.
    return ~((statistic_BU < low) | (statistic_BU > high))


_MEANS = {
    "ratio_mean": ("ratio", "units"),
    "weight_mean": ("weight", "units"),
    "clipped_fraction": ("clipped", "weighted"),
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
"""Name of a metric that is a quotient -> the names of its numerator and its denominator in `Moments.sums`."""


@dataclass(frozen=True)
class Moments:
    """The sums and extremes of a batch, from which its metrics are computed.

    They cover the tokens whose log b is known, and the units and sequences with such a token. Only the counts
    "response_tokens" and "unknown" also cover other tokens.
    """

    sums: dict[str, float]
    """Sums and counts by name: see `_MEANS` and `of`."""
    extremes: dict[str, float]
    """Minima and maxima by the names of their metrics, which end in _min or _max."""

    @classmethod
    def of(cls, ratios: Ratios, masks: RejectionMasks) -> Moments:
        """The moments of one batch, in float64, because squares of ratios would overflow in float32."""
        config = ratios.config
        mask_BT = ratios.mask_BT
        known_BT = ratios.known_BT
        kept_BT = masks.kept_BT
        known_B1 = known_BT.any(dim=1, keepdim=True)
        unit_BU = ratios.units(known_BT)
        none_BU = torch.zeros_like(unit_BU)
        outside_BU = ratios.below_BU | ratios.above_BU
        # The tokens whose weight the action "mask" sets to 0: all tokens of a unit whose ratio is outside the bounds.
        masked_BT = torch.zeros_like(known_BT)
        if config.action == "mask":
            masked_BT = outside_BU & known_BT
        weighted_BU = unit_BU if config.has_weights else none_BU
        clipped_BU = none_BU
        if config.action != "none":
            clipped_BU = outside_BU & unit_BU
        counts = {
            "response_tokens": mask_BT,
            "unknown": mask_BT & ~known_BT,
            "tokens": known_BT,
            "units": unit_BU,
            "sequences": known_B1,
            "weighted": weighted_BU,
            "clipped": clipped_BU,
            "above": ratios.above_BU & unit_BU,
            "below": ratios.below_BU & unit_BU,
            "masked_tokens": masked_BT,
            # All known tokens of the sequence are masked.
            "masked_sequences": (masked_BT == known_BT).all(dim=1, keepdim=True) & known_B1,
            "rejected_tokens": known_BT & ~kept_BT,
            "rejected_sequences": ~kept_BT.any(dim=1, keepdim=True) & known_B1,
            "vetoed_sequences": masks.vetoed_B1 & known_B1,
            "off_policy_sequences": masks.off_policy_B1 & known_B1,
            "dppo_tokens": masks.dppo_BT & known_BT,
        }
        # `stack` makes one transfer from the device of all counts, instead of one for each count.
        totals = torch.stack([mask.sum() for mask in counts.values()]).tolist()
        sums: dict[str, float] = dict(zip(counts, totals, strict=True))
        # N: the tokens with a known log b. M: the units with such a token.
        difference_N = ratios.difference_BT[known_BT].cpu().double()
        log_N = ratios.log_BT[known_BT].cpu().double()
        ratio_M = ratios.ratio_BU[unit_BU].cpu().double()
        weight_M = ratios.clipped_BU[unit_BU].cpu().double()
        values = {
            "ratio": ratio_M,
            "weight": weight_M,
            "weight_squares": weight_M.square(),
            "difference": difference_N,
            "distance": difference_N.abs(),
            "k3": log_N.expm1() - log_N,
            "ratio_squares": log_N.exp().square(),
        }
        for name, summands in values.items():
            sums[name] = float(summands.sum())
        return cls(
            sums=sums,
            extremes={
                "ratio_min": _min(ratio_M),
                "ratio_max": _max(ratio_M),
                "weight_min": _min(weight_M),
                "weight_max": _max(weight_M),
                "logprob_diff_max": _max(difference_N.abs()),
            },
        )

    @classmethod
    def of_parts(cls, parts: Sequence[Moments]) -> Moments:
        """Joins the moments of the parts of a batch to the moments of the batch. There must be at least one part."""
        first = parts[0]
        assert all(part.sums.keys() == first.sums.keys() for part in parts), "ranks count different things"
        extremes = {}
        for name in first.extremes:
            values = [part.extremes[name] for part in parts]
            extremes[name] = min(values) if name.endswith("_min") else max(values)
        return cls(sums={name: sum(part.sums[name] for part in parts) for name in first.sums}, extremes=extremes)

    def metrics(self) -> dict[str, float]:
        """The metrics that the docstring of `correct` lists. A metric is NaN if there is nothing to count for it."""
        sums = self.sums

        def mean(name: str, count: str) -> float:
            """The sum `name` divided by the count `count`; NaN if nothing was counted."""
            return sums[name] / sums[count] if sums[count] else math.nan

        metrics = {metric: mean(name, count) for metric, (name, count) in _MEANS.items()}
        for metric, value in self.extremes.items():
            # Without tokens, the extremes are infinite.
            metrics[metric] = value if sums["tokens"] else math.nan
        # 1 / mean((w / mean w)²) = (sum w)² / (number of units * sum w²)
        denominator = sums["units"] * sums["weight_squares"]
        metrics["ess"] = sums["weight"] ** 2 / denominator if denominator else math.nan
        metrics["kl"] = -mean("difference", "tokens")
        metrics["chi2"] = mean("ratio_squares", "tokens") - 1
        return metrics


def _min(values_N: Tensor) -> float:
    """The least value; inf if there are no values."""
    return float(values_N.amin()) if values_N.numel() else math.inf


def _max(values_N: Tensor) -> float:
    """The greatest value; -inf if there are no values."""
    return float(values_N.amax()) if values_N.numel() else -math.inf


@dataclass(frozen=True)
class Correction:
    """Weights for the policy loss, the mask after rejection, and metrics of the distance between the policies."""

    weights: Tensor
    """(B, T) float32 (float64 from float64 input), without gradient; 0 outside the response mask."""
    mask: Tensor
    """(B, T) the response mask without the removed tokens, in the dtype of the response mask. Pass it as
    `correction_mask` to `policy_loss`."""
    ratios: Ratios
    rejected: RejectionMasks

    @cached_property
    def moments(self) -> Moments:
        """The sums and extremes behind `metrics`. `Moments.of_parts` joins the moments of the parts of a batch."""
        # `correct` does not compute the moments, because that waits for the device, and a training step needs the
        # moments only once.
        return Moments.of(self.ratios, self.rejected)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that the docstring of `correct` lists."""
        return self.moments.metrics()

    def weight_totals(self) -> tuple[float, int]:
        """The sum of the weights after the action over the units of the response mask, and the number of these units.

        If a batch is corrected in parts, batch_normalize needs the mean weight of the whole batch. It is the sum over
        all parts, divided by the number of units in all parts. Call `correct` for each part with this mean as
        `mean_weight`.
        """
        ratios = self.ratios
        counted_BU = ratios.units(ratios.mask_BT)
        return float(ratios.clipped_BU[counted_BU].sum(dtype=torch.float64)), int(counted_BU.sum())


@torch.no_grad()
def correct(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    config: CorrectionConfig | None = None,
    *,
    advantages: Tensor | None = None,
    logprobs: Tensor | None = None,
    mean_weight: float | None = None,
) -> Correction:
    """Computes the importance weights of a batch, and the mask of the tokens that stay in its loss.

    old_logprobs, rollout_logprobs: (B, T), nats. mask: (B, T) response mask of any dtype; values outside the mask
    have no effect. config: default CorrectionConfig(). A NaN in `rollout_logprobs` is an unknown log-probability: the
    token is treated as on-policy (l = 0), and counts in no metric except `nan_fraction`. A NaN in `old_logprobs` is an
    error of the model and is passed on, so that the loss shows it.
    advantages: (B,) or (B, T), for the off-policy and the DPPO mask. logprobs: (B, T) log θ, for the same masks;
    default: old_logprobs. mean_weight: the divisor of batch_normalize if the batch is a part of a larger batch
    (see `Correction.weight_totals`); default: the mean of this batch.

    The metrics cover the tokens whose log b is known, and are NaN if there are no such tokens. A unit is a token, or a
    sequence if one ratio covers a sequence. ρ is the ratio of a unit, and ρ_t is the ratio of a token.

        ratio_mean, ratio_min, ratio_max            ρ, over units
        weight_mean, weight_min, weight_max         after the action, before batch_normalize, over units
        clipped_fraction                            units whose ratio the action changed; NaN with weights off
        above_max_fraction, below_min_fraction      units with ρ > clip_max, ρ < clip_min, whatever the action
        masked_token_fraction                       tokens whose weight action="mask" set to 0
        masked_sequence_fraction                    sequences that lost every token in this way
        rejected_token_fraction                     tokens that rejection, veto or a mask removed from the loss
        rejected_sequence_fraction                  sequences that lost every token in this way
        vetoed_sequence_fraction                    sequences that the veto removed
        off_policy_sequence_fraction                sequences that the off-policy mask removed
        dppo_token_fraction                         tokens that the DPPO mask removed
        ess                                         1 / mean((w / mean w)²), over units, after the action
        kl                                          E[log b - log o], over tokens
        k3_kl                                       E[ρ_t - 1 - log ρ_t], over tokens
        chi2                                        E[ρ_t²] - 1, over tokens
        logprob_diff_mean, logprob_diff_max         |log o - log b|, over tokens
        nan_fraction                                share of response tokens with unknown log b

    Raises ValueError if the first three tensors do not have one shape (B, T), or if a mask needs advantages and
    `advantages` is missing or has another shape.
    """
    ratios = Ratios(old_logprobs, rollout_logprobs, mask, config or CorrectionConfig())
    rejected = RejectionMasks(ratios, advantages, logprobs)
    return Correction(ratios.weights(mean_weight), rejected.kept_BT.to(mask.dtype), ratios, rejected)
