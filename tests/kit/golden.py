"""Long texts that tests expect, as files in tests/golden/: a test compares, and `make golden` renews the files.

* A test with the fixture `golden` is a golden test; it has the mark `golden`, by which `make golden` finds it.
* A test replaces what differs from run to run, such as a port, before it compares.
* The files are data. A test writes them only when REPLAY_GOLDEN is "renew", and never where CI is set.
"""

from __future__ import annotations

import difflib
import os
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "golden"


class Golden:
    """The golden files in a folder. Calling it compares a text with one of them."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder

    def __call__(self, name: str, text: str) -> None:
        """Fail if the file `name` has another text, or write the text into it if the environment asks for that."""
        path = self.folder / name
        if os.environ.get("REPLAY_GOLDEN") == "renew":
            self._renew(path, text)
            return
        if not path.is_file():
            pytest.fail(f"there is no tests/golden/{name}: `make golden` writes it", pytrace=False)
        expected = path.read_bytes().decode()
        if text != expected:
            pytest.fail(difference(name, expected, text), pytrace=False)

    def _renew(self, path: Path, text: str) -> None:
        if os.environ.get("CI"):
            pytest.fail("REPLAY_GOLDEN=renew is for a developer's machine: CI only compares", pytrace=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())


def difference(name: str, expected: str, text: str) -> str:
    """The message of a failed test: the lines that differ, and the command that renews the file."""
    lines = difflib.unified_diff(
        expected.split("\n"), text.split("\n"), f"tests/golden/{name}", "this run", n=5, lineterm=""
    )
    return "\n".join((f"tests/golden/{name} differs. If this run is right: `make golden`, and read the diff.", *lines))


def sections(texts: Mapping[str, str]) -> str:
    """Several texts for one golden file: each under its name, indented."""
    parts = []
    for name, text in texts.items():
        below = textwrap.indent(text.rstrip() or "(nothing)", "    ")
        parts.append(f"{name}\n{below}\n")
    return "\n".join(parts)


def error_of(call: Callable[..., object], *arguments: object, kind: type[Exception] = ValueError) -> str:
    """The message of the error of this kind that a call raises. "(no error)" if the call raises none."""
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    return "(no error)"
