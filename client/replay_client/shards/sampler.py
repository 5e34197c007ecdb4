"""ShardedSampler: merged batches that are drawn ahead, and that count as sampled only when they are used."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Self

from replay_client.errors import InvalidRequestError
from replay_client.records import Sample
from replay_client.sampler import AsyncSampler, OnLease, ignore
from replay_client.shards.fleet import Deadline
from replay_client.shards.sampling import Draw, Drawer, rest_of

_ANSWER_SECONDS = 5.0
"""Seconds past the timeout to wait for a batch that is on its way."""


class ShardedSampler(AsyncSampler):
    """An AsyncSampler over several shards. Up to `prefetch` merged batches are drawn ahead, under leases.

    A lease that ends before the batch is used gives the batch back, and another one is drawn.
    """

    def __init__(
        self,
        drawer: Drawer,
        draw: Draw,
        prefetch: int,
        timeout: float | None,
        lease: float = 0.0,
        on_lease: OnLease = ignore,
    ) -> None:
        """`lease`: seconds for which the caller has each batch; 0: for good. `on_lease` is called before it begins."""
        if prefetch < 0:
            raise InvalidRequestError(f"prefetch must be at least 0, not {prefetch}")
        self._drawer, self._draw = drawer, draw
        self._prefetch, self._wait = prefetch, timeout
        self._lease, self._on_lease = lease, on_lease
        self._drawing: deque[asyncio.Task[list[Sample]]] = deque()
        self._taken: list[Sample] = []
        """Of a batch whose other rows were lost with their shard: the next batch begins with them."""
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Sample]:
        """The next batch. Raises DeadlineExceededError, with the reason, if there is none within the timeout."""
        if self._closed:
            raise StopAsyncIteration
        deadline = Deadline(self._wait)
        if not self._taken:
            self._taken = await self._drawer.settled(self._draw)
        while len(self._taken) < self._draw.rows:
            if self._taken:  # rows are missing: draw exactly these
                leased = await self._drawer.lease(rest_of(self._draw, self._taken), deadline)
            else:
                leased = await self._drawn_ahead(deadline)
            if self._lease:
                self._on_lease(leased)
            self._taken += await self._drawer.take(self._draw, leased, self._lease)
        batch, self._taken = self._taken, []
        self._draw_ahead(self._prefetch)
        return batch

    async def _drawn_ahead(self, deadline: Deadline) -> list[Sample]:
        self._draw_ahead(max(1, self._prefetch))
        # Any of them: an order among batches that are drawn at the same time means nothing.
        await asyncio.wait(self._drawing, timeout=deadline.seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in self._drawing:
            if task.done():
                self._drawing.remove(task)
                return task.result()
        # The same question once more, for the reason of the wait.
        return await self._drawer.lease(self._draw, deadline)

    def _draw_ahead(self, batches: int) -> None:
        while len(self._drawing) < batches:
            self._drawing.append(asyncio.create_task(self._drawer.lease(self._draw, Deadline(None))))

    async def close(self) -> None:
        """Gives back what was drawn ahead."""
        self._closed = True
        drawing, self._drawing = self._drawing, deque()
        for task in drawing:
            task.cancel()
        results = await asyncio.gather(*drawing, return_exceptions=True)
        for result in results:
            if isinstance(result, list):
                await self._drawer.give_back(result)
        if self._lease:
            await self._drawer.give_back(self._taken)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
