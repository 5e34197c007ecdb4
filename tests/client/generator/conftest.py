"""A small model and adapters of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.client.generator.factories import make_adapter, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions; the second has another rank."""
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(model, folder / f"step-{step}", seed=step, rank=4 * step) for step in (1, 2)]
