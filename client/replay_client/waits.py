"""Waits: tries again (Patience), and reports waits to a person (WaitLog) and to a health check (beat).

Health checks of containers look at the age of the file that the environment variable REPLAY_HEARTBEAT names. In a
process that hangs, the file must grow old. So call `beat` where work was completed or a wait goes on, and not on a
timer.
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
"""The environment variable with the path of the file that `beat` touches."""
LOG_SECONDS = 30.0
"""Seconds between two lines about waiting, even if they are about different waits."""
STOP_SECONDS = 20.0
"""Seconds in which a generator ends after it was told to stop, on any machine. A container must wait longer before it
kills the generator."""
LAST_WORD = STOP_SECONDS / 10
"""Seconds for each call to a server with which a generator ends. After `stop_grace`, up to five such calls follow each
other."""
ENGINE_STOP = STOP_SECONDS - 6 * LAST_WORD
"""Seconds for the engine to end. It ends last."""
_SHORT_WAIT = 1.0
"""Seconds. A shorter wait is logged without its duration, and without its end unless the log is `late`."""


def stop_signals() -> list[int]:
    """The signals that end a program of this package as Ctrl-C does.

    A terminal that is closed sends SIGHUP, and schedulers send other signals before they kill a process. A signal that
    is ignored, as SIGHUP under `nohup`, stays ignored and is not in the result.
    """
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return [number for number in wanted if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN]


class StopSignals:
    """Counts the signals that ask this process to end, for a loop that looks at them.

    The handler does not raise an exception. That could get lost in an import, or interrupt the start of a process,
    which would then run on unnoticed.
    """

    def __init__(self) -> None:
        self.first = 0
        """The number of the first signal; 0: none has come."""
        self.count = 0
        self._before: dict[int, Any] = {}
        """The earlier handler of each signal."""

    def __enter__(self) -> StopSignals:
        """Counts the signals from now on, until the end of the block."""
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
    """The function that a thread calls while it waits. Each thread has its own."""

    function: Callable[[], None] | None = None


_looking = _Look()


@contextmanager
def looking(look: Callable[[], None]) -> Iterator[None]:
    """In the block, this thread calls `look` every second in which it waits for a call of a blocking client.

    An exception of `look` ends the wait, and the call, as Ctrl-C does.
    """
    before = _looking.function
    _looking.function = look
    try:
        yield
    finally:
        _looking.function = before


def look_around() -> None:
    """Calls the function of `looking`, if this thread is in such a block."""
    if _looking.function is not None:
        _looking.function()


def beat() -> None:
    """Updates the time of the file that REPLAY_HEARTBEAT names. Raises ValueError if that is impossible."""
    path = os.environ.get(VARIABLE)
    if not path:
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
        result.set_running_or_notify_cancel()  # from now on, a caller that stops waiting does not cancel the future
        try:
            result.set_result(work())
        except BaseException as error:
            if isinstance(error, StopIteration):  # a future of asyncio refuses StopIteration
                result.set_exception(RuntimeError(repr(error)).with_traceback(error.__traceback__))
            elif isinstance(error, Exception):
                result.set_exception(error)
            else:  # an error such as SystemExit would end the event loop
                result.set_exception(ReplayError(f"work in a thread raised {error!r}{_last_line(error)}"))

    threading.Thread(target=run, name="replay-work", daemon=True).start()
    return await asyncio.wrap_future(result)


def _last_line(error: BaseException) -> str:
    """The file and line that raised the error, in brackets after a space; empty if they are not known."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    last = frames[-1]
    return f" ({last.filename}, line {last.lineno})"


class Deadline:
    """The time at which a call must end, `timeout` seconds from now; None: the call has no limit."""

    def __init__(self, timeout: float | None) -> None:
        self._end = math.inf if timeout is None else time.monotonic() + timeout

    @property
    def seconds(self) -> float | None:
        """The seconds that are left, at least 0; None: there is no limit."""
        if math.isinf(self._end):
            return None
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.seconds == 0.0

    def within(self, seconds: float) -> float:
        """`seconds`, or the seconds that are left if these are fewer."""
        left = self.seconds
        return seconds if left is None else min(seconds, left)


class Patience:
    """Makes an attempt again until it succeeds, or until `judge` ends the attempts.

    `judge` gets each failure, and True if no time is left for another attempt. It raises an error to end the attempts.
    Otherwise it may tell a person why another attempt follows. The pause after an attempt doubles from `first` to
    `longest` seconds. There is no pause after DeadlineExceededError: the attempt has waited already, and keeps its
    position in the server's line only if the next attempt follows at once.
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
        self._judge = judge
        self._timeout = timeout
        self._sleep = sleep
        self._first = first
        self._longest = longest
        self._pause = first
        self._deadline: Deadline | None = None

    def start(self) -> Deadline:
        """Begins the timeout now."""
        deadline = Deadline(self._timeout)
        self._deadline = deadline
        return deadline

    def renew(self) -> None:
        """Notes that an attempt got an answer: timeout and pauses begin anew at the next failure."""
        self._pause = self._first
        self._deadline = None

    async def result(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of `attempt`, made again until it succeeds."""
        while True:
            try:
                return await attempt()
            except (ReplayError, grpc.aio.AioRpcError) as error:
                await self.pause_or_raise(error)

    async def pause_or_raise(self, error: Exception) -> None:
        """Waits before the next attempt, unless `judge` raises."""
        deadline = self._deadline or self.start()
        left = deadline.seconds
        is_late = left is not None and left <= self._pause
        await self._judge(error, is_late)
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
    """`Patience.result` for code without asyncio, with plain functions that block their thread.

    `pauses` are `first` and `longest` of Patience. An attempt must not raise StopIteration.
    """
    patience = Patience(_async(judge), timeout, sleep=_async(sleep), **pauses)
    work = patience.result(_async(attempt))
    try:
        work.send(None)  # nothing in the coroutine waits for an event loop, so it runs to its end
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("an attempt waited for an event loop")


def _async(function: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    return call


class WaitLog:
    """Logs waits of one kind. Several waits at the same time count as one wait."""

    def __init__(self, who: str = "the generator", *, every: float = LOG_SECONDS, late: bool = False) -> None:
        """`who` names the program that waits. `every`: seconds between two lines.

        The first line of a wait is logged at once. With `late`, the first wait begins now, and its first line is logged
        after `every` seconds.
        """
        self._who = who
        self._every = every
        self._late = late
        self._since: float | None = None
        self._next_line = 0.0
        self._logged = False
        if late:
            self._since = time.monotonic()
            self._next_line = self._since + every

    def wait(self, reason: str, *, is_news: bool = False) -> None:
        """Notes that an attempt has failed and will be made again. `is_news`: a person must know the reason now."""
        beat()
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now < self._next_line and not is_news:
            return
        waited = now - self._since
        duration = f" (for {waited:.0f} s now)" if waited > _SHORT_WAIT else ""
        logger.warning("%s%s", reason, duration)
        self._next_line = now + self._every
        self._logged = True

    def go_on(self) -> None:
        """Notes that an attempt has succeeded, which ends the wait."""
        if self._logged and self._since is not None:
            waited = time.monotonic() - self._since
            if self._late or waited > _SHORT_WAIT:
                logger.warning("%s goes on after %.0f s", self._who, waited)
        self._since = None
        self._logged = False
