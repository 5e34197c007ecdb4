"""PromptsOfTable: what a table says of the prompts in it, from which generators draw.

The page knows such a table by its items. Its mark says how far prompts are loaded, in a tag that every list has. Which
items are prompts, and what they are called, is known when their payloads were read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replay_dashboard.catalog import Snapshot
from replay_dashboard.facts import A_PROMPT, FactsStore
from replay_generator.stored_prompts import MARK_TAG

_MARK = re.compile(r"epoch (\d+), (\d+) of (\d+)\Z")


@dataclass
class PromptsOfTable:
    """The prompts of one table at the moment of a snapshot."""

    name: str
    loaded: str
    """How far they are loaded, as the mark says it; empty: a generator has drawn the mark."""
    prompts: Mapping[str, Mapping[str, float]]
    """The times that each was drawn before, and its priority, by its name."""

    @classmethod
    def of(cls, name: str, snapshot: Snapshot, facts: FactsStore) -> PromptsOfTable | None:
        """None: the table holds no prompts, as far as its items were read."""
        tags = [str(labels.tags.get(MARK_TAG, "")) for labels in snapshot.labels]
        marks = [found for found in map(_MARK.match, tags) if found]
        prompts: dict[str, dict[str, float]] = {}
        times, priorities = snapshot.columns["times_sampled"].tolist(), snapshot.columns["priority"].tolist()
        for slot, drawn, priority in zip(snapshot.slots(facts).tolist(), times, priorities, strict=True):
            if slot >= 0 and A_PROMPT in facts.rows[slot].flags:
                prompts[facts.rows[slot].prompt_id] = {"drawn": drawn, "priority": priority}
        if not (marks or prompts):
            return None
        # A curriculum has a mark of its beginning and one of its end.
        newest = max(marks, key=lambda found: (int(found[1]), int(found[2])), default=None)
        return cls(name, newest[0] if newest else "", prompts)

    def document(self) -> dict[str, Any]:
        return {"name": self.name, "loaded": self.loaded, "waiting": len(self.prompts)}
