"""The headlines of doctor and page while `replay serve`, `train`, `generate` and `score` come and go."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from replay_client import ReplayClient
from replay_client.testing import until
from replay_dashboard import app, live
from replay_dashboard.app import Settings
from tests.dashboard.conftest import serving
from tests.dashboard.test_answers import looks_of
from tests.kit.processes import free_port, run_replay, start_server
from tests.system.conftest import Command

CONFIG = """
tables = [
    {{ name = "rollouts", rate_limiter = {{ type = "queue", max_size = 12 }}, forward_to = "replay" }},
    {{ name = "replay", sampler = "prioritized", remover = "min_heap", max_size = 64 }},
    {{ name = "unscored", rate_limiter = {{ type = "queue", max_size = 12 }} }},
]
[server]
data_dir = "{folder}/data"
[admission]
table = "rollouts"
fresh_groups_per_step = 4
max_staleness = 2
permit_tables = ["unscored"]
"""
WORKS = ("Healthy", "Running, ")
"""Beginnings of the headlines of a run that goes on. A machine with little memory or disk has something to look at."""
FINE = ("ok", "warning")
SOON = ("idle", "blocked")
"""In the first minute of a server parts are on their way; later somebody should look."""
PATIENCE = 300.0


class Run:
    """One server, and the commands that work at it."""

    def __init__(self, folder: Path, replay: Any, model: Path, looks: Iterator[dict[str, Any]], address: str) -> None:
        self.folder = folder
        self.address = address
        self._replay = replay
        self._model = model
        self._looks = looks
        self._config = folder / "replay.toml"
        self._config.write_text(CONFIG.format(folder=folder))
        self.serve()

    def serve(self) -> None:
        """Start the server, for the first time or again."""
        self.server = start_server(self._config, address=self.address)

    def train(self, *more: str) -> Command:
        return self._start(
            *("--name", "trainer-a", "train", "--model", str(self._model), "--output-dir", str(self.folder / "run")),
            *("--groups-per-step", "4", "--max-steps", "100000", "--learning-rate", "1e-5", *more),
        )

    def generate(self) -> Command:
        return self._start(
            *("--name", "gen-a", "generate", "--engine", "transformers", "--model", str(self._model)),
            *("--prompts", str(self._model.parent / "prompts.jsonl"), "--group-size", "4", "--max-tokens", "6"),
            *("--max-concurrent-groups", "4", "--unscored-table", "unscored"),
        )

    def score(self) -> Command:
        return self._start(
            "--name",
            "scorer-a",
            "score",
            "--source-table",
            "unscored",
            "--table",
            "rollouts",
            "--reward",
            "tests.rewards:even_start",
        )

    def _start(self, *words: str) -> Command:
        command: Command = self._replay("--address", self.address, *words)
        return command

    def end(self, command: Command) -> None:
        """Stop a command as its user does, and wait until it has."""
        command.send_signal(signal.SIGTERM)
        command.wait(timeout=PATIENCE)

    def says(self, *headlines: str, level: tuple[str, ...], detail: str = "", remedy: str = "") -> None:
        """Wait until page and doctor have such a headline and level, with these parts of the detail and the remedy."""
        seen: dict[str, Any] = {}

        def is_right(verdict: dict[str, str]) -> bool:
            seen.update(verdict)
            parts = detail in verdict["detail"] and remedy in verdict["remedy"]
            return verdict["headline"].startswith(headlines) and verdict["level"] in level and parts

        with suppress(AssertionError):
            until(lambda: is_right(next(self._looks)["verdict"]), timeout=PATIENCE)
        assert is_right(seen), f"the page: {seen}"
        with suppress(AssertionError):
            until(lambda: is_right(self._doctor()), timeout=PATIENCE)
        assert is_right(seen), f"the doctor: {seen}"

    def knows(self, name: str, role: str) -> None:
        """Waits until the server that runs now knows a client by its name and by its part of the run.

        A client tells its name and its settings first. Its calls tell its part.
        """

        def has_described_itself() -> bool:
            clients = client.server_info().clients
            return any(known.name == name and known.settings and role in known.role.split(", ") for known in clients)

        with ReplayClient(self.address) as client:
            until(has_described_itself, timeout=PATIENCE)

    def _doctor(self) -> dict[str, str]:
        done = run_replay("doctor", "--json", address=self.address)
        said: dict[str, str] = json.loads(done.stdout)["verdict"]
        return said

    def learns(self) -> dict[str, str]:
        """What the page says of learning."""
        said: dict[str, str] = next(self._looks)["learning"]
        return said


@pytest.fixture
def run(tmp_path, replay, model_folder, monkeypatch):
    monkeypatch.setattr(app, "LOOKING", 0.5)
    monkeypatch.setattr(live, "SECONDS_PER_LOOK", 0.2)
    address = f"127.0.0.1:{free_port()}"
    with serving(Settings({"address": address}, runs=tmp_path)) as url, closing(looks_of(url)) as looks:
        run = Run(tmp_path, replay, model_folder, looks, address)
        yield run
        run.server.kill()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_page_and_doctor_say_at_once_what_a_run_of_real_programs_lacks(run):
    run.says("Nobody is connected", level=("idle",), detail="no trainer has connected since the server started")
    trainer = run.train()
    run.says("No generator has connected yet", level=SOON, remedy="start a generator")
    generator = run.generate()
    run.says("No scorer has connected yet", level=SOON, remedy="`replay score --source-table unscored`")
    scorer = run.score()
    run.says(*WORKS, level=FINE)
    with ReplayClient(run.address) as client:
        until(lambda: client.policy().version >= 3, timeout=PATIENCE)

    run.end(scorer)
    run.says("The scorer has ended", level=("blocked",), detail="scorer scorer-a ended", remedy="start a scorer")
    scorer = run.score()
    run.says(*WORKS, level=FINE)

    run.end(generator)
    run.says(
        "The generator has ended", level=("blocked",), detail="generator gen-a ended", remedy="stop the trainer too"
    )
    generator = run.generate()
    run.says(*WORKS, level=FINE)
    until(lambda: run.learns()["sentence"].startswith("Fresh reward of run: "), timeout=PATIENCE)

    run.end(trainer)
    run.says("The trainer has ended", level=("blocked",), detail="trainer trainer-a ended")
    assert run.learns()["level"] != "ok"
    assert "Trainer trainer-a ended" in run.learns()["sentence"]
    run.says("The trainer has ended", level=("blocked",), detail=" waits", remedy="stop the generators too")
    trainer = run.train("--resume")
    run.says(*WORKS, level=FINE)

    run.server.kill()
    run.says("The server does not answer", level=("failure",))
    run.serve()
    run.says(*WORKS, level=FINE)
    run.knows("scorer-a", role="scorer")

    scorer.kill()
    run.says("The scorer is not connected", level=("blocked",), detail="scorer scorer-a is not connected, last seen")
    scorer = run.score()
    run.says(*WORKS, level=FINE)

    run.end(trainer)
    run.end(generator)
    run.end(scorer)
    run.says("The run has ended", level=("idle",), detail="trainer trainer-a ended")
