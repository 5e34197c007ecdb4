"""Off-policy correction: how much each token counts when the sampler's policy was not the one being trained.

Three policies: b wrote the tokens (rollout), o is the trainer's before the update (old), θ is being updated.
This module is about o/b, which holds engine mismatch and staleness in one ratio. Axes: B sequences, T tokens
of the longest. m is the response mask.

    l_t = (log o_t - log b_t) * m_t, clamped to ±20; 0 where log b_t is NaN (unknown: taken for on-policy)

    level       ratio ρ                            action     weight w
    token       exp(l_t)                           truncate   clamp(ρ, clip_min, clip_max)
    sequence    exp(sum_t l_t)                     mask       ρ inside the bounds (inclusive), 0 outside
    geometric   exp(sum_t l_t / sum_t m_t)         none       ρ

Weights multiply the loss. What takes tokens out of the loss altogether, always leaving its denominators alone:

    rejection        tokens or sequences whose divergence from b lies outside bounds (see Rejection)
    veto             sequences with a token of ρ_t < veto
    off-policy mask  sequences with A < 0 and mean_t(log b - log θ) > off_policy_mask_threshold
    DPPO mask        tokens with A > 0 and p_θ - p_b > dppo_mask_high, or A <= 0 and p_θ - p_b < -dppo_mask_low

The objective says which of the three policies the loss compares (see Objective and losses.corrected_policy_loss).

Sources: truncation, Yao et al. 2025 (TIS) and TRL; masking, IcePop; rejection, veto and metrics, verl's
rollout correction; off-policy mask, DeepSeek-V3.2 (arXiv 2512.02556), TRL and slime; DPPO mask, prime-rl.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Level = Literal["token", "sequence", "geometric"]
Action = Literal["truncate", "mask", "none"]
Estimator = Literal["k1", "k2", "k3"]
Aggregate = Literal["token", "sum", "mean", "max"]
Objective = Literal["decoupled", "bypass", "bypass_reinforce"]
"""decoupled: -E[w min(r A, clip(r) A)], w from o/b, r = θ/o. Three policies.
bypass: -E[min(r A, clip(r) A)], r = θ/b. The clipped ratio corrects by itself; there are no weights.
bypass_reinforce: -E[sg(w) A log θ], w from θ/b. No clipping."""

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
    """How `correct` makes weights and what it takes out of the loss. presets.py has those of other projects.

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
    rejection: Rejection | tuple[Rejection, ...] | None = None
    """Which tokens or sequences leave the loss; of several, each takes out its own. None: none."""
    veto: float | None = None
    """One token with a ratio below this (verl: 1e-4) rejects its whole sequence; None: no veto."""
    off_policy_mask_threshold: float | None = None
    """δ: sequences with A < 0 and a mean of log b - log θ above this many nats leave the loss (0.5); None: off."""
    dppo_mask_low: float | None = None
    """Tokens with A <= 0 whose probability has fallen by more than this since b leave the loss (0.2); None: off."""
    dppo_mask_high: float | None = None
    """Tokens with A > 0 whose probability has risen by more than this since b leave the loss (0.2); None: off."""
    rollout_penalty: float = 0.0
    """τ: adds τ (log θ - log b)² to the loss of every token, rejected or not, so that θ stays near b (prime-rl:
    kl_tau = 1e-3); 0: off."""
    objective: Objective = "decoupled"
    """Which policies the loss compares."""

    def __post_init__(self) -> None:
        _check_choice("level", self.level, Level)
        _check_choice("action", self.action, Action)
        _check_choice("objective", self.objective, Objective)
        _check_bounds("clip_min", self.clip_min, "clip_max", self.clip_max)
        if self.action != "none" and self.clip_min is None and self.clip_max is None:
            raise ValueError(f"action={self.action!r} needs a bound: set clip_min, clip_max, or action='none'")
        smallest = math.exp(-LOG_RATIO_LIMIT)
        if self.veto is not None and not smallest < self.veto < 1:
            raise ValueError(f"veto is a ratio between {smallest:.1e} and 1, such as 1e-4, not {self.veto}")
        if self.off_policy_mask_threshold is not None and not 0 < self.off_policy_mask_threshold < math.inf:
            raise ValueError(
                f"off_policy_mask_threshold must be above 0 nats, such as 0.5, not {self.off_policy_mask_threshold}"
            )
        for name, bound in (("dppo_mask_low", self.dppo_mask_low), ("dppo_mask_high", self.dppo_mask_high)):
            if bound is not None and not 0 < bound < 1:
                raise ValueError(f"{name} is a difference of probabilities between 0 and 1, such as 0.2, not {bound}")
        if not 0 <= self.rollout_penalty < math.inf:
            raise ValueError(f"rollout_penalty must be finite and at least 0, not {self.rollout_penalty}")

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """`rejection` as a tuple."""
        if self.rejection is None:
            return ()
        return (self.rejection,) if isinstance(self.rejection, Rejection) else tuple(self.rejection)

    @property
    def needs_advantages(self) -> bool:
        """Whether what leaves the loss depends on the sign of the advantage."""
        return any(
            bound is not None for bound in (self.off_policy_mask_threshold, self.dppo_mask_low, self.dppo_mask_high)
        )


@dataclass(frozen=True)
class Correction:
    """Weights for the policy loss, what rejection left of the mask, and how far apart the policies are."""

    weights: Tensor
    """(B, T) float32 (float64 from float64 input), without gradient; 0 outside the response mask."""
    mask: Tensor
    """(B, T) the response mask, in its own dtype, without what was rejected: `keep` of `policy_loss`."""
    metrics: dict[str, float]
    """See `correct`."""


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
    """Importance weights and rejection of a batch.

    old_logprobs, rollout_logprobs: (B, T), nats. mask: (B, T) response mask, of any dtype; what stands outside it
    has no effect. config: CorrectionConfig() unless given. A NaN in `rollout_logprobs` is an unknown log-probability:
    the token is taken for on-policy (l = 0) and counts in no metric but `nan_fraction`. A NaN in `old_logprobs` is an
    error of the model and is passed on, so that the loss shows it.
    advantages: (B,) or (B, T), for the off-policy and the DPPO mask. logprobs: (B, T) log θ, for the same; left out:
    old_logprobs. mean_weight: what batch_normalize divides by, where the batch is a part of a larger one
    (`weight_totals` of all parts gives it); left out: the mean of this batch.

    Metrics, over tokens with a known log b ("units": tokens, or sequences where a ratio covers one); NaN where there
    are none. ρ is the ratio at the level of the configuration, ρ_t that of the token.

        ratio_mean, ratio_min, ratio_max            ρ, over units
        weight_mean, weight_min, weight_max         after the action, before batch_normalize, over units
        clipped_fraction                            units whose ratio the action changed
        above_max_fraction, below_min_fraction      units with ρ > clip_max, ρ < clip_min, whatever the action
        masked_token_fraction                       tokens whose weight action="mask" set to 0
        masked_sequence_fraction                    sequences that so lost every token
        rejected_token_fraction                     tokens that rejection, veto or a mask took out of the loss
        rejected_sequence_fraction                  sequences that so lost every token
        vetoed_sequence_fraction                    sequences that the veto took out
        off_policy_sequence_fraction                sequences that the off-policy mask took out
        dppo_token_fraction                         tokens that the DPPO mask took out
        ess                                         1 / mean((w / mean w)²), over units, after the action
        kl                                          E[log b - log o], over tokens
        k3_kl                                       E[ρ_t - 1 - log ρ_t], over tokens
        chi2                                        E[ρ_t²] - 1, over tokens
        logprob_diff_mean, logprob_diff_max         |log o - log b|, over tokens
        nan_fraction                                of the response tokens, those with unknown log b

    Raises ValueError unless the tensors have one shape (B, T), and where a mask needs advantages and has none.
    """
    config = config or CorrectionConfig()
    ratios = _Ratios(old_logprobs, rollout_logprobs, mask, config)
    exits = _Exits(ratios, advantages, logprobs)
    return Correction(
        weights=ratios.weights(mean_weight),
        mask=exits.kept_BT.to(mask.dtype),
        metrics=_moments(config, ratios, exits).metrics(),
    )


@torch.no_grad()
def weights_and_mask(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    config: CorrectionConfig,
    *,
    advantages: Tensor | None = None,
    logprobs: Tensor | None = None,
    mean_weight: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`correct` without its metrics, which would wait for the device at every micro-batch."""
    ratios = _Ratios(old_logprobs, rollout_logprobs, mask, config)
    exits = _Exits(ratios, advantages, logprobs)
    return ratios.weights(mean_weight), exits.kept_BT.to(mask.dtype)


@torch.no_grad()
def measure(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    config: CorrectionConfig,
    *,
    advantages: Tensor | None = None,
    logprobs: Tensor | None = None,
) -> Moments:
    """What the metrics of `correct` are made of; moments of the parts of a batch add up to those of the whole."""
    ratios = _Ratios(old_logprobs, rollout_logprobs, mask, config)
    exits = _Exits(ratios, advantages, logprobs)
    return _moments(config, ratios, exits)


@torch.no_grad()
def weight_totals(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, config: CorrectionConfig
) -> tuple[float, int]:
    """(sum, count) of the weights after the action, over units: their quotient over all parts of a batch is the
    `mean_weight` of each part."""
    ratios = _Ratios(old_logprobs, rollout_logprobs, mask, config)
    counted_BU = _units(ratios.mask_BT, config.level)
    return float(ratios.acted_BU[counted_BU].sum(dtype=torch.float64)), int(counted_BU.sum())


@dataclass(frozen=True)
class Moments:
    """Sums and extremes over the known tokens, units and sequences of a batch."""

    sums: dict[str, float]
    minima: dict[str, float]
    maxima: dict[str, float]

    @classmethod
    def of_parts(cls, parts: Sequence[Moments]) -> Moments:
        """Those of at least one part as one."""
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

        def extreme(value: float, count: str = "units") -> float:
            return value if total[count] else math.nan

        squares = total["units"] * total["weight_squares"]
        return {
            "ratio_mean": mean("ratio", "units"),
            "ratio_min": extreme(self.minima["ratio"]),
            "ratio_max": extreme(self.maxima["ratio"]),
            "weight_mean": mean("weight", "units"),
            "weight_min": extreme(self.minima["weight"]),
            "weight_max": extreme(self.maxima["weight"]),
            "clipped_fraction": mean("clipped", "units"),
            "above_max_fraction": mean("above", "units"),
            "below_min_fraction": mean("below", "units"),
            "masked_token_fraction": mean("masked_tokens", "tokens"),
            "masked_sequence_fraction": mean("masked_sequences", "sequences"),
            "rejected_token_fraction": mean("rejected_tokens", "tokens"),
            "rejected_sequence_fraction": mean("rejected_sequences", "sequences"),
            "vetoed_sequence_fraction": mean("vetoed_sequences", "sequences"),
            "off_policy_sequence_fraction": mean("off_policy_sequences", "sequences"),
            "dppo_token_fraction": mean("dppo_tokens", "tokens"),
            "ess": total["weight"] ** 2 / squares if squares else math.nan,
            "kl": -mean("difference", "tokens"),
            "k3_kl": mean("k3", "tokens"),
            "chi2": mean("ratio_squares", "tokens") - 1,
            "logprob_diff_mean": mean("distance", "tokens"),
            "logprob_diff_max": extreme(self.maxima["distance"], "tokens"),
            "nan_fraction": mean("unknown", "response_tokens"),
        }


class _Ratios:
    """Ratios and weights of a batch. U units a row: T tokens, or the sequence as one."""

    def __init__(self, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, config: CorrectionConfig) -> None:
        if old_logprobs.ndim != 2 or not old_logprobs.shape == rollout_logprobs.shape == mask.shape:
            raise ValueError(
                f"old_logprobs {tuple(old_logprobs.shape)}, rollout_logprobs {tuple(rollout_logprobs.shape)} and "
                f"mask {tuple(mask.shape)} must have one shape (B, T)"
            )
        self.config = config
        self.old_logprobs, self.rollout_logprobs = old_logprobs, rollout_logprobs
        self.mask_BT = mask.bool()
        self.known_BT = self.mask_BT & ~rollout_logprobs.isnan()
        difference_BT = at_least_float32(old_logprobs) - at_least_float32(rollout_logprobs)
        self.difference_BT = torch.where(self.known_BT, difference_BT, 0.0)
        self.log_BT = self.difference_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        log_BU = _aggregate(self.log_BT, self.mask_BT, _AGGREGATE_OF_LEVEL[config.level])
        self.ratio_BU = log_BU.clamp(-_LOG_SUM_LIMIT, _LOG_SUM_LIMIT).exp()
        self.acted_BU = _act(self.ratio_BU, config)

    def weights(self, mean_weight: float | None) -> Tensor:
        """(B, T), 0 outside the mask."""
        weights_BU = self.acted_BU
        if self.config.batch_normalize:
            counted_BU = _units(self.mask_BT, self.config.level)
            mean = weights_BU.new_tensor(mean_weight) if mean_weight is not None else weights_BU[counted_BU].mean()
            weights_BU = torch.where(mean > 0, weights_BU / mean, weights_BU)  # a mean of 0: every ratio was masked
        return torch.where(self.mask_BT, weights_BU, 0.0)


class _Exits:
    """Which tokens leave the loss, and by which rule."""

    def __init__(self, ratios: _Ratios, advantages: Tensor | None, logprobs: Tensor | None) -> None:
        """`logprobs`: log θ; the old ones where left out."""
        config, mask_BT, log_BT = ratios.config, ratios.mask_BT, ratios.log_BT
        nobody_B1 = torch.zeros_like(mask_BT[:, :1])
        self.vetoed_B1 = nobody_B1
        if config.veto is not None:
            self.vetoed_B1 = (log_BT.exp() < config.veto).any(dim=1, keepdim=True)
        self.off_policy_B1, self.dppo_BT = nobody_B1, torch.zeros_like(mask_BT)
        if config.needs_advantages:
            if advantages is None or advantages.shape not in (mask_BT.shape, mask_BT.shape[:1]):
                given = None if advantages is None else tuple(advantages.shape)
                raise ValueError(
                    f"off_policy_mask_threshold and dppo_mask_low and _high need advantages of shape "
                    f"{tuple(mask_BT.shape[:1])} or {tuple(mask_BT.shape)}, not {given}"
                )
            advantages_BT = advantages[:, None].expand_as(mask_BT) if advantages.ndim == 1 else advantages
            known_BT = ratios.known_BT
            current = ratios.old_logprobs if logprobs is None else logprobs
            rollout_BT = torch.where(known_BT, at_least_float32(ratios.rollout_logprobs), 0.0)
            current_BT = torch.where(known_BT, at_least_float32(current), 0.0)
            if config.off_policy_mask_threshold is not None:
                divergence_B1 = _aggregate(rollout_BT - current_BT, mask_BT, "mean")
                negative_B1 = (mask_BT & (advantages_BT < 0)).any(dim=1, keepdim=True)
                self.off_policy_B1 = negative_B1 & (divergence_B1 > config.off_policy_mask_threshold)
            rise_BT = torch.where(known_BT, current_BT.exp() - rollout_BT.exp(), 0.0)
            if config.dppo_mask_high is not None:
                self.dppo_BT = self.dppo_BT | ((advantages_BT > 0) & (rise_BT > config.dppo_mask_high))
            if config.dppo_mask_low is not None:
                self.dppo_BT = self.dppo_BT | ((advantages_BT <= 0) & (rise_BT < -config.dppo_mask_low))
        self.kept_BT = mask_BT & ~self.vetoed_B1 & ~self.off_policy_B1 & ~self.dppo_BT
        for rejection in config.rejections:
            self.kept_BT = self.kept_BT & _accepted(log_BT, mask_BT, rejection)


def _moments(config: CorrectionConfig, ratios: _Ratios, exits: _Exits) -> Moments:
    """In float64, because squares of ratios leave the range of float32."""
    mask_BT, known_BT = ratios.mask_BT, ratios.known_BT
    unit_BU = _units(known_BT, config.level)
    below_BU, above_BU = _outside(ratios.ratio_BU, config)
    outside_BU = below_BU | above_BU
    masked_BT = (outside_BU if config.action == "mask" else torch.zeros_like(outside_BU)) & known_BT
    gone_BT = known_BT & ~exits.kept_BT
    known_B1 = known_BT.any(dim=1, keepdim=True)

    difference_N = ratios.difference_BT[known_BT].cpu().double()
    log_N = ratios.log_BT[known_BT].cpu().double()
    ratio_M, weight_M = ratios.ratio_BU[unit_BU].cpu().double(), ratios.acted_BU[unit_BU].cpu().double()
    counts = {
        "response_tokens": mask_BT,
        "unknown": mask_BT & ~known_BT,
        "tokens": known_BT,
        "units": unit_BU,
        "sequences": known_B1,
        "clipped": outside_BU & unit_BU if config.action != "none" else torch.zeros_like(unit_BU),
        "above": above_BU & unit_BU,
        "below": below_BU & unit_BU,
        "masked_tokens": masked_BT,
        "masked_sequences": (masked_BT == known_BT).all(dim=1, keepdim=True) & known_B1,
        "rejected_tokens": gone_BT,
        "rejected_sequences": ~exits.kept_BT.any(dim=1, keepdim=True) & known_B1,
        "vetoed_sequences": exits.vetoed_B1 & known_B1,
        "off_policy_sequences": exits.off_policy_B1 & known_B1,
        "dppo_tokens": exits.dppo_BT & known_BT,
    }
    totals = torch.stack([places.sum() for places in counts.values()]).tolist()
    sums = {
        "ratio": ratio_M,
        "weight": weight_M,
        "weight_squares": weight_M.square(),
        "difference": difference_N,
        "distance": difference_N.abs(),
        "k3": log_N.expm1() - log_N,
        "ratio_squares": log_N.exp().square(),
    }
    return Moments(
        sums=dict(zip(counts, totals, strict=True)) | {name: float(values.sum()) for name, values in sums.items()},
        minima={"ratio": _extreme(ratio_M, torch.amin, math.inf), "weight": _extreme(weight_M, torch.amin, math.inf)},
        maxima={
            "ratio": _extreme(ratio_M, torch.amax, -math.inf),
            "weight": _extreme(weight_M, torch.amax, -math.inf),
            "distance": _extreme(difference_N.abs(), torch.amax, -math.inf),
        },
    )


def _extreme(values_N: Tensor, reduce: Callable[[Tensor], Tensor], of_none: float) -> float:
    return float(reduce(values_N)) if values_N.numel() else of_none


def at_least_float32(values: Tensor) -> Tensor:
    """As they are if they are float64, else in float32."""
    return values if values.dtype == torch.float64 else values.float()


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


def _check_choice(name: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, not {value!r}")


def _check_bounds(low_name: str, low: float | None, high_name: str, high: float | None) -> None:
    for name, bound in ((low_name, low), (high_name, high)):
        if bound is not None and not (math.isfinite(bound) and bound >= 0):
            raise ValueError(f"{name} must be finite and not negative, or None for no bound, not {bound}")
    if low is not None and high is not None and low > high:
        raise ValueError(f"{low_name}={low} must not exceed {high_name}={high}")
