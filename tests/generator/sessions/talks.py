"""Conversations of a real client with a real session, in each protocol: what a client does with its history."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from replay_generator.sessions.endpoint import SessionServer
from replay_generator.sessions.session import Session
from tests.generator.sessions.fakes import of_anthropic, of_openai

SCHEMA = {"type": "object", "properties": {}}
PROTOCOLS = ("chat", "responses", "messages")


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


@asynccontextmanager
async def talking(session: Session, protocol: str, tools: Sequence[str] = (), **options: Any) -> AsyncIterator[Talk]:
    """A conversation with a session through a real server and the real client of the protocol."""
    kind = {"chat": ChatTalk, "responses": ResponsesTalk, "messages": MessagesTalk}[protocol]
    async with SessionServer() as server:
        address = server.open(session)
        async with (of_anthropic if kind is MessagesTalk else of_openai)(address) as client:
            yield kind(client, tools, **options)
