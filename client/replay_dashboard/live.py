"""Live: one poller that asks the server for its state, and sends the state to every viewer."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from importlib.metadata import version
from typing import Any

from replay_client import AsyncReplayClient
from replay_client.errors import ReplayError
from replay_client.records import ServerInfo, rates_between, shards_of
from replay_dashboard.budget import Budget
from replay_dashboard.diagnosis import Finding, Level, diagnose
from replay_dashboard.health import learning, verdict
from replay_protos import replay_pb2 as pb
from replay_protos.state import document, plain

HISTORY = 600
"""The number of looks that the charts show. A look is one poll of the server, and the event with the result."""
SECONDS_PER_LOOK = 1.0
"""Seconds between two looks while somebody watches the page."""
SECONDS_PER_IDLE_LOOK = 5.0
"""Seconds between two looks while nobody watches."""
PATIENCE = 3.0
"""Seconds to wait for an answer of the server. After that the page shows that the server does not answer."""
MOST_VIEWERS = 64
REMEDY = "start it with `replay serve`, or give --address HOST:PORT; the page goes on by itself"
"""The remedy if the server does not answer."""


def _shard_row(name: str, info: ServerInfo | None) -> dict[str, Any]:
    """The row of the page about one server of several. `info`: None if this server does not answer."""
    if info is None:
        return {"name": name, "up": False}
    tables = info.tables.values()
    return {
        "name": name,
        "up": True,
        "version": info.policy.version,
        "tables": [{"name": table.name, "size": table.size} for table in tables],
        "waiting": sum(table.inserting.count + table.sampling.count for table in tables),
        "capacity": None if info.admission is None else info.admission.capacity,
    }


def dumps(value: object) -> bytes:
    """Writes a document with values of Python and numpy as compact JSON. NaN and infinities become null."""
    return json.dumps(plain(value), separators=(",", ":"), allow_nan=False).encode()


def _event(name: str, data: object) -> bytes:
    """A server-sent event with `data` as JSON."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), dumps(data))


class Live:
    """The state of the server, now and over the last minutes."""

    def __init__(self, client: AsyncReplayClient, budget: Budget, more: Callable[[], dict[str, Any]]) -> None:
        """`more` is called at each look. It returns the fields that this process adds to the server's numbers."""
        self.info: ServerInfo | None = None
        """The last answer of the server; None: it has not answered yet."""
        self.viewers = 0
        """The number of viewers that receive events now."""
        self._client = client
        self._budget = budget
        self._more = more
        self._problem = ""
        """The error of the last look; empty: the server answered."""
        self._problem_since = 0.0
        """The time of the first look without an answer since the last answer."""
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        """The points of the charts, one for each look: `t`, its time, and `tables`, the numbers of each table."""
        self._looks = 0
        """The number of looks so far. It is also the number of the last look."""
        self._look_event = b""
        """The last look as a server-sent event."""
        self._new_look = asyncio.Condition()
        """Notified after each look, and by `close`."""
        self._last_viewer = time.monotonic()
        """The time at which the last viewer left."""
        self._closed = False

    def watched(self) -> bool:
        """True if there is a viewer, or was one in the last minute."""
        return self.viewers > 0 or time.monotonic() - self._last_viewer < 60.0

    def tables(self) -> list[str]:
        """The names of the server's tables; empty while the server does not answer."""
        if self.info is None or self._problem:
            return []
        return list(self.info.tables)

    async def run(self) -> None:
        """Polls the server for ever, once a second. While nobody watches, it polls every five seconds."""
        while True:
            await self.look()
            await asyncio.sleep(SECONDS_PER_LOOK if self.watched() else SECONDS_PER_IDLE_LOOK)

    async def look(self) -> None:
        """Asks the server once, and wakes the event streams of the viewers."""
        try:
            async with self._budget.call():
                info = await self._client.server_info(timeout=PATIENCE)
        except ReplayError as error:
            if not self._problem:
                self._problem_since = time.time()
            self._problem = str(error)
            self._history.append({"t": time.time(), "tables": {}})  # a gap in the charts
        else:
            self._problem = ""
            self._record(info)
        async with self._new_look:
            self._looks += 1
            self._look_event = _event("look", self._document())
            self._new_look.notify_all()

    async def events(self) -> AsyncGenerator[bytes]:
        """The server-sent events of one viewer: the history of the charts, then every look until `close`.

        A viewer that reads slowly misses looks, and gets the newest one next.
        """
        self.viewers += 1
        try:
            yield _event("history", list(self._history))
            last_sent_look = 0
            while True:
                async with self._new_look:
                    while self._looks == last_sent_look and not self._closed:
                        await self._new_look.wait()
                    last_sent_look = self._looks
                    look_event = self._look_event
                if self._closed:
                    return
                yield look_event  # outside of the lock, because the viewer may be slow
        finally:
            self.viewers -= 1
            self._last_viewer = time.monotonic()

    async def close(self) -> None:
        """Ends the events of every viewer."""
        async with self._new_look:
            self._closed = True
            self._new_look.notify_all()

    def _record(self, info: ServerInfo) -> None:
        """Adds a point to the charts: for each table, inserts a second, samples a second, and the size.

        The rates are means over the time since the last answer; None: not known.
        """
        rates = rates_between(self.info, info)
        points: dict[str, list[Any]] = {}
        for name, table in info.tables.items():
            inserts_per_second, samples_per_second = rates.get(name, (None, None))
            points[name] = [inserts_per_second, samples_per_second, table.size]
        self.info = info
        self._history.append({"t": time.time(), "tables": points})

    def _document(self) -> dict[str, Any]:
        """The fields of a look: the server's numbers, the fields of `more`, and the findings and verdict from both."""
        info = self.info
        now = time.time()
        look: dict[str, Any] = {
            "address": self._client.address,
            "time": now,
            "problem": self._problem,
            "problem_since": self._problem_since,
            "point": self._history[-1],
            "server": None,
        }
        look |= self._more()
        findings: list[Finding] = []
        if info is not None:
            findings = list(diagnose(info, version("replay-server"), now))
            server = document(info, pb.ServerInfo.DESCRIPTOR)
            # The page expects these fields beside `server`, not in it.
            look |= {name: server.pop(name) for name in ("policy", "admission", "clients", "overdue")}
            look["tables"] = list(server.pop("tables").values())
            look["server"] = server
            look["shards"] = [_shard_row(name, shard) for name, shard in shards_of(info)]
        if self._problem:  # `info` is an old answer. The page shows its numbers, but the verdict must not use them.
            info = None
            findings = [Finding("connection", Level.FAILURE, self._problem, REMEDY)]
        # `signals`, `trend` and `run` are among the fields of `more`.
        look["verdict"] = verdict(info, findings, look["signals"])
        # The page gets the trend only in the sentence of `learning`.
        look["learning"] = learning(look.pop("trend"), look["run"], info, look["signals"])
        look["findings"] = [vars(finding) for finding in findings]
        look["signals"] = [vars(finding) for finding in look["signals"]]
        return look
