"""Merging: makes one answer of the answers of all shards.

replay.proto declares for each field of ServerInfo the rule by which the field is merged. `_merged` applies these rules
to one message: for each field it makes one value of the values of all shards. If the values are messages, it merges
their fields in the same way. So a new field needs no line here.
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
    """All shards as one server. `infos` has the answer of each shard that answered, at least one, by the shard's name.

    `gone` are the names of the shards that did not answer.
    """
    merged = _merged(pb.ServerInfo.DESCRIPTOR, list(infos.values()), names=list(infos))
    # `_by_name` has made a dict of the clients. A ServerInfo has them as a tuple, the client that was seen last first.
    merged["clients"] = tuple(sorted(merged["clients"].values(), key=lambda client: client.age))
    return ShardedInfo(**merged, shards=dict(infos), gone=tuple(gone))


def merge_messages(parts: Sequence[M], weights: Sequence[float] = ()) -> M:
    """Merges the messages of one or more shards into one message.

    `weights` has the weight of each shard, for fields that are merged to a mean. Without weights all shards count the
    same.
    """
    if len(parts) == 1:
        return parts[0]
    merged = _merged(parts[0].DESCRIPTOR, parts, weights=weights)
    for name, value in merged.items():
        if isinstance(value, dict):  # the result of `_by_name`; protobuf needs a list of the messages
            merged[name] = list(value.values())
    message_type = type(parts[0])
    return message_type(**merged)


def lowest(policies: Iterable[Policy]) -> Policy:
    """The policy that counts: every shard has at least this version."""
    return min(policies, key=lambda policy: policy.version)


def _merged(
    message: Any, parts: Sequence[Any], *, names: Sequence[str] = (), weights: Sequence[float] = ()
) -> dict[str, Any]:
    """The merged values by the names of the fields. `message` is a descriptor, in which each field declares its rule.

    `parts` has the message of each shard, or a record with the same fields. `names` are the names of these shards.
    `weights` are the weights of the shards in means; without them each shard counts the same.
    """
    merged: dict[str, Any] = {}
    for field, option in declared(message):  # `option` is what replay.proto declares about the field
        values = [getattr(part, field.name) for part in parts]
        match option.merge:
            case pb.Field.MIN if option.zero_is_unknown:  # leave out shards that do not know the number
                value: Any = min((number for number in values if number), default=0)
            case pb.Field.MEAN:
                value = _weighted_mean(values, weights or [1.0] * len(values))
            case pb.Field.NAMED:
                value = "; ".join(f"{name}: {text}" for name, text in zip(names, values, strict=True) if text)
            case pb.Field.OF_LONGEST:  # of the shard on which the wait is longest
                longest = max(parts, key=lambda part: part.seconds)
                value = getattr(longest, field.name)
            case pb.Field.OF_LATEST:  # of the shard that has seen the client last
                latest = min(parts, key=lambda part: part.age)
                value = getattr(latest, field.name)
            case pb.Field.BY_SIZE:
                value = _by_size(values, [part.size for part in parts])
            case rule:
                value = _RULES[rule](values)
        merged[field.name] = value
    return merged


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The sum of weight * value, divided by the sum of the weights."""
    weighted = [weight * value for weight, value in zip(weights, values, strict=True)]
    return sum(weighted) / sum(weights)


def _by_size(values: Sequence[M], sizes: Sequence[int]) -> M | None:
    """The merged message of the shards that hold items, weighted by their numbers; None if no shard holds items."""
    messages = [value for value, size in zip(values, sizes, strict=True) if size]
    if not messages:
        return None
    return merge_messages(messages, [size for size in sizes if size])


def _of_known(values: Sequence[M | None]) -> M | None:
    """The merged message of the shards that have one; None if no shard has one."""
    known = [value for value in values if value is not None]
    return merge_messages(known) if known else None


def _by_name(values: Sequence[Mapping[str, Any] | Sequence[Any]]) -> dict[str, Any]:
    """One merged message for each name, by the name. `values` has the named messages of each shard."""
    messages: dict[str, list[Any]] = defaultdict(list)
    for of_shard in values:
        if isinstance(of_shard, Mapping):
            of_shard = list(of_shard.values())
        for message in of_shard:
            messages[message.name].append(message)
    return {name: merge_messages(of_name) for name, of_name in messages.items()}


def _agreed(values: Sequence[Sequence[OverdueClient]]) -> tuple[OverdueClient, ...]:
    """The clients that are overdue at all shards, each with the shortest age. `values` has those of each shard.

    A client that does something at one shard is not overdue.
    """
    reports: dict[tuple[str, str], list[OverdueClient]] = defaultdict(list)
    for overdue in chain.from_iterable(values):
        reports[overdue.role, overdue.table].append(overdue)
    agreed: list[OverdueClient] = []
    for reports_of_client in reports.values():
        if len(reports_of_client) == len(values):  # all shards have reported the client
            agreed.append(min(reports_of_client, key=lambda overdue: overdue.age))
    return tuple(agreed)


def _config(values: Sequence[str]) -> str:
    """The TableConfig of the first shard as JSON, but each bound is the sum of the bounds of all shards.

    `values` has the JSON of each shard.
    """
    configs = [json.loads(value) for value in values]
    merged = dict(configs[0])
    merged["max_size"] = sum(config["max_size"] for config in configs)
    byte_bounds = [config["max_bytes"] for config in configs]  # None: no bound
    merged["max_bytes"] = None if None in byte_bounds else sum(byte_bounds)
    if merged["rate_limiter"].get("max_size"):
        total = sum(config["rate_limiter"]["max_size"] or 0 for config in configs)
        merged["rate_limiter"] = merged["rate_limiter"] | {"max_size": total}
    return json.dumps(merged)


def _bound(values: Sequence[int]) -> int:
    """The sum of the bounds; 0, which means no bound, if any shard has no bound."""
    return sum(values) if all(values) else 0


def _each(values: Sequence[str]) -> str:
    """All entries once, sorted and separated by commas. Each value has the entries of a shard, separated by commas."""
    entries: set[str] = set()
    for value in values:
        entries.update(value.split(", "))
    return ", ".join(sorted(entries))


_RULES: Mapping[int, Callable[[Sequence[Any]], Any]] = {
    pb.Field.SAME: lambda values: values[0],
    pb.Field.SUM: sum,
    pb.Field.BOUND: _bound,
    pb.Field.MIN: min,
    pb.Field.MAX: max,
    pb.Field.EACH: _each,
    pb.Field.CONFIG: _config,
    pb.Field.FIELDS: _of_known,
    pb.Field.BY_NAME: _by_name,
    pb.Field.LOWEST: lowest,
    pb.Field.AGREED: _agreed,
}
"""The function that merges the values of all shards, by the rule. `_merged` has the rules that need more than the
values."""


# ------------------------------------------------------------------------------------------------------------ answers


def _checkpoints(named: Mapping[str, list[CheckpointInfo]]) -> list[CheckpointInfo]:
    """The checkpoints of all shards, named SHARD/NAME, the newest first."""
    for shard, checkpoints in named.items():
        for checkpoint in checkpoints:
            checkpoint.name = f"{shard}/{checkpoint.name}"
    return sorted(chain.from_iterable(named.values()), key=lambda checkpoint: checkpoint.created, reverse=True)


MERGES: Mapping[str, Callable[[Mapping[str, Any], Sequence[str]], Any]] = {
    "Get": lambda named, gone: list(chain.from_iterable(named.values())),
    "GetPolicy": lambda named, gone: lowest(named.values()),
    "GetServerInfo": merge_infos,
    "UpdateTable": lambda named, gone: merge_messages(list(named.values())),
    "Reset": lambda named, gone: sum(named.values()),
    "CreateCheckpoint": lambda named, gone: ",".join(f"{shard}/{name}" for shard, name in named.items()),
    "ListCheckpoints": lambda named, gone: _checkpoints(named),
}
"""The function that merges the answers of a method, by the name of the method. Its arguments are the records of the
shards that answered, by the shard's name, and the names of the shards that did not answer."""

# ------------------------------------------------------------------------------------------------------------- pages


def read_page(page: str) -> dict[str, str]:
    """The page to request from each shard, by the shard's name. `page` is a `next_page` of `merge_pages`, or empty.

    Raises InvalidRequestError for any other text.
    """
    try:
        pages = json.loads(page or "{}")
    except ValueError:
        pages = None  # refused below
    if not isinstance(pages, dict):
        raise InvalidRequestError(f"page {page[:40]!r} is not one that a client of several servers gave out")
    return {str(name): str(value) for name, value in pages.items()}


def merge_pages(
    pages: Mapping[str, ItemPage], starts: Mapping[str, str], limit: int, order_by: str, descending: bool
) -> ItemPage:
    """The first `limit` items of all shards' pages. All pages are in the same order and have up to `limit` items.

    `starts` has the start of each page by the shard's name: the number of the shard's items before the page, as a text.
    The result leaves out some items of a page, so the next page of the shard starts in the middle of this page.
    """
    if order_by == "size":
        order_by = "nbytes"  # the field of ItemInfo has another name
    sort_value = attrgetter(order_by)
    rows_of_shards = [[(name, item) for item in page.items] for name, page in pages.items()]
    in_order = heapq.merge(*rows_of_shards, key=lambda row: sort_value(row[1]), reverse=descending)
    rows = list(in_order)[:limit]
    used = Counter(name for name, _ in rows)  # the number of items in the result, by the shard's name
    is_last = all(used[name] == len(page) and not page.next_page for name, page in pages.items())
    next_page = ""
    if not is_last:
        next_starts = {name: int(starts.get(name) or 0) + used[name] for name in pages}
        next_page = json.dumps(next_starts)
    matching = sum(page.matching for page in pages.values())
    return ItemPage([item for _, item in rows], matching, next_page)
