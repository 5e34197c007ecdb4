"""`replay watch`: prints a line for each event on a server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replay_protos import replay_pb2 as pb
from replay_server.cli.connection import Timeout, ask, connect
from replay_server.cli.options import with_access
from replay_server.cli.output import AsJson, fail, print_json, say

if TYPE_CHECKING:
    from replay_client.records import ServerInfo, TableInfo

Event = dict[str, Any]


class Kind(StrEnum):
    POLICY = "policy"
    TABLE = "table"
    BLOCKED = "blocked"
    SERVER = "server"


@with_access
def watch(
    access: dict[str, Any],
    only: Annotated[list[Kind] | None, typer.Option(help="Only events of this kind; repeatable. [all]")] = None,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks at the server.")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many lines.")] = None,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
) -> None:
    """Print a line for each event: new policy versions, items in and out, waits, a server that comes or goes.

    With --json each line is a JSON document.
    """
    from replay_client.errors import DeadlineExceededError, ReplayError, ServerUnavailableError

    changes, printed = Changes(), 0
    with connect(access, timeout) as client:
        info: ServerInfo | None = ask(client.server_info)
        while True:
            for event in changes.since_last(info):
                if only and event["event"] not in only:
                    continue
                if as_json:
                    print_json({"time": time.time()} | event, indent=None)
                else:
                    say(f"{time.strftime('%H:%M:%S')} {in_words(event)}")
                printed += 1
                if printed == count:
                    return
            time.sleep(interval)
            try:
                info = client.server_info()
            except (ServerUnavailableError, DeadlineExceededError):
                info = None
            except ReplayError as error:  # it refuses: the token was revoked
                fail(error)


@dataclass
class Changes:
    """Finds what changed between two looks at a server."""

    last: ServerInfo | None = None
    there: bool = True
    waiting: set[tuple[str, str]] = field(default_factory=set)

    def since_last(self, info: ServerInfo | None) -> Iterator[Event]:
        """The events since the last call. `info` None: no server answered."""
        if info is None:
            if self.there:
                yield {"event": "server", "state": "gone"}
            self.there = False
            return
        last, self.last = self.last, info
        if last is not None and last.server_id != info.server_id:
            yield {"event": "server", "state": "restarted"}
            last = None
        elif not self.there:
            yield {"event": "server", "state": "back"}
        self.there = True
        if last is None or (last.policy.version, last.policy.weights) != (info.policy.version, info.policy.weights):
            yield {"event": "policy", "version": info.policy.version, "weights": info.policy.weights}
        for name, table in info.tables.items():
            before = None if last is None else last.tables.get(name)
            if before is not None and (moved := _moved(before, table)):
                yield {"event": "table", "table": name, **moved, "size": table.size}
            yield from self._waits(table)

    def _waits(self, table: TableInfo) -> Iterator[Event]:
        for verb, wait in (("inserting", table.inserting), ("sampling", table.sampling)):
            place, facts = (table.name, verb), {"event": "blocked", "table": table.name, "verb": verb}
            if wait.count and place not in self.waiting:
                self.waiting.add(place)
                yield facts | {"state": "begins", "count": wait.count, "reason": wait.reason}
            elif not wait.count and place in self.waiting:
                self.waiting.remove(place)
                yield facts | {"state": "ends", "count": 0, "reason": ""}


_COUNTERS = tuple(
    field.name
    for field in pb.TableInfo.DESCRIPTOR.fields
    if field.type == field.TYPE_UINT64 and field.name not in ("size", "bytes", "reserved", "duplicates")
)
"""The fields of a TableInfo that only grow, until a reset. `duplicates` are retries, and no event."""


def _moved(before: TableInfo, after: TableInfo) -> dict[str, int]:
    """How far each counter went up. After a reset, which sets it to 0, its whole value counts."""
    moved = {}
    for name in _COUNTERS:
        old, new = getattr(before, name), getattr(after, name)
        if new != old:
            moved[name] = new - old if new > old else new
    return moved


def in_words(event: Event) -> str:
    match event["event"]:
        case "server":
            return f"the server is {event['state']}" if event["state"] != "restarted" else "the server was restarted"
        case "policy":
            return f"policy version {event['version']} {event['weights']}".rstrip()
        case "table":
            counts = [f"{value} {name.replace('_', ' ')}" for name, value in event.items() if name in _COUNTERS]
            return f"{event['table']}: {', '.join(counts)}; size {event['size']}"
        case _:
            if event["state"] == "ends":
                return f"{event['table']}: {event['verb']} goes on"
            return f"{event['count']} wait: {event['reason']}"
