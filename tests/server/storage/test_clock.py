"""The wall clock is set back and forth by hours while the server works, between two starts, and before a boot."""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import replay_server
from replay_client.errors import DeadlineExceededError
from replay_server import AdmissionConfig, CheckpointsConfig, TableConfig
from replay_server.rpc import administration
from replay_server.storage import checkpointer, data_dir, records
from tests.kit.servers import serving

HOURS = 5 * 3600.0
TABLES = [TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 100}), TableConfig(name="pool")]
ADMISSION = AdmissionConfig(fresh_groups_per_step=8, max_staleness=0, permit_ttl=600.0)


class Wall:
    """The wall clock as the server sees it, set by the test. All that reads the wall clock must be named here.

    It stands in the server's modules alone: gRPC mixes Python's `time.time` with the clock of the system.
    """

    def __init__(self, monkeypatch):
        self.ahead = 0.0
        clock = SimpleNamespace(**vars(time))
        clock.time = lambda: time.time() + self.ahead
        clock.time_ns = lambda: time.time_ns() + int(self.ahead * 1e9)
        for module in (administration, checkpointer, data_dir, records):
            monkeypatch.setattr(module, "time", clock)


def test_no_other_module_of_the_server_reads_the_wall_clock():
    readers = {
        path.stem
        for path in Path(replay_server.__file__).parent.rglob("*.py")
        if re.search(r"time\.time(_ns)?\(|datetime", path.read_text()) and path.parent.name != "cli"
    }
    assert readers == {"administration", "checkpointer", "data_dir", "records"}


@pytest.fixture
def wall(monkeypatch):
    return Wall(monkeypatch)


def serving_in(folder):
    checkpoints = CheckpointsConfig(dir=folder / "checkpoints", keep=2)
    return serving(TABLES, data_dir=folder / "data", admission=ADMISSION, checkpoints=checkpoints)


def check_times(client, permits, items=3):
    """No time is longer than this test may have taken, and none is negative."""
    info = client.server_info()
    assert info.admission.running == permits
    assert info.admission.expired == 0
    assert 0 <= info.policy.age < 300
    assert 0 <= info.tables["pool"].age.min <= info.tables["pool"].age.max < 300
    listed = client.list_items("pool").items
    assert len(listed) == items
    assert all(0 <= item.age < 300 for item in listed)


@pytest.mark.parametrize("ahead", [HOURS, -HOURS])
def test_a_running_server_does_not_notice(wall, tmp_path, ahead):
    with serving_in(tmp_path) as client:
        client.set_policy_version(0)
        for _ in range(3):
            client.insert(b"x", {"pool": 1.0, "queue": 1.0})
        lease = client.acquire_permits(8)
        samples = client.sample("queue", 2, lease=600.0)
        first = client.create_checkpoint()
        wall.ahead = ahead
        check_times(client, permits=8)
        assert client.server_info().tables["queue"].reserved == 2
        with pytest.raises(DeadlineExceededError, match="8 running"):
            client.acquire_permits(1, timeout=0.2)
        assert client.acknowledge(samples).applied == 1
        later = [client.create_checkpoint() for _ in range(2)]
        assert [entry.name for entry in client.list_checkpoints()] == later[::-1], "the newest two are kept"
        assert first not in later
        wall.ahead = 0.0
        check_times(client, permits=8)
        assert client.release_permits(lease) == 8
        newest = client.create_checkpoint()
        assert client.list_checkpoints()[0].name == newest


@pytest.mark.parametrize("ahead", [HOURS, -HOURS])
def test_a_server_that_starts_again_counts_no_time_that_has_not_passed(wall, tmp_path, ahead):
    with serving_in(tmp_path) as client:
        client.set_policy_version(0)
        for _ in range(3):
            client.insert(b"x", {"pool": 1.0})
        lease = client.acquire_permits(8)
    wall.ahead = ahead
    for _ in range(2):
        with serving_in(tmp_path) as client:
            check_times(client, permits=8)
        wall.ahead = -wall.ahead
    with serving_in(tmp_path) as client:
        assert client.release_permits(lease) == 8


def test_after_a_reboot_with_the_clock_set_back_nothing_comes_from_the_future(wall, tmp_path, monkeypatch):
    with serving_in(tmp_path) as client:
        client.set_policy_version(0)
        for _ in range(3):
            client.insert(b"x", {"pool": 1.0})
        client.acquire_permits(8)
    wall.ahead = -HOURS
    monkeypatch.setattr(records, "boot_id", lambda: "the next boot")
    with serving_in(tmp_path) as client:
        check_times(client, permits=8)


def test_after_a_reboot_the_wall_clock_says_how_much_time_has_passed(wall, tmp_path, monkeypatch):
    with serving_in(tmp_path) as client:
        client.insert(b"x", {"pool": 1.0})
        client.acquire_permits(8)
    wall.ahead = HOURS
    monkeypatch.setattr(records, "boot_id", lambda: "the next boot")
    for _ in range(2):
        with serving_in(tmp_path) as client:
            info = client.server_info()
            assert info.admission.running == 0
            assert info.admission.expired == 8
            assert HOURS <= info.tables["pool"].age.max < HOURS + 300


def test_scopes_keep_their_order_when_the_clock_is_set_back_between_two_starts(wall, tmp_path, monkeypatch):
    monkeypatch.setattr("replay_server.tables.remembered.MAX_SCOPES", 2)
    with serving_in(tmp_path) as client:
        for _ in range(3):
            client.insert(b"x", {"pool": 1.0})
        client.sample("pool", 1, scope="old")
        client.sample("pool", 1, scope="middle")
    wall.ahead = -HOURS
    with serving_in(tmp_path) as client:
        client.sample("pool", 1, scope="new")
    with serving_in(tmp_path) as client:
        client.sample("pool", 1, scope="newer")  # forgets the scope that was used longest ago
        with pytest.raises(DeadlineExceededError, match="2 of 3"):
            client.sample("pool", 3, scope="new", timeout=0.2)
