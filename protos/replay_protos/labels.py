"""Labels: the columns and tags of an item, which travel beside its payload.

The server never opens a payload. What it has to know about a payload is in the labels. They have the names of the
columns, so that a table can wait for a column that it requires. They also have the tags, by which people find items and
tables balance their draws. Most items have no columns and no tags. These items share `NO_LABELS`, so their labels take
no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from numbers import Integral

import msgpack

MOST_TAGS = 8
"""The most tags of an item."""
MOST_NAME_BYTES = 64
"""The most bytes of the name of a tag, in UTF-8."""
MOST_VALUE_BYTES = 256
"""The most bytes of the value of a tag, in UTF-8."""
MOST_COLUMNS = 1024
"""The most columns of an item."""
MOST_COLUMN_BYTES = 256
"""The most bytes of the name of a column, in UTF-8."""

TagValue = str | int


@dataclass(frozen=True, slots=True)
class Labels:
    """The names of an item's columns, and its tags."""

    columns: frozenset[str] = frozenset()
    """The names of the extras in the payload, which are the columns besides the fields that each group has."""
    pairs: tuple[tuple[str, TagValue], ...] = ()
    """(Name, value) of each tag, sorted by name."""
    nbytes: int = field(default=0, compare=False)
    """About as many bytes of memory as the labels would take if no other item shared them. The server's bounds on
    memory count these bytes."""

    @property
    def tags(self) -> dict[str, TagValue]:
        """The tags: name -> value."""
        return dict(self.pairs)

    def text(self, name: str) -> str:
        """The value of the tag `name` as text. Empty if the item has no such tag. Values of tags are compared as
        texts."""
        for tag_name, value in self.pairs:
            if tag_name == name:
                return str(value)
        return ""


NO_LABELS = Labels()


def labels_of(columns: Iterable[str], tags: Mapping[str, TagValue] | None) -> Labels:
    """Makes the labels of an item. `columns`: the names of its columns. `tags`: name -> value; None: no tags.

    Raises ValueError for columns or tags that an item cannot have.
    """
    names = frozenset(columns)
    if not names and not tags:
        return NO_LABELS
    pairs: list[tuple[str, TagValue]] = []
    if tags is not None and not isinstance(tags, Mapping):
        raise ValueError(f'tags must be values by name, such as {{"environment": "math"}}, not {tags!r:.80}')
    for name, value in (tags or {}).items():
        # The types are checked here and not in `_checked`, because the cache of `_shared` cannot tell 1, 1.0 and True
        # apart.
        if isinstance(value, bool) or not isinstance(value, str | Integral):
            raise ValueError(f"tag {name!r:.80} is {value!r:.80}: a tag is a string, or an integer of 64 bits")
        plain_value = value if isinstance(value, str) else int(value)  # `int` converts the integers of numpy
        pairs.append((name, plain_value))
    if len(names) <= _MOST_SHARED:
        return _shared(names, tuple(pairs))
    return _checked(names, tuple(pairs))


_TEXT_BYTES = 80
"""Bytes of memory that each name and value takes in addition to its characters, for the Python object and for the entry
in a set or tuple."""
_MOST_SHARED = 64
"""Labels with more columns than this are not cached. The names of 1024 columns may take 256 kB, which is too much for
a cache."""


def _checked(columns: frozenset[str], pairs: tuple[tuple[str, TagValue], ...]) -> Labels:
    """The labels with these columns and tags. Raises ValueError if there are too many columns or tags, if a name is no
    text, empty or too long, or if a value is too long or too large."""
    if len(columns) > MOST_COLUMNS:
        raise ValueError(f"an item has at most {MOST_COLUMNS} columns, not {len(columns)}: join some of its extras")
    for column in columns:
        size = _size("the name of a column", column)
        if not 0 < size <= MOST_COLUMN_BYTES:
            raise ValueError(f"column {column!r:.80} has a name of {size} bytes: 1 to {MOST_COLUMN_BYTES}")
    if len(pairs) > MOST_TAGS:
        raise ValueError(f"an item has at most {MOST_TAGS} tags, not {len(pairs)}: put the others into meta")
    for name, value in pairs:
        size = _size("the name of a tag", name)
        if not 0 < size <= MOST_NAME_BYTES:
            raise ValueError(f"tag {name!r:.80} has a name of {size} bytes: 1 to {MOST_NAME_BYTES}")
        if isinstance(value, str):
            size = _size(f"tag {name!r}", value)
            if size > MOST_VALUE_BYTES:
                raise ValueError(
                    f"tag {name!r} has a value of {size} bytes, more than {MOST_VALUE_BYTES}: put it into meta"
                )
        elif not -(1 << 63) <= value < 1 << 63:  # integers must fit into 64 bits
            raise ValueError(f"tag {name!r} is {value!r:.80}: a tag is a string, or an integer of 64 bits")
    names_and_values = chain(columns, *pairs)
    nbytes = sum(_TEXT_BYTES + len(str(text)) for text in names_and_values)
    return Labels(columns, tuple(sorted(pairs)), nbytes)


_shared = lru_cache(1 << 12)(_checked)
"""`_checked` with a cache, so that items with equal labels share one object. Most items of a run have equal labels."""


def _size(what: str, text: str) -> int:
    """The number of bytes of a text in UTF-8. Raises ValueError for a value that is no text. `what` names the text in
    this error."""
    if not isinstance(text, str):
        raise ValueError(f"{what} must be a string, not {text!r:.80}")
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is no text: {error}") from error


def pack_labels(labels: Labels) -> bytes:
    """The bytes as which labels are stored. Empty for NO_LABELS."""
    if len(labels.columns) > _MOST_SHARED:
        return _pack(labels)
    return _pack_cached(labels)


def _pack(labels: Labels) -> bytes:
    """`pack_labels` without a cache."""
    return b"" if labels == NO_LABELS else msgpack.packb([sorted(labels.columns), labels.pairs])


_pack_cached = lru_cache(1 << 12)(_pack)
"""`_pack` with a cache."""


def unpack_labels(data: bytes) -> Labels:
    """The labels whose `pack_labels` is `data`. `data` must not be empty."""
    columns, pairs = msgpack.unpackb(data)
    return labels_of(columns, dict(pairs))
