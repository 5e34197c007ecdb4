"""Advantages of a user's function reach the loss unchanged, and a trainer that would scale them again is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from replay_client import AsyncReplayClient, ReplayClient
from replay_client.testing import make_group, server
from replay_generator import GroupScorer, ScorerConfig
from replay_generator.testing import ScriptedEngine
from replay_trainer import GRPOTrainer
from replay_trainer.batching import Batch
from tests.kit.clients import FakeClient
from tests.kit.generators import by_length, make_generator
from tests.kit.groups import keys_in, make_sample
from tests.kit.trainers import lines_of, make_batches, make_trainer

OWN = "tests.generator.own_advantages"
GROUPS = 3
TABLES = [
    {"name": "rollouts", "sampler": "fifo", "max_times_sampled": 1},
    {"name": "unscored", "sampler": "fifo", "max_times_sampled": 1},
    {"name": "replay", "sampler": "prioritized", "remover": "min_heap", "max_size": 64},
]


@pytest.fixture
def client() -> Iterator[ReplayClient]:
    with server(tables=TABLES) as replay:
        yield replay.client(timeout=20.0)


def generate(client: ReplayClient, **config: Any) -> None:
    """Inserts the groups of a generator."""

    async def run() -> None:
        engine = ScriptedEngine(tokenizer=SimpleNamespace(encode=lambda text: [3, 4]))
        async with AsyncReplayClient(client.address) as own:
            options = {"max_groups": GROUPS, "follow_policy": False} | config
            await make_generator(own, engine, **options).run()

    asyncio.run(run())


def score(client: ReplayClient, **config: Any) -> None:
    """Lets a scorer give all groups their rewards."""

    async def run() -> None:
        async with AsyncReplayClient(client.address) as own:
            await GroupScorer(own, by_length, ScorerConfig("unscored", max_items=GROUPS, **config)).run()

    asyncio.run(run())


def train(
    client: ReplayClient, folder: Path, monkeypatch: Any, **options: Any
) -> tuple[Batch, dict[str, torch.Tensor]]:
    """What one step trains on, and the weights after it."""
    batches = []
    to_batch = GRPOTrainer._to_batch

    def noting(trainer: GRPOTrainer, *arguments: Any) -> Batch:
        batches.append(to_batch(trainer, *arguments))
        return batches[-1]

    monkeypatch.setattr(GRPOTrainer, "_to_batch", noting)
    options = {"groups_per_step": GROUPS, "max_steps": 1, "sample_timeout": 20.0} | options
    trainer = make_trainer(client, folder, **options)
    trainer.train()
    return batches[-1], dict(trainer.model.state_dict())


def leave_one_out(rewards_G: np.ndarray) -> np.ndarray:
    others_G = np.array([np.delete(rewards_G, index).mean() for index in range(rewards_G.size)])
    return rewards_G - others_G


@pytest.mark.parametrize("scored_by", ["generator", "scorer"])
def test_the_advantages_of_a_function_are_those_of_the_loss(client, tmp_path, monkeypatch, scored_by):
    if scored_by == "generator":
        generate(client, advantages=f"{OWN}:leave_one_out")
    else:
        generate(client, unscored_table="unscored", reward=None)
        score(client, advantages=f"{OWN}:leave_one_out")
    batch, _ = train(client, tmp_path, monkeypatch)
    rewards_G = np.array([2.0, 0.0, 1.0, 2.0])  # of the texts "78", "", "9" and "78"
    assert batch.advantages_B.tolist() == GROUPS * np.float32(leave_one_out(rewards_G)).tolist()
    assert batch.token_advantages_BT is None


def test_a_function_equal_to_the_built_in_one_trains_the_same_weights(tmp_path, monkeypatch):
    weights = {}
    for name, config in {"built in": {}, "own": {"advantages": f"{OWN}:as_built_in"}}.items():
        with server(tables=TABLES) as replay:
            client = replay.client(timeout=20.0)
            generate(client, **config)
            _, weights[name] = train(client, tmp_path / name, monkeypatch, learning_rate=1e-2)
    for name, weight in weights["built in"].items():
        assert torch.equal(weight, weights["own"][name]), name


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_trainer_that_would_scale_them_again_ends_with_one_sentence_and_leaves_the_groups(client, tmp_path, scale):
    generate(client, advantages=f"{OWN}:leave_one_out")
    before = keys_in(client, "rollouts")
    options = {"groups_per_step": GROUPS, "max_steps": 1, "sample_timeout": 20.0}
    with pytest.raises(RuntimeError, match="leave one of the two settings out") as refusal:
        make_trainer(client, tmp_path, scale_rewards=scale, **options).train()
    assert f"of table 'rollouts': scale_rewards = '{scale}' of the trainer" in str(refusal.value)
    assert f"those that '{OWN}:leave_one_out' computes" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert keys_in(client, "rollouts") == before
    make_trainer(client, tmp_path, resume=True, **options).train()
    assert len(lines_of(tmp_path)) == 1


def test_a_group_of_the_pool_is_refused_too(tmp_path):
    by_function = make_group(rewards=[1.0, 0.0], completions=[[5], [6]], meta={"advantages_by": "my:function"})
    pool = [make_sample(by_function, key=100)]
    client = FakeClient(make_batches(1, zero_variance=1), pool=pool)
    with pytest.raises(RuntimeError, match="key 100 of table 'replay': scale_rewards = 'group'"):
        make_trainer(client, tmp_path, groups_per_step=3, max_steps=1, scale_rewards="group").train()


def test_what_else_a_group_says_of_its_advantages_is_no_refusal(tmp_path):
    group = make_group(rewards=[1.0, 0.0], completions=[[5], [6]], meta={"advantages_by": 3})
    client = FakeClient([[make_sample(group)]])
    make_trainer(client, tmp_path, groups_per_step=1, max_steps=1, scale_rewards="group").train()
    assert len(lines_of(tmp_path)) == 1
