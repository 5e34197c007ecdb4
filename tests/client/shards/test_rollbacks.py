"""States and rollbacks over several servers: what a shard misses while it is away, it hears when it comes back."""

from __future__ import annotations

from collections.abc import Callable

from replay_client import ReplayClient, ServerInfo, ShardedInfo
from replay_client.testing import until
from replay_server import ReplayServer, TableConfig
from tests.kit.processes import free_port

QUEUE = TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 100}, retain_consumed=2)


def test_a_shard_hears_of_states_and_rollbacks_that_it_missed_when_it_comes_back(tmp_path):
    servers = [ReplayServer([QUEUE], free_port(), data_dir=tmp_path / str(place)) for place in range(2)]
    for server in servers:
        server.start()
    addresses = [server.address for server in servers]

    def info() -> ShardedInfo:
        found = client.server_info()
        assert isinstance(found, ShardedInfo)
        return found

    def second() -> ServerInfo | None:
        return info().shards.get(addresses[1])

    def without_the_second(act: Callable[[], object]) -> None:
        servers[1].stop(grace=0)
        until(lambda: info().gone == (addresses[1],))
        act()
        servers[1] = ReplayServer([QUEUE], int(addresses[1].rpartition(":")[2]), data_dir=tmp_path / "1")
        servers[1].start()

    def go_back() -> None:
        client.set_policy_version(2, rollback=True, state="second")
        client.set_policy_version(3)

    with ReplayClient(addresses, timeout=60.0) as client:
        for _ in range(30):
            client.insert(b"", {"queue": 1.0})
        client.sample("queue", 10)
        client.set_policy_version(1, state="first")
        client.sample("queue", 10)
        without_the_second(lambda: client.set_policy_version(2, state="second"))
        found = until(lambda: (there := second()) and there.policy.state == "second" and there)
        last = found.tables["queue"].size
        client.sample("queue", 10)

        without_the_second(go_back)
        found = until(lambda: (there := second()) and there.policy.version == 3 and there)
        assert found.tables["queue"].size == last
        assert info().tables["queue"].size == 10
        client.set_policy_version(1, rollback=True, state="first")
        assert info().tables["queue"].size == 20
    for server in servers:
        server.stop(grace=0)
