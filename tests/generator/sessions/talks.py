"""Conversations of a real client with a real session, in each protocol: what a client does with its history."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from replay_generator.rollouts.sessions.endpoint import SessionServer
from replay_generator.rollouts.sessions.session import Session
from replay_generator.rollouts.sessions.turns import object_of
from tests.generator.sessions.fakes import of_anthropic, of_openai

SCHEMA = {"type": "object", "properties": {}}


class Talk:
    """One conversation. It repeats what it was answered word for word, as its client gives it."""

    def __init__(self, client: Any, tools: Sequence[str] = (), *, stream: bool = False) -> None:
        self.client = client
        self.tools = tools
        self.stream = stream
        self.history: list[Any] = []
        self.text = ""
        """Of the newest answer."""
        self.calls: list[tuple[str, str]] = []
        """Of the newest answer: the id and the arguments of each."""
        self.reason = ""
        """Why the newest answer ended."""

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def results(self, results: Sequence[tuple[str, str]]) -> None:
        """The result of each call, by its id."""
        raise NotImplementedError

    async def ask(self) -> None:
        raise NotImplementedError

    def rewrite(self, *, spells_numbers: bool, drops_thoughts: bool, drops_text: bool) -> None:
        """Rewrites the newest answer in the history as some clients do. `spells_numbers`: as JavaScript, 2.0 as 2;
        `drops_text`: beside calls alone."""
        raise NotImplementedError

    def copied(self) -> Talk:
        """Another conversation that begins with this one."""
        other = type(self)(self.client, self.tools, stream=self.stream)
        other.history = copy.deepcopy(self.history)
        other.calls = list(self.calls)
        return other


def spelt_by_javascript(value: Any) -> Any:
    """The value of JSON as JavaScript writes it after it has read it."""
    if isinstance(value, dict):
        return {name: spelt_by_javascript(each) for name, each in value.items()}
    if isinstance(value, list):
        return [spelt_by_javascript(each) for each in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _respelt(arguments: str) -> str:
    """Arguments that a client has read and written again; what no client can read stays as it is."""
    found = object_of(arguments)
    if found is None:
        return arguments
    return json.dumps(spelt_by_javascript(found), separators=(",", ":"))


class ChatTalk(Talk):
    def results(self, results: Sequence[tuple[str, str]]) -> None:
        self.history += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results]

    async def ask(self) -> None:
        about = [{"name": name, "parameters": SCHEMA} for name in self.tools]
        body: Any = {"model": "any", "messages": self.history}
        if about:
            body["tools"] = [{"type": "function", "function": each} for each in about]
        if self.stream:
            message, self.reason = await self._streamed(body)
        else:
            (choice,) = (await self.client.chat.completions.create(**body)).choices
            message = choice.message.model_dump(exclude_none=True)
            self.reason = choice.finish_reason
        self.text = message.get("content") or ""
        self.calls = [(call["id"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        self.history.append(message)

    async def _streamed(self, body: Any) -> tuple[dict[str, Any], str]:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        calls: list[Any] = []
        reason = ""
        async for chunk in await self.client.chat.completions.create(**body, stream=True):
            (choice,) = chunk.choices
            message["content"] += choice.delta.content or ""
            calls += [call.model_dump(exclude_none=True) for call in choice.delta.tool_calls or ()]
            reason = choice.finish_reason or reason
        if calls:
            message["tool_calls"] = calls
        return message, reason

    def rewrite(self, *, spells_numbers: bool, drops_thoughts: bool, drops_text: bool) -> None:
        message = self.history[-1]
        if drops_thoughts:
            message.pop("reasoning_content", None)
        for call in message.get("tool_calls") or ():
            if spells_numbers:
                call["function"]["arguments"] = _respelt(call["function"]["arguments"])
            if drops_text:
                message["content"] = None


class ResponsesTalk(Talk):
    def results(self, results: Sequence[tuple[str, str]]) -> None:
        self.history += [{"type": "function_call_output", "call_id": id, "output": text} for id, text in results]

    async def ask(self) -> None:
        tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in self.tools]
        body: Any = {"model": "any", "input": self.history, "tools": tools}
        if self.stream:
            async for event in await self.client.responses.create(**body, stream=True):
                answer: Any = getattr(event, "response", None)
        else:
            answer = await self.client.responses.create(**body)
        self.text, self.reason = answer.output_text, answer.status
        self.calls = [(item.call_id, item.arguments) for item in answer.output if item.type == "function_call"]
        self.history += [item.model_dump(exclude_none=True) for item in answer.output]
        self._newest = len(answer.output)

    def rewrite(self, *, spells_numbers: bool, drops_thoughts: bool, drops_text: bool) -> None:
        items = self.history[-self._newest :]
        if drops_thoughts:
            items = [item for item in items if item["type"] != "reasoning"]
        if drops_text and self.calls:
            items = [item for item in items if item["type"] != "message"]
        if spells_numbers:
            for item in items:
                if item["type"] == "function_call":
                    item["arguments"] = _respelt(item["arguments"])
        self.history[-self._newest :] = items


class MessagesTalk(Talk):
    def results(self, results: Sequence[tuple[str, str]]) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results]
        self.history.append({"role": "user", "content": blocks})

    async def ask(self) -> None:
        tools = [{"name": name, "input_schema": SCHEMA} for name in self.tools]
        body: Any = {"model": "any", "messages": self.history, "max_tokens": 20_000, "tools": tools}
        if self.stream:
            async with self.client.messages.stream(**body) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await self.client.messages.create(**body)
        self.text = "".join(block.text for block in answer.content if block.type == "text")
        self.calls = [(block.id, json.dumps(block.input)) for block in answer.content if block.type == "tool_use"]
        self.reason = answer.stop_reason
        self.history.append({"role": "assistant", "content": [each.model_dump() for each in answer.content]})

    def rewrite(self, *, spells_numbers: bool, drops_thoughts: bool, drops_text: bool) -> None:
        blocks = self.history[-1]["content"]
        if drops_thoughts:
            blocks = [block for block in blocks if block["type"] != "thinking"]
        if drops_text and self.calls:
            blocks = [block for block in blocks if block["type"] != "text"]
        if spells_numbers:
            for block in blocks:
                if block["type"] == "tool_use":
                    block["input"] = spelt_by_javascript(block["input"])
        self.history[-1]["content"] = blocks


KINDS: dict[str, type[Talk]] = {"chat": ChatTalk, "responses": ResponsesTalk, "messages": MessagesTalk}
PROTOCOLS = tuple(KINDS)


@asynccontextmanager
async def talking(session: Session, protocol: str, tools: Sequence[str] = (), **options: Any) -> AsyncIterator[Talk]:
    """A conversation with a session through a real server and the real client of the protocol."""
    kind = KINDS[protocol]
    async with SessionServer() as server:
        address = server.open(session)
        async with (of_anthropic if kind is MessagesTalk else of_openai)(address) as client:
            yield kind(client, tools, **options)
