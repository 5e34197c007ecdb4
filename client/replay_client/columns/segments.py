"""Segments: columns that arrive after their group was stored, as bytes that are appended to those of the group.

    group | segment | segment | ...

Each is a multiple of 64 bytes, so all arrays stay aligned, and nothing that is stored ever changes. A reader gets the
group with the columns of all segments that were there at that moment. Of several columns with one name the first
counts: whoever repeats an append after a broken connection changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy.typing as npt

from replay_client.columns.axes import OFFSETS, RAGGED, Array, check_axes, checked_columns
from replay_client.columns.encoding import Buffer, check_magic, decode_arrays, encode_arrays

SEGMENT_MAGIC = b"RPLYSEG\x01"
"""The last byte is the format version."""
PREFIX = "extras/"
"""The beginning of the names of extras in the headers of groups and segments."""


def encode_columns(extras: Mapping[str, npt.ArrayLike], axes: Mapping[str, str] | None = None) -> list[Buffer]:
    """A segment with these columns, as consecutive buffers; together they are a multiple of 64 bytes.

    `extras` and `axes` are as in RolloutGroup. Raises ValueError that names the column for none at all, a dtype, an
    axis that there is not, and for arrays of one axis that differ in rows. Whether the rows are those of the group only
    its readers know: `RolloutGroup.decode` refuses others.
    """
    columns, axes = checked_columns(extras), dict(axes or {})
    if not columns:
        raise ValueError("extras is empty: name at least one column")
    check_axes(columns, axes)
    named = {PREFIX + name: axis for name, axis in axes.items()}
    return encode_arrays(SEGMENT_MAGIC, ((PREFIX + name, array) for name, array in columns.items()), named, {})


def decode_segments(view: memoryview, extras: dict[str, Array], axes: dict[str, str]) -> None:
    """Adds the columns of all segments in `view` to `extras` and `axes`. What has a name there already is left out.

    Errors: those of `check_magic` and `decode_arrays`.
    """
    number = 0
    while len(view):
        number += 1
        decoded = decode_arrays(view, check_magic(view, SEGMENT_MAGIC, "segment"))
        columns, column_axes = split_extras(decoded.arrays, decoded.axes)
        if decoded.arrays:
            raise ValueError(f"segment {number} has {', '.join(decoded.arrays)} beside extras")
        view = decoded.rest
        taken = set(extras)
        for name, array in columns.items():
            # Offsets go where their values go.
            values = name.removesuffix(OFFSETS)
            owner = values if column_axes.get(values) == RAGGED else name
            if owner not in taken:
                extras[name] = array
                if name in column_axes:
                    axes[name] = column_axes[name]


def split_extras(arrays: dict[str, Array], axes: dict[str, str]) -> tuple[dict[str, Array], dict[str, str]]:
    """The extras among `arrays`, and their axes. They are taken out of `arrays`."""
    names = [name for name in arrays if name.startswith(PREFIX)]
    if not names and not axes:
        return {}, {}
    extras = {name[len(PREFIX) :]: arrays.pop(name) for name in names}
    return extras, {name.removeprefix(PREFIX): axis for name, axis in axes.items()}
