"""Messages: Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replay_generator.rollouts.sessions.dialects import fields
from replay_generator.rollouts.sessions.turns import Answer, Ask, Refusal

_POLICY_BLOCKS = ("thinking", "text", "tool_use")
"""The kinds of blocks in a message of the policy."""
_USER_BLOCKS = ("tool_result", "text")
"""The kinds of blocks in a message of the user."""


class Messages:
    """Anthropic's protocol: the client sends messages that consist of blocks, and the policy answers with blocks."""

    path = "/v1/messages"

    def ask(self, body: dict[str, Any]) -> Ask:
        fields.check(body.get("output_config") or {}, "format", fields.FREE)
        system = _without_billing(body.get("system") or "")
        received = [*fields.few("messages", body["messages"])]
        if system:
            received.insert(0, {"role": "system", "content": system})
        messages: list[dict[str, Any]] = []
        for message in received:
            messages += _messages(message)
        tools = fields.tools_of(body, "custom", None)
        return fields.ask_of(body, messages=messages, tools=tools, objects_only=True)

    def answer(self, answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": body.get("model") or fields.MODEL,
            "content": [block for block, _, _ in _blocks(answer)],
            "stop_reason": _stop_reason(answer),
            "stop_sequence": answer.stopped_by,
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
        }

    def events(self, answer: Answer, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        message = self.answer(answer, body)
        start = {
            **message,
            "stop_reason": None,
            "stop_sequence": None,
            "content": [],
            "usage": {**message["usage"], "output_tokens": 0},
        }
        yield {"type": "message_start", "message": start}
        for index, (block, empty_fields, delta) in enumerate(_blocks(answer)):
            yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty_fields}}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        end = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        yield {"type": "message_delta", "delta": end, "usage": message["usage"]}
        yield {"type": "message_stop"}

    def error(self, refusal: Refusal) -> dict[str, Any]:
        error = fields.error_of(refusal)
        if refusal.code == "context_length_exceeded":
            # Clients look for these words. Then they compact the conversation.
            error["message"] = f"prompt is too long: {refusal}"
        return {"type": "error", "error": error}


def _stop_reason(answer: Answer) -> str:
    """The reason why a turn ended, in Anthropic's words."""
    if answer.finish_reason == "length":
        return "max_tokens"
    if answer.calls:
        return "tool_use"
    if answer.stopped_by:
        return "stop_sequence"
    return "end_turn"


def _without_billing(system: Any) -> Any:
    """The system prompt without the billing block that Claude Code puts before it.

    That block changes with each request, so no conversation would continue an earlier one.
    """
    blocks = _as_blocks(system)
    left = [block for block in blocks if not str(block.get("text")).startswith("x-anthropic-billing-header:")]
    if len(left) == len(blocks):
        return system
    return left


def _as_blocks(content: Any) -> Any:
    """The blocks of a content. A content that is a text becomes one block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content


def _messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message of Anthropic as messages of OpenAI.

    With Anthropic, a message of the user also contains the results of tools. Each result becomes a message of its own.
    """
    content = message["content"]
    is_of_policy = message["role"] == "assistant"
    kinds = _POLICY_BLOCKS if is_of_policy else _USER_BLOCKS
    blocks: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for block in _as_blocks(content):
        kind = fields.kind_of(block, *kinds)
        blocks[kind].append(block)
    text = "".join(block["text"] for block in blocks["text"])
    if is_of_policy:
        thoughts = "".join(block["thinking"] for block in blocks["thinking"])
        calls = [fields.call_of(block["id"], block) for block in blocks["tool_use"]]
        return [fields.assistant_message(text, thoughts, calls)]
    messages = [fields.answered(block["tool_use_id"], block.get("content")) for block in blocks["tool_result"]]
    if blocks["text"]:
        messages.append(fields.input_message({**message, "content": text}))
    return messages


def _blocks(answer: Answer) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """The blocks of an answer. Each is a whole block, the fields that are empty when the block begins in a stream, and
    the only delta of the block."""
    block: dict[str, Any]
    thoughts = answer.reasoning
    if thoughts:
        block = {"type": "thinking", "thinking": thoughts, "signature": ""}
        yield block, {"thinking": ""}, {"type": "thinking_delta", "thinking": thoughts}
    text = answer.text
    if text or not answer.calls:
        block = {"type": "text", "text": text}
        yield block, {"text": ""}, {"type": "text_delta", "text": text}
    for call in answer.calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.object or {}}
        yield block, {"input": {}}, {"type": "input_json_delta", "partial_json": call.arguments}
