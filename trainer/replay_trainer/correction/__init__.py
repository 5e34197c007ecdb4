"""Off-policy correction: weights and masks for tokens that another policy wrote.

Three policies: b wrote the tokens (rollout), o is the trainer's policy before the update (old), θ is being updated.
This package is about the ratio o/b, which covers two differences: the mismatch of the engines and the staleness.
Axes: B rollouts, T tokens of the longest one. m is the response mask.

    l_t = (log o_t - log b_t) * m_t, clamped to ±20; 0 where log b_t is NaN (unknown: counted as on-policy)

    level       ratio ρ                            action     weight w
    token       exp(l_t)                           truncate   clamp(ρ, clip_min, clip_max)
    sequence    exp(sum_t l_t)                     mask       ρ inside the bounds (inclusive), 0 outside
    geometric   exp(sum_t l_t / sum_t m_t)         none       ρ

A weight multiplies the loss of its token. Four rules remove tokens from the loss; its denominators still count them:

    rejection        tokens or sequences whose divergence from b lies outside bounds (see Rejection)
    veto             sequences with a token of ρ_t < veto
    off-policy mask  sequences with A < 0 and mean_t(log b - log θ) > off_policy_mask_threshold
    DPPO mask        tokens with A > 0 and p_θ - p_b > dppo_mask_high, or A <= 0 and p_θ - p_b < -dppo_mask_low

As in the sources, a *sequence* is all that the policy wrote in answer to one prompt: a whole rollout, whatever its
turns and its `sequence_counts`. The product of its tokens' ratios is the weight of the trajectory: tokens that the
policy did not write, such as results of tools, have the same probability under every policy, and cancel. So each row
here is a whole rollout: `batching.Rollouts` joins its sequences.

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
    """Imports the names above that need torch when somebody asks for one, so that the configuration needs no torch."""
    if name in __all__:
        return getattr(import_module("replay_trainer.correction.correction"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
