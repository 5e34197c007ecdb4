"""Calls: calls the functions of users, such as rewards, stages, hooks, tools, agents and priorities.

All calls of users' functions go through this module. Such a function may fail in any way, but it cannot end the
process, and every failure is reported:

* Three exceptions of a user's function would end the process or a task of this package: SystemExit, a
  KeyboardInterrupt from a `raise` in the function, and a CancelledError although nobody cancelled the call. These
  exceptions become a UserCodeError, which names function, file and line. Ctrl-C and the cancellation of the caller are
  raised unchanged.
* A function without async runs in a thread. Only the main thread of a process can handle signals. Therefore a function
  that asks for a signal runs in a process of its own from then on (signal_process.py).
* An async function runs on the event loop. If the function blocks the loop, LoopWatch logs the name of the function.
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
"""The positional arguments and the keyword arguments of one call."""

PACKAGE = Path(__file__).parents[1]
"""The folder of this package. Code in files outside of this folder may be the user's."""
STOOD_STILL = 5.0
"""Seconds for which the event loop is blocked before LoopWatch logs a warning."""
_LOOKS = 5
"""The number of times that LoopWatch finds the event loop blocked before it logs a warning."""
_calling: ContextVar[Function | None] = ContextVar("_calling", default=None)
"""The user's function that runs in this context; None: no user's function runs here."""
MOST_LEFT = 8
"""The most abandoned threads of one function: threads that still run, but that nobody waits for any more. A function
with so many abandoned threads is not called in another thread."""
_abandoned: dict[int, set[_Thread]] = {}
"""The abandoned threads, by the `id` of their function. A thread holds a reference to its function, so that no other
function gets this id."""
_abandoned_lock = threading.Lock()
"""Held while `_abandoned` is read or changed."""
_processes: dict[int, tuple[Function, SignalProcess]] = {}
"""The `id` of each function that runs in a process of its own -> the function and its process. The reference to the
function keeps other functions from getting this id."""
_processes_lock = threading.Lock()
"""Held while `_processes` is changed."""


class UserCodeError(ReplayError):
    """A function of the user tried to end the process, cannot be called in the way that is needed, or failed in a
    process of its own."""

    def __init__(self, function: str, how: str, place: str) -> None:
        """`function`: the name of the function. `how`: the failure, such as "raised SystemExit: 0". `place`: file and
        line, in brackets."""
        super().__init__(f"function {function!r} {how}{place}")
        self.how = how
        self.place = place


class UserCodeValueError(UserCodeError, ValueError):
    """A function raised a ValueError in a process of its own."""


# ------------------------------------------------------------------------------------------------ calls


def is_async(function: Function) -> bool:
    """True if a call of `function` returns a coroutine, which runs on the event loop."""
    # A callable object is async if its method `__call__` is.
    method = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


async def call(function: Function, *args: Any, **options: Any) -> Any:
    """Calls `function`, and returns its result. An async function runs on the event loop, and any other function in a
    thread. Raises the errors of the function, and UserCodeError."""
    if is_async(function):
        result = _begin(function, args, options)
    else:
        results = await _call_outside_of_loop(function, [(args, options)])
        result = results[0]
    return await _resolved(function, result)


async def call_each(function: Function, calls: Sequence[Call]) -> list[Any]:
    """Calls `function` several times, and returns the results in the order of the calls.

    All calls of an async function run at the same time. The calls of any other function run one after the other, in one
    thread. Raises the errors of the function, and UserCodeError.
    """
    if is_async(function):
        results = [_begin(function, args, options) for args, options in calls]
    else:
        results = await _call_outside_of_loop(function, calls)
    return await asyncio.gather(*(_resolved(function, result) for result in results))


def call_here(function: Function, *args: Any, **options: Any) -> Any:
    """Calls `function` in this thread, and returns its result. The result of an async function is a coroutine.

    Use `call_here` for fast functions, and to get a coroutine for `awaited`.
    """
    return _begin(function, args, options)


def call_plain(function: Function, *args: Any) -> Any:
    """Calls a function without async in this thread, and returns its result. Raises UserCodeError if the function is
    async."""
    result = call_here(function, *args)
    if inspect.iscoroutine(result):
        result.close()  # otherwise Python warns that nobody awaited the coroutine
        how = "is async, and here nobody awaits it: write it without async"
        raise UserCodeError(name_of(function), how, where(function))
    return result


def decision_of(function: Function, *args: Any) -> bool:
    """Calls a function in this thread, and returns its result as a bool. Raises UserCodeError for a result that is
    neither true nor false, such as an array with two elements."""
    result = call_plain(function, *args)
    try:
        return bool(call_here(bool, result))  # `bool` may call a method of the user, so it needs a guard
    except Exception as error:
        how = f"returned {shown(result)}, which is neither true nor false: {in_words(error)}"
        raise UserCodeError(name_of(function), how, where(function)) from error


async def awaited(function: Function, result: Awaitable[T]) -> T:
    """Awaits `result`, which a call of `function` has returned, and returns its value. Tasks that `function` starts are
    guarded too, unless the event loop has a task factory of the user."""
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:  # from now on, `_make_task` makes all tasks of this loop
        loop.set_task_factory(_make_task)
    token = _calling.set(function)  # tasks that `function` starts inherit this value, and `_make_task` reads it there
    try:
        with _Guard(function):
            return await result
    finally:
        _calling.reset(token)


@asynccontextmanager
async def entered(hook: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Enters and leaves an async context manager of the user, as `async with` does, with a guard around both steps.
    Yields the value of `__aenter__`."""
    hook_class = type(hook)  # both methods are looked up in the class, as `async with` does
    value = await awaited(hook_class.__aenter__, hook_class.__aenter__(hook))
    try:
        yield value
    except BaseException as error:
        leaving = hook_class.__aexit__(hook, type(error), error, error.__traceback__)
        is_suppressed = await awaited(hook_class.__aexit__, leaving)
        if not is_suppressed:
            raise
    else:
        leaving = hook_class.__aexit__(hook, None, None, None)
        await awaited(hook_class.__aexit__, leaving)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs the coroutine `main`, in which users' code is called, and returns its result. For callers without an event
    loop.

    Users' code may give the event loop a callback, for example by `call_later`. The loop calls this callback without a
    guard. If the callback raises SystemExit or KeyboardInterrupt, the loop ends, and this function raises
    UserCodeError.
    """
    try:
        return event_loop.run(main)
    except (SystemExit, KeyboardInterrupt) as error:
        # If guarded users' code raises such an error, it becomes a UserCodeError. So this error comes from Ctrl-C or
        # from a callback.
        is_ctrl_c = isinstance(error, KeyboardInterrupt) and not _is_from_raise_statement(error)
        if is_ctrl_c:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        users_frames = []  # the frames of the callback
        for frame in frames:
            if not _is_of_loop_or_no_file(frame.filename) and not _is_ours(frame.filename):
                users_frames.append(frame)
        place = own_line(users_frames) if users_frames else ""
        raise UserCodeError("a callback of the event loop", f"raised {in_words(error)}", place) from error


def name_of(function: Function) -> str:
    """The name of a function. For a callable object without a name: the name of its class."""
    return getattr(function, "__name__", type(function).__name__)


def in_words(error: BaseException) -> str:
    """The type and the message of an error. For a group of errors: type and message of the first error in the group.
    For a UserCodeError: the failure that it describes, without function and line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, UserCodeError):
        return error.how.removeprefix("raised ")
    return f"{type(error).__name__}: {_message_of(error)}"


def shown(value: Any, most: int = 200) -> str:
    """The first `most` characters of the `repr` of a user's value. If the value's own `repr` fails: object's `repr`."""
    try:
        text = str(call_here(repr, value))
    except Exception:
        text = object.__repr__(value)
    return text[:most]


def _message_of(error: BaseException) -> str:
    """The message of an error. The class of the error may be the user's, so making the message may fail. In this case,
    returns a text that says so."""
    try:
        return str(call_here(str, error))
    except Exception as other:
        return f"(its message cannot be shown: {type(other).__name__})"


def where(function: Function, error: BaseException | None = None) -> str:
    """The line of users' code from which `error` came, as file and line in brackets. Without an error, or if there is
    no such line: the line at which the function begins; "" if the function has no source."""
    users_frames = [] if error is None else _users_frames(error)
    if users_frames:
        return own_line(users_frames)
    code = _code_of(function)
    if code is None:
        return ""
    return f" ({code.co_filename}, line {code.co_firstlineno})"


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of users' code in the traceback of an error, after the last frame of this file. Empty: the traceback
    has no such frame."""
    frames = list(traceback.extract_tb(error.__traceback__))
    indices_of_this_file = [index for index, frame in enumerate(frames) if frame.filename == __file__]
    if not indices_of_this_file:
        return []
    later_frames = frames[indices_of_this_file[-1] + 1 :]
    return [frame for frame in later_frames if not _is_ours(frame.filename)]


def own_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """The last line in the file of the first frame, as file and line in brackets. `frames`: at least one.

    The first frame is the user's. Therefore the line is the user's even if a library that the user called has failed.
    """
    users_file = frames[0].filename
    last = [frame for frame in frames if frame.filename == users_file][-1]
    return f" ({last.filename}, line {last.lineno})"


def _is_ours(filename: str) -> bool:
    """True for a file of the package replay_generator."""
    return PACKAGE in Path(filename).parents


def _is_of_loop_or_no_file(filename: str) -> bool:
    """True if the code of an event loop may be in this file, or if there is no such file, as for built-in modules."""
    path = Path(filename)
    loop_folders = {Path(asyncio.__file__).parent, Path(event_loop.__file__).parent}
    return path.parent in loop_folders or not path.is_file()


def _code_of(function: Function) -> CodeType | None:
    """The code of a function, without its decorators and bound arguments; None: the function has no Python code."""
    plain: Any = inspect.unwrap(function)
    while isinstance(plain, partial):
        plain = plain.func
    if not hasattr(plain, "__code__"):
        plain = type(plain).__call__  # a callable object
    return getattr(plain, "__code__", None)


def _begin(function: Function, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Calls `function` under a guard, and returns its result. The result of an async function is a coroutine.

    If the result is an iterator, such as a generator, the list of its values is returned instead. The iterator itself
    would run users' code later, without a guard.
    """
    with _Guard(function):
        return at_once(function(*args, **options))


async def _resolved(function: Function, result: Any) -> Any:
    """The value of the result of a call: awaits the result if it is awaitable, and otherwise returns it unchanged."""
    if inspect.isawaitable(result):
        return await awaited(function, result)
    return result


# ------------------------------------------------------------------------------------------------ what is raised


class _Guard:
    """A context around users' code. It turns an exception that would end the process or a task of this package into a
    UserCodeError."""

    def __init__(self, function: Function, *, of_a_task: bool = False) -> None:
        """`of_a_task`: True if the guard surrounds a step of a task that users' code has started. Such a guard raises a
        CancelledError unchanged, because the error ends only this task. For example, aiohttp's server ends its tasks by
        cancelling the futures for which the tasks wait."""
        self._function = function
        self._of_a_task = of_a_task

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Raises UserCodeError in the place of an exception that would end the process or a task of this package. An
        ordinary Exception is the failure of one call, and is raised unchanged."""
        # After a `return` of this method, Python raises the error unchanged, if there is one.
        if error is None or isinstance(error, Exception):
            return
        if not _is_from_users_code(error):
            return
        if self._of_a_task and isinstance(error, asyncio.CancelledError):
            return
        how = f"raised {in_words(error)}"
        failure = UserCodeError(name_of(self._function), how, where(self._function, error))
        raise failure.with_traceback(trace) from error


def _is_from_users_code(error: BaseException) -> bool:
    """True if users' code raised the error. False: Python or this program raised it while users' code ran."""
    if isinstance(error, asyncio.CancelledError):
        return not _is_cancelled()
    if isinstance(error, KeyboardInterrupt | GeneratorExit) and threading.current_thread() is threading.main_thread():
        # In the main thread, Python raises KeyboardInterrupt for Ctrl-C, and GeneratorExit when a coroutine is closed.
        # Then the traceback does not end at a `raise` statement. Users' code can raise these errors only by such a
        # statement.
        return _is_from_raise_statement(error)
    return True


def _is_cancelled() -> bool:
    """True if the current task was cancelled. Also True in a callback of the event loop, because callbacks run outside
    of a task, where nobody can tell."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # this thread has no event loop, so nobody can cancel what it does
        return False
    return task is None or task.cancelling() > 0


def _is_from_raise_statement(error: BaseException) -> bool:
    """True if a `raise` statement raised the error."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:  # go to the frame that raised the error
        trace = trace.tb_next
    instructions = trace.tb_frame.f_code.co_code
    last_instruction = instructions[trace.tb_lasti]  # the one that ran last, and so raised the error
    return dis.opname[last_instruction] == "RAISE_VARARGS"  # the name of the instruction of a `raise` statement


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Makes a new task. The event loop calls this function for every task. A task that users' code starts gets a guard,
    because a SystemExit in the task would end the event loop."""
    function = _calling.get()  # the user's function that starts the task; None: this package starts it
    if function is not None:
        coroutine = _GuardedCoroutine(function, coroutine)
    return asyncio.Task(coroutine, loop=loop, **options)


class _GuardedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine that runs each step of another coroutine, `inner`, under a guard.

    asyncio.Task calls `send` for a step, and `throw` for a step that begins with an exception.
    """

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


async def _call_outside_of_loop(function: Function, calls: Sequence[Call]) -> list[Any]:
    """Calls a function without async several times, and returns the results.

    The calls run in a thread, or in a process of their own if the function has asked for a signal. Raises the errors of
    the function, and UserCodeError.
    """
    _, process = _processes.get(id(function), (None, None))  # None: the function runs in threads
    if process is None:
        results, requests = await _in_thread(function, calls)
        if not requests:
            return list(results)
        # Each request for a signal was refused, so these results may be wrong. The process repeats all calls.
        process = _move_to_process(function, requests)
    try:
        return await process.call_each(calls)
    except NotImportableError as error:
        how = (
            f"asks for a signal ({process.requests}), which Python gives to the main thread of a process alone, and "
            f"{error}"
        )
        raise UserCodeError(name_of(function), how, where(function)) from None
    except FunctionFailedError as error:
        error_class = UserCodeValueError if error.is_value_error else UserCodeError
        place = error.place or where(function)
        raise error_class(name_of(function), str(error), place) from None


class _Thread:
    """A thread that calls a function several times. It may still run when nobody waits for the results any more."""

    def __init__(self, function: Function, calls: Sequence[Call]) -> None:
        self._function = function
        self._calls = calls
        self._has_ended = False
        """True once the calls have ended, with or without an error."""

    def run(self) -> tuple[list[Any], SignalRequests]:
        """Makes the calls, in the new thread. Returns their results, and the requests for signals."""
        threading.current_thread().name = f"replay-{name_of(self._function)}"
        try:
            return _call_in_thread(self._function, self._calls)
        finally:
            self._note_end()

    def _note_end(self) -> None:
        """Notes that the thread ends, so that it no longer counts as an abandoned thread."""
        key = id(self._function)
        with _abandoned_lock:
            self._has_ended = True  # from now on, `abandon` does nothing
            threads = _abandoned.get(key, set())  # this thread may be one of them
            threads.discard(self)
            if not threads:
                _abandoned.pop(key, None)

    def abandon(self) -> None:
        """Notes and logs that nobody waits for the thread any more. Does nothing if the thread has ended."""
        with _abandoned_lock:
            if self._has_ended:
                return
            threads = _abandoned.setdefault(id(self._function), set())
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
    """The number of abandoned threads of all functions: they still run, but nobody waits for them any more."""
    with _abandoned_lock:
        return sum(len(threads) for threads in _abandoned.values())


async def _in_thread(function: Function, calls: Sequence[Call]) -> tuple[list[Any], SignalRequests]:
    """Makes the calls in a new thread. Returns their results and the requests for signals. If there are requests, the
    results must not be used. Raises the errors of the function, and UserCodeError if the function has too many
    abandoned threads."""
    with _abandoned_lock:
        count = len(_abandoned.get(id(function), ()))
    if count >= MOST_LEFT:
        how = f"has {count} threads that do not end, so no further one is started: give its requests a timeout"
        raise UserCodeError(name_of(function), how, where(function))
    thread = _Thread(function, calls)
    try:
        result: tuple[list[Any], SignalRequests] = await in_daemon_thread(thread.run)
        return result
    except asyncio.CancelledError:  # a thread cannot be ended from outside, so it goes on without a caller
        thread.abandon()
        raise


def _call_in_thread(function: Function, calls: Sequence[Call]) -> tuple[list[Any], SignalRequests]:
    """Makes the calls in this thread. Returns their results and the requests for signals.

    If there are requests, the results must not be used, because they may be wrong and some may be missing. If there are
    no requests, raises the errors of the function.
    """
    results: list[Any] = []
    with signal_requests() as requests:
        try:
            for args, options in calls:
                results.append(_begin(function, args, options))
                if requests:  # a process repeats all calls, so the rest need not be made here
                    break
        except Exception:
            if not requests:  # if there are requests, the function has probably failed because one was refused
                raise
    return results, requests


def _move_to_process(function: Function, requests: SignalRequests) -> SignalProcess:
    """Makes and returns the process that calls this function from now on. `requests`: the calls with which the function
    asked for signals."""
    with _processes_lock:
        # Calls of the function that run at the same time all come here. The first one makes the process, and the others
        # use it.
        if id(function) in _processes:
            _, process = _processes[id(function)]
            return process
        distinct_requests = dict.fromkeys(requests)
        process = SignalProcess(function, ", ".join(distinct_requests))
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
    """A context that watches the running event loop. If the loop is blocked for some seconds, a warning in the log
    names the function that blocks the loop."""

    def __init__(self, seconds: float = STOOD_STILL) -> None:
        """`seconds`: the time for which the loop is blocked before the warning is logged."""
        self._look_seconds = seconds / _LOOKS
        """Seconds between two looks at the loop."""
        self._seconds = seconds
        self._ended = threading.Event()
        """Set when the context is left."""

    def __enter__(self) -> LoopWatch:
        """Starts the thread that watches the running event loop of this thread."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        """The id of the thread in which the event loop runs."""
        threading.Thread(target=self._watch, name="replay-loop-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        """Watches the loop, in a thread of its own, until the context is left."""
        while not self._ended.wait(self._look_seconds):
            has_turned = threading.Event()  # set when the loop has run its callbacks once
            try:
                self._loop.call_soon_threadsafe(has_turned.set)  # a loop that is not blocked sets the event soon
            except RuntimeError:  # the loop is closed
                return
            # Count the looks that find the loop blocked. Seconds are no measure: if the machine sleeps or is busy, this
            # thread is delayed like the loop, but then it also looks less often. The counting goes on after the
            # warning, until the loop turns, so that one warning is logged for each time that the loop is blocked.
            looks = 0
            while not has_turned.wait(self._look_seconds) and not self._ended.is_set():
                looks += 1
                if looks == _LOOKS:
                    self._log_where_blocked()

    def _log_where_blocked(self) -> None:
        """Logs the place at which the loop is blocked.

        The place is in the user's function that this file called last in the thread of the loop. If this file has
        called no user's function there, the place is the innermost frame of the thread.
        """
        frame = sys._current_frames().get(self._thread)
        frames: list[traceback.FrameSummary] = []
        if frame is not None:
            frames = list(traceback.extract_stack(frame))
        # The index of the frame of the user's function that this file called last. 0: this file has called no user's
        # function. `run` calls the event loop itself, and no user's function.
        start = 0
        for index, summary in enumerate(frames):
            if summary.filename == __file__ and summary.name != run.__name__:
                start = index + 1
        if 0 < start < len(frames):
            place = f"in function {frames[start].name!r}{own_line(frames[start:])}"
        elif frames:  # no user's function runs, so the innermost frame is named
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
