"""What the commands that load a model check first."""

from __future__ import annotations

from pathlib import Path

from replay_server.cli.output import fail


def check_model(model: str) -> None:
    """A path that does not exist; transformers would take it for a name on the hub and say something else."""
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        fail(f"--model: there is no folder {model}")
