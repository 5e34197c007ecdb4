"""PartialGroups: the unfinished groups of one generator. StoredPartialGroups: unfinished groups that a table stores.

Without such a table, a group belongs to the generator that opens it. With such a table:

    open ──▶ [ table ] ──draw, under a lease──▶ append each finished rollout ──▶ close: the group takes the item's place
                 ▲                                          │
                 └── the lease ends: its generator is dead ─┘

A generator that opens a group does not keep the group. That generator, too, draws from the table, and gets the oldest
group that nobody works at. So if a generator is killed between opening and drawing, others draw the group, and the
group of a dead generator is no special case. The permit of a group stays with its item, whichever generator works at
the group.

* A generator works at a group under a lease that it renews all the time. If it loses the lease, it stops this work, and
  may not close the group.
* A rollout is safe once the server has confirmed it. If the server already has a rollout of the same name, another
  generator works at the group. Then this generator stops its work and requeues the group, so that the next generator
  gets all rollouts. The last rollouts of a group need not be stored if the whole group is inserted at once.
* If a group is dropped, its item is consumed, and its permit is released.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from replay_client import AsyncReplayClient, KeySequence, PermitGrant, Sample
from replay_client.errors import DeadlineExceededError, LeaseEndedError, PayloadTooLargeError
from replay_client.waits import LAST_WORD
from replay_generator.config import GeneratorConfig
from replay_generator.errors import PromptError
from replay_generator.groups.codec import ROLLOUT, PartialGroupSpec, encode_rollout, sampled_tokens
from replay_generator.metrics import GeneratorStats
from replay_generator.prompts.queue import Answer, DrawnPrompt, LeasedItems
from replay_generator.rollouts.rollout import PlayedRollout

logger = logging.getLogger(__name__)

SECONDS_PER_LOOK = 1.0
"""After a draw that found no group, the seconds until the next draw of groups that dead generators have left."""
TOGETHER = 0.1
"""Seconds that a finished rollout waits for other rollouts of its group, or for the whole group, to share a request."""
_MOST_TOGETHER = 1 << 20
"""The most bytes of the rollouts that share a request. A larger rollout has its own request."""


class LeaseLostError(Exception):
    """Another generator may work at this group now."""


@dataclass(eq=False)
class PartialGroup:
    """A group that this generator will open, or that it works at."""

    spec: PartialGroupSpec
    drawn: DrawnPrompt
    """The prompt of the group, as the queue of prompts returned it."""
    rollouts: dict[int, PlayedRollout] = field(default_factory=dict)
    """The finished rollouts, by their numbers. If the group is stored, the server has them too, except the newest ones
    and those that cannot be stored."""
    permit: PermitGrant | None = None
    """The permit of the group; None: the group needs no permit, or its item has the permit."""
    sample: Sample | None = None
    """The item of the group, under its lease; None: nothing of the group is stored."""
    handed: bool = False
    """True if the group had finished rollouts when this generator drew it."""
    opened: float = field(default_factory=time.monotonic)
    """The time, by time.monotonic, at which the group was opened, perhaps by another generator."""
    played: bool = False
    """True once no rollout will follow. From then on, if the server lacks the item of the group, this generator's own
    insert may have closed the item."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when another generator may work at the group."""
    unstored: dict[int, PlayedRollout] = field(default_factory=dict)
    """Finished rollouts that were not sent to the server yet, by their numbers. A rollout that cannot be stored is
    removed from this dict without being sent."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is a new rollout to store, or the lease is lost."""

    @property
    def missing(self) -> list[int]:
        """The numbers of the rollouts that are not finished."""
        return [index for index in range(self.spec.group_size) if index not in self.rollouts]

    def append(self, index: int, played: PlayedRollout) -> None:
        """Adds a finished rollout."""
        assert index in self.missing, f"rollout {index} of {self.spec.group_size} is finished already"
        self.rollouts[index] = played
        self.unstored[index] = played
        self.changed.set()  # wakes the task that stores rollouts, if there is one
        if self.sample is None:  # without a table of partial groups, a finished rollout counts as safe
            played.rollout.settle()

    def check(self) -> None:
        """Asserts that all rollouts to be stored are finished, and that the group has one permit at most."""
        assert self.unstored.keys() <= self.rollouts.keys(), self.unstored.keys() - self.rollouts.keys()
        assert self.permit is None or self.sample is None, "a group that is stored has its permit in its item"

    def settle(self, why_lost: str = "") -> None:
        """Tells the callback of each rollout that it is safe or, with `why_lost`, why no group will have it."""
        for played in self.rollouts.values():
            played.rollout.settle(why_lost)


class PartialGroups:
    """The groups of a generator that does not store them. Such a generator works only at groups that it has opened."""

    starts = 1
    """The number of tasks that open groups, or draw them, at the same time."""
    stores = False
    """True if `open` stores the group on the server, which uses up its permit and closes its prompt."""

    def __init__(self) -> None:
        self._ready = deque[PartialGroup]()
        """The groups that were opened, and that nobody works at yet, the oldest first."""

    async def open(self, group: PartialGroup, permit: PermitGrant | None, version: int) -> None:
        """Begins a group. `permit` None: it needs none. `version`: the policy version that will draw its rollouts."""
        group.permit = permit
        assert group not in self._ready, "a group is opened twice"
        self._ready.append(group)

    async def next(self, *, surely: bool = False) -> PartialGroup | None:
        """Returns the oldest group that nobody works at; None: there is none. `surely` has an effect only in
        StoredPartialGroups."""
        if not self._ready:
            return None
        return self._ready.popleft()

    def work(self, group: PartialGroup) -> AbstractAsyncContextManager[None]:
        """Surrounds the work at a group. Raises LeaseLostError inside if another generator may work at the group."""
        return nullcontext()

    def closed(self, group: PartialGroup) -> None:
        """Is called when an insert has closed the group."""

    async def drop(self, group: PartialGroup) -> None:
        """Gives a group up, so that no generator finishes it."""

    async def requeue_all(self) -> None:
        """Lets other generators continue all groups of this generator."""

    def check(self) -> None:
        """Asserts the invariants of the groups that this generator has opened, or works at."""
        for group in self._ready:
            assert group.sample is None, "a group that is stored nowhere has an item"
            group.check()


class StoredPartialGroups(PartialGroups):
    """Opens groups, draws groups that nobody works at, and renews the leases of the groups that it has drawn."""

    starts = 4
    stores = True

    def __init__(
        self, client: AsyncReplayClient, config: GeneratorConfig, stats: GeneratorStats, answer: Answer
    ) -> None:
        super().__init__()
        assert config.partial_groups_table is not None
        self.table = config.partial_groups_table
        self._client = client
        self._timeout = config.insert_timeout
        self._stats = stats
        self._answer = answer
        self._keys = KeySequence()
        self._items = LeasedItems(
            client,
            answer,
            self.table,
            lease=config.partial_groups_lease,
            what="partial groups",
            decode=decoded,
            on_lost=_lose,
            stats=stats,
        )
        self._opened: set[int] = set()
        """The keys of groups that this generator is opening or has opened, and that it has not drawn yet. A drawn group
        with another key comes from another generator."""
        self._next_look = 0.0
        """The time, by time.monotonic, of the next draw of groups that other generators have left."""
        self._has_warned = False
        """True after the first warning that a rollout cannot be stored."""

    async def open(self, group: PartialGroup, permit: PermitGrant | None, version: int) -> None:
        """Inserts a group into the table. The insert uses up the permit, and closes the prompt.

        Raises StaleItemError if the policy version is too old, PromptError if the prompt cannot be stored, and
        LeaseEndedError if another generator may have the prompt.
        """
        key = next(self._keys)
        payload = group.spec.encode()
        # The key is noted before the insert: `next` may draw the group before the answer to the insert arrives.
        self._opened.add(key)
        try:
            await self._answer(
                self._client.insert,
                payload,
                {self.table: 1.0},
                key=key,
                policy_version=version,
                permits=permit,
                closes=group.drawn.closes,
                timeout=self._timeout,
                counts_as="insert_waits",
            )
        except PayloadTooLargeError as error:
            self._opened.discard(key)
            raise PromptError(f"prompt {group.spec.prompt.prompt_id!r}: its group cannot be opened: {error}") from error
        except BaseException:
            self._opened.discard(key)
            raise

    async def next(self, *, surely: bool = False) -> PartialGroup | None:
        """Draws the oldest group that nobody works at, and leases it. Returns None if no group was found.

        If the last draw found no group, the table is not asked again for SECONDS_PER_LOOK. `surely`: asks the table
        even then. Pass it if a group was just opened.
        """
        if not surely and time.monotonic() < self._next_look:
            return None
        try:
            sample, group = await self._items.draw(timeout=0.0)
        except DeadlineExceededError:
            self._next_look = time.monotonic() + SECONDS_PER_LOOK
            self._opened.clear()  # the table has no group to draw, so other generators have drawn these groups
            return None
        if sample.info.key in self._opened:
            self._opened.discard(sample.info.key)
        else:
            self._next_look = 0.0  # another generator has left this group, and maybe more: the next call draws again
        if group.handed:
            self._stats["groups_resumed"] += 1
            self._stats["tokens_resumed"] += sampled_tokens(group.rollouts)
        self.check()
        return group

    @asynccontextmanager
    async def work(self, group: PartialGroup) -> AsyncIterator[None]:
        """Stores finished rollouts during the work. If a rollout cannot be stored, ends the work with that error.

        Raises LeaseLostError if another generator may work at the group.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                # If this task fails, the TaskGroup cancels the code inside of the context.
                storing = tasks.create_task(self._keep_storing(group))
                yield
                storing.cancel()  # `_keep_storing` never returns by itself
        except ExceptionGroup as failed:  # a TaskGroup wraps all errors, those of the work too
            raise failed.exceptions[0]  # noqa: B904  this exception has a cause that says more than the group

    def closed(self, group: PartialGroup) -> None:
        self._items.forget(_item_of(group))

    async def drop(self, group: PartialGroup) -> None:
        """Gives a group up: its item is consumed, and its permit is released."""
        await self._items.end(_item_of(group))

    async def requeue_all(self) -> None:
        """Stores the finished rollouts, and then requeues all groups.

        Each of these two steps is given up after LAST_WORD seconds. Errors of the server are not raised.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD):
                groups = [group for _, group in self._items.held.values()]
                await asyncio.gather(*[self.store(group) for group in groups], return_exceptions=True)
        await self._items.close()

    def check(self) -> None:
        """Also asserts that each group is held under its own item, and that no held group waits to be drawn."""
        super().check()
        self._items.check()
        held = {sample.info.key for sample, _ in self._items.held.values()}
        assert self._opened.isdisjoint(held), "a group that this generator has drawn waits to be drawn"
        for sample, group in self._items.held.values():
            assert group.sample is sample, "a group is held under the item of another one"
            group.check()

    async def _keep_storing(self, group: PartialGroup) -> None:
        """Stores each finished rollout, together with the rollouts that are finished within TOGETHER seconds.

        The last rollouts are not stored if the group is closed within that time. Raises LeaseLostError if another
        generator may work at the group.
        """
        while True:
            await group.changed.wait()  # until a rollout is finished, or the lease is lost
            group.changed.clear()
            try:
                await asyncio.wait_for(group.lost.wait(), TOGETHER)
            except TimeoutError:
                pass  # TOGETHER seconds have passed, and the lease is not lost
            else:
                raise LeaseLostError
            await self.store(group)

    async def store(self, group: PartialGroup) -> None:
        """Stores all rollouts that are finished and not stored yet, several in a request (_MOST_TOGETHER).

        A rollout that cannot be encoded is not stored. It stays in the group of this generator. Raises the errors of
        `_extend`.
        """
        rollouts = group.unstored
        group.unstored = {}
        columns: dict[str, npt.NDArray[np.uint8]] = {}
        for index, played in rollouts.items():
            try:
                columns[f"{ROLLOUT}{index}"] = encode_rollout(played)
            except ValueError as error:
                if not self._has_warned:
                    logger.warning("a rollout is not stored, and would be played again after a kill: %s", error)
                    self._has_warned = True
        while columns:  # each turn of the loop sends one request
            request: dict[str, npt.NDArray[np.uint8]] = {}
            room = _MOST_TOGETHER  # the bytes that the request has left
            for name, column in columns.items():
                # The first rollout is sent whatever its size, because alone it may be small enough for the server.
                if column.nbytes <= room or not request:
                    request[name] = column
                    room -= column.nbytes
            for name in request:
                del columns[name]
            await self._extend(group, request)

    async def _extend(self, group: PartialGroup, columns: Mapping[str, npt.NDArray[np.uint8]]) -> None:
        """Appends columns to the group's item. Raises LeaseLostError if another generator may work at the group.

        `columns`: the bytes of rollouts, by the names of their segments. Raises PromptError if they are too large for
        the server.
        """
        held = _item_of(group)
        key = held[0].info.key
        axes = dict.fromkeys(columns, "group")  # the bytes of a rollout belong to no row of the group
        try:
            # The result names the columns that were `added`, and those that were `present` before. Its `missing` is
            # True if the server has no such item.
            result = await self._answer(self._client.extend, key, columns, axes=axes, held=held)
        except LeaseEndedError:
            self._items.forget(held)
            raise LeaseLostError from None
        except PayloadTooLargeError as error:
            prompt_id = group.spec.prompt.prompt_id
            raise PromptError(f"prompt {prompt_id!r}: a rollout of its group cannot be stored: {error}") from error
        # In two cases another generator works at the group: it has stored a rollout of the same name, or it has closed
        # the item. But once all rollouts are played, this generator's own insert may have closed the item.
        is_closed_elsewhere = result.missing and not group.played
        if result.present or is_closed_elsewhere:
            self._next_look = 0.0  # lets the next call of `next` draw the group that is requeued here
            await self._items.end(held, requeue=True)
            raise LeaseLostError
        self._stats["rollouts_stored"] += len(result.added)
        for name in result.added:
            index = int(name.removeprefix(ROLLOUT))
            group.rollouts[index].rollout.settle()


def _item_of(group: PartialGroup) -> list[Sample]:
    """The item of a stored group, as the list that calls about leases expect."""
    assert group.sample is not None
    return [group.sample]


def decoded(sample: Sample) -> PartialGroup:
    """The partial group that is stored in this item. Raises ValueError if the item holds anything else."""
    spec, rollouts = PartialGroupSpec.decode(sample.payload)
    drawn = DrawnPrompt(spec.prompt, item=spec.item)
    group = PartialGroup(spec, drawn, rollouts, sample=sample, handed=bool(rollouts))
    group.opened -= sample.info.age  # the group was opened when its item was inserted, not now
    return group


def _lose(_: Sample, group: PartialGroup) -> None:
    """Stops the work at a group whose lease is lost."""
    group.lost.set()
    group.changed.set()
