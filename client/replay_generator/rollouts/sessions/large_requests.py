"""Large requests: works on them in a few threads, so that they do not hold up the event loop and all other requests.

With more threads, the event loop would get the interpreter lock too rarely. A small request is worked on at once,
because a thread would take longer than the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

from replay_client.waits import in_daemon_thread

T = TypeVar("T")
SMALL = 20_000
"""A request with fewer bytes or characters is small: it is parsed, rendered and tokenized in some milliseconds."""
_AT_ONCE = 2
"""The most threads that work on requests at the same time."""
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""The semaphore that bounds these threads, by the event loop that uses it."""


async def worked(size: int, work: Callable[[], T]) -> T:
    """The result of `work`. `size`: the bytes, characters or tokens that it works on. Large requests wait in line for a
    thread."""
    if size < SMALL:
        return work()
    turns = _turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_AT_ONCE))
    async with turns:
        return cast("T", await in_daemon_thread(work))
