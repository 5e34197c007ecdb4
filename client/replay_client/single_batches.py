"""Single batches: draws a batch with one call, and takes it when all of its bytes are here.

* The server gives a batch back that nobody takes. `take` may be repeated, so no answer that is lost costs a batch.
* A batch that went back before it was taken is drawn again.
"""

from __future__ import annotations

import secrets

from replay_client.connection import TAKE_SECONDS, Connection, Patience
from replay_client.records import Sample, samples_of
from replay_protos import replay_pb2 as pb

MOST_UNTAKEN = 16
"""Batches kept because no server answered when they were to be taken."""


class SingleBatches:
    """The single batches of one client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._untaken: dict[bytes, tuple[int, list[Sample]]] = {}
        """Batches whose time was up before the server confirmed them, by the request."""

    async def sample(self, request: pb.SampleRequest, seconds: float | None) -> list[Sample]:
        """The samples of one batch, within `seconds` (None: no limit). With `request.lease` the batch is not taken."""
        patience = Patience(self._connection, seconds)
        patience.start()
        leased = request.lease > 0
        same_call = request.SerializeToString(deterministic=True)  # before the lease: a leased call is another call
        request.lease = request.lease or TAKE_SECONDS
        request.request = secrets.randbits(64) or 1

        def left() -> float | None:
            return None if seconds is None else patience.remaining()

        async def attempt(rpc_timeout: float | None) -> tuple[int, list[Sample]]:
            if seconds is not None:  # the server waits for what is left of the timeout, and not for all of it again
                request.timeout = patience.remaining()
            first, payloads = await self._connection.payloads.Sample(request, timeout=rpc_timeout)
            return first.batch, samples_of(first, payloads, leased)

        while True:
            drawn = self._untaken.pop(same_call, None)
            batch, samples = drawn if drawn is not None else await self._connection.call(attempt, left())
            if leased or await self._take(batch, samples, same_call, left()):
                return samples

    async def _take(self, batch: int, samples: list[Sample], same_call: bytes, timeout: float | None) -> bool:
        """Whether the batch is taken. If only the server knows, it is kept for the next equal call."""
        try:
            return await self._connection.take(batch, timeout)
        except BaseException:
            self._untaken[same_call] = batch, samples
            while len(self._untaken) > MOST_UNTAKEN:
                del self._untaken[next(iter(self._untaken))]
            raise
