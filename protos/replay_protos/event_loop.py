"""Event loops: those of uvloop if it is installed (`pip install '.[fast]'`), otherwise those of asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

try:
    from uvloop import new_event_loop as new_event_loop
except ImportError:
    new_event_loop = asyncio.new_event_loop


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine and returns its result, as `asyncio.run` does, but on a loop that `new_event_loop` makes."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


__all__ = ["new_event_loop", "run"]
