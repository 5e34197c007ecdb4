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
"""One table: its size, counters and waiting requests, as replay.proto documents them. `config` is the JSON of its
TableConfig."""
Policy = pb.Policy
"""The trainer's current version and where its weights are, as replay.proto documents them."""
CheckpointInfo = pb.CheckpointInfo
"""One checkpoint: its name, size and time, as replay.proto documents them."""
AdmissionInfo = pb.AdmissionInfo
"""The state of admission, as replay.proto documents it."""
ClientInfo = pb.ClientInfo
"""A client that inserts, samples or publishes: its name, its role and its last sign of life, as replay.proto documents
them."""
Waiting = pb.Waiting
"""The requests that wait in one line, as replay.proto documents them."""
OverdueClient = pb.OverdueClient
"""Trainer or generators that are overdue: since when, and in words, as replay.proto documents it."""


class Tagged:
    """What has the labels of an item."""

    __slots__ = ()
    labels: Labels

    @property
    def tags(self) -> dict[str, str | int]:
        """The tags with which the item was inserted."""
        return self.labels.tags


class Holding:
    """What has the payload of an item."""

    payload: Buffer

    @cached_property
    def group(self) -> RolloutGroup:
        """The payload as a group, decoded at the first use. Its arrays are read-only.

        Raises ValueError if the payload is no group.
        """
        return RolloutGroup.decode(self.payload)


@dataclass(slots=True)  # not frozen, here and below: frozen ones take four times as long to create
class SampleInfo(Tagged):
    """The state of an item and its table at the moment when the item was drawn."""

    key: int
    priority: float
    probability: float
    """The probability of this item to be drawn first in its request. Selectors without chance give 1 or 0."""
    age: float
    """Seconds since the item was inserted."""
    policy_version: int
    staleness: int
    """The current policy version minus the item's."""
    times_sampled: int
    """How often this item was sampled from the table, this time included."""
    table_size: int
    lease_id: int = 0
    """Names the batch for `acknowledge`, if it was drawn with a lease; 0: no lease."""
    shard: str = ""
    """The name of the server that gave the sample, if the client has several."""
    labels: Labels = NO_LABELS
    """Of a sample only the tags."""


@dataclass
class Sample(Holding):
    """One item that was drawn from a table."""

    info: SampleInfo
    payload: Buffer
    """The inserted bytes, and after them those of the columns that `extend` added."""


@dataclass(frozen=True)
class Membership:
    """An item's place in one table."""

    priority: float
    times_sampled: int
    effective_priority: float
    """The weight in the sampler: priority ** exponent * 2 ** (-staleness / half_life)."""


@dataclass(frozen=True)
class StoredItem(Holding, Tagged):
    """One item with all of its tables."""

    key: int
    age: float
    policy_version: int
    staleness: int
    tables: dict[str, Membership]
    payload: Buffer
    labels: Labels = NO_LABELS
    """Its tags, and the names of its columns."""


@dataclass(frozen=True)
class ItemInfo(Tagged):
    """One row of `list_items`."""

    key: int
    priority: float
    age: float
    policy_version: int
    staleness: int
    times_sampled: int
    nbytes: int
    effective_priority: float
    """As `Membership.effective_priority`."""
    labels: Labels = NO_LABELS
    """Its tags, and the names of its columns."""
    missing_columns: tuple[str, ...] = ()
    """Names of the columns that it lacks and the table requires. While there are some, it is not sampled."""


@dataclass(frozen=True)
class ItemPage:
    """Some of the items of a table. Iterate over the page for its items; `len` counts them."""

    items: Sequence[ItemInfo]
    matching: int
    """How many items match on all pages."""
    next_page: str
    """The argument `page` of `list_items` for the next page; empty: this is the last page."""

    def __iter__(self) -> Iterator[ItemInfo]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class MutationResult:
    """What an update, delete or acknowledgement changed."""

    applied: int
    missing: tuple[int, ...]
    """Keys that are not in the table; for `acknowledge`, batches whose lease had ended."""


@dataclass(frozen=True)
class ExtendResult:
    """What became of the columns with which an item was to be extended."""

    added: tuple[str, ...] = ()
    """Names of the columns that the item has from this call."""
    present: tuple[str, ...] = ()
    """Names of the columns that it had before. They are as they were."""
    missing: bool = False
    """The item is gone, so nothing was added."""


@dataclass(frozen=True)
class PermitGrant:
    """Permits to generate groups."""

    id: int
    count: int
    ttl: float
    """Seconds until the server takes unused permits back."""
    shard: str = ""
    """The name of the server that granted the permits, if the client has several."""


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
    items: int
    bytes: int
    max_bytes: int
    """The most bytes that all tables together may hold; 0: no bound."""
    storage: str
    insert_streams: int
    sample_streams: int
    time: float
    """The server's clock, in seconds since the epoch."""
    resident_bytes: int
    """Bytes of memory that the server's process uses; 0: unknown. This holds for the next fields too."""
    memory_available: int
    """Bytes of memory that are free on the server's machine, or in its control group."""
    disk_available: int
    """Bytes that are free on the disk of `data_dir`."""
    disk_bytes: int
    """Bytes of the files in `data_dir`."""
    commits: int
    """Commits to durable storage since the start."""
    commit_error: str
    """Why the last commit failed; empty: it succeeded. While it is set, the server refuses inserts."""
    damaged: int
    """Items that the server lost since its start because their bytes on disk were damaged."""
    fell_back: str
    """If the server started from an older state of its data: which state, and why. Empty: it did not."""
    long_wait: float
    """Seconds from which on a wait is long: three usual steps of the run."""
    overdue: tuple[OverdueClient, ...]
    """Trainer and generators, if they are overdue."""
    clients: tuple[ClientInfo, ...]
    """The named clients that insert, sample or publish. The one that was seen last comes first."""

    def is_long(self, wait: Waiting) -> bool:
        """Whether requests wait, and none was served for longer than steps of this run usually take."""
        return bool(wait.count and wait.seconds >= self.long_wait)

    def clients_of(self, role: str) -> list[ClientInfo]:
        """The clients with this role, beside others that they may have."""
        return [client for client in self.clients if role in client.role.split(", ")]

    def is_connected(self, client: ClientInfo) -> bool:
        """A client is connected during its calls, and `long_wait` seconds longer, unless it said that it ends."""
        return not client.ended and bool(client.open or client.age < self.long_wait)

    def settings_of(self, part: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The name of each generator or trainer that is there, and what it says of itself."""
        for client in self.clients:
            settings = read_described(client.settings)
            if self.is_connected(client) and settings.get("part") == part:
                yield client.name, settings


@dataclass(frozen=True)
class ShardedInfo(ServerInfo):
    """All shards as one server: counts, bytes and rates are sums, the policy is the lowest one.

    Quantiles of a table: `min` and `max` are those of all items, `mean` is their mean, and the others are means of the
    shards' quantiles, each weighted by its items.
    """

    shards: Mapping[str, ServerInfo]
    """Each shard that answered, by its name."""
    gone: tuple[str, ...]
    """The shards that did not answer. Nothing of them is in the sums."""


def shards_of(info: ServerInfo) -> Iterator[tuple[str, ServerInfo | None]]:
    """Each server of several by its name; None: it does not answer. Nothing for a single server."""
    if isinstance(info, ShardedInfo):
        yield from info.shards.items()
        for name in info.gone:
            yield name, None


def starts_of(info: ServerInfo) -> dict[str, int]:
    """The id that each server drew at its start, by its name; a single one has no name. One that is gone is absent."""
    return {name: shard.server_id for name, shard in shards_of(info) if shard is not None} or {"": info.server_id}


def restarted(last: ServerInfo, info: ServerInfo) -> bool:
    """Returns whether a server that answers now has started again since the last look."""
    before = starts_of(last)
    return any(before.get(name, start) != start for name, start in starts_of(info).items())


def rates_between(last: ServerInfo | None, info: ServerInfo) -> dict[str, tuple[float, float]]:
    """Inserts and samples a second of each table between two looks at a server.

    A table is absent if its counters began anew in between, or if it was not there before. All are absent if other
    servers answer than before: what a shard counted while it was away did not happen between the two looks.
    """
    if last is None or starts_of(last) != starts_of(info) or (seconds := info.uptime - last.uptime) <= 0:
        return {}
    return {
        name: ((table.inserts - before.inserts) / seconds, (table.samples - before.samples) / seconds)
        for name, table in info.tables.items()
        if (before := last.tables.get(name)) is not None
        and table.inserts >= before.inserts
        and table.samples >= before.samples
    }


@lru_cache(maxsize=2048)  # each look at a server reads what hundreds of clients said, a dozen times
def read_described(text: str) -> Mapping[str, Any]:
    """What a client has said of itself, from the `settings` of its ClientInfo. What is no JSON is a text.

    A client may say anything. `tables` is a list of names here, or nothing. Nobody may change the result.
    """
    settings = {name: _parsed(value) for name, value in json.loads(text or "{}").items()}
    tables = settings.get("tables")
    if not (isinstance(tables, list) and all(isinstance(name, str) for name in tables)):
        settings.pop("tables", None)
    return MappingProxyType(settings)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def grant_of(message: pb.Permits, shard: str = "") -> PermitGrant:
    """The permits in their message, and the name of the server that granted them."""
    return PermitGrant(message.grant, message.count, message.ttl, shard)


def server_info_of(message: pb.ServerInfo) -> ServerInfo:
    """The server and its tables in their message."""
    values: dict[str, Any] = {field.name: getattr(message, field.name) for field in fields(ServerInfo)}
    values["admission"] = message.admission if message.HasField("admission") else None
    values["tables"] = {table.name: table for table in message.tables}
    values |= {"overdue": tuple(message.overdue), "clients": tuple(message.clients)}
    return ServerInfo(**values)


def samples_of(first: pb.SampleResponse, payloads: Sequence[Buffer], leased: bool = False) -> list[Sample]:
    """The samples of a batch; `first` is the message with its columns."""
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
    now, size = first.policy_version, first.table_size
    return [
        Sample(
            SampleInfo(key, priority, chance, age, version, max(0, now - version), times, size, lease, "", of_row),
            payload,
        )
        for key, priority, chance, age, version, times, of_row, payload in columns
    ]


def _labels(columns: Sequence[pb.Columns], tags: Sequence[pb.Tags], n: int) -> Iterable[Labels]:
    """One for each of the n rows of a message."""
    return labels_of_rows(columns, tags, n) or repeat(NO_LABELS, n)


def stored_items_of(first: pb.GetResponse, payloads: Sequence[Buffer]) -> list[StoredItem]:
    """The items of a response; `first` is the message with its columns, `payloads` has one entry a row."""
    tables: list[dict[str, Membership]] = [{} for _ in first.keys]
    for member in first.memberships:
        columns = zip(member.rows, member.priorities, member.times_sampled, member.effective_priorities, strict=True)
        for row, priority, times, aged in columns:
            tables[row][member.table] = Membership(priority, times, aged)
    labels = _labels(first.columns, first.tags, len(first.keys))
    return [
        StoredItem(key, age, version, max(0, first.policy_version - version), held, payload, of_row)
        for key, age, version, held, payload, of_row in zip(
            first.keys, first.ages, first.policy_versions, tables, payloads, labels, strict=True
        )
    ]


def item_page_of(response: pb.ListItemsResponse) -> ItemPage:
    """The page that a response holds; rows in its order."""
    columns = zip(
        response.keys,
        response.priorities,
        response.ages,
        response.policy_versions,
        response.times_sampled,
        response.payload_sizes,
        response.effective_priorities,
        _labels(response.columns, response.tags, len(response.keys)),
        _labels(response.missing_columns, (), len(response.keys)),
        strict=True,
    )
    now = response.policy_version
    items = [
        ItemInfo(
            *(key, priority, age, version, max(0, now - version), times, nbytes, effective, of_row),
            tuple(sorted(lacking.columns)),
        )
        for key, priority, age, version, times, nbytes, effective, of_row, lacking in columns
    ]
    return ItemPage(items, response.matching, response.next_page)
