"""Requests: checks a caller's values, makes messages of them, and packs items into messages.

It also makes the keys of new items and the ids of requests. replay.proto states the conventions of the protocol.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, SupportsIndex, TypeVar, cast

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from replay_client.columns import Buffer, encode_columns
from replay_client.errors import InvalidRequestError
from replay_client.records import PermitGrant, Sample, StoredItem
from replay_client.rollout import RolloutGroup
from replay_protos import replay_pb2 as pb
from replay_protos.framing import BYTES_PER_MESSAGE, Frame, cut
from replay_protos.label_columns import columns_message, tags_message
from replay_protos.labels import NO_LABELS, Labels, TagValue, labels_of

M = TypeVar("M", bound=Message)

MOST_KEYS = 1_000_000
"""The most keys in one request."""
FIRST_KEY = 1 << 62
"""The smallest key of a KeySequence."""
LAST_KEY = (1 << 63) - 1
"""The largest key of a KeySequence."""
_LONGEST = 80
"""The most characters that an error shows of a value."""


class KeySequence:
    """Keys that no other client chooses: 38 random bits and a counter of 24 bits.

    After a fork, both processes would choose the same keys.
    """

    def __init__(self) -> None:
        self._keys: Iterator[int] = iter(())
        """The remaining keys with the present random bits."""

    def __next__(self) -> int:
        """The next key, which is the last one plus 1, except after 2**24 keys."""
        key = next(self._keys, None)
        if key is None:  # at the first key, and when the counter has reached its end: draw new random bits
            start = FIRST_KEY | secrets.randbits(38) << 24
            self._keys = iter(range(start, start + (1 << 24)))
            key = next(self._keys)
        return key


def priorities_message(
    table: str, keys: npt.NDArray[np.uint64], priorities: npt.NDArray[np.float64]
) -> pb.UpdatePrioritiesRequest:
    """A request that sets the priorities (K,) of the items with these `keys` (K,).

    Raises InvalidRequestError for too many keys, and for keys that are no integers.
    """
    if len(keys) > MOST_KEYS:
        raise InvalidRequestError(f"{len(keys)} keys in one request: send at most {MOST_KEYS} at a time")
    dtype = np.asarray(keys).dtype
    if dtype.kind not in "ui":
        raise InvalidRequestError(f"keys of type {dtype}: keys are integers, which {dtype} would not keep exactly")
    return pb.UpdatePrioritiesRequest(
        table=table,
        keys=np.ascontiguousarray(keys, dtype="<u8").tobytes(),
        priorities=np.ascontiguousarray(priorities, dtype="<f8").tobytes(),
    )


def new_id() -> int:
    """An id for a draw or another request. No other client chooses the same id."""
    return secrets.randbits(62) | 1 << 62


def once(request: M) -> M:
    """Gives `request` an id in place, and returns it. The server answers a retry as the first try, and changes nothing.

    The server recognises a retry by the id.
    """
    cast("Any", request).request = new_id()
    return request


def tag_filters(tags: Mapping[str, TagValue] | None) -> list[pb.TagFilter]:
    """The filters for items that have these tags. Raises InvalidRequestError for tags that no item can have."""
    try:
        return [pb.TagFilter(name=name, value=str(value)) for name, value in labels_of((), tags).pairs]
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


def message_of(kind: type[M], **fields: Any) -> M:
    """A message of this `kind`. Raises InvalidRequestError for a value that its field cannot hold."""
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(_explain(kind, fields, error)) from error


def _explain(kind: type[Message], fields: Mapping[str, Any], error: Exception) -> str:
    """An error text that names the first field whose value protobuf refuses; the text of `error` if it refuses none.

    Protobuf's own `error` does not name the field, so this function tries each field alone.
    """
    for name, value in fields.items():
        try:
            kind(**{name: value})
        except (TypeError, ValueError) as field_error:
            return f"{name} {shortened(value)}: {field_error}"
    return str(error)


def column(name: str, values: Iterable[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """The values as an array (K,). Raises InvalidRequestError if a value is no number of this type."""
    entries = list(values)
    try:
        return np.fromiter(entries, dtype=dtype, count=len(entries))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{name} {shortened(entries)}: {error}") from error


def whole_number(name: str, value: SupportsIndex, bits: int) -> int:
    """The value as an int. Raises InvalidRequestError unless it is an integer from 0 to 2**bits - 1."""
    try:
        number = index(value)
    except TypeError:
        number = -1  # no integer at all: refused below
    if not 0 <= number < 1 << bits:
        raise InvalidRequestError(f"{name} must be a whole number from 0 to 2**{bits} - 1, not {shortened(value)}")
    return number


def shortened(value: object) -> str:
    """The value as an error shows it, with at most `_LONGEST` characters."""
    text = repr(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}..."


# ------------------------------------------------------------------------------------------------------------- items

ROWS_PER_MESSAGE = 1024
"""The most items in one message. A message costs both sides as much as many small items."""
BYTES_TOGETHER = 2 << 20
"""The most payload bytes of items that share a message. A larger item has messages of its own, and is cut into smaller
pieces, because the server waits at most `stall_timeout` for the next piece, in which a slow link must carry a piece."""


@dataclass(slots=True)  # not frozen: that would make it four times as slow to create
class Item:
    """One item that a client inserts, or a segment with which it extends a stored item."""

    key: int
    priorities: Mapping[str, float]
    """The item's priority in each of its tables, by the name of the table. Empty for a segment."""
    policy_version: int
    payload: Sequence[Buffer]
    """The bytes of the item, as consecutive buffers."""
    nbytes: int
    """The total length of these buffers."""
    timeout: float | None
    """Seconds that the item may wait for its tables; None: for ever."""
    permits: int = 0
    """The id of the grant from which the item uses up a permit; 0: the item uses no permit."""
    granted_by: str = ""
    """The name of the shard that granted the permit."""
    labels: Labels = NO_LABELS
    """The tags of the item, and the names of its columns."""
    closes: tuple[int, ...] = ()
    """The leases that the insert of the item acknowledges; for a segment, the leases that must not have ended."""
    closed_on: str = ""
    """The name of the shard that gave the samples of these leases."""
    request: int = 0
    """The id of a segment, by which the server recognises a segment that is sent again. The segment is appended to the
    stored item that has this `key`. 0: this is a new item and no segment."""
    completions: int = 0
    """The number of completions in the group; 0: unknown, because the caller passed bytes."""
    completion_tokens: int = 0
    """The number of tokens of all these completions."""
    moved: bool = False
    """True if the item is inserted into another shard than the one that granted the permit. The client then tells the
    granting shard that the permit is used (`ReleasePermits`)."""
    refused_by: frozenset[str] = frozenset()
    """The names of the shards that have refused this item because they are draining. These shards do not have it."""

    @classmethod
    def segment(
        cls, key: int, extras: Mapping[str, npt.ArrayLike], axes: Mapping[str, str] | None, timeout: float | None
    ) -> Item:
        """A segment with these columns. Raises InvalidRequestError for columns that `encode_columns` refuses."""
        try:
            payload = encode_columns(extras, axes)
            labels = labels_of(extras, None)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
        return cls(
            key=whole_number("key", key, 64),
            priorities={},
            policy_version=0,
            payload=payload,
            nbytes=sum(map(len, payload)),
            timeout=timeout,
            labels=labels,
            request=new_id(),
        )

    @classmethod
    def of(
        cls,
        key: int,
        group: RolloutGroup | Buffer,
        priorities: Mapping[str, float],
        policy_version: int | None,
        timeout: float | None,
        permits: PermitGrant | None,
        tags: Mapping[str, TagValue] | None = None,
        closes: Sequence[Sample] = (),
    ) -> Item:
        """An item with this group or these bytes.

        `policy_version`: None means the group's own version, or 0 for bytes. `timeout` is in seconds. `closes` are
        samples with a lease, which the insert acknowledges. Raises InvalidRequestError for a value that cannot be sent.
        """
        columns: Iterable[str] = ()
        completions = completion_tokens = 0
        if isinstance(group, RolloutGroup):
            completions = group.group_size
            completion_tokens = int(group.sampled_lengths.sum())
            payload: Sequence[Buffer] = group.encode_pieces()
            version = group.policy_version if policy_version is None else policy_version
            columns = group.extras
        elif isinstance(group, bytes | bytearray | memoryview):
            if isinstance(group, memoryview):
                group = group.cast("B")  # the length of any other view is not its number of bytes
            payload = (group,)
            version = policy_version or 0
        else:
            raise InvalidRequestError(f"a group must be a RolloutGroup or its bytes, not a {type(group).__name__}")
        # Check everything here, before the item joins the pipeline of a writer. Several items share a message there, so
        # one bad value would make the others fail too.
        key = whole_number("key", key, 64)
        version = whole_number("policy_version", version, 63)
        if not isinstance(priorities, Mapping):
            raise InvalidRequestError(f'priorities must be by table, such as {{"replay": 1.0}}, not {priorities!r}')
        try:
            "".join(priorities).encode()  # protobuf sends only text that UTF-8 can encode
            priorities = {table: float(priority) for table, priority in priorities.items()}
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"priorities must be numbers by table name, not {priorities}: {error}") from error
        try:
            labels = labels_of(columns, tags)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
        nbytes = len(payload[0]) if len(payload) == 1 else sum(map(len, payload))  # the first form is faster
        grant = 0
        granted_by = ""
        if permits:
            grant = permits.id
            granted_by = permits.shard
        leases: tuple[int, ...] = ()
        closed_on = ""
        if closes:
            leases, closed_on = _closed(closes)
        return cls(
            key=key,
            priorities=priorities,
            policy_version=version,
            payload=payload,
            nbytes=nbytes,
            timeout=timeout,
            permits=grant,
            granted_by=granted_by,
            labels=labels,
            closes=leases,
            closed_on=closed_on,
            completions=completions,
            completion_tokens=completion_tokens,
        )


def _closed(samples: Sequence[Sample]) -> tuple[tuple[int, ...], str]:
    """The leases of these samples, and the shard that gave all of them.

    Raises InvalidRequestError for a sample without a lease, and for samples of several shards.
    """
    for sample in samples:
        if not sample.info.lease_id:
            raise InvalidRequestError(f"item {sample.info.key} cannot be closed: it was drawn without a lease")
    shards = {sample.info.shard for sample in samples}
    if len(shards) > 1:
        raise InvalidRequestError(f"an item closes samples of one shard, not of {', '.join(sorted(shards))}")
    (shard,) = shards
    leases = dict.fromkeys(sample.info.lease_id for sample in samples)  # each lease once, in order
    return tuple(leases), shard


def check_extension(item: Sample | StoredItem, extras: Mapping[str, npt.ArrayLike], axes: Mapping[str, str]) -> None:
    """Raises InvalidRequestError if nobody could read the group of `item` after it was extended with these columns."""
    try:
        group = item.group
    except ValueError as error:
        raise InvalidRequestError(f"the item is no group that columns could join: {error}") from None
    new_columns = {name: np.asarray(values) for name, values in extras.items() if name not in group.extras}
    # A column that the group already has stays as it is, so leave out its new axis. Keep an axis without a column in
    # `extras`, which is a mistake of the caller: the check below refuses it.
    new_axes = {name: axis for name, axis in axes.items() if name in new_columns or name not in extras}
    try:
        # The construction checks the shapes and axes of all columns. `validate=False`: the stored values do not matter.
        replace(group, extras=group.extras | new_columns, axes=group.axes | new_axes, validate=False)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


def pack_items(items: Sequence[Item], bytes_per_message: int = BYTES_PER_MESSAGE) -> Iterator[Frame[pb.InsertRequest]]:
    """Yields messages that carry `items` in order: many small items share a message, and a large item spans several.

    `bytes_per_message` is the most payload bytes of a message of a large item. All items of a message have the same
    timeout and permits, because a message has one field for each. An item that closes batches has its own message.
    """
    # A message may carry more than BYTES_TOGETHER if its payloads travel through shared memory.
    bytes_together = max(bytes_per_message, BYTES_TOGETHER)
    start = 0
    while start < len(items):
        first = items[start]
        nbytes = first.nbytes
        stop = start + 1
        end = min(len(items), start + ROWS_PER_MESSAGE)
        # Let items join the message of the first one, up to the first item that does not fit or must not join.
        while stop < end:
            item = items[stop]
            if nbytes + item.nbytes > bytes_together or not _share_a_message(first, item):
                break
            nbytes += item.nbytes
            stop += 1
        yield from _message(items[start:stop], nbytes, bytes_per_message)
        start = stop


def _share_a_message(first: Item, item: Item) -> bool:
    """True if one message may carry both items: they agree in the fields that a message has once, and close nothing."""
    return (
        item.permits == first.permits
        and item.moved == first.moved
        and item.timeout == first.timeout
        and bool(item.request) == bool(first.request)  # both are segments, or both are new items
        and not item.closes
        and not first.closes
    )


def _message(items: Sequence[Item], nbytes: int, bytes_per_message: int) -> Iterator[Frame[pb.InsertRequest]]:
    """Yields the message with these items, or several messages if there is one large item.

    `nbytes` is the sum of the items' bytes. All items agree in the fields that are read from the first one.
    """
    first = items[0]
    keys = [item.key for item in items]
    sizes = [item.nbytes for item in items]
    request = pb.InsertRequest(keys=keys, payload_sizes=sizes, timeout=first.timeout)
    if first.request:  # the items are segments
        request.extend = True
        request.requests.extend(item.request for item in items)
    else:
        request.policy_versions.extend(item.policy_version for item in items)
        request.targets.extend(_targets(items))
        request.permits = first.permits
        request.moved = first.moved
    request.closes.extend(first.closes)
    if any(item.labels is not NO_LABELS for item in items):
        labels = [item.labels for item in items]
        request.columns.extend(columns_message(labels))
        request.tags.extend(tags_message(labels))
    if any(item.completions for item in items):
        request.lengths.completions.extend(item.completions for item in items)
        request.lengths.tokens.extend(item.completion_tokens for item in items)
    if len(items) > 1 or nbytes <= bytes_per_message:  # several items always fit: `pack_items` bounds their bytes
        pieces: list[Buffer] = []
        for item in items:
            pieces.extend(item.payload)
        yield Frame(request, pieces)
        return
    for chunks in cut(first.payload, bytes_per_message):
        yield Frame(request, chunks)
        request = pb.InsertRequest()  # the later messages have only bytes


def _targets(items: Sequence[Item]) -> list[pb.InsertTarget]:
    """The tables of these items, each with its rows and their priorities in it. A row is the index of an item."""
    rows_of_tables: dict[str, list[int]] = {}
    for row, item in enumerate(items):
        for table in item.priorities:
            rows_of_tables.setdefault(table, []).append(row)
    targets: list[pb.InsertTarget] = []
    for table, rows in rows_of_tables.items():
        priorities = [items[row].priorities[table] for row in rows]
        if len(rows) == len(items):
            rows = []  # an empty list means all rows
        targets.append(pb.InsertTarget(table=table, priorities=priorities, rows=rows))
    return targets


def unchanged_row(answer: pb.InsertResponse) -> pb.UnchangedRow | None:
    """The reason why the only segment of a request was not appended; None: it was appended."""
    return answer.unchanged[0] if answer.unchanged else None


class EvictedItems(dict[int, tuple[str, ...]]):
    """The items that a full table removed as soon as they were inserted: the names of these tables by item key.

    The newest entry is the last one.
    """

    MOST = 1 << 16
    """The most entries; the oldest entries are forgotten. The bound is for a pool that keeps the best items: it evicts
    many new items in a long run."""

    def record(self, response: pb.InsertResponse) -> None:
        """Adds the evicted items that an acknowledgement names."""
        for row in response.evicted:
            tables = self.pop(row.key, ())  # removed first, so that the new entry is the last one
            self[row.key] = (*tables, row.table)
        while len(self) > self.MOST:
            oldest = next(iter(self))
            del self[oldest]
