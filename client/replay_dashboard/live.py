"""Live: one poller that asks the server for its state, and sends it to every viewer."""

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
"""Looks (polls of the server) that the charts show."""
SECONDS_PER_LOOK = 1.0
SECONDS_PER_IDLE_LOOK = 5.0
"""While nobody watches."""
PATIENCE = 3.0
"""Seconds in which the server must answer; after them the page says that it does not."""
MOST_VIEWERS = 64
REMEDY = "start it with `replay serve`, or give --address HOST:PORT; the page goes on by itself"


def _shard(name: str, info: ServerInfo | None) -> dict[str, Any]:
    """The row of one server of several; None: it does not answer."""
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


def dumps(found: object) -> bytes:
    """The document as compact JSON."""
    return json.dumps(plain(found), separators=(",", ":"), allow_nan=False).encode()


def _event(name: str, news: object) -> bytes:
    """A server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), dumps(news))


class Live:
    """The state of the server, now and over the last minutes."""

    def __init__(self, client: AsyncReplayClient, budget: Budget, more: Callable[[], dict[str, Any]]) -> None:
        """`more` returns the fields that this process adds to each look."""
        self.info: ServerInfo | None = None
        self.viewers = 0
        self._client = client
        self._budget = budget
        self._more = more
        self._problem = ""
        self._problem_since = 0.0
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._looks = 0
        self._frame = b""
        self._new_look = asyncio.Condition()
        self._last_viewer = time.monotonic()
        self._closed = False

    def watched(self) -> bool:
        """True if there is a viewer, or was one in the last minute."""
        return self.viewers > 0 or time.monotonic() - self._last_viewer < 60.0

    def tables(self) -> list[str]:
        return [] if self.info is None or self._problem else list(self.info.tables)

    async def run(self) -> None:
        """Polls the server for ever: each second, or each five while nobody watches."""
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
            self._history.append({"t": time.time(), "tables": {}})
        else:
            self._problem = ""
            self._record(info)
        async with self._new_look:
            self._looks += 1
            self._frame = _event("look", self._document())
            self._new_look.notify_all()

    async def events(self) -> AsyncGenerator[bytes]:
        """Server-sent events: the last minutes, then every look. A slow viewer gets only the newest look."""
        self.viewers += 1
        try:
            yield _event("history", list(self._history))
            last_sent = 0
            while True:
                async with self._new_look:
                    while self._looks == last_sent and not self._closed:
                        await self._new_look.wait()
                    last_sent = self._looks
                    frame = self._frame
                if self._closed:
                    return
                yield frame
        finally:
            self.viewers -= 1
            self._last_viewer = time.monotonic()

    async def close(self) -> None:
        """Ends the events of every viewer."""
        async with self._new_look:
            self._closed = True
            self._new_look.notify_all()

    def _record(self, info: ServerInfo) -> None:
        """Adds a point to the charts. Its rates are the change of the counters since the previous look."""
        rates = rates_between(self.info, info)
        points = {name: [*rates.get(name, (None, None)), table.size] for name, table in info.tables.items()}
        self.info = info
        self._history.append({"t": time.time(), "tables": points})

    def _document(self) -> dict[str, Any]:
        info = self.info
        now = time.time()
        look: dict[str, Any] = {
            "address": self._client.address,
            "time": now,
            "problem": self._problem,
            "problem_since": self._problem_since,
            "point": self._history[-1],
            "server": None,
        } | self._more()
        findings: list[Finding] = []
        if info is not None:
            findings = list(diagnose(info, version("replay-server"), now))
            server = document(info, pb.ServerInfo.DESCRIPTOR)
            look |= {name: server.pop(name) for name in ("policy", "admission", "clients", "overdue")}
            look |= {"tables": list(server.pop("tables").values()), "server": server}
            look["shards"] = [_shard(name, shard) for name, shard in shards_of(info)]
        if self._problem:
            info = None
            findings = [Finding("connection", Level.FAILURE, self._problem, REMEDY)]
        look["verdict"] = verdict(info, findings, look["signals"])
        look["learning"] = learning(look.pop("trend"), look["run"], info, look["signals"])
        look["findings"] = [vars(finding) for finding in findings]
        look["signals"] = [vars(finding) for finding in look["signals"]]
        return look
