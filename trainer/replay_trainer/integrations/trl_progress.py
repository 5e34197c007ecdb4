"""Progress: which of the groups that TRL's AsyncGRPOTrainer took from its queue it has trained on.

taken from the queue ──▶ collated into a micro-batch ──▶ trained on
      place 1, 2, ...         ahead of training            everything up to a place is done

* TRL keeps the order of the queue: each micro-batch holds the samples that follow those of the one before.
* TRL drops samples that are too old or too long. They are done when a later sample is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from replay_client import Sample


@dataclass(frozen=True)
class _Group:
    sample: Sample
    skipped: int
    """Completions that are not handed out again."""
    before: int
    """The place before that of the first completion that is handed out."""
    last: int
    """The place of the last completion."""


class Progress:
    """Follows samples from the queue to the steps. One thread uses it: TRL's loop."""

    def __init__(self) -> None:
        self._last = 0
        """The place of the sample that was handed out last."""
        self._done = 0
        """All samples up to this place are trained on, or dropped."""
        self._groups: deque[_Group] = deque()
        self._places: dict[int, int] = {}
        """The place of each sample, by the id of its `input_ids`, which TRL passes on as they are."""
        self._collated: deque[int] = deque()
        """The last place of each micro-batch that is collated and not trained on."""
        self._skip: dict[int, int] = {}
        self._number = 0

    def watch(self, collator: Any) -> None:
        """From now on notes what TRL's collator puts into each micro-batch."""
        collate = collator.torch_call

        def noting(examples: list[Any]) -> Any:
            # One element: the rows of a micro-batch, one for each rank.
            samples = [sample for row in examples[0] for sample in row.samples]
            self._collated.append(max(self._places[id(sample["input_ids"])] for sample in samples))
            return collate(examples)

        collator.torch_call = noting

    def skip(self, begun: dict[int, int]) -> None:
        """`begun` of the checkpoint that the trainer goes on from: it has trained on these completions."""
        self._skip = begun

    def begin(self, sample: Sample) -> tuple[int, int]:
        """A number for a group that comes, and how many of its completions the trainer has trained on before."""
        self._number += 1
        return self._number, self._skip.pop(sample.info.key, 0)

    def hand_out(self, sample: Sample, skipped: int, rows: list[np.ndarray]) -> None:
        """The `input_ids` of the completions of a group, without the `skipped` first ones, go to TRL in this order."""
        before = self._last
        for input_ids in rows:
            self._last += 1
            self._places[id(input_ids)] = self._last
        self._groups.append(_Group(sample, skipped, before, self._last))

    def trained(self) -> None:
        """The oldest micro-batch that was collated is trained on."""
        self._done = self._collated.popleft()
        while self._groups and self._groups[0].last <= self._done:
            self._groups.popleft()
        self._places = {key: place for key, place in self._places.items() if place > self._done}

    @property
    def left(self) -> list[Sample]:
        """The groups of which some completions are not trained on."""
        return [group.sample for group in self._groups]

    @property
    def begun(self) -> list[tuple[int, int]]:
        """The keys of groups that are trained on in part, with the number of completions that are: the first ones."""
        counts = dict(self._skip)
        for group in self._groups:
            if count := group.skipped + max(0, self._done - group.before):
                counts[group.sample.info.key] = count
        return list(counts.items())
