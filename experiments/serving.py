"""The server of an experiment: a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.processes import Server


def serve(folder: Path, config: str, *arguments: str, python: str = sys.executable) -> Server:
    """A server with this configuration, which `folder` keeps, on a free port. `python` runs it."""
    path = folder / "replay.toml"
    path.write_text(config)
    command = [python, "-m", "replay_cli", "serve", "--config", str(path), "--log-level", "error"]
    return Server([*command, "--listen", "127.0.0.1:0", *arguments])
