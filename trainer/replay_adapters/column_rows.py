"""Packs the columns of a batch into one payload for each row, and reads single fields of rows back.

A payload has the packed values of all fields of one row, one after the other, without gaps. A `Place` says where the
value of a field lies. The places travel beside the payloads, so that a reader needs only the bytes of its fields.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from replay_adapters.plain_values import bytes_of, header_of, pack, shown

_PLACE = struct.Struct("<QIIH")
_PLACES = np.dtype([("key", "<u8"), ("offset", "<u4"), ("size", "<u4"), ("fields", "<u2")])
"""The layout of _PLACE, for numpy, which writes the places of a whole column at once."""
assert _PLACES.itemsize == _PLACE.size
_KEY = struct.Struct("<Q")
MOST_BYTES = (1 << 32) - 1
"""The most bytes of a row, because a place has 32 bits for an offset."""
Piece = bytes | memoryview


class Place(NamedTuple):
    """Where the value of one field of one row lies."""

    key: int
    """The key of the item that has the value."""
    offset: int
    size: int
    """Bytes of the value in the payload of the item, from `offset` on."""
    fields: int
    """The number of fields in the item."""
    others: tuple[int, ...] = ()
    """The keys of the items that the row had when this value was put: of other fields, and of older values."""

    def encode(self) -> bytes:
        """The place as bytes, which are smaller than a tuple in the memory of the controller of TransferQueue."""
        fixed = _PLACE.pack(self.key, self.offset, self.size, self.fields)
        return b"".join((fixed, *map(_KEY.pack, self.others)))

    @classmethod
    def decode(cls, data: bytes) -> Place:
        """The place that `encode` encoded. Raises ValueError if it is none."""
        length = len(data) - _PLACE.size
        if length < 0 or length % _KEY.size:
            raise ValueError(f"{len(data)} bytes are not the place of a value")
        key, offset, size, fields = _PLACE.unpack_from(data)
        others = tuple(other for (other,) in _KEY.iter_unpack(data[_PLACE.size :]))
        return cls(key, offset, size, fields, others)


def items_of(encoded: bytes) -> tuple[int, ...]:
    """The keys of all items that an encoded place names: that of the value, and the other items of the row."""
    if len(encoded) == _PLACE.size:  # the most frequent case, in which the row has no other item
        return _KEY.unpack_from(encoded)
    place = Place.decode(encoded)
    return (place.key, *place.others)


def replace_values(new: Mapping[str, bytes], old: Mapping[str, bytes]) -> tuple[dict[str, bytes], list[int]]:
    """The places to announce for a row, and the keys of the items that have no value in use any more.

    `new`: the places of the values that were just put, by name of the field. `old`: the places that the row had
    before. All places are encoded. New places name the other items of the row, so that these leave with it, also an
    item of which only some values were replaced. Old places stay as they are: another process may have replaced them
    meanwhile.
    """
    if not old:  # the most frequent case
        return dict(new), []
    added = {name: Place.decode(data) for name, data in new.items()}
    items = {place.key for place in added.values()}
    replaced: dict[int, int] = {}
    fields: dict[int, int] = {}
    for name, data in old.items():
        place = Place.decode(data)
        items.update((place.key, *place.others))
        if name in new:
            replaced[place.key] = replaced.get(place.key, 0) + 1
            fields[place.key] = place.fields
    unused = {key for key, count in replaced.items() if count == fields[key]}
    items -= unused
    places = {}
    for name, place in added.items():
        places[name] = place._replace(others=tuple(sorted(items - {place.key}))).encode()
    return places, sorted(unused)


def lacks_fields(encoded: Iterable[bytes]) -> bool:
    """True if an item of a row has more fields than these encoded places of the row say.

    A later put that replaced some of an item's values names the item in its places. Such an item lacks no fields.
    """
    missing: dict[int, int] = {}
    named: set[int] = set()
    for data in encoded:
        key, _, _, fields = _PLACE.unpack_from(data)
        missing[key] = missing.get(key, fields) - 1
        named.update(items_of(data)[1:])
    return any(count and key not in named for key, count in missing.items())


@dataclass(frozen=True)
class PackedRows:
    """The rows of a batch as payloads."""

    payloads: Sequence[bytes]
    """One for each row."""
    ends: Mapping[str, Sequence[int]]
    """By name of the field, and for each row: the byte of the payload at which the value ends."""

    def places(self, keys: Sequence[int]) -> dict[str, list[bytes]]:
        """The encoded places of all values, by name of the field, if `keys` are the keys of the rows' items.

        A batch has thousands of values, so the places of a column are encoded together, and not by `Place.encode`.
        """
        table = np.empty(len(keys), _PLACES)
        table["key"] = np.array(keys, np.uint64)
        table["fields"] = len(self.ends)
        places: dict[str, list[bytes]] = {}
        starts = np.zeros(len(keys), np.int64)
        for name, column_ends in self.ends.items():
            ends = np.array(column_ends)
            table["offset"] = starts
            table["size"] = ends - starts
            encoded = table.tobytes()
            places[name] = [encoded[i : i + _PLACE.size] for i in range(0, len(encoded), _PLACE.size)]
            starts = ends
        return places


def pack_rows(columns: Mapping[str, Any], rows: int) -> PackedRows:
    """Packs columns with this number of rows. A column is a tensor, a nested tensor, or a sequence of values.

    Raises ValueError that names the field and the value if a value cannot be packed, or if a row is too large.
    """
    pieces_B: list[list[Piece]] = [[] for _ in range(rows)]
    sizes_B = [0] * rows
    ends: dict[str, list[int]] = {}
    for name, column in columns.items():
        values = list(_values(name, column))
        if len(values) != rows:
            raise ValueError(f"the number of rows is {len(values)} in the field {name!r}, and {rows} in the batch")
        for row, pieces in enumerate(values):
            pieces_B[row].extend(pieces)
            sizes_B[row] += sum(map(len, pieces))
        ends[name] = list(sizes_B)
    if max(sizes_B, default=0) > MOST_BYTES:
        raise ValueError(
            f"a row of {max(sizes_B)} bytes: at most {MOST_BYTES}; put large fields into rows of their own"
        )
    return PackedRows([b"".join(pieces) for pieces in pieces_B], ends)


def _values(name: str, column: Any) -> Iterable[Sequence[Piece]]:
    """For each row of a column, the pieces of its packed value."""
    if not isinstance(column, torch.Tensor):
        return [(_packed(name, value),) for value in column]
    try:
        if not column.is_nested:
            return _dense_values(column)
        if _is_plain_jagged(column):
            return _jagged_values(column)
    except TypeError as error:
        raise _refusal(name, str(error)) from None
    return [(_packed(name, value),) for value in column.unbind()]


def _dense_values(column: torch.Tensor) -> Iterable[Sequence[Piece]]:
    """The values of a tensor (rows, ...), without a copy of a contiguous tensor on the CPU."""
    header = header_of(column, tuple(column.shape[1:]))
    elements = bytes_of(column)
    size = len(elements) // len(column) if len(column) else 0
    return [(header, elements[row * size : (row + 1) * size]) for row in range(len(column))]


def _is_plain_jagged(column: Any) -> bool:
    """True if the rows of a nested tensor lie one after the other in its buffer, and differ in their first size."""
    return bool(column.layout == torch.jagged and column._ragged_idx == 1 and column.lengths() is None)


def _jagged_values(column: Any) -> Iterable[Sequence[Piece]]:
    """The values of a plain jagged tensor, as views of its buffer."""
    buffer = column.values()
    rest = tuple(buffer.shape[1:])
    elements = bytes_of(buffer)
    offsets = column.offsets().tolist()
    stride = len(elements) // len(buffer) if len(buffer) else 0
    for start, end in itertools.pairwise(offsets):
        yield header_of(buffer, (end - start, *rest)), elements[start * stride : end * stride]


def _packed(name: str, value: Any) -> bytes:
    """A packed value. Raises ValueError, with the name of the field, if it cannot be packed."""
    try:
        return pack(value)
    except (TypeError, ValueError, OverflowError, RuntimeError, AttributeError) as error:
        raise _refusal(name, f"{shown(value)} ({error})") from None


def _refusal(name: str, what: str) -> ValueError:
    """The error for a value that cannot be packed."""
    return ValueError(
        f"the field {name!r} has a value that is not stored, {what}: put numbers, texts, tensors, arrays, images, and "
        f"lists, tuples and dicts of them into it"
    )
