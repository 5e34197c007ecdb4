"""LeasedTable: a table of fresh groups for the trainer of another project, which trains on each group once.

table ──lease──▶ draw ──▶ the trainer ──checkpoint on the disk──▶ acknowledge
                  └────────the run ends, or dies────────────────▶ requeued

The class combines what such a trainer needs: the lock of its folder, the leases and the file that lists them, the
protocol of a resume, a stream of groups, and the pool of groups to replay. While the server is away, `reach` waits
without limit, and logs that it waits.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from replay_adapters.group_pool import GroupPool
from replay_adapters.patient_requests import LATER, PatientRequests
from replay_client import ReplayClient, Sample
from replay_client.folder_lock import FolderLock
from replay_trainer.leases import GroupLeases, TrainedGroups
from replay_trainer.resume import ResumeProtocol

logger = logging.getLogger(__name__)

_POLL = 1.0
"""Seconds that a draw waits for groups."""


class LeasedTable:
    """One reader of a table, with leases on the groups that it draws. Several threads may use `leases.expect`, `reach`
    and `closed` at once. Only one thread at a time may use the other methods."""

    def __init__(
        self,
        who: str,
        table: str,
        folder: Path,
        lease: float,
        *,
        pool: str | None = None,
        max_staleness: int | None = None,
        prefetch: int = 2,
        **access: Any,
    ) -> None:
        """`who`: the name of the reader in the log. `folder`: the folder of the lock and of the list of leases.

        `lease`: seconds after which the server takes back the groups of a reader that died and was not started again.
        `pool`: the table of groups to replay; None: no table, and `self.pool` only counts versions. `prefetch`:
        the number of batches to draw ahead. `access`: settings of the client that replace the settings of the
        environment. Raises TableNotFoundError if the server lacks a table.
        """
        self.client = ReplayClient.from_env(**access)
        self.table = table
        try:
            config = self.client.server_info(tables=[table]).tables[table].config
            self.pool = GroupPool(
                client=self.client,
                table=pool or table,
                max_staleness=max_staleness,
                sequences=True,
                on_unavailable="raise",
            )
        except BaseException:
            self.client.close()
            raise
        self._requests = PatientRequests(who)
        self.reach = self._requests.reach
        """Repeats a request while the server is away or the table is full (`PatientRequests.reach`)."""
        self.waiting = self._requests.log
        """Logs that the reader waits, and why."""
        self.leases = GroupLeases(self.client, table, lease, folder, rank=0)
        # `renumbers=False`: a run that resumes goes on counting from the newest version of the server.
        self.protocol = ResumeProtocol(self.client, self.leases, config, renumbers=False, reach=self.reach)
        self._lock = FolderLock(folder)
        # The client calls `expect` before the lease of a batch begins. So if this run dies, a file names the lease.
        self._batches = self.client.sampler(
            table, prefetch=prefetch, timeout=_POLL, lease=lease, on_lease=self.leases.expect
        )

    def lock(self) -> None:
        """Locks the folder until `close`. Raises RuntimeError if another run uses the folder."""
        refusal = self._lock.acquire()
        if refusal:
            raise RuntimeError(refusal)

    def draw(self) -> list[Sample]:
        """Draws the next batch. Returns its groups, except those that a checkpoint contains already. Returns an empty
        list if no batch came in time, or if the server is away."""
        try:
            drawn = self.leases.hold(next(self._batches))
        except LATER as error:
            self._requests.pause_or_raise(error)  # pauses if the server is away, and raises after `close`
            return []
        self.waiting.go_on()
        return drawn

    def acknowledge(self, groups: TrainedGroups) -> bool:
        """Tells the server that a checkpoint on the disk contains `groups`. Returns False if the server cannot answer
        now; the next checkpoint then acknowledges these groups too."""
        try:
            self.leases.acknowledge(groups)
        except LATER as error:
            logger.warning("the groups of this checkpoint are acknowledged with the next one: %s", error)
            return False
        self.leases.settled(groups)  # ends the renewal of their leases
        return True

    def close(self, leave: bool = True) -> None:
        """Requeues the groups that no checkpoint contains, and closes the connection. A second call does nothing.

        `leave`: True if the run has ended as planned, so that the server does not report this reader as missing.
        """
        if self.closed:
            return
        self._requests.close()
        self._batches.close()
        self.leases.requeue()
        if leave:
            # This is the last request, because after a later one the server would take this client as running again.
            self.client.leave()
        self._lock.release()
        self.client.close()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._requests.closed
