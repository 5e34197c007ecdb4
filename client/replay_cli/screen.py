"""What `tables` and `top` show of a server: a headline, a row for each table, permits, clients and waits.

Both are a `Screen`: `tables` prints all of one look at the server, and `top` what fits into the terminal of many.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from replay_cli.output import one_line
from replay_client.records import rates_between, shards_of
from replay_dashboard.tag_counts import tag_counts
from replay_dashboard.units import byte_size, counted, duration, shares, waiting, waits_for

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

    from replay_client.records import ServerInfo, TableInfo

_BARS = "▁▂▃▄▅▆▇█"
_HELP = "q quit   space pause"
_BELOW = 8
"""Most lines below the tables of a terminal: permits and waits come first."""
_VALUES = 6
"""Values of a tag that a line shows."""
_SPARE = 2
"""The heading of the tables, and the last line of the terminal, which stays empty."""
_HISTORY = 24
"""Looks at the server that a sparkline shows."""


def headline(address: str, info: ServerInfo) -> Text:
    line = Text(one_line(address), style="bold")
    bound = f" of {byte_size(info.max_bytes)}" if info.max_bytes else ""
    line.append(
        f"  version {one_line(info.version)}  up {duration(info.uptime)}  policy version {info.policy.version}  "
        f"{counted(info.items, 'item')}, {byte_size(info.bytes)}{bound}  {one_line(info.storage)}",
        style="not bold",
    )
    return line


def _shard_parts(name: str, shard: ServerInfo | None, wanted: bool, live: bool) -> Iterator[Text | TableView]:
    """A server of several: a line, and its tables where there is room. Without `wanted` only what does not answer."""
    if shard is None:
        yield Text(one_line(f"{name}  does not answer"), style="red")
    elif wanted:
        yield headline(name, shard)
        if not live:
            yield TableView(list(shard.tables.values()))


Cell = str | Text


@dataclass(frozen=True)
class TableColumn:
    """One fact about a table, as `tables` and `top` show it."""

    name: str
    cell: Callable[[TableInfo], Cell]
    goes: int = 0
    """A narrow terminal leaves out the column with the highest number first; 0 always stays."""


def _staleness(table: TableInfo) -> str:
    return f"{table.staleness.p50:.0f} (max {table.staleness.max:.0f})" if table.size else "-"


def _size(table: TableInfo) -> str:
    retained = f" (+{table.retained} retained)" if table.retained else ""
    return f"{table.size} / {capacity(table)}{retained}"


def _blocked(table: TableInfo) -> str:
    shares = table.insert_blocked_share, table.sample_blocked_share
    return f"{shares[0]:.0%} in, {shares[1]:.0%} out" if any(shares) else "-"


def _evicted(table: TableInfo) -> Text:
    cell = Text(str(table.evicted))
    if table.evicted_unsampled:
        cell.append(f" ({table.evicted_unsampled} unsampled)", style="red")
    return cell


def _stale(table: TableInfo) -> Text:
    count = table.stale + table.stale_refused
    return Text(str(count), style="yellow" if count else "")


COLUMNS = (
    TableColumn("table", lambda table: one_line(table.name)),
    TableColumn("size", _size),
    TableColumn("bytes", lambda table: byte_size(table.bytes), goes=8),
    TableColumn("in/s", lambda table: f"{table.inserts_per_second:.1f}", goes=1),
    TableColumn("out/s", lambda table: f"{table.samples_per_second:.1f}", goes=2),
    TableColumn("staleness", _staleness, goes=6),
    TableColumn("oldest", lambda table: duration(table.age.max) if table.size else "-", goes=7),
    TableColumn("blocked", _blocked, goes=5),
    TableColumn("evicted", _evicted, goes=3),
    TableColumn("stale", _stale, goes=4),
)


@dataclass(frozen=True)
class TableView:
    """A row for each table. With `sparks` (past rates in and out, by table) also their course."""

    tables: Sequence[TableInfo]
    sparks: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        rows = [{column.name: column.cell(table) for column in COLUMNS} for table in self.tables]
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


def _fitting(rows: Sequence[Mapping[str, Cell]], width: int) -> list[str]:
    """The columns that fit as a whole into `width`: half a number would be a wrong number."""
    wide = {
        column.name: max(cell_len(str(cell)) for cell in (column.name, *(row[column.name] for row in rows)))
        for column in COLUMNS
    }
    names = [column.name for column in COLUMNS]
    for column in sorted((column for column in COLUMNS if column.goes), key=lambda column: -column.goes):
        if sum(wide[name] + 2 for name in names) - 2 > width:
            names.remove(column.name)
    return names


def waits(info: ServerInfo) -> list[Text]:
    """A line for each side that is gone, each kind of request that waits, with the reason, and for items that wait."""
    gone = [Text(one_line(f"{overdue.role} overdue: {overdue.reason}"), style="red") for overdue in info.overdue]
    lines = []
    for table in info.tables.values():
        for request, wait in (("insert", table.inserting), ("sample request", table.sampling)):
            if wait.count:
                lines.append(waiting(wait, request))
    if info.admission is not None and (wait := info.admission.acquiring).count:
        lines.append(waiting(wait, "permit request"))
    lines += [
        f"{table.name} {waits_for(table.missing_columns)}" for table in info.tables.values() if table.incomplete_items
    ]
    return gone + [Text(one_line(line), style="yellow") for line in lines]


def clients(info: ServerInfo) -> Iterator[Text]:
    """A line for each client that inserts, samples or publishes, with its last sign of life."""
    for client in info.clients:
        state = "ended" if client.ended else "connected" if client.open else "not connected"
        yield Text(
            one_line(f"{client.role or 'client'} {client.name}: {state}, seen {duration(client.age)} ago"),
            style="" if client.open or client.ended else "yellow",
        )


def balances(info: ServerInfo) -> Iterator[Text]:
    """A line for each table that balances its draws, with the share of each value."""
    for table in info.tables.values():
        if table.values:
            tag = json.loads(table.config)["balance"]["tag"]
            yield Text(one_line(f"{table.name} balances {tag}: {shares(table.values)}"))


def tags(info: ServerInfo) -> Iterator[Text]:
    """A line for each tag by which a table counts: what became of the groups of each value."""
    for table in info.tables.values():
        for counts in tag_counts(info, table):
            ordered = sorted(counts.values.items(), key=lambda item: -item[1].generated)
            values = [
                f"{value} {groups.generated} generated, {groups.stale} lost as stale, {groups.sampled} trained on"
                for value, groups in ordered[:_VALUES]
            ]
            if len(ordered) > _VALUES:
                values.append(f"and {counted(len(ordered) - _VALUES, 'more value')}")
            yield Text(one_line(f"{table.name} by {counts.tag}: {'; '.join(values)}"))


def permits(info: ServerInfo) -> Iterator[Text]:
    if (admission := info.admission) is not None:
        partial = f" ({admission.partial_groups} partial)" if admission.permit_tables else ""
        yield Text(
            f"permits: {admission.running} running{partial}, {admission.accepted} accepted, "
            f"{admission.capacity} available, {admission.expired} expired"
        )


def sparkline(values: Sequence[float]) -> str:
    """The values as bars; the largest is a full one."""
    largest = max(values, default=0.0)
    if largest <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[round(value / largest * (len(_BARS) - 1))] for value in values)


def capacity(table: TableInfo) -> int:
    """The most items that a table holds."""
    config = json.loads(table.config)
    return int(min(config["max_size"], config["rate_limiter"]["max_size"] or config["max_size"]))


@dataclass
class Screen:
    """What is on the screen."""

    address: str
    info: ServerInfo | None = None
    problem: str = ""
    """Why the figures are old."""
    by_shard: bool = False
    """Whether each server of several has a line. One that does not answer has a line in any case."""
    paused: bool = False
    ended: bool = False
    _rates: defaultdict[str, tuple[deque[float], deque[float]]] = field(
        default_factory=lambda: defaultdict(lambda: (deque(maxlen=_HISTORY), deque(maxlen=_HISTORY)))
    )

    def record(self, info: ServerInfo) -> None:
        """A look at the server. Rates are what the counters did since the look before."""
        for name, rates in rates_between(self.info, info).items():
            for past, rate in zip(self._rates[name], rates, strict=True):
                past.append(rate)
        self.info, self.problem = info, ""

    def press(self, key: str) -> None:
        match key:
            case "q" | "\x04" | "":
                self.ended = True
            case " " | "p":
                self.paused = not self.paused

    def render(self, height: int | None = None) -> Group:
        """All that there is to say or, of a terminal with `height` lines, what fits: `top`, with its keys.

        There tables give way to the lines below them, and say how many.
        """
        live = height is not None
        keys = [Text(_HELP + "   PAUSED" * self.paused, style="dim")] * live
        problem = [Text(one_line(self.problem), style="red")] if self.problem else []
        if self.info is None:
            return Group(Text(self.address, style="bold"), *(problem or [Text("...")]), Text(), *keys)
        shards = [
            part for name, shard in shards_of(self.info) for part in _shard_parts(name, shard, self.by_shard, live)
        ]
        above = [headline(self.address, self.info), *shards, *problem, *[Text()] * live]
        below = [*permits(self.info), *waits(self.info), *balances(self.info), *tags(self.info), *clients(self.info)]
        shown = list(self.info.tables.values())
        if height is not None:
            below = [Text(), *below[:_BELOW], *keys]
            room = height - len(above) - len(below) - _SPARE
            if len(shown) > room:
                hidden, shown = len(shown) - max(1, room - 1), shown[: max(1, room - 1)]
                below.insert(0, Text(f"and {counted(hidden, 'more table')}: `replay tables` has all", style="dim"))
        for line in (*above, *below):
            if isinstance(line, Text):
                line.no_wrap, line.overflow = True, "ellipsis" if live else "ignore"
        return Group(*above, TableView(shown, self._rates if live else None), *below)
