"""The page "Train an agent" as its reader runs it, with a shorter warm-up and fewer steps."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from examples.demo import task
from examples.demo.prepare import READY
from tests.docs.blocks import ROOT, Block, blocks, write_files

PAGE = ROOT / "docs/tutorial-agent.md"
SHORTER = {
    'prepare(Path("agent"), kind="tools")': 'prepare(Path("agent"), 0, 0.02, kind="tools")',
    "16 * 50": "16 * 2",
    "max_steps=50": "max_steps=2",
}
"""What the tests do less of than the reader."""


def program() -> list[Block]:
    """The blocks of Python, but for the file."""
    found = [block for block in blocks(PAGE) if block.language == "python" and not block.title]
    assert all(sum(block.text.count(long) for block in found) == 1 for long in SHORTER)
    return found


def shortened(text: str) -> str:
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return text


def test_the_program_of_the_page_trains_a_model_that_knows_nothing(tmp_path, monkeypatch, capsys):
    """It calls no tool, so there are no turns to look at: the last block is left to the other test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_files(PAGE, tmp_path)
    (tmp_path / "agent").mkdir()
    task.main("make", tmp_path / "agent", 0, 0.0, "tools")
    (tmp_path / "agent/model").rename(tmp_path / "agent/warm")
    (tmp_path / "agent" / READY).touch()
    names, threads = {"__name__": "__page__"}, torch.get_num_threads()
    torch.set_num_threads(1)  # with more, generator and trainer wait for each other's
    try:
        for block in program()[:-1]:
            # As many lines down as in the page, so that a failure names the page's line.
            exec(compile("\n" * (block.line - 1) + shortened(block.text), PAGE.name, "exec"), names)
        assert names["client"].server_info().admission.accepted == 32
    finally:
        torch.set_num_threads(threads)
        sys.modules.pop("my_agent", None)
        for name, end in (("client", "close"), ("server", "stop")):
            getattr(names.get(name), end, lambda: None)()
    assert names["made"] is False
    assert "last steps: fresh reward 0.0" in capsys.readouterr().out


@pytest.mark.long
def test_the_program_of_the_page_shows_the_turns_of_a_model_that_has_seen_calls(tmp_path):
    write_files(PAGE, tmp_path)
    (tmp_path / "program.py").write_text(shortened("\n".join(block.text for block in program())))
    paths = [str(ROOT / name) for name in (".", "client", "protos", "trainer")]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    assert said["prompt"].strip().startswith("<user>")
    assert "<tool_call>" in said["trained"]
    assert said["not trained"].strip().startswith("<tool>")
    assert said["not trained"].strip().endswith("<assistant>")
    assert "['tool', " in said["turns"]
    assert len((tmp_path / "agent/train/metrics.jsonl").read_text().splitlines()) == 2
