"""Columns: arrays with names, their axes, and the bytes in which groups and segments hold them."""

from replay_client.columns.axes import AXES, OFFSETS, RAGGED, check_axes, checked_columns
from replay_client.columns.encoding import ALIGNMENT, Buffer, check_magic, decode_arrays, encode_arrays
from replay_client.columns.segments import SEGMENT_MAGIC, decode_segments, encode_columns

__all__ = [
    "ALIGNMENT",
    "AXES",
    "OFFSETS",
    "RAGGED",
    "SEGMENT_MAGIC",
    "Buffer",
    "check_axes",
    "check_magic",
    "checked_columns",
    "decode_arrays",
    "decode_segments",
    "encode_arrays",
    "encode_columns",
]
