"""Records: the layout of a server's state in bytes, for data directories and checkpoints.

* Every record has a checksum, by which a damaged record is noticed. Only this record is lost.
* Times are wall-clock seconds, as if the wall clock had not been set since the first server of this boot of the machine
  started (`time_offset`).
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
"""Version of this layout. A server reads its own version only.

docs/reference/compatibility.md says when the version may change.
"""

ITEM = np.dtype(
    [
        ("checksum", "<u8"),  # of all bytes after the checksum, with rows and labels; the key is its seed
        ("key", "<u8"),
        ("policy_version", "<i8"),
        ("nbytes", "<i8"),
        ("inserted_at", "<f8"),
        ("permit", "<u4"),  # Extension.mark of the extension that has marked the item; 0: none has
        ("labels", "<u4"),  # bytes of the packed labels
    ]
)
"""The beginning of the record of an item: what all its tables share. The rows of the item follow, and then its
labels."""

ROW = np.dtype(
    [
        ("table", "<u4"),  # number of the table, from its TableState
        ("kind", "<u4"),  # one of the four below
        ("order", "<i8"),
        ("times_sampled", "<i8"),  # in a retained row: the number of its consumption
        ("priority", "<f8"),
        ("inserted_at", "<f8"),
    ]
)
"""One row of an item, in the record of the item."""
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

# Names of state records, or the first bytes of their names. Extensions choose the names of their own records.
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
            labels.append(unpack_labels(data[start:end]) if size else NO_LABELS)
            start = end
        return labels


class RememberedIds(NamedTuple):
    """Ids that one commit writes into one record, from the oldest to the newest."""

    name: bytes
    """The name of the record."""
    kind: str
    """The kind of the Remembered that has these ids."""
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
        """The bytes to write."""
        return pack([self.kind, np.array(self.ids, "<u8").tobytes(), self.answers])


def pack_items(items: ItemRecords) -> list[tuple[int, bytes]]:
    """(key, record) of each item, by ascending key."""
    # The records are cut out of the bytes of whole arrays, in a loop. To index the structured arrays costs more, for
    # one item (20 us) and for thousands.
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
    """Unpacks the records found under `keys`, in their order. Damaged records are left out."""
    head_size = ITEM.itemsize
    intact = [
        record
        for key, record in zip(keys, records, strict=True)
        if len(record) >= head_size and record[:_CHECKSUM] == xxh3_64_digest(record[_CHECKSUM:], key)
    ]
    # A record has the head of the item (ITEM), its rows (ROW each), and its labels.
    items = np.frombuffer(b"".join([record[:head_size] for record in intact]), ITEM)
    sizes = np.fromiter(map(len, intact), np.int64, len(intact))
    row_ends = sizes - items["labels"]  # (n,): the byte of each record at which its rows end and its labels begin
    # In memory, rows and labels of all records are apart from their heads.
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
    """A record of a value: its checksum, and then the value in msgpack."""
    return seal(msgpack.packb(value))


def unpack(record: bytes | memoryview) -> Any:
    """The value of a record. Raises Damaged."""
    return msgpack.unpackb(unseal(record), strict_map_key=False)


def seal(data: bytes) -> bytes:
    """A record of bytes: their checksum, and then the bytes."""
    return xxh3_64_digest(data) + data


def unseal(record: bytes | memoryview) -> bytes | memoryview:
    """The bytes of a record. Raises Damaged."""
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
    """The keys of items that are gone, of which some were perhaps never written."""
    state_records: dict[bytes, bytes | None] = field(default_factory=dict)
    """The records of tables, scopes, leases, the policy, the clock and extensions, by name; None deletes the record."""
    remembered: list[RememberedIds] = field(default_factory=list)
    """New records of remembered ids. Old ones are deleted by `state_records`."""

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
        """The values of the state records, by name and in the order of their names.

        Adds the names of damaged records to `damaged`. Raises ValueError if a record is damaged that the server needs.
        The server can start without records of scopes, leases and remembered ids.
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
        """The values whose names begin with `start`."""
        return {name: value for name, value in self.values.items() if name.startswith(start)}

    @property
    def tables(self) -> dict[int, str]:
        """The names of the tables, by the numbers that rows use."""
        return {int(record.removeprefix(TABLE)): value["name"] for record, value in self.named(TABLE).items()}


def boot_id() -> str:
    """The id of this boot of the machine; "" if it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def time_offset(values: Mapping[bytes, Any], clock: float) -> float:
    """The seconds to add to times of the server's clock, which now shows `clock`, to get the times in the records.

    The server's clock is monotonic, and the same for all processes of one boot of the machine. A server that is started
    again in the same boot keeps the recorded offset, so that a change of the wall clock changes no age and no lease.
    After a reboot, the wall clock says how much time has passed.
    """
    written_boot, offset = values.get(CLOCK, ("", 0.0))  # "" for a new state: the second case below
    if written_boot and written_boot == boot_id():
        return float(offset)
    return wall_offset(clock)


def wall_offset(clock: float) -> float:
    """The difference between wall-clock seconds and the server's clock, which now shows `clock`."""
    return time.time() - clock
