"""Requests that a broken or hostile client could send, and clients that vanish: nobody notices, nothing is left."""

import asyncio
import math
import socket
import subprocess
import sys
import threading
import time

import grpc
import msgpack
import numpy as np
import psutil
import pytest

from replay_client import AsyncReplayClient, ReplayClient, RolloutGroup
from replay_client.errors import ReplayError
from replay_client.rollout import MAGIC
from replay_client.streams import failure
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import AdmissionConfig, ReplayServer, TableConfig
from tests.factories import make_group, until
from tests.server.rpc.bystander import bystander

TABLES = [
    TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 4}, forward_to="pool"),
    TableConfig(name="pool", sampler="prioritized", remover="min_heap", max_size=8, seed=1),
    TableConfig(name="plain", sampler="fifo"),
]
Code = grpc.StatusCode
MB = 1 << 20
ID = 1 << 40
"""Of a draw."""


@pytest.fixture
def server():
    admission = AdmissionConfig(groups_per_step=100, max_staleness=1)
    with ReplayServer(tables=TABLES, port=0, admission=admission) as server:
        yield server
        check_unaffected(server.address)


@pytest.fixture
def stub(server):
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_metadata_size", 64 << 10)]
    with grpc.insecure_channel(server.address, options) as channel:
        yield ReplayStub(channel)


@pytest.fixture
def client(server, transport):
    with ReplayClient(server.address, timeout=10.0) as client:
        yield client


def check_unaffected(address: str) -> None:
    """Another client works at once; when it has taken its item and emptied the tables, nothing is left."""
    with ReplayClient(address, timeout=5.0) as other:
        until(lambda: streams(other) == 0, "a stream is still open")
        until(lambda: in_hand(other) == 0, "something is still in hand")
        until(lambda: waiting(other) == 0, "somebody still waits")
        for name, table in other.server_info().tables.items():
            assert table.bytes <= other.server_info().bytes, name
            left = table.consumed + table.deleted + table.evicted + table.stale
            assert table.inserts - left == table.size, f"{name} has lost count: {table}"
        for name in ("queue", "pool", "plain"):
            other.reset(name)
        info = other.server_info()
        assert (info.items, info.bytes) == (0, 0)
        for name in ("queue", "pool", "plain"):
            key = other.insert(b"alive", {name: 1.0})
            (sample,) = other.sample(name, 1)
            assert (sample.info.key, bytes(sample.payload)) == (key, b"alive")
            other.reset(name)


def streams(client: ReplayClient) -> int:
    info = client.server_info()
    return info.insert_streams + info.sample_streams


def in_hand(client: ReplayClient) -> int:
    return sum(table.reserved for table in client.server_info().tables.values())


def waiting(client: ReplayClient) -> int:
    return sum(table.inserting.count + table.sampling.count for table in client.server_info().tables.values())


def insert_request(*, keys=(1,), table="plain", priorities=(), rows=(), payload=b"x", sizes=None, **fields):
    """One item of one byte in `plain`, unless told otherwise."""
    targets = [pb.InsertTarget(table=table, priorities=priorities, rows=rows)]
    sizes = [len(payload)] * len(keys) if sizes is None else sizes
    request = pb.InsertRequest(keys=keys, targets=targets, payload_sizes=sizes, payloads=payload, timeout=0.0)
    request.MergeFrom(pb.InsertRequest(**fields))
    return request


def update_request(keys, priorities) -> pb.UpdatePrioritiesRequest:
    return pb.UpdatePrioritiesRequest(
        table="plain",
        keys=np.array(keys, dtype="<u8").tobytes(),
        priorities=np.array(priorities, dtype="<f8").tobytes(),
    )


def code_of(call) -> grpc.StatusCode:
    """The status with which a call, or a stream, ends."""
    try:
        answer = call()
        if hasattr(answer, "__next__"):
            list(answer)
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
    else:
        return Code.OK
    assert code not in (Code.UNKNOWN, Code.INTERNAL), details
    return code


def row_codes(response: pb.InsertResponse) -> list[int]:
    return [error.code for error in response.errors]


def nothing_stored(client: ReplayClient) -> None:
    info = client.server_info()
    assert (info.items, info.bytes) == (0, 0)
    assert all(table.inserts == 0 for table in info.tables.values())


INVALID, NOT_FOUND, OUT_OF_RANGE = (
    code.value[0] for code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.OUT_OF_RANGE)
)


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("priority", [math.nan, math.inf, -math.inf, -1.0, -5e-324, 1e300])
def test_a_bad_priority_is_refused_on_insert_and_on_update(stub, client, priority):
    assert row_codes(stub.Insert(insert_request(priorities=[priority]))) == [INVALID]
    nothing_stored(client)
    client.insert(b"x", {"plain": 1.0}, key=5)
    update = update_request([5, 5], [0.5, priority])
    assert code_of(lambda: stub.UpdatePriorities(update)) is Code.INVALID_ARGUMENT
    assert client.list_items("plain").items[0].priority == 1.0


@pytest.mark.parametrize("priority", [0.0, -0.0, 5e-324, 2.3e-308, 3e38])
def test_an_odd_but_valid_priority_does_no_harm(stub, client, priority):
    assert row_codes(stub.Insert(insert_request(table="pool", priorities=[priority]))) == []
    client.insert(b"y", {"pool": 1.0})
    drawn = client.sample("pool", 1 + (priority > 0))
    assert len(drawn) == 1 + (priority > 0)
    assert all(0 <= sample.info.probability <= 1 for sample in drawn)


@pytest.mark.parametrize(
    "fields",
    [
        {"policy_versions": [1, 2, 3]},
        {"sizes": [1, 1]},
        {"sizes": []},
        {"priorities": [1.0, 2.0]},
        {"rows": [1]},
        {"rows": [2**32 - 1]},
        {"rows": [0], "priorities": [1.0, 2.0]},
        {"keys": [], "sizes": []},
        {"keys": [], "sizes": [], "payload": b""},
        {"payload": b"xy", "sizes": [1]},
        {"keys": list(range(2**16 + 1)), "sizes": [], "payload": b""},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_contradictory_columns_are_refused_as_a_whole(stub, client, fields):
    assert code_of(lambda: stub.Insert(insert_request(**fields))) is Code.INVALID_ARGUMENT
    nothing_stored(client)
    assert code_of(lambda: stub.InsertStream(iter([insert_request(**fields)]))) is Code.INVALID_ARGUMENT
    nothing_stored(client)


def test_too_many_payload_bytes_refuse_the_whole_message(stub, client):
    request = insert_request(keys=[1, 2], sizes=[1, 1], payload=b"xyz")
    assert code_of(lambda: stub.Insert(request)) is Code.INVALID_ARGUMENT
    nothing_stored(client)


@pytest.mark.parametrize("nbytes", [2, 2**31, 2**63, 2**64 - 1])
def test_an_insert_that_lacks_payload_bytes_is_not_acknowledged(stub, client, nbytes):
    assert code_of(lambda: stub.Insert(insert_request(sizes=[nbytes]))) is not Code.OK
    nothing_stored(client)


@pytest.mark.parametrize("nbytes", [2, 2**31, 2**63, 2**64 - 1])
def test_a_stream_that_ends_in_the_middle_of_an_item_never_had_it(stub, client, nbytes):
    responses = list(stub.InsertStream(iter([insert_request(sizes=[nbytes])])))
    assert sum(response.decided for response in responses) == 0
    nothing_stored(client)


def test_a_message_that_should_go_on_and_begins_anew_is_refused(stub, client):
    for second in (insert_request(keys=[2]), pb.InsertRequest(), pb.InsertRequest(payload_sizes=[1])):
        requests = [insert_request(keys=[1], sizes=[10], payload=b"12345"), second]
        assert code_of(lambda requests=requests: stub.InsertStream(iter(requests))) is Code.INVALID_ARGUMENT
    assert code_of(lambda: stub.InsertStream(iter([pb.InsertRequest(payloads=b"xx")]))) is Code.INVALID_ARGUMENT
    nothing_stored(client)


def test_an_item_over_the_limit_leaves_those_before_it_where_they_are(stub, client):
    too_large = insert_request(keys=[1], sizes=[(1 << 30) + 1], payload=b"x")
    requests = [insert_request(keys=[9]), too_large]
    responses = stub.InsertStream(iter_later(requests.pop(0), requests))
    assert next(responses).decided == 1
    until(lambda: not requests, "both are sent")
    responses.cancel()
    assert [item.key for item in client.list_items("plain").items] == [9]


@pytest.mark.parametrize("table", ["", "nope", "a\nb\0c", "plain ", "../plain", "☃" * 50, "x" * 100_000])
def test_an_unknown_table_is_a_typed_error_whatever_its_name(stub, client, table):
    assert row_codes(stub.Insert(insert_request(table=table))) == [NOT_FOUND]
    calls = [
        lambda: stub.Sample(pb.SampleRequest(table=table, num_samples=1, timeout=0)),
        lambda: drawn(stub, pb.SampleRequest(table=table, num_samples=1, id=ID)),
        lambda: stub.UpdatePriorities(pb.UpdatePrioritiesRequest(table=table)),
        lambda: stub.Delete(pb.DeleteRequest(table=table)),
        lambda: stub.ListItems(pb.ListItemsRequest(table=table)),
        lambda: stub.GetServerInfo(pb.GetServerInfoRequest(tables=[table])),
        lambda: stub.UpdateTable(pb.UpdateTableRequest(table=table, changes="{}")),
    ]
    for index, call in enumerate(calls):
        assert code_of(call) is Code.NOT_FOUND, index
    nothing_stored(client)


def test_a_long_table_name_is_not_repeated_for_every_row(stub, client):
    request = insert_request(keys=range(1000), table="x" * 100_000, sizes=[], payload=b"")
    response = stub.Insert(request)
    assert len(response.errors) == 1000
    assert response.ByteSize() < 2 * MB


def check_holds_nobody_up(address: str, request: bytes, method: str = "Insert", seconds: float = 2.0) -> None:
    """No call of another client reaches its deadline of `seconds` while the server deals with `request`."""
    with grpc.insecure_channel(address) as channel, ReplayClient(address, timeout=seconds) as other:
        other.policy()
        call = channel.unary_unary(f"/replay.v1.Replay/{method}").future(request)
        while not call.done():
            other.policy()


def test_one_table_named_many_times_in_a_message_holds_nobody_up(server):
    request = insert_request(keys=range(2**16), sizes=[], payload=b"")
    request.targets.extend([request.targets[0]] * 30_000)
    check_holds_nobody_up(server.address, request.SerializeToString())


def test_many_tables_named_in_a_message_cost_no_memory_for_each_row(server):
    """3000 tables and 65536 rows: a double for each pair would be 1.5 GB."""
    request = insert_request(keys=range(2**16), sizes=[], payload=b"")
    request.targets.extend(pb.InsertTarget(table=f"t{n}", rows=[0]) for n in range(3000))
    before = psutil.Process().memory_info().rss
    most, stop = [0], threading.Event()

    def watch():
        while not stop.wait(0.005):
            most[0] = max(most[0], psutil.Process().memory_info().rss - before)

    thread = threading.Thread(target=watch)
    thread.start()
    with grpc.insecure_channel(server.address) as channel:
        code_of(lambda: ReplayStub(channel).Insert(request))
    stop.set()
    thread.join()
    assert most[0] < 300 * MB


@pytest.mark.parametrize("garbage", [b"\xff" * 200_000, b"\x60\x01" * 2 * MB], ids=["endless number", "many fields"])
def test_bytes_that_are_slow_to_read_hold_nobody_up(server, garbage):
    check_holds_nobody_up(server.address, garbage)


@pytest.mark.parametrize("timeout", [math.nan, -1.0, -math.inf])
def test_a_timeout_that_is_none_is_refused(stub, client, timeout):
    assert row_codes(stub.Insert(insert_request(timeout=timeout))) == [INVALID]
    sample = pb.SampleRequest(table="plain", num_samples=1, timeout=timeout)
    assert code_of(lambda: stub.Sample(sample)) is Code.INVALID_ARGUMENT
    permits = pb.AcquirePermitsRequest(count=1, timeout=timeout)
    assert code_of(lambda: stub.AcquirePermits(permits)) is Code.INVALID_ARGUMENT
    nothing_stored(client)


@pytest.mark.parametrize("lease", [math.nan, math.inf, -1.0])
def test_a_lease_without_an_end_is_refused(stub, client, lease):
    client.insert(b"x", {"plain": 1.0})
    request = pb.SampleRequest(table="plain", num_samples=1, timeout=0, lease=lease)
    assert code_of(lambda: stub.Sample(request)) is Code.INVALID_ARGUMENT
    assert in_hand(client) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"num_samples": 0},
        {"num_samples": 2**32 - 1},
        {"num_samples": 2**16 + 1},
        {"num_samples": 1, "min_samples": 2},
        {"num_samples": 1, "min_samples": 0},
        {"num_samples": 2, "allow_repeats": True, "scope": "s"},
        {"num_samples": 2, "allow_repeats": True, "exclude": [1]},
    ],
    ids=str,
)
def test_a_batch_that_can_never_be_is_refused(stub, client, fields):
    request = pb.SampleRequest(table="plain", timeout=0, **fields)
    assert code_of(lambda: stub.Sample(request)) is Code.INVALID_ARGUMENT
    request.id = ID
    assert code_of(lambda: drawn(stub, request)) is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("page", ["-1", "abc", "1.5", "²", "0x10", "9" * 5000, "\0"])
def test_a_bad_page_token_is_refused(stub, client, page):
    request = pb.ListItemsRequest(table="plain", page=page)
    assert code_of(lambda: stub.ListItems(request)) is Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "fields",
    [
        {"page": str(2**59)},
        {"limit": 2**32 - 1},
        {"min_priority": math.nan},
        {"min_staleness": -(2**63)},
        {"max_staleness": 2**63 - 1},
        {"min_staleness": 2**63 - 1, "max_staleness": -(2**63)},
    ],
    ids=str,
)
def test_extreme_bounds_of_a_listing_only_match_less(stub, client, fields):
    client.insert(b"x", {"plain": 1.0})
    stub.ListItems(pb.ListItemsRequest(table="plain", **fields))


@pytest.mark.parametrize(
    "changes",
    [
        "",
        "null",
        "[1]",
        "{",
        '{"max_size": -1}',
        '{"max_size": NaN}',
        '{"max_size": 1e400}',
        '{"name": "other"}',
        '{"sampler": "best"}',
        '{"max_size": ' + "9" * 5000 + "}",
        "[" * 100_000,
        '{"rate_limiter": {"type": "queue", "max_size": 1' + "0" * 400 + "}}",
        '{"when_full": "' + "x" * 100_000 + '"}',
    ],
    ids=lambda changes: changes[:30],
)
def test_a_bad_change_of_a_table_is_refused_and_changes_nothing(stub, client, changes):
    before = client.server_info().tables["plain"].config
    request = pb.UpdateTableRequest(table="plain", changes=changes)
    assert code_of(lambda: stub.UpdateTable(request)) is Code.INVALID_ARGUMENT
    assert client.server_info().tables["plain"].config == before


@pytest.mark.parametrize("version", [-1, -(2**63)])
def test_a_negative_policy_version_is_refused(stub, client, version):
    request = pb.SetPolicyVersionRequest(version=version, rollback=True)
    assert code_of(lambda: stub.SetPolicyVersion(request)) is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("share", [None, 4096.0])
def test_a_policy_version_whose_permits_cannot_be_counted_is_refused(stub, client, share):
    most = 2**50 // 100
    for version in (2**62, 2**55, most + 1):
        request = pb.SetPolicyVersionRequest(version=version, share=share)
        assert code_of(lambda request=request: stub.SetPolicyVersion(request)) is Code.INVALID_ARGUMENT
    assert client.server_info().policy.version == 0
    for version in (1, most):
        stub.SetPolicyVersion(pb.SetPolicyVersionRequest(version=version, share=share))
        assert client.server_info().policy.version == version
        assert client.acquire_permits(2).count == 2


@pytest.mark.parametrize("version", [-(2**63), -1, 2**63 - 1])
def test_an_item_of_an_absurd_policy_version_is_refused(stub, client, version):
    (error,) = stub.Insert(insert_request(policy_versions=[version])).errors
    assert error.code == Code.INVALID_ARGUMENT.value[0]
    assert f"policy version {version}" in error.message
    assert client.server_info().tables["plain"].size == 0


@pytest.mark.parametrize("count", [0, 2**32 - 1])
def test_no_permits_and_absurdly_many_are_refused(stub, client, count):
    assert code_of(lambda: stub.AcquirePermits(pb.AcquirePermitsRequest(count=count))) is Code.INVALID_ARGUMENT
    lease = client.acquire_permits(2)
    request = pb.ReleasePermitsRequest(lease=lease.id, count=2**32 - 1)
    assert code_of(lambda: stub.ReleasePermits(request)) is Code.INVALID_ARGUMENT
    assert stub.ReleasePermits(pb.ReleasePermitsRequest(lease=1)).released == 0
    assert client.server_info().admission.running == 2


def test_updates_and_deletes_of_many_unknown_keys_only_say_so(stub, client):
    keys = range(100_000)
    update = update_request(keys, np.ones(len(keys)))
    assert stub.UpdatePriorities(update).applied == 0
    assert len(stub.Delete(pb.DeleteRequest(table="plain", keys=keys)).missing) == len(keys)
    half_a_key = pb.UpdatePrioritiesRequest(table="plain", keys=bytes(12), priorities=bytes(12))
    for uneven in (update_request([1, 2], [1.0]), half_a_key):
        assert code_of(lambda uneven=uneven: stub.UpdatePriorities(uneven)) is Code.INVALID_ARGUMENT
    assert code_of(lambda: stub.Get(pb.GetRequest(keys=keys))) is Code.INVALID_ARGUMENT


def test_asking_for_one_table_many_times_is_answered_once_and_soon(stub, client):
    info = stub.GetServerInfo(pb.GetServerInfoRequest(tables=["plain"] * 20_000), timeout=10)
    assert len(info.tables) == 1


# ------------------------------------------------------------------------------------------------ messages


@pytest.mark.parametrize("method", [method.name for method in pb.DESCRIPTOR.services_by_name["Replay"].methods])
def test_bytes_that_are_no_message_are_refused(server, client, caplog, method):
    with grpc.insecure_channel(server.address) as channel:
        path = f"/replay.v1.Replay/{method}"
        for garbage in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05x", bytes(range(256))):
            call = channel.stream_stream(path)(iter([garbage]), timeout=10)
            assert code_of(lambda call=call: call) is Code.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError):
            channel.unary_unary("/replay.v1.Replay/Nothing")(b"")
    assert "Traceback" not in caplog.text
    nothing_stored(client)


def test_a_message_over_the_limit_is_refused(stub, client):
    big = insert_request(payload=bytes(17 * MB))
    assert code_of(lambda: stub.Insert(big)) is Code.RESOURCE_EXHAUSTED
    assert code_of(lambda: stub.InsertStream(iter([insert_request(keys=[7]), big]))) is Code.RESOURCE_EXHAUSTED
    draw = pb.DrawRequest(draw=pb.SampleRequest(table="x" * 17 * MB, num_samples=1))
    assert code_of(lambda: stub.Draw(iter([draw]))) is Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    "request_",
    [
        pb.DrawRequest(draw=pb.SampleRequest(table="plain", num_samples=1)),
        pb.DrawRequest(draw=pb.SampleRequest(table="plain", num_samples=1, id=7)),
        pb.DrawRequest(draw=pb.SampleRequest(table="plain", num_samples=1, id=2**63)),
        pb.DrawRequest(draw=pb.SampleRequest(table="plain", num_samples=1, id=ID, lease=math.nan)),
        pb.DrawRequest(draw=pb.SampleRequest(table="plain", num_samples=1, id=ID, timeout=-1.0)),
        pb.DrawRequest(draw=pb.SampleRequest(table="plain", weigh=True, id=ID, scope="x" * 1000)),
        pb.DrawRequest(take=range(2**16 + 1)),
        pb.DrawRequest(renew=[ID]),
        pb.DrawRequest(renew=[ID], seconds=math.inf),
    ],
    ids=["no id", "small id", "large id", "lease", "timeout", "scope", "ids", "no seconds", "seconds"],
)
def test_a_bad_request_of_a_stream_is_refused_alone_and_the_stream_goes_on(stub, client, request_):
    key = client.insert(b"x", {"plain": 1.0})
    good = pb.DrawRequest(draw=pb.SampleRequest(table="plain", num_samples=1, id=ID + 1))
    answers = list(stub.Draw(iter([request_, good])))
    assert [answer.error.code for answer in answers] == [INVALID, 0]
    assert answers[1].keys == [key]
    assert list(stub.Draw(iter([pb.DrawRequest()]))) == []


def test_a_draw_that_cannot_be_served_does_not_hold_up_those_behind_it(stub, client):
    key = client.insert(b"x", {"queue": 1.0})
    waits, goes = (pb.SampleRequest(table=table, num_samples=1, id=ID + n) for n, table in enumerate(("pool", "queue")))
    answers = stub.Draw(iter_until(threading.Event(), *(pb.DrawRequest(draw=draw) for draw in (waits, goes))))
    assert next(answers).keys == [key]
    answers.cancel()


def test_a_batch_ends_once_whoever_names_it_and_however_often(stub, client):
    """An unknown id is missing. A known one may be named on any stream: its reader may have lost its own."""
    for n in range(4):
        client.insert(bytes([n]), {"queue": 1.0})
    done = threading.Event()
    draws = [pb.DrawRequest(draw=pb.SampleRequest(table="queue", num_samples=1, id=ID + n)) for n in range(2)]
    mine = stub.Draw(iter_until(done, *draws))
    assert [next(mine).batch for _ in range(2)] == [ID, ID + 1]

    def told(**ids) -> tuple[list[int], list[int]]:
        (answer,) = stub.Draw(iter([pb.DrawRequest(**ids)]))
        return list(answer.done), list(answer.missing)

    unknown = [0, 1, ID + 2, 2**63 + ID, 2**64 - 1]
    assert told(take=unknown) == told(give_back=unknown) == told(renew=unknown, seconds=9.0) == ([], unknown)
    assert told(take=[ID, ID]) == ([ID, ID], [])
    assert told(give_back=[ID]) == ([], [ID])
    assert told(renew=[ID], seconds=9.0) == ([ID], [])
    done.set()
    mine.cancel()
    until(lambda: client.server_info().tables["queue"].size == 3, "what nobody took must come back")
    assert told(take=[ID, ID + 1]) == ([ID], [ID + 1])
    assert client.server_info().tables["queue"].consumed == 1


def test_draws_of_one_stream_are_bounded(stub, client, monkeypatch):
    monkeypatch.setattr("replay_server.rpc.sampling.MAX_DRAWS", 3)
    done = threading.Event()
    draws = [pb.DrawRequest(draw=pb.SampleRequest(table="plain", num_samples=1, id=ID + n)) for n in range(4)]
    answers = stub.Draw(iter_until(done, *draws))
    refused = next(answers)
    assert (refused.batch, refused.error.code) == (ID + 3, Code.RESOURCE_EXHAUSTED.value[0])
    assert "3 draws of this stream" in refused.error.message
    assert waiting(client) == 3
    done.set()
    answers.cancel()


def drawn(stub: ReplayStub, request: pb.SampleRequest) -> None:
    """Raises the error with which a draw on a stream is refused."""
    (answer,) = stub.Draw(iter([pb.DrawRequest(draw=request)]))
    if answer.error.code:
        raise failure(answer.error.code, answer.error.message)


def iter_until(done, *requests):
    """The requests; the stream ends when `done` is set."""
    yield from requests
    done.wait(20)


def iter_later(first, later):
    """`first`, then what is put into `later`."""
    yield first
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if later:
            yield later.pop(0)
        time.sleep(0.01)


def test_a_message_of_very_many_rows_that_enter_one_by_one_holds_nobody_up(stub, client):
    rows = 20_000
    client.update_table("plain", max_size=100, remover="min_heap")  # each row evicts, depending on the row before
    request = pb.InsertRequest(
        keys=range(1, rows + 1), targets=[pb.InsertTarget(table="plain")], payload_sizes=[0] * rows
    )
    with bystander(client) as answers:
        assert stub.Insert(request).decided == rows
    assert len(answers) > 3  # one or two is what others get when the server does not yield in between


def test_many_draws_at_once_hold_nobody_up(stub, client):
    with client.writer() as writer:
        for _ in range(500):
            writer.insert(b"x" * 100, {"plain": 1.0})
    done = threading.Event()
    draw = pb.SampleRequest(table="plain", num_samples=500)
    stream = stub.Draw(iter_until(done, *(with_id(draw, ID + n) for n in range(130))))
    with bystander(client) as answers:
        for _ in range(130):
            next(stream)
    assert answers
    done.set()
    stream.cancel()


def with_id(draw: pb.SampleRequest, draw_id: int) -> pb.DrawRequest:
    request = pb.DrawRequest(draw=draw)
    request.draw.id = draw_id
    return request


def test_requests_whose_time_is_up_leave_nothing_behind_the_one_that_waits(server, stub, client):
    """The first in line waits for ever; a thousand others, of 64 kB, give up."""
    before = psutil.Process().memory_info().rss
    for _ in range(4):
        client.insert(b"x", {"queue": 1.0})
    call = stub.Insert.future(pb.InsertRequest(keys=[5], targets=[pb.InsertTarget(table="queue")]))
    until(lambda: client.server_info().tables["queue"].inserting.count == 1, "it must wait")
    for key in range(10, 1010):
        request = insert_request(keys=[key], table="queue", payload=bytes(64_000))
        assert row_codes(stub.Insert(request)) == [Code.DEADLINE_EXCEEDED.value[0]]
    assert psutil.Process().memory_info().rss - before < 48 * MB  # rings count as well; all payloads are 64 MB
    call.cancel()


# ------------------------------------------------------------------------------------------------ vanishing

VANISH = """
import sys, threading, time
import grpc
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
address, what = sys.argv[1:]
channel = grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)])
stub = ReplayStub(channel)
sleep = threading.Event()
def and_stay(*requests):
    yield from requests
    sleep.wait()
def insert(key, size, payload, table="plain"):
    return pb.InsertRequest(keys=[key], targets=[pb.InsertTarget(table=table)], payload_sizes=[size], payloads=payload)
draws = [pb.DrawRequest(draw=pb.SampleRequest(table="queue", num_samples=1, id=2**40 + n)) for n in range(4)]
if what == "mid item":
    more = pb.InsertRequest(payloads=bytes(999_999))
    call = stub.InsertStream(and_stay(insert(11, 5_000_000, bytes(1_000_000)), more))
elif what == "blocked insert":
    call = stub.InsertStream(and_stay(insert(11, 1, b"x", "queue"), insert(12, 1, b"y", "queue")))
elif what == "blocked unary insert":
    call = stub.Insert.future(insert(11, 1, b"x", "queue"))
elif what == "waiting sample":
    call = stub.Sample(pb.SampleRequest(table="plain", num_samples=100))
elif what == "waiting sample stream":
    call = stub.Draw(and_stay(pb.DrawRequest(draw=pb.SampleRequest(table="plain", num_samples=100, id=2**40))))
elif what == "untaken batches":
    call = stub.Draw(and_stay(*draws))
    for _ in range(4):
        next(call)
elif what in ("mid response", "mid response with lease"):
    lease = 60.0 if what.endswith("lease") else 0.0
    call = stub.Sample(pb.SampleRequest(table="large", num_samples=1, lease=lease))
    next(call)
elif what == "mid get":
    call = stub.Get(pb.GetRequest(keys=[77]))
    next(call)
elif what == "watch":
    call = stub.WatchPolicy(pb.GetPolicyRequest())
    next(call)
elif what == "permits":
    call = stub.AcquirePermits.future(pb.AcquirePermitsRequest(count=200))
print("there", flush=True)
how = sys.stdin.readline().strip()
if how == "cancel":
    call.cancel()
elif how == "close":
    channel.close()
else:
    time.sleep(60)
print("gone", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def vanishing():
    """Tables whose limiters show everything that was not given back."""
    queue = TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 4}, forward_to="pool")
    large = TableConfig(name="large", rate_limiter={"type": "queue", "max_size": 4})
    with ReplayServer(
        tables=[queue, large, *TABLES[1:]], port=0, admission=AdmissionConfig(groups_per_step=100, max_staleness=1)
    ) as server:
        yield server


@pytest.mark.parametrize("how", ["kill", "close", "cancel"])
@pytest.mark.parametrize(
    "where",
    [
        "mid item",
        "blocked insert",
        "blocked unary insert",
        "waiting sample",
        "waiting sample stream",
        "untaken batches",
        "mid response",
        "mid response with lease",
        "mid get",
        "watch",
        "permits",
    ],
)
def test_a_client_that_vanishes_leaves_everything_as_it_was(vanishing, where, how):
    with ReplayClient(vanishing.address, timeout=10.0) as client:
        keys = [client.insert(bytes([n]), {"queue": 1.0}) for n in range(4)]
        client.insert(bytes(60 * MB), {"large": 1.0}, key=77)
        if where == "permits":
            client.acquire_permits(1)
        before = facts(client)
        command = [sys.executable, "-c", VANISH, vanishing.address, where]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout.readline() == "there\n"
            expected = {
                "blocked insert": lambda: client.server_info().tables["queue"].inserting.count == 1,
                "blocked unary insert": lambda: client.server_info().tables["queue"].inserting.count == 1,
                "waiting sample": lambda: client.server_info().tables["plain"].sampling.count == 1,
                "waiting sample stream": lambda: client.server_info().tables["plain"].sampling.count == 1,
                "untaken batches": lambda: client.server_info().tables["queue"].reserved == 4,
                "mid item": lambda: client.server_info().insert_streams == before["server"][2] + 1,
                "permits": lambda: client.server_info().admission.acquiring.count == 1,
            }.get(where, lambda: in_hand(client) == (where.startswith("mid response")))
            until(expected, f"the client is not {where}")
            if how == "kill":
                process.kill()
                process.wait()
            else:
                process.stdin.write(how + "\n")
                process.stdin.flush()
                assert process.stdout.readline() == "gone\n"
            until(lambda: facts(client) == before, f"{facts(client)} is not {before}")
            assert [sample.info.key for sample in client.sample("queue", 4)] == keys
            assert client.sample("large", 1)[0].info.key == 77
            client.insert(b"next", {"queue": 1.0})
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def facts(client: ReplayClient) -> dict[str, tuple]:
    """What must be as before when somebody has come and gone."""
    info = client.server_info()
    counts = {
        name: (
            table.size,
            table.bytes,
            table.reserved,
            table.samples,
            table.inserts,
            table.inserting.count,
            table.sampling.count,
        )
        for name, table in info.tables.items()
    }
    counts["server"] = (info.items, info.bytes, info.insert_streams, info.sample_streams)
    counts["permits"] = (info.admission.accepted, info.admission.running, info.admission.acquiring.count)
    return counts


def test_a_lease_of_a_client_that_was_killed_ends_with_its_time(vanishing):
    code = VANISH.replace("lease = 60.0", "lease = 1.0").replace("next(call)", "list(call)")
    with ReplayClient(vanishing.address, timeout=10.0) as client:
        client.insert(b"x", {"large": 1.0}, key=77)
        before = facts(client)
        command = [sys.executable, "-c", code, vanishing.address, "mid response with lease"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "there\n"
            process.kill()
        assert client.server_info().tables["large"].reserved == 1
        until(lambda: facts(client) == before, "the lease must end")
        assert client.sample("large", 1)[0].info.key == 77


async def test_a_cancelled_task_leaves_nothing(server):
    async with AsyncReplayClient(server.address, timeout=5.0) as client:
        for delay in (0.0, 0.001, 0.003, 0.01, 0.03):
            tasks = [
                asyncio.create_task(client.sample("plain", 3)),
                asyncio.create_task(client.insert(bytes(3 * MB), {"pool": 1.0})),
                asyncio.create_task(client.acquire_permits(1)),
                asyncio.create_task(anext(client.sampler("queue", batch_size=2))),
            ]
            await asyncio.sleep(delay)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def test_a_sampler_that_runs_out_of_time_loses_nothing_that_comes_just_then(client):
    got, sent = [], []
    with client.sampler("queue", batch_size=1, prefetch=1, timeout=0.02) as sampler:
        for n in range(60):
            timer = threading.Timer(0.012 + 0.0004 * (n % 30), lambda: sent.append(client.insert(b"x", {"queue": 0.0})))
            timer.start()
            for _ in range(2):
                try:
                    got += [sample.info.key for sample in next(sampler)]
                except ReplayError:
                    continue
            timer.join()
    until(lambda: in_hand(client) == 0, "in hand")
    got += [item.key for item in client.list_items("queue").items]
    assert sorted(got) == sorted(sent)


@pytest.mark.parametrize(
    "bad", [{"priorities": {"plain": "high"}}, {"policy_version": 2**70}], ids=["priority", "version"]
)
def test_a_writer_that_is_given_nonsense_says_so_and_does_not_hang(client, bad):
    writer = client.writer(max_in_flight=2, timeout=2.0)
    options = {"priorities": {"plain": 1.0}} | bad

    def use():
        for _ in range(4):
            writer.insert(b"x", options["priorities"], policy_version=options.get("policy_version"))
        writer.flush(timeout=2.0)

    outcome = []

    def run():
        try:
            use()
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert outcome, "the writer hangs"
    assert not isinstance(outcome[0], TimeoutError), outcome


# ------------------------------------------------------------------------------------------------ payloads


def header(**changes) -> bytes:
    """The bytes of a group whose header says what it should not."""
    data = make_group().encode()
    length = int.from_bytes(data[8:16], "little")
    content = msgpack.unpackb(data[16 : 16 + length])
    for path, value in changes.items():
        if path.startswith("array_"):
            content["arrays"][0][int(path[-1])] = value
        else:
            content[path] = value
    packed = msgpack.packb(content)
    start = -(-(16 + len(packed)) // 64) * 64
    body = data[-(-(16 + length) // 64) * 64 :]
    return (MAGIC + len(packed).to_bytes(8, "little") + packed).ljust(start, b"\0") + body


HOSTILE = {
    "empty": b"",
    "pickle": b"\x80\x04\x95" + bytes(100),
    "other format": MAGIC[:-1] + b"\x09" + bytes(100),
    "huge header": MAGIC + (2**64 - 1).to_bytes(8, "little") + bytes(100),
    "no header": MAGIC + bytes(8),
    "deep header": MAGIC + (10_000).to_bytes(8, "little") + b"\x91" * 10_000,
    "huge list": MAGIC + (5).to_bytes(8, "little") + b"\xdd\xff\xff\xff\xff",
    "huge bytes": MAGIC + (5).to_bytes(8, "little") + b"\xc6\xff\xff\xff\xff",
    "object dtype": header(array_1="object"),
    "huge shape": header(array_2=[2**62]),
    "overflowing shape": header(array_2=[2**32, 2**32]),
    "negative shape": header(array_2=[-1]),
    "many dimensions": header(array_2=[1] * 64),
    "zero of much": header(array_2=[0, 2**62]),
    "negative offset": header(array_3=-64),
    "far offset": header(array_3=2**62),
    "unaligned": header(array_3=1),
    "float shape": header(array_2=[3.0]),
    "bool shape": header(array_2=[True]),
    "name is a number": header(array_0=7),
    "arrays is a map": header(arrays={}),
    "fields is a list": header(fields=[]),
    "unknown field": header(fields={"finish_reasons": None, "__class__": "x"}),
    "reasons is a number": header(fields={"finish_reasons": 3}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_stored_as_they_are_and_decode_to_a_value_error(client, name):
    client.insert(HOSTILE[name], {"plain": 1.0})
    (sample,) = client.sample("plain", 1)
    assert bytes(sample.payload) == HOSTILE[name]
    with pytest.raises(ValueError, match="rollout group"):
        _ = sample.group


def test_every_truncation_and_every_flipped_byte_is_an_error_or_a_group():
    data = make_group(extras={"x": np.arange(4)}, meta={"a": 1}).encode()
    for end in range(len(data) - 64):
        with pytest.raises(ValueError, match="rollout group"):
            RolloutGroup.decode(data[:end])
    rng = np.random.default_rng(0)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= int(rng.integers(1, 256))
        try:
            group = RolloutGroup.decode(damaged)
        except ValueError:
            continue
        assert int(group.completion_lengths.sum()) == group.num_tokens


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """Of HTTP/2."""
    return len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body


def _call_bytes(path: bytes, **headers: bytes) -> bytes:
    """All that a client would send for a call with an empty message, as it is; gRPC would refuse to send some of it."""
    named = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x", b"te": b"trailers"}
    named |= {b"content-type": b"application/grpc"} | {name.encode(): value for name, value in headers.items()}
    block = b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in named.items())
    start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"")
    return start + _frame(1, 4, 1, block) + _frame(0, 1, 1, bytes(5))


@pytest.mark.parametrize(
    "data",
    [
        _call_bytes(b"/\xff\xfe/x"),
        _call_bytes(b"/replay.v1.Replay/GetServerInfo", authorization=b"Bearer \xff\xfe"),
        _call_bytes(b"/replay.v1.Replay/GetServerInfo")[:-5] + b"\0\xff\xff\xff\xff",
        _call_bytes(b"/replay.v1.Replay/GetServerInfo") + bytes(range(256)) * 100,
    ],
    ids=["path", "token", "length", "garbage"],
)
def test_bytes_that_no_client_sends_do_not_end_the_service_for_others(server, client, data):
    host, port = server.address.split(":")
    with client.writer() as writer, client.sampler("queue") as sampler:
        for n in range(3):
            writer.insert(b"before", {"plain": 1.0})
            with socket.create_connection((host, int(port))) as hostile:
                hostile.sendall(data)
                time.sleep(0.5)
            writer.insert(b"after", {"queue": 1.0})
            writer.flush()
            assert bytes(next(sampler)[0].payload) == b"after"
            assert client.server_info().tables["plain"].size == n + 1
