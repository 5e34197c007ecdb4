"""Row files: reads rows, by their number, from files and data sets in their usual forms.

* A file of JSON lines, or with a JSON array, is read whole. It may be packed by gzip. It may be a pipe, or "-", which
  stands for stdin.
* A Parquet file is read whole, into an Arrow table. A row is converted to Python objects when it is needed.
* From a folder of such files, the files of one split are read.
* A folder that the package `datasets` has saved, or a data set on the hub, is read by that package, row by row.

The first bytes of a file, not its name, decide its form. A row that cannot be read raises an error only when it is
needed. The error names the file and the row.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import os
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, Protocol, cast

from replay_generator.prompts.values import without_nulls

STDIN = "-"
"""The path of the standard input."""
_GZIP = b"\x1f\x8b"
"""The first bytes of a gzip file."""
_PARQUET = b"PAR1"
"""The first bytes of a Parquet file."""
_OTHER_FILES = (
    (b"PK\x03\x04", "a zip file", "unpack it with unzip"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "unpack it with unzstd"),
    (b"BZh", "a bzip2 file", "unpack it with bunzip2"),
    (b"\xfd7zXZ", "an xz file", "unpack it with unxz"),
    (b"ARROW1", "an Arrow file", "write it as Parquet with pyarrow, or give the folder that `datasets` saved"),
    (codecs.BOM_UTF16_LE, "text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
    (codecs.BOM_UTF16_BE, "text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
)
"""Forms of files that cannot be read, but that users give by mistake. Each entry has the first bytes of such a file,
the name of the form in the error, and the remedy."""
_ONLY_LINES = (
    (_GZIP, "a gzip file", "unpack it with gunzip"),
    (_PARQUET, "a Parquet file", "write it as JSON lines or, to import items, let its name end with .parquet"),
)
"""Further forms that `json_lines` cannot read, because it reads only lines of JSON. The entries are as in
_OTHER_FILES."""
_ROWS_AT_ONCE = 256
"""The number of rows of an Arrow table that are converted to Python objects at once."""
_HEAD = 8
"""The number of first bytes that decide the form of a file."""
_START_BYTES = 1 << 16
"""The number of first bytes by which `_values` decides whether a file has one row in each line."""
_TABLES = {".csv": "read_csv", ".tsv": "read_table", ".xlsx": "read_excel"}
"""Suffix of a file -> the function of pandas that reads the file. Files with these suffixes are refused, because their
values have no types."""
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")
"""The suffixes of packed files."""
_LINES_ENDS = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
"""The names of files with JSON lines end so."""
_JSON_ENDS = (".json", ".json.gz")
"""The names of other JSON files end so."""
_FILE_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json", ".txt", *_PACKED, *_TABLES)
"""A source with one of these suffixes is a file, and not a data set on the hub."""
_LFS = b"version https://git-lfs"
"""The beginning of a pointer file, which Git LFS leaves in the place of a large file that it has not fetched yet."""
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> the words that name it in paths. A file belongs to the first split that has a word in the file's path."""


class Rows(Protocol):
    """Rows that are read by number. Each row has a name for error messages."""

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns of all rows; None: each row has its own fields."""

    @property
    def in_memory(self) -> bool:
        """True if it costs little to read all rows."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...

    def place(self, index: int) -> str:
        """The name of a row in errors: its file and its number."""
        ...

    def each(self) -> Iterator[Any]:
        """Yields all rows in their order. In place of a row that cannot be read, yields a ValueError."""
        ...


def place_of(rows: Any, index: int) -> str:
    """The name of a row in errors: what `rows.place` returns. If `rows` has no such method, the number of the row."""
    if hasattr(rows, "place"):
        return str(rows.place(index))
    return f"row {index + 1} (index {index}) of the prompts"


# ------------------------------------------------------------------------------------------------ JSON


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a file, a pipe, or stdin. Yields a file object with its bytes, unpacked if they are packed by gzip.

    The file object is seekable, so that it can be read more than once. If the caller's block reads damaged gzip data,
    the block ends with ValueError.
    """
    with contextlib.ExitStack() as stack:
        if os.fspath(path) == STDIN:  # stdin has descriptor 0, which stays open
            file: IO[bytes] = stack.enter_context(open(0, "rb", closefd=False))
        else:
            file = stack.enter_context(Path(path).open("rb"))
        if not file.seekable():  # a pipe
            file = io.BytesIO(file.read())
        if not _head(file).startswith(_GZIP):
            yield file
            return
        try:
            unpacked = gzip.GzipFile(fileobj=file)
            stack.callback(unpacked.close)
            # The caller's block reads the file, so the errors of reading come out of this `yield`.
            yield cast("IO[bytes]", unpacked)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: a damaged gzip file: {error}") from error


def _head(file: IO[bytes]) -> bytes:
    """Returns the first bytes of a file, and seeks back to its beginning."""
    head = file.read(_HEAD)
    file.seek(0)
    return head


def json_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number and the object of each line of a file in UTF-8 that has one JSON object in each line.

    Empty lines and a byte order mark are skipped. Raises ValueError, which names file, line and remedy, for a file of
    another form, and for a line that is no JSON object.
    """
    with Path(path).open("rb") as file:
        if file.seekable():  # the form of a pipe is not checked, because its first bytes cannot be read twice
            _refuse_others(path, file, _ONLY_LINES)
        for number, row in _lines(path, file):
            if isinstance(row, ValueError):
                raise row
            yield number, row


def _lines(path: object, file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    """Yields the number and the object of each line that is not empty.

    If a line is no JSON object, yields a ValueError in the place of the object.
    """
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            yield number, _object(_decoded(line))
        except ValueError as error:
            yield number, ValueError(f"{path}, line {number}: {error}")


def _object(text: str) -> dict[str, Any]:
    """Parses the text of a line, which must be one JSON object. Raises ValueError for any other text."""
    try:
        row = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error}: it is no JSON, and each line must be an object") from error
    if not isinstance(row, dict):  # JSON of another type, such as a list
        raise ValueError(f"a {type(row).__name__} where an object belongs")
    return row


def _decoded(data: bytes) -> str:
    """Decodes bytes in UTF-8. Raises ValueError, which names the remedy, for other bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        wrong_byte = data[error.start : error.start + 1]
        raise ValueError(
            f"byte {error.start + 1}, {wrong_byte!r}, is not UTF-8: if the file is in Latin-1, convert it with iconv "
            "-f ISO-8859-1 -t UTF-8"
        ) from error


def _refuse_others(path: object, file: IO[bytes], others: Sequence[tuple[bytes, str, str]] = ()) -> None:
    """Raises ValueError, which names the remedy, for a file of a known form that cannot be read.

    These are files with a suffix of _TABLES, pointer files of Git LFS, and the forms of _OTHER_FILES. `others` are
    further forms to refuse, with entries as in _OTHER_FILES.
    """
    name = str(path)
    line = _conversion_command_line(Path(name))
    if line is not None:
        raise ValueError(f"{name}: its values have no types, so it is not read; convert it: {line}")
    head = _head(file)
    # `head` has at most _HEAD bytes, fewer than _LFS. A file that has fewer bytes than _HEAD is no pointer file.
    if _LFS.startswith(head) and len(head) == _HEAD:
        raise ValueError(f"{name}: git has not fetched this file yet, and left a note in its place: run git lfs pull")
    for start, kind, remedy in (*_OTHER_FILES, *others):
        if head.startswith(start):
            raise ValueError(f"{name}, line 1: this is {kind}, and not lines of JSON in UTF-8: {remedy}")


def _conversion_command_line(path: Path) -> str | None:
    """The command line that converts a file with a suffix of _TABLES to JSON lines; None: it has another suffix."""
    unpacked = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    reader = _TABLES.get(unpacked.suffix.lower())
    if reader is None:
        return None
    target = str(unpacked.with_suffix(".jsonl"))
    source = str(path)
    return (
        f'python -c "import pandas; pandas.{reader}({source!r}, dtype=str).to_json({target!r}, '
        "orient='records', lines=True)\""
    )


def _values(name: str, file: IO[bytes]) -> list[Any] | None:
    """Reads the values of a file that is one JSON array or one JSON object; None: the file must be read line by line.

    Afterwards, `file` is at its beginning again. Raises ValueError for a damaged array, and for values that are nested
    too deeply.
    """
    start = file.read(_START_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    file.seek(0)
    is_array = start.startswith(b"[")
    if not is_array and not _begins_with_multiline_object(start):
        return None
    data = file.read().removeprefix(codecs.BOM_UTF8)
    file.seek(0)
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(f"{name}: it is nested too deeply") from None
    except UnicodeDecodeError:
        return None  # the reader of lines raises an error that names the line
    except json.JSONDecodeError as error:
        first_line = start.partition(b"\n")[0]
        # If the first line is JSON by itself, the file is not one array, but has a value in each line.
        if is_array and not _is_json(first_line):
            raise ValueError(f"{name}: it begins as a JSON array, and is damaged: {error}") from error
        return None
    if isinstance(value, dict):
        return [value]
    if isinstance(value, list):
        return value
    return None


def _begins_with_multiline_object(start: bytes) -> bool:
    """True if a file begins with an object that is written over several lines. `start`: the beginning of the file."""
    first_line, line_end, _ = start.partition(b"\n")
    if not first_line.startswith(b"{") or not line_end:
        return False
    return not _is_json(first_line)


def _is_json(line: bytes) -> bool:
    """True if the line is JSON of any type."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


# ------------------------------------------------------------------------------------------------ rows of files


@dataclass
class FileRows:
    """The rows of files, one file after the other. A row that cannot be read raises an error when it is needed."""

    parts: list[Rows] = field(default_factory=list)
    """The rows of each file."""
    in_memory = True

    def __post_init__(self) -> None:
        """Computes the ends of the files, and the columns that at least one of them has."""
        self._ends = list(accumulate(len(part) for part in self.parts))
        """For each file, the number of rows in this file and in all files before it."""
        self.columns: Sequence[str] | None = None
        if self.parts and all(part.columns is not None for part in self.parts):
            names: list[str] = []
            for part in self.parts:
                names += part.columns or ()
            self.columns = list(dict.fromkeys(names))  # without duplicates

    def __len__(self) -> int:
        if not self._ends:
            return 0
        return self._ends[-1]

    def _part(self, index: int) -> tuple[Rows, int]:
        """The rows of the file that has this row, and the index of the row in that file."""
        file_index = bisect_right(self._ends, index)  # the first file that ends behind the row
        if index < 0 or file_index == len(self.parts):
            raise IndexError(index)
        part = self.parts[file_index]
        start = self._ends[file_index] - len(part)
        return part, index - start

    def __getitem__(self, index: int) -> Any:
        part, index_in_part = self._part(index)
        return part[index_in_part]

    def place(self, index: int) -> str:
        part, index_in_part = self._part(index)
        return part.place(index_in_part)

    def each(self) -> Iterator[Any]:
        for part in self.parts:
            yield from part.each()


@dataclass
class _ListedRows:
    """The rows of a file of JSON, in a list."""

    name: str
    word: str
    """The word before a number in errors: "line" or "row"."""
    rows: list[tuple[int, Any]]
    """The number of each row, from 1, and the row. In the place of a row that cannot be read, there is a ValueError."""
    columns: Sequence[str] | None = None
    in_memory: bool = True

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        _, row = self.rows[index]
        if isinstance(row, ValueError):
            raise row
        return row

    def place(self, index: int) -> str:
        number, _ = self.rows[index]
        return f"{self.name}, {self.word} {number}"

    def each(self) -> Iterator[Any]:
        for _, row in self.rows:
            yield row


@dataclass
class ArrowRows:
    """Rows of a table of pyarrow, or of a data set of the package `datasets`.

    `template_columns`: the columns from which a chat template gets values. In these columns, null fields are left out,
    because Arrow adds a null field to an object if any other object of the column has this field.
    """

    name: str
    rows: Any
    columns: Sequence[str]
    template_columns: Sequence[str]
    in_memory: bool

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        """Converts the row to Python objects. Raises ValueError for values that are nested too deeply."""
        if not 0 <= index < len(self.rows):
            raise IndexError(index)
        if hasattr(self.rows, "to_pylist"):  # a table of pyarrow
            (row,) = self.rows.slice(index, 1).to_pylist()
        else:
            row = self.rows[index]
        return row_of_arrow(row, self.template_columns)

    def place(self, index: int) -> str:
        return f"{self.name}, row {index + 1} (index {index})"

    def each(self) -> Iterator[Any]:
        """Yields all rows in their order, as in Rows.

        A table of pyarrow converts _ROWS_AT_ONCE rows at once, which is faster than one row at a time.
        """
        for start in range(0, len(self.rows), _ROWS_AT_ONCE):
            if hasattr(self.rows, "to_pylist"):  # a table of pyarrow
                rows = self.rows.slice(start, _ROWS_AT_ONCE).to_pylist()
            else:
                end = min(start + _ROWS_AT_ONCE, len(self.rows))
                rows = [self.rows[index] for index in range(start, end)]
            for row in rows:
                try:
                    yield row_of_arrow(row, self.template_columns)
                except ValueError as error:
                    yield error


def row_of_arrow(row: Mapping[str, Any], template_columns: Sequence[str]) -> dict[str, Any]:
    """Copies a row, without the null fields inside the values of its `template_columns`: see ArrowRows.

    Raises ValueError for values that are nested too deeply.
    """
    cleaned = dict(row)
    for name in template_columns:
        if cleaned.get(name) is not None:
            cleaned[name] = without_nulls(cleaned[name])
    return cleaned


def numbered_rows(rows: Any, template_columns: Sequence[str]) -> Any:
    """Makes the rows of a DataFrame, a data set of the package `datasets`, or a table of pyarrow readable by number.

    Returns other rows unchanged, also those of a streamed data set. `template_columns`: see ArrowRows. Raises
    ValueError for a data set from which no split was chosen.
    """
    if hasattr(rows, "iloc"):  # a DataFrame of pandas, in which rows[0] is a column
        return rows.to_dict("records")
    if isinstance(rows, Mapping):
        splits = ", ".join(map(str, rows))
        raise ValueError(f"the prompts are in splits, {splits}: choose one, such as rows['train']")
    # A streamed data set has no length. Its `__getitem__` always fails: it has one because it is a data set of torch.
    if is_of_arrow(rows) and hasattr(rows, "__len__"):
        return ArrowRows("the prompts", rows, rows.column_names, template_columns, in_memory=False)
    return rows


def is_of_arrow(rows: Any) -> bool:
    """True for rows of the package `datasets`, or of pyarrow."""
    return type(rows).__module__.partition(".")[0] in ("datasets", "pyarrow") and hasattr(rows, "column_names")


def _rows_of_file(path: str | os.PathLike[str], template_columns: Sequence[str]) -> Rows:
    """Reads the rows of one file. Raises ValueError for a file of an unknown form, or a damaged file.

    A row that cannot be read raises an error only when it is needed.
    """
    name = str(path)
    with _opened(path) as file:
        _refuse_others(path, file)
        if _head(file).startswith(_PARQUET):
            table = _parquet(name, file)
            return ArrowRows(name, table, table.column_names, template_columns, in_memory=True)
        values = _values(name, file)
        if values is None:
            return _ListedRows(name, "line", list(_lines(path, file)))
        rows: list[tuple[int, Any]] = []
        for number, value in enumerate(values, start=1):
            if isinstance(value, dict):
                rows.append((number, value))
            else:
                error = ValueError(f"{name}, row {number}: a {type(value).__name__} where an object belongs")
                rows.append((number, error))
        return _ListedRows(name, "row", rows)


def _parquet(name: str, file: IO[bytes]) -> Any:
    """Reads a Parquet file into a table of pyarrow.

    Raises ImportError if pyarrow is not installed, and ValueError for a damaged file.
    """
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ImportError(f"{name} is a Parquet file, which needs the package pyarrow: pip install pyarrow") from error
    try:
        return parquet.read_table(file)
    except (ArrowException, OSError) as error:
        raise ValueError(f"{name}: not a Parquet file: {error}") from None


def file_rows(path: str | os.PathLike[str], template_columns: Sequence[str] = ()) -> FileRows:
    """Reads the rows of one file. `template_columns`: see ArrowRows.

    Raises ValueError for a file of an unknown form or a damaged file, OSError for a file that cannot be opened or read,
    and ImportError for a Parquet file if pyarrow is not installed.
    """
    return FileRows([_rows_of_file(path, template_columns)])


# ------------------------------------------------------------------------------------------------ folders


def _folder_rows(folder: Path, split: str, template_columns: Sequence[str]) -> FileRows:
    """Reads the rows of the files of a split, in the order of the names of these files.

    Raises ValueError if the folder has no files of the split.
    """
    files = _data_files(folder)
    by_split: dict[str, list[Path]] = {}
    for path in files:
        named_split = _split_of(path.relative_to(folder))
        by_split.setdefault(named_split, []).append(path)
    if list(by_split) == [""]:  # no file is named after a split
        by_split = {"train": files}
    chosen = by_split.get(split)
    if not chosen:  # `split` may be a word that is not in _SPLITS: choose the files that have it in their names
        chosen = [path for path in by_split.get("", ()) if split in path.name]
    if not chosen:
        names = ", ".join(sorted(name or "others" for name in by_split))
        raise ValueError(f"{folder} has no split {split!r}, only {names}: see --split")
    return FileRows([_rows_of_file(path, template_columns) for path in chosen])


def _data_files(folder: Path) -> list[Path]:
    """Finds the data files of a folder. If the folder itself has none, finds those below its subfolders.

    Raises ValueError if there are none either. Also raises ValueError if there are data files below several subfolders
    that are not all named after splits, because these subfolders are several data sets.
    """
    own_files = _files_of_one_kind(folder)
    if own_files:
        return own_files
    files_by_folder: dict[Path, list[Path]] = {}
    for path in _folders(folder):
        files = _files_below(path)
        if files:
            files_by_folder[path] = files
    if not files_by_folder:
        raise ValueError(
            f"{folder} holds no prompts: neither files *.parquet, *.jsonl or *.json, nor what `datasets` saved"
            f"{_remedy_for_other_files(folder)}"
        )
    all_are_splits = all(_split_of(Path(path.name)) for path in files_by_folder)
    if len(files_by_folder) > 1 and not all_are_splits:
        names = ", ".join(path.name for path in files_by_folder)
        raise ValueError(f"{folder} has several data sets, {names}: give the folder of one of them")
    all_files: list[Path] = []
    for files in files_by_folder.values():
        all_files += files
    return all_files


def _files_below(folder: Path) -> list[Path]:
    """Finds the data files of a folder. If the folder itself has none, finds those of its subfolders."""
    files = _files_of_one_kind(folder)
    if not files:
        for subfolder in _folders(folder):
            files += _files_of_one_kind(subfolder)
    return files


def _folders(folder: Path) -> list[Path]:
    """The subfolders of a folder, without those whose names begin with a dot."""
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]


def _files_of_one_kind(folder: Path) -> list[Path]:
    """Finds the data files of a folder: its Parquet files, or its files of JSON lines, or its other JSON files.

    Other JSON files are the last choice, because beside data files they may only describe these. Raises ValueError for
    a folder with both Parquet files and files of JSON lines, because one kind would be ignored.
    """
    files = _files(folder)
    parquet = [path for path in files if path.name.lower().endswith(".parquet")]
    json_lines_files = [path for path in files if path.name.lower().endswith(_LINES_ENDS)]
    other_json = [path for path in files if path.name.lower().endswith(_JSON_ENDS)]
    if parquet and json_lines_files:
        raise ValueError(
            f"{folder} holds files of two kinds, such as {parquet[0].name} and {json_lines_files[0].name}: give one "
            "file, or a folder of one kind"
        )
    return parquet or json_lines_files or other_json


def _files(folder: Path) -> list[Path]:
    """The files of a folder, except those whose names begin with a dot, which operating systems and editors make."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]


def _remedy_for_other_files(folder: Path) -> str:
    """The end of an error: how to convert or unpack the first file that needs it; "": no file of the folder does."""
    for path in _files(folder):
        command_line = _conversion_command_line(path)
        if command_line is not None:
            return f"; convert {path.name}: {command_line}"
        if path.suffix.lower() in _PACKED:
            return f"; unpack {path.name}"
    return ""


def _split_of(path: Path) -> str:
    """The split after which a file, or its folder, is named; "": its path names no split."""
    words = re.split(r"[^a-z0-9]+", str(path).lower())
    for split, names in _SPLITS.items():
        if any(name in words for name in names):
            return split
    return ""


# ------------------------------------------------------------------------------------------------ all sources


def open_rows(source: str, *, split: str = "train", template_columns: Sequence[str] = ()) -> Rows:
    """Opens the rows of a file, a folder, or a data set on the hub. `template_columns`: see ArrowRows.

    If a data set on the hub has several subsets, `source` also names one of them, as in "openai/gsm8k:main". Raises
    ValueError for a source without rows or of an unknown form, OSError for a source that does not exist or cannot be
    read, and ImportError if a package is missing.
    """
    path = Path(source)
    if not source:
        raise ValueError("the prompts have no name: give a file, a folder, or a data set")
    if source != STDIN and not path.exists() and _is_path(source):
        raise FileNotFoundError(f"there is no file or folder {source}")
    if source == STDIN or (path.exists() and not path.is_dir()):  # a file or a pipe
        rows: Rows = file_rows(source, template_columns)
    elif path.is_dir() and not _is_saved_data_set(path):
        rows = _folder_rows(path, split, template_columns)
    else:  # a folder that `datasets` has saved, or the name of a data set on the hub
        rows = _data_set(source, split, template_columns)
    if not len(rows):
        raise ValueError(f"{source} has no prompts")
    return rows


def _is_saved_data_set(folder: Path) -> bool:
    """True if the package `datasets` has saved this folder."""
    return (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists()


def _is_path(source: str) -> bool:
    """True if a source is named like a file or folder, and not like a data set on the hub, `owner/name`."""
    if source.startswith(("/", ".", "~")):
        return True
    name, _, _ = source.partition(":")  # a subset of a data set may follow
    path = Path(name)
    return len(path.parts) > 2 or path.suffix.lower() in _FILE_SUFFIXES


def _data_set(source: str, split: str, template_columns: Sequence[str]) -> ArrowRows:
    """Loads a split of a data set, from the hub or from a folder that the package `datasets` has saved.

    Raises ImportError if this package is not installed, and ValueError or OSError if it cannot load the split.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{source!r} is no file, and for a data set the package `datasets` is needed: pip install datasets"
        ) from error
    name, _, subset = source.partition(":")
    try:
        if Path(source).is_dir():
            loaded = datasets.load_from_disk(source)
        else:
            loaded = datasets.load_dataset(name, subset or None)
    except (ValueError, OSError, ImportError):  # callers expect these errors
        raise
    except Exception as error:  # the package may raise any error for a data set that it cannot load
        raise ValueError(f"{source!r} is no data set that can be loaded: {type(error).__name__}: {error}") from error
    if isinstance(loaded, Mapping):
        if split not in loaded:
            raise ValueError(f"{source} has no split {split!r}, only {', '.join(loaded)}")
        loaded = loaded[split]
    return ArrowRows(source, loaded, loaded.column_names, template_columns, in_memory=False)
