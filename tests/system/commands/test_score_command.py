"""`replay generate --unscored-table` and `replay score` as their user runs them."""

from replay_client import ReplayClient
from replay_client.testing import until
from tests.kit.processes import server_process

CONFIG = """
tables = [{ name = "rollouts", rate_limiter = { type = "queue", max_size = 12 } }]
[admission]
fresh_groups_per_step = 4
max_staleness = 1
permit_tables = ["unscored"]
"""


def test_groups_of_the_one_command_get_their_rewards_from_the_other(tmp_path, replay, model_folder):
    prompts = str(model_folder.parent / "prompts.jsonl")
    with server_process(tmp_path, CONFIG) as server, ReplayClient(server.address, timeout=90.0) as client:
        generating = [
            *("--address", server.address, "generate", "--engine", "transformers", "--model", str(model_folder)),
            *("--prompts", prompts, "--group-size", "4", "--max-tokens", "6", "--unscored-table", "unscored"),
        ]
        scoring = ["--address", server.address, "score", "--source-table", "unscored", "--table", "rollouts"]
        refused = replay(*generating, "--reward", "exact_match")
        generator = replay(*generating)
        rewards = ("--reward", "tests.rewards:even_start", "--reward", "tests.rewards:is_long=0.5")
        scorers = [replay(*scoring, *rewards, "--concurrency", "4", "--set", "min_rollouts=2") for _ in range(2)]
        groups = [sample.group for sample in client.sample("rollouts", 6)]
        for group in groups:
            even, long = group.extras["rewards/even_start"], group.extras["rewards/is_long"]
            assert group.rewards.tolist() == (even + 0.5 * long).tolist()
        generator.terminate()
        assert generator.wait(timeout=200) == 0, generator.output()
        assert "reward" not in generator.output()
        until(lambda: not client.server_info().tables["unscored"].size)
        for scorer in scorers:
            scorer.terminate()
            assert scorer.wait(timeout=200) == 0, scorer.output()
            assert "groups, reward" in scorer.output()
        info = client.server_info()
        assert not info.admission.running + info.admission.partial_groups
        assert info.admission.accepted == 6 + info.tables["rollouts"].size
        wrong = replay(*scoring, "--reward", "exact_match", "--set", "leese=3")
        assert refused.wait(timeout=200) == 2, refused.output()
        assert wrong.wait(timeout=200) == 2, wrong.output()
        assert "lease" in wrong.output()
        assert "--reward and --drop-zero-variance belong to `replay score`" in refused.output()
