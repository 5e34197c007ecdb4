"""Records: the results of the client's methods."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import repeat
from types import MappingProxyType
from typing import Any

from replay_client.columns import Buffer
from replay_client.rollout import RolloutGroup
from replay_protos import replay_pb2 as pb
from replay_protos.label_columns import labels_of_rows
from replay_protos.labels import NO_LABELS, Labels

TableInfo = pb.TableInfo
"""One table: its size, counters and waiting requests, as replay.proto documents them. The field `config` is the JSON of
the TableConfig."""
Policy = pb.Policy
"""The current policy version and the location of its weights, as replay.proto documents them."""
CheckpointInfo = pb.CheckpointInfo
"""One checkpoint: its name, size and time, as replay.proto documents them."""
AdmissionInfo = pb.AdmissionInfo
"""The state of admission, as replay.proto documents it."""
ClientInfo = pb.ClientInfo
"""A client that inserts, samples or publishes: its name, its role, and the seconds since the server last heard from the
client, as replay.proto documents them."""
Waiting = pb.Waiting
"""The requests that wait in one queue of the server: their number, reason and time, as replay.proto documents them."""
OverdueClient = pb.OverdueClient
"""The trainer, or the generators, if they have done nothing for too long: the role, the seconds and the reason, as
replay.proto documents them."""


class Tagged:
    """A record with the labels of an item."""

    __slots__ = ()
    labels: Labels

    @property
    def tags(self) -> dict[str, str | int]:
        """The tags with which the item was inserted."""
        return self.labels.tags


class Holding:
    """A record with the payload of an item."""

    payload: Buffer

    @cached_property
    def group(self) -> RolloutGroup:
        """The payload as a group, decoded at the first use. Its arrays are read-only.

        Raises ValueError if the payload is no group.
        """
        return RolloutGroup.decode(self.payload)


@dataclass(slots=True)  # not frozen, here and below: frozen dataclasses take four times as long to create
class SampleInfo(Tagged):
    """The state of an item and its table at the moment when the item was drawn."""

    key: int
    priority: float
    probability: float
    """The probability with which the sampler chooses this item as the first item of a request; 1 or 0 if the sampler is
    not random."""
    age: float
    """Seconds since the item was inserted."""
    policy_version: int
    staleness: int
    """The current policy version minus the item's, at least 0."""
    times_sampled: int
    """The number of times that this item was sampled from the table, this time included."""
    table_size: int
    """The number of items in the table."""
    lease_id: int = 0
    """The id of the lease of the batch, which `acknowledge` uses; 0: no lease."""
    shard: str = ""
    """The name of the server that gave the sample, if the client has several servers."""
    labels: Labels = NO_LABELS
    """The tags of the item. The labels of a sample leave out the names of the item's columns."""


@dataclass
class Sample(Holding):
    """One item that was drawn from a table."""

    info: SampleInfo
    payload: Buffer
    """The inserted bytes, followed by the bytes of the columns that `extend` added."""


@dataclass(frozen=True)
class Membership:
    """The state of an item in one of its tables."""

    priority: float
    times_sampled: int
    effective_priority: float
    """The weight in the sampler: priority ** exponent * 2 ** (-staleness / half_life)."""


@dataclass(frozen=True)
class StoredItem(Holding, Tagged):
    """One item with all of its tables."""

    key: int
    age: float
    """Seconds since the item was inserted."""
    policy_version: int
    staleness: int
    tables: dict[str, Membership]
    """The item's state in each of its tables, by the name of the table."""
    payload: Buffer
    labels: Labels = NO_LABELS
    """The tags of the item, and the names of its columns."""


@dataclass(frozen=True)
class ItemInfo(Tagged):
    """One row of `list_items`."""

    key: int
    priority: float
    age: float
    """Seconds since the item was inserted."""
    policy_version: int
    staleness: int
    times_sampled: int
    nbytes: int
    """Bytes of the payload."""
    effective_priority: float
    """The weight in the sampler, as in `Membership`."""
    labels: Labels = NO_LABELS
    """The tags of the item, and the names of its columns."""
    missing_columns: tuple[str, ...] = ()
    """The names of columns that the table requires and the item lacks. An item that lacks any is not sampled."""


@dataclass(frozen=True)
class ItemPage:
    """Some of the items of a table. Iterate over the page for its items; `len` counts them."""

    items: Sequence[ItemInfo]
    matching: int
    """The number of items that match, on all pages."""
    next_page: str
    """The argument `page` of `list_items` for the next page; empty: this is the last page."""

    def __iter__(self) -> Iterator[ItemInfo]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class MutationResult:
    """The changes that an update, delete or acknowledgement made."""

    applied: int
    """The number of changed items; for `acknowledge` and `renew`, the number of batches."""
    missing: tuple[int, ...]
    """Keys that are not in the table; for `acknowledge` and `renew`, the ids of leases that had ended."""


@dataclass(frozen=True)
class ExtendResult:
    """The outcome of an attempt to add columns to an item."""

    added: tuple[str, ...] = ()
    """Names of the columns that this call added."""
    present: tuple[str, ...] = ()
    """Names of the columns that the item had before. These columns have not changed."""
    missing: bool = False
    """True if nothing was added, because the server no longer has the item."""


@dataclass(frozen=True)
class PermitGrant:
    """Permits to generate groups."""

    id: int
    count: int
    """The number of permits."""
    ttl: float
    """Seconds until the server takes unused permits back."""
    shard: str = ""
    """The name of the server that granted the permits, if the client has several servers."""


@dataclass(frozen=True)
class ServerInfo:
    """A server and its tables."""

    version: str
    server_id: int
    """A random number that the server draws at each start."""
    uptime: float
    """Seconds since the server started."""
    policy: Policy
    admission: AdmissionInfo | None
    """None if the server has no [admission]."""
    tables: dict[str, TableInfo]
    """The tables by name."""
    items: int
    """The number of items; an item in several tables counts once."""
    bytes: int
    """Bytes of the items' payloads and labels."""
    max_bytes: int
    """The most bytes that all tables together may hold; 0: no bound."""
    storage: str
    """The kind of storage of the items: "memory" or "lmdb"."""
    insert_streams: int
    """The number of open streams on which clients insert."""
    sample_streams: int
    """The number of open streams on which clients draw."""
    time: float
    """The server's clock, in seconds since the epoch."""
    resident_bytes: int
    """Bytes of memory that the server's process uses; 0: unknown, as in the next three fields."""
    memory_available: int
    """Bytes of memory that are free on the server's machine, or in its control group."""
    disk_available: int
    """Bytes that are free on the disk of `data_dir`."""
    disk_bytes: int
    """Bytes of the files in `data_dir`."""
    commits: int
    """Commits to durable storage since the start."""
    commit_error: str
    """The reason why the last commit failed; empty: it succeeded. While it is set, the server refuses inserts."""
    damaged: int
    """Items that the server lost since its start because their bytes on disk were damaged."""
    fell_back: str
    """Empty unless the server could not start from the newest state of its data. Then the text names the older state
    from which it started, and the reason."""
    long_wait: float
    """Seconds after which a wait counts as long: three usual steps of the run, at least 20 s."""
    overdue: tuple[OverdueClient, ...]
    """Trainer and generators, if they are overdue."""
    clients: tuple[ClientInfo, ...]
    """The named clients that insert, sample or publish. The client that was seen last comes first."""

    def is_long(self, wait: Waiting) -> bool:
        """True if requests wait, and none was served for `long_wait` seconds."""
        return bool(wait.count and wait.seconds >= self.long_wait)

    def clients_of(self, role: str) -> list[ClientInfo]:
        """The clients with this role. They may have other roles, too."""
        return [client for client in self.clients if role in client.role.split(", ")]

    def is_connected(self, client: ClientInfo) -> bool:
        """True while the client has a call open, and for `long_wait` seconds after the server last heard from it.

        False as soon as the client has said that it ends (`leave`).
        """
        if client.ended:
            return False
        return bool(client.open or client.age < self.long_wait)

    def settings_of(self, part: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yields the name and the settings of each connected client that describes itself as this part of a run.

        `part` is for example "generator" or "trainer".
        """
        for client in self.clients:
            settings = read_described(client.settings)
            if self.is_connected(client) and settings.get("part") == part:
                yield client.name, settings


@dataclass(frozen=True)
class ShardedInfo(ServerInfo):
    """All shards as one server. Counts, bytes and rates are sums. `policy` is the lowest version of all shards.

    Of the quantiles of a table, `min`, `max` and `mean` are exact for the items of all shards. Any other quantile is
    the mean of the shards' quantiles, weighted by the shards' numbers of items.
    """

    shards: Mapping[str, ServerInfo]
    """The answer of each shard that answered, by the name of the shard."""
    gone: tuple[str, ...]
    """The names of the shards that did not answer. The sums leave them out."""


def shards_of(info: ServerInfo) -> Iterator[tuple[str, ServerInfo | None]]:
    """Yields the name and the answer of each of several servers. The answer is None if the server does not answer.

    Yields nothing for a single server.
    """
    if isinstance(info, ShardedInfo):
        yield from info.shards.items()
        for name in info.gone:
            yield name, None


def starts_of(info: ServerInfo) -> dict[str, int]:
    """Returns the id that each server drew at its start, by the name of the server. A single server has the name "".

    A server that does not answer is absent.
    """
    ids = {name: shard.server_id for name, shard in shards_of(info) if shard is not None}
    return ids or {"": info.server_id}


def restarted(last: ServerInfo, info: ServerInfo) -> bool:
    """Returns True if one of the servers in `info` has restarted since the answer `last`."""
    earlier_ids = starts_of(last)
    return any(name in earlier_ids and earlier_ids[name] != server_id for name, server_id in starts_of(info).items())


def rates_between(last: ServerInfo | None, info: ServerInfo) -> dict[str, tuple[float, float]]:
    """Returns the inserts per second and the samples per second between two answers, by the name of the table.

    `last` is the earlier answer. The result is empty if there is no earlier answer, or if a server has restarted in
    between. It is also empty if the two answers are not of the same servers, because a shard that answers again also
    counts what happened while it did not answer. A table is absent if `last` does not have it, or if its counters were
    set to 0 in between.
    """
    if last is None or starts_of(last) != starts_of(info):
        return {}
    seconds = info.uptime - last.uptime
    if seconds <= 0:  # the same answer twice
        return {}
    rates: dict[str, tuple[float, float]] = {}
    for name, table in info.tables.items():
        earlier_table = last.tables.get(name)
        if earlier_table is None:
            continue
        inserts = table.inserts - earlier_table.inserts
        samples = table.samples - earlier_table.samples
        if inserts >= 0 and samples >= 0:  # below 0: `reset` has set the counters to 0
            rates[name] = (inserts / seconds, samples / seconds)
    return rates


@lru_cache(maxsize=2048)  # an answer of a server may have hundreds of clients, whose settings are read a dozen times
def read_described(text: str) -> Mapping[str, Any]:
    """Returns the settings with which a client described itself (`AsyncReplayClient.describe`), by name.

    `text` is the field `settings` of a ClientInfo: a JSON object whose values are texts. Each value is parsed as JSON,
    or stays a text if it is no JSON. A client may send anything, so `tables` is left out unless it is a list of names.
    The result is read-only, because the cache returns the same object to all callers.
    """
    settings = {name: _parsed(value) for name, value in json.loads(text or "{}").items()}
    tables = settings.get("tables")
    if not isinstance(tables, list) or not all(isinstance(name, str) for name in tables):
        settings.pop("tables", None)
    return MappingProxyType(settings)


def _parsed(text: str) -> Any:
    """Returns the value of a JSON text, or the text itself if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def grant_of(message: pb.Permits, shard: str = "") -> PermitGrant:
    """Returns the record of a message with permits. `shard` is the name of the server that granted them."""
    return PermitGrant(message.grant, message.count, message.ttl, shard)


def server_info_of(message: pb.ServerInfo) -> ServerInfo:
    """Returns the record of a message about a server and its tables."""
    # Each field of the record has the name of a field of the message. Four of them have another form in the record.
    values: dict[str, Any] = {field.name: getattr(message, field.name) for field in fields(ServerInfo)}
    values["admission"] = message.admission if message.HasField("admission") else None
    values["tables"] = {table.name: table for table in message.tables}
    values["overdue"] = tuple(message.overdue)
    values["clients"] = tuple(message.clients)
    return ServerInfo(**values)


def samples_of(first: pb.SampleResponse, payloads: Sequence[Buffer], leased: bool = False) -> list[Sample]:
    """Returns the samples of a batch.

    `first` is the first message of the answer, which has the columns of all rows. `payloads` has one payload for each
    row. `leased`: the batch has a lease, so the id of the batch becomes the `lease_id` of each sample.
    """
    lease = first.batch if leased else 0
    labels = _labels((), first.tags, len(first.keys))
    columns = zip(
        first.keys,
        first.priorities,
        first.probabilities,
        first.ages,
        first.policy_versions,
        first.times_sampled,
        labels,
        payloads,
        strict=True,
    )
    current_version = first.policy_version
    size = first.table_size
    # This code runs for every sample, so it has a comprehension and positional arguments, which are fast.
    return [
        Sample(
            SampleInfo(
                key,
                priority,
                probability,
                age,
                version,
                max(0, current_version - version),
                times,
                size,
                lease,
                "",
                item_labels,
            ),
            payload,
        )
        for key, priority, probability, age, version, times, item_labels, payload in columns
    ]


def _labels(columns: Sequence[pb.Columns], tags: Sequence[pb.Tags], n: int) -> Iterable[Labels]:
    """Returns the labels of each of the n rows of a message."""
    return labels_of_rows(columns, tags, n) or repeat(NO_LABELS, n)


def stored_items_of(first: pb.GetResponse, payloads: Sequence[Buffer]) -> list[StoredItem]:
    """Returns the items of a response.

    `first` is the first message of the response, which has the columns of all rows. `payloads` has one payload for each
    row.
    """
    # For each row: name of a table -> state of the item in this table.
    tables: list[dict[str, Membership]] = [{} for _ in first.keys]
    for member in first.memberships:
        rows = zip(member.rows, member.priorities, member.times_sampled, member.effective_priorities, strict=True)
        for row, priority, times, effective_priority in rows:
            tables[row][member.table] = Membership(priority, times, effective_priority)
    columns = zip(
        first.keys,
        first.ages,
        first.policy_versions,
        tables,
        payloads,
        _labels(first.columns, first.tags, len(first.keys)),
        strict=True,
    )
    current_version = first.policy_version
    items: list[StoredItem] = []
    for key, age, version, memberships, payload, labels in columns:
        item = StoredItem(
            key=key,
            age=age,
            policy_version=version,
            staleness=max(0, current_version - version),
            tables=memberships,
            payload=payload,
            labels=labels,
        )
        items.append(item)
    return items


def item_page_of(response: pb.ListItemsResponse) -> ItemPage:
    """Returns the page of a response. The items are in the order of the rows of the response."""
    columns = zip(
        response.keys,
        response.priorities,
        response.ages,
        response.policy_versions,
        response.times_sampled,
        response.payload_sizes,
        response.effective_priorities,
        _labels(response.columns, response.tags, len(response.keys)),
        _labels(response.missing_columns, (), len(response.keys)),  # each holds the names of the row's missing columns
        strict=True,
    )
    current_version = response.policy_version
    items: list[ItemInfo] = []
    for key, priority, age, version, times_sampled, nbytes, effective_priority, labels, missing in columns:
        item = ItemInfo(
            key=key,
            priority=priority,
            age=age,
            policy_version=version,
            staleness=max(0, current_version - version),
            times_sampled=times_sampled,
            nbytes=nbytes,
            effective_priority=effective_priority,
            labels=labels,
            missing_columns=tuple(sorted(missing.columns)),
        )
        items.append(item)
    return ItemPage(items, response.matching, response.next_page)
