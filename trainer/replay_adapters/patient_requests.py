"""PatientRequests: repeats requests while the server is away or a table is full, and logs each wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from replay_adapters.group_pool import AWAY
from replay_client.errors import GONE, ClientClosedError, DeadlineExceededError, TableFullError
from replay_client.waits import WaitLog, try_patiently

T = TypeVar("T")

LATER = (*AWAY, DeadlineExceededError, TableFullError)
"""Errors after which the same request may succeed later."""
_PAUSE = 0.2
"""Seconds between two attempts."""


class PatientRequests:
    """The requests of one adapter to its server. Several threads may use it at once."""

    def __init__(self, who: str) -> None:
        """`who`: the name of the adapter's program in the log."""
        self.log = WaitLog(who)
        """Logs that the program waits, and why."""
        self._who = who
        self._closed = threading.Event()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed.is_set()

    def close(self) -> None:
        """Ends all waits: each raises the error of its last attempt."""
        self._closed.set()

    def reach(self, attempt: Callable[[], T]) -> T:
        """Returns the result of `attempt`, which is repeated without limit while the table is full or the server is
        away.

        Raises any other error at once, and every error after `close` or after the client was closed.
        """
        # `try_patiently` calls `pause_or_raise` after each failed attempt. That method already pauses, so
        # `try_patiently` itself must not: a first pause of 0 seconds, doubled after each attempt, stays 0.
        result = try_patiently(attempt, self.pause_or_raise, first=0.0)
        self.log.go_on()
        return result

    def pause_or_raise(self, error: Exception, _: bool = False) -> None:
        """Logs the reason of a failed attempt, and pauses, so that the caller can then repeat the attempt.

        Raises `error` if a further attempt cannot succeed, and raises every error after `close`. `try_patiently` passes
        a second argument, which says whether the time is up. It is ignored, because the attempts have no time limit.
        """
        # Patience knows of closed clients too, but LeasedTable calls this method without it.
        if self.closed or isinstance(error, ClientClosedError):
            raise error
        if not isinstance(error, LATER):
            raise error
        if isinstance(error, GONE):
            self.log.wait(f"the server is away, and {self._who} waits for it: {error}")
        else:  # the server answers, and the error says why it does not do what it is asked for
            self.log.wait(f"{self._who} waits: {error}")
        if isinstance(error, DeadlineExceededError):  # the failed attempt has waited already, so no pause is needed
            return
        self._closed.wait(_PAUSE)  # `close` ends the pause
