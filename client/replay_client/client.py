"""ReplayClient: the client for code without asyncio. Its calls run on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt

from replay_client.access import TLS
from replay_client.aio import WRITER_BYTES, AsyncReplayClient
from replay_client.connection import DEFAULT, Timeout
from replay_client.errors import DeadlineExceededError, ReplayError, ServerClosedError
from replay_client.records import (
    Buffer,
    CheckpointInfo,
    ItemPage,
    MutationResult,
    PermitLease,
    Policy,
    Sample,
    ServerInfo,
    StoredItem,
    TableInfo,
)
from replay_client.rollout import RolloutGroup
from replay_client.sampler import AsyncSampler
from replay_client.writer import AsyncWriter

T = TypeVar("T")


_forks = 0
"""How many forks lie between the first process and this one."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)

_resting: deque[tuple[int, asyncio.AbstractEventLoop]] = deque()
"""Event loops of clients that were closed, with the `_forks` of their process, for the next ones: gRPC still has words
for a loop after its last call has ended, and complains to stderr where they find it closed."""


def _event_loop() -> asyncio.AbstractEventLoop:
    while _resting:
        forks, loop = _resting.pop()
        if forks == _forks:
            return loop
    return asyncio.new_event_loop()


class LoopThread:
    """An event loop in a daemon thread, for calls from other threads."""

    def __init__(self) -> None:
        self.loop = _event_loop()
        self._forks = _forks
        self._thread = threading.Thread(target=self.loop.run_forever, name="replay-client", daemon=True)
        self._thread.start()
        self._closed = False

    def check(self) -> None:
        if self._forks != _forks:
            raise RuntimeError(
                "this ReplayClient was made before a fork and does not work after it; make one in each process"
            )
        if self._closed:
            raise ServerClosedError("this client is closed")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, run on the loop. An interrupt of the caller cancels it."""
        try:
            self.check()
        except BaseException:
            work.close()
            raise
        return self._run(work)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ServerClosedError("this client was closed while the call waited") from None
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Runs `last`, ends the calls of other threads with ServerClosedError, and stops the loop."""
        if self._closed or self._forks != _forks:
            last.close()
            return
        self._closed = True

        async def finish() -> None:
            await last
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self._run(finish())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        _resting.append((self._forks, self.loop))


class ReplayClient:
    """A client of the replay server at `address` ("host:port"), for any number of threads.

    Methods and errors are those of `AsyncReplayClient`. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        address: str,
        timeout: float | None = 30.0,
        *,
        token: str | None = None,
        tls: TLS | bool = False,
        allow_insecure_token: bool = False,
    ) -> None:
        """As AsyncReplayClient."""
        self._aio = AsyncReplayClient(address, timeout, token=token, tls=tls, allow_insecure_token=allow_insecure_token)
        self._thread = LoopThread()

    @classmethod
    def from_env(cls, timeout: float | None = 30.0, **settings: Any) -> Self:
        """As AsyncReplayClient.from_env."""
        client = cls.__new__(cls)
        client._aio = AsyncReplayClient.from_env(timeout, **settings)
        client._thread = LoopThread()
        return client

    @property
    def address(self) -> str:
        """host:port of the server."""
        return self._aio.address

    def insert(
        self,
        group: RolloutGroup | Buffer,
        priorities: Mapping[str, float],
        *,
        key: int | None = None,
        policy_version: int | None = None,
        permits: PermitLease | None = None,
        timeout: Timeout = DEFAULT,
    ) -> int:
        """As AsyncReplayClient.insert."""
        return self._thread.run(
            self._aio.insert(
                group, priorities, key=key, policy_version=policy_version, permits=permits, timeout=timeout
            )
        )

    def writer(self, max_in_flight: int = 64, *, max_bytes: int = WRITER_BYTES, timeout: Timeout = DEFAULT) -> Writer:
        """As AsyncReplayClient.writer; used with `with`."""

        async def make() -> AsyncWriter:
            return self._aio.writer(max_in_flight, max_bytes=max_bytes, timeout=timeout)

        return Writer(self._thread, self._thread.run(make()))

    def sample(
        self,
        table: str,
        num_samples: int = 1,
        *,
        min_samples: int | None = None,
        timeout: Timeout = DEFAULT,
        distinct: bool = True,
        scope: str = "",
        exclude: Iterable[int] = (),
        lease: float = 0.0,
    ) -> list[Sample]:
        """As AsyncReplayClient.sample."""
        return self._thread.run(
            self._aio.sample(
                table,
                num_samples,
                min_samples=min_samples,
                timeout=timeout,
                distinct=distinct,
                scope=scope,
                exclude=exclude,
                lease=lease,
            )
        )

    def acknowledge(
        self, samples: Iterable[Sample], *, give_back: bool = False, timeout: Timeout = DEFAULT
    ) -> MutationResult:
        """As AsyncReplayClient.acknowledge."""
        return self._thread.run(self._aio.acknowledge(samples, give_back=give_back, timeout=timeout))

    def sampler(
        self, table: str, batch_size: int = 1, *, prefetch: int = 2, timeout: Timeout = DEFAULT, distinct: bool = True
    ) -> Sampler:
        """As AsyncReplayClient.sampler; an iterator, closed by `with`, `close()` or the end of the client."""
        return Sampler(
            self._thread,
            self._aio.sampler(table, batch_size, prefetch=prefetch, timeout=timeout, distinct=distinct),
        )

    def update_priorities(
        self, table: str, priorities: Mapping[int, float], *, timeout: Timeout = DEFAULT
    ) -> MutationResult:
        """As AsyncReplayClient.update_priorities."""
        return self._thread.run(self._aio.update_priorities(table, priorities, timeout=timeout))

    def update_priority_arrays(
        self,
        table: str,
        keys: npt.NDArray[np.uint64],
        priorities: npt.NDArray[np.float64],
        *,
        timeout: Timeout = DEFAULT,
    ) -> MutationResult:
        """As AsyncReplayClient.update_priority_arrays."""
        return self._thread.run(self._aio.update_priority_arrays(table, keys, priorities, timeout=timeout))

    def delete(self, table: str, keys: Iterable[int], *, timeout: Timeout = DEFAULT) -> MutationResult:
        """As AsyncReplayClient.delete."""
        return self._thread.run(self._aio.delete(table, keys, timeout=timeout))

    def get(self, keys: Iterable[int], *, timeout: Timeout = DEFAULT) -> list[StoredItem]:
        """As AsyncReplayClient.get."""
        return self._thread.run(self._aio.get(keys, timeout=timeout))

    def list_items(
        self,
        table: str,
        *,
        limit: int = 100,
        order_by: Literal["age", "priority", "policy_version", "times_sampled", "size"] = "age",
        descending: bool = False,
        page: str = "",
        min_priority: float | None = None,
        max_priority: float | None = None,
        min_staleness: int | None = None,
        max_staleness: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> ItemPage:
        """As AsyncReplayClient.list_items."""
        return self._thread.run(
            self._aio.list_items(
                table,
                limit=limit,
                order_by=order_by,
                descending=descending,
                page=page,
                min_priority=min_priority,
                max_priority=max_priority,
                min_staleness=min_staleness,
                max_staleness=max_staleness,
                timeout=timeout,
            )
        )

    def server_info(self, *, tables: Iterable[str] = (), timeout: Timeout = DEFAULT) -> ServerInfo:
        """As AsyncReplayClient.server_info."""
        return self._thread.run(self._aio.server_info(tables=tables, timeout=timeout))

    def update_table(self, table: str, *, timeout: Timeout = DEFAULT, **changes: Any) -> TableInfo:
        """As AsyncReplayClient.update_table."""
        return self._thread.run(self._aio.update_table(table, timeout=timeout, **changes))

    def reset(self, table: str, *, timeout: Timeout = DEFAULT) -> int:
        """As AsyncReplayClient.reset."""
        return self._thread.run(self._aio.reset(table, timeout=timeout))

    def set_policy_version(
        self, version: int, weights: str = "", *, rollback: bool = False, timeout: Timeout = DEFAULT
    ) -> Policy:
        """As AsyncReplayClient.set_policy_version."""
        return self._thread.run(self._aio.set_policy_version(version, weights, rollback=rollback, timeout=timeout))

    def policy(self, *, timeout: Timeout = DEFAULT) -> Policy:
        """As AsyncReplayClient.policy."""
        return self._thread.run(self._aio.policy(timeout=timeout))

    def watch_policy(self) -> Iterator[Policy]:
        """As AsyncReplayClient.watch_policy."""
        watch = self._aio.watch_policy()
        try:
            while True:
                yield self._thread.run(anext(watch))
        finally:
            with suppress(ServerClosedError):  # closed with the client
                self._thread.run(watch.aclose())

    def acquire_permits(self, count: int = 1, *, timeout: Timeout = DEFAULT) -> PermitLease:
        """As AsyncReplayClient.acquire_permits."""
        return self._thread.run(self._aio.acquire_permits(count, timeout=timeout))

    def release_permits(self, lease: PermitLease, count: int = 0, *, timeout: Timeout = DEFAULT) -> int:
        """As AsyncReplayClient.release_permits."""
        return self._thread.run(self._aio.release_permits(lease, count, timeout=timeout))

    def checkpoint(self, name: str = "", *, timeout: Timeout = DEFAULT) -> str:
        """As AsyncReplayClient.checkpoint."""
        return self._thread.run(self._aio.checkpoint(name, timeout=timeout))

    def checkpoints(self, *, verify: bool = False, timeout: Timeout = DEFAULT) -> list[CheckpointInfo]:
        """As AsyncReplayClient.checkpoints."""
        return self._thread.run(self._aio.checkpoints(verify=verify, timeout=timeout))

    def close(self) -> None:
        """As AsyncReplayClient.close; the second time it does nothing."""
        self._thread.close(self._aio.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Writer:
    """AsyncWriter for code without asyncio; `insert` hands over and returns without a round trip to the loop."""

    def __init__(self, thread: LoopThread, writer: AsyncWriter) -> None:
        self._thread = thread
        self._writer = writer
        self._pipeline = writer.pipeline

    @property
    def refused(self) -> Mapping[int, ReplayError]:
        """As AsyncWriter.refused."""
        return self._writer.refused

    def insert(
        self,
        group: RolloutGroup | Buffer,
        priorities: Mapping[str, float],
        *,
        policy_version: int | None = None,
        permits: PermitLease | None = None,
    ) -> int:
        """As AsyncWriter.insert."""
        self._thread.check()
        item = self._writer.item(group, priorities, policy_version, permits)
        if not self._pipeline.offer(item):
            room = threading.Event()
            while not self._pipeline.offer(item, room.set):
                room.wait()
                room.clear()
        return item.key

    def flush(self, timeout: Timeout = DEFAULT) -> None:
        """As AsyncWriter.flush."""
        # Waited for here and not on the loop: that saves a hand-over between the threads.
        self._thread.check()
        seconds, drained = self._pipeline.seconds(timeout), threading.Event()
        while not self._pipeline.drained(drained.set):
            if not drained.wait(seconds):
                raise DeadlineExceededError(self._pipeline.waiting())
            drained.clear()

    def close(self) -> None:
        """Stops without waiting; what is not acknowledged may or may not have been stored."""
        self._thread.run(self._writer.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()


class Sampler:
    """AsyncSampler for code without asyncio."""

    def __init__(self, thread: LoopThread, sampler: AsyncSampler) -> None:
        self._thread = thread
        self._sampler = sampler

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Sample]:
        """As AsyncSampler.__anext__."""
        try:
            return self._thread.run(self._sampler.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Gives back what was drawn ahead."""
        self._thread.run(self._sampler.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
