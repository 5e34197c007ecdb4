"""A loss of the user: it trains as the trainer's own does, and each mistake is one sentence at the start."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import GRPOTrainer as TrlTrainer

from replay_client.testing import make_group
from replay_trainer import GRPOConfig, LossConfig, loss_function, policy_loss
from replay_trainer.correction import CorrectionConfig, Rejection
from replay_trainer.loss_functions import check_loss
from replay_trainer.losses import corrected_policy_loss
from tests.docs.blocks import ROOT, write_files
from tests.kit.clients import FakeClient
from tests.kit.groups import make_sample
from tests.kit.trainers import Killed, killed_in, lines_of, make_batches, make_trainer
from tests.trainer.test_ranks import run

OWN = "tests.trainer.own_losses"


def a_batch(seed: int, rollouts: int = 5, tokens: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> torch.Tensor:
        return torch.rand((rollouts, tokens), generator=generator)

    lengths_B = torch.randint(1, tokens + 1, (rollouts, 1), generator=generator)
    old_BT = -3 * uniform()
    return {
        "mask": torch.arange(tokens)[None, :] < lengths_B,
        "old": old_BT,
        "logprobs": old_BT + 1.5 * (uniform() - 0.5),
        "rollout": old_BT + uniform() - 0.5,
        "advantages": 4 * (uniform()[:, 0] - 0.5),
    }


def loss_and_gradient(batch: dict[str, torch.Tensor], config: LossConfig, correction: CorrectionConfig):
    logprobs = batch["logprobs"].clone().requires_grad_()
    loss, metrics = corrected_policy_loss(
        logprobs, batch["old"], batch["rollout"], batch["advantages"], batch["mask"], correction, config
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss, gradient, metrics


# ------------------------------------------------------------------------------------------------ the same as ours


@pytest.mark.parametrize("name", ["dapo", "gspo"])
@pytest.mark.parametrize(
    "correction",
    [
        CorrectionConfig(clip_min=1.0, clip_max=1.0),
        CorrectionConfig(clip_max=1.2),
        CorrectionConfig(rejection=Rejection(low=0.8, high=1.2)),
        CorrectionConfig(objective="bypass"),
    ],
    ids=["no correction", "weights", "rejection", "bypass"],
)
def test_a_copy_of_a_loss_of_the_trainer_has_its_loss_and_its_gradient_bit_by_bit(name, correction):
    for seed in range(20):
        batch = a_batch(seed)
        ours = loss_and_gradient(batch, LossConfig(name, epsilon_high=0.3), correction)
        own = loss_and_gradient(batch, LossConfig(f"{OWN}:{name}", epsilon_high=0.3), correction)
        assert torch.equal(own[0], ours[0])
        assert torch.equal(own[1], ours[1])


def trained(folder: Path, loss_type: str, **options: Any) -> dict[str, torch.Tensor]:
    folder.mkdir()
    trainer = make_trainer(FakeClient(make_batches(4, groups=4)), folder, loss_type=loss_type, max_steps=4, **options)
    trainer.train()
    return dict(trainer.model.state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {"groups_per_step": 4, "max_tokens_per_micro_batch": 20},
        {"groups_per_step": 4, "packing": False},
        {"groups_per_step": 4, "num_iterations": 2, "correction": CorrectionConfig(clip_max=1.5)},
    ],
    ids=["micro-batches and packing", "padded", "several iterations and a correction"],
)
def test_a_run_with_a_copy_of_dapo_ends_with_the_weights_of_a_run_with_dapo(tmp_path, options):
    ours = trained(tmp_path / "ours", "dapo", learning_rate=1e-2, **options)
    own = trained(tmp_path / "own", f"{OWN}:dapo", learning_rate=1e-2, **options)
    assert ours.keys() == own.keys()
    for name, weights in ours.items():
        assert torch.equal(weights, own[name]), name


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_two_ranks_and_rollouts_in_pieces_have_the_weights_of_the_loss_of_the_trainer(tmp_path, name):
    options = {"pieces": True, "max_tokens_per_micro_batch": 6}
    ours = run(tmp_path / "ours", ranks=2, loss_type=name, **options)
    own = run(tmp_path / "own", ranks=2, loss_type=f"{OWN}:{name}", **options)
    assert ours.keys() == own.keys()
    for weight in ours:
        assert torch.equal(ours[weight], own[weight]), weight


def test_a_run_with_an_own_loss_that_is_killed_and_resumed_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    options = {"groups_per_step": 4, "learning_rate": 1e-2, "loss_type": f"{OWN}:dapo", "max_steps": 4}
    batches = make_batches(4, groups=4)
    whole = make_trainer(FakeClient(batches), tmp_path / "whole", **options)
    whole.train()
    client = FakeClient(batches)
    with pytest.raises(Killed):
        make_trainer(client, tmp_path / "killed", on_step=killed_in(2), **options).train()
    resumed = make_trainer(client, tmp_path / "killed", resume=True, **options)
    resumed.train()
    assert [line["step"] for line in lines_of(tmp_path / "killed")] == [1, 2, 3, 4]
    weights = dict(resumed.model.state_dict())
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, weights[name]), name


# ------------------------------------------------------------------------------------------------ the page's example


@pytest.fixture
def my_losses(tmp_path, monkeypatch):
    """The module of the page, importable."""
    write_files(ROOT / "docs/how-to/own-loss.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    return "my_losses"


def sapo_of_trl(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and its gradient that TRL's own trainer computes."""
    logprobs = batch["logprobs"].clone().requires_grad_()
    rows, tokens = batch["mask"].shape
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type="sapo",
        args=SimpleNamespace(sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, delta=None),
        use_vllm=False,
        model=SimpleNamespace(training=False),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(gather=lambda value: value, reduce=lambda value, reduction: value),
        _metrics={"eval": defaultdict(list)},
        epsilon_low=0.2,
        epsilon_high=0.2,
    )
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
        "completion_ids": torch.zeros(rows, tokens, dtype=torch.long),
        "completion_mask": batch["mask"].long(),
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old"],
    }
    loss = TrlTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss, gradient


def test_the_example_of_the_page_is_trls_sapo(my_losses):
    config = LossConfig(f"{my_losses}:sapo")
    for seed in range(200):
        batch = a_batch(seed)
        logprobs = batch["logprobs"].clone().requires_grad_()
        loss, metrics = policy_loss(logprobs, batch["old"], batch["advantages"], batch["mask"], config)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        expected, expected_gradient = sapo_of_trl(batch)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
        assert torch.allclose(gradient, expected_gradient, rtol=0, atol=1e-6)
        assert metrics["loss/gate"] > 0


def test_a_run_with_the_example_logs_its_metric_beside_those_of_every_loss(my_losses, tmp_path):
    options = {"groups_per_step": 3, "max_tokens_per_micro_batch": 20, "max_steps": 2}
    make_trainer(FakeClient(make_batches(2)), tmp_path / "run", loss_type=f"{my_losses}:sapo", **options).train()
    for line in lines_of(tmp_path / "run"):
        assert line["train/loss/gate"] == pytest.approx(2.0, rel=0.2)
        assert line["train/ratio_mean"] == pytest.approx(1.0, rel=0.1)
        assert line["train/loss"] is not None


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:loss", "loss_type 'nowhere:loss': No module named 'nowhere'"),
        (f"{OWN}:missing", f"loss_type '{OWN}:missing': module '{OWN}' has no attribute 'missing'"),
        (f"{OWN}:not_a_function", "is a int, which cannot be called"),
        (f"{OWN}:raises", r"raised AttributeError: .* no attribute 'no_such_field' \(.*own_losses.py, line \d+\)"),
        (
            f"{OWN}:is_a_sum",
            r"must return one loss for each token, a tensor of shape \(2, 3\), not a tensor of shape \(\)",
        ),
        (f"{OWN}:is_a_row_for_each", r"a tensor of shape \(2, 3\), not a tensor of shape \(2,\)"),
        (f"{OWN}:without_metrics", "must return the losses of the tokens and a dict of metrics, not a tensor"),
        (f"{OWN}:metrics_in_a_list", "must return its metrics as a dict, not a list"),
        (f"{OWN}:odd_metric", "the metric 'ratio' of the loss function .* must be a number or a tensor"),
        (f"{OWN}:detached", "returned a loss without a gradient: it must depend on logprobs_BT"),
        (f"{OWN}:depends_on_something_else", "has no gradient by logprobs_BT"),
        (f"{OWN}:is_nan", "is not finite for two ordinary rollouts"),
        (f"{OWN}:gradient_is_nan", "the gradient of the loss function .* is not finite"),
        (f"{OWN}:teaches_nothing", "it would learn nothing"),
        (f"{OWN}:divides_by_length", "aggregates like dr_grpo, and needs max_completion_length"),
    ],
)
def test_a_mistake_is_one_sentence_before_the_first_step(tmp_path, name, message):
    with pytest.raises(ValueError, match=message) as refusal:
        make_trainer(FakeClient(make_batches(1)), tmp_path, loss_type=name)
    assert "\n" not in str(refusal.value)


def test_a_function_without_the_decorator_is_taken(tmp_path):
    trainer = make_trainer(FakeClient(make_batches(1)), tmp_path, loss_type=f"{OWN}:undecorated", max_steps=1)
    trainer.train()
    assert lines_of(tmp_path)[0]["train/loss/halves"] == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "sapo"}, "loss_type must be 'grpo', .* or 'package.module:function', not 'sapo'"),
        ({"correction": CorrectionConfig(objective="bypass_reinforce")}, "would not be called"),
        ({"correction": CorrectionConfig(clip_ratio_c=3.0)}, "clip_ratio_c belongs to the built-in losses"),
    ],
)
def test_settings_that_the_function_would_not_see_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**{"output_dir": str(tmp_path), "loss_type": f"{OWN}:dapo"} | options)


def test_another_way_to_aggregate_is_refused_where_the_function_is_defined():
    with pytest.raises(ValueError, match="aggregate_like must be one of dapo, grpo, dr_grpo, not 'gspo'"):
        loss_function(aggregate_like="gspo")


def test_a_group_whose_loss_becomes_nan_later_is_left_out_and_counted(tmp_path):
    short = [make_sample(make_group(rewards=[0.0, 1.0], completions=[[5, 6], [7]]), key=key) for key in range(2)]
    long = make_sample(make_group(rewards=[0.0, 1.0], completions=[[5, 6, 7, 8, 5, 6], [7]]), key=9)
    client = FakeClient([[*short, long]])
    trainer = make_trainer(
        client,
        tmp_path,
        loss_type=f"{OWN}:nan_for_longer_rollouts",
        groups_per_step=3,
        max_steps=1,
        max_unusable_fraction=0.5,
    )
    trainer.train()
    assert lines_of(tmp_path)[0]["train/groups_unusable"] == 1


def test_the_check_says_nothing_of_a_loss_that_can_be_trained_with(my_losses):
    check_loss(LossConfig(f"{OWN}:dapo"))
    check_loss(LossConfig(f"{OWN}:divides_by_length", max_completion_length=8))
    check_loss(LossConfig(f"{my_losses}:sapo"))
