"""Off-policy correction: how much each token counts when the sampler's policy was not the one being trained.

Three policies: b wrote the tokens (rollout), o is the trainer's before the update (old), θ is being updated.
This module is about o/b, which holds engine mismatch and staleness in one ratio. Axes: B sequences, T tokens
of the longest.

    l_t = (log o_t - log b_t) * m_t, clamped to ±20; 0 where log b_t is NaN (unknown: taken for on-policy)

    level       ratio ρ                            action     weight
    token       exp(l_t)                           truncate   clamp(ρ, clip_min, clip_max)
    sequence    exp(sum_t l_t)                     mask       ρ inside the bounds (inclusive), 0 outside
    geometric   exp(sum_t l_t / sum_t m_t)         none       ρ

Sources: truncation, Yao et al. 2025 (TIS) and TRL; masking, IcePop; rejection, veto and metrics, verl's
rollout correction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Level = Literal["token", "sequence", "geometric"]
Action = Literal["truncate", "mask", "none"]
Estimator = Literal["k1", "k2", "k3"]
Aggregate = Literal["token", "sum", "mean", "max"]

LOG_RATIO_LIMIT = 20.0
"""Bound of the log-ratio of one token."""
_LOG_SUM_LIMIT = 80.0
"""Bound of the log-ratio of a whole sequence: exp of it is still finite in float32."""
_AGGREGATE_OF_LEVEL: dict[Level, Aggregate] = {"token": "token", "sequence": "sum", "geometric": "mean"}


@dataclass(frozen=True)
class Rejection:
    """Takes tokens or sequences out of the loss whose divergence lies outside [low, high] (inclusive).

        k1: exp(aggregate of l)        the ratio itself, so 1 is on-policy (verl bounds its inverse)
        k2: aggregate of l² / 2        0 is on-policy
        k3: aggregate of exp(l) - 1 - l

    Raises ValueError for an unknown name, no bound, or bounds that nothing or everything satisfies.
    """

    estimator: Estimator = "k1"
    """What is measured at each token."""
    aggregate: Aggregate = "token"
    """What is judged: each "token" by itself, or a whole sequence by "sum", "mean" or "max" over its tokens."""
    low: float | None = None
    """Smallest value that is kept; None: no bound."""
    high: float | None = None
    """Largest value that is kept; None: no bound."""

    def __post_init__(self) -> None:
        _check_choice("estimator", self.estimator, Estimator)
        _check_choice("aggregate", self.aggregate, Aggregate)
        _check_bounds("low", self.low, "high", self.high)
        if self.low is None and self.high is None:
            raise ValueError("Rejection() keeps everything: set low, high or both")


@dataclass(frozen=True)
class CorrectionConfig:
    """How `correct` makes weights and which tokens it rejects.

    To switch the weights off, set clip_min = clip_max = 1: each is 1 then, and the metrics stay.
    Raises ValueError for an unknown name, and for bounds without effect or out of range.
    """

    level: Level = "token"
    """What a ratio covers: one token, or a sequence by the product or the geometric mean of its tokens'."""
    action: Action = "truncate"
    """What happens to a ratio outside the bounds."""
    clip_min: float | None = None
    """Lower bound of the ratio; None: no bound."""
    clip_max: float | None = 2.0
    """Upper bound of the ratio; None: no bound."""
    batch_normalize: bool = False
    """Divide by the mean weight: over the tokens, or over the sequences where one ratio covers a sequence."""
    rejection: Rejection | None = None
    """Which tokens or sequences leave the loss; None: none."""
    veto: float | None = None
    """One token with a ratio below this (verl: 1e-4) rejects its whole sequence; None: no veto."""

    def __post_init__(self) -> None:
        _check_choice("level", self.level, Level)
        _check_choice("action", self.action, Action)
        _check_bounds("clip_min", self.clip_min, "clip_max", self.clip_max)
        if self.action != "none" and self.clip_min is None and self.clip_max is None:
            raise ValueError(f"action={self.action!r} needs a bound: set clip_min, clip_max, or action='none'")
        smallest = math.exp(-LOG_RATIO_LIMIT)
        if self.veto is not None and not smallest < self.veto < 1:
            raise ValueError(f"veto is a ratio between {smallest:.1e} and 1, such as 1e-4, not {self.veto}")


@dataclass(frozen=True)
class Correction:
    """Weights for the policy loss, what rejection left of the mask, and how far apart the policies are."""

    weights: Tensor
    """(B, T) float32, without gradient; 0 outside the response mask."""
    mask: Tensor
    """(B, T) the response mask, in its own dtype, without what was rejected: `keep` of `policy_loss`."""
    metrics: dict[str, float]
    """See `correct`."""


@torch.no_grad()
def correct(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, config: CorrectionConfig | None = None
) -> Correction:
    """Importance weights and rejection of a batch.

    old_logprobs, rollout_logprobs: (B, T), nats. mask: (B, T) response mask, of any dtype; what stands outside it
    has no effect. config: CorrectionConfig() unless given. A NaN in `rollout_logprobs` is an unknown log-probability:
    the token is taken for on-policy (l = 0) and counts in no metric but `nan_fraction`. A NaN in `old_logprobs` is an
    error of the model and is passed on, so that the loss shows it.

    Metrics, over tokens with a known log b ("units": tokens, or sequences where a ratio covers one); NaN where there
    are none. ρ is the ratio at the level of the configuration, ρ_t that of the token.

        ratio_mean, ratio_min, ratio_max            ρ, over units
        weight_mean, weight_min, weight_max         after the action, before batch_normalize, over units
        clipped_fraction                            units whose ratio the action changed
        above_max_fraction, below_min_fraction      units with ρ > clip_max, ρ < clip_min, whatever the action
        masked_token_fraction                       tokens whose weight action="mask" set to 0
        masked_sequence_fraction                    sequences that so lost every token
        rejected_token_fraction                     tokens that rejection or veto took out
        rejected_sequence_fraction                  sequences that so lost every token
        ess                                         1 / mean((w / mean w)²), over units, after the action
        kl                                          E[log b - log o], over tokens
        k3_kl                                       E[ρ_t - 1 - log ρ_t], over tokens
        chi2                                        E[ρ_t²] - 1, over tokens
        logprob_diff_mean, logprob_diff_max         |log o - log b|, over tokens
        nan_fraction                                of the response tokens, those with unknown log b

    Raises ValueError unless the three have one shape (B, T).
    """
    config = config or CorrectionConfig()
    if old_logprobs.ndim != 2 or not old_logprobs.shape == rollout_logprobs.shape == mask.shape:
        raise ValueError(
            f"old_logprobs {tuple(old_logprobs.shape)}, rollout_logprobs {tuple(rollout_logprobs.shape)} and "
            f"mask {tuple(mask.shape)} must have one shape (B, T)"
        )
    mask_BT = mask.bool()
    known_BT = mask_BT & ~rollout_logprobs.isnan()
    difference_BT = torch.where(known_BT, old_logprobs.float() - rollout_logprobs.float(), 0.0)
    log_ratio_BT = difference_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    # U units a row: T tokens, or the sequence as one.
    log_ratio_BU = _aggregate(log_ratio_BT, mask_BT, _AGGREGATE_OF_LEVEL[config.level])
    ratio_BU = log_ratio_BU.clamp(-_LOG_SUM_LIMIT, _LOG_SUM_LIMIT).exp()
    acted_BU = _act(ratio_BU, config)
    weights_BU = acted_BU
    if config.batch_normalize:
        counted_BU = _units(mask_BT, config.level)
        mean = torch.where(counted_BU, acted_BU, 0.0).sum() / counted_BU.sum()
        weights_BU = torch.where(mean > 0, acted_BU / mean, acted_BU)  # a mean of 0: every ratio was masked

    kept_BT = mask_BT
    if config.rejection is not None:
        kept_BT = kept_BT & _accepted(log_ratio_BT, mask_BT, config.rejection)
    if config.veto is not None:
        kept_BT = kept_BT & ~(log_ratio_BT.exp() < config.veto).any(dim=1, keepdim=True)

    return Correction(
        weights=torch.where(mask_BT, weights_BU, 0.0),
        mask=kept_BT.to(mask.dtype),
        metrics=_metrics(config, mask_BT, known_BT, kept_BT, difference_BT, log_ratio_BT, ratio_BU, acted_BU),
    )


def _aggregate(values_BT: Tensor, mask_BT: Tensor, aggregate: Aggregate) -> Tensor:
    """`values_BT`, which are 0 outside the mask, as they are (B, T), or one value a sequence (B, 1)."""
    if aggregate == "token":
        return values_BT
    if aggregate == "max":
        return values_BT.masked_fill(~mask_BT, -torch.inf).amax(dim=1, keepdim=True)
    sum_B1 = values_BT.sum(dim=1, keepdim=True)
    return sum_B1 if aggregate == "sum" else sum_B1 / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)


def _units(tokens_BT: Tensor, level: Level) -> Tensor:
    """The units with at least one of these tokens: (B, T), or (B, 1) where one ratio covers a sequence."""
    return tokens_BT if level == "token" else tokens_BT.any(dim=1, keepdim=True)


def _outside(ratio_BU: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """Which ratios lie below clip_min, and which above clip_max; the bounds themselves are inside."""
    below_BU = ratio_BU < (-torch.inf if config.clip_min is None else config.clip_min)
    above_BU = ratio_BU > (torch.inf if config.clip_max is None else config.clip_max)
    return below_BU, above_BU


def _act(ratio_BU: Tensor, config: CorrectionConfig) -> Tensor:
    if config.action == "none":
        return ratio_BU
    if config.action == "truncate":
        return ratio_BU.clamp(min=config.clip_min, max=config.clip_max)
    below_BU, above_BU = _outside(ratio_BU, config)
    return ratio_BU.masked_fill(below_BU | above_BU, 0.0)


def _accepted(log_ratio_BT: Tensor, mask_BT: Tensor, rejection: Rejection) -> Tensor:
    """What the rejection keeps: (B, T), or (B, 1) for whole sequences."""
    if rejection.estimator == "k1":
        statistic_BU = _aggregate(log_ratio_BT, mask_BT, rejection.aggregate).exp()
    elif rejection.estimator == "k2":
        statistic_BU = _aggregate(log_ratio_BT.square() / 2, mask_BT, rejection.aggregate)
    else:
        # expm1 keeps the digits that exp(l) - 1 loses near the policy.
        statistic_BU = _aggregate(log_ratio_BT.expm1() - log_ratio_BT, mask_BT, rejection.aggregate)
    low = -torch.inf if rejection.low is None else rejection.low
    high = torch.inf if rejection.high is None else rejection.high
    return (low <= statistic_BU) & (statistic_BU <= high)


def _metrics(
    config: CorrectionConfig,
    mask_BT: Tensor,
    known_BT: Tensor,
    kept_BT: Tensor,
    difference_BT: Tensor,
    log_ratio_BT: Tensor,
    ratio_BU: Tensor,
    acted_BU: Tensor,
) -> dict[str, float]:
    """As documented at `correct`; in float64, because squares of ratios leave the range of float32."""
    unit_BU = _units(known_BT, config.level)
    below_BU, above_BU = _outside(ratio_BU, config)
    outside_BU = below_BU | above_BU
    masked_BT = (outside_BU if config.action == "mask" else torch.zeros_like(outside_BU)) & known_BT
    sequence_B = known_BT.any(dim=1)

    def host(values: Tensor) -> Tensor:
        return values.cpu().double()

    difference_N, log_ratio_N = host(difference_BT[known_BT]), host(log_ratio_BT[known_BT])
    ratio_N = log_ratio_N.exp()
    ratio_M, weight_M = host(ratio_BU[unit_BU]), host(acted_BU[unit_BU])
    clipped_M = host(outside_BU[unit_BU]) if config.action != "none" else torch.zeros_like(ratio_M)
    return {
        "ratio_mean": float(ratio_M.mean()),
        "ratio_min": _or_nan(ratio_M, torch.min),
        "ratio_max": _or_nan(ratio_M, torch.max),
        "weight_mean": float(weight_M.mean()),
        "weight_min": _or_nan(weight_M, torch.min),
        "weight_max": _or_nan(weight_M, torch.max),
        "clipped_fraction": float(clipped_M.mean()),
        "above_max_fraction": float(host(above_BU[unit_BU]).mean()),
        "below_min_fraction": float(host(below_BU[unit_BU]).mean()),
        "masked_token_fraction": float(host(masked_BT[known_BT]).mean()),
        "masked_sequence_fraction": float(host((masked_BT == known_BT).all(dim=1)[sequence_B]).mean()),
        "rejected_token_fraction": float(host(~kept_BT[known_BT]).mean()),
        "rejected_sequence_fraction": float(host(~kept_BT.any(dim=1)[sequence_B]).mean()),
        "ess": float(1 / (weight_M / weight_M.mean()).square().mean()),
        "kl": float(-difference_N.mean()),
        "k3_kl": float((log_ratio_N.expm1() - log_ratio_N).mean()),
        "chi2": float(ratio_N.square().mean() - 1),
        "logprob_diff_mean": float(difference_N.abs().mean()),
        "logprob_diff_max": _or_nan(difference_N.abs(), torch.max),
        "nan_fraction": float(host(~known_BT[mask_BT]).mean()),
    }


def _or_nan(values_N: Tensor, reduce: Any) -> float:
    return float(reduce(values_N)) if values_N.numel() else math.nan


def _check_choice(name: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, not {value!r}")


def _check_bounds(low_name: str, low: float | None, high_name: str, high: float | None) -> None:
    for name, bound in ((low_name, low), (high_name, high)):
        if bound is not None and not (math.isfinite(bound) and bound >= 0):
            raise ValueError(f"{name} must be finite and not negative, or None for no bound, not {bound}")
    if low is not None and high is not None and low > high:
        raise ValueError(f"{low_name}={low} must not exceed {high_name}={high}")
