"""Says that the trainer waits, and why: after half a minute, every half minute, and when it goes on.

It says within seconds that the server is gone, and that a server which came back is another one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from replay_client import ReplayClient
from replay_client.errors import DeadlineExceededError, ReplayError, ServerUnavailableError
from replay_client.heartbeat import beat

logger = logging.getLogger(__name__)

SECONDS = 30.0
"""Between two lines, and before the first."""
LOOK_SECONDS = 2.0
"""Between two looks at the server during a wait."""


class WaitLog:
    """Watches the waits of one thread for one server, such as those for batches of a table."""

    def __init__(
        self,
        client: ReplayClient,
        table: str = "",
        seconds: float = SECONDS,
        look_seconds: float = LOOK_SECONDS,
        *,
        quiet: bool = False,
    ) -> None:
        """`table`: the one that groups come from, if the waits are for groups. `quiet`: log nothing."""
        self._client = client
        self._table = table
        self._waiting = quiet
        """Whether there is nothing to begin, because a wait is watched already or none is to be."""
        self._seconds = seconds
        self._look_seconds = look_seconds
        self._server_id: int | None = None
        self._gone = False

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields `batches`, and logs every long wait for one.

        Raises what they raise; but a deadline that passes while the server is away does not count. Then the timeout of
        the client says how long to wait for the server, and ServerUnavailableError ends the wait.
        """
        while True:
            with self.waiting("for groups"):
                batch = self._next(batches)
            if batch is None:
                return
            yield batch

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Logs a long wait for `what` inside of the block. A wait inside of a wait is a part of it."""
        if self._waiting:
            yield
            return
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(done, what), name="wait-log", daemon=True)
        watcher.start()
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False
            done.set()
            watcher.join()

    def _next(self, batches: Iterator[Any]) -> Any:
        while True:
            try:
                return next(batches, None)
            except ServerUnavailableError:
                self._client.policy()  # it waits for the server
            except DeadlineExceededError:
                try:
                    self._client.policy(timeout=self._look_seconds)
                except ReplayError:
                    self._client.policy()
                else:
                    raise

    def _watch(self, done: threading.Event, what: str) -> None:
        """In a thread of its own, because the trainer's is blocked."""
        began, told = time.monotonic(), False
        next_line = began + self._seconds
        while not done.wait(min(self._look_seconds, self._seconds)):
            beat()
            reason, is_news = self._look()
            now = time.monotonic()
            if (is_news or now >= next_line) and not done.is_set():
                logger.warning("waiting %s for %.0f s: %s", what, now - began, reason)
                told, next_line = True, now + self._seconds
        if told:
            logger.warning("the trainer goes on after %.0f s", time.monotonic() - began)

    def _look(self) -> tuple[str, bool]:
        """Why there are no groups, and whether the server has just gone or is another one than before."""
        try:
            tables = [self._table] if self._table else []
            info = self._client.server_info(tables=tables, timeout=5 * self._look_seconds)
        except ReplayError as error:
            was_gone, self._gone = self._gone, True
            return str(error), not was_gone
        reason = "the server answers"
        if self._table:
            reason = info.tables[self._table].sampling.reason or f"{self._table}: no request of this trainer waits"
        was_restarted = self._server_id not in (None, info.server_id)
        if was_restarted:
            reason = f"the server was restarted, and holds {info.items} items now; {reason}"
        elif self._gone:
            reason = f"the server answers again; {reason}"
        is_news = was_restarted or self._gone
        self._server_id, self._gone = info.server_id, False
        return reason, is_news
