"""Waits: repeats failed attempts (Patience), and reports waits to a person (WaitLog) and to a health check (beat).

A health check of a container looks at the age of the file that the environment variable REPLAY_HEARTBEAT names. `beat`
updates the time of this file. When the process hangs, the file must grow old. So call `beat` after completed work and
during a wait, and not on a timer, which would go on in a process that hangs.
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

from replay_client.errors import ClientClosedError, DeadlineExceededError, ReplayError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

VARIABLE = "REPLAY_HEARTBEAT"
"""The environment variable with the path of the file that `beat` touches."""
LOG_SECONDS = 30.0
"""Seconds between two lines of a WaitLog, even if these lines are about different waits."""
STOP_SECONDS = 20.0
"""Upper limit, in seconds, on the time from a stop signal to the end of a generator with the default `stop_grace`.

The program that runs the container must wait longer than this before it kills the generator."""
LAST_WORD = STOP_SECONDS / 10
"""Upper limit, in seconds, on each of the calls that a generator makes to the server before it ends.

After `stop_grace`, the generator makes up to five such calls, one after the other. The default of `stop_grace` is as
long as the limit on one of these calls."""
ENGINE_STOP = STOP_SECONDS - 6 * LAST_WORD
"""Seconds in which the engine must end. The engine ends last, after `stop_grace` and the five calls, for which the rest
of STOP_SECONDS is reserved."""
_SHORT_WAIT = 1.0
"""The length of a short wait, in seconds. A WaitLog logs a wait of at most this length without its duration. The end of
such a wait is logged only if the WaitLog was made with `late`."""
_SIGNAL_SECONDS = 0.1
"""The time between two checks of `StopSignals.wait` for a signal, in seconds."""


def stop_signals() -> list[int]:
    """The signals that end a program of this package as Ctrl-C does.

    A terminal that is closed sends SIGHUP, and schedulers send other signals before they kill a process. A signal that
    is ignored, as SIGHUP under `nohup`, stays ignored and is not in the result. SIGINT is always in the result: a shell
    script starts its background programs with SIGINT ignored, and the signal must stop such a program too.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return [number for number in signals if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN]


class StopSignals:
    """Counts the signals that ask this process to end. The loop of the program must look at these counts.

    The handler does not raise an exception, for two reasons. An import could swallow the exception. And an exception
    that interrupted the start of a child process would leave this child running unnoticed. The handler does not set a
    threading.Event either. The lock of an Event may be held by the code that the handler interrupts, which goes on only
    when the handler has returned: the process would hang.
    """

    def __init__(self) -> None:
        self.first = 0
        """The number of the first signal that arrived; 0: none has."""
        self.count = 0
        """The number of signals that have arrived."""
        self._before: dict[int, Any] = {}
        """Number of a signal -> the handler that the signal had before the block."""

    def begin(self) -> None:
        """Counts the signals from now on, until the process ends. In a `with` block: until the end of the block."""
        for number in stop_signals():
            self._before[number] = signal.signal(number, self._note)

    def wait(self, seconds: float) -> bool:
        """Blocks the caller until a stop signal arrives or `seconds` have passed. Returns True if one has arrived."""
        deadline = Deadline(seconds)
        while not self.count and not deadline.passed:
            time.sleep(deadline.within(_SIGNAL_SECONDS))  # a signal whose handler returns does not end a sleep
        return self.count > 0

    def __enter__(self) -> StopSignals:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        """Counts a signal. Python calls this handler with the number of the signal."""
        if not self.first:
            self.first = number
        self.count += 1


class _Look(threading.local):
    """Holds, for each thread, the function that the thread calls while it waits."""

    function: Callable[[], None] | None = None
    """The argument of `looking`, for the innermost such block that this thread is in. None: it is in no such block."""


_looking = _Look()


@contextmanager
def looking(look: Callable[[], None]) -> Iterator[None]:
    """Lets this thread call `look` once a second while it is blocked in a call of a ReplayClient, until the end of the
    block.

    For example, `look` checks whether the thread must stop. If `look` raises an exception, the call of the client ends
    with this exception, as it does after Ctrl-C.
    """
    outer_function = _looking.function  # the function of a block around this one, if there is such a block
    _looking.function = look
    try:
        yield
    finally:
        _looking.function = outer_function


def look_around() -> None:
    """Calls `look`, if this thread is in a block of `looking(look)`."""
    if _looking.function is not None:
        _looking.function()


def beat() -> None:
    """Updates the time of the file that REPLAY_HEARTBEAT names, if this variable is set. Raises ValueError if the file
    cannot be written."""
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
    """The absolute path of `path`. A relative path begins at the working directory of the first beat.

    The cache keeps this first result, because users' code may change the working directory later.
    """
    return Path(path).absolute()


async def in_daemon_thread(work: Callable[[], Any]) -> Any:
    """Calls `work` in a new thread, and returns its result.

    Neither the event loop nor the end of the program waits for the thread.
    """
    result: Future[Any] = Future()

    def run() -> None:
        """Calls `work`, and puts its result or its error into the future. Runs in the new thread."""
        # Mark the future as running, because then nobody can cancel it. Otherwise a caller that stops waiting would
        # cancel the future, and `set_result` would then fail.
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
    """The file and line that raised the error, in brackets after a space; "" if they are not known."""
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
    """Repeats an attempt until it succeeds, or until `judge` ends the attempts.

    After each failed attempt, `judge` is called with the error, and with True if no time is left for another attempt.
    `judge` ends the attempts by raising an error. Otherwise another attempt follows, and `judge` may tell a person why.
    The pauses between attempts double from `first` to `longest` seconds.

    After a DeadlineExceededError there is no pause, for two reasons. The failed attempt has already waited. And its
    request keeps its position among the requests that wait at the server only if the next attempt follows at once.
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
        """`timeout`: seconds for all attempts. This time begins when `start` is called, or else at the first failure.
        None: no limit.

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
        """Begins the timeout now, and returns the time at which it ends."""
        deadline = Deadline(self._timeout)
        self._deadline = deadline
        return deadline

    def renew(self) -> None:
        """Notes that the server has answered. At the next failure, the timeout and the pauses begin anew."""
        self._pause = self._first
        self._deadline = None

    async def result(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Calls `attempt` until it succeeds, and returns its result. Raises what `judge` raises."""
        while True:
            try:
                return await attempt()
            except (ReplayError, grpc.aio.AioRpcError) as error:
                await self.pause_or_raise(error)

    async def pause_or_raise(self, error: Exception) -> None:
        """Calls `judge` with the error of a failed attempt, and then waits until the next attempt. Raises what `judge`
        raises, and a ClientClosedError at once."""
        if isinstance(error, ClientClosedError):  # no attempt with a closed client can succeed
            raise error
        deadline = self._deadline or self.start()  # the first failure begins the timeout, unless `start` has begun it
        left = deadline.seconds
        is_late = left is not None and left <= self._pause  # the time would be up before the next attempt
        await self._judge(error, is_late)
        if isinstance(error, DeadlineExceededError):  # the docstring of the class says why there is no pause
            return
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
    """Calls `attempt` until it succeeds, and returns its result: `Patience.result` for code without asyncio.

    `attempt`, `judge` and `sleep` are plain functions, which block the thread. `pauses` are `first` and `longest` of
    Patience. An attempt must not raise StopIteration.
    """
    patience = Patience(_async(judge), timeout, sleep=_async(sleep), **pauses)
    coroutine = patience.result(_async(attempt))
    try:
        # Run the coroutine without an event loop. It awaits only plain functions in the form of coroutines, which never
        # wait for a loop. So one `send` runs it to its end. When it returns, it raises StopIteration with its result.
        coroutine.send(None)
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

        The first line about a wait is logged at once, unless a line was logged less than `every` seconds ago. `late`:
        the first wait begins now, and its first line is logged after `every` seconds.
        """
        self._who = who
        self._every = every
        self._late = late
        self._since: float | None = None
        """The start of the present wait, by time.monotonic(). None: no wait goes on."""
        self._next_line = 0.0
        """The time, by time.monotonic(), before which no line is logged, except for news."""
        self._logged = False
        """True if a line of the present wait was logged."""
        if late:
            self._since = time.monotonic()
            self._next_line = self._since + every

    def wait(self, reason: str, *, is_news: bool = False) -> None:
        """Notes that an attempt has failed and will be repeated. Logs the reason if it is time for a line.

        `is_news`: log the reason in any case, because a person must know it now.
        """
        beat()  # the process waits, so it does not hang
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
        """Notes that an attempt has succeeded, which ends the wait. Logs the end of the wait if the wait was logged and
        was not short."""
        if self._logged and self._since is not None:
            waited = time.monotonic() - self._since
            if self._late or waited > _SHORT_WAIT:
                logger.warning("%s goes on after %.0f s", self._who, waited)
        self._since = None
        self._logged = False
