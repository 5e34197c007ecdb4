"""Requests: checks a caller's values, makes messages of them, and packs items into messages.

This module also makes the keys of new items and the ids of requests. replay.proto states the conventions of the
protocol.
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
_MOST_CHARACTERS = 80
"""The most characters of a value that an error shows."""


class KeySequence:
    """Makes keys for new items. No other client makes the same keys, because each key has 38 random bits.

    The lowest 24 bits of a key are a counter. After a fork, parent and child would make the same keys with this object.
    """

    def __init__(self) -> None:
        self._keys: Iterator[int] = iter(())
        """The remaining keys with the present random bits."""

    def __next__(self) -> int:
        """The next key. It is the key before it plus 1 or, after every 2**24 keys, a key with new random bits."""
        key = next(self._keys, None)
        if key is None:  # this is the first key, or the counter has reached its end, so draw new random bits
            start = FIRST_KEY | (secrets.randbits(38) << 24)
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
    """An id for a draw or another request. It is random, so that no other client chooses the same id."""
    return secrets.randbits(62) | (1 << 62)  # never 0, which stands for no id


def once(request: M) -> M:
    """Sets a new id in `request`, and returns this same message.

    By the id, the server recognises a retry. It then changes nothing, and gives the same answer as at the first try.
    """
    cast("Any", request).request = new_id()
    return request


def tag_filters(tags: Mapping[str, TagValue] | None) -> list[pb.TagFilter]:
    """The filters for items that have these tags. Raises InvalidRequestError for tags that no item can have."""
    try:
        labels = labels_of(columns=(), tags=tags)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None
    return [pb.TagFilter(name=name, value=str(value)) for name, value in labels.pairs]


def message_of(kind: type[M], **fields: Any) -> M:
    """A message of this `kind`. Raises InvalidRequestError for a value that its field cannot hold."""
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(_explain(kind, fields, error)) from error


def _explain(kind: type[Message], fields: Mapping[str, Any], error: Exception) -> str:
    """The text of an error that names the first field whose value protobuf refuses.

    Protobuf's own `error` does not name the field, so this function tries each field alone. If protobuf accepts each
    field alone, returns the text of `error`.
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
    """The `repr` of a value, for an error. A longer text is cut after `_MOST_CHARACTERS` characters."""
    text = repr(value)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}..."


# ------------------------------------------------------------------------------------------------------------- items

ROWS_PER_MESSAGE = 1024
"""The most items in one message. Many small items share a message, because each message costs client and server about
as much as many small items do."""
BYTES_TOGETHER = 2 << 20
"""The most payload bytes of items that share a message. A larger item is sent alone, in several messages with smaller
pieces of it. The pieces are small because the server waits at most `stall_timeout` for the next piece, so even a slow
link must carry a piece within this time."""


@dataclass(slots=True)  # not frozen, because a frozen object takes four times as long to create
class Item:
    """One item that a client inserts, or a segment with which it extends a stored item."""

    key: int
    priorities: Mapping[str, float]
    """Name of each table that the item enters -> its priority in that table. Empty for a segment."""
    policy_version: int
    payload: Sequence[Buffer]
    """The bytes of the item, as consecutive buffers."""
    nbytes: int
    """The bytes of all buffers of `payload` together."""
    timeout: float | None
    """Seconds that the item may wait until its tables take it; None: it may wait for ever."""
    permits: int = 0
    """The id of the grant from which the item uses up a permit; 0: the item uses no permit."""
    granted_by: str = ""
    """The name of the shard that granted the permit."""
    labels: Labels = NO_LABELS
    """The tags of the item, and the names of its columns."""
    closes: tuple[int, ...] = ()
    """The ids of the leases that the insert of the item acknowledges. A segment acknowledges no leases, but the server
    refuses it if one of these leases has ended."""
    closed_on: str = ""
    """The name of the shard that gave the samples of these leases."""
    request: int = 0
    """The id of a segment, by which the server recognises a segment that is sent again. The server appends the segment
    to the stored item that has this `key`. 0: this is a new item and no segment."""
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
        """A segment that adds the columns `extras` to the stored item with this `key`.

        Raises InvalidRequestError for columns that `encode_columns` refuses, and for names that no column can have.
        """
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
        """A new item that has this group, or these bytes, as its payload.

        `policy_version` None: the group's own version, or 0 for bytes. `timeout` is in seconds. `permits`: the grant
        from which the item uses up a permit. `closes`: samples with a lease, which the insert acknowledges. Raises
        InvalidRequestError for a value that cannot be sent.
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
                group = group.cast("B")  # so that `len` below is the number of bytes, and not of larger elements
            payload = (group,)
            version = policy_version or 0
        else:
            raise InvalidRequestError(f"a group must be a RolloutGroup or its bytes, not a {type(group).__name__}")
        # Check everything here, before the item joins the pipeline of a writer. There, several items share a message,
        # so one bad value would make the other items fail, too.
        key = whole_number("key", key, 64)
        version = whole_number("policy_version", version, 63)
        if not isinstance(priorities, Mapping):
            raise InvalidRequestError(f'priorities must be by table, such as {{"replay": 1.0}}, not {priorities!r}')
        try:
            "".join(priorities).encode()  # raises for a name that is no text in UTF-8, because protobuf cannot send it
            priorities = {table: float(priority) for table, priority in priorities.items()}
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"priorities must be numbers by table name, not {priorities}: {error}") from error
        try:
            labels = labels_of(columns, tags)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
        if len(payload) == 1:  # faster than `sum`
            nbytes = len(payload[0])
        else:
            nbytes = sum(map(len, payload))
        grant_id = 0
        granted_by = ""
        if permits:
            grant_id = permits.id
            granted_by = permits.shard
        leases: tuple[int, ...] = ()
        closed_on = ""
        if closes:
            leases, closed_on = _leases_of(closes)
        return cls(
            key=key,
            priorities=priorities,
            policy_version=version,
            payload=payload,
            nbytes=nbytes,
            timeout=timeout,
            permits=grant_id,
            granted_by=granted_by,
            labels=labels,
            closes=leases,
            closed_on=closed_on,
            completions=completions,
            completion_tokens=completion_tokens,
        )


def _leases_of(samples: Sequence[Sample]) -> tuple[tuple[int, ...], str]:
    """The ids of the leases of these samples, and the name of the shard that gave all of the samples.

    There must be at least one sample. Raises InvalidRequestError for a sample without a lease, and for samples of
    several shards.
    """
    for sample in samples:
        if not sample.info.lease_id:
            raise InvalidRequestError(f"item {sample.info.key} cannot be closed: it was drawn without a lease")
    shards = {sample.info.shard for sample in samples}
    if len(shards) > 1:
        raise InvalidRequestError(f"an item closes samples of one shard, not of {', '.join(sorted(shards))}")
    (shard,) = shards
    leases = dict.fromkeys(sample.info.lease_id for sample in samples)  # has each lease once, and keeps their order
    return tuple(leases), shard


def check_extension(item: Sample | StoredItem, extras: Mapping[str, npt.ArrayLike], axes: Mapping[str, str]) -> None:
    """Raises InvalidRequestError if nobody could read the group of `item` any more with these new columns in it."""
    try:
        group = item.group
    except ValueError as error:
        raise InvalidRequestError(f"the item is no group that columns could join: {error}") from None
    new_columns = {name: np.asarray(values) for name, values in extras.items() if name not in group.extras}
    # A column that the group already has stays as it is, so `new_axes` leaves out the axis of such a column. An axis
    # without a column in `extras` is a mistake of the caller, so `new_axes` keeps it, and the check below refuses it.
    new_axes = {name: axis for name, axis in axes.items() if name in new_columns or name not in extras}
    try:
        # `replace` makes a new group, which checks the shapes and axes of all columns. With `validate=False`, the new
        # group accepts stored values that no trainer could use, because they do not matter here.
        replace(group, extras=group.extras | new_columns, axes=group.axes | new_axes, validate=False)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


def pack_items(items: Sequence[Item], bytes_per_message: int = BYTES_PER_MESSAGE) -> Iterator[Frame[pb.InsertRequest]]:
    """Yields messages that carry `items` in order: many small items share a message, and a large item spans several.

    `bytes_per_message` is the most payload bytes of each message of a large item. All items of a message have the same
    timeout and permits, because a message has these fields only once. An item that closes batches is alone in its
    message.
    """
    # If payloads travel through shared memory, `bytes_per_message` is larger than BYTES_TOGETHER.
    bytes_together = max(bytes_per_message, BYTES_TOGETHER)
    start = 0
    while start < len(items):
        first = items[start]
        nbytes = first.nbytes
        stop = start + 1
        last_stop = min(len(items), start + ROWS_PER_MESSAGE)
        # Let the next items join the message of `first`, until one of them does not fit or must not join.
        while stop < last_stop:
            item = items[stop]
            if nbytes + item.nbytes > bytes_together or not _may_share_message(first, item):
                break
            nbytes += item.nbytes
            stop += 1
        yield from _messages(items[start:stop], nbytes, bytes_per_message)
        start = stop


def _may_share_message(first: Item, item: Item) -> bool:
    """True if one message may carry both items: they agree in the fields that a message has only once, and neither item
    closes batches."""
    return (
        item.permits == first.permits
        and item.moved == first.moved
        and item.timeout == first.timeout
        and bool(item.request) == bool(first.request)  # both are segments, or both are new items
        and not item.closes
        and not first.closes
    )


def _messages(items: Sequence[Item], nbytes: int, bytes_per_message: int) -> Iterator[Frame[pb.InsertRequest]]:
    """Yields one message with all of these items or, for a single large item, several messages.

    `nbytes` is the sum of the items' bytes. All items may share a message (`_may_share_message`).
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
    request.closes.extend(first.closes)  # an item that closes batches is alone in its message
    if any(item.labels is not NO_LABELS for item in items):
        labels = [item.labels for item in items]
        request.columns.extend(columns_message(labels))
        request.tags.extend(tags_message(labels))
    if any(item.completions for item in items):
        request.lengths.completions.extend(item.completions for item in items)
        request.lengths.tokens.extend(item.completion_tokens for item in items)
    # Several items always fit into one message, because `pack_items` bounds the sum of their bytes.
    if len(items) > 1 or nbytes <= bytes_per_message:
        pieces: list[Buffer] = []
        for item in items:
            pieces.extend(item.payload)
        yield Frame(request, pieces)
        return
    for chunks in cut(first.payload, bytes_per_message):
        yield Frame(request, chunks)
        request = pb.InsertRequest()  # only the first message has fields, and the later ones have only payload bytes


def _targets(items: Sequence[Item]) -> list[pb.InsertTarget]:
    """The targets of a message with these items: one for each table that any of the items enters.

    A target has the rows that enter its table, and the priorities of these rows in the table. A row is the index of an
    item in `items`.
    """
    rows_by_table: dict[str, list[int]] = {}
    for row, item in enumerate(items):
        for table in item.priorities:
            rows_by_table.setdefault(table, []).append(row)
    targets: list[pb.InsertTarget] = []
    for table, rows in rows_by_table.items():
        priorities = [items[row].priorities[table] for row in rows]
        if len(rows) == len(items):
            rows = []  # an empty list means all rows
        targets.append(pb.InsertTarget(table=table, priorities=priorities, rows=rows))
    return targets


def unchanged_row(answer: pb.InsertResponse) -> pb.UnchangedRow | None:
    """The answer to a request with one segment: why the segment was not appended; None: it was appended."""
    return answer.unchanged[0] if answer.unchanged else None


class EvictedItems(dict[int, tuple[str, ...]]):
    """The items that full tables evicted as soon as the items were inserted: key -> names of these tables.

    The entry that was added or changed last is the last one.
    """

    MOST = 1 << 16
    """The most entries. If there are more, the oldest ones are forgotten. The number is bounded because a table that
    keeps only the best items evicts many new items in a long run."""

    def record(self, response: pb.InsertResponse) -> None:
        """Adds the evicted items that an acknowledgement names."""
        for row in response.evicted:
            tables = self.pop(row.key, ())  # removes the old entry, so that the changed entry becomes the last one
            self[row.key] = (*tables, row.table)
        while len(self) > self.MOST:
            oldest = next(iter(self))
            del self[oldest]
