"""Partial groups: items that came with a permit into the table `partial_groups`, and what becomes of the permit.

test_model.py compares the counts with the reference, for operations in any order.
"""

import numpy as np
import pytest

from replay_cli.screen import permits
from replay_client import ReplayClient
from replay_client.errors import DeadlineExceededError, InvalidRequestError
from replay_client.testing import make_group
from replay_dashboard.diagnosis import Level, diagnose
from replay_server import TableConfig
from replay_server.config import Config
from replay_server.tables.config import AdmissionConfig
from tests.kit.servers import serving

ADMISSION = AdmissionConfig(fresh_groups_per_step=2, max_staleness=0, permit_tables="partial_groups")
TABLES = [
    TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 10}, max_staleness=3, forward_to="pool"),
    TableConfig(name="pool"),
]

PARTIAL_GROUPS = TableConfig(name="partial_groups", sampler="fifo", max_times_sampled=1)
GROUPS = {"fresh_groups_per_step": 2, "max_staleness": 1}
ROLLOUTS = {"name": "rollouts", "rate_limiter": {"type": "queue", "max_size": 4}, "max_staleness": 3}


@pytest.fixture
def client():
    with serving(TABLES, admission=ADMISSION) as client:
        yield client


def open_group(client, version=0):
    """Opens a group with a permit, and draws it under a lease."""
    lease = client.acquire_permits(1)
    key = client.insert(b"what another generator needs", {"partial_groups": 1.0}, permits=lease, policy_version=version)
    return key, client.sample("partial_groups", lease=600.0)


def counts(client):
    info = client.server_info().admission
    return info.accepted, info.running, info.partial_groups


def test_what_is_appended_while_a_reader_has_the_group_is_there_for_the_next_one(client):
    key, drawn = open_group(client)
    client.extend(key, {"rollout/1": np.frombuffer(b"abc", np.uint8)})
    client.acknowledge(drawn, requeue=True)
    (again,) = client.sample("partial_groups", lease=600.0)
    assert bytes(again.payload).startswith(b"what another generator needs")
    assert b"abc" in bytes(again.payload)
    assert client.extend(key, {"rollout/1": np.frombuffer(b"def", np.uint8)}).present == ("rollout/1",)


def test_a_group_under_construction_is_in_no_other_table(client):
    lease = client.acquire_permits(1)
    with pytest.raises(InvalidRequestError, match="is in no other table until it is closed"):
        client.insert(b"x", {"partial_groups": 1.0, "pool": 1.0}, permits=lease)
    client.insert(b"x", {"partial_groups": 1.0, "pool": 1.0})  # without a permit it is an item like others
    assert counts(client) == (0, 1, 0)
    assert client.release_permits(lease) == 1


def test_who_looks_for_groups_to_build_is_a_generator_and_no_trainer(client):
    _, drawn = open_group(client)
    client.renew(drawn, 600.0)
    with ReplayClient(client.address, name="builder") as builder:
        with pytest.raises(DeadlineExceededError):
            builder.sample("partial_groups", timeout=0.0, lease=1.0)
        builder.extend(drawn[0].info.key, {"rollout/1": np.frombuffer(b"abc", np.uint8)})
        assert {each.role for each in client.server_info().clients if each.name == "builder"} == {"generator"}


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ([], {"max_times_sampled": 1, "when_full": "block", "max_staleness": 3}),
        (
            [{"name": "partial_groups", "max_staleness": 1, "when_full": "reject"}],
            {"max_staleness": 1, "when_full": "reject"},
        ),
        ([{"name": "partial_groups", "max_bytes": 10}], {"max_bytes": 10, "max_staleness": 3, "max_times_sampled": 1}),
    ],
    ids=["declared by its name alone", "what is set wins", "the rest has its defaults"],
)
def test_the_name_declares_the_table(tables, expected):
    config = Config.model_validate(
        {"admission": {**GROUPS, "permit_tables": "partial_groups"}, "tables": [ROLLOUTS, *tables]}
    )
    (made,) = [table.model_dump() for table in config.tables if table.name == "partial_groups"]
    assert made["sampler"]["type"] == "fifo"
    assert made["remover"]["type"] == "fifo"
    assert {name: made[name] for name in expected} == expected
    assert [table.name for table in config.tables] == ["rollouts", "partial_groups"]


@pytest.mark.parametrize(
    ("name", "table", "words"),
    [
        ("rollouts", None, "is the table that is trained on: name another one"),
        (
            "partial_groups",
            {"forward_to": "rollouts"},
            "leave out max_times_sampled, forward_to, copy_to and retain_consumed",
        ),
        (
            "partial_groups",
            {"max_times_sampled": 2},
            "leave out max_times_sampled, forward_to, copy_to and retain_consumed",
        ),
        (
            "partial_groups",
            {"max_times_sampled": 1, "retain_consumed": 1},
            "leave out max_times_sampled, forward_to, copy_to and retain_consumed",
        ),
        ("no good", None, "table name 'no good'"),
    ],
)
def test_a_table_that_cannot_be_of_groups_under_construction_is_refused(name, table, words):
    tables = [ROLLOUTS] if table is None else [ROLLOUTS, {"name": name, **table}]
    with pytest.raises(ValueError, match=words):
        Config.model_validate({"admission": {**GROUPS, "permit_tables": name}, "tables": tables})


def remedies(info):
    """What the doctor says of the table that is not well."""
    found = diagnose(info, info.version, 0.0)
    return [finding for finding in found if finding.check == "partial_groups" and finding.level is not Level.OK]


def test_groups_that_no_generator_takes_are_seen_by_the_doctor_and_their_number_by_all(client):
    _, drawn = open_group(client)
    assert remedies(client.server_info()) == []
    client.acknowledge(drawn, requeue=True)
    info = client.server_info()
    info.tables["partial_groups"].age.max = info.tables["partial_groups"].sampled.age = info.long_wait + 100
    (finding,) = remedies(info)
    assert "1 group, the oldest for " in finding.message
    assert "nobody takes them" in finding.message
    assert [str(line) for line in permits(info)] == [
        "permits: 1 running (1 partial), 0 accepted, 1 available, 0 expired"
    ]


def test_a_group_goes_from_stage_to_stage_with_its_permit_and_is_accepted_by_the_last(tmp_path):
    stages = AdmissionConfig(fresh_groups_per_step=2, max_staleness=0, permit_tables=["partial_groups", "unscored"])
    with serving(TABLES, data_dir=tmp_path, admission=stages) as client:
        _, built = open_group(client)
        client.insert(b"no rewards yet", {"unscored": 1.0}, closes=built)
        assert counts(client) == (0, 1, 1)
        client.insert(b"no permit", {"unscored": 1.0})
        held = client.sample("unscored", lease=600.0)
        client.renew(held, 600.0)
    with serving(TABLES, data_dir=tmp_path, admission=stages) as client:
        assert counts(client) == (0, 1, 1)
        assert client.server_info().admission.permit_tables == ["partial_groups", "unscored"]
        client.insert(make_group(), {"rollouts": 1.0}, closes=held)
        assert counts(client) == (1, 0, 0)
        client.insert(b"of no unit", {"partial_groups": 1.0}, closes=client.sample("unscored", lease=600.0))
        assert counts(client) == (1, 0, 0)
    ordinary = ADMISSION.model_copy(update={"permit_tables": ()})
    with serving([*TABLES, PARTIAL_GROUPS], data_dir=tmp_path, admission=ordinary) as client:
        assert counts(client) == (1, 0, 0)
        assert client.server_info().tables["partial_groups"].size == 1


def test_a_group_that_a_stage_drops_gives_its_permit_back():
    stages = AdmissionConfig(fresh_groups_per_step=2, max_staleness=0, permit_tables=["partial_groups", "unscored"])
    with serving(TABLES, admission=stages) as client:
        client.insert(b"no rewards yet", {"unscored": 1.0}, closes=open_group(client)[1])
        client.acknowledge(client.sample("unscored", lease=600.0))
        assert counts(client) == (0, 0, 0)
