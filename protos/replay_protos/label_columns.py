"""Label columns: converts the labels of items (columns and tags) to and from the messages `Columns` and `Tags`.

A `Labels` has all labels of one item. In these messages (replay.proto) it is the other way round: one entry has the
labels of the same name, or names, of several rows. Each row of a message is an item.
"""

from __future__ import annotations

from collections.abc import Sequence

from replay_protos import replay_pb2 as pb
from replay_protos.labels import Labels, TagValue, labels_of


def columns_message(rows: Sequence[Labels]) -> list[pb.Columns]:
    """The columns of the items, as a message has them: one `Columns` for each set of names that an item has.

    `rows`: the labels of the item of each row of the message.
    """
    rows_by_names: dict[frozenset[str], list[int]] = {}
    for row, labels in enumerate(rows):
        if labels.columns:
            rows_by_names.setdefault(labels.columns, []).append(row)
    messages = []
    for names, named_rows in rows_by_names.items():
        if len(named_rows) == len(rows):  # an entry about all rows has an empty list of rows
            named_rows = []
        messages.append(pb.Columns(names=sorted(names), rows=named_rows))
    return messages


def tags_message(rows: Sequence[Labels]) -> list[pb.Tags]:
    """The tags of the items, as a message has them: one `Tags` for each name, or two if the tags of this name have both
    texts and numbers as values.

    `rows`: the labels of the item of each row of the message.
    """
    messages: dict[tuple[str, type], pb.Tags] = {}  # (name of the tag, type of its values) -> message
    for row, labels in enumerate(rows):
        for name, value in labels.pairs:
            kind = (name, type(value))
            tags = messages.get(kind)
            if tags is None:  # the first value of this kind
                tags = pb.Tags(name=name)
                messages[kind] = tags
            if isinstance(value, str):
                tags.texts.append(value)
            else:
                tags.numbers.append(value)
            tags.rows.append(row)
    for tags in messages.values():
        if len(tags.rows) == len(rows):  # an entry about all rows has an empty list of rows
            del tags.rows[:]
    return list(messages.values())


def labels_of_rows(columns: Sequence[pb.Columns], tags: Sequence[pb.Tags], n: int) -> list[Labels] | None:
    """The labels of each of the n rows of a message; None: no row has labels.

    Raises ValueError for columns or tags that contradict each other, or that an item cannot have.
    """
    if not columns and not tags:
        return None
    columns_of_rows: list[frozenset[str] | None] = [None] * n  # None: no entry has named the row yet
    for entry in columns:
        entry_columns = frozenset(entry.names)
        for row in _rows(entry.rows, n, "columns"):
            # Each entry may name all rows. Without this error, a small message of many entries would be much work.
            if columns_of_rows[row] is not None:
                raise ValueError(f"columns of row {row} come twice: name all that a row has in one entry")
            columns_of_rows[row] = entry_columns
    tags_of_rows: list[dict[str, TagValue]] = [{} for _ in range(n)]
    for tag in tags:
        if tag.texts and tag.numbers:
            raise ValueError(f"tag {tag.name!r:.80} has texts and numbers in one message: one message for each")
        tag_values: Sequence[TagValue] = tag.texts or tag.numbers
        tag_rows = _rows(tag.rows, n, f"tag {tag.name!r:.80}")
        if len(tag_values) != len(tag_rows):
            raise ValueError(f"tag {tag.name!r:.80} has {len(tag_values)} values for {len(tag_rows)} rows")
        for row, value in zip(tag_rows, tag_values, strict=True):
            if tag.name in tags_of_rows[row]:
                raise ValueError(f"tag {tag.name!r:.80} comes twice for row {row}")
            tags_of_rows[row][tag.name] = value
    return [
        labels_of(row_columns or (), row_tags)
        for row_columns, row_tags in zip(columns_of_rows, tags_of_rows, strict=True)
    ]


def _rows(rows: Sequence[int], n: int, what: str) -> Sequence[int]:
    """The rows that an entry of a message of n rows is about. `rows`: the rows that the entry names; empty: all rows.

    Raises ValueError for a row that the message does not have. `what` names the entry in this error.
    """
    if not rows:
        return range(n)
    highest = max(rows)
    if highest >= n:
        raise ValueError(f"row {highest} of {what} in a message of {n} rows")
    return rows
