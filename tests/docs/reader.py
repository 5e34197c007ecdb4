"""Reader: follows a tutorial block by block, with `replay run` in one terminal and looks at it in a second one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from replay_client.testing import until
from tests.docs.blocks import ROOT, Block, blocks, write_files
from tests.kit.processes import free_port

SECOND = "second terminal"
"""The title of blocks that the reader types while the run goes on."""
RUN = "replay run run.toml\n"
PATIENCE = 500.0
"""Seconds after which what does not end counts as hanging, on a busy machine."""


class Reader:
    """A reader of one page. Use it in a `with` block: no process of the run stays behind.

    The run goes on until the reader has looked into it, and is then stopped with Ctrl-C. So the blocks that look into a
    run find one, however fast or slow the machine is.
    """

    def __init__(self, page: Path, repository: Path, folder: str, shorter: Mapping[str, str]) -> None:
        """`repository`: an empty folder, for what `make setup` makes. `folder`: the name of the reader's folder in it.
        `shorter`: what the reader does less of, as texts of the page and what stands in their place.
        """
        self.page = page
        self.repository = repository
        self.folder = repository / folder
        self.said = ""
        """What all commands have printed."""
        self._shorter = dict(shorter)
        self._run: subprocess.Popen[bytes] | None = None
        self._log = repository / "run.log"
        text = page.read_text()
        missing = [long for long in shorter if long not in text]
        assert missing == [], f"{page.name} has no such text"
        self._longer = re.findall(r"train\.max_steps=\d+", text)
        steps = re.search(r"^max_steps = (\d+)$", text, re.MULTILINE)
        assert steps is not None, f"{page.name} has no run of so many steps"
        self._steps = steps[1]
        paths = [str(ROOT / name) for name in (".", "client", "protos", "trainer")]
        self._address = f"127.0.0.1:{free_port()}"
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "REPLAY_ADDRESS": self._address,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._set_up()

    def _set_up(self) -> None:
        """Make what `make setup` makes, and the files of the page."""
        self.folder.mkdir()
        scripts = self.repository / ".venv/bin"
        scripts.mkdir(parents=True)
        (scripts / "activate").write_text(f'export PATH="{scripts}:$PATH"\n')
        for name, command in (("replay", "-m replay_cli"), ("python", "")):
            (scripts / name).write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
            (scripts / name).chmod(0o755)
        write_files(self.page, self.folder)
        for path in self.folder.iterdir():
            path.write_text(self._shortened(path.read_text()))
        file = self.folder / "run.toml"
        text = file.read_text()
        assert text.count("127.0.0.1:7400") == 1
        file.write_text(text.replace("127.0.0.1:7400", self._address))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._run is not None:
            self._run.kill()  # its parts end with it
            self._run.wait()

    def read(self) -> None:
        """Type every block of the page, in order."""
        has_run = False
        for block in blocks(self.page):
            if block.language not in ("sh", "python"):
                continue
            if block.title == SECOND:
                self._type(block, self.repository)
            elif block.text == RUN and not has_run:
                has_run = True
                self._begin_run()
            elif not block.title:
                if self._run is not None:
                    self._stop_run()
                self._type(block, self.folder, self.repository / ".venv/bin")
        if self._run is not None:
            self._stop_run()

    def metrics(self) -> list[dict[str, float]]:
        """The steps of the run."""
        path = self.folder / "run/train/metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def _shortened(self, text: str) -> str:
        for long, short in self._shorter.items():
            text = text.replace(long, short)
        return text

    def _begin_run(self) -> None:
        """Start the run without an end, and return when the trainer has put groups into the pool."""
        file = self.folder / "run.toml"
        file.write_text(re.sub(r"^max_steps = \d+$", "max_steps = 1000000", file.read_text(), flags=re.MULTILINE))
        with self._log.open("wb") as log:
            self._run = subprocess.Popen(
                [str(self.repository / ".venv/bin/replay"), "run", "run.toml"],
                cwd=self.folder,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        run = self._run

        def has_learned() -> bool:
            return run.poll() is not None or any(line["fresh/zero_variance_fraction"] < 1 for line in self.metrics())

        until(has_learned, f"nothing is learned: {self._log.read_text()}", PATIENCE)
        assert run.poll() is None, self._words()

    def _stop_run(self) -> None:
        """Stop the run with Ctrl-C. What follows on the page is about the steps that it has made."""
        assert self._run is not None
        os.killpg(self._run.pid, signal.SIGINT)
        status = self._run.wait(PATIENCE)
        self._run = None
        assert status == 128 + signal.SIGINT, self._words()
        last = len(self.metrics())
        assert f"stopped after step {last}; the same command goes on with the run" in self._log.read_text()
        self._shorter[f"step-{self._steps}"] = f"step-{last}"
        for text in self._longer:
            self._shorter[text] = f"train.max_steps={last + 2}"

    def _type(self, block: Block, folder: Path, *path: Path) -> None:
        """Run one block to its end. `path`: where its programs are looked for first."""
        program = ["bash", "-e", "-c"] if block.language == "sh" else [sys.executable, "-c"]
        done = subprocess.run(
            [*program, self._shortened(block.text)],
            cwd=folder,
            env=self._environment | {"PATH": os.pathsep.join([*map(str, path), os.environ["PATH"]])},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"line {block.line} of {self.page.name}: {block.text}\n{said}\n{self._words()}"
        self.said += said

    def _words(self) -> str:
        """What the run and its parts have written."""
        logs = [self._log, *sorted(self.folder.glob("*/logs/*.log"))]
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in logs if path.exists())
