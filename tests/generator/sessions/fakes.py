"""A session that answers from a script, and the real clients that ask it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from replay_client.testing import async_until
from replay_generator.rollouts.sessions.endpoint import SessionServer
from replay_generator.rollouts.sessions.turns import Answer, Ask, Refusal, WrittenCall

CALL = WrittenCall("call1", "add", '{"a": 1, "b": [2.5, "ü"]}')
ARGUMENTS = {"a": 1, "b": [2.5, "ü"]}


def answer(text: str = "Hällo", calls: Any = (), reasoning: str = "", stopped_by: str | None = None) -> Answer:
    return Answer("a1", text, reasoning, calls, "stop", stopped_by, 7, 3)


class ScriptedSession:
    """Answers with the next of its script, or raises it. `gate` holds all turns until it is set."""

    def __init__(self, *script: Answer | Exception, id: str = "secret") -> None:
        self.id, self.script, self.task = id, list(script), SimpleNamespace(max_length=100)
        self.asked: list[Ask] = []
        self.read: list[Answer] = []
        self.refusals: list[Refusal] = []
        self.answers: list[Answer] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._turns: dict[bytes, asyncio.Task[Answer]] = {}

    async def ask(self, ask: Ask, digest: bytes, repeated: bool = False) -> Answer:
        self.asked.append(ask)
        turn = self._turns.get(digest) if repeated else None
        if turn is None or (turn.done() and turn.exception()):
            turn = self._turns[digest] = asyncio.create_task(self._draw())
        return await asyncio.shield(turn)

    async def _draw(self) -> Answer:
        said = self.script.pop(0)
        await self.gate.wait()
        if isinstance(said, Exception):
            raise said
        return said

    async def count(self, ask: Ask) -> int:
        self.asked.append(ask)
        return 42

    def refused(self, refusal: Refusal) -> None:
        self.refusals.append(refusal)

    def delivered(self, answer: Answer) -> None:
        self.read.append(answer)


@asynccontextmanager
async def serving(*script: Answer | Exception, **options: Any) -> AsyncIterator[tuple[ScriptedSession, str]]:
    """A session at a server, and its address."""
    session = ScriptedSession(*script)
    async with SessionServer(**options) as server:
        yield session, server.open(session)  # type: ignore[arg-type]


def of_openai(address: str, **options: Any) -> AsyncOpenAI:
    client = openai.DefaultAsyncHttpxClient(verify=False)  # loading authorities takes long
    return AsyncOpenAI(base_url=f"{address}/v1", api_key="none", http_client=client, **{"max_retries": 0, **options})


def of_anthropic(address: str, **options: Any) -> AsyncAnthropic:
    client = anthropic.DefaultAsyncHttpxClient(verify=False)
    return AsyncAnthropic(base_url=address, api_key="none", http_client=client, **{"max_retries": 0, **options})


until = functools.partial(async_until, pause=0)
"""Waits for a condition, also while a test has stopped the clock of the loop."""
