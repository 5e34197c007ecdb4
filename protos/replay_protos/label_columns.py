"""Label columns: converts the labels of items (columns and tags) to and from the messages `Columns` and `Tags`.

In a message, the labels of several rows are one column for each name, as replay.proto says. `Labels` has the labels of
one item.
"""

from __future__ import annotations

from collections.abc import Sequence

from replay_protos import replay_pb2 as pb
from replay_protos.labels import Labels, TagValue, labels_of


def columns_message(rows: Sequence[Labels]) -> list[pb.Columns]:
    """The columns of the items, as a message has them: one `Columns` for each set of names that items have.

    `rows` has the labels of one item for each row of the message.
    """
    rows_by_names: dict[frozenset[str], list[int]] = {}
    for row, labels in enumerate(rows):
        if labels.columns:
            rows_by_names.setdefault(labels.columns, []).append(row)
    messages = []
    for names, its_rows in rows_by_names.items():
        is_all_rows = len(its_rows) == len(rows)  # such an entry has an empty list of rows
        messages.append(pb.Columns(names=sorted(names), rows=[] if is_all_rows else its_rows))
    return messages


def tags_message(rows: Sequence[Labels]) -> list[pb.Tags]:
    """The tags of the items, as a message has them: one `Tags` for each name, or two if it has texts and numbers.

    `rows` has the labels of one item for each row of the message.
    """
    messages: dict[tuple[str, type], pb.Tags] = {}
    """By name of the tag and type of its values."""
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
    names: list[frozenset[str] | None] = [None] * n  # of the columns of each row; None: no entry has named the row yet
    for entry in columns:
        names_of_entry = frozenset(entry.names)
        for row in _rows(entry.rows, n, "columns"):
            # Each entry may name all rows. Without this error, a small message of many entries would be much work.
            if names[row] is not None:
                raise ValueError(f"columns of row {row} come twice: name all that a row has in one entry")
            names[row] = names_of_entry
    values: list[dict[str, TagValue]] = [{} for _ in range(n)]
    for tag in tags:
        if tag.texts and tag.numbers:
            raise ValueError(f"tag {tag.name!r:.80} has texts and numbers in one message: one message for each")
        tag_values: Sequence[TagValue] = tag.texts or tag.numbers
        its_rows = _rows(tag.rows, n, f"tag {tag.name!r:.80}")
        if len(tag_values) != len(its_rows):
            raise ValueError(f"tag {tag.name!r:.80} has {len(tag_values)} values for {len(its_rows)} rows")
        for row, value in zip(its_rows, tag_values, strict=True):
            if tag.name in values[row]:
                raise ValueError(f"tag {tag.name!r:.80} comes twice for row {row}")
            values[row][tag.name] = value
    return [labels_of(names_of_row or (), tags_of_row) for names_of_row, tags_of_row in zip(names, values, strict=True)]


def _rows(rows: Sequence[int], n: int, what: str) -> Sequence[int]:
    """The rows that an entry of a message of n rows names. An entry without rows means all rows.

    Raises ValueError, in which `what` names the entry, for a row that the message does not have.
    """
    if not rows:
        return range(n)
    if (highest := max(rows)) >= n:
        raise ValueError(f"row {highest} of {what} in a message of {n} rows")
    return rows
