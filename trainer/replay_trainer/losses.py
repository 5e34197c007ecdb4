"""Policy losses: from log-probabilities and advantages to the scalar that is minimised. Pure functions.

Axes: B rollouts, T tokens of the longest one. m: response mask, A: advantage, w: weight of the off-policy correction.
ε, ε_high: `epsilon` and `clip_high` of LossConfig. sg: stop-gradient.

    c = exp(log θ - log old), of the token; for gspo exp(sum_t (log θ - log old) m / sum_t m), of the rollout

    loss_type   loss l of a token                            aggregation, N: normalizer       N counts
    dapo        -min(c A, clip(c, 1-ε, 1+ε_high) A) w        sum(l m) / N                     tokens
    bnpo        as dapo                                      sum(l m) / N                     tokens
    cispo       -sg(min(c, ε_high)) A w log θ                sum(l m) / N                     tokens
    grpo        as dapo                                      sum_B(sum_T(l m) / sum_T m) / N  rollouts
    gspo        as dapo, with the c of the rollout           as grpo                          rollouts
    dr_grpo     as dapo                                      sum(l m) / (N max_completion_length)  rollouts
    a:b         the value that the user's function b of module a returns for a token, times w; the function chooses the
                aggregation (see `replay_trainer.loss_functions`)

All that the policy wrote in answer to one prompt is called a rollout here. The papers call it a response or a sequence.
A rollout of several sequences is one row, because `batching.Rollouts` joins the trained tokens of its sequences. So it
has the loss of a single sequence with the same tokens: it counts once in N, grpo takes one mean over its tokens, and
gspo takes one c.

The normalizer N is the count by which the sum of losses is divided. By default, it counts the tokens or rollouts of the
call. If a batch is cut into micro-batches or is spread over ranks, the caller passes the count of the whole batch with
every part. This count is `loss_normalizer` of the whole mask, summed over ranks. The losses and gradients of the parts
then add up to the loss and gradient of the whole batch.
In TRL, bnpo divides by the tokens of one micro-batch on one rank, and otherwise is dapo. Here both take the same
normalizer, so that the gradient does not depend on how a batch is cut. So bnpo and dapo are the same loss here.

`distillation_advantages` adds the advantages of a teacher to those of the rollouts, before any of these losses.

`corrected_policy_loss` combines these losses with the off-policy correction. The objective of the correction chooses
the ratio.

Sources: GRPO arXiv 2402.03300, DAPO 2503.14476, Dr. GRPO 2503.20783, CISPO 2506.13585, GSPO 2507.18071; names
as in TRL. On-policy distillation: Thinking Machines, "On-Policy Distillation", 2025.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from replay_trainer.config import BUILT_IN_LOSSES, LossConfig
from replay_trainer.correction import CorrectionConfig, correct
from replay_trainer.correction.config import LOG_RATIO_LIMIT
from replay_trainer.correction.correction import at_least_float32
from replay_trainer.loss_functions import LossInputs, token_losses, traits_of


def distillation_advantages(
    advantages: Tensor, logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, weight: float
) -> Tensor:
    """Adds the advantages of a teacher: (B, T) A + weight (log teacher - log π) for the tokens of `mask`, A elsewhere.

    advantages: A, (B,) or (B, T). logprobs: (B, T) log π of the policy before the update, in nats; no gradient flows
    through them. teacher_logprobs: (B, T) nats, finite inside the mask.

    If π wrote the tokens, the policy gradient of the added term is the gradient of -weight KL(π || teacher), because
    the mean of log π - log teacher over the tokens of π is the reverse KL (the module names the source). The source
    uses the sampler's log-probabilities as log π. For a fresh group, both are the same. For a group of an older policy,
    log π of the policy before the update is right, because the correction weighs the tokens as if this policy had
    written them.
    """
    difference_BT = torch.where(mask.bool(), teacher_logprobs - logprobs.detach(), 0.0)
    return _by_token(advantages).expand_as(logprobs) + weight * difference_BT


def loss_normalizer(mask: Tensor, loss_type: str) -> int:
    """The normalizer N of a (B, T) response mask: the number of its tokens or rollouts, by the table of the module."""
    counts_rollouts = traits_of(loss_type).aggregate_like in ("grpo", "gspo", "dr_grpo")
    return mask.shape[0] if counts_rollouts else int(mask.bool().sum())


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: LossConfig | None = None,
    *,
    weights: Tensor | None = None,
    correction_mask: Tensor | None = None,
    normalizer: float | None = None,
    correction: CorrectionConfig | None = None,
    tokens: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss to minimise, and its metrics. The formulas are in the table of the module.

    The loss is a scalar, at least float32. The gradient flows through `logprobs` only.

    logprobs, old_logprobs: (B, T) nats. Log-ratios are clamped to ±20.
    advantages: (B,), or (B, T) with one for each token.
    mask: (B, T) response mask before any rejection. All its tokens count in every denominator.
    config: None: `LossConfig()`.
    weights: (B, T) `Correction.weights`; None: 1.
    correction_mask: (B, T) `Correction.mask`. Tokens of `mask` outside `correction_mask` add no loss. The denominators
    still count them, so that rejecting some tokens does not inflate the others.
    normalizer: see the module.
    correction: only its `clip_ratio_c` and its objective are used; None: neither has an effect. `clip_ratio_c` is the
    bound k of the dual clip (arXiv 1912.09729; TRL's `delta`): if A < 0, the loss of a token is at most -k A, and has
    no gradient beyond that. cispo has no dual clip. With the objective bypass_reinforce, the loss of a token is
    -A w log θ, without c and without clipping, and the loss type only chooses the aggregation.
    tokens: (B,) the number of tokens of each whole rollout, by which grpo and gspo divide. Needed if a row may hold
    only some tokens of its rollout.

    Each metric is a mean over the tokens of `mask`; NaN without tokens. To join micro-batches, weigh their metrics by
    their numbers of tokens.

        ratio_mean            the mean of c
        approx_kl             the mean of c - 1 - log c
        clip_low_fraction     the share of tokens whose gradient clipping removed: c < 1 - ε with A < 0
        clip_high_fraction    the same for c > 1 + ε_high with A > 0; for cispo, the share with capped c and A > 0
        dual_clip_fraction    the share of tokens whose gradient the dual clip removed
        loss/NAME             the metric NAME of a loss function of the user, for which the three fractions are 0

    Raises ValueError for shapes that do not fit, and for a loss function of the user as `token_losses` does.
    """
    config = config or LossConfig()
    correction = correction or CorrectionConfig()
    _check_shapes(
        logprobs,
        {"old_logprobs": old_logprobs, "mask": mask, "weights": weights, "correction_mask": correction_mask},
        advantages,
    )
    mask_BT = mask.bool()
    # `where` instead of a product with the mask, because padding may hold anything, and 0 * inf is NaN in the gradient.
    logprobs_BT = torch.where(mask_BT, at_least_float32(logprobs), 0.0)
    old_BT = torch.where(mask_BT, at_least_float32(old_logprobs.detach()), 0.0)
    advantages_BT = torch.where(mask_BT, _by_token(advantages).detach().to(logprobs_BT.dtype), 0.0)

    log_ratio_BT = logprobs_BT - old_BT
    if config.loss_type == "gspo":
        tokens_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio_BT = (log_ratio_BT.sum(dim=1, keepdim=True) / tokens_B1).expand_as(log_ratio_BT)
    log_ratio_BT = log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_BT = log_ratio_BT.exp()

    # For the metrics: the tokens whose gradient the lower bound, the upper bound or the dual clip removes.
    none_BT = torch.zeros_like(mask_BT)
    low_BT = none_BT
    high_BT = none_BT
    dual_BT = none_BT
    user_metrics: dict[str, Tensor] = {}
    if correction.objective == "bypass_reinforce":
        loss_BT = -advantages_BT * logprobs_BT
    elif config.loss_type not in BUILT_IN_LOSSES:
        inputs = LossInputs(
            logprobs_BT=logprobs_BT,
            old_logprobs_BT=old_BT,
            advantages_BT=advantages_BT,
            mask_BT=mask_BT,
            weights_BT=_masked(mask_BT, weights).to(logprobs_BT.dtype),
            correction_mask_BT=_masked(mask_BT, correction_mask).bool(),
            normalizer=_divisor(mask_BT, config, normalizer),
            config=config,
        )
        loss_BT, user_metrics = token_losses(inputs, config.loss_type)
    elif config.loss_type == "cispo":
        # The capped ratio is detached, so the gradient flows through log θ, also for a token beyond the cap.
        capped_BT = ratio_BT.detach().clamp(max=config.clip_high)
        loss_BT = -capped_BT * advantages_BT * logprobs_BT
        high_BT = (ratio_BT > config.clip_high) & (advantages_BT > 0)
    else:
        least = 1 - config.epsilon
        most = 1 + config.clip_high
        clipped_BT = ratio_BT.clamp(least, most)
        loss_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
        low_BT = (ratio_BT < least) & (advantages_BT < 0)
        high_BT = (ratio_BT > most) & (advantages_BT > 0)
        if correction.clip_ratio_c is not None:
            dual_BT = (ratio_BT > correction.clip_ratio_c) & (advantages_BT < 0)
            loss_BT = torch.where(dual_BT, -correction.clip_ratio_c * advantages_BT, loss_BT)
    if weights is not None:
        loss_BT = loss_BT * torch.where(mask_BT, weights.detach().to(loss_BT.dtype), 0.0)
    if correction_mask is not None:
        loss_BT = torch.where(correction_mask.bool(), loss_BT, 0.0)

    assert loss_BT.shape == mask_BT.shape, (loss_BT.shape, mask_BT.shape)
    loss = aggregate_loss(loss_BT, mask_BT, config, normalizer, tokens)
    assert loss.ndim == 0, loss.shape
    with torch.no_grad():
        values = {
            "ratio_mean": ratio_BT,
            "approx_kl": log_ratio_BT.expm1() - log_ratio_BT,
            "clip_low_fraction": low_BT.float(),
            "clip_high_fraction": high_BT.float(),
            "dual_clip_fraction": dual_BT.float(),
        }
        values.update({f"loss/{name}": value_BT for name, value_BT in user_metrics.items()})
        # `tolist` of the stack is one transfer from the device, instead of one for each metric.
        means = torch.stack([value_BT[mask_BT].mean() for value_BT in values.values()]).tolist()
    return loss, dict(zip(values, means, strict=True))


def corrected_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    correction: CorrectionConfig,
    config: LossConfig | None = None,
    *,
    mean_weight: float | None = None,
    normalizer: float | None = None,
    tokens: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The `policy_loss` with an off-policy correction. The objective of `correction` chooses the loss:

        decoupled           -E[w min(r A, clip(r) A)]    r = θ/old, w from old/rollout
        bypass              -E[min(r A, clip(r) A)]      r = θ/rollout, no w
        bypass_reinforce    -E[sg(w) A log θ]            w from θ/rollout

    A `rollout_penalty` τ adds τ E[(log θ - log rollout)²], which also covers rejected tokens.
    Rejection judges the ratio from which w is computed. For bypass, which has no w, it judges θ/rollout.
    All tensors are (B, T), except that advantages may be (B,), and that tokens are (B,). A token whose rollout
    log-probability is unknown (NaN) has w = 1. For bypass it has r = 1, and r keeps its gradient.
    config, normalizer, tokens: as in `policy_loss`. mean_weight: as in `correct`.
    """
    config = config or LossConfig()
    current = logprobs.detach()
    # The numerator of the ratio of the correction; the denominator is `rollout_logprobs`.
    numerator = old_logprobs if correction.objective == "decoupled" else current
    corrected = correct(
        numerator, rollout_logprobs, mask, correction, advantages=advantages, logprobs=current, mean_weight=mean_weight
    )
    assert corrected.weights.shape == corrected.mask.shape == mask.shape, (corrected.weights.shape, mask.shape)
    is_bypass = correction.objective == "bypass"
    if is_bypass:  # r = θ/rollout; where log rollout is unknown, r = θ/θ
        old_logprobs = torch.where(rollout_logprobs.isnan(), current.to(rollout_logprobs.dtype), rollout_logprobs)
    loss, metrics = policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        config,
        weights=None if is_bypass else corrected.weights,
        correction_mask=corrected.mask,
        normalizer=normalizer,
        correction=correction,
        tokens=tokens,
    )
    if correction.rollout_penalty:
        known_BT = mask.bool() & rollout_logprobs.isfinite()
        # `where` for each operand and not for the difference, because the gradient of inf - inf would be NaN.
        current_BT = torch.where(known_BT, at_least_float32(logprobs), 0.0)
        rollout_BT = torch.where(known_BT, at_least_float32(rollout_logprobs), 0.0)
        # The difference is not clamped, so the pull is strongest on the tokens whose probability has changed most.
        squares_BT = (current_BT - rollout_BT).square()
        loss = loss + correction.rollout_penalty * aggregate_loss(squares_BT, mask, config, normalizer, tokens)
    return loss, metrics


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    beta: float,
    config: LossConfig | None = None,
    *,
    normalizer: float | None = None,
    tokens: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss to add to the policy loss: beta times the aggregated k3. Also returns {"kl": mean of k3 over tokens}.

    k3 is aggregated like the policy loss. It is not weighted, and it also covers rejected tokens.

        k3 = exp(d) - d - 1 >= 0 with d = ref - log θ, an unbiased estimate of KL(θ || ref)   (Schulman 2020)

    Above d = 20 nats, k3 continues as a straight line with its slope at 20, so that exp(d) does not overflow.
    logprobs, ref_logprobs, mask: (B, T). The gradient flows through `logprobs` only.
    config, normalizer, tokens: as in `policy_loss`.
    """
    mask_BT = mask.bool()
    difference_BT = torch.where(mask_BT, at_least_float32(ref_logprobs.detach()) - at_least_float32(logprobs), 0.0)
    near_BT = difference_BT.clamp(max=LOG_RATIO_LIMIT)
    beyond_BT = (difference_BT - LOG_RATIO_LIMIT).relu()
    slope = math.expm1(LOG_RATIO_LIMIT)  # of k3 at the limit
    k3_BT = near_BT.expm1() - near_BT + slope * beyond_BT
    loss = beta * aggregate_loss(k3_BT, mask_BT, config or LossConfig(), normalizer, tokens)
    return loss, {"kl": float(k3_BT.detach()[mask_BT].mean())}


def aggregate_loss(
    loss_BT: Tensor,
    mask: Tensor,
    config: LossConfig,
    normalizer: float | None = None,
    tokens: Tensor | None = None,
) -> Tensor:
    """One scalar from the (B, T) losses of the tokens of `mask`, by the table of the module.

    tokens: (B,) as in `policy_loss`; None: those of `mask`.
    """
    mask_BT = mask.bool()
    loss_BT = torch.where(mask_BT, loss_BT, 0.0)
    divisor = _divisor(mask_BT, config, normalizer)
    aggregate_like = traits_of(config.loss_type).aggregate_like
    if aggregate_like in ("grpo", "gspo"):
        tokens_B = mask_BT.sum(dim=1) if tokens is None else tokens
        return (loss_BT.sum(dim=1) / tokens_B.clamp(min=1)).sum() / divisor
    if aggregate_like == "dr_grpo":
        assert config.max_completion_length is not None  # LossConfig and check_loss have checked this
        divisor = divisor * config.max_completion_length
    return loss_BT.sum() / divisor


def _divisor(mask_BT: Tensor, config: LossConfig, normalizer: float | None) -> float:
    """N: the `normalizer`; None: the count of this mask, at least 1. Raises ValueError unless N is positive."""
    divisor = normalizer
    if divisor is None:
        divisor = max(loss_normalizer(mask_BT, config.loss_type), 1)
    if divisor <= 0:
        raise ValueError(f"normalizer must be positive, not {divisor}")
    return divisor


def _masked(mask_BT: Tensor, values: Tensor | None) -> Tensor:
    """The (B, T) `values` inside the mask, and 0 elsewhere. `values` None: True inside the mask."""
    if values is None:
        return mask_BT
    return torch.where(mask_BT, values.detach(), torch.zeros_like(values))


def _by_token(advantages: Tensor) -> Tensor:
    """(B,) advantages as (B, 1), which broadcasts with (B, T) values; (B, T) advantages unchanged."""
    return advantages[:, None] if advantages.ndim == 1 else advantages


def _check_shapes(logprobs: Tensor, others: dict[str, Tensor | None], advantages: Tensor) -> None:
    """Raises ValueError unless logprobs and `others`, by name, are (B, T), and advantages are (B,) or (B, T)."""
    shape = logprobs.shape
    if len(shape) != 2:
        raise ValueError(f"logprobs must have shape (B, T), not {tuple(shape)}")
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have the shape of logprobs, {tuple(shape)}, not {tuple(tensor.shape)}")
    if advantages.shape not in (shape, shape[:1]):
        raise ValueError(
            f"advantages must have shape {tuple(shape[:1])} or {tuple(shape)}, not {tuple(advantages.shape)}"
        )
