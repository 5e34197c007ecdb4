"""Batches that no shard can give alone come as soon as all together have enough, and nobody holds a part of one."""

from replay_client import ReplayClient
from replay_client.testing import PATIENCE, until
from tests.client.shards.test_sharded_client import insert_many
from tests.kit.clocks import in_a_thread


def test_three_shards_with_20_groups_each_give_48_at_once_and_64_as_soon_as_four_more_arrive(service, client):
    def fill(index, count):
        with ReplayClient(service.addresses[index]) as one:
            insert_many(one, "queue", count)

    for index in range(3):
        fill(index, 20)
    batch = client.sample("queue", 48, lease=60.0, timeout=0.0)
    assert len({sample.info.key for sample in batch}) == 48
    client.acknowledge(batch, requeue=True)
    waiting = in_a_thread(client.sample, "queue", 64, timeout=None)
    until(lambda: client.server_info().tables["queue"].reserved == 0)  # nobody holds what is not enough
    fill(1, 4)
    assert len({sample.info.key for sample in waiting.result(PATIENCE)}) == 64
