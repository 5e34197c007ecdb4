"""Off-policy correction: weights and masks for tokens that another policy wrote.

Three policies: b wrote the tokens (rollout), o is the trainer's policy before the update (old), θ is being updated.
This package corrects for the ratio o/b. The ratio differs from 1 for two reasons: inference engine and trainer compute
slightly different probabilities with the same weights (mismatch), and b may have older weights than o (staleness).
Axes: B rollouts, T tokens of the longest rollout. m is the response mask.

    l_t = (log o_t - log b_t) * m_t, clamped to ±20; 0 where log b_t is NaN (unknown: counted as on-policy)

    level       ratio ρ                            action     weight w
    token       exp(l_t)                           truncate   clamp(ρ, clip_min, clip_max)
    sequence    exp(sum_t l_t)                     mask       ρ inside the bounds (inclusive), 0 outside
    geometric   exp(sum_t l_t / sum_t m_t)         none       ρ

A weight multiplies the loss of its token. Four rules remove tokens from the loss. The denominators of the loss still
count the removed tokens:

    rejection        tokens or sequences whose divergence from b lies outside bounds (see Rejection)
    veto             sequences with a token of ρ_t < veto
    off-policy mask  sequences with A < 0 and mean_t(log b - log θ) > off_policy_mask_threshold
    DPPO mask        tokens with A > 0 and p_θ - p_b > dppo_mask_high, or A <= 0 and p_θ - p_b < -dppo_mask_low

As in the sources, a *sequence* is all that the policy wrote in answer to one prompt. So a sequence here is a whole
rollout, even if the rollout has several turns, or if `sequence_counts` cuts it into several sequences. The product of
the ratios of its tokens is the ratio of the whole trajectory, because tokens that the policy did not write, such as
results of tools, have the same probability under every policy, and cancel. Therefore each row of the (B, T) tensors is
a whole rollout, whose sequences `batching.Rollouts` has joined.

The objective says which of the three policies the loss compares (see Objective and losses.corrected_policy_loss).

Sources: truncation, Yao et al. 2025 (TIS) and TRL; masking, IcePop; rejection, veto and metrics, verl's rollout
correction; off-policy mask, DeepSeek-V3.2 (arXiv 2512.02556), TRL and slime; DPPO mask, prime-rl.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from replay_trainer.correction.config import CorrectionConfig, Rejection
from replay_trainer.correction.presets import PRESETS

if TYPE_CHECKING:
    from replay_trainer.correction.correction import Correction, Moments, correct

__all__ = ["PRESETS", "Correction", "CorrectionConfig", "Moments", "Rejection", "correct"]


def __getattr__(name: str) -> Any:
    """Imports a name that needs torch only when it is used, so that the configuration can be used without torch."""
    if name in __all__:
        return getattr(import_module("replay_trainer.correction.correction"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
