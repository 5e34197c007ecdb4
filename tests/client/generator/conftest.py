"""A small model and adapters of it, and time for the last words of a generator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from replay_client.generator import building, server
from tests.client.generator.factories import make_adapter, make_model


@pytest.fixture(scope="module", autouse=True)
def time_for_last_words() -> Iterator[None]:
    """Gives a generator a minute for its last words: on a slow machine the server would get its permits back late."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server, "_RELEASE_SECONDS", 60.0)
        patched.setattr(building, "_LAST_SECONDS", 60.0)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions; the second has another rank."""
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(model, folder / f"step-{step}", seed=step, rank=4 * step) for step in (1, 2)]
