"""Prompt queue: returns a generator's next prompt. The generator reports the outcome of each prompt to the queue.

Prompts come from an iterable or from a table of the server. The prompts of an iterable belong to one generator, and
their outcomes are ignored (`IteratedPrompts`). Each prompt of a table is drawn under a lease, which ends when the group
of the prompt is done (`table.py`).

`LeasedItems` draws items of any kind under leases: prompts, partial groups, and the items of stages.
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
"""Calls a method of the client, and repeats the call while the server is away or busy (`GeneratorServer.answer`)."""
_THE_END = object()
"""Marks the end of the iterable. None cannot mark the end, because an iterable may yield None."""
_MOST_REJECTED = 100
"""The run ends after this many rejected items if no group was made, because the table then holds other things."""


class PromptItem(NamedTuple):
    """The key of a prompt's item in its table, with the values that the item had when a generator drew it."""

    key: int
    priority: float
    epoch: int
    position: int
    """The position of the prompt, as in `StoredPrompt`."""


@dataclass(frozen=True)
class DrawnPrompt:
    """A prompt from which the generator will make a group."""

    source: PromptSource
    closes: tuple[Sample, ...] = ()
    """The item of the prompt, under its lease. The generator passes it to the insert of the group, which closes it.

    Empty: there is no item to close, because the prompt came from an iterable, or because a partial group has replaced
    the prompt."""
    item: PromptItem | None = None
    """The key and the values of the prompt's item; None: the prompt came from an iterable."""


class PromptQueue:
    """Returns prompts one by one. For each prompt, the generator then calls `finished`, `requeued` or `reject` once.

    If partial groups are stored, the generator also calls `opened` when it has opened the group of a prompt, because
    the stored group then replaces the prompt. Any generator may continue that group. So the generator that calls
    `finished` or `requeued` may be another one than the generator that drew the prompt.
    """

    ended = False
    """True if there will be no further prompt."""
    is_loading = False
    """True if the last call of `next` has returned no prompt because further prompts are being loaded, by this
    generator or by another one."""

    async def begin(self) -> None:
        """Prepares the queue. Raises ReplayError, which names the remedy, if the queue cannot return any prompts."""

    async def next(self) -> DrawnPrompt | None:
        """Returns the next prompt; None: there is no prompt now. After None, call `next` again, unless `ended`.

        Raises PromptError if the next row is no prompt. The call of `next` after that continues with the row after it.
        """
        raise NotImplementedError

    async def finished(self, drawn: DrawnPrompt, rewards: npt.ArrayLike | None, *, inserted: bool) -> None:
        """Ends a prompt that is done, because its group was inserted, or was left out for good.

        `rewards` (G,): the rewards of the group; None: they are unknown. `inserted`: False if the group was left out.
        """

    def opened(self, drawn: DrawnPrompt) -> None:
        """Notes that the insert of a partial group has closed the item of the prompt."""

    async def requeued(self, drawn: DrawnPrompt, partial: Sample | None = None) -> None:
        """Puts a prompt that is not done back into its table, so that any generator can draw it.

        `partial`: the item of the partial group that had replaced the prompt. The prompt then replaces this item. None:
        the prompt has no stored group.
        """

    async def reject(self, sample: Sample, why: Exception) -> None:
        """Removes an item from the table, because no generator can make a group from it. `why` is logged."""

    async def close(self) -> None:
        """Puts all prompts that this generator still holds back into their table, if the server answers soon."""


class IteratedPrompts(PromptQueue):
    """The prompts of an iterable, in its order."""

    def __init__(self, prompts: Iterable[PromptSource]) -> None:
        self._prompts = iter(prompts)
        self._count = 0
        """The number of values that the iterable has yielded. Errors name a prompt by this number."""

    async def next(self) -> DrawnPrompt | None:
        """Returns the next prompt; None: the iterable has ended. Raises PromptError if the value is no prompt."""
        # `next` is called in a thread, because the next row of a streamed data set may take long.
        self._count += 1  # also if reading the value fails
        source = await in_daemon_thread(lambda: next(self._prompts, _THE_END))
        if source is _THE_END:
            self.ended = True
            return None
        try:
            return DrawnPrompt(Prompt.of(source))
        except ValueError as error:
            raise PromptError(f"prompt {self._count} of those that are given: {error}") from error


class LeasedItems(Generic[T]):
    """Draws items of a table under leases, and renews the leases until this process is done with the items."""

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

        `decode` makes the value of an item. If `decode` raises ValueError, the item is rejected. If the server reports
        that the lease of an item has ended, `on_lost` is called with the item and its value.
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
        """Id of the lease -> item and its value, for each item that was drawn, and neither closed nor lost."""

    async def draw(self, timeout: float, exclude: Sequence[int] = ()) -> tuple[Sample, T]:
        """Draws the next item that can be decoded. Returns the item and its value.

        `timeout`: how many seconds each draw may wait for an item. `exclude`: keys of items to skip. Raises
        DeadlineExceededError if no item comes in time, and ReplayError if the table seems to hold other things.
        """
        while True:
            # `sample` returns a list with one item. If no item comes in time, this call raises DeadlineExceededError.
            (sample,) = await self._answer(
                self._client.sample, self._table, timeout=timeout, lease=self._lease, exclude=exclude
            )
            try:
                value = self._decode(sample)
            except ValueError as error:
                await self.reject(sample, error)
                # If many items were rejected and none has become a group, this is probably the wrong table.
                if self._stats["items_rejected"] >= _MOST_REJECTED and not self._stats["groups"]:
                    message = f"table {self._table!r} holds other things than {self._what}: use another one"
                    raise ReplayError(message) from error
                continue
            self.held[sample.info.lease_id] = (sample, value)
            # `add` makes the renewer renew the lease at once, because a lease survives a restart of the server only
            # after its first renewal.
            self._renewer.add([sample])
            return sample, value

    async def reject(self, sample: Sample, why: Exception) -> None:
        """Removes an item from the table, because nobody can use it. `why` is logged."""
        logger.warning("item %d of table %r is rejected: %s", sample.info.key, self._table, why)
        self._stats["items_rejected"] += 1
        self.forget([sample])
        # The item is also deleted, because a table whose items are drawn again and again, such as a curriculum, keeps
        # items that are only acknowledged.
        await self._answer(self._client.delete, self._table, [sample.info.key])
        await self._answer(self._client.acknowledge, [sample])

    def forget(self, samples: Sequence[Sample]) -> list[Sample]:
        """Forgets these items, and ends the renewal of their leases. Returns the items among them that were still held.

        The leases themselves do not end by this call.
        """
        self._renewer.forget(samples)
        forgotten = []
        for sample in samples:
            if self.held.pop(sample.info.lease_id, None) is not None:
                forgotten.append(sample)
        return forgotten

    def check(self) -> None:
        """Asserts that each item is held under its own lease."""
        for lease_id, (sample, _) in self.held.items():
            assert sample.info.lease_id == lease_id, (lease_id, sample.info)

    async def end(self, samples: Sequence[Sample], *, requeue: bool = False) -> None:
        """Ends the leases of these items. Items that are no longer held are skipped.

        The other items are consumed or, with `requeue`, return to their places in the table.
        """
        still_held = self.forget(samples)
        if still_held:
            await self._answer(self._client.acknowledge, still_held, requeue=requeue)

    async def close(self) -> None:
        """Ends the renewals, and requeues all items that are held. Gives up after LAST_WORD seconds, without an error.

        The leases of items that were not requeued end by themselves.
        """
        await self._renewer.close()
        with contextlib.suppress(ReplayError, TimeoutError):
            async with asyncio.timeout(LAST_WORD):
                samples = [sample for sample, _ in self.held.values()]
                await self.end(samples, requeue=True)

    def _lose(self, lost: list[SampleInfo]) -> None:
        """Forgets the items whose leases have ended, and calls `on_lost` for each. The renewer calls this method."""
        lost_items = [self.held[info.lease_id] for info in lost if info.lease_id in self.held]
        for sample, value in lost_items:
            self.forget([sample])
            self._on_lost(sample, value)
