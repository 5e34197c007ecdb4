"""What a server counts of groups by their tags, and of their lengths: generated, lost as too stale, and sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_client import ReplayClient
from replay_client.errors import StaleItemError
from replay_client.testing import make_group, until
from replay_server import ReplayServer, TableConfig
from replay_server.tables.tag_counts import MAX_COUNTED

QUEUE = TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 1000}, max_staleness=1)
POOL = TableConfig(name="pool", index=["level"])


@pytest.fixture
def server():
    with ReplayServer([QUEUE, POOL], port=0) as server:
        yield server


@pytest.fixture
def client(server):
    with ReplayClient(server.address) as client:
        yield client


def insert(client: ReplayClient, environment: str, version: int = 0, table: str = "rollouts") -> None:
    client.insert(make_group(version=version), {table: 1.0}, tags={"environment": environment})


def counts_in(client: ReplayClient, table: str = "rollouts", tag: str = "environment") -> dict[str, tuple[int, ...]]:
    """Generated, stale and sampled groups, by the value of the tag."""
    tags = {counts.name: counts for counts in client.server_info().tables[table].tags}
    return {value.name: (value.generated, value.stale, value.sampled) for value in tags[tag].values}


def test_groups_are_counted_by_their_environment_which_no_table_has_to_index(client):
    for environment in ("math", "math", "code"):
        insert(client, environment)
    client.sample("rollouts", 2)
    assert counts_in(client) == {"math": (2, 0, 2), "code": (1, 0, 0)}


def test_a_group_is_lost_as_stale_where_it_waits_and_where_it_arrives(client):
    insert(client, "waits")
    client.set_policy_version(2)
    with pytest.raises(StaleItemError):
        insert(client, "arrives")
    insert(client, "fits", version=2)
    assert counts_in(client) == {"waits": (1, 1, 0), "arrives": (1, 1, 0), "fits": (1, 0, 0)}


def test_an_item_of_a_pool_that_was_drawn_before_it_became_stale_is_not_lost(client):
    insert(client, "drawn", table="pool")
    client.sample("pool", 1)
    insert(client, "never drawn", table="pool")
    client.update_table("pool", max_staleness=0)
    client.set_policy_version(1)
    assert counts_in(client, "pool") == {"drawn": (1, 0, 1), "never drawn": (1, 1, 0)}


def test_a_batch_that_goes_back_is_not_sampled(client):
    insert(client, "math")
    client.sample("rollouts", 1, lease=0.2)
    assert counts_in(client) == {"math": (1, 0, 0)}
    until(lambda: client.server_info().tables["rollouts"].size == 1)
    assert counts_in(client) == {"math": (1, 0, 0)}


def test_every_indexed_tag_is_counted_and_no_other(client):
    client.insert(make_group(), {"pool": 1.0}, tags={"level": 3, "environment": "math", "other": "x"})
    tags = [counts.name for counts in client.server_info().tables["pool"].tags]
    assert sorted(tags) == ["environment", "level"]
    assert counts_in(client, "pool", "level") == {"3": (1, 0, 0)}


def test_a_tag_with_too_many_values_is_not_counted_by_value(client):
    for number in range(MAX_COUNTED):
        insert(client, f"environment {number}")
    assert len(counts_in(client)) == MAX_COUNTED
    insert(client, "one more")
    (tag,) = client.server_info().tables["rollouts"].tags
    assert tag.too_many
    assert not tag.values


def test_a_reset_begins_the_counts_anew(client):
    insert(client, "math")
    client.reset("rollouts")
    assert not client.server_info().tables["rollouts"].tags


def test_the_counts_outlive_a_restart(tmp_path: Path):
    for _ in range(2):
        with ReplayServer([QUEUE], port=0, data_dir=tmp_path) as server, ReplayClient(server.address) as client:
            insert(client, "math")
            client.sample("rollouts", 1)
            counts = counts_in(client)
    assert counts == {"math": (2, 0, 2)}


def test_completions_and_their_tokens_are_counted_those_of_stale_groups_too(client):
    client.insert(make_group(lengths=[3, 4]), {"rollouts": 1.0})
    client.insert(make_group(lengths=[5]).encode(), {"rollouts": 1.0})  # of bytes nobody knows the length
    client.set_policy_version(2)
    with pytest.raises(StaleItemError):
        client.insert(make_group(lengths=[10, 20, 30]), {"rollouts": 1.0})
    table = client.server_info().tables["rollouts"]
    assert table.completions == 5
    assert table.completion_tokens == 67


def test_groups_of_one_message_are_counted_each_with_its_own_length(client):
    with client.writer() as writer:
        for length in range(1, 11):
            writer.insert(make_group(lengths=[length]), {"rollouts": 1.0}, tags={"environment": str(length % 2)})
    table = client.server_info().tables["rollouts"]
    assert table.completions == 10
    assert table.completion_tokens == 55
    assert counts_in(client) == {"0": (5, 0, 0), "1": (5, 0, 0)}
