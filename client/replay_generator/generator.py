"""RolloutGenerator: keeps tables supplied with groups. Permits limit the number of groups under way.

prompts ──▶ permit ──▶ group: rollouts, rewards, advantages (groups/maker.py) ──▶ insert (groups/server.py)
                                ▲
                      new weights (policy/follower.py)

Every group passes these steps in a task of its own, so a slow group does not hold up the others.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from replay_client import AsyncReplayClient, KeySequence, PermitGrant, RolloutGroup, Sample, tracing
from replay_client.errors import LeaseEndedError, ReplayError, StaleItemError
from replay_client.waits import beat
from replay_generator.config import GeneratorConfig
from replay_generator.engines import CompletionError, Engine
from replay_generator.errors import GroupRefusedError, PromptError
from replay_generator.groups.codec import PartialGroupSpec
from replay_generator.groups.given_up_watch import GivenUpWatch
from replay_generator.groups.inserting import LeftOut, run_worker
from replay_generator.groups.maker import GroupMaker
from replay_generator.groups.partial_groups import SECONDS_PER_LOOK, LeaseLostError, PartialGroup
from replay_generator.groups.server import GeneratorServer
from replay_generator.metrics import GeneratorMetrics, GeneratorStats, GroupTimes
from replay_generator.notices import Watch
from replay_generator.policy.follower import PolicyFollower, TooOldToFinish
from replay_generator.prompts.prompt import PromptRows, PromptSource
from replay_generator.prompts.queue import DrawnPrompt
from replay_generator.prompts.table import prompt_queue_of
from replay_generator.rewards.functions import AbstainedError, Rewards
from replay_generator.rollouts.rollout import RolloutHook, held, single_turn
from replay_generator.user_code import calls as user_code

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MOST_SKIPPED = 100
"""The run ends after this many skipped groups in a row, because the cause is then not a single prompt."""


class RolloutGenerator:
    """Keeps tables supplied with groups of the newest policy, until its prompts run out, `stop` is called, or an error
    ends the run.

    `run` raises the error that ends it. Such an error is a server that stays away longer than the client's timeout, an
    engine that died, a prompt or reward that does not work (unless the config says to skip prompts), or weights that do
    not match. Other trouble passes by itself: a full table, a missing permit, a late group, a busy server, failing
    storage, and a restart of the server. The generator waits until such trouble is over, and counts it.

    If the server has [admission], the generator acquires a permit before it makes a group. The insert uses the permit
    up. If the group is not inserted, the generator releases the permit. The server takes a permit back when the
    permit's time to live has passed. A group that took longer than that is still inserted, and the server counts it as
    accepted. But the server may have given the permit to another generator by then, so that more groups are under way
    than [admission] allows.
    """

    def __init__(
        self,
        client: AsyncReplayClient,
        engine: Engine,
        prompts: Iterable[PromptSource] | PromptRows,
        reward: Rewards | None = None,
        config: GeneratorConfig | None = None,
        *,
        rollout: RolloutHook = single_turn,
        group_filter: Callable[[RolloutGroup], bool] | None = None,
        on_group: Callable[[GeneratorStats], None] | None = None,
    ) -> None:
        """The generator owns `engine`: the end of `run` closes it. The caller owns `client`, and closes it.

        `prompts`: an iterable of values that `Prompt.of` accepts. With a `prompts_table`, a list of such values, or
        other rows that can be indexed.
        `rollout` plays each rollout; by default a rollout is one completion of its prompt. `reward` None: the rollouts
        have rewards of their own. `group_filter` decides whether a finished group is inserted. `on_group` is called on
        the event loop after each group, with the current statistics.
        """
        # Only the hook behind `--agent` and `--sessions`, for which agents play the rollouts, has `plays_agents`.
        self.config = (config or GeneratorConfig()).decided(agents=getattr(rollout, "plays_agents", False))
        if self.config.unscored_table is not None and (reward is not None or group_filter is not None):
            raise ValueError(
                "reward and group_filter belong to the scorer of "
                f"unscored_table {self.config.unscored_table!r}: leave them out"
            )
        self._engine = engine
        self._rollout = rollout
        self._on_group = on_group
        path = self.config.metrics_path
        self._metrics = GeneratorMetrics(self.config.solved_reward, Path(path) if path else None)
        stats = self._metrics.stats
        self._policy = PolicyFollower(client, engine, self.config, self._metrics)
        self._maker = GroupMaker(engine, self._policy, reward, self.config, group_filter, rollout, stats)
        self._server = GeneratorServer(client, self.config, stats, self._policy)
        self._given_up = GivenUpWatch()
        """Counts the groups that were given up as too old, for a report to the server."""
        self._server.watches = [*self._maker.watches, self._given_up]
        if isinstance(rollout, Watch):
            self._server.watches = [*self._server.watches, rollout]
        self._partial_groups = self._server.partial_groups
        self._prompts = prompt_queue_of(client, self._server.answer, prompts, self.config, stats)
        most_groups = self.config.max_concurrent_groups or sys.maxsize  # None: only permits limit the number of groups
        self._slots = asyncio.Semaphore(most_groups)
        self._tasks: set[asyncio.Task[Any]] = set()
        """All tasks of `_spawn` that have not ended."""
        self._groups: set[asyncio.Task[None]] = set()
        """The tasks that make a group, which are in `_tasks` as well."""
        self._keys = KeySequence()
        """Makes the keys of the items of finished groups."""
        self._again: deque[PartialGroup] = deque()
        """Groups that are opened before new prompts are drawn. They were given up once, or could not be opened yet."""
        self._permit_requests: list[asyncio.Task[PermitGrant]] = []
        """Requests for permits whose results no group waits for any more. The next group that needs a permit uses one
        of these requests."""
        self._unfit: list[tuple[Sample, PromptError]] = []
        """Prompts of a table that do not fit the engine, each with the reason. They are removed from the table once
        another prompt fits."""
        self._drawing = asyncio.Lock()
        """Held while a prompt is drawn: several tasks start groups (`_start_groups`), and take turns at the queue."""
        self._started = 0
        """The number of prompts for which a group was begun."""
        self._ended = asyncio.Event()
        """Set by `stop`, and by a failure."""
        self._failure: BaseException | None = None
        """The error that has ended the run; None: there is none."""

    @property
    def stats(self) -> GeneratorStats:
        """A copy of the current statistics."""
        self._update_current()
        return self._metrics.stats.copy()

    async def run(self) -> None:
        """Generates until the prompts run out, `stop` is called or something fails. Then closes the engine.

        A rollout hook that is a context manager is entered before the run, and left after it (`held`). During the run,
        `LoopWatch` logs user code that blocks the event loop.

        Raises PromptError, WeightsNotFoundError, WeightsNotAllowedError, WeightsMismatchError, StaleWeightsError,
        ServerUnavailableError, and any error of the engine.
        """
        try:
            self._metrics.create_file()
            with user_code.LoopWatch():
                async with held(self._rollout):
                    await self._run()
        finally:
            await self._engine.close()
        if self._failure is not None:
            raise self._failure

    async def _run(self) -> None:
        """Works until all groups have ended, something fails, or `stop` is called. Then ends all tasks.

        After that, releases the permits, requeues unfinished groups and prompts, and writes the last metrics.
        """
        work = self._spawn(self._work())
        ended = asyncio.create_task(self._ended.wait())
        self._spawn(self._write_metrics())
        try:
            await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
            is_stopped = not work.done() and self._failure is None
            if is_stopped:
                work.cancel()  # no more groups start. Those under way go on, because they are tasks of their own
                if self._groups:
                    await asyncio.wait(self._groups, timeout=self.config.stop_grace)
        finally:
            self._ended.set()  # from here on, `_on_done` ignores the errors of tasks
            tasks = [*self._tasks, ended]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(self._server.release_all(), self._prompts.close())
            self._update_current()
            self._metrics.write()
        if self._failure is None:  # after a failure, `replay doctor` should report that this generator is gone
            await self._server.leave()

    def stop(self) -> None:
        """Starts no more groups. `run` gives the groups under way `stop_grace` seconds to finish, and then returns."""
        self._ended.set()

    async def _work(self) -> None:
        """Loads the first weights, starts what runs beside the groups, and makes all groups."""
        await self._policy.load_first(self.config.wait_for_policy)
        if self.config.follow_policy:
            self._spawn(self._policy.follow())
        self._spawn(self._server.watch())
        self._spawn(self._maker.watch())
        await self._start_groups()

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task whose failure ends the run."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        """Is called when a task of `_spawn` has ended. If the task failed, ends the run."""
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        # Only the first failure is kept. Failures after the first one, or after `stop`, are its consequences.
        if not self._ended.is_set():
            self._failure = error
            self._ended.set()

    async def _write_metrics(self) -> None:
        while True:
            await asyncio.sleep(self.config.metrics_interval)
            self._update_current()
            self._metrics.write()

    def _update_current(self) -> None:
        """Updates the statistics that are current values. Totals are counted where their events happen."""
        stats = self._metrics.stats
        stats["groups_in_flight"] = len(self._groups)
        stats["threads_left"] = user_code.threads_left()
        # Only the engine `vllm-server`, which uses several servers, has these two counts.
        stats["engines_lost"] = getattr(self._engine, "engines_lost", 0)
        stats["engines_away"] = getattr(self._engine, "engines_away", 0)

    async def _start_groups(self) -> None:
        """Starts groups until no prompt is left. Returns when all groups have ended.

        A group starts when there is room for it (`max_concurrent_groups`) and, if groups need permits, a permit.
        """
        needs_permits = await self._server.begin()
        if self.config.max_concurrent_groups is None and not needs_permits:
            raise ReplayError(
                f"max_concurrent_groups = None needs [admission] for {', '.join(self.config.tables)}: set one of them"
            )
        await self._prompts.begin()
        # If groups are stored, several tasks start groups at the same time. For each group, such a task waits for two
        # answers of the server: when it opens a group, and when it draws one.
        num_tasks = self._partial_groups.starts
        await asyncio.gather(*(self._start_in_turn(needs_permits) for _ in range(num_tasks)))

    async def _start_in_turn(self, needs_permits: bool) -> None:
        """Starts groups one after another, each in a task of its own, until there are no more."""
        while True:
            await self._slots.acquire()
            times = GroupTimes()
            group = await self._next(needs_permits, times)
            if group is None:
                self._slots.release()
                return
            # `make_group` makes the coroutine only when the task starts. If a task is cancelled before it starts, a
            # coroutine that was made here would never be awaited, and Python would warn of that.
            make_group = partial(self._make_group, group, times)
            prompt_id = group.spec.prompt.prompt_id
            task = self._spawn(tracing.in_span("replay.generate", make_group, prompt_id=prompt_id))
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)
            task.add_done_callback(lambda _: self._slots.release())

    async def _next(self, needs_permits: bool, times: GroupTimes) -> PartialGroup | None:
        """The next group to work at. Opens groups until one can be worked at.

        None: no prompt is left, all groups of this generator have ended, and other generators have left none. `times`
        gets the seconds of the wait for permits.

        A group that this method opens is not returned at once. In the next turn of the loop, `_partial_groups.next`
        returns the oldest group that nobody works at: this one or, if groups are stored, perhaps one that another
        generator has opened.
        """
        has_opened = False  # True: the last turn of the loop has opened a group
        while True:
            # Open no group that would be too old on arrival. If `_is_through`, no group is opened, so do not wait.
            if not self._is_through:
                await self._policy.hold()
            group = await self._partial_groups.next(surely=has_opened)
            if group is not None:
                return group
            async with self._drawing:
                unopened = await self._draw()
            if unopened is None:
                if self._is_through:  # before the end, continue the groups that generators left when they died
                    return await self._partial_groups.next(surely=True)
                continue  # `_draw` has waited, or has left a prompt out. Now there may be another prompt
            permit_or_group: PermitGrant | PartialGroup | None = None  # None: groups need no permit
            asked_at = time.monotonic()
            if needs_permits:
                permit_or_group = await self._permit_or_group()
            times.permit += time.monotonic() - asked_at
            if isinstance(permit_or_group, PartialGroup):
                # The group of another generator goes first, and the unopened one is opened later.
                self._again.appendleft(unopened)
                return permit_or_group
            has_opened = await self._open(unopened, permit_or_group)

    async def _permit_or_group(self) -> PermitGrant | PartialGroup:
        """Waits for a permit, or for a partial group that another generator has left, whichever comes first.

        The wait is not for a permit alone, because the group of a generator that died may hold the last permit. If such
        a group comes first, the request for a permit goes on, and a later call uses it.
        """
        if self._permit_requests:
            request = self._permit_requests.pop()
        else:
            request = self._spawn(self._server.acquire())
        while not request.done():
            await asyncio.wait({request}, timeout=SECONDS_PER_LOOK)
            if request.done():
                break
            group = await self._partial_groups.next()
            if group is not None:
                self._permit_requests.append(request)
                return group
        return request.result()

    async def _open(self, group: PartialGroup, permit: PermitGrant | None) -> bool:
        """Opens a group, with its permit if it needs one. Returns True if the group was opened."""
        version = self._policy.version
        try:
            await self._partial_groups.open(group, permit, version)
        except (StaleItemError, PromptError, LeftOut, LeaseEndedError) as error:
            if permit is not None:
                await self._server.release(permit)
            if isinstance(error, PromptError):
                self._skip(error)  # raises the error if it has to end the run
                await self._prompts.finished(group.drawn, rewards=None, inserted=False)
            elif isinstance(error, StaleItemError):
                self._metrics.stats["groups_refused_stale"] += 1
                await self._server.refused_as_old(error)
                self._again.appendleft(group)  # the next attempt to open it waits for newer weights (`hold`)
            else:  # the lease of the prompt has ended, or the table is full (LeftOut)
                if isinstance(error, LeaseEndedError):
                    self._metrics.stats["prompts_lost"] += 1
                await self._prompts.requeued(group.drawn)
            return False
        if self._partial_groups.stores:  # the stored item of the group has replaced the prompt, and holds the permit
            self._prompts.opened(group.drawn)
            if permit is not None:
                self._server.used(permit)
        return True

    @property
    def _is_through(self) -> bool:
        """True if all groups have ended, and no group of this generator's prompts will begin."""
        return self._has_no_prompts and not self._again and not self._groups

    @property
    def _has_no_prompts(self) -> bool:
        """True if no more prompts are drawn, because the prompts have ended, or because `max_groups` is reached."""
        return self._prompts.ended or self._started == self.config.max_groups

    async def _draw(self) -> PartialGroup | None:
        """The next group to open: one from `_again`, or a new one for the next prompt.

        None: there is no such group now. The caller asks again unless `_is_through`.
        """
        if self._again:
            return self._again.popleft()
        if self._has_no_prompts:
            if self._groups:
                # Wait until a group ends. If that group was given up, it may be in `_again` then, to be made again.
                await asyncio.wait(self._groups, return_when=asyncio.FIRST_COMPLETED)
            return None
        # If a group was started, some prompt fits this engine. Then the unfit prompts themselves are to blame, and not
        # the settings of this generator, so remove these prompts from their table.
        while self._unfit and self._started:
            sample, reason = self._unfit.pop()
            await self._prompts.reject(sample, reason)
        try:
            drawn = await self._prompts.next()
        except PromptError as error:
            self._skip(error)
            return None
        if drawn is None:
            # No prompt has fitted so far, and the table returns no further prompt now. If further prompts are being
            # loaded, the table returns them later.
            if self._unfit and not self._prompts.is_loading:
                _, reason = self._unfit[0]
                raise reason
            return None
        return await self._group_of(drawn)

    async def _group_of(self, drawn: DrawnPrompt) -> PartialGroup | None:
        """A new group for a prompt; None: the prompt does not fit the engine."""
        began = datetime.now()
        try:
            prompt, prompt_ids = self._maker.tokenize(drawn.source, began)
        except PromptError as error:
            is_of_table = bool(drawn.closes)
            if is_of_table and self.config.on_prompt_error == "raise" and len(self._unfit) < _MOST_SKIPPED:
                # The error ends the run only if no other prompt of the table fits the engine (`_draw`).
                self._unfit.append((drawn.closes[0], error))
            else:
                self._skip(error)  # this may raise the error
                await self._prompts.finished(drawn, rewards=None, inserted=False)
            return None
        number = self._started
        self._started += 1
        spec = PartialGroupSpec(
            next(self._keys),
            prompt,
            prompt_ids,
            number,
            self.config.group_size,
            self.config.sampling,
            item=drawn.item,
            began=began.isoformat(),
        )
        return PartialGroup(spec, drawn)

    async def _make_group(self, work: PartialGroup, times: GroupTimes) -> None:
        """Makes and inserts one group, and reports the outcome of its prompt. `times` gets the seconds of each step."""
        began = time.monotonic()
        try:
            async with self._partial_groups.work(work):
                group, by_function = await self._maker.make(work, times)
                group.meta |= tracing.carrier()  # the trace context, for the trainer's spans
                if work.permit is not None:
                    self._check_permit(work.permit, time.monotonic() - began)
                # After a rollback of the trainer, the newest version may be lower than that of the group.
                staleness = max(0, self._policy.newest_version - group.policy_version)
                insert_began = time.monotonic()
                await self._server.insert(group, work)
                times.insert = time.monotonic() - insert_began
        except LeaseLostError:  # the group lives on in its table, with its permit and its prompt
            self._metrics.stats["leases_lost"] += 1
        except (LeftOut, PromptError, TooOldToFinish) as error:
            # The permit is released before everything else, because another group may wait for it.
            if work.permit is not None:
                await self._server.release(work.permit)
            await self._end_prompt(work, error)
            await self._partial_groups.drop(work)
            if isinstance(error, PromptError):
                self._skip(error)  # raises the error if it has to end the run
            elif isinstance(error, TooOldToFinish):
                self._metrics.count_given_up(times)
                self._given_up.record(self._server.tags_of(work))
            elif error.counts_as is not None:  # a LeftOut that nobody has counted yet
                self._metrics.stats[error.counts_as] += 1
                if error.counts_as in ("groups_refused_stale", "prompts_lost"):  # the insert failed, so `group` exists
                    self._metrics.stats["tokens_wasted"] += group.num_tokens
                if error.counts_as == "groups_refused_stale":
                    await self._server.refused_as_old(error.__cause__)
        else:
            rewards = group.rewards if by_function else None  # without functions, the group is scored elsewhere
            await self._prompts.finished(work.drawn, rewards, inserted=True)
            self._metrics.count_inserted(group, by_function, staleness, times)
        # Tell the hooks of the rollouts that no group will have these rollouts. After an insert this call does nothing,
        # because the insert has settled the rollouts.
        work.settle("the generator has given up the group of the rollout")
        beat()  # for health checks, the end of a group is progress
        if self._on_group is not None:
            user_code.call_plain(self._on_group, self.stats)

    async def _end_prompt(self, work: PartialGroup, error: Exception) -> None:
        """Ends the prompt of a group that was not inserted.

        A prompt that is to blame is finished. Any other prompt is requeued, with one exception: if its group was given
        up as too old, this generator makes the group again. It does so only once, because a group that always takes too
        long would otherwise never end. It does not do so if a stored partial group has replaced a prompt of a table.
        Then the prompt returns to its table, for any generator.
        """
        spec = work.spec
        is_old = isinstance(error, TooOldToFinish)
        is_replaced = work.sample is not None and work.drawn.item is not None
        if self._is_to_blame(error):
            rewards = error.rewards if isinstance(error, LeftOut) else None
            await self._prompts.finished(work.drawn, rewards, inserted=False)
        elif is_old and not spec.again and not is_replaced:
            new_spec = replace(spec, key=next(self._keys), again=True)
            self._again.append(PartialGroup(new_spec, work.drawn))
        else:
            await self._prompts.requeued(work.drawn, work.sample)
            if is_old and spec.again:
                logger.warning("prompt %r: its group was left out, because it was too old twice", spec.prompt.prompt_id)

    def _is_to_blame(self, error: Exception) -> bool:
        """True if a group was left out because of its prompt. `error`: the reason why it was left out."""
        if isinstance(error, LeftOut):
            return error.counts_as in ("groups_skipped", "groups_filtered", "items_rejected")
        return isinstance(error, PromptError) and self._may_skip(error)

    def _check_permit(self, grant: PermitGrant, seconds: float) -> None:
        """Counts a permit that expired before its group was made. Logs a warning for the first such permit.

        `seconds`: the time from the start of the group to its insert.
        """
        if seconds <= grant.ttl:
            return
        self._metrics.stats["permits_expired"] += 1
        if self._metrics.stats["permits_expired"] == 1:
            logger.warning(
                "groups take longer (%.0f s) than permits live (%g s), so the server admits too many: raise permit_ttl "
                "in its [admission] (said once)",
                seconds,
                grant.ttl,
            )

    def _may_skip(self, error: PromptError) -> bool:
        """True if the run goes on without the group: the settings say so, or the fault concerns only this group."""
        if self.config.on_prompt_error == "skip":
            return True
        if isinstance(error, GroupRefusedError):
            return True  # the server refuses a single group for its names or numbers
        # The engine returned what no policy can have drawn, or all reward functions abstained.
        return isinstance(error.__cause__, CompletionError | AbstainedError)

    def _skip(self, error: PromptError) -> None:
        """Counts a prompt that is left out. Raises the error instead if it has to end the run."""
        if not self._may_skip(error):
            raise error
        self._metrics.count_skipped(error, _MOST_SKIPPED)


def run_generator(
    connect: Callable[[], AsyncReplayClient],
    engine: Engine,
    prompts: Iterable[PromptSource] | PromptRows,
    reward: Rewards | None = None,
    config: GeneratorConfig | None = None,
    *,
    rollout: RolloutHook = single_turn,
    group_filter: Callable[[RolloutGroup], bool] | None = None,
    on_group: Callable[[GeneratorStats], None] | None = None,
    on_stop: Callable[[], None] | None = None,
) -> GeneratorStats:
    """Runs a RolloutGenerator to its end, for callers without an event loop. Returns the last statistics.

    `connect` makes the client. It is called on the event loop that uses the client. Ctrl-C and SIGTERM stop the run
    gracefully, and call `on_stop`. The other parameters are those of RolloutGenerator. Raises the errors of its `run`.
    """

    def make(client: AsyncReplayClient) -> RolloutGenerator:
        """Makes the generator. `run_worker` calls this function on the event loop, with the client of `connect`."""
        return RolloutGenerator(
            client,
            engine,
            prompts,
            reward,
            config,
            rollout=rollout,
            group_filter=group_filter,
            on_group=on_group,
        )

    return run_worker(connect, make, on_stop)
