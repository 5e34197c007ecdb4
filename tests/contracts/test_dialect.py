"""What every dialect promises: what the clients of OpenAI and Anthropic read, and what their requests mean."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types import Message, RawMessageStreamEvent
from openai import LengthFinishReasonError, OpenAI, pydantic_function_tool
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from replay_generator import notices
from replay_generator.rollouts.sessions.dialects.chat import Chat, Completions
from replay_generator.rollouts.sessions.dialects.messages import Messages
from replay_generator.rollouts.sessions.dialects.responses import Responses
from replay_generator.rollouts.sessions.turns import Answer, Refusal
from tests.generator.sessions.fakes import ARGUMENTS, CALL, answer, of_anthropic, of_openai, serving
from tests.kit.golden import error_of, sections

HELLO: Any = [{"role": "user", "content": "hello"}]
CHAT: Any = {"model": "any", "messages": HELLO}
ITEMS: Any = {"model": "any", "input": "hello"}
BLOCKS: Any = {**CHAT, "max_tokens": 9}
BODIES = {Chat: CHAT, Completions: {"prompt": "hello"}, Responses: ITEMS, Messages: BLOCKS}
ANSWERS = {
    "text": answer(),
    "nothing": answer(""),
    "calls": answer("", [CALL, replace(CALL, id="call2")]),
    "all": answer("So:", [CALL], reasoning="hm"),
    "stop": answer(stopped_by="END"),
    "cut": replace(answer(), finish_reason="length"),
}


class Add(BaseModel):
    a: int
    b: list[Any]


ADD = Add.model_json_schema()

# ------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("said", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize(
    ("dialect", "whole", "event"),
    [
        (Chat, ChatCompletion, ChatCompletionChunk),
        (Completions, Completion, Completion),
        (Responses, Response, ResponseStreamEvent),
        (Messages, Message, RawMessageStreamEvent),
    ],
    ids=["chat", "completions", "responses", "messages"],
)
def test_bodies_and_events_have_the_fields_that_the_types_of_the_clients_require(dialect, whole, event, said):
    body = {**BODIES[dialect], "stream_options": {"include_usage": True}}
    TypeAdapter(whole).validate_json(json.dumps(dialect().answer(said, body)))
    events = [each for each in dialect().events(said, body) if each != "[DONE]"]
    assert events
    for each in events:
        TypeAdapter(event).validate_json(json.dumps(each))


@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        (Chat, "dialects/chat.txt"),
        (Completions, "dialects/completions.txt"),
        (Responses, "dialects/responses.txt"),
        (Messages, "dialects/messages.txt"),
    ],
)
def test_an_answer_is_a_body_and_as_a_stream_events(dialect, name, golden):
    """Each answer: its body, then its events, one a line. The time of the answer is 0."""
    texts = {}
    for answer_name, said in ANSWERS.items():
        body = {**BODIES[dialect], "stream_options": {"include_usage": True}}
        whole = dialect().answer(said, body)
        lines = [json.dumps(each, ensure_ascii=False) for each in (whole, *dialect().events(said, body))]
        texts[answer_name] = re.sub(r'"(created|created_at)": \d+', r'"\1": 0', "\n".join(lines))
    golden(name, sections(texts))


@pytest.mark.parametrize("said", ANSWERS.values(), ids=ANSWERS)
async def test_the_chat_of_openai_reads_an_answer_at_once_as_a_stream_and_by_its_helper(said):
    async with serving(said, said, said) as (session, address), of_openai(address) as client:
        whole = await client.chat.completions.create(**CHAT)
        with pytest.raises(LengthFinishReasonError) if said is ANSWERS["cut"] else nullcontext():
            async with client.chat.completions.stream(**CHAT, stream_options={"include_usage": True}) as stream:
                streamed = await stream.get_final_completion()
        text = ""
        async for chunk in await client.chat.completions.create(**CHAT, stream=True):
            text += chunk.choices[0].delta.content or ""
        assert session.read == [said] * 3
    assert text == said.text
    reason = {"length": "length"}.get(said.finish_reason, "tool_calls" if said.calls else "stop")
    for completion in (whole, whole if said is ANSWERS["cut"] else streamed):
        (choice,) = completion.choices
        assert choice.finish_reason == reason
        assert (choice.message.content or "") == said.text
        assert getattr(choice.message, "reasoning_content", "") == said.reasoning
        calls = choice.message.tool_calls or []
        assert [(c.id, c.function.name, c.function.arguments) for c in calls] == triples(said)
        assert completion.usage.total_tokens == 10
    assert whole.model == "any"
    assert whole.id == "chatcmpl-a1"


@pytest.mark.parametrize("said", ANSWERS.values(), ids=ANSWERS)
async def test_the_responses_of_openai_read_an_answer_at_once_as_a_stream_and_by_its_helper(said):
    async with serving(said, said, said) as (session, address), of_openai(address) as client:
        whole = await client.responses.create(**ITEMS)
        async for event in await client.responses.create(**ITEMS, stream=True):
            last = event
        async with client.responses.stream(**ITEMS) as stream:
            texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            if said.finish_reason == "stop":
                assert (await stream.get_final_response()).output_text == said.text
        assert session.read == [said] * 3
    assert "".join(texts) == said.text
    for response in (whole, last.response):
        assert response.status == {"stop": "completed", "length": "incomplete"}[said.finish_reason]
        assert response.output_text == said.text
        calls = [(i.call_id, i.name, i.arguments) for i in response.output if i.type == "function_call"]
        assert calls == triples(said)
        thoughts = [part.text for i in response.output if i.type == "reasoning" for part in i.content]
        assert "".join(thoughts) == said.reasoning
        assert response.usage.total_tokens == 10


@pytest.mark.parametrize("said", ANSWERS.values(), ids=ANSWERS)
async def test_the_client_of_anthropic_reads_an_answer_at_once_as_a_stream_and_by_its_helper(said):
    async with serving(said, said, said) as (session, address), of_anthropic(address) as client:
        whole = await client.messages.create(**BLOCKS)
        text = ""
        async for event in await client.messages.create(**BLOCKS, stream=True):
            text += getattr(getattr(event, "delta", None), "text", "")
        async with client.messages.stream(**BLOCKS) as stream:
            streamed = await stream.get_final_message()
        assert session.read == [said] * 3
    assert text == said.text
    reason = "tool_use" if said.calls else "stop_sequence" if said.stopped_by else "end_turn"
    for message in (whole, streamed):
        assert message.stop_reason == {"length": "max_tokens"}.get(said.finish_reason, reason)
        assert message.stop_sequence == said.stopped_by
        assert "".join(block.text for block in message.content if block.type == "text") == said.text
        assert "".join(block.thinking for block in message.content if block.type == "thinking") == said.reasoning
        calls = [(block.id, block.name, block.input) for block in message.content if block.type == "tool_use"]
        assert calls == [(call.id, call.name, ARGUMENTS) for call in said.calls]
        assert message.usage.input_tokens == 7
        assert message.usage.output_tokens == 3


def triples(said: Answer) -> list[Any]:
    return [(call.id, call.name, call.arguments) for call in said.calls]


async def test_clients_that_block_completions_models_raw_responses_and_parsed_arguments():
    said = ANSWERS["all"]

    def talk(address: str) -> None:
        openai = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        anthropic = Anthropic(base_url=address, api_key="none", max_retries=0)
        assert [model.id for model in openai.models.list()] == ["policy"]
        assert openai.completions.create(model="any", prompt=[5, 6]).choices[0].text == "So:"
        chunks = [*openai.completions.create(model="any", prompt="go", stream=True, stop="END")]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "So:"
        assert chunks[-1].choices[0].finish_reason == "stop"
        raw = openai.chat.completions.with_raw_response.create(**CHAT)
        assert raw.parse().choices[0].message.content == "So:"
        tool: Any = pydantic_function_tool(Add, name="add")
        (call,) = openai.chat.completions.parse(**CHAT, tools=[tool]).choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == Add(**ARGUMENTS)
        flat: Any = {"type": "function", "strict": True, **tool["function"]}
        output = openai.responses.parse(**ITEMS, tools=[flat]).output
        assert output[-1].parsed_arguments == ARGUMENTS
        assert anthropic.messages.count_tokens(**CHAT).input_tokens == 42
        assert anthropic.messages.with_raw_response.create(**BLOCKS).parse().content[1].text == "So:"
        assert anthropic.beta.messages.create(**BLOCKS).content[1].text == "So:"

    async with serving(*[said] * 7) as (session, address):
        await asyncio.to_thread(talk, address)
        assert len(session.read) == 7
    assert [ask.prompt for ask in session.asked[:2]] == [[5, 6], "go"]
    assert session.asked[1].stop == ("END",)
    assert session.asked[3].tools == session.asked[4].tools


# ------------------------------------------------------------------------------------------------ requests

CALLED = {"id": "call1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "12"},
    {"role": "assistant", "content": "So:", "reasoning_content": "hm", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call1", "content": "3"},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call1", "content": ""},
    {"role": "user", "content": "and?"},
]
"""As a session reads it."""
AS_TEXT = {**CALLED, "function": {"name": "add", "arguments": CALL.arguments}}
ITEM = {"type": "function_call", "call_id": "call1", "name": "add", "arguments": CALL.arguments, "id": "fc_1"}
BLOCK = {"type": "tool_use", "id": "call1", "name": "add", "input": ARGUMENTS}
TOOL = {"name": "add", "description": "Adds.", "parameters": ADD}


def text(*texts: str, kind: str = "text") -> list[Any]:
    return [{"type": kind, "text": each} for each in texts]


@pytest.mark.parametrize("nothing", [None, "", [], text("")], ids=["null", "empty", "no parts", "an empty part"])
@pytest.mark.parametrize("called", [CALLED, AS_TEXT], ids=["an object", "JSON"])
def test_a_conversation_means_the_same_whichever_way_a_chat_repeats_it(nothing, called):
    messages = [
        {"role": "developer", "content": text("Be ", "brief.")},
        {"role": "user", "content": text("1", "2"), "name": "me"},
        {
            "role": "assistant",
            "content": text("So:"),
            "reasoning_content": "hm",
            "tool_calls": [called],
            "refusal": None,
        },
        {"role": "tool", "tool_call_id": "call1", "content": text("3")},
        {"role": "assistant", "content": nothing, "tool_calls": [called], "function_call": None},
        {"role": "tool", "tool_call_id": "call1", "content": nothing},
        {"role": "user", "content": "and?"},
    ]
    ask = Chat().ask({"messages": messages, "tools": [{"type": "function", "function": TOOL}]})
    assert ask.messages == CONVERSATION
    assert ask.tools == [{"type": "function", "function": TOOL}]


def test_a_conversation_means_the_same_in_the_words_of_the_other_protocols():
    items = [
        {"role": "user", "content": text("1", "2", kind="input_text")},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": text("hm", kind="reasoning_text")},
        {"type": "message", "role": "assistant", "content": text("So:", kind="output_text"), "status": "completed"},
        ITEM,
        {"type": "function_call_output", "call_id": "call1", "output": "3"},
        ITEM,
        {"type": "function_call_output", "call_id": "call1", "output": text("", kind="input_text")},
        {"type": "message", "role": "user", "content": "and?"},
    ]
    tools = [{"type": "function", **TOOL}]
    of_responses = Responses().ask({"instructions": "Be brief.", "input": items, "tools": tools})
    result = {"type": "tool_result", "tool_use_id": "call1"}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    messages = [
        {"role": "user", "content": text("1", "2")},
        {"role": "assistant", "content": [thought, *text("So:"), BLOCK]},
        {"role": "user", "content": [{**result, "content": text("3")}]},
        {"role": "assistant", "content": [BLOCK]},
        {"role": "user", "content": [result, *text("an", "d?")]},
    ]
    tools = [{"name": "add", "description": "Adds.", "input_schema": ADD, "cache_control": {"type": "ephemeral"}}]
    of_messages = Messages().ask({"system": text("Be ", "brief."), "messages": messages, "tools": tools})
    for ask in (of_responses, of_messages):
        assert ask.messages == CONVERSATION
        assert ask.tools == [{"type": "function", "function": TOOL}]


def test_turns_of_the_policy_that_follow_each_other_as_items_stay_two():
    said = {"role": "assistant", "content": "a"}
    assert Responses().ask({"input": [said, said, ITEM, ITEM]}).messages == [
        said,
        {**said, "tool_calls": [CALLED, CALLED]},
    ]


@pytest.mark.parametrize("said", [ANSWERS[name] for name in ("text", "nothing", "calls", "all")])
def test_an_answer_that_a_client_repeats_as_it_was_sent_is_the_same_in_all_protocols(said):
    (choice,) = Chat().answer(said, CHAT)["choices"]
    chat = Chat().ask({"messages": [*HELLO, choice["message"], *HELLO]})
    items = Responses().ask({"input": [*HELLO, *Responses().answer(said, ITEMS)["output"], *HELLO]})
    blocks = Messages().ask({"messages": [*HELLO, Messages().answer(said, BLOCKS), *HELLO]})
    assert chat.messages == items.messages == blocks.messages
    assert chat.messages[1]["content"] == said.text


@pytest.mark.parametrize("said", [ANSWERS[name] for name in ("text", "nothing", "calls", "all")])
def test_items_that_we_sent_may_be_named_in_their_place(said):
    items = Responses().answer(said, ITEMS)["output"]
    named = [{"type": "item_reference", "id": item["id"]} for item in items]
    whole = Responses().ask({"input": [*HELLO, *items, *HELLO]})
    assert Responses().ask({"input": [*HELLO, *named, *HELLO]}, [answer("earlier"), said]) == whole


@pytest.mark.parametrize("tool", [{"type": "function", **TOOL}, {"type": "custom", "name": "exec", "format": {}}])
def test_items_that_are_fields_elsewhere_are_no_words_of_the_conversation(tool):
    tools = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [tool]}
    update = {"type": "configuration_update", "reasoning": {"effort": "low"}}
    other = {"type": "function", "name": "other"}
    ask = Responses().ask({"input": [tools, *HELLO, update], "tools": [other]})
    assert ask == Responses().ask({"input": HELLO, "tools": [other, tool]})


def test_limits_stops_and_sampling_reach_the_session_and_what_changes_no_draw_is_ignored():
    ignored = {
        "user": "me",
        "metadata": {},
        "store": True,
        "service_tier": "auto",
        "n": 1,
        "top_logprobs": 0,
        "logit_bias": {},
    }
    ask = Chat().ask(
        {**CHAT, **ignored, "max_completion_tokens": 5, "stop": "x", "temperature": 0, "tool_choice": "auto"}
    )
    assert ask.max_tokens == 5
    assert ask.stop == ("x",)
    assert ask.sampling == {"temperature": 0}
    ask = Responses().ask({**ITEMS, **ignored, "max_output_tokens": 6, "include": ["reasoning.encrypted_content"]})
    assert ask.max_tokens == 6
    assert ask.sampling == {}
    ask = Messages().ask({**BLOCKS, "stop_sequences": ["x", "y"], "top_k": 3, "thinking": {"type": "disabled"}})
    assert ask.max_tokens == 9
    assert ask.stop == ("x", "y")
    assert ask.sampling == {"top_k": 3}


def test_tools_that_may_not_be_called_are_left_out():
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert Chat().ask({**CHAT, "tools": tools, "tool_choice": "none"}).tools == []
    assert Chat().ask({**CHAT, "tools": tools}).tools[0]["function"]["description"] is None
    messages = Messages().ask({**BLOCKS, "tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "none"}})
    assert messages.tools == []


@pytest.mark.parametrize(
    "function",
    [
        {"name": "add"},
        {"name": "add", "description": ""},
        {"description": "Adds.", "parameters": ADD, "name": "add"},
        {"name": "add", "strict": True, "parameters": {}},
        {"name": "add", "strict": False, "description": None},
        {"name": "add", "strict": None, "parameters": {"b": 1, "a": [2]}},
    ],
    ids=str,
)
def test_tools_are_told_to_the_template_as_vllm_serve_tells_them(function):
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    tool = {"type": "function", "function": function}
    as_vllm = json.dumps([protocol.ChatCompletionToolsParam.model_validate(tool).model_dump()])
    block = {name: value for name, value in function.items() if name != "parameters"}
    if "parameters" in function:
        block["input_schema"] = function["parameters"]
    assert json.dumps(Chat().ask({**CHAT, "tools": [tool]}).tools) == as_vllm
    assert json.dumps(Responses().ask({**ITEMS, "tools": [{"type": "function", **function}]}).tools) == as_vllm
    assert json.dumps(Messages().ask({**BLOCKS, "tools": [block]}).tools) == as_vllm


BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=5f3;"}


@pytest.mark.parametrize(
    "system",
    [
        [BILLING, {"type": "text", "text": "Be brief."}],
        [{"type": "text", "text": "Be brief."}, BILLING],
        [BILLING, {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}}, *text("brief.")],
        "Be brief.",
    ],
)
def test_what_claude_code_puts_before_its_words_is_left_out(system):
    ask = Messages().ask({**BLOCKS, "system": system})
    assert ask.messages == [{"role": "system", "content": "Be brief."}, *HELLO]


def test_a_system_that_is_nothing_but_that_is_none():
    assert Messages().ask({**BLOCKS, "system": [BILLING]}).messages == HELLO
    told = Messages().ask({**BLOCKS, "system": text("Say x-anthropic-billing-header: y")})
    assert told.messages[0]["content"] == "Say x-anthropic-billing-header: y"


IGNORED = (
    'parallel_tool_calls=false parallel_tool_calls=true thinking={"type":"adaptive"} thinking={"type":"enabled"} '
    'context_management={"edits":[{"type":"clear_thinking"}]} context_management=[1] truncation="auto" seed=0 '
    'web_search_options={"a":1} mcp_servers=[1] container="x" reasoning={"effort":"high"} reasoning_effort="low" '
    'verbosity="low" store=true metadata={"a":"b"} service_tier="auto" prompt_cache_key="k" user="me" '
    'include=["reasoning.encrypted_content"] client_metadata={"a":1} betas=["x"] safety_identifier="x" '
    'prediction={"type":"content","content":"x"} max_tool_calls=3 prompt_logprobs=null return_token_ids=false '
    "skip_special_tokens=true add_generation_prompt=true diagnostics={} speed=1"
)


@pytest.mark.parametrize("asked", IGNORED.split())
def test_a_field_that_changes_no_token_is_no_reason_to_refuse(asked):
    name, _, value = asked.partition("=")
    for dialect, body in BODIES.items():
        assert dialect().ask({**body, name: json.loads(value)}) == dialect().ask(body)


@pytest.mark.parametrize("choice", ["auto", {"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": True}])
def test_a_choice_that_forces_no_call_leaves_the_tools(choice):
    ask = Messages().ask({**BLOCKS, "tools": [{"name": "add", "input_schema": ADD}], "tool_choice": choice})
    assert [tool["function"]["name"] for tool in ask.tools] == ["add"]


OTHER_TOOLS: list[tuple[Any, dict[str, Any], list[str]]] = [
    (Chat, {"type": "custom", "custom": {"name": "x"}}, ["add"]),
    (Responses, {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}, ["add"]),
    (Responses, {"type": "web_search", "external_web_access": False}, ["add"]),
    (Responses, {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "y"}]}, ["add"]),
    (Responses, {"type": "local_shell"}, ["add"]),
    (Responses, {"type": "code_interpreter", "container": {}}, ["add"]),
    (Messages, {"type": "web_search_20250305", "name": "web_search"}, ["add"]),
    (Messages, {"type": "bash_20250124", "name": "bash"}, ["add"]),
]


@pytest.mark.parametrize(("dialect", "other", "left"), OTHER_TOOLS, ids=lambda each: str(each)[:40])
def test_a_tool_that_no_template_can_tell_the_policy_is_left_out_which_is_said_once(dialect, other, left, caplog):
    notices.forget()
    add = {
        Chat: {"type": "function", "function": TOOL},
        Responses: {"type": "function", **TOOL},
        Messages: {"name": "add", "description": "Adds.", "input_schema": ADD},
    }[dialect]
    for _ in range(3):
        ask = dialect().ask({**BODIES[dialect], "tools": [other, add]})
        assert [tool["function"]["name"] for tool in ask.tools] == left
    (record,) = caplog.records
    assert repr(other["type"]) in record.getMessage()


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
FORM = {"type": "json_schema", "name": "x", "schema": {}}
NAMED = {"type": "function", "function": {"name": "add"}}
REFUSED: list[tuple[Any, dict[str, Any]]] = [
    (Chat, {"messages": IMAGE}),
    (Chat, {"messages": [{"role": "function", "content": ""}]}),
    (Chat, {"messages": []}),
    (Chat, {"tool_choice": "required"}),
    (Chat, {"tool_choice": NAMED}),
    (Chat, {"max_tokens": 0}),
    (Chat, {"stop": [""]}),
    (Completions, {"prompt": ["a", "b"]}),
    (Completions, {"prompt": ""}),
    (Completions, {"logprobs": 0}),
    (Responses, {"prompt": {"id": "p"}}),
    (Responses, {"text": {"format": FORM}}),
    (Responses, {"include": ["message.output_text.logprobs"]}),
    (Responses, {"input": [{"type": "item_reference", "id": "x"}]}),
    (Responses, {"input": [{**ITEM, "arguments": [1]}]}),
    (Messages, {"tool_choice": {"type": "any"}}),
    (Messages, {"output_config": {"format": FORM}}),
    (Messages, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
]


@pytest.mark.parametrize("prompt", ["go", [5, 6]], ids=["a text", "tokens"])
def test_a_list_with_one_prompt_means_this_prompt(prompt):
    asked = Completions().ask({**BODIES[Completions], "prompt": [prompt]})
    assert asked.prompt == prompt


EVERYWHERE = (
    "n=2 best_of=3 presence_penalty=0.5 frequency_penalty=-1 repetition_penalty=1.1 length_penalty=2 "
    'min_tokens=4 logit_bias={"5":1} stop_token_ids=[5] bad_words=["x"] allowed_token_ids=[5] ignore_eos=true '
    'use_beam_search=true suffix="x" echo=true chat_template="x" chat_template_kwargs={"a":false} '
    'logprobs=true top_logprobs=5 response_format={"type":"json_object"} prompt_logprobs=0 prompt_logprobs=1 '
    "return_token_ids=true return_tokens_as_token_ids=true skip_special_tokens=false add_generation_prompt=false "
    "continue_final_message=true documents=[1] thinking_token_budget=5 include_stop_str_in_output=true "
    'structured_outputs={"json":{}} guided_json={"a":1} previous_response_id="x" conversation="x" background=true '
    'functions=[1] function_call="auto" modalities=["audio"]'
)


@pytest.mark.parametrize("asked", EVERYWHERE.split())
def test_a_field_that_no_dialect_can_serve_honestly_is_refused_with_its_name_its_value_and_the_remedy(asked):
    name, _, value = asked.partition("=")
    why = f"^{name} {re.escape(repr(json.loads(value)))} is not served: (leave it out|send)"
    for dialect, body in BODIES.items():
        with pytest.raises(Refusal, match=why) as refused:
            dialect().ask({**body, name: json.loads(value)})
        assert refused.value.status == 400


def test_what_a_dialect_cannot_serve_honestly_is_refused_with_the_remedy(golden):
    refusals = {}
    for dialect, asked in REFUSED:
        refusal = error_of(dialect().ask, {**BODIES[dialect], **asked}, kind=Refusal)
        refusals[f"{dialect.__name__} {asked}"] = refusal
    golden("errors/refusals.txt", sections(refusals))
