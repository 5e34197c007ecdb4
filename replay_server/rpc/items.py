"""Items: the methods that update, delete, get and list items by key."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame
from replay_protos.label_columns import columns_message, tags_message
from replay_protos.labels import MOST_TAGS, Labels
from replay_server.config import MAX_KEYS, MAX_ROWS
from replay_server.errors import invalid, try_again
from replay_server.rpc.calls import Call, once, split_payloads
from replay_server.rpc.info import effective_priorities
from replay_server.rpc.limits import Backend
from replay_server.storage.memory import read_payloads, read_slices
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.columns import IntArray
from replay_server.tables.items import DamagedPayloads
from replay_server.tables.table import Table

ITEM_ORDERS = ("age", "priority", "policy_version", "times_sampled", "size")
"""The values of `order_by`. All but "age" are names of columns of a table."""
ITEMS_PER_LOOK = 4096
"""Items whose tags are compared before other requests may run. The tags of so many items are compared in about 2 ms."""


class ItemMethods:
    """The gRPC methods that update, delete, get and list items."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.buffer = backend.buffer

    async def UpdatePriorities(self, request: pb.UpdatePrioritiesRequest, call: Call) -> pb.MutationResponse:
        """Sets the priorities of items in one table. A repetition has the same effect, so this needs no `once`."""
        # Both fields are bytes that hold an array of numbers, each of 8 bytes.
        if len(request.keys) % 8 or len(request.priorities) % 8:
            raise invalid(f"keys and priorities of {len(request.keys)} and {len(request.priorities)} bytes: 8 for each")
        _check_keys(len(request.keys) // 8)
        keys = np.frombuffer(request.keys, dtype="<u8")
        priorities = np.frombuffer(request.priorities, dtype="<f8")
        applied, missing = self.buffer.update_priorities(request.table, keys, priorities)
        await self.backend.durable()
        return pb.MutationResponse(applied=applied, missing=missing)

    @once(pb.MutationResponse)
    async def Delete(self, request: pb.DeleteRequest, call: Call) -> pb.MutationResponse:
        """Deletes items from one table."""
        _check_keys(len(request.keys))
        missing = self.buffer.delete(request.table, request.keys)
        return pb.MutationResponse(applied=len(set(request.keys)) - len(missing), missing=missing)

    async def Get(self, request: pb.GetRequest, call: Call) -> None:
        """Sends the facts about items, and then their payloads unless the client wants none.

        Raises Refused if an item leaves, or proves damaged, before its payload is sent.
        """
        if len(request.keys) > MAX_ROWS:
            raise invalid(f"{len(request.keys)} keys: at most {MAX_ROWS} in one request")
        buffer = self.buffer
        reading = self.backend.reading
        # Items that left their tables in one large change stay in memory for a while, but count as gone.
        keys = [key for key in dict.fromkeys(request.keys) if not buffer.items.gone(key)]
        message = _facts_message(buffer, keys, request)
        if request.without_payloads or not keys:
            await call.write(Frame(message, ()))
            return
        items = [buffer.items[key] for key in keys]
        sizes = [item.nbytes for item in items]
        # Payloads are read and sent slice by slice, so that the server does not hold all of them in memory. While a
        # slice is sent, items of later slices may leave.
        for rows in read_slices(sizes):
            nbytes = sum(sizes[rows])
            # Waits until the answers to all clients leave room for these bytes in memory.
            await reading.take_in_turn(call.client, nbytes, self.backend.limits.stall_timeout)
            try:
                for key, item in zip(keys[rows], items[rows], strict=True):
                    if buffer.items.get(key) is not item:  # gone, or replaced by a new item with this key
                        raise try_again(f"item {key} left before its bytes were sent: ask again, for fewer at once")
                payloads = read_payloads(buffer.storage, keys[rows], sizes[rows])
                for response in split_payloads(message, payloads):
                    await call.write(response)
            except DamagedPayloads as damage:
                raise buffer.refuse_damaged(damage) from None
            finally:
                reading.release(call.client, nbytes)
            message = pb.GetResponse()  # the facts are sent only with the first slice

    async def ListItems(self, request: pb.ListItemsRequest, call: Call) -> pb.ListItemsResponse:
        """One page of the items of a table that match the request, in the requested order, without payloads."""
        table = self.buffer.table(request.table)
        order_by = request.order_by or "age"
        if order_by not in ITEM_ORDERS:
            raise invalid(f"order_by {order_by[:40]!r}: one of {', '.join(ITEM_ORDERS)}")
        # A page is named by the index of its first row, in decimal digits. It has at most 18 digits, so that the index
        # fits into 64 bits.
        is_page = request.page.isascii() and request.page.isdecimal() and len(request.page) < 19
        if request.page and not is_page:
            raise invalid(f"page {request.page[:40]!r} is not one that this server gave out")
        current_version = self.buffer.policy.version
        slots = _within_bounds(table, current_version, request)
        slots = _ordered(table, slots, order_by, descending=request.descending)
        columns = table.columns
        if request.tags:
            slots = await self._with_tags(table, slots, _wanted_tags(request))
            columns = table.columns  # if the table was reset while this waited, it has new columns
        start = int(request.page or 0)
        limit = min(request.limit or 100, MAX_ROWS)
        chosen = slots[start : start + limit]
        keys: list[int] = columns.key[chosen].tolist()
        labels = self.buffer.items.labels(keys) or ()
        missing_columns: Sequence[Labels] = ()
        if table.waiting.count:  # the number of items that lack a column which the table requires
            missing_columns = [Labels(frozenset(names)) for names in table.waiting.lacking_of(chosen)]
        return pb.ListItemsResponse(
            keys=keys,
            priorities=columns.priority[chosen].tolist(),
            ages=(self.buffer.clock() - columns.inserted_at[chosen]).tolist(),
            policy_versions=columns.policy_version[chosen].tolist(),
            times_sampled=columns.times_sampled[chosen].tolist(),
            payload_sizes=columns.size[chosen].tolist(),
            policy_version=current_version,
            matching=slots.size,
            next_page=str(start + limit) if start + limit < slots.size else "",
            effective_priorities=effective_priorities(table, chosen).tolist(),
            columns=columns_message(labels),
            tags=tags_message(labels),
            missing_columns=columns_message(missing_columns),
        )

    async def _with_tags(self, table: Table, slots: IntArray, wanted: Mapping[str, str]) -> IntArray:
        """The slots, among `slots` (n,), of items that have all `wanted` tags.

        Items that leave the table while this runs are left out.
        """
        columns = table.columns
        for name, tag_column in columns.tags.items():
            if name in wanted:
                slots = slots[tag_column.have(slots, wanted[name])]
        not_indexed = [(name, value) for name, value in wanted.items() if name not in columns.tags]
        if not not_indexed or not slots.size:
            return slots
        # The other tags have no column, so this looks at the labels of each item. Other requests may run in between.
        keys = columns.key[slots]
        matching: list[int] = []
        for start in range(0, slots.size, ITEMS_PER_LOOK):
            for key in keys[start : start + ITEMS_PER_LOOK].tolist():
                item = self.buffer.items.get(key)
                if item is not None and all(item.labels.text(name) == value for name, value in not_indexed):
                    matching.append(key)
            await asyncio.sleep(0)
        # The other requests may have moved or removed rows, so the slots are looked up again; -1: not in the table.
        matching_slots = table.columns.find(np.array(matching, dtype=np.uint64))
        return matching_slots[matching_slots >= 0]


def _within_bounds(table: Table, current_version: int, request: pb.ListItemsRequest) -> IntArray:
    """The slots of the items whose priority and staleness are within the bounds of the request."""
    columns = table.columns
    slots = columns.used()
    set_fields = {field.name: value for field, value in request.ListFields()}  # fields that are absent set no bound
    for lower_bound, upper_bound, values in (
        ("min_priority", "max_priority", columns.priority),
        ("min_staleness", "max_staleness", current_version - columns.policy_version),
    ):
        if lower_bound in set_fields:
            slots = slots[values[slots] >= set_fields[lower_bound]]
        if upper_bound in set_fields:
            slots = slots[values[slots] <= set_fields[upper_bound]]
    return slots


def _ordered(table: Table, slots: IntArray, order_by: str, *, descending: bool) -> IntArray:
    """Sorts `slots` (n,) by `order_by`. They must be in the order in which their items were inserted."""
    if order_by == "age":  # the least age is that of the newest item
        return slots if descending else slots[::-1]
    values = getattr(table.columns, order_by)[slots]
    if descending:
        values = -values
    return slots[np.argsort(values, kind="stable")]  # stable: items with equal values stay oldest first


def _wanted_tags(request: pb.ListItemsRequest) -> dict[str, str]:
    """The tags that items must have: name -> value. Raises Refused if a name comes twice or there are too many tags."""
    wanted = {tag.name: tag.value for tag in request.tags}
    if len(wanted) < len(request.tags) or len(wanted) > MOST_TAGS:
        raise invalid(f"{len(request.tags)} tags to look for: name each once, and at most {MOST_TAGS}")
    return wanted


def _check_keys(n: int) -> None:
    """Raises Refused if `n` keys are too many for one request."""
    if n > MAX_KEYS:
        raise invalid(f"{n} keys: at most {MAX_KEYS} in one request")


def _facts_message(buffer: ReplayBuffer, keys: Sequence[int], request: pb.GetRequest) -> pb.GetResponse:
    """The facts about items, in columns, and the keys of the items that are missing.

    `keys` are those keys of the request whose items exist.
    """
    known = set(keys)
    now = buffer.clock()
    items = [buffer.items[key] for key in keys]
    labels = buffer.items.labels(keys) or ()
    response = pb.GetResponse(
        keys=keys,
        ages=[now - item.inserted_at for item in items],
        policy_versions=[item.policy_version for item in items],
        policy_version=buffer.policy.version,
        missing=[key for key in dict.fromkeys(request.keys) if key not in known],
        payload_sizes=[0 if request.without_payloads else item.nbytes for item in items],
        columns=columns_message(labels),
        tags=tags_message(labels),
    )
    # The membership of a table has those rows of this response whose items are in the table, and facts about them.
    for table in buffer.tables.values():
        columns = table.columns
        slots_of_keys = columns.find(np.array(keys, dtype=np.uint64))  # (n,); -1: not in this table
        rows = np.flatnonzero(slots_of_keys >= 0)
        if rows.size:
            slots = slots_of_keys[rows]
            response.memberships.add(
                table=table.name,
                rows=rows.tolist(),
                priorities=columns.priority[slots].tolist(),
                times_sampled=columns.times_sampled[slots].tolist(),
                effective_priorities=effective_priorities(table, slots).tolist(),
            )
    return response
