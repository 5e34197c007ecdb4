"""ReplayClient: the client for code without asyncio, derived from AsyncReplayClient method by method."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Self, TypeVar

from replay_client.access import TLS
from replay_client.aio import AsyncReplayClient
from replay_client.columns.encoding import Buffer
from replay_client.connection import DEFAULT, Timeout
from replay_client.errors import DeadlineExceededError, ReplayError, ServerClosedError
from replay_client.keeping import AsyncKeeper
from replay_client.loop_thread import LoopThread, Wake
from replay_client.records import PermitLease, Policy, Sample
from replay_client.rollout import RolloutGroup
from replay_client.sampling import AsyncSampler
from replay_client.writer import AsyncWriter

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")
A = TypeVar("A", AsyncWriter, AsyncSampler, AsyncKeeper)


def blocking(
    method: Callable[Concatenate[AsyncReplayClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[ReplayClient, P], T]:
    """The blocking form of a method: its parameters, docstring and errors, and its result instead of a coroutine."""

    @wraps(method)
    def call(self: ReplayClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.run(method(self._aio, *args, **kwargs))

    # `wraps` copies these too. Tracebacks and the reference must name the method of this class.
    call.__module__, call.__qualname__ = __name__, f"ReplayClient.{method.__name__}"
    return call


def handing_out(
    method: Callable[Concatenate[AsyncReplayClient, P], T], wrapper: Callable[[LoopThread, T], W]
) -> Callable[Concatenate[ReplayClient, P], W]:
    """The blocking form of a method that makes a writer, sampler or keeper: it wraps what the method makes."""

    @wraps(method)
    def call(self: ReplayClient, /, *args: P.args, **kwargs: P.kwargs) -> W:
        async def make() -> T:
            return method(self._aio, *args, **kwargs)

        return wrapper(self._thread, self._thread.run(make()))

    call.__module__, call.__qualname__ = __name__, f"ReplayClient.{method.__name__}"
    call.__annotations__ = {**method.__annotations__, "return": wrapper.__name__}
    return call


class _Blocking(Generic[A]):
    """A writer, sampler or keeper of a blocking client, for `with`. It calls the asyncio one on its thread."""

    def __init__(self, thread: LoopThread, aio: A) -> None:
        self._thread = thread
        self._aio: A = aio

    def close(self) -> None:
        """Ends its work in the background."""
        self._thread.run(self._aio.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


class Writer(_Blocking[AsyncWriter]):
    """Inserts without waiting for each acknowledgement; made by `ReplayClient.writer()`, for `with`.

    The end of the `with` block flushes the writer. `close` alone does not wait: the server may or may not have what it
    has not acknowledged.
    """

    def __init__(self, thread: LoopThread, writer: AsyncWriter) -> None:
        super().__init__(thread, writer)
        self._pipeline = writer.pipeline
        self.refused: Mapping[int, ReplayError] = writer.refused
        """The items that the server refused: their keys, each with the reason."""
        self.evicted: Mapping[int, tuple[str, ...]] = writer.evicted
        """The items that left a full table at once, because its remover chose them: their tables by key.

        The newest 65,536 of them. They were inserted, so this is no error; a pool that keeps the best does not keep
        them.
        """

    def insert(
        self,
        group: RolloutGroup | Buffer,
        priorities: Mapping[str, float],
        *,
        key: int | None = None,
        policy_version: int | None = None,
        permits: PermitLease | None = None,
        tags: Mapping[str, str | int] | None = None,
    ) -> int:
        """Queues a group and returns its key; waits only while `max_in_flight` or `max_bytes` are in flight.

        Raises the first error of earlier inserts that was not raised yet, and then does not queue this group.
        """
        # No hand-over to the loop: it would cost more than all the rest.
        self._thread.check()
        item = self._aio.item(group, priorities, key, policy_version, permits, tags)
        if not self._pipeline.offer(item):
            room = Wake()
            while not self._pipeline.offer(item, room.set):
                room.wait(None)
        return item.key

    def flush(self, timeout: Timeout = DEFAULT) -> None:
        """Returns when everything inserted so far is acknowledged. Raises the first error of any of it."""
        # This thread waits, and not the loop: that saves a hand-over.
        self._thread.check()
        seconds, drained = self._pipeline.seconds(timeout), Wake()
        while not self._pipeline.drained(drained.set):
            if not drained.wait(seconds):
                raise DeadlineExceededError(self._pipeline.waiting())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()


class Keeper(_Blocking[AsyncKeeper]):
    """Keeps samples leased, however long the caller's own thread works; made by `ReplayClient.keep()`, for `with`.

    The end of the `with` block ends the renewals, and no lease: `acknowledge` does that.
    """

    def add(self, samples: Iterable[Sample]) -> None:
        """Renews their leases from now on, the first time at once. Samples without a lease are passed over."""
        self._thread.run(self._call(self._aio.add, samples))

    def let_go(self, samples: Iterable[Sample]) -> None:
        """Renews the leases of these samples no more. All samples of one draw have one lease."""
        self._thread.run(self._call(self._aio.let_go, samples))

    async def _call(self, method: Callable[[Iterable[Sample]], None], samples: Iterable[Sample]) -> None:
        method(samples)


class Sampler(_Blocking[AsyncSampler]):
    """An endless iterator over batches; made by `ReplayClient.sampler()`, for `with` and `for`.

    The server draws up to `prefetch` batches ahead. A batch counts as sampled when it is handed to the caller. `close`
    gives back what was drawn ahead.
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Sample]:
        """The next batch. Raises DeadlineExceededError, with the reason, if there is none within the timeout."""
        try:
            return self._thread.run(self._aio.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None


class ReplayClient:
    """A client of the replay server at `address` ("host:port"). Any number of threads may use one client.

    Several addresses, as a list or with commas, or "ray://NAMESPACE/NAME", make a client of all these servers with the
    same methods; `replay_client.shards` says what each then does.

    Every method takes `timeout` in seconds. Without it the client's own timeout applies; None waits for ever. While no
    server answers, a method tries again until its time is up, and then raises ServerUnavailableError. All errors are
    subclasses of `replay_client.errors.ReplayError`.

    Close the client, or use it as a context manager. A client does not work in a forked process: use `spawn`.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        timeout: float | None = 30.0,
        *,
        token: str | None = None,
        tls: TLS | bool = False,
        allow_insecure_token: bool = False,
        shared_memory: bool = True,
        name: str | None = None,
    ) -> None:
        """`tls`: True for a server whose certificate a public authority signed, or a TLS that names files.

        `shared_memory=False` sends payloads over gRPC even to a server on this host. `name`: how the server lists this
        client among those that insert, sample or publish; host:pid unless given.

        A token goes to other machines only over TLS, unless `allow_insecure_token` says that the network is trusted.
        Raises ValueError for an address, token or file that cannot be used, and RuntimeError in a process that was
        forked while gRPC was in use.
        """
        self._start(
            AsyncReplayClient(
                address,
                timeout,
                token=token,
                tls=tls,
                allow_insecure_token=allow_insecure_token,
                shared_memory=shared_memory,
                name=name,
            )
        )

    @classmethod
    def from_env(cls, timeout: float | None = 30.0, **settings: Any) -> Self:
        """A client with the settings of the environment; see AsyncReplayClient.from_env."""
        client = cls.__new__(cls)
        client._start(AsyncReplayClient.from_env(timeout, **settings))
        return client

    def _start(self, client: AsyncReplayClient) -> None:
        self._aio = client
        self._thread = LoopThread()
        self._watches: set[AsyncGenerator[Policy]] = set()

    @property
    def address(self) -> str:
        """host:port of the server."""
        return self._aio.address

    @property
    def transport(self) -> str:
        """How payloads travel: "shared memory", or "grpc: " with the reason. Asks the server if that is not known."""
        return self.find_transport()

    find_transport = blocking(AsyncReplayClient.find_transport)
    insert = blocking(AsyncReplayClient.insert)
    extend = blocking(AsyncReplayClient.extend)
    writer = handing_out(AsyncReplayClient.writer, Writer)
    sample = blocking(AsyncReplayClient.sample)
    acknowledge = blocking(AsyncReplayClient.acknowledge)
    renew = blocking(AsyncReplayClient.renew)
    take = blocking(AsyncReplayClient.take)
    keep = handing_out(AsyncReplayClient.keep, Keeper)
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
            with suppress(ServerClosedError):  # closed with the client
                self._thread.run(watch.aclose())

    acquire_permits = blocking(AsyncReplayClient.acquire_permits)
    release_permits = blocking(AsyncReplayClient.release_permits)
    describe = blocking(AsyncReplayClient.describe)
    leave = blocking(AsyncReplayClient.leave)
    checkpoint = blocking(AsyncReplayClient.checkpoint)
    checkpoints = blocking(AsyncReplayClient.checkpoints)

    def close(self) -> None:
        """Closes the connection. Calls of other threads end with ServerClosedError. Closing twice is harmless."""
        self._thread.close(self._close())

    async def _close(self) -> None:
        await self._aio.close()
        # An iterator of `watch_policy` that outlives the client can no longer end its watch on this loop.
        for watch in list(self._watches):
            with suppress(RuntimeError):  # a thread waits for it; that call is cancelled, which ends the watch
                await watch.aclose()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be pickled or copied; make one in each process")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
