"""Prompt queue: where a generator's next prompt comes from, and who is told what became of it.

Prompts of an iterable are the generator's own, and nobody is told (`IteratedPrompts`). Those of a table of prompts are
drawn under a lease, which ends with the group (`table.py`). Partial groups are drawn and held like them
(`LeasedItems`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy.typing as npt

from replay_client import AsyncLeaseRenewer, AsyncReplayClient, Sample, SampleInfo
from replay_client.errors import ReplayError
from replay_client.waits import LAST_WORD, in_daemon_thread
from replay_generator.errors import PromptError
from replay_generator.metrics import GeneratorStats
from replay_generator.prompts.prompt import Prompt, PromptSource

logger = logging.getLogger(__name__)

T = TypeVar("T")
Answer = Callable[..., Awaitable[Any]]
"""Makes a call of the client, again while the server is away or busy: `GeneratorServer.answer`."""
_THE_END = object()
"""What stands for a further prompt where there is none. Null may be one that somebody gave."""
_MOST_STRANGERS = 100
"""Items that cannot be decoded. When there were so many before the first group, it is the wrong table."""


class PromptItem(NamedTuple):
    """A prompt in its table, as a generator has drawn it."""

    key: int
    priority: float
    epoch: int
    position: int


@dataclass(frozen=True)
class DrawnPrompt:
    """A prompt of which the generator is to make a group."""

    source: PromptSource
    closes: tuple[Sample, ...] = ()
    """Its item under a lease, which the insert of the group closes. Empty: it came from an iterable, or a partial
    group has taken its place."""
    item: PromptItem | None = None
    """None: it came from an iterable."""


class PromptQueue:
    """Gives prompts one by one. Each ends with exactly one of `finished`, `requeued` and `reject`.

    Where partial groups are stored, such a group takes the place of its prompt when it is opened (`opened`). It may
    end at another generator than the one that drew the prompt.
    """

    ended = False
    """No prompt will come any more."""

    async def begin(self) -> None:
        """Finds out whether there can be prompts. Raises ReplayError that names the remedy."""

    async def next(self) -> DrawnPrompt | None:
        """The next prompt; None: there is none now. Then `ended` says whether to ask again.

        Raises PromptError for a row that is no prompt; the next call goes on with the next one.
        """
        raise NotImplementedError

    async def finished(self, drawn: DrawnPrompt, rewards: npt.ArrayLike | None, *, inserted: bool) -> None:
        """The prompt is done: its group was `inserted`, or is left out for good.

        `rewards` (G,) are those of the group; None: nobody knows them.
        """

    def opened(self, drawn: DrawnPrompt) -> None:
        """The insert of a partial group has closed the prompt."""

    async def requeued(self, drawn: DrawnPrompt, partial: Sample | None = None) -> None:
        """The prompt is not done: somebody else may have it. It takes the place of `partial`, if there is one."""

    async def reject(self, sample: Sample, why: Exception) -> None:
        """The item is taken out: nobody can make a group of it."""

    async def close(self) -> None:
        """Returns all prompts that are under way, if the server can be reached soon."""


class IteratedPrompts(PromptQueue):
    """The prompts of an iterable, in its order."""

    def __init__(self, prompts: Iterable[PromptSource]) -> None:
        self._prompts = iter(prompts)
        self._count = 0

    async def next(self) -> DrawnPrompt | None:
        # In a thread: the next prompt of a streamed data set may take its time.
        source = await in_daemon_thread(lambda: next(self._prompts, _THE_END))
        if source is _THE_END:
            self.ended = True
            return None
        self._count += 1
        try:
            return DrawnPrompt(Prompt.of(source))
        except ValueError as error:
            raise PromptError(f"prompt {self._count} of those that are given: {error}") from error


class LeasedItems(Generic[T]):
    """The items of a table that this process has drawn, under leases that it renews until it has done with them."""

    def __init__(
        self,
        client: AsyncReplayClient,
        answer: Answer,
        table: str,
        lease: float,
        what: str,
        decode: Callable[[Sample], T],
        on_lost: Callable[[Sample, T], object],
        stats: GeneratorStats,
    ) -> None:
        """`what` such a table is of. `decode` raises ValueError for what nobody can work at, and that is rejected.
        `on_lost`: its lease has ended."""
        self._client, self._answer, self._table, self._what, self._lease = client, answer, table, what, lease
        self._decode, self._on_lost, self._stats = decode, on_lost, stats
        self._renewer = AsyncLeaseRenewer(client.renew, lease, self._lose)
        self.held: dict[int, tuple[Sample, T]] = {}
        """By lease."""

    async def draw(self, timeout: float, exclude: Sequence[int] = ()) -> tuple[Sample, T]:
        """The next item. Raises DeadlineExceededError if there is none."""
        while True:
            (sample,) = await self._answer(
                self._client.sample, self._table, timeout=timeout, lease=self._lease, exclude=exclude
            )
            try:
                item = self._decode(sample)
            except ValueError as error:
                await self.reject(sample, error)
                if self._stats["items_rejected"] >= _MOST_STRANGERS and not self._stats["groups"]:
                    wrong = f"table {self._table!r} holds other things than {self._what}: use another one"
                    raise ReplayError(wrong) from error
                continue
            self.held[sample.info.lease_id] = sample, item
            # From its first renewal on the sample is in use: its lease goes on after a restart of the server.
            self._renewer.add([sample])
            return sample, item

    async def reject(self, sample: Sample, why: Exception) -> None:
        """The item is taken out: nobody can work at it."""
        logger.warning("item %d of table %r is rejected: %s", sample.info.key, self._table, why)
        self._stats["items_rejected"] += 1
        self.forget([sample])
        await self._answer(self._client.delete, self._table, [sample.info.key])  # a curriculum keeps it
        await self._answer(self._client.acknowledge, [sample])

    def forget(self, samples: Sequence[Sample]) -> list[Sample]:
        """These have been closed or lost. Returns those that were not already."""
        self._renewer.forget(samples)
        return [sample for sample in samples if self.held.pop(sample.info.lease_id, None) is not None]

    def check(self) -> None:
        """Asserts that each item is held under its own lease."""
        for lease, (sample, _) in self.held.items():
            assert sample.info.lease_id == lease, (lease, sample.info)

    async def end(self, samples: Sequence[Sample], *, requeue: bool = False) -> None:
        """These leave the table, or go back to their places."""
        if held := self.forget(samples):
            await self._answer(self._client.acknowledge, held, requeue=requeue)

    async def close(self) -> None:
        """Requeues all items, if the server can be reached soon."""
        await self._renewer.close()
        with contextlib.suppress(ReplayError, TimeoutError):
            async with asyncio.timeout(LAST_WORD):
                await self.end([sample for sample, _ in self.held.values()], requeue=True)

    def _lose(self, lost: list[SampleInfo]) -> None:
        for sample, item in [self.held[info.lease_id] for info in lost if info.lease_id in self.held]:
            self.forget([sample])
            self._on_lost(sample, item)
