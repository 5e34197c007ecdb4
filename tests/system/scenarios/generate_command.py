"""The command `replay` as a process that `tests.kit.processes.start` forks from one with torch and transformers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from replay_cli import generate as _too  # noqa: F401
from replay_cli import main
from replay_generator.engines import transformers as _imported_once  # noqa: F401


def run_command(log: Path, *arguments: str) -> None:
    """Runs the command. What it says is added to the file `log`."""
    file = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    for output in (1, 2):
        os.dup2(file, output)
    torch.set_num_threads(1)  # matrices this small only wait for a second one
    sys.argv = ["replay", *arguments]
    main()
