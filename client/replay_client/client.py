"""ReplayClient: the client for code without asyncio, derived from AsyncReplayClient method by method."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Self, TypeVar

from replay_client.aio import AsyncReplayClient
from replay_client.columns import Buffer
from replay_client.connection import DEFAULT, Timeout
from replay_client.errors import ClientClosedError, ReplayError, ServerClosedError
from replay_client.lease_renewer import AsyncLeaseRenewer
from replay_client.records import PermitGrant, Policy, Sample
from replay_client.requests import Item
from replay_client.rollout import RolloutGroup
from replay_client.sampling import AsyncSampler
from replay_client.transport import forks
from replay_client.waits import Deadline, look_around
from replay_client.writer import AsyncWriter
from replay_protos.event_loop import new_event_loop

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")
A = TypeVar("A", AsyncWriter, AsyncSampler, AsyncLeaseRenewer)


def blocking(
    method: Callable[Concatenate[AsyncReplayClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[ReplayClient, P], T]:
    """Makes the blocking form of `method`, which is a coroutine function of AsyncReplayClient.

    The blocking form runs the coroutine on the client's loop, and returns its result. It has the parameters, the
    docstring and the errors of `method`.
    """

    @wraps(method)
    def call(self: ReplayClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        work = method(self._aio, *args, **kwargs)
        return self._thread.run(work)

    # `wraps` has copied the names of AsyncReplayClient and its module. Tracebacks and the reference must name the class
    # ReplayClient and this module.
    call.__module__ = __name__
    call.__qualname__ = f"ReplayClient.{method.__name__}"
    return call


def handing_out(
    method: Callable[Concatenate[AsyncReplayClient, P], T], wrapper: Callable[[LoopThread, T], W]
) -> Callable[Concatenate[ReplayClient, P], W]:
    """Makes the blocking form of `method`, which makes an asyncio writer, sampler or renewer.

    The blocking form returns a `wrapper`, which holds the asyncio object.
    """

    @wraps(method)
    def call(self: ReplayClient, /, *args: P.args, **kwargs: P.kwargs) -> W:
        async def make() -> T:
            """Calls `method` on the thread of the loop, because the asyncio object starts tasks on this loop."""
            return method(self._aio, *args, **kwargs)

        made = self._thread.run(make())
        return wrapper(self._thread, made)

    call.__module__ = __name__
    call.__qualname__ = f"ReplayClient.{method.__name__}"
    # The reference shows the annotations, so they must say that the result is the wrapper, not the asyncio object.
    call.__annotations__ = {**method.__annotations__, "return": wrapper.__name__}
    return call


def constructed_as(
    origin: Callable[Concatenate[AsyncReplayClient, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[ReplayClient, P], None]]:
    """Makes a decorator that gives a constructor the parameters and the docstring of `origin`."""
    return wraps(origin)


class _Blocking(Generic[A]):
    """The base class of the writer, sampler and renewer of a blocking client. It can be used in `with`.

    It holds the asyncio writer, sampler or renewer, and calls its methods on the thread of the client's loop.
    """

    def __init__(self, thread: LoopThread, aio: A) -> None:
        self._thread = thread
        self._aio: A = aio
        """The asyncio writer, sampler or renewer."""

    def close(self) -> None:
        """Ends the background work of the writer, sampler or renewer."""
        self._thread.run(self._aio.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


class Writer(_Blocking[AsyncWriter]):
    """Inserts groups without waiting for each acknowledgement. `ReplayClient.writer()` makes it, for `with`.

    The end of the `with` block flushes the writer, unless the block raises. `close` does not flush. So after `close`
    alone, the server may or may not have the items that it had not acknowledged.
    """

    def __init__(self, thread: LoopThread, writer: AsyncWriter) -> None:
        super().__init__(thread, writer)
        self.refused: Mapping[int, ReplayError] = writer.refused
        """The reason for each item that the server refused, by the key of the item."""
        self.evicted: Mapping[int, tuple[str, ...]] = writer.evicted
        """The items that full tables removed as soon as they were inserted. Item key -> names of these tables.

        The mapping has the newest 65,536 of these items. Such a removal is no error, because a pool that keeps the best
        items does not keep every new item.
        """

    def insert(
        self,
        group: RolloutGroup | Buffer,
        priorities: Mapping[str, float],
        *,
        key: int | None = None,
        policy_version: int | None = None,
        permits: PermitGrant | None = None,
        tags: Mapping[str, str | int] | None = None,
    ) -> int:
        """Queues a group and returns its key. Waits only while `max_in_flight` or `max_bytes` are in flight.

        Raises the first error of an earlier insert that no call has raised yet. In this case the group is not queued.
        """
        # The calling thread itself makes the item and offers it to the writer. A task on the loop would cost more time
        # than all else that an insert does.
        self._thread.check()
        if key is None:
            key = next(self._aio.keys)
        item = Item.of(key, group, priorities, policy_version, self._aio.timeout, permits, tags)
        if not self._aio.offer(item):  # the writer has no room for the item now
            room = Wake()
            # If there is still no room, the writer keeps `room.set`, and calls it when there may be room.
            while not self._aio.offer(item, room.set):
                room.wait()
        return item.key

    def flush(self, timeout: Timeout = DEFAULT) -> None:
        """Waits until the server has acknowledged all items. If items are inserted meanwhile, waits for these too.

        Raises the first error of an insert that no call has raised yet.
        """
        self._thread.run(self._aio.flush(timeout))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()


class LeaseRenewer(_Blocking[AsyncLeaseRenewer]):
    """Renews the leases of samples, however long the caller's own thread works.

    `ReplayClient.auto_renew()` makes it, for `with`.

    The end of the `with` block ends the renewals, but not the leases. `acknowledge` ends a lease.
    """

    def add(self, samples: Iterable[Sample]) -> None:
        """Renews the leases of these samples from now on, the first time at once. Ignores samples without a lease."""
        self._thread.run(self._call(self._aio.add, samples))

    def forget(self, samples: Iterable[Sample]) -> None:
        """Stops renewing the leases of these samples.

        All samples of one draw share a lease, so the lease of the others in the draw is not renewed any more either.
        """
        self._thread.run(self._call(self._aio.forget, samples))

    async def _call(self, method: Callable[[Iterable[Sample]], None], samples: Iterable[Sample]) -> None:
        """Calls `method` with the samples. This is a coroutine, because `LoopThread.run` runs only coroutines."""
        method(samples)


class Sampler(_Blocking[AsyncSampler]):
    """An endless iterator over batches. `ReplayClient.sampler()` makes it, for `with` and `for`.

    The server draws up to `prefetch` batches ahead. A batch counts as sampled when the caller gets it. `close` requeues
    the batches that were drawn ahead.
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Sample]:
        """The next batch. Raises DeadlineExceededError, with the reason, if no batch comes within the timeout."""
        try:
            return self._thread.run(self._aio.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None


class ReplayClient:
    """A client of the replay server at `address` ("host:port"). Any number of threads may use one client.

    A client can also use several servers. `address` is then a list of their addresses, one text with commas between
    them, or "ray://NAMESPACE/NAME". `replay_client.shards` says what each method does with several servers.

    Every method takes `timeout` in seconds. Without `timeout`, the client's own timeout applies. None means that the
    method waits for ever. While no server answers, a method tries again until its time is up, and then raises
    ServerUnavailableError. All errors are subclasses of `replay_client.errors.ReplayError`.

    Close the client, or use it as a context manager. A client does not work in a process that was forked after the
    client was made, so start processes with `spawn`.
    """

    @constructed_as(AsyncReplayClient.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._start(AsyncReplayClient(*args, **kwargs))

    @classmethod
    def from_env(cls, timeout: float | None = 30.0, **settings: Any) -> Self:
        """A client with the settings of the environment; see AsyncReplayClient.from_env."""
        client = cls.__new__(cls)
        client._start(AsyncReplayClient.from_env(timeout, **settings))
        return client

    def _start(self, client: AsyncReplayClient) -> None:
        """Sets the attributes and starts the thread of the loop. `__init__` and `from_env` call it."""
        self._aio = client
        self._thread = LoopThread()
        self._watches: set[AsyncGenerator[Policy]] = set()
        """The open iterators of `watch_policy`, which `close` ends."""

    @property
    def address(self) -> str:
        """host:port of the server; of several servers, separated by commas; or ray://NAMESPACE/NAME."""
        return self._aio.address

    @property
    def transport(self) -> str:
        """The transport of payloads: "shared memory", or "grpc: " with the reason why it is not shared memory.

        Asks the server if the transport is not known yet.
        """
        return self.find_transport()

    find_transport = blocking(AsyncReplayClient.find_transport)
    insert = blocking(AsyncReplayClient.insert)
    extend = blocking(AsyncReplayClient.extend)
    writer = handing_out(AsyncReplayClient.writer, Writer)
    sample = blocking(AsyncReplayClient.sample)
    acknowledge = blocking(AsyncReplayClient.acknowledge)
    renew = blocking(AsyncReplayClient.renew)
    consume = blocking(AsyncReplayClient.consume)
    auto_renew = handing_out(AsyncReplayClient.auto_renew, LeaseRenewer)
    sampler = handing_out(AsyncReplayClient.sampler, Sampler)
    update_priorities = blocking(AsyncReplayClient.update_priorities)
    update_priority_arrays = blocking(AsyncReplayClient.update_priority_arrays)
    delete = blocking(AsyncReplayClient.delete)
    get = blocking(AsyncReplayClient.get)
    list_items = blocking(AsyncReplayClient.list_items)
    server_info = blocking(AsyncReplayClient.server_info)
    update_table = blocking(AsyncReplayClient.update_table)
    reset = blocking(AsyncReplayClient.reset)
    set_policy_version = blocking(AsyncReplayClient.set_policy_version)
    policy = blocking(AsyncReplayClient.policy)

    def watch_policy(self) -> Iterator[Policy]:
        """Yields the current policy, then every new one; see AsyncReplayClient.watch_policy."""
        watch = self._aio.watch_policy()
        self._watches.add(watch)
        try:
            while True:
                yield self._thread.run(anext(watch))
        finally:
            self._watches.discard(watch)
            with suppress(ServerClosedError):  # the client is closed already, and its `close` has ended the watch
                self._thread.run(watch.aclose())

    acquire_permits = blocking(AsyncReplayClient.acquire_permits)
    release_permits = blocking(AsyncReplayClient.release_permits)
    describe = blocking(AsyncReplayClient.describe)
    leave = blocking(AsyncReplayClient.leave)
    create_checkpoint = blocking(AsyncReplayClient.create_checkpoint)
    list_checkpoints = blocking(AsyncReplayClient.list_checkpoints)

    def close(self) -> None:
        """Closes the connection. Calls of other threads end with ServerClosedError. Closing twice is harmless."""
        self._thread.close(self._close())

    async def _close(self) -> None:
        """Closes the asyncio client, and ends the iterators of `watch_policy`, on the loop's thread."""
        await self._aio.close()
        # End the watches now, because an iterator of `watch_policy` cannot use this loop any more after the client is
        # closed.
        for watch in list(self._watches):
            # `aclose` raises RuntimeError if a thread still waits in `anext(watch)`. LoopThread.close cancels that wait
            # later.
            with suppress(RuntimeError):
                await watch.aclose()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be pickled or copied; make one in each process")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -------------------------------------------------------------------------------------------------------- the thread

# gRPC may still call an event loop after the last RPC on the loop has ended, and writes an error to stderr if the loop
# is closed. Therefore the loops of closed clients stay open, and later clients use them. The number beside a loop is
# the value of `forks()` in the process that used the loop. A forked process has another value, and cannot use the loop.
_idle_loops: deque[tuple[int, asyncio.AbstractEventLoop]] = deque()


def _event_loop() -> asyncio.AbstractEventLoop:
    """An idle loop that this process can use, or else a new loop. Drops idle loops from before a fork."""
    while _idle_loops:
        forks_before, loop = _idle_loops.pop()
        if forks_before == forks():
            return loop
    return new_event_loop()


class Wake:
    """A flag that one thread waits for and another thread sets. `wait` clears the flag.

    A Wake takes a quarter of the time of a `threading.Event`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Locked while the flag is clear."""
        self._lock.acquire()

    def set(self) -> None:
        """Sets the flag, from any thread."""
        with suppress(RuntimeError):  # the lock is free: the flag is set already
            self._lock.release()

    def wait(self) -> None:
        """Waits until the flag is set, and clears it.

        About once a second, calls the function that was given to `replay_client.waits.looking`. If this function or the
        handler of a signal raises an exception, the wait ends with it. When the program ends, raises SystemExit in a
        daemon thread.
        """
        # The timeout is for a signal that arrives right before `acquire`. Python runs its handler only when `acquire`
        # returns, so without a timeout, Ctrl-C and SIGTERM would do nothing.
        while not self._lock.acquire(timeout=1.0):
            look_around()
        _end_daemon_thread()


class _Call(Generic[T]):
    """A coroutine that runs on a loop while the calling thread waits for it.

    When the coroutine ends, its own task wakes the calling thread. `asyncio.run_coroutine_threadsafe` would wake the
    thread from a callback, one turn of the loop later.
    """

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._value: T
        """The result of the coroutine, once it has returned."""
        self._error: BaseException | None = asyncio.CancelledError()
        """The error of the coroutine; None: the coroutine has returned.

        The first value is a CancelledError, because `_run` never runs if the task is cancelled before it begins."""
        self._ended = Wake()
        loop.call_soon_threadsafe(self._start)

    def result(self) -> T:
        """Waits for the end of the coroutine. Returns its result, or raises its error.

        If an exception such as KeyboardInterrupt ends the wait, cancels the coroutine.
        """
        try:
            self._ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(self._cancel)
            raise
        if self._error is not None:
            try:
                raise self._error
            finally:
                # The traceback of the error refers to this frame, and so to `self`. Without this line, `self` and the
                # error would be a reference cycle.
                self._error = None
        return self._value

    # The methods below run on the loop's thread.

    def _start(self) -> None:
        """Starts the task that runs the coroutine."""
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        """Cancels the coroutine. The loop has called `_start` before, because it runs callbacks in order."""
        assert self._task is not None, "callbacks run in order"
        self._task.cancel()

    async def _run(self) -> None:
        """Runs the coroutine, stores its result or error, and wakes the calling thread."""
        try:
            self._value = await self._work
            self._error = None
        except BaseException as error:
            self._error = error
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise  # asyncio ends the loop with these two errors
        finally:
            self._ended.set()

    def _end(self, task: asyncio.Task[None]) -> None:
        """Wakes the calling thread after the end of the task.

        `_run` has done so already, unless the task was cancelled before `_run` began.
        """
        # If the coroutine never began, `close` prevents Python's warning that it was never awaited. If the coroutine
        # has ended, `close` does nothing.
        self._work.close()
        self._ended.set()


class LoopThread:
    """An event loop in a daemon thread, for calls from other threads."""

    def __init__(self) -> None:
        self.loop = _event_loop()
        self._forks_before = forks()
        """The value of `forks()` when this object was made. In a process that was forked later, `forks()` is higher,
        and no thread runs the loop."""
        self._thread = threading.Thread(target=self.loop.run_forever, name="replay-client", daemon=True)
        self._thread.start()
        self._closed = False
        _running.add(self)

    def check(self) -> None:
        """Raises RuntimeError after a fork, and ClientClosedError after `close`."""
        if self._forks_before != forks():
            raise RuntimeError(
                "this ReplayClient was made before a fork and does not work after it; make one in each process"
            )
        if self._closed:
            _end_daemon_thread()
            raise ClientClosedError("this client is closed")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the loop and returns its result.

        If an exception such as KeyboardInterrupt interrupts the calling thread, cancels `work`.
        """
        try:
            self.check()
        except BaseException:
            work.close()  # else Python warns that the coroutine was never awaited
            raise
        return self._run(work)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Does the same as `run`, but does not check that this object is open, so that `close` can call it."""
        try:
            return _Call(work, self.loop).result()
        except asyncio.CancelledError:
            raise ClientClosedError("this client was closed while the call waited") from None

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Runs `last`, ends the calls of other threads with ClientClosedError, and stops the loop.

        Does nothing if this object is closed already, or after a fork.
        """
        if self._closed or self._forks_before != forks():
            last.close()  # else Python warns that the coroutine was never awaited
            return
        self._closed = True

        async def finish() -> None:
            """Runs `last`, and then cancels all other tasks of the loop."""
            await last
            others = asyncio.all_tasks() - {asyncio.current_task()}  # the calls of other threads
            for task in others:
                task.cancel()
            # `return_exceptions`: wait until all tasks have ended, even if some end with an error.
            await asyncio.gather(*others, return_exceptions=True)

        self._run(finish())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        _running.discard(self)
        _idle_loops.append((self._forks_before, self.loop))  # a later client may use the loop

    def begin_end(self) -> None:
        """Makes the loop cancel its tasks and stop soon, without waiting for it. Does nothing after a fork."""
        if self._forks_before == forks():
            self._closed = True
            self.loop.call_soon_threadsafe(self._cancel_and_stop)

    def join(self, deadline: Deadline) -> None:
        """Waits until the thread has ended, or until the deadline."""
        self._thread.join(deadline.seconds)

    def _cancel_and_stop(self) -> None:
        """Cancels all tasks of the loop, and stops the loop when they have ended. Runs on the loop."""
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: self.loop.stop())
        self.loop.call_later(_TASKS_END, self.loop.stop)  # some task may go on although it is cancelled


# -------------------------------------------------------------------------------------------- the end of the program

_running: set[LoopThread] = set()
"""The loop threads of this process that run, and those from before a fork. A program may have dropped a client without
closing it: its loop thread runs nevertheless."""
_TASKS_END = 0.5
"""Seconds in which the tasks of a loop must end, when the program ends."""
_THREADS_END = 2 * _TASKS_END
"""Seconds in which all loop threads must end, when the program ends. A thread may be blocked, for example by a function
of the user that the loop has called."""
_program_ends = False
"""True once `_end_threads` has begun."""


@atexit.register
def _end_threads() -> None:
    """Ends the loop threads of clients that the program has left open, when the program ends.

    Python ends daemon threads in the middle of what they do. A loop thread that is inside gRPC at this moment can end
    the process with SIGSEGV, whatever the program has done before. The connections are not closed in good order,
    because a server that hangs must not keep the program from ending.
    """
    global _program_ends
    _program_ends = True
    threads = list(_running)
    for thread in threads:
        thread.begin_end()
    deadline = Deadline(_THREADS_END)
    for thread in threads:
        thread.join(deadline)


def _end_daemon_thread() -> None:
    """Raises SystemExit in a daemon thread when the program ends, so that the thread ends without a word.

    Python itself would have ended such a thread without a word. An error of a client would be printed.
    """
    if _program_ends and threading.current_thread().daemon:
        raise SystemExit
