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
    """Copies tensors into host memory. All calls of `take` write into the same buffers, so only the newest copy is
    valid.

    The buffers are reused because it takes longer to allocate a gigabyte than to copy it.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        """The buffer of each tensor, by its path in the tree, such as "/state/lm_head.weight/exp_avg"."""
        self._copied: torch.cuda.Event | None = None
        """The event that the GPU reaches when the newest copy is complete. None: this copy had no tensor on a GPU."""

    def take(self, tree: Any) -> Any:
        """Returns `tree`, made of dicts, lists, tensors and other values, with a copy in the place of each tensor.

        Tensors that share memory share their copy, so tied weights stay tied. Copies from a GPU are complete only after
        `wait`. The caller may nevertheless change the tensors at once, because the GPU makes the copies before it makes
        these changes.
        """
        on_gpu: list[Tensor] = []
        copied = self._take(tree, path="", shared={}, on_gpu=on_gpu)
        self._copied = None
        if on_gpu:
            # The GPU makes all copies in its current stream, so it reaches the event after the last copy.
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(on_gpu[0].device))
        return copied

    def wait(self) -> None:
        """Waits until the newest copy is complete. Any thread may call this."""
        if self._copied is not None:
            self._copied.synchronize()

    def _take(self, tree: Any, path: str, shared: dict[Any, Tensor], on_gpu: list[Tensor]) -> Any:
        """Returns the copy of `tree`, which is a part of the whole tree. `path`: the place of this part.

        Adds new copies to `shared`, by the identity of their tensors, and the tensors of a GPU to `on_gpu`.
        """
        if isinstance(tree, dict):
            return {name: self._take(value, f"{path}/{name}", shared, on_gpu) for name, value in tree.items()}
        if isinstance(tree, list):
            return [self._take(value, f"{path}/{index}", shared, on_gpu) for index, value in enumerate(tree)]
        if not isinstance(tree, Tensor):
            return tree
        tensor = tree.detach()
        # Two tensors with the same identity, such as tied weights, share their memory.
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        # Empty tensors are left out, because all of them have the same address although they share no memory.
        if tensor.numel() and identity in shared:
            return shared[identity]
        buffer = self._buffers.get(path)
        # The first copy of this tensor needs a new buffer, and so does a tensor whose shape or dtype has changed.
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            # The CPU can go on during a copy from a GPU (`non_blocking`) only if the buffer is in pinned memory.
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[path] = buffer
        assert buffer.device.type == "cpu", buffer.device
        buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            on_gpu.append(tensor)
        shared[identity] = buffer
        return buffer


class BackgroundTask:
    """Runs one function at a time on a thread, and keeps the error of this function until `take_error` returns it."""

    def __init__(self, name: str) -> None:
        # One thread runs all functions, because the start of a thread would delay the training loop by a millisecond or
        # more. Python waits for this thread before it exits, so a write is always finished.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._work: Future[object] | None = None
        """The future of the newest function, which is running or has ended. None: there was no function, or
        `take_error` was called after its end."""

    def start(self, function: Callable[[], object]) -> None:
        """Starts the function. The previous function must have ended, so call `wait` first."""
        assert self._work is None or self._work.done(), "it runs one function at a time"
        self._work = self._executor.submit(function)

    def wait(self, only_while: Callable[[], bool] = lambda: True) -> bool:
        """Waits until the function has ended, or until `only_while` returns False.

        Calls `only_while` every half second. Returns True if the function has ended, or if there was none.
        """
        # The half second also limits how late a signal is handled. If a signal arrives just before a call of
        # `futures.wait` blocks, Python handles the signal only after this call.
        while self._work is not None and not wait([self._work], timeout=0.5).done:
            if not only_while():
                return False
        return True

    def take_error(self) -> BaseException | None:
        """Returns the error of the newest function, but each error only once.

        None: there is no function, it is still running, it has succeeded, or its error was returned before.
        """
        if self._work is None or not self._work.done():
            return None
        error = self._work.exception()
        self._work = None
        return error


class DaemonThread:
    """A thread that runs functions one after the other. The end of the program does not wait for it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Callable[[], object], Future[object]]] = queue.SimpleQueue()
        """The functions that are still to run, each with the future of its result."""
        self._is_started = False
        """True once the thread was started."""

    def start(self, function: Callable[[], object]) -> Future[object]:
        """Lets the thread run `function` after the functions of all earlier calls. Returns a future of its result."""
        if not self._is_started:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._is_started = True
        result: Future[object] = Future()
        self._queue.put((function, result))
        return result

    def _run(self) -> None:
        """Runs the functions in the thread, until the program ends."""
        while True:
            function, result = self._queue.get()
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)  # `result.result()` raises the error, and this thread goes on


def through_restarts(client: ReplayClient, attempt: Callable[[], T]) -> T:
    """Calls `attempt` and returns its result. If the server is away, waits for the server and calls `attempt` again.

    Raises ServerUnavailableError after a wait that was as long as the timeout of `client`.
    """
    while True:
        try:
            return attempt()
        except ServerUnavailableError:
            client.policy()  # returns when the server answers again


LOOK_SECONDS = 2.0
"""Seconds between two checks of the server during a wait."""


def over(limit: str, error: DeadlineExceededError) -> DeadlineExceededError:
    """Returns `error` with a remedy in its message. `limit`: the setting that ended the wait, with its value."""
    return DeadlineExceededError(
        f"{error}; {limit} is over: raise it, or leave it out, and go on with --resume (resume=True)"
    )


class ServerWaits:
    """Logs the waits of one thread for the server, with the reason of each wait.

    The first line comes after half a minute of waiting, and another line follows every half minute. A last line comes
    when the thread goes on. If the server is gone, answers again, or was restarted, a line comes within seconds.

    A background thread checks the current wait every few seconds. A step has several waits, and most of them are
    shorter than the time between two checks. Starting and joining a thread takes a millisecond or more. So the
    background thread does not start and end with each wait. It ends when two checks in a row find no wait, and the next
    wait starts it again.
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
        """`table`: the table of the groups, if the waits are for groups.

        `seconds`: the time between two lines of the log. `look_seconds`: the time between two checks of the server.
        `quiet`: log nothing.

        `suppliers`: ends a wait for groups if no more groups will come. None: the deadline of a batch ends the wait.
        `limit`: the setting that sets this deadline, with its value, for the error.

        `look`: is called every second during a wait for groups. If `look` raises an error, the wait ends with it.
        """
        self._client = client
        self._table = table
        self._quiet = quiet
        self._suppliers = suppliers
        self._limit = limit
        self._check_wait = look
        """The parameter `look`, which may raise an error to end a wait."""
        self._deserted = ""
        """The reason why no groups will come, from the newest check of `_suppliers`; "": groups may come."""
        self._lock = threading.Lock()
        """Guards `_wait` and `_is_watched`, which the waiting thread and the background thread use."""
        self._wait: tuple[str, WaitLog] | None = None
        """The current wait: what the thread waits for, such as "for groups", and the log of this wait. None: the thread
        does not wait."""
        self._is_watched = False
        """True while the background thread is running."""
        self._seconds = seconds
        self._look_seconds = look_seconds
        self._server_id: int | None = None
        """The id in the server's last answer. A restart changes the id. None: the server has not answered yet."""
        self._gone = False
        """True if the server did not answer the last check."""

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields `batches`, and logs every long wait for a batch.

        `batches` must be able to go on after it has raised an error. A `Sampler` can, but a generator cannot.

        Raises the errors of `batches`, except for two kinds of DeadlineExceededError. If a deadline passes while the
        server is away, waits for the server, and raises ServerUnavailableError after the timeout of the client. If a
        deadline passes although the server answers, and there are `suppliers`, `Suppliers.check` decides whether the
        wait goes on.
        """
        while True:
            self._deserted = ""
            # `looking` lets the client call `_check_wait` every second while this thread waits for the server.
            with self.waiting("for groups"), looking(self._check_wait):
                batch = self._next(batches)
            if batch is None:
                return
            yield batch

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Logs a long wait inside of the block. `what`: what the thread waits for, such as "for groups".

        A `waiting` block inside of another one does nothing, because the outer block logs the whole wait.
        """
        if self._quiet or self._wait is not None:
            yield
            return
        try:
            with self._lock:
                # With `late`, the first line is logged only after `every` seconds.
                self._wait = (what, WaitLog("the trainer", every=self._seconds, late=True))
                needs_thread = not self._is_watched
                self._is_watched = True
            if needs_thread:
                threading.Thread(target=self._watch, name="wait-log", daemon=True).start()
            yield
        except BaseException:
            with self._lock:
                self._wait = None  # no line says that the trainer goes on
            raise
        else:
            with self._lock:
                ended_wait = self._wait
                self._wait = None
                if ended_wait is not None:  # None: two threads waited, and the other thread has ended the wait
                    _, log = ended_wait
                    log.go_on()  # logs that the trainer goes on, if a line about this wait was logged

    def _next(self, batches: Iterator[Any]) -> Any:
        """Returns the next batch; None: there are no more batches. See `watch` for the errors."""
        while True:
            try:
                return through_restarts(self._client, lambda: next(batches, None))
            except DeadlineExceededError as error:
                # Either the server is away, or there were no groups. A short call tells which of the two.
                try:
                    self._client.policy(timeout=self._look_seconds)
                except ReplayError:
                    # The server is away: wait for it. This call raises ServerUnavailableError after the timeout.
                    self._client.policy()
                    continue
                # The server answers, so there were no groups.
                if self._suppliers is None:
                    raise over(self._limit, error) from None
                # `check` raises DeadlineExceededError if it has found for long that no more groups will come.
                self._deserted = self._suppliers.check()

    def _watch(self) -> None:
        """Checks and logs the waits. Runs in the background thread, because the thread that waits is blocked.

        Returns when two checks in a row find no wait.
        """
        current = self._wait
        while True:
            time.sleep(min(self._look_seconds, self._seconds))
            with self._lock:
                previous = current  # the wait that the previous check found
                current = self._wait
                if previous is None and current is None:
                    self._is_watched = False
                    return
            if current is None or current is not previous:  # no wait, or one that began after the previous check
                continue
            what, log = current
            reason, is_news = self._ask_reason()
            with self._lock:
                if self._wait is current:  # otherwise the wait ended while the server was asked
                    log.wait(f"waiting {what}: {reason}", is_news=is_news)

    def _ask_reason(self) -> tuple[str, bool]:
        """Asks the server for the reason of the wait. Returns the reason, and True if the reason is news.

        It is news that the server is gone, answers again, or was restarted.
        """
        try:
            tables = [self._table] if self._table else []
            # This timeout is longer than the time between two checks, because a busy server that answers late is not
            # gone.
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
