"""FinishedGroups: copies of finished groups on the server, which stay there until a checkpoint contains the groups.

This class is for a trainer that keeps its queue in its own memory, such as SkyRL's or verl's. The trainer writes each
finished group to the server, with the place of its prompt as tags. A subclass says what a place is: EpochGroups for
SkyRL, and OccurrenceGroups for verl. A trainer that resumes from a checkpoint finds the later groups on the server, and
need not generate them again.

A table that is configured as a queue is refused, for two reasons. Its inserts wait for draws, but no program draws from
this table. And it removes groups after they are sampled, but these groups must stay.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from replay_adapters.group_pool import GroupPool
from replay_client import RolloutGroup
from replay_client.errors import StaleItemError, TableFullError

P = TypeVar("P", bound=Hashable)
"""The place of a group: what names its prompt in a run, however often the run starts again."""
Place = tuple[int, str]
"""The place of a group in SkyRL: its epoch, and the uid of its prompt."""
Tags = Mapping[str, str | int]


@dataclass
class FinishedGroups(GroupPool, Generic[P]):
    """The finished groups of one run on the server. `run`: the tag of the run.

    Raises ValueError for a table that removes items after they are sampled, or whose inserts wait for samples.
    """

    run: str = ""
    held: dict[P, int] = field(default_factory=dict, init=False)
    """By place, the keys of all groups of the run that are on the server."""

    def __post_init__(self) -> None:
        """Checks the configuration of the table. Raises ValueError as the docstring of the class says."""
        super().__post_init__()
        config = json.loads(self.client.server_info(tables=[self.table]).tables[self.table].config)
        reason = _why_unsuitable(config)
        if reason:
            raise ValueError(f"table {self.table!r} cannot keep finished groups until a checkpoint has them: {reason}")

    def tags_of(self, place: P) -> Tags:
        """The tags of a group at a place, beside the tag of the run."""
        raise NotImplementedError

    def place_of(self, tags: Tags) -> P:
        """The place that `tags_of` wrote into tags."""
        raise NotImplementedError

    def store(self, place: P, group: RolloutGroup) -> bool:
        """Stores a group. Returns when the server has confirmed or refused the group, or was away for `timeout`.

        True: the server has confirmed the group.
        """
        # A random key of 63 bits, the same for all attempts, so that no group is stored twice.
        key = uuid.uuid4().int >> 65
        tags = {"run": self.run, **self.tags_of(place)}
        try:
            stored = self.ask(self.client.insert, group, {self.table: 1.0}, key=key, tags=tags)
        except (StaleItemError, TableFullError):
            return False  # no harm: after a crash, a group that the table refused is generated again
        if stored is None:  # the server is away
            return False
        self.held[place] = key
        return True

    def find(self) -> None:
        """Looks up the groups that an earlier start of the run left on the server.

        If there are two groups of one place, keeps the newer group and deletes the older one. There are two groups if
        the server was away when an earlier start asked for the first group. The run then generated the group again, and
        stored the second.
        """
        page: Any = ""  # the first page
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
                # The server is away. The groups in `older` stay there until a later start finds them again.
                return
            for item in listed.items:  # the oldest item comes first
                place = self.place_of(item.tags)
                # False for an item that is listed on two pages: that is one group.
                has_older_group = self.held.get(place, item.key) != item.key
                if has_older_group:
                    older.append(self.held[place])
                self.held[place] = item.key
            page = listed.next_page
            if not page:
                break
        if older:
            self.ask(self.client.delete, self.table, older)

    def get(self, place: P) -> RolloutGroup | None:
        """The group of a place; None if the server has no such group, or is away."""
        if place not in self.held:
            return None
        items = self.ask(self.client.get, [self.held[place]])
        if not items:
            return None
        return items[0].group

    def forget(self, places: Mapping[P, int]) -> None:
        """Deletes groups from the table. If the server is away, they stay in `held`, and are deleted by a later
        call."""
        if not places:
            return
        deleted = self.ask(self.client.delete, self.table, list(places.values()))
        if deleted is None:  # the server is away
            return
        for place in places:
            self.held.pop(place, None)


@dataclass
class EpochGroups(FinishedGroups[Place]):
    """The finished groups of a trainer that goes through its prompts epoch by epoch, such as SkyRL's.

    When a checkpoint is written, the groups that the previous checkpoint contains are deleted. The groups in the newest
    checkpoint stay, because that checkpoint may not be on the disk yet.
    """

    contained: dict[Place, int] = field(default_factory=dict, init=False)
    """By place, the keys of the groups in `held` that the last checkpoint contains."""

    def tags_of(self, place: Place) -> Tags:
        epoch, uid = place
        return {"epoch": epoch, "uid": uid}

    def place_of(self, tags: Tags) -> Place:
        return int(tags["epoch"]), str(tags["uid"])

    def saved(self, epoch: int, uids: set[str]) -> None:
        """Notes that a checkpoint contains all epochs before `epoch`, and the prompts `uids` of `epoch`.

        The trainer may still be writing this checkpoint. So this method deletes only the groups that the previous
        checkpoint contains.
        """
        # `contained` still has the groups of the previous checkpoint. It is copied, because `forget` changes it.
        self.forget(dict(self.contained))
        for place, key in list(self.held.items()):
            epoch_of_group, uid = place
            if epoch_of_group < epoch or (epoch_of_group == epoch and uid in uids):
                self.contained[place] = key

    def forget(self, places: Mapping[Place, int]) -> None:
        """Deletes groups from the table: see `FinishedGroups.forget`."""
        super().forget(places)
        for place in list(self.contained):
            if place not in self.held:
                del self.contained[place]


def _why_unsuitable(config: Mapping[str, Any]) -> str:
    """The reason why a table of this configuration cannot keep finished groups, with the remedy; empty: it can."""
    limiter = config["rate_limiter"]["type"]
    if limiter != "min_size":
        return f"its rate_limiter is {limiter!r}, under which inserts wait for draws; leave rate_limiter out"
    max_times_sampled = config["max_times_sampled"]
    if max_times_sampled:  # 0: no limit
        return f"its max_times_sampled is {max_times_sampled}, after which a group is gone; write 0"
    if config["when_full"] == "block":
        return "its when_full is 'block', under which inserts wait once it is full; leave when_full out"
    return ""
