"""Label columns: how the rows of a message carry the labels of their items. replay.proto has the messages."""

from __future__ import annotations

from collections.abc import Sequence

from replay_protos import replay_pb2 as pb
from replay_protos.labels import Labels, TagValue, labels_of


def columns_message(rows: Sequence[Labels]) -> list[pb.Columns]:
    """The columns of each of `rows`, as a message has them."""
    chosen: dict[frozenset[str], list[int]] = {}
    for row, labels in enumerate(rows):
        if labels.columns:
            chosen.setdefault(labels.columns, []).append(row)
    return [
        pb.Columns(names=sorted(names), rows=[] if len(places) == len(rows) else places)
        for names, places in chosen.items()
    ]


def tags_message(rows: Sequence[Labels]) -> list[pb.Tags]:
    """The tags of each of `rows`, as a message has them."""
    found: dict[tuple[str, type], pb.Tags] = {}
    for row, labels in enumerate(rows):
        for name, value in labels.pairs:
            of = (name, type(value))
            if (tags := found.get(of)) is None:
                tags = found[of] = pb.Tags(name=name)
            if isinstance(value, str):
                tags.texts.append(value)
            else:
                tags.numbers.append(value)
            tags.rows.append(row)
    for tags in found.values():
        if len(tags.rows) == len(rows):
            del tags.rows[:]
    return list(found.values())


def labels_of_rows(columns: Sequence[pb.Columns], tags: Sequence[pb.Tags], n: int) -> list[Labels] | None:
    """The labels of each of the n rows of a message; None: no row has any. Raises ValueError for what is not right."""
    if not columns and not tags:
        return None
    names: list[frozenset[str] | None] = [None] * n
    for entry in columns:
        some = frozenset(entry.names)
        for row in _rows(entry.rows, n, "columns"):
            if names[row] is not None:  # or a small message would be much work: each entry may name all rows
                raise ValueError(f"columns of row {row} come twice: name all that a row has in one entry")
            names[row] = some
    values: list[dict[str, TagValue]] = [{} for _ in range(n)]
    for tag in tags:
        if tag.texts and tag.numbers:
            raise ValueError(f"tag {tag.name!r:.80} has texts and numbers in one message: one message for each")
        tag_values: Sequence[TagValue] = tag.texts or tag.numbers
        chosen = _rows(tag.rows, n, f"tag {tag.name!r:.80}")
        if len(tag_values) != len(chosen):
            raise ValueError(f"tag {tag.name!r:.80} has {len(tag_values)} values for {len(chosen)} rows")
        for row, value in zip(chosen, tag_values, strict=True):
            if tag.name in values[row]:
                raise ValueError(f"tag {tag.name!r:.80} comes twice for row {row}")
            values[row][tag.name] = value
    return [labels_of(of_row or (), its_tags) for of_row, its_tags in zip(names, values, strict=True)]


def _rows(rows: Sequence[int], n: int, what: str) -> Sequence[int]:
    if not rows:
        return range(n)
    if (highest := max(rows)) >= n:
        raise ValueError(f"row {highest} of {what} in a message of {n} rows")
    return rows
