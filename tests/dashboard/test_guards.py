"""Whatever strangers send to the page, and whatever lies in the folder of runs, the page goes on in bounded memory."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from replay_client import ReplayClient
from replay_dashboard import training
from replay_dashboard.app import Settings
from replay_protos import connection_bounds
from replay_server import ReplayServer, TableConfig
from tests.dashboard.conftest import serving, until
from tests.dashboard.test_answers import answer_of, asked, looks_of

DEEP = "[" * 4000


@pytest.fixture(scope="module")
def server():
    with ReplayServer(tables=[TableConfig(name="pool")], port=0) as server, ReplayClient(server.address) as client:
        client.insert(b"raw", {"pool": 1.0})
        yield server


@pytest.fixture(params=[None, "s3cret"], ids=["no token", "token"])
def url(server, request):
    with serving(Settings({"address": server.address}, token=request.param)) as url:
        yield url


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=60)


# ------------------------------------------------------------------------------------------------ bodies and requests


@pytest.mark.parametrize("announced", [True, False], ids=["with its length", "in chunks"])
def test_a_large_body_is_refused_before_it_has_come(url, announced):
    with connect(url) as stranger:
        size = b"Content-Length: 600000000" if announced else b"Transfer-Encoding: chunked"
        stranger.sendall(b"POST /api/login HTTP/1.1\r\nHost: localhost\r\n" + size + b"\r\n\r\n")
        sent = bytes(100_000) if announced else b"186a0\r\n" + bytes(100_000) + b"\r\n"
        with suppress(ConnectionError):  # the page has closed the connection already
            stranger.sendall(sent)
        assert stranger.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/api/login", DEEP, 401),
        ("/api/login", '{"token":' * 400, 401),
        ("/api/login", '{"token": ' + "9" * 3000 + "}", 401),
        ("/api/login", '{"token": "\\ud800"}', 401),
        ("/api/groups/" + "9" * 30, "", 400),
        ("/api/groups/" + "9" * 5000, "", 400),
        ("/api/groups/" + "9" * 5000 + "/tokens", "", 400),
        ("/api/groups/x", "", 400),
        ("/api/groups/%FF", "", 400),
        ("/api/groups?table=pool&offset=" + "9" * 5000, "", 400),
        ("/api/groups?table=pool&limit=1e400", "", 400),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_request_that_makes_no_sense_is_answered_and_leaves_no_traceback(server, caplog, path, body, status):
    with serving(Settings({"address": server.address}, token="s3cret")) as url, caplog.at_level(logging.ERROR):
        given = {"Cookie": "replay_dashboard=s3cret"}
        found, _, answer = answer_of(url, path, "POST" if body else "GET", body, **given)
        assert found == status
        assert answer["problem"]
    assert caplog.records == []


def test_a_stranger_who_goes_away_in_the_middle_leaves_no_traceback(server, caplog):
    with serving(Settings({"address": server.address})) as url, caplog.at_level(logging.ERROR):
        with connect(url) as stranger:
            stranger.sendall(b"POST /api/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert asked(url, "/api/prompts")
    assert caplog.records == []


@pytest.mark.parametrize(
    "half",
    [
        b"",
        b"G",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /api/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
        b"GET /main.js HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP",
    ],
    ids=["nothing", "one letter", "no end of the head", "half a body", "half a second request"],
)
def test_half_a_request_is_closed(server, monkeypatch, half):
    monkeypatch.setattr(connection_bounds, "SECONDS_PER_REQUEST", 0.3)
    with serving(Settings({"address": server.address})) as url, connect(url) as stranger:
        stranger.sendall(half)
        with suppress(ConnectionResetError):
            while stranger.recv(65536):
                pass  # the answer to the request before


def ended(connection: socket.socket) -> bool:
    """Waits until the page says something or closes the connection; true if it closes it."""
    with suppress(ConnectionResetError):
        return connection.recv(100) == b""
    return True


def test_where_strangers_hold_all_connections_a_viewer_takes_the_place_of_the_oldest(server, monkeypatch):
    monkeypatch.setattr(connection_bounds, "most_connections", lambda: 4)
    monkeypatch.setattr(connection_bounds, "SECONDS_PER_REQUEST", 600.0)
    monkeypatch.setattr(connection_bounds, "SECONDS_SAFE", 0.0)
    with serving(Settings({"address": server.address})) as url:
        halves = [connect(url) for _ in range(4)]
        for half in halves:
            half.sendall(b"GET / HTTP/1.1\r\n")
        assert asked(url, "/api/prompts")
        assert ended(halves[0])
        for half in halves:
            half.close()


def test_where_strangers_have_just_come_a_new_connection_is_closed_itself(server, monkeypatch):
    monkeypatch.setattr(connection_bounds, "most_connections", lambda: 4)
    monkeypatch.setattr(connection_bounds, "SECONDS_PER_REQUEST", 600.0)
    monkeypatch.setattr(connection_bounds, "SECONDS_SAFE", 600.0)
    with serving(Settings({"address": server.address})) as url:
        halves = [connect(url) for _ in range(4)]
        with connect(url) as late:
            assert ended(late)
        for half in halves:
            half.close()


def test_a_viewer_keeps_its_stream_for_longer_than_a_request_may_take(server, monkeypatch):
    monkeypatch.setattr(connection_bounds, "SECONDS_PER_REQUEST", 2.0)  # the looks come a second apart
    with serving(Settings({"address": server.address})) as url:
        viewer = looks_of(url)
        assert len([next(viewer) for _ in range(4)]) == 4
        viewer.close()


# ------------------------------------------------------------------------------------------------ files of runs


def line(step: int, **metrics: float) -> str:
    return json.dumps({"step": step, **metrics}) + "\n"


def write_run(folder: Path, text: str, written: float | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.jsonl"
    path.write_text(text)
    if written is not None:
        os.utime(path, (written, written))
    return path


@pytest.mark.parametrize(
    "size",
    [
        training.BYTES_PER_READ - 9,
        training.BYTES_PER_READ,
        pytest.param(3 * training.BYTES_PER_READ + 7, marks=pytest.mark.long),
    ],
)
def test_a_line_that_is_too_long_is_skipped_and_counted_and_the_run_goes_on(server, tmp_path, size):
    long = '{"step": 2, "x": "' + "a" * size + '"}\n'
    path = write_run(tmp_path / "now", line(1, loss=1.0) + long + line(3, loss=3.0))
    with serving(Settings({"address": server.address}, runs=tmp_path)) as url:

        def found(steps: int) -> bool:
            return asked(url, "/api/training")["runs"] == [{"name": "now", "steps": steps, "damaged": 1}]

        until(lambda: found(2))
        with path.open("a") as file:
            file.write(line(4, loss=4.0))
        until(lambda: found(3))
        (curve,) = asked(url, "/api/training")["curves"]
        assert curve["steps"] == [1, 3, 4]
        assert curve["columns"]["loss"] == [1.0, 3.0, 4.0]


def test_of_more_runs_than_are_read_the_newest_are(server, tmp_path):
    names = [f"run-{number:03}" for number in range(training.MOST_RUNS + 40)]
    random.Random(1).shuffle(names)
    for number, name in enumerate(names):
        write_run(tmp_path / name, line(1), written=1e9 + number)
    with serving(Settings({"address": server.address}, runs=tmp_path)) as url:

        def read() -> list[str]:
            return [run["name"] for run in asked(url, "/api/training")["runs"]]

        until(lambda: len(read()) == training.MOST_RUNS)
        assert read() == names[: -training.MOST_RUNS - 1 : -1]
        write_run(tmp_path / names[0], line(1) + line(2), written=2e9)
        until(lambda: read()[0] == names[0])
        assert len(read()) == training.MOST_RUNS
