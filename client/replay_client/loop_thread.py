"""LoopThread: the event loop behind a blocking client, and the only place where its threads hand work to each other."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from replay_client import forks
from replay_client.errors import ServerClosedError
from replay_protos.event_loop import new_event_loop

T = TypeVar("T")

# gRPC may still call a loop after the last call on it has ended, and writes an error to stderr if the loop is closed.
# The loops of closed clients therefore stay open, each with its `forks.count()`, and later clients use them again.
_idle_loops: deque[tuple[int, asyncio.AbstractEventLoop]] = deque()


def _event_loop() -> asyncio.AbstractEventLoop:
    while _idle_loops:
        made_at, loop = _idle_loops.pop()
        if made_at == forks.count():
            return loop
    return new_event_loop()


class Wake:
    """Lets one thread wait until another one sets it. The wait clears it. It costs a quarter of a `threading.Event`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        with suppress(RuntimeError):  # it is set already
            self._lock.release()

    def wait(self, seconds: float | None) -> bool:
        """False: it was not set within `seconds`. A signal can end the wait."""
        # A wait without an end would miss a signal that comes in the moment before it: Python has noted it then, and
        # looks at its notes when the wait ends, not before. Ctrl-C and SIGTERM would do nothing.
        end = math.inf if seconds is None else time.monotonic() + seconds
        while not self._lock.acquire(timeout=max(0.0, min(end - time.monotonic(), 1.0))):
            if time.monotonic() >= end:
                return False
        return True


class _Call(Generic[T]):
    """A coroutine that runs on a loop while the calling thread waits for it.

    It tells the thread itself that it has ended. The future of `asyncio.run_coroutine_threadsafe` would learn that from
    a callback, one turn of the loop later.
    """

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._work, self._loop = work, loop
        self._task: asyncio.Task[None] | None = None
        self._value: T
        self._error: BaseException | None = None
        self._began = False
        self._ended = Wake()
        loop.call_soon_threadsafe(self._start)

    def result(self) -> T:
        """Waits for the result of the coroutine. An interrupt of this wait cancels the coroutine."""
        try:
            self._ended.wait(None)
        except BaseException:
            self._loop.call_soon_threadsafe(self._cancel)
            raise
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it refers to this frame, which refers to it
        return self._value

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        assert self._task is not None, "callbacks run in order"
        self._task.cancel()

    async def _run(self) -> None:
        self._began = True
        try:
            self._value = await self._work
        except BaseException as error:
            self._error = error
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        finally:
            self._ended.set()

    def _end(self, task: asyncio.Task[None]) -> None:
        if self._began:
            return
        self._work.close()
        self._error = asyncio.CancelledError()  # before it began
        self._ended.set()


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
        try:
            return _Call(work, self.loop).result()
        except asyncio.CancelledError:
            raise ServerClosedError("this client was closed while the call waited") from None

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
