"""ReplayBuffer: what an operation means, with a clock in the hand of the test."""

import math

import numpy as np
import pytest

from replay_server.errors import Code, Refused
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.config import AdmissionConfig, TableConfig
from replay_server.tables.items import InsertBatch
from replay_server.tables.table import SampleRequest


class Bench:
    """A buffer with short names for its operations."""

    def __init__(self, *tables: TableConfig, **options):
        self.now = 100.0
        self.buffer = ReplayBuffer(tables, lambda: self.now, **options)
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
        evicted=None,
        **tables,
    ):
        self.next_key += 1
        key = self.next_key if key is None else key
        priorities = {name: np.array([value]) for name, value in (tables or {table: priority}).items()}
        insert = InsertBatch([key], priorities, np.array([version]), np.array([nbytes]), [(b"x" * nbytes,)], permits)
        taken, pending = self.buffer.insert(insert, self.now + wait, evicted)
        assert taken == (pending is None)
        return key if pending is None else pending

    def sample(self, n=1, table="t", minimum=None, wait=math.inf, **options):
        request = SampleRequest(n, n if minimum is None else minimum, **options)
        return self.buffer.sample(table, request, self.now + wait)

    def take(self, n=1, table="t", **options):
        batch_id, batch = self.sample(n, table, **options).result()
        assert self.buffer.take(batch_id)
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


def test_a_queue_gives_each_item_once_in_order_and_forgets_its_payload():
    bench = Bench(queue())
    keys = [bench.insert() for _ in range(3)]
    assert bench.take(2) == keys[:2]
    assert bench.take(1) == keys[2:]
    assert bench.buffer.items == {}
    assert bench.buffer.bytes == 0
    assert not bench.sample().done


def test_waiting_inserts_enter_in_order_as_soon_as_samples_make_room():
    bench = Bench(queue(size=2))
    bench.insert(), bench.insert()
    waiting = [bench.insert() for _ in range(3)]
    assert [pending.done for pending in waiting] == [False] * 3
    bench.take(1)
    assert [pending.done for pending in waiting] == [True, False, False]
    bench.take(2)
    assert [pending.done for pending in waiting] == [True, True, True]
    assert bench.keys() == [4, 5]


def test_waiting_samples_are_served_first_come_first_served():
    bench = Bench(queue(size=8))
    first, second = bench.sample(2), bench.sample(1)
    bench.insert()
    assert (first.done, second.done) == (False, False)
    bench.insert()
    assert (first.done, second.done) == (True, False)
    bench.insert()
    assert second.done


def test_hundreds_of_waiting_requests_are_served_in_one_go():
    bench = Bench(queue(size=1))
    bench.insert()
    inserts = [bench.insert() for _ in range(3000)]
    samples = [bench.sample() for _ in range(3001)]
    assert all(pending.done for pending in [*inserts, *samples])


def test_a_deadline_ends_a_wait_with_its_reason_and_disturbs_nobody():
    bench = Bench(table(rate_limiter={"type": "min_size", "min_size": 5}))
    for _ in range(3):
        bench.insert()
    sample = bench.sample(wait=1.0)
    bench.buffer.time_out(sample)
    assert refusal(sample.result).message == "t: sampling blocked: items there: 3, wanted: 5 (size 3 < min_size 5)"
    assert refusal(sample.result).code is Code.DEADLINE_EXCEEDED
    assert bench.table().counters.samples == 0
    bench.insert(), bench.insert()
    assert bench.sample().done


def test_when_the_time_is_up_enough_is_enough():
    bench = Bench(queue(size=8))
    keys = [bench.insert() for _ in range(3)]
    sample = bench.sample(5, minimum=2, wait=1.0)
    assert not sample.done
    bench.buffer.time_out(sample)
    _, batch = sample.result()
    assert batch.keys.tolist() == keys
    too_many = bench.sample(5, minimum=1, wait=1.0)
    bench.buffer.time_out(too_many)
    assert "0 samples" not in refusal(too_many.result).message


def test_a_request_that_nobody_waits_for_any_more_gives_its_place_away():
    bench = Bench(queue(size=8))
    first, second = bench.sample(3), bench.sample(1)
    bench.insert()
    bench.buffer.abandon(first)
    assert second.done


@pytest.mark.parametrize("priority", [math.nan, math.inf, -math.inf, -1.0, -5e-324, 1e39])
def test_a_bad_priority_is_refused_and_changes_nothing(priority):
    bench = Bench(table("a"), table("b"))
    key = bench.insert("a")
    assert refusal(bench.insert, a=1.0, b=priority).code is Code.INVALID_ARGUMENT
    keys, priorities = np.array([key, 77], dtype=np.uint64), np.array([0.5, priority])
    assert "priority" in refusal(bench.buffer.update_priorities, "a", keys, priorities).message
    assert bench.keys("a") == [key]
    assert bench.keys("b") == []
    assert bench.table("a").columns.priority[bench.table("a").columns.used()].tolist() == [1.0]
    assert len(bench.buffer.items) == 1


@pytest.mark.parametrize("priority", [0.0, 5e-324, 1e-12, 3e38])
def test_extreme_but_valid_priorities_are_taken(priority):
    bench = Bench(table(sampler="prioritized"))
    bench.insert(priority=priority)
    assert bench.sample().done == (priority > 0)


def test_an_unknown_table_is_named_together_with_those_there_are():
    bench = Bench(table("a"), table("b"))
    assert refusal(bench.insert, "c").message == "no table 'c'; tables: a, b"
    assert refusal(bench.sample, 1, "c").code is Code.NOT_FOUND


def test_inserting_a_key_again_does_nothing_even_after_it_was_consumed():
    bench = Bench(queue())
    bench.insert(key=5)
    assert bench.insert(key=5) == 5
    assert bench.take(1) == [5]
    assert bench.insert(key=5) == 5
    assert bench.table().size == 0
    assert bench.table().counters.duplicates == 2
    assert bench.table().limiter.inserts == 1


def test_a_retry_of_an_insert_that_waits_is_taken_once():
    bench = Bench(queue(size=1))
    bench.insert()
    lost, retry = bench.insert(key=9), bench.insert(key=9)
    assert bench.take(1) == [1]
    assert lost.done
    assert retry.done
    assert bench.keys() == [9]


def test_one_payload_lives_as_long_as_its_last_table_holds_it():
    bench = Bench(table("a"), table("b"))
    key = bench.insert(a=1.0, b=2.0)
    assert bench.buffer.delete("a", [key]) == []
    assert bench.buffer.items[key].holders == 1
    assert bench.buffer.delete("b", [key, 99]) == [99]
    assert bench.buffer.items == {}


def test_an_insert_into_two_tables_waits_for_both_and_enters_both_at_once():
    bench = Bench(queue("a", size=1), queue("b", size=1))
    bench.insert("a"), bench.insert("b")
    waiting = bench.insert(a=1.0, b=1.0)
    bench.take(1, "a")
    assert not waiting.done
    assert bench.keys("a") == []
    bench.take(1, "b")
    assert waiting.done
    assert (bench.keys("a"), bench.keys("b")) == ([3], [3])


@pytest.mark.parametrize(
    ("remover", "survivors"),
    [("fifo", [3, 4, 5]), ("lifo", [1, 2, 3]), ("min_heap", [2, 4, 5]), ("max_heap", [1, 3, 5])],
)
@pytest.mark.filterwarnings("ignore:.*evicts high priorities first")
def test_a_full_table_evicts_what_its_remover_names(remover, survivors):
    bench = Bench(table(remover=remover, max_size=3))
    for priority in (1.0, 5.0, 2.0, 4.0, 3.0):
        bench.insert(priority=priority)
    assert bench.keys() == survivors
    assert bench.table().counters.evicted == 2
    assert bench.table().counters.evicted_unsampled == 2


def test_max_bytes_evicts_as_much_as_the_new_item_needs():
    bench = Bench(table(remover="fifo", max_bytes=100))
    for _ in range(4):
        bench.insert(nbytes=25)
    big = bench.insert(nbytes=60)
    assert bench.keys() == [4, big]
    assert refusal(bench.insert, nbytes=101).code is Code.OUT_OF_RANGE


def test_a_full_table_blocks_or_rejects_if_told_to():
    bench = Bench(table("block", when_full="block", max_size=1), table("reject", when_full="reject", max_size=1))
    first = bench.insert("block")
    waiting = bench.insert("block")
    assert not waiting.done
    bench.buffer.delete("block", [first])
    assert waiting.done
    bench.insert("reject")
    assert refusal(bench.insert, "reject").code is Code.RESOURCE_EXHAUSTED


def test_the_bound_of_the_server_holds_over_all_tables():
    bench = Bench(table("a"), table("b", when_full="reject"), max_bytes=100)
    first = bench.insert("a", nbytes=60)
    bench.insert("b", nbytes=40)
    second = bench.insert("a", nbytes=30)
    assert first not in bench.buffer.items
    assert bench.buffer.bytes == 70
    assert refusal(bench.insert, "b", nbytes=40).code is Code.RESOURCE_EXHAUSTED
    assert bench.keys("a") == [second]


def test_a_first_sample_forwards_the_item_with_its_priority_unless_that_is_zero():
    bench = Bench(queue("rollouts", forward_to="replay"), table("replay", sampler="prioritized"))
    bench.insert("rollouts", priority=0.7)
    bench.insert("rollouts", priority=0.0)
    assert bench.take(2, "rollouts") == [1, 2]
    assert bench.keys("replay") == [1]
    columns = bench.table("replay").columns
    assert columns.priority[columns.used()].tolist() == [0.7]
    assert list(bench.buffer.items) == [1]
    assert bench.table("rollouts").counters.forwarded == 1


def test_an_item_is_forwarded_when_it_is_taken_and_only_once():
    bench = Bench(table("a", forward_to="b"), table("b"))
    bench.insert("a")
    batch_id, _ = bench.sample(1, "a").result()
    assert bench.keys("b") == []
    bench.buffer.take(batch_id)
    assert bench.keys("b") == [1]
    bench.buffer.delete("b", [1])
    bench.take(1, "a")
    assert bench.keys("b") == []


def test_what_is_given_back_is_as_if_it_had_never_been_drawn():
    bench = Bench(queue("q", size=8, forward_to="pool"), table("pool"))
    keys = [bench.insert("q") for _ in range(4)]
    batch_id, _ = bench.sample(3, "q").result()
    assert bench.keys("q") == keys[3:]
    bench.buffer.give_back(batch_id)
    assert bench.keys("q") == keys
    assert bench.table("q").counters.samples == 0
    assert bench.table("q").outstanding == 0
    assert bench.keys("pool") == []
    assert bench.take(4, "q") == keys


def test_giving_back_after_a_reset_or_delete_brings_nothing_back():
    bench = Bench(table("a"))
    bench.insert("a")
    batch_id, _ = bench.sample(1, "a").result()
    bench.buffer.reset("a")
    bench.buffer.give_back(batch_id)
    assert bench.buffer.items == {}
    assert bench.table("a").outstanding == 0
    bench.insert("a", key=7)
    batch_id, _ = bench.sample(1, "a").result()
    bench.buffer.delete("a", [7])
    bench.buffer.give_back(batch_id)
    assert bench.keys("a") == []
    assert bench.buffer.items == {}


def test_stale_items_are_dropped_when_the_version_moves_and_make_room():
    bench = Bench(queue(size=2, max_staleness=1))
    bench.insert(version=0), bench.insert(version=1)
    waiting = bench.insert(version=1)
    bench.buffer.set_policy_version(2, "")
    assert waiting.done
    assert bench.keys() == [2, 3]
    assert bench.table().counters.stale == 1
    bench.buffer.set_policy_version(3, "")
    assert bench.keys() == []
    fresh = [bench.insert(version=3), bench.insert(version=3)]
    assert bench.keys() == fresh


def test_an_item_that_is_too_stale_is_refused_on_arrival_and_while_it_waits():
    bench = Bench(queue(size=1, max_staleness=0))
    bench.insert(version=0)
    waiting = bench.insert(version=0)
    bench.buffer.set_policy_version(1, "")
    assert refusal(waiting.result).code is Code.FAILED_PRECONDITION
    assert "lags 1 behind the current 1" in refusal(bench.insert, version=0).message
    assert bench.table().counters.stale_refused == 2


def test_a_batch_drawn_ahead_is_withdrawn_when_something_in_it_goes_stale():
    bench = Bench(queue(size=4, max_staleness=1))
    bench.insert(version=0), bench.insert(version=1)
    batch_id, _ = bench.sample(2).result()
    bench.buffer.set_policy_version(2, "")
    assert not bench.buffer.take(batch_id)
    assert bench.keys() == [2]
    assert bench.table().counters.stale == 1
    assert bench.table().counters.samples == 0


def test_the_policy_version_goes_back_only_on_purpose():
    bench = Bench(table())
    bench.buffer.set_policy_version(5, "w")
    assert "rollback=True" in refusal(bench.buffer.set_policy_version, 4, "").message
    assert bench.buffer.policy.version == 5
    assert bench.buffer.set_policy_version(4, "v", rollback=True).version == 4


def test_a_scope_gives_no_key_twice_to_anyone_and_exclude_leaves_keys_out():
    bench = Bench(table(sampler="prioritized"))
    keys = {bench.insert() for _ in range(10)}
    first = set(bench.take(4, scope="step-1"))
    second = set(bench.take(4, scope="step-1"))
    assert not first & second
    third = bench.sample(3, scope="step-1")
    assert not third.done
    bench.buffer.abandon(third)
    assert len(bench.take(10, scope="step-2")) == 10
    excluded = frozenset(first)
    assert set(bench.take(6, exclude=excluded)) == keys - first
    blocked = bench.sample(7, exclude=excluded, wait=0.0)
    bench.buffer.time_out(blocked)
    assert refusal(blocked.result).message == ("t: sampling blocked: 6 of 7 samples available (size 10, 4 excluded)")


def test_what_is_given_back_may_be_given_out_again_under_its_scope():
    bench = Bench(table())
    bench.insert()
    batch_id, _ = bench.sample(1, scope="s").result()
    waiting = bench.sample(1, scope="s")
    assert not waiting.done
    bench.buffer.give_back(batch_id)
    assert waiting.done


def test_impossible_samples_are_refused_at_once():
    bench = Bench(queue(size=4), table("small", max_size=3))
    assert "can never be drawn" in refusal(bench.sample, 5).message
    assert "max_size is 3" in refusal(bench.sample, 4, "small").message
    assert "at least 1 sample" in refusal(bench.sample, 0).message
    assert "min_samples must be from 1 to num_samples = 2, not 3" in refusal(bench.sample, 2, minimum=3).message


def test_a_table_can_be_changed_while_it_runs():
    bench = Bench(table(max_size=10, sampler="fifo", remover="fifo"))
    for priority in (3.0, 1.0, 2.0):
        bench.insert(priority=priority)
    bench.buffer.update_table("t", {"remover": "min_heap", "sampler": "max_heap"})
    bench.buffer.update_table("t", {"max_size": 2})
    assert bench.keys() == [1, 3]
    assert bench.take(2) == [1, 3]
    bench.buffer.update_table("t", {"rate_limiter": {"type": "min_size", "min_size": 2}, "max_size": 3})
    bench.buffer.delete("t", [1])
    waiting = bench.sample(1)
    assert not waiting.done
    bench.buffer.update_table("t", {"rate_limiter": "min_size"})
    assert waiting.done
    bench.insert()
    bench.take(1)
    bench.buffer.update_table("t", {"max_times_sampled": 1})
    assert bench.buffer.tables["t"].counters.consumed == bench.buffer.tables["t"].limiter.deletes - 2 > 0
    assert (
        bench.buffer.tables["t"].columns.times_sampled[list(bench.buffer.tables["t"].columns.slots.values())] == 0
    ).all()
    assert "max_size" in refusal(bench.buffer.update_table, "t", {"max_size": 0}).message
    assert "cannot change" in refusal(bench.buffer.update_table, "t", {"name": "u"}).message


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
    return Bench(queue(size=100), admission=AdmissionConfig(**{"groups_per_step": 2, "max_staleness": 1} | options))


def test_permits_are_granted_up_to_the_bound_and_again_when_the_version_moves():
    bench = admission()
    permits = bench.buffer.admission
    assert permits.acquire(4, math.inf).done  # (1 + 0 + 1) * 2
    waiting = permits.acquire(1, math.inf)
    assert not waiting.done
    bench.buffer.set_policy_version(1, "")
    assert waiting.done
    assert permits.capacity == 1


def test_an_insert_uses_a_permit_up_release_and_expiry_give_it_back():
    bench = admission(permit_ttl=60.0)
    permits = bench.buffer.admission
    lease = permits.acquire(4, math.inf).result()
    bench.insert(permits=lease.id)
    assert (permits.accepted, permits.running, permits.capacity) == (1, 3, 0)
    assert permits.release(lease.id, 1) == 1
    assert (permits.running, permits.capacity) == (2, 1)
    bench.now += 61
    permits.expire()
    assert (permits.running, permits.expired, permits.capacity) == (0, 2, 3)
    assert permits.release(lease.id) == 0
    bench.insert(permits=lease.id)  # late work still counts
    assert permits.accepted == 2


def test_a_group_that_is_dropped_before_anyone_sampled_it_gives_its_place_back():
    bench = Bench(queue(size=100, max_staleness=1), admission=AdmissionConfig(groups_per_step=2, max_staleness=1))
    permits = bench.buffer.admission
    bench.buffer.set_policy_version(0, "")
    lease = permits.acquire(4, math.inf).result()
    for _ in range(4):
        bench.insert(version=0, permits=lease.id)
    bench.take(1)
    assert (permits.accepted, permits.capacity) == (4, 0)
    bench.buffer.set_policy_version(2, "")
    assert bench.table().counters.stale == 3
    assert (permits.accepted, permits.capacity) == (1, 7)


def test_a_trainer_that_begins_again_at_a_version_counts_only_its_finished_steps():
    bench = admission()
    permits = bench.buffer.admission
    bench.buffer.set_policy_version(3, "")
    assert permits.accepted == 6  # of the three steps before this server
    lease = permits.acquire(4, math.inf).result()
    for _ in range(4):
        bench.insert(version=3, permits=lease.id)
    bench.take(4)
    assert permits.accepted == 10
    bench.buffer.set_policy_version(3, "")
    assert permits.accepted == 10  # said again after a lost answer: nothing changes
    bench.buffer.set_policy_version(3, "", rollback=True)
    assert permits.accepted == 6
    bench.buffer.set_policy_version(1, "", rollback=True)
    assert permits.accepted == 2


def test_a_fresh_server_in_the_middle_of_a_run_grants_no_more_than_at_its_beginning():
    bench = admission()
    permits = bench.buffer.admission
    bench.buffer.set_policy_version(30, "")
    assert permits.capacity == 4  # (max_staleness + 1) * groups_per_step
    assert not permits.acquire(5, math.inf).done
    bench.buffer.set_policy_version(31, "")
    assert permits.capacity == 2 - 1  # the version admits two more, and the fifth permit came out of them


def test_groups_inserted_before_a_fresh_server_hears_of_the_run_still_count():
    bench = admission()
    permits = bench.buffer.admission
    lease = permits.acquire(4, math.inf).result()
    for _ in range(3):
        bench.insert(permits=lease.id)
    bench.take(1)
    bench.buffer.set_policy_version(30, "")
    assert (permits.accepted, permits.running, permits.capacity) == (60 + 2, 1, 1)


def test_only_inserts_into_the_table_that_is_trained_on_use_permits():
    tables = [TableConfig(name="eval", rate_limiter={"type": "queue", "max_size": 9}), queue(size=100)]
    bench = Bench(*tables, admission=AdmissionConfig(table="t", groups_per_step=2, max_staleness=1))
    permits = bench.buffer.admission
    bench.insert("eval")
    assert (permits.accepted, permits.capacity) == (0, 4)
    lease = permits.acquire(2, math.inf).result()
    bench.insert("eval", permits=lease.id)  # an older generator, which asks for permits always
    assert (permits.accepted, permits.running, permits.capacity) == (0, 1, 3)
    bench.insert(permits=lease.id, eval=1.0, t=1.0)
    assert (permits.accepted, permits.running, permits.capacity) == (1, 0, 3)
    bench.take(2, "eval")  # evaluation is no training: the group still counts as not used
    bench.take(1, "eval")
    bench.buffer.delete("t", bench.keys())
    assert permits.accepted == 0


@pytest.mark.parametrize(
    ("tables", "table"),
    [
        ([queue(), TableConfig(name="eval", sampler="fifo")], "t"),
        ([queue(forward_to="pool"), TableConfig(name="eval", rate_limiter=queue().rate_limiter), table("pool")], "t"),
        ([table("pool")], "pool"),
    ],
)
def test_admission_is_of_the_queue_that_is_trained_on(tables, table):
    assert Bench(*tables, admission=AdmissionConfig(groups_per_step=2, max_staleness=1)).buffer.admission.table == table


@pytest.mark.parametrize("name", [None, "nowhere"])
def test_an_admission_that_could_be_of_two_tables_is_refused_with_the_remedy(name):
    tables = [queue(), TableConfig(name="eval", rate_limiter=queue().rate_limiter)]
    with pytest.raises(ValueError, match=r"\[admission\] table = '"):
        Bench(*tables, admission=AdmissionConfig(table=name, groups_per_step=2, max_staleness=1))


@pytest.mark.parametrize(
    ("remover", "priorities", "left"),
    [
        ("fifo", [3.0, 2.0, 1.0, 0.5], [2.0, 1.0, 0.5]),
        ("lifo", [3.0, 2.0, 1.0, 9.0], [3.0, 2.0, 1.0]),
        ("min_heap", [3.0, 2.0, 1.0, 0.5], [3.0, 2.0, 1.0]),
        ("min_heap", [3.0, 2.0, 1.0, 1.5], [3.0, 2.0, 1.5]),
        ("min_heap", [3.0, 2.0, 1.0, 1.0], [3.0, 2.0, 1.0]),
        ("max_heap", [3.0, 2.0, 1.0, 9.0], [3.0, 2.0, 1.0]),
        ("prioritized", [0.0, 0.0, 0.0, 5.0], [0.0, 0.0, 0.0]),
    ],
)
def test_a_remover_chooses_among_the_old_items_and_the_new_one(remover, priorities, left):
    bench = Bench(table(remover=remover, max_size=3))
    keys = [bench.insert(priority=priority) for priority in priorities]
    columns = bench.table().columns
    assert columns.priority[columns.used()].tolist() == left
    assert len(bench.buffer.items) == 3
    counts = bench.table().counts()
    at_once = keys[-1] not in bench.buffer.items
    assert (counts["inserts"], counts["evicted"], counts["evicted_on_arrival"]) == (4, 1, int(at_once))
    assert bench.insert(priority=7.0, key=keys[-1]) == keys[-1]  # a retry changes nothing, wherever the item is
    assert columns.priority[columns.used()].tolist() == left


def test_among_equals_the_older_item_leaves_and_not_the_new_one():
    bench = Bench(table(remover="min_heap", max_size=2))
    keys = [bench.insert() for _ in range(3)]
    assert bench.keys() == keys[1:]


def test_a_uniform_remover_takes_the_new_item_as_often_as_any_other():
    bench = Bench(table(remover="uniform", max_size=3))
    for _ in range(4003):
        bench.insert()
    assert 850 < bench.table().counters.evicted_on_arrival < 1150  # a quarter of 4000, give or take five deviations


@pytest.mark.parametrize("bound", ["table", "server"])
def test_a_new_item_that_is_the_worst_leaves_at_once_when_bytes_are_short(bound):
    bench = (
        Bench(table(remover="min_heap", max_bytes=30))
        if bound == "table"
        else Bench(table(remover="min_heap"), max_bytes=30)
    )
    kept = [bench.insert(priority=2.0), bench.insert(priority=3.0)]
    evicted = []
    bench.insert(priority=1.0, nbytes=20, evicted=evicted)
    assert (bench.keys(), bench.buffer.bytes, evicted) == (kept, 20, [(3, "t")])
    assert bench.table().counters.evicted_on_arrival == 1


def test_a_forwarded_item_may_be_the_worst_of_its_pool_and_leave_at_once():
    bench = Bench(queue(forward_to="pool"), table("pool", remover="min_heap", max_size=2))
    best = [bench.insert(priority=priority) for priority in (3.0, 2.0)]
    worst = bench.insert(priority=1.0)
    bench.take(3)
    assert bench.keys("pool") == best
    assert list(bench.buffer.items) == best
    assert bench.table("pool").counters.evicted_on_arrival == 1
    assert worst not in bench.buffer.items


def test_a_new_group_that_leaves_at_once_gives_its_place_in_admission_back():
    pool = table(remover="min_heap", max_size=1)
    bench = Bench(pool, admission=AdmissionConfig(groups_per_step=2, max_staleness=0))
    permits = bench.buffer.admission
    lease = permits.acquire(2, math.inf).result()
    bench.insert(priority=2.0, permits=lease.id)
    waiting = permits.acquire(2, math.inf)
    bench.insert(priority=1.0, permits=lease.id)
    assert (permits.accepted, permits.running, permits.capacity, waiting.done) == (1, 0, 1, False)


def test_a_row_that_waited_and_leaves_at_once_is_reported_too():
    limiter = {"type": "sample_to_insert_ratio", "samples_per_insert": 1.0, "min_size": 1, "error_buffer": [-9, 2]}
    bench = Bench(table(remover="min_heap", max_size=2, rate_limiter=limiter))
    bench.insert(priority=2.0), bench.insert(priority=3.0)
    evicted = []
    waiting = bench.insert(priority=1.0, evicted=evicted)
    assert not waiting.done
    bench.take(1)
    assert waiting.done
    assert evicted == [(3, "t")]


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


def test_permits_wait_with_a_reason():
    bench = admission()
    permits = bench.buffer.admission
    permits.acquire(4, math.inf)
    waiting = permits.acquire(2, 0.0)
    permits.time_out(waiting)
    assert refusal(waiting.result).message == (
        "permits: there: 0, wanted: 2; the next policy version brings more "
        "(0 accepted + 4 running + 2 requested > (max_staleness 1 + version 0 + 1) * groups_per_step 2 = 4)"
    )


def test_who_asks_for_more_permits_than_are_usually_free_holds_nobody_up():
    bench = admission()
    permits = bench.buffer.admission
    bench.buffer.set_policy_version(0, "")
    many, too_many = permits.acquire(6, math.inf), permits.acquire(1 << 16, 0.0)
    one = permits.acquire(1, math.inf)
    assert (many.done, one.done) == (False, True)
    permits.time_out(too_many)
    assert "; ask for at most 4 at once (" in refusal(too_many.result).message
    permits.release(one.result().id)
    bench.buffer.set_policy_version(1, "")
    assert many.done
    assert "at most 65536" in refusal(permits.acquire, (1 << 16) + 1, math.inf).message
