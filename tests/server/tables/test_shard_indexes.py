"""Places: several servers share the permits of a run exactly, whoever comes, goes, or is told late."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_server.errors import Refused
from replay_server.tables.config import AdmissionConfig
from replay_server.tables.extensions.admission import Admission, share_of
from replay_server.tables.extensions.extension import ShardIndex
from tests.server.tables.test_buffer import Bench, queue

GROUPS = 7


@given(st.integers(1, 1 << 30), st.integers(1, 4096))
def test_the_shares_of_all_servers_sum_to_the_groups_of_a_step(groups, servers):
    shares = [share_of(groups, ShardIndex(number, servers)) for number in range(servers)]
    assert sum(shares) == groups
    assert max(shares) - min(shares) <= 1
    assert share_of(groups, ShardIndex()) == groups
    assert share_of(groups, ShardIndex(0, 0)) == 0


def make_server(max_staleness: int = 0) -> Bench:
    return Bench(queue(size=1000), admission=AdmissionConfig(fresh_groups_per_step=GROUPS, max_staleness=max_staleness))


def permits_of(bench: Bench) -> Admission:
    return Admission.of(bench.buffer)


def test_a_server_that_nobody_told_its_place_grants_all_and_a_trainer_knows_better_than_a_generator():
    server = permits_of(bench := make_server())
    assert server.capacity == GROUPS
    server.acquire(1, math.inf, shard_index=ShardIndex(0, 3))
    assert server.capacity == 2 - 1
    server.acquire(1, math.inf, shard_index=ShardIndex())  # another generator sees only this one
    assert server.capacity == 2 - 2
    bench.buffer.set_policy_version(0, "", shard_index=ShardIndex(1, 2))
    assert server.capacity == 4 - 2
    server.acquire(1, math.inf, shard_index=ShardIndex(0, 3))
    bench.buffer.set_policy_version(1, "")  # a client that knows no place changes nothing about it
    assert server.capacity == 2 * 4 - 3


def test_a_server_without_a_place_grants_nothing_and_says_so():
    bench = make_server()
    bench.buffer.set_policy_version(3, "", shard_index=ShardIndex(0, 0))
    waiting = permits_of(bench).acquire(1, 0.0)
    permits_of(bench).time_out(waiting)
    with pytest.raises(Refused, match=r"0 of earlier steps \+ \(max_staleness 0 \+ 1\) \* 0 a step = 0"):
        waiting.result()


def move(lease: int, drains: Bench, other: Bench, **insert) -> None:
    """A group with a permit of a server that drains goes to another one. Then that one hears of it."""
    other.insert(permits=lease, moved=True, **insert)
    permits_of(drains).release(lease, 1, moved=True)


def test_a_release_for_groups_that_moved_returns_no_more_permits_than_were_left():
    server = permits_of(make_server())
    lease = server.acquire(2, math.inf).result().id
    assert server.release(lease, 5, moved=True) == 2
    assert server.running == 0
    assert server.capacity == GROUPS - 5


def test_a_permit_that_moves_with_its_group_counts_once_also_if_its_lease_has_ended():
    drains, other = make_server(), make_server()
    left, there = permits_of(drains), permits_of(other)
    lease = left.acquire(2, math.inf).result().id
    move(lease, drains, other, key=5)
    assert left.running == 1
    assert left.capacity == 5
    assert there.capacity == 7
    drains.now += 1e6
    left.expire()
    move(lease, drains, other)
    assert left.running == 0
    assert left.capacity == 5
    assert there.capacity == 7
    other.buffer.delete("t", [5])  # nobody sampled it
    assert there.capacity == 8


def test_a_server_hands_over_only_what_the_next_version_does_not_change():
    server = permits_of(bench := make_server())
    bench.insert(permits=server.acquire(1, math.inf).result().id)
    assert server.hand_over() == 1  # no trainer was ever there
    bench.buffer.set_policy_version(1, "", shard_index=ShardIndex(1, 2))
    assert server.hand_over() is None
    bench.buffer.set_policy_version(1, "", shard_index=ShardIndex(0, 0))
    assert server.hand_over() == -4  # the share of version 1


class Run:
    """Servers, a trainer that tells all of them each version and their places, and generators that use all permits."""

    def __init__(self, max_staleness: int) -> None:
        self.ahead, self.version, self.generated = max_staleness + 1, 0, 0
        self.servers: list[Bench] = []
        self.old: list[Bench] = []
        self.join()

    def tell(self, version: int) -> None:
        for bench in [*self.servers, *self.old]:
            shard_index = (
                ShardIndex(self.servers.index(bench), len(self.servers)) if bench in self.servers else ShardIndex(0, 0)
            )
            bench.buffer.set_policy_version(version, "", shard_index=shard_index)
        self.version = version

    def join(self) -> None:
        self.servers.append(make_server(self.ahead - 1))
        self.tell(self.version)

    def leave(self, which: int) -> None:
        self.old.append(self.servers.pop(which % len(self.servers)))
        self.tell(self.version)

    def go(self) -> None:
        for bench in self.old:
            permits_of(self.servers[0]).take_over(permits_of(bench).hand_over())
            assert permits_of(bench).hand_over() == 0  # the command may be given again
        self.old = []

    def generate(self) -> None:
        for bench in [*self.servers, *self.old]:
            for _ in range(max(0, permits_of(bench).capacity)):
                lease = permits_of(bench).acquire(1, math.inf).result().id
                if bench in self.servers:
                    bench.insert(version=self.version, permits=lease)
                else:
                    assert permits_of(bench).hand_over() is None
                    move(lease, bench, self.servers[-1], version=self.version)
                self.generated += 1

    @property
    def capacity(self) -> int:
        return sum(permits_of(bench).capacity for bench in [*self.servers, *self.old])


@given(st.integers(0, 2), st.lists(st.sampled_from(["step", "join", "leave 0", "leave 1", "go"]), max_size=30))
def test_servers_that_come_and_go_change_nothing_about_the_permits_of_all_together(max_staleness, what):
    run = Run(max_staleness)
    for each in what:
        verb, _, which = each.partition(" ")
        if verb == "step":
            run.generate()
            assert run.generated >= (run.version + 1) * GROUPS, "the next step would wait for ever"
            run.tell(run.version + 1)
        elif verb != "leave":
            getattr(run, verb)()
        elif len(run.servers) > 1:
            run.leave(int(which))
        assert run.capacity == (run.version + run.ahead) * GROUPS - run.generated
