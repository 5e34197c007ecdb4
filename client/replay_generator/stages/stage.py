"""Stage: takes items out of a table, works at each, and inserts the results into other tables.

    [ source ] ──draw, under a lease──▶ work ──▶ one insert: the result takes the item's place
         ▲                               │ └──▶ None: the item leaves
         └── its stage has died ─────────┘

Any number of processes can share a table. Each process draws an item only when it has room for the item, so a slow
process draws fewer items. If a process dies, other processes get its items when the leases of the items end. These
processes do the work once more, but only one result replaces each item.
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
"""The most seconds that one draw waits for an item. If none comes, the draw is repeated."""
_MOST_SKIPPED = 20
"""The number of items in a row that are left out after which the run ends."""

Work = Callable[[Sample], Any]
"""A function that works at an item. A function without async runs in a thread.

The function returns a group for the tables of the settings, a Handoff for other tables, or None. After None, the item
is removed, and nothing replaces it."""


class Stage:
    """Works at items and hands on the results, until `stop`, `max_items` or an error ends the run.

    Items that are not handed on at the end of the run return to their table. If the work raises ValueError, the stage
    leaves out the item and logs a warning. Any other error of the work ends the run, and so do 20 items in a row that
    are left out. The stage waits while a table is full, and while the server is away or busy. If the server stays away
    longer than the client's timeout, `run` raises ServerUnavailableError.
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
        """`client`: the caller owns and closes it. `on_item`: a function that is called on the event loop after each
        item, with the current statistics."""
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
        self._an_item_has_ended = asyncio.Event()
        """Set when the work at an item has ended."""
        self._ended = asyncio.Event()
        """Set by `stop`."""

    async def run(self) -> None:
        """Works until `stop` is called, `max_items` items are done, or something fails. Unfinished items return to
        their table."""
        with user_code.LoopWatch():
            await self._run()

    async def _run(self) -> None:
        """Works until one of three tasks ends: the work at all items, the watch over the server, or the wait for
        `stop`."""
        info = await self._server.look(self.config.source_table)
        await self._server.observe(info)
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._work_at_all()),
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
        # Tells the server that this process ends on purpose. After an error, the process does not say so.
        await self._client.leave(timeout=LAST_WORD)

    def stop(self) -> None:
        """Ends the run: no more items are drawn, and unfinished items return to their table."""
        self._ended.set()

    @property
    def _has_room(self) -> bool:
        """True if another item may be drawn."""
        return len(self._tasks) < (self.config.concurrency or CONCURRENCY)

    async def _work_at_all(self) -> None:
        """Draws items while there is room, and starts a task for each item. Returns when `max_items` items are done."""
        drawn = 0
        try:
            async with asyncio.TaskGroup() as tasks:
                while drawn != self.config.max_items:  # if `max_items` is None, this loop never ends
                    while not self._has_room:
                        self._an_item_has_ended.clear()
                        await self._an_item_has_ended.wait()
                    with contextlib.suppress(DeadlineExceededError):  # if no item came, the draw is repeated
                        sample, _ = await self._items.draw(_DRAW_SECONDS)
                        work = tracing.in_span(f"replay.{self.part}", partial(self._work_at, sample))
                        task = tasks.create_task(work)
                        self._tasks[sample.info.lease_id] = task
                        task.add_done_callback(partial(self._end, sample))
                        drawn += 1
                        # Lets the task begin before `_has_room` is read. At its beginning, the task of a GroupScorer
                        # adds the rollouts of the item to the number that its `_has_room` reads.
                        await asyncio.sleep(0)
        except ExceptionGroup as failed:  # a TaskGroup wraps every error
            # Not `from failed`, because the error's own cause tells more than this group of errors.
            raise failed.exceptions[0]  # noqa: B904

    async def _work_at(self, sample: Sample) -> None:
        """Works at one item, and hands on the result. Counts the item if it is left out."""
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
                # Raises PromptError after _MOST_SKIPPED such items in a row, which ends the run.
                self._metrics.count_skipped(error, _MOST_SKIPPED)
            elif error.counts_as is not None:  # None: the item is counted already
                self.stats[error.counts_as] += 1
        self.stats["threads_left"] = user_code.threads_left()
        beat()  # tells health checks that the stage makes progress
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
        if isinstance(handoff.group, RolloutGroup):  # it may also be bytes, whose rollouts cannot be counted
            # An empty dict would mean that the group was not scored. The name of the function may be "", because a
            # stage writes no file of metrics, and so nobody reads the name.
            by_function = {"": handoff.group.rewards}
            self._metrics.count_inserted(handoff.group, by_function, info.staleness, GroupTimes())

    def _lose(self, sample: Sample, _: None) -> None:
        """Ends the work at an item whose lease has ended, because another process may have the item now."""
        self.stats["leases_lost"] += 1
        self._tasks[sample.info.lease_id].cancel()

    def _end(self, sample: Sample, _: object) -> None:
        """Makes room for another item. The event loop calls this method when the task of an item has ended."""
        del self._tasks[sample.info.lease_id]
        self._an_item_has_ended.set()


def run_stage(connect: Callable[[], AsyncReplayClient], work: Work, config: StageConfig) -> GeneratorStats:
    """Runs a stage to its end, for callers without an event loop. Returns the last statistics.

    `connect`: a function that makes the client; it is called on the event loop that uses the client. Ctrl-C and SIGTERM
    stop the run gracefully.
    """
    return run_worker(connect, lambda client: Stage(client, work, config))
