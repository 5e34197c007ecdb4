"""What strangers and odd clients send to the address of sessions: headers, lengths, values; and faults of engines."""

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from replay_generator import GeneratorConfig
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.rollouts.sessions import remote
from replay_generator.rollouts.sessions.agents import SessionHook
from replay_generator.rollouts.sessions.endpoint import SessionServer
from replay_generator.rollouts.sessions.parsers import Parsers
from replay_generator.testing import EOS
from tests.generator.sessions.fakes import answer, of_anthropic, of_openai, serving
from tests.generator.sessions.test_endpoint import ASKS, EACH
from tests.generator.sessions.test_remote import running
from tests.generator.sessions.test_session import Drawing, session_of, user
from tests.kit.clients import RecordingClient
from tests.kit.generators import generate


async def sent(url: str, data: bytes) -> tuple[int, bytes]:
    """The status and the whole answer to these bytes."""
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(data)
    got = await reader.read()
    writer.close()
    return int(got.split(b" ", 2)[1]), got


def post(path: str, *headers: bytes, body: bytes = b"") -> bytes:
    """The bytes of a request. Its connection ends with the answer."""
    lines = [f"POST {path} HTTP/1.1".encode(), b"Connection: close", *headers]
    if not any(line.lower().startswith((b"content-length", b"transfer-encoding")) for line in lines):
        lines.append(f"Content-Length: {len(body)}".encode())
    return b"\r\n".join([*lines, b"", body])


HOSTS = {
    "port": b"Host: x:99999",
    "port 0": b"Host: x:0",
    "port of letters": b"Host: x:http",
    "port below 0": b"Host: x:-1",
    "port of many digits": b"Host: x:" + b"9" * 4000,
    "empty": b"Host:",
    "only a port": b"Host: :80",
    "no UTF-8": b"Host: \xff\xfe",
    "no ASCII": "Host: münchen:80".encode(),
    "a space": b"Host: a b",
    "a path": b"Host: a/b",
    "a query": b"Host: a?b",
    "a user": b"Host: a@b",
    "half an address": b"Host: [::1",
    "no address": b"Host: [x]:80",
    "none": b"X-No-Host: x",
}


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
async def test_an_odd_host_is_refused_before_a_rollout_is_taken(host, monkeypatch, caplog):
    monkeypatch.setattr(remote, "PATIENCE", 0.05)
    async with running(group_size=1) as run:
        status, got = await sent(run.url, post("/sessions", host))
        assert status == 400
        assert b"Traceback" not in got
        offer = await run.taken()
        assert await run.ask(offer) == 200
        await run.end(offer, reward=1.0)
        await run.group()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("host", ["example.org", "example.org:8100", "[::1]:8100", "my_host.lan", "10.0.0.1:80"])
async def test_an_offer_has_the_address_by_which_its_client_came(host):
    async with running(group_size=1) as run:
        _, got = await sent(run.url, post("/sessions", f"Host: {host}".encode()))
        offer = json.loads(got.partition(b"\r\n\r\n")[2])
        assert offer["address"] == f"http://{host}/sessions/{offer['id']}"
        here = {**offer, "openai_base_url": f"{run.url}/sessions/{offer['id']}/v1"}
        assert await run.ask(here) == 200
        await run.end(offer, reward=1.0)
        await run.group()


AUTHORIZATIONS = {
    "no UTF-8": b"Authorization: Bearer \xff\xfe",
    "only bytes": b"Authorization: \x80",
    "no ASCII": "Authorization: Bearer ü".encode(),
    "another way": b"Authorization: Basic dTpw",
    "no token": b"Authorization: Bearer ",
    "empty": b"Authorization:",
    "long": b"Authorization: Bearer " + b"a" * 8000,
    "none": b"X-Nothing: x",
}


@pytest.mark.parametrize("header", AUTHORIZATIONS.values(), ids=AUTHORIZATIONS)
async def test_an_odd_token_is_refused_as_a_wrong_one(header, tmp_path, caplog):
    token = tmp_path / "token"
    token.write_text("one-token-of-the-run\n")
    async with running(group_size=1, sessions_token_file=token, token="one-token-of-the-run") as run:
        for path in ("/sessions", "/sessions/x/end"):
            status, _ = await sent(run.url, post(path, b"Host: x", header))
            assert status == 401, path
        offer = await run.taken()
        await run.ask(offer)
        await run.end(offer, reward=1.0)
        await run.group()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


BODIES = {
    "length below 0": (b"Content-Length: -1", b""),
    "length of letters": (b"Content-Length: many", b""),
    "length with a sign": (b"Content-Length: +2", b"{}"),
    "length of bytes": (b"Content-Length: \xff", b"{}"),
    "length beyond all": (b"Content-Length: " + b"9" * 40, b"{}"),
    "no chunks": (b"Transfer-Encoding: chunked", b"no chunk\r\n\r\n"),
    "chunk below 0": (b"Transfer-Encoding: chunked", b"-1\r\n\r\n"),
    "another coding": (b"Transfer-Encoding: \xff", b"{}"),
    "no gzip": (b"Content-Encoding: gzip\r\nContent-Length: 2", b"{}"),
    "no deflate": (b"Content-Encoding: deflate\r\nContent-Length: 2", b"{}"),
    "key of bytes": (b"Idempotency-Key: \xff\r\nContent-Length: 2", b"{}"),
    "repeated by bytes": (b"x-stainless-retry-count: \xff\r\nContent-Length: 2", b"{}"),
}


@pytest.mark.parametrize(("header", "body"), BODIES.values(), ids=BODIES)
async def test_a_body_that_is_not_what_its_headers_say_is_refused(header, body, caplog):
    async with running(group_size=1) as run:
        offer = await run.taken()
        for path in [*(path for path, _ in ASKS.values()), "/v1/messages/count_tokens", "/end"]:
            status, _ = await sent(run.url, post(f"/sessions/{offer['id']}{path}", b"Host: x", header, body=body))
            assert status == 400, path
        assert await run.ask(offer) == 200
        await run.end(offer, reward=1.0)
        await run.group()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@EACH
async def test_a_key_of_any_bytes_names_a_request(path, body):
    raw = json.dumps(body).encode()
    async with serving(answer()) as (session, address):
        where = httpx.URL(address).path + path
        for _ in range(2):
            status, _ = await sent(address, post(where, b"Host: x", b"Idempotency-Key: \xff\xfe", body=raw))
            assert status == 200
    assert session.script == []


ENDS = {
    "half a surrogate": b'{"reward": "\\ud800"}',
    "a name of half a surrogate": b'{"\\ud800": 1}',
    "a metric of half a surrogate": b'{"reward": 1, "metrics": {"\\ud800": "x"}}',
    "deep": b"[" * 200_000,
    "deep in an object": b'{"reward": ' + b"[" * 100_000,
    "digits": b'{"reward": ' + b"9" * 5000 + b"}",
    "a large number": b'{"reward": 1' + b"0" * 400 + b"}",
    "no UTF-8": b'{"reward": "\xff"}',
    "arguments of Python": b'{"self": 1, "reward": 1}',
}


@pytest.mark.parametrize("body", ENDS.values(), ids=ENDS)
async def test_an_odd_end_is_refused_in_a_sentence_and_the_rollout_goes_on(body, caplog):
    async with running(group_size=1) as run:
        offer = await run.taken()
        await run.ask(offer)
        status, _ = await sent(run.url, post(f"/sessions/{offer['id']}/end", b"Host: x", body=body))
        assert status == 400
        assert (await run.end(offer, reward=1.0))[0] == 200
        assert (await run.group()).rewards.tolist() == [1.0]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_failure_with_half_a_surrogate_is_kept_with_the_group():
    async with running(group_size=2, min_rollouts=1) as run:
        first, second = await run.taken(), await run.taken()
        for offer in (first, second):
            await run.ask(offer)
        await run.end(first, failed="its browser is \ud800 gone")
        await run.end(second, reward=1.0)
        group = await run.group()
    assert "its browser is \ufffd gone" in group.meta["failures"][0]


# ------------------------------------------------------------------------------------------------ values of a request

CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
VALUES: dict[str, tuple[str, dict[str, Any]]] = {
    "id of a call": (
        "/v1/chat/completions",
        {"messages": [user("a"), {"role": "assistant", "content": "", "tool_calls": [{**CALLED, "id": [1]}] * 2}]},
    ),
    "name of a call": (
        "/v1/chat/completions",
        {
            "messages": [
                user("a"),
                {"role": "assistant", "content": "", "tool_calls": [{**CALLED, "function": {"name": {}}}]},
            ]
        },
    ),
    "id of a result": (
        "/v1/chat/completions",
        {"messages": [user("a"), {"role": "tool", "tool_call_id": ["c"], "content": "x"}]},
    ),
    "thoughts": (
        "/v1/chat/completions",
        {"messages": [user("a"), {"role": "assistant", "content": "b", "reasoning_content": [5]}, user("c")]},
    ),
    "name of a tool": (
        "/v1/chat/completions",
        {"messages": [user("a")], "tools": [{"type": "function", "function": {"name": 5}}]},
    ),
    "description of a tool": (
        "/v1/chat/completions",
        {"messages": [user("a")], "tools": [{"type": "function", "function": {"name": "f", "description": [5]}}]},
    ),
    "parameters of a tool": (
        "/v1/responses",
        {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": "none"}]},
    ),
    "id of a block": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": {}, "content": "x"}]}]},
    ),
    "id of an output": (
        "/v1/responses",
        {"input": [{"type": "function_call_output", "call_id": None, "output": "x"}]},
    ),
    "token": ("/v1/completions", {"prompt": [10**30]}),
    "token below 0": ("/v1/completions", {"prompt": [-1]}),
}


@pytest.mark.parametrize(("path", "body"), VALUES.values(), ids=VALUES)
async def test_a_value_of_another_kind_is_refused_and_is_no_fault(path, body, caplog):
    session = session_of(Drawing(), parsers=Parsers("hermes"))
    async with SessionServer() as server, httpx.AsyncClient() as client:
        answered = await client.post(server.open(session) + path, json=body)
        assert answered.status_code == 400, answered.text
        assert answered.json()["error"]["message"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# ------------------------------------------------------------------------------------------------ faults of the engine


class Breaking(Drawing):
    """Returns a log-probability that no policy has."""

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, *_: Any) -> list[Completion]:
        self.drawn += [([], Completion([EOS], [7.0], "", "stop", [0]))] * n
        return [each for _, each in self.drawn[-n:]]


@pytest.mark.parametrize("of", [of_openai, of_anthropic], ids=["openai", "anthropic"])
@pytest.mark.parametrize("swallows", [False, True])
async def test_a_completion_that_breaks_the_rules_is_asked_for_once_and_fails_the_rollout_with_its_sentence(
    of, swallows, caplog
):
    engine = Breaking()
    statuses = []

    async def agent(task: Any, address: Any) -> float:
        async with of(address.url, max_retries=5) as client:
            for _ in range(2):
                try:
                    if of is of_openai:
                        await client.chat.completions.create(model="any", messages=[user("a")])
                    else:
                        await client.messages.create(model="any", max_tokens=9, messages=[user("a")])
                except Exception as error:
                    statuses.append(error.status_code)  # type: ignore[attr-defined]
                    if not swallows:
                        raise
        return 1.0

    hook = SessionHook(agent, GeneratorConfig(), needs_reward=True)
    stats = await generate(RecordingClient(), engine, hook, reward=None, group_size=4)
    assert stats["groups_skipped"] == 1
    assert "log-probability 7: that of a drawn token is finite" in caplog.text
    assert set(statuses) == {422}
    assert len(engine.drawn) == 4
