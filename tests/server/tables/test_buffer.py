"""ReplayBuffer: what it says, and what the model does not look at: closing, long lines, rare sequences.

What operations mean is stated in reference.py, and compared with it by test_model.py.
"""

import math

import numpy as np
import pytest

from replay_protos.labels import labels_of
from replay_server.errors import Code, Refused
from replay_server.tables.config import AdmissionConfig, TableConfig
from replay_server.tables.extensions.admission import Admission
from replay_server.tables.table import SampleRequest
from tests.kit.tables import replay_buffer, rows_of


class Bench:
    """A buffer with short names for its operations."""

    def __init__(self, *tables: TableConfig, **options):
        self.now = 100.0
        self.buffer = replay_buffer(tables, lambda: self.now, **options)
        self.next_key = 0

    def insert(
        self,
        table="t",
        priority=1.0,
        version=0,
        nbytes=10,
        key=None,
        permits=0,
        wait=math.inf,
        moved=False,
        **tables,
    ):
        self.next_key += 1
        key = self.next_key if key is None else key
        row = rows_of([key], tables or {table: priority}, version=version, payload=b"x" * nbytes, permits=permits)
        row.moved = moved
        taken, pending = self.buffer.insert(row, self.now + wait)
        assert taken == (pending is None)
        return key if pending is None else pending

    def sample(self, n=1, table="t", minimum=None, wait=math.inf, **options):
        request = SampleRequest(n, n if minimum is None else minimum, **options)
        return self.buffer.sample(table, request, self.now + wait)

    def consume(self, n=1, table="t", **options):
        batch_id, batch = self.sample(n, table, **options).result()
        assert self.buffer.acknowledge(batch_id)
        return batch.keys.tolist()

    def table(self, name="t"):
        return self.buffer.tables[name]

    def keys(self, name="t"):
        table = self.table(name)
        return table.columns.key[table.columns.used()].tolist()


def table(name="t", **options) -> TableConfig:
    return TableConfig.model_validate({"name": name, "sampler": "fifo", "seed": 1} | options)


def queue(name="t", size=4, **options) -> TableConfig:
    return table(name, rate_limiter={"type": "queue", "max_size": size}, **options)


def refusal(action, *args, **kwargs) -> Refused:
    with pytest.raises(Refused) as caught:
        action(*args, **kwargs)
    return caught.value


# ------------------------------------------------------------------------------------------------ what it says


def timed_out(bench: Bench, owner, pending) -> Refused:
    owner.time_out(pending)
    return refusal(pending.result)


def test_a_wait_that_ends_names_what_is_there_and_what_was_wanted():
    bench = Bench(table(rate_limiter={"type": "min_size", "min_size": 5}), table("pool", sampler="prioritized"))
    for _ in range(3):
        bench.insert()
    refused = timed_out(bench, bench.buffer, bench.sample(wait=1.0))
    assert refused.code is Code.DEADLINE_EXCEEDED
    assert refused.message == "t: sampling blocked: items there: 3, wanted: 5 (size 3 < min_size 5)"
    keys = [bench.insert("pool") for _ in range(10)]
    few = bench.sample(7, "pool", exclude=frozenset(keys[:4]), wait=0.0)
    assert timed_out(bench, bench.buffer, few).message == (
        "pool: sampling blocked: 6 of 7 samples available (size 10, 4 excluded)"
    )


def test_permits_that_are_not_there_are_counted_and_named_with_what_brings_more():
    bench = admission()
    permits = Admission.of(bench.buffer)
    permits.acquire(4, math.inf)
    assert timed_out(bench, permits, permits.acquire(2, 0.0)).message == (
        "permits: there: 0, wanted: 2; the next policy version brings more "
        "(0 accepted + 4 running + 2 requested > 0 of earlier steps + (max_staleness 1 + 1) * 2 a step = 4)"
    )
    assert "; ask for at most 4 at once (" in timed_out(bench, permits, permits.acquire(1 << 16, 0.0)).message


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"n": 5}, "5 samples at once can never be drawn"),
        ({"n": 4, "table": "small"}, "its max_size is 3"),
    ],
)
def test_a_sample_that_can_never_be_there_is_refused_at_once(sample, words):
    assert words in refusal(Bench(queue(size=4), table("small", max_size=3)).sample, **sample).message


# ------------------------------------------------------------------------------------------------ what it does


def test_hundreds_of_waiting_requests_are_served_in_one_go():
    bench = Bench(queue(size=1))
    bench.insert()
    inserts = [bench.insert() for _ in range(3000)]
    samples = [bench.sample() for _ in range(3001)]
    assert all(pending.done for pending in [*inserts, *samples])


def test_a_change_that_ends_a_wait_lets_those_go_on_who_stood_behind_it_for_another_table():
    bench = Bench(table("a", max_size=1, when_full="block"), table("b", when_full="block"))
    bench.insert("a")
    first = bench.insert(a=1.0, b=1.0, nbytes=30)
    behind = bench.insert("b")
    assert not behind.done
    bench.buffer.update_table("a", {"max_bytes": 20})
    assert "at most 20" in refusal(first.result).message
    assert behind.done
    assert bench.keys("b") == [3]


def test_closing_ends_every_wait_and_refuses_what_comes_after():
    bench = Bench(queue(size=1))
    bench.insert()
    insert, sample = bench.insert(), bench.sample(1)
    assert sample.done
    sample = bench.sample(1)
    assert sample.done  # the waiting insert came in
    waiting = bench.sample(1)
    bench.buffer.close()
    assert refusal(waiting.result).code is Code.ABORTED
    assert insert.done
    assert refusal(bench.insert).code is Code.ABORTED


def admission(**options) -> Bench:
    return Bench(
        queue(size=100), admission=AdmissionConfig(**{"fresh_groups_per_step": 2, "max_staleness": 1} | options)
    )


@pytest.mark.parametrize(
    ("tables", "table"),
    [
        ([queue(), TableConfig(name="eval", sampler="fifo")], "t"),
        ([queue(forward_to="pool"), TableConfig(name="eval", rate_limiter=queue().rate_limiter), table("pool")], "t"),
        ([table("pool")], "pool"),
    ],
)
def test_admission_is_of_the_queue_that_is_trained_on(tables, table):
    bench = Bench(*tables, admission=AdmissionConfig(fresh_groups_per_step=2, max_staleness=1))
    assert Admission.of(bench.buffer).table == table


@pytest.mark.parametrize("name", [None, "nowhere"])
def test_an_admission_that_could_be_of_two_tables_is_refused_with_the_remedy(name):
    tables = [queue(), TableConfig(name="eval", rate_limiter=queue().rate_limiter)]
    with pytest.raises(ValueError, match=r"\[admission\] table = '"):
        Bench(*tables, admission=AdmissionConfig(table=name, fresh_groups_per_step=2, max_staleness=1))


def test_a_rollback_grants_no_permit_by_the_bound_of_the_version_that_it_undoes():
    bench = Bench(queue(retain_consumed=1), admission=AdmissionConfig(fresh_groups_per_step=2, max_staleness=1))
    bench.buffer.set_policy_version(1, "", state="one")
    bench.buffer.set_policy_version(2, "")
    bench.insert(version=2, permits=Admission.of(bench.buffer).acquire(1, math.inf).result().id)
    waiting = Admission.of(bench.buffer).acquire(6, math.inf)
    bench.buffer.set_policy_version(1, "", rollback=True, state="one")  # drops the item, whose permit is free then
    assert bench.keys() == []
    assert not waiting.done
    assert Admission.of(bench.buffer).capacity == 4


def test_a_uniform_remover_takes_the_new_item_as_often_as_any_other():
    bench = Bench(table(remover="uniform", max_size=3))
    for _ in range(4003):
        bench.insert()
    assert 850 < bench.table().counters.evicted_on_arrival < 1150  # a quarter of 4000, give or take five deviations


def test_a_sample_that_waits_draws_the_first_row_of_an_insert_although_the_second_ranks_higher():
    bench = Bench(table(sampler="lifo"))
    waiting = bench.sample()
    bench.buffer.insert(rows_of([1, 2], {"t": 1.0}), math.inf)
    _, batch = waiting.result()
    assert batch.keys.tolist() == [1]


def test_a_row_that_waited_and_leaves_at_once_is_reported_too():
    limiter = {"type": "sample_to_insert_ratio", "samples_per_insert": 1.0, "min_size": 1, "error_buffer": [-9, 2]}
    bench = Bench(table(remover="min_heap", max_size=2, rate_limiter=limiter))
    bench.insert(priority=2.0), bench.insert(priority=3.0)
    waiting = bench.insert(priority=1.0)
    assert not waiting.done
    bench.consume(1)
    assert waiting.done
    assert waiting.insert.evicted == [(3, "t")]


@pytest.mark.parametrize("undone", [0, 3], ids=["no rollback", "a rollback long ago"])
def test_rows_that_are_fresh_enough_enter_a_table_with_a_limit_on_staleness_together(undone):
    bench = Bench(queue(max_staleness=1, retain_consumed=1))
    if undone:
        bench.buffer.set_policy_version(1, "", state="one")
        bench.buffer.set_policy_version(undone, "")
        bench.buffer.set_policy_version(1, "", rollback=True, state="one")
    bench.buffer.set_policy_version(9, "")
    rows = rows_of([1, 2, 3], {"t": 1.0}, version=8)
    taken, _ = bench.buffer.insert(rows, math.inf)
    assert taken == 3


def test_a_batch_of_which_one_row_became_too_old_before_it_was_sent_goes_back():
    bench = Bench(queue(max_staleness=1))
    bench.insert(version=0)
    fresh = bench.insert(version=1)
    batch_id, _ = bench.sample(2).result()
    bench.buffer.set_policy_version(2, "")
    assert not bench.buffer.acknowledge(batch_id)
    assert bench.keys() == [fresh]


def test_a_key_that_comes_again_for_other_tables_is_refused_and_not_acknowledged():
    bench = Bench(table(), table("other"))
    key = bench.insert()
    assert bench.insert(key=key) == key
    assert bench.insert(key=key, priority=9.0) == key  # a retry may come from a caller that computed a new priority
    for names in ({"other": 1.0}, {"t": 1.0, "other": 1.0}):
        with pytest.raises(Refused, match=f"key {key} was inserted into t, and now comes for .*another key") as caught:
            bench.insert(key=key, **names)
        assert caught.value.code is Code.INVALID_ARGUMENT
    bench.buffer.delete("t", [key])
    assert refusal(bench.insert, "other", key=key).code is Code.INVALID_ARGUMENT
    assert bench.table("other").size == 0


def test_an_insert_that_waits_for_bytes_comes_in_when_the_last_reader_of_a_deleted_item_has_them():
    bench = Bench(table(when_full="block"), max_bytes=10)
    key = bench.insert()
    bench.buffer.items.hold([key])  # somebody reads its payload
    bench.buffer.delete("t", [key])
    waiting = bench.insert()
    assert not waiting.done
    bench.buffer.release([key])
    assert waiting.done


@pytest.mark.parametrize("sampler", ["fifo", "lifo", "uniform", "min_heap", "max_heap", "prioritized"])
def test_no_sampler_gives_a_row_that_waits_after_anything_that_happens_to_it(sampler):
    half_life = {"half_life": 2.0} if sampler in ("min_heap", "max_heap", "prioritized") else {}
    buffer = Bench(table(sampler={"type": sampler} | half_life, requires=["value"])).buffer
    for key in range(1, 9):
        labels = [labels_of(["value"] if key % 2 else [], None)]
        buffer.insert(rows_of([key], {"t": 1.0}, version=key, labels=labels))
    buffer.update_priorities("t", np.arange(1, 9, dtype=np.uint64), np.linspace(1, 2, 8))
    for version in (3, 400, 2):  # weights are computed anew, for all rows
        buffer.set_policy_version(version, "", rollback=version < 400)
        batch_id, batch = buffer.sample("t", SampleRequest(4, 4)).result()
        assert sorted(batch.keys.tolist()) == [1, 3, 5, 7]
        buffer.requeue(batch_id)
    assert buffer.table("t").weigh(SampleRequest(1, 1))["items"] == 4
    buffer.extend(2, ["value"], (b"x",))
    _, batch = buffer.sample("t", SampleRequest(5, 5)).result()
    assert sorted(batch.keys.tolist()) == [1, 2, 3, 5, 7]


@pytest.mark.parametrize("sampler", ["fifo", "uniform", "prioritized", "max_heap"])
def test_a_sample_may_exclude_rows_that_wait_for_columns(sampler):
    bench = Bench(table(sampler=sampler, requires=["score"]))
    keys = [bench.insert() for _ in range(100)]  # more than the selector has made room for
    waiting = bench.sample(exclude=frozenset(keys))
    assert not waiting.done


def test_an_item_has_a_bounded_number_of_columns():
    bench = Bench(table())
    buffer, key = bench.buffer, bench.insert()
    buffer.extend(key, [f"column{n}" for n in range(1024)], (b"x",))
    with pytest.raises(Refused, match="item 1: an item has at most 1024 columns, not 1025"):
        buffer.extend(key, ["one more"], (b"y",))
    assert buffer.items[key].nbytes == 11


# ------------------------------------------------------------------------------ what random sequences seldom meet


def test_a_batch_that_returns_undoes_no_draw_of_an_item_that_has_joined_again_meanwhile():
    bench = Bench(queue("a", forward_to="pool"), queue("b", forward_to="pool"), table("pool"))
    key = bench.insert(a=1.0, b=1.0)
    bench.consume(table="a")
    batch_id, _ = bench.sample(table="pool").result()
    assert bench.buffer.delete("pool", [key]) == []
    bench.consume(table="b")
    assert bench.keys("pool") == [key]
    bench.buffer.requeue(batch_id)
    _, batch = bench.sample(table="pool").result()
    assert batch.times_sampled.tolist() == [1]
    bench.table("pool").check()


def test_a_forwarded_item_may_be_the_worst_of_its_pool_and_leave_at_once():
    bench = Bench(queue(forward_to="pool"), table("pool", remover="min_heap", max_size=2))
    best = [bench.insert(priority=priority) for priority in (3.0, 2.0)]
    worst = bench.insert(priority=1.0)
    bench.consume(3)
    assert bench.keys("pool") == best
    assert list(bench.buffer.items) == best
    assert bench.table("pool").counters.evicted_on_arrival == 1
    assert worst not in bench.buffer.items
