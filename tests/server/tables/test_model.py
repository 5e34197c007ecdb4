"""ReplayBuffer against the reference: any operations in any order, on any configuration.

REPLAY_MODEL_EXAMPLES=2000 looks longer than a run of all tests does.
"""

import math
import os
import warnings
from collections import Counter, deque
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replay_protos.labels import NO_LABELS
from replay_protos.words import counted
from replay_server.errors import Code, Refused
from replay_server.rpc import info
from replay_server.storage.memory import read_payloads
from replay_server.tables.config import AdmissionConfig, TableConfig
from replay_server.tables.extensions.admission import Admission, PendingPermits
from replay_server.tables.extensions.extension import PolicyChange
from replay_server.tables.extensions.history import History
from replay_server.tables.table import InsertBatch, SampleRequest
from tests.kit.tables import replay_buffer, slots_of
from tests.server.tables.reference import Reference
from tests.server.tables.reference_table import Insert, RefTable, Waiting, labels_for, lengths_for
from tests.server.tables.strategies import forwards, limits, names, picks, priorities, tables, timeouts

EXAMPLES = os.environ.get("REPLAY_MODEL_EXAMPLES")
STEPS = 60
ROWS_PER_SLICE = 1
"""A change of two rows clears them away later, in two slices. Other operations come in between."""

# Odd configurations are the point here; what warns of them is tested elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def everything_of(buffer):
    """All that an operation could change."""
    tables = [
        (
            *(table.state_dict(), table.bytes, table.outstanding, table.columns.state.tolist()),
            *(table.columns.times_sampled.tolist(), table.columns.priority.tolist()),
            *(dict(table.columns.reserved), dict(table.columns.retained)),
            {scope: set(table.scopes.keys_under(scope)) for scope in table.scopes},
        )
        for table in buffer.tables.values()
    ]
    lines = [(list(each.inserts), list(each.samples)) for each in buffer.lines.values()]
    extensions = [(each.state_dict(0.0), set(each.marked)) for each in buffer.extensions]
    items = {key: replace(item) for key, item in buffer.items.items()}
    return tables, lines, extensions, items, buffer.items.bytes, len(buffer.items.leaving), vars(buffer.policy)


def columns_of(rows: list[Insert]) -> InsertBatch:
    return InsertBatch(
        [row.key for row in rows],
        {name: np.array([row.priorities[name] for row in rows]) for name in rows[0].priorities},
        np.array([row.policy_version for row in rows]),
        np.array([row.nbytes for row in rows]),
        [(b"x" * row.nbytes,) for row in rows],
        rows[0].permits,
        [labels_for(row.key) for row in rows],
        rows[0].closes,
        completions=[lengths_for(row.key)[0] for row in rows],
        completion_tokens=[lengths_for(row.key)[1] for row in rows],
    )


class ModelMachine(RuleBasedStateMachine):
    @initialize(
        configs=st.tuples(tables, tables, tables),
        forwards=forwards,
        max_bytes=st.sampled_from([None, None, 800, 1600]),
        admission=st.sampled_from([None, (2, 1, None), (3, 0, None), (2, 1, "c"), (3, 0, "bc")]),
    )
    def start(self, configs, forwards, max_bytes, admission):
        tables = [
            TableConfig(name=name, forward_to=forwards.get(name), **config)
            for name, config in zip("abc", configs, strict=True)
        ]
        groups = admission and AdmissionConfig(
            table="a",
            fresh_groups_per_step=admission[0],
            max_staleness=admission[1],
            permit_ttl=5.0,
            permit_tables=admission[2] and [*admission[2]],
        )
        self.now = 0.0
        self.log: deque[tuple] = deque()
        self.buffer = self.make_buffer(tables, groups, max_bytes)
        self.model = Reference(tables, groups, max_bytes)
        self.pendings: dict[Waiting, object] = {}
        self.hands: list[int] = []
        self.leases: list[int] = [77]  # an unknown one
        self.next_key = self.segments = 0
        self.named = 0
        self.listen_to_all()

    def listen_to_all(self):
        self.admission, self.history = Admission.of(self.buffer), History.of(self.buffer)
        for table in self.buffer.tables.values():
            self.listen(table)
        history = self.history
        free = history.free

        def logged_free(needed):
            before = list(dict.fromkeys(key for _, key in history.rows))
            at = len(self.log)
            found = free(needed)
            gone = [key for key in before if not history.spares(key)]
            if gone:
                self.log.insert(at, ("discard", needed, gone))  # before what came of it: permits were granted
            return found

        self.buffer.items.frees = tuple(logged_free if each == free else each for each in self.buffer.items.frees)
        self.listen_to_closing()

    def make_buffer(self, tables, admission, max_bytes):
        return replay_buffer(
            tables, lambda: self.now, admission=admission, max_bytes=max_bytes, rows_per_slice=ROWS_PER_SLICE
        )

    def listen(self, table):
        """Logs what the table does, in the order in which it does it."""
        insert, evict, draw = table.insert, table.evict, table.draw

        def logged_insert(batch, priorities):
            self.log.append(("insert", table.name, list(batch.keys)))
            insert(batch, priorities)

        def logged_evict(n=1):
            columns, ranks = table.columns, {}
            for key, slot in slots_of(columns).items():
                age, priority = int(columns.order[slot]), float(columns.priority[slot])
                ranks[key] = {"lifo": (-age,), "min_heap": (priority, age), "max_heap": (-priority, age)}.get(
                    table.config.remover.type, (age,)
                )
            at = len(self.log)
            evict(n)
            gone = sorted(ranks.keys() - slots_of(columns), key=ranks.__getitem__)
            assert len(gone) == n
            for place, key in enumerate(gone, at):
                self.log.insert(place, ("evict", table.name, key))  # before what came of it: permits were granted

        def logged_draw(request, n):
            batch = draw(request, n)
            self.log.append(("draw", table.name, request, batch))
            return batch

        table.insert, table.evict, table.draw = logged_insert, logged_evict, logged_draw

    def listen_to_closing(self):
        close = self.buffer.outstanding.close

        def logged_close(batch_ids):
            self.log.append(("close", batch_ids))
            self.hands = [batch_id for batch_id in self.hands if batch_id not in batch_ids]
            return close(batch_ids)

        self.buffer.outstanding.close = logged_close

    def refused(self, operation, *args):
        """The result of an operation, or the code with which it was refused."""
        try:
            return operation(*args), None
        except Refused as refusal:
            return None, refusal.code

    def ended(self, waiting, pending):
        value, code = self.refused(pending.result)
        self.log.append(("end", waiting, code, value))
        self.pendings.pop(waiting, None)
        if code is None and isinstance(waiting.what, SampleRequest):
            self.hands.append(value[0])
        elif code is None and isinstance(waiting.what, int):
            self.leases.append(value.id)

    def settle(self, waiting, pending):
        """What an operation that may wait came to, so far."""
        if pending.done:
            self.ended(waiting, pending)
        else:
            self.pendings[waiting] = pending
            pending.on_done = partial(self.ended, waiting, pending)
        self.follow()

    def follow(self):
        self.model.follow(self.log)

    # ------------------------------------------------------------------------------------------------ rules

    @rule(
        n=st.sampled_from([1, 1, 1, 2, 4]),
        tables=st.sets(names, min_size=1, max_size=2),
        priority=priorities,
        lag=st.sampled_from([0, 0, 0, 1, 2, 3]),
        nbytes=st.sampled_from([0, 5, 10, 10, 15, 30]),
        wait=timeouts,
        retry=st.sampled_from([0, 0, 0, 0, 1, 2, 5]),
        permit=st.one_of(st.just(-1), picks),
    )
    def insert(self, n, tables, priority, lag, nbytes, wait, retry, permit, closes=()):
        lease = self.leases[permit % len(self.leases)] if permit >= 0 else 0
        rows = []
        for index in range(n):
            self.next_key += 1
            key = max(1, self.next_key - (0 if index else retry))
            each = {name: priority + place + index for place, name in enumerate(sorted(tables))}
            rows.append(
                Insert(key, each, max(0, self.model.version - lag), nbytes, lease, labels_for(key).columns, closes)
            )
        deadline = self.now + wait
        while rows:  # as the service does it: those that may, enter at once; the first that may not waits
            result, code = self.refused(self.buffer.insert, columns_of(rows), deadline)
            taken, pending = result or (1, None)
            offers = [self.model.offer_insert(row, deadline) for row in rows[: max(1, taken)]]
            if pending is not None:
                assert taken == 0
                self.settle(offers[0], pending)
                return
            for offer in offers:
                if isinstance(offer, Waiting):
                    self.log.append(("end", offer, code, None))
                else:
                    assert len(offers) == 1
                    assert code == (None if offer == "duplicate" else offer)
            self.follow()
            rows = rows[taken:]

    @rule(
        key=st.integers(1, 30),
        names=st.sets(st.sampled_from(["teacher", "images", "values"]), min_size=1, max_size=2),
        nbytes=st.sampled_from([0, 3, 7, 20]),
    )
    def extend(self, key, names, nbytes):
        self.segments += 1
        segment = bytes([65 + self.segments % 26]) * nbytes
        expected = self.model.extend(key, names, segment)
        result, code = self.refused(self.buffer.extend, key, names, (segment[:2], segment[2:]))
        if code is None:
            assert expected == ("missing" if result is None else list(result) or "")
        else:
            assert code is expected
        self.follow()

    @rule(table=names, n=st.integers(1, 3))
    def extend_the_first(self, table, n):
        """Without it few rows that wait get all columns."""
        for row in self.model.tables[table].waiting()[:n]:
            self.extend(row.key, set(self.model.tables[table].lacks(row)), 3)

    # Without the next three few sequences have a batch in hand when something happens to its rows.

    @rule(table=names, n=st.integers(1, 4), lag=st.sampled_from([0, 0, 1]), permit=st.booleans())
    def fill(self, table, n, lag, permit):
        self.insert(n, {table}, 1.0, lag, 5, 0.0, 0, len(self.leases) - 1 if permit else -1)

    @rule(table=names, n=st.sampled_from([1, 1, 2]))
    def draw(self, table, n):
        self.sample(table, n, 0, True, "", frozenset(), 0.0)

    @rule(
        table=names,
        n=st.integers(1, 3),
        permit=st.booleans(),
        published=st.integers(0, 3),
        emptied=st.sampled_from([False, False, True]),
        taken=st.booleans(),
    )
    def hold(self, table, n, permit, published, emptied, taken):
        """Something happens to the rows of a batch before its reader acknowledges it or requeues it."""
        hands = len(self.hands)
        self.fill(table, n, 0, permit)
        self.draw(table, n)
        for _ in range(published):
            self.set_policy_version(1)
        self.reset(table, emptied)
        if len(self.hands) > hands:
            self.acknowledge(hands, False) if taken else self.requeue(hands)

    @rule(
        table=names,
        n=st.sampled_from([1, 1, 2, 3, 5]),
        fewer=st.sampled_from([0, 0, 1, 2]),
        distinct=st.sampled_from([True, True, True, False]),
        scope=st.sampled_from(["", "", "s", "t"]),
        exclude=st.frozensets(st.integers(1, 30), max_size=3),
        wait=timeouts,
    )
    def sample(self, table, n, fewer, distinct, scope, exclude, wait):
        if not distinct:
            scope, exclude = "", frozenset()
        request = SampleRequest(n, n - fewer, distinct, scope, exclude)
        expected = self.model.offer_sample(table, request, self.now + wait)
        pending, code = self.refused(self.buffer.sample, table, request, self.now + wait)
        if isinstance(expected, Waiting):
            assert code is None
            self.settle(expected, pending)
        else:
            assert code is expected

    @precondition(lambda self: self.hands)
    @rule(pick=picks, sent=st.booleans())
    def acknowledge(self, pick, sent):
        batch_id = self.hands.pop(pick % len(self.hands))
        taken = self.buffer.acknowledge(batch_id, sent=sent)
        assert taken == self.model.acknowledge(batch_id, sent, self.log)
        self.follow()

    @precondition(lambda self: self.hands)
    @rule(pick=picks)
    def requeue(self, pick):
        batch_id = self.hands.pop(pick % len(self.hands))
        self.buffer.requeue(batch_id)
        self.model.requeue(batch_id)
        self.follow()

    @precondition(lambda self: self.hands)
    @rule(
        tables=st.sets(names, min_size=1, max_size=2),
        picked=st.lists(picks, min_size=1, max_size=2),
        ended=st.sampled_from([False, False, False, True]),
        nbytes=st.sampled_from([0, 5, 15]),
        wait=timeouts,
        retry=st.sampled_from([0, 0, 0, 1]),
    )
    def close(self, tables, picked, ended, nbytes, wait, retry):
        """A reader inserts what it has made of batches in their place. It may have lost one of them meanwhile."""
        closes = tuple({self.hands[pick % len(self.hands)]: None for pick in picked})
        if ended:
            self.requeue(self.hands.index(closes[0]))
        self.insert(1, tables, 1.0, 0, nbytes, wait, retry, -1, closes)

    @precondition(lambda self: self.model.permit_tables)
    @rule(
        table=names, extended=st.booleans(), ends=st.sampled_from(["closed", "closed", "acknowledged", "requeued", ""])
    )
    def build(self, table, extended, ends):
        """A generator opens a group with a permit, is handed it or an older one, and finishes it or does not."""
        self.acquire_permits(1, 0.0)
        hands = len(self.hands)
        self.fill("c", 1, 0, True)
        self.draw("c", 1)
        if extended:
            self.extend(self.next_key, {"values"}, 3)
        if len(self.hands) == hands or not ends:
            return
        if ends == "closed":
            self.insert(1, {table}, 1.0, 0, 5, 0.0, 0, -1, (self.hands[-1],))
        else:
            self.acknowledge(hands, True) if ends == "acknowledged" else self.requeue(hands)

    @rule(
        table=names,
        keys=st.dictionaries(st.integers(1, 30), priorities, max_size=4),
        bad=st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1e39]),
    )
    def update_priorities(self, table, keys, bad):
        poisoned = np.array([*keys, 1], dtype=np.uint64), np.array([0.25] * len(keys) + [bad])
        _, code = self.refused(self.buffer.update_priorities, table, *poisoned)
        assert code is Code.INVALID_ARGUMENT  # and nothing has changed
        _, missing = self.buffer.update_priorities(
            table, np.array(list(keys), dtype=np.uint64), np.array(list(keys.values()), dtype=np.float64)
        )
        assert missing == self.model.update_priorities(table, keys)
        self.follow()

    @rule(table=names, keys=st.lists(st.integers(1, 30), max_size=4))
    def delete(self, table, keys):
        assert self.buffer.delete(table, keys) == self.model.delete(table, keys)
        self.follow()

    @rule(table=st.sampled_from(["a", "b", "c", "", "a"]), really=st.sampled_from([False, False, True]))
    def reset(self, table, really):
        if really:
            assert self.buffer.reset(table) == self.model.reset(table)
            self.follow()

    @rule(step=st.sampled_from([1, 1, 1, 2, 0, -1]))
    def set_policy_version(self, step):
        version = max(0, self.model.version + step)
        if version < self.model.version:
            _, code = self.refused(self.buffer.set_policy_version, version, "w")
            assert code is Code.INVALID_ARGUMENT
        self.buffer.set_policy_version(version, "w", rollback=step < 0)
        self.model.set_policy_version(version, rollback=step < 0)
        self.follow()
        for waiting in self.pendings:
            if isinstance(waiting.what, Insert):
                assert not any(table.stale(waiting.what.policy_version, version) for table in waiting.tables)

    @rule(step=st.sampled_from([0, 1, 1]), again=st.sampled_from([False, False, False, True]))
    def save_state(self, step, again):
        """The trainer names a state, perhaps for the second time."""
        version = self.model.version + step
        self.named += not again
        known = [state[0] for state in self.model.states]
        if (name := f"s{self.named}") in known[:-1]:
            name = known[-1]
        self.buffer.set_policy_version(version, "w", state=name)
        self.model.set_policy_version(version, False, name)
        self.follow()

    @rule(n=st.integers(1, 3), permit=st.booleans(), pick=picks)
    def consume(self, n, permit, pick):
        """From a table that keeps, if there is one."""
        tables = [table.config.name for table in self.model.tables.values() if table.config.retain_consumed] or ["a"]
        table = tables[pick % len(tables)]
        self.fill(table, n, 0, permit)
        for row in self.model.tables[table].waiting():
            self.extend(row.key, set(self.model.tables[table].lacks(row)), 3)
        hands = len(self.hands)
        self.draw(table, n)
        if len(self.hands) > hands:
            self.acknowledge(hands, True)

    @rule(n=st.integers(1, 3), permit=st.booleans(), pick=picks)
    def go_back(self, n, permit, pick):
        """The trainer consumes something, goes back to a state, and asks for it once more."""
        if not self.model.states:
            self.save_state(1, False)
        self.consume(n, permit, pick)
        states = {id: version for id, version, _ in self.model.states}
        _, code = self.refused(self.buffer.set_policy_version, 0, "w", True, None, "unknown")
        assert code is Code.INVALID_ARGUMENT
        if states:
            name = list(states)[pick % len(states)]
            _, code = self.refused(self.buffer.set_policy_version, states[name] + 1, "w", True, None, name)
            assert code is Code.INVALID_ARGUMENT
            for _ in range(2):
                self.buffer.set_policy_version(states[name], "w", True, None, name)
                self.model.set_policy_version(states[name], True, name)
                self.follow()

    @rule(
        table=names, change=st.sampled_from(sorted(limits)).flatmap(lambda name: limits[name].map(lambda v: {name: v}))
    )
    def update_table(self, table, change):
        reference = self.model.tables[table]
        changed, _ = self.refused(self.buffer.update_table, table, change)
        if changed is not None:
            reference.configure(changed.config)
            self.model.drop_used_up(reference)
            self.shrink(reference)
        self.follow()

    def shrink(self, table: RefTable):
        while self.log and self.log[0][0] == "evict":
            self.model.follow_one(self.log)
        self.model.drop_stale(table)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 6.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.model.now = self.now
        for waiting, pending in sorted(self.pendings.items(), key=lambda item: item[0].deadline):
            if waiting.deadline <= self.now and not pending.done:
                owner = self.admission if isinstance(waiting.what, int) else self.buffer
                owner.time_out(pending)
                assert pending.done
                self.follow()
        if self.admission is not None:
            self.admission.expire()
            self.model.expire_leases()
            self.follow()

    @precondition(lambda self: self.pendings)
    @rule(pick=picks)
    def abandon(self, pick):
        waiting = list(self.pendings)[pick % len(self.pendings)]
        owner = self.admission if isinstance(waiting.what, int) else self.buffer
        self.model.abandon(waiting)
        owner.abandon(self.pendings.pop(waiting))
        self.follow()

    @precondition(lambda self: self.admission is not None)
    @rule(count=st.sampled_from([1, 2, 3, 5, 8]), wait=timeouts)
    def acquire_permits(self, count, wait):
        waiting = Waiting(count, [], self.now + wait)
        self.model.acquiring.append(waiting)
        self.settle(waiting, self.admission.acquire(count, self.now + wait))

    @rule(name=names, n=st.integers(1, 3), nbytes=st.sampled_from([0, 30, 900]))
    def read(self, name, n, nbytes):
        """Whatever only reads changes nothing, also where something could be discarded."""
        buffer, table = self.buffer, self.buffer.tables[name]
        before = everything_of(buffer)
        info.server_info(buffer, [])
        table.weigh(SampleRequest(n, 1))
        table.why_no_sample(SampleRequest(n, 1), n)
        table.why_no_insert(n, nbytes)
        for pending in self.pendings.values():
            if not isinstance(pending, PendingPermits):
                buffer.why_waiting(pending)
        buffer.items.why_full(nbytes, buffer.trained)
        for extension in buffer.extensions:
            extension.why_no_policy(PolicyChange(buffer.policy.version, 1, rollback=True, state=f"state-{n}"))
        assert everything_of(buffer) == before

    @rule(slices=st.integers(1, 3))
    def clear_away(self, slices):
        """Nobody sees a difference, except that bytes become free."""
        for _ in range(slices):
            self.buffer.items.leaving.clear_slice()
        self.follow()

    @precondition(lambda self: self.admission is not None)
    @rule(pick=picks, count=st.integers(0, 2))
    def release_permits(self, pick, count):
        lease = self.leases[pick % len(self.leases)]
        left = self.model.leases.get(lease, [math.inf])[0]
        released, code = self.refused(self.admission.release, lease, count)
        if count > left:
            assert code is Code.INVALID_ARGUMENT
        else:
            assert released == self.model.release(lease, count)
        self.follow()

    # ------------------------------------------------------------------------------------------------ invariants

    @invariant()
    def asserts_hold(self):
        """What the buffer and its parts state of themselves."""
        if hasattr(self, "model"):
            self.buffer.check()
            self.buffer.check_each_item()

    @invariant()
    def tables_agree(self):
        for name, reference in getattr(self, "model", Reference([], None, None)).tables.items():
            table = self.buffer.tables[name]
            columns, slots = table.columns, table.columns.used()
            facts = zip(
                columns.key[slots].tolist(),
                columns.priority[slots].tolist(),
                columns.policy_version[slots].tolist(),
                columns.size[slots].tolist(),
                columns.inserted_at[slots].tolist(),
                columns.times_sampled[slots].tolist(),
                [name in self.buffer.items[key].forwarded for key in columns.key[slots].tolist()],
                strict=True,
            )
            expected = [
                (row.key, row.priority, row.version, row.nbytes, row.inserted_at, row.sampled, forwarded)
                for row in reference.rows
                for forwarded in [name in self.model.items[row.key].forwarded]
            ]
            assert list(facts) == expected
            assert set(columns.tags) == set(table.config.indexed)
            for tag in columns.tags.values():
                found = [tag.values[code] for code in tag.codes[slots]]
                assert found == [labels_for(row.key).text(tag.name) for row in reference.rows]
            found = [(*self.history.rows[name, key], slot) for key, slot in columns.retained.items()]
            assert sorted(
                (number, permit, *(getattr(columns, fact)[slot] for fact in ("key", "order", "priority", "size")))
                for number, permit, slot in found
            ) == [
                (
                    retained.number,
                    retained.permit,
                    retained.row.key,
                    retained.row.order,
                    retained.row.priority,
                    retained.row.nbytes,
                )
                for retained in reference.retained
            ]
            assert table.size == len(expected)
            assert table.bytes == reference.bytes
            assert table.outstanding == reference.outstanding
            assert table.counts() == {counter: reference.counts[counter] for counter in table.counts()}
            tag_counts = {
                (name, value, event): count
                for name, counts in table.tag_counts.items()
                for value, counts_of_value in counts.values.items()
                for event, count in vars(counts_of_value).items()
            }
            assert +Counter(tag_counts) == +reference.tag_counts
            limiter = table.limiter
            assert limiter.inserts == reference.inserts
            assert limiter.samples == reference.samples
            assert limiter.deletes == reference.deletes
            assert table.sampler.selectable() == sum(
                reference.weight(row, table.config.sampler) * reference.value_weight(row) > 0
                and not reference.lacks(row)
                for row in reference.rows
            )
            lacking = [reference.lacks(row) for row in reference.rows]
            assert table.waiting.lacking_of(slots) == lacking
            assert table.waiting.count == len(reference.waiting())
            counts = Counter(column for columns_of_row in lacking for column in columns_of_row)
            assert table.waiting.lacking() == counts

    @invariant()
    def payloads_agree(self):
        if not hasattr(self, "model"):
            return
        model, buffer = self.model, self.buffer
        leaving = {key: buffer.items.leaving.holds_of(key) for key in buffer.items}
        gone = [key for key in buffer.items if buffer.items.gone(key)]
        assert {key: item.holders - leaving[key] for key, item in buffer.items.items() if key not in gone} == {
            key: model.holders(key) for key in model.items
        }
        labels = buffer.items.labels(list(model.items)) or [NO_LABELS] * len(model.items)  # None: no item has any
        assert [of_item.pairs for of_item in labels] == [labels_for(key).pairs for key in model.items]
        assert [of_item.columns for of_item in labels] == [item.columns for item in model.items.values()]
        sizes = [item.nbytes for item in model.items.values()]
        payloads = read_payloads(buffer.storage, list(model.items), sizes)
        assert [b"".join(payload) for payload in payloads] == [item.payload for item in model.items.values()]
        assert buffer.items.bytes == model.bytes + sum(buffer.items[key].cost for key in gone)
        assert buffer.items.bytes <= buffer.items.max_bytes
        assert set(self.hands) == set(model.hands) == set(buffer.outstanding.by_id)

    @invariant()
    def lines_agree(self):
        if not hasattr(self, "model"):
            return
        for name, reference in self.model.tables.items():
            lines = self.buffer.lines[name]
            for line, expected in (
                (lines.inserts, reference.inserting),
                (lines.samples, reference.sampling),
            ):
                assert list(line) == [self.pendings[waiting] for waiting in expected]
                assert len(line) == len(expected)
                assert bool(line) == bool(expected)
                assert (line.blocked.since is not None) == bool(expected), f"{name}: blocked is not what it says"
            for place, waiting in enumerate(reference.inserting):
                why = self.buffer.why_waiting(self.pendings[waiting])
                own = self.model.blocked(waiting)
                assert (own or f"{counted(place, 'request')} came first") in why or " came first" in why
                assert "inserting blocked" in why
            for waiting in reference.sampling:
                why = self.buffer.why_waiting(self.pendings[waiting])
                assert why.startswith(f"{name}: sampling blocked: ")
                _, min_size, _, _ = reference.limits()
                ready = reference.inserts - reference.deletes - len(reference.waiting())
                wanted, there = waiting.what.num_samples, len(reference.candidates(waiting.what))
                lacking = there < wanted if waiting.what.distinct else there == 0
                if lacking and reference.waiting():
                    assert f"{there} of {wanted} samples available" in why
                    assert f"{len(reference.waiting())} wait for " in why
                elif ready < min_size:
                    assert f"< min_size {min_size}" in why
                    assert (f"{len(reference.waiting())} wait for " in why) == bool(reference.waiting())
                elif not reference.allows(wanted):
                    assert "min_diff" in why
                elif lacking:
                    assert f"{there} of {wanted} samples available" in why
                else:
                    assert " came first" in why

    @invariant()
    def permits_agree(self):
        if not hasattr(self, "model") or self.admission is None:
            return
        admission, model = self.admission, self.model
        assert admission.accepted == model.accepted
        assert admission.running == model.running
        assert admission.expired == model.expired
        assert admission.capacity == model.capacity
        assert set(admission.partial_groups) == {key for key, item in model.items.items() if item.partial}
        assert list(admission.line) == [self.pendings[waiting] for waiting in model.acquiring]

    def teardown(self):
        """When everything in hand is requeued and everything is removed, nothing is left."""
        if not hasattr(self, "model"):
            return
        for waiting in list(self.pendings):
            if waiting in self.pendings:
                pending = self.pendings.pop(waiting)
                pending.on_done = None
                (self.admission if isinstance(waiting.what, int) else self.buffer).abandon(pending)
        for batch_id in list(self.buffer.outstanding.by_id):
            self.buffer.requeue(batch_id)
        self.buffer.reset()
        while self.buffer.items.leaving:
            self.buffer.items.leaving.clear_slice()
        assert self.buffer.items == {}
        assert self.buffer.items.bytes == 0
        self.nothing_is_stored()
        assert self.buffer.outstanding.by_id == {}
        assert all(table.outstanding == 0 for table in self.buffer.tables.values())

    def nothing_is_stored(self):
        for key in range(1, self.next_key + 1):
            with pytest.raises(KeyError):
                self.buffer.storage.get([key], [1])


warnings.filterwarnings("ignore", module="replay_server")


def case_of(machine, examples):
    """The test case of a machine, with so many sequences unless the environment wants another number."""

    class TestCase(machine.TestCase):
        settings = hypothesis_settings(
            max_examples=int(EXAMPLES or examples),
            stateful_step_count=STEPS,
            derandomize=EXAMPLES is None,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink],  # explaining a failure takes minutes
        )

    return TestCase


TestModel = case_of(ModelMachine, 300)
