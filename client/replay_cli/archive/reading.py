"""Reading: looks into the segments of an archive. Each item counts once, however often a kill had it written.

Readers need no server, and disturb no archiver: a segment that is there never changes. Filters are given to pyarrow,
which reads only the columns and the parts of the files that they need.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replay_cli.archive.files import schema_of
from replay_cli.archive.rows import Row
from replay_cli.archive.segments import GROUP_COLUMNS, segments

log = logging.getLogger("replay_cli.archive")

_ROWS_PER_READ = 64
"""Rows with their payloads in memory at the same time."""


@dataclass(frozen=True)
class Wanted:
    """Which items; what is empty or None does not matter."""

    keys: Collection[str] = ()
    prompt_id: str | None = None
    least_version: int | None = None
    most_version: int | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    """Their values as text."""

    def expression(self) -> Any:
        """The conditions on columns, by which pyarrow filters rows as it reads them; None: there are none."""
        from pyarrow import compute

        parts = []
        if self.keys:
            parts.append(compute.field("key").isin(list(self.keys)))
        if self.prompt_id is not None:
            parts.append(compute.field("prompt_id") == self.prompt_id)
        if self.least_version is not None:
            parts.append(compute.field("policy_version") >= self.least_version)
        if self.most_version is not None:
            parts.append(compute.field("policy_version") <= self.most_version)
        whole = None
        for part in parts:
            whole = part if whole is None else whole & part
        return whole

    def has_tags(self, row: Row) -> bool:
        tags = json.loads(row["tags"]) if row["tags"] else {}
        return all(str(tags.get(name, "")) == value for name, value in self.tags.items())


class Archive:
    """The archive in a folder. Methods raise ValueError if there is no such folder. A file that is damaged is left out,
    from where the damage begins, and named in the log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def groups(self, wanted: Wanted, columns: Sequence[str] | None = None, payloads: bool = False) -> Iterator[Row]:
        """The items in the order in which they were archived, each once. `payloads`: with their bytes."""
        chosen = [name for name in columns or GROUP_COLUMNS if payloads or name != "payload"]
        needed = list(dict.fromkeys([*chosen, "key", "tags"]))
        seen: set[str] = set()
        for row in self._rows(needed, wanted.expression()):
            if row["key"] not in seen and (not wanted.tags or wanted.has_tags(row)):
                seen.add(row["key"])
                yield {name: row[name] for name in chosen}

    def _rows(self, columns: Sequence[str], which: Any) -> Iterator[Row]:
        from pyarrow import ArrowException, dataset

        how = dataset.ParquetFragmentScanOptions(page_checksum_verification=True)
        checked = dataset.ParquetFileFormat(default_fragment_scan_options=how)
        for path in segments(self.folder):
            try:
                found = dataset.dataset(str(path), format=checked, schema=schema_of(GROUP_COLUMNS))
                for batch in found.to_batches(columns=list(columns), filter=which, batch_size=_ROWS_PER_READ):
                    yield from batch.to_pylist()
            except (ArrowException, OSError) as error:
                said = "replay: %s is damaged, and what cannot be read of it is left out: %s"
                log.warning(said, path, " ".join(str(error).split()))
