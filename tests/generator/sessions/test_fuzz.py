"""Requests made up by chance, at the address of sessions: each is answered, and none with 500."""

import asyncio
import json
import logging
import os
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from replay_generator.engines import Completion
from replay_generator.rollouts.sessions import endpoint, remote
from replay_generator.rollouts.sessions.endpoint import SessionServer
from replay_generator.rollouts.sessions.parsers import Parsers
from tests.generator.sessions.test_connections import opened
from tests.generator.sessions.test_remote import running
from tests.generator.sessions.test_session import Drawing, session_of

REQUESTS = int(os.environ.get("FUZZED_REQUESTS", "20000"))
OFFER_SECONDS = 300.0
TOKEN = "the-token-of-the-run"
TEXTS = [
    "",
    "a",
    "ab c",
    "user",
    "assistant",
    "tool",
    "system",
    "function",
    "text",
    "\ud800",
    "\x00",
    "☃",
    "x" * 300,
    "<s>",
]
NUMBERS = [0, 1, -1, 2, 1e308, -0.0, 10**30, 2**31, 0.5]
NAMES = [
    *("messages", "role", "content", "type", "text", "tool_calls"),
    *("id", "function", "name", "arguments", "tool_call_id", "tools"),
    *("parameters", "stop", "prompt", "input", "output", "call_id"),
    *("max_tokens", "temperature", "stream", "n", "logprobs", "system"),
    *("tool_use", "tool_result", "tool_use_id", "thinking", "reasoning_content", "tool_choice"),
    *("instructions", "include", "stream_options", "description", "model"),
]
PATHS = ["chat/completions", "completions", "responses", "messages", "messages/count_tokens", "models", "models/x", "x"]
HEADERS = [
    b"Idempotency-Key: \xff",
    b"x-stainless-retry-count: 1",
    b"Authorization: \xfe",
    b"Content-Encoding: gzip",
    b"Content-Type: \xff/\xff",
    b"Expect: 100-continue",
    b"Accept: \x80",
    b"Transfer-Encoding: chunked",
    b"Content-Length: -5",
    b"Range: bytes=9-",
    b"Upgrade: websocket\r\nConnection: upgrade",
    b"X: " + b"y" * 9000,
]


def value(chance: random.Random, depth: int = 4) -> Any:
    kind = chance.randrange(8 if depth else 5)
    if kind < 2:
        return chance.choice(TEXTS)
    if kind == 2:
        return chance.choice(NUMBERS)
    if kind == 3:
        return chance.choice([None, True, False])
    if kind == 4:
        return chance.choice([[], {}])
    if kind == 5:
        return [value(chance, depth - 1) for _ in range(chance.randrange(4))]
    return {chance.choice(NAMES): value(chance, depth - 1) for _ in range(chance.randrange(5))}


def sensible(chance: random.Random) -> dict[str, Any]:
    """A request that most paths can read, with a part or two that is made up."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": "a", "tool_calls": [call]}
    messages: list[Any] = [
        {"role": "user", "content": "a"},
        said,
        {"role": "tool", "tool_call_id": "c", "content": "b"},
    ]
    tool = {"type": "function", "name": "f", "function": {"name": "f", "parameters": {}}}
    body: dict[str, Any] = {"messages": messages[: chance.randrange(4)], "prompt": "ab", "input": "ab", "tools": [tool]}
    for _ in range(chance.randrange(3)):
        holders = [body, *messages, call, call["function"], tool, tool["function"]]
        holder = chance.choice([each for each in holders if isinstance(each, dict)])
        holder[chance.choice([*holder, *NAMES])] = value(chance)
    return body


def end(chance: random.Random) -> dict[str, Any]:
    """How a rollout ended, with a part that may be made up."""
    said: dict[str, Any] = {"reward": 1.0, "metrics": {"steps": 1}}
    if chance.random() < 0.2:
        said = {"failed": "why"}
    if chance.random() < 0.5:
        said[chance.choice(["reward", "metrics", "failed", "x"])] = value(chance)
    return said


def raw_request(chance: random.Random, path: bytes, valid_body: Any, *fixed: bytes) -> bytes:
    """The bytes of a request, with parts that are made up. `fixed`: headers that it has."""
    body = json.dumps(value(chance) if chance.random() < 0.3 else valid_body).encode()
    if chance.random() < 0.2:
        at = chance.randrange(len(body) + 1)
        body = body[:at] + chance.randbytes(chance.randrange(4)) + body[at + chance.randrange(3) :]
    if chance.random() < 0.05:
        path += chance.choice([b"%ff", b"\xff", b"?\xff=%", b"/../..", b"%00"])
    lines = [
        chance.choice([b"POST"] * 9 + [b"GET"]) + b" " + path + b" HTTP/1.1",
        b"Host: x",
        b"Connection: close",
        *fixed,
    ]
    lines += [chance.choice(HEADERS) for _ in range(chance.randrange(2) * chance.randrange(2))]
    return b"\r\n".join([*lines, f"Content-Length: {len(body)}".encode(), b"", body])


def request(chance: random.Random, address: str) -> bytes:
    """A request of an agent to a session."""
    return raw_request(chance, f"{address}/v1/{chance.choice(PATHS)}".encode(), sensible(chance))


def request_of_rollouts(chance: random.Random, session: str) -> bytes:
    """A request of an agent elsewhere: it takes a rollout, or ends this session. Some have no token, or another."""
    token = chance.choice([b"Bearer " + TOKEN.encode()] * 3 + [b"Bearer another", b""])
    path = b"/sessions" if chance.random() < 0.3 else f"/sessions/{session}/end".encode()
    return raw_request(chance, path, end(chance), b"Authorization: " + token)


def statuses_of(got: bytes) -> list[int]:
    """The statuses of an answer in their order: interim ones (1xx), and the final one."""
    statuses = []
    while got:
        status = int(got.split(b" ", 2)[1])
        statuses.append(status)
        if status // 100 != 1 or status == 101:
            break
        got = got.partition(b"\r\n\r\n")[2]
    return statuses


async def answered(url: str, sent: bytes) -> tuple[int, bytes]:
    """The final status (0: the connection ended without one), and all that came."""
    reader, writer = await opened(url, sent)
    got = b""
    try:
        async with asyncio.timeout(60):
            got = await reader.read()
    except ConnectionError:
        pass
    writer.close()
    statuses = statuses_of(got)
    final = statuses[-1] if statuses else 0
    return (0 if final == 100 else final), got


class Faulty(Drawing):
    """Returns a completion that no policy can have drawn."""

    def _one(self, prompt_ids: list[int]) -> Completion:
        return replace(super()._one(prompt_ids), logprobs=[1.0])


def test_the_status_after_an_interim_one_is_the_status_of_the_answer():
    got = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 500 Internal Server Error\r\n\r\n"
    assert statuses_of(got) == [100, 500]
    assert statuses_of(b"HTTP/1.1 101 Switching Protocols\r\n\r\nHTTP/1.1") == [101]
    assert statuses_of(b"") == []


@pytest.mark.long
async def test_requests_made_up_by_chance_are_answered_and_none_is_a_fault(caplog, monkeypatch):
    monkeypatch.setattr("replay_protos.connection_bounds.SECONDS_PER_REQUEST", 2.0)
    monkeypatch.setattr(endpoint, "_MOST", 1)
    monkeypatch.setattr(endpoint, "MOST_WAITING", 0)
    statuses: Counter[int] = Counter()
    async with SessionServer(largest=1000) as server:
        for number in range(REQUESTS):
            if number % 500 == 0:
                session = session_of(Drawing(), parsers=Parsers("hermes"))
                ended = session_of(Drawing(), parsers=Parsers("hermes"))
                await ended.close()
                faulty = session_of(Faulty(), parsers=Parsers("hermes"))
                busy_engine = Drawing(holds=asyncio.Event())
                busy = session_of(busy_engine, parsers=Parsers("hermes"))
                addresses = [server.open(each).removeprefix(server.base_url) for each in (session, ended, faulty, busy)]
                first = f"POST {addresses[3]}/v1/completions HTTP/1.1\r\nHost: x\r\n".encode()
                waiting = await opened(server.base_url, first + b'Content-Length: 15\r\n\r\n{"prompt": "a"}')
            chance = random.Random(number)
            address = chance.choices(addresses, weights=[17, 1, 1, 1])[0]
            sent = request(chance, address)
            status, got = await answered(server.base_url, sent)
            statuses[status] += 1
            assert status < 500, (number, sent, got)
            if number % 500 == 499:
                busy_engine.holds.set()
                waiting[1].close()
    print(sorted(statuses.items()))
    assert statuses[200] > REQUESTS / 50
    for status in (410, 413, 422, 429):
        assert statuses[status], status
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def offered(run) -> dict[str, Any]:
    """A rollout that waits for an agent. On a busy machine the next one may take a while to begin."""
    async with asyncio.timeout(OFFER_SECONDS):
        while True:
            status, offer = await run.post("/sessions")
            if status == 200:
                return offer
            assert status == 503, (status, offer)


@pytest.mark.long
async def test_requests_for_rollouts_made_up_by_chance_are_answered_and_none_is_a_fault(caplog, monkeypatch, tmp_path):
    monkeypatch.setattr("replay_protos.connection_bounds.SECONDS_PER_REQUEST", 2.0)
    monkeypatch.setattr(remote, "PATIENCE", 0.05)
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    statuses: Counter[int] = Counter()
    session = "none"
    settings = {"max_groups": None, "max_concurrent_groups": 4, "sessions_token_file": token_file, "token": TOKEN}
    async with running(group_size=1, **settings) as run:
        for number in range(REQUESTS // 10):
            if number % 5 == 0:
                if session != "none":  # a rollout that no request has ended would hold its group for ever
                    await run.post(f"/sessions/{session}/end", {"failed": "left"})
                offer = await offered(run)
                session = offer["id"]
                assert await run.ask(offer) == 200
            sent = request_of_rollouts(random.Random(number), session)
            status, got = await answered(run.url, sent)
            statuses[status] += 1
            assert status < 500 or (status == 503 and b"no rollout waits" in got), (number, sent, got)
            if status == 200 and sent.startswith(
                b"POST /sessions "
            ):  # nobody plays it: it would hold its group for ever
                taken = json.loads(got.rpartition(b"\r\n\r\n")[2])  # behind an interim answer, too
                await run.post(f"/sessions/{taken['id']}/end", {"failed": "nobody plays it"})
    print(sorted(statuses.items()))
    assert statuses[200] > REQUESTS / 500
    for status in (400, 401, 404):
        assert statuses[status], status
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
