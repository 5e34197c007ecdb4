"""What clients say of themselves, and how groups flow through a table: both as a real server tells them."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from functools import partial

import grpc
import pytest

from replay_client import ReplayClient
from replay_client.errors import AuthenticationError, InvalidRequestError
from replay_client.records import read_described
from replay_client.testing import make_group, until
from replay_dashboard.diagnosis import Level, diagnose
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import ReplayServer, SecurityConfig, TableConfig
from tests.kit.processes import run_replay, sample_of, scrape, tokens_file

QUEUE = TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 8}, forward_to="replay")
POOL = TableConfig(name="replay", sampler="uniform")


def clients_of(client: ReplayClient) -> dict[str, dict]:
    return {each.name: read_described(each.settings) for each in client.server_info().clients}


def test_what_a_client_says_stands_beside_its_name_and_replaces_what_it_said_before():
    with (
        ReplayServer([QUEUE, POOL], port=0) as server,
        ReplayClient(server.address, name="a") as one,
        ReplayClient(server.address, name="b") as other,
    ):
        one.describe({"part": '"generator"', "max_concurrent_groups": "4"})
        other.insert(make_group(), {"rollouts": 1.0})
        assert clients_of(one) == {"a": {"part": "generator", "max_concurrent_groups": 4}, "b": {}}
        one.describe({"note": "as I like"})
        assert clients_of(one)["a"] == {"note": "as I like"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lines": "a\nb"}, "setting 'lines'"),
        ({f"s{number}": "x" * 200 for number in range(20)}, "settings of 4210 bytes, as JSON: at most 4096"),
    ],
    ids=["not printable", "too large together"],
)
def test_what_is_too_much_is_refused_and_what_was_said_before_stays(settings, words):
    with ReplayServer([POOL], port=0) as server, ReplayClient(server.address, name="a") as client:
        client.describe({"part": '"trainer"'})
        with pytest.raises(InvalidRequestError, match=words):
            client.describe(settings)
        assert clients_of(client) == {"a": {"part": "trainer"}}


def test_settings_of_all_clients_are_bounded_and_those_of_clients_seen_longest_ago_are_forgotten():
    with ExitStack() as stack:
        server = stack.enter_context(ReplayServer([POOL], port=0))
        names = [f"c{number}" for number in range(70)]
        for name in names:
            client = stack.enter_context(ReplayClient(server.address, name=name))
            client.describe({f"s{number}": "x" * 250 for number in range(15)})
        known = [name for name, said in clients_of(client).items() if said]
        assert 64 <= len(known) < 70
        assert sorted(known) == sorted(names[-len(known) :])


def test_a_connection_describes_and_ends_no_client_but_its_own():
    with (
        ReplayServer([POOL], port=0) as server,
        ReplayClient(server.address, name="trainer") as trainer,
        ReplayClient(server.address, name="watch") as watch,
        grpc.insecure_channel(
            server.address, [("grpc.primary_user_agent", "replay/trainer"), ("grpc.use_local_subchannel_pool", 1)]
        ) as channel,
    ):
        trainer.describe({"part": '"trainer"'})
        trainer.insert(b"x", {"replay": 1.0})
        other = ReplayStub(channel)

        def ended():
            return next(each.ended for each in watch.server_info().clients if each.name == "trainer")

        for used in (False, True):  # also if the other one calls under this name
            if used:
                other.SetPolicyVersion(pb.SetPolicyVersionRequest(version=1))
            other.Leave(pb.LeaveRequest())
            assert not ended()
            with pytest.raises(grpc.RpcError) as error:
                other.Describe(pb.DescribeRequest(settings={"part": '"generator"'}))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "'trainer' is the name of another connection" in error.value.details()
        assert clients_of(watch)["trainer"] == {"part": "trainer"}
        trainer.leave()
        assert ended()
        trainer.close()
        until(lambda: not any(each.open for each in watch.server_info().clients))
        other.Leave(pb.LeaveRequest())
        other.SetPolicyVersion(pb.SetPolicyVersionRequest(version=1))  # now the name is free
        other.Describe(pb.DescribeRequest(settings={"part": '"generator"'}))
        assert clients_of(watch)["trainer"] == {"part": "generator"}


def test_a_client_has_a_role_by_what_it_does_and_a_name_of_host_and_process_or_what_it_likes_or_none():
    with (
        ReplayServer([QUEUE, POOL], port=0) as server,
        ReplayClient(server.address) as trainer,
        ReplayClient(server.address, name="gen-a") as generator,
        ReplayClient(server.address, name="") as nameless,
    ):
        generator.insert(make_group(), {"rollouts": 1.0})
        trainer.sample("rollouts")
        nameless.insert(b"x", {"replay": 1.0})
        known = {each.name: (each.role, each.open > 0) for each in trainer.server_info().clients}
        (name,) = known.keys() - {"gen-a"}
        assert name.endswith(f":{os.getpid()}")
        assert known == {name: ("trainer", True), "gen-a": ("generator", True)}


@pytest.mark.parametrize("name", ["a b", "ü", "x" * 65, "a\n"])
def test_a_name_that_cannot_travel_is_refused_at_once(name):
    with pytest.raises(ValueError, match="name must have at most 64 printable ASCII characters"):
        ReplayClient("127.0.0.1:1", name=name)


def test_a_client_that_only_reads_leaves_no_trace_and_cannot_say_that_others_end(tmp_path):
    reader, writer = "r" * 32, "w" * 32
    security = SecurityConfig(tokens_file=tokens_file(tmp_path, f"read-only:{reader}", f"read-write:{writer}"))
    with (
        ReplayServer([TableConfig(name="pool")], port=0, security=security) as server,
        ReplayClient(server.address, token=writer, name="honest") as client,
        ReplayClient(server.address, token=reader, name="honest", timeout=60.0) as spy,
        ReplayClient(server.address, token=reader, name="another", timeout=60.0) as other,
    ):
        client.insert(b"x", {"pool": 1.0})
        for reads in (spy, other):
            reads.server_info()
            reads.get([1])
            reads.list_items("pool")
            next(reads.watch_policy())
            for refused in (
                *(reads.leave, partial(reads.describe, {"part": '"trainer"'})),
                *(partial(reads.sample, "pool"), partial(reads.insert, b"y", {"pool": 1.0})),
            ):
                with pytest.raises(AuthenticationError, match="needs a token of the role read-write"):
                    refused()
        (known,) = client.server_info().clients
        assert known.name == "honest"
        assert known.role == "generator"
        assert not known.ended


def step(client: ReplayClient, version: int, begun: int) -> None:
    """A trainer's step: two groups that began with version `begun` are inserted, and two are drawn."""
    for _ in range(2):
        client.insert(make_group(version=begun), {"rollouts": 1.0})
    client.sample("rollouts", 2)
    client.set_policy_version(version)


def test_the_flow_of_a_queue_counts_what_is_drawn_by_version_and_how_old_it_is():
    with ReplayServer([QUEUE, POOL], port=0) as server, ReplayClient(server.address, name="gen") as client:

        def flow():
            return client.server_info().tables["rollouts"].flow

        client.set_policy_version(0, rollback=True)
        assert flow().versions == 0  # nothing is known before a whole version
        for _ in range(3):  # they wait from now on, and what is drawn began a version earlier
            client.insert(make_group(version=0), {"rollouts": 1.0})
        for version in range(1, 11):
            step(client, version, begun=version - 1)
        assert flow().versions == 10
        assert flow().drawn == 2.0
        # The pairs that are drawn are 0 and 0 versions old, then 1 and 1, and then eight times 2 and 1.
        assert flow().staleness == pytest.approx((0 + 2 + 8 * 3) / 20)
        client.set_policy_version(10)  # said once more: nothing new
        assert flow().versions == 10
        assert client.server_info().tables["replay"].flow.versions == 0  # its items are drawn again and again
        client.set_policy_version(4, rollback=True)
        assert flow().versions == 0  # the trainer has started again


def test_doctor_and_metrics_say_how_old_groups_are_when_they_are_drawn():
    with (
        ReplayServer([QUEUE, POOL], port=0, metrics_listen="127.0.0.1:0") as server,
        ReplayClient(server.address) as client,
    ):
        client.set_policy_version(0, rollback=True)
        for version in range(1, 13):  # of 12 steps the first one draws groups of its own version
            step(client, version, begun=max(0, version - 2))
        info = client.server_info()
        [said] = [each for each in diagnose(info, info.version, time.time()) if each.message.startswith("drawn ")]
        assert said.level == Level.OK
        assert said.message == "drawn 0.9 versions old in the mean"
        done = run_replay("doctor", "--max-staleness", "0.5", address=server.address)
        assert "drawn 0.9 versions old in the mean, and 0.5 is the bound" in done.stdout
        measured = scrape(server.metrics_address)[sample_of("replay_table_flow_staleness_versions", table="rollouts")]
        assert measured == pytest.approx(11 / 12)
