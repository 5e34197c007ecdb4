"""Ended batches: how the batches ended that readers ended last. So a reader that asks again is recognised.

Ids lie in blocks, so that a durable server writes one small record for each end, and not all ids again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MOST_ID = 1 << 63
"""Ids of batches are below this. In a block this bit of an id says that the batch was given back."""
MAX_ENDED = 1 << 18
IDS_PER_BLOCK = 256


class EndedBatches:
    def __init__(self) -> None:
        self._ended: set[int] = set()
        self._blocks: dict[int, list[int]] = {}
        """By number, ascending. Only the last block grows."""

    def was_taken(self, batch_id: int) -> bool:
        return batch_id in self._ended

    def was_given_back(self, batch_id: int) -> bool:
        return batch_id | MOST_ID in self._ended

    def remember(self, batch_id: int, *, given_back: bool) -> Iterator[int]:
        """Adds an id, and forgets the oldest ones. Returns the numbers of the blocks that have changed."""
        entry = batch_id | MOST_ID if given_back else batch_id
        last = next(reversed(self._blocks), 0)
        if len(self._blocks.setdefault(last, [])) == IDS_PER_BLOCK:
            last += 1
            self._blocks[last] = []
        self._blocks[last].append(entry)
        self._ended.add(entry)
        yield last
        while len(self._ended) > MAX_ENDED:
            oldest = next(iter(self._blocks))
            self._ended.difference_update(self._blocks.pop(oldest))
            yield oldest

    def block(self, number: int) -> list[int] | None:
        """The entries of a block, or None if they are forgotten."""
        return self._blocks.get(number)

    def load(self, blocks: Iterable[tuple[int, list[int]]]) -> None:
        """Blocks of an older server, by number."""
        self._blocks = dict(sorted(blocks))
        self._ended = {entry for entries in self._blocks.values() for entry in entries}
