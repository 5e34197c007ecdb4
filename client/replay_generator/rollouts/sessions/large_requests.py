"""Large requests: works on them in a few threads, so that they do not block the event loop and all other requests.

With more than a few threads, the event loop would get the interpreter lock too rarely. A small request is worked on in
the event loop, because starting a thread would take longer than the work.
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
_threads: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""Event loop -> the semaphore that bounds the number of its threads. A semaphore can serve only one event loop."""


async def worked(size: int, work: Callable[[], T]) -> T:
    """Runs `work`, and returns its result. `size`: the number of bytes, characters or tokens that `work` reads.

    If `size` is below SMALL, `work` runs at once in the event loop. Otherwise it runs in a thread, as soon as fewer
    than _AT_ONCE threads are working.
    """
    if size < SMALL:
        return work()
    free_threads = _threads.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_AT_ONCE))
    async with free_threads:
        return cast("T", await in_daemon_thread(work))
