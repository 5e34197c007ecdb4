"""Writes and reads files of rows. A file whose name ends with .parquet is Parquet, and any other has JSON lines.

Parquet needs the package pyarrow.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from replay_cli.archive.rows import Row
from replay_generator.prompts.files import json_lines
from replay_protos.state import plain

_ROWS_PER_BATCH = 256
"""The most rows that a writer has in memory at the same time, and the rows of a row group of a parquet file."""
_ROWS_PER_READ = 32
"""Rows of a parquet file in memory at the same time. A row may hold thousands of tokens, each an object of Python."""


def write_rows(path: Path, columns: Mapping[str, str], rows: Iterable[Row]) -> int:
    """Writes the rows into a file beside `path`, which is renamed to `path` at the end. Returns the number of rows."""
    unfinished = path.with_name(path.name + ".tmp")
    write = _write_parquet if path.suffix == ".parquet" else _write_jsonl
    try:
        count = write(unfinished, columns, iter(rows))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)  # only an error leaves a file of this name
    return count


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows of a file. `columns`: the columns that the caller needs; None: all. The rows may lack the others.

    Raises a ValueError that names the file if its content is not of the kind that its name says, and OSError if it
    cannot be read.
    """
    if path.suffix == ".parquet":
        return _read_parquet(path, columns)
    return (row for _line_number, row in json_lines(path))


def _write_jsonl(path: Path, columns: Mapping[str, str], rows: Iterator[Row]) -> int:
    """Writes each row as a line of JSON. Returns the number of rows. Does not use `columns`."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            document = {name: _plain(value) for name, value in row.items()}
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
            count += 1
    return count


def _plain(value: Any) -> Any:
    """The value in a form that `json` can write. Bytes become base64."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    dtype = getattr(value, "dtype", None)
    if getattr(dtype, "kind", "") in ("i", "b"):  # an array of integers or booleans
        # `plain` would be slow here, because it looks at each entry, and a group may have a million tokens.
        return value.tolist()
    return plain(value)


def schema_of(columns: Mapping[str, str]) -> Any:
    """The schema of pyarrow for a file. `columns`: name of each column -> its type, as in ITEM_COLUMNS."""
    import pyarrow

    kinds = {"int": pyarrow.int64(), "float": pyarrow.float64(), "str": pyarrow.string(), "bytes": pyarrow.binary()}
    kinds |= {"int32": pyarrow.int32(), "float32": pyarrow.float32(), "bool": pyarrow.bool_()}
    kinds |= {f"list of {name}": pyarrow.list_(kind) for name, kind in kinds.items()}
    kinds["json"] = pyarrow.string()  # the JSON text of the value, see `table_of`
    return pyarrow.schema([(name, kinds[kind]) for name, kind in columns.items()])


def _write_parquet(path: Path, columns: Mapping[str, str], rows: Iterator[Row]) -> int:
    """Writes the rows as a parquet file. Returns the number of rows."""
    from pyarrow import parquet

    schema = schema_of(columns)
    count = 0
    with parquet.ParquetWriter(path, schema) as writer:
        while batch := list(islice(rows, _ROWS_PER_BATCH)):
            writer.write_table(table_of(batch, columns, schema))
            count += len(batch)
    return count


def table_of(rows: Sequence[Row], columns: Mapping[str, str], schema: Any) -> Any:
    """The rows as a table of pyarrow, with the values of type json as JSON texts.

    `columns`: name of each column -> its type. `schema`: the result of `schema_of(columns)`.
    """
    import pyarrow

    json_columns = [name for name, kind in columns.items() if kind == "json"]
    rows_with_texts = []
    for row in rows:
        texts = {name: _json_of(row[name]) for name in json_columns}
        rows_with_texts.append(row | texts)
    return pyarrow.Table.from_pylist(rows_with_texts, schema=schema)


def _json_of(value: Any) -> str | None:
    """The value as JSON text. None stays None, which Parquet stores as null."""
    return None if value is None else json.dumps(plain(value))


def _read_parquet(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows of a parquet file. `columns`: the columns to read; None: all."""
    from pyarrow import ArrowInvalid, parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_PER_READ, columns=columns):
                yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file: {error}") from None
