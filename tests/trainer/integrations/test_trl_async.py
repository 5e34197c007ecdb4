"""ServerRollouts with the data set and the batcher that TRL's AsyncGRPOTrainer reads its queue with."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM

pytest.importorskip("trl", reason="pip install 'replay-server[trl]'")

from trl.experimental.async_grpo.async_grpo_trainer import FixedCountBatcher, RolloutQueueDataset

from replay_client import ReplayClient
from replay_client.errors import TableNotFoundError
from replay_client.scoring import group_priority
from replay_server import ReplayServer, TableConfig
from replay_trainer.demo.task import make_tokenizer
from replay_trainer.integrations.trl_async import ServerRollouts
from tests.docs.blocks import ROOT, blocks
from tests.factories import make_group, server_process
from tests.trainer.factories import make_model

TABLES = [
    TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 64}, forward_to="replay"),
    TableConfig(name="replay", sampler="prioritized", max_size=64),
]


@pytest.fixture(scope="module", autouse=True)
def accelerate_state() -> None:
    """A trainer has made this state. Without it, TRL's data set cannot log that it waited for more than a second."""
    PartialState()


@pytest.fixture
def server() -> Iterator[ReplayServer]:
    with ReplayServer(TABLES, port=0) as server:
        yield server


@pytest.fixture
def rollouts(server: ReplayServer, tmp_path: Path) -> Iterator[ServerRollouts]:
    tokenizer = make_tokenizer()
    made = ServerRollouts(server.address, make_model(vocabulary=len(tokenizer)), tokenizer, tmp_path / "weights")
    yield made
    made.stop()


def insert(address: str, *groups: Any) -> None:
    with ReplayClient(address) as client:
        for group in groups:
            client.insert(group, {"rollouts": group_priority(group.rewards, group.advantages)})


def dataset_of(rollouts: ServerRollouts, version: int = 1, **options: Any) -> tuple[RolloutQueueDataset, dict]:
    metrics: dict[str, list] = defaultdict(list)
    settings: dict[str, Any] = {"stale_after_s": 30.0, "poll_interval_s": 0.2, "max_staleness": 3} | options
    dataset = RolloutQueueDataset(
        rollout_queue=rollouts.rollout_buffer,
        model_version_fn=lambda: version,
        check_health_fn=rollouts.check_health,
        metrics=metrics,
        **settings,
    )
    return dataset, metrics


def test_trls_data_set_reads_the_groups_that_generators_inserted(
    server: ReplayServer, rollouts: ServerRollouts
) -> None:
    first = make_group(version=1, loss_mask=[True, False, True, True, True, True], prompt=(5, 6))
    first.rollout_logprobs[2] = np.nan  # unknown
    second = make_group(version=0, seed=1, prompt=(7, 8, 9, 10))
    insert(server.address, first, second)
    dataset, metrics = dataset_of(rollouts)
    rows = list(islice(iter(dataset), 6))
    for group, part in ((first, rows[:3]), (second, rows[3:])):
        assert len({row["group_id"] for row in part}) == 1
        end = 0
        mask = np.ones(6, bool) if group.loss_mask is None else group.loss_mask
        mask = mask & np.isfinite(group.rollout_logprobs)
        for k, (row, completion) in enumerate(zip(part, group.completions(), strict=True)):
            tokens = slice(end, end := end + len(completion))
            prompt = len(group.prompt_ids)
            assert row["input_ids"].tolist() == [*group.prompt_ids.tolist(), *completion.tolist()]
            assert row["input_ids"].dtype == row["completion_mask"].dtype == np.int64
            assert row["completion_mask"].tolist() == [0] * prompt + mask[tokens].astype(int).tolist()
            expected = np.nan_to_num(group.rollout_logprobs[tokens], nan=0.0)
            np.testing.assert_allclose(row["old_log_probs"], [*([0.0] * prompt), *expected])
            assert row["old_log_probs"].dtype == np.float32
            assert row["advantage"] == pytest.approx(float(group.advantages[k]))
            assert row["metrics"]["reward"] == group.rewards[k]
    assert rows[0]["group_id"] != rows[3]["group_id"]
    assert metrics["sample/staleness_max"] == [0.0] * 3 + [1.0] * 3
    assert all(0 <= seconds < 60 for seconds in metrics["sample/time_in_queue_s"])


def test_trls_batcher_takes_them(server: ReplayServer, rollouts: ServerRollouts) -> None:
    insert(server.address, *(make_group(seed=seed, version=1) for seed in range(4)))
    dataset, _ = dataset_of(rollouts)
    rows = next(iter(FixedCountBatcher(dataset, num_processes=2, microbatch_size=6)))
    assert len(rows) == 2
    assert sum(len(row.samples) for row in rows) == 6


def test_a_group_without_variance_is_replaced_from_the_pool(server: ReplayServer, rollouts: ServerRollouts) -> None:
    informative, barren = make_group(version=1), make_group(rewards=(1.0, 1.0, 1.0), seed=5, version=2)
    insert(server.address, informative, barren)
    dataset, _ = dataset_of(rollouts, version=2)
    rows = list(islice(iter(dataset), 6))
    # Drawn as a fresh one, the first group has joined the pool, and comes again in the place of the second.
    assert [row["input_ids"].tolist() for row in rows[3:]] == [row["input_ids"].tolist() for row in rows[:3]]
    assert [row["advantage"] for row in rows[3:]] == [row["advantage"] for row in rows[:3]]
    told = [rollouts.metrics_queue.get_nowait() for _ in range(2)]
    assert [each["replay/groups_replaced_total"] for each in told] == [0.0, 1.0]
    assert [each["replay/fresh_zero_variance"] for each in told] == [(0.0, 1.0), (1.0, 1.0)]
    with pytest.raises(queue.Empty):
        rollouts.metrics_queue.get_nowait()


def test_an_empty_table_is_an_empty_queue_until_it_is_unhealthy(server: ReplayServer, rollouts: ServerRollouts) -> None:
    rollouts.start()
    with pytest.raises(queue.Empty):
        rollouts.rollout_buffer.get(timeout=0.05)
    assert rollouts.rollout_buffer.qsize() == 0
    rollouts.check_health(60.0)
    dataset, _ = dataset_of(rollouts, stale_after_s=0.0)
    with pytest.raises(RuntimeError, match=r"no rollout came for .* 0 groups were inserted into rollouts"):
        next(iter(dataset))


def test_weights_and_version_reach_the_generators(server: ReplayServer, rollouts: ServerRollouts) -> None:
    trained = make_model(seed=7, vocabulary=len(make_tokenizer()))
    with ReplayClient(server.address) as client:
        client.set_policy_version(40)  # of an earlier run
        for version in (1, 2, 3):
            with torch.no_grad():
                trained.lm_head.weight += 1.0
            # In the order in which TRL's trainer calls them.
            rollouts.init_weight_transfer()
            rollouts.pause()
            rollouts.send_weights(trained.named_parameters())
            rollouts.resume()
            rollouts.update_model_version(version)
            policy = client.policy()
            assert policy.version == version
            loaded = AutoModelForCausalLM.from_pretrained(policy.weights)
            for name, parameter in loaded.named_parameters():
                torch.testing.assert_close(parameter, trained.get_parameter(name))
    folder = Path(policy.weights).parent
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-3"]
    rollouts.destroy()
    # A trainer that is started again from an older checkpoint counts from there.
    again = ServerRollouts(server.address, make_model(vocabulary=45), make_tokenizer(), folder)
    again.send_weights(trained.named_parameters())
    again.update_model_version(2)
    assert again.client.policy().version == 2
    again.stop()


def test_the_queue_waits_for_a_server_that_restarts(tmp_path: Path) -> None:
    config = '[server]\ndata_dir = "data"\n[[tables]]\nname = "rollouts"\n'.replace('data"', f'{tmp_path}/data"')
    tokenizer = make_tokenizer()
    with server_process(tmp_path, config) as first:
        insert(first.address, make_group(version=1))
        made = ServerRollouts(first.address, make_model(vocabulary=45), tokenizer, tmp_path / "w", pool=None)
        first.kill()
        with pytest.raises(queue.Empty):
            made.rollout_buffer.get(timeout=0.2)
        with server_process(tmp_path, config, address=first.address):
            dataset, _ = dataset_of(made)
            assert next(iter(dataset))["metrics"]["reward"] == 1.0
        made.stop()


def test_a_table_that_the_server_lacks_is_refused(server: ReplayServer, tmp_path: Path) -> None:
    with pytest.raises(TableNotFoundError):
        ServerRollouts(server.address, make_model(), None, tmp_path, table="other")


def test_the_code_of_the_page_makes_worker_and_transfer(
    server: ReplayServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}

    class Trainer:
        """AsyncGRPOTrainer needs CUDA: what it is given is what counts here."""

        def __init__(self, **given: Any) -> None:
            made.update(given)

        def train(self) -> None:
            made["trained"] = True

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs/how-to/trl-async.md"):
        if block.language == "python":
            exec(block.text, names)
    names["AsyncGRPOTrainer"], names["AsyncGRPOConfig"] = Trainer, dict
    names["train"](make_model(vocabulary=45), make_tokenizer(), None, None, server.address)
    assert made["rollout_worker"] is made["weight_transfer"]
    assert made["args"]["token_budget"] > 0
    insert(server.address, make_group())
    assert made["rollout_worker"].rollout_buffer.get(timeout=60.0).advantage > 0
    made["rollout_worker"].stop()
