"""Stopping: a trainer that is asked to stop ends after its step, or at once if it waits for groups. All ranks stop.

* A signal handler, a callback or another thread of any rank asks for the stop. This only sets a flag.
* All ranks agree on the stop in the exchange of `Publication.check`, between steps and before a version is published.
  So all ranks end after the same step.
* A rank that waits for groups checks every second (`replay_client.waits.looking`) whether any rank was asked. If a stop
  ends the wait of one rank, the step of all ranks ends: after the wait, and before any rank uses its groups, each rank
  tells the others whether a stop ended its wait.
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
    """`stop` was called: no further step begins, and a step that waits for its groups is given up, on every rank."""


class Stopping:
    """One rank's part in a stop. All ranks construct their objects together."""

    def __init__(self, ranks: Ranks) -> None:
        self.agreed = False
        """True once all ranks know that they stop."""
        self._ranks = ranks
        self._asked = False
        """True once this rank was asked to stop, or knows that another rank was."""
        self._flag = RankFlag(ranks)

    def ask(self) -> None:
        """Asks all ranks to stop. Any thread of any rank may call it."""
        self._asked = True
        # On the main thread, the caller may be a signal handler, which has no time to tell the other ranks. The next
        # call of `is_asked` tells them.
        if threading.current_thread() is not threading.main_thread():
            self._flag.set()

    def is_asked(self) -> bool:
        """True if any rank was asked to stop. Tells the other ranks if this rank was asked."""
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
        """Notes the result of an exchange between all ranks. `asked`: True if any rank was asked; the same value on all
        ranks."""
        if asked:
            self._asked = True
            self.agreed = True

    def together(self, action: Callable[[], T]) -> T:
        """The result of an action that every rank takes. Raises Stopped on every rank if the action did on one."""
        results: list[T] = []  # stays empty if a stop ends the action on this rank
        with suppress(Stopped):
            results.append(action())
        self.is_asked()  # tells the other ranks, which may still wait
        if any(self._ranks.all(not results)):
            self.agree(True)
            raise Stopped
        return results[0]

    def wait(self, call: Callable[[], T]) -> T:
        """Like `together`, for a call of a client that may wait. A stop ends the wait."""

        def watched() -> T:
            with looking(self.look):
                return call()

        return self.together(watched)
