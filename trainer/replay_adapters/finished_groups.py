"""FinishedGroups: copies of finished groups on the server, which stay there until a checkpoint contains the groups.

This class is for a trainer that keeps its queue in its own memory, such as SkyRL's. The trainer writes each finished
group to the server, with the epoch and the uid of its prompt as tags. When a checkpoint is written, the groups that the
previous checkpoint contains are deleted. The groups in the newest checkpoint stay, because that checkpoint may not be
on the disk yet. A trainer that resumes from a checkpoint finds the groups that were finished after it on the server,
and need not generate them again.

A table that is configured as a queue is refused, for two reasons. Its inserts wait for draws, but no program draws from
this table. And it removes groups after they are sampled, but these groups must stay.
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
"""The epoch of a group, and the uid of its prompt."""


@dataclass
class FinishedGroups(GroupPool):
    """The finished groups of one run on the server. `run`: the value of the tag "run" of these groups.

    Raises ValueError for a table that removes items after they are sampled, or whose inserts wait for samples.
    """

    run: str = ""
    held: dict[Place, int] = field(default_factory=dict, init=False)
    """Place of each group of the run that is on the server -> its key."""
    contained: dict[Place, int] = field(default_factory=dict, init=False)
    """Place of each group in `held` that the last checkpoint contains -> its key."""

    def __post_init__(self) -> None:
        """Checks the configuration of the table. Raises ValueError as the docstring of the class says."""
        super().__post_init__()
        config = json.loads(self.client.server_info(tables=[self.table]).tables[self.table].config)
        reason = _why_unsuitable(config)
        if reason:
            raise ValueError(f"table {self.table!r} cannot keep finished groups until a checkpoint has them: {reason}")

    def store(self, place: Place, group: RolloutGroup) -> None:
        """Stores a group. Returns when the server has confirmed or refused it, or was away for `timeout`."""
        epoch, uid = place
        tags: dict[str, str | int] = {"run": self.run, "epoch": epoch, "uid": uid}
        # A random key of 63 bits. All attempts use the same key, so that no group is stored twice.
        key = uuid.uuid4().int >> 65
        try:
            stored = self.ask(self.client.insert, group, {self.table: 1.0}, key=key, tags=tags)
        except (StaleItemError, TableFullError):
            return  # this does no harm, because a run that resumes generates the missing group again
        if stored is not None:
            self.held[place] = key

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
                place = (int(item.tags["epoch"]), str(item.tags["uid"]))
                # An item may be listed on two pages. It is still one group, so the keys are compared.
                has_older_group = self.held.get(place, item.key) != item.key
                if has_older_group:
                    older.append(self.held[place])
                self.held[place] = item.key
            page = listed.next_page
            if not page:
                break
        if older:
            self.ask(self.client.delete, self.table, older)

    def get(self, place: Place) -> RolloutGroup | None:
        """The group of a place; None if the server has no such group, or is away."""
        if place not in self.held:
            return None
        items = self.ask(self.client.get, [self.held[place]])
        if not items:
            return None
        return items[0].group

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

    def forget(self, keys: Mapping[Place, int]) -> None:
        """Deletes groups from the table. `keys`: place of each group -> its key.

        If the server is away, the groups stay in `held`, and a later call can delete them.
        """
        if not keys:
            return
        deleted = self.ask(self.client.delete, self.table, list(keys.values()))
        if deleted is None:  # the server is away
            return
        for place in keys:
            self.held.pop(place, None)
            self.contained.pop(place, None)


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
