"""SignalProcess: a process that calls one function in its main thread, because that function asks for signals.

    thread of a function ──asks for a signal──▶ `signal_requests` notes it ──▶ SignalProcess calls it from then on

Python gives signals to the main thread of a process alone. Graders set alarms against answers that take for ever
(math-verify does), and many take the ValueError of another thread for a wrong answer. So what a function asks for is
noted, whatever it makes of the error.

The process is a child of this one, started by `spawn`, and both speak through a pipe of their own.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module behind `signal` has no stub
import atexit
import functools
import multiprocessing
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from replay_client.waits import in_daemon_thread

SignalRequests = list[str]
"""What a function asked for, in order, such as "signal.signal(SIGALRM)"."""
_CALLS = ("signal", "alarm", "setitimer", "set_wakeup_fd")
"""The functions of `signal` that only work, or only make sense, in the main thread."""
_REFUSAL = "signal only works in main thread of the main interpreter"
"""As Python says it."""
_noting = threading.local()
_patch_lock = threading.Lock()
_patched: list[tuple[Any, str, Any]] = []
_calls_under_way = 0


class NotImportableError(Exception):
    """No other process can take this function, or the arguments of its call."""


class FunctionFailedError(Exception):
    """The function raised, or its process ended. The message says so, without the function's name."""

    def __init__(self, message: str, place: str = "", *, is_value_error: bool = False) -> None:
        """`place`: the line of the function's file, in brackets."""
        super().__init__(message)
        self.place = place
        self.is_value_error = is_value_error


# ------------------------------------------------------------------------------------------------ requests


@contextmanager
def signal_requests() -> Iterator[SignalRequests]:
    """Notes what the code of the block asks of `signal` in this thread, and refuses it as Python does."""
    requests: SignalRequests = []
    if threading.current_thread() is threading.main_thread():
        yield requests
        return
    _patch()
    _noting.requests = requests
    try:
        yield requests
    finally:
        _noting.requests = None
        _unpatch()


def _patch() -> None:
    """Puts functions that note requests in the place of those of `signal`, until the last `_unpatch`."""
    global _calls_under_way
    with _patch_lock:
        _calls_under_way += 1
        if _patched:
            return
        for name in _CALLS:
            real = getattr(_signal, name)
            noted = _noted(name, real)
            # `signal.signal` is a function around that of `_signal`; the others are the same in both modules.
            for module in (_signal, signal):
                if getattr(module, name, None) is real:
                    _patched.append((module, name, real))
                    setattr(module, name, noted)


def _unpatch() -> None:
    global _calls_under_way
    with _patch_lock:
        _calls_under_way -= 1
        if _calls_under_way == 0:
            for module, name, real in _patched:
                setattr(module, name, real)
            _patched.clear()


def _noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def request(*args: Any, **options: Any) -> Any:
        requests = getattr(_noting, "requests", None)
        if requests is None:
            return real(*args, **options)
        about = ""
        if name == "signal" and args:
            about = _name_of_signal(args[0])
        requests.append(f"signal.{name}({about})")
        raise ValueError(_REFUSAL)

    return request


def _name_of_signal(number: Any) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


# ------------------------------------------------------------------------------------------------ the process


class SignalProcess:
    """Calls one function in the main thread of a process, one call after the other. It starts with the first call."""

    def __init__(self, function: Callable[..., Any], requests: str) -> None:
        """`requests`: the signals that it asks for, in words."""
        self.requests = requests
        self._function = function
        self._turn = threading.Lock()
        self._process: Any = None
        self._connection: Connection | None = None
        self._caller: object = None
        atexit.register(self.end)  # before multiprocessing waits for its children

    async def call_each(self, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> list[Any]:
        """The results of these calls. Raises NotImportableError and FunctionFailedError.

        If the caller gives up, the process ends: the function may hang. The next call starts another one.
        """
        given_up = threading.Event()
        try:
            results: list[Any] = await in_daemon_thread(functools.partial(self._ask, calls, given_up))
        finally:
            given_up.set()
            if self._caller is given_up:
                self.end()
        return results

    def end(self) -> None:
        """Kills the process, if there is one."""
        if self._process is not None:
            self._process.kill()

    def _ask(self, calls: Sequence[Any], given_up: threading.Event) -> list[Any]:
        with self._turn:
            if given_up.is_set():
                return []
            self._caller = given_up
            try:
                connection = self._connected()
                answer = self._answer_to(connection, list(calls))
            finally:
                self._caller = None
        kind, *values = answer
        if kind == "raised":
            message, place, is_value_error = values
            raise FunctionFailedError(message, place, is_value_error=is_value_error)
        results: list[Any] = values[0]
        return results

    def _connected(self) -> Connection:
        """The pipe to the process that has the function. Raises NotImportableError."""
        if self._connection is not None and self._process.is_alive():
            return self._connection
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name="replay-signals")
        self._process.start()
        theirs.close()
        try:
            said = self._answer_to(ours, self._function)
        except NotImportableError:
            self.end()
            raise
        if said is not None:
            self.end()
            raise NotImportableError(said)
        self._connection = ours
        return ours

    def _answer_to(self, connection: Connection, question: Any) -> Any:
        """Raises NotImportableError for what no other process can have, and FunctionFailedError if it ended."""
        try:
            connection.send(question)
            return connection.recv()
        except (EOFError, OSError):
            self._process.join()
            self._connection = None
            code = self._process.exitcode
            raise FunctionFailedError(f"ended the process that called it, with exit code {code}") from None
        except Exception as error:
            raise NotImportableError(f"{type(error).__name__}: {error}") from error


def _serve(connection: Connection) -> None:
    """What the process does: gets the function by name, and calls it until its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too, and its parent still waits for its answers
    try:
        function = connection.recv()
    except EOFError:
        return
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(None)
    while True:
        try:
            answer = _called(function, connection.recv())
        except (EOFError, OSError):
            return
        except Exception as error:  # it cannot import what the arguments need
            answer = _raised(error)
        try:
            connection.send(answer)
        except OSError:
            return
        except Exception as error:
            connection.send(_raised(error))


def _called(function: Callable[..., Any], calls: Sequence[Any]) -> tuple[Any, ...]:
    try:
        return "returned", [function(*args, **options) for args, options in calls]
    except BaseException as error:
        return _raised(error)


def _raised(error: BaseException) -> tuple[Any, ...]:
    return "raised", f"raised {type(error).__name__}: {error}", _line_of(error), isinstance(error, ValueError)


def _line_of(error: BaseException) -> str:
    """The last line of the function's own file, in brackets; "" if the call failed before it began."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    if not frames:
        return ""
    last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f" ({last.filename}, line {last.lineno})"


__all__ = ["FunctionFailedError", "NotImportableError", "SignalProcess", "SignalRequests", "signal_requests"]
