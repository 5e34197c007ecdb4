"""A policy that writes calls that are none: its agent is answered, tells it so, and each draw is trained on."""

from __future__ import annotations

import httpx
import pytest

from replay_generator.engines import SamplingConfig
from replay_generator.rollouts.sessions.endpoint import SessionServer
from replay_generator.rollouts.sessions.parsers import Parsers
from tests.generator.sessions.talks import PROTOCOLS, talking
from tests.generator.sessions.test_session import Drawing, assert_drawn, session_of, user, words

DEEP = '{"a": ' + "[" * 3000


def hermes(arguments: str) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'


SLIPS = {
    "cut": '{"a": 1',
    "no quotes": "{'a': 1}",
    "a list": "[1]",
    "null": "null",
    "a text": '"a"',
    "a number": "5",
    "NaN": '{"a": NaN}',
    "infinite": '{"a": 1e999}',
    "half a surrogate": '{"a": "\\ud800"}',
    "deep": DEEP,
    "deep and closed": DEEP + "]" * 3000 + "}",
    "deep, but JSON": '{"a": ' + "[" * 300 + "]" * 300 + "}",
    "a long number": '{"a": ' + "1" * 5000 + "}",
    "nothing": "",
    "one of two": '{"a": 1}}</tool_call><tool_call>{"name": "add", "arguments": [1]',
    "no name": '{}, "name": 5',
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("parser", ["hermes", "mistral", "granite-20b-fc", "internlm"])
async def test_a_slip_of_the_policy_is_answered_and_the_conversation_goes_on_in_its_sequence(parser, protocol):
    for number, (name, arguments) in enumerate(SLIPS.items()):
        wrote = {
            "hermes": hermes(arguments),
            "mistral": f'[TOOL_CALLS][{{"name": "add", "arguments": {arguments}}}]',
            "granite-20b-fc": f'<function_call>{{"name": "add", "arguments": {arguments}}}',
            "internlm": f'<|action_start|><|plugin|>{{"name": "add", "parameters": {arguments}}}<|action_end|>',
        }[parser]
        engine = Drawing(says=[wrote, "sorry", "done"], max_length=100_000)
        engine.tokenizer.add_tokens(["[TOOL_CALLS]"])
        session = session_of(engine, parsers=Parsers(parser), sampling=SamplingConfig(max_tokens=20_000))
        async with talking(session, protocol, ["add"], stream=bool(number % 2)) as talk:
            talk.user("go")
            await talk.ask()
            if not talk.calls:
                assert talk.reason in ("stop", "completed", "end_turn"), (name, talk.reason)
                talk.user("that was no call")
            else:
                talk.results([(id, "that was no call") for id, _ in talk.calls])
            await talk.ask()
            assert talk.text == "sorry", name
            talk.user("go on")
            await talk.ask()
        sequences = session.rollout(1.0).sequences
        assert len(sequences) == 1, name
        assert_drawn(engine, sequences, [each for _, each in engine.drawn])


@pytest.mark.parametrize("protocol", ["chat", "responses"])
async def test_a_new_sequence_reads_a_slip_as_the_text_that_the_policy_wrote(protocol):
    wrote = hermes("[1]")
    engine = Drawing(says=[wrote, "sorry"])
    session = session_of(engine, parsers=Parsers("hermes"))
    async with talking(session, protocol, ["add"]) as talk:
        talk.user("go")
        await talk.ask()
        ((id, arguments),) = talk.calls
        assert arguments == "[1]"
        talk.history[0] = {"role": "user", "content": "another"}
        talk.results([(id, "a list is none")])
        await talk.ask()
    read, _ = engine.drawn[1]
    assert wrote in words(engine, read)
    assert len(session.rollout(1.0).sequences) == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("odd", [{"stream_options": [1]}, {"stream_options": 5}])
async def test_what_cannot_be_written_is_refused_before_it_is_drawn(path, odd):
    engine = Drawing()
    session = session_of(engine)
    body = {"messages": [user("a")], "input": "a", "max_tokens": 5, "stream": True, **odd}
    async with SessionServer() as server, httpx.AsyncClient() as client:
        answered = await client.post(server.open(session) + path, json=body)
    if path == "/v1/chat/completions":
        assert answered.status_code == 400
        assert engine.drawn == []
    else:
        assert answered.status_code == 200
