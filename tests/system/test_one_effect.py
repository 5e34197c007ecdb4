"""Calls that change something have the effect of one call, however often they are tried, and the answer of the first.

REPLAY_CUT_STEP=1 cuts the answers after every byte; a run of all tests takes larger steps.
"""

import os
from contextlib import contextmanager

import grpc
import numpy as np
import pytest

from replay_client import ReplayClient
from replay_client.columns import encode_columns
from replay_client.testing import make_group
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import AdmissionConfig, TableConfig
from tests.kit.processes import server_process
from tests.kit.servers import serving
from tests.system.proxy import Faults, FaultyProxy

STEP = int(os.environ.get("REPLAY_CUT_STEP", "41"))
ANSWER_BYTES = 500
"""More than the server sends for any of these calls, the frames of HTTP/2 included, but for update_table."""
PERMITS = 2000
ADMISSION = AdmissionConfig(fresh_groups_per_step=PERMITS, max_staleness=0)
QUIET = Faults(delay=0, reset=0, truncate=0, drop=0, refuse=0)
TABLES = [TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 1000}), TableConfig(name="pool")]
CONFIG = """
server.data_dir = "{folder}/data"
admission = {{ fresh_groups_per_step = 8, max_staleness = 0 }}
tables = [{{ name = "queue", rate_limiter = {{ type = "queue", max_size = 1000 }} }}, {{ name = "pool" }}]
"""


@contextmanager
def stub_of(address):
    with grpc.insecure_channel(address) as channel:
        yield ReplayStub(channel)


def cut_anywhere(call, check, nbytes=ANSWER_BYTES, prepare=lambda client: None):
    """Cuts the answer of `call(client, prepared)` after every STEP-th byte. The client tries again by itself."""
    with (
        serving(TABLES, admission=ADMISSION) as direct,
        FaultyProxy(direct.address, 0, QUIET) as proxy,
        ReplayClient(proxy.address, timeout=60.0) as client,
    ):
        client.policy()  # connected
        cuts = list(range(1, nbytes, STEP))
        for cut in cuts:
            prepared = prepare(direct)
            proxy.cut_after = cut
            result = call(client, prepared)
            check(direct, prepared, result)
            proxy.cut_after = None


def test_permits_whose_answer_breaks_off_anywhere_are_granted_once():
    def check(direct, before, lease):
        admission = direct.server_info().admission
        assert lease.count == 3
        assert admission.running == before + 3

    cut_anywhere(
        lambda client, _: client.acquire_permits(3),
        check,
        prepare=lambda direct: direct.server_info().admission.running,
    )


def test_permits_are_released_once_and_the_answer_says_how_many():
    def check(direct, lease, released):
        assert released == 2
        assert direct.release_permits(lease) == 3
        assert direct.server_info().admission.running == 0

    cut_anywhere(
        lambda client, lease: client.release_permits(lease, 2),
        check,
        prepare=lambda direct: direct.acquire_permits(5),
    )


def test_a_deletion_names_as_missing_what_was_missing_the_first_time():
    def check(direct, key, result):
        assert result.applied == 1
        assert result.missing == (7,)

    cut_anywhere(
        lambda client, key: client.delete("pool", [key, 7]),
        check,
        prepare=lambda direct: direct.insert(b"x", {"pool": 1.0}),
    )


def test_a_column_is_added_once_and_the_answer_says_that_it_was_added():
    def check(direct, key, result):
        assert result.added == ("value", "late")
        assert result.present == ()
        assert not result.missing
        (item,) = direct.get([key])
        assert item.group.extras["value"].tolist() == [key % 97] * 3
        segment = b"".join(encode_columns(columns_of(key)))
        assert len(item.payload) == len(make_group().encode()) + len(segment)

    def columns_of(key):
        return {"value": np.full(3, key % 97), "late": np.zeros(5)}

    cut_anywhere(
        lambda client, key: client.extend(key, columns_of(key)),
        check,
        prepare=lambda direct: direct.insert(make_group(), {"pool": 1.0}),
    )


def test_an_answer_that_an_item_was_missing_stays_so():
    with serving(TABLES, admission=ADMISSION) as client, stub_of(client.address) as stub:
        columns = [pb.Columns(names=["value"])]
        request = pb.InsertRequest(
            keys=[5], extend=True, requests=[31], columns=columns, payload_sizes=[3], payloads=b"abc"
        )
        first = stub.Insert(request)
        assert first.unchanged[0].missing
        client.insert(make_group(), {"pool": 1.0}, key=5)
        assert stub.Insert(request) == first
        assert client.get([5])[0].labels.columns == set()


def test_a_reset_removes_what_was_there_when_it_was_asked_for():
    def check(direct, _, removed):
        assert removed == 2

    def prepare(direct):
        direct.reset("pool")
        for _ in range(2):
            direct.insert(b"x", {"pool": 1.0})

    cut_anywhere(lambda client, _: client.reset("pool"), check, prepare=prepare)


@pytest.mark.parametrize("requeue", [False, True])
def test_samples_are_acknowledged_once_and_the_answer_says_so(requeue):
    def prepare(direct):
        direct.reset("queue")
        direct.insert(b"x", {"queue": 1.0})
        return direct.sample("queue", 1, lease=60.0)

    def check(direct, samples, result):
        assert result.applied == 1
        assert result.missing == ()
        queue = direct.server_info().tables["queue"]
        assert queue.consumed == int(not requeue)
        assert queue.size == int(requeue)

    cut_anywhere(lambda client, samples: client.acknowledge(samples, requeue=requeue), check, prepare=prepare)


def test_a_table_is_updated_once_and_not_over_an_update_after_it():
    with serving(TABLES, admission=ADMISSION) as client, stub_of(client.address) as stub:
        request = pb.UpdateTableRequest(table="pool", changes='{"max_size": 5}', request=11)
        first = stub.UpdateTable(request)
        client.update_table("pool", max_size=9)
        assert stub.UpdateTable(request) == first
        assert b'"max_size":9' in client.server_info().tables["pool"].config.encode()


def test_the_number_of_one_request_with_another_is_refused():
    with serving(TABLES, admission=ADMISSION) as client, stub_of(client.address) as stub:
        stub.Delete(pb.DeleteRequest(table="pool", keys=[1], request=5))
        for call, request in (
            (stub.Delete, pb.DeleteRequest(table="pool", keys=[2], request=5)),
            (stub.Reset, pb.ResetRequest(table="pool", request=5)),
        ):
            with pytest.raises(grpc.RpcError, match="request 5 was another request before") as caught:
                call(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_refused_request_is_no_answer_and_may_come_again():
    with serving(TABLES, admission=ADMISSION) as client, stub_of(client.address) as stub:
        grant = client.acquire_permits(1)
        request = pb.ReleasePermitsRequest(grant=grant.id, count=2, request=6)
        with pytest.raises(grpc.RpcError, match="has 1 permit left"):
            stub.ReleasePermits(request)
        assert client.server_info().admission.running == 1


def test_permits_asked_for_again_while_the_first_attempt_waits_are_granted_once():
    with serving(TABLES, admission=ADMISSION) as client, stub_of(client.address) as stub:
        all_of_them = client.acquire_permits(PERMITS)
        request = pb.AcquirePermitsRequest(count=2, timeout=30.0, request=77)
        first, second = stub.AcquirePermits.future(request), None
        try:
            while client.server_info().admission.acquiring.count == 0:
                pass
            second = stub.AcquirePermits.future(request)
            assert first.code() is grpc.StatusCode.UNAVAILABLE  # nobody waits for it any more
            assert client.server_info().admission.acquiring.count == 1
            client.release_permits(all_of_them)
            assert second.result().grant == 77
            assert second.result().count == 2
        finally:
            first.cancel()
        assert client.server_info().admission.running == 2


def test_what_was_settled_survives_a_kill_together_with_its_answer(tmp_path):
    config = CONFIG.format(folder=tmp_path)
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        keys = [client.insert(b"x", {"queue": 1.0, "pool": 1.0}) for _ in range(6)]
        taken, back = client.sample("queue", 3, lease=60.0), client.sample("queue", 2, lease=60.0)
        calls = {
            "AcquirePermits": pb.AcquirePermitsRequest(count=5, timeout=1.0, request=21),
            "Delete": pb.DeleteRequest(table="pool", keys=[keys[5], 123], request=24),
            "UpdateTable": pb.UpdateTableRequest(table="pool", changes='{"max_size": 50}', request=25),
            "Insert": pb.InsertRequest(
                keys=[keys[0]],
                extend=True,
                requests=[27],
                columns=[pb.Columns(names=["value"])],
                payload_sizes=[3],
                payloads=b"abc",
            ),
        }
        ends = [pb.DrawRequest(acknowledge=[taken[0].info.lease_id]), pb.DrawRequest(requeue=[back[0].info.lease_id])]
        with stub_of(server.address) as stub:
            answers = {name: getattr(stub, name)(request) for name, request in calls.items()}
            answers["ends"] = list(stub.Draw(iter(ends)))
            released = pb.ReleasePermitsRequest(grant=answers["AcquirePermits"].grant, count=2, request=26)
            answers["release"] = stub.ReleasePermits(released)
        server.process.kill()  # the client got none of these answers
        server.process.wait()
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        before = client.server_info()
        with stub_of(server.address) as stub:
            again = {name: getattr(stub, name)(request) for name, request in calls.items()}
            again["ends"] = list(stub.Draw(iter(ends)))
            again["release"] = stub.ReleasePermits(released)
        assert [(len(answer.done), len(answer.missing)) for answer in again["ends"]] == [(1, 0), (1, 0)]
        assert again["AcquirePermits"].grant == answers["AcquirePermits"].grant
        for name in ("ends", "Delete", "UpdateTable", "release", "Insert"):
            assert again[name] == answers[name], name
        assert [bytes(item.payload) for item in client.get(keys[:1])] == [b"xabc"]
        after = client.server_info()
        assert after.admission.running == 3
        assert before.admission.running == 3
        queue, pool = after.tables["queue"], after.tables["pool"]
        assert queue.consumed == 3
        assert queue.size == 3
        assert pool.deleted == 1
        assert pool.size == 5
