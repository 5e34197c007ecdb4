"""Presets against the formulas of the projects they are named after, on ratios worked by hand; and the alarms."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from replay_trainer.config import LossConfig
from replay_trainer.correction import PRESETS, CorrectionConfig, correct
from replay_trainer.losses import corrected_policy_loss
from replay_trainer.metrics import Alarms

# Token ratios; products 5.6 and 0.64, geometric means 1.776 and 0.862.
RATIOS = torch.tensor([[2.0, 4.0, 0.7], [0.8, 1.0, 0.8]])
ROLLOUT = torch.full((2, 3), -2.0)


def outcome(config: CorrectionConfig) -> tuple[list[list[float]], list[list[bool]]]:
    correction = correct(ROLLOUT + RATIOS.log(), ROLLOUT, torch.ones(2, 3, dtype=torch.bool), config)
    return [[round(w, 3) for w in row] for row in correction.weights.tolist()], correction.mask.tolist()


ALL = [[True] * 3] * 2
EXPECTED = {
    "trl_token_truncate": ([[2.0, 3.0, 0.7], [0.8, 1.0, 0.8]], ALL),
    "trl_token_mask": ([[2.0, 0.0, 0.7], [0.8, 1.0, 0.8]], ALL),
    "trl_sequence_truncate": ([[3.0] * 3, [0.64] * 3], ALL),
    "trl_sequence_mask": ([[0.0] * 3, [0.64] * 3], ALL),
    "verl_decoupled_token_is": ([[2.0, 2.0, 0.7], [0.8, 1.0, 0.8]], ALL),
    "verl_decoupled_seq_is": ([[2.0] * 3, [0.64] * 3], ALL),
    "verl_decoupled_seq_is_rs": ([[2.0] * 3, [0.64] * 3], [[False] * 3, [True] * 3]),
    "verl_decoupled_geo_rs": ([[1.0] * 3] * 2, [[False] * 3] * 2),
    # k3: 0.307, 1.614, 0.057 | 0.023, 0, 0.023: means 0.659, 0.0154
    "verl_decoupled_k3_rs": ([[1.0] * 3] * 2, [[False] * 3] * 2),
    "areal": ([[2.0, 4.0, 0.7], [0.8, 1.0, 0.8]], ALL),
    "prime_rl": ([[2.0, 4.0, 0.7], [0.8, 1.0, 0.8]], ALL),
    "icepop": ([[2.0, 4.0, 0.7], [0.8, 1.0, 0.8]], ALL),
    "off": ([[1.0] * 3] * 2, ALL),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_preset_weighs_and_rejects_as_its_project(name):
    assert outcome(PRESETS[name]()) == EXPECTED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_a_loss(name):
    config = PRESETS[name]()
    logprobs = (ROLLOUT + RATIOS.log()).requires_grad_()
    loss, _ = corrected_policy_loss(
        logprobs, logprobs.detach(), ROLLOUT, torch.tensor([1.0, -1.0]), torch.ones(2, 3), config
    )
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_a_preset_takes_other_fields():
    assert outcome(PRESETS["trl_token_mask"](clip_max=1.5, clip_min=0.75))[0] == [[0.0, 0.0, 0.0], [0.8, 1.0, 0.8]]
    assert outcome(PRESETS["areal"](level="geometric", clip_max=1.5))[0] == [[0.0] * 3, [0.862] * 3]
    assert outcome(PRESETS["verl_decoupled_token_is"](clip_max=3.0))[0][0] == [2.0, 3.0, 0.7]
    with pytest.raises(ValueError, match="did you mean 'clip_max'"):
        PRESETS["areal"](clip_mox=1.5)


def test_the_clipped_presets_of_verl_have_its_dual_clip_and_its_reinforce_has_no_clip():
    for name, preset in PRESETS.items():
        clipped = name.startswith("verl") and "_pg_" not in name
        assert preset().clip_ratio_c == (3.0 if clipped else None), name
    # A < 0 and θ / rollout = 4 > 3: under bypass verl gives this token no gradient
    logprobs = (ROLLOUT + RATIOS.log()).requires_grad_()
    config = PRESETS["verl_bypass_ppo_clip"]()
    loss, _ = corrected_policy_loss(logprobs, logprobs.detach(), ROLLOUT, -torch.ones(2), torch.ones(2, 3), config)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert (gradient[0] == 0).tolist() == [False, True, True]  # 0.7 lies below 1 - epsilon


def test_icepop_of_verl_exists_with_and_without_an_old_policy():
    assert PRESETS["verl_bypass_pg_token_icepop"]().objective == "bypass_reinforce"
    for name in ("verl_bypass_pg_token_icepop", "verl_decoupled_token_icepop"):
        config = PRESETS[name]()
        assert config.level == "token"
        assert config.action == "mask"
        assert config.clip_min == 0.5
        assert config.clip_max == 5.0


@pytest.mark.parametrize(
    ("aggregate", "high", "kept"),
    [
        pytest.param("token", 3.0, [[True, False, True], [True] * 3], id="tokens"),
        pytest.param("mean", 1.7, [[False] * 3, [True] * 3], id="sequences by their mean"),
        pytest.param("max", 3.9, [[False] * 3, [True] * 3], id="sequences by their largest ratio"),
    ],
)
def test_prime_rl_drops_tokens_and_sequences_by_their_own_bounds(aggregate, high, kept):
    bounds = PRESETS["prime_rl"]().rejections
    tighter = [replace(each, high=high) if each.aggregate == aggregate else each for each in bounds]
    assert outcome(PRESETS["prime_rl"](rejection=tuple(tighter)))[1] == kept


def test_the_gradient_of_prime_rl_is_that_of_its_unclipped_ratio():
    logprobs = (ROLLOUT + RATIOS.log()).requires_grad_()
    advantages = torch.tensor([1.0, -0.5])

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, logprobs)[0]

    ours, _ = corrected_policy_loss(
        logprobs, logprobs.detach(), ROLLOUT, advantages, torch.ones(2, 3), PRESETS["prime_rl"]()
    )
    theirs = -((logprobs - ROLLOUT).exp() * advantages[:, None]).sum() / 6
    torch.testing.assert_close(gradient(ours), gradient(theirs))


def test_the_gradient_of_dppo_pulls_every_token_to_the_rollout_policy_masked_or_not():
    # p_b = 0.135: the rises are 0.135, 0.406 and -0.041, the falls 0.027, 0, 0.027.
    logprobs = (ROLLOUT + RATIOS.log()).requires_grad_()
    advantages, kept = torch.tensor([1.0, -0.5]), torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    loss, _ = corrected_policy_loss(
        logprobs, logprobs.detach(), ROLLOUT, advantages, torch.ones(2, 3), PRESETS["dppo"](rollout_penalty=0.5)
    )
    pull = 2 * 0.5 * RATIOS.log()
    torch.testing.assert_close(
        torch.autograd.grad(loss, logprobs)[0], (-RATIOS * advantages[:, None] * kept + pull) / 6
    )


def test_the_pull_of_dppo_is_aggregated_like_the_loss_and_leaves_unknown_tokens_alone():
    logprobs = (ROLLOUT + RATIOS.log()).requires_grad_()
    rollout, mask = ROLLOUT.clone(), torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    rollout[1, 0] = math.nan
    loss, _ = corrected_policy_loss(
        logprobs,
        logprobs.detach(),
        rollout,
        torch.zeros(2),
        mask,
        PRESETS["dppo"](rollout_penalty=0.5),
        LossConfig("grpo"),
        normalizer=4,
    )
    weights = torch.tensor([[1 / 2, 1 / 2, 0.0], [0.0, 1 / 3, 1 / 3]]) / 4
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], weights * RATIOS.log())


# ------------------------------------------------------------------------------------------------------------ alarms


def test_an_alarm_rings_once_and_says_what_to_do(caplog):
    alarms = Alarms()
    fine = {"ratio_mean": 1.9, "ess": 0.31, "kl": -0.09, "chi2": 0.99}
    assert alarms.check(fine) == []
    with caplog.at_level(logging.WARNING):
        (said,) = alarms.check(fine | {"ess": 0.29})
    assert said.startswith("correction/ess is 0.29, safe is 0.3 to inf: a few tokens carry the gradient: lower")
    assert caplog.messages == [said]
    assert alarms.check(fine | {"ess": 0.1}) == []
    bad = {"ratio_mean": 2.1, "ess": 0.1, "kl": -0.2, "chi2": 1.5}
    assert [warning.split()[0] for warning in alarms.check(bad)] == [
        "correction/ratio_mean",
        "correction/kl",
        "correction/chi2",
    ]


def test_a_step_without_numbers_rings_nothing():
    nan = torch.zeros(1, 1)
    assert Alarms().check(correct(nan, nan, nan).metrics) == []
    assert Alarms().check({"ratio_mean": math.nan}) == []
