"""FinishedGroups: copies of finished groups that lie on the server until a checkpoint contains the groups.

This class is for a trainer that keeps its queue in its own memory. The trainer writes each finished group to the
server, with the epoch and the uid of its prompt as tags. When a checkpoint is written, the groups that the checkpoint
before contains are deleted: the newest checkpoint may still be on its way to the disk. A trainer that resumes from a
checkpoint finds the groups beyond that checkpoint, and need not generate them.

Nobody draws from the table. So its inserts must not wait for draws, and sampling must not remove groups from it: a
queue is refused.
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
    """The keys of all groups of the run that lie on the server."""
    contained: dict[Place, int] = field(default_factory=dict, init=False)
    """The keys of the groups in `held` that the last checkpoint contains."""

    def __post_init__(self) -> None:
        super().__post_init__()
        config = json.loads(self.client.server_info(tables=[self.table]).tables[self.table].config)
        reason = _why_not_kept(config)
        if reason:
            raise ValueError(f"table {self.table!r} cannot keep finished groups until a checkpoint has them: {reason}")

    def store(self, place: Place, group: RolloutGroup) -> None:
        """Stores a group. Returns when the server has acknowledged it, or is away for the timeout."""
        epoch, uid = place
        tags: dict[str, str | int] = {"run": self.run, "epoch": epoch, "uid": uid}
        key = uuid.uuid4().int >> 65  # the same at each attempt, so that no group is stored twice
        try:
            stored = self.ask(self.client.insert, group, {self.table: 1.0}, key=key, tags=tags)
        except (StaleItemError, TableFullError):
            # A group that the table refuses is generated again after a kill.
            return
        if stored is not None:
            self.held[place] = key

    def find(self) -> None:
        """Looks up the groups that an earlier run has left.

        The newer of two groups of one prompt counts, and the older one is deleted. A prompt has two groups if the
        server was away when a run looked, so that the run generated the prompt again.
        """
        page: Any = ""
        older: list[int] = []
        while True:
            listed = self.ask(
                self.client.list_items,
                self.table,
                limit=1000,
                page=page,
                tags={"run": self.run},
                order_by="age",
                descending=True,
            )
            if listed is None:
                return
            for item in listed.items:  # the oldest come first
                place = (int(item.tags["epoch"]), str(item.tags["uid"]))
                if self.held.get(place, item.key) != item.key:
                    older.append(self.held[place])
                self.held[place] = item.key
            page = listed.next_page
            if not page:
                break
        if older:
            self.ask(self.client.delete, self.table, older)

    def get(self, place: Place) -> RolloutGroup | None:
        """The group of a place; None if there is none."""
        if place not in self.held:
            return None
        found = self.ask(self.client.get, [self.held[place]])
        if not found:
            return None
        return found[0].group

    def saved(self, epoch: int, uids: set[str]) -> None:
        """Notes that a checkpoint contains all epochs before `epoch`, and the prompts `uids` of `epoch`.

        SkyRL may still be writing that checkpoint. So the groups that are deleted now are those that the checkpoint
        before contains.
        """
        self.forget(dict(self.contained))
        for place, key in list(self.held.items()):
            epoch_of_group, uid = place
            if epoch_of_group < epoch or (epoch_of_group == epoch and uid in uids):
                self.contained[place] = key

    def forget(self, places: Mapping[Place, int]) -> None:
        """Deletes groups from the table. They stay noted if the server is away."""
        if not places:
            return
        deleted = self.ask(self.client.delete, self.table, list(places.values()))
        if deleted is None:
            return
        for place in places:
            self.held.pop(place, None)
            self.contained.pop(place, None)


def _why_not_kept(config: Mapping[str, Any]) -> str:
    """The reason why a table of this configuration loses groups that nobody draws, with the remedy; empty: it keeps
    them."""
    limiter = config["rate_limiter"]["type"]
    if limiter != "min_size":
        return f"its rate_limiter is {limiter!r}, under which inserts wait for draws; leave rate_limiter out"
    times = config["max_times_sampled"]
    if times:
        return f"its max_times_sampled is {times}, after which a group is gone; write 0"
    if config["when_full"] == "block":
        return "its when_full is 'block', under which inserts wait once it is full; leave when_full out"
    return ""
