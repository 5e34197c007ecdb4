"""The trainer on a real server: a share of replay, and groups that cannot be trained on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_client import ReplayClient
from replay_client.scoring import group_priority
from replay_server import ReplayServer, TableConfig
from replay_trainer import GRPOConfig, GRPOTrainer
from tests.trainer.factories import make_group, make_model

STEPS, FRESH = 6, 2


@pytest.fixture
def client() -> Iterator[ReplayClient]:
    tables = [
        TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 64}, forward_to="replay"),
        TableConfig(name="replay", sampler="prioritized", remover="min_heap", max_size=64, max_times_sampled=3),
    ]
    server = ReplayServer(tables=tables, port=0, admission={"groups_per_step": FRESH, "max_staleness": 20})
    server.start()
    try:
        with ReplayClient(server.address) as connected:
            yield connected
    finally:
        server.stop()


def insert(client: ReplayClient, count: int, bad: dict[int, bytes]) -> list[int]:
    """`count` groups for the queue, the payloads of `bad` among them at their places; returns all keys."""
    keys = []
    for index in range(count):
        group = make_group(rewards=[1.0, 0.0], completions=[[5, 6], [7 + index % 5]], logprobs=-2.7)
        payload = bad.get(index, group.encode())
        priority = group_priority(group.rewards, group.advantages)
        keys.append(client.insert(payload, {"rollouts": priority}))
    return keys


def train(client: ReplayClient, output_dir: Path, **options: Any) -> list[dict[str, Any]]:
    few = {"max_steps": STEPS, "learning_rate": 1e-3, "progress": False, "report_to": (), "sample_timeout": 20.0}
    GRPOTrainer(make_model(), client, GRPOConfig(output_dir=output_dir, **(few | options))).train()
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_share_comes_from_a_real_pool_and_permits_count_fresh_groups(client: ReplayClient, tmp_path: Path) -> None:
    insert(client, STEPS * FRESH + FRESH, {})
    steps = train(client, tmp_path, groups_per_step=2 * FRESH, replay_share=0.5, replay_start_step=1)
    assert [line["fresh/groups"] for line in steps] == [FRESH] * STEPS
    assert [line["replay/groups_added"] for line in steps] == [0] + [FRESH] * (STEPS - 1)
    assert max(line["replay/times_sampled_mean"] or 0 for line in steps) <= 3
    assert client.policy().version == STEPS


def test_bad_groups_leave_a_real_server_and_are_never_drawn_again(client: ReplayClient, tmp_path: Path) -> None:
    beyond = make_group(rewards=[1.0, 0.0], completions=[[5, 900], [7]], logprobs=-2.7)
    broken = make_group(rewards=[1.0, 0.0])
    broken.advantages = np.array([math.nan, 0.0], np.float32)
    keys = insert(client, STEPS * FRESH + FRESH, {0: b"foreign", 3: beyond.encode(), 4: broken.encode()})
    bad = {keys[0], keys[3], keys[4]}
    steps = train(client, tmp_path, groups_per_step=2 * FRESH, replay_share=0.5)
    assert sum(line["train/groups_skipped"] for line in steps) == 3
    assert sum(line["train/groups"] for line in steps) > STEPS * FRESH
    for table in ("rollouts", "replay"):
        assert not bad & {item.key for item in client.list_items(table, limit=100)}
    assert client.get(sorted(bad)) == []
