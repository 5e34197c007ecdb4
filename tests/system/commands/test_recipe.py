"""`--recipe replay` as its users type it: three commands, what they show, and what `replay doctor` says of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from replay_client import ReplayClient
from replay_protos.recipes import RECIPES, read_described, settings_of
from tests.commands import run_replay
from tests.factories import server_process, until

STEPS = 24
"""Fewer than the versions that the server remembers."""


def shown(output: str) -> dict[str, str]:
    """The block of settings that a command has shown, and what it says of the user's own."""
    [block] = re.findall(r"recipe replay: [^\n]*\n((?:    \S+ = [^\n]*\n)+)", output)
    return dict(line.strip().split(" = ", 1) for line in block.splitlines())


def declared(part: str) -> dict[str, str]:
    return {each.name: json.dumps(each.wanted) for each in settings_of(getattr(RECIPES["replay"], part), {})}


def doctor(address: str, *options: str) -> list[dict]:
    said = run_replay("doctor", "--json", *options, address=address)
    return json.loads(said.stdout)["findings"]


def messages(findings: list[dict], check: str) -> list[tuple[str, str]]:
    return [(each["level"], each["message"]) for each in findings if each["check"] == check]


def test_serve_takes_the_recipe_by_option_or_file_and_shows_each_setting_and_what_the_user_changed(tmp_path):
    log = tmp_path / "serve.log"
    with (
        log.open("w") as stderr,
        server_process(tmp_path, options=("--recipe", "replay"), stderr=stderr) as server,
        ReplayClient(server.address) as client,
    ):
        assert client.server_info().recipe == "replay"
        assert shown(log.read_text()) == declared("server")
    own = 'recipe = "replay"\n[[tables]]\nname = "replay"\nmax_size = 512\n'
    with (
        log.open("w") as stderr,
        server_process(tmp_path, own, stderr=stderr) as server,
        ReplayClient(server.address) as client,
    ):
        changed = shown(log.read_text())
        assert changed == declared("server") | {"tables.replay.max_size": "512  (yours; the recipe has 256)"}
        assert json.loads(client.server_info().tables["replay"].config)["max_size"] == 512
        said = messages(doctor(server.address), "recipe")
        words = "the server runs by recipe 'replay'; changed on purpose: tables.replay.max_size of the server is 512"
        assert said == [("ok", f"{words} (recipe: 256)")]


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("serve", ()),
        ("generate", ("--model", "m", "--prompts", "p.jsonl")),
        ("train", ("--model", "m", "--output-dir", "o")),
    ],
)
def test_a_recipe_that_there_is_not_is_one_line(command, options):
    done = run_replay(command, "--recipe", "repaly", *options)
    assert done.returncode in (1, 2)
    assert "must be one of replay, not 'repaly'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_three_commands_with_one_word_train_agree_and_measure_one_staleness(tmp_path, replay, generate, model_folder):
    config = tmp_path / "train.toml"
    # Nothing is drawn ahead, so that the trainer trains on all that the server has counted as drawn.
    config.write_text('recipe = "replay"\nprefetch = 0\n[correction]\noff_policy_mask_threshold = 0.2\n')
    with (
        server_process(tmp_path, options=("--recipe", "replay")) as server,
        ReplayClient(server.address, timeout=60.0) as client,
    ):

        def train(*more: str):
            return replay(
                *("--address", server.address, "--name", "tr", "train", "--config", str(config), *more),
                *("--model", str(model_folder), "--output-dir", str(tmp_path / "run")),
            )

        generator = generate(server.address, "transformers", "--recipe", "replay", name="gen")
        trainer = train("--steps", str(STEPS))
        assert trainer.wait(timeout=300) == 0, trainer.output()
        assert shown(generator.output()) == declared("generator")
        threshold = {"correction.off_policy_mask_threshold": "0.2  (yours; the recipe has 0.1)"}
        assert shown(trainer.output()) == declared("trainer") | threshold
        flow = client.server_info().tables["rollouts"].flow
        lines = [json.loads(line) for line in Path(tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        stale = [line["fresh/staleness_mean"] for line in lines if "fresh/staleness_mean" in line]
        assert (flow.versions, flow.drawn, len(stale)) == (STEPS, 4.0, STEPS)
        assert flow.staleness == pytest.approx(sum(stale) / STEPS)
        [age] = [each for each in messages(doctor(server.address), "rollouts") if each[1].startswith("drawn ")]
        assert age[1] == f"drawn {flow.staleness:.1f} versions old in the mean"

        trainer = train("--steps", "100000", "--resume")
        until(lambda: client.policy().version > STEPS or trainer.poll() is not None, seconds=200)
        said = {each.name: read_described(each.settings) for each in client.server_info().clients}
        assert said["gen"]["priority"] == "learnability"
        assert (said["tr"]["recipe"], said["tr"]["fresh_groups_per_step"]) == ("replay", 4)
        level, words = messages(doctor(server.address), "recipe")[0]
        assert level == "ok"
        assert "the server, generator gen, trainer tr run by recipe 'replay'; changed on purpose: " in words
        assert "correction.off_policy_mask_threshold of trainer tr is 0.2 (recipe: 0.1)" in words

        for command in (trainer, generator):
            command.terminate()
            command.wait(timeout=200)
        generate(server.address, "transformers", name="plain")
        until(
            lambda: "plain" in {each.name for each in client.server_info().clients if each.settings != "{}"},
            seconds=120,
        )
        level, words = next(each for each in messages(doctor(server.address), "recipe") if "plain" in each[1])
        assert level == "warning"
        assert "generator plain does not run by recipe 'replay', as the server does: priority is" in words
