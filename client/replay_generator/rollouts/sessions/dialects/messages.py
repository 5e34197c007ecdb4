"""Messages: Anthropic's `/v1/messages`, and what `/v1/messages/count_tokens` counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replay_generator.rollouts.sessions.dialects import fields
from replay_generator.rollouts.sessions.turns import Answer, Ask, Refusal

_SAID, _TOLD = ("thinking", "text", "tool_use"), ("tool_result", "text")
"""The blocks of the policy, and those of its user."""


class Messages:
    """A conversation of messages with blocks, and the blocks that the policy answers."""

    path = "/v1/messages"

    def ask(self, body: dict[str, Any]) -> Ask:
        fields.check(body.get("output_config") or {}, "format", fields.FREE)
        system_content = _without_billing(body.get("system") or "")
        system = [{"role": "system", "content": system_content}] if system_content else []
        received = (*system, *fields.few("messages", body["messages"]))
        messages = [message for each in received for message in _messages(each)]
        tools = fields.tools_of(body, "custom", None)
        return fields.ask_of(body, messages=messages, tools=tools, objects_only=True)

    def answer(self, answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
        reason = "tool_use" if answer.calls else "stop_sequence" if answer.stopped_by else "end_turn"
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": body.get("model") or fields.MODEL,
            "content": [block for block, _, _ in _blocks(answer)],
            "stop_reason": "max_tokens" if answer.finish_reason == "length" else reason,
            "stop_sequence": answer.stopped_by,
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
        }

    def events(self, answer: Answer, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        message = self.answer(answer, body)
        end = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        begun = {**message, **dict.fromkeys(end), "content": [], "usage": {**message["usage"], "output_tokens": 0}}
        yield {"type": "message_start", "message": begun}
        for n, (block, empty, delta) in enumerate(_blocks(answer)):
            yield {"type": "content_block_start", "index": n, "content_block": {**block, **empty}}
            yield {"type": "content_block_delta", "index": n, "delta": delta}
            yield {"type": "content_block_stop", "index": n}
        yield {"type": "message_delta", "delta": end, "usage": message["usage"]}
        yield {"type": "message_stop"}

    def error(self, refusal: Refusal) -> dict[str, Any]:
        error = fields.error_of(refusal)
        if refusal.code == "context_length_exceeded":  # by these words clients know that they have to compact
            error["message"] = f"prompt is too long: {refusal}"
        return {"type": "error", "error": error}


def _without_billing(system: Any) -> Any:
    """The words of the system without what Claude Code puts before them, which changes with each request."""
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    left = [block for block in blocks if not str(block.get("text")).startswith("x-anthropic-billing-header:")]
    return left if len(left) < len(blocks) else system


def _messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that one message is. One of the user has those of its tools too."""
    content, is_said = message["content"], message["role"] == "assistant"
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts: dict[str, list[Any]] = {kind: [] for kind in (_SAID if is_said else _TOLD)}
    for block in blocks:
        parts[fields.kind_of(block, *parts)].append(block)
    text = "".join(block["text"] for block in parts["text"])
    if is_said:
        thoughts = "".join(block["thinking"] for block in parts["thinking"])
        calls = [fields.call_of(block["id"], block) for block in parts["tool_use"]]
        return [fields.assistant_message(text, thoughts, calls)]
    results = [fields.answered(block["tool_use_id"], block.get("content")) for block in parts["tool_result"]]
    return [*results, fields.input_message({**message, "content": text})] if parts["text"] else results


def _blocks(answer: Answer) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Each block, what is empty in it when it begins, and what it then gets."""
    block: dict[str, Any]
    if thoughts := answer.reasoning:
        block = {"type": "thinking", "thinking": thoughts, "signature": ""}
        yield block, {"thinking": ""}, {"type": "thinking_delta", "thinking": thoughts}
    if (text := answer.text) or not answer.calls:
        yield {"type": "text", "text": text}, {"text": ""}, {"type": "text_delta", "text": text}
    for call in answer.calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.object or {}}
        yield block, {"input": {}}, {"type": "input_json_delta", "partial_json": call.arguments}
