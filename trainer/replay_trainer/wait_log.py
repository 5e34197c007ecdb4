"""Says that the trainer waits for groups, and why: after half a minute, every half minute, and when it goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

from replay_client import ReplayClient
from replay_client.errors import ReplayError

logger = logging.getLogger(__name__)

SECONDS = 30.0
"""Between two lines, and before the first."""


class WaitLog:
    """Watches the waits for batches of one table."""

    def __init__(self, client: ReplayClient, table: str, seconds: float = SECONDS) -> None:
        self._client = client
        self._table = table
        self._seconds = seconds
        self._server_id: int | None = None

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields `batches`, and logs every long wait for one."""
        while True:
            done = threading.Event()
            watcher = threading.Thread(target=self._watch, args=(done,), name="wait-log", daemon=True)
            watcher.start()
            try:
                batch = next(batches, None)
            finally:
                done.set()
                watcher.join()
            if batch is None:
                return
            yield batch

    def _watch(self, done: threading.Event) -> None:
        """In a thread of its own, because the trainer's is blocked."""
        began, told = time.monotonic(), False
        while not done.wait(self._seconds):
            told = True
            logger.warning("waiting for groups for %.0f s: %s", time.monotonic() - began, self._reason())
        if told:
            logger.warning("the trainer goes on after %.0f s", time.monotonic() - began)

    def _reason(self) -> str:
        try:
            info = self._client.server_info(tables=[self._table], timeout=self._seconds / 2)
        except ReplayError as error:
            return str(error)
        reason = info.tables[self._table].sampling.reason or f"{self._table}: no request of this trainer waits"
        if self._server_id not in (None, info.server_id):
            reason = f"the server was restarted, and holds {info.items} items now; {reason}"
        self._server_id = info.server_id
        return reason
