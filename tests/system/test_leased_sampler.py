"""Batches of a sampler under leases: in use until they are acknowledged, across restarts and broken answers."""

import pytest

from replay_client import AsyncReplayClient, MutationResult, ReplayClient
from replay_client.sampling import DrawStream
from replay_client.testing import until
from replay_protos import replay_pb2 as pb
from replay_server import ReplayServer, TableConfig
from tests.kit.groups import keys_of
from tests.kit.processes import server_process
from tests.kit.servers import async_serving
from tests.system.test_exactly_once import QUEUE, connected, draw_of, named, payload

LONG, SHORT = 600.0, 0.5
TABLES = [QUEUE, TableConfig(name="pool")]
CONFIG = """
admission = { fresh_groups_per_step = 2, max_staleness = 1 }
tables = [
    { name = "queue", rate_limiter = { type = "queue", max_size = 1000 }, forward_to = "pool" },
    { name = "pool" },
]
"""


def insert(client: ReplayClient, count: int) -> list[int]:
    return [client.insert(payload(number), {"queue": 1.0}) for number in range(count)]


def facts(client: ReplayClient) -> tuple[int, ...]:
    """Of the queue: size, outstanding, samples, consumed, forwarded. Of the pool: size, inserts."""
    tables = client.server_info().tables
    queue, pool = tables["queue"], tables["pool"]
    return (queue.size, queue.reserved, queue.samples, queue.consumed, queue.forwarded, pool.size, pool.inserts)


def test_a_leased_batch_outlives_its_stream_and_is_forwarded_once():
    with ReplayServer(tables=TABLES, port=0) as server, ReplayClient(server.address) as client:
        keys = insert(client, 3)
        with client.sampler("queue", batch_size=2, prefetch=1, lease=LONG) as sampler:
            batch = next(sampler)
        assert keys_of(batch) == keys[:2]
        until(lambda: facts(client) == (1, 2, 2, 2, 2, 2, 2))
        assert client.acknowledge(batch).applied == 1
        assert client.acknowledge(batch).applied == 1  # a retry
        assert client.renew(batch, LONG).missing == ()  # it is taken: nothing to renew, and nothing is lost
        assert facts(client) == (1, 0, 2, 2, 2, 2, 2)


def test_a_lease_that_ends_gives_the_batch_back_and_renewing_keeps_it():
    with ReplayServer(tables=TABLES, port=0) as server, ReplayClient(server.address) as client:
        keys = insert(client, 2)
        with client.sampler("queue", batch_size=1, prefetch=0, lease=SHORT) as sampler:

            def renewed():  # on a loaded machine the lease may have ended; then the same item comes again
                batch = next(sampler)
                return batch if client.renew(batch, LONG).applied else None

            kept, lost = until(renewed), next(sampler)
            until(lambda: facts(client)[0] == 1)
            assert client.renew(lost, LONG).missing == (lost[0].info.lease_id,)
            assert client.acknowledge(lost).missing == (lost[0].info.lease_id,)
        again = client.sample("queue", 1, timeout=60.0)
        assert keys_of(again) == [keys[1]] == keys_of(lost)
        assert client.acknowledge(kept).applied == 1
        assert facts(client) == (0, 0, 2, 2, 2, 2, 2)  # the pool has each of them once


def test_items_of_a_lease_that_has_ended_can_be_taken_by_key_and_only_once():
    with ReplayServer(tables=TABLES, port=0) as server, ReplayClient(server.address) as client:
        keys = insert(client, 3)
        with client.sampler("queue", batch_size=2, prefetch=0, lease=LONG) as sampler:
            batch = next(sampler)
        assert client.consume("queue", keys[:2]).missing == tuple(keys[:2])  # still in use
        client.acknowledge(batch, requeue=True)
        assert facts(client) == (3, 0, 0, 0, 2, 2, 2)
        assert client.consume("queue", [*keys[:2], 99, 99]) == MutationResult(2, (99,))
        assert client.consume("queue", keys[:2]).applied == 0
        assert facts(client) == (1, 0, 2, 2, 2, 2, 2)
        assert keys_of(client.sample("queue", 1)) == keys[2:]


@pytest.mark.parametrize("keep", ["data_dir", "checkpoint"])
def test_a_leased_batch_is_still_in_use_after_a_kill_and_a_restart(tmp_path, keep):
    durable = f'server.data_dir = "{tmp_path}/data"\n'
    with server_process(tmp_path, durable + CONFIG) as server, ReplayClient(server.address) as client:
        permits = client.acquire_permits(3)
        keys = [client.insert(payload(number), {"queue": 1.0}, permits=permits) for number in range(3)]
        with client.sampler("queue", batch_size=1, prefetch=2, lease=LONG) as sampler:
            used, half = next(sampler), next(sampler)
            before = facts(client)
        client.acknowledge(used)
        name = client.create_checkpoint()
        server.kill()
    extra = ["--restore", name, "--replace"] if keep == "checkpoint" else []
    with server_process(tmp_path, durable + CONFIG, options=extra) as server, ReplayClient(server.address) as client:
        assert before[1] in (2, 3)
        assert facts(client) == (1, 1, 2, 2, 2, 2, 2)
        assert keys_of(client.sample("queue", 1, timeout=60.0)) == keys[2:]  # nobody gets what is in use
        assert client.renew(half, LONG).applied == 1
        assert client.acknowledge(half).applied == 1
        assert facts(client) == (0, 0, 3, 3, 3, 3, 3)
        assert client.acknowledge(half).applied == 1


def test_the_lease_of_a_dead_reader_ends_after_a_restart_too(tmp_path):
    config = f'server.data_dir = "{tmp_path}/data"\n{CONFIG}'
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        keys = insert(client, 1)
        with client.sampler("queue", batch_size=1, prefetch=0, lease=2.0) as sampler:
            next(sampler)
        server.kill()
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        assert keys_of(client.sample("queue", 1, timeout=60.0)) == keys
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        assert facts(client) == (0, 0, 1, 1, 1, 1, 1)


async def test_a_stale_batch_is_not_leased_and_one_in_use_may_grow_stale():
    tables = [TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 9}, max_staleness=1)]
    async with async_serving(tables) as client:
        keys = [await client.insert(payload(n), {"queue": 1.0}, policy_version=n // 2 * 2) for n in range(3)]
        async with client.sampler("queue", batch_size=1, prefetch=2, lease=LONG) as sampler:
            first = await anext(sampler)
            await client.set_policy_version(2)  # the second was drawn ahead, and is too old now
            second = await anext(sampler)
        assert first[0].info.key == keys[0]
        assert second[0].info.key == keys[2]
        assert (await client.renew(first, LONG)).applied == 1
        assert (await client.acknowledge([*first, *second])).applied == 2
        info = (await client.server_info()).tables["queue"]
        assert info.size == 0
        assert info.reserved == 0
        assert info.stale == 1
        assert info.consumed == 2


async def test_a_batch_of_a_broken_stream_is_leased_where_the_server_has_not_noticed_that_yet():
    with ReplayServer(tables=TABLES, port=0) as server, ReplayClient(server.address) as client:
        insert(client, 1)
        async with AsyncReplayClient(server.address) as aio, connected(server.address) as connection:
            draws = DrawStream(connection)
            batch = (await draws.draw(draw_of())).head.batch
            assert (await aio.renew([named(batch)], LONG)).applied == 1
            answer = await draws.end(pb.DrawRequest(renew=[batch], seconds=LONG))  # said again on the old stream
            assert answer.done == [batch]
            await draws.close()
        assert facts(client) == (0, 1, 1, 1, 1, 1, 1)
