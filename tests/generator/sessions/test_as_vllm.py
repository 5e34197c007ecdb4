"""What the policy reads in a session are the tokens that `vllm serve` makes of the same request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from replay_generator.rollouts.sessions.dialects.chat import Chat
from replay_generator.rollouts.sessions.parsers import Parsers
from tests.generator.sessions.test_session import Drawing, chat_tokenizer, session_of

TEMPLATE = (
    "{% for tool in tools or [] %}<s>tool {{ tool | tojson }}<e>\n{% endfor %}"
    "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "[{{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{% endfor %}<e>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
MODEL: Any = SimpleNamespace(
    multimodal_config=None, enable_prompt_embeds=False, is_multimodal_model=False, hf_config=SimpleNamespace()
)


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", **fields}}


def called(arguments: str, **fields: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **fields}


USER = {"role": "user", "content": "2+3?"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "5"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "tools",
    [
        [],
        [function()],
        [function(description="Adds.", parameters=SCHEMA)],
        [function(parameters={}, strict=True)],
        [function(description="", strict=False), function(name="other", description=None)],
    ],
    ids=["none", "a name alone", "described", "strict", "two"],
)
@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "5"}, USER],
        [{"role": "developer", "content": "Be brief."}, USER],
        [USER, called('{"b": 3.0, "a": [2, null, "x"]}', content=None), RESULT],
        [USER, called("", content="Let me see. "), RESULT, USER],
        [{"role": "user", "content": [{"type": "text", "text": "2+3?"}]}],
    ],
    ids=["a question", "a conversation", "a developer", "a call", "a call without arguments", "a part"],
)
async def test_the_policy_reads_what_vllm_serve_makes_of_the_request(tools, messages):
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import safe_apply_chat_template

    engine = Drawing(tokenizer=chat_tokenizer(TEMPLATE))
    session = session_of(engine, parsers=Parsers("hermes"))
    body = {"messages": messages, "tools": tools} if tools else {"messages": messages}
    await session.ask(Chat().ask(body), b"")
    ((read, _),) = engine.drawn

    request = ChatCompletionRequest.model_validate({"model": "any", **body})
    conversation, _, _ = parse_chat_messages(request.messages, MODEL, content_format="string")
    told = [tool.model_dump() for tool in request.tools or ()] or None
    by_vllm = safe_apply_chat_template(
        MODEL, engine.tokenizer, conversation, tools=told, chat_template=TEMPLATE, add_generation_prompt=True
    )
    assert read == by_vllm
