"""`replay export` and `replay import`: the items of a table as a file, for a notebook or another server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from replay_server.cli.connection import TableName, Timeout, ask, complete_table, connect, with_access
from replay_server.cli.output import AsJson, fail, print_json, say

FileName = Annotated[Path, typer.Argument(metavar="FILE", help="Its name ends with .jsonl or .parquet.")]


@with_access
def export(
    access: dict[str, Any],
    table: TableName,
    file: FileName,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the model or tokenizer: adds prompt and completions as text.")
    ] = None,
    payloads: Annotated[
        bool, typer.Option("--payloads/--no-payloads", help="Write the bytes of the items, which `import` needs.")
    ] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="Only this many items, the oldest first. [all]")] = None,
    as_json: AsJson = False,
    timeout: Timeout = 60.0,
) -> None:
    """Write the items of a table into a file, a row for each. They stay in the table, and do not count as sampled."""
    from replay_client.units import counted
    from replay_server.cli import export_files, export_rows
    from replay_server.cli.show import load_tokenizer

    export_files.format_of(file)
    decoder = None if tokenizer is None else load_tokenizer(tokenizer)
    with connect(access, timeout) as client:
        rows = export_rows.rows(client, table, limit, decoder, payloads)
        columns = export_rows.columns(decoder is not None, payloads)
        try:
            count = ask(lambda: export_files.write(file, columns, rows))
        except OSError as error:
            fail(error)
    if as_json:
        print_json({"table": table, "file": str(file), "items": count})
    else:
        say(f"{counted(count, 'item')} of {table} written to {file}")


@with_access
def import_items(
    access: dict[str, Any],
    file: FileName,
    table: Annotated[
        str | None,
        typer.Option(help="Insert into this table. [the table that each row names]", autocompletion=complete_table),
    ] = None,
    as_json: AsJson = False,
    timeout: Timeout = 60.0,
) -> None:
    """Insert the items of a file that `replay export` wrote, under their keys. Items that are there stay."""
    from replay_client.units import counted

    with connect(access, timeout) as client:
        try:
            count = ask(lambda: _insert_all(client, file, table))
        except OSError as error:
            fail(error)
    if as_json:
        print_json({"file": str(file), "items": count})
    else:
        say(f"{counted(count, 'item')} of {file} inserted")


def _insert_all(client: Any, file: Path, table: str | None) -> int:
    from replay_server.cli import export_files
    from replay_server.cli.export_rows import insert

    count = 0
    for row in export_files.read(file):
        try:
            insert(client, row, table)
        except ValueError as error:
            raise ValueError(f"{file}, row {count + 1}: {error}") from None
        count += 1
    return count
