"""Large requests: works on them in threads, a few at a time, so that the event loop goes on for all other requests.

More threads would take the interpreter from the loop. A small request is worked on at once: a thread costs more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

from replay_client.waits import in_daemon_thread

T = TypeVar("T")
SMALL = 20_000
"""Bytes or characters that are parsed, rendered and tokenized in some milliseconds."""
_AT_ONCE = 2
"""The most threads that work on requests at the same time."""
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def worked(size: int, work: Callable[[], T]) -> T:
    """The result of `work` on a request of `size` bytes. Large requests wait for their turn, in order."""
    if size < SMALL:
        return work()
    turns = _turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_AT_ONCE))
    async with turns:
        return cast("T", await in_daemon_thread(work))
