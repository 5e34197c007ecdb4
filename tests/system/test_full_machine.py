"""A machine that runs full: a typed refusal, what is there is kept, and the server recovers by itself."""

import os
import resource
import secrets
import socket
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from replay_client import ReplayClient
from replay_client.errors import ReplayError, ServerBusyError
from replay_client.testing import until
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from tests.kit.processes import server_process

MB = 1 << 20
CONFIG = """
tables = [{ name = "pool" }]
"""


@contextmanager
def control_group(controller: str, limits: dict[str, str]):
    """The folder of a new control group; skips where none can be made. `limits`: files by version 1 or 2."""
    root = Path("/sys/fs/cgroup")
    folder = root / (controller if (root / controller).is_dir() else "") / f"replay-test-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
        name = next(name for name in limits if (folder / name).exists())
        (folder / name).write_text(limits[name])
    except (OSError, StopIteration):
        if folder.exists():
            folder.rmdir()
        pytest.skip("no control group can be made here")
    try:
        yield folder
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text(), "the server is still there")
        folder.rmdir()


def joins(group: Path):
    return lambda: (group / "cgroup.procs").write_text(str(os.getpid()))


def fill(client: ReplayClient) -> list[int]:
    """Inserts until the server refuses one."""
    kept: list[int] = []
    while len(kept) < 2000:
        try:
            kept.append(client.insert(os.urandom(MB), {"pool": 1.0}, timeout=60))
        except ServerBusyError as refused:
            return kept if "memory left" in str(refused) else []
    return []


def inserts_again(client: ReplayClient) -> bool:
    try:
        client.insert(bytes(1000), {"pool": 1.0}, timeout=60)
    except ServerBusyError:
        return False
    return True


@contextmanager
def served_in(memory: int, tmp_path: Path, config: str):
    limit = str(memory)
    with (
        control_group("memory", {"memory.limit_in_bytes": limit, "memory.max": limit}) as group,
        server_process(tmp_path, config, before=joins(group)) as server,
        ReplayClient(server.address, timeout=60) as client,
    ):
        yield client


def test_inserts_are_refused_before_the_system_kills_the_server_and_go_on_when_there_is_room(tmp_path):
    with served_in(300 * MB, tmp_path, CONFIG) as client:
        kept = fill(client)
        assert len(kept) > 50, "the server refused too early, for another reason, or never"
        assert client.server_info().items == len(kept)
        assert client.insert(b"a retry", {"pool": 1.0}, key=kept[0]) == kept[0]
        assert client.sample("pool", 4)
        client.delete("pool", kept[:40])
        until(lambda: inserts_again(client), "the server never accepts inserts again")
        assert {item.key for item in client.list_items("pool", limit=2000).items} >= set(kept[40:])


@pytest.mark.long
def test_a_durable_server_holds_more_than_its_memory_and_answers_that_nobody_reads_do_not_fill_it(tmp_path):
    """Payloads lie in the file, and its cache in memory can be freed."""
    with served_in(200 * MB, tmp_path, f'server.data_dir = "{tmp_path}/data"\n{CONFIG}') as client:
        keys = [client.insert(os.urandom(MB), {"pool": 1.0}) for _ in range(250)]
        with grpc.insecure_channel(client.address) as channel:
            stub, calls = ReplayStub(channel), []
            for _ in range(3):
                calls.append(stub.Get(pb.GetRequest(keys=keys)))
                calls.append(stub.Sample(pb.SampleRequest(table="pool", num_samples=250, lease=9)))
            for call in calls[:2]:  # the others are given up unread
                assert sum(len(piece.payloads) for piece in call) == 250 * MB
            for call in calls:
                call.cancel()
        assert client.server_info().items == 250


def test_without_file_descriptors_clients_that_are_there_go_on_and_others_come_in_later(tmp_path):
    files = 164
    config = f'server.data_dir = "{tmp_path}/data"\n{CONFIG}'
    with (
        server_process(
            tmp_path, config, before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        ) as server,
        ReplayClient(server.address, timeout=60) as client,
    ):
        kept = [client.insert(b"first", {"pool": 1.0})]
        host, port = server.address.split(":")
        with ExitStack() as stack:
            for _ in range(3 * files):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            for _ in range(20):
                kept.append(client.insert(b"more", {"pool": 1.0}))
            assert client.create_checkpoint("in-want")
            assert client.server_info().commit_error == ""
        with ReplayClient(server.address, timeout=60) as other:
            kept.append(until(lambda: try_insert(other), "nobody gets in any more"))
        assert {item.key for item in client.list_items("pool").items} == set(kept)


def try_insert(client: ReplayClient) -> int | None:
    try:
        return client.insert(b"other", {"pool": 1.0})
    except ReplayError:
        return None
