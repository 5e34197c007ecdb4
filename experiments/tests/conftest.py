"""Experiments are over: `make test-long` looks whether their programs still run, and `make test` does not."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(__file__.removesuffix("conftest.py")):
            item.add_marker(pytest.mark.long)
