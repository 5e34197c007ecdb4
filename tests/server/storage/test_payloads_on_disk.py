"""Damage on the disk: a damaged payload is never served, and a damaged record costs no other one.

test_full_machine.py has the memory of payloads on disk.
"""

import os
from pathlib import Path

import msgpack
import pytest

from replay_client import ReplayClient
from replay_server import CheckpointsConfig, ReplayServer, TableConfig

QUEUE = TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 100})
POOL = TableConfig(name="pool", sampler="fifo")


def damage(data_dir: Path, written: bytes) -> None:
    """Flips a bit in these bytes, wherever they stand: the file may still have pages of older commits."""
    path = data_dir / "data.mdb"
    data = path.read_bytes()
    assert written in data
    path.write_bytes(data.replace(written, bytes([written[0] ^ 4]) + written[1:]))


@pytest.fixture(params=["found at once", "found on the way"])
def damaged(tmp_path, request, monkeypatch, transport):
    """A server with items 0 to 5 in both tables, of which 2 is damaged."""
    if request.param == "found on the way":
        monkeypatch.setattr("replay_server.storage.memory.BYTES_PER_READ", 5000)
    payloads = [os.urandom(3000) for _ in range(6)]
    with ReplayServer([QUEUE, POOL], port=0, data_dir=tmp_path) as server, ReplayClient(server.address) as client:
        for key, payload in enumerate(payloads):
            client.insert(payload, {"queue": 1.0, "pool": 1.0}, key=key)
    damage(tmp_path, payloads[2])
    with ReplayServer([QUEUE, POOL], port=0, data_dir=tmp_path) as server, ReplayClient(server.address) as client:
        yield client
        info = client.server_info()
        assert info.damaged == 1
        assert info.tables["pool"].deleted == 1
        assert not client.get([2])


def with_a_sampler(client):
    with client.sampler("queue", batch_size=1) as sampler:
        return [next(sampler)[0] for _ in range(5)]


READS = {
    "a sample": lambda client: client.sample("queue", 5),
    "a sampler": with_a_sampler,
    "get": lambda client: client.get(range(6)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_damaged_item_is_left_out_and_the_others_come(damaged, read):
    found = [getattr(each, "info", each).key for each in read(damaged)]
    assert found == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("durable", [False, True])
def test_a_checkpoint_of_a_damaged_item_restores_all_others(damaged, tmp_path, durable):
    name = damaged.create_checkpoint()
    (found,) = damaged.list_checkpoints(verify=True)
    assert found.name == name
    assert found.intact
    assert len(damaged.get(range(6))) == 5
    section = CheckpointsConfig(dir=tmp_path / "checkpoints")
    server = ReplayServer([POOL], port=0, checkpoints=section, data_dir=tmp_path / "other" if durable else None)
    with server.restore(name), ReplayClient(server.address) as client:
        assert [item.key for item in client.get(range(6))] == [0, 1, 3, 4, 5]
        assert client.server_info().damaged == 1


def test_a_damaged_record_of_a_lease_costs_the_lease_alone(tmp_path):
    with ReplayServer([QUEUE], port=0, data_dir=tmp_path) as server, ReplayClient(server.address) as client:
        keys = [client.insert(b"x", {"queue": 1.0}) for _ in range(2)]
        (leased,) = client.sample("queue", 1, lease=600.0)
        client.renew([leased], 600.0)  # from now on the lease outlives the server
    damage(tmp_path, msgpack.packb([leased.info.lease_id, "queue"])[1:])
    with ReplayServer([QUEUE], port=0, data_dir=tmp_path) as server, ReplayClient(server.address) as client:
        assert [sample.info.key for sample in client.sample("queue", 2, timeout=10.0)] == keys


def test_a_value_on_the_first_page_that_lmdb_hands_out_is_no_damage(tmp_path):
    file = tmp_path / "data.mdb"
    flags_at = 2 * 4096 + 10  # of the third page: the first two describe the file
    overflow = b"\x04\0"  # the flag of a page that holds only a part of a large value
    for version in (1, 2):  # the change of the policy frees the page, and one of the next payloads goes there
        with ReplayServer([QUEUE], port=0, data_dir=tmp_path) as server, ReplayClient(server.address) as client:
            client.set_policy_version(version)
            for _ in range(12):
                client.insert(bytes(3000), {"queue": 1.0})
                if file.read_bytes()[flags_at : flags_at + 2] == overflow:
                    break
            items = client.server_info().items
    assert file.read_bytes()[flags_at : flags_at + 2] == overflow
    with ReplayServer([QUEUE], port=0, data_dir=tmp_path) as server, ReplayClient(server.address) as client:
        assert client.server_info().items == items
