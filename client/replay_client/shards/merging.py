"""Merging: makes one answer of the answers of all shards.

replay.proto declares for each field of ServerInfo the rule by which the field is merged. `_merged` applies these rules
to the messages of all shards: for each field, it makes one value of the shards' values. If these values are messages
themselves, their fields are merged in the same way. So a new field of ServerInfo needs no line here.
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

from replay_client.errors import InvalidRequestError, ServerUnavailableError
from replay_client.records import CheckpointInfo, ItemPage, OverdueClient, Policy, ServerInfo, ShardedInfo
from replay_protos import replay_pb2 as pb
from replay_protos.state import declared

M = TypeVar("M", bound=Message)


def merge_infos(infos: Mapping[str, ServerInfo], gone: Iterable[str]) -> ShardedInfo:
    """Merges the infos of all shards, as if these were one server.

    `infos` has the answer of each shard that answered, at least one, by the shard's name. `gone` are the names of the
    shards that did not answer.
    """
    merged = _merged(pb.ServerInfo.DESCRIPTOR, list(infos.values()), names=list(infos))
    # `_by_name` has made a dict of the clients. A ServerInfo has them as a tuple, the client that was seen last first.
    merged["clients"] = tuple(sorted(merged["clients"].values(), key=lambda client: client.age))
    return ShardedInfo(**merged, shards=dict(infos), gone=tuple(gone))


def merge_messages(parts: Sequence[M], weights: Sequence[float] = ()) -> M:
    """Merges the messages of one or more shards into one message.

    Fields with the rule MEAN get a weighted mean, in which `weights` has the weight of each shard. Without `weights`,
    all shards have the same weight.
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
    """The policy with the lowest version. It counts for the whole client, because every shard has at least this
    version."""
    return min(policies, key=lambda policy: policy.version)


def _merged(
    message: Any, parts: Sequence[Any], *, names: Sequence[str] = (), weights: Sequence[float] = ()
) -> dict[str, Any]:
    """Merges the messages of several shards. Returns the merged values by the names of the fields.

    `message` is the descriptor of these messages, in which each field declares its rule. `parts` has the message of
    each shard, or a record with the same fields. `names` are the names of these shards. `weights` are the weights of
    the shards in means. Without `weights`, all shards have the same weight.
    """
    merged: dict[str, Any] = {}
    for field, option in declared(message):  # `option` is what replay.proto declares about the field
        values = [getattr(part, field.name) for part in parts]
        match option.merge:
            case pb.Field.MIN if option.zero_is_unknown:
                known_numbers = [number for number in values if number]
                value: Any = min(known_numbers, default=0)
            case pb.Field.MEAN:
                value = _weighted_mean(values, weights or [1.0] * len(values))
            case pb.Field.NAMED:
                texts = [f"{name}: {text}" for name, text in zip(names, values, strict=True) if text]
                value = "; ".join(texts)
            case pb.Field.OF_LONGEST:  # the value of the shard on which the wait is longest
                longest = max(parts, key=lambda part: part.seconds)
                value = getattr(longest, field.name)
            case pb.Field.OF_LATEST:  # the value of the shard that has seen the client last
                latest = min(parts, key=lambda part: part.age)
                value = getattr(latest, field.name)
            case pb.Field.BY_SIZE:
                value = _by_size(values, sizes=[part.size for part in parts])
            case other_rule:
                value = _RULES[other_rule](values)
        merged[field.name] = value
    return merged


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean: the sum of weight * value, divided by the sum of the weights."""
    weighted = [weight * value for weight, value in zip(weights, values, strict=True)]
    return sum(weighted) / sum(weights)


def _by_size(values: Sequence[M], sizes: Sequence[int]) -> M | None:
    """Merges the messages of the shards that hold items. In means, each shard has its number of items as its weight.

    `sizes` has the number of items of each shard. Returns None if no shard holds items.
    """
    messages = [value for value, size in zip(values, sizes, strict=True) if size]
    if not messages:
        return None
    return merge_messages(messages, [size for size in sizes if size])


def _of_known(values: Sequence[M | None]) -> M | None:
    """Merges the messages of the shards that have one. Returns None if no shard has one."""
    known = [value for value in values if value is not None]
    return merge_messages(known) if known else None


def _by_name(values: Sequence[Mapping[str, Any] | Sequence[Any]]) -> dict[str, Any]:
    """Merges messages that have the same `name`. Returns one message for each name, by the name.

    `values` has the messages of each shard: a sequence, or a dict of the messages by name.
    """
    messages_by_name: dict[str, list[Any]] = defaultdict(list)
    for messages_of_shard in values:
        if isinstance(messages_of_shard, Mapping):
            messages_of_shard = list(messages_of_shard.values())
        for message in messages_of_shard:
            messages_by_name[message.name].append(message)
    return {name: merge_messages(messages) for name, messages in messages_by_name.items()}


def _agreed(values: Sequence[Sequence[OverdueClient]]) -> tuple[OverdueClient, ...]:
    """The clients that all shards report as overdue. A client that does something at one shard is not overdue.

    `values` has the reports of each shard. The result has the report with the smallest age for each client. A client is
    known by its role and its table.
    """
    reports: dict[tuple[str, str], list[OverdueClient]] = defaultdict(list)
    for report in chain.from_iterable(values):
        reports[report.role, report.table].append(report)
    agreed: list[OverdueClient] = []
    for reports_of_client in reports.values():
        if len(reports_of_client) == len(values):  # all shards have reported the client
            latest = min(reports_of_client, key=lambda report: report.age)
            agreed.append(latest)
    return tuple(agreed)


def _config(values: Sequence[str]) -> str:
    """Merges the TableConfigs of the shards, which `values` has as JSON, into one, and returns it as JSON.

    This is the configuration of the first shard, but each of its bounds is the sum of the bounds of all shards.
    """
    configs = [json.loads(value) for value in values]
    merged = dict(configs[0])
    merged["max_size"] = sum(config["max_size"] for config in configs)
    byte_bounds = [config["max_bytes"] for config in configs]  # None: no bound
    merged["max_bytes"] = None if None in byte_bounds else sum(byte_bounds)
    if merged["rate_limiter"].get("max_size"):  # a queue or stack
        total = sum(config["rate_limiter"]["max_size"] or 0 for config in configs)
        merged["rate_limiter"] = merged["rate_limiter"] | {"max_size": total}
    return json.dumps(merged)


def _bound(values: Sequence[int]) -> int:
    """The sum of the bounds; 0, which means no bound, if any shard has no bound."""
    return sum(values) if all(values) else 0


def _each(values: Sequence[str]) -> str:
    """All different entries, sorted and separated by commas. `values` has the entries of each shard, separated by
    commas."""
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
"""Rule -> the function that merges the values of all shards by this rule. The rules that are missing here need more
than the values, so they are in `_merged`."""


# ------------------------------------------------------------------------------------------------------------ answers


def _checkpoints(checkpoints_by_shard: Mapping[str, list[CheckpointInfo]]) -> list[CheckpointInfo]:
    """Renames the checkpoints of all shards to SHARD/NAME, and returns them, the newest first."""
    for shard, checkpoints in checkpoints_by_shard.items():
        for checkpoint in checkpoints:
            checkpoint.name = f"{shard}/{checkpoint.name}"
    all_checkpoints = chain.from_iterable(checkpoints_by_shard.values())
    return sorted(all_checkpoints, key=lambda checkpoint: checkpoint.created, reverse=True)


MERGES: Mapping[str, Callable[[Mapping[str, Any], Sequence[str]], Any]] = {
    "Get": lambda records, gone: list(chain.from_iterable(records.values())),
    "GetPolicy": lambda records, gone: lowest(records.values()),
    "GetServerInfo": merge_infos,
    "UpdateTable": lambda records, gone: merge_messages(list(records.values())),
    "Reset": lambda records, gone: sum(records.values()),
    "CreateCheckpoint": lambda records, gone: ",".join(f"{shard}/{name}" for shard, name in records.items()),
    "ListCheckpoints": lambda records, gone: _checkpoints(records),
}
"""Name of a method -> the function that merges the answers of this method. Its arguments are the records of the shards
that answered, by the shard's name, and the names of the shards that did not answer."""

# ------------------------------------------------------------------------------------------------------------- pages


def read_page(page: str) -> dict[str, str]:
    """Reads a page that `merge_pages` has given as `next_page`. Returns where it starts on each shard, by the name.

    The start on a shard is the number of the shard's items on all earlier pages, as a text. A shard without a start
    begins with its first item. An empty `page` means the first page. Raises InvalidRequestError for a `page` that
    `merge_pages` cannot have given.
    """
    try:
        pages = json.loads(page or "{}")
    except (ValueError, RecursionError):
        pages = None  # refused below
    starts = {}
    is_page = isinstance(pages, dict)
    if is_page:
        starts = {str(name): str(value) for name, value in pages.items()}
        is_page = all(start.isascii() and start.isdecimal() and len(start) < 19 for start in starts.values())
    if not is_page:
        raise InvalidRequestError(f"page {page[:40]!r} is not one that a client of several servers gave out")
    return starts


def merge_pages(
    pages: Mapping[str, ItemPage], starts: Mapping[str, str], limit: int, order_by: str, descending: bool
) -> ItemPage:
    """Merges one page of each shard into a page that has the first `limit` of their items.

    All pages are in the same order. A page has up to `limit` items, or fewer if the server allows no more. `starts` has
    the start of each page as `read_page` returns it. The merged page may leave out the last items of a shard's page.
    The next page then starts with these. A shard that has a start and no page is away. It keeps its start, because it
    may be back for the next page. Raises ServerUnavailableError if such shards alone may have further items.
    """
    if order_by == "size":
        order_by = "nbytes"  # the field of ItemInfo has another name
    sort_value = attrgetter(order_by)
    rows_of_shards = [[(name, item) for item in page.items] for name, page in pages.items()]
    in_order = heapq.merge(*rows_of_shards, key=lambda row: sort_value(row[1]), reverse=descending)
    # The server bounds its pages. Behind a page that is shorter than `limit`, and not the last, nobody knows the order.
    lengths_of_cut_pages = [len(page) for page in pages.values() if page.next_page]
    limit = min([limit, *lengths_of_cut_pages])
    rows = list(in_order)[:limit]
    used = Counter(name for name, _ in rows)  # name of a shard -> the number of its items in the merged page
    is_last = all(used[name] == len(page) and not page.next_page for name, page in pages.items())
    away = [name for name in starts if name not in pages]
    if away and is_last and not rows:
        raise ServerUnavailableError(
            f"{', '.join(away)} went away while the items were listed, and those of all other shards are listed: list "
            "them again when it answers"
        )
    next_page = ""
    if away or not is_last:
        next_starts = {name: int(starts.get(name) or 0) + used[name] for name in [*starts, *pages]}
        next_page = json.dumps(next_starts)
    matching = sum(page.matching for page in pages.values())
    return ItemPage([item for _, item in rows], matching, next_page)
