"""Encoding of arrays with names, behind a header: the byte format of groups and of segments.

    0        8               16                     H                      64-aligned
    +--------+---------------+----------------------+-----------+----------+--------- ...
    | magic  | header length | msgpack header       | padding   | array 0  | array 1
    +--------+---------------+----------------------+-----------+----------+--------- ...

The header names every array with its dtype, shape, offset and, if it has one, its axis; and it holds small fields.
Arrays are little-endian, in C order, each aligned to 64 bytes, and the whole is a multiple of 64 bytes: what is
appended is aligned too. Decoding makes views of the buffer and checks everything in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import ml_dtypes
import msgpack
import numpy as np
import numpy.typing as npt

Buffer = bytes | memoryview
ALIGNMENT = 64
MAGIC_BYTES = 8
"""Bytes of a magic number. Its last byte is the version of the format."""
_PREFIX = MAGIC_BYTES + 8
_FIELDS = 4
"""Name, dtype, shape and offset of an array in the header. A fifth is its axis."""
_MAX_HEADER = 4 * 2**20
"""The most bytes of a header. A decoded hostile header takes about 60 times as much memory."""
DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


class Decoded(NamedTuple):
    """What the bytes of a group or segment hold."""

    fields: dict[str, Any]
    """The small fields."""
    arrays: dict[str, Any]
    """By name, as read-only views of the bytes."""
    axes: dict[str, str]
    """By name, of the arrays that have one."""
    rest: memoryview
    """The bytes that follow."""


def encode_arrays(
    magic: bytes,
    columns: Iterable[tuple[str, npt.NDArray[Any]]],
    axes: dict[str, str],
    fields: dict[str, Any],
) -> list[Buffer]:
    """Consecutive buffers: the header, then each array without a copy. `axes` by the names of `columns`."""
    arrays, table, offset = [], [], 0
    for name, array in columns:
        array = np.ascontiguousarray(array, dtype=DTYPES[array.dtype.name]).reshape(array.shape)
        table.append([name, array.dtype.name, list(array.shape), offset])
        if name in axes:
            table[-1].append(axes[name])
        arrays.append(array)
        offset += _aligned(array.nbytes)
    try:
        # Offsets count from the first array, so they do not depend on the length of the header.
        header = msgpack.packb({"arrays": table, "fields": fields})
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"sampling and meta must hold only what msgpack can (None, bool, int, float, str, bytes, "
            f"list, dict): {error}"
        ) from error
    if len(header) > _MAX_HEADER:
        raise ValueError(
            f"sampling, meta, finish_reasons and the names of extras take {len(header)} bytes, more than "
            f"{_MAX_HEADER}: put large values into extras, as arrays"
        )
    prefix = magic + len(header).to_bytes(8, "little") + header
    pieces: list[Buffer] = [prefix.ljust(_aligned(len(prefix)), b"\0")]
    for array in arrays:
        if array.nbytes:
            pieces.append(array.reshape(-1).view(np.uint8).data)
            if padding := _aligned(array.nbytes) - array.nbytes:
                pieces.append(bytes(padding))
    return pieces


def check_magic(view: memoryview, magic: bytes, kind: str) -> int:
    """The length of the header. Raises ValueError that says why `view` cannot begin with a `kind`."""
    if len(view) < _PREFIX or view[: MAGIC_BYTES - 1] != magic[:-1]:
        raise ValueError(f"not a {kind}: {len(view)} bytes that begin with {bytes(view[:8])!r}")
    if view[MAGIC_BYTES - 1] != magic[-1]:
        raise ValueError(f"{kind} of format {view[MAGIC_BYTES - 1]}; this version reads {magic[-1]}")
    header_length = int.from_bytes(view[MAGIC_BYTES:_PREFIX], "little")
    if header_length > min(_MAX_HEADER, len(view) - _PREFIX):
        raise ValueError(f"header of {header_length} bytes in a {kind} of {len(view)}")
    return header_length


def decode_arrays(view: memoryview, header_length: int) -> Decoded:
    """What `encode_arrays` wrote, after `check_magic`.

    Damage raises ValueError, and also KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError
    and msgpack.UnpackException.
    """
    header = msgpack.unpackb(view[_PREFIX : _PREFIX + header_length], strict_map_key=True)
    table = header["arrays"]
    body = view[min(_aligned(_PREFIX + header_length), len(view)) :]
    arrays, axes, end = {}, {}, 0
    for entry in table:
        if len(entry) > _FIELDS:
            *entry, axis = entry
            axes[entry[0]] = axis
        name, dtype, shape, offset = entry
        arrays[name], stop = _view(body, name, dtype, shape, offset)
        if stop > end:
            end = stop
    if len(arrays) != len(table):
        raise ValueError("an array is named twice")
    return Decoded(header["fields"], arrays, axes, body[_aligned(end) :])


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _view(body: memoryview, name: str, dtype_name: str, shape: list[int], offset: int) -> tuple[npt.NDArray[Any], int]:
    """The array, and where it ends."""
    dtype = DTYPES.get(dtype_name)
    if dtype is None:
        raise ValueError(f"array {name!r} has dtype {dtype_name!r}, not one of {', '.join(DTYPES)}")
    if not all(type(n) is int and n >= 0 for n in (offset, *shape)) or len(shape) > 32:
        raise ValueError(f"array {name!r} has shape {shape} and offset {offset}")
    count = math.prod(shape)
    stop = offset + count * dtype.itemsize
    if offset % ALIGNMENT or stop > len(body):
        raise ValueError(f"array {name!r} lies at {offset} to {stop}, outside {len(body)} bytes or unaligned")
    return np.frombuffer(body, dtype=dtype, count=count, offset=offset if count else 0).reshape(shape), stop
