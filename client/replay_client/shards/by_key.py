"""By key: what callers do with items whose keys they name.

An item lies on the shard to which its key belongs, unless that shard was away at its insert, or another one granted its
permit. So the owners are asked first, and all other shards for the keys that these lack.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from replay_client.aio import AsyncReplayClient
from replay_client.records import MutationResult, StoredItem
from replay_client.shards.fleet import GONE, Deadline, Fleet
from replay_client.shards.placing import Keys
from replay_client.shards.shard import Shard

Rows = npt.NDArray[np.int64]
Change = Callable[[AsyncReplayClient, Rows], Awaitable[MutationResult]]


class KeyedItems:
    """Finds, changes and deletes items by key, for one client."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def change(self, keys: Keys, change: Change, deadline: Deadline) -> MutationResult:
        """Applies `change` to rows of `keys` (K,) on each shard. A key is missing if no shard that is up has it."""
        up = await self._fleet.reachable(deadline)
        names = [self._fleet.shards.index(shard) for shard in up]
        owners = self._fleet.rendezvous.owners(keys)
        applied, found = await self._change_on_each(
            up, [np.flatnonzero(owners == name) for name in names], keys, change
        )
        rows = np.flatnonzero(~found)
        if rows.size:
            rest = [rows[owners[rows] != name] for name in names]
            more, found_elsewhere = await self._change_on_each(up, rest, keys, change)
            applied, found = applied + more, found | found_elsewhere
        return MutationResult(applied, tuple(dict.fromkeys(keys[~found].tolist())))

    async def get(self, keys: Iterable[int], deadline: Deadline) -> list[StoredItem]:
        """The items that a shard which is up holds, in the order of `keys`."""
        wanted = list(dict.fromkeys(keys))
        answers = await self._fleet.ask(lambda client: client.get(wanted, timeout=deadline.seconds), deadline)
        found = {item.key: item for items in answers.values() for item in items}
        return [found[key] for key in wanted if key in found]

    async def _change_on_each(
        self, shards: Sequence[Shard], parts: Sequence[Rows], keys: Keys, change: Change
    ) -> tuple[int, npt.NDArray[np.bool_]]:
        """How many items the shards changed, and whether each of `keys` (K,) was found, as (K,)."""
        results = await asyncio.gather(*map(partial(self._change_on, keys, change), shards, parts))
        found = np.zeros(keys.size, dtype=np.bool_)
        for rows, result in zip(parts, results, strict=True):
            found[rows] |= ~np.isin(keys[rows], np.array(result.missing, dtype=np.uint64))
        return sum(result.applied for result in results), found

    async def _change_on(self, keys: Keys, change: Change, shard: Shard, rows: Rows) -> MutationResult:
        async def work() -> MutationResult:
            return await change(shard.client, rows)

        if not rows.size:
            return MutationResult(0, ())
        try:
            return await shard.run(work())
        except GONE:
            return MutationResult(0, tuple(keys[rows].tolist()))
