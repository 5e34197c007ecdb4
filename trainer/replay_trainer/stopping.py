"""Stopping: a trainer that is asked to stop ends after its step, or at once where it waits for groups, on all ranks.

* Whoever asks only sets a flag: a signal handler, a callback, or another thread, of any rank.
* All ranks agree on it in the exchange of `Publication.check`, between steps and before a version is published. So
  they end after the same step.
* A rank that waits looks every second (`replay_client.waits.looking`), also at whether another rank was asked. What
  ends the wait of one rank ends the step of all: they exchange it after the wait, before any of them uses its groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from replay_client.waits import looking
from replay_trainer.ranks import RankFlag, Ranks

T = TypeVar("T")


class Stopped(BaseException):
    """No further step begins, or the one that waits for its groups is given up: on every rank, because of `stop`."""


class Stopping:
    """One rank's part in a stop. All ranks make theirs together."""

    def __init__(self, ranks: Ranks) -> None:
        self.agreed = False
        """True if all ranks know that they stop."""
        self._ranks = ranks
        self._asked = False
        self._flag = RankFlag(ranks)

    def ask(self) -> None:
        """Ask all ranks to stop, by this one."""
        self._asked = True
        # A signal handler has no time for the other ranks, and a callback needs none: the main thread tells them.
        if threading.current_thread() is not threading.main_thread():
            self._flag.set()

    def is_asked(self) -> bool:
        """True if this rank was asked to stop, or knows that another rank was."""
        if self._asked:
            self._flag.set()
        else:
            self._asked = self._flag.is_set()
        return self._asked

    def look(self) -> None:
        """Raises Stopped if any rank was asked to stop."""
        if self.is_asked():
            raise Stopped

    def agree(self, asked: bool) -> None:
        """`asked`: whether any rank was, the same on all of them."""
        if asked:
            self._asked = True
            self.agreed = True

    def together(self, action: Callable[[], T]) -> T:
        """The result of what every rank does. Raises Stopped on every rank if it raised Stopped on one."""
        results: list[T] = []
        with suppress(Stopped):
            results.append(action())
        self.is_asked()  # tells the others, which may wait still
        if any(self._ranks.all(not results)):
            self.agree(True)
            raise Stopped
        return results[0]

    def wait(self, call: Callable[[], T]) -> T:
        """`together` for calls of a client that may wait: a stop ends the wait."""

        def watched() -> T:
            with looking(self.look):
                return call()

        return self.together(watched)
