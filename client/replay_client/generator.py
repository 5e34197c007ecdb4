"""RolloutGenerator: takes prompts, has an engine complete them, scores the completions and inserts the groups.

prompts ──▶ permit ──▶ engine ──▶ rewards ──▶ advantages, priority ──▶ insert
                         ▲
               new weights (policy_follower.py)

Every group goes this way on its own: one that is slow holds up no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from replay_client import tracing
from replay_client.engines import Completion, Engine, SamplingConfig
from replay_client.errors import (
    DeadlineExceededError,
    PayloadTooLargeError,
    ReplayError,
    ServerClosedError,
    ServerUnavailableError,
    StaleItemError,
    TableFullError,
)
from replay_client.frames import KeySequence
from replay_client.generator_metrics import GeneratorMetrics, GeneratorStats, GroupTimes, MetricsFile
from replay_client.policy_follower import (
    PolicyFollower,
    ReloadMode,
    WeightsMismatchError,
    WeightsNotAllowedError,
    WeightsNotFoundError,
)
from replay_client.prompts import Message, Prompt, PromptError
from replay_client.records import PermitLease
from replay_client.rewards import RewardError, Rewards, Scorer, in_daemon_thread
from replay_client.rollout import RolloutGroup, group_from_completions
from replay_client.scoring import group_advantages, group_priority

if TYPE_CHECKING:
    from replay_client.aio import AsyncReplayClient

logger = logging.getLogger(__name__)

PromptSource = Prompt | Mapping[str, Any] | str | list[Message]

_RELEASE_SECONDS = 2.0  # for giving permits back at the end; the server takes back by itself what it does not hear of
_MOST_SKIPPED = 100
"""Groups skipped one after the other before the run ends after all: then it is not single prompts that fail."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""Seconds between attempts to insert into a table that is full and refuses; doubled each time."""


@dataclass(frozen=True)
class GeneratorConfig:
    """What a RolloutGenerator does; every wait is in seconds."""

    group_size: int = 8
    """G, completions of each prompt."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How they are drawn. With a seed, each group has one of its own that follows from it."""
    chat_template: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the tokenizer's chat template with prompts that are messages, like {"enable_thinking": False}."""
    tables: tuple[str, ...] = ("rollouts",)
    """Where a group is inserted, with `scoring.group_priority`, which is 0 where all its rewards are equal."""
    advantage_scale: Literal["group", "none"] = "group"
    """As `scoring.group_advantages` has it."""
    max_concurrent_groups: int | None = 16
    """Groups between their prompt and their place in the table. A full queue holds them, and with them all others.
    None: as many as there are permits, so only with a server that has [admission]."""
    max_groups: int | None = None
    """Start this many groups and then finish; None: as many as there are prompts."""
    follow_policy: bool = True
    """Reload the engine's weights whenever the trainer publishes new ones."""
    reload: ReloadMode = "between_groups"
    """between_groups: reload when the groups under way are complete, and start none until then, so that every group is
    of one version. at_once: reload now; completions under way go on with the new weights and then span versions, each
    token with the version that drew it in `extras["policy_versions"]`. Their keys and values are computed anew, so that
    each token's log-probability is exactly that of its version. For long completions, where waiting is idle time."""
    wait_for_policy: bool = False
    """Start only when the trainer has published something. Otherwise start with the engine's own weights, version 0,
    where nothing is published."""
    weights_root: str | os.PathLike[str] | None = None
    """Load weights from this folder and those in it only; None: from wherever the policy says. Whoever may write to the
    server may set the policy, and with it what a generator opens; weights are never executed, only read."""
    probe_tolerance: float = 0.02
    """Largest difference, in nats, between the trainer's and the engine's log-probability of any token of the probe.
    The default is for float32 on both sides; with bfloat16 on either, single tokens differ by some tenths: use 0.5."""
    truncated: Literal["keep", "mask"] = "keep"
    """What becomes of completions that ended for their length alone. mask: they count in the advantages of their group,
    but their tokens are not trained on (`loss_mask`), nor do they add to its priority (DAPO's overlong filtering)."""
    on_prompt_error: Literal["raise", "skip"] = "raise"
    """What happens where a prompt does not fit the engine, a reward function fails or a group is larger than the server
    takes. raise: the run ends. skip: the group is left out, counted and warned about; so many in a row that it cannot
    be the prompts end the run after all."""
    when_full: Literal["wait", "drop"] = "wait"
    """What happens where a table with `when_full = "reject"` refuses a group. wait: try again. drop: leave it out."""
    reward_threads: int = 1
    """Groups whose reward functions, where they are not async, may run at a time. More only if they are thread-safe."""
    reward_timeout: float | None = 300.0
    """Longest time for one reward function and one group; beyond it, the function has failed."""
    solved_reward: float = 1.0
    """Reward from which on a completion counts in the metrics as solved."""
    metrics_path: Path | None = None
    """File that a JSON line goes to every `metrics_interval`; see docs/how-to/generate.md for its fields."""
    metrics_interval: float = 10.0
    insert_timeout: float = 30.0
    """A group that finds its queue full for so long is counted in `insert_waits` and tries again."""
    permit_timeout: float = 30.0
    """As `insert_timeout`, for a permit, where the server's admission is configured."""
    stop_grace: float = 2.0
    """How long groups that are being generated may go on after `stop`."""

    def __post_init__(self) -> None:
        for name in ("group_size", "max_concurrent_groups", "reward_threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.tables:
            raise ValueError("tables must name at least one table")
        for name in ("probe_tolerance", "metrics_interval", "insert_timeout", "permit_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.reward_timeout is not None and not self.reward_timeout > 0:
            raise ValueError(f"reward_timeout must be above 0, or None for no limit, not {self.reward_timeout}")
        for name, valid in _CHOICES.items():
            if getattr(self, name) not in valid:
                raise ValueError(f"{name} must be one of {', '.join(valid)}, not {getattr(self, name)!r}")


_CHOICES = {
    "advantage_scale": ("group", "none"),
    "reload": ("between_groups", "at_once"),
    "truncated": ("keep", "mask"),
    "on_prompt_error": ("raise", "skip"),
    "when_full": ("wait", "drop"),
}


class _Left(Exception):
    """A group is not inserted, and its permit goes back; its message says why, where that is worth a warning."""


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
        self._scorer = Scorer(reward, threads=self.config.reward_threads, timeout=self.config.reward_timeout)
        self._keep = keep
        self._on_group = on_group
        self._keys = KeySequence()
        self._policy = PolicyFollower(
            client, engine, self.config.reload, self.config.probe_tolerance, self.config.weights_root
        )
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
                prompt, prompt_ids = self._tokenize(source)
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

    def _tokenize(self, source: PromptSource) -> tuple[Prompt, list[int]]:
        try:
            prompt = Prompt.of(source)
        except ValueError as error:
            raise PromptError(f"{source!r:.200} is no prompt: {error}") from error
        prompt_ids = prompt.tokenize(self._engine.tokenizer, **self.config.chat_template)
        if not 0 < len(prompt_ids) < self._engine.max_length:
            raise PromptError(
                f"prompt {prompt.prompt_id!r} has {len(prompt_ids)} tokens; the engine takes 1 to "
                f"{self._engine.max_length - 1}, so that with one more they fit its maximum length"
            )
        return prompt, prompt_ids

    async def _make_group(
        self, prompt: Prompt, prompt_ids: list[int], number: int, lease: PermitLease | None, times: GroupTimes
    ) -> None:
        acquired = time.monotonic()
        try:
            group, by_function = await self._group(prompt, prompt_ids, number, times)
            if lease is not None and time.monotonic() - acquired > lease.ttl:
                self._metrics.stats["permits_expired"] += 1
                self._warn(
                    "permit",
                    f"groups take longer ({time.monotonic() - acquired:.0f} s) than the {lease.ttl:g} s that a permit "
                    "lives, so the server lets more be generated than it wants: raise permit_ttl in its [admission]",
                )
            staleness = max(0, self._policy.newest_version - group.policy_version)
            times.insert = -time.monotonic()
            await self._insert(group, _priority(group), lease)
            times.insert += time.monotonic()
        except (_Left, PromptError) as error:
            # Before anything else happens: the permit may be what another group waits for.
            if lease is not None:
                await self._give_back(lease)
            if isinstance(error, PromptError):
                self._skip(error)
        else:
            if lease is not None:
                self._leases.discard(lease)
            self._skipped_in_a_row = 0
            self._metrics.count_inserted(group, by_function, staleness, times)
        if self._on_group is not None:
            self._on_group(self.stats)

    async def _group(
        self, prompt: Prompt, prompt_ids: list[int], number: int, times: GroupTimes
    ) -> tuple[RolloutGroup, dict[str, npt.NDArray[np.float32]]]:
        """The group, and each reward function's rewards. Raises _Left where it is not to be inserted."""
        times.generate = -time.monotonic()
        async with self._policy.generation():
            version = self._policy.version
            completions = await self._engine.generate(prompt_ids, self._sampling(number), self.config.group_size)
        times.generate += time.monotonic()
        times.reward = -time.monotonic()
        try:
            rewards, by_function = await self._scorer.score(prompt.row, [each.text for each in completions])
        except RewardError as error:
            raise PromptError(f"prompt {prompt.prompt_id!r}: {error}") from error
        times.reward += time.monotonic()
        group = self._assemble(prompt, prompt_ids, completions, version, rewards, by_function)
        if group.num_tokens == 0 or (group.loss_mask is not None and not group.loss_mask.any()):
            self._metrics.stats["skipped"] += 1
            raise _Left("nothing in it can be trained on")
        if self._keep is not None and not self._keep(group):
            self._metrics.stats["filtered"] += 1
            raise _Left("filtered")
        return group, by_function

    def _sampling(self, number: int) -> SamplingConfig:
        """That of the group with this number: with a seed, one of its own, or equal prompts would complete equally."""
        sampling = self.config.sampling
        if sampling.seed is None:
            return sampling
        return replace(sampling, seed=random.Random(f"{sampling.seed}/{number}").getrandbits(31))

    def _assemble(
        self,
        prompt: Prompt,
        prompt_ids: list[int],
        completions: list[Completion],
        version: int,
        rewards: npt.NDArray[np.float32],
        by_function: dict[str, npt.NDArray[np.float32]],
    ) -> RolloutGroup:
        """`version`: that of the engine when it was asked, for where there are no tokens to say it."""
        versions_T = np.array([v for each in completions for v in each.policy_versions], dtype=np.int64)
        first, last = (int(versions_T.min()), int(versions_T.max())) if versions_T.size else (version, version)
        extras: dict[str, npt.NDArray[Any]] = {"policy_versions": versions_T} if first != last else {}
        if len(by_function) > 1:
            extras |= {f"rewards/{name}": values for name, values in by_function.items()}
        mask = None
        if self.config.truncated == "mask" and any(each.finish_reason == "length" for each in completions):
            mask = np.repeat(
                [each.finish_reason != "length" for each in completions],
                [len(each.token_ids) for each in completions],
            )
        return group_from_completions(
            prompt_ids=prompt_ids,
            completions=[each.token_ids for each in completions],
            logprobs=[each.logprobs for each in completions],
            rewards=rewards,
            advantages=group_advantages(rewards, scale=self.config.advantage_scale),
            policy_version=first,
            policy_version_end=last if last != first else None,
            prompt_id=prompt.prompt_id,
            loss_mask=mask,
            finish_reasons=tuple(each.finish_reason for each in completions),
            sampling=self.config.sampling.describe(),
            extras=extras,
            meta=tracing.carrier(),
        )

    # -------------------------------------------------------------------------------------------------- the server

    async def _insert(self, group: RolloutGroup, priority: float, lease: PermitLease | None) -> None:
        """Returns when it is in the tables. Raises _Left where it will not get there, PromptError where it cannot."""
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
                    raise _Left("no room") from error
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            except StaleItemError as error:
                stats["stale_refused"] += 1
                raise _Left("stale") from error
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


def _priority(group: RolloutGroup) -> float:
    """`group_priority` of the completions that are trained on: the others have no gradient to offer."""
    advantages = group.advantages
    if group.loss_mask is not None:
        ends = np.cumsum(group.completion_lengths)
        trained = [
            bool(group.loss_mask[end - length : end].any())
            for end, length in zip(ends, group.completion_lengths, strict=True)
        ]
        advantages = np.where(trained, advantages, 0.0).astype(np.float32)
    return group_priority(group.rewards, advantages)


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
    "RolloutGenerator",
    "WeightsMismatchError",
    "WeightsNotAllowedError",
    "WeightsNotFoundError",
    "run_generator",
]
