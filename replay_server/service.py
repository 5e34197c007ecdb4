"""ReplayService: the gRPC methods. Wire to table calls and back, nothing else.

Payload bytes are never decoded. A large item arrives, lies and leaves in the pieces that its client chose.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
import numpy as np
from google.protobuf.message_factory import GetMessageClass

from replay_protos import replay_pb2 as pb
from replay_protos.framing import SERVICE, Frame, frame_reader, write_frame
from replay_protos.replay_pb2_grpc import ReplayServicer
from replay_server import info
from replay_server.admission import Admission
from replay_server.batch import Batch, SampleRequest
from replay_server.buffer import ReplayBuffer
from replay_server.errors import Refused, invalid, unsupported
from replay_server.frames import MAX_ROWS, join_messages, split_payloads
from replay_server.table import ITEM_ORDERS
from replay_server.waiting import Pending

_PORTION = 256
"""Rows offered to the buffer at a time."""

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
Method = Callable[..., Awaitable[T]]


def unary(method: Method[T]) -> Method[T]:
    """Answers a Refused with its code and message."""

    @functools.wraps(method)
    async def answer(self: ReplayService, request: Any, context: Context) -> T:
        try:
            return await method(self, request, context)
        except Refused as refusal:
            await context.abort(refusal.code, refusal.message)

    return answer


def stream(method: Callable[..., AsyncIterator[T]]) -> Callable[..., AsyncIterator[T]]:
    """The same for a method that answers with a stream."""

    @functools.wraps(method)
    async def answer(self: ReplayService, request: Any, context: Context) -> AsyncIterator[T]:
        try:
            async for response in method(self, request, context):
                yield response
        except Refused as refusal:
            await context.abort(refusal.code, refusal.message)

    return answer


def endless(method: Callable[..., AsyncIterator[T]]) -> Callable[..., AsyncIterator[T]]:
    """The same for a stream that lasts until its client goes: the end of the server ends it as well."""

    @functools.wraps(method)
    async def answer(self: ReplayService, request: Any, context: Context) -> AsyncIterator[T]:
        task = asyncio.current_task()
        assert task is not None
        self._endless.add(task)
        try:
            async for response in stream(method)(self, request, context):
                yield response
        except asyncio.CancelledError:
            if not self._closing:
                raise
            # Clients try again while a server comes back in time.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        finally:
            self._endless.discard(task)

    return answer


class ReplayService(ReplayServicer):
    """The methods that carry payloads deal in Frames; `add_service` registers them with the serializers for that.

    The generated base class declares them with plain messages, hence their `type: ignore[override]`.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer
        self.server_id = secrets.randbits(63)
        self._started = buffer.clock()
        self._insert_streams = 0
        self._sample_streams = 0
        self._leases: dict[int, asyncio.TimerHandle] = {}
        self._endless: set[asyncio.Task[Any]] = set()
        self._closing = False

    def close(self) -> None:
        """Ends the streams that would not end by themselves."""
        self._closing = True
        for task in self._endless:
            task.cancel()

    # ------------------------------------------------------------------------------------------------ insert

    @unary
    async def Insert(self, request: Frame[pb.InsertRequest], context: Context) -> pb.InsertResponse:
        whole = pb.InsertResponse()
        async for part in self._insert(_once(request)):
            whole.decided += part.decided
            whole.errors.extend(part.errors)
        if whole.decided < len(request.head.keys):
            raise invalid("the payload is shorter than payload_sizes says")
        return whole

    @endless
    async def InsertStream(
        self, requests: AsyncIterator[Frame[pb.InsertRequest]], context: Context
    ) -> AsyncIterator[pb.InsertResponse]:
        self._insert_streams += 1
        try:
            async for response in self._insert(requests):
                yield response
        finally:
            self._insert_streams -= 1

    async def _insert(self, requests: AsyncIterator[Frame[pb.InsertRequest]]) -> AsyncIterator[pb.InsertResponse]:
        """Inserts what comes, in order. What is decided is told at the end of each message and before each wait."""
        async for message in join_messages(requests, self.buffer.max_payload_bytes):
            response = pb.InsertResponse()
            # In portions, with a turn for others after each step: many rows that enter one by one take seconds.
            portions = [part[at : at + _PORTION] for part in message.inserts for at in range(0, len(part), _PORTION)]
            for inserts in portions:
                while len(inserts):
                    try:
                        if message.refusal is not None:
                            raise message.refusal
                        taken, pending = self.buffer.insert(inserts, self._deadline(message.timeout))
                        response.decided += taken
                        if pending is not None:
                            if response.decided:
                                yield response
                                response = pb.InsertResponse()
                            await self._wait(pending, self.buffer.time_out, self.buffer.abandon)
                            response.decided += 1
                            taken += 1
                    except Refused as refusal:
                        key = inserts.keys[0]
                        response.errors.add(key=key, code=refusal.code.value[0], message=refusal.message)
                        response.decided += 1
                        taken = 1
                    inserts = inserts[taken:]
                    await asyncio.sleep(0)
            yield response

    # ------------------------------------------------------------------------------------------------ sample

    @stream
    async def Sample(  # type: ignore[override]
        self, request: pb.SampleRequest, context: Context
    ) -> AsyncIterator[Frame[pb.SampleResponse]]:
        if not 0 <= request.lease < math.inf:
            raise invalid(f"lease must be a number of seconds, not {request.lease}")
        batch_id, batch = await self._draw(request)
        sent = False
        try:
            for response in self._sample_responses(batch_id, batch):
                yield response
            sent = True
        finally:
            if not sent:
                self.buffer.give_back(batch_id)
            elif request.lease:
                self._leases[batch_id] = asyncio.get_running_loop().call_later(
                    request.lease, self._settle_lease, batch_id, True
                )
            else:
                self.buffer.take(batch_id, sent=True)

    @endless
    async def SampleStream(  # type: ignore[override]
        self, requests: AsyncIterator[pb.SampleStreamRequest], context: Context
    ) -> AsyncIterator[Frame[pb.SampleResponse]]:
        reader = aiter(requests)
        first = await anext(reader, None)
        if first is None or not first.HasField("open"):
            raise invalid("the first message of a sample stream must have `open`")
        credit = asyncio.Semaphore(_credit(first, first.open))
        untaken: set[int] = set()
        # Bounded: a reader that is slow holds a few messages here, and the payloads of its batches in the tables.
        outgoing: asyncio.Queue[Frame[pb.SampleResponse] | Exception | None] = asyncio.Queue(maxsize=4)
        whole_batch = asyncio.Lock()  # the messages of a batch follow each other

        async def draw() -> None:
            try:
                while True:
                    await credit.acquire()
                    batch_id, batch = await self._draw(first.open)
                    untaken.add(batch_id)
                    async with whole_batch:
                        for response in self._sample_responses(batch_id, batch):
                            await outgoing.put(response)
                    await asyncio.sleep(0)  # others have their turn between two batches
            except Exception as error:
                await outgoing.put(error)

        async def obey() -> None:
            try:
                async for request in reader:
                    for _ in range(_credit(request, first.open)):
                        credit.release()
                    if request.take:
                        if request.take not in untaken:
                            raise invalid(f"batch {request.take} is not one of this stream's")
                        untaken.remove(request.take)
                        taken = self.buffer.take(request.take)
                        answer = pb.SampleResponse(taken=request.take)
                        if not taken:
                            answer = pb.SampleResponse(revoked=request.take)
                        async with whole_batch:
                            await outgoing.put(Frame(answer, ()))
                await outgoing.put(None)
            except Exception as error:
                await outgoing.put(error)

        tasks = [asyncio.create_task(draw()), asyncio.create_task(obey())]
        self._sample_streams += 1
        try:
            while (response := await outgoing.get()) is not None:
                if isinstance(response, Exception):
                    raise response
                yield response
        finally:
            self._sample_streams -= 1
            for task in tasks:
                task.cancel()
            # Before anything is awaited: a second cancellation would skip what comes after that.
            for batch_id in untaken:
                self.buffer.give_back(batch_id)
            await asyncio.gather(*tasks, return_exceptions=True)

    @unary
    async def AcknowledgeSamples(
        self, request: pb.AcknowledgeSamplesRequest, context: Context
    ) -> pb.AcknowledgeSamplesResponse:
        missing = [batch for batch in request.batches if not self._settle_lease(batch, request.give_back)]
        return pb.AcknowledgeSamplesResponse(applied=len(request.batches) - len(missing), missing=missing)

    def _settle_lease(self, batch_id: int, give_back: bool) -> bool:
        timer = self._leases.pop(batch_id, None)
        if timer is None:
            return False
        timer.cancel()
        if give_back:
            self.buffer.give_back(batch_id)
        else:
            self.buffer.take(batch_id, sent=True)
        return True

    async def _draw(self, request: pb.SampleRequest) -> tuple[int, Batch]:
        wanted = SampleRequest(
            num_samples=request.num_samples,
            min_samples=request.min_samples if request.HasField("min_samples") else request.num_samples,
            distinct=not request.allow_repeats,
            scope=request.scope,
            exclude=frozenset(request.exclude),
        )
        if wanted.num_samples > MAX_ROWS:
            raise invalid(f"num_samples {wanted.num_samples}: at most {MAX_ROWS} in one request")
        pending = self.buffer.sample(request.table, wanted, self._deadline(_timeout(request)))
        try:
            return await self._wait(pending, self.buffer.time_out, self.buffer.abandon)
        except asyncio.CancelledError:
            if pending.drawn is not None:  # drawn in the moment in which the client went away
                self.buffer.give_back(pending.drawn)
            raise

    def _sample_responses(self, batch_id: int, batch: Batch) -> Iterator[Frame[pb.SampleResponse]]:
        first = pb.SampleResponse(
            batch=batch_id,
            keys=batch.keys.tolist(),
            priorities=batch.priorities.tolist(),
            probabilities=batch.probabilities.tolist(),
            ages=(self.buffer.clock() - batch.inserted_at).tolist(),
            policy_versions=batch.policy_versions.tolist(),
            times_sampled=batch.times_sampled.tolist(),
            policy_version=self.buffer.policy.version,
            table_size=batch.table_size,
            payload_sizes=batch.sizes.tolist(),
        )
        return split_payloads(first, self.buffer.payloads(batch.keys.tolist()))

    # ------------------------------------------------------------------------------- update, delete, get, list

    @unary
    async def UpdatePriorities(self, request: pb.UpdatePrioritiesRequest, context: Context) -> pb.MutationResponse:
        if len(request.keys) % 8 or len(request.priorities) % 8:
            raise invalid(f"keys and priorities of {len(request.keys)} and {len(request.priorities)} bytes: 8 for each")
        keys, priorities = np.frombuffer(request.keys, dtype="<u8"), np.frombuffer(request.priorities, dtype="<f8")
        applied, missing = self.buffer.update_priorities(request.table, keys, priorities)
        return pb.MutationResponse(applied=applied, missing=missing)

    @unary
    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.MutationResponse:
        missing = self.buffer.delete(request.table, request.keys)
        return pb.MutationResponse(applied=len(set(request.keys)) - len(missing), missing=missing)

    @stream
    async def Get(  # type: ignore[override]
        self, request: pb.GetRequest, context: Context
    ) -> AsyncIterator[Frame[pb.GetResponse]]:
        if len(request.keys) > MAX_ROWS:
            raise invalid(f"{len(request.keys)} keys: at most {MAX_ROWS} in one request")
        buffer = self.buffer
        wanted = dict.fromkeys(request.keys)
        keys = [key for key in wanted if key in buffer.items]
        items = [buffer.items[key] for key in keys]
        now = buffer.clock()
        first = pb.GetResponse(
            keys=keys,
            ages=[now - item.inserted_at for item in items],
            policy_versions=[item.policy_version for item in items],
            policy_version=buffer.policy.version,
            missing=[key for key in wanted if key not in buffer.items],
            payload_sizes=[0 if request.without_payloads else item.nbytes for item in items],
        )
        for table in buffer.tables.values():
            slots = table.columns.slots
            rows = [row for row, key in enumerate(keys) if key in slots]
            if rows:
                found = [slots[keys[row]] for row in rows]
                first.memberships.add(
                    table=table.name,
                    rows=rows,
                    priorities=table.columns.priority[found].tolist(),
                    times_sampled=table.columns.times_sampled[found].tolist(),
                )
        # The payloads are immutable, so they stay whole while they are sent, whatever becomes of the items.
        for response in split_payloads(first, [] if request.without_payloads else buffer.payloads(keys)):
            yield response

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
        server_info = info.server_info(self.buffer, request.tables)
        server_info.version = version("replay-server")
        server_info.server_id = self.server_id
        server_info.uptime = self.buffer.clock() - self._started
        server_info.insert_streams = self._insert_streams
        server_info.sample_streams = self._sample_streams
        return server_info

    @unary
    async def UpdateTable(self, request: pb.UpdateTableRequest, context: Context) -> pb.TableInfo:
        try:
            changes = json.loads(request.changes)
        except (ValueError, RecursionError) as error:
            raise invalid(f"changes must be a JSON object: {str(error)[:200]}") from error
        if not isinstance(changes, dict):
            raise invalid(f"changes must be a JSON object, not {request.changes[:40]!r}")
        return info.table_info(self.buffer, self.buffer.update_table(request.table, changes))

    @unary
    async def Reset(self, request: pb.ResetRequest, context: Context) -> pb.ResetResponse:
        return pb.ResetResponse(removed=self.buffer.reset(request.table))

    # ------------------------------------------------------------------------------- policy version, admission

    @unary
    async def SetPolicyVersion(self, request: pb.SetPolicyVersionRequest, context: Context) -> pb.Policy:
        self.buffer.set_policy_version(request.version, request.weights, request.rollback)
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
        pending = admission.acquire(request.count, self._deadline(_timeout(request)))
        try:
            lease = await self._wait(pending, admission.time_out, admission.abandon)
        except asyncio.CancelledError:
            if pending.lease is not None:
                admission.release(pending.lease.id)
            raise
        self._expire_permits_at(lease.expires)
        return pb.Permits(lease=lease.id, count=lease.count, ttl=admission.config.permit_ttl)

    @unary
    async def ReleasePermits(self, request: pb.ReleasePermitsRequest, context: Context) -> pb.ReleasePermitsResponse:
        return pb.ReleasePermitsResponse(released=self._admission().release(request.lease, request.count))

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
        raise unsupported("this version of the server has no checkpoints")

    @unary
    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Context) -> pb.ListCheckpointsResponse:
        raise unsupported("this version of the server has no checkpoints")

    # ------------------------------------------------------------------------------------------------ waiting

    def _deadline(self, timeout: float | None) -> float:
        if timeout is None:
            return math.inf
        if not timeout >= 0:
            raise invalid(f"timeout must be a number of seconds from 0, not {timeout}")
        return self.buffer.clock() + timeout

    async def _wait(self, pending: Pending[T], time_out: Callable[[Any], None], abandon: Callable[[Any], None]) -> T:
        """The result of `pending`, which ends at its deadline at the latest."""
        remaining = pending.deadline - self.buffer.clock()
        if not pending.done and remaining <= 0:
            time_out(pending)
        if not pending.done:
            loop = asyncio.get_running_loop()
            done: asyncio.Future[None] = loop.create_future()

            def wake() -> None:
                if not done.done():
                    done.set_result(None)

            pending.on_done = wake
            timer = loop.call_later(remaining, time_out, pending) if remaining < math.inf else None
            try:
                await done
            except asyncio.CancelledError:
                abandon(pending)
                raise
            finally:
                if timer is not None:
                    timer.cancel()
        return pending.result()


def add_service(service: ReplayService, server: grpc.aio.Server) -> None:
    """Registers every method of replay.proto; messages that have a field `payloads` are read and written as Frames."""
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    handlers = {}
    for method in pb.DESCRIPTOR.services_by_name["Replay"].methods:
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        handlers[method.name] = kinds[method.client_streaming, method.server_streaming](
            getattr(service, method.name),
            frame_reader(request) if "payloads" in method.input_type.fields_by_name else request.FromString,
            write_frame if "payloads" in method.output_type.fields_by_name else response.SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


async def _once(request: T) -> AsyncIterator[T]:
    yield request


def _timeout(request: pb.SampleRequest | pb.AcquirePermitsRequest) -> float | None:
    return request.timeout if request.HasField("timeout") else None


def _credit(request: pb.SampleStreamRequest, opened: pb.SampleRequest) -> int:
    if request.credit * max(1, opened.num_samples) > MAX_ROWS:
        raise invalid(
            f"credit {request.credit} for batches of {opened.num_samples}: at most {MAX_ROWS} samples ahead at once"
        )
    return request.credit
