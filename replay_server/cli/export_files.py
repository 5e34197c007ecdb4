"""Files of rows: JSON lines, or parquet with the package pyarrow."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from replay_server.cli.export_rows import Row
from replay_server.cli.extras import need
from replay_server.cli.output import misuse

ROWS_PER_BATCH = 256
"""Rows in memory at the same time, and in one row group of a parquet file."""


def format_of(path: Path) -> str:
    """`jsonl` or `parquet`, by the end of the file's name."""
    if path.suffix in (".jsonl", ".json"):
        return "jsonl"
    if path.suffix == ".parquet":
        need("a .parquet file", "parquet", "pyarrow")
        return "parquet"
    misuse(f"{path}: the name of the file must end with .jsonl or .parquet")


def write(path: Path, columns: Mapping[str, str], rows: Iterable[Row]) -> int:
    """Writes the rows beside the file and renames it at the end. Returns how many there were."""
    unfinished = path.with_name(path.name + ".tmp")
    writer = _write_jsonl if format_of(path) == "jsonl" else _write_parquet
    try:
        count = writer(unfinished, columns, iter(rows))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def read(path: Path) -> Iterator[Row]:
    """The rows of a file. Raises ValueError that names a file of another kind, OSError if it cannot be read."""
    return _read_jsonl(path) if format_of(path) == "jsonl" else _read_parquet(path)


def _write_jsonl(path: Path, columns: Mapping[str, str], rows: Iterator[Row]) -> int:
    from replay_client.documents import plain

    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            encoded = {
                name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
                for name, value in row.items()
            }
            file.write(json.dumps(plain(encoded), ensure_ascii=False) + "\n")
            count += 1
    return count


def _read_jsonl(path: Path) -> Iterator[Row]:
    try:
        yield from _rows_of_lines(path)
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text{_other_kind(path)}") from None


def _other_kind(path: Path) -> str:
    """What the first bytes of a file that is no text look like, and the remedy."""
    with path.open("rb") as file:
        head = file.read(4)
    if head.startswith(b"\x1f\x8b"):
        return ": it is packed with gzip, unpack it first"
    return ": it looks like a parquet file, whose name ends with .parquet" if head == b"PAR1" else ""


def _rows_of_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:  # some editors begin a file with a byte order mark
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: not a JSON object")
            yield row


def _schema(columns: Mapping[str, str]) -> Any:
    import pyarrow

    kinds = {"int": pyarrow.int64(), "float": pyarrow.float64(), "str": pyarrow.string(), "bytes": pyarrow.binary()}
    kinds |= {f"list of {name}": pyarrow.list_(kind) for name, kind in kinds.items()}
    return pyarrow.schema([(name, kinds[kind]) for name, kind in columns.items()])


def _write_parquet(path: Path, columns: Mapping[str, str], rows: Iterator[Row]) -> int:
    import pyarrow
    from pyarrow import parquet

    schema, count = _schema(columns), 0
    with parquet.ParquetWriter(path, schema) as writer:
        while batch := list(islice(rows, ROWS_PER_BATCH)):
            writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def _read_parquet(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowInvalid, parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH):
                yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file: {error}") from None
