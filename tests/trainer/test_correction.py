"""Weights, rejection and metrics against examples worked by hand from the formulas, and what holds for all inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replay_trainer.correction import CorrectionConfig, Moments, Rejection, correct

NAN = math.nan


def logprobs_of(ratios: list[list[float]]) -> tuple[Tensor, Tensor, Tensor]:
    """(old, rollout, mask) with these ratios old / rollout; 0 stands for padding, NaN for an unknown log b."""
    ratios_BT = torch.tensor(ratios)
    mask_BT = ratios_BT != 0
    rollout_BT = torch.where(ratios_BT.isnan(), NAN, torch.full_like(ratios_BT, -1.5))
    old_BT = torch.where(mask_BT & ~ratios_BT.isnan(), -1.5 + ratios_BT.log(), -3.0)
    return old_BT, rollout_BT, mask_BT


def weights(ratios: list[list[float]], **config: object) -> list[list[float]]:
    correction = correct(*logprobs_of(ratios), CorrectionConfig(**config))  # type: ignore[arg-type]
    return [[round(w, 4) for w in row] for row in correction.weights.tolist()]


def kept(ratios: list[list[float]], **config: object) -> list[list[int]]:
    return correct(*logprobs_of(ratios), CorrectionConfig(**config)).mask.int().tolist()  # type: ignore[arg-type]


def test_token_truncation_clamps_from_below_where_told():
    assert weights([[0.5, 1.0, 3.0]], clip_min=0.8, clip_max=2.0) == [[0.8, 1.0, 2.0]]
    assert weights([[0.5, 1.0, 3.0]], clip_min=0.8, clip_max=None) == [[0.8, 1.0, 3.0]]


def test_masking_zeroes_weights_outside_the_bounds_and_leaves_the_mask():
    ratios = [[0.4, 1.0, 3.0], [4.9, 5.1, 0]]
    assert weights(ratios, action="mask", clip_min=0.5, clip_max=5.0) == [[0.0, 1.0, 3.0], [4.9, 0.0, 0.0]]
    assert kept(ratios, action="mask", clip_min=0.5, clip_max=5.0) == [[1, 1, 1], [1, 1, 0]]


def test_bounds_are_inside():
    assert weights([[1.0]], action="mask", clip_min=1.0, clip_max=1.0) == [[1.0]]
    assert kept([[1.0]], rejection=Rejection("k1", "token", low=1.0, high=1.0)) == [[1]]
    assert kept([[1.0]], rejection=Rejection("k2", "max", high=0.0)) == [[1]]


def test_token_weights_are_normalised_over_tokens_after_the_action():
    # truncated 0.5, 1, 2: mean 3.5 / 3
    assert weights([[0.5, 1.0], [3.0, 0]], batch_normalize=True) == [
        [round(0.5 * 3 / 3.5, 4), round(3 / 3.5, 4)],
        [round(2 * 3 / 3.5, 4), 0.0],
    ]


def test_sequence_weights_are_normalised_over_sequences_whatever_their_length():
    # 0.25 and truncated 2: mean 1.125; an empty sequence is none
    assert weights([[0.5, 0.5], [4.0, 0], [0, 0]], level="sequence", batch_normalize=True) == [
        [0.2222, 0.2222],
        [1.7778, 0.0],
        [0.0, 0.0],
    ]


def test_normalising_weights_that_are_all_masked_leaves_zeros():
    assert weights([[9.0, 9.0]], action="mask", clip_max=2.0, batch_normalize=True) == [[0.0, 0.0]]


def test_the_log_ratio_of_each_token_is_clamped_before_it_is_summed():
    old, rollout, mask = torch.tensor([[-1.0, -9.0]]), torch.tensor([[-31.0, -4.0]]), torch.ones(1, 2)
    token = correct(old, rollout, mask, CorrectionConfig(action="none")).weights
    assert token.tolist()[0] == pytest.approx([math.exp(20), math.exp(-5)], rel=1e-5)
    sequence = correct(old, rollout, mask, CorrectionConfig(level="sequence", action="none")).weights
    assert sequence.tolist()[0] == pytest.approx([math.exp(15)] * 2, rel=1e-5)


def test_an_unknown_logprob_counts_as_on_policy():
    assert weights([[NAN, 4.0]], clip_max=2.0) == [[1.0, 2.0]]
    assert weights([[NAN, 4.0]], level="sequence", action="none") == [[4.0, 4.0]]
    assert weights([[NAN, 4.0]], level="geometric", action="none") == [[2.0, 2.0]]
    assert kept([[NAN, 4.0]], rejection=Rejection("k1", "token", high=2.0)) == [[1, 0]]
    assert kept([[NAN, 1.0]], rejection=Rejection("k1", "token", low=0.99, high=1.01)) == [[1, 1]]


# l = 0.5, -0.3 | 0.1, 0.2. Worked by hand: exp(0.5) = 1.648721, exp(-0.3) = 0.740818, exp(0.1) = 1.105171,
# exp(0.2) = 1.221403, exp(0.3) = 1.349859, exp(0.15) = 1.161834.
STATISTICS = {
    ("k1", "token"): [1.648721, 0.740818, 1.105171, 1.221403],
    ("k1", "sum"): [1.221403, 1.349859],
    ("k1", "mean"): [1.105171, 1.161834],
    ("k1", "max"): [1.648721, 1.221403],
    ("k2", "token"): [0.125, 0.045, 0.005, 0.02],
    ("k2", "sum"): [0.17, 0.025],
    ("k2", "mean"): [0.085, 0.0125],
    ("k2", "max"): [0.125, 0.02],
    ("k3", "token"): [0.148721, 0.040818, 0.005171, 0.021403],
    ("k3", "sum"): [0.189539, 0.026574],
    ("k3", "mean"): [0.094770, 0.013287],
    ("k3", "max"): [0.148721, 0.021403],
}


@pytest.mark.parametrize(("estimator", "aggregate"), STATISTICS)
def test_rejection_compares_the_statistic_with_both_bounds(estimator, aggregate):
    values = STATISTICS[estimator, aggregate]
    rollout = torch.full((2, 3), -2.0)
    old = rollout + torch.tensor([[0.5, -0.3, 9.0], [0.1, 0.2, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])

    def keeps(**bounds: float) -> list[bool]:
        rejection = Rejection(estimator, aggregate, **bounds)  # type: ignore[arg-type]
        mask_BT = correct(old, rollout, mask, CorrectionConfig(rejection=rejection)).mask
        assert mask_BT[:, 2].tolist() == [0, 0]
        if aggregate != "token":
            assert (mask_BT[:, 0] == mask_BT[:, 1]).all()
            return mask_BT[:, 0].bool().tolist()
        return mask_BT[:, :2].flatten().bool().tolist()

    for value in values:
        assert keeps(high=value * 1.001) == [v <= value for v in values]
        assert keeps(high=value * 0.999) == [v < value for v in values]
        assert keeps(low=value * 0.999) == [v >= value for v in values]
        assert keeps(low=value * 1.001) == [v > value for v in values]


def test_one_catastrophic_token_vetoes_its_sequence_only():
    ratios = [[1.0, 0.9e-4, 2.0], [1.0, 1.1e-4, 0]]
    assert kept(ratios, veto=1e-4) == [[0, 0, 0], [1, 1, 0]]
    assert kept(ratios) == [[1, 1, 1], [1, 1, 0]]


def test_rejection_and_veto_add_up_and_leave_the_weights_alone():
    ratios = [[1.0, 1e-6], [1.0, 3.0]]
    config = {"veto": 1e-4, "rejection": Rejection("k1", "token", high=2.0)}
    assert kept(ratios, **config) == [[0, 0], [1, 0]]
    assert weights(ratios, **config) == [[1.0, 0.0], [1.0, 2.0]]


# mean(log b - log θ) = ln 2 of each sequence but the third, where it is ln(2) / 2.
OFF_POLICY = [[0.5, 0.5], [0.5, 0.5], [0.5, 1.0], [0.5, 0.0]]


def test_the_off_policy_mask_drops_sequences_the_policy_has_left_behind_if_their_advantage_is_negative():
    config = CorrectionConfig(off_policy_mask_threshold=0.5)
    advantages = torch.tensor([-1.0, 0.0, -1.0, -0.1])
    correction = correct(*logprobs_of(OFF_POLICY), config, advantages=advantages)
    assert correction.mask.int().tolist() == [[0, 0], [1, 1], [1, 1], [0, 0]]
    assert correction.metrics["off_policy_sequence_fraction"] == 0.5
    assert correction.metrics["rejected_token_fraction"] == pytest.approx(3 / 7)
    # The threshold itself is kept, and unknown tokens count as on-policy: ln(4) / 2 = ln 2.
    exact = CorrectionConfig(off_policy_mask_threshold=float(torch.tensor(2.0).log()))
    assert correct(*logprobs_of([[0.25, NAN]]), exact, advantages=torch.tensor([-1.0])).mask.int().tolist() == [[1, 1]]


def test_the_off_policy_mask_judges_the_current_policy_and_not_the_old_one():
    old, rollout, mask = logprobs_of([[0.5, 0.5]])
    config = CorrectionConfig(off_policy_mask_threshold=0.5)
    correction = correct(old, rollout, mask, config, advantages=torch.tensor([-1.0]), logprobs=rollout)
    assert correction.mask.all()


def test_the_dppo_mask_drops_tokens_that_have_moved_far_in_the_direction_they_are_pushed():
    rollout = torch.tensor([[0.5, 0.5, 0.5, 0.5, NAN]]).log().repeat(2, 1)
    current = torch.tensor([[0.69, 0.71, 0.31, 0.29, 0.9]]).log().repeat(2, 1)
    config = CorrectionConfig(dppo_mask_low=0.2, dppo_mask_high=0.2)
    correction = correct(current, rollout, torch.ones(2, 5), config, advantages=torch.tensor([1.0, -1.0]))
    assert correction.mask.int().tolist() == [[1, 0, 1, 1, 1], [1, 1, 1, 0, 1]]
    assert correction.metrics["dppo_token_fraction"] == 2 / 8
    zero = correct(current, rollout, torch.ones(2, 5), config, advantages=torch.zeros(2, 5))
    assert zero.mask.int().tolist() == [[1, 1, 1, 0, 1]] * 2


def test_masks_that_judge_by_the_advantage_ask_for_it():
    with pytest.raises(ValueError, match=r"need advantages of shape \(1,\) or \(1, 2\), not None"):
        correct(*logprobs_of([[1.0, 1.0]]), CorrectionConfig(dppo_mask_high=0.2))


def test_moments_of_parts_give_the_metrics_of_the_whole():
    config = CorrectionConfig(veto=0.1, off_policy_mask_threshold=0.5)
    batch, advantages = logprobs_of(OFF_POLICY), torch.tensor([-1.0, 0.0, -1.0, -0.1])
    parts = [
        correct(*(tensor[rows] for tensor in batch), config, advantages=advantages[rows]).moments
        for rows in (slice(0, 1), slice(1, 4))
    ]
    whole = correct(*batch, config, advantages=advantages).metrics
    assert Moments.of_parts(parts).metrics() == pytest.approx(whole, nan_ok=True)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("aggregate", ["token", "sum", "mean", "max"])
def test_a_rejection_does_not_hide_a_nan_of_the_model(estimator, aggregate):
    old, rollout, mask = logprobs_of([[1.0, 1.0, 50.0], [1.0, 50.0, 1.0]])
    old[0, 0] = NAN
    rejection = Rejection(estimator, aggregate, low=0.0, high=2.0)  # type: ignore[arg-type]
    correction = correct(old, rollout, mask, CorrectionConfig(rejection=rejection))
    assert correction.mask[0, 0]
    assert not correction.mask[1, 1]
    assert correction.weights[0, 0].isnan()


def test_weights_that_all_vanish_are_not_blown_up_by_normalising():
    # Two sequences of 3 tokens with l = -7 and -8: weights e^-21 and e^-24, mean 4e-10.
    old, rollout, mask = torch.tensor([[-9.0] * 3, [-10.0] * 3]), torch.full((2, 3), -2.0), torch.ones(2, 3)
    config = CorrectionConfig(level="sequence", batch_normalize=True)
    assert correct(old, rollout, mask, config).weights[:, 0].tolist() == pytest.approx([math.exp(-21), math.exp(-24)])
    # One sequence that does not vanish is enough to divide by.
    near = correct(torch.tensor([[-9.0] * 3, [-2.1] * 3]), rollout, mask, config).weights[:, 0].tolist()
    assert near == pytest.approx([2 * math.exp(-20.7), 2.0], rel=1e-4)


def test_the_mask_keeps_its_dtype():
    old, rollout, mask = logprobs_of([[1.0, 0]])
    for dtype in (torch.bool, torch.int64, torch.float32):
        assert correct(old, rollout, mask.to(dtype)).mask.dtype == dtype


def test_no_gradient_flows_through_the_correction():
    old, rollout, mask = logprobs_of([[0.5, 1.0]])
    assert not correct(old.requires_grad_(), rollout, mask).weights.requires_grad


def test_token_metrics_follow_their_formulas():
    config = CorrectionConfig(clip_max=2.0, rejection=Rejection("k1", "token", high=3.0))
    metrics = correct(*logprobs_of([[0.5, 1.0, 4.0], [2.0, NAN, 0]]), config).metrics
    assert metrics == pytest.approx(
        {
            "ratio_mean": 7.5 / 4,
            "ratio_min": 0.5,
            "ratio_max": 4.0,
            "weight_mean": 5.5 / 4,
            "weight_min": 0.5,
            "weight_max": 2.0,
            "clipped_fraction": 1 / 4,
            "above_max_fraction": 1 / 4,
            "below_min_fraction": 0.0,
            "masked_token_fraction": 0.0,
            "masked_sequence_fraction": 0.0,
            "rejected_token_fraction": 1 / 4,
            "rejected_sequence_fraction": 0.0,
            "vetoed_sequence_fraction": 0.0,
            "off_policy_sequence_fraction": 0.0,
            "dppo_token_fraction": 0.0,
            "ess": (5.5 / 4) ** 2 / ((0.25 + 1 + 4 + 4) / 4),
            "kl": -math.log(4) / 4,
            "k3_kl": 7.5 / 4 - 1 - math.log(4) / 4,
            "chi2": (0.25 + 1 + 16 + 4) / 4 - 1,
            "logprob_diff_mean": math.log(2),
            "logprob_diff_max": math.log(4),
            "nan_fraction": 1 / 5,
        },
        abs=2e-6,
    )


def test_sequence_metrics_count_sequences_whatever_their_length():
    config = CorrectionConfig(level="sequence", action="mask", clip_min=0.4, clip_max=3.0, veto=0.6)
    metrics = correct(*logprobs_of([[2.0, 2.0, 1.0], [0.5, 0, 0], [0.25, 0, 0], [NAN, NAN, 0]]), config).metrics
    # ρ = 4, 0.5, 0.25; weights 0, 0.5, 0. The last sequence is unknown as a whole.
    assert metrics["ratio_mean"] == pytest.approx(4.75 / 3)
    assert metrics["weight_mean"] == pytest.approx(0.5 / 3)
    assert metrics["above_max_fraction"] == pytest.approx(1 / 3)
    assert metrics["below_min_fraction"] == pytest.approx(1 / 3)
    assert metrics["clipped_fraction"] == pytest.approx(2 / 3)
    assert metrics["masked_token_fraction"] == pytest.approx(4 / 5)
    assert metrics["masked_sequence_fraction"] == pytest.approx(2 / 3)
    assert metrics["rejected_token_fraction"] == pytest.approx(2 / 5)
    assert metrics["rejected_sequence_fraction"] == pytest.approx(2 / 3)
    assert metrics["ess"] == pytest.approx(1 / 3)
    assert metrics["chi2"] == pytest.approx((4 + 4 + 1 + 0.25 + 0.0625) / 5 - 1)
    assert metrics["nan_fraction"] == pytest.approx(2 / 7)


def test_a_token_mask_loses_a_sequence_only_when_all_its_tokens_go():
    config = CorrectionConfig(action="mask", clip_max=2.0)
    metrics = correct(*logprobs_of([[3.0, 3.0], [1.0, 3.0]]), config).metrics
    assert metrics["masked_token_fraction"] == 0.75
    assert metrics["masked_sequence_fraction"] == 0.5


def test_differences_are_reported_as_they_are_and_not_clamped():
    metrics = correct(torch.tensor([[-1.0]]), torch.tensor([[-31.0]]), torch.ones(1, 1)).metrics
    assert metrics["kl"] == -30.0
    assert metrics["logprob_diff_max"] == 30.0
    assert metrics["ratio_max"] == pytest.approx(math.exp(20), rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("aggregate", ["token", "sum", "mean", "max"])
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_a_batch_without_tokens_gives_zero_weights_and_no_numbers(level, aggregate, shape):
    empty, rejection = torch.zeros(shape), Rejection("k1", aggregate, high=2.0)  # type: ignore[arg-type]
    config = CorrectionConfig(level=level, batch_normalize=True, rejection=rejection)  # type: ignore[arg-type]
    correction = correct(empty, empty, empty, config)
    assert correction.weights.tolist() == correction.mask.tolist() == empty.tolist()
    assert all(math.isnan(value) for value in correction.metrics.values())


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            CorrectionConfig,
            {"level": "tokens"},
            "level: Input should be 'token', 'sequence' or 'geometric', not 'tokens'",
        ),
        (CorrectionConfig, {"clip_max": None}, "needs a bound"),
        (CorrectionConfig, {"clip_max": -1.0}, "clip_max: Input should be greater than or equal to 0, not -1.0"),
        (CorrectionConfig, {"clip_max": NAN}, "clip_max: Input should be .*, not nan"),
        (CorrectionConfig, {"clip_min": 3.0}, "clip_min=3.0 must not exceed clip_max=2.0"),
        (CorrectionConfig, {"veto": 2.0}, "veto: Input should be less than 1, not 2.0"),
        (
            CorrectionConfig,
            {"off_policy_mask_threshold": 0.0},
            "off_policy_mask_threshold: Input should be greater than 0",
        ),
        (CorrectionConfig, {"dppo_mask_low": 1.5}, "dppo_mask_low: Input should be less than 1"),
        (CorrectionConfig, {"clip_ratio_c": 1.0}, "clip_ratio_c: Input should be greater than 1"),
        (CorrectionConfig, {"objective": "ppo"}, "'decoupled', 'bypass' or 'bypass_reinforce', not 'ppo'"),
        (Rejection, {"estimator": "k4", "high": 1.0}, "estimator: Input should be"),
        (Rejection, {"aggregate": "median", "high": 1.0}, "aggregate: Input should be"),
        (Rejection, {}, "keeps everything"),
        (Rejection, {"low": 2.0, "high": 1.0}, "must not exceed"),
    ],
)
def test_a_bad_configuration_is_refused_with_its_value(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        kind(**fields)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 2\)"):
        correct(torch.zeros(2, 3), torch.zeros(2, 2), torch.ones(2, 3))


# ---------------------------------------------------------------------------------------- what holds for all inputs

configs = st.builds(
    CorrectionConfig,
    level=st.sampled_from(["token", "sequence", "geometric"]),
    action=st.sampled_from(["truncate", "mask", "none"]),
    clip_min=st.sampled_from([None, 0.5]),
    clip_max=st.just(2.0),
    batch_normalize=st.booleans(),
    rejection=st.none()
    | st.builds(
        Rejection,
        estimator=st.sampled_from(["k1", "k2", "k3"]),
        aggregate=st.sampled_from(["token", "sum", "mean", "max"]),
        high=st.sampled_from([0.05, 1.5]),
    ),
    veto=st.sampled_from([None, 0.1]),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 6)))
    spread = draw(st.sampled_from([0.01, 1.0, 30.0]))
    rollout_BT = -torch.rand(shape, generator=generator) * 5
    old_BT = rollout_BT + spread * torch.randn(shape, generator=generator)
    rollout_BT[torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3]))] = NAN
    mask_BT = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.5, 1.0]))
    return old_BT, rollout_BT, mask_BT


def same(a: object, b: object) -> bool:
    # Sums in another order differ in the last digit, and the exponential of a large one makes more of it.
    return a == pytest.approx(b, rel=1e-4, abs=1e-6, nan_ok=True)


@settings(max_examples=60, deadline=None)
@given(batches(), configs)
def test_weights_stay_in_bounds_and_inside_the_mask(batch, config):
    old, rollout, mask = batch
    correction = correct(old, rollout, mask, config)
    assert correction.weights.shape == correction.mask.shape == mask.shape
    assert correction.weights.isfinite().all()
    assert (correction.weights[~mask] == 0).all()
    assert not (correction.mask & ~mask).any()
    if not config.batch_normalize and config.action != "none":
        assert (correction.weights <= 2.0).all()
    if not config.batch_normalize and config.action == "truncate" and config.clip_min:
        assert (correction.weights[mask] >= 0.5).all()


@settings(max_examples=60, deadline=None)
@given(batches(), configs)
def test_padding_never_matters(batch, config):
    old, rollout, mask = batch
    T = mask.shape[1]
    correction = correct(old, rollout, mask, config)
    garbage = torch.tensor([NAN, math.inf, -math.inf, 7.0]).repeat(mask.shape[0], 1)
    padded = correct(
        torch.cat([old.masked_fill(~mask, NAN), garbage], dim=1),
        torch.cat([rollout.masked_fill(~mask, -math.inf), garbage.flip(1)], dim=1),
        torch.cat([mask, torch.zeros_like(garbage, dtype=torch.bool)], dim=1),
        config,
    )
    torch.testing.assert_close(padded.weights[:, :T], correction.weights, rtol=1e-4, atol=1e-6)
    assert (padded.mask[:, :T] == correction.mask).all()
    assert same(padded.metrics, correction.metrics)


@settings(max_examples=60, deadline=None)
@given(batches(), configs)
def test_unknown_tokens_count_nowhere_but_in_nan_fraction(batch, config):
    old, rollout, mask = batch
    before = correct(old, rollout, mask, config).metrics
    unknown = torch.full_like(old[:1], NAN)
    after = correct(
        torch.cat([old, torch.zeros_like(unknown)]),
        torch.cat([rollout, unknown]),
        torch.cat([mask, torch.ones_like(unknown, dtype=torch.bool)]),
        config,
    ).metrics
    total = int(mask.sum())
    fraction = before.pop("nan_fraction")
    counted = fraction * total if total else 0.0
    assert after.pop("nan_fraction") == pytest.approx((counted + mask.shape[1]) / (total + mask.shape[1]))
    assert same(after, before)


@settings(max_examples=60, deadline=None)
@given(batches(), configs)
def test_float64_gives_what_float32_gives_to_its_last_digits(batch, config):
    old, rollout, mask = batch
    correction = correct(old, rollout, mask, config)
    doubled = correct(old.double(), rollout.double(), mask, config)
    assert correction.weights.dtype == torch.float32
    assert doubled.weights.dtype == torch.float64
    # A sum of logs of some 100 has an error of 1e-5, and so has its exponential.
    torch.testing.assert_close(doubled.weights.float(), correction.weights, rtol=1e-3, atol=1e-6)
    assert torch.equal(doubled.mask, correction.mask)


@settings(max_examples=60, deadline=None)
@given(batches(), configs)
def test_on_policy_data_is_left_as_it_is(batch, config):
    old, rollout, mask = batch
    correction = correct(old, torch.where(rollout.isnan(), NAN, old), mask, config)
    assert torch.equal(correction.weights, mask.float())
    if config.rejection is None or config.rejection.high == 1.5:
        assert torch.equal(correction.mask, mask)
