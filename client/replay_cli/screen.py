"""Shows the state of a server for `tables` and `top`: a headline, a row for each table, permits, clients and waits.

Both commands use a `Screen`. `tables` asks the server once and prints everything. `top` asks again and again, and
prints what fits into the terminal.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

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
_MOST_BELOW = 8
"""The most lines that `top` shows below the tables. The lines about permits and waits come first, so other lines are
left out before them."""
_VALUES = 6
"""The most values of a tag that a line shows."""
_SPARE = 2
"""Lines of the terminal that `Screen.render` does not count otherwise: the heading of the tables, and the last line,
which stays empty."""
_HISTORY = 24
"""Past rates that a sparkline shows."""


def headline(address: str, info: ServerInfo) -> Text:
    """The address of a server, its version and policy version, and what it holds."""
    line = Text(one_line(address), style="bold")
    bound = f" of {byte_size(info.max_bytes)}" if info.max_bytes else ""
    line.append(
        f"  version {one_line(info.version)}  up {duration(info.uptime)}  policy version {info.policy.version}  "
        f"{counted(info.items, 'item')}, {byte_size(info.bytes)}{bound}  {one_line(info.storage)}",
        style="not bold",
    )
    return line


def _shard_parts(name: str, shard: ServerInfo | None, by_shard: bool, live: bool) -> Iterator[Text | TableView]:
    """Yields the parts of the screen about one of several servers. `shard`: its state; None: it does not answer.

    A server that does not answer always has a line. A server that answers has a line only with `by_shard`. After this
    line come the server's tables, except on a `live` screen, because a terminal has no room for them.
    """
    if shard is None:
        yield Text(one_line(f"{name}  does not answer"), style="red")
    elif by_shard:
        yield headline(name, shard)
        if not live:
            yield TableView(list(shard.tables.values()))


Cell = str | Text


@dataclass(frozen=True)
class TableColumn:
    """One fact about a table, as `tables` and `top` show it."""

    name: str
    cell: Callable[[TableInfo], Cell]
    removal_rank: int = 0
    """On a narrow terminal, the column with the highest rank is left out first. A column with the rank 0 always
    stays."""


def _staleness(table: TableInfo) -> str:
    if not table.size:
        return "-"
    return f"{table.staleness.p50:.0f} (max {table.staleness.max:.0f})"


def _oldest(table: TableInfo) -> str:
    if not table.size:
        return "-"
    return duration(table.age.max)


def _size(table: TableInfo) -> str:
    retained = f" (+{table.retained} retained)" if table.retained else ""
    return f"{table.size} / {capacity(table)}{retained}"


def _blocked(table: TableInfo) -> str:
    """The shares of the last minute in which inserts and draws were blocked."""
    inserts = table.insert_blocked_share
    samples = table.sample_blocked_share
    if not inserts and not samples:
        return "-"
    return f"{inserts:.0%} in, {samples:.0%} out"


def _evicted(table: TableInfo) -> Text:
    """The number of evicted items, and of those that were never drawn."""
    cell = Text(str(table.evicted))
    if table.evicted_unsampled:
        cell.append(f" ({table.evicted_unsampled} unsampled)", style="red")
    return cell


def _stale(table: TableInfo) -> Text:
    """The number of items that were dropped as stale or, on arrival, refused as stale."""
    count = table.stale + table.stale_refused
    return Text(str(count), style="yellow" if count else "")


COLUMNS = (
    TableColumn("table", lambda table: one_line(table.name)),
    TableColumn("size", _size),
    TableColumn("bytes", lambda table: byte_size(table.bytes), removal_rank=8),
    TableColumn("in/s", lambda table: f"{table.inserts_per_second:.1f}", removal_rank=1),
    TableColumn("out/s", lambda table: f"{table.samples_per_second:.1f}", removal_rank=2),
    TableColumn("staleness", _staleness, removal_rank=6),
    TableColumn("oldest", _oldest, removal_rank=7),
    TableColumn("blocked", _blocked, removal_rank=5),
    TableColumn("evicted", _evicted, removal_rank=3),
    TableColumn("stale", _stale, removal_rank=4),
)


@dataclass(frozen=True)
class TableView:
    """A view for rich with a row for each table of a server."""

    tables: Sequence[TableInfo]
    sparks: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None
    """Table name -> past rates (in, out), which are shown as sparklines. None: there are no sparklines."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Yields one table of rich, with the columns that fit into the width. rich calls this to print the view."""
        rows = [{column.name: column.cell(table) for column in COLUMNS} for table in self.tables]
        columns = _fitting(rows, options.max_width)
        view = Table(box=None, header_style="bold", pad_edge=False)
        for column in columns:
            side: Literal["left", "right"] = "left" if column == "table" else "right"
            view.add_column(column, justify=side, no_wrap=True)
        if self.sparks is not None:
            # On a narrow terminal, rich first narrows the columns that may wrap, so these two may wrap. A sparkline has
            # no space at which rich could wrap it, so rich cuts it.
            view.add_column("in", overflow="crop", style="green")
            view.add_column("out", overflow="crop", style="cyan")
        for table, row in zip(self.tables, rows, strict=True):
            cells = [row[column] for column in columns]
            if self.sparks is not None:
                rates_in, rates_out = self.sparks.get(table.name, ((), ()))
                cells.append(sparkline(rates_in))
                cells.append(sparkline(rates_out))
            view.add_row(*cells)
        yield view


def _fitting(rows: Sequence[Mapping[str, Cell]], width: int) -> list[str]:
    """The names of the columns to show in `width` characters.

    A column that does not fit is left out and not cut, because half a number is a wrong number.
    """
    widths = {}
    for column in COLUMNS:
        cells = [column.name, *(row[column.name] for row in rows)]
        widths[column.name] = max(cell_len(str(cell)) for cell in cells)
    names = [column.name for column in COLUMNS]
    removable = [column for column in COLUMNS if column.removal_rank]
    for column in sorted(removable, key=lambda column: -column.removal_rank):
        needed = sum(widths[name] + 2 for name in names) - 2  # two spaces between columns
        if needed > width:
            names.remove(column.name)
    return names


def waits(info: ServerInfo) -> list[Text]:
    """Lines about what waits: overdue clients, requests that wait at a table or for permits, and incomplete items."""
    overdue = [Text(one_line(f"{client.role} overdue: {client.reason}"), style="red") for client in info.overdue]
    lines = []
    for table in info.tables.values():
        if table.inserting.count:
            lines.append(waiting(table.inserting, "insert"))
        if table.sampling.count:
            lines.append(waiting(table.sampling, "sample request"))
    if info.admission is not None and info.admission.acquiring.count:
        lines.append(waiting(info.admission.acquiring, "permit request"))
    for table in info.tables.values():
        if table.incomplete_items:
            lines.append(f"{table.name} {waits_for(table.missing_columns)}")
    return overdue + [Text(one_line(line), style="yellow") for line in lines]


def clients(info: ServerInfo) -> Iterator[Text]:
    """A line for each client that inserts, samples or publishes: its state, and when the server last heard of it."""
    for client in info.clients:
        style = ""
        if client.ended:  # the client has told the server that it ends
            state = "ended"
        elif client.open:  # the number of its open calls
            state = "connected"
        else:
            state = "not connected"
            style = "yellow"
        line = f"{client.role or 'client'} {client.name}: {state}, seen {duration(client.age)} ago"
        yield Text(one_line(line), style=style)


def balances(info: ServerInfo) -> Iterator[Text]:
    """A line for each table that balances its draws by a tag, with the share of each value of the tag."""
    for table in info.tables.values():
        if table.values:  # empty if the table does not balance its draws, or has no items
            tag = json.loads(table.config)["balance"]["tag"]
            yield Text(one_line(f"{table.name} balances {tag}: {shares(table.values)}"))


def tags(info: ServerInfo) -> Iterator[Text]:
    """A line for each tag by which a table counts groups: what became of the groups with each value of the tag."""
    for table in info.tables.values():
        for counts in tag_counts(info, table):
            # `counts.values`: value of the tag -> its numbers of groups. The value with the most generated groups comes
            # first.
            ordered = sorted(counts.values.items(), key=lambda item: -item[1].generated)
            values = []
            for value, groups in ordered[:_VALUES]:
                outcomes = f"{groups.generated} generated, {groups.stale} lost as stale, {groups.sampled} trained on"
                values.append(f"{value} {outcomes}")
            if len(ordered) > _VALUES:
                values.append(f"and {counted(len(ordered) - _VALUES, 'more value')}")
            yield Text(one_line(f"{table.name} by {counts.tag}: {'; '.join(values)}"))


def permits(info: ServerInfo) -> Iterator[Text]:
    """Yields the line about permits. Yields nothing if the server has no permits."""
    admission = info.admission
    if admission is None:
        return
    partial = f" ({admission.partial_groups} partial)" if admission.permit_tables else ""
    yield Text(
        f"permits: {admission.running} running{partial}, {admission.accepted} accepted, "
        f"{admission.capacity} available, {admission.expired} expired"
    )


def sparkline(values: Sequence[float]) -> str:
    """The values as a line of bars. The largest value has the highest bar."""
    largest = max(values, default=0.0)
    if largest <= 0:
        return _BARS[0] * len(values)
    highest = len(_BARS) - 1
    heights = [round(value / largest * highest) for value in values]
    return "".join(_BARS[height] for height in heights)


def capacity(table: TableInfo) -> int:
    """The most items that a table holds."""
    config = json.loads(table.config)
    size = config["max_size"]
    limiter_size = config["rate_limiter"]["max_size"] or size  # null: the rate limiter sets no limit
    return int(min(size, limiter_size))


Rates = tuple[deque[float], deque[float]]
"""The past rates of a table: (in, out), each with the newest last."""


def _no_rates() -> Rates:
    """The past rates of a table for which there are none yet."""
    return deque(maxlen=_HISTORY), deque(maxlen=_HISTORY)


def _rates_by_table() -> defaultdict[str, Rates]:
    """An empty dict: table name -> past rates. A new name gets `_no_rates`."""
    return defaultdict(_no_rates)


@dataclass
class Screen:
    """The last answer of a server, and how it is shown."""

    address: str
    info: ServerInfo | None = None
    """None: the server has not answered yet."""
    problem: str = ""
    """The reason why the server did not answer the last request; `info` is then old. Empty: the server answered."""
    by_shard: bool = False
    """True: each of several servers has a line. False: only the servers that do not answer have one."""
    paused: bool = False
    ended: bool = False
    _rates: defaultdict[str, Rates] = field(default_factory=_rates_by_table)
    """The past rates of each table, by its name."""

    def record(self, info: ServerInfo) -> None:
        """Stores an answer of the server, and the rates since the answer before it."""
        # For the first answer, `rates_between` returns no rates, because there is no answer before it.
        for name, rates in rates_between(self.info, info).items():
            for past_rates, rate in zip(self._rates[name], rates, strict=True):  # (in, out)
                past_rates.append(rate)
        self.info = info
        self.problem = ""

    def press(self, key: str) -> None:
        """Reacts to a key that was pressed. An empty key means that the terminal is gone."""
        match key:
            case "q" | "\x04" | "":  # "\x04": Ctrl-D
                self.ended = True
            case " " | "p":
                self.paused = not self.paused

    def render(self, height: int | None = None) -> Group:
        """Makes the screen from the last answer of the server.

        `height`: the number of lines of the terminal, for `top`; None: the screen has everything, for `tables`. With
        `height`, the last line names the keys. If there is no room for all tables, some tables are hidden, and a line
        below the others says how many. The lines below the tables stay.
        """
        live = height is not None
        problem = [Text(one_line(self.problem), style="red")] if self.problem else []
        if self.info is None:
            return self._without_answer(problem, live)
        above: list[Text | TableView] = [headline(self.address, self.info)]
        for name, shard in shards_of(self.info):  # yields nothing for a single server
            above += _shard_parts(name, shard, self.by_shard, live)
        above += problem
        below = [*permits(self.info), *waits(self.info), *balances(self.info), *tags(self.info), *clients(self.info)]
        shown = list(self.info.tables.values())
        if height is not None:
            above.append(Text())  # an empty line
            below = [Text(), *below[:_MOST_BELOW], self._keys()]
            # Each part above and below the tables is one line, because `_shard_parts` yields a TableView only if the
            # screen is not live. A table takes one line too.
            room = height - len(above) - len(below) - _SPARE
            if len(shown) > room:
                fitting = max(1, room - 1)  # one line less, for the line that says how many tables are hidden
                hidden = len(shown) - fitting
                shown = shown[:fitting]
                below.insert(0, Text(f"and {counted(hidden, 'more table')}: `replay tables` has all", style="dim"))
        for part in (*above, *below):
            if isinstance(part, Text):
                part.no_wrap = True
                part.overflow = "ellipsis" if live else "ignore"  # `tables` prints long lines in whole
        view = TableView(shown, sparks=self._rates if live else None)
        return Group(*above, view, *below)

    def _without_answer(self, problem: Sequence[Text], live: bool) -> Group:
        """The screen before the first answer of the server."""
        lines = [Text(self.address, style="bold")]
        lines += problem or [Text("...")]
        lines.append(Text())
        if live:
            lines.append(self._keys())
        return Group(*lines)

    def _keys(self) -> Text:
        """The line that names the keys."""
        words = _HELP
        if self.paused:
            words += "   PAUSED"
        return Text(words, style="dim")
