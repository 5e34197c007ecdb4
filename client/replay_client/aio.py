"""AsyncReplayClient: the client for code with asyncio. ReplayClient is derived from it.

Each method makes a request of its arguments. With one server, the client sends the request straight to this server
(`OneServer`). With several servers, `replay_client.shards` has the rules that say which servers get which part of the
request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Self

import numpy as np
import numpy.typing as npt

from replay_client import tracing
from replay_client.access import TLS, Access, joined_addresses, split_addresses
from replay_client.columns import Buffer
from replay_client.connection import DEFAULT, OneServer, Timeout, check_timeout, seconds_of
from replay_client.errors import InvalidRequestError
from replay_client.lease_renewer import AsyncLeaseRenewer, OnLost
from replay_client.records import (
    CheckpointInfo,
    ExtendResult,
    ItemPage,
    MutationResult,
    PermitGrant,
    Policy,
    Sample,
    ServerInfo,
    StoredItem,
    TableInfo,
    server_info_of,
    stored_items_of,
)
from replay_client.requests import (
    Item,
    KeySequence,
    check_extension,
    column,
    message_of,
    once,
    priorities_message,
    shortened,
    tag_filters,
)
from replay_client.rollout import RolloutGroup
from replay_client.sampling import AsyncSampler, OnLease, Series, SingleBatches, ignore
from replay_client.waits import Deadline
from replay_client.writer import AsyncWriter
from replay_protos import replay_pb2 as pb

if TYPE_CHECKING:
    from replay_client.shards.fleet import Fleet
    from replay_client.shards.placing import Placement
    from replay_client.shards.policy import PermitOffice, PolicyBoard
    from replay_client.shards.sampling import Drawer

WRITER_BYTES = 256 << 20
"""The default of `max_bytes`: payload bytes that a writer may have in flight."""


class Servers(NamedTuple):
    """The objects to which a client hands its calls.

    Each field has two types: the first for a client of one server, the second for a client of several.
    """

    fleet: OneServer | Fleet
    """Holds the connections, and asks all servers."""
    placement: OneServer | Placement
    """Inserts items, and changes items by their keys."""
    draws: SingleBatches | Drawer
    """Draws batches, and acknowledges, requeues or renews them."""
    board: OneServer | PolicyBoard
    """Publishes and watches the policy version."""
    permits: OneServer | PermitOffice
    """Acquires and releases permits."""


def servers_of(access: Access, timeout: float | None) -> Servers:
    """Makes the objects to which a client with this `access` hands its calls.

    `timeout` is the client's own timeout in seconds; None: no limit. Raises ValueError for an address that cannot be
    used.
    """
    if len(split_addresses(access.address)) == 1:
        server = OneServer(access, timeout)
        return Servers(
            fleet=server,
            placement=server,
            draws=SingleBatches(server),
            board=server,
            permits=server,
        )
    # The address has several servers, or is a ray:// address, for which `split_addresses` returns no server.
    # The modules are imported here, because a client of one server needs none of them.
    from replay_client.shards.fleet import Fleet
    from replay_client.shards.placing import Placement
    from replay_client.shards.policy import PermitOffice, PolicyBoard
    from replay_client.shards.sampling import Drawer

    fleet = Fleet(access, timeout)
    return Servers(
        fleet=fleet,
        placement=Placement(fleet),
        draws=Drawer(fleet),
        board=PolicyBoard(fleet),
        permits=PermitOffice(fleet),
    )


@tracing.spans
class AsyncReplayClient:
    """A client of the replay server at `address` ("host:port").

    With several addresses, in a list or separated by commas, or with "ray://NAMESPACE/NAME", it is a client of all
    these servers and has the same methods. `replay_client.shards` says what each method does with several servers.

    The `timeout` of a method is in seconds. Without this argument, the client's own timeout applies. None waits for
    ever. While no server answers, a method tries again until its time is up, and then raises ServerUnavailableError.
    All errors are subclasses of `replay_client.errors.ReplayError`.

    A client belongs to one event loop, and does not work in a forked process: use `spawn`.
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
        """Makes a client with these settings, after it has checked them.

        `timeout`: the seconds of each call without a timeout of its own; None: no limit. `tls`: False for a connection
        that is not encrypted, True for a server whose certificate a public authority signed, or a TLS that names files.
        `shared_memory=False` sends payloads over gRPC even to a server on this host. `name`: the name by which the
        server lists this client if it inserts, samples or publishes; host:pid unless given.

        A token is sent to other machines only over TLS, unless `allow_insecure_token` says that the network is trusted.
        Raises ValueError for an address, token or file that cannot be used, and RuntimeError in a process that was
        forked while gRPC was in use.
        """
        files: TLS | None = None
        if isinstance(tls, TLS):
            files = tls
        elif tls:
            files = TLS()
        access = Access(
            address=joined_addresses(address),
            token=token,
            tls=files,
            allow_insecure_token=allow_insecure_token,
            shared_memory=shared_memory,
            name=name,
        )
        check_timeout(timeout)
        self._timeout = timeout
        self._keys = KeySequence()
        servers = servers_of(access, timeout)
        self._fleet = servers.fleet
        self._placement = servers.placement
        self._draws = servers.draws
        self._board = servers.board
        self._permits = servers.permits

    def _seconds(self, timeout: Timeout) -> float | None:
        """The timeout of a call in seconds, from the argument or else from the client. None: no limit."""
        return seconds_of(timeout, self._timeout)

    @classmethod
    def from_env(cls, timeout: float | None = 30.0, **settings: Any) -> Self:
        """Makes a client from variables of the environment, such as REPLAY_ADDRESS, REPLAY_TOKEN and REPLAY_TLS_CA.

        `replay_client.access` lists the settings. An argument with the name of a setting wins over the environment.
        Raises ValueError that names the source of a bad setting.
        """
        access = Access.find(**settings)
        return cls(access.address, timeout, **access.arguments())

    @property
    def address(self) -> str:
        """host:port of the server; of several servers, separated by commas; or ray://NAMESPACE/NAME."""
        return self._fleet.address

    @property
    def transport(self) -> str:
        """The transport of payloads: "shared memory", or "grpc: " with the reason why it is not shared memory.

        For several servers: "SHARD: TRANSPORT" of each server whose address is known, separated by semicolons.
        """
        return self._fleet.carries

    async def find_transport(self) -> str:
        """As `transport`, but first finds out if the server is on this host."""
        return await self._fleet.find_transport()

    # ------------------------------------------------------------------------------------------------ insert

    async def insert(
        self,
        group: RolloutGroup | Buffer,
        priorities: Mapping[str, float],
        *,
        key: int | None = None,
        policy_version: int | None = None,
        permits: PermitGrant | None = None,
        tags: Mapping[str, str | int] | None = None,
        closes: Sequence[Sample] = (),
        timeout: Timeout = DEFAULT,
    ) -> int:
        """Inserts one group, or raw bytes, into each table of `priorities`, and returns its key.

        Returns when the server has acknowledged the insert. `priorities` gives the item's priority by table name.
        `key` is a whole number below 2**64; without it the client chooses one. Inserting the same key again does
        nothing, so the client may repeat an insert after a broken connection. `policy_version` is the group's own
        unless given. With `permits` the insert uses up one permit of that grant. `tags`: at most 8 small values by
        which the item can be found, such as {"environment": "math"}.

        `closes`: the samples from which the group was made. They must have been drawn with a lease. The server
        acknowledges them at the same moment at which the group enters its tables. So if a process is killed, the server
        has made both changes or neither. If one of the leases has ended, another reader may have the sample. Then
        LeaseEndedError is raised, and the group is not inserted.

        Raises InvalidRequestError, TableNotFoundError, StaleItemError, PayloadTooLargeError, TableFullError,
        ServerBusyError, StorageError, or DeadlineExceededError with the reason of the wait.
        """
        seconds = self._seconds(timeout)
        if key is None:
            key = next(self._keys)
        item = Item.of(key, group, priorities, policy_version, seconds, permits, tags, closes)
        await self._placement.insert(item)
        return item.key

    def writer(
        self, max_in_flight: int = 64, *, max_bytes: int = WRITER_BYTES, timeout: Timeout = DEFAULT
    ) -> AsyncWriter:
        """Makes a pipeline of inserts. Its `insert` returns before the server has acknowledged the group.

        At any time, at most `max_in_flight` groups and `max_bytes` payload bytes wait to be acknowledged. If one of
        several servers is away, the groups and bytes that wait for this server do not count. `timeout` is the most
        seconds that each group may wait for its tables.
        """
        seconds = self._seconds(timeout)
        return AsyncWriter(self._fleet, self._placement, self._keys, max_in_flight, max_bytes, seconds)

    async def extend(
        self,
        key: int | Sample | StoredItem,
        extras: Mapping[str, npt.ArrayLike],
        *,
        axes: Mapping[str, str] | None = None,
        held: Sequence[Sample] = (),
        timeout: Timeout = DEFAULT,
    ) -> ExtendResult:
        """Adds columns to a stored group. From then on, readers find the columns in the group's extras.

        `extras` and `axes` are as the fields of RolloutGroup with these names. If the columns do not fit the group,
        nobody can read the group any more. The server cannot check whether the columns fit. The client checks it before
        it sends anything, but only if the argument `key` is the Sample or StoredItem and not just its key.

        Returns when the server has acknowledged the columns. If the item already has a column of the same name, that
        column stays as it is. This is no error: the result has the name in `present`. Batches that were drawn before
        stay as they were drawn. Tables that require these columns can give the item from now on.

        `held`: samples that were drawn with a lease. If one of these leases has ended, another reader may have the
        sample, so nothing is added.

        Raises PayloadTooLargeError, TableFullError, ServerBusyError or StorageError if the item cannot grow,
        LeaseEndedError if a lease of `held` has ended, and InvalidRequestError for columns that no group can have. Then
        nothing has changed.
        """
        if not isinstance(extras, Mapping):
            raise InvalidRequestError(f"extras must be arrays by name, not {shortened(extras)}")
        if not isinstance(axes, Mapping | None):
            raise InvalidRequestError(f'axes must be by name, such as {{"values": "token"}}, not {shortened(axes)}')
        axes = axes or {}
        if isinstance(key, Sample | StoredItem):
            check_extension(key, extras, axes)
            key = key.info.key if isinstance(key, Sample) else key.key
        deadline = Deadline(self._seconds(timeout))
        columns = dict(extras)
        present: set[str] = set()
        # The server refuses a segment if the item already has one of its columns. Then send the other columns alone.
        while True:
            column_axes = {name: axis for name, axis in axes.items() if name not in present}
            item = Item.segment(key, columns, column_axes, deadline.seconds)
            # The insert of a new item ends the leases in `closes`. For a segment, the server only checks these leases.
            item.closes = tuple(sample.info.lease_id for sample in held)
            unchanged = await self._placement.extend(item)
            if unchanged is None:  # the server has added all columns
                return ExtendResult(added=tuple(columns), present=tuple(sorted(present)))
            if unchanged.missing:  # no server holds the item
                return ExtendResult(missing=True)
            present.update(unchanged.present)
            columns = {name: values for name, values in columns.items() if name not in present}
            if not columns:
                return ExtendResult(present=tuple(sorted(present)))

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

        When the time is up, `min_samples` items are enough; without `min_samples` all are needed. `distinct`: no item
        is twice in the result. `scope`: a name, for example of a training step that several ranks share; the result has
        no item that any client drew under the same name before. `exclude`: keys that the result must not have.
        `lease`: seconds within which `acknowledge` must follow. Otherwise the server takes the items back, as if they
        were never drawn. 0: no lease.

        An item of a queue reaches one reader, once. So if a broken connection or a restart of the server loses a batch,
        the client asks for this batch again. If the time is up before the server has confirmed a batch, the next call
        with the same arguments goes on with that batch.

        Raises TableNotFoundError, ServerBusyError, or DeadlineExceededError with the reason of the wait.
        """
        seconds = self._seconds(timeout)
        request = message_of(
            pb.SampleRequest,
            table=table,
            num_samples=num_samples,
            min_samples=min_samples,
            allow_repeats=not distinct,
            scope=scope,
            exclude=list(exclude),
            lease=lease,
        )
        return await self._draws.sample(request, seconds)

    async def acknowledge(
        self, samples: Iterable[Sample], *, requeue: bool = False, timeout: Timeout = DEFAULT
    ) -> MutationResult:
        """Acknowledges samples that were drawn with a lease, or requeues them.

        The result counts batches, not samples. `missing` has the leases that had ended, so that the server has already
        taken their batches back.
        """
        action = "requeue" if requeue else "acknowledge"
        return await self._draws.end(samples, action, self._seconds(timeout))

    async def renew(self, samples: Iterable[Sample], lease: float, *, timeout: Timeout = DEFAULT) -> MutationResult:
        """Lets the leases of samples end `lease` seconds from now, and tells the server that the samples are in use.

        Items in use join the table that `forward_to` names, and their leases go on after a restart of a durable server.
        The result counts batches. `missing` has the leases that had ended. If the caller has used the items of such a
        batch, `consume` consumes them.
        """
        return await self._draws.end(samples, "renew", self._seconds(timeout), lease)

    def auto_renew(self, samples: Iterable[Sample], lease: float, on_lost: OnLost) -> AsyncLeaseRenewer:
        """Renews the leases of samples in the background, each four times within `lease` seconds.

        `add` and `forget` of the result change which samples are renewed. `close` ends all renewals. The first renewal
        follows at once, and tells the server that the samples are in use, as `renew` does.

        When leases have ended, `on_lost` is called once with the `info` of their samples, on the thread of the event
        loop. Another reader may have these samples by now. While no server answers, `on_lost` is not called, because
        only the server knows which leases have ended. With several servers, if one of them cannot be reached, its
        samples count as lost.
        """
        renewer = AsyncLeaseRenewer(self.renew, lease, on_lost)
        renewer.add(samples)
        return renewer

    async def consume(self, table: str, keys: Iterable[int], *, timeout: Timeout = DEFAULT) -> MutationResult:
        """Consumes items that a reader has used, but that are back in the table because the reader's lease has ended.

        The items count as sampled once more. `missing` has the keys that are not in the table.
        """
        request = message_of(pb.ConsumeItemsRequest, table=table, keys=list(keys))
        # `once` gives the request an id, so that a retry does not consume the items again.
        return await self._placement.change("ConsumeItems", once(request), self._seconds(timeout))

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
        """Makes an endless iterator over batches of `batch_size` samples. It draws up to `prefetch` batches ahead.

        `timeout` bounds the wait for each batch, in seconds. `distinct` is as for `sample`.

        `lease`: the seconds of each lease. The lease of a batch begins when the caller gets the batch. The batch is
        then in use, as after `renew`. It returns to its table at the end of the lease, unless `renew` or `acknowledge`
        is called before. With 0, the batch is the caller's for good. `on_lease` is called with each batch just before
        its lease begins, on the thread of the event loop.
        """
        request = message_of(
            pb.SampleRequest,
            table=table,
            num_samples=batch_size,
            allow_repeats=not distinct,
            lease=lease,
        )
        return self._draws.sampler(Series(request, prefetch, self._seconds(timeout), on_lease))

    # ---------------------------------------------------------------------------------- update, delete, get, list

    async def update_priorities(
        self, table: str, priorities: Mapping[int, float], *, timeout: Timeout = DEFAULT
    ) -> MutationResult:
        """Sets the priorities of items of one table, by key.

        Raises InvalidRequestError for a priority that the table does not take. The server with that item has then
        changed no priority. If the client has several servers, the others may have changed the priorities of their
        items.
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
        """As `update_priorities`, for keys and priorities in two arrays of shape (K,), with K at most 1,000,000."""
        request = priorities_message(table, keys, priorities)
        return await self._placement.change("UpdatePriorities", request, self._seconds(timeout))

    async def delete(self, table: str, keys: Iterable[int], *, timeout: Timeout = DEFAULT) -> MutationResult:
        """Removes items from one table. They stay in their other tables."""
        request = message_of(pb.DeleteRequest, table=table, keys=list(keys))
        return await self._placement.change("Delete", once(request), self._seconds(timeout))

    async def get(self, keys: Iterable[int], *, payloads: bool = True, timeout: Timeout = DEFAULT) -> list[StoredItem]:
        """Reads the items with these keys, without those that the server does not hold. Does not count as sampling.

        With `payloads=False` no payload is sent, and the payloads of the items are empty. This is enough to see which
        items the server holds.
        """
        wanted = list(keys)
        request = message_of(pb.GetRequest, keys=wanted, without_payloads=not payloads)
        # `answer` is a frame: the message with the columns, and the payloads.
        items = await self._fleet.ask("Get", request, self._seconds(timeout), lambda answer: stored_items_of(*answer))
        items_by_key = {item.key: item for item in items}
        # The server answers in an order of its own. The result has the order of `keys`, and each item once.
        return [items_by_key[key] for key in dict.fromkeys(wanted) if key in items_by_key]

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
        tags: Mapping[str, str | int] | None = None,
        timeout: Timeout = DEFAULT,
    ) -> ItemPage:
        """One page of the items of a table, without their payloads. All bounds are inclusive.

        `tags`: only items that have all these tags. Values are compared as text, so "3" finds the number 3. The value
        "" finds items without the tag. The server finds items at once by tags that the table indexes. For other tags it
        looks at each item. `page` is the `next_page` of the page before. Raises TableNotFoundError or
        InvalidRequestError.
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
            tags=tag_filters(tags),
        )
        return await self._fleet.pages(request, self._seconds(timeout))

    # ------------------------------------------------------------------------------------------------ tables

    async def server_info(self, *, tables: Iterable[str] = (), timeout: Timeout = DEFAULT) -> ServerInfo:
        """The state of the server and of its tables: all tables, or the named ones."""
        request = message_of(pb.GetServerInfoRequest, tables=list(tables))
        return await self._fleet.ask("GetServerInfo", request, self._seconds(timeout), server_info_of)

    async def update_table(self, /, table: str, *, timeout: Timeout = DEFAULT, **changes: Any) -> TableInfo:
        """Changes fields of a table's TableConfig at run time, for example `max_size=8192`. Items and counters stay.

        Raises InvalidRequestError for a field that does not exist or cannot change.
        """
        request = pb.UpdateTableRequest(table=table, changes=json.dumps(changes))
        # `once` gives the request an id, so that a retry changes nothing more. The response is the TableInfo already.
        return await self._fleet.ask_all(
            "UpdateTable", once(request), self._seconds(timeout), lambda response: response
        )

    async def reset(self, table: str, *, timeout: Timeout = DEFAULT) -> int:
        """Empties a table and sets its counters to 0. Returns the number of items that were removed."""
        request = message_of(pb.ResetRequest, table=table)
        return await self._fleet.ask_all("Reset", once(request), self._seconds(timeout), lambda answer: answer.removed)

    # ------------------------------------------------------------------------------- policy version, admission

    async def set_policy_version(
        self, version: int, weights: str = "", *, rollback: bool = False, state: str = "", timeout: Timeout = DEFAULT
    ) -> Policy:
        """Announces that the trainer has finished `version` updates, and where it saved the weights.

        `state` names the training checkpoint that is saved with this version, by any id that was not used before. The
        checkpoint contains the effect of all items that were acknowledged before this call. Tables with retain_consumed
        retain the items that are acknowledged after this call.

        With `rollback` the trainer starts again from this version, which may be the current one or a lower one, and the
        server counts permits anew. With `rollback` and `state`, the items that were acknowledged after that state
        return to their tables, and items of later versions are dropped. With `rollback` alone, acknowledged items do
        not return. Raises InvalidRequestError for a lower version without `rollback`, and for a state that the server
        does not know or that has another version.
        """
        request = message_of(
            pb.SetPolicyVersionRequest,
            version=version,
            weights=weights,
            rollback=rollback,
            state=state,
        )
        if rollback and state:
            # A retry of this request must not make the server roll back again. `once` gives the request an id, by which
            # the server recognises the retry.
            once(request)
        return await self._board.publish(request, self._seconds(timeout))

    async def policy(self, *, timeout: Timeout = DEFAULT) -> Policy:
        """The current policy: its version, and the location of the weights that the trainer saved."""
        return await self._fleet.ask("GetPolicy", pb.GetPolicyRequest(), self._seconds(timeout), lambda policy: policy)

    async def watch_policy(self) -> AsyncGenerator[Policy]:
        """Yields the current policy, then every new one. If several come quickly, it may yield only the newest.

        Connects again by itself after a broken connection.
        """
        # `aclosing` ends the calls to the servers as soon as the caller closes this generator.
        async with aclosing(self._board.watch()) as watch:
            async for policy in watch:
                yield policy

    async def acquire_permits(self, count: int = 1, *, timeout: Timeout = DEFAULT) -> PermitGrant:
        """Acquires permits to generate `count` groups. Waits until groups that start now will not be too stale.

        Raises DeadlineExceededError with the reason of the wait, and UnsupportedError if the server's configuration has
        no [admission].
        """
        seconds = self._seconds(timeout)
        request = message_of(pb.AcquirePermitsRequest, count=count, timeout=seconds)
        return await self._permits.acquire(request, seconds)

    async def release_permits(self, grant: PermitGrant, count: int = 0, *, timeout: Timeout = DEFAULT) -> int:
        """Releases `count` unused permits; 0: all unused permits of the grant. Returns the number of released ones."""
        request = message_of(pb.ReleasePermitsRequest, grant=grant.id, count=count)
        return await self._permits.release(grant, request, self._seconds(timeout))

    # ------------------------------------------------------------------------------------------------ the client

    async def describe(self, settings: Mapping[str, str], *, timeout: Timeout = 5.0) -> None:
        """Sends the settings of this client, if a server answers. `server_info` shows them beside the client's name.

        The settings replace those that this client sent before. The server loses them when it restarts. Raises
        InvalidRequestError for more than 64 settings, for more than 4096 bytes as JSON, and if another connection of
        the same name is open.
        """
        request = message_of(pb.DescribeRequest, settings=settings)
        await self._fleet.say("Describe", request, self._seconds(timeout))

    async def leave(self, *, timeout: Timeout = 5.0) -> None:
        """Tells the server, if one answers, that this client ends on purpose.

        Otherwise `replay doctor` may report that the client is gone.
        """
        await self._fleet.say("Leave", pb.LeaveRequest(), self._seconds(timeout))

    async def create_checkpoint(self, name: str = "", *, timeout: Timeout = DEFAULT) -> str:
        """Makes the server write a checkpoint: a copy of all tables at one moment. Returns its name.

        While the server writes the checkpoint, it serves other requests. It finishes the checkpoint even if the client
        stops waiting. Without `name` the server chooses one, and keeps only the last few checkpoints that it named.
        Raises UnsupportedError if the server has no place for checkpoints, and StorageError if it cannot write one.
        """
        request = message_of(pb.CreateCheckpointRequest, name=name)
        return await self._fleet.ask_all(
            "CreateCheckpoint", request, self._seconds(timeout), lambda answer: answer.name
        )

    async def list_checkpoints(self, *, verify: bool = False, timeout: Timeout = DEFAULT) -> list[CheckpointInfo]:
        """The server's checkpoints, the newest first. With `verify` the server reads every byte of them to check it."""
        request = pb.ListCheckpointsRequest(verify=verify)
        return await self._fleet.ask(
            "ListCheckpoints", request, self._seconds(timeout), lambda answer: list(answer.checkpoints)
        )

    async def close(self) -> None:
        """Closes the connection. The server requeues the batches that samplers of this client have drawn ahead."""
        await self._draws.close()
        await self._fleet.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be pickled or copied; make one in each process")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
