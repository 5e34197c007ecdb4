"""Columns: checks named arrays and their axes, and encodes them to the bytes of groups and segments.

    0        8               16                     H                      64-aligned
    +--------+---------------+----------------------+-----------+----------+--------- ...
    | magic  | header length | msgpack header       | padding   | array 0  | array 1
    +--------+---------------+----------------------+-----------+----------+--------- ...

H is the end of the header. The header has the name, dtype, shape and offset of every array, its axis if it has one, and
small fields (text, numbers). Arrays are little-endian, in C order, each aligned to 64 bytes. The total length is a
multiple of 64 bytes, so that appended bytes are aligned too. Decoding makes views of the buffer, so it copies no array.
It checks everything in the buffer.

The axis of a column says what its rows belong to. Code that cuts a group into sequences or rollouts cuts each array of
its extras by the axis, and never by the shape of the array. The reason is that arrays of the same shape can mean
different things, for example in a group of 8 completions with 8 tokens in all. An array without an axis belongs to the
group as a whole, and is never cut.

Segments are columns that arrive after their group was stored, as bytes that are appended to the bytes of the group:

    group | segment | segment | ...

Stored bytes never change. A reader gets the group with the columns of all segments that were stored when the group was
drawn. Of several columns with the same name, the first counts. So if a client repeats an append after a broken
connection, the second append changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import msgpack
import numpy as np
import numpy.typing as npt

Buffer = bytes | memoryview
Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
ALIGNMENT = 64
"""The offset of each array is a multiple of this number of bytes."""
MAGIC_BYTES = 8
"""Bytes of a magic number. Its last byte is the version of the format."""
_PREFIX = MAGIC_BYTES + 8
"""Bytes before the header: the magic number and the length of the header."""
_VALUES_WITHOUT_AXIS = 4
"""The number of values that the header has for an array without an axis: name, dtype, shape and offset. An axis is the
fifth value."""
_EXTRAS = "extras/"
"""The beginning of the name of each extra in a header."""
_MAX_HEADER = 4 * 2**20
"""The most bytes of a header. The bound is low because a hostile header takes about 60 times as much memory when it is
decoded."""
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("bool", *_INTEGERS, *_FLOATS)}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)
"""The dtypes that the format has, by name."""
DAMAGE = (KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, msgpack.UnpackException)
"""The errors, besides ValueError, that decoding may raise for bytes that encoding cannot have written."""


class Decoded(NamedTuple):
    """The decoded bytes of a group or segment."""

    fields: dict[str, Any]
    """The small fields, by name."""
    arrays: dict[str, Any]
    """The arrays that are no extras, by name, as views of the bytes."""
    extras: dict[str, Array]
    """The extras by name, as views of the bytes."""
    axes: dict[str, str]
    """The axes of the extras that have one, by name."""
    rest: memoryview
    """The bytes after the last array."""


def encode_arrays(
    magic: bytes, fields: dict[str, Any], arrays: Arrays, extras: Arrays, axes: Mapping[str, str]
) -> list[Buffer]:
    """Encodes fields and arrays as consecutive buffers: the header, then each array and its padding.

    Contiguous arrays are not copied. `axes` has the axis of each extra that has one, by the name of the extra.

    Raises ValueError for fields that msgpack cannot hold, and for a header that is too long.
    """
    entries: list[list[Any]] = []  # the header's entry for each array
    stored: list[Array] = []
    offset = 0  # of the next array; counted from the first array, so the length of the header does not matter
    named_arrays: list[tuple[str, Array, str | None]] = [(name, array, None) for name, array in arrays.items()]
    named_arrays += [(_EXTRAS + name, array, axes.get(name)) for name, array in extras.items()]
    for name, array, axis in named_arrays:
        # `ascontiguousarray` makes an array without dimensions into a vector, so give it its shape again.
        array = np.ascontiguousarray(array, dtype=DTYPES[array.dtype.name]).reshape(array.shape)
        entry = [name, array.dtype.name, list(array.shape), offset]
        if axis:
            entry.append(axis)
        entries.append(entry)
        stored.append(array)
        offset += _aligned(array.nbytes)
    try:
        header = msgpack.packb({"arrays": entries, "fields": fields})
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"sampling and meta must hold only what msgpack can (None, bool, int, float, str, bytes, "
            f"list, dict): {error}"
        ) from error
    if len(header) > _MAX_HEADER:
        what = "sampling, meta, finish_reasons and the names of extras"
        raise ValueError(f"{what} take {len(header)} bytes, more than {_MAX_HEADER}: put large values into extras")
    prefix = magic + len(header).to_bytes(8, "little") + header
    pieces: list[Buffer] = [prefix.ljust(_aligned(len(prefix)), b"\0")]
    for array in stored:
        if array.nbytes:
            pieces.append(array.reshape(-1).view(np.uint8).data)
            padding = _aligned(array.nbytes) - array.nbytes
            if padding:
                pieces.append(bytes(padding))
    return pieces


def check_magic(view: memoryview, magic: bytes, kind: str) -> int:
    """Checks the beginning of a group or segment, and returns the length of its header in bytes.

    `magic`: the magic number with which `view` must begin. Its last byte is the version of the format. `kind`: the word
    "group" or "segment", for errors. Raises ValueError that says what is wrong: the magic number, the version or the
    length.
    """
    if len(view) < _PREFIX or view[: MAGIC_BYTES - 1] != magic[:-1]:
        raise ValueError(f"not a {kind}: {len(view)} bytes that begin with {bytes(view[:8])!r}")
    if view[MAGIC_BYTES - 1] != magic[-1]:
        raise ValueError(f"{kind} of format {view[MAGIC_BYTES - 1]}; this version reads {magic[-1]}")
    header_length = int.from_bytes(view[MAGIC_BYTES:_PREFIX], "little")
    if header_length > min(_MAX_HEADER, len(view) - _PREFIX):
        raise ValueError(f"header of {header_length} bytes in a {kind} of {len(view)}")
    return header_length


def decode_arrays(view: memoryview, header_length: int) -> Decoded:
    """Decodes the fields and arrays that `encode_arrays` wrote. `header_length`: the result of `check_magic`.

    Raises ValueError or an error of DAMAGE if `encode_arrays` cannot have written the bytes.
    """
    header = msgpack.unpackb(view[_PREFIX : _PREFIX + header_length], strict_map_key=True)
    entries = header["arrays"]
    body_start = min(_aligned(_PREFIX + header_length), len(view))
    body = view[body_start:]  # the bytes of the arrays, and all bytes after them; empty if the view ends too early
    arrays: dict[str, Array] = {}
    extras: dict[str, Array] = {}
    axes: dict[str, str] = {}
    end = 0  # the offset in `body` at which the last array ends
    for entry in entries:
        if len(entry) > _VALUES_WITHOUT_AXIS:
            *entry, axis = entry
            axes[entry[0].removeprefix(_EXTRAS)] = axis
        name, dtype, shape, offset = entry
        array, stop = _view(body, name, dtype, shape, offset)
        if name.startswith(_EXTRAS):
            extras[name.removeprefix(_EXTRAS)] = array
        else:
            arrays[name] = array
        if stop > end:
            end = stop
    if len(arrays) + len(extras) != len(entries):  # of two arrays with one name, the dict has only the last
        raise ValueError("an array is named twice")
    return Decoded(header["fields"], arrays, extras, axes, body[_aligned(end) :])


def _aligned(nbytes: int) -> int:
    """The smallest multiple of ALIGNMENT that is not below `nbytes`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _view(body: memoryview, name: str, dtype_name: str, shape: list[int], offset: int) -> tuple[Array, int]:
    """Returns an array as a view of `body`, and the offset in bytes at which the array ends.

    Raises ValueError for a dtype, shape or offset that `encode_arrays` cannot have written.
    """
    dtype = DTYPES.get(dtype_name)
    if dtype is None:
        raise ValueError(f"array {name!r} has dtype {dtype_name!r}, not one of {', '.join(DTYPES)}")
    # Compare the type, because `isinstance(True, int)` is true.
    are_counts = all(type(number) is int and number >= 0 for number in (offset, *shape))
    if not are_counts or len(shape) > 32:  # arrays of numpy 1 have at most 32 dimensions
        raise ValueError(f"array {name!r} has shape {shape} and offset {offset}")
    count = math.prod(shape)
    stop = offset + count * dtype.itemsize
    if offset % ALIGNMENT or stop > len(body):
        raise ValueError(f"array {name!r} lies at {offset} to {stop}, outside {len(body)} bytes or unaligned")
    if not count:
        offset = 0  # an empty array has no bytes, and this offset is valid for every buffer
    return np.frombuffer(body, dtype=dtype, count=count, offset=offset).reshape(shape), stop


# -------------------------------------------------------------------------------------------------------------- axes

RAGGED = "ragged:token"
"""The axis of an array with any number of values for each token. A second array, the offsets, says where the values of
a token begin and end."""
AXES = {
    "token": "T, the tokens of completion_ids",
    "whole": "P + T, the tokens of prompt_ids and of completion_ids",
    "sequence": "S, the sequences",
    "rollout": "G, the rollouts",
    "group": "anything: the group as a whole",
    RAGGED: "T + 1 offsets into its values",
}
"""The meaning of the first dimension of an array, by its axis."""
OFFSETS = "/offsets"
"""The ending that makes the name of an array with the axis "ragged:token" into the name of its offsets."""


def checked_columns(extras: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
    """Converts the values to arrays.

    Raises ValueError that names the extra if numpy cannot convert its value, or if the byte format does not have the
    dtype of the array.
    """
    columns: dict[str, Array] = {}
    for name, values in extras.items():
        try:
            array = np.asarray(values)
        # numpy raises one of these errors for a tensor that is on a GPU, has the dtype bfloat16, or needs a gradient.
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"extras[{name!r}] is no array of numpy: {error}; of a tensor take x.detach().cpu().numpy(), of one in "
                f"bfloat16 x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)"
            ) from None
        if array.dtype.name not in DTYPES:
            raise ValueError(f"extras[{name!r}] has dtype {array.dtype}, not one of {', '.join(DTYPES)}")
        columns[name] = array
    return columns


def check_axes(extras: Arrays, axes: Mapping[str, str], sizes: Mapping[str, int] | None = None) -> None:
    """Checks that each axis is known, and that each array fits its axis. Raises ValueError with the remedy.

    `sizes`: the number of rows that an array must have, for each of the axes "token", "whole", "sequence" and
    "rollout". None: these numbers are not known, so arrays with the same axis must have the same number of rows.
    """
    rows_of_axes = dict(sizes or {})
    for name, axis in axes.items():
        if name not in extras:
            raise ValueError(f"axes names {name!r}, which extras does not have: add the array or leave the name out")
        if axis not in AXES:
            raise ValueError(f"axes[{name!r}] is {axis!r}, not one of {', '.join(AXES)}")
        if axis == "group":
            continue
        array = extras[name]
        if axis == RAGGED:
            _check_ragged(name, array, extras.get(name + OFFSETS), rows_of_axes)
            continue
        rows = array.shape[0] if array.ndim else None
        if rows is not None:
            # Without `sizes`, the first array of an axis decides how many rows the others must have.
            rows_of_axes.setdefault(axis, rows)
        needed = rows_of_axes.get(axis, "some")
        if rows != needed:
            raise ValueError(
                f"extras[{name!r}] has the shape {array.shape}, and its axis {axis!r} needs {needed} "
                f"rows ({AXES[axis]}): give it these rows or another axis"
            )
    for name in extras:
        if not name.endswith(OFFSETS):
            continue
        values_name = name.removesuffix(OFFSETS)
        if axes.get(values_name) != RAGGED:
            raise ValueError(
                f"extras[{name!r}] is the name of offsets, and extras has no {values_name!r} with the "
                f"axis {RAGGED!r}: choose another name or say this axis"
            )


def check_row_axis(name: str, axis: str) -> None:
    """Raises ValueError for an axis that a column of `group_from_rows` cannot have."""
    if axis not in ("token", "whole", RAGGED):
        raise ValueError(f"columns has {name!r} with the axis {axis!r}: put it into extras and axes")


def _check_ragged(name: str, values: Array, offsets: Array | None, rows_of_axes: dict[str, int]) -> None:
    """Checks that `offsets` cut `values` into one set for each token. Raises ValueError if they do not.

    `rows_of_axes`: the number of rows of each axis for which the number is known. If it lacks the number of tokens,
    this function adds the number of sets as the number of tokens.
    """
    if offsets is None:
        raise ValueError(f"extras[{name!r}] has the axis {RAGGED!r}: put T + 1 offsets into extras[{name + OFFSETS!r}]")
    tokens = rows_of_axes.setdefault("token", max(offsets.size - 1, 0))
    if offsets.dtype.kind not in "iu" or offsets.shape != (tokens + 1,):
        raise ValueError(
            f"extras[{name + OFFSETS!r}] is {offsets.dtype} of the shape {offsets.shape}, and must be integers of the "
            f"shape ({tokens + 1},): T + 1 offsets into extras[{name!r}]"
        )
    rows = values.shape[0] if values.ndim else 0
    falls = (offsets[1:] < offsets[:-1]).any()
    if offsets[0] != 0 or offsets[-1] != rows or falls:
        ends = f"goes from {offsets[0]} to {offsets[-1]}"
        raise ValueError(f"extras[{name + OFFSETS!r}] {ends}, and must rise from 0 to {rows}, the rows of its values")


# ---------------------------------------------------------------------------------------------------------- segments

SEGMENT_MAGIC = b"RPLYSEG\x01"
"""The first bytes of a segment. The last of them is the version of the format."""


def encode_columns(extras: Mapping[str, npt.ArrayLike], axes: Mapping[str, str] | None = None) -> list[Buffer]:
    """Encodes these columns as a segment. Returns consecutive buffers, whose total length is a multiple of 64 bytes.

    `extras` and `axes` are as in RolloutGroup.

    Raises ValueError if there are no columns. Raises ValueError that names the column if its dtype or axis is unknown,
    or if its number of rows differs from that of another column with the same axis. This function does not know the
    group, so it cannot check that the columns fit the group. `RolloutGroup.decode` refuses columns that do not fit.
    """
    columns = checked_columns(extras)
    axes = axes or {}
    if not columns:
        raise ValueError("extras is empty: name at least one column")
    check_axes(columns, axes)
    return encode_arrays(SEGMENT_MAGIC, fields={}, arrays={}, extras=columns, axes=axes)


def decode_segments(view: memoryview, extras: dict[str, Array], axes: dict[str, str]) -> None:
    """Adds the columns of all segments in `view` to `extras` and `axes`.

    Leaves out a column if `extras` already has its name. Raises the errors of `check_magic` and `decode_arrays`.
    """
    number = 0
    while len(view):
        number += 1
        header_length = check_magic(view, SEGMENT_MAGIC, kind="segment")
        decoded = decode_arrays(view, header_length)
        if decoded.arrays:
            raise ValueError(f"segment {number} has {', '.join(decoded.arrays)} beside extras")
        view = decoded.rest
        names_before = set(extras)
        for name, array in decoded.extras.items():
            # A ragged column has two arrays, the values and the offsets. Either both are left out or neither, so the
            # name of the values decides about the offsets too. Look it up in `names_before` and not in `extras`, to
            # which this loop may have added the values just now.
            values_name = name.removesuffix(OFFSETS)
            column_name = values_name if decoded.axes.get(values_name) == RAGGED else name
            if column_name not in names_before:
                extras[name] = array
                if name in decoded.axes:
                    axes[name] = decoded.axes[name]
