"""SignalProcess: a process that calls one function in its main thread, because that function asks for signals.

    a function asks for a signal in a thread ──▶ `signal_requests` notes this ──▶ SignalProcess calls the function

Only the main thread of a process can handle signals. Many graders, such as math-verify, set an alarm to end comparisons
that would take for ever. In any other thread, setting an alarm raises ValueError, and many graders then report a wrong
answer. Therefore this module notes that a function asks for a signal, whatever the function does with the error.

For this purpose the module replaces functions of `signal` when it is imported. Modules that are imported later, and say
`from signal import alarm`, get the replaced functions too. Outside of `signal_requests` the replaced functions do what
Python's own functions do.

The process of SignalProcess is a child of this process, and both communicate through a pair of sockets. The child
imports the module of the function. The child imports the file of the program only if the function is defined in this
file, because the file may start the work of the program when it is imported.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module behind `signal` has no stub
import ast
import atexit
import functools
import importlib
import multiprocessing.spawn
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from replay_client.waits import in_daemon_thread, stop_signals

SignalRequests = list[str]
"""The calls with which a function asked for signals, in order, such as "signal.signal(SIGALRM)"."""
_CALLS = ("signal", "alarm", "setitimer", "set_wakeup_fd")
"""The functions of `signal` that are replaced. These functions only work, or only make sense, in the main thread."""
_REFUSAL = "signal only works in main thread of the main interpreter"
"""The message of the ValueError that Python's own functions raise in another thread."""
_noting = threading.local()
"""The attribute `requests` is the list to which this thread adds its requests for signals; None or missing: the
requests of this thread are not noted."""
_PROGRAM = """
import sys
from multiprocessing.connection import Connection
from multiprocessing.spawn import prepare

connection = Connection(int(sys.argv[1]))
prepare(connection.recv())

from replay_generator.user_code.signal_process import serve

serve(connection)
"""
"""The program of the process. `prepare` sets the search path for imports and the working directory to those of the
parent, and imports the file of the program if the function is defined there."""


class NotImportableError(Exception):
    """The function, or the arguments of its call, cannot be sent to another process. The message says why, and what to
    do."""


class FunctionFailedError(Exception):
    """The function raised an error, or its process ended. The message has no subject: the caller puts the name of the
    function before it."""

    def __init__(self, message: str, place: str = "", *, is_value_error: bool = False) -> None:
        """`place`: file and line of the error, in brackets. `is_value_error`: True if the function raised a
        ValueError."""
        super().__init__(message)
        self.place = place
        self.is_value_error = is_value_error


# ------------------------------------------------------------------------------------------------ requests


@contextmanager
def signal_requests() -> Iterator[SignalRequests]:
    """Notes the requests for signals that the block makes in this thread. Each request raises ValueError, as Python
    does outside of the main thread."""
    requests: SignalRequests = []
    _noting.requests = requests
    try:
        yield requests
    finally:
        _noting.requests = None


def _note_requests() -> None:
    """Replaces the functions of `signal` in _CALLS by functions that note requests, until the process ends."""
    for name in _CALLS:
        real = getattr(_signal, name)
        noted = _noted(name, real)
        # `signal.signal` is a Python function that calls `_signal.signal`, so it need not be replaced. The other
        # functions are the same objects in both modules.
        for module in (_signal, signal):
            if getattr(module, name) is real:
                setattr(module, name, noted)


def _noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """A function that replaces `real` and notes requests. `name`: the name of `real` in `signal`."""

    @functools.wraps(real)
    def request(*args: Any, **options: Any) -> Any:
        """Calls `real`. Under `signal_requests`, notes the call and raises ValueError instead."""
        requests = getattr(_noting, "requests", None)
        # If the user's function forks a child process, this thread is the main thread of the child, and may ask for
        # signals.
        if requests is None or threading.current_thread() is threading.main_thread():
            return real(*args, **options)
        argument = ""
        if name == "signal" and args:
            argument = _name_of_signal(args[0])
        requests.append(f"signal.{name}({argument})")
        raise ValueError(_REFUSAL)

    return request


def _name_of_signal(number: Any) -> str:
    """The name of a signal, such as "SIGALRM". For a value that is no signal: the value as text."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


_note_requests()


# ------------------------------------------------------------------------------------------------ the function


def portable(function: Callable[..., Any]) -> bytes:
    """The function as bytes that another process can load: pickled, or else found by a name in a module. Raises
    NotImportableError if neither is possible."""
    try:
        return bytes(ForkingPickler.dumps(function))
    except Exception as error:  # pickling a user's object may raise anything
        place = _place_of(function)
        if place is None:
            raise NotImportableError(
                "no process of its own can import it by name: define it at the top of a module "
                f"({type(error).__name__}: {error})"
            ) from error
    return bytes(ForkingPickler.dumps(_ByName(*place)))


class _ByName:
    """Is pickled in the place of a value that pickle refuses, such as a lambda or a decorated function. Loading the
    bytes gives the value of a name in a module."""

    def __init__(self, module: str, name: str) -> None:
        self._place = (module, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _imported, self._place  # loading the bytes calls `_imported(*self._place)`


def _imported(module: str, name: str) -> Any:
    """The value of a name in a module."""
    return getattr(importlib.import_module(module), name)


def _place_of(function: Callable[..., Any]) -> tuple[str, str] | None:
    """The module that has the function as an attribute, and the name of this attribute; None: no module has it."""
    # The lists are copies: other threads may import modules, or change them, during the search.
    for module_name, module in list(sys.modules.items()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is function:
                return module_name, name
    return None


def _preparation(function: bytes) -> dict[str, Any]:
    """The data that the child needs before it can load the function, for `prepare`. `function`: the result of
    `portable`.

    Raises NotImportableError if the child would have to import a program that starts its work when it is imported.
    """
    prepared = multiprocessing.spawn.get_preparation_data("replay-signals")
    prepared.pop("authkey")  # only processes of multiprocessing need this key
    is_in_program = b"__main__" in function  # the bytes name the module of the function
    if not is_in_program:  # without these entries, `prepare` does not import the file of the program
        prepared.pop("init_main_from_name", None)
        prepared.pop("init_main_from_path", None)
    elif not _is_main_guarded():
        raise NotImportableError(
            "a process of its own that imports it from the file of the program would run that program again: define "
            'it in a module, or begin the work of the program with `if __name__ == "__main__":`'
        )
    return prepared


def _is_main_guarded() -> bool:
    """True if the file of the program starts its work only under `if __name__ == "__main__":`, and not when another
    process imports the file. Also true if there is no such file, as in an interactive session."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None:
        return True
    try:
        statements = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # nobody can tell, and running a program twice is the worse mistake
        return False
    tests = [statement.test for statement in statements if isinstance(statement, ast.If)]
    return any("__name__" in ast.unparse(test) for test in tests)


# ------------------------------------------------------------------------------------------------ the process


class SignalProcess:
    """Calls one function in the main thread of a process, one call after the other. The process starts with the first
    call."""

    def __init__(self, function: Callable[..., Any], requests: str) -> None:
        """`requests`: the calls with which the function asked for signals, as text."""
        self.requests = requests
        self._function = function
        self._turn = threading.Lock()
        """Held by the thread of the caller whose calls the process makes now. Other callers wait for this lock."""
        self._process: subprocess.Popen[bytes] | None = None
        """The process that was started last; None: no process was started yet."""
        self._connection: Connection | None = None
        """The connection to a process that has loaded the function; None: there is no such process."""
        self._caller: object = None
        """The event `caller_is_done` of the caller whose calls the process makes now; None: the process waits."""
        atexit.register(self.end)

    async def call_each(self, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> list[Any]:
        """The results of these calls. Raises NotImportableError and FunctionFailedError.

        If the caller is cancelled while the process makes its calls, the process is killed, because the function may
        hang. The next call starts another process.
        """
        caller_is_done = threading.Event()  # set when the caller has its results, or gives up
        try:
            results: list[Any] = await in_daemon_thread(functools.partial(self._ask, calls, caller_is_done))
        finally:
            caller_is_done.set()
            # After results or an error, `_ask` has set `_caller` to None, or the process serves another caller already.
            # Otherwise this caller was cancelled while the process makes its calls.
            if self._caller is caller_is_done:
                self.end()
        return results

    def end(self) -> None:
        """Kills the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ask(self, calls: Sequence[Any], caller_is_done: threading.Event) -> list[Any]:
        """The results of these calls, when the process is free. Runs in a thread of the caller's own. Raises
        NotImportableError and FunctionFailedError."""
        with self._turn:
            if caller_is_done.is_set():  # the caller was cancelled while it waited, so nobody reads the results
                return []
            self._caller = caller_is_done
            try:
                answer = self._answered(self._packed(calls))
            finally:
                self._caller = None
        kind, *values = answer  # as `_called` returns it, in the process
        if kind == "raised":
            message, place, is_value_error = values
            raise FunctionFailedError(message, place, is_value_error=is_value_error)
        results: list[Any] = values[0]
        return results

    def _answered(self, calls: bytes) -> Any:
        """The answer of the process to these calls. `calls`: the result of `_packed`.

        A scheduler that stops a program may send its signal to the child processes too. The program still waits for
        this answer before it ends. Therefore, if such a signal has ended the process, another process makes the calls
        again.
        """
        try:
            return self._answer_to(self._connected(), calls)
        except FunctionFailedError:
            process = self._process
            # The return code of a process that a signal ended is the number of the signal, with a minus sign.
            if process is None or process.returncode is None or -process.returncode not in stop_signals():
                raise
        return self._answer_to(self._connected(), calls)

    def _connected(self) -> Connection:
        """The connection to the process, which is started if it does not run. Raises NotImportableError if the function
        cannot be sent to a process, or if the process cannot load it. Raises FunctionFailedError if the process ends
        meanwhile."""
        if self._connection is not None and self._process is not None and self._process.poll() is None:  # it runs
            return self._connection
        function = portable(self._function)
        prepared = _preparation(function)
        parent_socket, child_socket = socket.socketpair()
        with child_socket:  # closed here once the child has its copy, so that the end of the child ends the connection
            number = child_socket.fileno()
            command = [sys.executable, "-c", _PROGRAM, str(number)]
            self._process = subprocess.Popen(
                command,
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not end the child, because the parent still waits for answers
            )
        connection = Connection(parent_socket.detach())  # from here on the connection owns, and closes, the socket
        connection.send(prepared)
        failure = self._answer_to(connection, function)  # `serve` answers None if it could load the function
        if failure is not None:
            self.end()
            raise NotImportableError(f"a process of its own cannot import it ({failure})")
        self._connection = connection
        return connection

    def _packed(self, calls: Sequence[Any]) -> bytes:
        """The calls as bytes for the process. Raises NotImportableError if pickle refuses their arguments."""
        try:
            return bytes(ForkingPickler.dumps(list(calls)))
        except Exception as error:
            raise NotImportableError(
                f"its arguments cannot be sent to a process of its own ({type(error).__name__}: {error})"
            ) from error

    def _answer_to(self, connection: Connection, question: bytes) -> Any:
        """The answer of the process to one message. Raises FunctionFailedError if the process ended, or if its answer
        cannot be loaded here."""
        try:
            connection.send_bytes(question)
            return connection.recv()
        except (EOFError, OSError):  # the process ended
            code = None
            if self._process is not None:
                code = self._process.wait()
            self._connection = None  # `_connected` then starts another process
            raise FunctionFailedError(f"ended the process that called it, with exit code {code}") from None
        except Exception as error:
            raise FunctionFailedError(
                f"returned what this process cannot load ({type(error).__name__}: {error})"
            ) from error


def serve(connection: Connection) -> None:
    """The work of the process: receives the function, and calls the function in this thread until the parent has ended.

    Sends one answer to each message of the parent. The answer to the first message, the function, is None, or the
    reason why the function cannot be loaded. The answer to each further message is the result of `_called`.
    """
    questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, questions), daemon=True).start()
    try:
        function = ForkingPickler.loads(questions.get())
    except BaseException as error:  # the module of the function may raise anything
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(None)
    while True:
        answer = _called(function, questions.get())
        try:
            connection.send(answer)
        except OSError:  # the parent has ended
            return
        except Exception as error:  # pickle refuses a result
            connection.send(_raised(error))


def _read(connection: Connection, questions: queue.SimpleQueue[bytes]) -> None:
    """Puts the messages of the parent into a queue, in a thread of its own. Ends the whole process when the parent has
    ended, even while the function hangs."""
    while True:
        try:
            questions.put(connection.recv_bytes())
        except (EOFError, OSError):  # the parent has ended
            os._exit(0)


def _called(function: Callable[..., Any], question: bytes) -> tuple[Any, ...]:
    """The answer to a message with calls: "returned" and the results, or the result of `_raised`."""
    try:
        # The arguments are loaded in this main thread: loading may import a module, which may ask for signals.
        calls = ForkingPickler.loads(question)
        return "returned", [at_once(function(*args, **options)) for args, options in calls]
    except BaseException as error:
        return _raised(error)


def at_once(result: Any) -> Any:
    """The result of a call. If the result is an iterator, for example a generator: the list of its values."""
    if isinstance(result, Iterator) and not isinstance(result, Awaitable):
        return list(result)
    return result


def _raised(error: BaseException) -> tuple[Any, ...]:
    """The answer after a call that failed: "raised", the message, the user's line, and True if the error is a
    ValueError."""
    message = f"raised {type(error).__name__}: {error}"
    return "raised", message, _line_of(error), isinstance(error, ValueError)


def _line_of(error: BaseException) -> str:
    """The last line in the function's own file, as file and line in brackets; "" if the function did not run yet."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    if not frames:
        return ""
    # The first of these frames is the function that was called, so its file is the function's own.
    last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f" ({last.filename}, line {last.lineno})"


__all__ = [
    "FunctionFailedError",
    "NotImportableError",
    "SignalProcess",
    "SignalRequests",
    "at_once",
    "serve",
    "signal_requests",
]
