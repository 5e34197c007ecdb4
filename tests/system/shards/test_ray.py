"""Shards in a real Ray cluster of three nodes on this machine: killed, moved and left alone, under load.

The accounting is that of the kill tests: each acknowledged item is delivered or still there, and none comes twice.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from replay_client import ReplayClient
from replay_client.testing import until
from replay_server import ReplayServer, TableConfig, shards
from replay_server.config import AdmissionConfig, Config, SecurityConfig
from replay_server.shards import ShardError, ShardStatus
from tests.kit.faults import Books, Crew
from tests.kit.groups import keys_in
from tests.system.scenarios.ray_cluster import wait_longer_for_nodes

ADDRESS = "ray://replay/replay"
TABLES = (
    TableConfig(name="work", sampler="fifo", max_times_sampled=1),
    TableConfig(name="keep", sampler="prioritized"),
)
INSECURE = SecurityConfig(insecure=True)
"""Ray gives a shard the address of its node, which other machines may reach."""
CONFIG = Config(tables=TABLES, security=INSECURE)
BATCH = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    wait_longer_for_nodes()
    memory = 80 << 20
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "object_store_memory": memory})
    for _ in range(2):
        cluster.add_node(num_cpus=4, object_store_memory=memory)
    ray.init(address=cluster.address, namespace="tests", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def service(cluster, tmp_path) -> Iterator[list[ShardStatus]]:
    yield shards.up(3, CONFIG, data_dir=tmp_path)
    shards.down()


class Load(Crew):
    """A writer and a reader at work until `stop`, and what they know for sure."""

    def __init__(self) -> None:
        self.acknowledged: set[int] = set()
        self.unsure: set[int] = set()
        self.kept: set[int] = set()
        self.delivered: list[int] = []
        self._key = 0
        super().__init__(ADDRESS, Books(), [self.write, self.keep, self.read], timeout=30.0)

    def write(self, client: ReplayClient) -> None:
        self._key += 1
        self.unsure.add(self._key)
        client.insert(str(self._key).encode(), {"work": 1.0}, key=self._key)
        self.acknowledged.add(self._key)

    def keep(self, client: ReplayClient) -> None:
        self.kept.add(client.insert(b"kept", {"keep": 1.0}))

    def read(self, client: ReplayClient) -> None:
        for sample in client.sample("work", BATCH, timeout=1.0):
            assert bytes(sample.payload) == str(sample.info.key).encode()
            self.delivered.append(sample.info.key)

    def end(self) -> None:
        # A kill can leave a part of a batch open: its shard went away before it confirmed that the reader has it. The
        # reader asks again in its next batch after it has found the shard, which on a busy machine can take a while.
        for client in self.clients:
            until(lambda client=client: client.server_info().gone == ())
        delivered = len(self.delivered)
        until(lambda: len(self.delivered) > delivered + 5 * BATCH)
        self.stop()
        assert self.books.violations == []

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check(self) -> None:
        """Nothing twice, nothing invented, and no acknowledged item gone."""
        assert len(self.delivered) == len(set(self.delivered))
        with ReplayClient(ADDRESS, timeout=30.0) as client:
            until(lambda: client.server_info().gone == ())
            there = keys_in(client, "work")
            assert len(there) == len(set(there))
            assert set(there).isdisjoint(self.delivered)
            assert {*there, *self.delivered} <= self.unsure
            assert self.acknowledged <= {*there, *self.delivered}
            kept = keys_in(client, "keep")
            assert self.kept <= set(kept)
            assert len(kept) == len(set(kept))
        assert len(self.delivered) > 20


def kill_shard(number: int) -> None:
    """Kills a shard, and waits until Ray has started it again."""
    pid = shards.status()[number].pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: (now := shards.status()[number]).is_up and now.pid != pid)


def kill_and_wait(load: Load, number: int) -> None:
    """Kills a shard, and waits until it is back and inserts go on."""
    inserted = len(load.kept)
    kill_shard(number)
    until(lambda: len(load.kept) > inserted + 10)


@pytest.mark.long
def test_shards_spread_and_come_back_under_load_after_kills_with_what_they_held(service):
    assert len({shard.node for shard in service}) == 3
    with Load() as load:
        until(lambda: len(load.delivered) > 20)
        kill_and_wait(load, 1)
        kill_and_wait(load, 0)
        load.end()
        load.check()
    assert sorted(shard.restarted for shard in shards.status()) == [False, True, True]


@pytest.mark.long
def test_a_node_that_is_removed_costs_its_share_until_its_shard_runs_on_another(cluster, service):
    node = cluster.add_node(num_cpus=4, object_store_memory=80 << 20, resources={"last": 1})
    with Load() as load:
        until(lambda: len(load.delivered) > 20)
        victim = next(each for each in cluster.worker_nodes if each is not node)
        lost = [shard.name for shard in service if shard.node == victim.node_id]
        assert lost
        cluster.remove_node(victim, allow_graceful=False)
        # Ray may take the shard on the node that is gone for alive for some seconds.
        until(lambda: victim.node_id not in {shard.node for shard in shards.status()})
        until(lambda: len(shards.status()) == 3 and all(shard.is_up for shard in shards.status()))
        inserted = len(load.kept)
        until(lambda: len(load.kept) > inserted + 10)
        load.end()
        load.check()
    assert victim.node_id not in {shard.node for shard in shards.status()}


@pytest.mark.long
def test_two_drivers_at_once_start_the_same_shards_and_these_outlive_both(cluster, tmp_path):
    program = (
        "import sys; from replay_server import shards, SecurityConfig, TableConfig\n"
        "from replay_server.config import Config\n"
        "tables = (TableConfig(name='work'), TableConfig(name='keep'))\n"
        "config = Config(tables=tables, security=SecurityConfig(insecure=True))\n"
        "found = shards.up(2, config, data_dir=sys.argv[1], ray_address=sys.argv[2])\n"
        "print(*(shard.pid for shard in found))"
    )
    command = [sys.executable, "-c", program, str(tmp_path), cluster.address]
    drivers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [driver.communicate(timeout=120)[0].split() for driver in drivers]
    try:
        assert outputs[0] == outputs[1]
        assert [str(shard.pid) for shard in shards.status()] == outputs[0]
        with ReplayClient(ADDRESS, timeout=30.0) as client:
            assert client.get([client.insert(b"", {"keep": 1.0})])
        with pytest.raises(ShardError, match="to have 1, use resize"):
            shards.up(1, CONFIG)
    finally:
        assert shards.down() == ["replay-0", "replay-1"]
    assert shards.status() == []


@pytest.mark.long
def test_resize_empties_a_shard_before_it_goes_and_clients_follow(service, tmp_path):
    with ReplayClient(ADDRESS, timeout=30.0) as client, client.writer() as writer:
        keys = {writer.insert(b"", {"work": 1.0}) for _ in range(60)}  # with fewer, chance could leave a shard empty
        writer.flush()
        with pytest.raises(ShardError, match=r"resize is refused for now: replay-2 holds \d+ items"):
            shards.resize(2, CONFIG, data_dir=tmp_path)
        held = next(shard.items for shard in shards.status() if shard.name == "replay-2")
        keys |= {writer.insert(b"", {"work": 1.0}) for _ in range(30)}
        keys |= {client.insert(b"", {"work": 1.0}) for _ in range(30)}
        writer.flush()
        assert next(shard.items for shard in shards.status() if shard.name == "replay-2") == held
        taken = {sample.info.key for _ in range(12) for sample in client.sample("work", 10)}
        assert taken == keys
        assert [shard.name for shard in shards.resize(2, CONFIG, data_dir=tmp_path)] == ["replay-0", "replay-1"]
        until(lambda: len(client.server_info().shards) == 2 and client.server_info().gone == ())
        assert len(shards.resize(4, CONFIG, data_dir=tmp_path)) == 4
        until(lambda: len(client.server_info().shards) == 4)


@pytest.mark.long
def test_a_shard_that_goes_hands_over_the_permits_that_it_has_granted(cluster):
    admission = AdmissionConfig(fresh_groups_per_step=4, max_staleness=0, table="work")
    config = Config(tables=TABLES, admission=admission, security=INSECURE)
    shards.up(2, config)
    try:
        with ReplayClient(ADDRESS, timeout=30.0) as client:
            client.set_policy_version(0)
            for _ in range(4):
                client.insert(b"", {"work": 1.0}, permits=client.acquire_permits(1))
            assert client.server_info().admission.capacity == 0
            client.sample("work", 4)
            with pytest.raises(ShardError, match="replay-1 has permits in use, or a share of the next version"):
                shards.resize(1, config)
            client.set_policy_version(1)
            assert client.server_info().admission.capacity == 4
            assert [shard.name for shard in shards.resize(1, config)] == ["replay-0"]
            until(lambda: len(client.server_info().shards) == 1)
            assert client.server_info().admission.capacity == 4
            client.set_policy_version(2)
            assert client.server_info().admission.capacity == 8
    finally:
        shards.down()


@pytest.mark.long
@pytest.mark.parametrize("on_disk", [True, False], ids=["on disk", "in memory"])
def test_a_draining_shard_that_ray_restarts_takes_no_new_key_until_the_drain_is_taken_back(cluster, tmp_path, on_disk):
    folder = tmp_path if on_disk else None
    shards.up(2, CONFIG, data_dir=folder)
    try:
        insert_with_new_client(30)
        with pytest.raises(ShardError, match=r"resize is refused for now: replay-1 holds \d+ items"):
            shards.resize(1, CONFIG, data_dir=folder)
        kill_shard(1)
        held = shards.status()[1]
        assert held.draining
        assert bool(held.items) == on_disk
        insert_with_new_client(60)
        assert shards.status()[1].items == held.items
        shards.resize(2, CONFIG, data_dir=folder)
        kill_shard(1)
        assert not shards.status()[1].draining
        insert_with_new_client(60)
        assert shards.status()[1].items > held.items
    finally:
        shards.down()


def insert_with_new_client(items: int) -> None:
    """Inserts by a client that has not heard of any refusal."""
    with ReplayClient(ADDRESS, timeout=30.0) as client:
        for _ in range(items):
            client.insert(b"", {"keep": 1.0})


@pytest.mark.parametrize("count", [1, 3, 7])
def test_all_shards_have_one_configuration_and_each_has_a_folder(count, tmp_path):
    config = Config(tables=TABLES, admission=AdmissionConfig(fresh_groups_per_step=2, max_staleness=1, table="work"))
    parts = shards.shard_configs(config, count, tmp_path, "replay", 0)
    assert {part.admission for part in parts} == {config.admission}
    assert len({part.server.data_dir for part in parts}) == count


@pytest.mark.parametrize("insecure", [False, True])
def test_a_shard_listens_where_others_reach_it_only_if_the_caller_says_so(insecure, tmp_path):
    config = Config(tables=TABLES, security=SecurityConfig(insecure=insecure))
    (part,) = shards.shard_configs(config, 1, tmp_path, "replay", 0)
    server = ReplayServer.from_config(part, {})
    refused = pytest.raises(ValueError, match=r"refusing to listen on 0\.0\.0\.0:0 without tokens: .*--insecure")
    with nullcontext() if insecure else refused, server:
        assert server.address
