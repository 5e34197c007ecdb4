"""A plugin of pytest for `reach`: it tells coverage which test runs, and notes how long each test takes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import coverage
import pytest

SECONDS_FILE = "REPLAY_MUTANTS_SECONDS"
"""The variable of the environment that names the file for the seconds of each test."""
_seconds: dict[str, float] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    measured = coverage.Coverage.current()
    assert measured is not None
    measured.switch_context(item.nodeid)
    began = time.monotonic()
    try:
        return (yield)
    finally:
        _seconds[item.nodeid] = time.monotonic() - began
        measured.switch_context("")


def pytest_sessionfinish() -> None:
    Path(os.environ[SECONDS_FILE]).write_text(json.dumps(_seconds))
