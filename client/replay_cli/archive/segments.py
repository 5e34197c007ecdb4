"""Segments: the Parquet files of an archive. A file is there as a whole, or not at all.

A segment is written under a name that ends with `.tmp`, forced to the disk, and renamed. Before, no reader sees it.
Its writer holds a lock on it, so that who starts after a kill knows what nobody will finish, and removes it.

It has the items in the rows of `replay table export`, with the time of their insert. Names sort by the time at which
segments were begun.
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
GROUP_COLUMNS = GROUP_ROWS.columns() | {"inserted_at": "float"}
"""`inserted_at` in seconds since the epoch."""
_UNWRITABLE = (ValueError, TypeError, OverflowError, NotImplementedError)
"""What pyarrow raises for a value that its column cannot hold."""


class SegmentWriter:
    """A segment that is being written. Raises OSError where the disk does."""

    def __init__(self, folder: Path) -> None:
        from pyarrow import parquet

        self._path = folder / f"groups-{time.time_ns():020d}-{secrets.token_hex(4)}.parquet"
        self._unfinished = self._path.with_name(self._path.name + ".tmp")
        self._schema = schema_of(GROUP_COLUMNS)
        self._file: Any = self._unfinished.open("xb")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        # A dictionary of payloads would cost much and spare nothing, and readers filter by other columns.
        flat = [name for name, kind in GROUP_COLUMNS.items() if kind in ("int", "float", "str")]
        how = {"use_dictionary": flat, "write_statistics": flat, "write_page_checksum": True}
        self._writer = parquet.ParquetWriter(self._file, self._schema, **how)
        self.rows = 0
        self.lacking: list[str] = []
        """What is wrong with each row that went without columns that could not be written."""

    def add(self, rows: Sequence[Row]) -> None:
        """Writes rows, without values that their columns cannot hold. They are in the file when it is finished."""
        try:
            table = table_of(rows, GROUP_COLUMNS, self._schema)
        except _UNWRITABLE:  # were the row left, or the writer to end, it would come again for ever
            table = table_of([self._writable(row) for row in rows], GROUP_COLUMNS, self._schema)
        self._writer.write_table(table)
        self.rows += len(rows)

    def _writable(self, row: Row) -> Row:
        wrong = {}
        for name, kind in GROUP_COLUMNS.items():
            try:
                table_of([row], {name: kind}, schema_of({name: kind}))
            except _UNWRITABLE as error:
                wrong[name] = error
        if wrong:
            self.lacking.append(f"{row['key']} without {', '.join(wrong)}: {next(iter(wrong.values()))}")
        return row | dict.fromkeys(wrong)

    def finish(self) -> Path:
        """Forces the segment to the disk, and gives it its name."""
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._unfinished.rename(self._path)
        self._file.close()
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name, too
        finally:
            os.close(folder)
        return self._path

    def discard(self) -> None:
        """Removes what was written."""
        self._file.close()
        self._unfinished.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> int:
    """Removes the segments that a killed process left unfinished. Returns how many there were."""
    removed = 0
    for path in filter(Path.is_file, folder.glob("*.parquet.tmp")):  # to open a FIFO waits for its writer
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed += 1
        except (BlockingIOError, FileNotFoundError):
            continue  # somebody writes it, or has just finished it
    return removed


def segments(folder: Path) -> list[Path]:
    """The finished segments, the oldest first. Raises ValueError if there is no such folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the DIR of `replay archive run`")
    return sorted(filter(Path.is_file, folder.glob("groups-*.parquet")))
