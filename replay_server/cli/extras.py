"""Names the extra of the package that brings a missing module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from replay_server.cli.output import fail

_BROUGHT_BY = {
    "torch": "trainer",
    "transformers": "trainer",
    "safetensors": "trainer",
    "matplotlib": "demo",
    "vllm": "vllm",
    "datasets": "datasets",
    "pyarrow": "parquet",
    "opentelemetry": "otel",
}
"""Extras by the module that they bring."""


@contextmanager
def needed_by(what: str, extra: str) -> Iterator[None]:
    """Around imports. A module that is not installed ends the command with one line that names the extra."""
    try:
        yield
    except ImportError as error:
        root = (error.name or "").partition(".")[0]
        if root not in _BROUGHT_BY:
            raise
        fail(
            f"{what} needs {root}, which is not installed: pip install 'replay-server[{extra}]', or in a clone of the "
            f"repository pip install '.[{extra}]'"
        )
