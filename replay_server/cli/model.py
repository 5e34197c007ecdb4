"""Checks a model's folder before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replay_server.cli.output import fail


def check_model(model: str) -> None:
    """Ends the command if `model` is a path that does not exist. transformers would look for that name on the hub."""
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        fail(f"--model: there is no folder {model}")


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Names the model in the error of a block that loads it, and says it in one line.

    The errors of transformers have several lines, and some of them do not name the model.
    """
    try:
        yield
    except OSError as error:
        missing = "" if Path(model).exists() else "; there is no folder of this name here"
        raise ValueError(f"--model {model} cannot be loaded{missing}: {' '.join(str(error).split())}") from error
