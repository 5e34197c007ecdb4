"""ReplayClient: the client for code without asyncio, derived from AsyncReplayClient method by method."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Self, TypeVar

from replay_client.aio import AsyncReplayClient
from replay_client.columns import Buffer
from replay_client.connection import DEFAULT, Timeout
from replay_client.errors import ReplayError, ServerClosedError
from replay_client.lease_renewer import AsyncLeaseRenewer
from replay_client.records import PermitGrant, Policy, Sample
from replay_client.requests import Item
from replay_client.rollout import RolloutGroup
from replay_client.sampling import AsyncSampler
from replay_client.transport import forks
from replay_client.waits import look_around
from replay_client.writer import AsyncWriter
from replay_protos.event_loop import new_event_loop

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")
A = TypeVar("A", AsyncWriter, AsyncSampler, AsyncLeaseRenewer)


def blocking(
    method: Callable[Concatenate[AsyncReplayClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[ReplayClient, P], T]:
    """The blocking form of a method of AsyncReplayClient. It returns the result of the coroutine.

    It has the parameters, the docstring and the errors of `method`.
    """

    @wraps(method)
    def call(self: ReplayClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.run(method(self._aio, *args, **kwargs))

    # `wraps` copies both names from the method of AsyncReplayClient. Tracebacks and the reference must name this class.
    call.__module__ = __name__
    call.__qualname__ = f"ReplayClient.{method.__name__}"
    return call


def handing_out(
    method: Callable[Concatenate[AsyncReplayClient, P], T], wrapper: Callable[[LoopThread, T], W]
) -> Callable[Concatenate[ReplayClient, P], W]:
    """The blocking form of a method that makes a writer, sampler or renewer. It returns the result in `wrapper`."""

    @wraps(method)
    def call(self: ReplayClient, /, *args: P.args, **kwargs: P.kwargs) -> W:
        async def make() -> T:
            """Calls the method on the loop's thread, because the result starts tasks of that loop."""
            return method(self._aio, *args, **kwargs)

        return wrapper(self._thread, self._thread.run(make()))

    call.__module__ = __name__
    call.__qualname__ = f"ReplayClient.{method.__name__}"
    # The reference shows the annotations: the result is the wrapper and not the asyncio object.
    call.__annotations__ = {**method.__annotations__, "return": wrapper.__name__}
    return call


def constructed_as(
    origin: Callable[Concatenate[AsyncReplayClient, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[ReplayClient, P], None]]:
    """Gives a constructor the parameters and the docstring of `origin`."""
    return wraps(origin)


class _Blocking(Generic[A]):
    """A writer, sampler or renewer of a blocking client, for `with`.

    It calls the asyncio writer, sampler or renewer on the thread of the client's loop.
    """

    def __init__(self, thread: LoopThread, aio: A) -> None:
        self._thread = thread
        self._aio: A = aio

    def close(self) -> None:
        """Ends the background work of the writer, sampler or renewer."""
        self._thread.run(self._aio.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


class Writer(_Blocking[AsyncWriter]):
    """Inserts without waiting for each acknowledgement; made by `ReplayClient.writer()`, for `with`.

    The end of the `with` block flushes the writer, unless the block raises. `close` alone does not wait: the server may
    or may not have the items that it has not acknowledged.
    """

    def __init__(self, thread: LoopThread, writer: AsyncWriter) -> None:
        super().__init__(thread, writer)
        self.refused: Mapping[int, ReplayError] = writer.refused
        """The reason for each item that the server refused, by the key of the item."""
        self.evicted: Mapping[int, tuple[str, ...]] = writer.evicted
        """The items that a full table removed as soon as they were inserted: the names of these tables by item key.

        The mapping has the newest 65,536 of these items. Such a removal is no error: a pool that keeps the best items
        does not keep every new item.
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
        """Queues a group and returns its key; waits only while `max_in_flight` or `max_bytes` are in flight.

        Raises the first error of earlier inserts that was not raised yet, and then does not queue this group.
        """
        # The calling thread makes the item and offers it to the writer. A task on the loop for each insert would cost
        # more than the whole rest of an insert.
        self._thread.check()
        if key is None:
            key = next(self._aio.keys)
        item = Item.of(key, group, priorities, policy_version, self._aio.timeout, permits, tags)
        if not self._aio.offer(item):  # too much is in flight
            room = Wake()
            # An offer that finds no room leaves `room.set` with the writer, which calls it when there may be room.
            while not self._aio.offer(item, room.set):
                room.wait()
        return item.key

    def flush(self, timeout: Timeout = DEFAULT) -> None:
        """Returns when the server has acknowledged all items inserted so far. Raises the first error of them."""
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
        """Renews the leases of these samples no more. All samples of one draw share a lease."""
        self._thread.run(self._call(self._aio.forget, samples))

    async def _call(self, method: Callable[[Iterable[Sample]], None], samples: Iterable[Sample]) -> None:
        """A coroutine that calls `method`, because `LoopThread.run` runs only coroutines."""
        method(samples)


class Sampler(_Blocking[AsyncSampler]):
    """An endless iterator over batches; made by `ReplayClient.sampler()`, for `with` and `for`.

    The server draws up to `prefetch` batches ahead. A batch counts as sampled when it is handed to the caller. `close`
    requeues the batches that were drawn ahead.
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

    Several addresses, as a list or with commas, or "ray://NAMESPACE/NAME", make a client of all these servers with the
    same methods. `replay_client.shards` says what each method does then.

    Every method takes `timeout` in seconds. Without it the client's own timeout applies; None waits for ever. While no
    server answers, a method tries again until its time is up, and then raises ServerUnavailableError. All errors are
    subclasses of `replay_client.errors.ReplayError`.

    Close the client, or use it as a context manager. A client does not work in a forked process: use `spawn`.
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
        """Sets the attributes and starts the thread, for both constructors."""
        self._aio = client
        self._thread = LoopThread()
        self._watches: set[AsyncGenerator[Policy]] = set()
        """The open iterators of `watch_policy`, which `close` ends."""

    @property
    def address(self) -> str:
        """As `AsyncReplayClient.address`."""
        return self._aio.address

    @property
    def transport(self) -> str:
        """The transport of payloads: "shared memory", or "grpc: " with the reason. Asks the server if unknown."""
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
        # End the watches here: an iterator of `watch_policy` that outlives the client can no longer use this loop.
        for watch in list(self._watches):
            # RuntimeError: a thread still waits in `anext(watch)`. LoopThread.close cancels this wait.
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
# is closed. Therefore the loops of closed clients stay open, and later clients use them again. The number beside a loop
# is the value of `forks()` when the loop was made: a forked process cannot use the loop.
_idle_loops: deque[tuple[int, asyncio.AbstractEventLoop]] = deque()


def _event_loop() -> asyncio.AbstractEventLoop:
    """An idle loop that was made in this process, or else a new one."""
    while _idle_loops:
        made_at, loop = _idle_loops.pop()
        if made_at == forks():
            return loop
    return new_event_loop()


class Wake:
    """A flag that one thread waits for and another thread sets. The wait clears the flag.

    It costs a quarter of the time of a `threading.Event`.
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

        An exception of a signal's handler, or of the function of `replay_client.waits.looking`, ends the wait.
        """
        # The timeout is for signals that arrive right before the wait. Python runs their handlers only when the wait
        # ends, so Ctrl-C and SIGTERM would do nothing during a wait without a timeout.
        while not self._lock.acquire(timeout=1.0):
            look_around()


class _Call(Generic[T]):
    """A coroutine that runs on a loop while the calling thread waits for it.

    The task of the coroutine wakes the thread itself when it ends. The future of `asyncio.run_coroutine_threadsafe`
    would wake the thread from a callback, one turn of the loop later.
    """

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._value: T
        """The result of the coroutine, once it has returned."""
        self._error: BaseException | None = asyncio.CancelledError()
        """The error of the coroutine; None: it has returned. If the task is cancelled before it begins, `_run` never
        runs and the first value stays."""
        self._ended = Wake()
        loop.call_soon_threadsafe(self._start)

    def result(self) -> T:
        """Waits for the result of the coroutine. An interrupt of this wait cancels the coroutine."""
        try:
            self._ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(self._cancel)
            raise
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # the error's traceback refers to this frame: a reference cycle
        return self._value

    # The methods below run on the loop's thread.

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
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
                raise  # asyncio lets these two errors end the loop
        finally:
            self._ended.set()

    def _end(self, task: asyncio.Task[None]) -> None:
        """Wakes the calling thread even if the task was cancelled before it began, and `_run` never ran."""
        # If the coroutine never began, Python would warn that it was never awaited. If it has ended, this does nothing.
        self._work.close()
        self._ended.set()


class LoopThread:
    """An event loop in a daemon thread, for calls from other threads."""

    def __init__(self) -> None:
        self.loop = _event_loop()
        self._made_at = forks()
        """The number of forks when this object was made. After a fork, the thread does not exist in the child."""
        self._thread = threading.Thread(target=self.loop.run_forever, name="replay-client", daemon=True)
        self._thread.start()
        self._closed = False

    def check(self) -> None:
        """Raises RuntimeError after a fork, and ServerClosedError after `close`."""
        if self._made_at != forks():
            raise RuntimeError(
                "this ReplayClient was made before a fork and does not work after it; make one in each process"
            )
        if self._closed:
            raise ServerClosedError("this client is closed")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the loop and returns its result. An interrupt of the calling thread cancels `work`."""
        try:
            self.check()
        except BaseException:
            work.close()  # else Python warns that the coroutine was never awaited
            raise
        return self._run(work)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """As `run`, also on a closed client: `close` uses it for its last coroutine."""
        try:
            return _Call(work, self.loop).result()
        except asyncio.CancelledError:
            raise ServerClosedError("this client was closed while the call waited") from None

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Runs `last`, ends the calls of other threads with ServerClosedError, and stops the loop.

        Does nothing the second time, and after a fork.
        """
        if self._closed or self._made_at != forks():
            last.close()  # else Python warns that the coroutine was never awaited
            return
        self._closed = True

        async def finish() -> None:
            """Runs `last`, and then cancels all other tasks of the loop."""
            await last
            others = asyncio.all_tasks() - {asyncio.current_task()}  # the calls of other threads
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)  # waits until all have ended, however they end

        self._run(finish())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        _idle_loops.append((self._made_at, self.loop))  # a later client uses the loop again
