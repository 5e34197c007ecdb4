"""`replay generate` as its user runs it, with the options that change what goes into the tables."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from replay_client import ReplayClient
from replay_client.testing import until
from replay_trainer.weights import publish_weights
from tests.kit.models import scores
from tests.kit.processes import server_process
from tests.system.conftest import CONFIG


def test_options_reach_the_groups_and_the_metrics(tmp_path, generate, model_folder):
    with server_process(tmp_path, CONFIG) as server, ReplayClient(server.address, timeout=90.0) as client:
        metrics = tmp_path / "generator.jsonl"
        generator = generate(
            server.address,
            "transformers",
            *(
                "--reward",
                "tests.rewards:is_long=0.5",
                "--set",
                "mask_truncated_completions=true",
                "--reload",
                "in_flight",
            ),
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
            return (
                groups[-1].policy_version == 3
                and any(line["groups_filtered"] for line in lines)
                and any(map(rated, lines))
            )

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
    assert lines[-1]["groups_filtered"] > 0


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


def other_architecture(model_folder: Path, folder: Path) -> Path:
    """Weights that a trainer of another model published, with the probe that they pass, and the same tokenizer."""
    other = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=16, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    other.save_pretrained(folder / "whole")
    probe = {"token_ids": [3, 5, 4], "logprobs": scores(folder / "whole", [3, 5, 4])}
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    return publish_weights(other, tokenizer, folder, version=1, keep=1, probe=probe)


def test_weights_of_another_architecture_end_the_run_with_status_1_before_the_first_prompt(
    tmp_path, generate, model_folder
):
    folder = other_architecture(model_folder, tmp_path / "other")
    with server_process(tmp_path, CONFIG) as server, ReplayClient(server.address, timeout=90.0) as client:
        client.set_policy_version(1, weights=str(folder))
        generator = generate(server.address, "transformers", "--max-groups", "4")
        assert generator.wait(timeout=200) == 1
        assert client.server_info().items == 0
    said = generator.output()
    assert f"policy 1: {folder} is of another model than the engine's, {model_folder}: model_type gpt2 (here " in said
    assert "start generator and trainer with the same model and tokenizer (--model)" in said
    assert "Traceback" not in said


def test_a_short_run_says_how_far_it_came_once_and_no_rate_of_so_few_seconds(tmp_path, generate):
    with server_process(tmp_path, CONFIG) as server:
        generator = generate(server.address, "transformers", "--max-groups", "1")
        assert generator.wait(timeout=200) == 0, generator.output()
    said = [line for line in generator.output().splitlines() if "policy version" in line]
    assert len(said) == 1
    assert said[0].startswith("1 group, reward ")
    assert said[0].endswith(", policy version 0")
