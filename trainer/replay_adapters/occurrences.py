"""Occurrence: names the fetch of a prompt, so that a trainer that starts again fetches the prompt under the same name.

A trainer that resumes from a checkpoint goes on in its data set where the checkpoint was written. So it fetches the
same prompts again, in the same order. A fetch is therefore named by the index of the prompt in the data set, and by the
number of times that this index was fetched before, since a checkpoint:

    checkpoint 20 ── fetch 7 ── fetch 9 ── fetch 7 ── killed
                     7@20:0     9@20:0     7@20:1
    resumed at 20 ── fetch 7 ── fetch 9 ── fetch 7 ── fetch 4
                     7@20:0     9@20:0     7@20:1     4@20:0

A later run may have to resume from an older checkpoint, because the newest one was still being written. So a name
counts from each checkpoint from which the run may resume: 7@20:1,10:3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from replay_adapters.finished_groups import FinishedGroups, Tags

MAX_CHECKPOINTS = 4
"""The most checkpoints from which fetches are counted. If older checkpoints never get onto the disk, the oldest one is
dropped: a run that resumes from it finds no groups, and generates them again."""


@dataclass(frozen=True)
class Occurrence:
    """A fetch of a prompt."""

    index: str
    """The index of the prompt in the data set."""
    checkpoint: int
    """The step of the newest checkpoint before the fetch; 0: there was none."""
    count: int
    """The number of fetches of this index between `checkpoint` and this fetch."""
    earlier: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    """(checkpoint, count) for older checkpoints, the newer ones first."""

    def since(self, checkpoint: int) -> int | None:
        """The number of fetches of this index between `checkpoint` and this fetch; None: it was not counted."""
        counts = {self.checkpoint: self.count, **dict(self.earlier)}
        return counts.get(checkpoint)

    def __str__(self) -> str:
        counts = ((self.checkpoint, self.count), *self.earlier)
        return f"{self.index}@{','.join(f'{checkpoint}:{count}' for checkpoint, count in counts)}"

    @classmethod
    def parse(cls, text: str) -> Occurrence:
        """The occurrence that has this text. Raises ValueError for a text that no occurrence has."""
        index, at, rest = text.rpartition("@")
        pairs = [pair.partition(":") for pair in rest.split(",")]
        if not at or not all(left.isdecimal() and right.isdecimal() for left, _, right in pairs):
            raise ValueError(f"{text!r} does not name a fetch of a prompt: an index, '@', and counts as '20:0,10:3'")
        (checkpoint, count), *earlier = [(int(left), int(right)) for left, _, right in pairs]
        return cls(index, checkpoint, count, tuple(earlier))


class OccurrenceCounter:
    """Names the fetches of a run that began at `checkpoint`."""

    def __init__(self, checkpoint: int) -> None:
        self._fetches: dict[int, Counter[str]] = {checkpoint: Counter()}
        """By checkpoint, in the order of steps: how often each index was fetched since then."""

    @property
    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints from which fetches are counted, in their order."""
        return list(self._fetches)

    def next(self, index: str) -> Occurrence:
        """The name of a fetch of this index, which is counted."""
        newest, *older = [(checkpoint, self._fetches[checkpoint][index]) for checkpoint in reversed(self._fetches)]
        for fetches in self._fetches.values():
            fetches[index] += 1
        checkpoint, count = newest
        return Occurrence(index, checkpoint, count, tuple(older))

    def saved(self, checkpoint: int) -> None:
        """Counts from a new checkpoint too. Raises ValueError for a step that is not after that of the last one."""
        newest = self.checkpoints[-1]
        if checkpoint <= newest:
            raise ValueError(f"the checkpoint of step {checkpoint} was written after that of step {newest}")
        self._fetches[checkpoint] = Counter()
        if len(self._fetches) > MAX_CHECKPOINTS:
            del self._fetches[self.checkpoints[0]]
        assert len(self._fetches) <= MAX_CHECKPOINTS

    def forget_before(self, checkpoint: int) -> None:
        """Counts no longer from the checkpoints before this one."""
        for each in self.checkpoints:
            if each < checkpoint:
                del self._fetches[each]


@dataclass
class OccurrenceGroups(FinishedGroups[Occurrence]):
    """The finished groups of a run, by occurrence. Groups that were made with other settings are not found.

    Raises ValueError as FinishedGroups does.
    """

    settings: str = ""
    """A text that changes with the settings on which the groups of the run depend."""

    def tags_of(self, place: Occurrence) -> Tags:
        return {"occurrence": str(place), "settings": self.settings}

    def place_of(self, tags: Tags) -> Occurrence:
        occurrence = Occurrence.parse(str(tags["occurrence"]))
        if tags.get("settings") == self.settings:
            return occurrence
        # The name of no fetch, so that the group is deleted.
        return Occurrence(f"{tags.get('settings')}/{occurrence}", checkpoint=-1, count=0)


@dataclass(frozen=True)
class Fetch:
    """A fetch of a prompt, and the group that an earlier start of the run left for it."""

    occurrence: Occurrence
    key: int | None = None
    """The key of the group on the server; None: the group must be generated."""
    renamed: bool = False
    """True if the group has another name on the server, because the run resumed from an older checkpoint. It must be
    stored under the name of this fetch, so that a later start does not take it for another fetch."""


@dataclass
class Recovery:
    """What a run has on the server: finds the groups for its fetches, and lets go of those in a durable checkpoint.

    `checkpoint`: the step of the checkpoint from which the run resumed; 0: none. `restored`: by uid, the occurrences of
    the prompts that this checkpoint holds itself, because they were fetched, and not trained on, when it was written.

    A run that has just started lets go of all groups that belong to no fetch after `checkpoint`.
    """

    groups: OccurrenceGroups
    checkpoint: int
    restored: Mapping[str, Occurrence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._counter = OccurrenceCounter(self.checkpoint)
        self._waiting: dict[int, frozenset[Occurrence]] = {self.checkpoint: frozenset(self.restored.values())}
        """By checkpoint: the fetches that it holds itself, because they were not trained on when it was written."""
        self._found: dict[tuple[str, int], Occurrence] = {}
        """By index and number since `checkpoint`: the names of the groups that were found."""
        self.groups.find()
        useless: dict[Occurrence, int] = {}
        for place, key in self.groups.held.items():
            count = place.since(self.checkpoint)
            if count is not None:
                self._found[place.index, count] = place
            elif place not in self._waiting[self.checkpoint]:
                useless[place] = key
        self.groups.forget(useless)

    def next(self, uid: str, index: str) -> Fetch:
        """The fetch of a prompt, which is counted.

        A prompt that the checkpoint holds itself has its uid and its name from the run before, so it is not counted.
        """
        restored = self.restored.get(uid)
        if restored is not None:
            return Fetch(restored, self.groups.held.get(restored))
        occurrence = self._counter.next(index)
        count = occurrence.since(self.checkpoint)
        if count is None:  # the run has forgotten the checkpoint from which it resumed
            return Fetch(occurrence)
        found = self._found.pop((index, count), None)
        if found is None:
            return Fetch(occurrence)
        return Fetch(occurrence, self.groups.held.get(found), renamed=found != occurrence)

    def saved(self, checkpoint: int, waiting: Iterable[Occurrence], durable: int, last: bool = False) -> None:
        """Notes that a checkpoint was written, and lets go of the groups that an earlier one contains.

        `waiting`: the fetches that were not trained on. `durable`: the newest checkpoint that is known to be on the
        disk. `last`: this checkpoint ends the run, so that its own groups go as well if it is durable.
        """
        self._counter.saved(checkpoint)
        self._waiting[checkpoint] = frozenset(waiting)
        # Without `last`, a checkpoint is trusted only once the next one was written: the disk may not have it before.
        trusted = [each for each in self._counter.checkpoints if each <= durable and (last or each < checkpoint)]
        if not trusted:
            return
        newest = trusted[-1]
        self._counter.forget_before(newest)
        self._waiting = {step: names for step, names in self._waiting.items() if step in self._counter.checkpoints}
        self.groups.find()  # other processes have stored groups
        held = self._waiting[newest]
        contained = {place: key for place, key in self.groups.held.items() if place.checkpoint < newest}
        self.groups.forget({place: key for place, key in contained.items() if place not in held})
