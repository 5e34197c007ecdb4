"""RolloutGenerator: keeps tables supplied with groups, as many under way at a time as permits allow.

prompts ──▶ permit ──▶ group: engine, rewards, advantages (group_maker.py) ──▶ insert
                                ▲
                      new weights (policy_follower.py)

Every group goes this way on its own: one that is slow holds up no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from replay_client import tracing
from replay_client.errors import (
    DeadlineExceededError,
    PayloadTooLargeError,
    ReplayError,
    ServerClosedError,
    ServerUnavailableError,
    StaleItemError,
    TableFullError,
)
from replay_client.generator.config import GeneratorConfig
from replay_client.generator.engines import Engine
from replay_client.generator.group_maker import GroupMaker, LeftOut, PromptSource, priority_of
from replay_client.generator.metrics import GeneratorMetrics, GeneratorStats, GroupTimes, MetricsFile
from replay_client.generator.policy_follower import (
    PolicyFollower,
    WeightsMismatchError,
    WeightsNotAllowedError,
    WeightsNotFoundError,
)
from replay_client.generator.prompts import Prompt, PromptError
from replay_client.generator.rewards import Rewards, in_daemon_thread
from replay_client.keys import KeySequence
from replay_client.records import PermitLease
from replay_client.rollout import RolloutGroup

if TYPE_CHECKING:
    from replay_client.aio import AsyncReplayClient

logger = logging.getLogger(__name__)

_RELEASE_SECONDS = 2.0  # for giving permits back at the end; the server takes back by itself what it does not hear of
_MOST_SKIPPED = 100
"""Groups skipped one after the other before the run ends after all: then it is not single prompts that fail."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""Seconds between attempts to insert into a table that is full and refuses; doubled each time."""


class RolloutGenerator:
    """Keeps tables supplied with groups of the newest policy, until its prompts end, `stop`, or an error.

    Errors end the run and are raised by `run`: a server that does not come back within the client's timeout, an engine
    that died, a prompt or its reward that does not work (unless they are skipped), weights that do not match. A full
    table, a missing permit, a group that arrives too late and a server that restarts are normal life: they are waited
    for and counted.

    A permit is acquired before a group is generated, used up by its insert, and given back where there is none. The
    server takes permits back after their time to live; a group that took longer is inserted all the same and counts
    there as accepted, so the only harm is that more groups than wanted may have been generated meanwhile.
    """

    def __init__(
        self,
        client: AsyncReplayClient,
        engine: Engine,
        prompts: Iterable[PromptSource],
        reward: Rewards,
        config: GeneratorConfig | None = None,
        *,
        keep: Callable[[RolloutGroup], bool] | None = None,
        on_group: Callable[[GeneratorStats], None] | None = None,
    ) -> None:
        """The engine is the generator's from now on: the end of `run` closes it. The client stays the caller's.

        `prompts` are whatever `Prompt.of` takes. `keep` says whether a finished group is inserted. `on_group` is called
        on the event loop after each group, with what `stats` says.
        """
        self.config = config or GeneratorConfig()
        self._client = client
        self._engine = engine
        self._prompts = iter(prompts)
        self._on_group = on_group
        self._keys = KeySequence()
        self._policy = PolicyFollower(
            client, engine, self.config.reload, self.config.probe_tolerance, self.config.weights_root
        )
        self._maker = GroupMaker(engine, self._policy, reward, self.config, keep)
        self._metrics = GeneratorMetrics(self.config.solved_reward)
        self._slots = asyncio.Semaphore(self.config.max_concurrent_groups or sys.maxsize)
        self._leases: set[PermitLease] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._groups: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()  # by `stop` or by a failure
        self._failure: BaseException | None = None
        self._skipped_in_a_row = 0
        self._warned: set[str] = set()

    @property
    def stats(self) -> GeneratorStats:
        """A copy of the current statistics."""
        self._see_policy()
        return self._metrics.stats.copy()

    async def run(self) -> None:
        """Generate until the prompts end, `stop` is called or something fails; then close the engine.

        Raises PromptError, WeightsNotFoundError, WeightsNotAllowedError, WeightsMismatchError, ServerUnavailableError,
        and what the engine raises.
        """
        try:
            with MetricsFile(self.config.metrics_path) if self.config.metrics_path else nullcontext() as file:
                await self._run(file)
        finally:
            await self._engine.close()
        if self._failure is not None:
            raise self._failure

    async def _run(self, file: MetricsFile | None) -> None:
        work = self._spawn(self._work())
        ended = asyncio.create_task(self._ended.wait())
        if file is not None:
            self._spawn(self._write_metrics(file))
        try:
            await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and self._failure is None:
                work.cancel()
                if self._groups:
                    await asyncio.wait(self._groups, timeout=self.config.stop_grace)
        finally:
            self._ended.set()
            tasks = [*self._tasks, ended]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(self._give_back(lease) for lease in [*self._leases]))
            if file is not None:
                self._see_policy()
                file.write(self._metrics.line())

    def stop(self) -> None:
        """Start no more groups, let those under way finish for `stop_grace`, and have `run` return."""
        self._ended.set()

    async def _work(self) -> None:
        await self._policy.load_first(self.config.wait_for_policy)
        if self.config.follow_policy:
            self._spawn(self._policy.follow())
        await self._start_groups()
        while self._groups:
            await asyncio.wait(self._groups)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose failure ends the run."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        # What breaks after the first failure, or while stopping, is not the reason.
        if not self._ended.is_set():
            self._failure = error
            self._ended.set()

    async def _write_metrics(self, file: MetricsFile) -> None:
        while True:
            await asyncio.sleep(self.config.metrics_interval)
            self._see_policy()
            file.write(self._metrics.line())

    def _see_policy(self) -> None:
        """Take over what the follower has done meanwhile."""
        stats, policy = self._metrics.stats, self._policy
        for seconds in policy.take_reload_seconds():
            self._metrics.count_reload(seconds)
        stats["policy_version"] = policy.version
        stats["reloads"] = policy.reloads
        stats["probe_max_difference"] = policy.difference
        stats["groups_under_way"] = len(self._groups)

    # -------------------------------------------------------------------------------------------------- groups

    async def _start_groups(self) -> None:
        """Start a group for each prompt in turn, when there is room for it and a permit."""
        admission = (await self._client.server_info()).admission is not None
        if self.config.max_concurrent_groups is None and not admission:
            raise ReplayError(
                "max_concurrent_groups = None leaves the number of groups to permits, and the server has no "
                "[admission]: configure it there, or say how many"
            )
        number = 0
        while self.config.max_groups is None or number < self.config.max_groups:
            # In a thread: a data set that is streamed may take its time.
            source = await in_daemon_thread(lambda: next(self._prompts, None))
            if source is None:
                break
            try:
                prompt, prompt_ids = self._maker.tokenize(source)
            except PromptError as error:
                self._skip(error)
                continue
            await self._slots.acquire()
            times = GroupTimes(permit=-time.monotonic())
            lease = await self._permit() if admission else None
            times.permit += time.monotonic()
            # Called by the task: one that is cancelled before it starts leaves no coroutine that nobody awaits.
            work = partial(self._make_group, prompt, prompt_ids, number, lease, times)
            task = self._spawn(tracing.in_span("replay.generate", work, prompt_id=prompt.prompt_id))
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)
            task.add_done_callback(lambda _: self._slots.release())
            number += 1

    async def _make_group(
        self, prompt: Prompt, prompt_ids: list[int], number: int, lease: PermitLease | None, times: GroupTimes
    ) -> None:
        acquired = time.monotonic()
        try:
            group, by_function = await self._maker.make(prompt, prompt_ids, number, times)
            if lease is not None and time.monotonic() - acquired > lease.ttl:
                self._metrics.stats["permits_expired"] += 1
                self._warn(
                    "permit",
                    f"groups take longer ({time.monotonic() - acquired:.0f} s) than the {lease.ttl:g} s that a permit "
                    "lives, so the server lets more be generated than it wants: raise permit_ttl in its [admission]",
                )
            staleness = max(0, self._policy.newest_version - group.policy_version)
            times.insert = -time.monotonic()
            await self._insert(group, priority_of(group), lease)
            times.insert += time.monotonic()
        except (LeftOut, PromptError) as error:
            # Before anything else happens: the permit may be what another group waits for.
            if lease is not None:
                await self._give_back(lease)
            if isinstance(error, PromptError):
                self._skip(error)
            elif error.counts_as is not None:
                self._metrics.stats[error.counts_as] += 1
        else:
            if lease is not None:
                self._leases.discard(lease)
            self._skipped_in_a_row = 0
            self._metrics.count_inserted(group, by_function, staleness, times)
        if self._on_group is not None:
            self._on_group(self.stats)

    # -------------------------------------------------------------------------------------------------- the server

    async def _insert(self, group: RolloutGroup, priority: float, lease: PermitLease | None) -> None:
        """Returns when it is in the tables. Raises LeftOut where it will not get there, PromptError where it cannot."""
        stats, pause = self._metrics.stats, _FIRST_PAUSE
        priorities = dict.fromkeys(self.config.tables, priority)
        key = next(self._keys)  # one for all attempts: should an earlier one have succeeded after all, it stays at that
        while True:
            try:
                await self._client.insert(group, priorities, key=key, permits=lease, timeout=self.config.insert_timeout)
                return
            except DeadlineExceededError:  # the queue is full: the trainer is slow, or away for a while
                stats["insert_waits"] += 1
            except (ServerUnavailableError, ServerClosedError):
                await self._server_is_back()
            except TableFullError as error:
                stats["full_refused"] += 1
                self._warn("full", f"a group was refused, which {self.config.when_full}s now: {error}")
                if self.config.when_full == "drop":
                    raise LeftOut(None) from error
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            except StaleItemError as error:
                raise LeftOut("stale_refused") from error
            except PayloadTooLargeError as error:
                raise PromptError(f"prompt {group.prompt_id!r}: its group cannot be inserted: {error}") from error

    async def _permit(self) -> PermitLease:
        while True:
            try:
                lease = await self._client.acquire_permits(1, timeout=self.config.permit_timeout)
            except DeadlineExceededError:
                self._metrics.stats["permit_waits"] += 1
            except (ServerUnavailableError, ServerClosedError):
                await self._server_is_back()
            else:
                self._leases.add(lease)
                return lease

    async def _server_is_back(self) -> None:
        """Returns when the server answers again. Raises ServerUnavailableError after the client's own timeout."""
        await asyncio.sleep(_FIRST_PAUSE)
        with contextlib.suppress(ServerClosedError):  # it is on its way down; the caller tries again
            await self._client.policy()

    async def _give_back(self, lease: PermitLease) -> None:
        self._leases.discard(lease)
        with contextlib.suppress(ReplayError, TimeoutError):
            async with asyncio.timeout(_RELEASE_SECONDS):
                await self._client.release_permits(lease)

    # -------------------------------------------------------------------------------------------------- trouble

    def _skip(self, error: PromptError) -> None:
        """Leave a prompt out, or end the run with its error."""
        self._skipped_in_a_row += 1
        if self.config.on_prompt_error == "raise":
            raise error
        if self._skipped_in_a_row >= _MOST_SKIPPED:
            raise PromptError(f"{self._skipped_in_a_row} groups in a row were skipped, the last because of: {error}")
        self._metrics.stats["skipped"] += 1
        logger.warning("skipped: %s", error)

    def _warn(self, kind: str, message: str) -> None:
        """Say something of its kind once."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s (only warning of this kind)", message)


def run_generator(
    connect: Callable[[], AsyncReplayClient],
    engine: Engine,
    prompts: Iterable[PromptSource],
    reward: Rewards,
    config: GeneratorConfig | None = None,
    *,
    keep: Callable[[RolloutGroup], bool] | None = None,
    on_group: Callable[[GeneratorStats], None] | None = None,
) -> GeneratorStats:
    """Run a RolloutGenerator to its end, for callers without an event loop; the last statistics.

    `connect` makes the client, on the loop it will be used on. Ctrl-C and SIGTERM stop the run gracefully.
    """

    async def main() -> GeneratorStats:
        async with connect() as client:
            generator = RolloutGenerator(client, engine, prompts, reward, config, keep=keep, on_group=on_group)
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
                for number in (signal.SIGINT, signal.SIGTERM):
                    asyncio.get_running_loop().add_signal_handler(number, generator.stop)
            await generator.run()
            return generator.stats

    return asyncio.run(main())


__all__ = [
    "GeneratorConfig",
    "GeneratorStats",
    "PromptError",
    "PromptSource",
    "RolloutGenerator",
    "WeightsMismatchError",
    "WeightsNotAllowedError",
    "WeightsNotFoundError",
    "run_generator",
]
