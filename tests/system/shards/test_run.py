"""A whole run over three shards, as its user starts it: one shard is killed in the middle, and comes back."""

import json

import pytest

from replay_client import ReplayClient
from replay_client.testing import until
from tests.kit.processes import Servers

STEPS = 12
CONFIG = """
server.data_dir = "{folder}"
admission = { fresh_groups_per_step = 4, max_staleness = 3 }
tables = [
    { name = "rollouts", rate_limiter = { type = "queue", max_size = 8 }, forward_to = "replay" },
    { name = "replay", sampler = "prioritized", remover = "min_heap", max_size = 64 },
]
"""


@pytest.mark.long
def test_a_run_over_three_shards_goes_on_when_one_is_killed(tmp_path, replay, generate, model_folder):
    servers = Servers(tmp_path, [CONFIG] * 3)
    every = servers.address
    (tmp_path / "train.toml").write_text("groups_per_step = 4\nmax_tokens_per_micro_batch = 64\nlearning_rate = 1e-3\n")
    try:
        generator = generate(every, "transformers", "--wait-for-policy")
        trainer = replay(
            *("--address", every, "train", "--model", str(model_folder), "--config", str(tmp_path / "train.toml")),
            *("--output-dir", str(tmp_path / "run"), "--max-steps", str(STEPS)),
        )
        metrics = tmp_path / "run/metrics.jsonl"
        until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 4, trainer.output(), timeout=600)
        servers.kill(0)
        with ReplayClient(every, timeout=30.0) as client:
            until(lambda: client.server_info().gone == (servers.addresses[0],))
            servers.restart(0)
            assert trainer.wait(timeout=800) == 0, trainer.output()
            until(lambda: client.policy().version == STEPS)
            info = client.server_info()
            # Every shard gave groups to the run, and none was taken twice or lost on the way.
            assert all(shard.tables["rollouts"].samples > 0 for shard in info.shards.values())
            rollouts = info.tables["rollouts"]
            assert rollouts.size == rollouts.inserts - rollouts.consumed - rollouts.stale
            assert info.tables["replay"].size > 0
        generator.terminate()
        assert generator.wait(timeout=200) == 0, generator.output()
        steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
        assert steps == list(range(1, STEPS + 1))
    finally:
        servers.close()
