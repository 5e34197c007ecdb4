"""Batches that no shard can give alone come as soon as all together have enough, and nobody holds a part of one."""

import threading

from replay_client import ReplayClient
from replay_server.tables.config import AdmissionConfig
from tests.client.shards.conftest import connected
from tests.client.shards.test_sharded_client import insert_many
from tests.factories import PATIENCE, until


def test_three_shards_with_20_groups_each_give_48_at_once_and_64_as_soon_as_four_more_arrive(service, client):
    def fill(index, count):
        with ReplayClient(service.addresses[index]) as one:
            insert_many(one, "queue", count)

    for index in range(3):
        fill(index, 20)
    batch = client.sample("queue", 48, lease=60.0, timeout=0.0)
    assert len({sample.info.key for sample in batch}) == 48
    client.acknowledge(batch, give_back=True)
    got = []
    waiting = threading.Thread(target=lambda: got.extend(client.sample("queue", 64, timeout=None)))
    waiting.start()
    until(lambda: client.server_info().tables["queue"].reserved == 0)  # nobody holds what is not enough
    fill(1, 4)
    waiting.join(timeout=PATIENCE)
    assert len({sample.info.key for sample in got}) == 64


def test_nothing_stands_still_with_as_many_permits_as_a_batch_has_rows(make_service):
    """Three shards grant 16 permits each for a version, and its batch is 48 groups."""
    service = make_service(admission=AdmissionConfig(table="queue", groups_per_step=48, max_staleness=0))
    versions = 4
    with connected(service.addresses) as client, connected(service.addresses) as generator:

        def generate():
            for _ in range(48 * versions):
                generator.insert(b"", {"queue": 1.0}, permits=generator.acquire_permits(1, timeout=None))

        client.set_policy_version(0)
        generating = threading.Thread(target=generate, daemon=True)
        generating.start()
        with client.sampler("queue", 48, prefetch=2, timeout=PATIENCE) as batches:
            for version in range(1, versions + 1):
                assert len({sample.info.key for sample in next(batches)}) == 48
                client.set_policy_version(version)
        generating.join(timeout=PATIENCE)
        assert not generating.is_alive()
