"""Taken batches: the ids of the batches that readers took last. They show that a `take` is a retry.

Ids lie in blocks, so that a durable server writes one small record for each take, and not all ids again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MAX_TAKEN = 1 << 18
IDS_PER_BLOCK = 256


class TakenBatches:
    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._blocks: dict[int, list[int]] = {}
        """By number, ascending. Only the last block grows."""

    def __contains__(self, batch_id: int) -> bool:
        return batch_id in self._ids

    def remember(self, batch_id: int) -> Iterator[int]:
        """Adds an id, and forgets the oldest ones. Returns the numbers of the blocks that have changed."""
        last = next(reversed(self._blocks), 0)
        if len(self._blocks.setdefault(last, [])) == IDS_PER_BLOCK:
            last += 1
            self._blocks[last] = []
        self._blocks[last].append(batch_id)
        self._ids.add(batch_id)
        yield last
        while len(self._ids) > MAX_TAKEN:
            oldest = next(iter(self._blocks))
            self._ids.difference_update(self._blocks.pop(oldest))
            yield oldest

    def block(self, number: int) -> list[int] | None:
        """The ids of a block, or None if they are forgotten."""
        return self._blocks.get(number)

    def load(self, blocks: Iterable[tuple[int, list[int]]]) -> None:
        """Blocks of an older server, by number."""
        self._blocks = dict(sorted(blocks))
        self._ids = {batch_id for ids in self._blocks.values() for batch_id in ids}
