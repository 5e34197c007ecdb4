"""PartialGroups: the groups that one generator works at. StoredPartialGroups: those that are stored in a table while it
does.

Without such a table, who opens a group has it for itself. With it:

    open ──▶ [ table ] ──draw, under a lease──▶ append each finished rollout ──▶ close: the group takes the item's place
                 ▲                                          │
                 └── the lease ends: its generator is dead ─┘

A generator that opens a group does not keep it: it draws from the table like all others, and gets the oldest group that
nobody works at. So a kill between the two leaves the group to the others, and taking over the group of a dead
generator is no case of its own. A permit that came with its item is the group's, whoever works at it.

* A group is worked at under a lease that is renewed all the time. Who lost the lease stops, and may not close it.
* A rollout is safe once the server has acknowledged it. A name that is there already says that another generator is at
  work: this one stops, and requeues the group, so that the next one sees all that is there. The last rollouts of a
  group need not be stored if the group follows at once.
* What leaves without being closed is acknowledged: the item is consumed, and its permit is released.
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
"""Between two questions for groups that a dead generator has left, if the first one found none."""
TOGETHER = 0.1
"""Seconds that a finished rollout waits for others of its group, or for the whole group: they share a request."""
_MOST_TOGETHER = 1 << 20
"""Bytes of the rollouts that share a request; a larger one has its own."""


class LeaseLostError(Exception):
    """Another generator may work at this group now."""


@dataclass(eq=False)
class PartialGroup:
    """A group that this generator is to open, or works at."""

    spec: PartialGroupSpec
    drawn: DrawnPrompt
    """Its prompt, as the queue of prompts knows it."""
    rollouts: dict[int, PlayedRollout] = field(default_factory=dict)
    """The finished rollouts, by their numbers. The server has them, but the newest, and what it cannot store."""
    permit: PermitGrant | None = None
    """None: it needs none, or its item has it."""
    sample: Sample | None = None
    """The item, under its lease; None: nothing of the group is stored."""
    handed: bool = False
    """Whether another one has finished some of its rollouts."""
    opened: float = field(default_factory=time.monotonic)
    played: bool = False
    """Whether no rollout will follow. Then the insert of the group tells whether another one has closed it."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when another one may work at it."""
    unstored: dict[int, PlayedRollout] = field(default_factory=dict)
    """Finished rollouts that the server does not have, by their numbers."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the storing has something to see to."""

    @property
    def missing(self) -> list[int]:
        """The numbers of the rollouts that are not finished."""
        return [index for index in range(self.spec.group_size) if index not in self.rollouts]

    def append(self, index: int, played: PlayedRollout) -> None:
        """Takes a finished rollout."""
        assert index in self.missing, f"rollout {index} of {self.spec.group_size} is finished already"
        self.rollouts[index] = played
        self.unstored[index] = played
        self.changed.set()
        if self.sample is None:  # nothing of the group is stored before it is whole
            played.rollout.settle()

    def check(self) -> None:
        """Asserts that what is to be stored is finished."""
        assert self.unstored.keys() <= self.rollouts.keys(), self.unstored.keys() - self.rollouts.keys()
        assert self.permit is None or self.sample is None, "a group that is stored has its permit in its item"

    def settle(self, why_lost: str = "") -> None:
        """Tells those who wait for its rollouts that these are safe, or why no group will have them."""
        for played in self.rollouts.values():
            played.rollout.settle(why_lost)


class PartialGroups:
    """The groups of a generator that stores nothing of them: it works at what it has opened."""

    starts = 1
    """Groups that are opened or handed out at a time."""
    stores = False
    """Whether a group takes the place of its permit and its prompt as soon as it is opened."""

    def __init__(self) -> None:
        self._ready = deque[PartialGroup]()

    async def open(self, group: PartialGroup, permit: PermitGrant | None, version: int) -> None:
        """Begins a group, with its permit if it needs one. `version`: of the policy that is to draw its rollouts."""
        group.permit = permit
        assert group not in self._ready, "a group is opened twice"
        self._ready.append(group)

    async def next(self, *, surely: bool = False) -> PartialGroup | None:
        """The oldest group that nobody works at; None: there is none. After `open` ask `surely`."""
        return self._ready.popleft() if self._ready else None

    def work(self, group: PartialGroup) -> AbstractAsyncContextManager[None]:
        """Surrounds the work at a group. Raises LeaseLostError inside as soon as another one may work at it."""
        return nullcontext()

    def closed(self, group: PartialGroup) -> None:
        """An insert has closed the group."""

    async def drop(self, group: PartialGroup) -> None:
        """The group will not be finished by anybody."""

    async def requeue_all(self) -> None:
        """Others may go on with all groups of this generator."""

    def check(self) -> None:
        """Asserts what holds of the groups that this generator has opened, or works at."""
        for group in self._ready:
            assert group.sample is None, "a group that is stored nowhere has an item"
            group.check()


class StoredPartialGroups(PartialGroups):
    """Opens groups, hands out those that nobody works at, and keeps the leases of those that this generator has."""

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
        lease, what = config.partial_groups_lease, "partial groups"
        self._items = LeasedItems(client, answer, self.table, lease, what, decoded, _lose, stats)
        self._opened = set[int]()  # keys of groups that this generator has opened and not drawn
        self._looks_at = 0.0  # the moment from which on it looks for groups that others have left
        self._warned = False

    async def open(self, group: PartialGroup, permit: PermitGrant | None, version: int) -> None:
        """Puts a group into the table; its permit is used up by that, and its prompt is closed.

        Raises StaleItemError if that version is too old, PromptError if the prompt cannot be stored, and
        LeaseEndedError if another generator may have the prompt.
        """
        key, payload = next(self._keys), group.spec.encode()
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
            raise PromptError(f"prompt {group.spec.prompt.prompt_id!r}: its group cannot be opened: {error}") from error
        self._opened.add(key)

    async def next(self, *, surely: bool = False) -> PartialGroup | None:
        """The oldest group that nobody works at, under a lease; None: there is none.

        Unless `surely`, it does not ask the server for SECONDS_PER_LOOK after there was none. After `open` ask surely.
        """
        if not surely and time.monotonic() < self._looks_at:
            return None
        try:
            sample, group = await self._items.draw(timeout=0.0)
        except DeadlineExceededError:
            self._looks_at = time.monotonic() + SECONDS_PER_LOOK
            self._opened.clear()  # other generators have drawn them
            return None
        if sample.info.key in self._opened:
            self._opened.discard(sample.info.key)
        else:
            self._looks_at = 0.0  # somebody has left it, and maybe others
        if group.handed:
            self._stats["groups_resumed"] += 1
            self._stats["tokens_resumed"] += sampled_tokens(group.rollouts)
        self.check()
        return group

    @asynccontextmanager
    async def work(self, group: PartialGroup) -> AsyncIterator[None]:
        """Stores meanwhile what is finished. Its failure ends the work."""
        try:
            async with asyncio.TaskGroup() as tasks:
                storing = tasks.create_task(self._keep_storing(group))
                yield
                storing.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0]  # noqa: B904  its cause tells more than the group

    def closed(self, group: PartialGroup) -> None:
        self._items.forget(_item_of(group))

    async def drop(self, group: PartialGroup) -> None:
        """The group will not be finished by anybody: it leaves, and its permit is released."""
        await self._items.end(_item_of(group))

    async def requeue_all(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD):
                groups = [group for _, group in self._items.held.values()]
                await asyncio.gather(*map(self.store, groups), return_exceptions=True)
        await self._items.close()

    def check(self) -> None:
        super().check()
        self._items.check()
        held = {sample.info.key for sample, _ in self._items.held.values()}
        assert self._opened.isdisjoint(held), "a group that this generator has drawn waits to be drawn"
        for sample, group in self._items.held.values():
            assert group.sample is sample, "a group is held under the item of another one"
            group.check()

    async def _keep_storing(self, group: PartialGroup) -> None:
        """Stores each finished rollout, together with those that end within TOGETHER seconds.

        The last ones are not stored if the group is closed by then. Raises LeaseLostError if another generator may work
        at the group.
        """
        while True:
            await group.changed.wait()
            group.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(group.lost.wait(), TOGETHER)
                raise LeaseLostError
            await self.store(group)

    async def store(self, group: PartialGroup) -> None:
        """Stores the rollouts that are finished and not stored, at once."""
        rollouts, group.unstored = group.unstored, {}
        columns: dict[str, npt.NDArray[np.uint8]] = {}
        for index, played in rollouts.items():
            try:
                columns[f"{ROLLOUT}{index}"] = encode_rollout(played)
            except ValueError as error:
                if not self._warned:
                    logger.warning("a rollout is not stored, and would be played again after a kill: %s", error)
                self._warned = True
        while columns:
            names: list[str] = []
            room = _MOST_TOGETHER
            for name, column in columns.items():
                if column.nbytes <= room or not names:  # what fits alone need not fit with others
                    names.append(name)
                    room -= column.nbytes
            await self._extend(group, {name: columns.pop(name) for name in names})

    async def _extend(self, group: PartialGroup, columns: Mapping[str, npt.NDArray[np.uint8]]) -> None:
        axes, item = dict.fromkeys(columns, "group"), _item_of(group)
        try:
            result = await self._answer(self._client.extend, item[0].info.key, columns, axes=axes, held=item)
        except LeaseEndedError:
            self._items.forget(item)
            raise LeaseLostError from None
        except PayloadTooLargeError as error:
            prompt_id = group.spec.prompt.prompt_id
            raise PromptError(f"prompt {prompt_id!r}: a rollout of its group cannot be stored: {error}") from error
        if result.present or (result.missing and not group.played):
            self._looks_at = 0.0
            await self._items.end(item, requeue=True)
            raise LeaseLostError
        self._stats["rollouts_stored"] += len(result.added)
        for name in result.added:
            group.rollouts[int(name.removeprefix(ROLLOUT))].rollout.settle()


def _item_of(group: PartialGroup) -> list[Sample]:
    assert group.sample is not None
    return [group.sample]


def decoded(sample: Sample) -> PartialGroup:
    """The group that a generator stored in this item. Raises ValueError if it holds anything else."""
    spec, rollouts = PartialGroupSpec.decode(sample.payload)
    drawn = DrawnPrompt(spec.prompt, item=spec.item)
    group = PartialGroup(spec, drawn, rollouts, None, sample, handed=bool(rollouts))
    group.opened -= sample.info.age
    return group


def _lose(_: Sample, group: PartialGroup) -> None:
    """Another one may work at it."""
    group.lost.set()
    group.changed.set()
