"""AsyncReplayClient: the client for code with asyncio. ReplayClient is derived from it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal, NoReturn, Self, cast

import grpc
import numpy as np
import numpy.typing as npt

from replay_client import tracing
from replay_client.access import TLS, Access, is_several
from replay_client.connection import DEFAULT, Connection, Patience, Timeout
from replay_client.errors import DeadlineExceededError, ServerClosedError, ServerUnavailableError, error_of
from replay_client.frames import Item, pack_items
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
    item_page_of,
    mutation_of,
    policy_of,
    server_info_of,
    stored_items_of,
)
from replay_client.requests import KeySequence, column, leases_of, message_of, once, priorities_message
from replay_client.rollout import RolloutGroup
from replay_client.sampling import AsyncSampler, OnLease, SingleBatches, ignore
from replay_client.writer import AsyncWriter, InsertStreams, Pipeline
from replay_protos import replay_pb2 as pb

WRITER_BYTES = 256 << 20
"""The default of `max_bytes`: payload bytes that a writer may have in flight."""


class AsyncReplayClient:
    """A client of the replay server at `address` ("host:port"), or of several: see `replay_client.shards`.

    Every method takes `timeout` in seconds. Without it the client's own timeout applies; None waits for ever. While no
    server answers, a method tries again until its time is up, and then raises ServerUnavailableError. All errors are
    subclasses of `replay_client.errors.ReplayError`.

    A client belongs to one event loop, and does not work in a forked process: use `spawn`.
    """

    of_several: ClassVar[type[AsyncReplayClient]]
    """The class for several servers. `replay_client.shards` sets it, since that class is derived from this one."""

    def __new__(cls, address: str | Sequence[str] = "", *_: Any, **__: Any) -> Self:
        several = cls is AsyncReplayClient and is_several(address)
        return cast("Self", object.__new__(cls.of_several if several else cls))

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
        assert isinstance(address, str)  # see __new__
        files = tls if isinstance(tls, TLS) else TLS() if tls else None
        access = Access(address, token, files, allow_insecure_token, shared_memory, name)
        self._connection = Connection(access, timeout)
        self._keys = KeySequence()
        self._single_batches = SingleBatches(self._connection)
        self._insert_streams = InsertStreams(self._connection)

    @classmethod
    def from_env(cls, timeout: float | None = 30.0, **settings: Any) -> Self:
        """A client with the settings of the environment, for example REPLAY_ADDRESS, REPLAY_TOKEN and REPLAY_TLS_CA.

        `replay_client.access` lists the settings. Those given here by name win over the environment. Raises ValueError
        that names the source of a bad setting.
        """
        access = Access.find(**settings)
        return cls(access.address, timeout, **access.arguments())

    @property
    def address(self) -> str:
        """host:port of the server."""
        return self._connection.address

    @property
    def connection(self) -> Connection:
        """The connection to the server, for parts of this package."""
        return self._connection

    @property
    def transport(self) -> str:
        """How payloads travel: "shared memory", or "grpc: " with the reason."""
        return self._connection.transport

    async def find_transport(self) -> str:
        """As `transport`, but first finds out whether the server is on this host."""
        return await self._connection.find_transport()

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
        """Inserts one group, or raw bytes, into each table of `priorities`, and returns its key.

        Returns when the server has acknowledged the insert. `priorities` gives the item's priority by table name.
        `key` is a whole number below 2**64; without it the client chooses one. Inserting the same key again does
        nothing, so the client may repeat an insert after a broken connection. `policy_version` is the group's own
        unless given. With `permits` the insert uses up one permit of that lease.

        Raises InvalidRequestError, TableNotFoundError, StaleItemError, PayloadTooLargeError, TableFullError,
        ServerBusyError, StorageError, or DeadlineExceededError with the reason of the wait.
        """
        seconds = self._connection.seconds(timeout)
        lease = permits.id if permits else 0
        item = Item.of(next(self._keys) if key is None else key, group, priorities, policy_version, seconds, lease)
        frames = list(pack_items([item]))

        async def attempt(rpc_timeout: float | None) -> pb.InsertResponse:
            if len(frames) == 1 and tracing.active():  # a call carries a trace context, a stream does not
                return await self._connection.payloads.Insert(frames[0], timeout=rpc_timeout)
            return await self._insert_streams.insert(frames, rpc_timeout)

        response = await self._connection.call(attempt, seconds)
        for error in response.errors:
            raise error_of(error.code, error.message, error.reason)
        return item.key

    def writer(
        self, max_in_flight: int = 64, *, max_bytes: int = WRITER_BYTES, timeout: Timeout = DEFAULT
    ) -> AsyncWriter:
        """A pipeline of inserts: `insert` returns before the server has acknowledged the group.

        At most `max_in_flight` groups and `max_bytes` payload bytes are not acknowledged at any time. `timeout` bounds
        how long each group may wait for its tables, in seconds.
        """
        pipeline = Pipeline(
            self._connection,
            asyncio.get_running_loop(),
            max_in_flight,
            max_bytes,
            self._connection.seconds(timeout),
        )
        return AsyncWriter(pipeline, self._keys)

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
        """Draws `num_samples` items of a table.

        When the time is up, `min_samples` items are enough; without it all are needed. `distinct`: no item comes twice
        in the result. `scope`: no item comes that any client drew under the same scope before, for example a training
        step that several ranks share. `exclude`: keys that must not come. `lease`: seconds within which `acknowledge`
        must follow, or the server takes the items back as if they were never drawn; 0: no lease.

        An item of a queue reaches one reader, once: the client repeats what a broken connection or a restart of the
        server has lost. If the time is up before the server has confirmed a batch, the next call with the same
        arguments goes on with that batch.

        Raises TableNotFoundError, ServerBusyError, or DeadlineExceededError with the reason of the wait.
        """
        seconds = self._connection.seconds(timeout)
        request = message_of(
            pb.SampleRequest,
            table=table,
            num_samples=num_samples,
            min_samples=min_samples,
            timeout=seconds,
            allow_repeats=not distinct,
            scope=scope,
            exclude=list(exclude),
            lease=lease,
        )
        return await self._single_batches.sample(request, seconds)

    async def acknowledge(
        self, samples: Iterable[Sample], *, give_back: bool = False, timeout: Timeout = DEFAULT
    ) -> MutationResult:
        """Keeps samples that were drawn with a lease, or gives them back.

        The result counts batches, and not samples. It names a batch as `missing` if its lease had ended; the server
        has then taken the items back.
        """
        leases = leases_of(samples)
        request = pb.DrawRequest(give_back=leases) if give_back else pb.DrawRequest(take=leases)
        return await self._end(request, timeout)

    async def renew(self, samples: Iterable[Sample], lease: float, *, timeout: Timeout = DEFAULT) -> MutationResult:
        """Lets the leases of samples end `lease` seconds from now. The samples are in use from then on.

        Their items join the table of `forward_to`, and their leases go on after a restart of a durable server. The
        result counts batches, and names as `missing` those whose lease had ended; `take` then takes their items.
        """
        return await self._end(message_of(pb.DrawRequest, renew=leases_of(samples), seconds=lease), timeout)

    async def _end(self, request: pb.DrawRequest, timeout: Timeout) -> MutationResult:
        if not (request.take or request.give_back or request.renew):
            return MutationResult(0, ())
        return await self._single_batches.end(request, self._connection.seconds(timeout))

    async def take(self, table: str, keys: Iterable[int], *, timeout: Timeout = DEFAULT) -> MutationResult:
        """Takes the items that a reader has used, and that are back in the table because its lease has ended.

        They count as sampled once more. `missing` are those that are not in the table.
        """
        request = message_of(pb.TakeItemsRequest, table=table, keys=list(keys))
        response = await self._connection.short("TakeItems", once(request), timeout)
        return mutation_of(response)

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
    ) -> AsyncSampler:
        """An endless iterator over batches of `batch_size` samples, with up to `prefetch` batches drawn ahead.

        `timeout` bounds the wait for each batch, in seconds. `lease`: a batch that the caller gets is in use, and goes
        back after this many seconds, unless `renew` or `acknowledge` comes before; 0: the batch is the caller's.
        `on_lease` is called with each batch just before its lease begins, on the thread of the event loop.
        """
        fields = {"num_samples": batch_size, "allow_repeats": not distinct, "lease": lease}
        request = message_of(pb.SampleRequest, table=table, **fields)
        return AsyncSampler(self._connection, request, prefetch, self._connection.seconds(timeout), on_lease)

    # ---------------------------------------------------------------------------------- update, delete, get, list

    async def update_priorities(
        self, table: str, priorities: Mapping[int, float], *, timeout: Timeout = DEFAULT
    ) -> MutationResult:
        """Sets the priorities of items of one table, by key.

        Raises InvalidRequestError for a priority that the table does not take; then no priority has changed.
        """
        keys = column("keys", priorities.keys(), np.uint64)
        values = column("priorities", priorities.values(), np.float64)
        return await self.update_priority_arrays(table, keys, values, timeout=timeout)

    async def update_priority_arrays(
        self,
        table: str,
        keys: npt.NDArray[np.uint64],
        priorities: npt.NDArray[np.float64],
        *,
        timeout: Timeout = DEFAULT,
    ) -> MutationResult:
        """`update_priorities` for two arrays of shape (K,), with K at most 1,000,000."""
        request = priorities_message(table, keys, priorities)
        response = await self._connection.short("UpdatePriorities", request, timeout)
        return mutation_of(response)

    async def delete(self, table: str, keys: Iterable[int], *, timeout: Timeout = DEFAULT) -> MutationResult:
        """Removes items from one table. They stay in their other tables."""
        request = message_of(pb.DeleteRequest, table=table, keys=list(keys))
        response = await self._connection.short("Delete", once(request), timeout)
        return mutation_of(response)

    async def get(self, keys: Iterable[int], *, timeout: Timeout = DEFAULT) -> list[StoredItem]:
        """The items with these keys, as far as the server holds them. Does not count as sampling."""
        request = message_of(pb.GetRequest, keys=list(keys))

        async def attempt(rpc_timeout: float | None) -> list[StoredItem]:
            first, payloads = await self._connection.payloads.Get(request, timeout=rpc_timeout)
            return stored_items_of(first, payloads)

        return await self._connection.call(attempt, self._connection.seconds(timeout))

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
        """One page of the items of a table, without their payloads. All bounds are inclusive.

        `page` is the `next_page` of the page before. Raises TableNotFoundError or InvalidRequestError.
        """
        request = message_of(
            pb.ListItemsRequest,
            table=table,
            limit=limit,
            page=page,
            order_by=order_by,
            descending=descending,
            min_priority=min_priority,
            max_priority=max_priority,
            min_staleness=min_staleness,
            max_staleness=max_staleness,
        )
        response = await self._connection.unary(self._connection.stub.ListItems, request, timeout)
        return item_page_of(response)

    # ------------------------------------------------------------------------------------------------ tables

    async def server_info(self, *, tables: Iterable[str] = (), timeout: Timeout = DEFAULT) -> ServerInfo:
        """The state of the server and of its tables: all tables, or the named ones."""
        request = message_of(pb.GetServerInfoRequest, tables=list(tables))
        response = await self._connection.unary(self._connection.stub.GetServerInfo, request, timeout)
        return server_info_of(response)

    async def update_table(self, /, table: str, *, timeout: Timeout = DEFAULT, **changes: Any) -> TableInfo:
        """Changes fields of a table's TableConfig at run time, for example `max_size=8192`. Items and counters stay.

        Raises InvalidRequestError for a field that does not exist or cannot change.
        """
        request = pb.UpdateTableRequest(table=table, changes=json.dumps(changes))
        return await self._connection.unary(self._connection.stub.UpdateTable, once(request), timeout)

    async def reset(self, table: str, *, timeout: Timeout = DEFAULT) -> int:
        """Empties a table and sets its counters to 0. Returns how many items were removed."""
        request = message_of(pb.ResetRequest, table=table)
        response = await self._connection.unary(self._connection.stub.Reset, once(request), timeout)
        return response.removed

    # ------------------------------------------------------------------------------- policy version, admission

    async def set_policy_version(
        self, version: int, weights: str = "", *, rollback: bool = False, timeout: Timeout = DEFAULT
    ) -> Policy:
        """Announces that the trainer has finished `version` updates, and where it saved the weights.

        With `rollback` the trainer starts again from this version, which may be the current one or a lower one. Items
        that it took beyond its finished steps are lost, and the server starts to count permits again. Raises
        InvalidRequestError for a lower version without `rollback`.
        """
        request = message_of(pb.SetPolicyVersionRequest, version=version, weights=weights, rollback=rollback)
        response = await self._connection.unary(self._connection.stub.SetPolicyVersion, request, timeout)
        return policy_of(response)

    async def policy(self, *, timeout: Timeout = DEFAULT) -> Policy:
        """The current policy version, and where the trainer saved its weights."""
        response = await self._connection.unary(self._connection.stub.GetPolicy, pb.GetPolicyRequest(), timeout)
        return policy_of(response)

    async def watch_policy(self) -> AsyncGenerator[Policy]:
        """Yields the current policy, then every new one. If several come quickly, it may yield only the newest.

        Connects again by itself.
        """
        patience = Patience(self._connection, self._connection.timeout)
        last: tuple[int, str] | None = None
        while True:
            call = self._connection.stub.WatchPolicy(pb.GetPolicyRequest())
            try:
                async for message in call:
                    patience.renew()
                    if (message.version, message.weights) != last:
                        last = message.version, message.weights
                        yield policy_of(message)
            except grpc.aio.AioRpcError as error:
                await patience.pause_or_raise(error)
            finally:
                call.cancel()

    async def acquire_permits(self, count: int = 1, *, timeout: Timeout = DEFAULT) -> PermitLease:
        """Acquires permits to generate `count` groups, as soon as the groups will not be too stale.

        Raises DeadlineExceededError with the reason, and UnsupportedError if the server has no [admission].
        """
        seconds = self._connection.seconds(timeout)
        request = message_of(pb.AcquirePermitsRequest, count=count, timeout=seconds)
        response = await self._connection.unary(self._connection.stub.AcquirePermits, once(request), seconds)
        return PermitLease(response.lease, response.count, response.ttl)

    async def release_permits(self, lease: PermitLease, count: int = 0, *, timeout: Timeout = DEFAULT) -> int:
        """Gives back `count` unused permits; 0: all unused permits of the lease. Returns how many went back."""
        request = message_of(pb.ReleasePermitsRequest, lease=lease.id, count=count)
        response = await self._connection.unary(self._connection.stub.ReleasePermits, once(request), timeout)
        return response.released

    # ------------------------------------------------------------------------------------------------ the client

    async def leave(self, *, timeout: Timeout = 5.0) -> None:
        """Says, if a server answers, that this client ends on purpose. Otherwise `replay doctor` will miss it."""
        with suppress(ServerUnavailableError, ServerClosedError, DeadlineExceededError):
            await self._connection.unary(self._connection.stub.Leave, pb.LeaveRequest(), timeout)

    async def checkpoint(self, name: str = "", *, timeout: Timeout = DEFAULT) -> str:
        """Makes the server write a checkpoint: a copy of all tables at one moment. Returns its name.

        The server goes on meanwhile, and finishes the checkpoint even if the client stops waiting. Without `name` the
        server chooses one, and keeps only the last few checkpoints that it named. Raises UnsupportedError if the server
        has no place for checkpoints, and StorageError if it cannot write one.
        """
        request = message_of(pb.CheckpointRequest, name=name)
        response = await self._connection.unary(self._connection.stub.Checkpoint, request, timeout)
        return response.name

    async def checkpoints(self, *, verify: bool = False, timeout: Timeout = DEFAULT) -> list[CheckpointInfo]:
        """The server's checkpoints, the newest first. With `verify` the server reads every byte of them."""
        response = await self._connection.unary(
            self._connection.stub.ListCheckpoints, pb.ListCheckpointsRequest(verify=verify), timeout
        )
        return list(response.checkpoints)

    async def close(self) -> None:
        """Closes the connection. The server takes back what it drew ahead for this client."""
        await self._insert_streams.close()
        await self._single_batches.close()
        await self._connection.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be pickled or copied; make one in each process")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
