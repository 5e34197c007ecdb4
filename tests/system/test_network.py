"""The network between client and server breaks at random: nothing acknowledged is lost, nothing comes twice.

REPLAY_NETWORK_SECONDS=120 looks longer than a run of all tests does, REPLAY_NETWORK_SEED elsewhere.
"""

import hashlib
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from replay_client import TLS, ReplayClient
from replay_client.errors import DeadlineExceededError, ReplayError, ServerUnavailableError
from replay_server import ReplayServer, SecurityConfig, TableConfig
from tests.certificates import make_certificate
from tests.system.proxy import Faults, FaultyProxy

pytestmark = pytest.mark.long

SECONDS = float(os.environ.get("REPLAY_NETWORK_SECONDS", "8"))
SEED = int(os.environ.get("REPLAY_NETWORK_SEED", "0"))
TABLES = [
    TableConfig(name="plain", sampler="fifo"),
    TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 64}),
]
GRACE = 5.0
"""What a client gives a server beyond a timeout, to say what a request waited for."""


@pytest.fixture
def server(transport):
    with ReplayServer(tables=TABLES, port=0) as server:
        yield server


@contextmanager
def proxied(server: ReplayServer, seed: int, faults: Faults | None = None):
    with FaultyProxy(server.address, SEED * 1000 + seed, faults) as proxy:
        yield proxy


def payload(writer: int, number: int) -> bytes:
    """Some bytes that say whose they are; of very different lengths, some of them in several messages."""
    name = f"{writer}/{number}".encode()
    size = (1, 100, 5_000, 80_000, 300_000, 2_500_000)[int(hashlib.sha256(name).hexdigest(), 16) % 6]
    return name + b":" + bytes(size)


def run_all(*works) -> list[BaseException]:
    """Runs each of them on a thread; what they raised."""
    raised: list[BaseException] = []

    def run(work) -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 150)
        assert not thread.is_alive(), "somebody hangs"
    return raised


def numbers(proxy: FaultyProxy, end: float) -> Iterator[int]:
    """0, 1, ... until `end`; on a slow machine until a connection was broken, and there are some."""
    return itertools.takewhile(
        lambda number: time.monotonic() < end or not proxy.breaks or number < 20, itertools.count()
    )


def one_by_one(proxy: FaultyProxy, name: int, end: float) -> Iterator[tuple[int, bytes]]:
    """Inserts into `plain`. Yields what was acknowledged."""
    with ReplayClient(proxy.address, timeout=60.0) as client:
        for number in numbers(proxy, end):
            data = payload(name, number)
            yield client.insert(data, {"plain": 1.0}), data


def pipelined(proxy: FaultyProxy, name: int, end: float, table: str = "plain") -> Iterator[tuple[int, bytes]]:
    """As `one_by_one`; all is acknowledged at its end."""
    with ReplayClient(proxy.address, timeout=90.0) as client, client.writer(max_in_flight=16) as writer:
        for number in numbers(proxy, end):
            data = payload(name, number)
            yield writer.insert(data, {table: 1.0}), data
            if number % 50 == 49:
                writer.flush()


def test_what_writers_had_acknowledged_is_there_exactly_once_and_whole(server):
    written: dict[int, bytes] = {}
    end = time.monotonic() + SECONDS
    with proxied(server, 1) as proxy:
        writes = [write(proxy, n, end) for n, write in enumerate((pipelined, one_by_one) * 2)]
        assert run_all(*(partial(written.update, write) for write in writes)) == []
    assert proxy.breaks > 0, proxy.happened
    with ReplayClient(server.address, timeout=60.0) as client:
        table = client.server_info().tables["plain"]
        assert table.size == len(written)
        assert table.inserts == len(written)
        for key, expected in written.items():
            (item,) = client.get([key])
            assert bytes(item.payload) == expected


def with_leases(client: ReplayClient, goes_on: Callable[[], bool]) -> Iterator[int]:
    """What is read counts once it is acknowledged."""
    while goes_on():
        with suppress(DeadlineExceededError, ServerUnavailableError):
            samples = client.sample("queue", 4, min_samples=1, timeout=0.5, lease=8.0)
            if client.acknowledge(samples).applied:
                yield from (sample.info.key for sample in samples)


def with_a_sampler(client: ReplayClient, goes_on: Callable[[], bool]) -> Iterator[int]:
    sampler = client.sampler("queue", batch_size=1, prefetch=4, timeout=0.5)
    while goes_on():
        with suppress(DeadlineExceededError, ServerUnavailableError):
            yield next(sampler)[0].info.key
    while True:  # a batch that was taken, and whose answer was lost
        with suppress(ServerUnavailableError):
            try:
                yield next(sampler)[0].info.key
            except DeadlineExceededError:
                return


@pytest.mark.parametrize("read", [with_leases, with_a_sampler])
def test_items_of_a_queue_reach_readers_exactly_once(server, read):
    """Writers and readers are behind the proxy."""
    written: dict[int, bytes] = {}
    delivered: Counter[int] = Counter()
    writing = threading.Event()
    end = time.monotonic() + SECONDS

    def goes_on() -> bool:
        with ReplayClient(server.address, timeout=60.0) as client:
            table = client.server_info().tables["queue"]
        return not writing.is_set() or bool(table.size + table.reserved + table.inserting.count)

    def write_all() -> None:
        try:
            writes = [pipelined(proxy, n, end, "queue") for n in range(2)]
            assert run_all(*(partial(written.update, write) for write in writes)) == []
        finally:
            writing.set()

    def read_all() -> None:
        with ReplayClient(proxy.address, timeout=60.0) as client:
            delivered.update(read(client, goes_on))

    with proxied(server, 2) as proxy:
        assert run_all(write_all, *[read_all] * 3) == []
    assert proxy.breaks > 0, proxy.happened
    assert len(written) > 20
    assert max(delivered.values()) == 1
    assert delivered.keys() == written.keys()


def test_every_call_ends_in_its_time_whatever_the_network_does(server):
    faults = Faults(delay=0.2, reset=0.01, truncate=0.01, drop=0.03, refuse=0.3, longest_silence=4.0)
    codes: Counter[str] = Counter()
    end = time.monotonic() + SECONDS

    def use(address: str) -> None:
        timeout = 1.0
        while time.monotonic() < end or not codes["OK"]:
            with ReplayClient(address, timeout=timeout) as client:
                for call in (
                    lambda: client.insert(bytes(30_000), {"plain": 1.0}),
                    lambda: client.sample("plain", 1),
                    lambda: client.server_info(),
                    lambda: client.sample("queue", 1),
                ):
                    try:
                        # A call that far outlives its timeout and the grace raises TimeoutError here.
                        calls.submit(call).result(timeout + GRACE + 60.0)
                        codes["OK"] += 1
                    except ReplayError as error:
                        codes[type(error).__name__] += 1

    with ThreadPoolExecutor(4) as calls, proxied(server, 4, faults) as proxy:
        assert run_all(*(lambda: use(proxy.address) for _ in range(4))) == []
    assert codes.keys() <= {"OK", "DeadlineExceededError", "ServerUnavailableError"}, codes
    assert codes["OK"] > 0
    assert codes["ServerUnavailableError"] + codes["DeadlineExceededError"] > 0


def test_tls_with_tokens_goes_on_through_a_network_that_breaks(tmp_path):
    """Broken handshakes must not be taken for a server that cannot be trusted."""
    ca = make_certificate(tmp_path, "ca")
    own = make_certificate(tmp_path, "server", ca)
    (tmp_path / "tokens").write_text("read-write:0123456789abcdef0123")
    security = SecurityConfig(tls_cert=own.cert, tls_key=own.key, tokens_file=tmp_path / "tokens")
    faults = Faults(reset=0.02, truncate=0.05, refuse=0.2)
    with ReplayServer(tables=TABLES, port=0, security=security) as server, proxied(server, 5, faults) as proxy:
        keys = set()
        end = time.monotonic() + SECONDS / 2
        while time.monotonic() < end or not proxy.breaks:
            with ReplayClient(proxy.address, 60.0, token="0123456789abcdef0123", tls=TLS(ca=ca.cert)) as client:
                for _ in range(20):
                    keys.add(client.insert(bytes(20_000), {"plain": 1.0}))
        assert proxy.breaks > 0, proxy.happened
        with ReplayClient(server.address, 60.0, token="0123456789abcdef0123", tls=TLS(ca=ca.cert)) as client:
            assert client.server_info().tables["plain"].inserts == len(keys)


def test_a_cut_ends_no_writer_and_no_watcher(server):
    with proxied(server, 6, Faults(0, 0, 0, 0, 0)) as proxy, ReplayClient(proxy.address, timeout=60.0) as client:
        watch = client.watch_policy()
        assert next(watch).version == 0
        with client.writer() as writer:
            for round_ in range(5):
                for _ in range(20):
                    writer.insert(bytes(50_000), {"plain": 1.0})
                proxy.cut()
                client.set_policy_version(round_ + 1)
                assert next(watch).version == round_ + 1
        assert client.server_info().tables["plain"].inserts == 100
