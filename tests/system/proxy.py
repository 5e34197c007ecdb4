"""FaultyProxy: a TCP proxy that delays, cuts short and breaks the connections through it, as a seed says."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Self

_CHUNK = 16_384


@dataclass(frozen=True)
class Faults:
    """How often what happens, for each chunk of at most 16 kB in either direction."""

    delay: float = 0.05
    """Comes later, by up to `longest_delay`."""
    reset: float = 0.001
    """The connection is reset at both ends; the chunk is lost."""
    truncate: float = 0.001
    """A part of the chunk gets through, then the connection is closed."""
    drop: float = 0.0005
    """From here on everything is lost without a word, in both directions, for up to `longest_silence`; then reset."""
    refuse: float = 0.1
    """For each new connection: it is closed at once."""
    longest_delay: float = 0.05
    longest_silence: float = 2.0


class FaultyProxy:
    """Listens on `address` and passes on to `target` ("host:port"), on a thread of its own; a context manager."""

    def __init__(self, target: str, seed: int, faults: Faults | None = None) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._random = random.Random(seed)
        self.faults = faults or Faults()
        self.happened: Counter[str] = Counter()
        """What was done, by the names of the fields of Faults; `connections` are those that were passed on."""
        self.cut_after: int | None = None
        """Once so many more bytes of the server have passed, all connections are reset, once; None: they are not."""
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    @property
    def breaks(self) -> int:
        """How many connections were broken."""
        return sum(self.happened[name] for name in ("reset", "truncate", "drop"))

    def __enter__(self) -> Self:
        ready = threading.Event()

        async def main() -> None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
            ready.set()

        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(main(), self._loop)
        assert ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Resets every connection there is."""

        def cancel() -> None:
            for task in self._tasks:
                task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def _happens(self, name: str) -> bool:
        happens = self._random.random() < getattr(self.faults, name)
        self.happened[name] += happens
        return happens

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if not self._happens("refuse"):
                with contextlib.suppress(asyncio.CancelledError):  # by `cut`, or at the end
                    await self._pass_on(reader, writer)
        finally:
            self._tasks.discard(task)
            _reset(writer)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            return
        self.happened["connections"] += 1
        ways = [
            asyncio.create_task(self._copy(reader, far_writer)),
            asyncio.create_task(self._copy(far_reader, writer, answers=True)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            _reset(far_writer)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool = False) -> None:
        """Until the connection ends, by itself or by a fault."""
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                if answers and self.cut_after is not None:
                    if len(chunk) >= self.cut_after:
                        writer.write(chunk[: self.cut_after])
                        await writer.drain()
                        await asyncio.sleep(0.01)  # the client reads these bytes before the reset reaches it
                        self.cut_after = None
                        self.cut()
                        return
                    self.cut_after -= len(chunk)
                if self._happens("reset"):
                    return
                if self._happens("truncate"):
                    writer.write(chunk[: self._random.randrange(len(chunk))])
                    await writer.drain()
                    await asyncio.sleep(0.01)
                    return
                if self._happens("drop"):
                    await asyncio.sleep(self._random.uniform(0, self.faults.longest_silence))
                    return
                if self._happens("delay"):
                    await asyncio.sleep(self._random.uniform(0, self.faults.longest_delay))
                writer.write(chunk)
                await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with RST instead of FIN."""
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
