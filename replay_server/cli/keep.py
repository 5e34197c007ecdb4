"""`replay checkpoint`, `checkpoints`, `export` and `import`: copies of a whole server, and of the items of a table.

A file of items is JSON lines or, with the package pyarrow, parquet. Its columns are plain, for a notebook; the bytes of
the items are a column too, so that another server gets back exactly what there was. A row is one item or, with `--rows
sequences`, one sequence of a group, as data sets have them: then the first row of each group has its bytes, and the
others have none. Such rows may come in any order. `import` waits until it has all of a group, and inserts it then.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
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
FileNames = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...", help="Files that `replay export` wrote. Items of several tables need all of theirs."
    ),
]


class RowKind(StrEnum):
    """What a row of a file holds."""

    GROUPS = "groups"
    """An item; of a group, one row with lists."""
    SEQUENCES = "sequences"
    """One sequence of a group, with its tokens."""


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
    rows: Annotated[
        RowKind, typer.Option(help="A row for each item, or one for each sequence of its group, with the tokens.")
    ] = RowKind.GROUPS,
    limit: Annotated[int | None, typer.Option(min=1, help="Only this many items, the oldest first. [all]")] = None,
    as_json: AsJson = False,
    timeout: Timeout = 60.0,
) -> None:
    """Write the items of a table into a file. They stay in the table, and do not count as sampled."""
    from replay_client.units import counted

    format_of(file)
    tags = parse_tags(tag)
    form = Form(rows, None if tokenizer is None else load_tokenizer(tokenizer), payloads)
    with connect(access, timeout) as client:
        found = _rows(client, all_items(client, table, tags, limit), table, form)
        try:
            count = ask(lambda: _write(file, form.columns(), found))
        except OSError as error:
            fail(error)
    if as_json:
        print_json({"table": table, "file": str(file), "items": form.items, "rows": count})
    else:
        more = f", in {counted(count, 'row')}" if rows is RowKind.SEQUENCES else ""
        say(f"{counted(form.items, 'item')} of {table} written to {file}{more}")


@with_access
def import_items(
    access: dict[str, Any],
    files: FileNames,
    table: Annotated[
        str | None,
        typer.Option(help="Insert into this table. [the table that each row names]", autocompletion=complete_table),
    ] = None,
    as_json: AsJson = False,
    timeout: Timeout = 60.0,
) -> None:
    """Insert the items of files that `replay export` wrote, under their keys. Items that are there stay.

    Status 1 if rows of a group are missing. Such a group is not inserted.
    """
    for file in files:
        format_of(file)
    done = Imported()
    with connect(access, timeout) as client:
        try:
            ask(lambda: _insert_all(client, files, table, done))
        except OSError as error:
            fail(error)
    if as_json:
        print_json({"files": [str(file) for file in files]} | done.document())
    else:
        say(done.words(files))
    if done.incomplete:
        fail(done.incomplete)


@dataclass
class Imported:
    """What became of the items of the files."""

    inserted: int = 0
    present: int = 0
    """They were there before."""
    gone: int = 0
    """They are not there after their insert."""
    incomplete: str = ""
    """Which groups lack rows; empty: none."""

    def document(self) -> dict[str, Any]:
        return {"items": self.inserted, "present": self.present, "gone": self.gone}

    def words(self, files: Sequence[Path]) -> str:
        from replay_client.units import counted

        words = f"{counted(self.inserted, 'item')} of {', '.join(map(str, files))} inserted"
        if self.present:
            words += f"; {self.present} {'was' if self.present == 1 else 'were'} there before"
        if self.gone:
            words += (
                f"; {self.gone} not there: taken or deleted, before or meanwhile, or let go at once by a full table"
            )
        return words


def _insert_all(client: ReplayClient, files: Sequence[Path], table: str | None, done: Imported) -> None:
    """Inserts what the files hold. An item that is in several files goes into all their tables at once."""
    priorities = _priorities_of_all(files) if len(files) > 1 and table is None else {}
    seen: set[str] = set()
    for file in files:
        rows = _whole_items(file, done)
        while some := list(islice(rows, _PAYLOADS_PER_CALL)):
            # A second file with the same items has nothing new.
            fresh = [(number, row) for number, row in some if len(files) == 1 or str(row.get("key")) not in seen]
            seen.update(str(row.get("key")) for _, row in fresh if len(files) > 1)
            keys = [int(row["key"]) for _, row in fresh]
            before = {item.key: item for item in client.get(keys, payloads=False)}
            for number, row in fresh:
                own = {table or row["table"]: float(row["priority"])}
                try:
                    wanted = priorities.get(str(row["key"]), own)
                    _refuse_other_tables(before.get(int(row["key"])), wanted)
                    _insert(client, row, wanted)
                except ValueError as error:
                    raise ValueError(f"{file}, row {number}: {error}") from None
            after = {item.key for item in client.get(keys, payloads=False)}
            done.present += len(before)
            done.inserted += len(after - before.keys())
            done.gone += len(set(keys) - after - before.keys())


def _refuse_other_tables(item: StoredItem | None, wanted: Mapping[str, float]) -> None:
    if item is not None and item.tables and (missing := wanted.keys() - item.tables.keys()):
        raise ValueError(
            f"item {item.key} is there, in {', '.join(item.tables)}, and cannot join {', '.join(sorted(missing))}: "
            f"delete it and give the files of all its tables to one `replay import`"
        )


def _priorities_of_all(files: Sequence[Path]) -> dict[str, dict[str, float]]:
    """The priority of each item in each of its tables, by its key."""
    found: dict[str, dict[str, float]] = {}
    for file in files:
        for number, row in enumerate(_read(file, ("key", "table", "priority")), start=1):
            if any(row.get(name) is None for name in ("key", "table", "priority")):
                raise ValueError(f"{file}, row {number}: there is no key, table or priority")
            found.setdefault(str(row["key"]), {})[row["table"]] = float(row["priority"])
    return found


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


_SEQUENCE_COLUMNS = {
    "prompt_id": "str",
    "rollouts": "int",
    "rollout": "int",
    "sequences": "int",
    "sequence": "int",
    "policy_version_end": "int",
    "prompt_ids": "list of int32",
    "context_ids": "list of int32",
    "completion_ids": "list of int32",
    "loss_mask": "list of bool",
    "logprobs": "list of float32",
    "token_advantages": "list of float32",
    "reward": "float",
    "advantage": "float",
    "finish_reason": "str",
    "turns": "json",
    "sampling": "json",
    "meta": "json",
}
"""What a sequence says of itself, with `--rows sequences`. Null where an item is not a group.

It is sequence number `sequence` of the `sequences` of rollout number `rollout` of `rollouts`. Its tokens are those of
`prompt_ids`, which all sequences of the group share, of `context_ids` and of `completion_ids`. The lists below have an
entry for each of `completion_ids`: `loss_mask` says which are trained on, and an unknown log-probability is NaN, in
JSON lines null. Without advantages of tokens, `token_advantages` is null."""
_SEQUENCE_TEXTS = {"prompt": "str", "context": "str", "completion": "str"}
"""With a tokenizer."""


@dataclass
class Form:
    """Which rows and columns an export writes."""

    kind: RowKind
    decoder: Any
    """None: no texts."""
    payloads: bool
    items: int = field(default=0, init=False)
    """How many were written so far."""

    def columns(self) -> dict[str, str]:
        """The type of each column of the file, in their order."""
        if self.kind is RowKind.SEQUENCES:
            kinds, texts = _ITEM_COLUMNS | _SEQUENCE_COLUMNS, _SEQUENCE_TEXTS
        else:
            kinds, texts = _ITEM_COLUMNS | {name: kind for name, (kind, _) in _GROUP_COLUMNS.items()}, _TEXT_COLUMNS
        return kinds | ({} if self.decoder is None else texts) | ({_PAYLOAD: "bytes"} if self.payloads else {})

    def rows(self, facts: Row, item: StoredItem) -> Iterator[Row]:
        """The rows of an item. `facts`: what the server says of it."""
        self.items += 1
        group, columns = _group_of(item), self.columns()
        if self.kind is RowKind.SEQUENCES:
            found = [{}] if group is None else sequence_rows(group, self.decoder)
        else:
            found = [{} if group is None else {name: of(group) for name, (_, of) in _GROUP_COLUMNS.items()}]
            if group is not None and self.decoder is not None:
                found[0] |= _texts(group, self.decoder)
        for number, row in enumerate(found):
            if self.payloads and not number:
                row[_PAYLOAD] = bytes(item.payload)
            yield dict.fromkeys(columns) | {name: facts[name] for name in _ITEM_COLUMNS} | row


def _rows(client: ReplayClient, items: Iterator[ItemInfo], table: str, form: Form) -> Iterator[Row]:
    """The rows of `items`. Leaves out items that go away meanwhile."""
    while infos := list(islice(items, _PAYLOADS_PER_CALL)):
        stored = {item.key: item for item in client.get([info.key for info in infos])}
        for info in infos:
            if (item := stored.get(info.key)) is not None:
                yield from form.rows(item_document(info) | {"table": table}, item)


def sequence_rows(group: RolloutGroup, decoder: Any = None) -> list[Row]:
    """The columns of each sequence of a group, by _SEQUENCE_COLUMNS, and its texts if there is a decoder."""
    from replay_client.dashboard.turns import turns_of

    shared, trained_T, rows = group.prompt_ids.size, group.trained_mask, list[Row]()
    places = ((rollout, part) for rollout, parts in enumerate(_counts(group)) for part in range(parts))
    prompts, spans, counts = group.prompts(), group.sampled_spans(), _counts(group)
    meta = {name: value for name, value in group.meta.items() if name != "turns"}
    for (rollout, part), before, span, turns in zip(places, prompts, spans, turns_of(group), strict=True):
        row: Row = {
            "prompt_id": group.prompt_id,
            "rollouts": group.group_size,
            "rollout": rollout,
            "sequences": counts[rollout],
            "sequence": part,
            "policy_version_end": None if group.policy_version_end is None else int(group.policy_version_end),
            "prompt_ids": group.prompt_ids,
            "context_ids": before[shared:],
            "completion_ids": group.completion_ids[span],
            "loss_mask": trained_T[span],
            "logprobs": group.rollout_logprobs[span],
            "token_advantages": None if group.token_advantages is None else group.token_advantages[span],
            "reward": float(group.rewards[rollout]),
            "advantage": float(group.advantages[rollout]),
            "finish_reason": None if group.finish_reasons is None else str(group.finish_reasons[rollout]),
            "turns": [turn.document() for turn in turns],
            "sampling": group.sampling,
            "meta": meta,
        }
        if decoder is not None:
            row |= {name: decoder.decode(row[f"{name}_ids"].tolist()) for name in ("prompt", "context", "completion")}
        rows.append(row)
    return rows


def _group_of(item: StoredItem) -> RolloutGroup | None:
    """The item's group; None if its payload is something else."""
    try:
        return item.group
    except ValueError:
        return None


def _texts(group: RolloutGroup, decoder: Any) -> Row:
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


def _check(row: Row) -> None:
    """Raises ValueError for a row that `export` did not write."""
    missing = [name for name in ("key", "table", "priority", "policy_version", _PAYLOAD) if row.get(name) is None]
    if missing:
        remedy = "; export it with payloads" if missing == [_PAYLOAD] else ""
        raise ValueError(f"there is no {', '.join(missing)}{remedy}")
    if not (str(row["key"]).isascii() and str(row["key"]).isdecimal() and int(row["key"]) < 1 << 64):
        raise ValueError(f"key is {row['key']!r:.80}, not a whole number below 2^64")


def _insert(client: ReplayClient, row: Row, priorities: Mapping[str, float]) -> None:
    """Inserts the item of a row into these tables, under its own key."""
    from replay_client import RolloutGroup

    payload, tags = _bytes_of(row), row.get("tags")
    item: RolloutGroup | bytes = payload
    # A group tells the server the names of its columns, which tables may require. What is none goes back as it was.
    with suppress(ValueError):
        item = RolloutGroup.decode(payload)
    client.insert(
        item,
        priorities,
        key=int(row["key"]),
        policy_version=int(row["policy_version"]),
        tags=json.loads(tags) if isinstance(tags, str) else tags,
    )


def _bytes_of(row: Row) -> bytes:
    payload: bytes | str = row[_PAYLOAD]
    return base64.b64decode(payload) if isinstance(payload, str) else payload


# ------------------------------------------------------------------------------------------------ sequences


def _whole_items(path: Path, done: Imported) -> Iterator[tuple[int, Row]]:
    """A row for each item of a file, with its number. What has a row for each sequence is put together by its key.

    Raises ValueError that names file and row. Groups that lack rows are left out, and `done` says so.
    """
    waiting: dict[str, dict[tuple[int, int], tuple[int, Row]]] = {}
    for number, row in enumerate(_read(path), start=1):
        try:
            if row.get("rollouts") is None or row.get("key") is None:
                _check(row)
                yield number, row
                continue
            parts = waiting.setdefault(str(row["key"]), {})
            parts[_number(row, "rollout"), _number(row, "sequence")] = number, row
            if len(parts) >= _number(row, "rollouts") and not _lacks(parts):
                whole = _put_together(waiting.pop(str(row["key"])))
                _check(whole)
                yield number, whole
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from None
    if waiting and not done.incomplete:
        key, parts = next(iter(waiting.items()))
        others = f", and so are {len(waiting) - 1} more" if len(waiting) > 1 else ""
        done.incomplete = (
            f"{path}: item {key} is incomplete, without {_lacks(parts)}{others}: nothing of it was inserted; keep all "
            f"rows of an item together, or export it again"
        )


def _number(row: Row, name: str) -> int:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r:.80}, not a number from 0: `replay export --rows sequences` writes it")
    return value


def _lacks(parts: Mapping[tuple[int, int], tuple[int, Row]]) -> str:
    """The first sequence of a group that is not among `parts`, in words; empty: all are there."""
    sizes = {rollout: _number(row, "sequences") for (rollout, _), (_, row) in parts.items()}
    (_, first) = next(iter(parts.values()))
    for rollout in range(_number(first, "rollouts")):
        if rollout not in sizes:
            return f"rollout {rollout}"
        for sequence in range(sizes[rollout]):
            if (rollout, sequence) not in parts:
                return f"sequence {sequence} of rollout {rollout}"
    return ""


def _put_together(parts: Mapping[tuple[int, int], tuple[int, Row]]) -> Row:
    """The row of the whole item. Its bytes are in one of the rows, and the columns of all rows have to agree with them.

    Raises ValueError for a column that was changed: `import` would insert the item without the change.
    """
    from replay_client import RolloutGroup

    rows = [row for _, row in parts.values()]
    whole = next((row for row in rows if row.get(_PAYLOAD) is not None), rows[0])
    if whole.get(_PAYLOAD) is None:
        return whole
    expected = {(row["rollout"], row["sequence"]): row for row in sequence_rows(RolloutGroup.decode(_bytes_of(whole)))}
    for place, (number, row) in parts.items():
        for name, kind in _SEQUENCE_COLUMNS.items():
            if name not in row or place not in expected:
                continue
            given, stored = row[name], expected[place][name]
            if not _agree(kind, given, stored):
                raise ValueError(
                    f"{name} of sequence {place[1]} of rollout {place[0]} is {given!r:.60} in row {number}, and "
                    f"{plain(stored)!r:.60} in the payload, which is what `import` inserts: change groups in Python"
                )
    return whole


def _agree(kind: str, given: Any, stored: Any) -> bool:
    """Whether a column of a file has the value that the payload has."""
    if given is None or stored is None:
        return plain(stored) is None and given is None
    if kind == "json":
        return bool((json.loads(given) if isinstance(given, str) else given) == plain(stored))
    if not kind.startswith("list of "):
        return bool(plain(given) == plain(stored))
    if stored.dtype.kind != "f":
        return bool(given == stored.tolist())
    import numpy as np

    try:
        values = np.array(given, dtype=np.float64)  # null becomes NaN, which is an unknown number
    except (TypeError, ValueError):
        return False
    return np.array_equal(values, stored, equal_nan=True)


# ------------------------------------------------------------------------------------------------ files

_ROWS_PER_BATCH = 256
"""Rows in memory at the same time, and in one row group of a parquet file."""
_ROWS_PER_READ = 32
"""Rows of a parquet file in memory at the same time. A row may hold thousands of tokens, each an object of Python."""


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


def _read(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows of a file; with `columns`, these are enough.

    Raises ValueError that names a file of another kind, OSError if it cannot be read.
    """
    from replay_client.json_lines import json_lines

    return (row for _, row in json_lines(path)) if format_of(path) == "jsonl" else _read_parquet(path, columns)


def _write_jsonl(path: Path, columns: Mapping[str, str], rows: Iterator[Row]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({name: _plain(value) for name, value in row.items()}, ensure_ascii=False) + "\n")
            count += 1
    return count


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    # `plain` looks at each entry of a list, and the tokens of a group may be a million.
    whole = getattr(getattr(value, "dtype", None), "kind", "") in ("i", "b")
    return value.tolist() if whole else plain(value)


def _schema(columns: Mapping[str, str]) -> Any:
    import pyarrow

    kinds = {"int": pyarrow.int64(), "float": pyarrow.float64(), "str": pyarrow.string(), "bytes": pyarrow.binary()}
    kinds |= {"int32": pyarrow.int32(), "float32": pyarrow.float32(), "bool": pyarrow.bool_()}
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
            batch = [row | {name: _json_of(row[name]) for name in texts} for row in batch]
            writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def _json_of(value: Any) -> str | None:
    return None if value is None else json.dumps(plain(value))


def _read_parquet(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    from pyarrow import ArrowInvalid, parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_PER_READ, columns=columns):
                yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file: {error}") from None
