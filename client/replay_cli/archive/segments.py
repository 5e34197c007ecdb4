"""Segments: writes the Parquet files of an archive. A reader sees the whole file, or no file.

A segment is written under a name that ends with `.tmp`, forced to the disk, and renamed. Readers ignore files with such
a name. The writer holds a lock on the file. After a kill, the next archiver finds the file without a lock, and removes
it.

A segment has the rows of `replay table export`, and a column with the time of the insert. The names of segments sort by
the time at which they were begun.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replay_cli.archive.files import schema_of, table_of
from replay_cli.archive.rows import Form, Row
from replay_dashboard.group import TokenText

GROUP_ROWS = Form(sequences=False, text=TokenText(), payloads=True)
"""A row for each item, with its payload and without texts."""
GROUP_COLUMNS = GROUP_ROWS.columns() | {"inserted_at": "float"}
"""The type of each column of a segment, by its name. `inserted_at` is in seconds since the epoch."""
_UNWRITABLE = (ValueError, TypeError, OverflowError, NotImplementedError)
"""The errors of pyarrow for a value that its column cannot hold."""


class SegmentWriter:
    """A segment that is being written. Its methods raise OSError if the disk fails."""

    def __init__(self, folder: Path) -> None:
        """Makes the file in `folder`, under the name of an unfinished segment, and locks it."""
        from pyarrow import parquet

        self._schema = schema_of(GROUP_COLUMNS)
        self._open(folder)
        # Another archiver of this folder may have removed the file after it was made and before it was locked.
        while not self._unfinished.exists():
            self._file.close()
            self._open(folder)
        # Payloads differ, so a dictionary of payloads would cost much and save nothing. Readers do not filter by
        # payloads and lists, so they need no statistics of such columns.
        flat = [name for name, kind in GROUP_COLUMNS.items() if kind in ("int", "float", "str")]
        self._writer = parquet.ParquetWriter(
            self._file,
            self._schema,
            use_dictionary=flat,
            write_statistics=flat,
            write_page_checksum=True,
        )
        self.rows = 0
        """The rows that were written so far."""
        self.lacking: list[str] = []
        """A message for each row that was written without some columns, which could not be written."""

    def _open(self, folder: Path) -> None:
        """Makes a file with a new name, and locks it until it is closed."""
        self._path = folder / f"groups-{time.time_ns():020d}-{secrets.token_hex(4)}.parquet"
        self._unfinished = self._path.with_name(self._path.name + ".tmp")
        self._file: Any = self._unfinished.open("xb")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def add(self, rows: Sequence[Row]) -> None:
        """Writes rows, without values that their columns cannot hold. The rows are on the disk only after `finish`."""
        try:
            table = table_of(rows, GROUP_COLUMNS, self._schema)
        except _UNWRITABLE:  # a row that is not written would come back with each lease, for ever
            table = table_of([self._writable(row) for row in rows], GROUP_COLUMNS, self._schema)
        self._writer.write_table(table)
        self.rows += len(rows)

    def _writable(self, row: Row) -> Row:
        """The row, with null in the columns that cannot hold its values. Notes the first problem in `lacking`."""
        wrong: dict[str, Exception] = {}
        for name, kind in GROUP_COLUMNS.items():  # a table of one column shows whether this column has the error
            try:
                table_of([row], {name: kind}, schema_of({name: kind}))
            except _UNWRITABLE as error:
                wrong[name] = error
        if wrong:
            errors = list(wrong.values())
            self.lacking.append(f"{row['key']} without {', '.join(wrong)}: {errors[0]}")
        return row | dict.fromkeys(wrong)

    def finish(self) -> Path:
        """Forces the segment to the disk, gives the file its final name, and returns its path."""
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._unfinished.rename(self._path)
        self._file.close()  # not earlier: `remove_unfinished` removes a file `.tmp` that is not locked
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # forces the new name to the disk
        finally:
            os.close(folder)
        return self._path

    def discard(self) -> None:
        """Removes what was written."""
        self._file.close()
        self._unfinished.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> int:
    """Removes the segments that a killed process left unfinished. Returns the number of them."""
    removed = 0
    for path in folder.glob("*.parquet.tmp"):
        if not path.is_file():
            continue  # such as a FIFO, whose opening waits for a writer
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed += 1
        except (BlockingIOError, FileNotFoundError):
            continue  # an archiver writes the segment, or has just finished it
    return removed


def segments(folder: Path) -> list[Path]:
    """The finished segments, the oldest first. Raises ValueError if there is no such folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the FOLDER of `replay archive run`")
    return sorted(filter(Path.is_file, folder.glob("groups-*.parquet")))
