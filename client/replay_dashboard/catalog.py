"""Catalog: lists the tables repeatedly, and reads each group once, both within the budget."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_client import AsyncReplayClient
from replay_client.errors import ReplayError
from replay_client.records import ItemInfo, StoredItem
from replay_dashboard.answers import VersionAnswers
from replay_dashboard.budget import Budget
from replay_dashboard.facts import A_PROMPT, Facts, FactsStore, facts_of
from replay_dashboard.group import TokenText
from replay_dashboard.prompts import PromptLog
from replay_generator.prompts.stored import CURSOR_TAG
from replay_protos.labels import Labels

ROWS_PER_LIST = 5000
"""Most items of one ListItems call. A longer list would delay other requests on the server's event loop."""
KEYS_PER_GET = 256
"""Most items of one call of `get`."""
BYTES_PER_GET = 4 << 20
"""Bytes of payloads after which a call of `get` asks for no further item."""
SECONDS_PER_SWEEP = 2.0
"""Least seconds from the beginning of one list of all tables to that of the next."""
HELD_ROWS = 2_000_000
"""Most rows of all snapshots together that are kept for viewers. A viewer who stops or scrolls a list looks at an old
snapshot."""
MOST_TAG_NAMES = 16
"""Most names of tags that `Snapshot.tag_values` returns. These are the names that most items have."""
MOST_TAG_VALUES = 12
"""Most values that `Snapshot.tag_values` returns for each name."""
LISTED = ("priority", "age", "policy_version", "staleness", "times_sampled", "nbytes")
"""Numbers of an item that a list of items contains. They are known before its payload is read."""
_CURSOR = re.compile(r"epoch (\d+), (\d+) of (\d+)\Z")
"""The value of CURSOR_TAG: epoch, prompts of this epoch that are loaded, prompts of an epoch."""
_ids = itertools.count(1)
"""The ids of snapshots."""
_BASE_ROWS = 1000
"""Rows that count for each snapshot in addition to its own rows, because even an empty snapshot uses memory."""


@dataclass
class Snapshot:
    """The N items of one table as they were listed, the oldest first.

    `keys`, `labels` and the arrays in `columns` have one entry for each item.
    """

    keys: npt.NDArray[np.uint64]
    columns: dict[str, npt.NDArray[np.float64]]
    """Name of a number, from LISTED -> its values (N,)."""
    labels: list[Labels]
    id: int = field(default_factory=lambda: next(_ids))
    _slots: tuple[int, npt.NDArray[np.int64]] = (-1, np.zeros(0, np.int64))
    """The last result of `slots`, with the version of the facts that it was computed from; -1: none yet."""

    @classmethod
    def of(cls, items: Sequence[ItemInfo]) -> Snapshot:
        """The snapshot of these N items."""
        columns = {}
        for name in LISTED:
            columns[name] = np.array([getattr(item, name) for item in items], dtype=np.float64)
        keys = np.array([item.key for item in items], dtype=np.uint64)
        return cls(keys, columns, [item.labels for item in items])

    def tags(self, row: int) -> list[str]:
        """The tags of the item in this row, each as NAME=VALUE."""
        return [f"{name}={value}" for name, value in self.labels[row].pairs]

    @cached_property
    def _tag_sets(self) -> tuple[list[frozenset[str]], npt.NDArray[np.int64]]:
        """The distinct sets of tags, each tag as NAME=VALUE, and for each item the index of its set (N,).

        Many items share a set, so callers compute what they need once for each set.
        """
        index_of_pairs: dict[tuple[Any, ...], int] = {}  # the tags of a set as pairs -> the index of the set
        set_of_item = np.zeros(len(self.labels), dtype=np.int64)
        for row, labels in enumerate(self.labels):
            next_index = len(index_of_pairs)
            set_of_item[row] = index_of_pairs.setdefault(labels.pairs, next_index)
        tag_sets = [frozenset(f"{name}={value}" for name, value in pairs) for pairs in index_of_pairs]
        return tag_sets, set_of_item

    def have_tags(self, tags: Sequence[str]) -> npt.NDArray[np.bool_]:
        """True for each item (N,) that meets all conditions in `tags`.

        Each condition is NAME=VALUE, which means that the item has this tag, or NAME= without a value, which means that
        the item has no tag NAME.
        """
        if not tags:
            return np.ones(len(self.keys), dtype=np.bool_)
        tag_sets, set_of_item = self._tag_sets
        set_matches = [all(_meets(tag_set, condition) for condition in tags) for tag_set in tag_sets]
        item_matches: npt.NDArray[np.bool_] = np.array(set_matches, dtype=np.bool_)[set_of_item]
        return item_matches

    @cached_property
    def tag_values(self) -> list[dict[str, Any]]:
        """One entry for each name of a tag, with its most frequent values. The most frequent name comes first.

        An entry has the `name`, its `values` as pairs of NAME=VALUE and the number of items, and `others`, the number
        of values that are left out.
        """
        tag_sets, set_of_item = self._tag_sets
        items_per_set = np.bincount(set_of_item, minlength=len(tag_sets)).tolist()
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)  # name -> NAME=VALUE -> number of items
        for tag_set, item_count in zip(tag_sets, items_per_set, strict=True):
            for tag in tag_set:
                name, _, _ = tag.partition("=")
                counts[name][tag] += item_count
        names = sorted(counts, key=lambda name: (-counts[name].total(), name))
        rows = []
        for name in names[:MOST_TAG_NAMES]:
            values = sorted(counts[name].items(), key=lambda tag_and_count: (-tag_and_count[1], tag_and_count[0]))
            others = max(0, len(values) - MOST_TAG_VALUES)
            rows.append({"name": name, "values": values[:MOST_TAG_VALUES], "others": others})
        return rows

    def prompts(self, facts: FactsStore) -> tuple[str, dict[str, dict[str, float]]] | None:
        """The progress of loading prompts into a table of prompts, and the facts of each prompt in it.

        The first result is the text of the newest cursor. It is empty while a generator has drawn the cursor. The
        second result maps the name of each prompt to its facts: how many times the prompt was drawn before (`drawn`),
        and its `priority`. None: the table has no cursor and no known prompt.

        The text of a cursor is a tag, and a list of items contains the tags, so it is known at once. A prompt is known
        only after its payload was read.
        """
        loaded = self._newest_cursor_text()
        prompts: dict[str, dict[str, float]] = {}
        drawn = self.columns["times_sampled"].tolist()
        priorities = self.columns["priority"].tolist()
        for row, slot in enumerate(self.slots(facts).tolist()):
            is_read = slot >= 0
            if is_read and A_PROMPT in facts.rows[slot].flags:
                name = facts.rows[slot].prompt_id
                prompts[name] = {"drawn": drawn[row], "priority": priorities[row]}
        if not loaded and not prompts:
            return None
        return loaded, prompts

    def _newest_cursor_text(self) -> str:
        """The text of the newest cursor of prompts; empty without a cursor.

        There may be several cursors, because the table of a curriculum has one of its beginning and one of its end.
        """
        newest = (-1, -1)
        newest_text = ""
        for labels in self.labels:
            cursor = _CURSOR.match(str(labels.tags.get(CURSOR_TAG, "")))
            if cursor is None:  # the item is no cursor
                continue
            epoch_and_count = (int(cursor[1]), int(cursor[2]))
            if epoch_and_count > newest:
                newest = epoch_and_count
                newest_text = cursor[0]
        return newest_text

    def slots(self, facts: FactsStore) -> npt.NDArray[np.int64]:
        """The index of each item's facts in `facts` (N,); -1: its payload was not read yet."""
        version, slots = self._slots
        if version != facts.version:
            slots = facts.slots_of(self.keys.tolist())
            self._slots = (facts.version, slots)
        return slots


def _meets(tags: frozenset[str], condition: str) -> bool:
    """True if a set of tags meets a condition of `Snapshot.have_tags`.

    If the condition is NAME=VALUE, the set must have this tag. If it is NAME=, the set must have no tag NAME with a
    value.
    """
    _, _, value = condition.partition("=")
    if value:
        return condition in tags
    return not any(tag.startswith(condition) and tag != condition for tag in tags)


class Catalog:
    """The contents of the tables: a snapshot of each, and the facts of every group read so far."""

    def __init__(self, client: AsyncReplayClient, budget: Budget, text: TokenText, prompts: PromptLog) -> None:
        self.snapshots: dict[str, Snapshot] = {}
        """The newest snapshot of each table, by the name of the table."""
        self.facts = FactsStore()
        self.answers = VersionAnswers()
        self._client = client
        self._budget = budget
        self._text = text
        self._source = text.source
        """The source of the tokenizer with which the groups were read."""
        self._prompts = prompts
        self._shown: OrderedDict[int, Snapshot] = OrderedDict()
        """The snapshots that viewers have asked for, by id. The one that was asked for last is at the end."""
        self._present: list[set[int]] = [set(), set()]
        """The keys of all items that the last sweep but one has listed, and of those that the last sweep has listed."""
        self._wanted: list[int] = []
        """The keys of the groups to read first."""
        self._counted: set[int] = set()
        """The keys of groups that `PromptLog` has counted, and that must be read again with a new tokenizer."""

    def snapshot(self, table: str, number: int) -> Snapshot | None:
        """The snapshot whose id is `number`, if it is still kept; otherwise the newest one of the table.

        None: the table has no snapshot. Keeps the result for later calls with its id. If the kept snapshots have too
        many rows together, drops those that were asked for longest ago.
        """
        snapshot = self._shown.get(number) or self.snapshots.get(table)
        if snapshot is not None:
            self._shown[snapshot.id] = snapshot
            self._shown.move_to_end(snapshot.id)
            while sum(_BASE_ROWS + len(shown.keys) for shown in self._shown.values()) > HELD_ROWS:
                self._shown.popitem(last=False)
        return snapshot

    def want(self, keys: Sequence[int]) -> None:
        """Puts these groups first in the order of reading, because their rows are on a viewer's screen."""
        self._wanted = [key for key in keys if key not in self.facts.slots]

    async def run(self, tables: Callable[[], Sequence[str]], watched: Callable[[], bool]) -> None:
        """Lists the tables and reads groups, for ever. Pauses while nobody watches.

        `tables` returns the names of the tables, and `watched` returns True if somebody watches.
        """
        while True:
            started = time.monotonic()
            if watched():
                with suppress(ReplayError):  # `Live` asks more often, and shows the error on the page
                    await self._sweep(tables())
                    while await self._read() and time.monotonic() < started + 2 * SECONDS_PER_SWEEP:
                        pass  # reads the next groups, but lists the tables again after two sweeps at the latest
            await asyncio.sleep(max(0.2, started + SECONDS_PER_SWEEP - time.monotonic()))

    async def _sweep(self, tables: Sequence[str]) -> None:
        """Takes a snapshot of each table, and forgets the facts of groups that have left all tables."""
        snapshots = {}
        for name in tables:
            snapshots[name] = Snapshot.of(await self._list(name))
            # Viewers see the new snapshot at once. The tables that are not listed yet keep their old snapshots.
            old_snapshots = {other: self.snapshots[other] for other in tables if other in self.snapshots}
            self.snapshots = old_snapshots | snapshots
        # A group that moves between tables while they are listed may be in no list. So its facts are forgotten only
        # after two sweeps without it.
        present = {key for snapshot in snapshots.values() for key in snapshot.keys.tolist()}
        self._present = [self._present[-1], present]
        self.facts.keep_only(set().union(*self._present))
        if self._text.source != self._source:  # a tokenizer was found, so read all groups again, for their text
            self._source = self._text.source
            self._counted = set(self.facts.slots)
            self.facts.keep_only(set())

    async def _list(self, table: str) -> list[ItemInfo]:
        """All items of a table, the oldest first."""
        items: dict[int, ItemInfo] = {}
        page = ""
        while True:
            async with self._budget.call(background=True):
                found = await self._client.list_items(
                    table, limit=ROWS_PER_LIST, order_by="age", descending=True, page=page, timeout=10.0
                )
            for item in found.items:  # an item that changed between two calls may be on both pages
                items[item.key] = item
            page = found.next_page
            if not page:  # that was the last page
                return list(items.values())

    async def _read(self) -> bool:
        """Reads some groups that were not read yet. Returns False if no such group is left."""
        keys = self._unread()
        if not keys:
            return False
        async with self._budget.call(background=True):
            items = await self._client.get(keys, timeout=10.0)
        facts_by_key: dict[int, Facts] = await asyncio.to_thread(self._facts_of, items)
        for item in items:
            facts = facts_by_key[item.key]
            is_group = bool(facts.numbers)
            if is_group:
                self.answers.add(item)
            self._prompts.add(item.policy_version, facts, again=item.key in self._counted)
            self.facts.put(item.key, facts)
            self._counted.discard(item.key)
        # The items that `get` did not find have left their tables since the list, so do not ask for them again.
        gone = set(keys) - facts_by_key.keys()
        self._present = [present - gone for present in self._present]
        return True

    def _facts_of(self, items: Sequence[StoredItem]) -> dict[int, Facts]:
        """The facts of these items by their keys."""
        return {item.key: facts_of(item.payload, self._text, self._prompts.solved_reward) for item in items}

    def _unread(self) -> list[int]:
        """The keys to read next: those on a viewer's screen, then the youngest of the first table, and so on.

        There are at most KEYS_PER_GET keys. Their payloads have less than BYTES_PER_GET bytes together, unless there is
        only one key.
        """
        sizes: dict[int, float] = {}  # key -> bytes of its payload
        for snapshot in self.snapshots.values():
            unread = np.flatnonzero(snapshot.slots(self.facts) < 0)
            youngest = unread[::-1][:KEYS_PER_GET]  # a snapshot has the oldest items first
            keys = snapshot.keys[youngest].tolist()
            nbytes = snapshot.columns["nbytes"][youngest].tolist()
            sizes.update(zip(keys, nbytes, strict=True))
        chosen: list[int] = []
        total = 0.0
        for key in dict.fromkeys([*self._wanted, *sizes]):  # the wanted keys first, and each key once
            is_read = key in self.facts.slots
            is_in_a_table = key in self._present[-1]
            if is_read or not is_in_a_table:
                continue
            total += sizes.get(key, 0.0)  # a wanted item that is not among the youngest counts as 0 bytes
            if chosen and (total >= BYTES_PER_GET or len(chosen) == KEYS_PER_GET):
                break
            chosen.append(key)
        return chosen
