"""The screen of `replay top`, and the keys that change it."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from replay_server.cli import overview

if TYPE_CHECKING:
    from replay_client.records import ServerInfo

_HELP = "q quit   space pause   s sort   r reverse"
_WAITS = 5
"""Most lines about waiting requests."""
_SPARE = 2
"""The heading of the tables, and the last line of the terminal, which stays empty."""
_HISTORY = 24
"""Looks at the server that a sparkline shows."""


@dataclass
class Screen:
    """What is on the screen."""

    address: str
    info: ServerInfo | None = None
    problem: str = ""
    """Why the figures are old."""
    by_shard: bool = False
    """Whether each server of several has a line."""
    paused: bool = False
    reverse: bool = False
    ended: bool = False
    sort: str = next(iter(overview.SORTS))
    _rates: defaultdict[str, tuple[deque[float], deque[float]]] = field(
        default_factory=lambda: defaultdict(lambda: (deque(maxlen=_HISTORY), deque(maxlen=_HISTORY)))
    )
    _seen_at: float = 0.0

    def see(self, info: ServerInfo, now: float) -> None:
        """The server at a time of a clock: rates are what the counters did since the look before."""
        last, seconds = self.info, now - self._seen_at
        self.info, self._seen_at, self.problem = info, now, ""
        if last is None or last.server_id != info.server_id:
            return
        for name, table in info.tables.items():
            if (before := last.tables.get(name)) is not None:
                ins, outs = self._rates[name]
                ins.append(max(0, table.inserts - before.inserts) / seconds)
                outs.append(max(0, table.samples - before.samples) / seconds)

    def press(self, key: str) -> None:
        match key:
            case "q" | "\x04" | "":
                self.ended = True
            case " " | "p":
                self.paused = not self.paused
            case "s":
                names = list(overview.SORTS)
                self.sort = names[(names.index(self.sort) + 1) % len(names)]
            case "r":
                self.reverse = not self.reverse

    def render(self, height: int = 1000) -> Group:
        """What fits into `height` lines. Tables give way to the lines on permits, waits and keys, and say how many."""
        state = f"sorted by {self.sort}{', reversed' if self.reverse else ''}{'   PAUSED' if self.paused else ''}"
        keys = Text(f"{_HELP}   {state}", style="dim")
        problem = Text(self.problem, style="red") if self.problem else None
        if self.info is None:
            return Group(Text(self.address, style="bold"), problem or Text("..."), Text(), keys)
        tables = sorted(self.info.tables.values(), key=overview.SORTS[self.sort], reverse=self.reverse)
        if self.reverse and self.sort == "configured":
            tables.reverse()
        lines = overview.shard_lines(self.info) if self.by_shard else ()
        above = [overview.headline(self.address, self.info), *lines, problem, Text()]
        below = [Text(), overview.permits(self.info), *overview.waits(self.info)[:_WAITS], keys]
        room = height - len([part for part in (*above, *below) if part is not None]) - _SPARE
        shown = tables if len(tables) <= room else tables[: max(1, room - 1)]
        hidden = len(tables) - len(shown)
        more = Text(f"and {hidden} more tables; s sorts", style="dim") if hidden else None
        parts = [*above, overview.TableView(shown, self._rates), more, *below]
        for part in parts:
            if isinstance(part, Text):
                part.no_wrap, part.overflow = True, "ellipsis"
        return Group(*(part for part in parts if part is not None))
