"""Policy losses: from log-probabilities and advantages to the scalar that is minimised. Pure functions.

Axes: B sequences, T tokens of the longest. m: response mask, A: advantage, w: weight of the off-policy
correction.

    c = exp(log θ - log old), of the token; for gspo exp(sum_t (log θ - log old) m / sum_t m), of the sequence

    loss_type   loss l of a token                            aggregation; N: normalizer       N counts
    dapo        -min(c A, clip(c, 1-ε, 1+ε_high) A) w        sum(l m) / N                     tokens
    bnpo        as dapo                                      sum(l m) / N                     tokens
    cispo       -sg(min(c, ε_high)) A w log θ                sum(l m) / N                     tokens
    grpo        as dapo                                      sum_B(sum_T(l m) / sum_T m) / N  sequences
    gspo        as dapo, with the c of the sequence          as grpo                          sequences
    dr_grpo     as dapo                                      sum(l m) / (N max_completion_length)  sequences

The normalizer counts what the gradient is the mean of: by default the tokens or sequences in the call. A
batch that is cut into micro-batches, or spread over ranks, passes the count of the whole (`loss_normalizer`
of the whole mask, summed over ranks) with every part: the parts' losses and gradients then add up to those of
the whole. In TRL bnpo is dapo normalised by whatever happens to lie in one micro-batch of one rank; here the
normalizer is an argument for both, so that a batch gives one gradient however it is cut, and they differ by name
only.

`corrected_policy_loss` joins these with correction.py: the objective of its configuration picks the ratio.

Sources: GRPO arXiv 2402.03300, DAPO 2503.14476, Dr. GRPO 2503.20783, CISPO 2506.13585, GSPO 2507.18071; names
as in TRL.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from replay_trainer.correction import LOG_RATIO_LIMIT, CorrectionConfig, at_least_float32, weights_and_mask

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo"]


def loss_normalizer(mask: Tensor, loss_type: LossType) -> int:
    """N of this (B, T) response mask: its tokens, or its sequences (see the module)."""
    return mask.shape[0] if loss_type in ("grpo", "gspo", "dr_grpo") else int(mask.bool().sum())


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_type: LossType = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    weights: Tensor | None = None,
    normalizer: float | None = None,
    max_completion_length: int | None = None,
    keep: Tensor | None = None,
    reinforce: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """The loss to minimise (a scalar, at least float32; the gradient flows through `logprobs` only) and its metrics.

    logprobs, old_logprobs: (B, T) nats; log-ratios are clamped to ±20. advantages: (B,), or (B, T) a token.
    mask: (B, T) response mask before any rejection; every denominator counts it.
    epsilon, epsilon_high: the clip range is [1 - epsilon, 1 + epsilon_high], epsilon_high = epsilon unless set;
    for cispo epsilon_high is the cap of c itself and has to be set.
    weights: (B, T) `Correction.weights`.
    normalizer, max_completion_length (dr_grpo only): see the module.
    keep: (B, T) `Correction.mask`. Tokens of `mask` that are not in it add no loss, yet still count in the
    denominators, so that rejecting some does not inflate the rest.
    reinforce: the loss of a token is -A w log θ instead, without c and without clipping; the type only aggregates.

    Metrics, means over the tokens of `mask` (NaN without any; weigh them by tokens to join micro-batches):
    ratio_mean of c; approx_kl = c - 1 - log c; clip_low_fraction and clip_high_fraction, where the clip took
    the gradient away (c < 1 - ε with A < 0; c > 1 + ε_high with A > 0), or for cispo capped c with A > 0.

    Raises ValueError for shapes that do not fit, an unknown loss type, or what that type needs and lacks.
    """
    _check(logprobs, old_logprobs, advantages, mask, weights, keep, loss_type)
    if loss_type == "cispo" and epsilon_high is None and not reinforce:
        raise ValueError("loss_type='cispo' needs epsilon_high, the cap of the ratio itself, such as 5.0")
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    mask_BT = mask.bool()
    # Zeros, not products with the mask: padding may hold anything, and 0 * inf is NaN in the gradient.
    logprobs_BT = torch.where(mask_BT, at_least_float32(logprobs), 0.0)
    old_BT = torch.where(mask_BT, at_least_float32(old_logprobs.detach()), 0.0)
    advantages_BT = (advantages[:, None] if advantages.ndim == 1 else advantages).detach().to(logprobs_BT.dtype)
    advantages_BT = torch.where(mask_BT, advantages_BT, 0.0)

    log_ratio_BT = logprobs_BT - old_BT
    if loss_type == "gspo":
        tokens_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio_BT = (log_ratio_BT.sum(dim=1, keepdim=True) / tokens_B1).expand_as(log_ratio_BT)
    log_ratio_BT = log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_BT = log_ratio_BT.exp()

    if reinforce:
        loss_BT = -advantages_BT * logprobs_BT
        low_BT = high_BT = torch.zeros_like(mask_BT)
    elif loss_type == "cispo":
        loss_BT = -ratio_BT.detach().clamp(max=epsilon_high) * advantages_BT * logprobs_BT
        low_BT, high_BT = torch.zeros_like(mask_BT), (ratio_BT > epsilon_high) & (advantages_BT > 0)
    else:
        clipped_BT = ratio_BT.clamp(1 - epsilon, 1 + epsilon_high)
        loss_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
        low_BT = (ratio_BT < 1 - epsilon) & (advantages_BT < 0)
        high_BT = (ratio_BT > 1 + epsilon_high) & (advantages_BT > 0)
    if weights is not None:
        loss_BT = loss_BT * torch.where(mask_BT, weights.detach().to(loss_BT.dtype), 0.0)
    if keep is not None:
        loss_BT = torch.where(keep.bool(), loss_BT, 0.0)

    loss = aggregate_loss(loss_BT, mask_BT, loss_type, normalizer, max_completion_length)
    with torch.no_grad():
        values_BT = (ratio_BT, log_ratio_BT.expm1() - log_ratio_BT, low_BT.float(), high_BT.float())
        means = torch.stack([values[mask_BT].mean() for values in values_BT]).tolist()
    names = ("ratio_mean", "approx_kl", "clip_low_fraction", "clip_high_fraction")
    return loss, dict(zip(names, means, strict=True))


def corrected_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    correction: CorrectionConfig,
    *,
    mean_weight: float | None = None,
    loss_type: LossType = "dapo",
    normalizer: float | None = None,
    max_completion_length: int | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, float]]:
    """`policy_loss` under an off-policy correction, by the objective of `correction`.

        decoupled           -E[w min(r A, clip(r) A)]    r = θ/old, w from old/rollout
        bypass              -E[min(r A, clip(r) A)]      r = θ/rollout, no w
        bypass_reinforce    -E[sg(w) A log θ]            w from θ/rollout

    With a `rollout_penalty` τ, + τ E[(log θ - log rollout)²], which rejection does not touch.
    Rejection follows the same ratio as w; for bypass it is θ/rollout. All (B, T), advantages (B,) or (B, T). A token
    with unknown (NaN) rollout log-probability has w = 1, and for bypass r = 1 with its gradient. `options` are those
    of `policy_loss`, like the parameters before them; `mean_weight` is as in `correct`.
    """
    current = logprobs.detach()
    source = old_logprobs if correction.objective == "decoupled" else current
    weights: Tensor | None
    weights, keep = weights_and_mask(
        source, rollout_logprobs, mask, correction, advantages=advantages, logprobs=current, mean_weight=mean_weight
    )
    if correction.objective == "bypass":
        old_logprobs = torch.where(rollout_logprobs.isnan(), current.to(rollout_logprobs.dtype), rollout_logprobs)
        weights = None
    aggregation: dict[str, Any] = {
        "loss_type": loss_type,
        "normalizer": normalizer,
        "max_completion_length": max_completion_length,
    }
    loss, metrics = policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        weights=weights,
        keep=keep,
        reinforce=correction.objective == "bypass_reinforce",
        **aggregation,
        **options,
    )
    if correction.rollout_penalty:
        known_BT = mask.bool() & ~rollout_logprobs.isnan()
        difference_BT = torch.where(known_BT, at_least_float32(logprobs) - at_least_float32(rollout_logprobs), 0.0)
        squares_BT = difference_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).square()
        loss = loss + correction.rollout_penalty * aggregate_loss(squares_BT, mask, **aggregation)
    return loss, metrics


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    beta: float,
    loss_type: LossType = "dapo",
    normalizer: float | None = None,
    max_completion_length: int | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """beta * k3, to be added to the policy loss, and {"kl": mean k3 over tokens}.

    Aggregated like the policy loss, but neither weighted nor subject to rejection.

        k3 = exp(ref - log θ) - (ref - log θ) - 1 >= 0, an unbiased estimate of KL(θ || ref)   (Schulman 2020)

    logprobs, ref_logprobs, mask: (B, T). The gradient flows through `logprobs` only.
    """
    mask_BT = mask.bool()
    difference_BT = torch.where(mask_BT, at_least_float32(ref_logprobs.detach()) - at_least_float32(logprobs), 0.0)
    difference_BT = difference_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3_BT = difference_BT.expm1() - difference_BT
    loss = beta * aggregate_loss(k3_BT, mask_BT, loss_type, normalizer, max_completion_length)
    return loss, {"kl": float(k3_BT.detach()[mask_BT].mean())}


def aggregate_loss(
    loss_BT: Tensor,
    mask: Tensor,
    loss_type: LossType,
    normalizer: float | None = None,
    max_completion_length: int | None = None,
) -> Tensor:
    """One scalar from the (B, T) losses of the tokens of `mask`, by the table of the module."""
    mask_BT = mask.bool()
    loss_BT = torch.where(mask_BT, loss_BT, 0.0)
    divisor = max(loss_normalizer(mask_BT, loss_type), 1) if normalizer is None else normalizer
    if divisor <= 0:
        raise ValueError(f"normalizer must be positive, not {divisor}")
    if loss_type in ("grpo", "gspo"):
        loss_B = loss_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)
        return loss_B.sum() / divisor
    if loss_type == "dr_grpo":
        if max_completion_length is None or max_completion_length < 1:
            raise ValueError(
                f"loss_type='dr_grpo' needs max_completion_length, the generator's limit in tokens, "
                f"not {max_completion_length}"
            )
        return loss_BT.sum() / (divisor * max_completion_length)
    return loss_BT.sum() / divisor


def _check(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None,
    keep: Tensor | None,
    loss_type: str,
) -> None:
    if loss_type not in get_args(LossType):
        raise ValueError(f"loss_type must be one of {', '.join(get_args(LossType))}, not {loss_type!r}")
    shape = logprobs.shape
    if len(shape) != 2:
        raise ValueError(f"logprobs must have shape (B, T), not {tuple(shape)}")
    others = {"old_logprobs": old_logprobs, "mask": mask, "weights": weights, "keep": keep}
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have the shape of logprobs, {tuple(shape)}, not {tuple(tensor.shape)}")
    if advantages.shape not in (shape, shape[:1]):
        raise ValueError(
            f"advantages must have shape {tuple(shape[:1])} or {tuple(shape)}, not {tuple(advantages.shape)}"
        )
