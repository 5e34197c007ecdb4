"""Connections to the address of weights: half a request ends in time, and who reads slowly holds up nobody."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from replay_client.access import ListenAddress
from replay_client.testing import PATIENCE, until
from replay_generator.engines.weights import MANIFEST
from replay_generator.policy.remote import WeightsServer, serving
from replay_protos import connection_bounds
from tests.certificates import make_certificate
from tests.generator.sessions.test_connections import HALVES, WHOLE, ended, opened
from tests.kit.processes import free_port

SIZE = 64 << 20
"""Bytes of a file: far more than the buffers between server and reader hold."""
TAKEN = 32 << 20
"""Bytes after which the server has sent more than one piece that no buffer held before."""


class Clock:
    """The clock of the server, which goes on when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=time.sleep))
    return clock


@contextmanager
def served(folder: Path, **files: Path) -> Iterator[int]:
    """The port of a server with one version, whose file `large` has SIZE bytes."""
    version = folder / "step-1"
    version.mkdir(parents=True)
    with (version / "large").open("wb") as file:
        file.truncate(SIZE)
    (version / MANIFEST).write_text(json.dumps({"files": ["large"]}))
    port = free_port()
    with WeightsServer(folder, ListenAddress("weights", f"127.0.0.1:{port}", **files)) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield port
        server.shutdown()


class Reader:
    """Asks for the large file, and reads of it what a test says."""

    def __init__(self, port: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._socket.settimeout(PATIENCE)
        self._socket.connect(("127.0.0.1", port))
        self.count = 0
        with suppress(ConnectionError):  # it is closed already
            self._socket.sendall(b"GET /step-1/large HTTP/1.1\r\nHost: x\r\n\r\n")
        self.read(1)

    @property
    def is_served(self) -> bool:
        return self.count > 0

    def read(self, count: int) -> None:
        """Reads so many bytes more, or to the end."""
        wanted = self.count + count
        with suppress(ConnectionError):
            while self.count < wanted and (data := self._socket.recv(min(1 << 20, wanted - self.count))):
                self.count += len(data)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def port(tmp_path, monkeypatch) -> Iterator[int]:
    """Of a server that answers two at once."""
    monkeypatch.setattr(connection_bounds, "most_connections", lambda: 2)
    with served(tmp_path / "weights") as port:
        yield port


def test_who_reads_too_slowly_makes_room_for_another(port, clock):
    slow = [Reader(port), Reader(port)]
    assert not Reader(port).is_served
    clock.now += connection_bounds.SECONDS_PER_PIECE + 1.0
    new = Reader(port)
    assert new.is_served
    new.read(2 * SIZE)
    assert new.count > SIZE
    for each in slow:
        each.read(2 * SIZE)
    assert sorted(each.count > SIZE for each in slow) == [False, True]


def test_who_reads_fast_enough_is_never_cut_and_the_slower_one_is(port, clock):
    slow, steady = Reader(port), Reader(port)
    clock.now += connection_bounds.SECONDS_PER_PIECE + 1.0
    steady.read(TAKEN)
    new = Reader(port)
    assert new.is_served
    assert not Reader(port).is_served  # both read fast enough
    steady.read(2 * SIZE)
    assert steady.count > SIZE
    new.read(2 * SIZE)
    assert new.count > SIZE
    slow.read(2 * SIZE)
    assert slow.count < SIZE


def test_who_reads_slowly_is_not_cut_while_there_is_room(port, clock):
    slow = Reader(port)
    clock.now += 100 * connection_bounds.SECONDS_PER_PIECE
    new = Reader(port)
    assert new.is_served
    slow.read(2 * SIZE)
    assert slow.count > SIZE
    new.close()


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
async def test_half_a_request_is_closed(half, tmp_path, monkeypatch, clock):
    monkeypatch.setattr(connection_bounds, "SECONDS_PER_REQUEST", 0.5)
    monkeypatch.setattr(connection_bounds, "SECONDS_SILENT", 100 * PATIENCE)
    with served(tmp_path / "weights") as port:
        reader, writer = await opened(f"http://127.0.0.1:{port}", half)
        other, other_writer = await opened(f"http://127.0.0.1:{port}", WHOLE)
        assert b" 404 " in await ended(other)  # so the first one has come in
        clock.now += 1.0
        got = await ended(reader)
        writer.close()
        other_writer.close()
    assert got.count(b"HTTP/1.") <= 1


async def test_half_a_handshake_of_tls_is_closed(tmp_path, monkeypatch):
    certificate = make_certificate(tmp_path, "server")
    monkeypatch.setattr(connection_bounds, "SECONDS_PER_REQUEST", 0.3)
    monkeypatch.setattr(connection_bounds, "SECONDS_SILENT", 100 * PATIENCE)
    with served(tmp_path / "weights", cert=certificate.cert, key=certificate.key) as port:
        reader, writer = await opened(f"http://127.0.0.1:{port}", b"\x16\x03\x01\x02\x00\x01")
        await ended(reader)
        writer.close()


async def test_a_request_that_comes_byte_by_byte_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(connection_bounds, "SECONDS_PER_REQUEST", 0.5)
    with served(tmp_path / "weights") as port:
        reader, writer = await opened(f"http://127.0.0.1:{port}")

        async def trickle() -> None:
            while True:
                writer.write(b"a")
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        await ended(reader)
        trickling.cancel()
        writer.close()


def test_a_client_that_takes_nothing_of_a_file_is_closed_after_a_silence(tmp_path, monkeypatch):
    monkeypatch.setattr(connection_bounds, "SECONDS_SILENT", 0.3)
    monkeypatch.setattr(connection_bounds, "most_connections", lambda: 1)
    with served(tmp_path / "weights") as port:
        silent = Reader(port)
        until(lambda: Reader(port).is_served)
        silent.read(2 * SIZE)
    assert silent.count < SIZE
