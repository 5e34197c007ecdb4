"""Reads the segments of an archive. Each item is returned once, even if it was written again after a kill.

Readers need no server. They disturb no archiver, because a finished segment never changes. pyarrow applies the filters,
and reads only the columns and the parts of the files that are needed.
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
"""The most rows, with their payloads, that are in memory at the same time."""


def read_groups(
    folder: Path,
    columns: Iterable[str] = tuple(GROUP_COLUMNS),
    where: Any = None,
    tags: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """Yields each item of the archive in a folder once, in the order in which the items were archived.

    `where`: the condition on columns by which pyarrow filters rows as it reads them; None: no condition. `tags`: the
    tags that an item must have, with their values as text. A damaged file is read up to the damage, and the log names
    it. Raises ValueError if there is no such folder.
    """
    chosen = list(columns)
    needed = list(dict.fromkeys([*chosen, "key", "tags"]))  # without duplicates, in this order
    wanted_tags = tags or {}
    seen_keys = set[str]()
    for row in _rows(folder, needed, where):
        row["tags"] = json.loads(row["tags"] or "{}")
        # A tag that the item does not have counts as a tag with the empty text.
        has_tags = all(str(row["tags"].get(name, "")) == value for name, value in wanted_tags.items())
        if has_tags and row["key"] not in seen_keys:
            seen_keys.add(row["key"])
            yield {name: row[name] for name in chosen}


def _rows(folder: Path, columns: list[str], where: Any) -> Iterator[Row]:
    """Yields the rows of all segments for which the condition `where` is true. An item may come twice.

    Logs a warning for a damaged segment, and skips the rest of it.
    """
    from pyarrow import ArrowException, dataset

    options = dataset.ParquetFragmentScanOptions(page_checksum_verification=True)
    with_checksums = dataset.ParquetFileFormat(default_fragment_scan_options=options)
    for path in segments(folder):
        try:
            segment = dataset.dataset(str(path), format=with_checksums, schema=schema_of(GROUP_COLUMNS))
            for batch in segment.to_batches(columns=columns, filter=where, batch_size=_ROWS_PER_READ):
                yield from batch.to_pylist()
        except (ArrowException, OSError) as error:
            message = "replay: %s is damaged, and what cannot be read of it is left out: %s"
            log.warning(message, path, " ".join(str(error).split()))
