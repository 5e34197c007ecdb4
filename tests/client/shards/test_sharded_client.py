"""A client of three servers keeps the promises of a client of one."""

import asyncio
import subprocess
import sys
from contextlib import suppress

import grpc
import numpy as np
import pytest

import replay_client.shards.policy
from replay_client import AsyncReplayClient, ReplayClient
from replay_client.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ServerClosedError,
    ServerUnavailableError,
)
from replay_client.sampling import DrawStream
from replay_client.shards.placing import Rendezvous
from replay_client.testing import PATIENCE, until
from replay_client.transport import failure
from replay_server import ReplayServer
from replay_server.tables.config import AdmissionConfig
from tests.client.shards.conftest import TABLES, all_up, connected
from tests.kit.clocks import in_a_thread
from tests.kit.processes import Servers, free_port

MANY = 60
"""New items, so many that one of three shards gets none of them in one of 10^10 runs."""


def insert_many(client, table, count, **options):
    return [client.insert(bytes([i % 256]), {table: 1.0 + i}, **options) for i in range(count)]


def sizes(client, table):
    return {name: info.tables[table].size for name, info in client.server_info().shards.items()}


# --------------------------------------------------------------------------------------------------- which client


def test_several_addresses_come_as_a_list_with_commas_or_from_the_environment(service, monkeypatch):
    joined = ",".join(service.addresses)
    monkeypatch.setenv("REPLAY_ADDRESS", joined)
    for make in (lambda: ReplayClient(service.addresses), lambda: ReplayClient(joined), ReplayClient.from_env):
        with make() as client:
            assert client.address == joined
            until(lambda client=client: len(client.server_info().shards) == 3)


@pytest.mark.parametrize(
    "address",
    [
        [],
        ["a:1", "a:1"],
        ["a:1", "b"],
        "a:1,",
        "a=b:1,a=c:1",
        "=b:1",
        "a/b=c:1,d:1",
        "localhost:1,127.0.0.1:1",
        "ray://",
        "ray://only",
        "ray://a/b/c",
    ],
    ids=str,
)
def test_a_list_that_cannot_be_used_is_refused(address):
    with pytest.raises(ValueError, match="address"):
        ReplayClient(address)


@pytest.mark.parametrize(
    "spelled", [lambda one: one, lambda one: one.replace("127.0.0.1", "LocalHost")], ids=["same", "localhost"]
)
def test_a_shard_is_the_same_however_its_address_is_spelled_and_wherever_it_stands(service, client, spelled):
    insert_many(client, "queue", 20)
    samples = client.sample("queue", 20, lease=60.0)
    with connected([spelled(one) for one in reversed(service.addresses)], timeout=20.0) as other:
        assert other.acknowledge(samples).missing == ()
        for key in range(20):
            for each in (client, other):
                each.insert(b"", {"any": 1.0}, key=key)
    assert client.server_info().tables["any"].size == 20


def test_keys_follow_the_names_of_shards_and_not_their_addresses(make_service):
    def placed() -> dict[int, str]:
        addresses = [f"{name}={address}" for name, address in zip("abc", make_service().addresses, strict=True)]
        with connected(addresses, timeout=20.0) as client:
            for key in range(30):
                client.insert(b"", {"any": 1.0}, key=key)
            return {sample.info.key: sample.info.shard for sample in client.sample("any", 30)}

    first = placed()
    assert set(first.values()) == set("abc")
    assert placed() == first


def test_batches_of_a_shard_that_a_client_does_not_have_count_as_missing(service, client, caplog):
    insert_many(client, "queue", MANY)
    samples = client.sample("queue", MANY, lease=60.0)
    removed = {sample.info.lease_id for sample in samples if sample.info.shard == service.addresses[0]}
    with connected(service.addresses[1:], timeout=20.0) as smaller:
        result = smaller.acknowledge(samples)
    assert set(result.missing) == removed
    assert result.applied == 2
    assert f"batches of {service.addresses[0]} count as missing: this client has no such shard" in caplog.text


def test_a_token_goes_unencrypted_to_no_shard_on_another_machine():
    with pytest.raises(ValueError, match=r"refusing to send the token to 10\.0\.0\.1:7400"):
        ReplayClient(["127.0.0.1:1", "10.0.0.1:7400"], token="t" * 20)


# ------------------------------------------------------------------------------------------------ insert, sample


def test_order_is_kept_within_each_shard(client):
    keys = insert_many(client, "queue", 40)
    shard_of = {item.key: sample for item in client.get(keys) for sample in [item]}
    assert len(shard_of) == 40
    drawn: dict[str, list[int]] = {}
    for _ in range(10):
        for sample in client.sample("queue", 4):
            drawn.setdefault(sample.info.shard, []).append(keys.index(sample.info.key))
    assert len(drawn) == 3
    assert all(order == sorted(order) for order in drawn.values())


def test_a_sample_that_cannot_be_completed_says_why_and_takes_nothing(client):
    insert_many(client, "queue", 4)
    with pytest.raises(DeadlineExceededError, match="4 of 5 samples available on 3 shards"):
        client.sample("queue", 5, timeout=1.0)
    info = client.server_info().tables["queue"]
    assert info.size == 4
    assert info.samples == 0
    assert info.reserved == 0
    assert len(client.sample("queue", 5, min_samples=2, timeout=1.0)) == 4


def test_a_scope_and_excluded_keys_hold_across_shards(client):
    keys = set(insert_many(client, "pool", 30))
    out = set(sorted(keys)[:6])
    seen = [sample.info.key for _ in range(4) for sample in client.sample("pool", 6, scope="step-1", exclude=out)]
    assert sorted(seen) == sorted(keys - out)
    with pytest.raises(DeadlineExceededError):
        client.sample("pool", 1, scope="step-1", exclude=out, timeout=0.1)


def test_a_lease_is_acknowledged_on_the_shards_that_gave_the_samples(client):
    insert_many(client, "queue", 12)
    samples = client.sample("queue", 6, lease=60.0)
    assert client.acknowledge(samples).applied == len({sample.info.lease_id for sample in samples})
    back = client.sample("queue", 6, lease=60.0)
    client.acknowledge(back, requeue=True)
    assert client.server_info().tables["queue"].size == 6
    assert client.acknowledge(back).applied == 0


@pytest.mark.parametrize("prefetch", [None, 0, 2], ids=["single batches", "sampler", "sampler that draws ahead"])
def test_an_item_with_nearly_all_of_the_weight_is_in_every_batch_once(client, prefetch):
    weight = 1e11  # another item comes first once in 10^9 draws
    heavy = client.insert(b"", {"pool": weight})
    for _ in range(120):
        client.insert(b"", {"pool": 1.0})
    if prefetch is None:
        batches = [client.sample("pool", 12) for _ in range(20)]
    else:
        with client.sampler("pool", 12, prefetch=prefetch) as sampler:
            batches = [next(sampler) for _ in range(20)]
    keys = [[sample.info.key for sample in batch] for batch in batches]
    assert all(heavy in batch and len(set(batch)) == 12 for batch in keys)
    others = [sample.info for batch in batches for sample in batch if sample.info.key != heavy]
    # As one table says it: of being drawn first.
    assert [info.probability for info in others] == pytest.approx([1.0 / (weight + 120.0)] * len(others))


# ------------------------------------------------------------------------------------------------ writer, sampler


async def test_a_writer_never_has_more_in_flight_than_it_may(service):
    async with AsyncReplayClient(service.addresses) as client:
        for address in service.addresses:
            async with AsyncReplayClient(address) as one:
                await one.insert(b"", {"one": 1.0})  # from now on every insert waits for a sample
        async with client.writer(max_in_flight=5) as writer:
            for _ in range(5):
                await writer.insert(b"", {"one": 1.0})
            sixth = asyncio.create_task(writer.insert(b"", {"one": 1.0}))
            while not (await client.server_info()).tables["one"].inserting.count:
                await asyncio.sleep(0.01)
            assert not sixth.done()
            for _ in range(9):
                await client.sample("one", 1)
            await sixth


def test_a_sampler_puts_batches_together_and_gives_back_what_it_drew_ahead(client):
    keys = set(insert_many(client, "queue", 20))
    with client.sampler("queue", batch_size=6, prefetch=2) as sampler:
        got = [sample.info.key for sample in next(sampler)]
        until(lambda: client.server_info().tables["queue"].reserved == 12)
    until(lambda: not client.server_info().tables["queue"].reserved)
    info = client.server_info().tables["queue"]
    assert info.size == 14
    assert info.reserved == 0
    assert info.samples == 6
    assert set(got) < keys


async def test_a_draw_that_is_given_up_gives_back_what_the_shards_gave_it(service):
    async with AsyncReplayClient(service.addresses) as client:
        for _ in range(6):
            await client.insert(b"", {"queue": 1.0})

        async def tables():
            return (await client.server_info()).tables["queue"]

        for points in range(40):  # interrupted at one of the first points where it waits
            draw = asyncio.create_task(client.sample("queue", 6, lease=60.0))
            for _ in range(points):
                await asyncio.sleep(0)
            if draw.cancel():
                with suppress(asyncio.CancelledError):
                    await draw
            if not draw.cancelled():
                await client.acknowledge(draw.result(), requeue=True)
            while (await tables()).reserved:
                await asyncio.sleep(0.01)
            queue = await tables()
            assert queue.size == 6
            assert queue.samples == 0


def test_a_sampler_hands_out_no_batch_that_became_stale_meanwhile(client):
    for i in range(8):
        client.insert(b"", {"fresh": 1.0}, policy_version=0 if i < 4 else 5)
    with client.sampler("fresh", batch_size=4, prefetch=1, timeout=4.0) as sampler:
        first = next(sampler)
        until(lambda: client.server_info().tables["fresh"].reserved == 4)
        client.set_policy_version(5)
        versions = [sample.info.policy_version for sample in first]
        try:
            versions_after = [sample.info.policy_version for sample in next(sampler)]
        except DeadlineExceededError:
            versions_after = []
    assert len(versions) == 4
    assert 0 not in versions_after


# ------------------------------------------------------------------------------------------------ by key, listing


def test_updates_and_deletes_reach_items_wherever_they_are(service, client):
    keys = insert_many(client, "pool", 20)
    misplaced = 7
    with ReplayClient(service.addresses[0]) as one, ReplayClient(service.addresses[1]) as two:
        for each in (one, two):  # one of them is not where its key belongs
            each.insert(b"", {"any": 1.0}, key=misplaced)
    result = client.update_priority_arrays("pool", np.array([*keys, 1], np.uint64), np.full(21, 0.5))
    assert result.applied == 20
    assert result.missing == (1,)
    assert {item.priority for item in client.list_items("pool")} == {0.5}
    assert client.delete("pool", [*keys[:3], 1]).applied == 3
    client.delete("any", [misplaced])
    client.delete("any", [misplaced])
    assert client.delete("any", [misplaced]).missing == (misplaced,)


@pytest.mark.parametrize("order_by", ["age", "priority", "size", "policy_version"])
@pytest.mark.parametrize("descending", [False, True])
def test_pages_are_in_one_order_and_hold_every_item_once(client, order_by, descending):
    keys = [client.insert(b"x" * (i * 7 % 31), {"pool": i * 5 % 23}, policy_version=i % 9) for i in range(50)]
    listed, page = [], ""
    while True:
        found = client.list_items("pool", limit=7, order_by=order_by, descending=descending, page=page)
        listed += found.items
        assert found.matching == 50
        if not (page := found.next_page):
            break
    assert sorted(item.key for item in listed) == sorted(keys)
    values = [getattr(item, "nbytes" if order_by == "size" else order_by) for item in listed]
    if order_by != "age":
        assert values == sorted(values, reverse=descending)


# ---------------------------------------------------------------------------------------------- policy, permits


def test_the_lowest_policy_version_counts(service, client):
    client.set_policy_version(3, "w3")
    assert client.policy().version == 3
    with ReplayClient(service.addresses[1]) as one:
        one.set_policy_version(4, "w4")
    assert client.policy().version == 3
    assert client.policy().weights == "w3"
    with pytest.raises(InvalidRequestError):
        client.set_policy_version(3 - 1)


async def test_a_call_that_waits_for_any_shard_ends_when_the_client_is_closed():
    client = AsyncReplayClient([f"127.0.0.1:{free_port()}" for _ in range(2)])
    with pytest.raises(ServerUnavailableError):  # from here on, it is known that no shard is up
        await client.server_info(timeout=0.1)
    waiting = asyncio.ensure_future(client.server_info(timeout=None))
    await asyncio.sleep(0)  # the call begins to wait
    await client.close()
    with pytest.raises(ServerClosedError):
        await asyncio.wait_for(waiting, PATIENCE)


async def test_a_watch_yields_a_version_when_all_shards_have_it(service):
    async with (
        AsyncReplayClient(service.addresses) as client,
        AsyncReplayClient(service.addresses[0]) as one,
        AsyncReplayClient(service.addresses[1:]) as others,
    ):
        await all_up(client)
        watch = client.watch_policy()
        assert (await anext(watch)).version == 0
        coming = asyncio.ensure_future(anext(watch))
        await one.set_policy_version(5)
        await others.set_policy_version(2)
        assert (await asyncio.wait_for(coming, PATIENCE)).version == 2  # and never 5, which one shard alone has
        await client.set_policy_version(0, rollback=True)
        assert (await asyncio.wait_for(anext(watch), PATIENCE)).version == 0
        await watch.aclose()


def test_permits_come_from_all_shares_and_their_groups_go_to_the_shard_that_granted_them(make_service):
    service = make_service(admission=AdmissionConfig(table="queue", fresh_groups_per_step=5, max_staleness=0))
    with connected(service.addresses) as client:
        leases = [client.acquire_permits(1) for _ in range(5)]
        with pytest.raises(DeadlineExceededError, match="permits"):
            client.acquire_permits(1, timeout=1.0)
        for lease in leases[:4]:
            client.insert(b"", {"queue": 1.0}, permits=lease)
        assert client.release_permits(leases[4]) == 1
        admission = client.server_info().admission
        assert admission.fresh_groups_per_step == 5
        assert admission.accepted == 4
        assert admission.running == 0
        assert admission.capacity == 1
        for name, info in client.server_info().shards.items():
            mine = [lease for lease in leases[:4] if lease.shard == name]
            assert info.admission.accepted == info.tables["queue"].size == len(mine)
        waiting = in_a_thread(client.acquire_permits, 2)
        client.set_policy_version(1)
        assert waiting.result(PATIENCE)
        until(lambda: client.server_info().admission.running == 2)  # what a slower shard granted went back


# --------------------------------------------------------------------------------------------- a shard that is gone


def test_all_goes_on_without_a_shard_and_with_it_when_it_comes_back(service, client):
    insert_many(client, "pool", 30)
    service.kill(1)
    # An insert that is on its way now waits for its shard: the shard may have it.
    until(lambda: client.server_info().gone == (service.addresses[1],))
    keys = insert_many(client, "pool", 30)
    assert len(client.get(keys)) == 30
    with client.writer() as writer:
        for _ in range(20):
            writer.insert(b"", {"queue": 1.0})
    assert len(client.sample("queue", 20)) == 20
    assert len(client.sample("pool", 10)) == 10
    assert client.set_policy_version(2, "w").version == 2
    for refused in (lambda: client.reset("queue", timeout=0.1), lambda: client.create_checkpoint(timeout=0.1)):
        with pytest.raises(ServerUnavailableError, match=service.addresses[1]):
            refused()
    service.restart(1)
    until(lambda: client.server_info().gone == ())
    until(lambda: {shard.policy.version for shard in client.server_info().shards.values()} == {2})
    insert_many(client, "pool", 60)
    assert sizes(client, "pool")[service.addresses[1]] > 0


def test_a_key_that_somebody_may_have_tried_waits_for_its_shard(service, client):
    def owner_of(key):
        client.insert(b"", {"any": 1.0}, key=key)
        [name] = [name for name, info in client.server_info().shards.items() if info.tables["any"].size]
        client.reset("any")
        return name

    key = next(key for key in range(100, 200) if owner_of(key) == service.addresses[2])
    service.kill(2)
    for _ in range(2):
        with pytest.raises(ServerUnavailableError, match=f"may have item {key} already"):
            client.insert(b"", {"any": 1.0}, key=key, timeout=0.3)
    with ReplayClient(service.addresses) as other, pytest.raises(ServerUnavailableError):
        other.insert(b"", {"any": 1.0}, key=key, timeout=0.3)
    assert client.server_info().tables["any"].size == 0
    service.restart(2)
    assert client.insert(b"", {"any": 1.0}, key=key) == key
    assert client.server_info().tables["any"].size == 1


def test_a_shard_that_drains_from_its_start_gets_no_new_key_until_the_drain_is_taken_back():
    drains = ReplayServer(TABLES, 0)
    drains.draining = True
    with ReplayServer(TABLES, 0) as other, drains:
        for expected in (False, True):
            with ReplayClient([other.address, drains.address], timeout=30.0) as client:  # it has heard of no refusal
                insert_many(client, "any", 30)
            assert (drains.items > 0) == expected
            drains.draining = False
        assert other.items + drains.items == 60


def test_an_item_with_a_chosen_key_that_a_draining_shard_has_gets_no_copy_on_another_shard():
    drains = ReplayServer(TABLES, 0)
    with ReplayServer(TABLES, 0) as other, drains:
        addresses = [other.address, drains.address]
        names = sorted(addresses)
        owners = Rendezvous(names)
        key = next(key for key in range(100, 200) if names[owners.owner(key)] == drains.address)
        with ReplayClient(addresses, timeout=30.0) as client:
            client.insert(b"", {"any": 1.0}, key=key)
        drains.draining = True
        with ReplayClient(addresses, timeout=30.0) as restarted:
            insert_many(restarted, "any", MANY)  # so many that it has heard that the shard drains
            restarted.insert(b"", {"any": 1.0}, key=key)
        assert drains.items == 1
        assert other.items == MANY


def test_a_chosen_key_that_a_draining_shard_lacks_goes_to_another_shard():
    drains = ReplayServer(TABLES, 0)
    with ReplayServer(TABLES, 0) as other, drains:
        drains.draining = True
        with ReplayClient([other.address, drains.address], timeout=30.0) as client:
            for key in range(MANY):
                client.insert(b"", {"any": 1.0}, key=key)
        assert drains.items == 0
        assert other.items == MANY


PERMITS = """
server.data_dir = "{folder}"
admission = { fresh_groups_per_step = 8, max_staleness = 0 }
tables = [{ name = "queue", rate_limiter = { type = "queue", max_size = 100 } }]
"""


def test_a_group_without_the_shard_of_its_permit_counts_where_it_goes_and_the_permit_stays_until_it_ends(
    tmp_path, caplog
):
    def counted(client):
        permits = client.server_info().admission
        return permits.accepted, permits.running, permits.capacity

    with Servers(tmp_path, [PERMITS] * 2) as servers, connected(servers.addresses, timeout=30.0) as client:
        client.set_policy_version(0)
        lease = client.acquire_permits(3)
        granted = servers.addresses.index(lease.shard)
        servers.kill(granted)
        until(lambda: client.server_info().gone)
        assert client.release_permits(lease) == 0
        for _ in range(2):
            client.insert(b"", {"queue": 1.0}, permits=lease)
        assert counted(client) == (2, 0, 2)  # the groups count although this shard has granted no permit
        servers.restart(granted)
        until(lambda: client.server_info().gone == ())
        client.insert(b"", {"queue": 1.0}, permits=lease)
        assert counted(client) == (3, 2, 3)  # these two go back when the lease ends, or by release_permits
        assert client.release_permits(lease) == 2
        assert counted(client) == (3, 0, 5)
    said = [record.message for record in caplog.records if lease.shard in record.message]
    assert said == [
        f"shard {lease.shard} is away: groups with its permits go to other shards and count there, and these permits "
        "stay in use until their lease ends"
    ]


def test_the_others_grant_the_permits_of_a_shard_that_stays_away(make_service, monkeypatch):
    monkeypatch.setattr(replay_client.shards.policy, "_AWAY_SECONDS", 0.1)
    service = make_service(admission=AdmissionConfig(table="queue", fresh_groups_per_step=7, max_staleness=1))

    def capacities():
        info = client.server_info()
        return {service.addresses.index(name): shard.admission.capacity for name, shard in info.shards.items()}

    def step(version):
        """Seven groups are generated, taken, and trained on."""
        for _ in range(7):
            client.insert(b"", {"queue": 1.0}, permits=client.acquire_permits(1))
        assert len(client.sample("queue", 7)) == 7
        client.set_policy_version(version)

    with connected(service.addresses, timeout=30.0) as client:
        client.set_policy_version(0)
        step(1)
        assert sum(capacities().values()) == 14
        service.kill(1)
        until(lambda: sum(capacities().values()) == 14)  # two versions of seven, all from two shards
        for version in (2, 3, 4):
            step(version)
            assert sum(capacities().values()) == 14
        service.restart(1)
        until(lambda: len(capacities()) == 3 and sum(capacities().values()) == 14)
        assert client.policy().version == 4
        step(5)
        assert sum(capacities().values()) == 14
        assert capacities()[1] <= 6


@pytest.mark.parametrize("granted_meanwhile", [2, 3], ids=["all", "but the first"])
async def test_the_share_of_a_shard_in_versions_that_it_missed_is_granted_once(make_service, granted_meanwhile):
    """By the others since they make up for it, and by itself, when it is back, of a version before that."""
    service = make_service(admission=AdmissionConfig(table="queue", fresh_groups_per_step=7, max_staleness=1))
    async with AsyncReplayClient(service.addresses, timeout=30.0) as client:

        async def capacity():
            return (await client.server_info()).admission.capacity

        await all_up(client)
        await client.set_policy_version(1)
        assert await capacity() == 14  # the first version that a server hears of is where it begins
        board, shard = client._board, client._fleet.shards[1]
        shard.is_up = False  # its server goes on, as behind a network that is cut
        for version in (2, 3):
            if version == granted_meanwhile:
                board._away.add(shard)
            await client.set_policy_version(version)
        shard.is_up = True
        await client.set_policy_version(4)
        assert await capacity() == 14 + 3 * 7


async def test_a_draw_that_a_shard_refuses_raises_an_error_of_this_package(service, monkeypatch):
    def refuse(*_):
        future = asyncio.get_running_loop().create_future()
        future.set_exception(failure(grpc.StatusCode.INVALID_ARGUMENT, "no such draw"))
        return future

    async with AsyncReplayClient(service.addresses, timeout=30.0) as client:
        await client.insert(b"x", {"queue": 1.0})
        monkeypatch.setattr(DrawStream, "draw", refuse)
        with pytest.raises(InvalidRequestError, match="no such draw"):
            await client.sample("queue", 1)


def test_a_sampler_goes_on_when_a_shard_dies_with_a_part_of_its_batch(service, client):
    insert_many(client, "queue", 60)
    with client.sampler("queue", batch_size=6, prefetch=2, timeout=20.0) as sampler:
        next(sampler)
        until(lambda: client.server_info().tables["queue"].reserved == 12)
        service.kill(0)
        batches = [next(sampler) for _ in range(3)]
    assert all(len(batch) == 6 for batch in batches)
    keys = [sample.info.key for batch in batches for sample in batch]
    assert len(set(keys)) == 18


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("how", ["sample", "sampler"])
async def test_a_part_whose_take_was_not_answered_reaches_the_reader_once(service, monkeypatch, how, committed):
    """`committed`: the shard took the part, and the answer is lost. Else the request was."""
    async with AsyncReplayClient(service.addresses, timeout=30.0) as client:
        await all_up(client)
        keys = {await client.insert(bytes([i]), {"queue": 1.0}) for i in range(60)}
        end, cuts = DrawStream.end, []
        broken = client._fleet.shards[0]

        def cut(stream, request):
            if stream._connection is not broken or not request.acknowledge or len(cuts) == 2:
                return end(stream, request)
            cuts.append(end(stream, request) if committed else None)
            answer = asyncio.get_running_loop().create_future()
            answer.set_exception(failure(grpc.StatusCode.UNAVAILABLE, "the connection broke"))
            return answer

        monkeypatch.setattr(DrawStream, "end", cut)
        got = []
        if how == "sample":
            while len(got) < 60:
                got += await client.sample("queue", 6, min_samples=1)
        else:
            async with client.sampler("queue", batch_size=6, prefetch=2) as sampler:
                while len(got) < 60:
                    got += await anext(sampler)
        assert len(cuts) == 2
        assert sorted(sample.info.key for sample in got) == sorted(keys)
        assert (await client.server_info()).tables["queue"].size == 0


def test_without_any_shard_every_method_says_so_in_time():
    with ReplayClient(["127.0.0.1:9", "127.0.0.1:19"], timeout=0.2) as client:
        for request in (
            lambda: client.insert(b"", {"any": 1.0}),
            lambda: client.sample("any"),
            lambda: client.server_info(),
            lambda: client.policy(),
            lambda: client.set_policy_version(1),
            lambda: client.acquire_permits(),
            lambda: client.delete("any", [1]),
            lambda: client.get([1]),
        ):
            with pytest.raises(ServerUnavailableError, match="none of the 2 shards answers"):
                request()


def test_an_iterator_of_the_policy_may_outlive_its_client(make_service):
    addresses = make_service(count=2).addresses
    code = (
        "from replay_client import ReplayClient\n"
        f"client = ReplayClient({addresses})\n"
        "watch = iter(client.watch_policy())\n"
        "print(next(watch).version)\n"
        "client.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "0\n"
    assert done.stderr == ""
