"""Draws: from a sample request on the wire to a batch with its payloads, and to the messages that bring them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame
from replay_server.errors import invalid
from replay_server.limits import MAX_EXCLUDE, MAX_ROWS, MAX_SCOPE
from replay_server.rpc.messages import split_payloads
from replay_server.tables.batch import Batch, SampleRequest
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.payloads import DamagedPayloads, Payload
from replay_server.tables.waiting import deadline_at, result_of


async def draw(buffer: ReplayBuffer, request: pb.SampleRequest) -> tuple[int, Batch, Iterator[Payload]]:
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


def responses(
    buffer: ReplayBuffer, batch_id: int, batch: Batch, payloads: Iterable[Payload]
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
