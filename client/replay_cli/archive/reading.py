"""Reading: looks into the segments of an archive. Each item counts once, however often a kill had it written.

Readers need no server, and disturb no archiver: a segment that is there never changes. Filters are given to pyarrow,
which reads only the columns and the parts of the files that they need.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from replay_cli.archive.files import schema_of
from replay_cli.archive.rows import Row
from replay_cli.archive.segments import GROUP_COLUMNS, segments

log = logging.getLogger("replay_cli.archive")

_ROWS_PER_READ = 64
"""Rows with their payloads in memory at the same time."""


def read_groups(
    folder: Path,
    columns: Iterable[str] = tuple(GROUP_COLUMNS),
    where: Any = None,
    tags: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """The items of the archive in a folder, in the order in which they were archived, each once.

    `where`: the condition on columns by which pyarrow filters rows as it reads them; None: there is none. `tags`: those
    that an item has, and their values as text. A file that is damaged is left out, from where the damage begins, and
    named in the log. Raises ValueError if there is no such folder.
    """
    chosen = list(columns)
    known_keys = set[str]()
    for row in _rows(folder, list(dict.fromkeys([*chosen, "key", "tags"])), where):
        row["tags"] = json.loads(row["tags"] or "{}")
        having = all(str(row["tags"].get(name, "")) == value for name, value in (tags or {}).items())
        if having and row["key"] not in known_keys:
            known_keys.add(row["key"])
            yield {name: row[name] for name in chosen}


def _rows(folder: Path, columns: list[str], where: Any) -> Iterator[Row]:
    from pyarrow import ArrowException, dataset

    how = dataset.ParquetFragmentScanOptions(page_checksum_verification=True)
    checked = dataset.ParquetFileFormat(default_fragment_scan_options=how)
    for path in segments(folder):
        try:
            found = dataset.dataset(str(path), format=checked, schema=schema_of(GROUP_COLUMNS))
            for batch in found.to_batches(columns=columns, filter=where, batch_size=_ROWS_PER_READ):
                yield from batch.to_pylist()
        except (ArrowException, OSError) as error:
            message = "replay: %s is damaged, and what cannot be read of it is left out: %s"
            log.warning(message, path, " ".join(str(error).split()))
