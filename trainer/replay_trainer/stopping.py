"""Stopping: a trainer that is asked to stop ends after its step, or at once if it waits for groups. All ranks stop.

* A signal handler, a callback or another thread of any rank asks for the stop. This only sets a flag.
* All ranks agree on the stop in the exchange of `Publication.check`, between steps and before a version is published.
  So all ranks end after the same step.
* A rank that waits for groups checks every second (`replay_client.waits.looking`) whether any rank was asked. After its
  wait, and before it uses its groups, each rank tells the others whether a stop ended its wait. So if a stop ended the
  wait of one rank, all ranks end the step.
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
    """Raised on every rank after a rank was asked to stop: no further step begins, and a step that waits for its groups
    is given up."""


class Stopping:
    """One rank's part in a stop. All ranks construct their objects together."""

    def __init__(self, ranks: Ranks) -> None:
        self.agreed = False
        """True once all ranks know that they stop."""
        self._ranks = ranks
        self._asked = False
        """True once this rank was asked to stop, or knows that another rank was."""
        self._flag = RankFlag(ranks)
        """Set once a rank has told the others that it was asked to stop."""

    def ask(self) -> None:
        """Asks all ranks to stop. Any thread of any rank may call it."""
        self._asked = True
        # On the main thread, the caller may be a signal handler, which has no time to tell the other ranks. In that
        # case, the next call of `is_asked` tells them.
        if threading.current_thread() is not threading.main_thread():
            self._flag.set()

    def is_asked(self) -> bool:
        """True if any rank was asked to stop. If this rank was asked, also tells the other ranks."""
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
        """Notes the result of an exchange between all ranks. `asked`: True if any rank was asked to stop. All ranks
        call this method with the same value."""
        if asked:
            self._asked = True
            self.agreed = True

    def together(self, action: Callable[[], T]) -> T:
        """Calls `action`, and returns this rank's result. All ranks call this method at the same point. If the action
        raises Stopped on any rank, this method raises Stopped on all ranks."""
        results: list[T] = []  # the result of the action; empty: a stop ended the action on this rank
        with suppress(Stopped):
            results.append(action())
        # The other ranks may still wait in their actions. If this rank was asked to stop, `is_asked` tells the other
        # ranks, which ends their waits.
        self.is_asked()
        was_stopped = not results
        if any(self._ranks.all(was_stopped)):
            self.agree(asked=True)
            raise Stopped
        return results[0]

    def wait(self, call: Callable[[], T]) -> T:
        """Like `together`, for a call of a ReplayClient that may wait. A stop of any rank ends the wait."""

        def watched() -> T:
            """The result of the call. Raises Stopped if a stop ends the call."""
            with looking(self.look):
                return call()

        return self.together(watched)
