"""Sampling: draws batches for readers, sends them, and gives back the batches that readers do not take.

* A drawn batch is outstanding until exactly one call of `take` or `give_back` ends it, whatever the client does.
* The payloads of an outstanding batch stay in storage until they are sent.
* In durable mode a reader is told that a batch is its own only after that is written.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack

from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame
from replay_server.errors import invalid
from replay_server.limits import MAX_BYTES_AHEAD, MAX_EXCLUDE, MAX_ROWS, MAX_SCOPE
from replay_server.rpc.messages import split_payloads
from replay_server.tables.batches import SampleBatch, SampleRequest
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.payloads import DamagedPayloads, Payload
from replay_server.tables.waiting import deadline_at, result_of

Response = Frame[pb.SampleResponse]


async def draw(buffer: ReplayBuffer, request: pb.SampleRequest) -> tuple[int, SampleBatch, Iterator[Payload]]:
    """The id of the batch, for `take` or `give_back`, the batch, and the payload of each row, as ReplayBuffer.payloads.

    Waits for its turn.
    """
    if request.num_samples > MAX_ROWS:
        raise invalid(f"num_samples {request.num_samples}: at most {MAX_ROWS} in one request")
    if len(request.exclude) > MAX_EXCLUDE:
        raise invalid(f"{len(request.exclude)} keys to exclude: at most {MAX_EXCLUDE} in one request")
    if len(request.scope) > MAX_SCOPE:
        raise invalid(f"a scope of {len(request.scope)} characters: at most {MAX_SCOPE}")
    wanted = SampleRequest(
        num_samples=request.num_samples,
        min_samples=request.min_samples if request.HasField("min_samples") else request.num_samples,
        distinct=not request.allow_repeats,
        scope=request.scope,
        exclude=frozenset(request.exclude),
    )
    deadline = deadline_at(buffer.clock(), request.timeout if request.HasField("timeout") else None)
    while True:
        pending = buffer.sample(request.table, wanted, deadline)
        try:
            batch_id, batch = await result_of(pending, buffer.clock(), buffer.time_out, buffer.abandon)
        except asyncio.CancelledError:
            if pending.drawn is not None:  # drawn in the moment in which the client went away
                buffer.give_back(pending.drawn)
            raise
        try:
            return batch_id, batch, buffer.payloads(batch.keys.tolist())
        except DamagedPayloads as damage:  # others take their place
            buffer.give_back(batch_id)
            buffer.discard(damage.keys)


def responses_of(
    buffer: ReplayBuffer, batch_id: int, batch: SampleBatch, payloads: Iterable[Payload]
) -> Iterator[Frame[pb.SampleResponse]]:
    """The messages that bring a batch. Raises DamagedPayloads."""
    first = pb.SampleResponse(
        batch=batch_id,
        keys=batch.keys.tolist(),
        priorities=batch.priorities.tolist(),
        probabilities=batch.probabilities.tolist(),
        ages=(buffer.clock() - batch.inserted_at).tolist(),
        policy_versions=batch.policy_versions.tolist(),
        times_sampled=batch.times_sampled.tolist(),
        policy_version=buffer.policy.version,
        table_size=batch.table_size,
        payload_sizes=batch.sizes.tolist(),
    )
    return split_payloads(first, payloads)


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
        self._untaken: dict[int, tuple[SampleBatch, ExitStack]] = {}
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
                batch_id, batch, payloads = await draw(self._buffer, self._request)
                self._untaken[batch_id] = batch, (share := ExitStack())
                share.enter_context(self._share(len(batch)))
                async with self._whole_batch:
                    for response in responses_of(self._buffer, batch_id, batch, payloads):
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


class Leases:
    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._open: dict[int, tuple[asyncio.TimerHandle, ExitStack]] = {}
        """By batch: what ends the lease, and its share of what clients may hold."""
        self._settled: dict[int, bool] = {}
        """The last batches that were acknowledged (False) or given back (True), so that a retry is recognised."""

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, batch_id: int, seconds: float, share: ExitStack) -> None:
        """The batch goes back after so many seconds; `share` is closed when the lease ends."""
        expire = functools.partial(self._settle, batch_id, give_back=True)
        self._open[batch_id] = asyncio.get_running_loop().call_later(seconds, expire), share

    def acknowledge(self, batches: Sequence[int], give_back: bool) -> list[int]:
        """The readers keep these batches, or give them back. Returns those whose lease is over."""
        missing = []
        for batch_id in batches:
            if self._settle(batch_id, give_back):
                self._settled[batch_id] = give_back
            elif self._settled.get(batch_id) is not give_back:  # otherwise it is a retry, whose answer was lost
                missing.append(batch_id)
        while len(self._settled) > MAX_ROWS:
            del self._settled[next(iter(self._settled))]
        return missing

    def _settle(self, batch_id: int, give_back: bool) -> bool:
        lease = self._open.pop(batch_id, None)
        if lease is None:
            return False
        timer, share = lease
        timer.cancel()
        share.close()
        if give_back:
            self._buffer.give_back(batch_id)
        else:
            self._buffer.take(batch_id, sent=True)
        return True
