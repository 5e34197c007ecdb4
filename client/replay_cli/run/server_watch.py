"""ServerWatch: asks the server of a run about its problems, and whether groups still come."""

from __future__ import annotations

import threading
import time

from replay_cli import doctor
from replay_cli.run.plan import RunPlan
from replay_client import ReplayClient
from replay_client.access import Access
from replay_client.errors import ReplayError
from replay_dashboard.diagnosis import Level
from replay_trainer.suppliers import why_deserted

WATCH_SECONDS = 5.0
"""Seconds between two requests to the server."""
EXAMINE_SECONDS = 30.0
"""Seconds between two examinations by the doctor."""
QUIET_SECONDS = 15.0
"""If all generators have ended, the run ends after at least this many seconds without a new step."""
_QUIET_STEPS = 3
"""The run also waits for this many durations of the last step, because the trainer may be in the middle of a step."""
_ANSWER_SECONDS = 10.0
"""Seconds in which the server must answer a request."""


class ServerWatch:
    """Asks the server on a thread of its own, because a request to a server that is away takes seconds."""

    def __init__(self, plan: RunPlan) -> None:
        """Asks nothing before `start`."""
        self.failure = ""
        """The doctor's first failure, with its remedy; empty: the doctor found no failure."""
        self._plan = plan
        self._why_deserted = ""
        """The reason why no more groups come; empty: groups may still come."""
        self._waited = 0.0
        """Seconds for which the trainer has waited for groups, as the server reports it."""
        self._step = 0
        """The trainer's last step."""
        self._stepped_at = time.monotonic()
        """The time at which the trainer's last step was first seen, by the monotonic clock."""
        self._ended = threading.Event()
        self._client: ReplayClient | None = None
        """None: not started."""
        self._thread = threading.Thread(target=self._run, name="server-watch", daemon=True)

    def start(self, address: str) -> None:
        """Watch the server at this address, until `close`."""
        self._client = self._connect(address)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, also in the middle of a request. Does nothing before `start`."""
        self._ended.set()
        if self._client is not None:
            self._client.close()
            self._thread.join()

    def why_nothing_comes(self, step: int, step_seconds: float) -> str:
        """The reason why no more groups come, once all generators have ended; empty: groups may still come.

        `step`: the trainer's last step, which took `step_seconds`.
        """
        now = time.monotonic()
        if step != self._step:
            self._step = step
            self._stepped_at = now
        quiet = max(QUIET_SECONDS, _QUIET_STEPS * step_seconds)
        # Groups may still come, unless the trainer has waited long for groups, and has made no step for long.
        if self._waited < QUIET_SECONDS or now - self._stepped_at < quiet:
            return ""
        return self._why_deserted

    def _run(self) -> None:
        """The work of the thread: asks the server every WATCH_SECONDS, and the doctor every EXAMINE_SECONDS."""
        assert self._client is not None, "`start` makes the client"
        examine_at = time.monotonic() + EXAMINE_SECONDS
        while not self._ended.wait(WATCH_SECONDS):
            self._look(self._client)
            if time.monotonic() >= examine_at:
                self._examine(self._client)
                examine_at = time.monotonic() + EXAMINE_SECONDS

    def _connect(self, address: str) -> ReplayClient:
        """A client that uses only the settings of the run: variables of the shell are for other servers."""
        config = self._plan.client_config
        access = Access.find(
            environment={},
            address=address,
            client_config=None if config is None else str(config),
            name="",  # without a name, so that the server does not count this client among those that work for the run
        )
        return ReplayClient(access.address, _ANSWER_SECONDS, **access.arguments())

    def _look(self, client: ReplayClient) -> None:
        """Asks the server whether groups still come, and how long the trainer's blocked request has waited."""
        try:
            info = client.server_info()
        except ReplayError:
            self._why_deserted = ""  # nothing is known, so the run goes on
            return
        self._why_deserted = why_deserted(info)
        waited = 0.0
        for table in info.tables.values():
            blocked = table.sampling  # the requests for samples that wait at this table now
            if table.name == self._plan.rollouts_table and blocked.count:
                waited = blocked.seconds
        self._waited = waited

    def _examine(self, client: ReplayClient) -> None:
        """Examines the server as `replay doctor` does, and sets `failure`."""
        _, findings = doctor.look(client)
        failures = [finding for finding in findings if finding.level == Level.FAILURE]
        if not failures:
            self.failure = ""
            return
        first = failures[0]
        remedy = f"; {first.remedy}" if first.remedy else ""
        self.failure = f"{first.check}: {first.message}{remedy}"
