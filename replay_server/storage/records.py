"""Records: the layout of a server's state in bytes, for data directories and checkpoints.

* Every record has a checksum, so damage is found, and costs only the record that it hits.
* Times are wall-clock seconds, as the wall clock was when the first server of this boot started: see `time_offset`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest

from replay_protos.labels import NO_LABELS, Labels, unpack_labels
from replay_server.tables.columns import IntArray

FORMAT = 4
"""Version of this layout. A server reads its own version only."""

ITEM = np.dtype(
    [
        ("checksum", "<u8"),  # of all that follows, rows and labels included; its seed is the key
        ("key", "<u8"),
        ("policy_version", "<i8"),
        ("nbytes", "<i8"),
        ("inserted_at", "<f8"),
        ("permit", "<u4"),  # the mark of an extension; 0: it has none
        ("labels", "<u4"),  # bytes
    ]
)
"""What all tables share of an item. Its rows follow, and then its labels."""

ROW = np.dtype(
    [
        ("table", "<u4"),  # number of the table, from its TableState
        ("kind", "<u4"),  # one of the four below
        ("order", "<i8"),
        ("times_sampled", "<i8"),  # of a row that is kept: the number of its consumption
        ("priority", "<f8"),
        ("inserted_at", "<f8"),
    ]
)
IN_TABLE, FORWARDED, KEPT, KEPT_WITH_PERMIT = range(4)
"""The item is in the table; or the table has passed it on, and then the other columns are 0; or the table has consumed
it and keeps it for a rollback, without or with the permit that it used."""

_CHECKSUM = 8

TABLE, SCOPE, LEASE, REMEMBERED, POLICY, CLOCK = (
    b"table/",
    b"scope/",
    b"lease/",
    b"remembered/",
    b"policy",
    b"clock",
)
"""Names of state records, or how they begin. Extensions name theirs themselves."""


def of_another_version(which: str) -> str:
    """What is to be done with the file of a version that wrote other records."""
    return (
        f"was written by a development version {which}, and this one reads format {FORMAT}: go on with that version, "
        f"or bring its tables here with its `replay export` and the `replay table import` of this one"
    )


class Damaged(Exception):
    """The bytes of a record are not what was written."""


@dataclass
class ItemRecords:
    """Records of items (n,) and of their rows in tables (m,). `owners` (m,), ascending: the index of its item."""

    items: npt.NDArray[np.void]
    rows: npt.NDArray[np.void]
    owners: IntArray
    labels: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    """Packed labels of all items, one after the other."""

    def __len__(self) -> int:
        return int(self.items.size)

    def labels_of_items(self) -> list[Labels] | None:
        """The labels of each item; None: no item has any."""
        if not self.labels.size:
            return None
        data, ends = self.labels.tobytes(), np.cumsum(self.items["labels"].astype(np.int64))
        sizes: list[int] = self.items["labels"].tolist()
        return [
            unpack_labels(data[end - size : end]) if size else NO_LABELS
            for end, size in zip(ends.tolist(), sizes, strict=True)
        ]


class StateRecord(NamedTuple):
    """A named record of a table, scope, lease, remembered ids, the policy or admission; None: delete it."""

    name: bytes
    record: bytes | None


class RememberedIds(NamedTuple):
    """Ids that one commit writes into one record, from the oldest to the newest."""

    name: bytes
    """Of the record."""
    kind: str
    """Of Remembered; "": the record is damaged."""
    stamp: int
    """Ascends from record to record."""
    ids: list[int]
    answers: list[Any] | None
    """Of each id, where answers are durable."""

    @classmethod
    def all_of(cls, state: State) -> list[RememberedIds]:
        """Everything that a state remembers, in order."""
        found = []
        for name, record in state.state_records.items():
            if name.startswith(REMEMBERED):
                try:
                    kind, stamp, ids, answers = unpack(record)
                except Damaged:
                    found.append(cls(name, "", 0, [], None))
                else:
                    found.append(cls(name, kind, stamp, np.frombuffer(ids, "<u8").tolist(), answers))
        return sorted(found, key=lambda entry: entry.stamp)

    def record(self) -> StateRecord:
        ids = np.array(self.ids, "<u8").tobytes()
        return StateRecord(self.name, pack([self.kind, self.stamp, ids, self.answers]))


def pack_items(items: ItemRecords) -> list[tuple[int, bytes]]:
    """(key, record) of each item, by ascending key."""
    # A loop: an array of structured records costs more, for one item (20 us) and for thousands.
    heads, rows, labels = items.items.tobytes(), items.rows.tobytes(), items.labels.tobytes()
    row_ends: list[int] = (ROW.itemsize * np.cumsum(np.bincount(items.owners, minlength=len(items)))).tolist()
    label_sizes: list[int] = items.items["labels"].tolist()
    packed: list[tuple[int, bytes]] = []
    head, row, label = 0, 0, 0
    for key, row_end, label_size in zip(items.items["key"].tolist(), row_ends, label_sizes, strict=True):
        plain = heads[head + _CHECKSUM : head + ITEM.itemsize] + rows[row:row_end]
        if label_size:
            plain += labels[label : label + label_size]
            label += label_size
        packed.append((key, xxh3_64_digest(plain, key) + plain))
        head, row = head + ITEM.itemsize, row_end
    packed.sort()
    return packed


def unpack_items(keys: Sequence[int], records: Sequence[bytes]) -> ItemRecords:
    """Unpacks the records found under `keys`, in their order. Damaged records are left out."""
    size = ITEM.itemsize
    intact = [
        record
        for key, record in zip(keys, records, strict=True)
        if len(record) >= size and record[:_CHECKSUM] == xxh3_64_digest(record[_CHECKSUM:], key)
    ]
    items = np.frombuffer(b"".join([record[:size] for record in intact]), ITEM)
    ends = np.fromiter(map(len, intact), np.int64, len(intact)) - items["labels"]
    rows = b"".join([record[size:end] for record, end in zip(intact, ends.tolist(), strict=True)])
    labels = b""
    if items["labels"].any():
        labels = b"".join([record[end:] for record, end in zip(intact, ends.tolist(), strict=True)])
    owners = np.repeat(np.arange(len(intact)), (ends - size) // ROW.itemsize)
    return ItemRecords(items, np.frombuffer(rows, ROW), owners, np.frombuffer(labels, np.uint8))


def join_items(parts: Iterable[ItemRecords]) -> ItemRecords:
    """Joins the records of different items."""
    parts = list(parts)
    shifts = np.cumsum([0, *(len(part) for part in parts)])[:-1]
    return ItemRecords(
        np.concatenate([np.empty(0, dtype=ITEM), *(part.items for part in parts)]),
        np.concatenate([np.empty(0, dtype=ROW), *(part.rows for part in parts)]),
        np.concatenate(
            [np.empty(0, np.int64), *(part.owners + shift for part, shift in zip(parts, shifts, strict=True))]
        ),
        np.concatenate([np.empty(0, np.uint8), *(part.labels for part in parts)]),
    )


def pack(value: Any) -> bytes:
    """A msgpack value with its checksum before it."""
    return seal(msgpack.packb(value))


def unpack(record: bytes | memoryview) -> Any:
    return msgpack.unpackb(unseal(record), strict_map_key=False)


def seal(data: bytes) -> bytes:
    return xxh3_64_digest(data) + data


def unseal(record: bytes | memoryview) -> bytes | memoryview:
    data = record[_CHECKSUM:]
    if len(record) < _CHECKSUM or xxh3_64_digest(data) != bytes(record[:_CHECKSUM]):
        raise Damaged
    return data


@dataclass
class Delta:
    """All changes since the Delta before."""

    items: ItemRecords = field(default_factory=lambda: join_items([]))
    """By ascending key."""
    removed: list[int] = field(default_factory=list)
    """Keys of items that are gone. Some were perhaps never written."""
    state_records: list[StateRecord] = field(default_factory=list)
    remembered: list[RememberedIds] = field(default_factory=list)
    """What the records of remembered ids among `state_records` hold."""

    def __bool__(self) -> bool:
        return bool(len(self.items) or self.removed or self.state_records)


@dataclass
class State:
    """The state of a whole buffer, without its payloads."""

    state_records: dict[bytes, bytes] = field(default_factory=dict)
    items: ItemRecords = field(default_factory=lambda: join_items([]))
    skipped: list[int] = field(default_factory=list)
    """Keys of items that are left out because they are damaged."""
    damaged: int = 0
    """How many other records are damaged, and left out."""


def table_numbers(state: State) -> dict[int, str]:
    """The tables by the numbers that rows use. Raises ValueError if the record of a table is damaged."""
    return {
        int(name.removeprefix(TABLE)): unpack_named(name, record)["name"]
        for name, record in state.state_records.items()
        if name.startswith(TABLE)
    }


def unpack_named(name: bytes, record: bytes) -> Any:
    try:
        return unpack(record)
    except Damaged:
        raise ValueError(f"the record {name.decode(errors='replace')!r} is damaged") from None


def boot_id() -> str:
    """Names this boot of the machine; "" where that is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def time_offset(state_records: Mapping[bytes, bytes], clock: float) -> float:
    """What has to be added to the server's clock, which now shows `clock`, for the times of these records.

    The server's clock is monotonic, and the same for all processes of one boot. A server that is started again in the
    same boot keeps the offset of the one before, so that setting the wall clock changes no age and no lease. Only after
    a reboot does the wall clock say how much time has passed.
    """
    if (record := state_records.get(CLOCK)) is not None:
        booted, offset = unpack_named(CLOCK, record)
        if booted and booted == boot_id():
            return float(offset)
    return wall_offset(clock)


def wall_offset(clock: float) -> float:
    """The difference between wall-clock seconds and the server's clock, which now shows `clock`."""
    return time.time() - clock
