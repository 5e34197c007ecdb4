"""`replay archive list`, `step` and `export`: what an archive has."""

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

if TYPE_CHECKING:
    from replay_cli.archive.outcomes import Outcome
    from replay_cli.archive.rows import Row

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the archive, as of `replay archive run`.")]
_STEPS = "steps.jsonl of the trainer: says what it trained on."
_WHICH = (
    option("steps_path", _STEPS, Path, metavar="FILE"),
    option("key", "Only this item; repeatable.", list[int], parser=parse_key, metavar="KEY"),
    option("prompt_id", "Only groups with this prompt_id."),
    option("policy_version", "Only groups of this policy version, or of a range such as 40..50."),
    option("tag", "Only items with this tag; repeatable.", list[str], metavar="NAME=VALUE"),
    option("outcome", "Only groups that ended so.", Literal["trained", "left-out", "unusable", "unknown"]),
)
"""Which groups, by what they are and by what became of them."""
_SHOWN = ("key", "prompt_id", "policy_version", "group_size", "reward_mean", "reward_std", "bytes", "tags", "table")
"""Columns of a list, beside the outcome."""


@taking(_WHICH)
def list_groups(
    which: dict[str, Any],
    folder: Folder,
    limit: Annotated[int, typer.Option(min=1, help="The most groups to print, the oldest first.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List the groups of an archive, and what became of each.

    Example: replay archive list runs/archive --steps-path runs/mine/steps.jsonl --outcome trained
    """
    found = _groups(folder, which, [*_SHOWN, "inserted_at"])
    (print_json if as_json else _print_groups)(ask(lambda: list(islice(found, limit))))


def show_step(
    folder: Folder,
    number: Annotated[int, typer.Argument(metavar="STEP", help="Number of a step of the trainer.")],
    steps: Annotated[Path, typer.Option("--steps-path", metavar="FILE", help=_STEPS)],
    as_json: AsJson = False,
) -> None:
    """Show which groups a step of the trainer took, and what is archived of each.

    Example: replay archive step runs/archive 120 --steps-path runs/mine/steps.jsonl
    """
    from replay_cli.archive.outcomes import read_steps
    from replay_dashboard.units import counted

    outcomes = ask(lambda: next((made for step, made in read_steps(steps) if step == number), None))
    if outcomes is None:
        fail(f"{steps} has no step {number}")
    keys = [each.key for each in outcomes]
    groups_of_step = _groups(folder, {"steps_path": steps, "key": keys}, _SHOWN) if keys else iter(())
    found = ask(lambda: {row["key"]: row for row in groups_of_step})
    document: dict[str, list[Row]] = {"trained": [], "left_out": [], "unusable": []}
    for each in outcomes:
        document[each.outcome.replace("-", "_")].append(_used(each, found))
    if as_json:
        print_json({"step": number} | document)
        return
    for kind, groups in document.items():
        if groups:
            say(f"{kind.replace('_', ' ')}: {len(groups)}")
            _print_groups(groups)
    if missing := sum(not each["archived"] for groups in document.values() for each in groups):
        open_files = len(list(folder.glob("groups-*.tmp")))
        say(f"in no finished file: {missing}" + f"; {counted(open_files, 'file')} not finished yet" * bool(open_files))


@taking(_WHICH)
def export_archive(
    which: dict[str, Any],
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

    form = Form(rows == "sequences", load_tokenizer(tokenizer), payloads)
    groups = _groups(folder, which, [*ITEM_COLUMNS, "payload"])
    found = (written for row in groups for written in form.rows(row, row["payload"]))
    write(file, form, found, {"folder": str(folder)}, as_json)


def _groups(folder: Path, which: Mapping[str, Any], columns: Iterable[str]) -> Iterator[Row]:
    """The groups that `which` names, with their `outcome`, and in `said` all that is known of it."""
    need("an archive", "parquet", "pyarrow")
    from replay_cli.archive.outcomes import Outcomes
    from replay_cli.archive.reading import read_groups

    where, tags = _where(which), parse_tags(which.get("tag"))
    outcomes = ask(lambda: Outcomes(which.get("steps_path")))
    for row in read_groups(folder, columns, where, tags):
        became = outcomes.of(row["key"])
        if which.get("outcome") in (None, became):
            yield row | {"outcome": became, "said": outcomes.words(row["key"])}


def _where(which: Mapping[str, Any]) -> Any:
    """The conditions on columns for pyarrow; None: there are none."""
    from pyarrow.compute import field

    conditions = []
    if keys := which.get("key"):
        conditions.append(field("key").isin(list(map(str, keys))))
    if (prompt := which.get("prompt_id")) is not None:
        conditions.append(field("prompt_id") == prompt)
    if version := which.get("policy_version"):
        least, dots, most = version.partition("..")
        if not all(end == "" or (end.isascii() and end.isdecimal()) for end in (least, most)):
            misuse(f"--version {version!r} is not a policy version, nor a range such as 40..50")
        if least:
            conditions.append(field("policy_version") >= int(least))
        if most or not dots:
            conditions.append(field("policy_version") <= int(most or least))
    return reduce(and_, conditions) if conditions else None


def _used(each: Outcome, found: dict[str, Row]) -> Row:
    """A group of a step: what the trainer said of it, and what the archive has."""
    row = found.get(each.key, {})
    facts = {name: value for name, value in each.facts.items() if name not in ("key", "table")}
    return row | facts | {"key": each.key, "archived": bool(row)}


def _print_groups(rows: list[Row]) -> None:
    cells = [
        (
            row["key"],
            str(row.get("prompt_id") or "-"),
            str(row.get("policy_version", "-")),
            _number(row.get("reward_mean")),
            _number(row.get("reward_std")),
            str(row.get("bytes", "-")),
            ", ".join(f"{name}={value}" for name, value in row.get("tags", {}).items()) or "-",
            str(row.get("outcome", "in no finished file")),
            str(row.get("said") or row.get("reason") or "-"),
        )
        for row in rows
    ]
    columns = ("key", "prompt", "version", "reward mean", "std", "bytes", "tags", "outcome", "what is known")
    console().print(plain_table(columns, cells, left=("key", "prompt", "tags", "outcome", "what is known")))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
