"""Reference: what a ReplayBuffer must do, by brute force over lists.

It chooses nothing itself. It follows the log of what the buffer did (an item inserted, evicted, drawn, a wait ended),
checks that each step was right at that moment, and in the end that nobody waits who could go on.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from replay_server.errors import Code
from replay_server.tables.config import AdmissionConfig, TableConfig
from replay_server.tables.table import SampleBatch, SampleRequest
from tests.server.tables.reference_table import Hand, Insert, Item, RefTable, Retained, Row, Waiting, label_bytes


class Reference:
    def __init__(self, tables: list[TableConfig], admission: AdmissionConfig | None, max_bytes: int | None) -> None:
        self.tables = {config.name: RefTable(config) for config in tables}
        self.max_bytes = max_bytes or math.inf
        self.admission = admission
        self.now, self.version = 0.0, 0
        self.items: dict[int, Item] = {}
        self.seen: dict[int, set[str] | None] = {}
        """The tables of each key that was inserted; None: unknown since a restart."""
        self.arrived: dict[str, list[int]] = {}
        """The keys that entered last, by table: as long as nothing else happens, the remover chooses among them too."""
        self.hands: dict[int, Hand] = {}
        self.accepted = self.expired = self.admission_version = 0
        self.began = False
        self.leases: dict[int, list[float]] = {}  # [permits left, expires]
        self.acquiring: list[Waiting] = []
        self.states: list[tuple[str, int, int]] = []
        """Id, version and moment of each state that the trainer can go back to."""
        self.consumed = self.undone = 0
        self.entering: set[int] = set()
        """Keys that are not in all of their tables yet."""

    # --------------------------------------------------------------------------------------------- what may happen

    @property
    def bytes(self) -> int:
        return sum(item.cost for item in self.items.values())

    @property
    def capacity(self) -> int:
        config = self.admission
        bound = (config.max_staleness + self.admission_version + 1) * config.fresh_groups_per_step
        return bound - self.accepted - self.running

    @property
    def running(self) -> int:
        partial = sum(item.partial for item in self.items.values())
        return int(sum(left for left, _ in self.leases.values())) + partial

    @property
    def permit_tables(self) -> set[str]:
        """The tables of partial groups."""
        return set() if self.admission is None else {*self.admission.permit_tables}

    def holders(self, key: int) -> int:
        in_tables = sum(table.find(key) is not None for table in self.tables.values()) + self.retained_of(key)
        return in_tables + sum(row.key == key for hand in self.hands.values() for row in hand.rows)

    def retained_of(self, key: int) -> int:
        return sum(retained.row.key == key for table in self.tables.values() for retained in table.retained)

    @property
    def spare(self) -> int:
        """Bytes of the items that are only retained for a rollback."""
        return sum(item.cost for key, item in self.items.items() if 0 < self.retained_of(key) == self.holders(key))

    def is_undone(self, version: int) -> bool:
        return self.version < version <= self.undone

    def refusal(self, insert: Insert, tables: list[RefTable]) -> Code | None:
        """What the state says against an insert, the server's bound apart."""
        for table in tables:
            if table.stale(insert.policy_version, self.version) or self.is_undone(insert.policy_version):
                return Code.FAILED_PRECONDITION
            if table.config.when_full == "reject" and table.full(insert.cost):
                return Code.RESOURCE_EXHAUSTED
        return None

    def blocked(self, waiting: Waiting, before: int = 0) -> str:
        """Why an insert waits, `before` others having come in: a word of the reason; empty: it does not."""
        insert = waiting.what
        for table in waiting.tables:
            if not table.admits(before + 1):
                return "max_diff"
            if table.config.when_full == "block":
                if table.full(insert.cost):
                    many = len(table.rows) >= table.config.max_size
                    return f"{table.config.name}: inserting blocked: {'size' if many else ''}"
                if self.bytes - self.spare + insert.cost > self.max_bytes:
                    return "server"
        return ""

    def hopeless(self, insert: Insert, tables: list[RefTable]) -> bool:
        """Whether evicting everything that may be evicted for it would still leave no room in the server."""
        evicting = [table for table in tables if table.config.when_full == "evict"]
        free = sum(
            item.cost
            for key, item in self.items.items()
            if self.holders(key) - self.retained_of(key) == sum(table.find(key) is not None for table in evicting)
        )
        return self.bytes - free + insert.cost > self.max_bytes

    def reused(self, insert: Insert) -> bool:
        """Whether the key was inserted before, for other tables."""
        return self.seen.get(insert.key) not in (None, set(insert.priorities))

    def closable(self, insert: Insert) -> bool:
        """Whether readers have all batches that it closes."""
        return all(batch_id in self.hands for batch_id in insert.closes)

    # --------------------------------------------------------------------------------------------- operations

    def offer_insert(self, insert: Insert, deadline: float) -> Code | str | Waiting:
        tables = [self.tables[name] for name in insert.priorities]
        if insert.permits and self.permit_tables & insert.priorities.keys() and len(tables) > 1:
            return Code.INVALID_ARGUMENT
        if any(insert.cost > (table.config.max_bytes or self.max_bytes) for table in tables):
            return Code.OUT_OF_RANGE
        if insert.cost > self.max_bytes:
            return Code.OUT_OF_RANGE
        if self.reused(insert):
            return Code.INVALID_ARGUMENT
        if insert.key in self.seen:
            self._count(tables, "duplicates")
            return "duplicate"
        if not self.closable(insert):
            return Code.ABORTED
        if code := self.refusal(insert, tables):
            self._count_refusal(code, insert, tables)
            return code
        waiting = Waiting(insert, tables, deadline)
        for table in tables:
            table.inserting.append(waiting)
        return waiting

    def offer_sample(self, name: str, request: SampleRequest, deadline: float) -> Code | Waiting:
        table = self.tables[name]
        spi, min_size, low, high = table.limits()
        impossible = (
            not 1 <= request.min_samples <= request.num_samples
            or (request.distinct and request.min_samples > table.config.max_size)
            or request.min_samples > max(high, spi * min_size) - low
            or (not request.distinct and (request.scope or request.exclude or table.config.max_times_sampled))
        )
        if impossible:
            return Code.INVALID_ARGUMENT
        waiting = Waiting(request, [table], deadline)
        table.sampling.append(waiting)
        return waiting

    def acknowledge(self, batch_id: int, sent: bool, events: deque[Any]) -> bool:
        hand = self.hands[batch_id]
        table = hand.table
        if not sent and any(table.stale(row.version, self.version) or self.is_undone(row.version) for row in hand.rows):
            self.requeue(batch_id)
            return False
        permits = set()
        if self.admission is not None and table.config.name == self.admission.table:
            permits = {row.key for row in hand.rows if self.items[row.key].unused_permit}
            for row in hand.rows:
                self.items[row.key].unused_permit = False
        if table.config.name in self.permit_tables:
            for row in hand.rows:
                self.items[row.key].partial = False
        if hand.epoch == table.epoch:
            table.outstanding -= len(hand.rows)
            for row, consumed in zip(hand.rows, hand.consumed, strict=True):
                if consumed or row in table.rows:  # of one that is gone meanwhile nobody knows the tags
                    table.count_tags("sampled", row.key)
            if table.config.retain_consumed and self.states:
                for row, consumed in zip(hand.rows, hand.consumed, strict=True):
                    if consumed:
                        self.consumed += 1
                        table.retained.append(Retained(row, self.consumed, row.key in permits))
            if table.config.forward_to is not None:
                for row, priority in zip(hand.rows, hand.priorities, strict=True):
                    forwarded = self.items[row.key].forwarded
                    if table.config.name not in forwarded and priority > 0:
                        forwarded.add(table.config.name)
                        joined = self._forward(row, priority, self.tables[table.config.forward_to], events)
                        table.counts["forwarded" if joined else "forward_refused"] += 1
        del self.hands[batch_id]
        self._sweep()
        return True

    def _forward(self, row: Row, priority: float, target: RefTable, events: deque[Any]) -> bool:
        if target.find(row.key) is not None or self._lent_out(target, row.key):
            return True
        if target.stale(row.version, self.version):
            target.counts["stale_refused"] += 1
            return False
        if self.is_undone(row.version):
            target.counts["undone"] += 1
            return False
        if target.config.when_full != "evict" and target.full(row.item.cost):
            return False
        if row.item.cost > (target.config.max_bytes or math.inf):
            return False
        assert events.popleft() == ("insert", target.config.name, [row.key])
        self._check_evicted()
        target.retained = [retained for retained in target.retained if retained.row.key != row.key]
        self._add(target, row.key, priority, row.version, row.item)
        target.count_tags("generated", row.key)
        while events and events[0][0] == "evict":
            self._evict(events.popleft())
        self._check_evicted()
        return True

    def _lent_out(self, table: RefTable, key: int) -> bool:
        """Whether the item left with a batch that may still requeue it."""
        hands = [hand for hand in self.hands.values() if hand.table is table and hand.epoch == table.epoch]
        return any(
            row.key == key and consumed
            for hand in hands
            for row, consumed in zip(hand.rows, hand.consumed, strict=True)
        )

    def requeue(self, batch_id: int) -> None:
        hand = self.hands.pop(batch_id)
        table = hand.table
        if hand.epoch == table.epoch:
            self._undo(hand)
        self._drop_stale(table)
        self._drop_undone(table)
        self._sweep()

    def _undo(self, hand: Hand) -> None:
        table, n, consumed = hand.table, len(hand.rows), sum(hand.consumed)
        table.outstanding -= n
        table.samples -= n
        table.deletes -= consumed
        table.counts["samples"] -= n
        table.counts["consumed"] -= consumed
        table.scopes.get(hand.scope, set()).difference_update(row.key for row in hand.rows)
        for row, gone in zip(hand.rows, hand.consumed, strict=True):
            row.sampled -= 1
            if gone:
                table.rows.append(row)
        table.rows.sort(key=lambda row: row.order)

    def restart(self) -> None:
        """All clients are gone, and what they had in hand and in line with them."""
        for hand in self.hands.values():
            table = hand.table
            if hand.epoch == table.epoch:
                self._undo(hand)
        self.hands.clear()
        self.acquiring.clear()
        self.seen = dict.fromkeys(self.seen)
        for table in self.tables.values():
            table.inserting.clear()
            table.sampling.clear()
        self._sweep()

    def extend(self, key: int, names: set[str], segment: bytes) -> Code | str | list[str]:
        """ "" where the segment was appended, "missing", the names that are there already, or why it was refused."""
        there = [table for table in self.tables.values() if table.find(key) or self._lent_out(table, key)]
        if not there:
            return "missing"
        item = self.items[key]
        if present := item.columns & names:
            return sorted(present)
        growth = len(segment) + label_bytes(frozenset(names), ())
        if item.cost + growth > self.max_bytes:
            return Code.OUT_OF_RANGE
        for table in there:
            bound = table.config.max_bytes or math.inf
            if item.cost + growth > bound:
                return Code.OUT_OF_RANGE
            if table.find(key) and table.bytes + growth > bound:
                return Code.RESOURCE_EXHAUSTED
        if self.bytes - self.spare + growth > self.max_bytes:
            return Code.RESOURCE_EXHAUSTED
        item.payload += segment
        item.columns |= names
        for table in there:
            table.counts["extensions"] += table.find(key) is not None
        return ""

    def delete(self, name: str, keys: list[int]) -> list[int]:
        table = self.tables[name]
        missing = [key for key in dict.fromkeys(keys) if table.find(key) is None]
        gone = [row for row in table.rows if row.key in keys]
        table.drop(gone)
        table.counts["deleted"] += len(gone)
        self._sweep()
        return missing

    def reset(self, name: str) -> int:
        removed = 0
        for table in [self.tables[name]] if name else self.tables.values():
            removed += len(table.rows)
            table.clear()
        self._sweep()
        return removed

    def update_priorities(self, name: str, priorities: dict[int, float]) -> list[int]:
        table = self.tables[name]
        for key, priority in priorities.items():
            if (row := table.find(key)) is not None:
                row.priority = priority
        return [key for key in priorities if table.find(key) is None]

    def set_policy_version(self, version: int, rollback: bool, state: str = "") -> None:
        before, self.version = self.version, version
        if state and rollback:
            self._go_back(state, before)
        elif state:
            self._name_state(state)
        elif version < before:
            self.undone = 0
        for table in self.tables.values():
            self._drop_stale(table)
        self._sweep()
        if self.admission is not None:
            self.admission_version = version
            used = version * self.admission.fresh_groups_per_step
            began_here = version <= 1 and (self.accepted or self.running)
            if not rollback and not self.began and not began_here:
                self.accepted = max(self.accepted, used + sum(item.unused_permit for item in self.items.values()))
            self.began = True
            if rollback:
                self.accepted = used + sum(item.unused_permit for item in self.items.values())

    def _name_state(self, id: str) -> None:
        most = max(table.config.retain_consumed for table in self.tables.values())
        if not most or (self.states[-1:] and self.states[-1][0] == id):
            return
        self.states = [*self.states, (id, self.version, self.consumed)][-most:]
        for table in self.tables.values():
            if n := table.config.retain_consumed:
                table.retained = [retained for retained in table.retained if retained.number > self.states[-n:][0][2]]
        self._sweep()

    def _go_back(self, id: str, before: int) -> None:
        place = next(place for place, state in enumerate(self.states) if state[0] == id)
        moment = self.states[place][2]
        self.states, self.undone = self.states[: place + 1], max(self.undone, before)
        for table in self.tables.values():
            back = [retained for retained in table.retained if retained.number > moment]
            table.retained = [retained for retained in table.retained if retained.number <= moment]
            for retained in back:
                table.count_tags("sampled", retained.row.key, -1)
                retained.row.sampled = 0
                table.rows.append(retained.row)
                retained.row.item.unused_permit |= retained.permit
                for scope in table.scopes.values():
                    scope.discard(retained.row.key)
            table.rows.sort(key=lambda row: row.order)
            table.samples -= len(back)
            table.deletes -= len(back)
            table.counts.update(samples=-len(back), consumed=-len(back), restored=len(back))
            self._drop_undone(table)

    def expire_leases(self) -> None:
        for lease in [lease for lease, (_, expires) in self.leases.items() if expires <= self.now]:
            self.expired += int(self.leases.pop(lease)[0])

    # --------------------------------------------------------------------------------------------- the log

    def follow(self, events: deque[Any]) -> None:
        """Checks and repeats what the buffer did; afterwards nobody waits who could go on."""
        while events:
            same_item = events[0][0] == "insert" and events[0][2] in self.arrived.values()  # into its next table
            if events[0][0] not in ("evict", "discard") and not same_item:  # what is evicted may be kept, and goes then
                self._check_evicted()
            self.follow_one(events)
        self._check_evicted()
        for table in self.tables.values():
            for waiting in table.sampling[:1]:
                n = waiting.what.num_samples
                assert not table.drawable(waiting.what, n), f"{waiting} could be drawn and waits"
            for waiting in table.inserting[:1]:
                if all(other.inserting[0] is waiting for other in waiting.tables):
                    assert self.blocked(waiting), f"{waiting.what} could come in and waits"
        for waiting in self.next_to_acquire():
            assert waiting.what > self.capacity, f"{waiting.what} permits could be granted and wait"

    def next_to_acquire(self) -> list[Waiting]:
        """The first in line, and those behind others that ask for more than is usually free."""
        usual = (self.admission.max_staleness + 1) * self.admission.fresh_groups_per_step if self.admission else 0
        first = next((at for at, waiting in enumerate(self.acquiring) if waiting.what <= usual), len(self.acquiring))
        return self.acquiring[: first + 1]

    def follow_one(self, events: deque[Any]) -> None:
        event = events.popleft()
        match event[0]:
            case "evict":
                self._evict(event)
            case "discard":
                self._discard(*event[1:])
            case "insert":
                self._insert(*event[1:])
            case "draw":
                self._draw(*event[1:])
            case "close":
                for batch_id in event[1]:
                    self.acknowledge(batch_id, True, events)
            case "end":
                self._end(*event[1:])

    def _discard(self, needed: float, keys: list[int]) -> None:
        """Items that were only retained made room: the oldest, and no more than were needed."""
        sizes = {0, *(waiting.what.cost for table in self.tables.values() for waiting in table.inserting)}
        assert needed + self.max_bytes - self.bytes in sizes
        oldest = sorted(
            (retained.number, retained.row.key) for table in self.tables.values() for retained in table.retained
        )
        spare = list(dict.fromkeys(key for _, key in oldest if self.retained_of(key) == self.holders(key)))
        assert keys == spare[: len(keys)]
        assert sum(self.items[key].cost for key in keys[:-1]) < needed
        for table in self.tables.values():
            before = len(table.retained)
            table.retained = [retained for retained in table.retained if retained.row.key not in keys]
            table.counts["retained_discarded"] += before - len(table.retained)
        self._sweep()

    def _check_evicted(self) -> None:
        """After an insert, and after all that was evicted for it, the table is within its bounds."""
        for name in self.arrived:
            table = self.tables[name]
            assert table.config.when_full != "evict" or not table.full(), f"{name} holds more than it may"
        assert self.bytes <= self.max_bytes or not self.arrived or self.entering
        self.arrived = {}

    def _could_serve(self, table: RefTable, inserts: list[Insert]) -> bool:
        """Whether the first sample in line could be drawn once those of the new items are in that fit."""
        kept, count = list(table.rows), table.inserts
        while inserts and not table.full(inserts[0].cost):
            item = inserts[0].item()
            table.rows.append(Row(-len(inserts), 1.0, self.version, item, self.now, table.orders + 1))
            table.inserts += 1
            inserts = inserts[1:]
        request = table.sampling[0].what
        could = table.drawable(request, request.num_samples)
        table.rows, table.inserts = kept, count
        return could

    def _evict(self, event: Any) -> None:
        _, name, key = event
        table = self.tables[name]
        for_server = self.bytes > self.max_bytes and table.config.when_full == "evict" and name in self.arrived
        assert table.full() or for_server, f"{key} was evicted from {name} without need"
        row = table.find(key)
        assert row is not None
        ordered = table.ordered(table.rows, table.config.remover)
        if ordered is not None:
            assert row is ordered[0], f"{name} evicted {key}, not {ordered[0].key}"
        elif any(table.weight(other, table.config.remover) > 0 for other in table.rows):
            assert table.weight(row, table.config.remover) > 0
        else:
            assert row is table.rows[0]
        table.counts["evicted"] += 1
        table.counts["evicted_unsampled"] += row.sampled == 0
        table.counts["evicted_on_arrival"] += key in self.arrived.get(name, ())
        table.drop([row])
        self._sweep()

    def _insert(self, name: str, keys: list[int]) -> None:
        """Rows of one message enter a table; at the first of their tables all of them must admit all, now."""
        table = self.tables[name]
        rows = [next(w for w in table.inserting if w.what.key == key) for key in keys]
        tables = rows[0].tables
        if keys[0] not in self.items:
            insert, sizes = rows[0].what, [waiting.what.cost for waiting in rows]
            assert self.bytes + sum(sizes) <= self.max_bytes or not self.hopeless(insert, tables)
            inserts = [waiting.what for waiting in rows]
            for other in tables:
                evicts = len(rows) > 1 and other.full(*sizes)
                assert not (evicts and other.sampling and self._could_serve(other, inserts)), (
                    f"{other.config.name} evicts what a sample that waits would have got"
                )
                assert other.inserting[: len(rows)] == rows, f"{keys} came before their turn"
            for place, waiting in enumerate(rows):
                insert = waiting.what
                assert insert.key not in self.seen, f"{insert.key} came in twice"
                assert not self.blocked(waiting, place), f"{keys} came in in spite of {self.blocked(waiting, place)}"
                assert self.refusal(insert, tables) is None
                assert self.closable(insert)
                self.items[insert.key] = insert.item()
                self.seen[insert.key] = set(insert.priorities)
                self.entering.add(insert.key)
            for waiting in rows:
                self._use_permit(waiting.what)
        for waiting in rows:
            insert = waiting.what
            table.count_generated(insert.key)
            self._add(table, insert.key, insert.priorities[name], insert.policy_version, self.items[insert.key])
            if table is tables[-1]:
                waiting.served = True
                self.entering.remove(insert.key)
                self._leave_lines(waiting)

    def _use_permit(self, insert: Insert) -> None:
        closed = (row.item for batch_id in insert.closes for row in self.hands[batch_id].rows)
        built = any(item.partial for item in closed)
        if not (insert.permits or built) or self.admission is None:
            return
        if self.admission.table in insert.priorities:
            self.items[insert.key].unused_permit = True
            self.accepted += 1
        self.items[insert.key].partial = insert.priorities.keys() <= self.permit_tables
        if lease := self.leases.get(insert.permits):
            self._use(insert.permits, lease, 1)

    def _add(self, table: RefTable, key: int, priority: float, version: int, item: Item) -> None:
        assert not table.full(item.cost) or table.config.when_full == "evict", (
            f"{table.config.name} took more than fits"
        )
        table.orders += 1
        table.rows.append(Row(key, priority, version, item, self.now, table.orders))
        table.inserts += 1
        table.counts["inserts"] += 1
        self.arrived.setdefault(table.config.name, []).append(key)

    def _draw(self, name: str, request: SampleRequest, batch: SampleBatch) -> None:
        table = self.tables[name]
        waiting = table.sampling[0]
        n = len(batch)
        assert waiting.what is request, "a sample came before its turn"
        timed_out = waiting.deadline <= self.now and n == table.most(request) >= request.min_samples
        assert (n == request.num_samples and table.drawable(request, n)) or timed_out
        candidates = table.candidates(request)
        rows = [table.find(key) for key in batch.keys.tolist()]
        assert all(row in candidates for row in rows)
        if request.distinct:
            assert len(set(rows)) == n
        for index, row in enumerate(rows):
            probability, alike = table.drawn_first(row, candidates)
            if (ordered := table.ordered(alike, table.config.sampler)) is None:
                total = sum(table.weight(other, table.config.sampler) for other in alike)
                probability *= table.weight(row, table.config.sampler) / total
            else:
                place = sum(other in alike for other in rows[:index]) if request.distinct else 0
                assert row is ordered[place]
                probability *= place == 0
            assert math.isclose(batch.probabilities[index], probability, rel_tol=1e-9), (
                f"row {index} of {name}: probability {batch.probabilities[index]}, not {probability}"
            )
            row.sampled += 1
        limit = table.config.max_times_sampled
        consumed = [bool(limit) and row.sampled >= limit for row in rows]
        assert batch.keys.tolist() == [row.key for row in rows]
        assert batch.priorities.tolist() == [row.priority for row in rows]
        assert batch.policy_versions.tolist() == [row.version for row in rows]
        assert batch.inserted_at.tolist() == [row.inserted_at for row in rows]
        assert batch.times_sampled.tolist() == [row.sampled for row in rows]
        assert batch.sizes.tolist() == [row.nbytes for row in rows]
        assert batch.consumed.tolist() == consumed
        assert batch.table_size == len(table.rows)
        if request.scope:
            table.scopes.setdefault(request.scope, set()).update(row.key for row in rows)
        table.rows = [row for row in table.rows if row not in rows or not consumed[rows.index(row)]]
        table.samples += n
        table.deletes += sum(consumed)
        table.counts["samples"] += n
        table.counts["consumed"] += sum(consumed)
        table.outstanding += n
        waiting.served = Hand(table, rows, [row.priority for row in rows], consumed, request.scope, table.epoch)
        self._leave_lines(waiting)
        self.hands[id(batch)] = waiting.served

    def _end(self, waiting: Waiting, code: Code | None, value: Any) -> None:
        """A wait ended: `value` is the id and batch of a sample, or the lease of permits."""
        first = waiting.deadline <= self.now
        match waiting.what:
            case Insert() as insert:
                if code is Code.DEADLINE_EXCEEDED:
                    assert first
                elif code is not None:
                    full = self.bytes + insert.cost > self.max_bytes and self.hopeless(insert, waiting.tables)
                    too_large = any(insert.cost > (table.config.max_bytes or math.inf) for table in waiting.tables)
                    assert (
                        code is self.refusal(insert, waiting.tables)
                        or (code is Code.ABORTED and not self.closable(insert))
                        or (code is Code.RESOURCE_EXHAUSTED and full)
                        or (code is Code.INVALID_ARGUMENT and self.reused(insert))
                        or (code is Code.OUT_OF_RANGE and too_large)  # since the table was changed
                    )
                    self._count_refusal(code, insert, waiting.tables)
                elif not waiting.served:
                    assert insert.key in self.seen, f"{insert.key} was acknowledged and is not there"
                    self._count(waiting.tables, "duplicates")
            case SampleRequest() as request:
                if code is None:
                    self.hands[value[0]] = self.hands.pop(id(value[1]))
                elif code is Code.INVALID_ARGUMENT:
                    assert waiting.tables[0].never(request), f"{request} could still be drawn one day"
                else:
                    assert code is Code.DEADLINE_EXCEEDED
                    assert first
                    (table,) = waiting.tables
                    assert table.sampling[0] is not waiting or table.most(request) < request.min_samples
            case count:
                if code is None:
                    assert waiting in self.next_to_acquire()
                    assert count <= self.capacity
                    self.leases[value.id] = [count, value.expires]
                else:
                    assert first
                self.acquiring.remove(waiting)
        self._leave_lines(waiting)

    # --------------------------------------------------------------------------------------------- small steps

    def abandon(self, waiting: Waiting) -> None:
        self._leave_lines(waiting)
        if waiting in self.acquiring:
            self.acquiring.remove(waiting)

    def release(self, lease_id: int, count: int) -> int:
        if (lease := self.leases.get(lease_id)) is None:
            return 0
        released = count or int(lease[0])
        self._use(lease_id, lease, released)
        return released

    def _use(self, lease_id: int, lease: list[float], count: int) -> None:
        lease[0] -= count
        if not lease[0]:
            del self.leases[lease_id]

    def _leave_lines(self, waiting: Waiting) -> None:
        for table in waiting.tables:
            for line in (table.inserting, table.sampling):
                if waiting in line:
                    line.remove(waiting)

    def _count(self, tables: list[RefTable], name: str) -> None:
        for table in tables:
            table.counts[name] += 1

    def _count_refusal(self, code: Code, insert: Insert, tables: list[RefTable]) -> None:
        if code is Code.FAILED_PRECONDITION and self.is_undone(insert.policy_version):
            tables[0].counts["undone"] += 1
        elif code is Code.FAILED_PRECONDITION:
            stale = next(table for table in tables if table.stale(insert.policy_version, self.version))
            stale.counts["stale_refused"] += 1
            stale.count_generated(insert.key)
            stale.count_tags("stale", insert.key)

    def _drop_stale(self, table: RefTable) -> None:
        gone = [row for row in table.rows if table.stale(row.version, self.version)]
        table.drop(gone, owed=True)
        table.counts["stale"] += len(gone)
        for row in gone:
            if not row.sampled:
                table.count_tags("stale", row.key)

    def _drop_undone(self, table: RefTable) -> None:
        gone = [row for row in table.rows if self.is_undone(row.version)]
        table.drop(gone, owed=True)
        table.counts["undone"] += len(gone)

    def drop_used_up(self, table: RefTable) -> None:
        """After max_times_sampled was lowered."""
        limit = table.config.max_times_sampled
        used_up = [row for row in table.rows if limit and row.sampled >= limit]
        table.drop(used_up)
        table.counts["consumed"] += len(used_up)
        self._sweep()

    def drop_stale(self, table: RefTable) -> None:
        self._drop_stale(table)
        self._sweep()

    def _sweep(self) -> None:
        for key in [key for key in self.items if key not in self.entering and not self.holders(key)]:
            if self.items.pop(key).unused_permit:
                self.accepted -= 1
