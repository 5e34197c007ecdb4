"""CorrectionConfig and Rejection: the options of the off-policy correction, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from replay_client.settings import Finite, settings

Level = Literal["token", "sequence", "geometric"]
Action = Literal["truncate", "mask", "none"]
Estimator = Literal["k1", "k2", "k3"]
Aggregate = Literal["token", "sum", "mean", "max"]
Objective = Literal["decoupled", "bypass", "bypass_reinforce"]
"""decoupled: -E[w min(r A, clip(r) A)], w from o/b, r = θ/o. Three policies.
bypass: -E[min(r A, clip(r) A)], r = θ/b. The clipped ratio is the correction; there are no weights.
bypass_reinforce: -E[sg(w) A log θ], w from θ/b. No clipping; sg (stop gradient) treats w as a constant."""

LOG_RATIO_LIMIT = 20.0
"""Bound of the log-ratio of one token, in nats."""
Change = Annotated[float, Field(gt=0, lt=1)]
"""A bound on a difference of probabilities."""


@settings()
class Rejection:
    """Removes tokens or sequences from the loss if their divergence is outside [low, high] (inclusive).

        k1: exp(aggregate of l)        the ratio itself, so 1 is on-policy (verl bounds its inverse)
        k2: aggregate of l² / 2        0 is on-policy
        k3: aggregate of exp(l) - 1 - l

    Raises ValueError for an unknown name, if there is no bound, or if `low` is above `high`.
    """

    estimator: Estimator = "k1"
    """The divergence that is measured at each token."""
    aggregate: Aggregate = "token"
    """token: judge each token by itself. sum, mean, max: judge a whole sequence by this value of its tokens. A
    sequence is a whole rollout."""
    low: Finite | None = None
    """Smallest value that is kept; None: no bound."""
    high: Finite | None = None
    """Largest value that is kept; None: no bound."""

    def __post_init__(self) -> None:
        _check_bounds("low", self.low, "high", self.high)
        if self.low is None and self.high is None:
            raise ValueError("Rejection() keeps everything: set low, high or both")


def _rejections_of(value: Any) -> Any:
    """Makes a Rejection from a table of a configuration file, or a tuple of Rejections from a list of tables.

    Returns all other values unchanged.
    """
    if isinstance(value, Mapping):
        return Rejection(**value)
    if isinstance(value, list | tuple):
        return tuple(Rejection(**rule) if isinstance(rule, Mapping) else rule for rule in value)
    return value


@settings()
class CorrectionConfig:
    """The settings of `correct`: its weights, and the tokens that it removes. PRESETS has the settings of other
    projects.

    Set clip_min = clip_max = 1, with action="truncate", to switch the weights off: every weight is then 1, and the
    metrics are still computed. Raises ValueError for an unknown name, for a value out of range, if clip_min is above
    clip_max, or if the action needs a bound and there is none.
    """

    level: Level = "token"
    """The span of one ratio. token: a token. sequence: a whole sequence, whose ratio is the product of its tokens'
    ratios. geometric: a whole sequence, whose ratio is their geometric mean. A sequence is a whole rollout here, even
    if `sequence_counts` cuts the rollout into several sequences."""
    action: Action = "truncate"
    """The treatment of a ratio outside the bounds. truncate: the weight is the nearer bound. mask: the weight is 0.
    none: the weight is the ratio."""
    clip_min: Finite | None = None
    """Lower bound of the ratio; None: no bound."""
    clip_max: Finite | None = 2.0
    """Upper bound of the ratio; None: no bound."""
    batch_normalize: bool = False
    """Divide the weights by their mean: over the tokens, or over the sequences if one ratio covers a sequence. If the
    mean is at most 1e-8, the weights are not divided, as in verl."""
    rejection: Annotated[Rejection | tuple[Rejection, ...] | None, BeforeValidator(_rejections_of)] = None
    """The rules that remove tokens or sequences from the loss. Each rule is applied by itself. None: no rejection."""
    veto: Annotated[float, Field(gt=math.exp(-LOG_RATIO_LIMIT), lt=1)] | None = None
    """A token with a ratio below this (such as 1e-4) rejects its whole sequence; None: no veto."""
    off_policy_mask_threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """δ: sequences with A < 0 and a mean of log b - log θ above this many nats leave the loss (usual: 0.5); None: off.
    """
    dppo_mask_low: Change | None = None
    """Tokens with A <= 0 whose probability has fallen by more than this from b to θ leave the loss (usual: 0.2). None:
    off."""
    dppo_mask_high: Change | None = None
    """Tokens with A > 0 whose probability has risen by more than this from b to θ leave the loss (usual: 0.2). None:
    off."""
    clip_ratio_c: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Dual clip: bounds the ratio r of the clipped objectives where A < 0 (verl: 3.0). See policy_loss. None: off."""
    rollout_penalty: Finite = 0.0
    """τ: adds τ (log θ - log b)² to the loss of every token, rejected or not, so that θ stays near b (prime-rl:
    kl_tau = 1e-3); 0: off."""
    objective: Objective = "decoupled"
    """The policies that the loss compares: see Objective."""

    def __post_init__(self) -> None:
        _check_bounds("clip_min", self.clip_min, "clip_max", self.clip_max)
        if self.action != "none" and self.clip_min is None and self.clip_max is None:
            raise ValueError(f"action={self.action!r} needs a bound: set clip_min, clip_max, or action='none'")

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """`rejection` as a tuple."""
        if self.rejection is None:
            return ()
        return (self.rejection,) if isinstance(self.rejection, Rejection) else tuple(self.rejection)

    @property
    def has_weights(self) -> bool:
        """True if the weights depend on the ratios.

        If the action is "truncate" and clip_min is equal to clip_max, every weight is that value. The other actions do
        not move a ratio to a bound, so their weights always depend on the ratios.
        """
        if self.action != "truncate":
            return True
        return self.clip_min is None or self.clip_min != self.clip_max

    @property
    def judges_rollouts(self) -> bool:
        """True if the weight or the rejection of a token depends on the other tokens of its rollout."""
        return (
            self.level != "token"
            or any(rejection.aggregate != "token" for rejection in self.rejections)
            or self.veto is not None
            or self.off_policy_mask_threshold is not None
        )

    @property
    def needs_advantages(self) -> bool:
        """True if a mask depends on the sign of the advantage."""
        bounds = (self.off_policy_mask_threshold, self.dppo_mask_low, self.dppo_mask_high)
        return any(bound is not None for bound in bounds)


def _check_bounds(low_name: str, low: float | None, high_name: str, high: float | None) -> None:
    """Raises ValueError if the lower bound is above the upper bound."""
    if low is not None and high is not None and low > high:
        raise ValueError(f"{low_name}={low} must not exceed {high_name}={high}")
