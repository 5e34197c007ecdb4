"""Waits: how a process tries again (Patience), and what it tells a person (WaitLog) and a health check (beat).

Health checks of containers look at the age of the file that the environment variable REPLAY_HEARTBEAT names. Who hangs
does not beat, so `beat` belongs where work was completed or a wait goes on, and not on a timer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import grpc

from replay_client.errors import DeadlineExceededError, ReplayError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

VARIABLE = "REPLAY_HEARTBEAT"
LOG_SECONDS = 30.0
"""Between two lines about waiting, also about waits that follow each other."""
STOP_SECONDS = 20.0
"""In which a generator ends that is told to stop, on any machine. Containers must wait longer before they kill it."""
LAST_WORD = STOP_SECONDS / 10
"""For each last word to a server. Up to five follow each other, and `stop_grace` comes before them."""
ENGINE_STOP = STOP_SECONDS - 6 * LAST_WORD
"""For the engine, which ends last."""
_SHORT_WAIT = 1.0
"""Seconds. The end of a shorter wait is not worth a line, unless its beginning was late too."""


def stop_signals() -> list[int]:
    """The signals that end a program of this package as Ctrl-C does: also those of a terminal that is closed, and of
    schedulers that warn before they kill. One that is ignored, as by `nohup`, stays so."""
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return [number for number in wanted if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN]


class StopSignals:
    """Counts the signals that ask this process to end, for a loop that looks at them.

    A handler that raised could lose its exception in an import, or leave a process running that was just being started.
    """

    def __init__(self) -> None:
        self.first = 0
        """The number of the first one; 0: none has come."""
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        """Count them from now on, until the end of the block."""
        for number in stop_signals():
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.first = self.first or number
        self.count += 1


class _Look(threading.local):
    """What a thread looks at while it waits; each thread has its own."""

    function: Callable[[], None] | None = None


_looking = _Look()


@contextmanager
def looking(look: Callable[[], None]) -> Iterator[None]:
    """Inside, this thread calls `look` every second in which it waits for a call of a blocking client.

    What `look` raises ends the wait, and the call, as Ctrl-C does.
    """
    before = _looking.function
    _looking.function = look
    try:
        yield
    finally:
        _looking.function = before


def look_around() -> None:
    """Calls the function of `looking`, if this thread is inside of it."""
    if _looking.function is not None:
        _looking.function()


def beat() -> None:
    """Give the file a new time of change. Raises ValueError if that is impossible."""
    if not (path := os.environ.get(VARIABLE)):
        return
    try:
        _absolute(path).touch()
    except OSError as error:
        raise ValueError(
            f"{VARIABLE}: cannot write {path}: {error.strerror}; name one in a folder that is there"
        ) from error


@cache
def _absolute(path: str) -> Path:
    """The file that `path` named at the first beat: users' code may change the folder of the process later."""
    return Path(path).absolute()


async def in_daemon_thread(work: Callable[[], Any]) -> Any:
    """The result of `work`, which runs in a thread. Neither the event loop nor the end of the program waits for it."""
    result: Future[Any] = Future()

    def run() -> None:
        result.set_running_or_notify_cancel()  # who stops to wait does not cancel it
        try:
            result.set_result(work())
        except BaseException as error:
            if isinstance(error, StopIteration):  # a future of asyncio refuses to carry it
                result.set_exception(RuntimeError(repr(error)).with_traceback(error.__traceback__))
            elif isinstance(error, Exception):
                result.set_exception(error)
            else:  # such as SystemExit, which would end the event loop
                result.set_exception(ReplayError(f"work in a thread raised {error!r}{_last_line(error)}"))

    threading.Thread(target=run, name="replay-work", daemon=True).start()
    return await asyncio.wrap_future(result)


def _last_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


class Deadline:
    """When a call must end. `timeout` is in seconds; None: never."""

    def __init__(self, timeout: float | None) -> None:
        self._end = math.inf if timeout is None else time.monotonic() + timeout

    @property
    def seconds(self) -> float | None:
        """What is left, at least 0; None: no end."""
        return None if math.isinf(self._end) else max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.seconds == 0.0

    def within(self, seconds: float) -> float:
        """`seconds`, or what is left if that is less."""
        left = self.seconds
        return seconds if left is None else min(seconds, left)


class Patience:
    """Tries again: what it gives up on, and what it says meanwhile, decides `judge`.

    `judge` is told each failure, and whether the time is up. It raises the error that ends the attempts, and says to a
    person why there is another one. The pause after an attempt doubles from `first` to `longest` seconds. An attempt
    that its deadline ended has waited already, and keeps its place in the server's line only if the next one follows at
    once.
    """

    def __init__(
        self,
        judge: Callable[[Exception, bool], Awaitable[None]],
        timeout: float | None = None,
        *,
        first: float = 0.1,
        longest: float = 2.0,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`timeout`: seconds from `start`, or from the first failure; None: for ever."""
        self._judge, self._timeout, self._sleep = judge, timeout, sleep
        self._first, self._longest, self._pause = first, longest, first
        self._deadline: Deadline | None = None

    def start(self) -> Deadline:
        """The timeout begins now."""
        self._deadline = deadline = Deadline(self._timeout)
        return deadline

    def renew(self) -> None:
        """An attempt got an answer: the timeout begins again at the next failure."""
        self._pause, self._deadline = self._first, None

    async def result(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of `attempt`, made again until it succeeds."""
        while True:
            try:
                return await attempt()
            except (ReplayError, grpc.aio.AioRpcError) as error:
                await self.pause_or_raise(error)

    async def pause_or_raise(self, error: Exception) -> None:
        """Waits before the next attempt, unless `judge` raises."""
        left = (self._deadline or self.start()).seconds
        await self._judge(error, left is not None and left <= self._pause)
        if not isinstance(error, DeadlineExceededError):
            await self._sleep(self._pause)
            self._pause = min(2 * self._pause, self._longest)


def try_patiently(
    attempt: Callable[[], T],
    judge: Callable[[Exception, bool], None],
    timeout: float | None = None,
    *,
    sleep: Callable[[float], object] = time.sleep,
    **pauses: float,
) -> T:
    """`Patience.result` for code without asyncio: plain functions, which block their thread; `pauses`: first, longest.

    An attempt must not raise StopIteration.
    """
    work = Patience(_async(judge), timeout, sleep=_async(sleep), **pauses).result(_async(attempt))
    try:
        work.send(None)  # nothing in it waits for an event loop, so that it runs to its end
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("an attempt waited for an event loop")


def _async(function: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    return call


class WaitLog:
    """One log for all waits of a kind, however many are under way at once."""

    def __init__(self, who: str = "the generator", *, every: float = LOG_SECONDS, late: bool = False) -> None:
        """`who` waits. `every`: seconds between two lines. `late`: the wait begins now, and its first line comes after
        `every` too. Otherwise that comes at once."""
        self._who = who
        self._every, self._late = every, late
        self._since = time.monotonic() if late else None
        self._next_line = 0.0 if self._since is None else self._since + every
        self._logged = False

    def wait(self, reason: str, *, is_news: bool = False) -> None:
        """An attempt has failed and will be made again. `is_news`: a person must know the reason now."""
        beat()
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now < self._next_line and not is_news:
            return
        waited = now - self._since
        logger.warning("%s%s", reason, f" (for {waited:.0f} s now)" if waited > _SHORT_WAIT else "")
        self._next_line, self._logged = now + self._every, True

    def go_on(self) -> None:
        """An attempt has succeeded."""
        if self._logged and self._since is not None:
            waited = time.monotonic() - self._since
            if self._late or waited > _SHORT_WAIT:
                logger.warning("%s goes on after %.0f s", self._who, waited)
        self._since, self._logged = None, False
