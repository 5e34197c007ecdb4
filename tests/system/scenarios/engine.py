"""An engine server that outlives its clients, and an engine of generators that asks it.

It draws tokens as an inference server does: of all requests at a time, some for each at every tick, until each has its
length. It counts every token that it draws, also those for clients that are killed before they have the answer. Each
completion has a number of its own, which its first two tokens tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replay_generator.engines import Completion, OnFinished, SamplingConfig

TICK = 0.01
TOKENS_PER_TICK = 4
BASE = 1000


def length(rng: random.Random) -> int:
    """Most completions are short, and some take many times as long: the others of their group wait for them."""
    return rng.randrange(20, 80) if rng.random() < 0.8 else rng.randrange(80, 400)


def number_of(token_ids: Sequence[int]) -> int:
    """The number of the completion with these tokens."""
    return int(token_ids[0]) * BASE + int(token_ids[1])


@dataclass
class _Drawing:
    number: int
    left: int


class EngineServer:
    """Serves on a port of this machine, from a thread of its own, until `stop`."""

    def __init__(self, seed: int) -> None:
        self.drawn = 0
        """Tokens, for whomever."""
        self._rng = random.Random(seed)
        self._numbers = 0
        self._active: dict[asyncio.Task[Any], list[_Drawing]] = {}
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        self._started.wait()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port: int = server.sockets[0].getsockname()[1]
        self._started.set()
        ticking = asyncio.create_task(self._tick())
        await self._stop.wait()
        ticking.cancel()
        server.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            for drawings in self._active.values():
                for drawing in drawings:
                    drawn = min(TOKENS_PER_TICK, drawing.left)
                    drawing.left -= drawn
                    self.drawn += drawn

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        with contextlib.suppress(ConnectionError, ValueError):
            count = int(await reader.readline())
            gone = asyncio.create_task(reader.read())
            gone.add_done_callback(lambda gone: gone.cancelled() or gone.exception())  # a kill may reset it
            lengths = [length(self._rng) for _ in range(count)]
            self._active[task] = drawings = []
            for n in lengths:
                self._numbers += 1
                drawings.append(_Drawing(self._numbers, n))
            running = dict(enumerate(drawings))
            while running and not gone.done():
                await asyncio.sleep(TICK)
                for index in [index for index, drawing in running.items() if not drawing.left]:
                    answer = [index, running.pop(index).number, lengths[index]]  # as soon as it has ended
                    writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
            gone.cancel()
        self._active.pop(task, None)
        writer.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


class OneToken:
    """A tokenizer for which each text is one token."""

    def encode(self, text: str) -> list[int]:
        return [1]


class RemoteEngine:
    """Asks an EngineServer, over a connection for each request."""

    def __init__(self, port: int) -> None:
        self.tokenizer: Any = OneToken()
        self.max_length = 100_000
        self.model = None
        self._port = port

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, finished: OnFinished | None = None
    ) -> list[Completion]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        completions: dict[int, Completion] = {}
        try:
            writer.write(b"%d\n" % n)
            while len(completions) < n:
                index, number, tokens = json.loads(await reader.readline())
                ids = [number // BASE, number % BASE, *[0] * (tokens - 2)]
                completions[index] = Completion(ids, [-0.5] * tokens, str(number), "stop", [0] * tokens)
                if finished is not None:
                    finished(index, completions[index])
        finally:
            writer.close()
        return [completions[index] for index in range(n)]

    async def load_weights(self, path: str, version: int) -> None:
        raise AssertionError("nobody publishes weights here")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        raise AssertionError("nobody publishes weights here")

    async def close(self) -> None:
        pass
