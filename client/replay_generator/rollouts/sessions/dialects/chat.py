"""Chat and Completions: OpenAI's `/v1/chat/completions`, and the older `/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from replay_generator.rollouts.sessions.dialects import fields
from replay_generator.rollouts.sessions.turns import Answer, Ask, Refusal


class Chat:
    """A conversation, and the message that the policy answers."""

    path = "/v1/chat/completions"
    name, kind, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    """What the id of an answer begins with, and what bodies and events call themselves."""

    def ask(self, body: dict[str, Any]) -> Ask:
        messages = [_message(message) for message in fields.few("messages", body["messages"])]
        return fields.ask_of(body, messages=messages, tools=fields.tools_of(body, "function"))

    def answer(self, answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
        return self._body(self.kind, answer, body) | {"choices": [self._choice(answer)], "usage": _usage(answer)}

    def events(self, answer: Answer, body: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
        about = self._body(self.chunk, answer, body)
        for part in self._parts(self._choice(answer)):
            yield about | {"choices": [part]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield about | {"choices": [], "usage": _usage(answer)}
        yield "[DONE]"

    def error(self, refusal: Refusal) -> dict[str, Any]:
        return {"error": fields.error_of(refusal)}

    def _body(self, kind: str, answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
        about = {"id": f"{self.name}-{answer.id}", "object": kind, "created": int(time.time())}
        return about | {"model": body.get("model") or fields.MODEL}

    def _choice(self, answer: Answer) -> dict[str, Any]:
        calls = []
        for n, call in enumerate(answer.calls):
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"index": n, "id": call.id, "type": "function", "function": function})
        reason = "tool_calls" if calls and answer.finish_reason == "stop" else answer.finish_reason
        message = fields.assistant_message(answer.text or (None if calls else ""), answer.reasoning, calls)
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}

    def _parts(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        """One chunk for each field of the message, and one for each call: some clients read the first in a chunk."""
        deltas = []
        for name, value in choice.pop("message").items():
            values = [[call] for call in value] if name == "tool_calls" else [value]
            deltas += [{name: each} for each in values]
        return [*({"index": 0, "delta": delta, "finish_reason": None} for delta in deltas), {**choice, "delta": {}}]


class Completions(Chat):
    """A text, or token ids, and the text that the policy writes after it."""

    path = "/v1/completions"
    name, kind, chunk = "cmpl", "text_completion", "text_completion"

    def ask(self, body: dict[str, Any]) -> Ask:
        fields.check(body, "logprobs", fields.LOGPROBS_STORED, ())  # with 0 too the client waits for some
        prompt = body["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            (prompt,) = prompt
        if not prompt or not (isinstance(prompt, str) or all(type(token) is int for token in prompt)):
            raise fields.refused("prompt", prompt, "send one text, or the token ids of one, in each request")
        return fields.ask_of(body, prompt=prompt)

    def _choice(self, answer: Answer) -> dict[str, Any]:
        return {"index": 0, "text": answer.text, "logprobs": None, "finish_reason": answer.finish_reason}

    def _parts(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        return [choice]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return fields.answered(message["tool_call_id"], message["content"])
    if message["role"] != "assistant":
        return fields.input_message(message)
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    calls = message.get("tool_calls") or ()
    calls = [fields.call_of(call["id"], call[fields.kind_of(call, "function")]) for call in calls]
    return fields.assistant_message(fields.text_of(message.get("content")), thoughts, calls)


def _usage(answer: Answer) -> dict[str, int]:
    read, drawn = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}
