"""Each loss and its gradient against a loop over the tokens; objectives, and how far a pull reaches, by hand."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replay_trainer.config import LossConfig
from replay_trainer.correction import CorrectionConfig, Rejection
from replay_trainer.losses import corrected_policy_loss, kl_loss, policy_loss

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo"]
OPTIONS = {"epsilon_high": 1.5, "max_completion_length": 10}

# ------------------------------------------------------------------------------------------------ the loop by hand


class Batch(NamedTuple):
    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    """(B,) or (B, T)."""
    mask: Tensor
    weights: Tensor
    keep: Tensor


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Outside the mask stands anything."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 6))

    def uniform() -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    mask_BT = uniform() < draw(st.sampled_from([0.5, 1.0]))
    old_BT = -3 * uniform()
    logprobs_BT = old_BT + draw(st.sampled_from([0.0, 0.6, 30.0])) * (uniform() - 0.5)
    logprobs_BT, old_BT, weights_BT = (
        torch.where(mask_BT, each, anything)
        for each, anything in ((logprobs_BT, math.inf), (old_BT, math.nan), (2 * uniform(), math.inf))
    )
    advantages_BT = draw(st.sampled_from([0.0, 1.0])) * (uniform() - 0.5)
    advantages = advantages_BT if draw(st.booleans()) else advantages_BT.sum(dim=1)
    return Batch(logprobs_BT, old_BT, advantages, mask_BT, weights_BT, uniform() < 0.8)


def normalizer_by_hand(batch: Batch, config: LossConfig, normalizer: float | None) -> float:
    rollouts = config.loss_type in ("grpo", "gspo", "dr_grpo")
    counted = max(1, len(batch.mask) if rollouts else int(batch.mask.sum())) if normalizer is None else normalizer
    return counted * (config.max_completion_length if config.loss_type == "dr_grpo" else 1)


def sum_by_hand(losses: list[list[Tensor]], config: LossConfig) -> Tensor:
    """Of the losses of the tokens of each rollout, or of their means."""
    each = [sum(row) / (len(row) if config.loss_type in ("grpo", "gspo") else 1) for row in losses if row]
    return sum(each, torch.tensor(0.0, dtype=torch.float64))


def loss_by_hand(
    batch: Batch, config: LossConfig, correction: CorrectionConfig, normalizer: float | None
) -> tuple[Tensor, dict[str, float]]:
    """The table of the module, one token at a time."""
    losses, seen = [], []
    advantages_BT = batch.advantages if batch.advantages.ndim == 2 else batch.advantages[:, None].expand_as(batch.mask)
    for b, mask in enumerate(batch.mask):
        at = mask.nonzero().flatten().tolist()
        logs = {t: batch.logprobs[b, t] - batch.old[b, t] for t in at}
        if config.loss_type == "gspo" and at:
            logs = dict.fromkeys(at, sum(logs.values()) / len(at))
        losses.append([])
        for t, log in logs.items():
            advantage, low, high = advantages_BT[b, t], 1 - config.epsilon, 1 + config.clip_high
            log = log.clamp(-20, 20)
            ratio, dual, under, over = log.exp(), False, False, False
            if correction.objective == "bypass_reinforce":
                loss = -advantage * batch.logprobs[b, t]
            elif config.loss_type == "cispo":
                loss = -ratio.detach().clamp(max=config.clip_high) * advantage * batch.logprobs[b, t]
                over = ratio > config.clip_high and advantage > 0
            else:
                loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
                under, over = ratio < low and advantage < 0, ratio > high and advantage > 0
                if correction.clip_ratio_c is not None and advantage < 0:
                    dual = ratio > correction.clip_ratio_c
                    loss = torch.minimum(loss, -correction.clip_ratio_c * advantage)
            losses[-1].append(loss * batch.weights[b, t] * batch.keep[b, t])
            seen.append([ratio.detach(), (ratio - 1 - log).detach(), under, over, dual])
    means = torch.tensor(seen, dtype=torch.float64).reshape(-1, 5).mean(dim=0).tolist()
    names = ["ratio_mean", "approx_kl", "clip_low_fraction", "clip_high_fraction", "dual_clip_fraction"]
    loss = sum_by_hand(losses, config) / normalizer_by_hand(batch, config, normalizer)
    return loss, dict(zip(names, means, strict=True))


def check_same(batch: Batch, ours: Tensor, by_hand: Tensor) -> None:
    torch.testing.assert_close(ours, by_hand)
    gradients = []
    for loss in (ours, by_hand):
        (gradient,) = torch.autograd.grad(loss, batch.logprobs, allow_unused=True) if loss.requires_grad else (None,)
        gradients.append(torch.zeros_like(batch.mask, dtype=torch.float64) if gradient is None else gradient)
    torch.testing.assert_close(*gradients)


configs = st.builds(
    LossConfig,
    loss_type=st.sampled_from(LOSS_TYPES),
    epsilon_high=st.sampled_from([0.28, 1.5]),
    max_completion_length=st.just(10),
)
corrections = st.builds(
    CorrectionConfig,
    clip_ratio_c=st.sampled_from([None, 1.5]),
    objective=st.sampled_from(["decoupled", "decoupled", "bypass_reinforce"]),
)
normalizers = st.sampled_from([None, None, 23.0])


@settings(max_examples=200, deadline=None)
@given(batches(), configs, corrections, normalizers)
def test_loss_gradient_and_metrics_are_those_of_a_loop_over_the_tokens(batch, config, correction, normalizer):
    batch.logprobs.requires_grad_()
    logprobs, old, advantages, mask, weights, keep = batch
    loss, metrics = policy_loss(
        logprobs,
        old,
        advantages,
        mask,
        config,
        weights=weights,
        correction_mask=keep,
        normalizer=normalizer,
        correction=correction,
    )
    expected, means = loss_by_hand(batch, config, correction, normalizer)
    check_same(batch, loss, expected)
    assert metrics == pytest.approx(means, rel=1e-6, abs=1e-9, nan_ok=True)


@settings(max_examples=60, deadline=None)
@given(batches(), configs, normalizers)
def test_the_kl_penalty_is_k3_of_the_reference(batch, config, normalizer):
    batch.logprobs.requires_grad_()
    loss, metrics = kl_loss(batch.logprobs, batch.old, batch.mask, 0.1, config, normalizer=normalizer)
    differences = [(old - new)[mask] for new, old, mask in zip(batch.logprobs, batch.old, batch.mask, strict=True)]
    k3 = [list(difference.exp() - 1 - difference) for difference in differences]
    check_same(batch, loss, 0.1 * sum_by_hand(k3, config) / normalizer_by_hand(batch, config, normalizer))
    values = [value.item() for row in k3 for value in row]
    assert metrics == pytest.approx({"kl": sum(values) / len(values) if values else math.nan}, nan_ok=True)


# ---------------------------------------------------------------------------------- objectives, worked by hand

# Two completions: ratios 2 and 0.5 with A = 1, and a ratio of 2 with A = -2; the last place is padding.
# -min(c A, clip(c, 0.8, 1.2) A):  -min(2, 1.2) = -1.2,  -min(0.5, 0.8) = -0.5,  -min(-4, -2.4) = 4.
RATIOS = torch.tensor([[2.0, 0.5], [2.0, 1.0]])
LOGPROBS = torch.tensor([[-1.0, -2.0], [-0.5, 99.0]])
MASK = torch.tensor([[1, 1], [1, 0]])
ADVANTAGES = torch.tensor([1.0, -2.0])

# θ / old = 2, 0.5 | 2 and old / rollout = 3, 1 | 0.5, so θ / rollout = 6, 0.5 | 1.
OLD = LOGPROBS - RATIOS.log()
ROLLOUT = OLD - torch.tensor([[3.0, 1.0], [0.5, 1.0]]).log()


def corrected(rollout: Tensor = ROLLOUT, **correction: object) -> tuple[float, list[list[float]]]:
    logprobs = LOGPROBS.clone().requires_grad_()
    config = CorrectionConfig(**correction)  # type: ignore[arg-type]
    loss, _ = corrected_policy_loss(logprobs, OLD, rollout, ADVANTAGES, MASK, config)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item() * 3, [[round(x * 3, 4) for x in row] for row in gradient.tolist()]


def test_decoupled_clips_against_the_old_policy_and_weighs_old_against_rollout():
    # l = -1.2, -0.5, 4 as above; w = min(3, 2), 1, 0.5
    assert corrected()[0] == pytest.approx(-2.4 - 0.5 + 2)
    assert corrected()[1] == [[0.0, -0.5], [2.0, 0.0]]


def test_bypass_clips_against_the_rollout_policy_and_has_no_weights():
    # c = 6, 0.5, 1: -min(6, 1.2), -min(0.5, 0.8), -min(-2, -2)
    assert corrected(objective="bypass")[0] == pytest.approx(-1.2 - 0.5 + 2)
    assert corrected(objective="bypass")[1] == [[0.0, -0.5], [2.0, 0.0]]


def test_bypass_reinforce_weighs_the_current_policy_against_the_rollout_policy():
    # w = min(6, 2), 0.5, 1; -A w log θ: 2 * 1, 0.5 * 2, -1
    assert corrected(objective="bypass_reinforce")[0] == pytest.approx(2 + 1 - 1)
    assert corrected(objective="bypass_reinforce")[1] == [[-2.0, -0.5], [2.0, 0.0]]


def test_rejection_judges_the_ratio_of_its_objective():
    rejection = Rejection("k1", "token", high=4.0)  # old / rollout reaches 3, θ / rollout 6
    assert corrected(rejection=rejection) == corrected()
    assert corrected(rejection=rejection, objective="bypass")[0] == pytest.approx(-0.5 + 2)
    assert corrected(rejection=rejection, objective="bypass_reinforce")[0] == pytest.approx(1 - 1)


def test_a_token_with_unknown_rollout_logprob_is_on_policy_under_every_objective():
    rollout = ROLLOUT.clone()
    rollout[1, 0] = math.nan
    assert corrected(rollout)[1][1] == [4.0, 0.0]  # w = 1
    assert corrected(rollout, objective="bypass")[1][1] == [2.0, 0.0]  # r = 1
    assert corrected(rollout, objective="bypass_reinforce")[1][1] == [2.0, 0.0]


def test_the_masks_of_correction_see_the_current_policy():
    # p_θ - p_b with A > 0: exp(-1) - exp(-1) / 6 = 0.307
    assert corrected(dppo_mask_high=0.2)[0] == pytest.approx(-0.5 + 2)
    assert corrected(dppo_mask_high=0.31) == corrected()


# ------------------------------------------------------------------------------------------- what the loop does not say


@pytest.mark.parametrize("difference", [19.0, 25.0, 60.0, 500.0])
def test_the_kl_penalty_pulls_however_far_the_policy_has_drifted(difference):
    for sign in (1, -1):
        logprobs = torch.tensor([[-1.0]], requires_grad=True)
        loss, _ = kl_loss(logprobs, torch.tensor([[-1.0 + sign * difference]]), torch.ones(1, 1), beta=1.0)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert loss.isfinite()
        # d k3 / d log θ = 1 - exp(d), and e^20 at most
        expected = 1 - math.exp(min(sign * difference, 20.0))
        assert gradient.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("difference", [-500.0, -25.0, 19.0, 60.0])
def test_the_pull_to_the_rollout_policy_grows_with_the_distance(difference):
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    rollout = torch.tensor([[-1.0 - difference, -math.inf]])
    config = CorrectionConfig(rollout_penalty=0.5, clip_min=1.0, clip_max=1.0)
    loss, _ = corrected_policy_loss(logprobs, logprobs.detach(), rollout, torch.zeros(1), torch.ones(1, 2), config)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    # 2 * 0.5 * difference / 2 tokens; an impossible token has nothing to be pulled to
    assert gradient.tolist() == [[pytest.approx(difference / 2), 0.0]]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_float32_leaves_a_finite_gradient(loss_type, advantage):
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    config = LossConfig(loss_type, **OPTIONS)
    loss, _ = policy_loss(logprobs, torch.tensor([[-200.0, -1.0]]), torch.tensor([advantage]), torch.ones(1, 2), config)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.isfinite()
    assert gradient.isfinite().all()


def loss_of(loss_type: str = "dapo", **options: object) -> None:
    policy_loss(LOGPROBS, OLD, options.pop("advantages", ADVANTAGES), MASK, LossConfig(loss_type=loss_type), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type must be 'grpo', 'bnpo'"),
        ({"loss_type": "cispo"}, "needs epsilon_high"),
        ({"loss_type": "dr_grpo"}, "needs max_completion_length"),
        ({"normalizer": 0}, "normalizer must be positive"),
        ({"weights": torch.ones(2, 1)}, r"weights must have the shape of logprobs, \(2, 2\), not \(2, 1\)"),
        ({"correction_mask": torch.ones(2, 3)}, "correction_mask must have the shape"),
        ({"advantages": torch.ones(2, 1)}, "advantages must have shape"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        loss_of(**options)
