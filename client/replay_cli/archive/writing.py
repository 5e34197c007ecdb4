"""Writes items or groups as rows into a file, for `replay table export` and `replay archive export`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from replay_cli.connection import ask
from replay_cli.output import misuse, need, print_result
from replay_protos.words import counted

if TYPE_CHECKING:
    from replay_cli.archive.rows import Form, Row

WhichRows = Annotated[
    Literal["groups", "sequences"],
    typer.Option(help="A row for each item, or one for each sequence of its group, with the tokens."),
]
TokenizerFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Folder with a tokenizer.json: adds prompt and completions as text."),
]
WithPayloads = Annotated[
    bool,
    typer.Option(
        "--payloads/--no-payloads",
        help="Write the bytes of the items, which `import` needs. Rows of sequences have none.",
    ),
]


def write(file: Path, form: Form, rows: Iterator[Row], origin: dict[str, str], as_json: bool) -> None:
    """Writes an export into a file, and prints how many items and rows the export has.

    `form`: the form that makes `rows`. `origin`: the field of the JSON output that says where the rows are from, such
    as {"table": "replay"}.
    """
    from replay_cli.archive.files import write_rows

    check_name(file)
    count = ask(lambda: write_rows(file, form.columns(), rows))
    # `form` has counted the items while it made the rows. Without `sequences`, each item has one row.
    in_rows = f", in {counted(count, 'row')}" if form.sequences else ""
    words = f"{counted(form.items, 'item')} of {', '.join(origin.values())} written to {file}{in_rows}"
    print_result(as_json, origin | {"file": str(file), "items": form.items, "rows": count}, words)


def check_name(path: Path) -> None:
    """Ends the command if the file's name has another ending than .jsonl, .json or .parquet.

    Also ends the command for .parquet if pyarrow is missing.
    """
    if path.suffix == ".parquet":
        need("a .parquet file", "parquet", "pyarrow")
    elif path.suffix not in (".jsonl", ".json"):
        misuse(f"{path}: the name of the file must end with .jsonl or .parquet")
