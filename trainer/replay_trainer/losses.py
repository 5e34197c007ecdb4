"""Policy losses: from log-probabilities and advantages to the scalar that is minimised. Pure functions.

Axes: B rollouts, T tokens of the longest one. m: response mask, A: advantage, w: weight of the off-policy correction.

    c = exp(log θ - log old), of the token; for gspo exp(sum_t (log θ - log old) m / sum_t m), of the rollout

    loss_type   loss l of a token                            aggregation; N: normalizer       N counts
    dapo        -min(c A, clip(c, 1-ε, 1+ε_high) A) w        sum(l m) / N                     tokens
    bnpo        as dapo                                      sum(l m) / N                     tokens
    cispo       -sg(min(c, ε_high)) A w log θ                sum(l m) / N                     tokens
    grpo        as dapo                                      sum_B(sum_T(l m) / sum_T m) / N  rollouts
    gspo        as dapo, with the c of the rollout           as grpo                          rollouts
    dr_grpo     as dapo                                      sum(l m) / (N max_completion_length)  rollouts
    a:b         the value that the user's function b of module a returns for a token, times w; the function chooses the
                aggregation: see `replay_trainer.loss_functions`

The papers call all that the policy wrote in answer to one prompt a response or a sequence. Here it is a rollout. A
rollout of several sequences is one row: `batching.Rollouts` joins the trained tokens of its sequences. So the rollout
counts once in N, has one mean over tokens and one c, and has the loss of a single sequence with the same tokens.

The normalizer N is the count by which the sum of losses is divided; by default the tokens or rollouts of the call. If a
batch is cut into micro-batches or is spread over ranks, the caller passes the count of the whole batch with every part:
`loss_normalizer` of the whole mask, summed over ranks. The losses and gradients of the parts then add up to the loss
and gradient of the whole batch.
In TRL, bnpo is dapo divided by the tokens of one micro-batch on one rank. Here bnpo and dapo take the same normalizer,
so that the gradient does not depend on how a batch is cut. So the two differ only by name.

`distillation_advantages` adds the advantages of a teacher, before any of these losses.

`corrected_policy_loss` joins these losses with the correction: the objective of its configuration picks the ratio.

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
    """(B, T) advantages A + weight (log teacher - log π) of the tokens of `mask`; elsewhere A.

    advantages: (B,) or (B, T). logprobs: (B, T) log π of the policy before the update, in nats; no gradient flows
    through them. teacher_logprobs: (B, T) nats, finite inside the mask.

    If π wrote the tokens, the policy gradient of these advantages is the gradient of -weight KL(π || teacher): the mean
    of log π - log teacher over the tokens of π is the reverse KL (see the module for the source). The source takes the
    sampler's log-probabilities for log π. For a fresh group, sampler and π have the same log-probabilities. For a group
    of an older policy, the log-probabilities of π are right, because the correction weighs the tokens as if π had
    written them.
    """
    difference_BT = torch.where(mask.bool(), teacher_logprobs - logprobs.detach(), 0.0)
    return _by_token(advantages).expand_as(logprobs) + weight * difference_BT


def loss_normalizer(mask: Tensor, loss_type: str) -> int:
    """N of this (B, T) response mask: its tokens, or its rollouts (see the module)."""
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
    """The loss to minimise (a scalar, at least float32; the gradient flows through `logprobs` only) and its metrics.

    logprobs, old_logprobs: (B, T) nats; log-ratios are clamped to ±20. advantages: (B,), or (B, T) one per token. mask:
    (B, T) response mask before any rejection; every denominator counts it. config: LossConfig() unless given. weights:
    (B, T) `Correction.weights`. normalizer: see the module. correction_mask: (B, T) `Correction.mask`. Tokens of `mask`
    outside `correction_mask` add no loss. The denominators still count them, so that rejecting some tokens does not
    inflate the others. correction: two of its settings are used. `clip_ratio_c` is the bound k of the dual clip (arXiv
    1912.09729; TRL's `delta`): if A < 0, the loss of a token is at most -k A, and has no gradient beyond that; not for
    cispo. With the objective bypass_reinforce, the loss of a token is -A w log θ, without c and without clipping, and
    the loss type only chooses the aggregation. None: no dual clip, and the loss of the loss type. tokens: (B,) the
    tokens of each whole rollout, if a row may hold only some of them; grpo divides by these counts.

    Metrics are means over the tokens of `mask` (NaN without tokens; weigh them by tokens to join micro-batches):
    ratio_mean is the mean of c; approx_kl is the mean of c - 1 - log c. clip_low_fraction and clip_high_fraction are
    the shares of tokens whose gradient clipping removed (c < 1 - ε with A < 0; c > 1 + ε_high with A > 0); for cispo,
    clip_high_fraction is the share with capped c and A > 0. dual_clip_fraction is the share whose gradient the dual
    clip removed. loss/NAME is the metric NAME of a loss function of the user; the fractions are 0 for such a loss.

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
    # `where` instead of a product with the mask: padding may hold anything, and 0 * inf is NaN in the gradient.
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
    own_metrics: dict[str, Tensor] = {}
    if correction.objective == "bypass_reinforce":
        loss_BT = -advantages_BT * logprobs_BT
    elif config.loss_type not in BUILT_IN_LOSSES:
        inputs = LossInputs(
            logprobs_BT=logprobs_BT,
            old_logprobs_BT=old_BT,
            advantages_BT=advantages_BT,
            mask_BT=mask_BT,
            weights_BT=_inside(mask_BT, weights).to(logprobs_BT.dtype),
            correction_mask_BT=_inside(mask_BT, correction_mask).bool(),
            normalizer=_divisor(mask_BT, config, normalizer),
            config=config,
        )
        loss_BT, own_metrics = token_losses(inputs, config.loss_type)
    elif config.loss_type == "cispo":
        # The ratio is capped and detached, so a token keeps its gradient, through log θ, beyond the cap too.
        loss_BT = -ratio_BT.detach().clamp(max=config.clip_high) * advantages_BT * logprobs_BT
        high_BT = (ratio_BT > config.clip_high) & (advantages_BT > 0)
    else:
        least = 1 - config.epsilon
        most = 1 + config.clip_high
        loss_BT = -torch.minimum(ratio_BT * advantages_BT, ratio_BT.clamp(least, most) * advantages_BT)
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
        values.update({f"loss/{name}": value_BT for name, value_BT in own_metrics.items()})
        # One transfer from the device instead of one for each metric.
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
    """`policy_loss` under an off-policy correction, by the objective of `correction`.

        decoupled           -E[w min(r A, clip(r) A)]    r = θ/old, w from old/rollout
        bypass              -E[min(r A, clip(r) A)]      r = θ/rollout, no w
        bypass_reinforce    -E[sg(w) A log θ]            w from θ/rollout

    A `rollout_penalty` τ adds τ E[(log θ - log rollout)²]; rejection does not touch it.
    Rejection judges the ratio that w is computed from; for bypass, which has no w, it judges θ/rollout.
    All tensors are (B, T); advantages (B,) or (B, T). A token with unknown (NaN) rollout log-probability has w = 1. For
    bypass it has r = 1, and r keeps its gradient.
    config, normalizer, tokens: as in `policy_loss`. mean_weight: as in `correct`.
    """
    config = config or LossConfig()
    current = logprobs.detach()
    # The log-probabilities that the correction divides by those of the rollout.
    source = old_logprobs if correction.objective == "decoupled" else current
    corrected = correct(
        source, rollout_logprobs, mask, correction, advantages=advantages, logprobs=current, mean_weight=mean_weight
    )
    assert corrected.weights.shape == corrected.mask.shape == mask.shape, (corrected.weights.shape, mask.shape)
    bypass = correction.objective == "bypass"
    if bypass:  # r = θ/rollout; where log rollout is unknown, r = θ/θ
        old_logprobs = torch.where(rollout_logprobs.isnan(), current.to(rollout_logprobs.dtype), rollout_logprobs)
    loss, metrics = policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        config,
        weights=None if bypass else corrected.weights,
        correction_mask=corrected.mask,
        normalizer=normalizer,
        correction=correction,
        tokens=tokens,
    )
    if correction.rollout_penalty:
        known_BT = mask.bool() & rollout_logprobs.isfinite()
        # `where` on each side: the gradient of inf - inf would be NaN.
        current_BT = torch.where(known_BT, at_least_float32(logprobs), 0.0)
        rollout_BT = torch.where(known_BT, at_least_float32(rollout_logprobs), 0.0)
        # Not clamped: the pull is strongest on the tokens whose probability has changed most.
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
    """beta * k3, to be added to the policy loss, and {"kl": mean k3 over tokens}.

    Aggregated like the policy loss, but neither weighted nor subject to rejection.

        k3 = exp(d) - d - 1 >= 0 with d = ref - log θ, an unbiased estimate of KL(θ || ref)   (Schulman 2020)

    Above d = 20 nats, k3 continues as a straight line with its slope at 20, so that exp(d) does not overflow.
    logprobs, ref_logprobs, mask: (B, T). The gradient flows through `logprobs` only.
    config, normalizer, tokens: as in `policy_loss`.
    """
    mask_BT = mask.bool()
    difference_BT = torch.where(mask_BT, at_least_float32(ref_logprobs.detach()) - at_least_float32(logprobs), 0.0)
    near_BT = difference_BT.clamp(max=LOG_RATIO_LIMIT)
    k3_BT = near_BT.expm1() - near_BT + math.expm1(LOG_RATIO_LIMIT) * (difference_BT - LOG_RATIO_LIMIT).relu()
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
        assert config.max_completion_length is not None  # LossConfig and check_loss check it
        divisor = divisor * config.max_completion_length
    return loss_BT.sum() / divisor


def _divisor(mask_BT: Tensor, config: LossConfig, normalizer: float | None) -> float:
    """N: the normalizer, or the count of this mask. Raises ValueError unless it is positive."""
    divisor = normalizer
    if divisor is None:
        divisor = max(loss_normalizer(mask_BT, config.loss_type), 1)
    if divisor <= 0:
        raise ValueError(f"normalizer must be positive, not {divisor}")
    return divisor


def _inside(mask_BT: Tensor, values: Tensor | None) -> Tensor:
    """(B, T) the values of the tokens of the mask, and 0 elsewhere. `values` None: 1 for each token of the mask."""
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
