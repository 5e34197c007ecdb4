"""Labels: the columns and tags of an item, which travel beside its payload.

The server never opens a payload. The labels tell it what it has to know about a payload: the names of the columns, so
that a table can wait for a column that it requires, and the tags. People find items by tags, and tables balance their
draws by tags. Items without columns and tags, which are most items, share `NO_LABELS`, and cost no byte.
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
    """The names of an item's columns, and its tags."""

    columns: frozenset[str] = frozenset()
    """Names of the columns of the payload beyond the fields that each group has: the names of its extras."""
    pairs: tuple[tuple[str, TagValue], ...] = ()
    """Name and value of each tag, sorted by name."""
    nbytes: int = field(default=0, compare=False)
    """Roughly the bytes of memory that the labels would take if no other item shared them. The server's bounds on
    memory count these bytes."""

    @property
    def tags(self) -> dict[str, TagValue]:
        """The value of each tag, by name."""
        return dict(self.pairs)

    def text(self, name: str) -> str:
        """The value of the tag as text, as which values are compared. Empty if the item has no such tag."""
        for tag, value in self.pairs:
            if tag == name:
                return str(value)
        return ""


NO_LABELS = Labels()


def labels_of(columns: Iterable[str], tags: Mapping[str, TagValue] | None) -> Labels:
    """Makes the labels of an item from the names of its columns and its tags (values by name).

    Raises ValueError for columns or tags that an item cannot have.
    """
    names = frozenset(columns)
    if not names and not tags:
        return NO_LABELS
    pairs: list[tuple[str, TagValue]] = []
    if tags is not None and not isinstance(tags, Mapping):
        raise ValueError(f'tags must be values by name, such as {{"environment": "math"}}, not {tags!r:.80}')
    for name, value in (tags or {}).items():
        # Types are checked here and not in `_checked`: the cache of `_shared` takes 1, 1.0 and True for the same value.
        if isinstance(value, bool) or not isinstance(value, str | Integral):
            raise ValueError(f"tag {name!r:.80} is {value!r:.80}: a tag is a string, or an integer of 64 bits")
        pairs.append((name, value if isinstance(value, str) else int(value)))  # `int` also converts numpy's integers
    if len(names) <= _MOST_SHARED:
        return _shared(names, tuple(pairs))
    return _checked(names, tuple(pairs))


_TEXT_BYTES = 80
"""Bytes of memory that each name and value takes besides its characters, as an object and as an entry of a set or
tuple."""
_MOST_SHARED = 64
"""Labels with more columns than this are not cached, because the names of 1024 columns may take 256 kB."""


def _checked(columns: frozenset[str], pairs: tuple[tuple[str, TagValue], ...]) -> Labels:
    """The labels with these columns and tags. Raises ValueError if there are too many, or one is empty or too long."""
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
        elif not -(1 << 63) <= value < 1 << 63:  # integers must fit into 64 bits
            raise ValueError(f"tag {name!r} is {value!r:.80}: a tag is a string, or an integer of 64 bits")
    nbytes = sum(_TEXT_BYTES + len(str(text)) for text in (*columns, *chain(*pairs)))
    return Labels(columns, tuple(sorted(pairs)), nbytes)


_shared = lru_cache(1 << 12)(_checked)
"""`_checked` with a cache, so that items with equal labels share one object. Most items of a run have equal labels."""


def _size(what: str, text: str) -> int:
    """Bytes of a text in UTF-8. Raises ValueError, in which `what` names the text, for values that have no UTF-8."""
    if not isinstance(text, str):
        raise ValueError(f"{what} must be a string, not {text!r:.80}")
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is no text: {error}") from error


def pack_labels(labels: Labels) -> bytes:
    """The bytes in which labels are stored. Empty for NO_LABELS."""
    if len(labels.columns) > _MOST_SHARED:
        return _pack(labels)
    return _packed(labels)


def _pack(labels: Labels) -> bytes:
    return b"" if labels == NO_LABELS else msgpack.packb([sorted(labels.columns), labels.pairs])


_packed = lru_cache(1 << 12)(_pack)
"""`_pack` with a cache."""


def unpack_labels(data: bytes) -> Labels:
    """The labels that `pack_labels` stored as `data`, which must not be empty."""
    columns, pairs = msgpack.unpackb(data)
    return labels_of(columns, dict(pairs))
