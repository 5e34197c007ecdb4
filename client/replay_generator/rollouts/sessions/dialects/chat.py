"""Chat and Completions: OpenAI's `/v1/chat/completions`, and the older `/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from replay_generator.rollouts.sessions.dialects import fields
from replay_generator.rollouts.sessions.turns import Answer, Ask, Refusal


class Chat:
    """The protocol of chats: the client sends messages, and the policy answers with one message.

    Every dialect has the same four methods. `ask` reads the body of a request. `answer` makes the body of an answer,
    `events` makes the events of an answer that is sent as a stream, and `error` makes the body of a refusal. If the
    body of a request has a wrong form, they may raise any error.
    """

    path = "/v1/chat/completions"
    """The path of the protocol, for error messages."""
    name = "chatcmpl"
    """The prefix of the id of each answer."""
    kind = "chat.completion"
    """The value of the field `object` in a body."""
    chunk = "chat.completion.chunk"
    """The value of the field `object` in an event."""

    def ask(self, body: dict[str, Any]) -> Ask:
        """The request with this body. Raises Refusal for a request that is not served."""
        messages = [_message(message) for message in fields.few("messages", body["messages"])]
        return fields.ask_of(body, messages=messages, tools=fields.tools_of(body, "function"))

    def answer(self, answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer. `body`: the body of the request."""
        shared_fields = self._shared_fields(self.kind, answer, body)
        return shared_fields | {"choices": [self._choice(answer)], "usage": _usage(answer)}

    def events(self, answer: Answer, body: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
        """Yields the events of an answer that is sent as a stream. `body`: the body of the request.

        Each event is a dict that is sent as JSON, except the last one, which is a text.
        """
        shared_fields = self._shared_fields(self.chunk, answer, body)
        for choice in self._stream_choices(self._choice(answer)):
            yield shared_fields | {"choices": [choice]}
        stream_options = body.get("stream_options") or {}
        if stream_options.get("include_usage"):
            yield shared_fields | {"choices": [], "usage": _usage(answer)}
        yield "[DONE]"  # with this text, OpenAI ends every stream

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """The body of a refusal."""
        return {"error": fields.error_of(refusal)}

    def _shared_fields(self, kind: str, answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
        """The fields that the body of an answer and each of its events have. `kind`: the value of `object`."""
        return {
            "id": f"{self.name}-{answer.id}",
            "object": kind,
            "created": int(time.time()),
            "model": body.get("model") or fields.MODEL,
        }

    def _choice(self, answer: Answer) -> dict[str, Any]:
        """The only choice in the body of an answer."""
        calls = []
        for index, call in enumerate(answer.calls):
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"index": index, "id": call.id, "type": "function", "function": function})
        reason = answer.finish_reason
        if calls and reason == "stop":
            reason = "tool_calls"
        text: str | None = answer.text
        if calls and not text:  # OpenAI's answers have null here
            text = None
        message = fields.assistant_message(text, answer.reasoning, calls)
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}

    def _stream_choices(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of a stream, one for each event. `choice`: the choice of the whole answer, which is changed.

        Each field of the message has an event of its own. Each call also has an event of its own, because some clients
        read only the first call of an event. The last event has the finish reason.
        """
        message = choice.pop("message")
        deltas = []
        for name, value in message.items():
            if name == "tool_calls":
                deltas += [{name: [call]} for call in value]
            else:
                deltas.append({name: value})
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        choices.append({**choice, "delta": {}})  # the other fields, such as the finish reason
        return choices


class Completions(Chat):
    """The older protocol: the client sends a text or token ids, and the policy continues them."""

    path = "/v1/completions"
    name = "cmpl"
    kind = "text_completion"
    chunk = "text_completion"

    def ask(self, body: dict[str, Any]) -> Ask:
        """The request with this body. Raises Refusal for a request that is not served."""
        # The field has no neutral value here, because even a client that sends 0 expects log-probabilities.
        fields.check(body, "logprobs", fields.LOGPROBS_STORED, neutral=())
        prompt = body["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]  # the body has a list of prompts, with one prompt in it
        is_served = bool(prompt) and (isinstance(prompt, str) or all(type(token) is int for token in prompt))
        if not is_served:
            raise fields.refused("prompt", prompt, "send one text, or the token ids of one, in each request")
        return fields.ask_of(body, prompt=prompt)

    def _choice(self, answer: Answer) -> dict[str, Any]:
        return {"index": 0, "text": answer.text, "logprobs": None, "finish_reason": answer.finish_reason}

    def _stream_choices(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        return [choice]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a request, in the form of `Ask.messages`. Raises Refusal for a message that is not served."""
    if message["role"] == "tool":
        return fields.answered(message["tool_call_id"], message["content"])
    if message["role"] != "assistant":
        return fields.input_message(message)
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    calls = []
    for call in message.get("tool_calls") or ():
        call_id = call["id"]
        kind = fields.kind_of(call, "function")
        calls.append(fields.call_of(call_id, call[kind]))
    text = fields.text_of(message.get("content"))
    return fields.assistant_message(text, thoughts, calls)


def _usage(answer: Answer) -> dict[str, int]:
    """The numbers of tokens that an answer reports."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
