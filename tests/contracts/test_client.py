"""What every client promises: blocking or for asyncio, of one server or of three, in messages or through rings."""

import asyncio
import inspect
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest

from replay_client import AsyncReplayClient, ReplayClient
from replay_client.errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    ServerClosedError,
    StaleItemError,
    TableNotFoundError,
    UnsupportedError,
)
from replay_client.testing import PATIENCE, make_group, until
from replay_server import ReplayServer, TableConfig

TABLES = [
    TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 8}),
    TableConfig(name="plain", sampler="fifo"),
    TableConfig(name="fresh", sampler="fifo", max_staleness=1),
    TableConfig(name="small", max_bytes=1000),
]


class Blocking:
    """An asyncio object, such as a client or a writer, as its blocking counterpart: its calls run on another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, inner: Any) -> None:
        self.loop = loop
        self.inner = inner

    def run(self, work: Any) -> Any:
        async def awaited() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result(PATIENCE)

    def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        async def called() -> Any:
            return method(*arguments, **options)

        result = self.run(called())
        if inspect.isawaitable(result):
            result = self.run(result)
        return Blocking(self.loop, result) if hasattr(result, "__aexit__") else result

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        return partial(self.call, value) if callable(value) else value

    def __enter__(self) -> Any:
        self.run(self.inner.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self.run(self.inner.__aexit__(*error))

    def __next__(self) -> Any:
        return self.run(anext(self.inner))


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(params=[1, 3], ids=["one server", "three servers"])
def addresses(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    with ExitStack() as servers:
        yield [servers.enter_context(ReplayServer(TABLES, port=0)).address for _ in range(request.param)]


@pytest.fixture(params=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest, addresses: list[str], loop: asyncio.AbstractEventLoop) -> Callable[[], Any]:
    """Makes a client of all servers, which has a connection to each."""

    def make() -> Any:
        if request.param == "blocking":
            client: Any = ReplayClient(addresses, timeout=20.0)
        else:
            client = Blocking(loop, None).call(AsyncReplayClient, addresses, timeout=20.0)
        until(lambda: getattr(client.server_info(), "gone", ()) == ())  # one server has no such field
        return client

    return make


@pytest.fixture
def client(connect: Callable[[], Any]) -> Iterator[Any]:
    client = connect()
    yield client
    client.close()


def size(client: Any, table: str) -> int:
    return client.server_info().tables[table].size


@pytest.mark.usefixtures("transport")
def test_a_group_comes_out_as_it_went_in_with_where_it_comes_from(client):
    group = make_group(version=3, prompt_id="p", extras={"ref": np.arange(6, dtype=np.float32)})
    client.set_policy_version(5)
    key = client.insert(group, {"rollouts": 0.5})
    (sample,) = client.sample("rollouts", 1)
    assert sample.group == group
    info = sample.info
    assert info.key == key
    assert info.priority == 0.5
    assert info.policy_version == 3
    assert info.staleness == 2
    assert info.probability == 1.0
    assert info.times_sampled == 1
    assert info.table_size == 1
    assert 0 <= info.age < 10


@pytest.mark.usefixtures("transport")
def test_items_come_without_their_payloads_if_nobody_wants_them(client):
    key = client.insert(make_group(), {"rollouts": 0.7, "plain": 0.5}, tags={"level": 3})
    (item,) = client.get([key, 12345], payloads=False)
    assert item.key == key
    assert bytes(item.payload) == b""
    assert item.tags == {"level": 3}
    assert {name: held.priority for name, held in item.tables.items()} == {"rollouts": 0.7, "plain": 0.5}


@pytest.mark.usefixtures("transport")
def test_the_writer_keeps_order_in_each_server_and_a_flush_means_stored(client):
    with client.writer(max_in_flight=16) as writer:
        keys = [writer.insert(bytes([n % 256]), {"plain": 1.0}) for n in range(1000)]
        writer.flush()
        assert size(client, "plain") == 1000
    by_server = defaultdict(list)
    for sample in client.sample("plain", 1000):
        by_server[sample.info.shard].append(keys.index(sample.info.key))
    assert sorted(number for numbers in by_server.values() for number in numbers) == [*range(1000)]
    for numbers in by_server.values():
        assert numbers == sorted(numbers)


@pytest.mark.usefixtures("transport")
def test_one_refused_item_disturbs_no_other_in_the_pipeline(client):
    writer = client.writer()
    raised: list[str] = []

    def until_done(call):
        """The result of a call. A call that raises the refusal of an earlier item has done nothing else."""
        while True:
            try:
                return call()
            except (InvalidRequestError, TableNotFoundError) as refusal:
                raised.append(str(refusal))

    first = until_done(lambda: writer.insert(b"a", {"plain": 1.0}))
    bad = until_done(lambda: writer.insert(b"b", {"plain": float("nan")}))
    lost = until_done(lambda: writer.insert(b"c", {"nowhere": 1.0}))
    last = until_done(lambda: writer.insert(b"d", {"plain": 1.0}))
    until_done(writer.flush)
    assert raised
    for refusal in raised:
        assert re.search("priority nan|no table 'nowhere'", refusal)
    assert set(writer.refused) == {bad, lost}
    assert "priority nan" in str(writer.refused[bad])
    assert isinstance(writer.refused[lost], TableNotFoundError)
    writer.close()
    assert {sample.info.key for sample in client.sample("plain", 2)} == {first, last}
    with pytest.raises(ServerClosedError):
        writer.insert(b"e", {"plain": 1.0})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"group": "text"}, "a str"),
    ({"group": np.zeros(3)}, "a ndarray"),
    ({"priorities": None}, "None"),
    ({"priorities": {7: 1.0}}, "{7: 1.0}"),
    ({"priorities": {"\udc80": 1.0}}, "udc80"),
    ({"priorities": {"plain": "high"}}, "'high'"),
    ({"policy_version": 1.5}, "policy_version .* 1.5"),
    ({"policy_version": -1}, "policy_version .* -1"),
]


def test_what_cannot_travel_is_refused_at_once_and_stops_no_other_item(client):
    right = {"group": b"x", "priorities": {"plain": 1.0}}
    with client.writer() as writer:
        for wrong, named in WRONG:
            writer.insert(**right)
            with pytest.raises(InvalidRequestError, match=named):
                writer.insert(**right | wrong)
        writer.insert(**right)
    assert size(client, "plain") == len(WRONG) + 1


REFUSED: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (
        lambda client: client.insert(b"x", {"plain": 1.0}, key=1 << 64),
        InvalidRequestError,
        "key .* 18446744073709551616",
    ),
    (lambda client: client.insert(b"x", {"plain": 1.0}, timeout="soon"), InvalidRequestError, "timeout .* 'soon'"),
    (lambda client: client.insert(b"x", {"plain": -1.0}), InvalidRequestError, r"priority -1\.0 .*from 0 to"),
    (lambda client: client.insert(b"x", {"plain": float("nan")}), InvalidRequestError, "priority nan"),
    (lambda client: client.insert(b"x", {}), InvalidRequestError, "names no table"),
    (
        lambda client: client.insert(b"x", {"plain": 1.0}, tags={"level": 1.5}),
        InvalidRequestError,
        r"tag 'level' is 1\.5",
    ),
    (lambda client: client.insert(b"x", {"nope": 1.0}), TableNotFoundError, "no table 'nope'; tables: rollouts, plain"),
    (lambda client: client.insert(b"x" * 1001, {"small": 1.0}), PayloadTooLargeError, "at most 1000"),
    (lambda client: client.insert(make_group(), {"fresh": 1.0}), StaleItemError, "lags 5 behind the current 5"),
    (lambda client: client.sample("nope", 1), TableNotFoundError, "no table 'nope'; tables: rollouts, plain"),
    (lambda client: client.sample("plain", 0), InvalidRequestError, "num_samples"),
    (lambda client: client.sample("plain", "all"), InvalidRequestError, "num_samples 'all'"),
    (lambda client: client.sample("plain", timeout=-1), InvalidRequestError, "timeout .* -1"),
    (lambda client: client.sample(7), InvalidRequestError, "table 7"),
    (lambda client: client.update_priorities("plain", {-1: 1.0}), InvalidRequestError, r"keys \[-1\]"),
    (lambda client: client.update_priorities("plain", {1: "high"}), InvalidRequestError, "priorities .*'high'"),
    (lambda client: client.update_priorities("plain", {1: -1.0}), InvalidRequestError, r"priority -1\.0"),
    (
        lambda client: client.update_priority_arrays("plain", np.ones(1), np.ones(1)),
        InvalidRequestError,
        "keys of type float64",
    ),
    (lambda client: client.delete("plain", [-3]), InvalidRequestError, r"keys \[-3\]"),
    (lambda client: client.get(["a"]), InvalidRequestError, r"keys \['a'\]"),
    (lambda client: client.list_items("plain", limit=-1), InvalidRequestError, "limit -1"),
    (lambda client: client.list_items("plain", order_by="name"), InvalidRequestError, "order_by 'name'"),
    (lambda client: client.list_items("plain", page="x"), InvalidRequestError, "page"),
    (lambda client: client.set_policy_version("latest"), InvalidRequestError, "version 'latest'"),
    (lambda client: client.set_policy_version(4), InvalidRequestError, "rollback=True"),
    (lambda client: client.policy(timeout=-1), ValueError, "timeout must be"),
    (lambda client: client.acquire_permits(-1), InvalidRequestError, "count -1"),
    (lambda client: client.acquire_permits(1), UnsupportedError, r"no \[admission\]"),
    (lambda client: client.create_checkpoint("x"), UnsupportedError, "no place for checkpoints"),
    (lambda client: client.writer(max_in_flight=0), InvalidRequestError, "max_in_flight 0"),
    (lambda client: next(client.sampler("plain", prefetch=-1)), InvalidRequestError, "prefetch .* -1"),
]


def test_errors_name_the_value_and_the_remedy_and_nothing_is_stored(client):
    client.set_policy_version(5)
    for call, error, named in REFUSED:
        with pytest.raises(error) as refused:
            call(client)
        assert re.search(named, str(refused.value)), f"{refused.value}: does not say {named}"
    assert all(table.size == 0 for table in client.server_info().tables.values())
    assert client.server_info().admission is None


def test_several_threads_share_one_client(client):
    with ThreadPoolExecutor(4) as threads:
        inserts = [threads.submit(client.insert, b"x", {"plain": 1.0}) for _ in range(200)]
    keys = {insert.result() for insert in inserts}
    assert len(keys) == 200
    assert size(client, "plain") == 200
