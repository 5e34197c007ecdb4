"""SampleStream: batches drawn ahead for one reader, as many as it gave credit for. What it does not take goes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack

from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame
from replay_server.errors import invalid
from replay_server.limits import MAX_BYTES_AHEAD, MAX_ROWS
from replay_server.rpc import draws
from replay_server.tables.batch import Batch
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.payloads import DamagedPayloads

Response = Frame[pb.SampleResponse]


class SampleStream:
    def __init__(
        self,
        buffer: ReplayBuffer,
        requests: AsyncIterator[pb.SampleStreamRequest],
        opening: pb.SampleStreamRequest,
        share: Callable[[int], AbstractContextManager[None]],
        durable: Callable[[], Awaitable[object]],
    ) -> None:
        """`share(n)` holds n samples of what this reader may have in hand; `durable()` ends when what was taken is
        written."""
        self._buffer = buffer
        self._requests = requests
        self._request = opening.open
        self._share = share
        self._durable = durable
        self._credit = asyncio.Semaphore(self._credit_of(opening))
        self._untaken: dict[int, tuple[Batch, ExitStack]] = {}
        self._whole: set[int] = set()
        """Those of them that are all sent, as far as gRPC takes it."""
        self._some_taken = asyncio.Event()
        # Bounded: a reader that is slow holds a few messages here, and the payloads of its batches in the tables.
        self._outgoing: asyncio.Queue[Response | Exception | None] = asyncio.Queue(maxsize=4)
        self._whole_batch = asyncio.Lock()
        """The messages of a batch follow each other."""

    async def responses(self) -> AsyncGenerator[Response]:
        """What the reader is to get, until it ends the stream. Raises Refused."""
        tasks = [asyncio.create_task(self._draw()), asyncio.create_task(self._obey())]
        try:
            while (response := await self._outgoing.get()) is not None:
                if isinstance(response, Exception):
                    raise response
                yield response
        finally:
            for task in tasks:
                task.cancel()
            # Before anything is awaited: a second cancellation would skip what comes after that.
            for batch_id, (_, share) in self._untaken.items():
                share.close()
                self._buffer.give_back(batch_id)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _draw(self) -> None:
        try:
            while True:
                await self._credit.acquire()
                while sum(int(batch.sizes.sum()) for batch, _ in self._untaken.values()) >= MAX_BYTES_AHEAD:
                    self._some_taken.clear()
                    await self._some_taken.wait()
                batch_id, batch, payloads = await draws.draw(self._buffer, self._request)
                self._untaken[batch_id] = batch, (share := ExitStack())
                share.enter_context(self._share(len(batch)))
                async with self._whole_batch:
                    for response in draws.responses(self._buffer, batch_id, batch, payloads):
                        await self._outgoing.put(response)
                self._whole.add(batch_id)
                await asyncio.sleep(0)  # others have their turn between two batches
        except DamagedPayloads as damage:
            if batch_id in self._untaken:
                self._untaken.pop(batch_id)[1].close()
                self._buffer.give_back(batch_id)
            await self._outgoing.put(self._buffer.discarded(damage))
        except Exception as error:
            await self._outgoing.put(error)

    async def _obey(self) -> None:
        try:
            async for request in self._requests:
                for _ in range(self._credit_of(request)):
                    self._credit.release()
                if request.take:
                    await self._take(request.take)
            await self._outgoing.put(None)
        except Exception as error:
            await self._outgoing.put(error)

    async def _take(self, batch_id: int) -> None:
        if batch_id not in self._untaken:
            raise invalid(f"batch {batch_id} is not one of this stream's")
        if batch_id not in self._whole:  # its payloads must stay until they are read
            raise invalid(f"batch {batch_id} is still being sent")
        self._whole.discard(batch_id)
        _, share = self._untaken.pop(batch_id)
        share.close()
        self._some_taken.set()
        if self._buffer.take(batch_id):
            await self._durable()
            answer = pb.SampleResponse(taken=batch_id)
        else:
            answer = pb.SampleResponse(revoked=batch_id)
        async with self._whole_batch:
            await self._outgoing.put(Frame(answer, ()))

    def _credit_of(self, request: pb.SampleStreamRequest) -> int:
        if request.credit * max(1, self._request.num_samples) > MAX_ROWS:
            raise invalid(
                f"credit {request.credit} for batches of {self._request.num_samples}: at most {MAX_ROWS} samples ahead "
                f"at once"
            )
        return request.credit
