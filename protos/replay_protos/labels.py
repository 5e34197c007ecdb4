"""Labels: the columns and tags of an item, which travel beside its payload.

The server never opens a payload. What the server has to know of a payload travels beside its bytes. These are the names
of its columns, so that a table can wait for a column that it requires, and tags. People find items by tags, and tables
balance their draws by tags. Most items have neither. They share `NO_LABELS`, and cost no byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from numbers import Integral

import msgpack

MOST_TAGS = 8
MOST_NAME_BYTES = 64
"""Bytes of the name of a tag, in UTF-8."""
MOST_VALUE_BYTES = 256
"""Bytes of the value of a tag, in UTF-8."""
MOST_COLUMNS = 1024
MOST_COLUMN_BYTES = 256
"""Bytes of the name of a column, in UTF-8."""

TagValue = str | int


@dataclass(frozen=True, slots=True)
class Labels:
    columns: frozenset[str] = frozenset()
    """Names of the columns of the payload beyond the fields that each group has: the names of its extras."""
    pairs: tuple[tuple[str, TagValue], ...] = ()
    """The tags, by name."""
    nbytes: int = field(default=0, compare=False)
    """About the bytes in memory that the labels take if no other item shares them. Bounds on memory count these."""

    @property
    def tags(self) -> dict[str, TagValue]:
        return dict(self.pairs)

    def text(self, name: str) -> str:
        """The value of a tag as text, by which values are compared; empty without the tag."""
        for known, value in self.pairs:
            if known == name:
                return str(value)
        return ""


NO_LABELS = Labels()


def labels_of(columns: Iterable[str], tags: Mapping[str, TagValue] | None) -> Labels:
    """Raises ValueError, in one sentence, for what an item cannot have."""
    names = frozenset(columns)
    if not names and not tags:
        return NO_LABELS
    pairs: list[tuple[str, TagValue]] = []
    if tags is not None and not isinstance(tags, Mapping):
        raise ValueError(f'tags must be values by name, such as {{"environment": "math"}}, not {tags!r:.80}')
    for name, value in (tags or {}).items():
        if isinstance(value, bool) or not isinstance(value, str | Integral):  # to the cache, 1, 1.0 and True are equal
            raise ValueError(f"tag {name!r:.80} is {value!r:.80}: a tag is a string, or an integer of 64 bits")
        pairs.append((name, value if isinstance(value, str) else int(value)))  # one of numpy, too
    return (_shared if len(names) <= _MOST_SHARED else _checked)(names, tuple(pairs))


_TEXT_BYTES = 80
"""Of each name and value beside its characters: of the object, and of its place in a set or tuple."""
_MOST_SHARED = 64
"""Columns of an item whose labels are kept for others: the names of 1024 columns may take 256 kB."""


def _checked(columns: frozenset[str], pairs: tuple[tuple[str, TagValue], ...]) -> Labels:
    if len(columns) > MOST_COLUMNS:
        raise ValueError(f"an item has at most {MOST_COLUMNS} columns, not {len(columns)}: join some of its extras")
    for column in columns:
        if not 0 < _size("the name of a column", column) <= MOST_COLUMN_BYTES:
            raise ValueError(f"column {column!r:.80} has a name of {_size('', column)} bytes: 1 to {MOST_COLUMN_BYTES}")
    if len(pairs) > MOST_TAGS:
        raise ValueError(f"an item has at most {MOST_TAGS} tags, not {len(pairs)}: put the others into meta")
    for name, value in pairs:
        if not 0 < (size := _size("the name of a tag", name)) <= MOST_NAME_BYTES:
            raise ValueError(f"tag {name!r:.80} has a name of {size} bytes: 1 to {MOST_NAME_BYTES}")
        if isinstance(value, str):
            if (size := _size(f"tag {name!r}", value)) > MOST_VALUE_BYTES:
                raise ValueError(
                    f"tag {name!r} has a value of {size} bytes, more than {MOST_VALUE_BYTES}: put it into meta"
                )
        elif not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"tag {name!r} is {value!r:.80}: a tag is a string, or an integer of 64 bits")
    nbytes = sum(_TEXT_BYTES + len(str(text)) for text in (*columns, *chain(*pairs)))
    return Labels(columns, tuple(sorted(pairs)), nbytes)


_shared = lru_cache(1 << 12)(_checked)  # most items of a run have the labels of many others: so they share one object


def _size(what: str, text: str) -> int:
    """Bytes of a text in UTF-8. Raises ValueError if it is none."""
    if not isinstance(text, str):
        raise ValueError(f"{what} must be a string, not {text!r:.80}")
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is no text: {error}") from error


def pack_labels(labels: Labels) -> bytes:
    """The labels as they are stored; nothing where there are none."""
    return (_packed if len(labels.columns) <= _MOST_SHARED else _pack)(labels)


def _pack(labels: Labels) -> bytes:
    return b"" if labels == NO_LABELS else msgpack.packb([sorted(labels.columns), labels.pairs])


_packed = lru_cache(1 << 12)(_pack)


def unpack_labels(data: bytes) -> Labels:
    columns, pairs = msgpack.unpackb(data)
    return labels_of(columns, dict(pairs))
