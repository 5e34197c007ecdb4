"""The job for Slurm of docs/how-to/run.md, with stand-ins for Slurm's programs and for ours."""

from __future__ import annotations

import os
import shlex
import subprocess

import typer

from replay_cli.app import app
from tests.docs.blocks import ROOT, blocks

# Takes its options away, and runs the rest.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_PROCID=5
exec "$@"
"""
# Notes what it was called with. All but a trainer work until they are told to end.
OURS = """#!/bin/bash
echo "$REPLAY_ADDRESS $(basename "$0") $*" >> "$CALLS"
if [[ $(basename "$0") == replay ]]; then sleep 600; fi
while [[ $(wc -l < "$CALLS") -lt 3 ]]; do sleep 0.1; done
"""


def test_the_job_starts_the_three_commands_and_ends_with_the_trainer(tmp_path):
    (block,) = [each for each in blocks(ROOT / "docs/how-to/run.md") if each.title == "run.sbatch"]
    (tmp_path / "run.sbatch").write_text(block.text)
    for name, text in {"srun": SRUN, "replay": OURS, "torchrun": OURS}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in ("serve", "train", "generate"):
        (tmp_path / f"{name}.toml").write_text('model = "m"\noutput_dir = "o"\n' if name == "train" else "")
    (tmp_path / "generate.toml").write_text('model = "m"\n')
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    subprocess.run(["bash", "run.sbatch"], cwd=tmp_path, env=environment, check=True, timeout=300)
    calls = (tmp_path / "calls").read_text().splitlines()
    host = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
    assert {call.split()[0] for call in calls} == {f"{host}:7400"}
    commands = sorted(call.partition("replay_cli ")[2] or call.partition(" replay ")[2] for call in calls)
    assert [command.split()[0] for command in commands] == ["generate", "serve", "train"]
    assert commands[0].endswith("--seed 5")
    group = typer.main.get_command(app)
    for command in commands:
        name, *words = shlex.split(command.replace("--config ", f"--config {tmp_path}/"))
        group.commands[name].make_context(name, words)  # raises for an option that does not exist
