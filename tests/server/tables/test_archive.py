"""Copies for an archive: what joins them, what goes first, and that all else happens as if they were not there."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_server.config import Config
from replay_server.errors import Refused
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.config import (
    AdmissionConfig,
    RateLimiterConfig,
    SelectorConfig,
    TableConfig,
    admitted_table,
    with_named,
)
from replay_server.tables.extensions.admission import Admission
from replay_server.tables.extensions.forwarding import Copying
from replay_server.tables.table import SampleRequest
from tests.kit.tables import replay_buffer, rows_of

QUEUE = TableConfig(name="rollouts", rate_limiter=RateLimiterConfig(type="queue", max_size=4), forward_to="replay")
POOL = TableConfig(
    name="replay",
    sampler=SelectorConfig(type="fifo"),
    remover=SelectorConfig(type="min_heap"),
    max_size=3,
    max_staleness=2,
)


def make_buffer(*tables: TableConfig, archive: dict | None = {}, **options) -> ReplayBuffer:  # noqa: B006  # not changed
    """`archive`: what the table of copies is told; None: the queue copies nothing."""
    queue, *others = tables or (QUEUE, POOL)
    if archive is not None:
        queue = queue.model_copy(update={"copy_to": "archive"})
        others += [TableConfig(name="archive", **archive)] if archive else []
    return replay_buffer(with_named(None, (queue, *others)), lambda: 100.0, **options)


def insert(buffer: ReplayBuffer, key: int, *tables: str, nbytes: int = 10, version: int = 0, permits: int = 0):
    priorities = dict.fromkeys(tables or ("rollouts",), key)
    row = rows_of([key], priorities, version=version, payload=b"x" * nbytes, permits=permits)
    return buffer.insert(row, math.inf)


def draw(buffer: ReplayBuffer, n: int, table: str = "archive"):
    return buffer.sample(table, SampleRequest(n, n)).result()


def held(buffer: ReplayBuffer, table: str = "archive") -> list[int]:
    columns = buffer.tables[table].columns
    return columns.key[columns.used()].tolist()


def test_what_enters_the_copied_table_joins_the_archive_and_nothing_else_does():
    buffer = make_buffer()
    insert(buffer, 1)
    insert(buffer, 2, "replay")
    insert(buffer, 3, "rollouts", "replay")
    for key in (4, 5):
        insert(buffer, key)
    _, waiting = insert(buffer, 6)
    assert waiting is not None
    assert held(buffer) == [1, 3, 4, 5]
    buffer.acknowledge(draw(buffer, 1, "rollouts")[0])
    assert waiting.done
    assert held(buffer) == [1, 3, 4, 5, 6]


@pytest.mark.parametrize("tables", [("rollouts", "archive"), ("archive",), ("replay", "archive")])
def test_a_client_that_names_the_archive_puts_no_second_row_there(tables):
    buffer = make_buffer(archive={"max_size": 2})
    with pytest.raises(Refused, match=r"item 1 names 'archive', which items of 'rollouts' join: leave it out"):
        insert(buffer, 1, *tables)
    for key in (1, 2, 3):  # as if nobody had tried
        assert insert(buffer, key) == (1, None)
    assert held(buffer) == [2, 3]
    buffer.reset()
    assert buffer.items == {}
    assert buffer.items.bytes == 0


def test_a_sample_of_the_archive_is_served_by_the_insert_that_it_waits_for():
    buffer = make_buffer()
    pending = buffer.sample("archive", SampleRequest(2, 2))
    for key in (1, 2):
        assert not pending.done
        insert(buffer, key)
    assert pending.result()[1].keys.tolist() == [1, 2]


def test_a_full_archive_lets_the_oldest_go_and_counts_them():
    buffer = make_buffer(archive={"max_size": 2})
    for key in (1, 2, 3):
        insert(buffer, key)
    assert held(buffer) == [2, 3]
    assert held(buffer, "rollouts") == [1, 2, 3]
    assert buffer.tables["archive"].counters.evicted_unsampled == 1


def test_when_memory_is_short_the_archive_drops_what_nothing_else_holds():
    buffer = make_buffer()
    for key in (1, 2, 3):
        insert(buffer, key)
    batch, _ = draw(buffer, 1)
    buffer.delete("rollouts", [1, 2])
    Copying.of(buffer).free(math.inf)
    assert held(buffer) == [3]
    assert sorted(buffer.items) == [1, 3]
    buffer.acknowledge(batch)


def test_what_the_archiver_gives_back_may_go_again():
    buffer = make_buffer(max_bytes=20)
    insert(buffer, 1)
    batch, _ = draw(buffer, 1)
    buffer.delete("rollouts", [1])
    buffer.requeue(batch)
    for key in (2, 3):
        assert insert(buffer, key) == (1, None)
    assert held(buffer) == [2, 3]


def test_a_later_column_goes_into_the_archive_too_and_is_refused_when_only_the_archive_has_the_item():
    buffer = make_buffer()
    insert(buffer, 1)
    buffer.extend(1, ["value"], (b"later",))
    _, batch = draw(buffer, 1)
    assert batch.sizes.tolist() == [15]
    buffer.delete("rollouts", [1])
    assert buffer.extend(1, ["other"], (b"later",)) is None


# ------------------------------------------------------------------------------------------------ transparency

OPERATION = st.one_of(
    st.tuples(
        st.just("insert"), st.sampled_from([("rollouts",), ("replay",), ("rollouts", "replay")]), st.integers(5, 20)
    ),
    st.tuples(st.just("permit"), st.integers(1, 2)),
    st.tuples(st.just("sample"), st.sampled_from(["rollouts", "replay"]), st.integers(1, 2)),
    st.tuples(st.sampled_from(["acknowledge", "requeue"]), st.integers(0, 3)),
    st.tuples(st.just("delete"), st.sampled_from(["rollouts", "replay"]), st.integers(0, 5)),
    st.tuples(st.just("version")),
    st.tuples(st.just("reset"), st.sampled_from(["rollouts", "replay"])),
    st.tuples(st.just("archiver"), st.sampled_from(["draw", "acknowledge", "requeue", "reset", "delete"])),
)


class Side:
    """One of two buffers that are told the same. What it answers is what clients, trainers and generators see."""

    def __init__(self, archive: dict | None, max_bytes: int | None) -> None:
        admission = AdmissionConfig(fresh_groups_per_step=2, max_staleness=1)
        self.buffer = make_buffer(archive=archive, max_bytes=max_bytes, admission=admission)
        self.batches: list[int] = []
        self.archived: list[int] = []
        self.waiting: list = []
        self.keys: list[int] = []

    def do(self, number: int, operation: tuple) -> object:
        try:
            return self._do(number, *operation)
        except Refused as refusal:
            return refusal.code, refusal.message

    def _do(self, number: int, name: str, *given) -> object:
        buffer = self.buffer
        if name == "insert":
            tables, nbytes = given
            self.keys.append(number)
            done, pending = insert(buffer, number, *tables, nbytes=nbytes, version=buffer.policy.version, permits=1)
            self.waiting += [] if pending is None else [pending]
            return done
        if name == "permit":
            self.waiting.append(Admission.of(buffer).acquire(given[0], math.inf, 1))
        elif name == "sample":
            pending = buffer.sample(given[0], SampleRequest(given[1], 1), 100.0)
            if not pending.done:
                buffer.time_out(pending)
            batch_id, batch = pending.result()
            self.batches.append(batch_id)
            return batch.keys.tolist(), batch.priorities.tolist(), batch.sizes.tolist()
        elif name in ("acknowledge", "requeue") and self.batches:
            end = buffer.acknowledge if name == "acknowledge" else buffer.requeue
            return end(self.batches.pop(given[0] % len(self.batches)))
        elif name == "delete" and self.keys:
            return buffer.delete(given[0], [self.keys[given[1] % len(self.keys)]])
        elif name == "version":
            buffer.set_policy_version(buffer.policy.version + 1, "")
        elif name == "reset":
            return buffer.reset(given[0])
        elif name == "archiver" and Copying.of(buffer) is not None:
            self._archive(given[0])
        return None

    def _archive(self, act: str) -> None:
        buffer = self.buffer
        if act == "draw" and held(buffer):
            self.archived.append(draw(buffer, 1)[0])
        elif act in ("acknowledge", "requeue") and self.archived:
            (buffer.acknowledge if act == "acknowledge" else buffer.requeue)(self.archived.pop())
        elif act == "reset":
            buffer.reset("archive")
        elif act == "delete":
            buffer.delete("archive", held(buffer)[:1])

    def seen(self) -> object:
        tables = [
            (held(self.buffer, name), table.counts(), table.bytes, table.limiter.size, table.outstanding)
            for name in ("rollouts", "replay")
            for table in [self.buffer.tables[name]]
        ]
        admission = Admission.of(self.buffer)
        return tables, admission.capacity, admission.accepted, [each.done for each in self.waiting]


@pytest.mark.parametrize("max_bytes", [None, 60], ids=["no bound", "a full server"])
@given(operations=st.lists(OPERATION, max_size=40))
def test_with_an_archive_everything_else_happens_as_without(max_bytes, operations):
    """Under a bound of bytes the archiver draws nothing here: what it has in its hands counts as any reader's does."""
    plain, archiving = Side(None, max_bytes), Side({"max_size": 5}, max_bytes)
    for number, operation in enumerate(operations, start=1):
        if max_bytes is not None and operation[0] == "archiver" and operation[1] == "draw":
            continue
        assert archiving.do(number, operation) == plain.do(number, operation)
        assert archiving.seen() == plain.seen()


# ------------------------------------------------------------------------------------------------ rollback


def test_a_rollback_spares_the_archive():
    buffer = make_buffer(QUEUE.model_copy(update={"retain_consumed": 2}), POOL)
    buffer.set_policy_version(0, "", state="s0")
    insert(buffer, 1)
    buffer.acknowledge(draw(buffer, 1, "rollouts")[0])
    buffer.set_policy_version(1, "")
    insert(buffer, 2, version=1)
    buffer.set_policy_version(0, "", rollback=True, state="s0")
    assert held(buffer, "rollouts") == [1]
    assert held(buffer) == [1, 2]
    assert buffer.tables["archive"].counters.inserts == 2


def test_the_archive_goes_before_what_is_kept_for_a_rollback():
    buffer = make_buffer(QUEUE.model_copy(update={"retain_consumed": 1}), POOL, max_bytes=30)
    buffer.set_policy_version(0, "", state="s0")
    insert(buffer, 1, "rollouts")
    buffer.delete("rollouts", [1])
    insert(buffer, 2)
    buffer.acknowledge(draw(buffer, 1, "rollouts")[0])
    buffer.delete("replay", [2])
    for key in (3, 4):
        insert(buffer, key)
    assert held(buffer) == [2, 3, 4]
    assert list(buffer.tables["rollouts"].columns.retained) == [2]


# ------------------------------------------------------------------------------------------------ configuration


def test_copies_are_declared_by_their_name_alone_or_with_what_a_user_says_of_them():
    queue = QUEUE.model_copy(update={"copy_to": "archive"})
    assert [table.name for table in Config(tables=(queue, POOL)).tables] == ["rollouts", "replay", "archive"]
    told = TableConfig(name="archive", max_size=7, requires=["value"])
    made = Config(tables=(told, queue, POOL)).tables[0]
    assert made.name == "archive"
    assert made.max_size == 7
    assert made.max_bytes == 2 << 30
    assert made.requires == ("value",)
    assert made.sampler.type == "fifo"
    assert made.remover.type == "fifo"
    assert made.max_times_sampled == 1


def test_copies_are_not_what_is_trained_on():
    pool = POOL.model_copy(update={"copy_to": "archive"})
    tables = with_named(None, (pool,))
    assert admitted_table(AdmissionConfig(fresh_groups_per_step=1, max_staleness=0), tables) == "replay"


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ([{"name": "a", "copy_to": "a"}], "table 'a' cannot forward or copy to itself"),
        ([{"name": "a", "copy_to": "c"}, {"name": "b", "copy_to": "c"}], "copy_to = 'c' stands at two tables"),
        (
            [{"name": "a", "copy_to": "c"}, {"name": "c", "max_times_sampled": 2}],
            "table 'c' is of copies of 'a': leave",
        ),
        ([{"name": "a", "copy_to": "c"}, {"name": "c", "copy_to": "d"}], "table 'c' is of copies of 'a': leave"),
    ],
    ids=["itself", "two sources", "drawn twice", "copies of copies"],
)
def test_a_mistake_about_copies_is_named_with_its_remedy(tables, said):
    with pytest.raises(ValueError, match=said):
        Config(tables=tables)
