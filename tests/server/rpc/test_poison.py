"""Requests that a broken or hostile client could send, and clients that vanish: nobody notices, nothing is left."""

import asyncio
import math
import threading
from contextlib import suppress
from functools import partial

import grpc
import numpy as np
import pytest

from replay_client import AsyncReplayClient, ReplayClient
from replay_client.errors import ReplayError
from replay_client.testing import until
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import AdmissionConfig, ReplayServer, TableConfig
from replay_server.config import MAX_EXCLUDE, MAX_KEYS, MAX_LEASE, MAX_ROWS, MAX_SCOPE, MAX_WEIGHTS
from tests.server.rpc.calls import Requests, bystander
from tests.server.rpc.vanish import hanging

TABLES = [
    TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 4}, forward_to="pool"),
    TableConfig(name="pool", sampler="prioritized", remover="min_heap", max_size=8, seed=1),
    TableConfig(name="plain", sampler="fifo"),
    TableConfig(name="large", rate_limiter={"type": "queue", "max_size": 4}),
]
Code = grpc.StatusCode
CODES = {code.value[0]: code for code in Code}
METHODS = pb.DESCRIPTOR.services_by_name["Replay"].methods_by_name
MB = 1 << 20
ID = 1 << 40
"""Of a draw."""
GROUPS_PER_STEP = 100


def make_server() -> ReplayServer:
    return ReplayServer(TABLES, 0, admission=AdmissionConfig(fresh_groups_per_step=GROUPS_PER_STEP, max_staleness=1))


@pytest.fixture
def server():
    with make_server() as server:
        yield server
        check_unaffected(server.address)


@pytest.fixture
def stub(server):
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_metadata_size", 64 << 10)]
    with grpc.insecure_channel(server.address, options) as channel:
        yield ReplayStub(channel)


def check_unaffected(address: str) -> None:
    """Another client works at once; when it has taken its item and emptied the tables, nothing is left."""
    with ReplayClient(address, timeout=60.0) as other:
        until(lambda: not held(other), "something is still held for a client")
        for name, table in other.server_info().tables.items():
            left = table.consumed + table.deleted + table.evicted + table.stale
            assert table.inserts - left == table.size, f"{name} has lost count: {table}"
        other.reset("")
        info = other.server_info()
        assert info.items == 0
        assert info.bytes == 0
        for name in ("queue", "pool", "plain"):
            key = other.insert(b"alive", {name: 1.0})
            (sample,) = other.sample(name, 1)
            assert sample.info.key == key
            assert bytes(sample.payload) == b"alive"
            other.reset(name)


def held(client: ReplayClient) -> dict[str, int]:
    """What the server holds for clients, as far as there is any."""
    info = client.server_info()
    counts = {
        "streams": info.insert_streams + info.sample_streams,
        "in hand": sum(table.reserved for table in info.tables.values()),
        "waiting": sum(table.inserting.count + table.sampling.count for table in info.tables.values()),
    }
    return {what: count for what, count in counts.items() if count}


def facts(client: ReplayClient) -> dict[str, tuple]:
    """What must be as before when somebody has come and gone, or was refused."""
    info = client.server_info()
    names = ("config", "size", "bytes", "reserved", "samples", "inserts")
    found = {
        name: (*(getattr(table, fact) for fact in names), table.inserting.count, table.sampling.count)
        for name, table in info.tables.items()
    }
    found["server"] = (info.items, info.bytes, info.insert_streams, info.sample_streams, info.policy.version)
    found["permits"] = (info.admission.accepted, info.admission.running, info.admission.acquiring.count)
    found["priorities"] = tuple((item.key, item.priority) for item in client.list_items("plain").items)
    return found


def insert_request(*, keys=(1,), table="plain", priorities=(), rows=(), payload=b"x", sizes=None, targets=1, **fields):
    """One item of one byte in `plain`, unless told otherwise."""
    target = pb.InsertTarget(table=table, priorities=priorities, rows=rows)
    sizes = [len(payload)] * len(keys) if sizes is None else sizes
    made = {"keys": keys, "targets": [target] * targets, "payload_sizes": sizes, "payloads": payload, "timeout": 0.0}
    return pb.InsertRequest(**made | fields)


def update_request(keys, priorities) -> pb.UpdatePrioritiesRequest:
    return pb.UpdatePrioritiesRequest(
        table="plain",
        keys=np.array(keys, dtype="<u8").tobytes(),
        priorities=np.array(priorities, dtype="<f8").tobytes(),
    )


def sample_request(**fields) -> pb.SampleRequest:
    return pb.SampleRequest(**{"table": "plain", "num_samples": 1, "timeout": 0} | fields)


def draw_request(**fields) -> pb.DrawRequest:
    return pb.DrawRequest(draw=sample_request(**{"id": ID} | fields))


def changes(text: str, table: str = "plain") -> pb.UpdateTableRequest:
    return pb.UpdateTableRequest(table=table, changes=text)


def end_of(stub: ReplayStub, method: str, *requests) -> tuple[grpc.StatusCode, str]:
    """The status and message with which a call ends, or of the first row that it refuses."""
    kind, call = METHODS[method], getattr(stub, method)
    try:
        answer = call(iter(requests) if kind.client_streaming else requests[0], timeout=60)
        answers = list(answer) if kind.server_streaming else [answer]
    except grpc.RpcError as error:
        return error.code(), error.details()
    refused = [error for each in answers for error in getattr(each, "errors", ())]
    refused += [each.error for each in answers if isinstance(each, pb.SampleResponse) and each.HasField("error")]
    return (CODES[refused[0].code], refused[0].message) if refused else (Code.OK, "")


# ------------------------------------------------------------------------------------------------ what is refused

BAD_PRIORITIES = (math.nan, math.inf, -math.inf, -1.0, -5e-324, 1e300)
BAD_COLUMNS = [
    ({"policy_versions": [1, 2, 3]}, "policy_versions has 3 entries for 1 item"),
    ({"sizes": [1, 1]}, "payload_sizes has 2 entries for 1 item"),
    ({"sizes": []}, "1 payload bytes more than payload_sizes says"),
    ({"payload": b"xy", "sizes": [1]}, "1 payload bytes more"),
    ({"keys": [1, 2], "sizes": [1, 1], "payload": b"xyz"}, "1 payload bytes more"),
    ({"priorities": [1.0, 2.0]}, "2 priorities for 1 item"),
    ({"rows": [1]}, "1 rows of table 'plain', up to row 1, in a message of 1 items"),
    ({"rows": [2**32 - 1]}, "up to row 4294967295"),
    ({"rows": [0] * 1000}, "1000 rows of table 'plain'"),
    ({"rows": [0], "priorities": [1.0, 2.0]}, "2 priorities for 1 item"),
    ({"keys": [], "sizes": []}, "a message without items"),
    ({"keys": [], "sizes": [], "payload": b""}, "a message without items"),
    ({"keys": range(MAX_ROWS + 1), "sizes": [], "payload": b""}, "65537 items in one message"),
    ({"targets": 2}, "table 'plain' is a target twice"),
]
BAD_BATCHES = [
    ({"num_samples": 0}, "at least 1 sample"),
    ({"num_samples": 2**32 - 1}, "4294967295: at most 65536"),
    ({"num_samples": MAX_ROWS + 1}, "65537: at most 65536"),
    ({"min_samples": 2}, "min_samples must be from 1 to num_samples = 1, not 2"),
    ({"min_samples": 0}, "min_samples must be from 1"),
    ({"num_samples": 2, "allow_repeats": True, "scope": "s"}, "repeats cannot be combined"),
    ({"num_samples": 2, "allow_repeats": True, "exclude": [1]}, "repeats cannot be combined"),
    ({"exclude": range(MAX_EXCLUDE + 1)}, "to exclude"),
    ({"scope": "x" * (MAX_SCOPE + 1)}, "scope of 257"),
    *(({"lease": lease}, "lease must be a number of seconds") for lease in (math.nan, math.inf, -1.0, MAX_LEASE + 1)),
    *(({"timeout": timeout}, "timeout must be a number of seconds") for timeout in (math.nan, -1.0, -math.inf)),
    ({"values": [pb.ValueRows(rows=2)]}, "rows of the values of a draw must be above 0, and together num_samples = 1"),
    ({"values": [pb.ValueRows(value="a", rows=0), pb.ValueRows(value="b", rows=1)]}, "must be above 0"),
    ({"values": [pb.ValueRows(value="a")] * 2}, "name a value twice"),
]
BAD_CHANGES = {
    "": "must be a JSON object",
    "null": "must be a JSON object",
    "[1]": "must be a JSON object",
    "{": "must be a JSON object",
    "[" * 100_000: "must be a JSON object",
    '{"when_full": "' + "x" * 100_000 + '"}': "when_full",
    '{"max_size": -1}': "max_size",
    '{"max_size": NaN}': "max_size",
    '{"max_size": 1e400}': "max_size",
    '{"max_size": ' + "9" * 5000 + "}": "",
    '{"name": "other"}': "cannot change",
    '{"sampler": "best"}': "sampler",
    '{"balance": {"tag": ""}}': "at least 1 character",
    '{"balance": {"tag": "a", "weights": {"b": -1}}}': "balance.weights.b",
    '{"balance": {"tag": "a"}, "rate_limiter": {"type": "queue", "max_size": 1}}': "would wait for ever",
    '{"index": ["a", "a"]}': "names one twice",
    '{"rate_limiter": {"type": "queue", "max_size": 1' + "0" * 400 + "}}": "rate_limiter",
}
MOST_VERSIONS = 2**50 // GROUPS_PER_STEP
UNKNOWN_TABLES = ("", "nope", "a\nb\0c", "plain ", "../plain", "☃" * 50, "x" * 100_000)


def of_unknown_table(table: str) -> list[tuple]:
    return [
        ("Insert", insert_request(table=table)),
        ("Sample", sample_request(table=table)),
        ("Draw", draw_request(table=table)),
        ("Draw", draw_request(table=table, num_samples=0, weigh=True)),
        ("UpdatePriorities", pb.UpdatePrioritiesRequest(table=table)),
        ("Delete", pb.DeleteRequest(table=table)),
        ("ListItems", pb.ListItemsRequest(table=table)),
        ("GetServerInfo", pb.GetServerInfoRequest(tables=[table])),
        ("UpdateTable", changes("{}", table)),
    ]


# What is refused with INVALID_ARGUMENT: a word of the message, the method, and its requests.
INVALID = [
    *(("priority", "Insert", insert_request(priorities=[bad])) for bad in BAD_PRIORITIES),
    *(("priority", "UpdatePriorities", update_request([5, 5], [0.5, bad])) for bad in BAD_PRIORITIES),
    *((word, method, insert_request(**bad)) for bad, word in BAD_COLUMNS for method in ("Insert", "InsertStream")),
    *(
        ("payload bytes are missing", "InsertStream", insert_request(sizes=[10], payload=b"12345"), second)
        for second in (insert_request(keys=[2]), pb.InsertRequest(), pb.InsertRequest(payload_sizes=[1]))
    ),
    ("a message without items", "InsertStream", pb.InsertRequest(payloads=b"xx")),
    *((f"policy version {bad}", "Insert", insert_request(policy_versions=[bad])) for bad in (-(2**63), -1, 2**63 - 1)),
    *(("timeout must be", "Insert", insert_request(timeout=bad)) for bad in (math.nan, -1.0, -math.inf)),
    *((word, "Sample", sample_request(**bad)) for bad, word in BAD_BATCHES),
    *((word, "Draw", draw_request(**bad)) for bad, word in BAD_BATCHES),
    ("a draw on a stream has an id", "Draw", draw_request(id=0)),
    *((f"id {bad} of a draw", "Draw", draw_request(id=bad)) for bad in (7, 2**32 - 1, 2**63, 2**64 - 1)),
    ("scope of 257", "Draw", draw_request(num_samples=0, weigh=True, scope="x" * (MAX_SCOPE + 1))),
    *(
        ("65537 batches", "Draw", pb.DrawRequest(**{end: range(MAX_ROWS + 1)}))
        for end in ("acknowledge", "requeue", "renew")
    ),
    ("seconds of a renewal must be above 0", "Draw", pb.DrawRequest(renew=[ID])),
    *(("lease must be", "Draw", pb.DrawRequest(renew=[ID], seconds=bad)) for bad in (math.nan, math.inf, -1.0)),
    *(
        ("is not one that this server gave out", "ListItems", pb.ListItemsRequest(table="plain", page=bad))
        for bad in ("-1", "abc", "1.5", "²", "0x10", "9" * 5000, "\0")
    ),
    *(
        ("tags to look for", "ListItems", pb.ListItemsRequest(table="plain", tags=[pb.TagFilter(name=n) for n in bad]))
        for bad in ("aa", "abcdefghi")
    ),
    *((word, "UpdateTable", changes(bad)) for bad, word in BAD_CHANGES.items()),
    *(
        ("must be from 0", "SetPolicyVersion", pb.SetPolicyVersionRequest(version=bad, rollback=True))
        for bad in (-1, -(2**63))
    ),
    *(
        ("must be from 0", "SetPolicyVersion", pb.SetPolicyVersionRequest(version=bad, shard_index=shard_index))
        for bad in (2**62, 2**55, MOST_VERSIONS + 1)
        for shard_index in (None, pb.ShardIndex(index=4095, shards=4096))
    ),
    *(
        (f"shard index {index} of {shards} shards", method, kind(shard_index=pb.ShardIndex(index=index, shards=shards)))
        for index, shards in ((1, 0), (1, 1), (2**32 - 1, 4096), (0, 4097), (0, 2**32 - 1))
        for method, kind in (
            ("SetPolicyVersion", pb.SetPolicyVersionRequest),
            ("AcquirePermits", partial(pb.AcquirePermitsRequest, count=1)),
        )
    ),
    ("4096", "SetPolicyVersion", pb.SetPolicyVersionRequest(version=1, weights="x" * (MAX_WEIGHTS + 1))),
    *(
        ("printable", "SetPolicyVersion", pb.SetPolicyVersionRequest(version=1, weights=bad))
        for bad in ("a\x1b[2Jb", "a\nb")
    ),
    ("count must be at least 1", "AcquirePermits", pb.AcquirePermitsRequest(count=0)),
    ("4294967295 permits: at most 65536", "AcquirePermits", pb.AcquirePermitsRequest(count=2**32 - 1)),
    *(
        ("timeout must be", "AcquirePermits", pb.AcquirePermitsRequest(count=1, timeout=bad))
        for bad in (math.nan, -1.0, -math.inf)
    ),
    ("2 keys and 1 priorities", "UpdatePriorities", update_request([1, 2], [1.0])),
    ("8 for each", "UpdatePriorities", pb.UpdatePrioritiesRequest(table="plain", keys=bytes(12), priorities=bytes(12))),
    ("1048577 keys", "Delete", pb.DeleteRequest(table="plain", keys=range(MAX_KEYS + 1))),
    ("65537 keys", "Get", pb.GetRequest(keys=range(MAX_ROWS + 1))),
]
BIG = insert_request(payload=bytes(17 * MB))
POISON = [
    *((Code.INVALID_ARGUMENT, *case) for case in INVALID),
    *((Code.NOT_FOUND, "no table", *case) for table in UNKNOWN_TABLES for case in of_unknown_table(table)),
    (Code.RESOURCE_EXHAUSTED, "larger", "Insert", BIG),
    (Code.RESOURCE_EXHAUSTED, "larger", "InsertStream", BIG),
    (Code.RESOURCE_EXHAUSTED, "larger", "Draw", draw_request(table="x" * 17 * MB)),
]


@pytest.fixture(scope="module")
def poisoned():
    """A server with an item and two permits in use, which refuses everything here."""
    with make_server() as server:
        with grpc.insecure_channel(server.address) as channel, ReplayClient(server.address, timeout=60.0) as client:
            client.insert(b"x", {"plain": 1.0}, key=5)
            client.release_permits(client.acquire_permits(3), 1)
            yield ReplayStub(channel), client, facts(client)
        check_unaffected(server.address)


@pytest.mark.parametrize(
    ("code", "word", "method", "requests"),
    [pytest.param(*case[:3], case[3:], id=f"{case[2]}: {case[1][:60]}") for case in POISON],
)
def test_poison_is_refused_with_its_reason_and_changes_nothing(poisoned, code, word, method, requests):
    stub, client, before = poisoned
    found, message = end_of(stub, method, *requests)
    assert found is code, message
    assert word in message
    assert len(message) < 400
    assert "\n" not in message
    until(lambda: facts(client) == before)  # a stream of the call may end a moment after its answer


def test_grpc_itself_ends_a_call_with_too_large_a_message_and_gives_no_reason(poisoned):
    stub, _, _ = poisoned
    with pytest.raises(grpc.RpcError) as refused:
        stub.Insert(BIG, timeout=60)
    assert "replay-reason" not in dict(refused.value.trailing_metadata())


@pytest.mark.parametrize("nbytes", [2, 2**31, 2**63, 2**64 - 1])
def test_an_item_whose_payload_never_comes_completely_was_never_there(poisoned, nbytes):
    stub, client, before = poisoned
    request = insert_request(keys=[6], sizes=[nbytes])
    assert end_of(stub, "Insert", request)[0] is not Code.OK
    code, message = end_of(stub, "InsertStream", request)[:2]
    assert code is not Code.OK  # as of `Insert`: who counts on the end of the stream must not lose the item
    assert "payload bytes are missing" in message or "takes at most" in message
    until(lambda: facts(client) == before)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_message_are_refused(poisoned, caplog, method):
    _, client, before = poisoned
    with grpc.insecure_channel(client.address) as channel:
        for garbage in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05x", bytes(range(256))):
            with pytest.raises(grpc.RpcError) as refused:
                list(channel.stream_stream(f"/replay.v1.Replay/{method}")(iter([garbage]), timeout=60))
            assert refused.value.code() is Code.INVALID_ARGUMENT
    assert "Traceback" not in caplog.text
    until(lambda: facts(client) == before)


# ------------------------------------------------------------------------------------------------ what is odd but valid


@pytest.mark.parametrize("priority", [0.0, -0.0, 5e-324, 2.3e-308, 3e38])
def test_an_odd_but_valid_priority_does_no_harm(stub, client, priority):
    assert end_of(stub, "Insert", insert_request(table="pool", priorities=[priority])) == (Code.OK, "")
    client.insert(b"y", {"pool": 1.0})
    drawn = client.sample("pool", 1 + (priority > 0))
    assert len(drawn) == 1 + (priority > 0)
    assert all(0 <= sample.info.probability <= 1 for sample in drawn)


def test_an_item_over_the_limit_leaves_those_before_it_where_they_are(stub, client):
    too_large = insert_request(keys=[1], sizes=[(1 << 30) + 1], payload=b"x")
    with Requests(insert_request(keys=[9])) as requests:
        responses = stub.InsertStream(iter(requests))
        assert next(responses).decided == 1
        requests.put(too_large)
        until(requests.empty, "both are sent")
        responses.cancel()
    assert [item.key for item in client.list_items("plain").items] == [9]


def test_a_long_table_name_is_not_repeated_for_every_row(stub):
    response = stub.Insert(insert_request(keys=range(1000), table="x" * 100_000, sizes=[], payload=b""))
    assert len(response.errors) == 1000
    assert response.ByteSize() < 2 * MB


@pytest.mark.parametrize("garbage", [b"\xff" * 200_000, b"\x60\x01" * 2 * MB], ids=["endless number", "many fields"])
def test_bytes_that_are_slow_to_read_hold_nobody_up(server, garbage):
    with grpc.insecure_channel(server.address) as channel, ReplayClient(server.address, timeout=20.0) as other:
        call = channel.unary_unary("/replay.v1.Replay/Insert").future(garbage)
        until(lambda: other.policy() and call.done())  # no call of the other reaches its deadline meanwhile


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
def test_extreme_bounds_of_a_listing_only_match_less(poisoned, fields):
    assert end_of(poisoned[0], "ListItems", pb.ListItemsRequest(table="plain", **fields)) == (Code.OK, "")


def test_the_largest_policy_version_whose_permits_can_be_counted_is_taken(stub, client):
    for version in (1, MOST_VERSIONS):
        stub.SetPolicyVersion(pb.SetPolicyVersionRequest(version=version, shard_index=pb.ShardIndex(shards=1)))
        assert client.server_info().policy.version == version
        assert client.acquire_permits(2).count == 2


def test_more_permits_than_a_lease_has_cannot_be_released(stub, client):
    request = pb.ReleasePermitsRequest(grant=client.acquire_permits(2).id, count=2**32 - 1)
    code, message = end_of(stub, "ReleasePermits", request)
    assert code == Code.INVALID_ARGUMENT
    assert "has 2 permits left" in message
    assert stub.ReleasePermits(pb.ReleasePermitsRequest(grant=1)).released == 0
    assert client.server_info().admission.running == 2


def test_many_keys_and_tables_that_nobody_knows_are_only_said_to_be_missing(poisoned):
    stub, *_ = poisoned
    keys = range(10, 100_010)
    assert stub.UpdatePriorities(update_request(keys, np.ones(len(keys)))).applied == 0
    assert len(stub.Delete(pb.DeleteRequest(table="plain", keys=keys)).missing) == len(keys)
    assert len(stub.GetServerInfo(pb.GetServerInfoRequest(tables=["plain"] * 20_000), timeout=60).tables) == 1


# ------------------------------------------------------------------------------------------------ messages


@pytest.mark.long
def test_a_message_of_very_many_rows_is_decided_whole(stub, client):
    rows = 20_000
    client.update_table("plain", max_size=100, remover="min_heap")  # each row evicts, depending on the row before
    request = insert_request(keys=range(1, rows + 1), sizes=[0] * rows, payload=b"")
    with bystander(client):
        assert stub.Insert(request).decided == rows


def test_requests_whose_time_is_up_leave_nothing_behind_the_one_that_waits(stub, client):
    """The first in line waits for ever; a hundred others give up."""
    for _ in range(4):
        client.insert(b"x", {"queue": 1.0})
    call = stub.Insert.future(pb.InsertRequest(keys=[5], targets=[pb.InsertTarget(table="queue")]))
    until(lambda: client.server_info().tables["queue"].inserting.count == 1, "it must wait")
    before = facts(client)
    for key in range(10, 110):
        code, _ = end_of(stub, "Insert", insert_request(keys=[key], table="queue", payload=bytes(64_000)))
        assert code is Code.DEADLINE_EXCEEDED
    assert facts(client) == before
    call.cancel()


# ------------------------------------------------------------------------------------------------ vanishing

# What the server shows when a client is there: by table, its inserts and samples that wait, or its reserved items.
WHERE = {
    "mid item": lambda info: info.insert_streams == 2,  # one is of the other client
    "blocked insert": lambda info: info.tables["queue"].inserting.count == 1,
    "blocked unary insert": lambda info: info.tables["queue"].inserting.count == 1,
    "waiting sample": lambda info: info.tables["plain"].sampling.count == 1,
    "waiting sample stream": lambda info: info.tables["plain"].sampling.count == 1,
    "untaken batches": lambda info: info.tables["queue"].reserved == 4,
    "mid response": lambda info: info.tables["large"].reserved == 1,
    "mid response with lease": lambda info: info.tables["large"].reserved == 1,
    "mid get": lambda info: True,
    "watch": lambda info: True,
    "permits": lambda info: info.admission.acquiring.count == 1,
}


@pytest.mark.parametrize("how", ["kill", "close", "cancel"])
@pytest.mark.parametrize("where", WHERE)
def test_a_client_that_vanishes_leaves_everything_as_it_was(server, client, where, how):
    keys = [client.insert(bytes([n]), {"queue": 1.0}) for n in range(4)]
    client.insert(bytes(24 * MB), {"large": 1.0}, key=77)
    if where == "permits":
        client.acquire_permits(1)
    before = facts(client)
    with hanging(server.address, where, how) as break_off:
        until(lambda: WHERE[where](client.server_info()), f"the client is not {where}")
        break_off()
        until(lambda: facts(client) == before, f"{facts(client)} is not {before}")
    assert [sample.info.key for sample in client.sample("queue", 4)] == keys
    assert client.sample("large", 1)[0].info.key == 77
    client.insert(b"next", {"queue": 1.0})


async def test_a_cancelled_task_leaves_nothing(server):
    async with AsyncReplayClient(server.address, timeout=60.0) as client:
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


def test_a_sampler_that_runs_out_of_time_loses_nothing_that_comes_just_then(client, transport):
    got, sent = [], []
    with client.sampler("queue", batch_size=1, prefetch=1, timeout=0.02) as sampler:

        def draw() -> None:
            with suppress(ReplayError):
                got.extend(sample.info.key for sample in next(sampler))

        for n in range(60):
            timer = threading.Timer(0.012 + 0.0004 * (n % 30), lambda: sent.append(client.insert(b"x", {"queue": 0.0})))
            timer.start()
            for _ in range(2):
                draw()
            while (
                timer.is_alive()
            ):  # on a loaded machine draws fail until the queue is full, and the insert waits for one
                draw()
    until(lambda: "in hand" not in held(client))
    got += [item.key for item in client.list_items("queue").items]
    assert sorted(got) == sorted(sent)
