"""Payloads that live on disk: damaged ones are never served. test_full_machine.py has their memory."""

import os
from pathlib import Path

import pytest

from replay_client import ReplayClient
from replay_server import ReplayServer, TableConfig

QUEUE = TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 100})
POOL = TableConfig(name="pool", sampler="fifo")


def damage(data_dir: Path, payload: bytes) -> None:
    """Flips a bit in the middle of a payload."""
    path = data_dir / "data.mdb"
    data = bytearray(path.read_bytes())
    at = data.index(payload) + len(payload) // 2
    data[at] ^= 4
    path.write_bytes(data)


@pytest.fixture(params=["found at once", "found on the way"])
def damaged(tmp_path, request, monkeypatch, transport):
    """A server with items 0 to 5 in both tables, of which 2 is damaged."""
    if request.param == "found on the way":
        monkeypatch.setattr("replay_server.tables.items.BYTES_PER_READ", 5000)
    payloads = [os.urandom(3000) for _ in range(6)]
    with ReplayServer([QUEUE, POOL], port=0, data_dir=tmp_path) as server, ReplayClient(server.address) as client:
        for key, payload in enumerate(payloads):
            client.insert(payload, {"queue": 1.0, "pool": 1.0}, key=key)
    damage(tmp_path, payloads[2])
    with ReplayServer([QUEUE, POOL], port=0, data_dir=tmp_path) as server, ReplayClient(server.address) as client:
        yield client
        info = client.server_info()
        assert (info.damaged, info.tables["pool"].deleted) == (1, 1)
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


def test_a_checkpoint_goes_without_a_damaged_item(damaged):
    name = damaged.checkpoint()
    (found,) = damaged.checkpoints(verify=True)
    assert (found.name, found.intact, found.items) == (name, True, 5)
