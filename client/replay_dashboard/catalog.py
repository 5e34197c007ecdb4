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
"""Items of one ListItems call. A longer list would delay other requests on the server's event loop."""
KEYS_PER_GET = 256
BYTES_PER_GET = 4 << 20
SECONDS_PER_SWEEP = 2.0
"""Least time from one list of all tables to the next."""
HELD_ROWS = 2_000_000
"""Most rows of all old snapshots together. They stay for viewers who hold or scroll a list."""
MOST_TAG_NAMES = 16
MOST_TAG_VALUES = 12
"""Names of tags, and values of each name, that a list counts: those that most items have."""
LISTED = ("priority", "age", "policy_version", "staleness", "times_sampled", "nbytes")
"""Numbers of an item that a list of items contains, so that its payload need not be read."""
_CURSOR = re.compile(r"epoch (\d+), (\d+) of (\d+)\Z")
_ids = itertools.count(1)


@dataclass
class Snapshot:
    """The items of one table as they were listed, the oldest first: N keys, labels (N,), and columns (N,) by LISTED."""

    keys: npt.NDArray[np.uint64]
    columns: dict[str, npt.NDArray[np.float64]]
    labels: list[Labels]
    id: int = field(default_factory=lambda: next(_ids))
    _slots: tuple[int, npt.NDArray[np.int64]] = (-1, np.zeros(0, np.int64))

    @classmethod
    def of(cls, items: Sequence[ItemInfo]) -> Snapshot:
        columns = {}
        for name in LISTED:
            columns[name] = np.array([getattr(item, name) for item in items], dtype=np.float64)
        keys = np.array([item.key for item in items], dtype=np.uint64)
        return cls(keys, columns, [item.labels for item in items])

    def tags(self, row: int) -> list[str]:
        """The tags of an item, each as NAME=VALUE."""
        return [f"{name}={value}" for name, value in self.labels[row].pairs]

    @cached_property
    def _tagged(self) -> tuple[list[frozenset[str]], npt.NDArray[np.int64]]:
        """The different sets of tags, and for each item the index of its set (N,). Most items share a set."""
        numbers_of: dict[tuple[Any, ...], int] = {}
        numbers = np.zeros(len(self.labels), dtype=np.int64)
        for row, labels in enumerate(self.labels):
            numbers[row] = numbers_of.setdefault(labels.pairs, len(numbers_of))
        kinds = [frozenset(f"{name}={value}" for name, value in pairs) for pairs in numbers_of]
        return kinds, numbers

    def have_tags(self, tags: Sequence[str]) -> npt.NDArray[np.bool_]:
        """True for each item (N,) that has all these tags, written as NAME=VALUE. "NAME=": without the tag NAME."""
        if not tags:
            return np.ones(len(self.keys), dtype=np.bool_)
        kinds, numbers = self._tagged
        having = [all(_has_tag(kind, tag) for tag in tags) for kind in kinds]
        found: npt.NDArray[np.bool_] = np.array(having, dtype=np.bool_)[numbers]
        return found

    @cached_property
    def tag_values(self) -> list[dict[str, Any]]:
        """The tags of all items, the most frequent first: their names, values as NAME=VALUE with the number of items,
        and how many `others` are left out."""
        kinds, numbers = self._tagged
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for tags, count in zip(kinds, np.bincount(numbers, minlength=len(kinds)).tolist(), strict=True):
            for tag in tags:
                counts[tag.partition("=")[0]][tag] += count
        names = sorted(counts, key=lambda name: (-counts[name].total(), name))
        rows = []
        for name in names[:MOST_TAG_NAMES]:
            values = sorted(counts[name].items(), key=lambda each: (-each[1], each[0]))
            others = max(0, len(values) - MOST_TAG_VALUES)
            rows.append({"name": name, "values": values[:MOST_TAG_VALUES], "others": others})
        return rows

    def prompts(self, facts: FactsStore) -> tuple[str, dict[str, dict[str, float]]] | None:
        """The progress of loading prompts into the table, and the facts of each prompt in it.

        The first result is the text of the newest cursor. It is empty while a generator has drawn the cursor. The
        second has, by the name of each prompt, how many times it was drawn before, and its priority. None: no prompt is
        known to be in the table.

        Generators draw their prompts from such a table. Its cursor has a tag, which is in every list of items. The
        prompts and their names are known only after their payloads were read.
        """
        loaded = self._loaded()
        prompts: dict[str, dict[str, float]] = {}
        drawn = self.columns["times_sampled"].tolist()
        priorities = self.columns["priority"].tolist()
        for row, slot in enumerate(self.slots(facts).tolist()):
            if slot >= 0 and A_PROMPT in facts.rows[slot].flags:
                name = facts.rows[slot].prompt_id
                prompts[name] = {"drawn": drawn[row], "priority": priorities[row]}
        if not loaded and not prompts:
            return None
        return loaded, prompts

    def _loaded(self) -> str:
        """The text of the newest cursor of prompts. A curriculum has a cursor of its beginning and one of its end."""
        newest = (-1, -1)
        loaded = ""
        for labels in self.labels:
            cursor = _CURSOR.match(str(labels.tags.get(CURSOR_TAG, "")))
            if cursor is None:
                continue
            epoch_and_count = (int(cursor[1]), int(cursor[2]))
            if epoch_and_count > newest:
                newest = epoch_and_count
                loaded = cursor[0]
        return loaded

    def slots(self, facts: FactsStore) -> npt.NDArray[np.int64]:
        """The slot of each item's facts (N,); -1: not read yet."""
        version, slots = self._slots
        if version != facts.version:
            slots = facts.slots_of(self.keys.tolist())
            self._slots = (facts.version, slots)
        return slots


def _has_tag(tags: frozenset[str], wanted: str) -> bool:
    _, _, value = wanted.partition("=")
    if value:
        return wanted in tags
    return not any(tag.startswith(wanted) and tag != wanted for tag in tags)


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
        self._prompts = prompts
        self._shown: OrderedDict[int, Snapshot] = OrderedDict()
        self._present: list[set[int]] = [set(), set()]
        self._wanted: list[int] = []
        self._counted: set[int] = set()

    def snapshot(self, table: str, number: int) -> Snapshot | None:
        """The snapshot with this number, if it is still kept; otherwise the newest one of the table."""
        snapshot = self._shown.get(number) or self.snapshots.get(table)
        if snapshot is not None:
            self._shown[snapshot.id] = snapshot
            self._shown.move_to_end(snapshot.id)
            while sum(1000 + len(each.keys) for each in self._shown.values()) > HELD_ROWS:
                self._shown.popitem(last=False)
        return snapshot

    def want(self, keys: Sequence[int]) -> None:
        """Puts these groups first in the order of reading: their rows are on a viewer's screen."""
        self._wanted = [key for key in keys if key not in self.facts.slots]

    async def run(self, tables: Callable[[], Sequence[str]], watched: Callable[[], bool]) -> None:
        """Lists the tables and reads groups, for ever; pauses while nobody watches."""
        while True:
            started = time.monotonic()
            if watched():
                with suppress(ReplayError):  # `Live` asks more often, and says what is wrong
                    await self._sweep(tables())
                    while await self._read() and time.monotonic() < started + 2 * SECONDS_PER_SWEEP:
                        pass
            await asyncio.sleep(max(0.2, started + SECONDS_PER_SWEEP - time.monotonic()))

    async def _sweep(self, tables: Sequence[str]) -> None:
        snapshots = {}
        for name in tables:
            snapshots[name] = Snapshot.of(await self._list(name))
            older = {other: self.snapshots[other] for other in tables if other in self.snapshots}
            self.snapshots = older | snapshots
        # A group that moves between tables while they are listed may be in no list: drop its facts at the second miss.
        present = {key for snapshot in snapshots.values() for key in snapshot.keys.tolist()}
        self._present = [self._present[-1], present]
        self.facts.keep_only(set().union(*self._present))
        if self._text.source != self._source:  # a tokenizer was found: read all groups again, now with their text
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
            for item in found.items:  # an item that moved between two calls may be in both pages
                items[item.key] = item
            page = found.next_page
            if not page:
                return list(items.values())

    async def _read(self) -> bool:
        """Reads some groups that were not read yet. Returns False if no such group is left."""
        keys = self._unread()
        if not keys:
            return False
        async with self._budget.call(background=True):
            items = await self._client.get(keys, timeout=10.0)
        found: dict[int, Facts] = await asyncio.to_thread(self._facts_of, items)
        for item in items:
            if found[item.key].numbers:
                self.answers.add(item)
            self._prompts.add(item.policy_version, found[item.key], again=item.key in self._counted)
            self.facts.put(item.key, found[item.key])
            self._counted.discard(item.key)
        # The keys that `get` did not find have left their tables since the list: do not ask for them again.
        self._present = [present - (set(keys) - found.keys()) for present in self._present]
        return True

    def _facts_of(self, items: Sequence[StoredItem]) -> dict[int, Facts]:
        return {item.key: facts_of(item.payload, self._text, self._prompts.solved_reward) for item in items}

    def _unread(self) -> list[int]:
        """The keys to read next: first those on a viewer's screen, then the youngest of each table in turn."""
        sizes: dict[int, float] = {}
        for snapshot in self.snapshots.values():
            unread = np.flatnonzero(snapshot.slots(self.facts) < 0)
            youngest = unread[::-1][:KEYS_PER_GET]
            keys = snapshot.keys[youngest].tolist()
            nbytes = snapshot.columns["nbytes"][youngest].tolist()
            sizes.update(zip(keys, nbytes, strict=True))
        chosen: list[int] = []
        total = 0.0
        for key in dict.fromkeys([*self._wanted, *sizes]):
            if key in self.facts.slots or key not in self._present[-1]:
                continue
            total += sizes.get(key, 0.0)
            if chosen and (total >= BYTES_PER_GET or len(chosen) == KEYS_PER_GET):
                break
            chosen.append(key)
        return chosen
