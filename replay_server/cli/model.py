"""Checks a model's folder before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from replay_server.cli.output import fail


def check_model(model: str) -> None:
    """Ends the command if `model` is a path that does not exist. transformers would look for that name on the hub."""
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        fail(f"--model: there is no folder {model}")
