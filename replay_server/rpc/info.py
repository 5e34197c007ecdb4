"""Info: the state of the buffer, of its tables and of checkpoints, as the protobuf messages that clients get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from replay_protos import replay_pb2 as pb
from replay_server.rpc.clients import Clients
from replay_server.storage.checkpoints import Listed, Summary
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.columns import FloatArray, IntArray
from replay_server.tables.meters import Activity, Quantiles
from replay_server.tables.rate_limiters import RateLimiter
from replay_server.tables.table import Table
from replay_server.tables.waiting import Line


def policy(buffer: ReplayBuffer) -> pb.Policy:
    current = buffer.policy
    age = max(0.0, buffer.clock() - current.set_at)
    return pb.Policy(version=current.version, weights=current.weights, age=age, usual=buffer.versions.usual)


def server_info(buffer: ReplayBuffer, names: Sequence[str]) -> pb.ServerInfo:
    """The buffer's part of ServerInfo, with the tables of `names`; without names, with all tables."""
    tables = [buffer.table(name) for name in dict.fromkeys(names)] or list(buffer.tables.values())
    storage = buffer.storage.facts()
    info = pb.ServerInfo(
        policy=policy(buffer),
        tables=[table_info(buffer, table) for table in tables],
        items=len(buffer.items),
        bytes=buffer.bytes,
        max_bytes=int(buffer.items.max_bytes) if buffer.items.max_bytes < float("inf") else 0,
        storage=storage.name,
        damaged=buffer.damaged,
        disk_bytes=storage.disk_bytes,
        commits=storage.commits,
        commit_error=storage.error,
        fell_back=storage.fell_back,
    )
    if (admission := buffer.admission) is not None:
        head = admission.line.head
        info.admission.CopyFrom(
            pb.AdmissionInfo(
                groups_per_step=admission.config.groups_per_step,
                max_staleness=admission.config.max_staleness,
                accepted=admission.accepted,
                running=admission.running,
                capacity=admission.capacity,
                acquiring=_waiting(admission.line, None if head is None else admission.why_not(head.count)),
                expired=admission.expired,
                table=admission.table,
            )
        )
    return info


def table_info(buffer: ReplayBuffer, table: Table) -> pb.TableInfo:
    now, lines, columns = buffer.clock(), buffer.lines[table.name], table.columns
    slots = columns.occupied()
    staleness = buffer.policy.version - columns.policy_version[slots]
    np.maximum(staleness, 0, out=staleness)
    insert, sample = lines.inserts.head, lines.samples.head
    return pb.TableInfo(
        name=table.name,
        config=table.config.model_dump_json(),
        size=table.size,
        bytes=table.bytes,
        reserved=table.outstanding,
        inserting=_waiting(lines.inserts, None if insert is None else buffer.why_waiting(insert)),
        sampling=_waiting(lines.samples, None if sample is None else buffer.why_waiting(sample)),
        age=_quantiles(now - columns.inserted_at[slots]),
        staleness=_quantiles(staleness),
        priority=_quantiles(columns.priority[slots]),
        effective_priority=_quantiles(table.effective_priorities(slots)),
        inserts_per_second=table.inserted.per_second(now),
        samples_per_second=table.sampled.per_second(now),
        insert_blocked_share=table.insert_blocked.share(now),
        sample_blocked_share=table.sample_blocked.share(now),
        limiter=_limiter(table.limiter),
        inserted=_rhythm(table.inserted, now),
        sampled=_rhythm(table.sampled, now),
        **table.counts(),
    )


def _waiting(line: Line[Any], reason: str | None) -> pb.Waiting:
    return pb.Waiting(count=len(line), reason=reason or "", seconds=line.standstill)


def _limiter(limiter: RateLimiter) -> pb.Limiter:
    return pb.Limiter(
        samples_per_insert=limiter.samples_per_insert,
        min_size=limiter.min_size,
        min_diff=limiter.min_diff,
        max_diff=limiter.max_diff,
        difference=limiter.inserts * limiter.samples_per_insert - limiter.samples,
        size=max(0, limiter.size),
    )


def _rhythm(activity: Activity, now: float) -> pb.Rhythm:
    return pb.Rhythm(age=max(0.0, now - activity.last), usual=activity.rhythm.usual)


def clients(buffer: ReplayBuffer, known: Clients) -> list[pb.ClientInfo]:
    now = buffer.clock()
    return [
        pb.ClientInfo(
            name=client.name,
            role=", ".join(sorted(client.roles)),
            age=max(0.0, now - client.seen),
            open=client.open,
            ended=client.ended,
        )
        for client in known
    ]


def _quantiles(values: FloatArray | IntArray) -> pb.Quantiles | None:
    """None of no values: then the message is absent, and its metrics are."""
    return pb.Quantiles(**vars(Quantiles.of(values))) if values.size else None


def checkpoint(summary: Summary) -> pb.CheckpointInfo:
    return pb.CheckpointInfo(
        name=summary.name,
        created=summary.created,
        items=summary.items,
        bytes=summary.bytes,
        intact=True,
        policy_version=summary.policy_version,
    )


def listed_checkpoint(entry: Listed) -> pb.CheckpointInfo:
    if entry.summary is None:
        return pb.CheckpointInfo(name=entry.name, created=entry.created, problem=entry.problem)
    return checkpoint(replace(entry.summary, name=entry.name))
