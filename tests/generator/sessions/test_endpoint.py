"""The server of sessions: failures, repetitions, clients that hang up, floods and bodies that are too much."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import anthropic
import httpx
import openai
import pytest
from aiohttp import web

from replay_generator.engines import CompletionError
from replay_generator.rollouts.sessions import endpoint
from replay_generator.rollouts.sessions.dialects.chat import Chat
from replay_generator.rollouts.sessions.endpoint import SessionServer
from replay_generator.rollouts.sessions.turns import Answer, Refusal
from tests.certificates import make_certificate
from tests.generator.sessions.fakes import ScriptedSession, answer, of_anthropic, of_openai, serving, until
from tests.generator.sessions.test_session import Drawing, session_of
from tests.kit.clocks import stopped_clock, turns

HELLO: Any = [{"role": "user", "content": "hello"}]
FULL = Refusal("the context is full", code="context_length_exceeded")
ASKS = {
    "chat": ("/v1/chat/completions", {"messages": HELLO}),
    "completions": ("/v1/completions", {"prompt": "hello"}),
    "responses": ("/v1/responses", {"input": "hello"}),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
}
EACH = pytest.mark.parametrize(("path", "body"), ASKS.values(), ids=ASKS)
OF_OPENAI = ("chat", "completions", "responses")


async def ask(kind: str, address: str, **options: Any) -> Any:
    """What the real client returns, which does not try again unless it is told to."""
    stream, retries = options.pop("stream", False), {"max_retries": options.pop("max_retries", 0)}
    body: Any = {"model": "any", **ASKS[kind][1], **options, "stream": stream}
    async with (of_openai if kind in OF_OPENAI else of_anthropic)(address, **retries) as client:
        parts = {"chat": "chat.completions"}
        answered = await attrgetter(parts.get(kind, kind))(client).create(**body)
        return [event async for event in answered] if stream else answered


@pytest.mark.parametrize("kind", ASKS)
async def test_a_failure_is_the_exception_of_its_status_in_the_words_of_the_protocol(kind):
    api: Any = openai if kind in OF_OPENAI else anthropic
    gone = Refusal("the session has ended", status=410)
    async with serving(FULL, gone, RuntimeError("no GPU"), RuntimeError("no GPU")) as (_, address):
        with pytest.raises(api.BadRequestError, match="the context is full") as full:
            await ask(kind, address, stream=True)
        with pytest.raises(api.APIStatusError, match="the session has ended"):
            await ask(kind, address)
        for stream in (False, True):
            with pytest.raises(api.InternalServerError, match="the policy failed with RuntimeError: no GPU"):
                await ask(kind, address, stream=stream)
        with pytest.raises(api.NotFoundError, match="no session is open at this address"):
            await ask(kind, f"{address}x")
        with pytest.raises(api.BadRequestError, match="n 2 is not served"):
            await ask(kind, address, extra_body={"n": 2})
    if kind in OF_OPENAI:
        assert full.value.code == "context_length_exceeded"
        assert full.value.type == "invalid_request_error"
    else:
        assert full.value.body["error"]["message"] == "prompt is too long: the context is full"


async def test_a_path_that_nobody_serves_is_told_which_there_are():
    async with serving() as (_, address):
        with pytest.raises(openai.NotFoundError, match=r"POST /v1/embeddings is not served; there are /v1/chat"):
            async with of_openai(address) as client:
                await client.embeddings.create(model="any", input="x")


@EACH
@pytest.mark.parametrize("before", ["", "/v1", "/v1/v1", "/openai/v1", "//v1", "/v1/"])
@pytest.mark.parametrize("after", ["", "/", "?beta=true", "/?api-version=1"])
async def test_what_a_path_ends_with_decides(path, body, before, after):
    async with serving(answer()) as (session, address), httpx.AsyncClient() as client:
        path = path.removeprefix("/v1")
        answered = await client.post(f"{address}{before}{path}{after}", json=body)
    assert answered.status_code == 200
    assert len(session.read) == 1


async def test_a_path_that_a_hook_adds_waits_in_line_and_its_refusals_are_counted():
    released = asyncio.Event()

    async def work(*_: Any) -> web.StreamResponse:
        await released.wait()
        raise Refusal("no images", field="features")

    session: Any = ScriptedSession()
    server = SessionServer(posted=(("/added", Chat(), work),))

    def sessions() -> Any:
        return json.loads(server.description["sessions"])

    async with server, httpx.AsyncClient() as client:
        asked = asyncio.create_task(client.post(f"{server.open(session)}/added", json={}))
        await until(lambda: sessions()["policy"] == 1)
        released.set()
        answered = await asked
        told = sessions()
    assert answered.status_code == 400
    assert answered.json()["error"]["message"] == "no images"
    assert told["policy"] == 0
    assert told["refused"] == {"400": 1}
    assert [str(refusal) for refusal in session.refusals] == ["no images"]


async def test_a_fault_of_the_engine_fails_a_rollout_that_ends_without_an_error():
    session = session_of(Drawing())
    fault = CompletionError("a log-probability of 7")
    session.fault = fault
    async with SessionServer() as server:
        with pytest.raises(CompletionError) as raised:
            async with server.playing(session):
                pass
        assert json.loads(server.description["sessions"])["open"] == 0
    assert raised.value is fault


async def test_models_and_tokens_are_told_at_all_these_paths():
    async with serving() as (session, address), httpx.AsyncClient() as client:
        for before in ("", "/v1", "/v1/v1"):
            for after in ("", "/"):
                counted = await client.post(f"{address}{before}/messages/count_tokens{after}", json={"messages": HELLO})
                assert counted.json() == {"input_tokens": 42}
                listed = (await client.get(f"{address}{before}/models{after}")).json()
                assert [each["id"] for each in listed["data"]] == ["policy"]
                for name in ("policy", "openai/policy", "claude-x"):
                    card = (await client.get(f"{address}{before}/models/{name}{after}")).json()
                    assert card["id"] == name
                    assert card["object"] == "model"
                    assert card["max_model_len"] == 99
        for path in ("", "/", "/v1", "/v1/responses/resp_1"):
            assert (await client.get(address + path)).status_code == 404
        assert session.refusals == []


async def test_a_client_that_asks_by_a_web_socket_is_told_to_post_and_it_is_no_refusal_of_a_turn():
    asks = {
        "Connection": "Upgrade",
        "Upgrade": "WebSocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "a" * 22,
    }
    async with serving() as (session, address), httpx.AsyncClient() as client:
        for path in ("/v1/responses", "/v1/realtime"):
            answered = await client.get(address + path, headers=asks)
            assert answered.status_code == 426  # of all others Codex tries again, for seven seconds
            assert answered.json()["error"]["message"] == "no path is served by web sockets: send a request by POST"
        assert session.refusals == []


BAD = {
    "no JSON": b"{",
    "no object": b"[]",
    "deep": b"[" * 200_000,
    "deep, but JSON": b'{"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a", "tools": '
    + b"[" * 400
    + b"]" * 400
    + b"}",
    "no UTF-8": b'{"messages": "\xff"}',
    "half a surrogate as bytes": b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}], '
    b'"prompt": "\xed\xa0\x80", "input": "\xed\xa0\x80"}',
    "half a surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}], '
    b'"prompt": "\\ud800", "input": "\\ud800"}',
    "numbers": b'{"messages": 5, "prompt": 5, "input": 5}',
    "no fields": b'{"messages": [{}], "prompt": [{}], "input": [{"role": "assistant"}]}',
    "no texts": b'{"messages": [{"role": "user", "content": 5}], "prompt": [1.5], "input": [{"role": []}]}',
    "tools": b'{"messages": [], "prompt": {}, "input": "x", "tools": [5]}',
}


@EACH
@pytest.mark.parametrize("raw", BAD.values(), ids=BAD)
async def test_a_body_that_is_no_request_is_refused_and_is_no_fault(path, body, raw, caplog):
    async with serving() as (session, address), httpx.AsyncClient() as client:
        answered = await client.post(address + path, content=raw)
        assert answered.status_code == 400
        assert answered.json()["error"]["type"] == "invalid_request_error"
    assert session.asked == []
    assert len(session.refusals) == 1
    assert not caplog.records


@pytest.mark.parametrize("kind", ASKS)
async def test_a_body_that_is_too_large_is_refused_while_others_are_served(kind):
    large = "x" * 10_000_000
    given: dict[str, Any] = {
        "chat": {"messages": [{"role": "user", "content": large}]},
        "completions": {"prompt": large},
    }
    given["responses"], given["messages"] = {"input": large}, given["chat"]
    api: Any = openai if kind in OF_OPENAI else anthropic
    async with serving(*[answer()] * 3) as (session, address):
        heavy = [asyncio.create_task(ask(kind, address, **given[kind])) for _ in range(4)]
        for _ in range(3):
            await ask(kind, address)
        for each in heavy:
            with pytest.raises(api.APIStatusError, match="too large") as refused:
                await each
            assert refused.value.status_code == 413
        assert len(session.asked) == 3


@pytest.mark.parametrize("kind", ASKS)
async def test_a_client_that_tries_again_after_a_failure_is_answered(kind):
    async with serving(RuntimeError("lost"), answer()) as (session, address):
        await ask(kind, address, max_retries=1)
        assert len(session.read) == 1


@EACH
async def test_a_repeated_request_gets_the_first_answer_and_an_equal_one_is_drawn_anew(path, body):
    first, second, third, fourth = (Answer(str(n), str(n), "", (), "stop", None, 1, 1) for n in range(4))
    async with serving(first, second, third, fourth) as (session, address), httpx.AsyncClient() as client:

        async def text(**headers: str) -> str:
            answered = await client.post(address + path, json=body, headers=headers)
            return answered.json()["id"].partition("_")[2] or answered.json()["id"].partition("-")[2]

        assert await text(**{"x-stainless-retry-count": "0"}) == "0"
        assert await text(**{"x-stainless-retry-count": "1"}) == "0"
        assert await text(**{"x-stainless-retry-count": "0"}) == "1"
        assert await text(**{"Idempotency-Key": "a"}) == "2"
        assert await text(**{"Idempotency-Key": "a"}) == "2"
        assert await text(**{"Idempotency-Key": "b"}) == "3"
        assert {each.id for each in session.read} == {"0", "1", "2", "3"}


@EACH
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_has_not_read_its_answer_and_gets_it_when_it_asks_again(
    path, body, stream, caplog
):
    async with serving(answer()) as (session, address), httpx.AsyncClient(timeout=30) as client:
        session.gate.clear()
        body = {**body, "stream": stream}
        asking = asyncio.create_task(client.post(address + path, json=body))
        await until(lambda: session.asked)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        again = asyncio.create_task(client.post(address + path, json=body, headers={"x-stainless-retry-count": "1"}))
        await until(lambda: len(session.asked) == 2)
        assert session.read == []
        session.gate.set()
        assert "llo" in (await again).text
        assert len(session.read) == 1
        assert session.script == []
    assert not caplog.records


async def test_an_answer_that_nobody_takes_is_not_read():
    said = answer("x" * 20_000_000)
    async with serving(said, answer()) as (session, address):
        url = httpx.URL(address)
        _, writer = await asyncio.open_connection(url.host, url.port, limit=1)
        body = b'{"prompt": "hello"}'
        head = f"POST {url.path}/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: not session.script[1:])
        await ask("completions", address)
        writer.transport.abort()
        await until(lambda: session.read == [answer()])


@EACH
async def test_an_upload_that_breaks_off_is_no_fault(path, body, caplog):
    async with serving(answer()) as (session, address):
        url = httpx.URL(address)
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(f"POST {url.path}{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode())
        await writer.drain()
        writer.transport.abort()
        async with httpx.AsyncClient() as client:
            assert (await client.post(address + path, json=body)).status_code == 200
        assert len(session.asked) == 1
    assert not caplog.records


@pytest.mark.parametrize("kind", ASKS)
async def test_a_stream_that_waits_gets_comments_and_then_its_answer_or_an_error(kind, caplog):
    api: Any = openai if kind in OF_OPENAI else anthropic
    path, body = ASKS[kind]
    lines: list[str] = []

    async def read(address: str) -> None:
        lines.clear()
        given = {**body, "stream": True}
        async with (
            httpx.AsyncClient(timeout=None) as client,
            client.stream("POST", address + path, json=given) as stream,
        ):
            async for line in stream.aiter_lines():
                lines.append(line)

    for said in (answer(), RuntimeError("no GPU")):
        async with serving(said, said) as (session, address):
            session.gate.clear()
            with stopped_clock() as go_on:
                raw = asyncio.create_task(read(address))
                real = asyncio.create_task(ask(kind, address, stream=True, timeout=None))
                await until(lambda: len(session.asked) == 2)
                go_on(10)
                await until(lambda: ": waiting" in lines)
                session.gate.set()
                await raw
                await asyncio.wait([real])
            if isinstance(said, Answer):
                assert await real
                assert "H\\u00e4llo" in "".join(lines)
                assert len(session.read) == 2
                continue
            assert "no GPU" in "".join(lines)
            assert not re.search(r"DONE|completed|stop", "".join(lines))
            with pytest.raises(api.APIError, match="the policy failed with RuntimeError: no GPU"):
                await real
            assert session.read == []
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2


@pytest.mark.parametrize("kind", ASKS)
async def test_requests_beyond_those_that_are_answered_at_once_wait_and_others_are_served(kind, monkeypatch):
    monkeypatch.setattr(endpoint, "MOST_WAITING", 2)
    api: Any = openai if kind in OF_OPENAI else anthropic
    calm = ScriptedSession(answer(), id="calm")
    flooded = ScriptedSession(*[answer()] * 35)
    flooded.gate.clear()
    async with SessionServer() as server:
        address = server.open(flooded)  # type: ignore[arg-type]
        flood = [asyncio.create_task(ask(kind, address)) for _ in range(32)]
        await until(lambda: len(flooded.asked) == 32)
        flood += [asyncio.create_task(ask(kind, address)) for _ in range(3)]
        done, _ = await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        (refused,) = done
        error = refused.exception()
        assert isinstance(error, api.RateLimitError)
        assert "32 requests under way, and 2 wait" in str(error)
        assert error.response.headers["Retry-After"] == "1"
        assert await ask(kind, server.open(calm))  # type: ignore[arg-type]
        assert len(flooded.asked) == 32
        flooded.gate.set()
        answered = await asyncio.gather(*(each for each in flood if each is not refused))
        assert len(answered) == 34
        assert await ask(kind, address)


async def test_bodies_that_wait_are_bounded(monkeypatch):
    monkeypatch.setattr(endpoint, "MOST_WAITING_BYTES", 1000)
    session = ScriptedSession(*[answer()] * 33)
    session.gate.clear()
    async with SessionServer() as server, httpx.AsyncClient(timeout=None) as client:
        url = f"{server.open(session)}/v1/completions"  # type: ignore[arg-type]
        flood = [asyncio.create_task(client.post(url, json={"prompt": "a"})) for _ in range(32)]
        await until(lambda: len(session.asked) == 32)
        assert (await client.post(url, json={"prompt": "a" * 1000})).status_code == 429
        flood.append(asyncio.create_task(client.post(url, json={"prompt": "b"})))
        session.gate.set()
        assert {each.status_code for each in await asyncio.gather(*flood)} == {200}


async def hung_up(client: httpx.AsyncClient, url: str, when: Callable[[], object]) -> None:
    """Asks, waits until `when` is true, and hangs up."""
    asking = asyncio.create_task(client.post(url, json={"prompt": "a"}))
    await until(when)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_client_that_hangs_up_leaves_its_place_to_the_next_before_its_turn_is_drawn(monkeypatch):
    monkeypatch.setattr(endpoint, "_MOST", 1)
    session = ScriptedSession(answer(), answer())
    session.gate.clear()
    async with SessionServer() as server, httpx.AsyncClient(timeout=None) as client:
        url = f"{server.open(session)}/v1/completions"  # type: ignore[arg-type]
        await hung_up(client, url, when=lambda: len(session.asked) == 1)
        asking = asyncio.create_task(client.post(url, json={"prompt": "b"}))
        await until(lambda: len(session.asked) == 2)
        session.gate.set()
        assert (await asking).status_code == 200


async def test_turns_for_clients_that_have_hung_up_are_bounded(monkeypatch):
    monkeypatch.setattr(endpoint, "_MOST", 1)
    session = ScriptedSession(*[answer()] * 3)
    session.gate.clear()
    async with SessionServer() as server, httpx.AsyncClient(timeout=None) as client:
        url = f"{server.open(session)}/v1/completions"  # type: ignore[arg-type]
        await hung_up(client, url, when=lambda: len(session.asked) == 1)
        await hung_up(client, url, when=lambda: len(session.asked) == 2)
        asking = asyncio.create_task(client.post(url, json={"prompt": "b"}))
        with stopped_clock() as go_on:
            for _ in range(5):
                go_on(10)
                await turns()
            assert len(session.asked) == 2
        session.gate.set()
        assert (await asking).status_code == 200


async def test_a_client_that_hangs_up_while_it_waits_leaves_the_line(monkeypatch):
    monkeypatch.setattr(endpoint, "_MOST", 1)
    monkeypatch.setattr(endpoint, "MOST_WAITING", 1)
    session = ScriptedSession(answer(), answer())
    session.gate.clear()
    async with SessionServer() as server, httpx.AsyncClient(timeout=None) as client:
        url = f"{server.open(session)}/v1/completions"  # type: ignore[arg-type]
        first = asyncio.create_task(client.post(url, json={"prompt": "a"}))
        await until(lambda: len(session.asked) == 1)
        others = {asyncio.create_task(client.post(url, json={"prompt": "b"})) for _ in range(2)}
        (refused,), (waiting,) = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        assert (await refused).status_code == 429
        waiting.cancel()
        await until(lambda: [each.status for each in session.refusals if each.status == 410])
        last = asyncio.create_task(client.post(url, json={"prompt": "c"}))
        session.gate.set()
        assert (await first).status_code == 200
        assert (await last).status_code == 200


class Held(ScriptedSession):
    """Its answers are read in a thread, as a large request of Responses is; the thread waits until it may go on."""

    def __init__(self, *script: Any) -> None:
        super().__init__(*script, id="held")
        self.reached = threading.Event()
        self.go_on = threading.Event()

    @property
    def answers(self) -> list[Answer]:
        return self._answers

    @answers.setter
    def answers(self, answers: list[Answer]) -> None:
        self._answers = Gate(self, answers)


class Gate(list[Answer]):
    def __init__(self, session: Held, answers: list[Answer]) -> None:
        super().__init__(answers)
        self.session = session

    def __iter__(self) -> Any:
        self.session.reached.set()
        assert self.session.go_on.wait(60)
        return super().__iter__()


async def test_while_a_large_request_is_read_others_are_served():
    held, calm = Held(answer()), ScriptedSession(answer(), id="calm")
    async with SessionServer() as server:
        large = [
            {"type": "item_reference", "id": "msg_x"},
            {"role": "user", "content": "x" * 100_000},
        ]
        waiting = asyncio.create_task(ask("responses", server.open(held), input=large))  # type: ignore[arg-type]
        await until(held.reached.is_set)
        assert await ask("chat", server.open(calm))  # type: ignore[arg-type]
        assert not waiting.done()
        held.go_on.set()
        with pytest.raises(openai.BadRequestError, match="item_reference"):
            await waiting


MANY: dict[str, tuple[str, dict[str, Any]]] = {
    "messages of chat": ("/v1/chat/completions", {"messages": HELLO * 5000}),
    "messages of anthropic": ("/v1/messages", {"messages": HELLO * 5000, "max_tokens": 9}),
    "messages that are counted": ("/v1/messages/count_tokens", {"messages": HELLO * 5000}),
    "blocks that are messages": (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}] * 5000}
            ],
            "max_tokens": 9,
        },
    ),
    "items": ("/v1/responses", {"input": HELLO * 5000}),
    "tools": (
        "/v1/chat/completions",
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}] * 5000},
    ),
    "tools of responses": ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": "f"}] * 5000}),
    "tools of anthropic": ("/v1/messages", {"messages": HELLO, "max_tokens": 9, "tools": [{"name": "f"}] * 5000}),
    "texts of stop": ("/v1/completions", {"prompt": "a", "stop": ["a"] * 5000}),
}


@pytest.mark.parametrize(("path", "body"), MANY.values(), ids=MANY)
async def test_more_than_4096_messages_or_tools_are_refused(path, body):
    async with serving() as (session, address), httpx.AsyncClient(timeout=60) as client:
        answered = await client.post(address + path, json=body)
    assert answered.status_code == 400
    assert "and at most 4096 are served" in answered.json()["error"]["message"]
    assert session.asked == []


VALUES = {
    "empty lists": b'{"messages": [' + b"[]," * 900_000 + b"[]]}",
    "objects": b'{"messages": [' + b'{"":0},' * 300_000 + b"{}]}",
    "numbers": b'{"prompt": [' + b"1," * 900_000 + b"1]}",
    "half of it": b"[" * 900_000,
}


@EACH
@pytest.mark.parametrize("raw", VALUES.values(), ids=VALUES)
async def test_more_values_than_any_request_needs_are_refused_before_they_are_made(path, body, raw):
    async with serving() as (session, address), httpx.AsyncClient(timeout=60) as client:
        answered = await client.post(address + path, content=raw)
    assert answered.status_code == 413
    assert "values, and at most" in answered.json()["error"]["message"]
    assert session.asked == []


async def test_brackets_and_commas_in_a_text_are_no_values():
    text = '[{"a": "\\"},],' * 80_000
    async with serving(answer()) as (session, address):
        await ask("chat", address, messages=[{"role": "user", "content": text}])
    assert session.asked[0].messages[0]["content"] == text


async def test_a_session_that_was_closed_is_served_no_more():
    async with SessionServer() as server:
        address = server.open(session := ScriptedSession(answer()))  # type: ignore[arg-type]
        server.close(session)  # type: ignore[arg-type]
        with pytest.raises(openai.NotFoundError, match="it has ended"):
            await ask("chat", address)


async def test_others_may_add_routes_and_the_server_may_speak_tls(tmp_path):
    async def end(request: web.Request) -> web.Response:
        return web.Response(text=f"ended {request.match_info['id']}")

    certificate = make_certificate(tmp_path, "server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.cert, certificate.key)
    server = SessionServer(ssl_context=context)
    server.app.router.add_post("/sessions/{id}/end", end)
    async with server, httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(certificate.cert))) as client:
        address = server.open(ScriptedSession(answer()))  # type: ignore[arg-type]
        assert re.fullmatch(r"https://127\.0\.0\.1:\d+/sessions/secret", address)
        assert (await client.post(f"{address}/end")).text == "ended secret"
        answered = await client.post(f"{address}/v1/chat/completions", content=json.dumps({"messages": HELLO}))
        assert answered.json()["choices"][0]["message"]["content"] == "Hällo"
