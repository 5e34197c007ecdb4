"""Half requests: they end in time, and take no descriptors from agents and from weights."""

import asyncio
import json
import socket
import ssl
import subprocess
import sys
from contextlib import suppress
from typing import Any

import httpx
import pytest
from aiohttp import web

from replay_client.testing import PATIENCE, until
from replay_generator.rollouts.sessions.connections import _Connection
from replay_generator.rollouts.sessions.endpoint import SessionServer
from replay_protos import connection_bounds
from tests.certificates import make_certificate
from tests.generator.sessions import half_connections
from tests.generator.sessions.fakes import ScriptedSession, answer, serving
from tests.generator.sessions.fakes import until as async_until
from tests.packages import ROOT


async def opened(url: str, data: bytes = b"", tls: Any = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
    writer.write(data)
    return reader, writer


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection ends."""
    with suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE):
            return await reader.read()
    return b""


WHOLE = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
ASK = b"POST /sessions/secret/v1/completions HTTP/1.1\r\nHost: x\r\n"
HALVES = {
    "nothing": b"",
    "a letter": b"P",
    "half a line": b"POST /sess",
    "half a head": ASK,
    "half a body": ASK + b"Content-Length: 99\r\n\r\n{",
    "half a chunk": ASK + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    "half a body for nobody": b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{",
    "half a body of another route": b"POST /other HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{",
    "half a second request": WHOLE + b"GET / HTTP",
    "half a second body": WHOLE + b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{",
    "half an upgrade": b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nabc",
}


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
async def test_half_a_request_is_closed(half, monkeypatch):
    monkeypatch.setattr(connection_bounds, "SECONDS_PER_REQUEST", 0.3)
    # A connection whose second request began in the packet of the first one counts as idle.
    monkeypatch.setattr(connection_bounds, "SECONDS_IDLE", 0.3)

    async def other(request: web.Request) -> web.Response:
        return web.json_response(await request.json())

    server = SessionServer()
    server.app.router.add_post("/other", other)
    async with server:
        server.open(ScriptedSession())  # type: ignore[arg-type]
        reader, writer = await opened(server.base_url, half)
        got = await ended(reader)
        writer.close()
    assert got.count(b"HTTP/1.1 ") <= 2


async def test_a_server_listens_at_all_addresses_of_a_name_with_one_port(monkeypatch):
    async def two_addresses(host: str, port: int, **options: Any) -> list[Any]:
        assert host == "trainer"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{number}", port)) for number in (1, 2)]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two_addresses)
    async with SessionServer("trainer") as server, httpx.AsyncClient() as client:
        port = httpx.URL(server.base_url).port
        for number in (1, 2):
            answered = await client.get(f"http://127.0.0.{number}:{port}/x")
            assert answered.status_code == 404


async def test_a_request_that_comes_byte_by_byte_is_closed(monkeypatch):
    monkeypatch.setattr(connection_bounds, "SECONDS_PER_REQUEST", 0.5)
    async with serving() as (_, address):
        reader, writer = await opened(address)

        async def trickle() -> None:
            while True:
                writer.write(b"a")
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        await ended(reader)
        trickling.cancel()
        writer.close()


async def test_half_a_handshake_of_tls_is_closed_and_others_come_in(tmp_path, monkeypatch):
    certificate = make_certificate(tmp_path, "server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.cert, certificate.key)
    trusting = ssl.create_default_context(cafile=str(certificate.cert))
    monkeypatch.setattr(connection_bounds, "most_connections", lambda: 4)
    async with SessionServer(ssl_context=context) as server:
        address = server.open(ScriptedSession(answer()))  # type: ignore[arg-type]
        halves = [await opened(address, b"\x16\x03\x01\x02\x00\x01") for _ in range(6)]
        async with httpx.AsyncClient(verify=trusting, timeout=60) as client:
            answered = await client.post(f"{address}/v1/completions", json={"prompt": "a"})
        assert answered.status_code == 200
        monkeypatch.setattr(connection_bounds, "SECONDS_PER_REQUEST", 0.3)
        halves.append(await opened(address, b"\x16\x03\x01\x02\x00\x01"))
        await ended(halves[-1][0])
        for _, writer in halves:
            writer.close()


async def test_an_idle_connection_is_closed_and_one_that_waits_for_its_answer_is_not(monkeypatch):
    monkeypatch.setattr(connection_bounds, "SECONDS_IDLE", 0.3)
    monkeypatch.setattr(connection_bounds, "SECONDS_PER_REQUEST", 0.6)
    body = b'{"prompt": "hello", "stream": true}'
    head = f"POST /sessions/secret/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with serving(answer()) as (session, address):
        session.gate.clear()
        waiting = await opened(address, head + body)
        await async_until(lambda: session.asked)
        for _ in range(3):  # each lives as long as an idle one may
            idle, writer = await opened(address, WHOLE)
            assert b"404" in await ended(idle)
            writer.close()
        session.gate.set()
        got = await ended(waiting[0])
        assert b"llo" in got
        waiting[1].close()
    assert len(session.read) == 1


async def test_a_connection_serves_one_request_after_the_other():
    async with serving(*[answer()] * 5) as (_, address), httpx.AsyncClient(timeout=60) as client:
        for _ in range(5):
            answered = await client.post(f"{address}/v1/completions", json={"prompt": "a"})
            assert answered.status_code == 200
        reader, writer = await opened(address, WHOLE * 3 + WHOLE.replace(b"Host", b"Connection: close\r\nHost"))
        assert (await ended(reader)).count(b"HTTP/1.1 404") == 4
        writer.close()


async def test_where_all_connections_wait_for_answers_a_new_one_waits_too(monkeypatch):
    monkeypatch.setattr(connection_bounds, "most_connections", lambda: 3)
    async with serving(*[answer()] * 4) as (session, address), httpx.AsyncClient(timeout=60) as client:
        session.gate.clear()
        url = f"{address}/v1/completions"
        asking = [asyncio.create_task(client.post(url, json={"prompt": "a"})) for _ in range(4)]
        await async_until(lambda: len(session.asked) == 3)
        session.gate.set()
        # The answered ones are idle then, and one of them makes room.
        assert [each.status_code for each in await asyncio.gather(*asking)] == [200] * 4


@pytest.mark.parametrize("count", [400, pytest.param(1000, marks=pytest.mark.long)])
def test_with_few_descriptors_strangers_stop_neither_agents_nor_weights(tmp_path, count):
    words = [sys.executable, "-m", half_connections.__name__, str(tmp_path)]
    log = (tmp_path / "log").open("wb")
    with subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log) as process:
        try:
            until((tmp_path / "ports").exists)
            sessions, weights = json.loads((tmp_path / "ports").read_text())
            taken = [
                *half_connections.strangers(sessions, count),
                *half_connections.strangers(weights, count),
            ]
            url = f"http://127.0.0.1:{sessions}"
            with httpx.Client(timeout=PATIENCE) as client:
                offer = client.post(f"{url}/sessions").json()
                body = {"messages": [{"role": "user", "content": "ab"}]}
                asked = client.post(f"{offer['openai_base_url']}/chat/completions", json=body)
                assert asked.status_code == 200
                ended = client.post(f"{url}/sessions/{offer['id']}/end", json={"reward": 1.0})
                assert ended.status_code == 200
            until(lambda: (tmp_path / "loaded").exists() or process.poll() is not None)
            assert "data.json" in json.loads((tmp_path / "loaded").read_text()), (tmp_path / "log").read_text()
            for stranger in taken:
                stranger.close()
        finally:
            process.kill()
            log.close()
    assert "Too many open files" not in (tmp_path / "log").read_text()


def test_the_loop_of_uvloop_serves_as_well():
    """`replay generate` runs on it where it is installed; its transports are no subclass of asyncio's."""
    uvloop = pytest.importorskip("uvloop")

    async def asked() -> int:
        async with serving(answer()) as (_, address), httpx.AsyncClient(timeout=60) as client:
            return (await client.post(f"{address}/v1/completions", json={"prompt": "a"})).status_code

    assert uvloop.run(asked()) == 200


async def test_a_request_that_comes_before_the_answer_to_the_last_one_counts_from_that_answer():
    connection = _Connection(asyncio.Protocol(), on_ready=lambda *_: None, on_lost=lambda *_: None)
    connection.since = -1.0
    connection.note_whole_request()
    connection._has_next = True
    connection.note_answer()
    assert connection.since > 0.0
    connection.limit_time(None)
