"""Writes the segments of an archive, which are Parquet files. A reader sees a whole segment, or no segment.

A segment is written under a name that ends with `.tmp`, forced to the disk, and renamed. Readers ignore files with such
a name. The writer holds a lock on the file. If the writer is killed, the next archiver finds the file without a lock,
and removes it.

The rows of a segment have the form that `replay table export` writes, with one more column: the time of the insert. The
names of the segments sort in the order in which the segments were begun.
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
"""The form of the rows of a segment: one for each item, with its payload and without texts."""
GROUP_COLUMNS = GROUP_ROWS.columns() | {"inserted_at": "float"}
"""Name of each column of a segment -> its type. `inserted_at` is in seconds since the epoch."""
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
        # Only columns of single values get a dictionary and statistics. Payloads differ, so a dictionary of payloads
        # would cost much and save nothing. Readers do not filter by payloads or lists, so these need no statistics.
        scalar_columns = [name for name, kind in GROUP_COLUMNS.items() if kind in ("int", "float", "str")]
        self._writer = parquet.ParquetWriter(
            self._file,
            self._schema,
            use_dictionary=scalar_columns,
            write_statistics=scalar_columns,
            write_page_checksum=True,
        )
        self.rows = 0
        """The number of rows that were written so far."""
        self.lacking: list[str] = []
        """A message for each row with values that their columns cannot hold, so that null was written instead."""

    def _open(self, folder: Path) -> None:
        """Makes a file with a new name in `folder`, and locks it. The lock lasts until the file is closed."""
        self._path = folder / f"groups-{time.time_ns():020d}-{secrets.token_hex(4)}.parquet"
        self._unfinished = self._path.with_name(self._path.name + ".tmp")
        self._file: Any = self._unfinished.open("xb")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def add(self, rows: Sequence[Row]) -> None:
        """Writes rows, with null for values that their columns cannot hold. `finish` forces the rows to the disk."""
        try:
            table = table_of(rows, GROUP_COLUMNS, self._schema)
        except _UNWRITABLE:
            # Write these rows as well. Otherwise their items would come back whenever their lease ends, for ever.
            table = table_of([self._writable(row) for row in rows], GROUP_COLUMNS, self._schema)
        self._writer.write_table(table)
        self.rows += len(rows)

    def _writable(self, row: Row) -> Row:
        """The row, with null in the columns that cannot hold its values. Adds a message to `lacking` if there are such
        columns."""
        errors: dict[str, Exception] = {}  # name of a column that cannot hold its value -> the error
        for name, kind in GROUP_COLUMNS.items():
            one_column = {name: kind}
            try:
                table_of([row], one_column, schema_of(one_column))
            except _UNWRITABLE as error:
                errors[name] = error
        if errors:
            first_error = next(iter(errors.values()))
            self.lacking.append(f"{row['key']} without {', '.join(errors)}: {first_error}")
        return row | dict.fromkeys(errors)

    def finish(self) -> Path:
        """Forces the segment to the disk, gives the file its final name, and returns its path."""
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._unfinished.rename(self._path)
        # Close the file only after the rename. This ends the lock, and `remove_unfinished` of another archiver removes
        # an unfinished file that is not locked.
        self._file.close()
        folder_descriptor = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder_descriptor)  # forces the new name to the disk
        finally:
            os.close(folder_descriptor)
        return self._path

    def discard(self) -> None:
        """Closes and removes the unfinished segment."""
        self._file.close()
        self._unfinished.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> int:
    """Removes the segments that killed archivers left unfinished. Returns the number of removed segments."""
    removed = 0
    for path in folder.glob("*.parquet.tmp"):
        if not path.is_file():
            continue  # to open it could block: a FIFO, for example, waits for a writer
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed += 1
        except (BlockingIOError, FileNotFoundError):
            continue  # an archiver is writing the segment, or has just renamed or removed it
    return removed


def segments(folder: Path) -> list[Path]:
    """The finished segments, the oldest first. Raises ValueError if there is no such folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the FOLDER of `replay archive run`")
    return sorted(path for path in folder.glob("groups-*.parquet") if path.is_file())
