"""A trainer goes back to an older state: what becomes of each group, line by line of docs/reference/failures.md.

The lines are played on a server in this process, and on a durable one that is killed and started again after each line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from replay_client import ReplayClient, Sample
from replay_client.errors import InvalidRequestError, StaleItemError
from replay_client.testing import make_group
from replay_server import ReplayServer
from replay_server.config import Config
from tests.kit.processes import free_port, server_process

CONFIG = """
admission = { fresh_groups_per_step = 2, max_staleness = 8, table = "rollouts" }
tables = [
    { name = "rollouts", rate_limiter = { type = "queue", max_size = 64 }, retain_consumed = 2, forward_to = "replay" },
    { name = "replay", sampler = "prioritized", remover = "min_heap" },
]
"""


@contextmanager
def played(folder: Path, kills: bool) -> Iterator[tuple[ReplayClient, Callable[[], None]]]:
    """A client of a server, and what is called after each line."""
    with ExitStack() as stack:
        if not kills:
            (folder / "replay.toml").write_text(CONFIG + 'server.listen = "127.0.0.1:0"')
            server = stack.enter_context(ReplayServer.from_config(Config.load(folder / "replay.toml")))
            yield stack.enter_context(ReplayClient(server.address)), lambda: None
            return
        config = CONFIG + f'server.data_dir = "{folder}/data"\n'
        address = f"127.0.0.1:{free_port()}"
        servers = [stack.enter_context(server_process(folder, config, address))]

        def kill() -> None:
            servers[-1].kill()
            servers.append(stack.enter_context(server_process(folder, config, address)))

        yield stack.enter_context(ReplayClient(address, timeout=120.0)), kill


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(False, id="on a server that lives"),
        pytest.param(True, id="with a kill at each line", marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
def test_a_trainer_that_goes_back_finds_what_the_table_says(tmp_path, kills):
    with played(tmp_path, kills) as (client, line):

        def insert(version: int, priority: float = 0.0) -> int:
            permits = client.acquire_permits(1)
            key: int = client.insert(make_group(version=version), {"rollouts": priority}, permits=permits)
            return key

        def lease(key: int) -> Sample:
            with client.sampler("rollouts", batch_size=1, timeout=60.0, lease=600.0) as stream:
                ((sample,),) = [next(iter(stream))]
            assert sample.info.key == key
            return sample

        def consume(*keys: int) -> None:
            for key in keys:
                client.acknowledge([lease(key)])
            line()

        def save(version: int) -> None:
            client.set_policy_version(version, state=f"state-{version}")
            line()

        def go_back(version: int) -> None:
            client.set_policy_version(version, rollback=True, state=f"state-{version}")
            line()

        def queue() -> list[int]:
            return [item.key for item in client.list_items("rollouts", descending=True)]

        def accepted() -> int:
            admission = client.server_info().admission
            assert admission is not None
            return int(admission.accepted)

        beyond = insert(0)
        size = client.server_info().bytes
        consume(beyond)
        save(1)
        before = insert(1)
        consume(before)
        save(2)
        assert client.get([beyond]) == []  # consumed before the second last state
        informative, dull = insert(2, 1.0), insert(2)
        consume(informative, dull)
        client.update_priorities("replay", {informative: 0.25})
        client.sample("replay", 1)
        client.set_policy_version(3)
        undone = insert(3, 1.0)
        consume(undone)
        leased = insert(2)
        held = lease(leased)
        deleted, waiting, undone_waiting = insert(2), insert(2), insert(3)
        client.delete("rollouts", [deleted])
        line()
        assert client.server_info().tables["rollouts"].retained == 4

        for _ in range(2):  # the second time nothing changes
            go_back(2)
            assert queue() == [informative, dull, waiting]
            assert client.get([beyond, undone, undone_waiting, deleted]) == []
            info = client.server_info()
            assert info.policy.version == 2
            assert info.policy.state == "state-2"
            table, pool = info.tables["rollouts"], info.tables["replay"]
            assert table.retained == 1
            assert table.restored == 3
            assert table.undone == 2
            assert pool.undone == 1
            assert info.items == 5  # with the leased one, and the one of before the state
            assert info.bytes == 5 * size
            assert accepted() == 2 * 2 + 4
            (in_pool,) = client.list_items("replay")
            assert in_pool.key == informative
            assert in_pool.priority == 0.25
            assert in_pool.times_sampled == 1
        with pytest.raises(StaleItemError, match="which a rollback to version 2 has undone"):
            client.insert(make_group(version=3), {"rollouts": 1.0})

        client.acknowledge([held], requeue=True)
        line()
        assert queue() == [informative, dull, leased, waiting]
        consume(informative, dull, leased, waiting)
        assert client.server_info().tables["replay"].inserts == 2  # nothing joined the pool again
        go_back(1)
        assert queue() == [before]  # the others were generated by version 2
        with pytest.raises(InvalidRequestError, match="this server knows 'state-1' \\(version 1\\)"):
            go_back(2)
        with pytest.raises(InvalidRequestError, match="'state-1' is of version 1, and not of 0"):
            client.set_policy_version(0, rollback=True, state="state-1")
        consume(before)
        assert accepted() == 1 * 2 + 1
