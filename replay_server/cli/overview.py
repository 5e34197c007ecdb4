"""Overview: a server and its tables at a glance, for `tables` and `top`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from replay_client.units import byte_size, duration
from replay_server.cli.documents import Document, config_of

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

    from replay_client.records import ServerInfo, TableInfo

SORTS: dict[str, Callable[[TableInfo], float | str]] = {
    "configured": lambda table: 0.0,
    "table": lambda table: table.name,
    "size": lambda table: float(table.size),
    "bytes": lambda table: float(table.bytes),
    "in/s": lambda table: table.inserts_per_second,
    "out/s": lambda table: table.samples_per_second,
    "staleness": lambda table: table.staleness.p50,
}
"""What the rows can be sorted by; the first keeps the order of the configuration."""
_COLUMNS = ("table", "size", "bytes", "in/s", "out/s", "staleness", "oldest", "blocked", "evicted", "stale")
_FIRST_TO_GO = ("bytes", "oldest", "staleness", "blocked", "stale", "evicted", "out/s", "in/s")
"""What a terminal that is too narrow for all columns does without, in this order."""
_BARS = "▁▂▃▄▅▆▇█"


def headline(address: str, info: ServerInfo) -> Text:
    line = Text(address, style="bold")
    bound = f" of {byte_size(info.max_bytes)}" if info.max_bytes else ""
    line.append(
        f"  version {info.version}  up {duration(info.uptime)}  policy version {info.policy.version}  "
        f"{info.items} items, {byte_size(info.bytes)}{bound}  {info.storage}",
        style="not bold",
    )
    return line


@dataclass(frozen=True)
class TableView:
    """A row for each table; with `sparks` (rates in and out over time, by table) also how they went."""

    tables: Sequence[TableInfo]
    sparks: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        rows = [dict(zip(_COLUMNS, _row(table), strict=True)) for table in self.tables]
        columns = _fitting(rows, options.max_width)
        view = Table(box=None, header_style="bold", pad_edge=False)
        for column in columns:
            view.add_column(column, justify="left" if column == "table" else "right", no_wrap=True)
        if self.sparks is not None:
            # Columns that may wrap are made narrower first; without a space in them they are cut instead.
            view.add_column("in", overflow="crop", style="green")
            view.add_column("out", overflow="crop", style="cyan")
        for table, row in zip(self.tables, rows, strict=True):
            more = [] if self.sparks is None else map(sparkline, self.sparks.get(table.name, ((), ())))
            view.add_row(*(row[column] for column in columns), *more)
        yield view


def _fitting(rows: Sequence[Mapping[str, str | Text]], width: int) -> list[str]:
    """The columns that are whole within `width`: half a number would say something wrong."""
    wide = {
        column: max(cell_len(str(cell)) for cell in (column, *(row[column] for row in rows))) for column in _COLUMNS
    }
    columns = list(_COLUMNS)
    for column in _FIRST_TO_GO:
        if sum(wide[each] + 2 for each in columns) - 2 > width:
            columns.remove(column)
    return columns


def _row(table: TableInfo) -> list[str | Text]:
    evicted = Text(str(table.evicted))
    if table.evicted_unsampled:
        evicted.append(f" ({table.evicted_unsampled} unsampled)", style="red")
    stale = table.stale + table.stale_refused
    blocked = f"{table.insert_blocked_share:.0%} in, {table.sample_blocked_share:.0%} out"
    return [
        table.name,
        f"{table.size} / {capacity(config_of(table))}",
        byte_size(table.bytes),
        f"{table.inserts_per_second:.1f}",
        f"{table.samples_per_second:.1f}",
        f"{table.staleness.p50:.0f} (max {table.staleness.max:.0f})" if table.size else "-",
        duration(table.age.max) if table.size else "-",
        blocked if table.insert_blocked_share or table.sample_blocked_share else "-",
        evicted,
        Text(str(stale), style="yellow" if stale else ""),
    ]


def waits(info: ServerInfo) -> list[Text]:
    """A line for everyone who waits, with the reason."""
    lines = []
    for table in info.tables.values():
        for verb, wait in (("inserting", table.inserting), ("sampling", table.sampling)):
            if wait.count:
                lines.append(f"waiting: {wait.count} {verb}, the first for {duration(wait.seconds)}: {wait.reason}")
    if info.admission is not None and (wait := info.admission.acquiring).count:
        lines.append(f"waiting: {wait.count} for permits, the first for {duration(wait.seconds)}: {wait.reason}")
    return [Text(line, style="yellow") for line in lines]


def permits(info: ServerInfo) -> Text | None:
    if (admission := info.admission) is None:
        return None
    return Text(
        f"permits: {admission.running} running, {admission.accepted} accepted, {admission.capacity} to be had, "
        f"{admission.expired} expired"
    )


def sparkline(values: Sequence[float]) -> str:
    """The values as bars, of which the largest is full; nothing before the first."""
    largest = max(values, default=0.0)
    if largest <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[round(value / largest * (len(_BARS) - 1))] for value in values)


def capacity(config: Document) -> int:
    """How many items a table with this configuration holds, for the eye."""
    return int(min(config["max_size"], config["rate_limiter"]["max_size"] or config["max_size"]))
