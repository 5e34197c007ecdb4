"""Live: one poller that asks the server how it is, and tells every viewer."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from importlib.metadata import version
from typing import Any

from google.protobuf.message import Message

from replay_client.aio import AsyncReplayClient
from replay_client.dashboard.budget import Budget
from replay_client.dashboard.health import verdict
from replay_client.diagnosis import Finding, Level, diagnose
from replay_client.errors import ReplayError
from replay_client.records import ServerInfo

HISTORY = 600
"""Looks that the charts show."""
SECONDS_PER_LOOK = 1.0
SECONDS_PER_IDLE_LOOK = 5.0
"""While nobody watches."""
PATIENCE = 3.0
"""Seconds in which the server has to answer."""
MOST_VIEWERS = 64


class Live:
    """What the server says of itself, now and over the last minutes."""

    def __init__(self, client: AsyncReplayClient, budget: Budget, more: Callable[[], dict[str, Any]]) -> None:
        """`more`: what else each look tells."""
        self.info: ServerInfo | None = None
        self.viewers = 0
        self._client = client
        self._budget = budget
        self._more = more
        self._problem = ""
        self._problem_since = 0.0
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._look: dict[str, Any] = {}
        self._frame = b""
        self._looks = 0
        self._moved: dict[tuple[str, str], tuple[int, float]] = {}
        self._seen = asyncio.Condition()
        self._last_viewer = time.monotonic()

    @property
    def watched(self) -> bool:
        """Whether somebody looks, or did in the last minute."""
        return self.viewers > 0 or time.monotonic() - self._last_viewer < 60.0

    def tables(self) -> list[str]:
        return [] if self.info is None or self._problem else list(self.info.tables)

    async def run(self) -> None:
        """Looks for ever."""
        while True:
            await self.look()
            await asyncio.sleep(SECONDS_PER_LOOK if self.watched else SECONDS_PER_IDLE_LOOK)

    async def look(self) -> None:
        """Asks the server once, and wakes the viewers."""
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
        self._look = self._document()
        async with self._seen:
            self._looks += 1
            self._frame = event("look", self._look)
            self._seen.notify_all()

    async def events(self) -> AsyncGenerator[bytes]:
        """Server-sent events: the last minutes, then every look. A slow viewer gets the newest only."""
        self.viewers += 1
        try:
            yield event("history", list(self._history))
            seen = -1
            while True:
                async with self._seen:
                    while self._looks == seen or not self._frame:
                        await self._seen.wait()
                    seen, frame = self._looks, self._frame
                yield frame
        finally:
            self.viewers -= 1
            self._last_viewer = time.monotonic()

    def _record(self, info: ServerInfo) -> None:
        """A point of the charts: rates are what the counters did since the look before."""
        last, self.info = self.info, info
        point: dict[str, Any] = {"t": time.time(), "tables": {}}
        seconds = info.uptime - last.uptime if last is not None and last.server_id == info.server_id else 0.0
        for name, table in info.tables.items():
            before = last.tables.get(name) if last is not None and seconds > 0 else None
            rates: list[float | None] = [None, None, table.size]
            if before is not None and table.inserts >= before.inserts and table.samples >= before.samples:
                rates[:2] = (table.inserts - before.inserts) / seconds, (table.samples - before.samples) / seconds
            point["tables"][name] = rates
            for verb, count in (("insert", table.inserts), ("sample", table.samples)):
                if self._moved.get((name, verb), (-1, 0.0))[0] != count:
                    self._moved[name, verb] = count, time.time()
        self._history.append(point)

    def _document(self) -> dict[str, Any]:
        info = self.info
        document: dict[str, Any] = {
            "address": self._client.address,
            "time": time.time(),
            "problem": self._problem,
            "problem_since": self._problem_since if self._problem else None,
            "point": self._history[-1],
            "server": None,
        } | self._more()
        findings: list[Finding] = []
        if self._problem:
            remedy = "start it with `replay serve`, or give --address HOST:PORT; the page goes on by itself"
            findings.append(Finding("connection", Level.FAILURE, self._problem, remedy))
        elif info is not None:
            findings += diagnose(info, version("replay-server"), time.time())
        if info is not None:
            server = {name: value for name, value in vars(info).items() if isinstance(value, str | int | float)}
            document["server"] = server | {"server_id": str(info.server_id)}
            document["policy"] = vars(info.policy)
            document["admission"] = None if info.admission is None else fields_of(info.admission)
            document["tables"] = [
                fields_of(table) | {"config": json.loads(table.config)} for table in info.tables.values()
            ]
        document["findings"] = [vars(finding) for finding in findings]
        document["idle"] = idle = {
            name: {verb: time.time() - self._moved[name, verb][1] for verb in ("insert", "sample")}
            for name in (info.tables if info is not None else ())
        }
        document["verdict"] = verdict(None if self._problem else info, findings, idle, document["signals"])
        return document


def fields_of(message: Message) -> dict[str, Any]:
    """All fields of a message, those of its messages included."""
    values = ((field, getattr(message, field.name)) for field in message.DESCRIPTOR.fields)
    return {field.name: fields_of(value) if field.message_type else value for field, value in values}


def event(name: str, document: object) -> bytes:
    """A server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + dumps(document) + b"\n\n"


def dumps(document: object) -> bytes:
    """JSON in which NaN and infinities are null, and a lone surrogate is escaped."""
    return json.dumps(_finite(document), separators=(",", ":"), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
