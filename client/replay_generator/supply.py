"""Supplies: where a generator's next prompt comes from, and who is told what became of it.

Prompts of an iterable are the generator's own, and nobody is told (`IteratedPrompts`). Those of a table of prompts are
drawn under a lease, which ends with the group (`prompts_table.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy.typing as npt

from replay_client.records import Sample
from replay_client.waits import in_daemon_thread
from replay_generator.prompts import PromptSource


class PromptItem(NamedTuple):
    """A prompt in its table, as a generator has drawn it."""

    key: int
    priority: float
    epoch: int
    position: int


@dataclass(frozen=True)
class Drawn:
    """A prompt of which the generator is to make a group."""

    source: PromptSource
    closes: tuple[Sample, ...] = ()
    """Its item under a lease, which the insert of the group closes. Empty: it came from an iterable, or a group under
    construction has taken its place."""
    item: PromptItem | None = None
    """None: it came from an iterable."""


class PromptSupply:
    """Gives prompts one by one. Each ends with exactly one of `finished`, `returned` and `set_aside`.

    Where groups are under construction, such a group takes the place of its prompt when it is opened (`opened`). It may
    end at another generator than the one that drew the prompt.
    """

    ended = False
    """No prompt will come any more."""

    async def begin(self) -> None:
        """Finds out whether there can be prompts. Raises ReplayError that names the remedy."""

    async def next(self) -> Drawn | None:
        """The next prompt; None: there is none now. Then `ended` says whether to ask again."""
        raise NotImplementedError

    async def finished(self, drawn: Drawn, rewards: npt.ArrayLike | None, *, inserted: bool) -> None:
        """The prompt is done: its group was `inserted`, or is left out for good.

        `rewards` (G,) are those of the group; None: nobody knows them.
        """

    def opened(self, drawn: Drawn) -> None:
        """The insert of a group under construction has closed the prompt."""

    async def returned(self, drawn: Drawn, building: Sample | None = None) -> None:
        """The prompt is not done: somebody else may have it. It takes the place of `building`, if there is one."""

    async def set_aside(self, sample: Sample, why: Exception) -> None:
        """The item is taken out: nobody can make a group of it."""

    async def close(self) -> None:
        """Returns all prompts that are under way, if the server can be reached soon."""


class IteratedPrompts(PromptSupply):
    """The prompts of an iterable, in its order."""

    def __init__(self, prompts: Iterable[PromptSource]) -> None:
        self._prompts = iter(prompts)

    async def next(self) -> Drawn | None:
        # In a thread: the next prompt of a streamed data set may take its time.
        source = await in_daemon_thread(lambda: next(self._prompts, None))
        self.ended = source is None
        return None if source is None else Drawn(source)
