"""LoopThread: the event loop behind a blocking client, and the only place where its threads hand work to each other."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

from replay_client import forks
from replay_client.errors import ServerClosedError

T = TypeVar("T")

# gRPC may still call a loop after the last call on it has ended, and writes an error to stderr if the loop is closed.
# The loops of closed clients therefore stay open, each with its `forks.count()`, and later clients use them again.
_idle_loops: deque[tuple[int, asyncio.AbstractEventLoop]] = deque()


def _event_loop() -> asyncio.AbstractEventLoop:
    while _idle_loops:
        made_at, loop = _idle_loops.pop()
        if made_at == forks.count():
            return loop
    return asyncio.new_event_loop()


def _result(future: concurrent.futures.Future[T]) -> T:
    # A wait without an end would miss a signal that comes in the moment before it: Python has noted it then, and looks
    # at its notes when the wait ends, not before. Ctrl-C and SIGTERM would do nothing.
    while True:
        try:
            return future.result(timeout=1.0)
        except TimeoutError:
            if future.done():  # the error is the result's, or the result came in this moment
                return future.result()


def wait_for(event: threading.Event, seconds: float | None) -> bool:
    """As `event.wait(seconds)`, for a wait that a signal must be able to end: see `_result`."""
    end = None if seconds is None else time.monotonic() + seconds
    while not event.is_set():
        left = 1.0 if end is None else end - time.monotonic()
        if left <= 0:
            return False
        event.wait(min(left, 1.0))
    return True


class LoopThread:
    """An event loop in a daemon thread, for calls from other threads."""

    def __init__(self) -> None:
        self.loop = _event_loop()
        self._made_at = forks.count()
        self._thread = threading.Thread(target=self.loop.run_forever, name="replay-client", daemon=True)
        self._thread.start()
        self._closed = False

    def check(self) -> None:
        """Raises RuntimeError after a fork, and ServerClosedError after `close`."""
        if self._made_at != forks.count():
            raise RuntimeError(
                "this ReplayClient was made before a fork and does not work after it; make one in each process"
            )
        if self._closed:
            raise ServerClosedError("this client is closed")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the loop and returns its result. An interrupt of the calling thread cancels `work`."""
        try:
            self.check()
        except BaseException:
            work.close()
            raise
        return self._run(work)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return _result(future)
        except concurrent.futures.CancelledError:
            raise ServerClosedError("this client was closed while the call waited") from None
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Runs `last`, ends the calls of other threads with ServerClosedError, and stops the loop."""
        if self._closed or self._made_at != forks.count():
            last.close()
            return
        self._closed = True

        async def finish() -> None:
            await last
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self._run(finish())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        _idle_loops.append((self._made_at, self.loop))
