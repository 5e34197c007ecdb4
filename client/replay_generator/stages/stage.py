"""Stage: takes items out of a table, works at each, and inserts the results into other tables.

    [ source ] ──draw, under a lease──▶ work ──▶ one insert: the result takes the item's place
         ▲                               │ └──▶ None: the item leaves
         └── its stage has died ─────────┘

Any number of processes can share a table. Each process draws an item only when it has room for the item, so a slow
process draws fewer items. If a process dies, the others get its items when its leases end. They do the work again, but
only one result replaces each item.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from replay_client import AsyncReplayClient, RolloutGroup, Sample, tracing
from replay_client.errors import DeadlineExceededError, LeaseEndedError
from replay_client.waits import LAST_WORD, beat
from replay_generator.config import StageConfig
from replay_generator.errors import PromptError
from replay_generator.groups.inserting import Handoff, InsertingServer, LeftOut, run_worker
from replay_generator.metrics import GeneratorMetrics, GeneratorStats, GroupTimes
from replay_generator.prompts.queue import LeasedItems
from replay_generator.user_code import calls as user_code

CONCURRENCY = 8
"""The default of `StageConfig.concurrency`."""
_DRAW_SECONDS = 30.0
"""Seconds that one draw waits for an item. Then the draw is repeated."""
_MOST_SKIPPED = 20
"""The run ends after this many items in a row that are left out."""

Work = Callable[[Sample], Any]
"""A function that works at an item. It returns a group for the tables of the settings, a Handoff for other tables, or
None. After None, the item is removed, and nothing replaces it.

A function without async runs in a thread."""


class Stage:
    """Works at items and hands on the results, until `stop`, `max_items` or an error ends the run.

    Items that are not handed on by then return to their table. If the work raises ValueError, its item is left out,
    with a warning. Any other error ends the run, and so do 20 items in a row that are left out. The stage waits while a
    table is full, and while the server is away or busy. `run` raises ServerUnavailableError for a server that stays
    away longer than the client's timeout.
    """

    part = "stage"
    """The name of the stage in traces and logs."""

    def __init__(
        self,
        client: AsyncReplayClient,
        work: Work,
        config: StageConfig,
        on_item: Callable[[GeneratorStats], None] | None = None,
    ) -> None:
        """The caller owns `client`, and closes it. `on_item` is called on the event loop after each item, with the
        current statistics."""
        self.config = config
        self._client = client
        self._work = work
        self._on_item = on_item
        self._metrics = GeneratorMetrics(solved_reward=1.0)
        self.stats = self._metrics.stats
        self._server = InsertingServer(client, config, self.stats, f"the {self.part}")
        self._items = LeasedItems(
            client,
            self._server.answer,
            config.source_table,
            lease=config.lease,
            what=self.part,
            decode=lambda _: None,  # the user's function decodes the items
            on_lost=self._lose,
            stats=self.stats,
        )
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """The tasks that work at items, by the id of the item's lease."""
        self._has_ended_one = asyncio.Event()
        """Set when the work at an item has ended."""
        self._ended = asyncio.Event()
        """Set by `stop`."""

    async def run(self) -> None:
        """Works until `stop` is called, `max_items` items are done, or something fails. Unfinished items return to
        their table."""
        with user_code.LoopWatch():
            await self._run()

    async def _run(self) -> None:
        """Works until the first of three tasks ends: the work at all items, the watch over the server, or `stop`."""
        info = await self._server.look(self.config.source_table)
        await self._server.observe(info)
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._pass_all_on()),
            asyncio.create_task(self._server.watch()),
            asyncio.create_task(self._ended.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises the error of a task that failed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._items.close()
        # Tells the server that this process ends on purpose. After an error, this line is not reached.
        await self._client.leave(timeout=LAST_WORD)

    def stop(self) -> None:
        """Draws no more items, and ends the work."""
        self._ended.set()

    @property
    def _has_room(self) -> bool:
        return len(self._tasks) < (self.config.concurrency or CONCURRENCY)

    async def _pass_all_on(self) -> None:
        """Draws items while there is room, and starts a task for each. Returns when `max_items` are done."""
        drawn = 0
        try:
            async with asyncio.TaskGroup() as tasks:
                while drawn != self.config.max_items:  # None: draws items for ever
                    while not self._has_room:
                        self._has_ended_one.clear()
                        await self._has_ended_one.wait()
                    with contextlib.suppress(DeadlineExceededError):  # no item came: the draw is repeated
                        sample, _ = await self._items.draw(_DRAW_SECONDS)
                        work = tracing.in_span(f"replay.{self.part}", partial(self._pass_on, sample))
                        task = tasks.create_task(work)
                        self._tasks[sample.info.lease_id] = task
                        task.add_done_callback(partial(self._end, sample))
                        drawn += 1
                        # The task begins here. A GroupScorer counts the rollouts of the item at that moment, for its
                        # `_has_room`.
                        await asyncio.sleep(0)
        except ExceptionGroup as failed:  # a TaskGroup wraps every error
            raise failed.exceptions[0]  # noqa: B904  the cause of the error tells more than this group of errors

    async def _pass_on(self, sample: Sample) -> None:
        """Works at one item, and hands on the result. If the item is left out, it is counted."""
        try:
            result = await user_code.call(self._work, sample)
            if result is None:
                await self._items.end([sample])
            else:
                await self._hand_on(sample, result)
        except LeaseEndedError:  # another process may work at the item now
            self._items.forget([sample])
            self.stats["leases_lost"] += 1
        except (LeftOut, PromptError, ValueError) as error:
            await self._items.end([sample])
            if not isinstance(error, LeftOut):
                self._metrics.count_skipped(
                    error, _MOST_SKIPPED
                )  # raises if _MOST_SKIPPED groups in a row were skipped
            elif error.counts_as is not None:  # a LeftOut that nobody has counted yet
                self.stats[error.counts_as] += 1
        self.stats["threads_left"] = user_code.threads_left()
        beat()  # for health checks, the end of an item is progress
        if self._on_item is not None:
            user_code.call_plain(self._on_item, self.stats)

    async def _hand_on(self, sample: Sample, result: Any) -> None:
        """Inserts the result of an item, which replaces the item. Raises UserCodeError for a result of a wrong type."""
        info = sample.info
        handoff = result
        if isinstance(result, RolloutGroup):
            handoff = self._server.hand_on(result, info.tags)
        if not isinstance(handoff, Handoff):
            how = f"returned {user_code.shown(handoff)}: return a RolloutGroup, a Handoff, or None"
            raise user_code.UserCodeError(user_code.name_of(self._work), how, user_code.where(self._work))
        # The tags of the item are used only if the Handoff has none. The new item keeps the item's policy version.
        await self._server.insert_into(
            f"item {info.key}",
            handoff,
            tags=info.tags,
            policy_version=info.policy_version,
            closes=(sample,),
        )
        self._items.forget([sample])
        if isinstance(handoff.group, RolloutGroup):  # and not bytes, which cannot be counted
            # Only an empty dict would mean that the group was not scored. Nobody reads the name: a stage writes no file
            # of metrics.
            by_function = {"": handoff.group.rewards}
            self._metrics.count_inserted(handoff.group, by_function, info.staleness, GroupTimes())

    def _lose(self, sample: Sample, _: None) -> None:
        """Ends the work at an item whose lease has ended: another process may have the item now."""
        self.stats["leases_lost"] += 1
        self._tasks[sample.info.lease_id].cancel()

    def _end(self, sample: Sample, _: object) -> None:
        """Is called when the task of an item has ended."""
        del self._tasks[sample.info.lease_id]
        self._has_ended_one.set()


def run_stage(connect: Callable[[], AsyncReplayClient], work: Work, config: StageConfig) -> GeneratorStats:
    """Runs a stage to its end, for callers without an event loop. Returns the last statistics.

    `connect` makes the client. It is called on the event loop that uses the client. Ctrl-C and SIGTERM stop the run
    gracefully.
    """
    return run_worker(connect, lambda client: Stage(client, work, config))
