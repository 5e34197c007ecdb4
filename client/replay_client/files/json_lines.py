"""JSON lines: the objects of a text file that has one in each line, as prompts and exported items have them."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OTHER_FILES = (
    (b"\x1f\x8b", "a gzip file", "unpack it with gunzip"),
    (b"PK\x03\x04", "a zip file", "unpack it with unzip"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "unpack it with unzstd"),
    (b"PAR1", "a Parquet file", "write it as JSON lines or, to import items, let its name end with .parquet"),
    (codecs.BOM_UTF16_LE, "text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
    (codecs.BOM_UTF16_BE, "text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
)
"""The first bytes of files that people give by mistake. Each has the words of the error, with the remedy."""


def json_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file in UTF-8 with one JSON object a line, each with the number of its line.

    Empty lines do not count, nor does a byte order mark. Raises ValueError that names file and line, with the remedy,
    for anything else.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            for start, kind, remedy in _OTHER_FILES if number == 1 else ():
                if line.startswith(start):
                    raise ValueError(f"{path}, line 1: this is {kind}, and not lines of JSON in UTF-8: {remedy}")
            line = line if number > 1 else line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                row = json.loads(_decoded(line))
                if not isinstance(row, dict):
                    raise ValueError(f"a {type(row).__name__} where an object belongs")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            yield number, row


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte {error.start + 1}, {line[error.start : error.start + 1]!r}, is not UTF-8: if the file is in "
            "Latin-1, convert it with iconv -f ISO-8859-1 -t UTF-8"
        ) from error
