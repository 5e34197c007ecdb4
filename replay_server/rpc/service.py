"""ReplayService: the gRPC methods. Wire to table calls and back, nothing else.

Payload bytes are never decoded. A large item arrives, lies and leaves in the pieces that its client chose.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import grpc
import numpy as np
from google.protobuf.message_factory import GetMessageClass

from replay_protos import replay_pb2 as pb
from replay_protos.framing import SERVICE, Frame, frame_reader, write_frame
from replay_protos.replay_pb2_grpc import ReplayServicer
from replay_server.config import LimitsSection
from replay_server.errors import Refused, busy, invalid, unsupported
from replay_server.limits import (
    MAX_CHANGES,
    MAX_KEYS,
    MAX_LEASE,
    MAX_ROWS,
    MAX_ROWS_IN_HAND,
    MAX_SAMPLE_STREAMS,
    MAX_WEIGHTS,
)
from replay_server.rpc import info
from replay_server.rpc.budget import Budget
from replay_server.rpc.insert_acks import acknowledged, refuse_taken_back, row_error
from replay_server.rpc.messages import join_messages, split_payloads
from replay_server.rpc.rpc_methods import Calls, Context, endless, parser, stream, unary
from replay_server.rpc.sampling import Leases, SampleStream, draw, responses_of
from replay_server.storage.checkpointer import Checkpointer
from replay_server.storage.journal import Journal
from replay_server.tables.admission import Admission
from replay_server.tables.batches import InsertBatch
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.payloads import DamagedPayloads, Payload
from replay_server.tables.table import ITEM_ORDERS
from replay_server.tables.waiting import deadline_at, result_of
from replay_server.telemetry import host, tracing
from replay_server.telemetry.latency import Latencies

_VERSION = version("replay-server")
_PORTION = 256
"""Rows offered to the buffer at a time."""

T = TypeVar("T")


class ReplayService(ReplayServicer):
    """The methods that carry payloads deal in Frames; `add_service` registers them with the serializers for that.

    The generated base class declares them with plain messages, hence their `type: ignore[override]`.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        limits: LimitsSection,
        data_dir: Path | None = None,
        journal: Journal | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        """With a journal nobody is told of a change before it is written."""
        self._checkpointer = checkpointer
        self.buffer = buffer
        self._journal = journal
        self._data_dir = data_dir
        self._limits = limits
        self.calls = Calls(limits)
        unfinished = max(limits.max_unfinished_bytes, buffer.max_payload_bytes)
        self._unfinished = Budget(unfinished, "bytes of items that are not complete (max_unfinished_bytes)")
        self._waiting = Budget(limits.max_waiting_bytes, "bytes of items that wait for their table (max_waiting_bytes)")
        self._outstanding = Budget(MAX_ROWS_IN_HAND, "samples under leases or drawn ahead")
        self.server_id = secrets.randbits(63)
        self._started = buffer.clock()
        self._insert_streams = 0
        self._sample_streams = 0
        self._streams_of: Counter[str] = Counter()
        """Sample streams, by connection."""
        self._leases = Leases(buffer)
        if buffer.admission is not None:  # from before a restart
            for when in buffer.admission.expiries():
                self._expire_permits_at(when)

    def close(self) -> None:
        """Ends the calls that would not end by themselves."""
        self.calls.close()

    # ------------------------------------------------------------------------------------------------ insert

    @unary
    async def Insert(self, request: Frame[pb.InsertRequest], context: Context) -> pb.InsertResponse:
        whole = pb.InsertResponse()
        async for part in self._insert(_once(request), context.peer()):
            whole.decided += part.decided
            whole.errors.extend(part.errors)
        await self._durable()
        if self._journal is not None:
            refuse_taken_back(whole, request.head.keys, self._journal)
        if whole.decided < len(request.head.keys):
            raise invalid("the payload is shorter than payload_sizes says")
        return whole

    @endless
    async def InsertStream(
        self, requests: AsyncIterator[Frame[pb.InsertRequest]], context: Context
    ) -> AsyncIterator[pb.InsertResponse]:
        self._insert_streams += 1
        try:
            insert = functools.partial(self._insert, client=context.peer())
            answers = insert(requests) if self._journal is None else acknowledged(self._journal, insert, requests)
            async for response in answers:
                yield response
        finally:
            self._insert_streams -= 1

    async def _insert(
        self, requests: AsyncIterator[Frame[pb.InsertRequest]], client: str
    ) -> AsyncIterator[pb.InsertResponse]:
        """Inserts what comes, in order. What is decided is told at the end of each message and before each wait."""
        room = functools.partial(self._unfinished.held_in_turn, client)
        async for message in join_messages(requests, self.buffer.max_payload_bytes, room, self._limits.stall_timeout):
            response = pb.InsertResponse()
            # In portions, with a turn for others after each step: many rows that enter one by one take seconds.
            for number, inserts in enumerate(_portions(message.inserts)):
                if number:
                    await asyncio.sleep(0)
                while True:
                    try:
                        if message.refusal is not None:
                            raise message.refusal
                        taken, pending = self.buffer.insert(inserts, deadline_at(self.buffer.clock(), message.timeout))
                        response.decided += taken
                        if pending is not None:
                            if response.decided:
                                yield response
                                response = pb.InsertResponse()
                            try:
                                with self._waiting.held(client, message.nbytes):
                                    await result_of(
                                        pending, self.buffer.clock(), self.buffer.time_out, self.buffer.abandon
                                    )
                            except Refused:
                                self.buffer.abandon(pending)  # unless that is over
                                raise
                            response.decided += 1
                            taken += 1
                    except Refused as refusal:
                        key = inserts.keys[0]
                        response.errors.append(row_error(key, refusal))
                        response.decided += 1
                        taken = 1
                    if taken == len(inserts):
                        break
                    inserts = inserts[taken:]
                    await asyncio.sleep(0)
            yield response

    # ------------------------------------------------------------------------------------------------ sample

    @stream
    async def Sample(  # type: ignore[override]
        self, request: pb.SampleRequest, context: Context
    ) -> AsyncGenerator[Frame[pb.SampleResponse]]:
        if not 0 <= request.lease <= MAX_LEASE:
            raise invalid(f"lease must be a number of seconds from 0 to {MAX_LEASE:g}, not {request.lease}")
        batch_id, batch, payloads = await draw(self.buffer, request)
        settled = False
        with ExitStack() as held:
            try:
                if request.lease:
                    held.enter_context(self._outstanding.held(context.peer(), len(batch)))
                responses = responses_of(self.buffer, batch_id, batch, payloads)
                last = next(responses)
                for response in responses:
                    yield last
                    last = response
                if self._journal is not None and not request.lease:
                    # A reader that has it all may rely on it that nobody gets it again, whatever happens to us.
                    settled = True
                    self.buffer.take(batch_id, sent=True)
                    await self._durable()
                yield last
                if request.lease:
                    settled = True
                    self._leases.begin(batch_id, request.lease, held.pop_all())
                elif not settled:
                    settled = True
                    self.buffer.take(batch_id, sent=True)
            except DamagedPayloads as damage:
                settled = True
                self.buffer.give_back(batch_id)
                raise self.buffer.discarded(damage) from None
            finally:
                if not settled:
                    self.buffer.give_back(batch_id)

    @endless
    async def SampleStream(  # type: ignore[override]
        self, requests: AsyncIterator[pb.SampleStreamRequest], context: Context
    ) -> AsyncIterator[Frame[pb.SampleResponse]]:
        reader = aiter(requests)
        opening = await anext(reader, None)
        if opening is None or not opening.HasField("open"):
            raise invalid("the first message of a sample stream must have `open`")
        client = context.peer()
        if self._streams_of[client] >= MAX_SAMPLE_STREAMS:
            raise busy(f"{MAX_SAMPLE_STREAMS} sample streams are open on this connection: use fewer, or connect anew")
        share = functools.partial(self._outstanding.held, client)
        sample_stream = SampleStream(self.buffer, reader, opening, share, self._durable)
        self._sample_streams += 1
        self._streams_of[client] += 1
        try:
            async with aclosing(sample_stream.responses()) as responses:
                async for response in responses:
                    yield response
        finally:
            self._sample_streams -= 1
            self._streams_of[client] -= 1
            if not self._streams_of[client]:
                del self._streams_of[client]

    @unary
    async def AcknowledgeSamples(
        self, request: pb.AcknowledgeSamplesRequest, context: Context
    ) -> pb.AcknowledgeSamplesResponse:
        if len(request.batches) > MAX_ROWS:
            raise invalid(f"{len(request.batches)} batches: at most {MAX_ROWS} in one request")
        missing = self._leases.acknowledge(request.batches, request.give_back)
        await self._durable()
        return pb.AcknowledgeSamplesResponse(applied=len(request.batches) - len(missing), missing=missing)

    # ------------------------------------------------------------------------------- update, delete, get, list

    @unary
    async def UpdatePriorities(self, request: pb.UpdatePrioritiesRequest, context: Context) -> pb.MutationResponse:
        if len(request.keys) % 8 or len(request.priorities) % 8:
            raise invalid(f"keys and priorities of {len(request.keys)} and {len(request.priorities)} bytes: 8 for each")
        check_keys(len(request.keys) // 8)
        keys, priorities = np.frombuffer(request.keys, dtype="<u8"), np.frombuffer(request.priorities, dtype="<f8")
        applied, missing = self.buffer.update_priorities(request.table, keys, priorities)
        await self._durable()
        return pb.MutationResponse(applied=applied, missing=missing)

    @unary
    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.MutationResponse:
        check_keys(len(request.keys))
        missing = self.buffer.delete(request.table, request.keys)
        await self._durable()
        return pb.MutationResponse(applied=len(set(request.keys)) - len(missing), missing=missing)

    @stream
    async def Get(  # type: ignore[override]
        self, request: pb.GetRequest, context: Context
    ) -> AsyncGenerator[Frame[pb.GetResponse]]:
        if len(request.keys) > MAX_ROWS:
            raise invalid(f"{len(request.keys)} keys: at most {MAX_ROWS} in one request")
        buffer = self.buffer
        wanted = dict.fromkeys(request.keys)
        keys = [key for key in wanted if key in buffer.items]
        payloads: Iterable[Payload] = ()
        while not request.without_payloads:
            try:
                payloads = buffer.payloads(keys)
                break
            except DamagedPayloads as damage:
                buffer.discard(damage.keys)
                keys = [key for key in keys if key in buffer.items and key not in damage.keys]
        found = set(keys)
        items = [buffer.items[key] for key in keys]
        now = buffer.clock()
        first = pb.GetResponse(
            keys=keys,
            ages=[now - item.inserted_at for item in items],
            policy_versions=[item.policy_version for item in items],
            policy_version=buffer.policy.version,
            missing=[key for key in wanted if key not in found],
            payload_sizes=[0 if request.without_payloads else item.nbytes for item in items],
        )
        for table in buffer.tables.values():
            slots = table.columns.slots
            rows = [row for row, key in enumerate(keys) if key in slots]
            if rows:
                places = [slots[keys[row]] for row in rows]
                first.memberships.add(
                    table=table.name,
                    rows=rows,
                    priorities=table.columns.priority[places].tolist(),
                    times_sampled=table.columns.times_sampled[places].tolist(),
                )
        if request.without_payloads:
            yield Frame(first, ())
            return
        # While they are sent the payloads count, whatever becomes of the items.
        buffer.hold(keys)
        try:
            for response in split_payloads(first, payloads):
                yield response
        except DamagedPayloads as damage:
            raise self.buffer.discarded(damage) from None
        finally:
            buffer.release(keys)

    @unary
    async def ListItems(self, request: pb.ListItemsRequest, context: Context) -> pb.ListItemsResponse:
        table = self.buffer.table(request.table)
        order_by = request.order_by or "age"
        if order_by not in ITEM_ORDERS:
            raise invalid(f"order_by {order_by[:40]!r}: one of {', '.join(ITEM_ORDERS)}")
        if request.page and not (request.page.isascii() and request.page.isdecimal() and len(request.page) < 19):
            raise invalid(f"page {request.page[:40]!r} is not one that this server gave out")
        current, columns = self.buffer.policy.version, table.columns
        slots = table.select_items(
            order_by=order_by,
            descending=request.descending,
            min_priority=request.min_priority if request.HasField("min_priority") else -math.inf,
            max_priority=request.max_priority if request.HasField("max_priority") else math.inf,
            min_version=current - request.max_staleness if request.HasField("max_staleness") else -math.inf,
            max_version=current - request.min_staleness if request.HasField("min_staleness") else math.inf,
        )
        start = int(request.page or 0)
        limit = min(request.limit or 100, MAX_ROWS)
        chosen = slots[start : start + limit]
        return pb.ListItemsResponse(
            keys=columns.key[chosen].tolist(),
            priorities=columns.priority[chosen].tolist(),
            ages=(self.buffer.clock() - columns.inserted_at[chosen]).tolist(),
            policy_versions=columns.policy_version[chosen].tolist(),
            times_sampled=columns.times_sampled[chosen].tolist(),
            payload_sizes=columns.size[chosen].tolist(),
            policy_version=current,
            matching=slots.size,
            next_page=str(start + limit) if start + limit < slots.size else "",
        )

    # ------------------------------------------------------------------------------------------------ tables

    @unary
    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.ServerInfo:
        if len(request.tables) > MAX_ROWS:
            raise invalid(f"{len(request.tables)} tables: at most {MAX_ROWS} in one request")
        return self.server_info(request.tables)

    def server_info(self, tables: Sequence[str] = ()) -> pb.ServerInfo:
        """The whole of ServerInfo; `tables` chooses some, none means all."""
        server_info = info.server_info(self.buffer, tables)
        server_info.version = _VERSION
        server_info.server_id = self.server_id
        server_info.uptime = self.buffer.clock() - self._started
        server_info.insert_streams = self._insert_streams
        server_info.sample_streams = self._sample_streams
        server_info.time = time.time()
        server_info.resident_bytes = host.resident_bytes()
        server_info.memory_available = host.memory_available()
        if self._data_dir is not None:
            server_info.disk_available = host.disk_available(self._data_dir)
        return server_info

    @unary
    async def UpdateTable(self, request: pb.UpdateTableRequest, context: Context) -> pb.TableInfo:
        if len(request.changes) > MAX_CHANGES:
            raise invalid(f"changes of {len(request.changes)} characters: at most {MAX_CHANGES}")
        try:
            changes = json.loads(request.changes)
        except (ValueError, RecursionError) as error:
            raise invalid(f"changes must be a JSON object: {str(error)[:200]}") from error
        if not isinstance(changes, dict):
            raise invalid(f"changes must be a JSON object, not {request.changes[:40]!r}")
        table = self.buffer.update_table(request.table, changes)
        await self._durable()
        return info.table_info(self.buffer, table)

    @unary
    async def Reset(self, request: pb.ResetRequest, context: Context) -> pb.ResetResponse:
        removed = self.buffer.reset(request.table)
        await self._durable()
        return pb.ResetResponse(removed=removed)

    # ------------------------------------------------------------------------------- policy version, admission

    @unary
    async def SetPolicyVersion(self, request: pb.SetPolicyVersionRequest, context: Context) -> pb.Policy:
        if len(request.weights) > MAX_WEIGHTS or not request.weights.isprintable():
            raise invalid(
                f"weights {request.weights[:100]!r}: the location of weights has at most {MAX_WEIGHTS} characters, all "
                f"of them printable"
            )
        self.buffer.set_policy_version(request.version, request.weights, request.rollback)
        await self._durable()
        return info.policy(self.buffer)

    @unary
    async def GetPolicy(self, request: pb.GetPolicyRequest, context: Context) -> pb.Policy:
        return info.policy(self.buffer)

    @endless
    async def WatchPolicy(self, request: pb.GetPolicyRequest, context: Context) -> AsyncIterator[pb.Policy]:
        changed = asyncio.Event()
        self.buffer.on_policy.add(changed.set)
        try:
            while True:
                changed.clear()
                yield info.policy(self.buffer)
                await changed.wait()
        finally:
            self.buffer.on_policy.discard(changed.set)

    @unary
    async def AcquirePermits(self, request: pb.AcquirePermitsRequest, context: Context) -> pb.Permits:
        admission = self._admission()
        self.buffer.check_open()
        timeout = request.timeout if request.HasField("timeout") else None
        pending = admission.acquire(request.count, deadline_at(self.buffer.clock(), timeout))
        try:
            lease = await result_of(pending, self.buffer.clock(), admission.time_out, admission.abandon)
            await self._durable()
        except asyncio.CancelledError:
            if pending.grant is not None:
                admission.release(pending.grant.id)
            raise
        self._expire_permits_at(lease.expires)
        return pb.Permits(lease=lease.id, count=lease.count, ttl=admission.config.permit_ttl)

    @unary
    async def ReleasePermits(self, request: pb.ReleasePermitsRequest, context: Context) -> pb.ReleasePermitsResponse:
        released = self._admission().release(request.lease, request.count)
        await self._durable()
        return pb.ReleasePermitsResponse(released=released)

    def _admission(self) -> Admission:
        if self.buffer.admission is None:
            raise unsupported("this server has no [admission] in its configuration")
        return self.buffer.admission

    def _expire_permits_at(self, when: float) -> None:
        loop = asyncio.get_running_loop()
        # A little late rather than a little early: the clocks of loop and buffer agree, their rounding need not.
        loop.call_later(max(0.0, when - self.buffer.clock()) + 0.001, self._admission().expire)

    # ------------------------------------------------------------------------------------------------ checkpoints

    @unary
    async def Checkpoint(self, request: pb.CheckpointRequest, context: Context) -> pb.CheckpointInfo:
        return info.checkpoint(await self._checkpoints().write(request.name))

    @unary
    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Context) -> pb.ListCheckpointsResponse:
        listed = await self._checkpoints().listed(request.verify)
        return pb.ListCheckpointsResponse(checkpoints=[info.listed_checkpoint(entry) for entry in listed])

    def _checkpoints(self) -> Checkpointer:
        if self._checkpointer is None:
            raise unsupported(
                "this server has no place for checkpoints: set dir in [checkpoints], or data_dir in [server]"
            )
        return self._checkpointer

    # ------------------------------------------------------------------------------------------------ waiting

    async def _durable(self) -> None:
        """Returns when all changes until now are written, at once if that is not asked for."""
        if self._journal is not None:
            await self._journal.durable()


def check_keys(n: int) -> None:
    if n > MAX_KEYS:
        raise invalid(f"{n} keys: at most {MAX_KEYS} in one request")


def add_service(service: ReplayService, server: grpc.aio.Server, latencies: Latencies | None = None) -> None:
    """Registers every method of replay.proto; messages that have a field `payloads` are read and written as Frames.

    With `latencies` every call is timed.
    """
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    handlers = {}
    for method in pb.DESCRIPTOR.services_by_name["Replay"].methods:
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        behavior = getattr(service, method.name)
        if tracing.available() and not method.client_streaming and method.name != "WatchPolicy":
            behavior = tracing.traced(method.name, behavior)
        if latencies is not None:
            timed = latencies.of_stream if method.client_streaming else latencies.of_call
            behavior = (latencies.of_watch if method.name == "WatchPolicy" else timed)(method.name, behavior)
        handlers[method.name] = kinds[method.client_streaming, method.server_streaming](
            behavior,
            parser(frame_reader(request) if "payloads" in method.input_type.fields_by_name else request.FromString),
            write_frame if "payloads" in method.output_type.fields_by_name else response.SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _portions(parts: Iterable[InsertBatch]) -> Iterator[InsertBatch]:
    for part in parts:
        if len(part) <= _PORTION:
            yield part
        else:
            yield from (part[at : at + _PORTION] for at in range(0, len(part), _PORTION))


async def _once(request: T) -> AsyncIterator[T]:
    yield request
