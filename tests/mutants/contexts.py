"""A plugin of pytest for `reach`: it measures which lines each test runs, and notes how long each test takes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage

SETTINGS_FILE = "REPLAY_MUTANTS_COVERAGE"
SECONDS_FILE = "REPLAY_MUTANTS_SECONDS"
"""The variables of the environment that name the file of coverage's settings, and the file for the seconds of tests."""


class Measured:
    """The lines and the seconds of the tests of one run of pytest."""

    def __init__(self) -> None:
        self.coverage = Coverage(config_file=os.environ[SETTINGS_FILE])
        self.seconds: dict[str, float] = {}
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.coverage.switch_context(item.nodeid)
        began = time.monotonic()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.monotonic() - began
            self.coverage.switch_context("")

    def pytest_unconfigure(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        Path(os.environ[SECONDS_FILE]).write_text(json.dumps(self.seconds))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Measured())
