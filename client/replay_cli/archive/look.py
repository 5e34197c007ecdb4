"""`replay archive list`, `step` and `export`: show the groups of an archive, and write them into files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from itertools import islice
from operator import and_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from replay_cli.archive.writing import TokenizerFolder, WhichRows, WithPayloads, write
from replay_cli.connection import ask, parse_key, parse_tags
from replay_cli.items import load_tokenizer
from replay_cli.options import option, taking
from replay_cli.output import AsJson, console, fail, misuse, need, plain_table, print_json, say
from replay_protos.words import counted

if TYPE_CHECKING:
    from replay_cli.archive.outcomes import Outcome
    from replay_cli.archive.rows import Form, Row

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the archive, as of `replay archive run`.")]
_STEPS = "steps.jsonl of the trainer: says what it trained on."
_SELECTION = (
    option("steps_path", _STEPS, Path, metavar="FILE"),
    option("key", "Only this item; repeatable.", list[int], parser=parse_key, metavar="KEY"),
    option("prompt_id", "Only groups with this prompt_id."),
    option("policy_version", "Only groups of this policy version, or of a range such as 40..50."),
    option("tag", "Only items with this tag; repeatable.", list[str], metavar="NAME=VALUE"),
    option("outcome", "Only groups that ended so.", Literal["trained", "left-out", "unusable", "unknown"]),
)
"""Options that select groups of an archive, by their properties and by their outcome."""
_SHOWN = ("key", "prompt_id", "policy_version", "group_size", "reward_mean", "reward_std", "bytes", "tags", "table")
"""The columns that `replay archive list` shows of a group, beside the outcome."""


@taking(_SELECTION)
def list_groups(
    selection: dict[str, Any],
    folder: Folder,
    limit: Annotated[int, typer.Option(min=1, help="The most groups to print, the oldest first.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List the groups of an archive, and what became of each.

    Example: replay archive list runs/archive --steps-path runs/mine/steps.jsonl --outcome trained
    """
    groups = _groups(folder, selection, [*_SHOWN, "inserted_at"])
    rows = ask(lambda: list(islice(groups, limit)))
    if as_json:
        print_json(rows)
    else:
        _print_groups(rows)


def show_step(
    folder: Folder,
    number: Annotated[int, typer.Argument(metavar="STEP", help="Number of a step of the trainer.")],
    steps: Annotated[Path, typer.Option("--steps-path", metavar="FILE", help=_STEPS)],
    as_json: AsJson = False,
) -> None:
    """Show which groups a step of the trainer took, and what is archived of each.

    Example: replay archive step runs/archive 120 --steps-path runs/mine/steps.jsonl
    """
    outcomes = ask(lambda: _outcomes_of_step(steps, number))
    if outcomes is None:
        fail(f"{steps} has no step {number}")
    keys = [outcome.key for outcome in outcomes]
    archived: dict[str, Row] = {}
    if keys:  # an empty selection of keys would select all groups of the archive
        groups_of_step = _groups(folder, {"steps_path": steps, "key": keys}, _SHOWN)
        archived = ask(lambda: {row["key"]: row for row in groups_of_step})
    document: dict[str, list[Row]] = {"trained": [], "left_out": [], "unusable": []}
    for outcome in outcomes:
        name = outcome.outcome.replace("-", "_")  # left-out is left_out in JSON
        document[name].append(_row_of(outcome, archived))
    if as_json:
        print_json({"step": number} | document)
        return
    missing = 0  # groups of the step that are in no finished file
    for kind, groups in document.items():
        missing += sum(not group["archived"] for group in groups)
        if groups:
            say(f"{kind.replace('_', ' ')}: {len(groups)}")
            _print_groups(groups)
    if missing:
        line = f"in no finished file: {missing}"
        open_files = len(list(folder.glob("groups-*.tmp")))
        if open_files:
            line += f"; {counted(open_files, 'file')} not finished yet"
        say(line)


def _outcomes_of_step(path: Path, number: int) -> list[Outcome] | None:
    """The outcomes of the groups of step `number`, from the trainer's steps.jsonl; None: the file has no such step."""
    from replay_cli.archive.outcomes import read_steps

    for step, outcomes in read_steps(path):
        if step == number:
            return outcomes
    return None


@taking(_SELECTION)
def export_archive(
    selection: dict[str, Any],
    folder: Folder,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Its name ends with .jsonl or .parquet.")],
    rows: WhichRows = "groups",
    tokenizer: TokenizerFolder = None,
    payloads: WithPayloads = True,
    as_json: AsJson = False,
) -> None:
    """Write groups of an archive into a file, in the rows of `replay table export`.

    Example: replay archive export runs/archive groups.parquet --policy-version 40..50
    """
    from replay_cli.archive.rows import ITEM_COLUMNS, Form

    form = Form(sequences=rows == "sequences", text=load_tokenizer(tokenizer), payloads=payloads)
    groups = _groups(folder, selection, [*ITEM_COLUMNS, "payload"])
    exported_rows = _rows(form, groups)
    write(file, form, exported_rows, origin={"folder": str(folder)}, as_json=as_json)


def _rows(form: Form, groups: Iterable[Row]) -> Iterator[Row]:
    """The rows that an export writes for these groups."""
    for group in groups:
        yield from form.rows(group, group["payload"])


def _groups(folder: Path, selection: Mapping[str, Any], columns: Iterable[str]) -> Iterator[Row]:
    """Yields the selected groups as rows with `columns`, and with two further columns.

    These are `outcome`, one of OUTCOMES, and `said`: all outcomes of the group in words. `selection`: the values of the
    options in _SELECTION, by name.
    """
    need("an archive", "parquet", "pyarrow")
    from replay_cli.archive.outcomes import Outcomes
    from replay_cli.archive.reading import read_groups

    where = _where(selection)
    tags = parse_tags(selection.get("tag"))
    outcomes = ask(lambda: Outcomes(selection.get("steps_path")))
    wanted_outcome = selection.get("outcome")
    for row in read_groups(folder, columns, where, tags):
        outcome = outcomes.of(row["key"])
        if wanted_outcome is None or wanted_outcome == outcome:
            yield row | {"outcome": outcome, "said": outcomes.words(row["key"])}


def _where(selection: Mapping[str, Any]) -> Any:
    """The condition of pyarrow for the selected keys, prompt and policy versions; None: all are selected."""
    from pyarrow.compute import field

    conditions = []
    keys = selection.get("key")
    if keys:
        conditions.append(field("key").isin([str(key) for key in keys]))
    prompt_id = selection.get("prompt_id")
    if prompt_id is not None:
        conditions.append(field("prompt_id") == prompt_id)
    versions = selection.get("policy_version")
    if versions:
        least, dots, most = versions.partition("..")
        if not dots:  # a single version is a range from this version to itself
            most = least
        for end in (least, most):
            is_number = end.isascii() and end.isdecimal()
            if end and not is_number:
                misuse(f"--policy-version {versions!r} is not a policy version, nor a range such as 40..50")
        # An end may be empty: `40..` selects version 40 and all later ones.
        if least:
            conditions.append(field("policy_version") >= int(least))
        if most:
            conditions.append(field("policy_version") <= int(most))
    return reduce(and_, conditions) if conditions else None


def _row_of(outcome: Outcome, archived: Mapping[str, Row]) -> Row:
    """The row for a group of a step: its row in the archive, if there is one, and its entry in steps.jsonl.

    `archived`: key -> row of the archive.
    """
    row = archived.get(outcome.key, {})
    # Leave out two facts of the entry. Its key is a number, but rows have keys as text. The table is in the row.
    facts = {name: value for name, value in outcome.facts.items() if name not in ("key", "table")}
    return row | facts | {"key": outcome.key, "archived": bool(row)}


def _print_groups(rows: list[Row]) -> None:
    """Prints a table with a line for each group. "-" stands for a value that is not known."""
    cells = []
    for row in rows:
        tags = [f"{name}={value}" for name, value in row.get("tags", {}).items()]
        cells.append(
            (
                row["key"],
                str(row.get("prompt_id") or "-"),
                str(row.get("policy_version", "-")),
                _number(row.get("reward_mean")),
                _number(row.get("reward_std")),
                str(row.get("bytes", "-")),
                ", ".join(tags) or "-",
                str(row.get("outcome", "in no finished file")),
                # All outcomes of the group in words or, for an unusable group that is in no file, the reason.
                str(row.get("said") or row.get("reason") or "-"),
            )
        )
    columns = ("key", "prompt", "version", "reward mean", "std", "bytes", "tags", "outcome", "what is known")
    console().print(plain_table(columns, cells, left=("key", "prompt", "tags", "outcome", "what is known")))


def _number(value: float | None) -> str:
    """The number with three digits after the point; "-" for None."""
    return "-" if value is None else f"{value:.3f}"
