"""What `top` shows, whatever the size of the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from replay_client.records import ServerInfo, server_info_of
from replay_protos import replay_pb2 as pb
from replay_server import TableConfig
from replay_server.cli.screen import Screen


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


def lines_of(screen: Screen, height: int) -> list[str]:
    written = io.StringIO()
    Console(file=written, width=100, height=height).print(screen.render(height))
    return written.getvalue().splitlines()


@pytest.mark.parametrize("height", [20, 24, 50])
@pytest.mark.parametrize("tables", [2, 10, 500])
def test_permits_waits_and_keys_are_on_the_screen_however_many_tables_there_are(tables, height):
    screen = Screen("host:1")
    screen.see(info(tables))
    lines = lines_of(screen, height)
    assert len(lines) < height
    text = "\n".join(lines)
    for words in ("permits: 4 running", "3 inserts wait, none was served for ", "q quit", "t0 "):
        assert words in text
    hidden = sum(f"t{i} " not in text for i in range(tables))
    assert (f"and {hidden} more tables" in text) == (hidden > 0)
