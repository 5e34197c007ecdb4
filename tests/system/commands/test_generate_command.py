"""`replay generate` as its user runs it, with the options that change what goes into the tables."""

import json
from typing import Any

import pytest

from replay_client import ReplayClient
from tests.factories import server_process, until
from tests.system.conftest import CONFIG


def test_options_reach_the_groups_and_the_metrics(tmp_path, generate, model_folder):
    with server_process(tmp_path, CONFIG) as server, ReplayClient(server.address, timeout=90.0) as client:
        metrics = tmp_path / "generator.jsonl"
        generator = generate(
            server.address,
            "transformers",
            *("--reward", "tests.rewards:is_long=0.5", "--set", "truncated=mask", "--reload", "at_once"),
            *("--drop-zero-variance", "--metrics-path", str(metrics), "--set", "metrics_interval=0.5"),
        )
        first = client.sample("rollouts", 4)
        client.set_policy_version(3, weights=str(model_folder))
        groups = [sample.group for sample in first]

        def written() -> list[dict[str, Any]]:
            whole = metrics.read_text().rpartition("\n")[0] if metrics.exists() else ""
            return [json.loads(line) for line in whole.splitlines()]

        def all_seen() -> bool:
            groups.append(client.sample("rollouts", 1)[0].group)
            lines = written()
            return groups[-1].policy_version == 3 and any(line["filtered"] for line in lines) and any(map(rated, lines))

        until(all_seen)
        generator.terminate()
        assert generator.wait(timeout=200) == 0, generator.output()
    for group in groups:
        assert len(set(group.rewards.tolist())) > 1
        even, long = group.extras["rewards/even_start"], group.extras["rewards/is_long"]
        assert group.rewards.tolist() == (even + 0.5 * long).tolist()
        cut = [reason == "length" for reason in group.finish_reasons]
        masks = [True] * group.num_tokens if group.loss_mask is None else group.loss_mask.tolist()
        ends = group.completion_lengths.cumsum().tolist()
        assert [not masks[end - 1] for end in ends] == cut
    lines = written()
    assert lines[-1]["policy_version"] == 3
    assert lines[-1]["reloads"] == 1
    assert lines[-1]["filtered"] > 0


def rated(line: dict[str, Any]) -> bool:
    return line.get("reward/is_long") is not None


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (("--chat",), 1, "the tokenizer has no chat template"),
        (("--engine-arg", "dtype"), 2, "--engine-arg 'dtype' is not NAME=VALUE"),
        (("--engine-arg", "speed=9"), 1, "unexpected keyword argument 'speed'"),
    ],
)
def test_what_cannot_work_is_one_clear_line(tmp_path, generate, options, status, says):
    with server_process(tmp_path, CONFIG) as server:
        generator = generate(server.address, "transformers", *options)
        assert generator.wait(timeout=200) == status
    assert says in generator.output()
    assert "Traceback" not in generator.output()
