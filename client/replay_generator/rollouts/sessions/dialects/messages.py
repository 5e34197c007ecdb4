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
    """The path of the protocol, for error messages."""

    def ask(self, body: dict[str, Any]) -> Ask:
        """The request with this body. Raises Refusal for a request that is not served."""
        fields.check(body.get("output_config") or {}, "format", fields.FREE)  # refuses a forced form of the answer
        system = _without_billing(body.get("system") or "")
        received = [*fields.few("messages", body["messages"])]
        if system:  # Anthropic has the system prompt in a field of the body, and OpenAI in a message
            received.insert(0, {"role": "system", "content": system})
        messages: list[dict[str, Any]] = []
        for message in received:
            messages += _messages(message)
        tools = fields.tools_of(body, "custom", None)  # Anthropic's tools have the type "custom", or none
        # `objects_only`: the `input` of a `tool_use` block can hold only an object.
        return fields.ask_of(body, messages=messages, tools=tools, objects_only=True)

    def answer(self, answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer. `body`: the body of the request."""
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
        """Yields the events of an answer that is sent as a stream: a start, each block, and an end. `body`: the body of
        the request."""
        message = self.answer(answer, body)
        start = {  # the message as it is before the policy has written anything
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
        """The body of a refusal, which is also the data of an event."""
        error = fields.error_of(refusal)
        if refusal.code == "context_length_exceeded":
            # Clients look for the words "prompt is too long", and then compact the conversation.
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

    The billing block changes with each request. With this block, no request would begin with the messages of an earlier
    request.
    """
    blocks = _as_blocks(system)
    # For a block without text, `str` gives "None", so this block stays.
    kept = [block for block in blocks if not str(block.get("text")).startswith("x-anthropic-billing-header:")]
    if len(kept) == len(blocks):  # there is no billing block, and a text stays a text
        return system
    return kept


def _as_blocks(content: Any) -> Any:
    """The blocks of the content of a message. A content that is a text becomes one block with this text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content


def _messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Converts a message from Anthropic's form to messages in OpenAI's form.

    In Anthropic's protocol, a message of the user also contains the results of tools. Each result becomes a message of
    its own, before the message with the text. Raises Refusal for a block of a kind that is not served.
    """
    content = message["content"]
    is_of_policy = message["role"] == "assistant"
    kinds = _POLICY_BLOCKS if is_of_policy else _USER_BLOCKS
    blocks: dict[str, list[Any]] = {kind: [] for kind in kinds}  # the blocks of each kind, in order
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
    """Yields each block of an answer, with what a stream needs for it.

    Each result has three parts. The first is the whole block. In a stream, a block begins with some fields empty, and
    one delta then fills them: the second part has these fields with their empty values, and the third is this delta.
    """
    block: dict[str, Any]
    thoughts = answer.reasoning
    if thoughts:
        block = {"type": "thinking", "thinking": thoughts, "signature": ""}
        yield block, {"thinking": ""}, {"type": "thinking_delta", "thinking": thoughts}
    text = answer.text
    if text or not answer.calls:  # an answer has at least one block besides its thoughts
        block = {"type": "text", "text": text}
        yield block, {"text": ""}, {"type": "text_delta", "text": text}
    for call in answer.calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.object or {}}
        yield block, {"input": {}}, {"type": "input_json_delta", "partial_json": call.arguments}
