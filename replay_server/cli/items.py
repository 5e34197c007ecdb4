"""`replay items` and `replay delete`: list the items of a table, and delete some."""

from __future__ import annotations

import shlex
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replay_protos.state import Document
from replay_server.cli.connection import Keys, TableName, Timeout, ask, connect, with_access
from replay_server.cli.output import AsJson, Yes, confirm, console, fail, print_json, say

if TYPE_CHECKING:
    from replay_client.records import ItemInfo


class Order(StrEnum):
    AGE = "age"
    PRIORITY = "priority"
    POLICY_VERSION = "policy_version"
    TIMES_SAMPLED = "times_sampled"
    SIZE = "size"


@with_access
def items(
    access: dict[str, Any],
    table: TableName,
    order_by: Annotated[Order, typer.Option(help="Sort the items by this, the lowest first.")] = Order.AGE,
    descending: Annotated[bool, typer.Option("--descending", "-d", help="Sort the highest first.")] = False,
    min_priority: Annotated[float | None, typer.Option(help="Only items of at least this priority.")] = None,
    max_priority: Annotated[float | None, typer.Option(help="Only items of at most this priority.")] = None,
    min_staleness: Annotated[int | None, typer.Option(help="Only items of at least this staleness.")] = None,
    max_staleness: Annotated[int | None, typer.Option(help="Only items of at most this staleness.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most items on a page.")] = 20,
    page: Annotated[str, typer.Option(help="Show this page; the page before names it.")] = "",
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
) -> None:
    """List the items of a table, one page at a time."""
    from replay_client.units import counted

    with connect(access, timeout) as client:
        found = ask(
            lambda: client.list_items(
                table,
                limit=limit,
                order_by=order_by.value,
                descending=descending,
                page=page,
                min_priority=min_priority,
                max_priority=max_priority,
                min_staleness=min_staleness,
                max_staleness=max_staleness,
            )
        )
    if as_json:
        print_json(
            {
                "table": table,
                "matching": found.matching,
                "next_page": found.next_page or None,
                "items": [_document(item) for item in found.items],
            }
        )
        return
    from rich.table import Table

    from replay_client.units import byte_size, duration

    view = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("key", "priority", "effective", "age", "version", "staleness", "sampled", "bytes"):
        view.add_column(column, justify="right", no_wrap=True)
    for item in found.items:
        view.add_row(
            str(item.key),
            f"{item.priority:.4g}",
            f"{item.effective_priority:.4g}",
            duration(item.age),
            str(item.policy_version),
            str(item.staleness),
            str(item.times_sampled),
            byte_size(item.nbytes),
        )
    out = console()
    if found.items:
        out.print(view)
    out.print(
        f"{len(found.items)} of {counted(found.matching, 'item')}"
        + (f"; for the next ones add --page {shlex.quote(found.next_page)}" if found.next_page else "")
    )


@with_access
def delete(
    access: dict[str, Any],
    table: TableName,
    keys: Keys,
    yes: Yes = False,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
) -> None:
    """Delete items from one table. Other tables keep them. Status 1 if a key was not there."""
    from replay_client.units import counted

    confirm(f"Delete {counted(len(set(keys)), 'item')} from {table}?", yes)
    with connect(access, timeout) as client:
        result = ask(lambda: client.delete(table, keys))
    if as_json:
        print_json({"deleted": result.applied, "missing": [str(key) for key in result.missing]})
    else:
        say(f"{result.applied} deleted from {table}")
    if result.missing:
        fail(f"not in {table}: {', '.join(map(str, result.missing))}")


def _document(item: ItemInfo) -> Document:
    """The key is a string, as in every document."""
    facts = vars(item) | {"key": str(item.key), "bytes": item.nbytes}
    return {name: fact for name, fact in facts.items() if name != "nbytes"}
