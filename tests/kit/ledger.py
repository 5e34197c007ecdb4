"""Ledger: what clients did to a server and were told about it; so, what must be there after a crash and what may be.

Each operation is certain (acknowledged) or unsure (the connection broke under it). After a restart `check` compares the
server with this, and what was unsure is settled by what is found.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from replay_client import ReplayClient
from replay_protos.replay_pb2 import TableInfo
from tests.kit.faults import Books
from tests.kit.groups import every_item

PLAIN_BATCH, AHEAD_BATCH = 3, 2
"""Items that a reader of "work", and one of "queue", gets at once."""
PERMITS = 4
"""That a writer gets at once."""


def payload_of(key: int) -> bytes:
    """Mostly small, now and then in several pieces; nothing for the keys that a writer chooses."""
    if key > 1 << 40:
        return b""
    rng = random.Random(key)
    size = rng.choice([0, 10, 400, 400, 5_000]) if rng.random() < 0.97 else 600_000
    return rng.randbytes(size)


@dataclass
class Consumed:
    """What a table is from which items leave by being sampled."""

    there: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    maybe_there: set[int] = field(default_factory=set)
    maybe_gone: set[int] = field(default_factory=set)
    """Given to somebody whose acknowledgement broke."""
    may_be_lost: int = 0
    """Items that may have left with an answer that never arrived."""
    untaken: set[int] = field(default_factory=set)
    """Items that may be in a batch whose reader went away before it took the batch: they come back with its lease."""


class Ledger(Books):
    def __init__(self, shards: int = 1) -> None:
        """Of several shards it does not count permits: a group goes elsewhere without one if its shard is away."""
        super().__init__()
        self.one_server = shards == 1
        self.tables = {"work": Consumed(), "queue": Consumed()}
        self.kept: dict[int, set[float]] = {}
        """Items that stay until they are deleted, with the priorities that they may have."""
        self.maybe_kept: dict[int, set[float]] = {}
        self.deleted: set[int] = set()
        self.maybe_deleted: set[int] = set()
        self.priorities: dict[int, float] = {}
        """Of the items of the queue: those above 0 go on to the pool."""
        self.delivered: set[int] = set()
        """Items that have certainly gone on to the pool."""
        self.version = self.maybe_version = 0
        self.running = [0, 0]
        """Least and most permits that are out."""
        self.accepted = [0, 0]
        self.counted = {name: [0, 0] for name in ("work", "queue", "pool", "keep")}
        """Least and most inserts."""

    # ------------------------------------------------------------------------------------------------ what happened

    def inserted(self, table: str, key: int, sure: bool, permit: bool = False) -> None:
        with self.lock:
            self.totals["inserts" if sure else "unsure inserts"] += 1
            self.counted[table][0] += sure
            self.counted[table][1] += 1
            if table == "keep":
                (self.kept if sure else self.maybe_kept)[key] = {1.0}
            else:
                state = self.tables[table]
                if key not in state.gone:
                    (state.there if sure else state.maybe_there).add(key)
            if permit:
                self.running[0] -= 1
                self.accepted[1] += 1
                if sure:
                    self.running[1] -= 1
                    self.accepted[0] += 1

    def consumed(self, table: str, keys: list[int], sure: bool = True) -> None:
        with self.lock:
            state = self.tables[table]
            self.totals["consumed" if sure else "unsure consumed"] += len(keys)
            for key in keys:
                if key in state.gone:
                    self.violated(f"{table}: {key} was consumed twice")
                if sure:
                    if self.priorities.get(key, 0) > 0:
                        self.delivered.add(key)
                    state.gone.add(key)
                    state.there.discard(key)
                    state.maybe_gone.discard(key)
                else:
                    state.maybe_gone.add(key)

    def updated(self, key: int, priority: float, sure: bool) -> None:
        with self.lock:
            self.totals["updates"] += sure
            for items in (self.kept, self.maybe_kept):
                if key in items:
                    items[key] = {priority} if sure else items[key] | {priority}

    def removed(self, key: int, sure: bool) -> None:
        with self.lock:
            self.totals["deletes"] += sure
            (self.deleted if sure else self.maybe_deleted).add(key)

    def permits(self, count: int, sure: bool) -> None:
        """Acquired (> 0) or released (< 0)."""
        with self.lock:
            self.totals["permits"] += sure
            if sure or count < 0:
                self.running[0] += count
            if sure or count > 0:
                self.running[1] += count

    def publish(self, client: ReplayClient) -> None:
        with self.lock:
            version = self.maybe_version = self.maybe_version + 1
        client.set_policy_version(version, weights=f"step-{version}")
        self.version = version

    def killed(self, victim: str) -> None:
        super().killed(victim)
        # Taken, and the answer that says so was under way: no more than one batch of each reader.
        self.tables["work"].may_be_lost, self.tables["queue"].may_be_lost = PLAIN_BATCH, AHEAD_BATCH
        # Granted, and the answer was under way: the lease ends with its time, and the client has another.
        self.running[1] += PERMITS

    # ------------------------------------------------------------------------------------------------ what is there

    def check(self, client: ReplayClient) -> None:
        """Compares, with nobody else at work."""
        if not self.one_server:
            self.publish(client)  # as a trainer does that goes on
        info = client.server_info()
        found = {name: self._items(client, name) for name in ("work", "queue", "pool", "keep")}
        for name, table in info.tables.items():
            least, most = self.counted[name]
            if name != "pool" and not least <= table.inserts <= most:
                self.violated(f"{name}: counted {table.inserts} inserts, not {least} to {most}")
            self.counted[name] = [table.inserts, table.inserts]
            left = table.consumed + table.deleted + table.evicted + table.stale
            if not len(found[name]) == table.size == table.inserts - left:
                self.violated(f"{name}: {len(found[name])} items, size {table.size}, {table.inserts} in, {left} out")
        for name in ("work", "queue"):
            self._check_consumed(name, set(found[name]), info.tables[name].reserved)
        self._check_kept(found["keep"])
        self._check_pool(set(found["pool"]), info.tables["pool"])
        if not self.version <= info.policy.version <= self.maybe_version:
            self.violated(f"policy version {info.policy.version}, {self.version} to {self.maybe_version} were set")
        elif info.policy.weights != f"step-{info.policy.version}":
            self.violated(f"weights {info.policy.weights} of policy version {info.policy.version}")
        self.version = self.maybe_version = info.policy.version
        assert info.admission is not None
        for what, seen, bounds in (
            ("running", info.admission.running, self.running),
            ("accepted", info.admission.accepted, self.accepted),
        ):
            if self.one_server and not bounds[0] <= seen <= bounds[1]:
                self.violated(f"{seen} permits {what}, not {bounds[0]} to {bounds[1]}")
            bounds[:] = [seen, seen]
        if info.damaged or info.commit_error:
            self.violated(f"{info.damaged} items damaged; {info.commit_error}")
        every = [key for keys in found.values() for key in keys]
        for item in client.get(random.sample(every, min(len(every), 100))):
            if bytes(item.payload) != payload_of(item.key):
                self.violated(f"{item.key} has the payload of another")

    def _items(self, client: ReplayClient, table: str) -> dict[int, float]:
        items = every_item(client, table)
        priorities = {item.key: item.priority for item in items}
        if len(priorities) < len(items):
            self.violated(f"{table}: {len(items) - len(priorities)} items are there twice")
        return priorities

    def _check_consumed(self, name: str, found: set[int], reserved: int) -> None:
        state = self.tables[name]
        state.maybe_there |= state.untaken
        if back := found & state.gone:
            self.violated(f"{name}: {len(back)} consumed items came back, for example {min(back)}")
        if strange := found - state.there - state.maybe_there:
            self.violated(f"{name}: {len(strange)} items that nobody put there, for example {min(strange)}")
        missing = state.there - found - state.maybe_gone
        if len(missing) > state.may_be_lost:
            self.violated(
                f"{name}: {len(missing)} acknowledged items are gone, at most {state.may_be_lost} can be lost"
            )
        self.totals["lost with an answer"] += len(missing)
        away = (state.there | state.maybe_there) - found
        state.untaken = away if reserved else set()
        state.gone |= away - state.untaken
        state.there, state.maybe_there, state.maybe_gone, state.may_be_lost = found, set(), set(), 0

    def _check_kept(self, found: dict[int, float]) -> None:
        must = self.kept.keys() - self.deleted - self.maybe_deleted
        if missing := must - found.keys():
            self.violated(f"keep: {len(missing)} acknowledged items are gone, for example {min(missing)}")
        if back := found.keys() & self.deleted:
            self.violated(f"keep: {len(back)} deleted items came back, for example {min(back)}")
        if strange := found.keys() - self.kept.keys() - self.maybe_kept.keys():
            self.violated(f"keep: {len(strange)} items that nobody put there")
        for key, priority in found.items():
            allowed = self.kept.get(key, self.maybe_kept.get(key, set()))
            if priority not in allowed:
                self.violated(f"keep: priority {priority} of {key}, not one of {allowed}")
        self.kept = {key: {priority} for key, priority in found.items()}
        self.maybe_kept, self.deleted, self.maybe_deleted = {}, set(), set()

    def _check_pool(self, found: set[int], table: TableInfo) -> None:
        passed_on = {key for key in self.tables["queue"].gone if self.priorities.get(key, 0) > 0}
        if strange := found - passed_on:
            self.violated(f"pool: {len(strange)} items that did not come from the queue, for example {min(strange)}")
        if not table.evicted and (missing := self.delivered - found):
            self.violated(f"pool: {len(missing)} items are missing, for example {min(missing)}")
