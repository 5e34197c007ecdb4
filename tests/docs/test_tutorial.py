"""The tutorial as its reader runs it: every block, in order, with servers and generators in terminals of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, blocks, write_files
from tests.factories import free_port, until

pytestmark = pytest.mark.long

SHORTER = {
    "examples.demo.prepare run": "examples.demo.prepare run 0 0.005",
    "--max-steps 100": "--max-steps 3",
    "--max-steps 150": "--max-steps 4",
    "step-100": "step-3",
}
"""What the test does less of than the reader."""


def shortened(text: str) -> str:
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return text


class Terminals:
    """The reader's terminals. Each opens in the folder of the repository, where nothing is activated yet."""

    def __init__(self, repository: Path, environment: dict[str, str]) -> None:
        self.repository = repository
        self.environment = environment
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, block: Block) -> None:
        log = self.log(block.title)
        with log.open("ab") as file:
            self.running[block.title] = subprocess.Popen(
                ["bash", "-e", "-c", shortened(block.text)],
                cwd=self.repository,
                env=self.environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def log(self, title: str) -> Path:
        return self.repository / f"{title}.log"

    def interrupt(self) -> None:
        """Ctrl-C in each of them, the last one first."""
        for title, terminal in reversed(self.running.items()):
            os.killpg(terminal.pid, signal.SIGINT)
            assert terminal.wait(timeout=200) in (0, 130), self.log(title).read_text()
            assert "Traceback" not in self.log(title).read_text()
        self.running.clear()

    def kill(self) -> None:
        for terminal in self.running.values():
            os.killpg(terminal.pid, signal.SIGKILL)
            terminal.wait()

    def run(self, program: list[str], text: str) -> str:
        """What the first terminal prints, in the folder of the tutorial with its environment activated."""
        done = subprocess.run(
            [*program, shortened(text)],
            cwd=self.repository / "tutorial",
            env=self.environment | {"PATH": f"{self.repository}/.venv/bin:{self.environment['PATH']}"},
            capture_output=True,
            text=True,
            timeout=500,
        )
        logs = "".join(path.read_text() for path in self.repository.glob("*.log"))
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}\n{logs}"
        return done.stdout + done.stderr


def make_repository(folder: Path) -> None:
    """A folder with what `make setup` and the first commands of the reader leave there."""
    (folder / "tutorial").mkdir()
    scripts = folder / ".venv/bin"
    scripts.mkdir(parents=True)
    (scripts / "activate").write_text(f'export PATH="{scripts}:$PATH"\n')
    for name, command in (("replay", "-m replay_cli"), ("python", "")):
        (scripts / name).write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
        (scripts / name).chmod(0o755)


def test_the_tutorial_runs_from_its_first_block_to_its_last(tmp_path):
    page = ROOT / "docs/tutorial.md"
    assert all(text in page.read_text() for text in SHORTER)
    make_repository(tmp_path)
    address = f"127.0.0.1:{free_port()}"
    write_files(page, tmp_path / "tutorial")
    config = tmp_path / "tutorial/replay.toml"
    config.write_text(config.read_text().replace("127.0.0.1:7400", address))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in (".", "client", "protos", "trainer")),
        "REPLAY_ADDRESS": address,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    found = [block for block in blocks(page) if block.language in ("sh", "python")]
    own = {block.title: block for block in found if block.title.startswith("terminal")}
    terminals = Terminals(tmp_path, environment)

    def open_terminals() -> None:
        for title, block in own.items():
            log = terminals.log(title)
            log.unlink(missing_ok=True)
            terminals.start(block)
            if title == "terminal 2":
                until(lambda log=log: "listening on" in log.read_text())

    said = ""
    try:
        for block in found:
            if block.title == "terminal 2":
                terminals.start(block)
                until(lambda: "listening on" in terminals.log("terminal 2").read_text())
            elif block.title.startswith("terminal"):
                terminals.start(block)
            elif block.title == "after a restart":
                terminals.interrupt()
                open_terminals()
                said += terminals.run(["bash", "-e", "-c"], block.text)
            elif not block.title:
                program = ["bash", "-e", "-c"] if block.language == "sh" else [sys.executable, "-c"]
                said += terminals.run(program, block.text)
        terminals.interrupt()
    finally:
        terminals.kill()
    for words in (
        '{"prompt": ',
        "rollouts",
        "step 3: fresh reward",
        "completion 7",
        "reward 0.",
        "58+7 =",
        "weights             ",
    ):
        assert words in said
    assert "step 4: fresh reward" in said  # the run that was continued
    assert said.count("step 3: fresh reward") == 2  # and the second one
    assert "failure" not in said
    assert not any(line.startswith("warning") and " permits: " not in line for line in said.splitlines())
