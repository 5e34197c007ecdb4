"""`replay checkpoint`, `replay table export` and `import`: copy a whole server, or the items of a table.

A file of items is JSON lines or, with the package pyarrow, Parquet. Its columns have plain values, which a notebook can
use. One more column has the bytes of the items, so that an import restores exactly the same items. With `--rows
sequences` a row is one sequence of a group, as in a data set, and has no bytes.

`import` also takes rows of data sets, which have neither keys nor bytes (replay_cli/data_rows.py).
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replay_cli.archive.writing import TokenizerFolder, WhichRows, WithPayloads, check_name, write
from replay_cli.connection import TableName, TagTexts, ask, complete_table, connect, parse_tags, reach
from replay_cli.items import all_items, info_document, load_tokenizer
from replay_cli.options import Commands
from replay_cli.output import AsJson, Yes, confirm, console, plain_table, print_json, print_result
from replay_protos.state import document
from replay_protos.words import counted

if TYPE_CHECKING:
    from replay_cli.archive.rows import Form, Row
    from replay_client import ReplayClient, RolloutGroup
    from replay_client.records import CheckpointInfo, ItemInfo, StoredItem

FileName = Annotated[Path, typer.Argument(metavar="FILE", help="Its name ends with .jsonl or .parquet.")]
FileNames = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE",
        help="Files that `replay table export` wrote (items of several tables need all of theirs), or data sets with "
        "prompt_ids, completion_ids and reward.",
    ),
]


_CHECKPOINT_SECONDS = 600.0
"""Seconds that the server may take to write a checkpoint, or to read its checkpoints."""
_PAYLOADS_PER_CALL = 32
"""The most items that are read or inserted at a time."""
_ITEM_COLUMNS = ("key", "table", "priority", "policy_version", "payload")
"""The columns that a row of an item needs."""


def create(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Its name. Checkpoints without one are removed after some newer ones."),
    ] = "",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint of all tables as of one moment, and print its name. The server goes on meanwhile.

    Example: replay checkpoint create before-the-change
    """
    with connect(context, _CHECKPOINT_SECONDS) as client:
        reach(client, context)  # if no server answers, this ends the command within seconds
        if name:
            names = [entry.name for entry in ask(client.list_checkpoints)]
            if name in names:
                confirm(f"There is a checkpoint {name!r} already. Replace it?", yes)
        written = ask(lambda: client.create_checkpoint(name))
    print_result(as_json, {"name": written}, written)


def list_checkpoints(
    context: typer.Context,
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every byte.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the server's checkpoints, the newest first. Status 1 if one is damaged.

    Example: replay checkpoint list --verify
    """
    with connect(context, _CHECKPOINT_SECONDS) as client:
        reach(client, context)  # if no server answers, this ends the command within seconds
        entries = ask(lambda: client.list_checkpoints(verify=verify))
    if as_json:
        print_json([document(entry) for entry in entries])
    else:
        rows = [_checkpoint_cells(entry, verified=verify) for entry in entries]
        columns = ("checkpoint", "made", "items", "bytes", "policy", "state")
        console().print(plain_table(columns, rows, left=("checkpoint", "made", "state")))
    if not all(entry.intact for entry in entries):
        raise typer.Exit(1)


def _checkpoint_cells(entry: CheckpointInfo, *, verified: bool) -> tuple[str, ...]:
    """The cells of a checkpoint in the list. `verified`: the server has read every byte of the checkpoint."""
    from replay_dashboard.units import byte_size

    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.created))
    if not entry.intact:
        return entry.name, made, "-", "-", "-", f"not restorable: {entry.problem}"
    state = "verified" if verified else "complete"
    return entry.name, made, str(entry.items), byte_size(entry.bytes), str(entry.policy_version), state


checkpoint = Commands("Copies of a whole server.\n\nExample: replay checkpoint create")
checkpoint.add(create)
checkpoint.add(list_checkpoints, name="list")


def export(
    context: typer.Context,
    table: TableName,
    file: FileName,
    tokenizer: TokenizerFolder = None,
    payloads: WithPayloads = True,
    tag: TagTexts = None,
    rows: WhichRows = "groups",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only this many items, the oldest first. [default: all]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the items of a table into a file. They stay in the table, and do not count as sampled.

    Example: replay table export replay replay.parquet --no-payloads
    """
    from replay_cli.archive.rows import Form

    tags = parse_tags(tag)
    form = Form(sequences=rows == "sequences", text=load_tokenizer(tokenizer), payloads=payloads)
    with connect(context, 60.0) as client:
        infos = islice(all_items(client, table, tags), limit)  # a limit of None: all items
        file_rows = _rows(client, infos, table, form)
        # `infos` and `file_rows` are iterators, so the items are read from the server only while `write` writes their
        # rows.
        write(file, form, file_rows, {"table": table}, as_json)


def import_items(
    context: typer.Context,
    files: FileNames,
    table: Annotated[
        str | None,
        typer.Option(
            help="Insert into this table. [default: the table that each row names]", autocompletion=complete_table
        ),
    ] = None,
    new_keys: Annotated[
        bool,
        typer.Option(
            "--new-keys",
            help="Insert under new keys, so that items that were deleted or consumed before come back too.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Insert the items of files under the keys that they had. Items that are already there stay as they are. Status 1
    if some of the items are not there afterwards.

    Example: replay table import replay.parquet
    """
    for file in files:
        check_name(file)
    imported = Imported()
    with connect(context, 60.0) as client:
        ask(lambda: _insert_all(client, files, table, imported, new_keys=new_keys))
    result = {"files": [str(file) for file in files], **imported.document()}
    print_result(as_json, result, imported.words(files))
    if imported.gone:
        raise typer.Exit(1)


@dataclass
class Imported:
    """Counts the items of the files by what became of them."""

    inserted: int = 0
    """Items that were not in the server before, and are there after their insert."""
    present: int = 0
    """Items that were in the server before."""
    gone: int = 0
    """Items that were not in the server before, and are not there after their insert either."""

    def document(self) -> dict[str, Any]:
        """The numbers as JSON."""
        return {"items": self.inserted, "present": self.present, "gone": self.gone}

    def words(self, files: Sequence[Path]) -> str:
        """The numbers as a line for people."""
        words = f"{counted(self.inserted, 'item')} of {', '.join(map(str, files))} inserted"
        if self.present:
            verb = "was" if self.present == 1 else "were"
            words += f"; {self.present} {verb} there before"
        if self.gone:
            words += (
                f"; {self.gone} not there: taken or deleted, before or meanwhile, or evicted at once by a full table "
                f"(--new-keys inserts what was taken or deleted)"
            )
        return words


def _insert_all(
    client: ReplayClient, files: Sequence[Path], table: str | None, imported: Imported, *, new_keys: bool
) -> None:
    """Inserts the items of the files into `table`, and counts them in `imported`.

    If `table` is None, each item goes into the tables that its rows name. An item that is in several files is inserted
    once, into all of its tables.
    """
    several = len(files) > 1
    # Stays empty if each item joins only one table, either `table` or the table of its row.
    priorities: dict[str, dict[str, float]] = {}
    if several and table is None:
        priorities = _priorities_of_all(files)
    known_keys: set[str] = set()  # with several files: the keys of all batches so far
    for file in files:
        rows = _items_of(file, table)
        while batch := list(islice(rows, _PAYLOADS_PER_CALL)):
            if several:
                # Leave out items of earlier batches, because they have been inserted into all of their tables already.
                batch = [(number, row) for number, row in batch if str(row.get("key")) not in known_keys]
                known_keys.update(str(row.get("key")) for _, row in batch)
            _insert_batch(client, file, batch, table, priorities, imported, new_keys=new_keys)


def _insert_batch(
    client: ReplayClient,
    file: Path,
    batch: Sequence[tuple[int, Row]],
    table: str | None,
    priorities: Mapping[str, Mapping[str, float]],
    imported: Imported,
    *,
    new_keys: bool,
) -> None:
    """Inserts the items of some rows of `file`, and counts them in `imported`.

    `batch`: each row after its row number. `priorities`: item key as text -> the priority of the item in each table. An
    item that is not in `priorities` goes into `table` or, if that is None, into the table of its row.

    An item that was in the server before counts as present, even if it leaves the server during this call.
    """
    # With `new_keys`, an item gets its key only when it is inserted.
    keys = [] if new_keys else [int(row["key"]) for _, row in batch]
    # `get` leaves out items that the server does not have.
    items_before = {item.key: item for item in client.get(keys, payloads=False)}
    for number, row in batch:
        own_priority = {table or row["table"]: float(row["priority"])}
        wanted = priorities.get(str(row["key"]), own_priority)
        try:
            if new_keys:
                keys.append(_insert(client, row, wanted, key=None))
            else:
                key = int(row["key"])
                _refuse_other_tables(items_before.get(key), wanted)
                _insert(client, row, wanted, key=key)
        except ValueError as error:
            raise ValueError(f"{file}, row {number}: {error}") from None
    keys_before = items_before.keys()
    keys_after = {item.key for item in client.get(keys, payloads=False)}
    imported.present += len(keys_before)
    imported.inserted += len(keys_after - keys_before)
    imported.gone += len(set(keys) - keys_after - keys_before)


def _refuse_other_tables(item: StoredItem | None, wanted: Mapping[str, float]) -> None:
    """Raises ValueError if `item` is in the server already, but not in all the tables of `wanted`.

    An insert does not change an item that the server has, so it would not add the item to the missing tables. `item` is
    None if the server does not have it.
    """
    # An item without tables has left all of its tables. The server has it only until it is sent to a reader.
    if item is None or not item.tables:
        return
    missing = wanted.keys() - item.tables.keys()
    if missing:
        raise ValueError(
            f"item {item.key} is there, in {', '.join(item.tables)}, and cannot join {', '.join(sorted(missing))}: "
            f"delete it and give the files of all its tables to one `replay table import`"
        )


def _priorities_of_all(files: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Reads the priority of each item in each of its tables: item key as text -> table name -> priority.

    Raises ValueError for a row that lacks key, table or priority.
    """
    from replay_cli.archive.files import read_rows

    columns = ("key", "table", "priority")
    priorities: dict[str, dict[str, float]] = {}
    for file in files:
        for number, row in enumerate(read_rows(file, columns), start=1):
            if any(row.get(name) is None for name in columns):
                raise ValueError(f"{file}, row {number}: there is no key, table or priority")
            by_table = priorities.setdefault(str(row["key"]), {})
            by_table[row["table"]] = float(row["priority"])
    return priorities


# ------------------------------------------------------------------------------------------------ rows


def _rows(client: ReplayClient, items: Iterator[ItemInfo], table: str, form: Form) -> Iterator[Row]:
    """Yields the rows of `items`. An item that leaves the server before its payload is read has no rows."""
    while infos := list(islice(items, _PAYLOADS_PER_CALL)):
        keys = [info.key for info in infos]
        stored = {item.key: item for item in client.get(keys)}
        for info in infos:
            if info.key in stored:
                facts = info_document(info) | {"table": table}
                yield from form.rows(facts, stored[info.key].payload)


def _items_of(path: Path, table: str | None) -> Iterator[tuple[int, Row]]:
    """Yields the items of a file as rows, each after its row number.

    If the file is a data set, its rows become groups. Such a group goes into `table` if its rows name no table. Raises
    a ValueError that names file and row.
    """
    from replay_cli.archive.files import read_rows
    from replay_cli.data_rows import items_of

    try:
        numbered_rows = enumerate(read_rows(path), start=1)
        for number, row in items_of(numbered_rows, table):
            _check(number, row)
            yield number, row
    except ValueError as error:
        message = str(error)
        if not message.startswith(str(path)):  # `read_rows` names the file itself
            message = f"{path}, {message}"
        raise ValueError(message) from None


def _check(number: int, row: Row) -> None:
    """Raises ValueError unless the row is an item with its payload, as `export` writes it for `import`."""
    missing = [name for name in _ITEM_COLUMNS if row.get(name) is None]
    if missing:
        raise ValueError(f"row {number}: there is no {', '.join(missing)}{_remedy(row, missing)}")
    key = str(row["key"])
    is_number = key.isascii() and key.isdecimal()
    if not is_number or int(row["key"]) >= 1 << 64:
        raise ValueError(f"row {number}: key is {row['key']!r:.80}, not a whole number below 2^64")
    if not isinstance(row["table"], str):
        raise ValueError(f"row {number}: table is {row['table']!r:.80}, not a name")
    for name, kind in (("priority", float), ("policy_version", int)):
        try:
            kind(row[name])
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"row {number}: {name} is {row[name]!r:.80}, not a number") from None
    try:
        # The results are not needed here. These calls raise ValueError if the row cannot be inserted.
        _tags_of(row)
        _item_of(row)
    except ValueError as error:
        raise ValueError(f"row {number}: {error}") from None


def _remedy(row: Row, missing: Sequence[str]) -> str:
    """The remedy for a row that lacks the columns `missing`, as the end of a message. Empty: no remedy is known."""
    from replay_cli.data_rows import NEEDED

    if missing == ["payload"]:  # exported without payloads, or as sequences
        return "; export it with payloads, a row for each item"
    if "key" in missing and "payload" in missing:  # perhaps a row of a data set
        missing_of_data_set = [name for name in NEEDED if row.get(name) is None]
        return (
            f", as `replay table export` writes them; and a sequence of your own needs {', '.join(NEEDED)}, of "
            f"which there is no {', '.join(missing_of_data_set)}, only {', '.join(map(str, row)) or 'nothing'}"
        )
    return ""


def _tags_of(row: Row) -> Mapping[str, Any] | None:
    """The tags of a row; None: the row has no tags.

    The row has them as an object or as the JSON text of an object. Raises ValueError for anything else.
    """
    tags = row.get("tags")
    if not tags:
        return None
    decoded = tags
    try:
        if isinstance(tags, str):
            decoded = json.loads(tags)
    except RecursionError:
        raise ValueError("tags are nested too deeply") from None
    if decoded is not None and not isinstance(decoded, Mapping):  # None: the JSON text was "null"
        raise ValueError(f"tags are {tags!r:.80}, not an object of names and values")
    return decoded


def _item_of(row: Row) -> RolloutGroup | bytes:
    """The item of a row: a group, or bytes of another kind. Raises ValueError for a damaged payload."""
    from replay_client import RolloutGroup
    from replay_client.rollout import MAGIC

    payload = row["payload"]
    if isinstance(payload, str):
        try:
            payload = base64.b64decode(payload, validate=True)
        except ValueError:
            raise ValueError(f"payload is no base64, as `export` writes it: {row['payload']!r:.80}") from None
    if not isinstance(payload, bytes):
        raise ValueError(f"payload is {payload!r:.80}, not base64 or bytes")
    # The insert of a RolloutGroup tells the server the names of the group's columns, which tables may require. Bytes of
    # another kind have no columns, and are inserted as they are.
    try:
        return RolloutGroup.decode(payload)
    except ValueError as error:
        # The last byte of MAGIC is the version of the format. If the row has rewards, the item was a group, even if its
        # first bytes are damaged too.
        was_group = payload.startswith(MAGIC[:-1]) or row.get("rewards") is not None
        if was_group:
            raise ValueError(f"payload is damaged: {error}") from None
    return payload


def _insert(client: ReplayClient, row: Row, priorities: Mapping[str, float], *, key: int | None) -> int:
    """Inserts the item of a row into the tables of `priorities`. Returns `key`, or a new key if `key` is None."""
    return client.insert(
        _item_of(row),
        priorities,
        key=key,
        policy_version=int(row["policy_version"]),
        tags=_tags_of(row),
    )
