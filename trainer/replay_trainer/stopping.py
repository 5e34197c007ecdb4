"""Stopping: a trainer that is asked to stop ends after its step, or at once where it waits for groups, on all ranks.

* A signal handler, a callback or another thread of any rank asks, and only sets a flag.
* All ranks agree on it in the exchange of `Publication.check`, between steps and before a version is published. So
  they end after the same step.
* A rank that waits looks every second (`replay_client.waits.looking`) if any rank was asked. If a stop ends the wait of
  one rank, the step of all ranks ends: they tell each other after the wait, before any of them uses its groups.
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
    """One rank's part in a stop. All ranks make theirs together."""

    def __init__(self, ranks: Ranks) -> None:
        self.agreed = False
        """True once all ranks know that they stop."""
        self._ranks = ranks
        self._asked = False
        self._flag = RankFlag(ranks)

    def ask(self) -> None:
        """Asks all ranks to stop. Any thread of any rank may call it."""
        self._asked = True
        # A signal handler has no time for the other ranks, and a callback needs none: the main thread tells them.
        if threading.current_thread() is not threading.main_thread():
            self._flag.set()

    def is_asked(self) -> bool:
        """True if this rank was asked, or knows that another one was."""
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
        """Notes the exchange of all ranks. `asked`: True if any rank was asked; the same on all ranks."""
        if asked:
            self._asked = True
            self.agreed = True

    def together(self, action: Callable[[], T]) -> T:
        """The result of an action that every rank takes. Raises Stopped on every rank if the action did on one."""
        results: list[T] = []
        with suppress(Stopped):
            results.append(action())
        self.is_asked()  # tells the other ranks, which may still wait
        if any(self._ranks.all(not results)):
            self.agree(True)
            raise Stopped
        return results[0]

    def wait(self, call: Callable[[], T]) -> T:
        """The result of a call of a client that may wait, as `together`: a stop ends the wait."""

        def watched() -> T:
            with looking(self.look):
                return call()

        return self.together(watched)
