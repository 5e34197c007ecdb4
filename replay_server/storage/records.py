"""Records: the layout of a server's state in bytes, for data directories and checkpoints.

* Every record has a checksum, by which a damaged record is noticed. Only this record is lost.
* Times are wall-clock seconds. All servers of one boot of the machine compute them from the monotonic clock and one
  offset (`time_offset`). So a change of the wall clock affects the times only after the next boot.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest

from replay_protos.labels import NO_LABELS, Labels, unpack_labels
from replay_server.tables.columns import IntArray

FORMAT = 5
"""Version of this layout. A server reads only the version that it writes.

docs/reference/compatibility.md says when the version may change.
"""

ITEM = np.dtype(
    [
        ("checksum", "<u8"),  # of all bytes that follow in the record, with rows and labels; the seed is the key
        ("key", "<u8"),
        ("policy_version", "<i8"),
        ("nbytes", "<i8"),
        ("inserted_at", "<f8"),
        ("permit", "<u4"),  # Extension.mark of the extension that has marked the item; 0: none has
        ("labels", "<u4"),  # bytes of the packed labels
    ]
)
"""The beginning of the record of an item: the values that do not depend on a table. The rows of the item follow, and
then its labels."""

ROW = np.dtype(
    [
        ("table", "<u4"),  # number of the table, from its TableState
        ("kind", "<u4"),  # one of the four below
        ("order", "<i8"),
        ("times_sampled", "<i8"),  # in a retained row, the number of its consumption instead
        ("priority", "<f8"),
        ("inserted_at", "<f8"),
    ]
)
"""One row in the record of an item: the state of the item in one table."""
IN_TABLE = 0
"""The kind of a row whose item is in the table."""
FORWARDED = 1
"""The kind of a row whose table has passed the item on. The columns after `kind` are 0."""
RETAINED = 2
"""The kind of a row that its table has consumed and retains for a rollback. All kinds from this number on are retained
rows."""
RETAINED_WITH_PERMIT = 3
"""The kind of a retained row whose item used a permit."""

_CHECKSUM = 8
"""Bytes of a checksum, with which each record begins."""

# The names of state records, or the first bytes of their names. Extensions choose the names of their own records.
TABLE = b"table/"
SCOPE = b"scope/"
LEASE = b"lease/"
REMEMBERED = b"remembered/"
POLICY = b"policy"
CLOCK = b"clock"
NUMBER = b"%020d"
"""The end of the name of a scope or of remembered ids. The numbers give the order in which to restore these records."""


def of_another_version(written: str) -> str:
    """The end of an error about a file that another version wrote, with the remedy. `written` names its format."""
    return (
        f"has {written}, and this version reads format {FORMAT}: go on with the version that wrote it, or bring its "
        f"tables here with the `replay table export` of that version and the `replay table import` of this one"
    )


class Damaged(Exception):
    """The bytes of a record are not the bytes that were written."""


@dataclass
class ItemRecords:
    """Records of items (n,) and of their rows in tables (m,)."""

    items: npt.NDArray[np.void] = field(default_factory=lambda: np.empty(0, ITEM))
    rows: npt.NDArray[np.void] = field(default_factory=lambda: np.empty(0, ROW))
    owners: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """(m,): the index in `items` of each row's item, ascending."""
    labels: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    """Packed labels of all items, one after the other."""

    def __len__(self) -> int:
        return int(self.items.size)

    def labels_of_items(self) -> list[Labels] | None:
        """The labels of each item; None if no item has labels."""
        if not self.labels.size:
            return None
        data = self.labels.tobytes()
        sizes: list[int] = self.items["labels"].tolist()
        labels: list[Labels] = []
        start = 0
        for size in sizes:
            end = start + size
            if size:
                labels.append(unpack_labels(data[start:end]))
            else:
                labels.append(NO_LABELS)
            start = end
        return labels


class RememberedIds(NamedTuple):
    """Ids that one commit writes into one record, from the oldest to the newest."""

    name: bytes
    """The name of the record."""
    kind: str
    """The `kind` of the Remembered to which these ids belong."""
    ids: list[int]
    answers: list[Any] | None
    """The answer to each id; None if the answers are not durable."""

    @classmethod
    def all_of(cls, state: State) -> list[RememberedIds]:
        """All records of remembered ids in a state, the oldest first."""
        entries = []
        for name, (kind, packed_ids, answers) in state.named(REMEMBERED).items():
            ids = np.frombuffer(packed_ids, "<u8").tolist()
            entries.append(cls(name, kind, ids, answers))
        return entries

    def record(self) -> bytes:
        """The bytes of the record."""
        packed_ids = np.array(self.ids, "<u8").tobytes()
        return pack([self.kind, packed_ids, self.answers])


def pack_items(items: ItemRecords) -> list[tuple[int, bytes]]:
    """Packs items into records. Returns (key, record) of each item, by ascending key."""
    # The loop cuts the records out of the bytes of the whole arrays, because to index the structured arrays would cost
    # more, for one item (20 us) as well as for thousands.
    heads = items.items.tobytes()
    rows = items.rows.tobytes()
    labels = items.labels.tobytes()
    rows_of_items = np.bincount(items.owners, minlength=len(items))
    row_ends: list[int] = (ROW.itemsize * np.cumsum(rows_of_items)).tolist()
    label_sizes: list[int] = items.items["labels"].tolist()
    packed: list[tuple[int, bytes]] = []
    head_start = 0
    row_start = 0
    label_start = 0
    for key, row_end, label_size in zip(items.items["key"].tolist(), row_ends, label_sizes, strict=True):
        head_end = head_start + ITEM.itemsize
        data = heads[head_start + _CHECKSUM : head_end] + rows[row_start:row_end]  # all that the checksum covers
        if label_size:
            data += labels[label_start : label_start + label_size]
            label_start += label_size
        packed.append((key, xxh3_64_digest(data, key) + data))
        head_start = head_end
        row_start = row_end
    packed.sort()
    return packed


def unpack_items(keys: Sequence[int], records: Sequence[bytes]) -> ItemRecords:
    """Unpacks records that were found under `keys`, in the same order. Leaves out damaged records."""
    head_size = ITEM.itemsize
    intact = [
        record
        for key, record in zip(keys, records, strict=True)
        if len(record) >= head_size and record[:_CHECKSUM] == xxh3_64_digest(record[_CHECKSUM:], key)
    ]
    # A record consists of a head (ITEM), the rows of the item (a ROW each), and its labels. In ItemRecords, the heads
    # of all records are one array, the rows are another, and the labels are a third.
    items = np.frombuffer(b"".join([record[:head_size] for record in intact]), ITEM)
    sizes = np.fromiter(map(len, intact), np.int64, len(intact))
    row_ends = sizes - items["labels"]  # (n,): the position in each record at which the rows end and the labels begin
    rows = b"".join([record[head_size:end] for record, end in zip(intact, row_ends.tolist(), strict=True)])
    labels = b""
    if items["labels"].any():
        labels = b"".join([record[end:] for record, end in zip(intact, row_ends.tolist(), strict=True)])
    rows_of_items = (row_ends - head_size) // ROW.itemsize
    return ItemRecords(
        items=items,
        rows=np.frombuffer(rows, ROW),
        owners=np.repeat(np.arange(len(intact)), rows_of_items),
        labels=np.frombuffer(labels, np.uint8),
    )


def join_items(parts: Iterable[ItemRecords]) -> ItemRecords:
    """Joins the records of different items, in the order of `parts`."""
    parts = [ItemRecords(), *parts]  # np.concatenate needs at least one array
    owners: list[IntArray] = []
    items_before = 0
    for part in parts:
        owners.append(part.owners + items_before)
        items_before += len(part)
    return ItemRecords(
        items=np.concatenate([part.items for part in parts]),
        rows=np.concatenate([part.rows for part in parts]),
        owners=np.concatenate(owners),
        labels=np.concatenate([part.labels for part in parts]),
    )


def pack(value: Any) -> bytes:
    """Packs a value with msgpack into a record, which begins with a checksum."""
    return seal(msgpack.packb(value))


def unpack(record: bytes | memoryview) -> Any:
    """Returns the value in a record of `pack`. Raises Damaged."""
    return msgpack.unpackb(unseal(record), strict_map_key=False)


def seal(data: bytes) -> bytes:
    """Makes a record of bytes: the checksum of the bytes, and then the bytes."""
    return xxh3_64_digest(data) + data


def unseal(record: bytes | memoryview) -> bytes | memoryview:
    """Returns the bytes in a record of `seal`. Raises Damaged if the checksum is wrong."""
    if len(record) < _CHECKSUM:
        raise Damaged
    data = record[_CHECKSUM:]
    if xxh3_64_digest(data) != bytes(record[:_CHECKSUM]):
        raise Damaged
    return data


@dataclass
class Delta:
    """All changes since the previous Delta."""

    items: ItemRecords = field(default_factory=ItemRecords)
    """The records of items that have changed, by ascending key."""
    removed: list[int] = field(default_factory=list)
    """The keys of items that are gone. Some of these items were perhaps never written."""
    state_records: dict[bytes, bytes | None] = field(default_factory=dict)
    """The records of tables, scopes, leases, the policy, the clock and extensions, by name; None deletes the record."""
    remembered: list[RememberedIds] = field(default_factory=list)
    """New records of remembered ids. `state_records` deletes the old ones."""

    def __bool__(self) -> bool:
        return bool(len(self.items) or self.removed or self.state_records or self.remembered)

    def named_records(self) -> dict[bytes, bytes | None]:
        """All records except the records of items, by name."""
        remembered = {entry.name: entry.record() for entry in self.remembered}
        return self.state_records | remembered


@dataclass
class State:
    """The state of a whole buffer, without its payloads."""

    state_records: dict[bytes, bytes] = field(default_factory=dict)
    items: ItemRecords = field(default_factory=ItemRecords)
    skipped: list[int] = field(default_factory=list)
    """The keys of items that are left out because they are damaged."""
    damaged: list[bytes] = field(default_factory=list)
    """The names of other records that are left out because they are damaged."""

    @cached_property
    def values(self) -> dict[bytes, Any]:
        """The values of the state records by name, in the order of the names.

        Leaves out damaged records of scopes, leases and remembered ids, because the server can start without them, and
        adds their names to `damaged`. Raises ValueError if any other record is damaged.
        """
        values = {}
        for name, record in sorted(self.state_records.items()):
            try:
                values[name] = unpack(record)
            except Damaged:
                if not name.startswith((SCOPE, LEASE, REMEMBERED)):
                    raise ValueError(f"the record {name.decode(errors='replace')!r} is damaged") from None
                self.damaged.append(name)
        return values

    def named(self, start: bytes) -> dict[bytes, Any]:
        """The values of the records whose names begin with `start`, by name."""
        return {name: value for name, value in self.values.items() if name.startswith(start)}

    @property
    def tables(self) -> dict[int, str]:
        """The names of the tables, by the numbers of the tables in ROW."""
        tables: dict[int, str] = {}
        for record_name, value in self.named(TABLE).items():
            number = int(record_name.removeprefix(TABLE))
            tables[number] = value["name"]
        return tables


def boot_id() -> str:
    """The id of this boot of the machine; "" if it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def time_offset(values: Mapping[bytes, Any], clock: float) -> float:
    """The seconds to add to a time of the server's clock to get the time that the records have for it.

    `values` are the values of the recorded state, and `clock` is the time that the server's clock shows now. The
    server's clock is monotonic, and the same for all processes of one boot of the machine. A server that is started
    again in the same boot keeps the recorded offset, so that a change of the wall clock changes no age and no lease.
    After a reboot, the offset is computed anew, because only the wall clock says how much time has passed.
    """
    recorded_boot, recorded_offset = values.get(CLOCK, ("", 0.0))  # a new state has no record of the clock
    if recorded_boot and recorded_boot == boot_id():
        return float(recorded_offset)
    return wall_offset(clock)


def wall_offset(clock: float) -> float:
    """The current wall-clock seconds minus `clock`, the time that the server's clock shows now."""
    return time.time() - clock
