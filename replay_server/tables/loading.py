"""Loading: fills a new buffer with the state of an older one, and makes it fit the configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from replay_server.errors import Refused
from replay_server.tables.buffer import Policy, ReplayBuffer
from replay_server.tables.items import Item

log = logging.getLogger("replay_server")


def load_policy(buffer: ReplayBuffer, policy: Policy) -> None:
    buffer.policy = policy
    for table in buffer.tables.values():
        table.set_policy_version(policy.version)


def load_items(buffer: ReplayBuffer, loaded: Mapping[int, Item], nbytes: int, unheld: Sequence[int]) -> None:
    """Restores items of `nbytes` in all, whose rows are in their tables already. Those without any row are deleted."""
    items = buffer.items
    items.update(loaded)
    items.bytes += nbytes
    items.hold(unheld)
    buffer.left(unheld)


def reconcile(buffer: ReplayBuffer) -> None:
    """Makes all that was loaded fit the configuration. What that costs is logged."""
    if buffer.admission is not None:
        buffer.admission.expire()
    for table in buffer.tables.values():
        size = table.size
        if lost := table.reconcile():
            log.warning("table %r: %d items are lost", table.name, lost)
        if evicted := size - table.size:
            log.warning("table %r: %d items evicted, for its bounds are lower now", table.name, evicted)
        table.drop_stale(buffer.policy.version)
    if why := buffer.items.why_full(0):
        tables = list(buffer.tables.values())
        try:
            buffer.items.check_room(0, tables)
            log.warning("%s: %d items evicted", why, buffer.items.make_room(tables))
        except Refused:
            log.warning("%s: 0 items evicted, for too few can be", why)
    buffer.items.freed = False
