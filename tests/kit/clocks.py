"""The clock of an event loop that a test stops, and waits for what happens on a loop or on a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest


def in_a_thread(call: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
    """What `call` answers or raises, as soon as the thread that it has for itself has ended it."""
    thread = ThreadPoolExecutor(1)
    try:
        return thread.submit(call, *arguments, **options)
    finally:
        thread.shutdown(wait=False)


@contextmanager
def stopped_clock() -> Iterator[Callable[[float], None]]:
    """Stops the clock of the running event loop. It goes on by as many seconds as the function is told, by any thread.

    So what has a time limit there, such as `asyncio.timeout`, ends when the test says so, and on no machine before.
    """
    loop = asyncio.get_running_loop()
    now = [loop.time()]

    def go_on(seconds: float) -> None:
        now[0] += seconds
        loop.call_soon_threadsafe(lambda: None)  # it looks at its clock

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "time", lambda: now[0])
        yield go_on


async def turns(count: int = 200) -> None:
    """Lets the event loop turn: what waits for nothing outside of this thread has happened afterwards."""
    for _ in range(count):
        await asyncio.sleep(0)
