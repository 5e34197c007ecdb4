"""What our trainer alone promises of a kill: with groups left over, servers that restart, and older states.

`tests/contracts/test_trainer.py` kills it in each phase of a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from replay_client import ReplayClient
from replay_client.scoring import group_priority
from replay_client.testing import make_group, until
from replay_server import ReplayServer
from replay_server.config import DEFAULT_TABLES
from tests.kit.processes import free_port, server_process
from tests.kit.trainers import OnStep
from tests.trainer.killed_trainer import kill_in_a_process, run, trained

# The limit is a guard against hanging; processes start where others may be busy.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
STEPS, GROUPS = 4, 2


def durable(folder: Path) -> str:
    """The default tables on a disk."""
    return f"""
    server.data_dir = "{folder}/data"
    tables = [
        {{ name = "rollouts", rate_limiter = {{ type = "queue", max_size = 64 }}, forward_to = "replay" }},
        {{ name = "replay", sampler = "prioritized", remover = "min_heap" }},
    ]
    """


@pytest.fixture
def client() -> Iterator[ReplayClient]:
    with ReplayServer(DEFAULT_TABLES, port=0) as server, ReplayClient(server.address) as connected:
        yield connected


def insert(client: ReplayClient, count: int = STEPS * GROUPS, *, flat: int = 0) -> list[int]:
    """Groups of different tokens; every `flat`th one without variance, if that is not 0. Returns the other keys."""
    keys = []
    for index in range(count):
        rewards = [1.0, 1.0] if flat and index % flat == 0 else [1.0, 0.0]
        group = make_group(rewards=rewards, completions=[[3 + index % 12, 6], [7, 3 + index % 5]], logprobs=-2.7)
        key = client.insert(group, {"rollouts": group_priority(group.rewards, group.advantages)})
        if rewards[1] == 0.0:
            keys.append(key)
    return keys


def until_gone(client: ReplayClient) -> None:
    """Wait until the server has noticed that the trainer is dead. What it had drawn ahead is then in its old place."""
    until(lambda: client.server_info().sample_streams == 0, timeout=60.0)


def check_used_up(client: ReplayClient, keys: list[int], inserted: int) -> None:
    """The queue gave every group once, and the pool has each informative one once."""
    tables = client.server_info().tables
    queue, pool = tables["rollouts"], tables["replay"]
    assert queue.size == 0
    assert queue.reserved == 0
    assert queue.consumed == inserted
    assert queue.samples == inserted
    assert pool.size == len(keys)
    assert pool.inserts == len(keys)


@pytest.mark.parametrize("phase", ["sampled", "written", "acknowledged"])
def test_groups_that_a_step_leaves_for_the_next_one_are_neither_lost_nor_used_twice(client, tmp_path, phase):
    # Batches of three with two informative groups each: every step leaves some of them for the next one.
    keys = insert(client, 15, flat=3)
    options = {"zero_variance": "dynamic", "groups_per_step": 3, "max_steps": 3}
    kill_in_a_process(client.address, tmp_path, phase, 2, **options)
    until_gone(client)
    run(client.address, tmp_path, resume=True, **options)
    used = trained(tmp_path)
    assert len(used) == 9
    assert len(set(used)) == 9
    assert used == sorted(keys)[:9]
    # The tenth was drawn for a step that never came: it is there again.
    assert client.sample("rollouts", 1, timeout=60.0)[0].info.key == keys[9]


def test_a_server_that_restarts_in_the_middle_of_a_step_gives_no_group_twice(tmp_path):
    config, address = durable(tmp_path), f"127.0.0.1:{free_port()}"
    servers = []

    def restart(metrics: dict[str, float]) -> None:
        if metrics["step"] == 2:
            servers[-1].kill()
            servers.append(stack.enter_context(server_process(tmp_path, config, address)))

    with ExitStack() as stack:
        servers.append(stack.enter_context(server_process(tmp_path, config, address)))
        with ReplayClient(address) as client:
            keys = insert(client)
            run(address, tmp_path, callbacks=[OnStep(restart)])
            assert trained(tmp_path) == sorted(keys)
            check_used_up(client, keys, len(keys))


def test_an_interrupted_run_gives_its_groups_back_at_once_without_the_bad_ones(client, tmp_path):
    beyond = make_group(rewards=[1.0, 0.0], completions=[[5, 900], [7]], logprobs=-2.7)
    bad = client.insert(beyond, {"rollouts": 1.0})
    keys = insert(client)

    def interrupt(_: dict[str, float]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(client.address, tmp_path, callbacks=[OnStep(interrupt)])
    until(lambda: client.server_info().tables["rollouts"].size == len(keys), timeout=60.0)
    assert client.get([bad]) == []
    assert [path.name for path in (tmp_path / "run").glob("leases-*")] == []
    assert json.loads((tmp_path / "drawn.jsonl").read_text().splitlines()[0])["keys"] == keys[:1]


@pytest.mark.parametrize(
    ("phase", "lost", "restored"),
    [
        pytest.param("updated", [2], GROUPS, id="groups of step 2 were acknowledged, and those of step 3 leased"),
        pytest.param("written", [2, 3], GROUPS, id="a newer state was written, and its groups leased"),
        pytest.param("acknowledged", [2, 3], 2 * GROUPS, id="groups of a state that was not named yet"),
        pytest.param("acknowledged", [], 0, id="the newest state, which was not named yet"),
    ],
)
def test_a_trainer_that_resumes_from_an_older_state_trains_again_on_what_came_after_it(tmp_path, phase, lost, restored):
    config = durable(tmp_path).replace("forward_to", "retain_consumed = 2, forward_to")
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        keys = insert(client)
        kill_in_a_process(server.address, tmp_path, phase, 3, publish_in_background=False)
        server.kill()
    for step in lost:
        (tmp_path / "run" / f"step-{step}").rename(tmp_path / f"step-{step}")
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        run(server.address, tmp_path, resume=True)
        assert trained(tmp_path) == sorted(keys)
        check_used_up(client, keys, len(keys))
        assert client.server_info().tables["rollouts"].restored == restored
