"""Work beside the training loop: copies of tensors in host memory, a thread that writes them, and the log of waits."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from replay_client import ReplayClient
from replay_client.errors import DeadlineExceededError, ReplayError, ServerUnavailableError
from replay_client.waits import LOG_SECONDS, WaitLog, looking
from replay_client.words import counted
from replay_trainer.suppliers import Suppliers

T = TypeVar("T")


class HostCopy:
    """Copies of tensors in host memory. The buffers are used again, so only the newest copy is valid.

    Allocating a gigabyte takes longer than copying one.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, tree: Any) -> Any:
        """`tree`, made of dicts, lists, tensors and other values, with a copy in the place of each tensor.

        Tensors that share memory share their copy: tied weights stay tied. From a GPU the copies are complete only
        after `wait`; the copy is queued before any later change of the tensors.
        """
        on_gpu: list[Tensor] = []
        copied = self._take(tree, "", {}, on_gpu)
        self._copied = None
        if on_gpu:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(on_gpu[0].device))
        return copied

    def wait(self) -> None:
        """Wait until the newest copy is complete. Any thread may call it."""
        if self._copied is not None:
            self._copied.synchronize()

    def _take(self, tree: Any, path: str, shared: dict[Any, Tensor], on_gpu: list[Tensor]) -> Any:
        if isinstance(tree, dict):
            return {name: self._take(value, f"{path}/{name}", shared, on_gpu) for name, value in tree.items()}
        if isinstance(tree, list):
            return [self._take(value, f"{path}/{index}", shared, on_gpu) for index, value in enumerate(tree)]
        if not isinstance(tree, Tensor):
            return tree
        tensor = tree.detach()
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and identity in shared:
            return shared[identity]
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[path] = buffer
        assert buffer.device.type == "cpu", buffer.device
        buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            on_gpu.append(tensor)
        shared[identity] = buffer
        return buffer


class BackgroundTask:
    """Runs one function at a time on a thread, and keeps its error for the thread that asks."""

    def __init__(self, name: str) -> None:
        # One thread for all functions: the loop waits a millisecond or more for a new one to start. At its end the
        # interpreter waits for this thread, so a write is finished first.
        self._thread = ThreadPoolExecutor(1, name)
        self._work: Future[object] | None = None

    def start(self, function: Callable[[], object]) -> None:
        """Run the function. The one before must have ended: call `wait` first."""
        assert self._work is None or self._work.done(), "it runs one function at a time"
        self._work = self._thread.submit(function)

    def wait(self, only_while: Callable[[], bool] = lambda: True) -> bool:
        """Wait until the function has ended, or `only_while` is false. Returns whether it has ended."""
        # In slices: in a wait without an end, Python may miss a signal that came in the moment before it.
        while self._work is not None and not wait([self._work], 0.5).done:
            if not only_while():
                return False
        return True

    def take_error(self) -> BaseException | None:
        """The error of the function if it has failed already, once."""
        if self._work is None or not self._work.done():
            return None
        error = self._work.exception()
        self._work = None
        return error


class DaemonThread:
    """A thread that runs functions one after the other. The end of the program does not wait for it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[Callable[[], object], Future[object]]] = queue.SimpleQueue()
        self._runs = False

    def start(self, function: Callable[[], object]) -> Future[object]:
        """The result of `function`, which runs after those before it."""
        if not self._runs:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._runs = True
        result: Future[object] = Future()
        self._work.put((function, result))
        return result

    def _run(self) -> None:
        while True:
            function, result = self._work.get()
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)


def through_restarts(client: ReplayClient, attempt: Callable[[], T]) -> T:
    """The result of `attempt`, made again whenever the server was away.

    Waits for the server as long as the timeout of `client` says, and then raises ServerUnavailableError.
    """
    while True:
        try:
            return attempt()
        except ServerUnavailableError:
            client.policy()


LOOK_SECONDS = 2.0
"""Between two looks at the server during a wait."""


def over(limit: str, error: DeadlineExceededError) -> DeadlineExceededError:
    """The error of a wait that `limit` ends, a setting with its value."""
    return DeadlineExceededError(
        f"{error}; {limit} is over: raise it, or leave it out, and go on with --resume (resume=True)"
    )


class ServerWaits:
    """Says that one thread waits for one server, and why: after half a minute, every half minute, and when it goes on.

    It says within seconds that the server is gone, and that a server which came back is another one.

    A thread looks at the wait of the moment, again and again. It does not start and end with each wait: a step has
    several, nearly all of them shorter than a look, and to start and join a thread takes the trainer a millisecond or
    more. The thread ends when it finds no wait twice, and the next wait starts it again.
    """

    def __init__(
        self,
        client: ReplayClient,
        table: str = "",
        seconds: float = LOG_SECONDS,
        look_seconds: float = LOOK_SECONDS,
        *,
        quiet: bool = False,
        suppliers: Suppliers | None = None,
        limit: str = "the timeout",
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """`table`: the one that groups come from, if the waits are for groups. `quiet`: log nothing. `suppliers`: ends
        a wait for groups of which no more will come; None: the deadline of a batch ends it. `limit`: the setting that
        gives this deadline, with its value, for the error. `look` ends a wait for groups by what it raises; it is
        called every second."""
        self._client = client
        self._table = table
        self._quiet = quiet
        self._suppliers = suppliers
        self._limit = limit
        self._look_up = look
        self._deserted = ""
        """Why no groups will come, in words; "": some may."""
        self._lock = threading.Lock()
        self._wait: tuple[str, WaitLog] | None = None
        """The wait of the moment: for what, and its log."""
        self._watched = False
        """True while the thread that looks at waits runs."""
        self._seconds = seconds
        self._look_seconds = look_seconds
        self._server_id: int | None = None
        self._gone = False

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields `batches`, and logs every long wait for one.

        Raises what they raise; but a deadline that passes while the server is away does not count. Then the timeout of
        the client says how long to wait for the server, and ServerUnavailableError ends the wait. With `suppliers` a
        deadline is only a moment to look at them.
        """
        while True:
            self._deserted = ""
            with self.waiting("for groups"), looking(self._look_up):
                batch = self._next(batches)
            if batch is None:
                return
            yield batch

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Logs a long wait for `what` inside of the block. A wait inside of a wait is a part of it."""
        if self._quiet or self._wait is not None:
            yield
            return
        try:
            with self._lock:
                self._wait = (what, WaitLog("the trainer", every=self._seconds, late=True))
                start_thread = not self._watched
                self._watched = True
            if start_thread:
                threading.Thread(target=self._watch, name="wait-log", daemon=True).start()
            yield
        except BaseException:
            with self._lock:
                self._wait = None  # nothing goes on
            raise
        else:
            with self._lock:
                ended = self._wait
                self._wait = None
                if ended is not None:
                    _, log = ended
                    log.go_on()

    def _next(self, batches: Iterator[Any]) -> Any:
        while True:
            try:
                return through_restarts(self._client, lambda: next(batches, None))
            except DeadlineExceededError as error:
                try:
                    self._client.policy(timeout=self._look_seconds)
                except ReplayError:
                    self._client.policy()
                    continue
                if self._suppliers is None:
                    raise over(self._limit, error) from None
                self._deserted = self._suppliers.check()

    def _watch(self) -> None:
        """In a thread of its own, because the trainer's is blocked."""
        now = self._wait
        while True:
            time.sleep(min(self._look_seconds, self._seconds))
            with self._lock:
                before = now
                now = self._wait
                if before is now is None:
                    self._watched = False
                    return
            if now is None or now is not before:  # that began a moment ago
                continue
            what, log = now
            reason, is_news = self._look()
            with self._lock:
                if self._wait is now:
                    log.wait(f"waiting {what}: {reason}", is_news=is_news)

    def _look(self) -> tuple[str, bool]:
        """The reason why there are no groups, and True if the server has just gone or is another one than before."""
        try:
            tables = [self._table] if self._table else []
            info = self._client.server_info(tables=tables, timeout=5 * self._look_seconds)
        except ReplayError as error:
            was_gone = self._gone
            self._gone = True
            return str(error), not was_gone
        reason = "the server answers"
        if self._table:
            reason = info.tables[self._table].sampling.reason or f"{self._table}: no request of this trainer waits"
            if self._deserted:
                reason = f"{reason}; {self._deserted}"
        was_restarted = self._server_id not in (None, info.server_id)
        if was_restarted:
            reason = f"the server was restarted, and holds {counted(info.items, 'item')} now; {reason}"
        elif self._gone:
            reason = f"the server answers again; {reason}"
        is_news = was_restarted or self._gone
        self._server_id = info.server_id
        self._gone = False
        return reason, is_news
