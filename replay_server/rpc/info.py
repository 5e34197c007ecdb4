"""Info: the state of the buffer, of its tables and of checkpoints, as the protobuf messages that clients get.

It also decides whether the trainer or the generators of a run are overdue, so that all programs that look at a server
use the same rule. A role is overdue in two cases:

* It has done nothing for PATIENCE (three) usual intervals, and for LONG_WAIT at least.
* Its clients were connected for LONG_WAIT, and then none of them was connected for LONG_WAIT. Without this case, a role
  with a long usual interval would be reported late.

A role is not overdue if

* none of its usual intervals is known yet, and none of its clients was connected for LONG_WAIT,
* one of its requests waits here, because then the role is still connected,
* or every client of the role has said that it ends (Leave).

The trainer's usual interval is the time between policy versions or, if it publishes none, between its samples. The
generators' usual interval is the time between inserts into a table, but at least a step of the trainer: generators
that wait for the trainer are not overdue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
    """The current policy version, with the location of its weights and the trainer's last state."""
    current = buffer.policy
    history = History.of(buffer)
    return pb.Policy(
        version=current.version,
        weights=current.weights,
        age=max(0.0, buffer.clock() - current.set_at),
        interval=buffer.versions.interval,
        state="" if history is None else history.last_state,
    )


def server_info(buffer: ReplayBuffer, names: Sequence[str]) -> pb.ServerInfo:
    """The part of ServerInfo that describes the buffer, with the tables in `names`; all tables if `names` is empty."""
    tables = list(buffer.tables.values())
    if names:
        tables = [buffer.table(name) for name in dict.fromkeys(names)]
    is_bounded = buffer.items.max_bytes < float("inf")
    info = pb.ServerInfo(
        policy=policy(buffer),
        tables=[table_info(buffer, table) for table in tables],
        items=len(buffer.items),
        bytes=buffer.items.bytes,
        max_bytes=int(buffer.items.max_bytes) if is_bounded else 0,
        damaged=buffer.damaged,
        **vars(buffer.storage.facts()),
    )
    admission = Admission.of(buffer)
    if admission is not None:
        info.admission.CopyFrom(_admission_info(admission))
    return info


def _admission_info(admission: Admission) -> pb.AdmissionInfo:
    """The settings and counts of permits."""
    return pb.AdmissionInfo(
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


def table_info(buffer: ReplayBuffer, table: Table) -> pb.TableInfo:
    """The whole state of one table: settings, counters, waits, rates and quantiles."""
    now = buffer.clock()
    lines = buffer.lines[table.name]
    columns = table.columns
    slots = columns.occupied()  # the slots of the items that are in the table; retained rows are not among them
    retained = np.array(list(columns.retained.values()), dtype=np.int64)  # the slots of the retained rows
    staleness = buffer.policy.version - columns.policy_version[slots]
    np.maximum(staleness, 0, out=staleness)  # after a rollback, items may be newer than the current version
    limiter = table.limiter
    flow = table.flow.measured()
    if table.name in buffer.items.copies:
        # The reader of copies waits for the next item most of the time. This wait is no problem, so it is reported
        # without a reason and without its seconds.
        sampling = pb.Waiting(count=len(lines.samples))
    else:
        sampling = _waiting(lines.samples, buffer.why_waiting)
    return pb.TableInfo(
        name=table.name,
        config=table.config.model_dump_json(),
        size=table.size,
        bytes=table.bytes,
        reserved=table.outstanding,
        inserting=_waiting(lines.inserts, buffer.why_waiting),
        sampling=sampling,
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
    """The message about the requests that wait in a line. `why_waiting` returns the reason why a request waits."""
    reason = ""
    if line.awaited and line.head is not None:
        reason = why_waiting(line.head)
    return pb.Waiting(count=line.awaited, reason=reason, seconds=line.standstill)


def _arrival_times(buffer: ReplayBuffer, activity: Meter, now: float) -> pb.ArrivalTimes:
    """The seconds since the last insert into a table, and the usual seconds between inserts; or both for samples.

    `activity` is the meter of the inserts, or that of the samples.
    """
    return pb.ArrivalTimes(
        age=max(0.0, now - activity.last),
        interval=_usual_interval(buffer, activity),
    )


def _usual_interval(buffer: ReplayBuffer, activity: Meter) -> float:
    """The usual seconds between two bursts of inserts or samples; 0: unknown.

    The usual seconds between two policy versions help to tell the pauses between bursts from those within a burst.
    """
    return activity.arrivals.interval(step=buffer.versions.interval)


def clients(buffer: ReplayBuffer, known: Clients) -> list[pb.ClientInfo]:
    """The named clients. The client seen last comes first."""
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
    """The weight (n,) that the sampler gives to the item in each of `slots` (n,).

    The weight is priority ** exponent * 2 ** (-staleness / half_life). If the priority is 0, the weight is 0. Without a
    half_life, the second factor is 1.
    """
    columns = table.columns
    sampler = table.config.sampler
    priorities = columns.priority[slots]
    effective = np.where(priorities > 0, priorities**sampler.exponent, 0.0)
    if sampler.half_life is not None:
        staleness = np.maximum(columns.current_version - columns.policy_version[slots], 0)
        effective *= np.exp2(-staleness / sampler.half_life)
    return effective


MANY = 1 << 13
"""The quantiles of more values than this are estimated."""
_rng = np.random.default_rng()


def quantiles_of(values: FloatArray | IntArray) -> pb.Quantiles | None:
    """The quantiles of values (n,). None if there are no values: then the message and its metrics are absent.

    If there are more than MANY values, p10, p50 and p90 are estimated from MANY values drawn at random, because to
    order a million values would hold up all clients for 60 ms. The share of all values that lie below an estimate has a
    standard error of sqrt(p (1 - p) / MANY), half a percent at the median. The minimum, the maximum and the mean are
    always exact.
    """
    if not values.size:
        return None
    drawn = values
    if values.size > MANY:
        drawn = values[_rng.integers(values.size, size=MANY)]
    p10, p50, p90 = np.quantile(drawn, [0.1, 0.5, 0.9])
    return pb.Quantiles(
        min=values.min(),
        p10=p10,
        p50=p50,
        p90=p90,
        max=values.max(),
        mean=values.mean(),
    )


def checkpoint(listed: Checkpoint) -> pb.CheckpointInfo:
    """A checkpoint, as clients get it."""
    return pb.CheckpointInfo(
        name=listed.name,
        created=listed.created,
        items=listed.items,
        bytes=listed.bytes,
        intact=not listed.problem,
        policy_version=listed.policy_version,
        problem=listed.problem,
    )


# ---------------------------------------------------------------------------------------------------- who is gone

LONG_WAIT = 20.0
"""Seconds. No shorter wait or silence is reported."""
FIRST_STEPS = 120.0
"""Seconds after which a wait is long, while no usual interval is known and both roles are expected to go on."""
PATIENCE = 3.0
"""The number of usual intervals after which a wait or silence is long."""
_MOST_NAMES = 3
"""The most names of clients in one reason."""


def long_wait(buffer: ReplayBuffer, clients: Clients) -> float:
    """The number of seconds after which a wait counts as long."""
    step = _usual_step(buffer)
    if step:
        return _longest_silence(step)
    # No usual interval is known yet. If both roles are expected to go on, their first steps may take long.
    if clients.missed(ClientRole.TRAINER) and clients.missed(ClientRole.GENERATOR):
        return FIRST_STEPS
    return LONG_WAIT


def overdue_clients(buffer: ReplayBuffer, clients: Clients) -> Iterator[pb.OverdueClient]:
    """Yields an entry if the trainer is overdue, and then the entries of overdue generators.

    Generators have one entry for each table that they should fill, or a single entry if they are gone.
    """
    # Tables of prompts say nothing about either role, because generators insert and draw many prompts at once, and then
    # none for long. `trained` are all tables except copies.
    tables = [table for table in buffer.trained if table.name not in clients.prompt_tables]
    now = buffer.clock()
    lines = [buffer.lines[table.name] for table in tables]

    # A role whose request waits here is connected, and is not overdue. Any other role is overdue if it has done nothing
    # for PATIENCE usual intervals (`_overdue_...`), or if it was connected and is gone (`_vanished`).
    trainers = clients.missed(ClientRole.TRAINER)
    if trainers and not _any_waits(table_lines.samples for table_lines in lines):
        overdue = list(_overdue_trainer(buffer, tables, now, trainers))
        if overdue:
            yield from overdue
        else:
            yield from _vanished(ClientRole.TRAINER, now, trainers)

    # Generators wait to insert, or in the line of an extension, such as the line for permits.
    lines_of_generators: list[Line[Any]] = [table_lines.inserts for table_lines in lines]
    for extension in buffer.extensions:
        lines_of_generators += extension.lines.values()
    generators = clients.missed(ClientRole.GENERATOR)
    if generators and not _any_waits(lines_of_generators):
        overdue = list(_overdue_generators(buffer, tables, now, generators))
        if overdue:
            yield from overdue
        else:
            yield from _vanished(ClientRole.GENERATOR, now, generators)


def _overdue_trainer(
    buffer: ReplayBuffer, tables: Sequence[Table], now: float, trainers: Sequence[Client]
) -> Iterator[pb.OverdueClient]:
    """Yields an entry if the trainer has published no policy version for long.

    If the trainer publishes no versions at all, yields an entry if nobody has sampled for long.
    """
    policy = buffer.policy
    usual = buffer.versions.interval
    if usual:
        age = now - policy.set_at
        if age > _longest_silence(usual):
            problem = f"no new policy version since version {policy.version}, for {_seconds(age)}"
            yield _overdue(
                ClientRole.TRAINER, table="", age=age, usual=usual, problem=problem, now=now, clients=trainers
            )
        return  # samples count only for a trainer that publishes no versions
    # Permit tables do not count, because generators, and not the trainer, sample the partial groups in them.
    permit_tables = _permit_tables(buffer)
    sampled_tables = [
        table for table in tables if _usual_interval(buffer, table.sampled) and table.name not in permit_tables
    ]
    if not sampled_tables:  # it is not known how often the trainer usually samples
        return
    # A pool may be sampled seldom, so the trainer is overdue only if it samples no table any more.
    for table in sampled_tables:
        usual = _usual_interval(buffer, table.sampled)
        if now - table.sampled.last <= _longest_silence(usual):
            return
    sampled_last = max(sampled_tables, key=lambda table: table.sampled.last)
    age = now - sampled_last.sampled.last
    usual = _usual_interval(buffer, sampled_last.sampled)
    problem = f"nobody has sampled {sampled_last.name} for {_seconds(age)}"
    yield _overdue(ClientRole.TRAINER, sampled_last.name, age, usual, problem, now, trainers)


def _overdue_generators(
    buffer: ReplayBuffer, tables: Sequence[Table], now: float, generators: Sequence[Client]
) -> Iterator[pb.OverdueClient]:
    """Yields an entry for each table into which generators usually insert, but have inserted nothing for long."""
    # A table that `forward_to` of another table names is filled when the trainer samples the other table, and not by
    # generators. Permit tables are left out, because if nobody fills them, the requests that wait for their items show
    # this.
    not_filled_by_generators = {table.config.forward_to for table in tables}.union(_permit_tables(buffer))
    for table in tables:
        if table.name in not_filled_by_generators:
            continue
        usual = _usual_interval(buffer, table.inserted)
        if not usual:  # too few inserts so far to know how often they come
            continue
        usual = max(usual, _usual_step(buffer))  # generators that wait for the trainer's next step are not overdue
        age = now - table.inserted.last
        if age > _longest_silence(usual):
            problem = f"nobody has inserted into {table.name} for {_seconds(age)}"
            yield _overdue(ClientRole.GENERATOR, table.name, age, usual, problem, now, generators)


def _permit_tables(buffer: ReplayBuffer) -> Collection[str]:
    """The names of the permit tables; empty if there are none."""
    permit_tables = PermitTables.of(buffer)
    return () if permit_tables is None else permit_tables.tables


def _vanished(role: ClientRole, now: float, clients: Sequence[Client]) -> Iterator[pb.OverdueClient]:
    """Yields an entry if the client seen last was connected for LONG_WAIT, and then no client was seen for LONG_WAIT.

    `clients` are the clients of the role. The client seen last comes first.
    """
    since = now - LONG_WAIT
    seen_last = clients[0]
    if not seen_last.vanished(since, seconds=LONG_WAIT):
        return
    # Another client of the role may be connected, or may have been seen since.
    if any(client.calls or client.last_seen_at > since for client in clients):
        return
    age = now - seen_last.left
    problem = f"the last {role} closed its connection {_seconds(age)} ago"
    yield _overdue(role, table="", age=age, usual=0.0, problem=problem, now=now, clients=clients)


def _overdue(
    role: ClientRole, table: str, age: float, usual: float, problem: str, now: float, clients: Sequence[Client]
) -> pb.OverdueClient:
    """The entry of a role that has been silent for `age` seconds, with the reason in words.

    `table`: the table that the role has not used; "": the entry is about no table. `usual`: seconds of the role's usual
    interval; 0: unknown. `problem`: the first clause of the reason. `clients`: those of the role, the last seen first.
    """
    reason = problem
    if usual:
        reason += f" (usually every {_seconds(usual)})"
    names = [f"{client.name} ({_seconds(now - client.last_seen_at)} ago)" for client in clients[:_MOST_NAMES]]
    reason += f"; last seen: {', '.join(names)}"
    if len(clients) > _MOST_NAMES:
        reason += f" and {len(clients) - _MOST_NAMES} more"
    return pb.OverdueClient(role=role, table=table, age=age, interval=usual, reason=reason)


def _any_waits(lines: Iterable[Line[Any]]) -> bool:
    """True if a request waits in one of the lines, or a client whose wait has just ended may ask again."""
    return any(len(line) or line.still_since is not None for line in lines)


def _usual_step(buffer: ReplayBuffer) -> float:
    """Seconds that a step of the trainer usually takes; 0: unknown.

    Without policy versions, this is the longest usual interval of inserts or samples.
    """
    if buffer.versions.interval:
        return buffer.versions.interval
    intervals = [0.0]
    for table in buffer.trained:
        intervals.append(_usual_interval(buffer, table.inserted))
        intervals.append(_usual_interval(buffer, table.sampled))
    return max(intervals)


def _longest_silence(usual: float) -> float:
    """Seconds after which a role with this usual interval is overdue."""
    return max(LONG_WAIT, PATIENCE * usual)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
