"""Waits: tries again (Patience), and reports waits to a person (WaitLog) and to a health check (beat).

A health check of a container looks at the age of the file that the environment variable REPLAY_HEARTBEAT names. `beat`
updates the time of the file. In a process that hangs, the file must grow old. So call `beat` after completed work and
during a wait, and not on a timer.
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
"""Upper limit, in seconds, on the time from a stop signal to the end of a generator with the default `stop_grace`.

Whatever runs the container must allow more than this before it kills the generator."""
LAST_WORD = STOP_SECONDS / 10
"""Upper limit, in seconds, on each of the calls that a generator makes to the server before it ends.

Up to five such calls follow each other, after `stop_grace`, which by default takes as long as one of them."""
ENGINE_STOP = STOP_SECONDS - 6 * LAST_WORD
"""Seconds for the engine, which ends last. The rest of STOP_SECONDS is for `stop_grace` and the five calls."""
_SHORT_WAIT = 1.0
"""Seconds. A WaitLog logs a wait of at most this length without its duration. It logs the end of such a wait only if
the log is `late`."""


def stop_signals() -> list[int]:
    """The signals that end a program of this package as Ctrl-C does.

    A terminal that is closed sends SIGHUP, and schedulers send other signals before they kill a process. A signal that
    is ignored, as SIGHUP under `nohup`, stays ignored and is not in the result. SIGINT is always in the result: a shell
    script starts its background programs with SIGINT ignored, and the signal must stop such a program too.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return [number for number in signals if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN]


class StopSignals:
    """Counts the signals that ask this process to end, for a loop that looks at them.

    The handler does not raise an exception, for two reasons: an import could swallow the exception, and if it
    interrupted the start of a child process, that process would run on unnoticed.
    """

    def __init__(self) -> None:
        self.first = 0
        """The number of the first signal that arrived; 0: none has."""
        self.count = 0
        """The number of signals that have arrived."""
        self._before: dict[int, Any] = {}
        """The earlier handler of each signal, by its number."""

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
    """None: the thread is in no block of `looking`."""


_looking = _Look()


@contextmanager
def looking(look: Callable[[], None]) -> Iterator[None]:
    """In the block, this thread calls `look` every second in which it waits for a call of a blocking client.

    An exception of `look` ends the wait, and the call, as Ctrl-C does.
    """
    outer = _looking.function  # of a block around this one
    _looking.function = look
    try:
        yield
    finally:
        _looking.function = outer


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
    """The file at `path`, seen from the folder in which the process was at its first beat.

    Users' code may change the folder of the process later.
    """
    return Path(path).absolute()


async def in_daemon_thread(work: Callable[[], Any]) -> Any:
    """The result of `work`, which runs in a thread. Neither the event loop nor the end of the program waits for it."""
    result: Future[Any] = Future()

    def run() -> None:
        """Runs `work` in the thread, and sets its result or its error."""
        # Marks the future as running. A caller that stops waiting then does not cancel the future, and `set_result`
        # does not fail.
        result.set_running_or_notify_cancel()
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
    """The time at which a call must end."""

    def __init__(self, timeout: float | None) -> None:
        """`timeout`: seconds from now. None: the call has no limit."""
        self._end = math.inf if timeout is None else time.monotonic() + timeout

    @property
    def seconds(self) -> float | None:
        """The seconds that are left, at least 0; None: there is no limit."""
        if math.isinf(self._end):
            return None
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """True if no time is left."""
        return self.seconds == 0.0

    def within(self, seconds: float) -> float:
        """`seconds`, or the seconds that are left if these are fewer."""
        left = self.seconds
        return seconds if left is None else min(seconds, left)


class Patience:
    """Makes an attempt again until it succeeds, or until `judge` ends the attempts.

    `judge` is called with the error of each failed attempt, and with True if no time is left for another attempt. To
    end the attempts, it raises an error. Otherwise it may tell a person why another attempt follows. The pause after an
    attempt doubles from `first` to `longest` seconds. After a DeadlineExceededError the next attempt follows at once:
    the failed one has waited already, and its request keeps its position in the server's line only without a pause.
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
        """`timeout`: seconds from the call of `start`, or else from the first failure. None: no limit.

        `first` and `longest`: seconds of the first and of the longest pause. `sleep` makes the pauses.
        """
        self._judge = judge
        self._timeout = timeout
        self._sleep = sleep
        self._first = first
        self._longest = longest
        self._pause = first
        """Seconds of the next pause."""
        self._deadline: Deadline | None = None
        """None: the timeout has not begun."""

    def start(self) -> Deadline:
        """Begins the timeout now, and returns its end."""
        deadline = Deadline(self._timeout)
        self._deadline = deadline
        return deadline

    def renew(self) -> None:
        """Notes that the server has answered: timeout and pauses begin anew at the next failure."""
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
        """Waits before the next attempt. Raises what `judge` raises."""
        deadline = self._deadline or self.start()  # the first failure begins the timeout, unless `start` has done it
        left = deadline.seconds
        is_late = left is not None and left <= self._pause  # the time would be up before the next attempt
        await self._judge(error, is_late)
        if not isinstance(error, DeadlineExceededError):  # the docstring of the class says why no pause follows
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
        # Runs the coroutine without an event loop. All its awaits are of plain functions, so it never waits for a loop,
        # and runs to its end. A coroutine that returns raises StopIteration with its result.
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("an attempt waited for an event loop")


def _async(function: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """A coroutine function that calls the plain `function`."""

    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    return call


class WaitLog:
    """Logs waits of one kind. Several waits at the same time count as one wait."""

    def __init__(self, who: str = "the generator", *, every: float = LOG_SECONDS, late: bool = False) -> None:
        """`who` names the program that waits, for the line at the end of a wait. `every`: seconds between two lines.

        The first line of a wait is logged at once. With `late`, the first wait begins now, and its first line is logged
        after `every` seconds.
        """
        self._who = who
        self._every = every
        self._late = late
        self._since: float | None = None
        """The start of the present wait, by time.monotonic(). None: no wait goes on."""
        self._next_line = 0.0
        """The time before which no line is logged."""
        self._logged = False
        """True if a line of the present wait was logged."""
        if late:
            self._since = time.monotonic()
            self._next_line = self._since + every

    def wait(self, reason: str, *, is_news: bool = False) -> None:
        """Notes that an attempt has failed and will be made again. Logs the reason if it is time for a line.

        `is_news`: log the reason in any case, because a person must know it now.
        """
        beat()  # a process that waits does not hang
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
