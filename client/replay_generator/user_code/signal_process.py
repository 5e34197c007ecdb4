"""SignalProcess: a process that calls one function in its main thread, because that function asks for signals.

    a function asks for a signal in a thread ──▶ `signal_requests` notes this ──▶ SignalProcess calls the function

Only the main thread of a process can handle signals. Many graders, such as math-verify, set an alarm to end comparisons
that would take for ever. In any other thread, setting an alarm raises ValueError. Many graders catch this error and
report that the answer is wrong. Therefore this module notes each request for a signal, even if the function catches the
error.

For this purpose the module replaces functions of `signal` when it is imported. Modules that are imported later, and say
`from signal import alarm`, get the replacements too. Outside of `signal_requests` the replacements do what Python's own
functions do.

The process of SignalProcess is a child of this process, and both communicate through a pair of sockets. The child
imports the module of the function. The child imports the file of the program only if the function is defined in that
file, because the import of the file may start the work of the program.
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
_REPLACED = ("signal", "alarm", "setitimer", "set_wakeup_fd")
"""The functions of `signal` that are replaced. These functions work, or make sense, only in the main thread."""
_REFUSAL = "signal only works in main thread of the main interpreter"
"""The message of the ValueError that Python's own functions raise in another thread."""
_noting = threading.local()
"""Its attribute `requests` is the list to which the current thread adds its requests for signals. None or missing: the
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
    """The function, or the arguments of a call, cannot be sent to another process. The message says why."""


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
    """Notes the requests for signals that the block makes in this thread, in the list that it yields. Each request
    raises ValueError, as Python does outside of the main thread."""
    requests: SignalRequests = []
    _noting.requests = requests
    try:
        yield requests
    finally:
        _noting.requests = None


def _replace_functions() -> None:
    """Replaces the functions _REPLACED of `signal` by functions that note requests, until the process ends."""
    for name in _REPLACED:
        real = getattr(_signal, name)
        replacement = _replacement_of(name, real)
        # `signal.signal` is a Python function that calls `_signal.signal`, so it need not be replaced itself. The other
        # functions are the same objects in both modules.
        for module in (_signal, signal):
            if getattr(module, name) is real:
                setattr(module, name, replacement)


def _replacement_of(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that replaces `real` and notes requests. `name`: the name of `real` in `signal`."""

    @functools.wraps(real)
    def request(*args: Any, **options: Any) -> Any:
        """Calls `real`. In a block of `signal_requests`, notes the call and raises ValueError instead."""
        requests = getattr(_noting, "requests", None)
        # If the user's function forks a child process in the block, this thread becomes the main thread of the child.
        # There it may ask for signals.
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


_replace_functions()


# ---------------------------------------------------------------------------------- sending the function to the process


def portable(function: Callable[..., Any]) -> bytes:
    """Pickles the function for another process. If pickle refuses the function itself, pickles a name under which a
    module has the function. Raises NotImportableError if neither is possible."""
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
    """A name in a module, which is pickled in the place of a function that pickle refuses, such as a lambda or a
    decorated function. Loading the pickled bytes gives the function that has this name."""

    def __init__(self, module: str, name: str) -> None:
        self._place = (module, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _imported, self._place  # loading the bytes calls `_imported(*self._place)`


def _imported(module: str, name: str) -> Any:
    """The value of a name in a module."""
    return getattr(importlib.import_module(module), name)


def _place_of(function: Callable[..., Any]) -> tuple[str, str] | None:
    """The module that has the function as an attribute, and the name of this attribute; None: no module has it."""
    # `list` makes copies, because other threads may import modules, or change them, during the search.
    for module_name, module in list(sys.modules.items()):
        attributes = getattr(module, "__dict__", {})
        for name, value in list(attributes.items()):
            if value is function:
                return module_name, name
    return None


def _preparation(function: bytes) -> dict[str, Any]:
    """The argument of `prepare` in the child, which the child needs before it can load the function. `function`: the
    result of `portable`.

    Raises NotImportableError if the child would have to import a program that starts its work when it is imported.
    """
    prepared = multiprocessing.spawn.get_preparation_data("replay-signals")
    prepared.pop("authkey")  # only processes of multiprocessing need this key
    # The bytes name the module of the function. `__main__` is the file of the program.
    is_in_program = b"__main__" in function
    if not is_in_program:  # without these two entries, `prepare` does not import the file of the program
        prepared.pop("init_main_from_name", None)
        prepared.pop("init_main_from_path", None)
    elif not _is_main_guarded():
        raise NotImportableError(
            "a process of its own that imports it from the file of the program would run that program again: define "
            'it in a module, or begin the work of the program with `if __name__ == "__main__":`'
        )
    return prepared


def _is_main_guarded() -> bool:
    """True if another process can import the file of the program without starting the work of the program. This is
    assumed if the file has an `if` at its top level that tests `__name__`. Also true if there is no such file, as in an
    interactive session."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None:
        return True
    try:
        statements = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False  # nobody can tell, and to run a program twice would be worse than to refuse the function
    tests = [statement.test for statement in statements if isinstance(statement, ast.If)]
    return any("__name__" in ast.unparse(test) for test in tests)


# ------------------------------------------------------------------------------------------------ the process


class SignalProcess:
    """A process that calls one function in its main thread, one call after the other. The process starts with the first
    call."""

    def __init__(self, function: Callable[..., Any], requests: str) -> None:
        """`requests`: the calls with which the function asked for signals, as text."""
        self.requests = requests
        self._function = function
        self._turn = threading.Lock()
        """Held while the process makes the calls of one caller. Other callers wait for this lock."""
        self._process: subprocess.Popen[bytes] | None = None
        """The process that was started last; None: no process was started yet."""
        self._connection: Connection | None = None
        """The connection to a process that has loaded the function; None: there is no such process."""
        self._caller: threading.Event | None = None
        """Identifies the caller whose calls the process makes now, by its `caller_is_done` in `call_each`. None: the
        process makes no calls."""
        atexit.register(self.end)

    async def call_each(self, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> list[Any]:
        """Makes these calls in the process, and returns their results. Raises NotImportableError and
        FunctionFailedError.

        If the caller is cancelled while the process makes the caller's calls, the process is killed, because the
        function may hang. The next call starts another process.
        """
        caller_is_done = threading.Event()  # set when the caller has its results, or gives up
        try:
            results: list[Any] = await in_daemon_thread(functools.partial(self._ask, calls, caller_is_done))
        finally:
            caller_is_done.set()
            # If `_ask` has ended, it has set `_caller` to None, and maybe the process already serves another caller. So
            # if `_caller` is still this caller, it was cancelled while the process makes its calls.
            if self._caller is caller_is_done:
                self.end()
        return results

    def end(self) -> None:
        """Kills the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ask(self, calls: Sequence[Any], caller_is_done: threading.Event) -> list[Any]:
        """Waits until the process is free, lets it make these calls, and returns their results. Each caller has a
        thread of its own, in which this method runs. Raises NotImportableError and FunctionFailedError."""
        with self._turn:
            if caller_is_done.is_set():  # the caller was cancelled while it waited, so nobody needs the results
                return []
            self._caller = caller_is_done
            try:
                answer = self._answered(self._packed(calls))
            finally:
                self._caller = None
        kind, *values = answer  # what `_called` returned in the process
        if kind == "raised":
            message, place, is_value_error = values
            raise FunctionFailedError(message, place, is_value_error=is_value_error)
        results: list[Any] = values[0]
        return results

    def _answered(self, calls: bytes) -> Any:
        """Sends the calls to the process, and returns its answer. `calls`: the result of `_packed`.

        A scheduler that stops a program may send its signal to the child processes too. The program still waits for
        this answer before it ends. Therefore, if such a signal has ended the process, another process repeats the
        calls.
        """
        try:
            return self._answer_to(self._connected(), calls)
        except FunctionFailedError:
            process = self._process
            if process is None or process.returncode is None:
                raise
            # The return code of a process that a signal ended is the number of the signal, with a minus sign.
            signal_number = -process.returncode
            if signal_number not in stop_signals():
                raise
        return self._answer_to(self._connected(), calls)

    def _connected(self) -> Connection:
        """Returns the connection to the process, and starts the process first if it does not run. Raises
        NotImportableError if the function cannot be sent to a process, or if the process cannot load the function.
        Raises FunctionFailedError if the new process ends before it has loaded the function."""
        # `poll` returns None while the process runs.
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        function = portable(self._function)
        prepared = _preparation(function)
        parent_socket, child_socket = socket.socketpair()
        # `with` closes the child's socket in this process once the child has its copy. So the copy of the child is the
        # only one, and the connection ends when the child ends. If the process cannot be started, `with` closes both.
        with parent_socket, child_socket:
            child_fd = child_socket.fileno()
            command = [sys.executable, "-c", _PROGRAM, str(child_fd)]
            self._process = subprocess.Popen(
                command,
                pass_fds=[child_fd],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not end the child, because the parent still waits for answers
            )
            connection = Connection(parent_socket.detach())  # from here on the connection owns, and closes, the socket
        # If the caller was cancelled before the process was in `_process`, `call_each` could not kill the process.
        if self._caller is not None and self._caller.is_set():
            self.end()
        # `serve` answers None if it could load the function.
        failure = self._answer_to(connection, bytes(ForkingPickler.dumps(prepared)), function)
        if failure is not None:
            self.end()
            raise NotImportableError(f"a process of its own cannot import it ({failure})")
        self._connection = connection
        return connection

    def _packed(self, calls: Sequence[Any]) -> bytes:
        """Pickles the calls for the process. Raises NotImportableError if pickle refuses their arguments."""
        try:
            return bytes(ForkingPickler.dumps(list(calls)))
        except Exception as error:
            raise NotImportableError(
                f"its arguments cannot be sent to a process of its own ({type(error).__name__}: {error})"
            ) from error

    def _answer_to(self, connection: Connection, *messages: bytes) -> Any:
        """Sends these messages to the process, and returns its answer to the last one. Raises FunctionFailedError if
        the process ended, or if its answer cannot be loaded here."""
        try:
            for message in messages:
                connection.send_bytes(message)
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
    """Does the work of the process: receives the function, and makes the calls that the parent sends, in this thread,
    until the parent has ended.

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
    """Puts the messages of the parent into a queue. Ends the whole process when the parent has ended.

    Runs in a thread of its own, so that the process ends even if the function hangs in the main thread.
    """
    while True:
        try:
            questions.put(connection.recv_bytes())
        except (EOFError, OSError):  # the parent has ended
            os._exit(0)


def _called(function: Callable[..., Any], question: bytes) -> tuple[Any, ...]:
    """Makes the calls of a message, and returns the answer: "returned" and the results, or the result of `_raised`."""
    try:
        # The arguments are loaded in this main thread: loading may import a module, which may ask for signals.
        calls = ForkingPickler.loads(question)
        return "returned", [at_once(function(*args, **options)) for args, options in calls]
    except BaseException as error:
        return _raised(error)


def at_once(result: Any) -> Any:
    """Returns the list of the values if the result of a call is an iterator, for example a generator. Returns any other
    result unchanged."""
    if isinstance(result, Iterator) and not isinstance(result, Awaitable):
        return list(result)
    return result


def _raised(error: BaseException) -> tuple[Any, ...]:
    """The answer after a call that failed: "raised", the message, the line of users' code, and True if the error is a
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
