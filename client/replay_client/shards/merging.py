"""Merging: one answer from the answers of all shards."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from replay_client.errors import InvalidRequestError
from replay_client.records import (
    AdmissionInfo,
    ClientInfo,
    ItemInfo,
    ItemPage,
    Policy,
    ServerInfo,
    Silence,
    TableInfo,
)
from replay_protos import replay_pb2 as pb


@dataclass(frozen=True)
class ShardedInfo(ServerInfo):
    """All shards as one server: counts, bytes and rates are sums, the policy is the lowest one.

    Quantiles of a table: `min` and `max` are those of all items, `mean` is their mean, and the others are means of the
    shards' quantiles, each weighted by its items.
    """

    shards: Mapping[str, ServerInfo] = field(default_factory=dict)
    """Each shard that answered, by its name."""
    gone: tuple[str, ...] = ()
    """The shards that did not answer. Nothing of them is in the sums."""


def shards_of(info: ServerInfo) -> Iterator[tuple[str, ServerInfo | None]]:
    """Each server of several by its name; None: it does not answer. Nothing for a single server."""
    if isinstance(info, ShardedInfo):
        yield from info.shards.items()
        for name in info.gone:
            yield name, None


def merge_infos(infos: Mapping[str, ServerInfo], gone: Iterable[str]) -> ShardedInfo:
    """`infos` has at least one entry."""
    every = list(infos.values())
    sums = ("items", "bytes", "insert_streams", "sample_streams", "resident_bytes", "disk_bytes", "commits", "damaged")
    merged: dict[str, Any] = {name: sum(getattr(info, name) for info in every) for name in sums}
    merged |= {name: min(getattr(info, name) for info in every) for name in ("uptime", "time")}
    for name in ("memory_available", "disk_available"):  # of shards that know it: the one that has least left
        merged[name] = min((value for info in every if (value := getattr(info, name))), default=0)
    errors = [f"{shard}: {info.commit_error}" for shard, info in infos.items() if info.commit_error]
    fallen = [f"{shard}: {info.fell_back}" for shard, info in infos.items() if info.fell_back]
    tables: dict[str, list[TableInfo]] = {}
    for info in every:
        for table in info.tables.values():
            tables.setdefault(table.name, []).append(table)
    merged |= {
        "version": ", ".join(sorted({info.version for info in every})),
        "storage": ", ".join(sorted({info.storage for info in every})),
        "server_id": min(info.server_id for info in every),
        "max_bytes": sum(info.max_bytes for info in every) if all(info.max_bytes for info in every) else 0,
        "policy": lowest(info.policy for info in every),
        "admission": merge_admissions([info.admission for info in every if info.admission is not None]),
        "commit_error": "; ".join(errors),
        "fell_back": "; ".join(fallen),
        "tables": {name: merge_tables(parts) for name, parts in tables.items()},
        "long_wait": max(info.long_wait for info in every),
        "silences": merge_silences(every),
        "clients": merge_clients([client for info in every for client in info.clients]),
    }
    assert merged.keys() == {item.name for item in fields(ServerInfo)}
    return ShardedInfo(**merged, shards=dict(infos), gone=tuple(gone))


def merge_silences(infos: Sequence[ServerInfo]) -> tuple[Silence, ...]:
    """Those of which all shards say the same: a side is gone only if no shard hears of it. The shortest of them."""
    parts: dict[tuple[str, str], list[Silence]] = {}
    for info in infos:
        for silence in info.silences:
            parts.setdefault((silence.side, silence.table), []).append(silence)
    return tuple(min(of_one, key=lambda part: part.age) for of_one in parts.values() if len(of_one) == len(infos))


def merge_clients(parts: Sequence[ClientInfo]) -> tuple[ClientInfo, ...]:
    """One client for each name, as the shard that heard of it last knows it."""
    merged: dict[str, ClientInfo] = {}
    for part in sorted(parts, key=lambda part: part.age):
        if (client := merged.setdefault(part.name, part)) is part:
            continue
        roles = {*client.role.split(", "), *part.role.split(", ")}
        merged[part.name] = ClientInfo(
            name=client.name,
            role=", ".join(sorted(roles)),
            age=client.age,
            open=client.open + part.open,
            ended=client.ended,
        )
    return tuple(merged.values())


def lowest(policies: Iterable[Policy]) -> Policy:
    """The policy that counts: every shard has at least this version."""
    return min(policies, key=lambda policy: policy.version)


def merge_admissions(parts: Sequence[AdmissionInfo]) -> AdmissionInfo | None:
    """Every shard has its share of `groups_per_step`; None if no shard has admission."""
    if not parts:
        return None
    counts = ("groups_per_step", "accepted", "running", "capacity", "expired")
    merged = AdmissionInfo(**{name: sum(getattr(part, name) for part in parts) for name in counts})
    merged.max_staleness = max(part.max_staleness for part in parts)
    merged.table = parts[0].table
    merged.acquiring.CopyFrom(_waiting([part.acquiring for part in parts]))
    return merged


_SUMS = (
    *("size", "bytes", "reserved", "inserts", "samples", "consumed", "deleted", "evicted", "evicted_unsampled"),
    *("evicted_on_arrival", "stale", "stale_refused", "duplicates", "forwarded", "forward_refused"),
    *("inserts_per_second", "samples_per_second"),
)
_MEANS = ("insert_blocked_share", "sample_blocked_share")
_QUANTILES = ("age", "staleness", "priority", "effective_priority")


def merge_tables(parts: Sequence[TableInfo]) -> TableInfo:
    """One table of the parts of all shards; at least one part."""
    merged = TableInfo(name=parts[0].name, config=_merge_configs([json.loads(part.config) for part in parts]))
    for name in _SUMS:
        setattr(merged, name, sum(getattr(part, name) for part in parts))
    for name in _MEANS:
        setattr(merged, name, sum(getattr(part, name) for part in parts) / len(parts))
    merged.inserting.CopyFrom(_waiting([part.inserting for part in parts]))
    merged.sampling.CopyFrom(_waiting([part.sampling for part in parts]))
    for name in _QUANTILES:
        getattr(merged, name).CopyFrom(_quantiles([(part.size, getattr(part, name)) for part in parts if part.size]))
    for name in ("inserted", "sampled"):
        rhythms = [getattr(part, name) for part in parts]
        getattr(merged, name).age = min(rhythm.age for rhythm in rhythms)
        getattr(merged, name).usual = max(rhythm.usual for rhythm in rhythms)
    limiters = [part.limiter for part in parts]
    merged.limiter.CopyFrom(limiters[0])
    for name in ("min_size", "min_diff", "max_diff", "difference", "size"):
        setattr(merged.limiter, name, sum(getattr(limiter, name) for limiter in limiters))
    return merged


def _merge_configs(configs: Sequence[dict[str, Any]]) -> str:
    """The first one, with the bounds of all together."""
    merged = dict(configs[0])
    bounds = [config["max_bytes"] for config in configs]
    merged["max_size"] = sum(config["max_size"] for config in configs)
    merged["max_bytes"] = None if None in bounds else sum(bounds)
    if merged["rate_limiter"].get("max_size"):
        total = sum(config["rate_limiter"]["max_size"] or 0 for config in configs)
        merged["rate_limiter"] = merged["rate_limiter"] | {"max_size": total}
    return json.dumps(merged)


def _waiting(parts: Sequence[pb.Waiting]) -> pb.Waiting:
    longest = max(parts, key=lambda part: part.seconds)
    return pb.Waiting(count=sum(part.count for part in parts), reason=longest.reason, seconds=longest.seconds)


def _quantiles(parts: Sequence[tuple[int, pb.Quantiles]]) -> pb.Quantiles:
    if not parts:
        return pb.Quantiles()
    total = sum(size for size, _ in parts)
    means = {
        name: sum(size * getattr(part, name) for size, part in parts) / total for name in ("p10", "p50", "p90", "mean")
    }
    return pb.Quantiles(min=min(part.min for _, part in parts), max=max(part.max for _, part in parts), **means)


# ------------------------------------------------------------------------------------------------------------- pages

_ORDERS: dict[str, Callable[[ItemInfo], float]] = {
    "age": lambda item: item.age,
    "priority": lambda item: item.priority,
    "policy_version": lambda item: item.policy_version,
    "times_sampled": lambda item: item.times_sampled,
    "size": lambda item: item.nbytes,
}


def read_page(page: str) -> dict[str, str]:
    """The page of each shard from which to go on, by its name; "" begins. Raises InvalidRequestError."""
    if not page:
        return {}
    try:
        pages = json.loads(page)
    except ValueError:
        pages = None
    if not isinstance(pages, dict):
        raise InvalidRequestError(f"page {page[:40]!r} is not one that a client of several servers gave out")
    return {str(name): str(value) for name, value in pages.items()}


def merge_pages(
    pages: Mapping[str, ItemPage], starts: Mapping[str, str], limit: int, order_by: str, descending: bool
) -> ItemPage:
    """The first `limit` items of all pages, each of which is in the same order and holds up to `limit` items.

    A page of a shard is the number of items before it, so that the next page can begin in the middle of this one.
    """
    key = _ORDERS[order_by]
    named = [[(name, item) for item in page.items] for name, page in pages.items()]
    rows = list(heapq.merge(*named, key=lambda row: key(row[1]), reverse=descending))[:limit]
    used = dict.fromkeys(pages, 0)
    for name, _ in rows:
        used[name] += 1
    begins = {name: int(starts.get(name) or 0) + count for name, count in used.items()}
    more = any(used[name] < len(page) or page.next_page for name, page in pages.items())
    next_page = json.dumps({name: str(begin) for name, begin in begins.items()}) if more else ""
    return ItemPage([item for _, item in rows], sum(page.matching for page in pages.values()), next_page)
