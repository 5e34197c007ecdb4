"""`replay checkpoint`, `checkpoints`, `export` and `import`: copies of a whole server, and of the items of a table.

A file of items is JSON lines or, with the package pyarrow, parquet. A row is one item as plain columns, for a notebook,
and back again for another server.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replay_protos.state import document, plain
from replay_server.cli.connection import TableName, TagTexts, Timeout, ask, complete_table, connect, parse_tags, reach
from replay_server.cli.items import all_items, item_document, load_tokenizer
from replay_server.cli.options import with_access
from replay_server.cli.output import AsJson, console, fail, misuse, need, plain_table, print_json, say

if TYPE_CHECKING:
    from replay_client import ReplayClient, RolloutGroup
    from replay_client.records import ItemInfo, StoredItem

FileName = Annotated[Path, typer.Argument(metavar="FILE", help="Its name ends with .jsonl or .parquet.")]


@with_access
def checkpoint(
    access: dict[str, Any],
    name: Annotated[
        str, typer.Argument(help="Its name. Checkpoints without one are removed after some newer ones.")
    ] = "",
    as_json: AsJson = False,
    timeout: Timeout = 600.0,
) -> None:
    """Write a checkpoint of all tables as of one moment, and print its name. The server goes on meanwhile."""
    with connect(access, timeout) as client:
        reach(client, timeout)
        written = ask(lambda: client.checkpoint(name))
    if as_json:
        print_json({"name": written})
    else:
        say(written)


@with_access
def checkpoints(
    access: dict[str, Any],
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every byte.")] = False,
    as_json: AsJson = False,
    timeout: Timeout = 600.0,
) -> None:
    """List the server's checkpoints, the newest first. Status 1 if one is damaged."""
    with connect(access, timeout) as client:
        reach(client, timeout)
        found = ask(lambda: client.checkpoints(verify=verify))
    if as_json:
        print_json([document(entry) for entry in found])
    else:
        from replay_client.units import byte_size

        rows = []
        for entry in found:
            made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.created))
            facts = (
                (str(entry.items), byte_size(entry.bytes), str(entry.policy_version)) if entry.intact else ("-",) * 3
            )
            state = ("verified" if verify else "complete") if entry.intact else f"damaged: {entry.problem}"
            rows.append((entry.name, made, *facts, state))
        columns = ("checkpoint", "made", "items", "bytes", "policy", "state")
        console().print(plain_table(columns, rows, left=("checkpoint", "made", "state")))
    if not all(entry.intact for entry in found):
        raise typer.Exit(1)


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
    tag: TagTexts = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only this many items, the oldest first. [all]")] = None,
    as_json: AsJson = False,
    timeout: Timeout = 60.0,
) -> None:
    """Write the items of a table into a file, a row for each. They stay in the table, and do not count as sampled."""
    from replay_client.units import counted

    format_of(file)
    tags = parse_tags(tag)
    decoder = None if tokenizer is None else load_tokenizer(tokenizer)
    with connect(access, timeout) as client:
        rows = _rows(client, all_items(client, table, tags, limit), table, decoder, payloads)
        columns = _columns(decoder is not None, payloads)
        try:
            count = ask(lambda: _write(file, columns, rows))
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


def _insert_all(client: ReplayClient, file: Path, table: str | None) -> int:
    count = 0
    for row in _read(file):
        try:
            _insert(client, row, table)
        except ValueError as error:
            raise ValueError(f"{file}, row {count + 1}: {error}") from None
        count += 1
    return count


# ------------------------------------------------------------------------------------------------ rows

Row = dict[str, Any]

_PAYLOADS_PER_CALL = 32


_GROUP_COLUMNS: dict[str, tuple[str, Callable[[RolloutGroup], Any]]] = {
    "prompt_id": ("str", lambda group: group.prompt_id),
    "group_size": ("int", lambda group: group.group_size),
    "sequence_counts": ("list of int", lambda group: _counts(group)),
    "prompt_tokens": ("int", lambda group: int(group.prompt_ids.size)),
    "context_tokens": ("list of int", lambda group: (group.prompt_lengths - group.prompt_ids.size).tolist()),
    "completion_tokens": ("list of int", lambda group: group.sampled_lengths.tolist()),
    "rewards": ("list of float", lambda group: group.rewards.tolist()),
    "advantages": ("list of float", lambda group: group.advantages.tolist()),
    "mean_logprobs": ("list of float", lambda group: _mean_logprobs(group)),
    "finish_reasons": ("list of str", lambda group: list(group.finish_reasons or ())),
    "reward_mean": ("float", lambda group: float(group.rewards.mean()) if group.rewards.size else None),
    "reward_std": ("float", lambda group: float(group.rewards.std()) if group.rewards.size else None),
}
"""What a group says of itself: by column its type (int, float, str, or list of one of them) and its value.

A list has one value for each rollout; `context_tokens`, `completion_tokens` and `mean_logprobs` have one for each of
its sequences. Null where an item is not a group."""
_ITEM_COLUMNS = {
    "key": "str",
    "table": "str",
    "priority": "float",
    "age": "float",
    "policy_version": "int",
    "staleness": "int",
    "times_sampled": "int",
    "bytes": "int",
    "tags": "json",
}
"""The columns that the server keeps of an item; of type json is an object, in parquet as text. Keys are strings: they
have 64 bits, and many readers keep only 53."""
_TEXT_COLUMNS = {"prompt": "str", "contexts": "list of str", "completions": "list of str"}
"""With a tokenizer."""
_PAYLOAD = "payload"
"""The bytes of the item, which `import` needs. In JSON lines they are in base64."""


def _columns(texts: bool, payloads: bool) -> dict[str, str]:
    """The type of each column of a file, in their order."""
    kinds = _ITEM_COLUMNS | {name: kind for name, (kind, _) in _GROUP_COLUMNS.items()}
    return kinds | (_TEXT_COLUMNS if texts else {}) | ({_PAYLOAD: "bytes"} if payloads else {})


def _rows(client: ReplayClient, items: Iterator[ItemInfo], table: str, decoder: Any, payloads: bool) -> Iterator[Row]:
    """A row for each of `items`. Leaves out items that go away meanwhile."""
    while infos := list(islice(items, _PAYLOADS_PER_CALL)):
        yield from _rows_of(client, table, infos, decoder, payloads)


def _rows_of(client: ReplayClient, table: str, infos: Any, decoder: Any, payloads: bool) -> Iterator[Row]:
    stored = {item.key: item for item in client.get([info.key for info in infos])}
    for info in infos:
        if (item := stored.get(info.key)) is None:
            continue
        group = _group_of(item)
        facts = item_document(info) | {"table": table}
        row = {name: facts[name] for name in _ITEM_COLUMNS}
        row |= {name: None if group is None else of(group) for name, (_, of) in _GROUP_COLUMNS.items()}
        if decoder is not None:
            row |= _texts(group, decoder)
        if payloads:
            row[_PAYLOAD] = bytes(item.payload)
        yield row


def _group_of(item: StoredItem) -> RolloutGroup | None:
    """The item's group; None if its payload is something else."""
    try:
        return item.group
    except ValueError:
        return None


def _texts(group: RolloutGroup | None, decoder: Any) -> Row:
    if group is None:
        return dict.fromkeys(_TEXT_COLUMNS)
    shared = group.prompt_ids.size
    return {
        "prompt": decoder.decode(group.prompt_ids.tolist()),
        "contexts": [decoder.decode(ids[shared:].tolist()) for ids in group.prompts()],
        "completions": [decoder.decode(group.completion_ids[span].tolist()) for span in group.sampled_spans()],
    }


def _counts(group: RolloutGroup) -> list[int]:
    """The number of sequences of each rollout."""
    return [1] * group.group_size if group.sequence_counts is None else group.sequence_counts.tolist()


def _mean_logprobs(group: RolloutGroup) -> list[float | None]:
    """The mean of the known log-probabilities of each sequence; null where none is known."""
    from replay_client.dashboard.group import completion_facts

    return [facts["mean_logprob"] for facts in completion_facts(group)]


def _insert(client: ReplayClient, row: Row, table: str | None) -> None:
    """Inserts the item of a row, under its own key. Raises ValueError for a row that `export` did not write."""
    from replay_client import RolloutGroup

    missing = [name for name in ("key", "table", "priority", "policy_version", _PAYLOAD) if row.get(name) is None]
    if missing:
        remedy = "; export it with payloads" if missing == [_PAYLOAD] else ""
        raise ValueError(f"there is no {', '.join(missing)}{remedy}")
    payload, tags = row[_PAYLOAD], row.get("tags")
    payload = base64.b64decode(payload) if isinstance(payload, str) else payload
    item: RolloutGroup | bytes = payload
    # A group tells the server the names of its columns, which tables may require. What is none goes back as it was.
    with suppress(ValueError):
        item = RolloutGroup.decode(payload)
    client.insert(
        item,
        {table or row["table"]: float(row["priority"])},
        key=int(row["key"]),
        policy_version=int(row["policy_version"]),
        tags=json.loads(tags) if isinstance(tags, str) else tags,
    )


# ------------------------------------------------------------------------------------------------ files

_ROWS_PER_BATCH = 256
"""Rows in memory at the same time, and in one row group of a parquet file."""


def format_of(path: Path) -> str:
    """`jsonl` or `parquet`, by the end of the file's name."""
    if path.suffix in (".jsonl", ".json"):
        return "jsonl"
    if path.suffix == ".parquet":
        need("a .parquet file", "parquet", "pyarrow")
        return "parquet"
    misuse(f"{path}: the name of the file must end with .jsonl or .parquet")


def _write(path: Path, columns: Mapping[str, str], rows: Iterable[Row]) -> int:
    """Writes the rows beside the file and renames it at the end. Returns how many there were."""
    unfinished = path.with_name(path.name + ".tmp")
    writer = _write_jsonl if format_of(path) == "jsonl" else _write_parquet
    try:
        count = writer(unfinished, columns, iter(rows))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def _read(path: Path) -> Iterator[Row]:
    """The rows of a file. Raises ValueError that names a file of another kind, OSError if it cannot be read."""
    from replay_client.json_lines import json_lines

    return (row for _, row in json_lines(path)) if format_of(path) == "jsonl" else _read_parquet(path)


def _write_jsonl(path: Path, columns: Mapping[str, str], rows: Iterator[Row]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            encoded = {
                name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
                for name, value in row.items()
            }
            file.write(json.dumps(plain(encoded), ensure_ascii=False) + "\n")
            count += 1
    return count


def _schema(columns: Mapping[str, str]) -> Any:
    import pyarrow

    kinds = {"int": pyarrow.int64(), "float": pyarrow.float64(), "str": pyarrow.string(), "bytes": pyarrow.binary()}
    kinds |= {f"list of {name}": pyarrow.list_(kind) for name, kind in kinds.items()}
    kinds["json"] = pyarrow.string()
    return pyarrow.schema([(name, kinds[kind]) for name, kind in columns.items()])


def _write_parquet(path: Path, columns: Mapping[str, str], rows: Iterator[Row]) -> int:
    import pyarrow
    from pyarrow import parquet

    schema, count = _schema(columns), 0
    texts = [name for name, kind in columns.items() if kind == "json"]
    with parquet.ParquetWriter(path, schema) as writer:
        while batch := list(islice(rows, _ROWS_PER_BATCH)):
            batch = [row | {name: json.dumps(row[name]) for name in texts} for row in batch]
            writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def _read_parquet(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowInvalid, parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH):
                yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file: {error}") from None
