"""Users' code: the one place that calls functions of users: rewards, stages, hooks, tools, agents, priorities.

A function of a user may fail as it likes. It cannot end the process, and nothing that it does goes unseen:

* SystemExit, a KeyboardInterrupt that its own line raises, and a CancelledError that nobody asked for become a
  UserCodeError, which names function, file and line. Ctrl-C and the cancellation of the caller pass.
* A function without async runs in a thread. Python gives signals to the main thread alone: a function that asks for one
  runs from then on in a process of its own (signal_process.py).
* An async function runs on the event loop. LoopWatch names the function in which the loop stands still.
"""

from __future__ import annotations

import asyncio
import dis
import inspect
import logging
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, TypeVar

from replay_client.errors import ReplayError
from replay_client.waits import in_daemon_thread
from replay_generator.user_code.signal_process import (
    FunctionFailedError,
    NotImportableError,
    SignalProcess,
    SignalRequests,
    at_once,
    signal_requests,
)
from replay_protos import event_loop

logger = logging.getLogger(__name__)

T = TypeVar("T")
Function = Callable[..., Any]
Call = tuple[Sequence[Any], Mapping[str, Any]]
"""The arguments of one call, and those by name."""

PACKAGE = Path(__file__).parents[1]
"""The folder of this package: lines of its files are not the user's."""
STOOD_STILL = 5.0
"""Seconds after which LoopWatch says that the event loop stands still."""
_LOOKS = 5
"""How often LoopWatch must find the loop standing still, one look after the other."""
_calling: ContextVar[Function | None] = ContextVar("_calling", default=None)
"""The function of the user that runs in this context; None: there is none."""
MOST_LEFT = 8
"""Threads of one function that have not ended, and that nobody waits for any more. No further one is started."""
_left: dict[int, set[_Thread]] = {}
"""Such threads, by the id of their function, which they hold."""
_left_lock = threading.Lock()
_processes: dict[int, tuple[Function, SignalProcess]] = {}
"""By the id of the function, which is held here too: the process that calls it."""
_processes_lock = threading.Lock()


class UserCodeError(ReplayError):
    """A function of the user's own wanted to end the process, or failed in a process of its own."""

    def __init__(self, function: str, how: str, place: str) -> None:
        """`function` has this name. `how` it failed, such as "raised SystemExit: 0". `place`: its file and line, in
        brackets."""
        super().__init__(f"function {function!r} {how}{place}")
        self.how = how
        self.place = place


class UserCodeValueError(UserCodeError, ValueError):
    """A function raised a ValueError in a process of its own."""


# ------------------------------------------------------------------------------------------------ calls


def is_async(function: Function) -> bool:
    """Whether a call of `function` returns a coroutine, which runs on the event loop."""
    called = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


async def call(function: Function, *args: Any, **options: Any) -> Any:
    """The result of one call. An async function runs on the event loop, any other one in a thread."""
    if is_async(function):
        result = _begin(function, args, options)
    else:
        results = await _call_plain(function, [(args, options)])
        result = results[0]
    return await _resolved(function, result)


async def call_each(function: Function, calls: Sequence[Call]) -> list[Any]:
    """The results of several calls, in order.

    An async function makes all calls at once, any other one makes them one after the other in one thread. Raises what
    the function raises, and UserCodeError.
    """
    if is_async(function):
        results = [_begin(function, args, options) for args, options in calls]
    else:
        results = await _call_plain(function, calls)
    return await asyncio.gather(*(_resolved(function, result) for result in results))


def call_here(function: Function, *args: Any, **options: Any) -> Any:
    """The result of a call in this thread: of a function that is fast, or whose result is awaited by `awaited`."""
    return _begin(function, args, options)


def call_plain(function: Function, *args: Any) -> Any:
    """As `call_here`, of a function whose result nobody awaits. Raises UserCodeError if it is async."""
    result = call_here(function, *args)
    if inspect.iscoroutine(result):
        result.close()
        how = "is async, and here nobody awaits it: write it without async"
        raise UserCodeError(name_of(function), how, where(function))
    return result


def decision_of(function: Function, *args: Any) -> bool:
    """What a function decides. Raises UserCodeError if its result is neither true nor false, as an array of two."""
    result = call_plain(function, *args)
    try:
        return bool(call_here(bool, result))
    except Exception as error:
        how = f"returned {shown(result)}, which is neither true nor false: {in_words(error)}"
        raise UserCodeError(name_of(function), how, where(function)) from error


async def awaited(function: Function, result: Awaitable[T]) -> T:
    """The result of a call of an async function."""
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)
    token = _calling.set(function)
    try:
        with _Guard(function):
            return await result
    finally:
        _calling.reset(token)


@asynccontextmanager
async def entered(hook: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """The context of the user's own object, which is entered and left as by `async with`."""
    kind = type(hook)
    inside = await awaited(kind.__aenter__, kind.__aenter__(hook))
    try:
        yield inside
    except BaseException as error:
        if not await awaited(kind.__aexit__, kind.__aexit__(hook, type(error), error, error.__traceback__)):
            raise
    else:
        await awaited(kind.__aexit__, kind.__aexit__(hook, None, None, None))


def run(main: Coroutine[Any, Any, T]) -> T:
    """The result of `main`, in which users' code runs, for callers without an event loop.

    A callback that users' code gave to the event loop runs outside of all guards. What it raises to end the process
    ends the loop, and is a UserCodeError here.
    """
    try:
        return event_loop.run(main)
    except (SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and not _is_raised_by_a_line(error):
            raise
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_pythons(frame.filename)]
        users = [frame for frame in frames if not _is_ours(frame.filename)]
        place = own_line(users) if users else ""
        raise UserCodeError("a callback of the event loop", f"raised {in_words(error)}", place) from error


def name_of(function: Function) -> str:
    """The name of a function, or that of the class of an object that can be called."""
    return getattr(function, "__name__", type(function).__name__)


def in_words(error: BaseException) -> str:
    """What a function raised: its type and its message; of a group of errors, those of the first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, UserCodeError):
        return error.how.removeprefix("raised ")
    return f"{type(error).__name__}: {_message_of(error)}"


def shown(value: Any, most: int = 200) -> str:
    """What a value of the user's looks like, in at most so many characters. Never fails, whatever its class does."""
    try:
        text = str(call_here(repr, value))
    except Exception:
        text = object.__repr__(value)
    return text[:most]


def _message_of(error: BaseException) -> str:
    try:
        return str(call_here(str, error))
    except Exception as other:
        return f"(its message cannot be shown: {type(other).__name__})"


def where(function: Function, error: BaseException | None = None) -> str:
    """The line of the user's file from which an error came, in brackets; else the line where the function begins."""
    frames = list(traceback.extract_tb(error.__traceback__)) if error is not None else []
    calls = [index for index, frame in enumerate(frames) if frame.filename == __file__]
    users = [frame for frame in frames[max(calls) :] if not _is_ours(frame.filename)] if calls else []
    if users:
        return own_line(users)
    code = _code_of(function)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code is not None else ""


def own_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """The last line of the file that was called first. The error may be in a library, but this line is its user's."""
    last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f" ({last.filename}, line {last.lineno})"


def _is_ours(filename: str) -> bool:
    return PACKAGE in Path(filename).parents


def _is_pythons(filename: str) -> bool:
    """Whether a line is one of an event loop, or one that Python keeps inside itself, such as those of `exit`."""
    path = Path(filename)
    of_the_loop = {Path(asyncio.__file__).parent, Path(event_loop.__file__).parent}
    return path.parent in of_the_loop or not path.is_file()


def _code_of(function: Function) -> CodeType | None:
    plain: Any = inspect.unwrap(function)
    while isinstance(plain, partial):
        plain = plain.func
    if not hasattr(plain, "__code__"):
        plain = type(plain).__call__  # an object that can be called
    return getattr(plain, "__code__", None)


def _begin(function: Function, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """What the function returns. An iterator, such as a generator, runs code of the user too: it is a list here."""
    with _Guard(function):
        return at_once(function(*args, **options))


async def _resolved(function: Function, result: Any) -> Any:
    return await awaited(function, result) if inspect.isawaitable(result) else result


# ------------------------------------------------------------------------------------------------ what is raised


class _Guard:
    """Surrounds users' code: what it raises to end the process becomes a UserCodeError."""

    def __init__(self, function: Function, *, of_a_task: bool = False) -> None:
        """`of_a_task`: whether it surrounds a step of a task that users' code has started. A CancelledError ends this
        task alone: aiohttp's server ends those of its connections so, by cancelling what they wait for."""
        self._function = function
        self._of_a_task = of_a_task

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, Exception) or _passes(error):
            return
        if self._of_a_task and isinstance(error, asyncio.CancelledError):
            return
        how = f"raised {in_words(error)}"
        failure = UserCodeError(name_of(self._function), how, where(self._function, error))
        raise failure.with_traceback(trace) from error


def _passes(error: BaseException) -> bool:
    """Whether Python or this program raised it inside users' code, and not that code."""
    if isinstance(error, asyncio.CancelledError):
        return _is_cancelled()
    if isinstance(error, KeyboardInterrupt | GeneratorExit) and threading.current_thread() is threading.main_thread():
        # Ctrl-C, or the end of a coroutine, comes between two steps of any line; other ones are raised by a line.
        return not _is_raised_by_a_line(error)
    return False


def _is_cancelled() -> bool:
    """Whether somebody has cancelled the task of this code."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop, which nobody can cancel
        return False
    return task is None or task.cancelling() > 0


def _is_raised_by_a_line(error: BaseException) -> bool:
    """Whether the error began at a statement `raise`."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """A task. Those that users' code starts are guarded too: a SystemExit of theirs would end the event loop."""
    function = _calling.get()
    if function is not None:
        coroutine = _GuardedCoroutine(function, coroutine)
    return asyncio.Task(coroutine, loop=loop, **options)


class _GuardedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine with a guard around each of its steps."""

    def __init__(self, function: Function, inner: Any) -> None:
        self._function = function
        self._inner = inner

    def send(self, value: Any) -> Any:
        with _Guard(self._function, of_a_task=True):
            return self._inner.send(value)

    def throw(self, *error: Any) -> Any:
        with _Guard(self._function, of_a_task=True):
            return self._inner.throw(*error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return self._inner.__await__()


# ------------------------------------------------------------------------------------------------ threads and signals


async def _call_plain(function: Function, calls: Sequence[Call]) -> list[Any]:
    """The results of a function without async, of a thread or of a process whose main thread it has."""
    _, process = _processes.get(id(function), (None, None))
    if process is None:
        results, requests = await _in_thread(function, calls)
        if not requests:
            return list(results)
        process = _move(function, requests)
    try:
        return await process.call_each(calls)
    except NotImportableError as error:
        how = (
            f"asks for a signal ({process.requests}), which Python gives to the main thread of a process alone, and "
            f"{error}"
        )
        raise UserCodeError(name_of(function), how, where(function)) from None
    except FunctionFailedError as error:
        kind = UserCodeValueError if error.is_value_error else UserCodeError
        raise kind(name_of(function), str(error), error.place or where(function)) from None


class _Thread:
    """Calls of a function in a thread, which may last longer than anybody waits for them."""

    def __init__(self, function: Function, calls: Sequence[Call]) -> None:
        self._function = function
        self._calls = calls
        self._has_ended = False

    def run(self) -> tuple[list[Any], SignalRequests]:
        """What `_call_in_thread` returns."""
        threading.current_thread().name = f"replay-{name_of(self._function)}"
        try:
            return _call_in_thread(self._function, self._calls)
        finally:
            self._end()

    def _end(self) -> None:
        key = id(self._function)
        with _left_lock:
            self._has_ended = True
            others = _left.get(key, set())
            others.discard(self)
            if not others:
                _left.pop(key, None)

    def leave(self) -> None:
        """Nobody waits for it any more. Says so, unless it has ended."""
        with _left_lock:
            if self._has_ended:
                return
            threads = _left.setdefault(id(self._function), set())
            threads.add(self)
            count = len(threads)
        logger.warning(
            "function %r goes on in its thread, for which nobody waits any more: %d such threads, of at most %d%s",
            name_of(self._function),
            count,
            MOST_LEFT,
            where(self._function),
        )


def threads_left() -> int:
    """Threads of all functions that have not ended, and that nobody waits for any more."""
    with _left_lock:
        return sum(map(len, _left.values()))


async def _in_thread(function: Function, calls: Sequence[Call]) -> tuple[list[Any], SignalRequests]:
    """What `_call_in_thread` returns. Raises UserCodeError if too many threads of this function have not ended."""
    with _left_lock:
        count = len(_left.get(id(function), ()))
    if count >= MOST_LEFT:
        how = f"has {count} threads that do not end, so no further one is started: give its requests a timeout"
        raise UserCodeError(name_of(function), how, where(function))
    thread = _Thread(function, calls)
    try:
        found: tuple[list[Any], SignalRequests] = await in_daemon_thread(thread.run)
        return found
    except asyncio.CancelledError:
        thread.leave()
        raise


def _call_in_thread(function: Function, calls: Sequence[Call]) -> tuple[list[Any], SignalRequests]:
    """The results, and the requests for signals; if there are any, the results count for nothing."""
    results: list[Any] = []
    with signal_requests() as requests:
        try:
            for args, options in calls:
                results.append(_begin(function, args, options))
                if requests:
                    break
        except Exception:
            if not requests:
                raise
    return results, requests


def _move(function: Function, requests: SignalRequests) -> SignalProcess:
    """The process that calls this function from now on."""
    with _processes_lock:
        if id(function) in _processes:
            return _processes[id(function)][1]
        process = SignalProcess(function, ", ".join(dict.fromkeys(requests)))
        _processes[id(function)] = function, process
    logger.warning(
        "function %r asks for a signal (%s), which Python gives to the main thread of a process alone: it runs in a "
        "process of its own from now on, and is called there again (said once)%s",
        name_of(function),
        process.requests,
        where(function),
    )
    return process


# ------------------------------------------------------------------------------------------------ the event loop


class LoopWatch:
    """Names in the log the function in which the running event loop stands still."""

    def __init__(self, seconds: float = STOOD_STILL) -> None:
        """`seconds` without one turn of the loop are worth a line."""
        self._look = seconds / _LOOKS
        self._seconds = seconds
        self._ended = threading.Event()

    def __enter__(self) -> LoopWatch:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        threading.Thread(target=self._watch, name="replay-loop-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._look):
            turned = threading.Event()
            try:
                self._loop.call_soon_threadsafe(turned.set)
            except RuntimeError:  # the loop is closed
                return
            # Looks are counted, and no seconds: a machine that slept, or a busy one, held up this thread too.
            for look in range(1, sys.maxsize):
                if turned.wait(self._look) or self._ended.is_set():
                    break
                if look == _LOOKS:
                    self._say()

    def _say(self) -> None:
        frame = sys._current_frames().get(self._thread)
        frames = [] if frame is None else list(traceback.extract_stack(frame))
        start = max((index for index, each in enumerate(frames) if each.filename == __file__), default=-1) + 1
        if 0 < start < len(frames):
            place = f"in function {frames[start].name!r}{own_line(frames[start:])}"
        elif frames:
            place = f"in {frames[-1].name!r} ({frames[-1].filename}, line {frames[-1].lineno})"
        else:
            place = "in a thread that has ended"
        logger.warning(
            "the event loop stands still for %g s now, %s: no lease is renewed meanwhile, and nothing else goes on. "
            "Let an async function await what it waits for, or write it without async: then it runs in a thread",
            self._seconds,
            place,
        )


__all__ = [
    "LoopWatch",
    "UserCodeError",
    "UserCodeValueError",
    "awaited",
    "call",
    "call_each",
    "call_here",
    "call_plain",
    "decision_of",
    "entered",
    "in_words",
    "is_async",
    "name_of",
    "own_line",
    "run",
    "shown",
    "threads_left",
    "where",
]
