"""The tutorial as its reader runs it: every block, in order, with servers and generators in terminals of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.docker.machine import free_port
from tests.docs.blocks import ROOT, blocks, write_files

SHORTER = {
    "replay_trainer.demo.prepare run": "replay_trainer.demo.prepare run 0 0.005",
    "--steps 60": "--steps 3",
    "step-60": "step-3",
}
"""What the test does less of than the reader."""


def shortened(text: str) -> str:
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return text


@pytest.mark.timeout(700)
def test_the_tutorial_runs_from_its_first_block_to_its_last(tmp_path):
    page = ROOT / "docs/tutorial.md"
    assert all(text in page.read_text() for text in SHORTER)
    address = f"127.0.0.1:{free_port()}"
    write_files(page, tmp_path)
    config = tmp_path / "replay.toml"
    config.write_text(config.read_text().replace("127.0.0.1:7400", address))
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in (".", "client", "protos", "trainer")),
        "REPLAY_ADDRESS": address,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    terminals: list[subprocess.Popen[bytes]] = []
    said = ""
    try:
        for block in blocks(page):
            if block.language == "sh" and block.title.startswith("terminal"):
                log = (tmp_path / f"{block.title}.log").open("wb")
                command = ["bash", "-c", f"exec {shortened(block.text)}"]
                terminals.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log))
                if block.title == "terminal 1":
                    wait_for(tmp_path / "terminal 1.log", "listening on")
            elif block.language in ("sh", "python") and not block.title:
                program = ["bash", "-e", "-c"] if block.language == "sh" else [sys.executable, "-c"]
                done = subprocess.run(
                    [*program, shortened(block.text)],
                    cwd=tmp_path,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=500,
                )
                logs = "".join(path.read_text() for path in tmp_path.glob("terminal*.log"))
                assert done.returncode == 0, f"{block.text}\n{done.stdout}{done.stderr}\n{logs}"
                said += done.stdout + done.stderr
        for terminal in reversed(terminals):
            terminal.send_signal(signal.SIGINT)
            assert terminal.wait(timeout=60) in (0, 130)
    finally:
        for terminal in terminals:
            terminal.kill()
            terminal.wait()
    for words in ('{"prompt": ', "rollouts", "step 3: fresh reward", "completion 7", "reward 0.", "58+7 ="):
        assert words in said


def wait_for(log: Path, words: str) -> None:
    deadline = time.monotonic() + 200
    while words not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
