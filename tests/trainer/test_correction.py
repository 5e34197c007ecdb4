"""Weights, rejection and metrics against a loop over the tokens by the formulas, and what the loop does not say."""

from __future__ import annotations

import math
from statistics import fmean
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replay_trainer.correction import Correction, CorrectionConfig, Moments, Rejection, correct

NAN = math.nan

# ------------------------------------------------------------------------------------------------ the loop by hand


class Token(NamedTuple):
    """A response token; its log-probabilities under three policies."""

    old: float
    rollout: float
    """NaN: unknown."""
    current: float
    advantage: float

    @property
    def known(self) -> bool:
        return not math.isnan(self.rollout)

    @property
    def log(self) -> float:
        return min(max(self.old - self.rollout, -20.0), 20.0) if self.known else 0.0

    @property
    def rise(self) -> float:
        return math.exp(self.current) - math.exp(self.rollout) if self.known else 0.0


ESTIMATORS = {"k1": lambda log: log, "k2": lambda log: log**2 / 2, "k3": lambda log: math.exp(log) - 1 - log}
AGGREGATES = {"sum": sum, "mean": fmean, "max": max}


def for_each(values: list[float], aggregate: str) -> list[float]:
    """The aggregate of the values of a sequence, at each of its tokens."""
    return values if aggregate == "token" else [AGGREGATES[aggregate](values)] * len(values)


def acted_on(ratio: float, config: CorrectionConfig) -> float:
    low = -math.inf if config.clip_min is None else config.clip_min
    high = math.inf if config.clip_max is None else config.clip_max
    if config.action == "none" or low <= ratio <= high:
        return ratio
    return 0.0 if config.action == "mask" else min(max(ratio, low), high)


class Row:
    """A sequence with at least one response token: ratio, weight and fate of each."""

    def __init__(self, tokens: list[Token], config: CorrectionConfig) -> None:
        self.tokens = tokens
        logs = [token.log for token in tokens]
        level = {"token": "token", "sequence": "sum", "geometric": "mean"}[config.level]
        self.ratios = [math.exp(min(max(log, -80.0), 80.0)) for log in for_each(logs, level)]
        self.weights = [acted_on(ratio, config) for ratio in self.ratios]
        self.vetoed = config.veto is not None and math.exp(min(logs)) < config.veto
        behind = fmean(token.rollout - token.current if token.known else 0.0 for token in tokens)
        threshold = config.off_policy_mask_threshold
        self.off_policy = threshold is not None and behind > threshold and any(token.advantage < 0 for token in tokens)
        self.dppo = [
            token.rise > (config.dppo_mask_high or math.inf)
            if token.advantage > 0
            else token.rise < -(config.dppo_mask_low or math.inf)
            for token in tokens
        ]
        self.kept = [not (self.vetoed or self.off_policy or dropped) for dropped in self.dppo]
        for rejection in config.rejections:
            values = for_each([ESTIMATORS[rejection.estimator](log) for log in logs], rejection.aggregate)
            for at, value in enumerate(map(math.exp, values) if rejection.estimator == "k1" else values):
                low = -math.inf if rejection.low is None else rejection.low
                high = math.inf if rejection.high is None else rejection.high
                self.kept[at] = self.kept[at] and low <= value <= high


def mean(values: list[float]) -> float:
    return fmean(values) if values else NAN


def metrics_of(rows: list[Row], config: CorrectionConfig) -> dict[str, float]:
    seen = [row for row in rows if any(token.known for token in row.tokens)]
    known = [(row, at) for row in seen for at, token in enumerate(row.tokens) if token.known]
    units = known if config.level == "token" else [(row, 0) for row in seen]
    ratios, weights = [row.ratios[at] for row, at in units], [row.weights[at] for row, at in units]
    above, below = (math.inf if config.clip_max is None else config.clip_max), config.clip_min or 0.0
    clipped = [ratio > above or ratio < below for ratio in ratios]
    logs = [row.tokens[at].log for row, at in known]
    away = [row.tokens[at].rollout - row.tokens[at].old for row, at in known]
    masked = [
        [
            config.action == "mask" and weight == 0
            for weight, token in zip(row.weights, row.tokens, strict=True)
            if token.known
        ]
        for row in seen
    ]
    tokens = [token for row in rows for token in row.tokens]
    squares = mean([weight**2 for weight in weights])
    return {
        "ratio_mean": mean(ratios),
        "ratio_min": min(ratios, default=NAN),
        "ratio_max": max(ratios, default=NAN),
        "weight_mean": mean(weights),
        "weight_min": min(weights, default=NAN),
        "weight_max": max(weights, default=NAN),
        "clipped_fraction": (
            mean([each and config.action != "none" for each in clipped])
            if config.action != "truncate" or config.clip_min is None or config.clip_min != config.clip_max
            else NAN
        ),
        "above_max_fraction": mean([ratio > above for ratio in ratios]),
        "below_min_fraction": mean([ratio < below for ratio in ratios]),
        "masked_token_fraction": mean([each for row in masked for each in row]),
        "masked_sequence_fraction": mean([all(row) for row in masked]),
        "rejected_token_fraction": mean([not row.kept[at] for row, at in known]),
        "rejected_sequence_fraction": mean([not any(row.kept) for row in seen]),
        "vetoed_sequence_fraction": mean([row.vetoed for row in seen]),
        "off_policy_sequence_fraction": mean([row.off_policy for row in seen]),
        "dppo_token_fraction": mean([row.dppo[at] for row, at in known]),
        "ess": mean(weights) ** 2 / squares if squares else NAN,
        "kl": mean(away),
        "k3_kl": mean([math.exp(log) - 1 - log for log in logs]),
        "chi2": mean([math.exp(log) ** 2 for log in logs]) - 1,
        "logprob_diff_mean": mean([abs(each) for each in away]),
        "logprob_diff_max": max(map(abs, away), default=NAN),
        "nan_fraction": mean([not token.known for token in tokens]),
    }


# ---------------------------------------------------------------------------------------- what holds for all inputs

PAIRS = [(None, 2.0), (0.5, 2.0), (0.5, None), (1.0, 1.0)]
rejections = st.builds(
    lambda estimator, aggregate, bounds: Rejection(estimator, aggregate, *bounds),
    st.sampled_from(["k1", "k2", "k3"]),
    st.sampled_from(["token", "sum", "mean", "max"]),
    st.sampled_from([(None, 0.05), (None, 1.5), (0.3, 1.0), (0.0, 0.0), (1.0, 1.0)]),
)


@st.composite
def configs(draw: st.DrawFn) -> CorrectionConfig:
    clip_min, clip_max = draw(st.sampled_from(PAIRS))
    return CorrectionConfig(
        level=draw(st.sampled_from(["token", "sequence", "geometric"])),
        action=draw(st.sampled_from(["truncate", "mask", "none"])),
        clip_min=clip_min,
        clip_max=clip_max,
        batch_normalize=draw(st.booleans()),
        rejection=tuple(draw(st.lists(rejections, max_size=4))),
        veto=draw(st.sampled_from([None, None, 0.1])),
        off_policy_mask_threshold=draw(st.sampled_from([None, None, 0.3])),
        dppo_mask_low=draw(st.sampled_from([None, None, 0.2])),
        dppo_mask_high=draw(st.sampled_from([None, None, 0.1])),
    )


class Batch(NamedTuple):
    old: Tensor
    rollout: Tensor
    mask: Tensor
    advantages: Tensor
    """(B,) or (B, T)."""
    current: Tensor | None

    def corrected(self, config: CorrectionConfig, rows: slice = slice(None), **options: float) -> Correction:
        old, rollout, mask, advantages, current = (each if each is None else each[rows] for each in self)
        return correct(old, rollout, mask, config, advantages=advantages, logprobs=current, **options)

    def rows(self, config: CorrectionConfig) -> list[Row]:
        advantages = self.advantages if self.advantages.ndim == 2 else self.advantages[:, None].expand_as(self.old)
        facts = torch.stack(
            [self.old, self.rollout, self.old if self.current is None else self.current, advantages], -1
        )
        tokens = [[Token(*token) for token in row[mask].tolist()] for row, mask in zip(facts, self.mask, strict=True)]
        return [Row(row, config) for row in tokens if row]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Outside the mask stands anything."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.integers(0, 4)), draw(st.integers(0, 6)))
    drift, spread = draw(st.sampled_from([(0.0, 0.0), (0.0, 0.01), (0.0, 1.0), (0.0, 30.0), (25.0, 5.0), (-3.0, 0.5)]))

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def happens(share: float) -> Tensor:
        return torch.rand(shape, generator=generator) < share

    rollout_BT = -5 * torch.rand(shape, generator=generator, dtype=torch.float64)
    old_BT = rollout_BT + drift + spread * normal()
    current_BT = draw(st.sampled_from([None, old_BT + 0.3 * normal(), rollout_BT.clone()]))
    rollout_BT[happens(draw(st.sampled_from([0.0, 0.3])))] = NAN
    mask_BT = happens(draw(st.sampled_from([0.5, 1.0])))
    anything_BT = torch.tensor([NAN, math.inf, -math.inf, 7.0]).repeat(shape[0], 2)[:, : shape[1]].double()
    old_BT, rollout_BT = (
        torch.where(mask_BT, old_BT, anything_BT),
        torch.where(mask_BT, rollout_BT, anything_BT.flip(1)),
    )
    advantages = normal().round()
    return Batch(old_BT, rollout_BT, mask_BT, advantages if draw(st.booleans()) else advantages.sum(dim=1), current_BT)


@settings(max_examples=400, deadline=None)
@given(batches(), configs())
def test_weights_mask_and_metrics_are_those_of_a_loop_over_the_tokens(batch, config):
    rows, correction = batch.rows(config), batch.corrected(config)
    weights = torch.tensor([weight for row in rows for weight in row.weights], dtype=torch.float64)
    units = torch.tensor([w for row in rows for w in (row.weights if config.level == "token" else row.weights[:1])])
    if config.batch_normalize and len(units) and (divisor := units.double().mean()) > 1e-8:
        weights /= divisor
    expected = torch.zeros_like(batch.old).masked_scatter(batch.mask, weights)
    torch.testing.assert_close(correction.weights, expected)
    kept = torch.tensor([kept for row in rows for kept in row.kept], dtype=torch.bool)
    assert torch.equal(correction.mask, torch.zeros_like(batch.mask).masked_scatter(batch.mask, kept))
    assert correction.metrics == pytest.approx(metrics_of(rows, config), rel=1e-6, abs=1e-9, nan_ok=True)


@settings(max_examples=60, deadline=None)
@given(batches(), configs(), st.integers(0, 4))
def test_parts_of_a_batch_give_the_weights_mask_and_metrics_of_the_whole(batch, config, at):
    whole = batch.corrected(config)
    total, count = whole.weight_totals()
    parts = [
        batch.corrected(config, rows, mean_weight=total / max(count, 1)) for rows in (slice(0, at), slice(at, None))
    ]
    torch.testing.assert_close(torch.cat([part.weights for part in parts]), whole.weights)
    assert torch.equal(torch.cat([part.mask for part in parts]), whole.mask)
    found = Moments.of_parts([part.moments for part in parts]).metrics()
    assert found == pytest.approx(whole.metrics, rel=1e-6, abs=1e-9, nan_ok=True)


@settings(max_examples=60, deadline=None)
@given(batches(), configs())
def test_float32_gives_what_float64_gives_to_its_last_digits(batch, config):
    exact = batch.corrected(config)
    single = Batch(*(each if each is None or each is batch.mask else each.float() for each in batch)).corrected(config)
    assert single.weights.dtype == torch.float32
    assert exact.weights.dtype == torch.float64
    # A sum of logs of some 100 has an error of 1e-5, and so has its exponential.
    torch.testing.assert_close(single.weights.double(), exact.weights, rtol=1e-3, atol=1e-6)
    assert torch.equal(single.mask, exact.mask)


# ------------------------------------------------------------------------------------------- what the loop does not say


def logprobs_of(ratios: list[list[float]]) -> tuple[Tensor, Tensor, Tensor]:
    """(old, rollout, mask) with these ratios old / rollout; 0 stands for padding."""
    ratios_BT = torch.tensor(ratios)
    return torch.where(ratios_BT != 0, ratios_BT.log() - 1.5, -3.0), torch.full_like(ratios_BT, -1.5), ratios_BT != 0


def test_masks_that_judge_by_the_advantage_ask_for_it():
    with pytest.raises(ValueError, match=r"need advantages of shape \(1,\) or \(1, 2\), not None"):
        correct(*logprobs_of([[1.0, 1.0]]), CorrectionConfig(dppo_mask_high=0.2))


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


def test_padding_is_not_the_largest_token_of_a_row():
    config = CorrectionConfig(rejection=Rejection("k1", "max", high=0.9))
    assert correct(*logprobs_of([[0.5, 0.0]]), config).mask.tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("action", "weights", "clipped"),
    [("truncate", [1.0, 1.0], NAN), ("mask", [1.0, 0.0], 0.5), ("none", [1.0, 2.0], 0.0)],
)
def test_equal_bounds_turn_the_weights_off_only_if_ratios_are_truncated(action, weights, clipped):
    config = CorrectionConfig(action=action, clip_min=1.0, clip_max=1.0)
    correction = correct(*logprobs_of([[1.0, 2.0]]), config)
    assert correction.weights[0].tolist() == pytest.approx(weights)
    assert correction.metrics["clipped_fraction"] == pytest.approx(clipped, nan_ok=True)


def test_the_mask_keeps_its_dtype():
    old, rollout, mask = logprobs_of([[1.0, 0]])
    for dtype in (torch.bool, torch.int64, torch.float32):
        assert correct(old, rollout, mask.to(dtype)).mask.dtype == dtype


def test_no_gradient_flows_through_the_correction():
    old, rollout, mask = logprobs_of([[0.5, 1.0]])
    assert not correct(old.requires_grad_(), rollout, mask).weights.requires_grad


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            CorrectionConfig,
            {"level": "tokens"},
            "level must be 'token', 'sequence' or 'geometric', not 'tokens'",
        ),
        (CorrectionConfig, {"clip_max": None}, "needs a bound"),
        (CorrectionConfig, {"clip_max": -1.0}, "clip_max must be at least 0, not -1.0"),
        (CorrectionConfig, {"clip_max": NAN}, "clip_max must be .*, not nan"),
        (CorrectionConfig, {"clip_min": 3.0}, "clip_min=3.0 must not exceed clip_max=2.0"),
        (CorrectionConfig, {"veto": 2.0}, "veto must be less than 1, not 2.0"),
        (
            CorrectionConfig,
            {"off_policy_mask_threshold": 0.0},
            "off_policy_mask_threshold must be greater than 0",
        ),
        (CorrectionConfig, {"dppo_mask_low": 1.5}, "dppo_mask_low must be less than 1"),
        (CorrectionConfig, {"clip_ratio_c": 1.0}, "clip_ratio_c must be greater than 1"),
        (CorrectionConfig, {"objective": "ppo"}, "'decoupled', 'bypass' or 'bypass_reinforce', not 'ppo'"),
        (Rejection, {"estimator": "k4", "high": 1.0}, "estimator must be"),
        (Rejection, {"aggregate": "median", "high": 1.0}, "aggregate must be"),
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
