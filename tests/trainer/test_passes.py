"""Groups that make a step fail are rejected, on all ranks alike; the weights change only by steps that are sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_client.testing import make_group
from replay_trainer import GRPOTrainer
from replay_trainer.config import GRPOConfig
from replay_trainer.weights import published
from tests.kit.clients import FakeClient
from tests.kit.groups import make_sample
from tests.kit.models import NEAR, assert_same_weights, poison
from tests.kit.trainers import OnStep, lines_of, make_batches, make_trainer, poisoned_sample
from tests.trainer.test_ranks import run

EFFECTS = {"nan": "its loss was nan", "memory": "memory ran out in a micro-batch with it"}


def trainer_of(client: FakeClient, output_dir: Path, effect: str = "", **options: Any) -> GRPOTrainer:
    # One row in each micro-batch: no group fails because of its neighbour.
    few = {"groups_per_step": 3, "learning_rate": 1e-2, "max_tokens_per_micro_batch": 1}
    trainer = make_trainer(client, output_dir, **(few | options))
    if effect:
        poison(trainer.model, effect)
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale_rewards": "batch"},
        {"beta": 0.1},
        {"correction": {"level": "sequence", "batch_normalize": True}},
        {"num_iterations": 2},
    ],
    ids=["plain", "scaled by the batch", "with a reference", "normalized weights", "two updates"],
)
@pytest.mark.parametrize("effect", EFFECTS)
def test_a_group_that_makes_a_step_fail_is_put_aside_and_the_step_is_made_without_it(tmp_path, caplog, effect, options):
    options = {name: getattr(GRPOConfig(**({"output_dir": tmp_path} | options)), name) for name in options}
    batches, sound = make_batches(3), make_batches(3)
    batches[1][1], sound[1] = poisoned_sample(), [sound[1][0], sound[1][2]]
    client = FakeClient(batches, pool=[poisoned_sample()])
    trainer = trainer_of(client, tmp_path / "poisoned", effect, **options)
    trainer.train()
    steps = lines_of(tmp_path / "poisoned")
    assert [line["train/groups_unusable"] for line in steps] == [0, 1, 0]
    assert [line["train/groups"] for line in steps] == [3, 2, 3]
    (said,) = [message for message in caplog.messages if "rejected" in message]
    assert "key 77 of table 'rollouts': step 2 failed: " in said
    assert EFFECTS[effect] in said
    assert client.pool == []
    without = trainer_of(FakeClient(sound), tmp_path / "sound", **options)
    without.train()
    assert_same_weights(trainer.model, without.model)


def test_a_group_of_the_pool_that_does_not_fit_into_memory_leaves_the_pool(tmp_path):
    client = FakeClient(make_batches(2), pool=[poisoned_sample()])
    drift = {"groups_per_step": 4, "replay_share": 0.25, "replay_max_drift": 100.0}
    trainer_of(client, tmp_path, "memory", max_steps=2, **drift).train()
    assert [line["train/groups_unusable"] for line in lines_of(tmp_path)] == [1, 0]
    assert client.pool == []
    assert client.deleted == [("replay", 77)]


def test_all_groups_of_a_step_are_put_aside_if_none_stands_out(tmp_path, caplog):
    trainer = trainer_of(FakeClient(make_batches(3)), tmp_path)
    passes = []

    def overflow(gradient: torch.Tensor) -> torch.Tensor:
        passes.append(1)
        return gradient * torch.inf if 10 <= len(passes) < 19 else gradient  # of the nine micro-batches of step 2

    trainer.model.lm_head.weight.register_hook(overflow)
    weights = []
    trainer.callbacks.append(OnStep(lambda _: weights.append(trainer.model.lm_head.weight.detach().clone())))
    trainer.train()
    assert [line["train/groups_unusable"] for line in lines_of(tmp_path)] == [0, 3, 0]
    assert [line["train/groups"] for line in lines_of(tmp_path)] == [3, 0, 3]
    assert len([message for message in caplog.messages if "no group stands out" in message]) == 3
    assert torch.equal(weights[0], weights[1])  # the second step was not applied
    assert not torch.equal(weights[1], weights[2])


def test_a_run_in_which_every_step_fails_ends_with_one_error(tmp_path):
    batch = [poisoned_sample(key=key) for key in range(6)]
    trainer = trainer_of(FakeClient([batch]), tmp_path, "nan", max_steps=9, groups_per_step=6)
    with pytest.raises(RuntimeError, match=r"12 of the last 12 groups could not be trained on, .* step 2 failed: its"):
        trainer.train()
    assert published(tmp_path)[-1].name == "step-1"


@pytest.mark.parametrize(
    ("effect", "fsdp"),
    [
        pytest.param("nan", False, marks=pytest.mark.long),
        pytest.param("memory", False, marks=pytest.mark.long),
        ("nan", True),
    ],
)
def test_two_ranks_put_the_same_group_aside(tmp_path, effect, fsdp):
    options = {
        "poison": effect,
        "fsdp": fsdp,
        "max_tokens_per_micro_batch": 1,
        "max_steps": 3,
        "sgd": False,
        "learning_rate": 1e-3,
    }
    one, two = run(tmp_path / "one", 1, **options), run(tmp_path / "two", 2, **options)
    for folder in ("one", "two"):
        assert [line["train/groups_unusable"] for line in lines_of(tmp_path / folder / "out")] == [0, 1, 0]
        assert [line["train/groups"] for line in lines_of(tmp_path / folder / "out")] == [4, 3, 4]
    assert_same_weights(two, one, **NEAR)


def test_ranks_of_partitioned_weights_that_run_out_of_memory_stop_and_name_the_group(tmp_path):
    with pytest.raises(AssertionError, match=r"memory ran out .* The groups 77 are rejected and deleted"):
        run(tmp_path / "two", 2, poison="memory", max_tokens_per_micro_batch=1, fsdp=True)


def test_a_group_below_the_bounds_trains(tmp_path):
    group = make_group(rewards=[1.0, 0.0], completions=[[5], [6]])
    group.advantages[:] = 1e9, -1e9
    group.sampling = {"temperature": 1e-3}
    client = FakeClient([[make_sample(group)]])
    trainer_of(client, tmp_path, max_steps=1, groups_per_step=1).train()
    assert lines_of(tmp_path)[0]["train/groups_unusable"] == 0
