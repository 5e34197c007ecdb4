"""Each loss against an example worked by hand, its gradient, and what must not change it."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replay_trainer.config import LossConfig
from replay_trainer.correction import CorrectionConfig, Rejection
from replay_trainer.losses import corrected_policy_loss, kl_loss, policy_loss

# Two completions: ratios 2 and 0.5 with A = 1, and a ratio of 2 with A = -2; the last place is padding.
# -min(c A, clip(c, 0.8, 1.2) A):  -min(2, 1.2) = -1.2,  -min(0.5, 0.8) = -0.5,  -min(-4, -2.4) = 4.
RATIOS = [[2.0, 0.5], [2.0, 0.0]]
LOGPROBS = torch.tensor([[-1.0, -2.0], [-0.5, 99.0]])
MASK = torch.tensor([[1, 1], [1, 0]])
ADVANTAGES = torch.tensor([1.0, -2.0])
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo"]
REINFORCE = CorrectionConfig(objective="bypass_reinforce")
OPTIONS = {"epsilon_high": 1.5, "max_completion_length": 10}


def old_of(ratios: list[list[float]], logprobs: Tensor = LOGPROBS) -> Tensor:
    return torch.where(torch.tensor(ratios) > 0, logprobs - torch.tensor(ratios).log(), -7.0)


def policy_loss_of(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **options: Any
) -> tuple[Tensor, dict[str, float]]:
    """`policy_loss`, the fields of LossConfig among its options."""
    names = {field.name for field in fields(LossConfig)}
    config = LossConfig(**{name: value for name, value in options.items() if name in names})
    others = {name: value for name, value in options.items() if name not in names}
    return policy_loss(logprobs, old, advantages, mask, config, **others)


def loss_of(**options: object) -> float:
    loss, _ = policy_loss_of(LOGPROBS, old_of(RATIOS), ADVANTAGES, MASK, **options)
    return loss.item()


def gradient_of(ratios: list[list[float]] = RATIOS, **options: object) -> list[list[float]]:
    logprobs = LOGPROBS.clone().requires_grad_()
    policy_loss_of(logprobs, old_of(ratios), ADVANTAGES, MASK, **options)[0].backward()
    assert logprobs.grad is not None
    return [[round(x, 4) for x in row] for row in logprobs.grad.tolist()]


def test_dapo_is_the_mean_over_all_tokens():
    assert loss_of() == pytest.approx((-1.2 - 0.5 + 4) / 3)
    assert loss_of(loss_type="dapo", normalizer=23) == pytest.approx(2.3 / 23)


def test_bnpo_is_the_mean_over_the_tokens_of_the_batch():
    assert loss_of(loss_type="bnpo") == pytest.approx(2.3 / 3)


def test_grpo_is_the_mean_over_sequences_of_their_token_means():
    assert loss_of(loss_type="grpo") == pytest.approx((-1.7 / 2 + 4) / 2)
    assert loss_of(loss_type="grpo", normalizer=8) == pytest.approx((-1.7 / 2 + 4) / 8)


def test_dr_grpo_divides_by_the_longest_completion_there_may_be():
    assert loss_of(loss_type="dr_grpo", max_completion_length=10) == pytest.approx(2.3 / 20)
    assert loss_of(loss_type="dr_grpo", max_completion_length=10, normalizer=4) == pytest.approx(2.3 / 40)


def test_epsilon_high_widens_the_clip_range_upwards_only():
    # -1.28 in the place of -1.2; the token with A < 0 is not clipped above, and 0.5 not below with A > 0
    assert loss_of(epsilon_high=0.28) == pytest.approx((-1.28 - 0.5 + 4) / 3)


def test_clipping_takes_the_gradient_only_where_the_policy_has_gone_far_enough():
    # d(-c A)/dlogp = -c A: -0.5 for the second token, 4 for the third; the first is clipped
    assert gradient_of() == [[0.0, round(-0.5 / 3, 4)], [round(4 / 3, 4), 0.0]]
    # With c = 0.5, A < 0 the third is clipped from below: -min(-1, -1.6) = 1.6
    assert gradient_of([[2.0, 0.5], [0.5, 0.0]])[1] == [0.0, 0.0]


def test_cispo_caps_the_ratio_and_keeps_the_gradient_of_every_token():
    # -min(c, 1.5) A log p: 1.5 * 1, 0.5 * 2, -(1.5 * -2 * -0.5)
    assert loss_of(loss_type="cispo", epsilon_high=1.5) == pytest.approx((1.5 + 1.0 - 1.5) / 3)
    assert gradient_of(loss_type="cispo", epsilon_high=1.5) == [[-0.5, round(-0.5 / 3, 4)], [1.0, 0.0]]


def test_gspo_clips_the_geometric_ratio_of_the_sequence():
    ratios = [[4.0, 1.0], [2.0, 0.0]]  # c = 2 clipped at 1.2, and 2: l = -1.2, 4
    loss, _ = policy_loss(LOGPROBS, old_of(ratios), ADVANTAGES, MASK, LossConfig("gspo"))
    assert loss.item() == pytest.approx((-1.2 + 4) / 2)
    # c = sqrt(0.5 * 2) = 1 is not clipped: dl/dlogp = -c A / 2 tokens / 2 sequences
    assert gradient_of([[0.5, 2.0], [2.0, 0.0]], loss_type="gspo") == [[-0.25, -0.25], [2.0, 0.0]]


def test_weights_multiply_the_loss_of_their_token():
    weights = torch.tensor([[2.0, 0.5], [0.1, 9.0]])
    assert loss_of(weights=weights) == pytest.approx((-2.4 - 0.25 + 0.4) / 3)
    assert loss_of(weights=weights, loss_type="grpo") == pytest.approx((-2.65 / 2 + 0.4) / 2)
    # gspo: c = 1 and 2: l = -1 for both tokens, 4
    assert loss_of(weights=weights, loss_type="gspo") == pytest.approx((-2.5 / 2 + 0.4) / 2)


def test_rejected_tokens_add_nothing_and_still_count_in_the_denominators():
    keep = torch.tensor([[0, 1], [1, 0]])
    assert loss_of(keep=keep) == pytest.approx((-0.5 + 4) / 3)
    assert loss_of(keep=keep, loss_type="grpo") == pytest.approx((-0.5 / 2 + 4) / 2)
    assert loss_of(keep=keep, loss_type="dr_grpo", max_completion_length=10) == pytest.approx(3.5 / 20)
    assert loss_of(keep=torch.zeros(2, 2)) == 0.0


def test_advantages_may_be_given_for_each_token():
    advantages = torch.tensor([[1.0, 0.0], [-2.0, 5.0]])
    loss, _ = policy_loss(LOGPROBS, old_of(RATIOS), advantages, MASK)
    assert loss.item() == pytest.approx((-1.2 + 0 + 4) / 3)


def test_metrics_count_what_was_clipped():
    ratios = [[2.0, 0.5], [0.5, 0.0]]
    _, metrics = policy_loss(LOGPROBS, old_of(ratios), ADVANTAGES, MASK)
    assert metrics == pytest.approx(
        {
            "ratio_mean": 1.0,
            "approx_kl": (3.0 - 3 + math.log(2)) / 3,  # c - 1 - log c: 1 - ln 2, and twice -0.5 + ln 2
            "clip_low_fraction": 1 / 3,
            "clip_high_fraction": 1 / 3,
            "dual_clip_fraction": 0.0,
        },
        abs=1e-6,
    )
    # A = -2 and c = 2: the third token is beyond 1.5. With A = 1 the first one is not touched.
    _, metrics = policy_loss(LOGPROBS, old_of(RATIOS), ADVANTAGES, MASK, correction=CorrectionConfig(clip_ratio_c=1.5))
    assert metrics["dual_clip_fraction"] == pytest.approx(1 / 3)


def test_the_kl_penalty_is_k3_of_the_reference():
    # ref - logp = ln 2, -ln 2, ln 4: k3 = 2 - 1 - ln 2, 0.5 - 1 + ln 2, 4 - 1 - ln 4
    difference = torch.tensor([[math.log(2), -math.log(2)], [math.log(4), 50.0]])
    k3 = [1 - math.log(2), math.log(2) - 0.5, 3 - math.log(4)]
    loss, metrics = kl_loss(LOGPROBS, LOGPROBS + difference, MASK, beta=0.1)
    assert loss.item() == pytest.approx(0.1 * sum(k3) / 3)
    assert metrics == pytest.approx({"kl": sum(k3) / 3})
    loss, _ = kl_loss(LOGPROBS, LOGPROBS + difference, MASK, beta=0.1, config=LossConfig("grpo"), normalizer=2)
    assert loss.item() == pytest.approx(0.1 * ((k3[0] + k3[1]) / 2 + k3[2]) / 2)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31))
def test_the_dual_clip_is_that_of_verl(seed):
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.randn(4, 5, generator=generator).mul(2).requires_grad_()
    old, advantages = 2 * torch.randn(4, 5, generator=generator), torch.randn(4, 5, generator=generator)
    loss, _ = policy_loss(
        logprobs,
        old,
        advantages,
        torch.ones(4, 5),
        LossConfig(epsilon_high=0.3),
        correction=CorrectionConfig(clip_ratio_c=3.0),
    )
    # verl 0.9.1, compute_policy_loss_vanilla
    ratio = (logprobs - old).exp()
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.3))
    theirs = torch.where(advantages < 0, torch.minimum(clipped, -advantages * 3.0), clipped).mean()
    torch.testing.assert_close(loss, theirs)
    ours, verls = (torch.autograd.grad(each, logprobs)[0] for each in (loss, theirs))
    torch.testing.assert_close(ours, verls)


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


def test_reinforce_is_the_weighted_log_likelihood_without_any_ratio():
    # -A w log θ: 1, 2, -(-2 * -0.5) = -1
    weights = torch.tensor([[3.0, 1.0], [0.5, 9.0]])
    assert loss_of(correction=REINFORCE) == pytest.approx((1 + 2 - 1) / 3)
    assert loss_of(correction=REINFORCE, weights=weights) == pytest.approx((3 + 2 - 0.5) / 3)
    assert gradient_of(correction=REINFORCE, weights=weights) == [[-1.0, round(-1 / 3, 4)], [round(1 / 3, 4), 0.0]]


# θ / old = 2, 0.5 | 2 and old / rollout = 3, 1 | 0.5, so θ / rollout = 6, 0.5 | 1.
OLD = old_of(RATIOS)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type: Input should be 'grpo', 'bnpo'"),
        ({"loss_type": "cispo"}, "needs epsilon_high"),
        ({"loss_type": "dr_grpo"}, "needs max_completion_length"),
        ({"normalizer": 0}, "normalizer must be positive"),
        ({"weights": torch.ones(2, 1)}, r"weights must have the shape of logprobs, \(2, 2\), not \(2, 1\)"),
        ({"keep": torch.ones(2, 3)}, "keep must have the shape"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        loss_of(**options)


def test_advantages_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="advantages must have shape"):
        policy_loss(LOGPROBS, LOGPROBS, torch.ones(2, 1), MASK)


# ---------------------------------------------------------------------------------------- what holds for all inputs


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    B, T = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    old_BT = -3 * torch.rand(B, T, generator=generator)
    return {
        "logprobs": old_BT + draw(st.sampled_from([0.0, 0.3])) * torch.randn(B, T, generator=generator),
        "old_logprobs": old_BT,
        "advantages": torch.randn(B, generator=generator),
        "mask": torch.rand(B, T, generator=generator) < draw(st.sampled_from([0.5, 1.0])),
        "weights": 2 * torch.rand(B, T, generator=generator),
        "keep": torch.rand(B, T, generator=generator) < 0.8,
    }


def loss_and_gradient(batch: dict[str, Tensor], **options: object) -> tuple[Tensor, Tensor]:
    logprobs = batch["logprobs"].clone().requires_grad_()
    old, advantages, mask = batch["old_logprobs"], batch["advantages"], batch["mask"]
    extra = {name: batch[name] for name in ("weights", "keep") if name in batch}
    loss, _ = policy_loss_of(logprobs, old, advantages, mask, **extra, **options)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient


@settings(max_examples=80, deadline=None)
@given(batches(), st.sampled_from(LOSS_TYPES))
def test_padding_never_matters(batch, loss_type):
    options = {"loss_type": loss_type, **OPTIONS}
    T = batch["mask"].shape[1]
    loss, gradient = loss_and_gradient(batch, **options)
    padded = {
        name: torch.nn.functional.pad(tensor, (0, 2), value=float("nan") if tensor.is_floating_point() else 0)
        if tensor.ndim == 2
        else tensor
        for name, tensor in batch.items()
    }
    for name in ("logprobs", "old_logprobs", "weights"):
        padded[name] = padded[name].masked_fill(~padded["mask"], math.inf)
    padded_loss, padded_gradient = loss_and_gradient(padded, **options)
    torch.testing.assert_close(padded_loss, loss)
    torch.testing.assert_close(padded_gradient[:, :T], gradient)
    assert (padded_gradient[~padded["mask"]] == 0).all()


@settings(max_examples=40, deadline=None)
@given(batches(), st.sampled_from(LOSS_TYPES))
def test_zero_advantages_give_no_loss_and_no_gradient(batch, loss_type):
    batch["advantages"].zero_()
    loss, gradient = loss_and_gradient(batch, loss_type=loss_type, **OPTIONS)
    assert loss == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_float32_leaves_a_finite_gradient(loss_type, advantage):
    batch = {"logprobs": torch.tensor([[-1.0, -1.0]]), "old_logprobs": torch.tensor([[-200.0, -1.0]])}
    batch |= {"advantages": torch.tensor([advantage]), "mask": torch.tensor([[True, True]])}
    loss, gradient = loss_and_gradient(batch, loss_type=loss_type, **OPTIONS)
    assert loss.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_batch_without_tokens_has_no_loss(loss_type):
    batch = {"logprobs": torch.zeros(2, 1), "old_logprobs": torch.zeros(2, 1)}
    batch |= {"advantages": torch.ones(2), "mask": torch.zeros(2, 1)}
    loss, gradient = loss_and_gradient(batch, loss_type=loss_type, **OPTIONS)
    assert loss == 0
    assert (gradient == 0).all()
