"""A shard that hangs, stopped or swapping, counts as away until it answers, although its connection stands."""

import os
import signal

import pytest

from replay_client import ReplayClient
from replay_client.testing import PATIENCE, until
from tests.kit.clocks import in_a_thread
from tests.kit.processes import free_port, start_server

CONFIG = """
tables = [
    { name = "pool", sampler = "prioritized" },
    { name = "queue", rate_limiter = { type = "queue", max_size = 1000 } },
]
"""


class Hangs:
    """The first of three servers, in processes of their own, which can be stopped and continued."""

    def __init__(self, folder) -> None:
        (folder / "replay.toml").write_text(CONFIG)
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
        self._servers = [start_server(folder / "replay.toml", address=address) for address in self.addresses]
        self.name = self.addresses[0]

    def stop(self) -> None:
        os.kill(self._servers[0].process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._servers[0].process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        for server in self._servers:
            server.kill()


@pytest.fixture
def hangs(tmp_path):
    hangs = Hangs(tmp_path)
    yield hangs
    hangs.close()


@pytest.fixture
def client(hangs):
    # Less than the 40 s after which gRPC itself gives up a connection that stands still.
    with ReplayClient(hangs.addresses, timeout=20.0) as client:
        until(lambda: client.server_info().gone == ())  # a connection stands to each
        yield client


def is_away(client, hangs) -> bool:
    return client.server_info().gone == (hangs.name,)


def test_all_calls_go_on_without_it_and_with_it_when_it_answers_again(client, hangs):
    keys = [client.insert(b"x", {"pool": 1.0}) for _ in range(30)]
    hangs.stop()
    assert client.sample("pool", 4)
    until(lambda: is_away(client, hangs))
    more = [client.insert(b"x", {"pool": 1.0}) for _ in range(30)]
    assert {item.key for item in client.get(more)} == set(more)
    assert {sample.info.shard for sample in client.sample("pool", 20)} <= set(hangs.addresses[1:])
    assert client.update_priorities("pool", dict.fromkeys(more, 2.0)).missing == ()
    assert client.set_policy_version(1).version == 1
    assert client.policy().version == 1
    hangs.go_on()
    until(lambda: client.server_info().gone == ())
    assert {item.key for item in client.get(keys + more)} == {*keys, *more}


def test_a_writer_goes_on_with_the_others(client, hangs):
    with client.writer(max_in_flight=1000) as writer:
        hangs.stop()
        first = [writer.insert(b"x", {"queue": 1.0}) for _ in range(60)]
        until(lambda: is_away(client, hangs))
        later = [writer.insert(b"x", {"queue": 1.0}) for _ in range(60)]
        until(lambda: len(client.get(later)) == 60)
        hangs.go_on()
    until(lambda: client.server_info().gone == ())
    assert {item.key for item in client.get(first + later)} == {*first, *later}
    assert client.server_info().tables["queue"].size == 120


def test_a_writer_whose_window_lies_with_it_goes_on_with_the_others(client, hangs):
    with client.writer(max_in_flight=4) as writer:
        hangs.stop()
        written = in_a_thread(lambda: [writer.insert(b"x", {"queue": 1.0}) for _ in range(60)])
        try:
            keys = written.result(PATIENCE)
            assert is_away(client, hangs)
            assert writer.refused == {}
        finally:
            hangs.go_on()
    until(lambda: client.server_info().gone == ())
    assert {item.key for item in client.get(keys)} == set(keys)
    assert client.server_info().tables["queue"].size == 60


def test_an_insert_whose_answer_is_open_stays_with_it(client, hangs):
    client.insert(b"x", {"pool": 1.0})
    hangs.stop()
    inserts = [in_a_thread(client.insert, b"x", {"pool": 1.0}, key=key, timeout=120.0) for key in range(30)]
    until(lambda: is_away(client, hangs))
    hangs.go_on()
    assert [insert.result() for insert in inserts] == list(range(30))
    until(lambda: client.server_info().gone == ())
    assert client.server_info().tables["pool"].size == 31
    assert len(client.get(range(30))) == 30
