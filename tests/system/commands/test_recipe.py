"""`--recipe replay` as its users type it: three commands, what they show, and what `replay doctor` says of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replay_cli.recipes import recipe_of
from replay_client import ReplayClient
from replay_client.records import read_described
from replay_client.testing import until
from tests.kit.processes import run_replay, server_process

STEPS = 24
"""Fewer than the versions that the server remembers."""


def shown(output: str) -> dict[str, str]:
    """The block of settings that a command has shown, and what it says of the user's own."""
    [block] = re.findall(r"recipe replay: [^\n]*\n((?:    \S+ = [^\n]*\n)+)", output)
    return dict(line.strip().split(" = ", 1) for line in block.splitlines())


def declared(part: str) -> dict[str, str]:
    """Each setting of a part of the recipe, by its place."""
    return dict(leaves(recipe_of("replay")[part]))


def leaves(settings: Any, place: str = "") -> Iterator[tuple[str, str]]:
    if place == "tables." and isinstance(settings, list):
        settings = {table.pop("name"): table for table in settings}
    for name, value in settings.items():
        if isinstance(value, dict) or (name == "tables" and isinstance(value[0], dict)):
            yield from leaves(value, f"{place}{name}.")
        else:
            yield f"{place}{name}", json.dumps(value)


def doctor(address: str, *options: str) -> list[dict]:
    said = run_replay("doctor", "--json", *options, address=address)
    return json.loads(said.stdout)["findings"]


def messages(findings: list[dict], check: str) -> list[tuple[str, str]]:
    return [(each["level"], each["message"]) for each in findings if each["check"] == check]


def test_serve_takes_the_recipe_and_shows_each_setting_and_what_the_user_changed(tmp_path):
    log = tmp_path / "serve.log"
    with (
        log.open("w") as stderr,
        server_process(tmp_path, options=("--recipe", "replay"), stderr=stderr) as server,
        ReplayClient(server.address) as client,
    ):
        assert list(client.server_info().tables) == ["rollouts", "replay"]
        assert shown(log.read_text()) == declared("serve")
    own = '[[tables]]\nname = "replay"\nmax_size = 512\n'
    with (
        log.open("w") as stderr,
        server_process(tmp_path, own, options=("--recipe", "replay"), stderr=stderr) as server,
        ReplayClient(server.address) as client,
    ):
        changed = shown(log.read_text())
        assert changed == declared("serve") | {"tables.replay.max_size": "512  (yours; the recipe has 256)"}
        assert json.loads(client.server_info().tables["replay"].config)["max_size"] == 512


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
    config.write_text("prefetch = 0\n[correction]\nclip_max = 1.5\n")
    with (
        server_process(tmp_path, options=("--recipe", "replay")) as server,
        ReplayClient(server.address, timeout=60.0) as client,
    ):

        def train(*more: str):
            return replay(
                *(
                    "--address",
                    server.address,
                    "--name",
                    "tr",
                    "train",
                    "--config",
                    str(config),
                    *("--recipe", "replay"),
                    *more,
                ),
                *("--model", str(model_folder), "--output-dir", str(tmp_path / "run")),
            )

        generator = generate(server.address, "transformers", "--recipe", "replay", name="gen")
        trainer = train("--max-steps", str(STEPS))
        assert trainer.wait(timeout=300) == 0, trainer.output()
        assert shown(generator.output()) == declared("generate")
        own = {"correction.clip_max": "1.5  (yours; the recipe has 1.0)"}
        assert shown(trainer.output()) == declared("train") | own
        flow = client.server_info().tables["rollouts"].flow
        lines = [json.loads(line) for line in Path(tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        stale = [line["fresh/staleness_mean"] for line in lines if "fresh/staleness_mean" in line]
        assert flow.versions == STEPS
        assert flow.drawn == 4.0
        assert len(stale) == STEPS
        assert flow.staleness == pytest.approx(sum(stale) / STEPS)
        [age] = [each for each in messages(doctor(server.address), "rollouts") if each[1].startswith("drawn ")]
        assert age[1] == f"drawn {flow.staleness:.1f} versions old in the mean"

        trainer = train("--max-steps", "100000", "--resume")
        until(lambda: client.policy().version > STEPS or trainer.poll() is not None, timeout=200)
        said = {each.name: read_described(each.settings) for each in client.server_info().clients}
        assert said["gen"]["priority"] == "learnability"
        assert said["tr"]["fresh_groups_per_step"] == 4
        assert {level for level, _ in messages(doctor(server.address), "permits")} <= {"ok"}
