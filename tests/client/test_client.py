"""The client against a real server: inserting, sampling, waiting, and what goes wrong."""

import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from itertools import product
from typing import Any

import grpc
import pytest

from replay_client import AsyncReplayClient, ReplayClient
from replay_client.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ServerClosedError,
    ServerUnavailableError,
    TableFullError,
)
from replay_client.testing import make_group, until
from replay_client.transport import Stream
from replay_server import AdmissionConfig, ReplayServer, TableConfig
from tests.kit.clocks import in_a_thread
from tests.kit.faults import ctrl_c_raises

TABLES = [
    TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 8}, forward_to="replay"),
    TableConfig(name="replay", sampler="prioritized", remover="min_heap", max_size=4, seed=1),
    TableConfig(name="plain", sampler="fifo"),
    TableConfig(name="fresh", sampler="fifo", max_staleness=1),
    TableConfig(name="small", max_size=1, when_full="reject", max_bytes=1000),
    TableConfig(name="best", remover="min_heap"),
]


@pytest.fixture
def server():
    with ReplayServer(tables=TABLES, port=0) as server:
        yield server


@pytest.fixture
def client(server):
    with ReplayClient(server.address, timeout=10.0) as client:
        yield client


def size(client: ReplayClient, table: str) -> int:
    return client.server_info().tables[table].size


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("held_back", [1, 100])
def test_small_items_that_wait_for_others_are_sent_without_a_flush(client, held_back):
    with client.writer(max_in_flight=200) as writer:
        for n in range(9):  # the table takes eight
            writer.insert(bytes([n]), {"rollouts": 0.0})
        until(lambda: size(client, "rollouts") == 8)
        for n in range(held_back):
            writer.insert(bytes([n]), {"plain": 1.0})
        client.sample("rollouts", 1)
        until(lambda: size(client, "plain") == held_back)


def test_a_writer_is_told_which_items_left_a_full_pool_at_once(client):
    client.update_table("best", max_size=3)
    with client.writer() as writer:
        keys = [writer.insert(b"x", {"best": priority, "plain": 1.0}) for priority in (3.0, 2.0, 1.0, 0.5, 4.0)]
    assert dict(writer.evicted) == {keys[3]: ("best",)}
    assert writer.refused == {}
    assert {item.key for item in client.list_items("best").items} == {keys[0], keys[1], keys[4]}
    assert client.server_info().tables["best"].evicted_on_arrival == 1
    assert client.insert(b"x", {"best": 0.1}) > 0  # no error
    assert size(client, "best") == 3
    with pytest.raises(InvalidRequestError, match="now comes for plain: a retry names the same tables"):
        client.insert(b"x", {"plain": 1.0}, key=keys[0])


@pytest.mark.parametrize("address", [None, 7400, [7400], ["127.0.0.1:7400", None]])
def test_an_address_that_is_no_text_is_named(address):
    with pytest.raises(ValueError, match=re.escape(f"or a list of these, not {address!r}")):
        ReplayClient(address)


def test_a_full_table_that_rejects_names_its_limit(client):
    client.insert(b"x", {"small": 1.0})
    with pytest.raises(TableFullError, match="size 1 = max_size 1"):
        client.insert(b"x", {"small": 1.0})


def test_a_list_has_the_items_within_all_bounds_in_the_order_that_is_asked_for(client):
    client.set_policy_version(3)
    keys = [client.insert(bytes(n * 7 % 5), {"plain": n % 4}, policy_version=n // 4) for n in range(16)]
    client.sample("plain", 5)
    oldest_first = client.list_items("plain", descending=True).items
    assert [item.key for item in oldest_first] == keys
    for order, descending in product(["priority", "policy_version", "times_sampled", "size"], [False, True]):
        field, sign = "nbytes" if order == "size" else order, -1 if descending else 1
        found = client.list_items("plain", order_by=order, descending=descending).items
        expected = sorted(oldest_first, key=lambda item: sign * getattr(item, field))
        assert [item.key for item in found] == [item.key for item in expected]
    for low, high, newest, stalest in product([None, 0, 2], repeat=4):
        bounds = {"min_priority": low, "max_priority": high, "min_staleness": newest, "max_staleness": stalest}
        assert [item.key for item in client.list_items("plain", **bounds).items] == [
            item.key
            for item in reversed(oldest_first)
            if (low is None or item.priority >= low) and (high is None or item.priority <= high)
            if (newest is None or item.staleness >= newest) and (stalest is None or item.staleness <= stalest)
        ]


def test_every_wait_ends_at_its_deadline_and_says_why(client):
    with pytest.raises(
        DeadlineExceededError, match=r"rollouts: sampling blocked: items there: 0, wanted: 1 \(size 0 < min_size 1\)"
    ):
        client.sample("rollouts", 1, timeout=1.0)
    with client.sampler("rollouts", batch_size=2, timeout=2.0) as sampler:
        client.insert(b"1", {"rollouts": 1.0})
        with pytest.raises(DeadlineExceededError, match="1 inserts \\* 1 - 0 samples - 2 requested = -1 < min_diff 0"):
            next(sampler)
        client.insert(b"2", {"rollouts": 1.0})
        assert [bytes(sample.payload) for sample in next(sampler)] == [b"1", b"2"]
    for _ in range(8):
        client.insert(b"x", {"rollouts": 1.0})
    with pytest.raises(DeadlineExceededError, match=r"rollouts: inserting blocked: .* > max_diff 8"):
        client.insert(b"x", {"rollouts": 1.0}, timeout=1.0)
    assert client.sample("rollouts", 3, min_samples=1, timeout=0)


def test_permits_pace_generators_over_the_wire():
    admission = AdmissionConfig(fresh_groups_per_step=1, max_staleness=1)
    with ReplayServer(tables=TABLES, port=0, admission=admission) as server, ReplayClient(server.address) as client:
        lease = client.acquire_permits(2)
        with pytest.raises(
            DeadlineExceededError, match=r"there: 0, wanted: 1; .* \(0 accepted \+ 2 running \+ 1 requested"
        ):
            client.acquire_permits(1, timeout=0.5)
        client.insert(make_group(), {"rollouts": 1.0}, permits=lease)
        assert client.release_permits(lease) == 1
        client.acquire_permits(1)
        info = client.server_info().admission
        assert info.accepted == 1
        assert info.running == 1
        assert info.expired == 0


def wait_in_a_thread(client: ReplayClient) -> Future[Any]:
    waiting = in_a_thread(client.sample, "plain", 1, timeout=None)
    until(lambda: client.server_info().tables["plain"].sampling.count)
    return waiting


@pytest.mark.usefixtures("transport")
def test_closing_a_client_ends_the_waits_of_its_other_threads(server):
    client = ReplayClient(server.address)
    waiting = wait_in_a_thread(client)
    client.close()
    with pytest.raises(ServerClosedError, match=r"^this client was closed while the call waited$"):
        waiting.result(60)


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("lease", [None, 60.0])
def test_a_draw_made_ahead_is_a_wait_only_while_its_caller_asks_for_the_batch(client, lease):
    def waits() -> tuple[int, bool, bool]:
        wait = client.server_info().tables["rollouts"].sampling
        return wait.count, bool(wait.reason), wait.seconds > 0

    with client.sampler("rollouts", batch_size=1, prefetch=1, lease=lease) as batches:
        for _ in range(2):
            asking = threading.Thread(target=next, args=[batches])
            asking.start()
            until(lambda: waits() == (1, True, True))
            client.insert(b"x", {"rollouts": 1.0})
            asking.join()
            assert waits() == (0, False, False)  # the caller works


@pytest.mark.usefixtures("transport")
def test_ctrl_c_ends_a_wait_and_the_client_goes_on(server, client):
    waiter = threading.get_ident()

    def interrupt() -> None:
        with ReplayClient(server.address) as other:
            until(lambda: other.server_info().tables["plain"].sampling.count)
        signal.pthread_kill(waiter, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    with ctrl_c_raises():
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            client.sample("plain", 1, timeout=None)
    interrupter.join()
    until(lambda: not client.server_info().tables["plain"].sampling.count)
    key = client.insert(b"x", {"plain": 1.0})
    assert client.sample("plain")[0].info.key == key


async def test_a_closed_asyncio_client_says_so(server):
    client = AsyncReplayClient(server.address)
    await client.policy()
    await client.close()
    await client.close()
    with pytest.raises(ServerClosedError, match="this client is closed"):
        await client.insert(b"x", {"plain": 1.0})


def test_no_server_gives_a_clear_error_in_time():
    with ReplayClient("127.0.0.1:1", timeout=0.3) as client:
        with pytest.raises(ServerUnavailableError, match=r"no replay server answers at 127\.0\.0\.1:1"):
            client.insert(b"x", {"t": 1.0})
        for first_to_end in (0.01, 60.0):  # the timeout of the sampler, and that of the client
            with client.sampler("t", timeout=first_to_end) as sampler, pytest.raises(ServerUnavailableError):
                next(sampler)
        writer = client.writer()
        writer.insert(b"x", {"t": 1.0})
        with pytest.raises(ServerUnavailableError):
            writer.flush()
        writer.close()
    with pytest.raises(ValueError, match="host:port"):
        ReplayClient("nonsense")


def test_stopping_the_server_ends_every_wait_with_a_clear_error(server):
    with ReplayClient(server.address) as client:
        waiting = wait_in_a_thread(client)
        server.stop()
        with pytest.raises(ServerClosedError, match=r"^the server is shutting down$"):
            waiting.result(60)


ONE_LOOP_AFTER_ANOTHER = """
import asyncio, sys
from replay_client import AsyncReplayClient

async def main():
    async with AsyncReplayClient(sys.argv[1]) as client:
        await client.insert(b"x", {"plain": 1.0})
        async with client.writer() as writer:
            await writer.insert(b"y", {"plain": 1.0})
        sampler = client.sampler("plain")
        await anext(sampler)
        await sampler.close()

for _ in range(10):
    asyncio.run(main())
"""


def test_event_loops_that_follow_each_other_end_without_a_word(server):
    command = [sys.executable, "-c", ONE_LOOP_AFTER_ANOTHER, server.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr == ""


LEFT_OPEN = """
import asyncio, atexit, sys, threading, time

def last():  # the last handler
    for worker in workers:
        worker.join()
    print([each.name for each in threading.enumerate()])

atexit.register(last)
from replay_client import ReplayClient
client = ReplayClient(sys.argv[1])
workers = []

def work(function):
    workers.append(threading.Thread(target=function, daemon=True))
    workers[-1].start()

client.server_info()
print([each.name for each in threading.enumerate()])
"""
"""The beginning of a program that leaves a client open. `work` calls a function in a daemon thread."""
WAITS = """
writer, sampler, policies = client.writer(max_in_flight=1), client.sampler("rollouts"), client.watch_policy()
next(policies)
work(lambda: client.sample("fresh"))
work(lambda: next(policies))
work(lambda: [each for each in sampler])
work(lambda: [writer.insert(b"x", {"rollouts": 1.0}) for _ in range(99)])
with ReplayClient(sys.argv[1]) as other:
    while other.server_info().tables["fresh"].sampling.count == 0:
        time.sleep(0.01)
"""
ASKS_AGAIN = """
def ask():
    while True:
        try:
            client.sample("fresh")
        except Exception as error:
            print(error)

work(ask)
"""
IS_DROPPED = """
del client
"""


def end_of(server: ReplayServer, program: str) -> tuple[str, str]:
    """Runs LEFT_OPEN and the rest of the program. Returns the threads before the rest, and at the end."""
    command = [sys.executable, "-c", LEFT_OPEN + program, server.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.returncode == 0
    before, at_the_end = done.stdout.splitlines()
    return before, at_the_end


@pytest.mark.parametrize("program", [WAITS, ASKS_AGAIN, IS_DROPPED], ids=["waits", "asks again", "is dropped"])
def test_a_client_that_a_program_leaves_open_has_no_thread_when_python_ends(server, program):
    """A thread inside gRPC ended such programs with SIGSEGV now and then."""
    before, at_the_end = end_of(server, program)
    assert "replay-client" in before
    assert "replay-client" not in at_the_end


GOES_ON = """
async def go_on():
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass

def begin():
    client.task = client._thread.loop.create_task(go_on())

client._thread.loop.call_soon_threadsafe(begin)
client.server_info()
"""
IS_BLOCKED = """
client._thread.loop.call_soon_threadsafe(time.sleep, 1000)
"""


@pytest.mark.parametrize("program", [GOES_ON, IS_BLOCKED], ids=["goes on", "is blocked"])
def test_a_loop_that_does_not_end_does_not_keep_a_program_from_ending(server, program):
    command = [sys.executable, "-c", LEFT_OPEN + program, server.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


FORKS = """
import os
child = os.fork()
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_a_forked_process_ends_although_its_parent_left_a_client_open(server):
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN + FORKS, server.address], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


async def test_a_stream_that_breaks_while_it_is_ended_raises_nothing():
    class Broken:
        """What gRPC does when the connection breaks between two of its own steps."""

        cancelled = False

        async def done_writing(self):
            raise grpc.aio.InternalError("execute_batch failed")

        def cancel(self):
            self.cancelled = True

    call = Broken()
    assert not await Stream(call).end()
    assert call.cancelled
