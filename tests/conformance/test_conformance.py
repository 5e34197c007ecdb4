"""Every shape of a group comes back bit for bit, wherever it went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from replay_client import ReplayClient, RolloutGroup
from replay_server import ReplayServer, TableConfig
from tests.conformance.shapes import COLUMNS, LATER, SHAPES, in_the_end
from tests.kit.processes import run_replay, server_process

Groups = dict[str, RolloutGroup]
EXPECTED: Groups = SHAPES | in_the_end()
TABLES = """
tables = [
    { name = "kept", sampler = "fifo" },
    { name = "drawn", rate_limiter = { type = "queue", max_size = 512 } },
]
"""


def store(client: ReplayClient, *tables: str) -> dict[int, str]:
    """Inserts every shape, and then the columns that arrive later. Returns the names of the shapes by key."""
    begun = SHAPES | {name: SHAPES[first] for name, first in LATER.items()}
    with client.writer() as writer:
        names = {writer.insert(group, dict.fromkeys(tables, 1.0)): name for name, group in begun.items()}
    for key, name in names.items():
        for later in COLUMNS if name in LATER else ():
            columns, axes = later(begun[name])
            assert client.extend(key, columns, axes=axes).added == tuple(columns)
            assert client.extend(key, columns, axes=axes).present == tuple(sorted(columns))
    return names


def found(client: ReplayClient, names: dict[int, str]) -> Groups:
    """The groups that the servers hold under these keys."""
    return {names[item.key]: item.group for item in client.get(list(names))}


def drawn(client: ReplayClient, names: dict[int, str]) -> Groups:
    """Draws every item of the table `drawn`."""
    samples = client.sample("drawn", len(names), timeout=60.0)
    return {names[sample.info.key]: sample.group for sample in samples}


def exported(address: str, names: dict[int, str], file: Path) -> Groups:
    """What an empty server holds after `replay table export` and `replay table import`."""
    with ReplayServer([TableConfig(name="kept")], port=0) as target, ReplayClient(target.address) as client:
        for command in (
            run_replay("table", "export", "kept", str(file), address=address),
            run_replay("table", "import", str(file), address=target.address),
        ):
            assert command.returncode == 0, command.stderr
        return found(client, names)


# ------------------------------------------------------------------------------------------------ in one process


@pytest.fixture(scope="module")
def nearby() -> Callable[[str], Groups]:
    """What came back from servers of this process: by the way that the groups went."""
    tables = [TableConfig(name="kept"), TableConfig(name="drawn", rate_limiter={"type": "queue", "max_size": 512})]
    with (
        ReplayServer(tables, port=0) as first,
        ReplayServer(tables, port=0) as second,
        ReplayClient(first.address) as one,
        ReplayClient([first.address, second.address]) as both,
    ):
        ways = {"one server": drawn(one, store(one, "drawn")), "two servers": drawn(both, store(both, "drawn"))}
        ways["kept"] = found(one, store(one, "kept"))
    return ways.__getitem__


@pytest.mark.parametrize("way", ["one server", "two servers", "kept"])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_group_comes_back_bit_for_bit(nearby, name, way):
    assert nearby(way)[name] == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_group_has_its_own_bytes_again_after_decoding(name):
    group = EXPECTED[name]
    assert RolloutGroup.decode(group.encode()) == group
    assert RolloutGroup.decode(group.encode()).encode() == group.encode()


# ------------------------------------------------------------------------------------------------ whole processes


def test_every_shape_survives_kills_checkpoints_and_files(tmp_path):
    config = f'server.data_dir = "{tmp_path}/data"\ncheckpoints.dir = "{tmp_path}/checkpoints"\n{TABLES}'
    walked: dict[str, Groups] = {}
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        names = store(client, "kept", "drawn")
        walked["inserted"] = found(client, names)
        server.kill()
    (tmp_path / "second").mkdir()
    with (
        server_process(tmp_path, config) as server,
        server_process(tmp_path / "second", TABLES) as second,
        ReplayClient(server.address) as client,
        ReplayClient([server.address, second.address]) as both,
    ):
        walked["killed and restarted"] = found(client, names)
        walked["drawn after the kill"] = drawn(client, names)
        walked["drawn from two processes"] = drawn(both, store(both, "drawn"))
        for file in ("kept.jsonl", "kept.parquet"):
            walked[file] = exported(server.address, names, tmp_path / file)
        client.create_checkpoint("walked")
        client.reset("kept")
        server.kill()
    with (
        server_process(tmp_path, config, options=("--restore", "walked", "--replace")) as server,
        ReplayClient(server.address) as client,
    ):
        walked["restored"] = found(client, names)
    wrong = [(way, name) for way in walked for name in EXPECTED if walked[way].get(name) != EXPECTED[name]]
    assert wrong == []
