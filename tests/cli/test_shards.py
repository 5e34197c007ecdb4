"""The commands over several servers, and `replay shards` where there is no cluster."""

import json
import os
import shlex
import signal
from collections.abc import Iterator

import pytest

from replay_client import ReplayClient
from replay_server import ReplayServer, TableConfig
from tests.kit.processes import ServerProcess, fails, run_replay, start_server


@pytest.fixture
def servers() -> Iterator[list[ReplayServer]]:
    servers = [ReplayServer([TableConfig(name="pool", sampler="prioritized", max_bytes=10**9)], 0) for _ in range(2)]
    for server in servers:
        server.start()
    yield servers
    for server in servers:
        server.stop()


def test_tables_and_doctor_show_the_whole_and_each_server_on_request(servers):
    addresses = [server.address for server in servers]
    every = ",".join(addresses)
    with ReplayClient(addresses) as client:
        for _ in range(20):
            client.insert(b"x", {"pool": 1.0})
    whole = json.loads(run_replay("tables", "--json", address=every).stdout)
    assert whole["tables"]["pool"]["size"] == 20
    assert "shards" not in whole
    shards = json.loads(run_replay("tables", "--json", "--by-shard", address=every).stdout)["shards"]
    assert list(shards) == addresses
    assert sum(shard["tables"]["pool"]["size"] for shard in shards.values()) == 20
    assert all(address in run_replay("tables", "--by-shard", address=every).stdout for address in addresses)
    assert f"{addresses[1]} pool" in run_replay("doctor", "--by-shard", address=every).stdout
    # The mark of the next page is JSON here: the shell must hand it over as it is.
    line = run_replay("items", "pool", "--limit", "3", address=every).stdout.splitlines()[-1]
    mark = shlex.split(line.partition("add --page ")[2])
    assert len(mark) == 1
    assert run_replay("items", "pool", "--limit", "3", "--page", *mark, address=every).returncode == 0
    servers[1].stop(grace=0)
    assert run_replay("tables", "--by-shard", address=every).stdout.count(f"{addresses[1]}  does not answer") == 1
    done = run_replay("doctor", address=every)
    assert done.returncode == 1
    assert f"failure  shard {addresses[1]}: does not answer" in done.stdout


@pytest.fixture
def two() -> Iterator[list[ServerProcess]]:
    two = [start_server() for _ in range(2)]
    yield two
    for server in two:
        server.kill()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["hangs", "is away"])
def test_tables_names_a_server_of_several_that(two, number):
    every, other = f"{two[0].address},{two[1].address}", two[1].address
    assert json.loads(run_replay("tables", "--json", address=every).stdout)["gone"] == []
    os.kill(two[1].process.pid, number)
    assert json.loads(run_replay("tables", "--json", address=every).stdout)["gone"] == [other]
    assert run_replay("tables", address=every).stdout.count(f"{other}  does not answer") == 1
    assert "gone" not in json.loads(run_replay("tables", "--json", address=two[0].address).stdout)


@pytest.mark.parametrize(
    "command", [("up", "--shards", "2"), ("status",), ("down", "--yes"), ("resize", "--shards", "2")]
)
def test_without_a_cluster_shards_says_so_in_one_line(command):
    said = fails("shards", "--ray-address", "127.0.0.1:1", *command)
    assert said.startswith("replay: no Ray cluster answers at 127.0.0.1:1")


def test_memory_that_is_no_size_is_named():
    assert "'much' is not a size" in fails("shards", "up", "--shards", "1", "--memory", "much")
