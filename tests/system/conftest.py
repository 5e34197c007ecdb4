"""A tiny model, its prompts, and the commands of a run as processes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.demo.task import make_model, make_tokenizer, problems
from tests.kit.processes import Running

CONFIG = """
tables = [
    { name = "rollouts", rate_limiter = { type = "queue", max_size = 12 }, forward_to = "replay" },
    { name = "replay", sampler = "prioritized", remover = "min_heap", max_size = 64, seed = 1 },
]
"""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """An untrained model with its tokenizer; prompts.jsonl beside it."""
    folder = tmp_path_factory.mktemp("model") / "model"
    make_model(0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    rows = problems(0, 64)
    (folder.parent / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Command(Running):
    """A `replay` command, with its output in a file."""

    def __init__(self, *arguments: str, log: Path) -> None:
        self.log = log
        with log.open("a") as file:
            super().__init__(*arguments, stdout=file, stderr=subprocess.STDOUT)

    def output(self) -> str:
        return self.log.read_text()


@pytest.fixture
def replay(tmp_path):
    """Starts commands; what still runs at the end is killed."""
    commands: list[Command] = []

    def start(*arguments: str) -> Command:
        commands.append(Command(*arguments, log=tmp_path / f"command-{len(commands)}.log"))
        return commands[-1]

    yield start
    for command in commands:
        command.kill()
        command.wait()


@pytest.fixture
def generate(replay, model_folder) -> Callable[..., Command]:
    """`replay generate` on the tiny model with rewards that are often mixed even if it knows nothing."""

    def start(address: str, engine: str, *more: str, name: str = "generator") -> Command:
        return replay(
            *("--address", address, "--timeout", "5", "--name", name, "generate"),
            *("--engine", engine, "--model", str(model_folder)),
            *("--prompts", str(model_folder.parent / "prompts.jsonl"), "--reward", "tests.rewards:even_start"),
            *("--group-size", "4", "--max-tokens", "6", "--max-concurrent-groups", "4", *more),
        )

    return start
