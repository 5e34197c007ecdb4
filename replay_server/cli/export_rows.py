"""Rows: one item of a table as plain columns, for a notebook, and back again."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from replay_client import ReplayClient, RolloutGroup
    from replay_client.records import ItemInfo, StoredItem

Row = dict[str, Any]

ITEMS_PER_PAGE = 1000
PAYLOADS_PER_CALL = 32


@dataclass(frozen=True)
class Column:
    """One column of the file."""

    name: str
    kind: str
    """Type of its values: int, float, str, bytes, or list of one of them."""
    of: Callable[[RolloutGroup], Any]


GROUP_COLUMNS = (
    Column("prompt_id", "str", lambda group: group.prompt_id),
    Column("group_size", "int", lambda group: group.group_size),
    Column("prompt_tokens", "int", lambda group: int(group.prompt_ids.size)),
    Column("context_tokens", "list of int", lambda group: (group.prompt_lengths - group.prompt_ids.size).tolist()),
    Column("completion_tokens", "list of int", lambda group: group.sampled_lengths.tolist()),
    Column("rewards", "list of float", lambda group: group.rewards.tolist()),
    Column("advantages", "list of float", lambda group: group.advantages.tolist()),
    Column("mean_logprobs", "list of float", lambda group: mean_logprobs(group)),
    Column("finish_reasons", "list of str", lambda group: list(group.finish_reasons or ())),
    Column("reward_mean", "float", lambda group: float(group.rewards.mean()) if group.rewards.size else None),
    Column("reward_std", "float", lambda group: float(group.rewards.std()) if group.rewards.size else None),
)
"""What a group says of itself; a list has one value for each completion. Null where an item is not a group."""
ITEM_COLUMNS = {
    "key": "str",
    "table": "str",
    "priority": "float",
    "age": "float",
    "policy_version": "int",
    "staleness": "int",
    "times_sampled": "int",
    "bytes": "int",
}
"""What the server knows of an item. Keys are strings: they have 64 bits, and many readers keep only 53."""
TEXT_COLUMNS = {"prompt": "str", "contexts": "list of str", "completions": "list of str"}
"""With a tokenizer."""
PAYLOAD = "payload"
"""The bytes of the item, which `import` needs. In JSON lines they are in base64."""


def columns(texts: bool, payloads: bool) -> dict[str, str]:
    """The type of each column of a file, in their order."""
    kinds = ITEM_COLUMNS | {column.name: column.kind for column in GROUP_COLUMNS}
    return kinds | (TEXT_COLUMNS if texts else {}) | ({PAYLOAD: "bytes"} if payloads else {})


def rows(client: ReplayClient, table: str, limit: int | None, decoder: Any, payloads: bool) -> Iterator[Row]:
    """A row for each item of the table, the oldest first. Leaves out items that go away meanwhile."""
    left = limit
    page = ""
    while left is None or left > 0:
        size = ITEMS_PER_PAGE if left is None else min(ITEMS_PER_PAGE, left)
        found = client.list_items(table, limit=size, descending=True, page=page)
        for start in range(0, len(found), PAYLOADS_PER_CALL):
            yield from _rows(client, table, found.items[start : start + PAYLOADS_PER_CALL], decoder, payloads)
        left = None if left is None else left - len(found)
        page = found.next_page
        if not page:
            return


def _rows(client: ReplayClient, table: str, infos: Any, decoder: Any, payloads: bool) -> Iterator[Row]:
    stored = {item.key: item for item in client.get([info.key for info in infos])}
    for info in infos:
        if (item := stored.get(info.key)) is None:
            continue
        group = _group_of(item)
        row = _item_row(info, table)
        row |= {column.name: None if group is None else column.of(group) for column in GROUP_COLUMNS}
        if decoder is not None:
            row |= _texts(group, decoder)
        if payloads:
            row[PAYLOAD] = bytes(item.payload)
        yield row


def _group_of(item: StoredItem) -> RolloutGroup | None:
    """The item's group; None if its payload is something else."""
    try:
        return item.group
    except ValueError:
        return None


def _item_row(info: ItemInfo, table: str) -> Row:
    return {
        "key": str(info.key),
        "table": table,
        "priority": info.priority,
        "age": info.age,
        "policy_version": info.policy_version,
        "staleness": info.staleness,
        "times_sampled": info.times_sampled,
        "bytes": info.nbytes,
    }


def _texts(group: RolloutGroup | None, decoder: Any) -> Row:
    if group is None:
        return dict.fromkeys(TEXT_COLUMNS)
    shared = group.prompt_ids.size
    return {
        "prompt": decoder.decode(group.prompt_ids.tolist()),
        "contexts": [decoder.decode(ids[shared:].tolist()) for ids in group.prompts()],
        "completions": [decoder.decode(group.completion_ids[span].tolist()) for span in group.sampled_spans()],
    }


def mean_logprobs(group: RolloutGroup) -> list[float | None]:
    """The mean of the known log-probabilities of each completion; null where none is known."""
    means = []
    for span in group.sampled_spans():
        logprobs = group.rollout_logprobs[span]
        known = logprobs[~np.isnan(logprobs)]
        means.append(float(known.mean()) if known.size else None)
    return means


def insert(client: ReplayClient, row: Row, table: str | None) -> None:
    """Inserts the item of a row, under its own key. Raises ValueError for a row that `export` did not write."""
    missing = [name for name in ("key", "table", "priority", "policy_version", PAYLOAD) if row.get(name) is None]
    if missing:
        remedy = "; export it with payloads" if missing == [PAYLOAD] else ""
        raise ValueError(f"there is no {', '.join(missing)}{remedy}")
    payload = row[PAYLOAD]
    client.insert(
        base64.b64decode(payload) if isinstance(payload, str) else payload,
        {table or row["table"]: float(row["priority"])},
        key=int(row["key"]),
        policy_version=int(row["policy_version"]),
    )
