"""Responses: OpenAI's `/v1/responses`, except for requests for which the server would have to store conversations."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from replay_generator.rollouts.sessions.dialects import fields
from replay_generator.rollouts.sessions.turns import Answer, Ask, Refusal

_NO_DETAILS = {
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens_details": {"reasoning_tokens": 0},
}
"""Details of the usage that every answer has, but that are not counted here."""
_TOOLS = "additional_tools"
"""The kind of items in which Codex sends tools."""
_SETTINGS = (_TOOLS, "configuration_update")
"""The kinds of items that become no message. In these items Codex sends settings that other clients send in fields of
the body."""


class Responses:
    """The protocol of items: the client sends a conversation as a list of items, and the policy answers with items."""

    path = "/v1/responses"
    """The path of the protocol, for error messages."""

    def ask(self, body: dict[str, Any], answers: Sequence[Answer] = ()) -> Ask:
        """The request with this body. Raises Refusal for a request that is not served.

        `answers`: the earlier answers of the session. The client may send references to the items of these answers
        instead of the items.
        """
        fields.check(body, "prompt", fields.WHOLE)  # refuses the id of a stored prompt
        fields.check(body.get("text") or {}, "format", fields.FREE)  # refuses a forced form of the answer
        wanted_logprobs = [name for name in body.get("include") or () if "logprobs" in name]
        fields.check({"include": wanted_logprobs}, "include", fields.LOGPROBS_STORED)  # an empty list passes
        inputs = fields.few("messages", body.get("input") or ())
        items: list[dict[str, Any]]
        if isinstance(inputs, str):  # the text of one message
            items = [{"role": "user", "content": inputs}]
        else:
            items = [*inputs]
        if body.get("instructions"):
            items.insert(0, {"role": "system", "content": body["instructions"]})
        items = _resolved(items, answers)
        sent_tools = [*(body.get("tools") or ())]
        for item in items:  # Codex sends tools in items
            if item.get("type") == _TOOLS:
                sent_tools += item["tools"]
        tools = fields.tools_of({**body, "tools": sent_tools}, "function")
        messages = _messages([item for item in items if item.get("type") not in _SETTINGS])
        return fields.ask_of(body, messages=messages, tools=tools)

    def answer(self, answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer. `body`: the body of the request."""
        status = "completed"
        incomplete_details = None
        if answer.finish_reason == "length":
            status = "incomplete"
            incomplete_details = {"reason": "max_output_tokens"}
        usage = {
            "input_tokens": answer.prompt_tokens,
            "output_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            **_NO_DETAILS,
        }
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.get("model") or fields.MODEL,
            "status": status,
            "incomplete_details": incomplete_details,
            "error": None,
            "output": _items(answer),
            "parallel_tool_calls": True,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "usage": usage,
        }

    def events(self, answer: Answer, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the events of an answer that is sent as a stream. `body`: the body of the request."""
        for number, event in enumerate(_events(self.answer(answer, body))):
            yield {**event, "sequence_number": number}

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """The body of a refusal, which is also the data of an event."""
        # An event has the fields of the error at its top level, and a body has them in `error`. The package `openai`
        # looks for `error` in both cases.
        error = fields.error_of(refusal)
        return {**error, "error": error, "type": "error", "sequence_number": 0}


def _resolved(items: Sequence[dict[str, Any]], answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """The items, with each `item_reference` replaced by the item that it names. Raises Refusal for a reference to an
    item that is in none of `answers`."""
    if all(item.get("type") != "item_reference" for item in items):  # then the items of the answers are not needed
        return [*items]
    items_by_id: dict[str, dict[str, Any]] = {}
    for answer in answers:
        for item in _items(answer):
            items_by_id[item["id"]] = item
    resolved = []
    for item in items:
        if item.get("type") == "item_reference":
            if item["id"] not in items_by_id:
                raise fields.refused("item_reference", item["id"], fields.WHOLE)
            item = items_by_id[item["id"]]
        resolved.append(item)
    return resolved


def _messages(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that the items stand for, in the form of `Ask.messages`. All items of one turn of the policy become
    one message."""
    messages: list[dict[str, Any]] = []
    kind_before = None  # the kind of the item before `item`; None: `item` is the first
    for item in items:
        kind = fields.kind_of(item, "message", "reasoning", "function_call", "function_call_output", None)
        if not kind:  # clients may send messages without a type
            kind = "message"
        if kind == "function_call_output":
            messages.append(fields.answered(item["call_id"], item["output"]))
        elif kind == "message" and item["role"] != "assistant":
            messages.append(fields.input_message(item))
        else:
            # The items of a turn come in this order: thoughts, text, calls. Thoughts always begin a turn. A text begins
            # a turn unless thoughts stand directly before it. A call belongs to a turn that stands directly before it.
            may_follow = kind == "function_call" or (kind == "message" and kind_before == "reasoning")
            follows_a_turn = bool(messages) and messages[-1]["role"] == "assistant"
            if not (may_follow and follows_a_turn):
                messages.append(fields.assistant_message(""))
            _add(item, kind, messages[-1])
        kind_before = kind
    return messages


def _add(item: dict[str, Any], kind: str, message: dict[str, Any]) -> None:
    """Adds the content of an item to the message of its turn. The `kind` of the item is "message", "function_call" or
    "reasoning"."""
    if kind == "message":
        message["content"] = fields.text_of(item["content"])
    elif kind == "function_call":
        message.setdefault("tool_calls", []).append(fields.call_of(item["call_id"], item))
    else:
        parts = item.get("content") or item.get("summary")
        if parts:  # an item may have only encrypted thoughts, which nobody here can read
            message["reasoning_content"] = "".join(part["text"] for part in parts)


def _items(answer: Answer) -> list[dict[str, Any]]:
    """The items of an answer: its thoughts and its text, if it has them, and then one item for each of its calls."""
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        content = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": content})
    if answer.text or not answer.calls:  # an answer has at least one item besides its thoughts
        text = {"type": "output_text", "text": answer.text, "annotations": []}
        items.append({"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": [text]})
    for number, call in enumerate(answer.calls):
        items.append(
            {
                "type": "function_call",
                "call_id": call.id,
                # The item has an id besides the id of the call, because some models write the ids of calls themselves,
                # and may write one id twice.
                "id": f"fc_{answer.id}_{number}",
                "name": call.name,
                "arguments": call.arguments,
            }
        )
    return [{**item, "status": "completed"} for item in items]


def _events(response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the events of a stream that sends a response. `response`: the body of the answer."""
    begun = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        yield from _item_events(index, item)
    yield {"type": f"response.{response['status']}", "response": response}


def _item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the events of one item. `index`: the index of the item in the output."""
    place = {"output_index": index, "item_id": item["id"]}  # the fields by which an event names its item
    begun = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        begun["arguments"] = ""
    else:
        begun["content"] = []
    yield {"type": "response.output_item.added", **place, "item": begun}
    if item["type"] == "function_call":
        name = "response.function_call_arguments"
        yield {"type": f"{name}.delta", **place, "delta": item["arguments"]}
        yield {"type": f"{name}.done", **place, "name": item["name"], "arguments": item["arguments"]}
    for part in item.get("content", ()):  # messages and thoughts have one part, whose index is 0; calls have none
        name = f"response.{part['type']}"
        place_of_part = {**place, "content_index": 0}
        yield {"type": "response.content_part.added", **place_of_part, "part": {**part, "text": ""}}
        yield {"type": f"{name}.delta", **place_of_part, "delta": part["text"], "logprobs": []}
        yield {"type": f"{name}.done", **place_of_part, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **place_of_part, "part": part}
    yield {"type": "response.output_item.done", **place, "item": item}
