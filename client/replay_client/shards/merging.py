"""Merging: one answer from the answers of all shards.

replay.proto declares for each field of ServerInfo how it is merged. `_merged` applies that to one message: it goes
through the fields, takes the values that the shards have, and makes one of them. A field whose values are messages is
merged the same way, field by field. So a new field needs no line here.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

from google.protobuf.message import Message

from replay_client.errors import InvalidRequestError
from replay_client.records import CheckpointInfo, ItemPage, OverdueClient, Policy, ServerInfo, ShardedInfo
from replay_protos import replay_pb2 as pb
from replay_protos.state import declared

M = TypeVar("M", bound=Message)


def merge_infos(infos: Mapping[str, ServerInfo], gone: Iterable[str]) -> ShardedInfo:
    """`infos` has at least one entry."""
    merged = _merged(pb.ServerInfo.DESCRIPTOR, list(infos.values()), names=list(infos))
    merged["clients"] = tuple(sorted(merged["clients"].values(), key=lambda client: client.age))
    return ShardedInfo(**merged, shards=dict(infos), gone=tuple(gone))


def merge_messages(parts: Sequence[M], weights: Sequence[float] = ()) -> M:
    """One message of those of all shards, of which there is at least one."""
    if len(parts) == 1:
        return parts[0]
    merged = _merged(parts[0].DESCRIPTOR, parts, weights=weights)
    return type(parts[0])(
        **{name: list(value.values()) if isinstance(value, dict) else value for name, value in merged.items()}
    )


def lowest(policies: Iterable[Policy]) -> Policy:
    """The policy that counts: every shard has at least this version."""
    return min(policies, key=lambda policy: policy.version)


def _merged(
    message: Any, parts: Sequence[Any], *, names: Sequence[str] = (), weights: Sequence[float] = ()
) -> dict[str, Any]:
    """The fields of a `message`, each as it is declared. `parts` have them: one for each shard, with its name."""
    merged: dict[str, Any] = {}
    for field, option in declared(message):
        values = [getattr(part, field.name) for part in parts]
        match option.merge:
            case pb.Field.MIN if option.zero_is_unknown:
                value: Any = min(filter(None, values), default=0)
            case pb.Field.MEAN:
                weighted = list(zip(weights or [1.0] * len(values), values, strict=True))
                value = sum(weight * each for weight, each in weighted) / sum(weight for weight, _ in weighted)
            case pb.Field.NAMED:
                value = "; ".join(f"{name}: {each}" for name, each in zip(names, values, strict=True) if each)
            case pb.Field.OF_LONGEST:
                value = getattr(max(parts, key=lambda part: part.seconds), field.name)
            case pb.Field.OF_LATEST:
                value = getattr(min(parts, key=lambda part: part.age), field.name)
            case pb.Field.BY_SIZE:
                held = [(part.size, each) for part, each in zip(parts, values, strict=True) if part.size]
                value = merge_messages([each for _, each in held], [size for size, _ in held]) if held else None
            case rule:
                value = _RULES[rule](values)
        merged[field.name] = value
    return merged


def _of_known(values: Sequence[M | None]) -> M | None:
    """The messages merged field by field; None if no shard has one."""
    known = [value for value in values if value is not None]
    return merge_messages(known) if known else None


def _by_name(values: Sequence[Mapping[str, Any] | Sequence[Any]]) -> dict[str, Any]:
    """One message for each name, from the messages of each shard."""
    parts: dict[str, list[Any]] = defaultdict(list)
    for part in chain.from_iterable(value.values() if isinstance(value, Mapping) else value for value in values):
        parts[part.name].append(part)
    return {name: merge_messages(of_one) for name, of_one in parts.items()}


def _agreed(values: Sequence[Sequence[OverdueClient]]) -> tuple[OverdueClient, ...]:
    """Returns who is overdue at all shards, each with the shortest age. Whom one shard hears is there."""
    parts: dict[tuple[str, str], list[OverdueClient]] = defaultdict(list)
    for overdue in chain.from_iterable(values):
        parts[overdue.role, overdue.table].append(overdue)
    return tuple(min(of_one, key=lambda part: part.age) for of_one in parts.values() if len(of_one) == len(values))


def _config(values: Sequence[str]) -> str:
    """The first one, with the bounds of all together."""
    configs = [json.loads(value) for value in values]
    merged = dict(configs[0])
    bounds = [config["max_bytes"] for config in configs]
    merged["max_size"] = sum(config["max_size"] for config in configs)
    merged["max_bytes"] = None if None in bounds else sum(bounds)
    if merged["rate_limiter"].get("max_size"):
        total = sum(config["rate_limiter"]["max_size"] or 0 for config in configs)
        merged["rate_limiter"] = merged["rate_limiter"] | {"max_size": total}
    return json.dumps(merged)


_RULES: Mapping[int, Callable[[Sequence[Any]], Any]] = {
    pb.Field.SAME: lambda values: values[0],
    pb.Field.SUM: sum,
    pb.Field.BOUND: lambda values: sum(values) if all(values) else 0,
    pb.Field.MIN: min,
    pb.Field.MAX: max,
    pb.Field.EACH: lambda values: ", ".join(sorted({part for value in values for part in value.split(", ")})),
    pb.Field.CONFIG: _config,
    pb.Field.FIELDS: _of_known,
    pb.Field.BY_NAME: _by_name,
    pb.Field.LOWEST: lowest,
    pb.Field.AGREED: _agreed,
}
"""The function that merges the values of all shards. Rules that need more than the values stand in `_merged`."""


# ------------------------------------------------------------------------------------------------------------ answers


def _checkpoints(named: Mapping[str, list[CheckpointInfo]]) -> list[CheckpointInfo]:
    """All of them as SHARD/NAME, the newest first."""
    for shard, entries in named.items():
        for entry in entries:
            entry.name = f"{shard}/{entry.name}"
    return sorted(chain.from_iterable(named.values()), key=lambda entry: entry.created, reverse=True)


MERGES: Mapping[str, Callable[[Mapping[str, Any], Sequence[str]], Any]] = {
    "Get": lambda named, gone: list(chain.from_iterable(named.values())),
    "GetPolicy": lambda named, gone: lowest(named.values()),
    "GetServerInfo": merge_infos,
    "UpdateTable": lambda named, gone: merge_messages(list(named.values())),
    "Reset": lambda named, gone: sum(named.values()),
    "CreateCheckpoint": lambda named, gone: ",".join(f"{shard}/{name}" for shard, name in named.items()),
    "ListCheckpoints": lambda named, gone: _checkpoints(named),
}
"""By method: one record of those of the shards that answered, by name, and the names of those that did not.
"""

# ------------------------------------------------------------------------------------------------------------- pages


def read_page(page: str) -> dict[str, str]:
    """The page of each shard from which to go on, by its name; "" begins. Raises InvalidRequestError."""
    try:
        pages = json.loads(page or "{}")
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
    key = attrgetter("nbytes" if order_by == "size" else order_by)
    named = [[(name, item) for item in page.items] for name, page in pages.items()]
    rows = list(heapq.merge(*named, key=lambda row: key(row[1]), reverse=descending))[:limit]
    used = Counter(name for name, _ in rows)
    begins = {name: int(starts.get(name) or 0) + used[name] for name in pages}
    more = any(used[name] < len(page) or page.next_page for name, page in pages.items())
    next_page = json.dumps(begins) if more else ""
    return ItemPage([item for _, item in rows], sum(page.matching for page in pages.values()), next_page)
