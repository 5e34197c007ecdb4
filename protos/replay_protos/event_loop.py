"""Event loops: uvloop's where it is installed, otherwise asyncio's. `pip install 'replay-server[fast]'` installs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
try:
    import uvloop
except ImportError:
    pass
else:
    new_event_loop = uvloop.new_event_loop


def run(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, on such a loop."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)
