"""ShardedClient: AsyncReplayClient over several servers. The package's docstring has the rule of each method."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from replay_client.access import TLS, Access, split_addresses
from replay_client.aio import WRITER_BYTES, AsyncReplayClient
from replay_client.connection import DEFAULT, Timeout, Unset, check_timeout
from replay_client.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ServerClosedError,
    ServerUnavailableError,
    ShardDrainingError,
)
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
from replay_client.requests import MOST_KEYS, KeySequence, column, whole_number
from replay_client.rollout import RolloutGroup
from replay_client.sampling import OnLease, ignore
from replay_client.shards.by_key import KeyedItems
from replay_client.shards.fleet import Deadline, Fleet
from replay_client.shards.merging import merge_infos, merge_messages, merge_pages, read_page
from replay_client.shards.permits import PermitOffice
from replay_client.shards.policy import PolicyBoard
from replay_client.shards.ray_names import RayNames
from replay_client.shards.sampling import Drawer, DrawOfAll, ShardedSampler
from replay_client.shards.shard import Shard
from replay_client.shards.writing import Placement, ShardedPipeline, ShardedWriter
from replay_client.writer import Pipeline

SECONDS_PER_LOOK = 5.0
"""Seconds between two looks for shards that were added or taken away."""
_PAUSE = 0.1
"""Seconds before the next attempt at a shard that shuts down."""


class ShardedClient(AsyncReplayClient):
    """A client of several servers, which know nothing of each other; made by `AsyncReplayClient([...])`."""

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
        """As AsyncReplayClient. Raises ValueError for an address that comes twice, or for none."""
        check_timeout(timeout)
        make_client = partial(
            AsyncReplayClient,
            timeout=timeout,
            token=token,
            tls=tls,
            allow_insecure_token=allow_insecure_token,
            shared_memory=shared_memory,
            name=name,
        )
        self._timeout = timeout
        self._names = RayNames.of(address) if isinstance(address, str) else None
        self._following: asyncio.Task[None] | None = None
        if (names := self._names) is not None:
            self._make_shard: Callable[[str], Shard] = partial(Shard, make_client=make_client, locate=names.locate)
            shards = [self._make_shard(name) for name in names.find()]
        else:
            given = split_addresses(address)
            if not given or len(set(given)) < len(given):
                raise ValueError(f"addresses must differ, and there must be one at least: {given}")
            for one in given:
                Access(one)  # raises ValueError for what is no address
            shards = [Shard(one, make_client, None) for one in given]
        self._name = address if isinstance(address, str) else ",".join(address)
        self._fleet = Fleet(shards)
        self._keys = KeySequence()
        self._placement = Placement(self._fleet)
        self._drawer = Drawer(self._fleet)
        self._items = KeyedItems(self._fleet)
        self._board = PolicyBoard(self._fleet)
        self._permits = PermitOffice(self._fleet)
        self._closed = False

    @property
    def address(self) -> str:
        """All addresses, with commas, or the name of the service in Ray."""
        return self._name

    @property
    def transport(self) -> str:
        """How payloads travel to each shard that has an address, "SHARD: TRANSPORT", with semicolons."""
        return "; ".join(f"{shard.name}: {shard.client.transport}" for shard in self._fleet.shards if shard.address)

    async def find_transport(self) -> str:
        await self._fleet.ask(lambda client: client.find_transport(), self._deadline(DEFAULT))
        return self.transport

    # ------------------------------------------------------------------------------------------------ insert

    async def insert(
        self,
        group: RolloutGroup | Buffer,
        priorities: Mapping[str, float],
        *,
        key: int | None = None,
        policy_version: int | None = None,
        permits: PermitLease | None = None,
        timeout: Timeout = DEFAULT,
    ) -> int:
        deadline = self._deadline(timeout)
        key = next(self._keys) if key is None else whole_number("key", key, 64)
        await self._fleet.reachable(deadline)
        while True:
            shard = self._placement.shard_for(key, permits.shard if permits else "")
            try:
                return await shard.client.insert(
                    group, priorities, key=key, policy_version=policy_version, permits=permits, timeout=deadline.seconds
                )
            except ShardDrainingError:
                self._placement.forget(key, shard)
                if deadline.passed:
                    raise
            except ServerClosedError:  # it shuts down, and did not insert this; it may have at an earlier attempt
                self._placement.remember(key, shard)
                if self._closed or deadline.passed:
                    raise
                await asyncio.sleep(deadline.within(_PAUSE))
            except ServerUnavailableError as error:
                self._placement.remember(key, shard)
                raise ServerUnavailableError(
                    f"shard {shard.name} may have item {key} already, so no other shard gets it: {error}"
                ) from None
            except (DeadlineExceededError, asyncio.CancelledError):
                self._placement.remember(key, shard)
                raise

    def writer(
        self, max_in_flight: int = 64, *, max_bytes: int = WRITER_BYTES, timeout: Timeout = DEFAULT
    ) -> ShardedWriter:
        self._check_open()
        self._fleet.start()
        loop, seconds = asyncio.get_running_loop(), self._seconds(timeout)

        def make(shard: Shard) -> Pipeline:
            return Pipeline(shard.client.connection, loop, max_in_flight, max_bytes, seconds)

        pipeline = ShardedPipeline(self._fleet, self._placement, make, max_in_flight, max_bytes, seconds, self._seconds)
        return ShardedWriter(pipeline, self._keys)

    # ------------------------------------------------------------------------------------------------ sample

    async def sample(
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
        deadline = self._deadline(timeout)
        draw = _draw(table, num_samples, min_samples, distinct, scope, exclude)
        return await self._drawer.sample(draw, deadline, lease)

    async def acknowledge(
        self, samples: Iterable[Sample], *, give_back: bool = False, timeout: Timeout = DEFAULT
    ) -> MutationResult:
        """As AsyncReplayClient. The batch of a shard that cannot be reached counts as missing: nobody may use it."""
        deadline = self._deadline(timeout)

        def end(client: AsyncReplayClient, mine: list[Sample]) -> Awaitable[MutationResult]:
            return client.acknowledge(mine, give_back=give_back, timeout=deadline.seconds)

        return await self._on_leases(samples, end, deadline)

    async def renew(self, samples: Iterable[Sample], lease: float, *, timeout: Timeout = DEFAULT) -> MutationResult:
        """As AsyncReplayClient. The batch of a shard that cannot be reached counts as missing."""
        deadline = self._deadline(timeout)

        def extend(client: AsyncReplayClient, mine: list[Sample]) -> Awaitable[MutationResult]:
            return client.renew(mine, lease, timeout=deadline.seconds)

        return await self._on_leases(samples, extend, deadline)

    async def _on_leases(
        self,
        samples: Iterable[Sample],
        change: Callable[[AsyncReplayClient, list[Sample]], Awaitable[MutationResult]],
        deadline: Deadline,
    ) -> MutationResult:
        given = [sample for sample in samples if sample.info.lease]
        shards = {sample.info.shard for sample in given}
        if unknown := shards - self._fleet.by_name.keys():
            raise InvalidRequestError(f"samples of {', '.join(map(repr, unknown))}, which is no shard of this client")
        await self._fleet.reachable(deadline)

        async def one(name: str) -> MutationResult:
            mine, shard = [sample for sample in given if sample.info.shard == name], self._fleet.by_name[name]

            async def work() -> MutationResult:
                return await change(shard.client, mine)

            try:
                return await shard.run(work())
            except (ServerUnavailableError, ServerClosedError):
                return MutationResult(0, tuple(sorted({sample.info.lease for sample in mine})))

        results = await asyncio.gather(*map(one, sorted(shards)))
        missing = tuple(batch for result in results for batch in result.missing)
        return MutationResult(sum(result.applied for result in results), missing)

    async def take(self, table: str, keys: Iterable[int], *, timeout: Timeout = DEFAULT) -> MutationResult:
        deadline, named = self._deadline(timeout), column("keys", keys, np.uint64)

        def change(client: AsyncReplayClient, rows: npt.NDArray[np.int64]) -> Any:
            return client.take(table, named[rows].tolist(), timeout=deadline.seconds)

        return await self._items.change(named, change, deadline)

    def sampler(
        self,
        table: str,
        batch_size: int = 1,
        *,
        prefetch: int = 2,
        timeout: Timeout = DEFAULT,
        distinct: bool = True,
        lease: float = 0.0,
        on_lease: OnLease = ignore,
    ) -> ShardedSampler:
        draw = _draw(table, batch_size, None, distinct, "", ())
        return ShardedSampler(self._fleet, draw, prefetch, self._seconds(timeout), lease, on_lease)

    # ---------------------------------------------------------------------------------- update, delete, get, list

    async def update_priority_arrays(
        self,
        table: str,
        keys: npt.NDArray[np.uint64],
        priorities: npt.NDArray[np.float64],
        *,
        timeout: Timeout = DEFAULT,
    ) -> MutationResult:
        """As AsyncReplayClient. An error of one shard leaves the other shards changed."""
        if len(keys) > MOST_KEYS or len(keys) != len(priorities) or np.asarray(keys).dtype.kind not in "ui":
            # The one client says what is wrong.
            return await self._fleet.shards[0].client.update_priority_arrays(table, keys, priorities, timeout=timeout)
        deadline = self._deadline(timeout)
        named, values = np.asarray(keys).astype(np.uint64), np.asarray(priorities)

        def change(client: AsyncReplayClient, rows: npt.NDArray[np.int64]) -> Any:
            return client.update_priority_arrays(table, named[rows], values[rows], timeout=deadline.seconds)

        return await self._items.change(named, change, deadline)

    async def delete(self, table: str, keys: Iterable[int], *, timeout: Timeout = DEFAULT) -> MutationResult:
        deadline, named = self._deadline(timeout), column("keys", keys, np.uint64)

        def change(client: AsyncReplayClient, rows: npt.NDArray[np.int64]) -> Any:
            return client.delete(table, named[rows].tolist(), timeout=deadline.seconds)

        return await self._items.change(named, change, deadline)

    async def get(self, keys: Iterable[int], *, timeout: Timeout = DEFAULT) -> list[StoredItem]:
        return await self._items.get(keys, self._deadline(timeout))

    async def list_items(
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
        deadline, begins = self._deadline(timeout), read_page(page)
        limit = limit or 100

        async def one(shard: Shard) -> tuple[str, ItemPage]:
            return shard.name, await shard.client.list_items(
                table,
                limit=limit,
                order_by=order_by,
                descending=descending,
                page=begins.get(shard.name, ""),
                min_priority=min_priority,
                max_priority=max_priority,
                min_staleness=min_staleness,
                max_staleness=max_staleness,
                timeout=deadline.seconds,
            )

        by_client = {id(shard.client): shard for shard in await self._fleet.reachable(deadline)}
        answers = await self._fleet.ask(lambda client: one(by_client[id(client)]), deadline)
        return merge_pages(dict(answers.values()), begins, limit, order_by, descending)

    # ------------------------------------------------------------------------------------------------ tables

    async def server_info(self, *, tables: Iterable[str] = (), timeout: Timeout = DEFAULT) -> ServerInfo:
        """All shards as one server: a ShardedInfo, which has each shard as well."""
        deadline, named = self._deadline(timeout), list(tables)
        answers = await self._fleet.ask(
            lambda client: client.server_info(tables=named, timeout=deadline.seconds), deadline
        )
        infos = {shard.name: info for shard, info in answers.items()}
        return merge_infos(infos, [name for name in self._fleet.by_name if name not in infos])

    async def update_table(self, /, table: str, *, timeout: Timeout = DEFAULT, **changes: Any) -> TableInfo:
        """As AsyncReplayClient, on every shard. Needs all shards: one with other settings would be hard to notice."""
        deadline = self._deadline(timeout)
        answers = await self._fleet.ask_all(
            lambda client: client.update_table(table, timeout=deadline.seconds, **changes), deadline
        )
        return merge_messages(list(answers.values()))

    async def reset(self, table: str, *, timeout: Timeout = DEFAULT) -> int:
        """As AsyncReplayClient, on every shard. Needs all shards: the items of one that is away would come back."""
        deadline = self._deadline(timeout)
        answers = await self._fleet.ask_all(lambda client: client.reset(table, timeout=deadline.seconds), deadline)
        return sum(answers.values())

    # ------------------------------------------------------------------------------- policy version, admission

    async def set_policy_version(
        self, version: int, weights: str = "", *, rollback: bool = False, timeout: Timeout = DEFAULT
    ) -> Policy:
        return await self._board.publish(version, weights, rollback, self._deadline(timeout))

    async def policy(self, *, timeout: Timeout = DEFAULT) -> Policy:
        return await self._board.policy(self._deadline(timeout))

    async def watch_policy(self) -> AsyncGenerator[Policy]:
        self._check_open()
        async with aclosing(self._board.watch()) as watch:
            async for policy in watch:
                yield policy

    async def acquire_permits(self, count: int = 1, *, timeout: Timeout = DEFAULT) -> PermitLease:
        return await self._permits.acquire(count, self._deadline(timeout))

    async def release_permits(self, lease: PermitLease, count: int = 0, *, timeout: Timeout = DEFAULT) -> int:
        return await self._permits.release(lease, count, self._deadline(timeout))

    # ------------------------------------------------------------------------------------------------ the client

    async def leave(self, *, timeout: Timeout = 5.0) -> None:
        await self._fleet.try_to_ask(lambda client: client.leave(timeout=timeout), self._fleet.up())

    async def checkpoint(self, name: str = "", *, timeout: Timeout = DEFAULT) -> str:
        """As AsyncReplayClient, on every shard, but not at one moment. Returns "SHARD/NAME" of each, with commas.

        Needs all shards: a checkpoint without one of them could not be restored as a whole.
        """
        deadline = self._deadline(timeout)
        answers = await self._fleet.ask_all(lambda client: client.checkpoint(name, timeout=deadline.seconds), deadline)
        return ",".join(f"{shard.name}/{written}" for shard, written in answers.items())

    async def checkpoints(self, *, verify: bool = False, timeout: Timeout = DEFAULT) -> list[CheckpointInfo]:
        """As AsyncReplayClient, of all shards, each named "SHARD/NAME"."""
        deadline = self._deadline(timeout)
        answers = await self._fleet.ask(
            lambda client: client.checkpoints(verify=verify, timeout=deadline.seconds), deadline
        )
        found = []
        for shard, listed in answers.items():
            for entry in listed:
                entry.name = f"{shard.name}/{entry.name}"
                found.append(entry)
        return sorted(found, key=lambda entry: entry.created, reverse=True)

    async def close(self) -> None:
        """Closes all connections. The shards take back what was drawn ahead for this client."""
        self._closed = True
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._drawer.close()
        await self._fleet.close()

    # ------------------------------------------------------------------------------------------------ helpers

    def _check_open(self) -> None:
        if self._closed:
            raise ServerClosedError("this client is closed")

    async def _follow(self, names: RayNames) -> None:
        """Takes in shards that `resize` has added, and leaves out those that it has taken away."""
        while True:
            await asyncio.sleep(SECONDS_PER_LOOK)
            known = self._fleet.by_name
            listed = await names.listed()
            if not listed or set(listed) == set(known):
                continue
            self._fleet.replace([known.get(name) or self._make_shard(name) for name in listed])
            for name in known.keys() - set(listed):
                await known[name].close()

    def _seconds(self, timeout: Timeout) -> float | None:
        if isinstance(timeout, Unset):
            return self._timeout
        check_timeout(timeout)
        return timeout

    def _deadline(self, timeout: Timeout) -> Deadline:
        self._check_open()
        if self._names is not None and self._following is None:
            self._following = asyncio.create_task(self._follow(self._names))
        return Deadline(self._seconds(timeout))


def _draw(table: str, rows: int, least: int | None, distinct: bool, scope: str, exclude: Iterable[int]) -> DrawOfAll:
    rows = whole_number("num_samples", rows, 32)
    least = rows if least is None else whole_number("min_samples", least, 32)
    if not 1 <= least <= rows:
        raise InvalidRequestError(f"min_samples {least} must be from 1 to num_samples {rows}")
    return DrawOfAll(table, rows, least, distinct, scope, frozenset(exclude))


AsyncReplayClient.of_several = ShardedClient
