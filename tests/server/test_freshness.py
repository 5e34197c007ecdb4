"""Priorities with a half-life, over gRPC: what is drawn, shown and evicted, through moves, rollbacks and restarts."""

import pytest

from replay_server import TableConfig
from replay_server.config import CheckpointsConfig
from tests.kit.servers import serving

AGEING = {"type": "prioritized", "exponent": 0.5, "half_life": 4.0}
TABLES = [TableConfig(name="pool", sampler=AGEING, seed=0)]


def effective(client, table="pool"):
    """Effective priorities by key."""
    return {item.key: item.effective_priority for item in client.list_items(table, limit=100).items}


def drawn_probabilities(client, table="pool"):
    size = client.server_info().tables[table].size
    return {sample.info.key: sample.info.probability for sample in client.sample(table, size)}


def shares(effective_priorities):
    total = sum(effective_priorities.values())
    return {key: value / total for key, value in effective_priorities.items()}


def insert_three(client):
    """Items of priority 4, 1 and 9, made by versions 0, 4 and 8."""
    return [client.insert(b"x", {"pool": p}, policy_version=v) for p, v in ((4.0, 0), (1.0, 4), (9.0, 8))]


def test_list_show_and_info_give_raw_and_effective_priority():
    with serving(TABLES) as client:
        client.set_policy_version(8)
        first, second, third = insert_three(client)
        expected = {first: 2.0 * 0.25, second: 1.0 * 0.5, third: 3.0}
        assert effective(client) == pytest.approx(expected)
        assert {item.key: item.priority for item in client.list_items("pool").items} == {first: 4, second: 1, third: 9}
        (stored,) = client.get([first])
        assert stored.tables["pool"].priority == 4.0
        assert stored.tables["pool"].effective_priority == 0.5
        info = client.server_info().tables["pool"]
        assert info.priority.min == 1.0
        assert info.priority.max == 9.0
        assert info.effective_priority.min == pytest.approx(0.5)
    assert info.effective_priority.max == pytest.approx(3.0)


def test_a_half_life_can_be_set_changed_and_taken_away_while_the_server_runs():
    with serving([TableConfig(name="pool", sampler="prioritized", seed=0)]) as client:
        client.set_policy_version(8)
        first, second, third = insert_three(client)
        assert drawn_probabilities(client) == pytest.approx({first: 4 / 14, second: 1 / 14, third: 9 / 14})
        client.update_table("pool", sampler={"type": "prioritized", "half_life": 2.0})
        weights = {first: 4 / 16, second: 1 / 4, third: 9.0}
        assert drawn_probabilities(client) == pytest.approx(shares(weights))
        client.update_table("pool", sampler="prioritized")
        assert drawn_probabilities(client) == pytest.approx({first: 4 / 14, second: 1 / 14, third: 9 / 14})


@pytest.mark.parametrize("durable", [True, False], ids=["a restart", "a checkpoint"])
def test_the_age_of_every_item_is_kept_over(tmp_path, durable):
    options = {"data_dir": tmp_path} if durable else {"checkpoints": CheckpointsConfig(dir=tmp_path)}
    with serving(TABLES, **options) as client:
        client.set_policy_version(3000)
        for lag in (0, 4, 40, 400):
            client.insert(b"x", {"pool": 1.0}, policy_version=3000 - lag)
        if not durable:
            client.create_checkpoint("late")
        before = effective(client)
    with serving(TABLES, **options, restore=None if durable else "late") as client:
        assert client.policy().version == 3000
        assert effective(client) == pytest.approx(before)
        assert drawn_probabilities(client) == pytest.approx(shares(before))
