"""Info: the state of the buffer, of its tables and of checkpoints, as the protobuf messages that clients get.

It also says who of the run is overdue: this is the one rule for whoever looks at a server. A role is overdue if it has
done nothing for three usual intervals, at least LONG_WAIT; or if its clients were connected for LONG_WAIT, and then not
for LONG_WAIT: who was paused often would otherwise be missed late. It is not overdue if

* no usual interval of it is known yet, and no client of it was connected for so long,
* one of its requests waits here, so that it is there,
* or every client that did its work has said that it ends (Leave).

The trainer's interval is that of policy versions or, if it publishes none, of its samples. Nobody inserts into a table
less often than once a step, so generators have three of the trainer's intervals, if those are longer than their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from replay_protos import replay_pb2 as pb
from replay_server.rpc.clients import Client, ClientRole, Clients
from replay_server.storage.checkpoints import Checkpoint
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.columns import FloatArray, IntArray
from replay_server.tables.extensions.admission import Admission
from replay_server.tables.extensions.history import History
from replay_server.tables.extensions.permit_tables import PermitTables
from replay_server.tables.meters import Meter
from replay_server.tables.table import Table
from replay_server.tables.waiting import Line


def policy(buffer: ReplayBuffer) -> pb.Policy:
    current = buffer.policy
    age = max(0.0, buffer.clock() - current.set_at)
    return pb.Policy(
        version=current.version,
        weights=current.weights,
        age=age,
        interval=buffer.versions.interval,
        state=history.last_state if (history := History.of(buffer)) is not None else "",
    )


def server_info(buffer: ReplayBuffer, names: Sequence[str]) -> pb.ServerInfo:
    """The buffer's part of ServerInfo, with the tables of `names`; without names, with all tables."""
    tables = [buffer.table(name) for name in dict.fromkeys(names)] or list(buffer.tables.values())
    info = pb.ServerInfo(
        policy=policy(buffer),
        tables=[table_info(buffer, table) for table in tables],
        items=len(buffer.items),
        bytes=buffer.items.bytes,
        max_bytes=int(buffer.items.max_bytes) if buffer.items.max_bytes < float("inf") else 0,
        damaged=buffer.damaged,
        **vars(buffer.storage.facts()),
    )
    if (admission := Admission.of(buffer)) is not None:
        info.admission.CopyFrom(
            pb.AdmissionInfo(
                fresh_groups_per_step=admission.config.fresh_groups_per_step,
                max_staleness=admission.config.max_staleness,
                accepted=admission.accepted,
                running=admission.running,
                capacity=admission.capacity,
                acquiring=_waiting(admission.line, lambda pending: admission.why_no_permits(pending.count)),
                expired=admission.expired,
                table=admission.table,
                partial_groups=len(admission.partial_groups),
                permit_tables=admission.config.permit_tables,
            )
        )
    return info


def table_info(buffer: ReplayBuffer, table: Table) -> pb.TableInfo:
    now, lines, columns = buffer.clock(), buffer.lines[table.name], table.columns
    slots = columns.occupied()
    retained = np.array(list(columns.retained.values()), dtype=np.int64)
    staleness = buffer.policy.version - columns.policy_version[slots]
    np.maximum(staleness, 0, out=staleness)
    limiter, flow = table.limiter, table.flow.measured()
    # The reader of copies waits for the next item; that is no standstill.
    idle = pb.Waiting(count=len(lines.samples)) if table.name in buffer.items.copies else None
    return pb.TableInfo(
        name=table.name,
        config=table.config.model_dump_json(),
        size=table.size,
        bytes=table.bytes,
        reserved=table.outstanding,
        inserting=_waiting(lines.inserts, buffer.why_waiting),
        sampling=idle or _waiting(lines.samples, buffer.why_waiting),
        age=quantiles_of(now - columns.inserted_at[slots]),
        staleness=quantiles_of(staleness),
        priority=quantiles_of(columns.priority[slots]),
        effective_priority=quantiles_of(effective_priorities(table, slots)),
        inserts_per_second=table.inserted.per_second(now),
        samples_per_second=table.sampled.per_second(now),
        insert_blocked_share=lines.inserts.blocked.share(now),
        sample_blocked_share=lines.samples.blocked.share(now),
        limiter=pb.Limiter(
            samples_per_insert=limiter.samples_per_insert,
            min_size=limiter.min_size,
            min_diff=limiter.min_diff,
            max_diff=limiter.max_diff,
            difference=limiter.inserts * limiter.samples_per_insert - limiter.samples,
            size=max(0, limiter.size),
        ),
        inserted=_arrival_times(buffer, table.inserted, now),
        sampled=_arrival_times(buffer, table.sampled, now),
        values=[pb.ValueInfo(**value) for value in table.balanced.values()] if table.balanced else [],
        incomplete_items=table.waiting.count,
        missing_columns=[pb.MissingColumn(name=name, items=items) for name, items in table.waiting.lacking().items()],
        incomplete_seconds=max(0.0, now - table.waits_since) if table.waiting.count else 0.0,
        tags=[pb.TagCounts(**counts.info()) for counts in table.tag_counts.values() if counts.has_values],
        flow=None if flow is None else pb.Flow(**flow),
        retained=retained.size,
        retained_bytes=int(columns.cost[retained].sum()),
        **table.counts(),
    )


def _waiting(line: Line[Any], why_waiting: Callable[[Any], str]) -> pb.Waiting:
    reason = why_waiting(line.head) if line.awaited and line.head is not None else ""
    return pb.Waiting(count=line.awaited, reason=reason, seconds=line.standstill)


def _arrival_times(buffer: ReplayBuffer, activity: Meter, now: float) -> pb.ArrivalTimes:
    return pb.ArrivalTimes(age=max(0.0, now - activity.last), interval=_usual(buffer, activity))


def _usual(buffer: ReplayBuffer, activity: Meter) -> float:
    """Seconds between two bursts; 0: unknown."""
    return activity.arrivals.interval(buffer.versions.interval)


def clients(buffer: ReplayBuffer, known: Clients) -> list[pb.ClientInfo]:
    now = buffer.clock()
    return [
        pb.ClientInfo(
            name=client.name,
            role=", ".join(sorted(client.roles)),
            age=max(0.0, now - client.last_seen_at),
            open=client.calls.total(),
            ended=client.ended,
            settings=client.settings,
        )
        for client in known
    ]


def effective_priorities(table: Table, slots: IntArray) -> FloatArray:
    """priority ** exponent * 2 ** (-staleness / half_life) of each of `slots` (n,), as the sampler weighs them.

    0 where the priority is 0.
    """
    columns, sampler = table.columns, table.config.sampler
    priorities = columns.priority[slots]
    effective = np.where(priorities > 0, priorities**sampler.exponent, 0.0)
    if sampler.half_life is not None:
        staleness = np.maximum(columns.current_version - columns.policy_version[slots], 0)
        effective *= np.exp2(-staleness / sampler.half_life)
    return effective


MANY = 1 << 13
"""Of more values than this, quantiles are estimated."""
_rng = np.random.default_rng()


def quantiles_of(values: FloatArray | IntArray) -> pb.Quantiles | None:
    """The quantiles of values (n,). None of no values: then the message is absent, and its metrics are.

    Of more than MANY values, p10, p50 and p90 are those of so many drawn at random: to order a million would hold up
    all clients for 60 ms. The share of values below an estimate is off by sqrt(p (1 - p) / MANY), half a percent at the
    median. All else is exact.
    """
    if not values.size:
        return None
    drawn = values if values.size <= MANY else values[_rng.integers(values.size, size=MANY)]
    p10, p50, p90 = np.quantile(drawn, [0.1, 0.5, 0.9])
    return pb.Quantiles(min=values.min(), p10=p10, p50=p50, p90=p90, max=values.max(), mean=values.mean())


def checkpoint(found: Checkpoint) -> pb.CheckpointInfo:
    return pb.CheckpointInfo(
        name=found.name,
        created=found.created,
        items=found.items,
        bytes=found.bytes,
        intact=not found.problem,
        policy_version=found.policy_version,
        problem=found.problem,
    )


# ---------------------------------------------------------------------------------------------------- who is gone

LONG_WAIT = 20.0
"""Seconds: no shorter wait or silence is worth a word."""
FIRST_STEPS = 120.0
"""Seconds after which a wait is long while both roles are there and their arrival times are not known yet."""
PATIENCE = 3.0
"""Usual intervals after which a wait or silence is long."""
_MOST_NAMES = 3
"""Names of clients in one reason."""


def long_wait(buffer: ReplayBuffer, clients: Clients) -> float:
    """Seconds from which on a wait is long."""
    if step := _usual_step(buffer):
        return _limit(step)
    return (
        FIRST_STEPS if all(clients.missed(role) for role in (ClientRole.TRAINER, ClientRole.GENERATOR)) else LONG_WAIT
    )


def overdue_clients(buffer: ReplayBuffer, clients: Clients) -> Iterator[pb.OverdueClient]:
    """Trainer and generators that are overdue; of generators each table that they do not fill any more."""
    # Prompts are loaded and drawn by generators, many at once and then none for long.
    tables = [table for table in buffer.trained if table.name not in clients.prompt_tables]
    now, lines = buffer.clock(), [buffer.lines[table.name] for table in tables]
    if (gone := clients.missed(ClientRole.TRAINER)) and not _any_waits(line.samples for line in lines):
        yield from list(_trainer(buffer, tables, now, gone)) or _vanished(ClientRole.TRAINER, now, gone)
    waits: list[Line[Any]] = [line.inserts for line in lines]
    waits += chain.from_iterable(each.lines.values() for each in buffer.extensions)
    if (gone := clients.missed(ClientRole.GENERATOR)) and not _any_waits(waits):
        yield from list(_generators(buffer, tables, now, gone)) or _vanished(ClientRole.GENERATOR, now, gone)


def _trainer(
    buffer: ReplayBuffer, tables: Sequence[Table], now: float, gone: Sequence[Client]
) -> Iterator[pb.OverdueClient]:
    policy, usual = buffer.policy, buffer.versions.interval
    if usual:
        if (age := now - policy.set_at) > _limit(usual):
            what = f"no new policy version since version {policy.version}, for {_seconds(age)}"
            yield _overdue(ClientRole.TRAINER, "", age, usual, what, now, gone)
        return
    # A pool may be sampled seldom. Only when no table is sampled any more is the trainer gone.
    # Generators, and not the trainer, sample partial groups.
    sampled = [table for table in tables if _usual(buffer, table.sampled) and table.name not in _permit_tables(buffer)]
    if sampled and all(now - table.sampled.last > _limit(_usual(buffer, table.sampled)) for table in sampled):
        last = max(sampled, key=lambda table: table.sampled.last)
        age = now - last.sampled.last
        what = f"nobody has sampled {last.name} for {_seconds(age)}"
        yield _overdue(ClientRole.TRAINER, last.name, age, _usual(buffer, last.sampled), what, now, gone)


def _generators(
    buffer: ReplayBuffer, tables: Sequence[Table], now: float, gone: Sequence[Client]
) -> Iterator[pb.OverdueClient]:
    forwarded = {table.config.forward_to for table in tables}
    for table in tables:
        # What another table feeds gets its items when the trainer samples that one.
        # A table of partial groups says itself that nobody works at it.
        if table.name in {*_permit_tables(buffer), *forwarded}:
            continue
        usual = _usual(buffer, table.inserted)
        if not usual:
            continue
        usual = max(usual, _usual_step(buffer))
        if (age := now - table.inserted.last) > _limit(usual):
            what = f"nobody has inserted into {table.name} for {_seconds(age)}"
            yield _overdue(ClientRole.GENERATOR, table.name, age, usual, what, now, gone)


def _permit_tables(buffer: ReplayBuffer) -> Collection[str]:
    """The tables of partial groups."""
    return permit_tables.tables if (permit_tables := PermitTables.of(buffer)) is not None else ()


def _vanished(role: ClientRole, now: float, gone: Sequence[Client]) -> Iterator[pb.OverdueClient]:
    """If the one seen last had a connection for long, and now nobody has."""
    since = now - LONG_WAIT
    if gone[0].vanished(since, LONG_WAIT) and not any(client.calls or client.last_seen_at > since for client in gone):
        age = now - gone[0].left
        yield _overdue(role, "", age, 0.0, f"the last {role} closed its connection {_seconds(age)} ago", now, gone)


def _overdue(
    role: ClientRole, table: str, age: float, usual: float, what: str, now: float, gone: Sequence[Client]
) -> pb.OverdueClient:
    names = ", ".join(f"{client.name} ({_seconds(now - client.last_seen_at)} ago)" for client in gone[:_MOST_NAMES])
    more = f" and {len(gone) - _MOST_NAMES} more" if len(gone) > _MOST_NAMES else ""
    usually = f" (usually every {_seconds(usual)})" if usual else ""
    return pb.OverdueClient(
        role=role,
        table=table,
        age=age,
        interval=usual,
        reason=f"{what}{usually}; last seen: {names}{more}",
    )


def _any_waits(lines: Iterable[Line[Any]]) -> bool:
    return any(len(line) or line.still_since is not None for line in lines)


def _usual_step(buffer: ReplayBuffer) -> float:
    """Seconds that a step of the trainer usually takes, as far as its traces here tell; 0: unknown."""
    if usual := buffer.versions.interval:
        return usual
    uses = ((_usual(buffer, table.inserted), _usual(buffer, table.sampled)) for table in buffer.trained)
    return max(chain.from_iterable(uses), default=0.0)


def _limit(usual: float) -> float:
    return max(LONG_WAIT, PATIENCE * usual)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
