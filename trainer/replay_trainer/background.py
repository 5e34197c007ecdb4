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
    """Copies of tensors in host memory. Each copy reuses the buffers, so only the newest copy is valid.

    The buffers are reused because it takes longer to allocate a gigabyte than to copy it.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        """The buffer of each tensor, by its path in the tree, such as "/state/lm_head.weight/exp_avg"."""
        self._copied: torch.cuda.Event | None = None
        """The GPU reaches this event after the newest copy. None: that copy had no tensor of a GPU."""

    def take(self, tree: Any) -> Any:
        """Returns `tree`, made of dicts, lists, tensors and other values, with a copy in the place of each tensor.

        Tensors that share memory share their copy, so tied weights stay tied. Copies from a GPU are complete only after
        `wait`. But the caller may change the tensors at once: the GPU makes these changes after the copies.
        """
        on_gpu: list[Tensor] = []
        copied = self._take(tree, "", {}, on_gpu)
        self._copied = None
        if on_gpu:
            # All copies of one GPU are in its current stream, so the GPU reaches the event after the last of them.
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(on_gpu[0].device))
        return copied

    def wait(self) -> None:
        """Waits until the newest copy is complete. Any thread may call this."""
        if self._copied is not None:
            self._copied.synchronize()

    def _take(self, tree: Any, path: str, shared: dict[Any, Tensor], on_gpu: list[Tensor]) -> Any:
        """Returns the copy of a part of the tree. `path`: the place of this part in the tree.

        Adds each copy to `shared`, by the identity of its tensor, and each tensor of a GPU to `on_gpu`.
        """
        if isinstance(tree, dict):
            return {name: self._take(value, f"{path}/{name}", shared, on_gpu) for name, value in tree.items()}
        if isinstance(tree, list):
            return [self._take(value, f"{path}/{index}", shared, on_gpu) for index, value in enumerate(tree)]
        if not isinstance(tree, Tensor):
            return tree
        tensor = tree.detach()
        # Tensors that share memory, such as tied weights, are equal in these four.
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        # An empty tensor is never shared: all empty tensors have the same address, and share no memory.
        if tensor.numel() and identity in shared:
            return shared[identity]
        buffer = self._buffers.get(path)
        # The first copy of this tensor, or a tensor that has changed its form, needs a new buffer.
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            # Only into pinned memory can a GPU copy while the CPU goes on (`non_blocking`).
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
        # One thread for all functions, because the start of a thread would delay the loop by a millisecond or more.
        # Python waits for this thread before it exits, so a write is always finished.
        self._thread = ThreadPoolExecutor(1, name)
        self._work: Future[object] | None = None
        """The newest function, running or ended. None: there was none, or `take_error` was called after its end."""

    def start(self, function: Callable[[], object]) -> None:
        """Starts the function. The function before it must have ended: call `wait` first."""
        assert self._work is None or self._work.done(), "it runs one function at a time"
        self._work = self._thread.submit(function)

    def wait(self, only_while: Callable[[], bool] = lambda: True) -> bool:
        """Waits until the function has ended, or until `only_while`, which is called every half second, returns False.

        Returns True if the function has ended, or if there was none.
        """
        # The wait is cut into half seconds also because Python handles a signal that arrives just before a wait only
        # after that wait.
        while self._work is not None and not wait([self._work], 0.5).done:
            if not only_while():
                return False
        return True

    def take_error(self) -> BaseException | None:
        """The error of the newest function. None: there is no function, it is running, or it has succeeded.

        Returns each error only once.
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
        self._work: queue.SimpleQueue[tuple[Callable[[], object], Future[object]]] = queue.SimpleQueue()
        """The functions that are still to run, each with the future of its result."""
        self._runs = False
        """True once the thread was started."""

    def start(self, function: Callable[[], object]) -> Future[object]:
        """Starts `function` after all functions of earlier calls. Returns a future of its result."""
        if not self._runs:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._runs = True
        result: Future[object] = Future()
        self._work.put((function, result))
        return result

    def _run(self) -> None:
        """Runs the functions in the thread, until the program ends."""
        while True:
            function, result = self._work.get()
            try:
                result.set_result(function())
            except BaseException as error:  # for the caller of `result.result()`; this thread goes on
                result.set_exception(error)


def through_restarts(client: ReplayClient, attempt: Callable[[], T]) -> T:
    """The result of `attempt`, which is repeated if the server was away.

    Waits for the server as long as the timeout of `client` says, and then raises ServerUnavailableError.
    """
    while True:
        try:
            return attempt()
        except ServerUnavailableError:
            client.policy()  # returns when the server answers again


LOOK_SECONDS = 2.0
"""Seconds between two checks of the server during a wait."""


def over(limit: str, error: DeadlineExceededError) -> DeadlineExceededError:
    """The error of a wait that was too long. `limit`: the setting that ended the wait, with its value."""
    return DeadlineExceededError(
        f"{error}; {limit} is over: raise it, or leave it out, and go on with --resume (resume=True)"
    )


class ServerWaits:
    """Logs that one thread waits for the server, and why: after half a minute, then every half minute, and when the
    thread goes on.

    Logs within seconds if the server is gone, if it answers again, and if it was restarted.

    A thread in the background checks the current wait every few seconds. This thread does not start and end with each
    wait: a step has several waits, most of them shorter than the time between two checks, and starting and joining a
    thread takes a millisecond or more. The thread ends when two checks in a row find no wait. The next wait starts it
    again.
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
        """`table`: the table of the groups, if the waits are for groups. `seconds`: the time between two messages.
        `look_seconds`: the time between two checks of the server. `quiet`: log nothing. `suppliers`: ends a wait for
        groups if no more groups will come; None: the deadline of a batch ends the wait. `limit`: the setting with this
        deadline, and its value, for the error. `look`: called every second during a wait for groups; an error that it
        raises ends the wait."""
        self._client = client
        self._table = table
        self._quiet = quiet
        self._suppliers = suppliers
        self._limit = limit
        self._check_wait = look
        """The parameter `look`. It may end a wait. The method `_look` asks the server for the reason of a wait."""
        self._deserted = ""
        """The reason why no groups will come; "": groups may come."""
        self._lock = threading.Lock()
        """Guards `_wait` and `_watched`, which both threads use."""
        self._wait: tuple[str, WaitLog] | None = None
        """The current wait: (what is waited for, its log); None: no wait."""
        self._watched = False
        """True while the thread that checks the waits is running."""
        self._seconds = seconds
        self._look_seconds = look_seconds
        self._server_id: int | None = None
        """The id of the server at its last answer, which differs after a restart; None: it has not answered yet."""
        self._gone = False
        """True if the server did not answer the last check."""

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields `batches`, and logs every long wait for one. After an error, `batches` must be able to go on: unlike a
        generator, a `Sampler` can.

        Raises the errors of `batches`, except for a deadline that passes while the server is away. In that case, waits
        for the server as long as the timeout of the client says, and then raises ServerUnavailableError. With
        `suppliers`, a deadline does not end the wait, but is the time to check the suppliers.
        """
        while True:
            self._deserted = ""
            # `looking`: the client calls `_check_wait` every second in which this thread waits for the server.
            with self.waiting("for groups"), looking(self._check_wait):
                batch = self._next(batches)
            if batch is None:
                return
            yield batch

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Logs a long wait for `what` inside of the block. An inner `waiting` block counts as a part of the outer
        block."""
        if self._quiet or self._wait is not None:
            yield
            return
        try:
            with self._lock:
                # `late`: the first line is logged only after `every` seconds.
                self._wait = (what, WaitLog("the trainer", every=self._seconds, late=True))
                start_thread = not self._watched
                self._watched = True
            if start_thread:
                threading.Thread(target=self._watch, name="wait-log", daemon=True).start()
            yield
        except BaseException:
            with self._lock:
                self._wait = None  # without a message that the thread goes on
            raise
        else:
            with self._lock:
                ended = self._wait
                self._wait = None
                if ended is not None:  # None: two threads waited, and the other thread has ended the wait
                    _, log = ended
                    log.go_on()  # logs that the trainer goes on, if a line about this wait was logged

    def _next(self, batches: Iterator[Any]) -> Any:
        """The next batch; None: there are no more. See `watch` for the errors."""
        while True:
            try:
                return through_restarts(self._client, lambda: next(batches, None))
            except DeadlineExceededError as error:
                # Was the deadline over because the server is away, or because there were no groups?
                try:
                    self._client.policy(timeout=self._look_seconds)
                except ReplayError:
                    self._client.policy()  # waits for the server, and raises ServerUnavailableError after the timeout
                    continue
                # The server answers, so there were no groups.
                if self._suppliers is None:
                    raise over(self._limit, error) from None
                # Raises DeadlineExceededError if no more groups will come. Otherwise the wait goes on.
                self._deserted = self._suppliers.check()

    def _watch(self) -> None:
        """Checks and logs the waits. Runs in a thread of its own, because the trainer's thread is blocked.

        Returns when two checks in a row find no wait.
        """
        now = self._wait
        while True:
            time.sleep(min(self._look_seconds, self._seconds))
            with self._lock:
                before = now
                now = self._wait
                if before is None and now is None:
                    self._watched = False
                    return
            if now is None or now is not before:  # no wait, or a wait that began after the check before
                continue
            what, log = now
            reason, is_news = self._look()
            with self._lock:
                if self._wait is now:  # otherwise the wait ended while `_look` asked the server
                    log.wait(f"waiting {what}: {reason}", is_news=is_news)

    def _look(self) -> tuple[str, bool]:
        """The reason for the wait, and True if it is news: the server is gone, answers again, or was restarted."""
        try:
            tables = [self._table] if self._table else []
            # Longer than the time between two checks: a busy server that answers late is not gone.
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
