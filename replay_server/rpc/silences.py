"""Silences: which side of the run is gone, and from when on a wait is long. One rule, for whoever looks at a server.

A side is gone if it has done nothing for three usual intervals, at least LONG_WAIT. It is not gone if

* nothing is known of its rhythm yet,
* one of its requests waits here, so that it is there,
* or every client that did its work has said that it ends (Leave).

The trainer's rhythm is that of policy versions or, if it publishes none, of its samples. Nobody inserts into a table
less often than once a step, so generators have three of the trainer's intervals, if those are longer than their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from replay_protos import replay_pb2 as pb
from replay_server.rpc.clients import Client, Clients, Role
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.table import Table
from replay_server.tables.waiting import Line

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
    return FIRST_STEPS if all(clients.missed(role) for role in Role) else LONG_WAIT


def silences(buffer: ReplayBuffer, clients: Clients) -> Iterator[pb.Silence]:
    """Each side that is gone; of generators each table that they do not fill any more."""
    now, lines = buffer.clock(), buffer.lines.values()
    if (gone := clients.missed(Role.TRAINER)) and not _any_waits(line.samples for line in lines):
        yield from _trainer(buffer, now, gone)
    waits: list[Line[Any]] = [line.inserts for line in lines]
    if buffer.admission is not None:
        waits.append(buffer.admission.line)
    if (gone := clients.missed(Role.GENERATOR)) and not _any_waits(waits):
        yield from _generators(buffer, now, gone)


def _trainer(buffer: ReplayBuffer, now: float, gone: Sequence[Client]) -> Iterator[pb.Silence]:
    policy, usual = buffer.policy, buffer.versions.usual
    if usual:
        if (age := now - policy.set_at) > _limit(usual):
            what = f"no new policy version since version {policy.version}"
            yield _silence(Role.TRAINER, "", age, usual, what, now, gone)
        return
    # A pool may be sampled seldom. Only when no table is sampled any more is the trainer gone.
    sampled = [table for table in buffer.tables.values() if table.sampled.rhythm.usual]
    if sampled and all(now - table.sampled.last > _limit(table.sampled.rhythm.usual) for table in sampled):
        last = max(sampled, key=lambda table: table.sampled.last)
        age, what = now - last.sampled.last, f"nobody samples {last.name}"
        yield _silence(Role.TRAINER, last.name, age, last.sampled.rhythm.usual, what, now, gone)


def _generators(buffer: ReplayBuffer, now: float, gone: Sequence[Client]) -> Iterator[pb.Silence]:
    forwarded = {table.config.forward_to for table in buffer.tables.values()}
    for table in buffer.tables.values():
        # What another table feeds gets its items when the trainer samples that one.
        if table.name in forwarded or not (usual := table.inserted.rhythm.usual):
            continue
        usual = max(usual, _usual_step(buffer))
        if (age := now - table.inserted.last) > _limit(usual):
            yield _silence(Role.GENERATOR, table.name, age, usual, f"nobody inserts into {table.name}", now, gone)


def _silence(
    role: Role, table: str, age: float, usual: float, what: str, now: float, gone: Sequence[Client]
) -> pb.Silence:
    names = ", ".join(f"{client.name} ({_seconds(now - client.seen)} ago)" for client in gone[:_MOST_NAMES])
    more = f" and {len(gone) - _MOST_NAMES} more" if len(gone) > _MOST_NAMES else ""
    return pb.Silence(
        side="trainer" if role is Role.TRAINER else "generators",
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
