"""What `top` shows, whatever the size of the terminal, and that `tables` shows all of it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from replay_cli.screen import Screen
from replay_client.records import ServerInfo, rates_between, server_info_of
from replay_client.shards.merging import merge_infos
from replay_protos import replay_pb2 as pb
from replay_server import TableConfig
from tests.kit.golden import sections


def info(tables: int) -> ServerInfo:
    config = TableConfig(name="t").model_dump_json()
    waiting = pb.Waiting(count=3, reason="t0: inserting blocked: the queue is full", seconds=12)
    return server_info_of(
        pb.ServerInfo(
            version="1.0",
            admission=pb.AdmissionInfo(running=4, acquiring=pb.Waiting(count=1, reason="none left", seconds=2)),
            tables=[
                pb.TableInfo(name=f"t{i}", config=config, inserting=waiting if i % 2 else None) for i in range(tables)
            ],
        )
    )


def lines_of(screen: Screen, height: int | None) -> list[str]:
    written = io.StringIO()
    Console(file=written, width=100, height=height).print(screen.render(height), crop=False)
    return written.getvalue().splitlines()


@pytest.mark.parametrize("height", [20, 24, 50])
@pytest.mark.parametrize("tables", [2, 10, 500])
def test_permits_waits_and_keys_are_on_the_screen_however_many_tables_there_are(tables, height):
    screen = Screen("host:1")
    screen.record(info(tables))
    lines = lines_of(screen, height)
    assert len(lines) < height
    text = "\n".join(lines)
    for words in ("permits: 4 running", "3 inserts wait, none was served for ", "q quit", "t0 "):
        assert words in text
    hidden = sum(f"t{i} " not in text for i in range(tables))
    assert (f"and {hidden} more tables" in text) == (hidden > 0)


def test_without_a_terminal_every_line_is_there():
    screen = Screen("host:1", info(500))
    text = "\n".join(lines_of(screen, None))
    assert all(f"t{i} " in text for i in range(500))
    assert text.count("3 inserts wait") == 250
    assert "q quit" not in text


def test_each_line_of_tables_is_about_the_server_a_table_permits_a_wait_or_a_client(golden):
    config = TableConfig(name="t", max_size=64, max_staleness=4).model_dump_json()
    waiting = pb.Waiting(count=3, reason="rollouts: inserting blocked: the queue is full", seconds=12)
    queue = pb.TableInfo(
        name="rollouts", config=config, size=64, bytes=64_000, inserts=200, samples=136, inserting=waiting,
        inserts_per_second=1.5, insert_blocked_share=0.25, age=pb.Quantiles(max=90.0), stale=7,
        incomplete_items=2, missing_columns=[pb.MissingColumn(name="value", items=2)], incomplete_seconds=40.0,
    )  # fmt: skip
    full = pb.ServerInfo(
        version="1.0", uptime=3600.0, policy=pb.Policy(version=60, weights="step-60", age=1.0),
        items=64, bytes=64_000, max_bytes=10**9, storage="memory",
        admission=pb.AdmissionInfo(running=4, capacity=8, acquiring=pb.Waiting(count=1, reason="none left", seconds=2)),
        tables=[queue, pb.TableInfo(name="replay", config=config, evicted=5)],
        overdue=[pb.OverdueClient(role="trainer", reason="no new policy version since version 60, 94 s ago")],
        clients=[
            pb.ClientInfo(name="gen-a", role="generator", open=1, age=3.0),
            pb.ClientInfo(name="gen-b", role="generator", age=40.0),
            pb.ClientInfo(name="score-1", role="scorer", ended=True, age=90.0),
        ],
    )  # fmt: skip
    alone = Screen("host:1", server_info_of(full))
    several = Screen("a:1,b:1", merge_infos({"a:1": server_info_of(full)}, ["b:1"]), by_shard=True)
    screens = {"a server": lines_of(alone, None), "one of two servers": lines_of(several, None)}
    golden("screens/tables.txt", sections({name: "\n".join(lines) for name, lines in screens.items()}))


def look(uptime: float, server_id: int = 1, **inserts: int) -> ServerInfo:
    config = TableConfig(name="t").model_dump_json()
    tables = [
        pb.TableInfo(name=name, config=config, inserts=count, samples=2 * count) for name, count in inserts.items()
    ]
    return server_info_of(pb.ServerInfo(server_id=server_id, uptime=uptime, tables=tables))


def shards(**looks: ServerInfo) -> ServerInfo:
    return merge_infos(looks, [name for name in ("first", "second") if name not in looks])


def first(uptime: float) -> ServerInfo:
    return shards(first=look(uptime, a=5))


def second(uptime: float) -> ServerInfo:
    return shards(second=look(uptime, 2, a=7000))


def both(uptime: float, more: int = 1, server_id: int = 2) -> ServerInfo:
    return shards(first=look(uptime, a=4 + more), second=look(uptime, server_id, a=7000))


@pytest.mark.parametrize(
    ("before", "after", "rates"),
    [
        pytest.param(look(10.0, a=5), look(12.0, a=9), {"a": (2.0, 4.0)}, id="two looks at a server"),
        pytest.param(None, look(12.0, a=9), {}, id="the first look"),
        pytest.param(look(10.0, a=5), look(1.0, 2, a=9), {}, id="the server was started again"),
        pytest.param(look(10.0, a=5, b=1), look(12.0, a=0, b=2), {"b": (0.5, 1.0)}, id="a table was reset"),
        pytest.param(look(10.0, a=5), look(12.0, a=5, b=2), {"a": (0.0, 0.0)}, id="a table is new"),
        pytest.param(look(10.0, a=5), look(10.0, a=9), {}, id="no time passed"),
        pytest.param(both(10.0), both(12.0, 3), {"a": (1.0, 2.0)}, id="two looks at two shards"),
        pytest.param(first(10.0), both(12.0), {}, id="a shard came back, with all that it ever counted"),
        pytest.param(both(10.0), first(12.0), {}, id="a shard is gone"),
        pytest.param(first(10.0), second(12.0), {}, id="one shard for the other"),
    ],
)
def test_rates_are_what_the_counters_did_between_two_looks(before, after, rates):
    assert rates_between(before, after) == rates
