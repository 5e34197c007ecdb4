"""Records: the layout of a server's state in bytes, for data directories and checkpoints.

* Every record has a checksum, so damage is found, and costs only the record that it hits.
* Times are wall-clock seconds, as the wall clock was when the first server of this boot started: see `time_offset`.
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
"""Version of this layout. A server reads its own version only. When it may change: docs/reference/compatibility.md."""

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
        ("times_sampled", "<i8"),  # of a retained row: the number of its consumption
        ("priority", "<f8"),
        ("inserted_at", "<f8"),
    ]
)
IN_TABLE, FORWARDED, RETAINED = range(3)
"""The item is in the table; or the table has passed it on, and then the other columns are 0; or the table has consumed
it and retains it for a rollback; RETAINED + 1: with the permit that it used."""

_CHECKSUM = 8

TABLE, SCOPE, LEASE, REMEMBERED = b"table/", b"scope/", b"lease/", b"remembered/"
POLICY, CLOCK = b"policy", b"clock"
"""Names of state records, or how they begin. Extensions name theirs themselves. Scopes and remembered ids end with a
number of NUMBER, in the order in which they have to be restored."""
NUMBER = b"%020d"


def of_another_version(written: str) -> str:
    """How to use a file that a version with other records wrote. `written`: the format of the file, in words."""
    return (
        f"has {written}, and this version reads format {FORMAT}: go on with the version that wrote it, or bring its "
        f"tables here with the `replay table export` of that version and the `replay table import` of this one"
    )


class Damaged(Exception):
    """The bytes of a record are not what was written."""


@dataclass
class ItemRecords:
    """Records of items (n,) and of their rows in tables (m,). `owners` (m,), ascending: the index of its item."""

    items: npt.NDArray[np.void] = field(default_factory=lambda: np.empty(0, ITEM))
    rows: npt.NDArray[np.void] = field(default_factory=lambda: np.empty(0, ROW))
    owners: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
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


class RememberedIds(NamedTuple):
    """Ids that one commit writes into one record, from the oldest to the newest."""

    name: bytes
    """Of the record."""
    kind: str
    """Of Remembered."""
    ids: list[int]
    answers: list[Any] | None
    """Of each id, where answers are durable."""

    @classmethod
    def all_of(cls, state: State) -> list[RememberedIds]:
        """Everything that a state remembers, in order."""
        found = state.named(REMEMBERED).items()
        return [cls(name, kind, np.frombuffer(ids, "<u8").tolist(), answers) for name, (kind, ids, answers) in found]

    def record(self) -> bytes:
        return pack([self.kind, np.array(self.ids, "<u8").tobytes(), self.answers])


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
    parts = [ItemRecords(), *parts]
    ends = np.cumsum(list(map(len, parts)))
    return ItemRecords(
        np.concatenate([part.items for part in parts]),
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.owners + end - len(part) for part, end in zip(parts, ends, strict=True)]),
        np.concatenate([part.labels for part in parts]),
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

    items: ItemRecords = field(default_factory=ItemRecords)
    """By ascending key."""
    removed: list[int] = field(default_factory=list)
    """Keys of items that are gone. Some were perhaps never written."""
    state_records: dict[bytes, bytes | None] = field(default_factory=dict)
    """Of tables, scopes, leases, the policy and extensions, by name; None: delete it."""
    remembered: list[RememberedIds] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(len(self.items) or self.removed or self.state_records or self.remembered)

    def named_records(self) -> dict[bytes, bytes | None]:
        """All but those of items."""
        return self.state_records | {entry.name: entry.record() for entry in self.remembered}


@dataclass
class State:
    """The state of a whole buffer, without its payloads."""

    state_records: dict[bytes, bytes] = field(default_factory=dict)
    items: ItemRecords = field(default_factory=ItemRecords)
    skipped: list[int] = field(default_factory=list)
    """Keys of items that are left out because they are damaged."""
    damaged: list[bytes] = field(default_factory=list)
    """Names of other records that are left out because they are damaged."""

    @cached_property
    def values(self) -> dict[bytes, Any]:
        """What the records hold, in the order of their names. Raises ValueError if one that is needed is damaged."""
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
        """Those of the values whose names begin so."""
        return {name: value for name, value in self.values.items() if name.startswith(start)}

    @property
    def tables(self) -> dict[int, str]:
        """Their names by the numbers that rows use."""
        return {int(name.removeprefix(TABLE)): value["name"] for name, value in self.named(TABLE).items()}


def boot_id() -> str:
    """Names this boot of the machine; "" where that is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def time_offset(values: Mapping[bytes, Any], clock: float) -> float:
    """What has to be added to the server's clock, which now shows `clock`, for the times of these values of a State.

    The server's clock is monotonic, and the same for all processes of one boot. A server that is started again in the
    same boot keeps the offset of the one before, so that setting the wall clock changes no age and no lease. Only after
    a reboot does the wall clock say how much time has passed.
    """
    booted, offset = values.get(CLOCK, ("", 0.0))
    return float(offset) if booted and booted == boot_id() else wall_offset(clock)


def wall_offset(clock: float) -> float:
    """The difference between wall-clock seconds and the server's clock, which now shows `clock`."""
    return time.time() - clock
