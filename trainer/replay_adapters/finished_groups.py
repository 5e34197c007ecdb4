"""FinishedGroups: copies of finished groups that lie on the server until a checkpoint contains the groups.

For a trainer that keeps its queue in its own memory. It writes each group that is finished, with the epoch and the uid
of its prompt as tags. When a checkpoint is written, it deletes what the checkpoint before contains: the newest one may
still be on its way to the disk. Who resumes from a checkpoint finds the groups beyond it, and need not generate them.

Nobody draws from the table. So it must let groups in without waiting for a draw, and must not be one that others draw
groups out of: a queue is refused.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from replay_adapters.group_pool import GroupPool
from replay_client import RolloutGroup
from replay_client.errors import StaleItemError, TableFullError

Place = tuple[int, str]
"""The epoch and the uid of a group."""


@dataclass
class FinishedGroups(GroupPool):
    """The finished groups of one run that no checkpoint contains, on the server. `run`: the tag of the run.

    Raises ValueError for a table whose items leave it when they are sampled, or whose inserts wait for samples.
    """

    run: str = ""
    held: dict[Place, int] = field(default_factory=dict, init=False)
    """The keys of all that lie there."""
    contained: dict[Place, int] = field(default_factory=dict, init=False)
    """Those of them that the last checkpoint contains."""

    def __post_init__(self) -> None:
        super().__post_init__()
        config = json.loads(self.client.server_info(tables=[self.table]).tables[self.table].config)
        if why := _why_not_kept(config):
            raise ValueError(f"table {self.table!r} cannot keep finished groups until a checkpoint has them: {why}")

    def store(self, place: Place, group: RolloutGroup) -> None:
        """Stores a group. Returns when the server has acknowledged it, or is away for the timeout."""
        tags: dict[str, str | int] = {"run": self.run, "epoch": place[0], "uid": place[1]}
        key = uuid.uuid4().int >> 65  # the same at each attempt, so that no group is stored twice
        try:
            stored = self.ask(self.client.insert, group, {self.table: 1.0}, key=key, tags=tags)
        except (StaleItemError, TableFullError):  # as if it were not stored: it is generated again after a kill
            return
        if stored is not None:
            self.held[place] = key

    def find(self) -> None:
        """Looks up what a run before has left. Of two groups of one prompt the newer one counts; the older one goes.

        There are two where the server was away when a run looked, so that the run generated the prompt again.
        """
        page: Any = ""
        older: list[int] = []
        while True:
            of_run = {"tags": {"run": self.run}, "order_by": "age", "descending": True}
            if (listed := self.ask(self.client.list_items, self.table, limit=1000, page=page, **of_run)) is None:
                return
            for item in listed.items:  # the oldest come first
                place = int(item.tags["epoch"]), str(item.tags["uid"])
                if self.held.get(place, item.key) != item.key:
                    older.append(self.held[place])
                self.held[place] = item.key
            if not (page := listed.next_page):
                break
        if older:
            self.ask(self.client.delete, self.table, older)

    def get(self, place: Place) -> RolloutGroup | None:
        """The group of a place; None if there is none."""
        if place not in self.held:
            return None
        found = self.ask(self.client.get, [self.held[place]])
        return found[0].group if found else None

    def saved(self, epoch: int, uids: set[str]) -> None:
        """A checkpoint contains all earlier epochs, and these prompts of this one.

        SkyRL may still write it. So what goes now is what the checkpoint before contains.
        """
        self.forget(dict(self.contained))
        for (of, uid), key in list(self.held.items()):
            if of < epoch or (of == epoch and uid in uids):
                self.contained[of, uid] = key

    def forget(self, places: Mapping[Place, int]) -> None:
        """Deletes groups from the table. They stay noted if the server is away."""
        if places and self.ask(self.client.delete, self.table, list(places.values())) is not None:
            for place in places:
                self.held.pop(place, None)
                self.contained.pop(place, None)


def _why_not_kept(config: Mapping[str, Any]) -> str:
    """Why a table of this configuration does not keep what nobody draws, and the way out; empty: it does."""
    if (limiter := config["rate_limiter"]["type"]) != "min_size":
        return f"its rate_limiter is {limiter!r}, under which inserts wait for draws; leave rate_limiter out"
    if times := config["max_times_sampled"]:
        return f"its max_times_sampled is {times}, after which a group is gone; write 0"
    if config["when_full"] == "block":
        return "its when_full is 'block', under which inserts wait once it is full; leave when_full out"
    return ""
