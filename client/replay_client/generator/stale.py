"""StaleGroups: holds generation while the server refuses as too old whatever the engine's weights would draw."""

from __future__ import annotations

import logging
import time

from replay_client.errors import ReplayError
from replay_client.generator.metrics import GeneratorStats
from replay_client.generator.policy_follower import PolicyFollower
from replay_client.generator.wait_log import LOG_SECONDS, WaitLog

logger = logging.getLogger(__name__)

_TRIAL_SECONDS = 30.0
"""Between two groups while generation is held. They find out if the server takes such groups again, for example since
somebody has raised `max_staleness`."""


class StaleWeightsError(ReplayError):
    """The server refuses all groups of the engine's weights as too old, and newer weights do not come."""


class StaleGroups:
    """A refused group that is older than the engine's weights was only late. One of the same version tells that all
    others will be refused too, until there are newer weights."""

    def __init__(self, policy: PolicyFollower, stats: GeneratorStats, timeout: float | None) -> None:
        """`timeout`: seconds to wait for newer weights; None: for ever."""
        self._policy = policy
        self._stats = stats
        self._timeout = timeout
        self._too_old: int | None = None  # the version of the engine's weights, of which all groups are refused
        self._since = 0.0
        self._log = WaitLog()

    def refused(self, version: int, error: BaseException | None) -> None:
        """The server has refused a group of this version."""
        hold = version >= self._policy.version
        if hold and self._too_old != self._policy.version:
            self._too_old, self._since = self._policy.version, time.monotonic()
        what = (
            "all groups of these weights will be, so the generator waits for newer ones" if hold else "it is left out"
        )
        refused = self._stats["stale_refused"]
        self._log.wait(f"a group is too old on arrival, the {refused}th, and {what}: {error}; {self._policy.why_old()}")

    def inserted(self) -> None:
        """The server has taken a group."""
        self._too_old = None
        self._log.go_on()

    async def hold(self) -> None:
        """Returns when a group may be started: at once, unless all would be refused.

        Raises StaleWeightsError when newer weights have not come for `timeout`.
        """
        started = time.monotonic()
        while self._too_old == self._policy.version:
            now = time.monotonic()
            if self._timeout is not None and now - self._since > self._timeout:
                raise StaleWeightsError(
                    f"for {self._timeout:g} s (stale_timeout) the server has refused all groups as too old: "
                    f"{self._policy.why_old()}. Let the trainer publish weights with its versions, where this machine "
                    "can read them, or raise max_staleness of the table"
                )
            if now - started > _TRIAL_SECONDS:
                break
            left = self._since + self._timeout - now if self._timeout is not None else LOG_SECONDS
            await self._policy.wait_for_other_weights(min(left + 0.01, started + _TRIAL_SECONDS - now + 0.01))
        self._stats["stale_seconds"] += time.monotonic() - started
