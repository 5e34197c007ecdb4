"""`correct`: importance weights, rejection and metrics of one batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from replay_trainer.correction.config import CorrectionConfig
from replay_trainer.correction.metrics import Moments
from replay_trainer.correction.rejection import RejectionMasks
from replay_trainer.correction.weights import Ratios


@dataclass(frozen=True)
class Correction:
    """Weights for the policy loss, the mask after rejection, and how far apart the policies are."""

    weights: Tensor
    """(B, T) float32 (float64 from float64 input), without gradient; 0 outside the response mask."""
    mask: Tensor
    """(B, T) the response mask without rejected tokens, in its own dtype: `keep` of `policy_loss`."""
    ratios: Ratios
    rejected: RejectionMasks

    @cached_property
    def moments(self) -> Moments:
        """Sums and extremes behind `metrics`; those of the parts of a batch can be added."""
        # Not computed by `correct` itself: it waits for the device, and a training step needs it only once.
        return Moments.of(self.ratios, self.rejected)

    @property
    def metrics(self) -> dict[str, float]:
        """See `correct`."""
        return self.moments.metrics()

    def weight_totals(self) -> tuple[float, int]:
        """(sum, count) of the weights after the action, over units.

        For batch_normalize of a batch in parts: sum / count over all parts is the `mean_weight` of each part.
        """
        return self.ratios.totals()


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

    old_logprobs, rollout_logprobs: (B, T), nats. mask: (B, T) response mask of any dtype; values outside the mask
    have no effect. config: CorrectionConfig() unless given. A NaN in `rollout_logprobs` is an unknown
    log-probability: the token counts as on-policy (l = 0), and in no metric except `nan_fraction`. A NaN in
    `old_logprobs` is an error of the model and is passed on, so that the loss shows it.
    advantages: (B,) or (B, T), for the off-policy and the DPPO mask. logprobs: (B, T) log θ, for the same masks;
    default: old_logprobs. mean_weight: the divisor of batch_normalize where the batch is a part of a larger one
    (see `Correction.weight_totals`); default: the mean of this batch.

    Metrics, over tokens with a known log b ("units": tokens, or sequences where a ratio covers one); NaN where there
    are none. ρ is the ratio at the level of the configuration, ρ_t that of the token.

        ratio_mean, ratio_min, ratio_max            ρ, over units
        weight_mean, weight_min, weight_max         after the action, before batch_normalize, over units
        clipped_fraction                            units whose ratio the action changed
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

    Raises ValueError unless the tensors have one shape (B, T), and if a mask needs advantages and has none.
    """
    ratios = Ratios(old_logprobs, rollout_logprobs, mask, config or CorrectionConfig())
    rejected = RejectionMasks(ratios, advantages, logprobs)
    return Correction(ratios.weights(mean_weight), rejected.kept_BT.to(mask.dtype), ratios, rejected)
