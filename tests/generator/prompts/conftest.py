"""What the tests of tables of prompts share: small windows."""

import pytest

from replay_generator.prompts import table as prompts_table


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(prompts_table, "WINDOW", 4)
