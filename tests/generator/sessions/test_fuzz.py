"""Requests made up by chance, at the address of sessions: each is answered, and none with 500."""

import asyncio
import json
import logging
import os
import random
from typing import Any

import pytest

from replay_generator.rollouts.sessions.endpoint import SessionServer
from replay_generator.rollouts.sessions.parsers import Parsers
from tests.generator.sessions.test_connections import opened
from tests.generator.sessions.test_session import Drawing, session_of

REQUESTS = int(os.environ.get("FUZZED_REQUESTS", "20000"))
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


def request(chance: random.Random, address: str) -> bytes:
    body = json.dumps(value(chance) if chance.random() < 0.3 else sensible(chance)).encode()
    if chance.random() < 0.2:
        at = chance.randrange(len(body) + 1)
        body = body[:at] + chance.randbytes(chance.randrange(4)) + body[at + chance.randrange(3) :]
    path = f"{address}/v1/{chance.choice(PATHS)}".encode()
    if chance.random() < 0.05:
        path += chance.choice([b"%ff", b"\xff", b"?\xff=%", b"/../..", b"%00"])
    lines = [chance.choice([b"POST"] * 9 + [b"GET"]) + b" " + path + b" HTTP/1.1", b"Host: x", b"Connection: close"]
    lines += [chance.choice(HEADERS) for _ in range(chance.randrange(2) * chance.randrange(2))]
    return b"\r\n".join([*lines, f"Content-Length: {len(body)}".encode(), b"", body])


@pytest.mark.long
async def test_requests_made_up_by_chance_are_answered_and_none_is_a_fault(caplog, monkeypatch):
    monkeypatch.setattr("replay_protos.connection_bounds.SECONDS_PER_REQUEST", 2.0)
    statuses: dict[int, int] = {}
    async with SessionServer() as server:
        for number in range(REQUESTS):
            if number % 500 == 0:
                engine = Drawing()
                session = session_of(engine, parsers=Parsers("hermes"))
                address = server.open(session).removeprefix(server.base_url)
            sent = request(random.Random(number), address)
            reader, writer = await opened(server.base_url, sent)
            got = b""
            try:
                async with asyncio.timeout(60):
                    got = await reader.read()
            except ConnectionError:
                pass
            writer.close()
            status = int(got.split(b" ", 2)[1]) if got else 0
            statuses[status] = statuses.get(status, 0) + 1
            assert status < 500, (number, sent, got)
    assert statuses[200] > REQUESTS / 50
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
