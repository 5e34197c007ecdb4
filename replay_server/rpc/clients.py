"""Clients: who inserts, samples and publishes, by name, when each was last seen, and which side of the run is gone.

* A client names itself in its user agent. Nothing depends on the name but what people read.
* Only calls that need a read-write token leave a trace here. A read-only client cannot.
* The most MAX_CLIENTS names seen last are kept, each with at most MAX_NAME characters.

A side is gone if it has done nothing for three usual intervals, at least LONG_WAIT: this is the one rule for whoever
looks at a server. A side is not gone if

* nothing is known of its rhythm yet,
* one of its requests waits here, so that it is there,
* or every client that did its work has said that it ends (Leave).

The trainer's rhythm is that of policy versions or, if it publishes none, of its samples. Nobody inserts into a table
less often than once a step, so generators have three of the trainer's intervals, if those are longer than their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, TypeAlias

import grpc

from replay_protos import replay_pb2 as pb
from replay_server.config import MAX_CLIENTS, MAX_NAME
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.table import Table
from replay_server.tables.waiting import Line

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""A call, as gRPC describes it."""

_PREFIX = "replay/"


class Side(StrEnum):
    """What a client does here."""

    GENERATOR = "generator"
    """It inserts, or asks for permits to generate."""
    TRAINER = "trainer"
    """It samples, or publishes policy versions."""


@dataclass
class Client:
    """One name. Several clients with the same name are one."""

    name: str
    roles: set[Side] = field(default_factory=set)
    seen: float = 0.0
    """When it sent its last request, by the clock of the buffer."""
    open: int = 0
    """Calls and streams that are open."""
    ended: bool = False
    """It said that it ends, and has sent nothing since."""


Seen = Callable[[], None]
"""Notes a sign of life of one client: a message on its open stream."""


class Clients:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_name: OrderedDict[str, Client] = OrderedDict()
        """The one that was seen last stands last."""

    def __iter__(self) -> Iterator[Client]:
        """The one that was seen last comes first."""
        return reversed(self._by_name.values())

    @contextmanager
    def calling(self, context: Context, role: Side) -> Iterator[Seen]:
        """Counts a call of a client as open, and as its sign of life. So is each call of the result."""
        if not (name := name_of(context)):
            yield _nobody
            return
        client = self._see(name)
        client.roles.add(role)
        client.open += 1

        def seen() -> None:
            self._see(name)

        try:
            yield seen
        finally:
            client.open -= 1

    def leave(self, context: Context) -> None:
        """The client says that it ends."""
        if (client := self._by_name.get(name_of(context))) is not None:
            client.ended = True

    def of(self, role: Side) -> Sequence[Client]:
        """The clients with this role, the one seen last first."""
        return [client for client in self if role in client.roles]

    def missed(self, role: Side) -> Sequence[Client]:
        """Those of whom something is expected: all that have not ended. Nobody if the one seen last has.

        One that was killed long ago, and replaced, is not waited for after its successor has ended.
        """
        known = self.of(role)
        return [] if known and known[0].ended else [client for client in known if not client.ended]

    def _see(self, name: str) -> Client:
        client = self._by_name.get(name)
        if client is None:
            client = self._by_name[name] = Client(name)
            if len(self._by_name) > MAX_CLIENTS:
                self._by_name.popitem(last=False)
        else:
            self._by_name.move_to_end(name)
        client.seen, client.ended = self._clock(), False
        return client


def name_of(context: Context) -> str:
    """The name of the client that calls; empty: it has none."""
    for key, value in context.invocation_metadata() or ():
        if key == "user-agent" and isinstance(value, str) and value.startswith(_PREFIX):
            return value[len(_PREFIX) : len(_PREFIX) + MAX_NAME + 1].partition(" ")[0][:MAX_NAME]
    return ""


def _nobody() -> None:
    """The sign of life of a client without a name."""


LONG_WAIT = 20.0
"""Seconds: no shorter wait or silence is worth a word."""
FIRST_STEPS = 120.0
"""Seconds after which a wait is long while both sides are there and their rhythm is not known yet."""
PATIENCE = 3.0
"""Usual intervals after which a wait or silence is long."""
_MOST_NAMES = 3
"""Names of clients in one reason."""


def long_wait(buffer: ReplayBuffer, clients: Clients) -> float:
    """Seconds from which on a wait is long."""
    if step := _usual_step(buffer):
        return _limit(step)
    return FIRST_STEPS if all(clients.missed(role) for role in Side) else LONG_WAIT


def silences(buffer: ReplayBuffer, clients: Clients) -> Iterator[pb.Silence]:
    """Each side that is gone; of generators each table that they do not fill any more."""
    now, lines = buffer.clock(), buffer.lines.values()
    if (gone := clients.missed(Side.TRAINER)) and not _any_waits(line.samples for line in lines):
        yield from _trainer(buffer, now, gone)
    waits: list[Line[Any]] = [line.inserts for line in lines]
    if buffer.admission is not None:
        waits.append(buffer.admission.line)
    if (gone := clients.missed(Side.GENERATOR)) and not _any_waits(waits):
        yield from _generators(buffer, now, gone)


def _trainer(buffer: ReplayBuffer, now: float, gone: Sequence[Client]) -> Iterator[pb.Silence]:
    policy, usual = buffer.policy, buffer.versions.usual
    if usual:
        if (age := now - policy.set_at) > _limit(usual):
            what = f"no new policy version since version {policy.version}"
            yield _silence(Side.TRAINER, "", age, usual, what, now, gone)
        return
    # A pool may be sampled seldom. Only when no table is sampled any more is the trainer gone.
    sampled = [table for table in buffer.tables.values() if table.sampled.rhythm.usual]
    if sampled and all(now - table.sampled.last > _limit(table.sampled.rhythm.usual) for table in sampled):
        last = max(sampled, key=lambda table: table.sampled.last)
        age, what = now - last.sampled.last, f"nobody samples {last.name}"
        yield _silence(Side.TRAINER, last.name, age, last.sampled.rhythm.usual, what, now, gone)


def _generators(buffer: ReplayBuffer, now: float, gone: Sequence[Client]) -> Iterator[pb.Silence]:
    forwarded = {table.config.forward_to for table in buffer.tables.values()}
    for table in buffer.tables.values():
        # What another table feeds gets its items when the trainer samples that one.
        if table.name in forwarded or not (usual := table.inserted.rhythm.usual):
            continue
        usual = max(usual, _usual_step(buffer))
        if (age := now - table.inserted.last) > _limit(usual):
            yield _silence(Side.GENERATOR, table.name, age, usual, f"nobody inserts into {table.name}", now, gone)


def _silence(
    role: Side, table: str, age: float, usual: float, what: str, now: float, gone: Sequence[Client]
) -> pb.Silence:
    names = ", ".join(f"{client.name} ({_seconds(now - client.seen)} ago)" for client in gone[:_MOST_NAMES])
    more = f" and {len(gone) - _MOST_NAMES} more" if len(gone) > _MOST_NAMES else ""
    return pb.Silence(
        side="trainer" if role is Side.TRAINER else "generators",
        table=table,
        age=age,
        usual=usual,
        reason=f"{what}, {_seconds(age)} ago; usual: {_seconds(usual)}; last seen: {names}{more}",
    )


def _any_waits(lines: Iterable[Line[Any]]) -> bool:
    return any(line.still_since is not None for line in lines)


def _usual_step(buffer: ReplayBuffer) -> float:
    """Seconds that a step of the trainer usually takes, as far as its traces here tell; 0: unknown."""
    if usual := buffer.versions.usual:
        return usual
    return max(chain.from_iterable(map(_usual_uses, buffer.tables.values())), default=0.0)


def _usual_uses(table: Table) -> tuple[float, float]:
    return table.inserted.rhythm.usual, table.sampled.rhythm.usual


def _limit(usual: float) -> float:
    return max(LONG_WAIT, PATIENCE * usual)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
