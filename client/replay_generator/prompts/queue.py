"""Prompt queue: returns a generator's next prompt. The generator reports the outcome of each prompt to the queue.

The prompts of an iterable belong to the generator, and their outcomes are ignored (`IteratedPrompts`). The prompts of a
table are drawn under a lease, which ends when the group is done (`table.py`). `LeasedItems` draws such prompts, and
partial groups.
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
"""Makes a call of the client, and repeats it while the server is away or busy: `GeneratorServer.answer`."""
_THE_END = object()
"""Marks the end of the iterable. None cannot mark it: an iterable may yield None."""
_MOST_FOREIGN = 100
"""The run ends after this many items that cannot be decoded, if no group was made: the table holds other things."""


class PromptItem(NamedTuple):
    """The item of a prompt, with the values that it had when a generator drew it."""

    key: int
    priority: float
    epoch: int
    position: int


@dataclass(frozen=True)
class DrawnPrompt:
    """A prompt from which the generator will make a group."""

    source: PromptSource
    closes: tuple[Sample, ...] = ()
    """The item of the prompt, under its lease. The insert of the group closes this item.

    Empty: the prompt came from an iterable, or a partial group has replaced the prompt. Otherwise one item, in the form
    that `insert` takes."""
    item: PromptItem | None = None
    """The item of the prompt; None: the prompt came from an iterable."""


class PromptQueue:
    """Returns prompts one by one. The end of each prompt is one call of `finished`, `requeued` or `reject`.

    If partial groups are stored, a group replaces its prompt when the group is opened (`opened`). Then this call may be
    made by another generator than the one that drew the prompt.
    """

    ended = False
    """True if there will be no further prompt."""
    has_loaded = False
    """True if the last call of `next` has loaded further prompts, and returned none of them yet."""

    async def begin(self) -> None:
        """Prepares the queue. Raises ReplayError, which names the remedy, if there can be no prompts."""

    async def next(self) -> DrawnPrompt | None:
        """The next prompt; None: there is none now. After None, call `next` again, unless `ended`.

        Raises PromptError for a row that is no prompt. The next call continues with the next row.
        """
        raise NotImplementedError

    async def finished(self, drawn: DrawnPrompt, rewards: npt.ArrayLike | None, *, inserted: bool) -> None:
        """Is called when the prompt is done: its group was `inserted`, or was left out for good.

        `rewards` (G,): the rewards of the group; None: they are unknown.
        """

    def opened(self, drawn: DrawnPrompt) -> None:
        """Is called when the insert of a partial group has closed the prompt."""

    async def requeued(self, drawn: DrawnPrompt, partial: Sample | None = None) -> None:
        """Puts a prompt that is not done back into its table, for any generator.

        `partial`: the item of a partial group that the prompt replaces; None: there is none.
        """

    async def reject(self, sample: Sample, why: Exception) -> None:
        """Removes an item from which no generator can make a group."""

    async def close(self) -> None:
        """Puts all prompts that are under way back into their table, if the server can be reached soon."""


class IteratedPrompts(PromptQueue):
    """The prompts of an iterable, in its order."""

    def __init__(self, prompts: Iterable[PromptSource]) -> None:
        self._prompts = iter(prompts)
        self._count = 0
        """The number of values that the iterable has yielded, for errors."""

    async def next(self) -> DrawnPrompt | None:
        """The next prompt; None: the iterable has ended. Raises PromptError for a value that is no prompt."""
        # The iterable runs in a thread: the next prompt of a streamed data set may take long.
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
    """The items of a table that this process has drawn, under leases that it renews until it is done with them."""

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
        """`lease`: the seconds of each lease. `what`: the contents of the table, for errors.

        `decode` makes the value of an item. If it raises ValueError, the item is rejected. `on_lost` is called with an
        item and its value after the lease has ended.
        """
        self._client = client
        self._answer = answer
        self._table = table
        self._lease = lease
        self._what = what
        self._decode = decode
        self._on_lost = on_lost
        self._stats = stats
        self._renewer = AsyncLeaseRenewer(client.renew, lease, self._lose)
        self.held: dict[int, tuple[Sample, T]] = {}
        """The items and their values, by the id of the lease."""

    async def draw(self, timeout: float, exclude: Sequence[int] = ()) -> tuple[Sample, T]:
        """The next item and its value. `exclude`: keys of items to skip. Raises DeadlineExceededError if none comes."""
        while True:
            # `sample` returns a list with one item. If none comes in time, `_answer` lets DeadlineExceededError pass.
            (sample,) = await self._answer(
                self._client.sample, self._table, timeout=timeout, lease=self._lease, exclude=exclude
            )
            try:
                item = self._decode(sample)
            except ValueError as error:
                await self.reject(sample, error)
                # _MOST_FOREIGN items, and no group made of any: this table cannot be the right one.
                if self._stats["items_rejected"] >= _MOST_FOREIGN and not self._stats["groups"]:
                    wrong = f"table {self._table!r} holds other things than {self._what}: use another one"
                    raise ReplayError(wrong) from error
                continue
            self.held[sample.info.lease_id] = (sample, item)
            # The renewer renews the lease at once. After its first renewal, a lease survives a restart of the server.
            self._renewer.add([sample])
            return sample, item

    async def reject(self, sample: Sample, why: Exception) -> None:
        """Removes an item that nobody can use."""
        logger.warning("item %d of table %r is rejected: %s", sample.info.key, self._table, why)
        self._stats["items_rejected"] += 1
        self.forget([sample])
        # The item is also deleted: a table whose items are drawn again and again, such as a curriculum, keeps items
        # that are only acknowledged.
        await self._answer(self._client.delete, self._table, [sample.info.key])
        await self._answer(self._client.acknowledge, [sample])

    def forget(self, samples: Sequence[Sample]) -> list[Sample]:
        """Forgets items that were closed or lost. Returns the items among them that were still held."""
        self._renewer.forget(samples)
        forgotten = []
        for sample in samples:
            if self.held.pop(sample.info.lease_id, None) is not None:
                forgotten.append(sample)
        return forgotten

    def check(self) -> None:
        """Asserts that each item is held under its own lease."""
        for lease, (sample, _) in self.held.items():
            assert sample.info.lease_id == lease, (lease, sample.info)

    async def end(self, samples: Sequence[Sample], *, requeue: bool = False) -> None:
        """Ends the leases of these items. They are consumed or, with `requeue`, return to their places in the table."""
        held = self.forget(samples)
        if held:
            await self._answer(self._client.acknowledge, held, requeue=requeue)

    async def close(self) -> None:
        """Requeues all items, if the server can be reached soon."""
        await self._renewer.close()
        with contextlib.suppress(ReplayError, TimeoutError):
            async with asyncio.timeout(LAST_WORD):
                await self.end([sample for sample, _ in self.held.values()], requeue=True)

    def _lose(self, lost: list[SampleInfo]) -> None:
        """Forgets the items whose leases have ended, and calls `on_lost` for each. The renewer calls this method."""
        held = [self.held[info.lease_id] for info in lost if info.lease_id in self.held]
        for sample, item in held:
            self.forget([sample])
            self._on_lost(sample, item)
