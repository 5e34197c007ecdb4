"""An insert that closes batches: what was drawn and what is made of it change places in one moment."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import lmdb
import pytest

from replay_client import ReplayClient
from replay_client.errors import DeadlineExceededError, InvalidRequestError, LeaseEndedError, ReplayError
from replay_client.testing import make_group, until
from replay_protos import replay_pb2 as pb
from replay_server import TableConfig
from replay_server.storage.lmdb import LmdbStorage
from tests.kit.processes import start_server
from tests.kit.servers import serving
from tests.server.rpc.calls import connection

TABLES = [
    TableConfig(name="prompts", rate_limiter={"type": "queue", "max_size": 100}),
    TableConfig(name="groups", rate_limiter={"type": "queue", "max_size": 2}),
]
CONFIG = """
server.data_dir = "{folder}"
tables = [
    {{ name = "prompts", rate_limiter = {{ type = "queue", max_size = 100 }} }},
    {{ name = "groups", rate_limiter = {{ type = "queue", max_size = 100 }} }},
]
"""


@pytest.fixture(params=["memory", "disk"])
def client(request, tmp_path):
    with serving(TABLES, data_dir=tmp_path / "data" if request.param == "disk" else None, timeout=20.0) as client:
        yield client


def draw_prompts(client, n=1, lease=600.0):
    for _ in range(n):
        client.insert(b"prompt", {"prompts": 1.0})
    return client.sample("prompts", n, lease=lease)


def reserved(client, table="prompts") -> int:
    return client.server_info().tables[table].reserved


def sizes(client) -> tuple[int, int]:
    tables = client.server_info().tables
    return tables["prompts"].size, tables["groups"].size


@pytest.mark.usefixtures("transport")
def test_the_samples_are_taken_when_the_group_made_of_them_is_inserted(client):
    first, second = draw_prompts(client), draw_prompts(client)
    key = client.insert(make_group(), {"groups": 1.0}, closes=[*first, *second])
    assert sizes(client) == (0, 1)
    assert reserved(client) == 0
    assert client.server_info().tables["prompts"].samples == 2
    assert client.acknowledge([*first, *second]).applied == 2  # a reader who asks is told that they are its own
    assert client.renew(first, 10.0).missing == ()
    client.insert(make_group(), {"groups": 1.0}, key=key, closes=first)  # a retry whose answer was lost
    assert sizes(client) == (0, 1)


def test_a_group_whose_samples_have_gone_back_or_are_closed_already_is_refused_and_changes_nothing(client):
    requeued, closed = draw_prompts(client, lease=600.0), draw_prompts(client)
    client.acknowledge(requeued, requeue=True)
    client.insert(make_group(), {"groups": 1.0}, closes=closed)
    before = sizes(client)
    for samples, words in ((requeued, "has gone back"), (closed, "was acknowledged already")):
        with pytest.raises(LeaseEndedError, match=words):
            client.insert(make_group(), {"groups": 1.0}, closes=samples)
    kept = draw_prompts(client)
    with pytest.raises(LeaseEndedError):
        client.insert(make_group(), {"groups": 1.0}, closes=[*kept, *requeued])
    assert sizes(client) == before
    assert reserved(client) == 1  # the one that could have been closed is still its reader's


def test_a_group_that_waits_for_room_closes_its_samples_when_it_enters(client):
    for _ in range(2):
        client.insert(make_group(), {"groups": 1.0})
    first, second = draw_prompts(client), draw_prompts(client)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.insert, make_group(), {"groups": 1.0}, closes=first)
        until(lambda: client.server_info().tables["groups"].inserting.count == 1)
        too_late = pool.submit(client.insert, make_group(), {"groups": 1.0}, closes=second)
        until(lambda: client.server_info().tables["groups"].inserting.count == 2)
        assert reserved(client) == 2
        client.acknowledge(second, requeue=True)
        client.sample("groups", 1)
        waiting.result(60)
        client.sample("groups", 1)
        with pytest.raises(LeaseEndedError):
            too_late.result(60)
    assert reserved(client) == 0
    client.insert(make_group(), {"groups": 1.0})
    third = draw_prompts(client)
    with pytest.raises(DeadlineExceededError):
        client.insert(make_group(), {"groups": 1.0}, closes=third, timeout=0.0)
    assert reserved(client) == 1  # there was no room, and the sample is still its reader's


def test_a_message_of_several_items_cannot_close_batches():
    with serving(TABLES) as client, connection(client.address) as stub:
        message = pb.InsertRequest(closes=[1], targets=[pb.InsertTarget(table="groups")], keys=[1, 2])
        with pytest.raises(grpc.RpcError) as refused:
            stub.Insert(message, timeout=20)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "in a message of its own" in refused.value.details()


def test_a_sample_that_was_drawn_without_a_lease_cannot_be_closed():
    with serving(TABLES) as client:
        client.insert(b"prompt", {"prompts": 1.0})
        with pytest.raises(InvalidRequestError, match="without a lease"):
            client.insert(make_group(), {"groups": 1.0}, closes=client.sample("prompts", 1))


def test_a_killed_server_has_the_sample_or_the_group(tmp_path):
    """Whatever it had written when it was killed, each prompt is there or was closed by its group: never neither."""
    config = tmp_path / "replay.toml"
    config.write_text(CONFIG.format(folder=tmp_path / "data"))
    server = start_server(config)
    inserted: set[int] = set()
    with ReplayClient(server.address, timeout=20.0) as client:
        for prompt in range(30):
            client.insert(b"prompt", {"prompts": 1.0}, key=prompt)

        def work() -> None:
            with suppress(ReplayError):  # the server is killed
                while True:
                    (sample,) = client.sample("prompts", 1, lease=600.0)
                    # The key of the group says which prompt it was made of.
                    client.insert(make_group(), {"groups": 1.0}, key=1000 + sample.info.key, closes=[sample])
                    inserted.add(sample.info.key)

        threading.Thread(target=work, daemon=True).start()
        until(lambda: len(inserted) >= 10)
        server.kill()
    server = start_server(config)
    try:
        with ReplayClient(server.address, timeout=20.0) as client:
            groups = {item.key - 1000 for item in client.list_items("groups", limit=1000).items}
            tables = client.server_info().tables
            assert inserted <= groups
            assert tables["prompts"].size + tables["prompts"].reserved + len(groups) == 30
            left = {item.key for item in client.list_items("prompts", limit=1000).items}
            assert not left & groups
    finally:
        server.kill()


def test_an_insert_that_closed_a_sample_is_written_again_when_the_disk_failed(tmp_path, monkeypatch):
    failures, commit = [lmdb.DiskError("full")], LmdbStorage.commit

    def failing(self, *changes):
        if changes[1].parts and failures:
            raise failures.pop()
        commit(self, *changes)

    with serving(TABLES, data_dir=tmp_path) as client:
        samples = draw_prompts(client)
        monkeypatch.setattr(LmdbStorage, "commit", failing)
        client.insert(make_group(), {"groups": 1.0}, closes=samples)
        assert not failures
        assert sizes(client) == (0, 1)
    with serving(TABLES, data_dir=tmp_path) as client:
        assert sizes(client) == (0, 1)
