"""`client.auto_renew` renews leases until it forgets them, and says which have ended."""

import asyncio

import pytest

from replay_client import AsyncReplayClient, ReplayClient
from replay_client.errors import ServerUnavailableError
from replay_client.lease_renewer import AsyncLeaseRenewer
from replay_client.records import MutationResult, Sample, SampleInfo
from replay_client.testing import PATIENCE
from replay_server import ReplayServer, TableConfig

LEASE = 2.0
"""Seconds. Longer than a process on a busy machine stands still."""


@pytest.fixture
def server():
    with ReplayServer([TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 100})], 0) as server:
        yield server


def test_samples_stay_with_their_reader_until_it_lets_them_go(server):
    lost = []
    with ReplayClient(server.address, timeout=PATIENCE) as client:
        for number in range(3):
            client.insert(bytes([number]), {"queue": 1.0})
        [first], [second], [third] = (client.sample("queue", lease=LEASE) for _ in range(3))
        with client.auto_renew([first], LEASE, lost.extend) as kept:
            kept.add([second])
            back = client.sample("queue", timeout=PATIENCE)  # the third comes back when its lease has ended
            assert back[0].info.key == third.info.key
            assert client.server_info().tables["queue"].reserved == 2
            kept.forget([first])
            assert client.sample("queue", timeout=PATIENCE)[0].info.key == first.info.key
            assert client.acknowledge([second]).applied == 1
        assert lost == []


async def test_a_lease_that_somebody_ended_is_told_once(server):
    lost = asyncio.Queue()
    async with AsyncReplayClient(server.address, timeout=PATIENCE) as client:
        await client.insert(b"x", {"queue": 1.0})
        samples = await client.sample("queue", lease=LEASE)
        async with client.auto_renew(samples, LEASE, lost.put_nowait):
            await client.acknowledge(samples, requeue=True)
            assert await asyncio.wait_for(lost.get(), PATIENCE) == [samples[0].info]
            await asyncio.sleep(LEASE)
            assert lost.empty()


def leased(number: int) -> Sample:
    return Sample(SampleInfo(number, 1.0, 1.0, 0.0, 0, 0, 1, 1, lease_id=number), b"payload")


async def test_a_server_that_is_away_ends_no_lease_and_a_lost_one_is_forgotten_a_lease_later():
    answers: list = [ServerUnavailableError("away"), (), (2,), (2,), (2,), (2,), (2,), (2,), (2,), ()]
    asked, lost, all_asked = [], [], asyncio.Event()

    async def renew(samples, lease, *, timeout):
        asked.append([sample.info.lease_id for sample in samples])
        answer = answers.pop(0)
        if not answers:
            all_asked.set()
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return MutationResult(0, tuple(answer))

    async with AsyncLeaseRenewer(renew, 0.2, lost.extend) as renewer:
        renewer.add([leased(1), leased(2), leased(0)])
        await asyncio.wait_for(all_asked.wait(), PATIENCE)
    assert [info.key for info in lost] == [2]
    assert asked[0] == [1, 2]
    assert asked[-1] == [1]
