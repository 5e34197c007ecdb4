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
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from replay_protos import replay_pb2 as pb
from replay_protos.framing import SERVICE, Frame, frame_reader, write_frame
from replay_protos.replay_pb2_grpc import ReplayServicer
from replay_server import host, info, tracing
from replay_server.acknowledging import acknowledged, refuse
from replay_server.admission import Admission
from replay_server.batch import Batch, SampleRequest
from replay_server.budget import Budget
from replay_server.buffer import ReplayBuffer
from replay_server.checkpoints import Checkpointer
from replay_server.config import LimitsSection
from replay_server.errors import Refused, deadline, full, invalid, unsupported
from replay_server.frames import join_messages, split_payloads
from replay_server.inserts import Inserts
from replay_server.journal import Journal
from replay_server.latency import Latencies
from replay_server.limits import (
    MAX_ANSWERS,
    MAX_BYTES_AHEAD,
    MAX_CHANGES,
    MAX_EXCLUDE,
    MAX_KEYS,
    MAX_LEASE,
    MAX_ROWS,
    MAX_ROWS_IN_HAND,
    MAX_SAMPLE_STREAMS,
    MAX_SCOPE,
    MAX_WEIGHTS,
)
from replay_server.storage import DamagedPayloads, Payload
from replay_server.table import ITEM_ORDERS
from replay_server.waiting import Pending

_PORTION = 256
"""Rows offered to the buffer at a time."""

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
Method = Callable[..., Awaitable[T]]


def parser(parse: Callable[[bytes], T]) -> Callable[[bytes], T | DecodeError]:
    """Gives the error instead of raising it: gRPC would log a traceback for each bad message, and call it UNKNOWN."""

    def parse_or_explain(data: bytes) -> T | DecodeError:
        try:
            return parse(data)
        except DecodeError as error:
            return error

    return parse_or_explain


def readable(request: Any) -> Any:
    """The request, or the stream of them, as parsed. Raises Refused for what is none."""
    if isinstance(request, DecodeError):
        raise invalid(f"the bytes are no message of this protocol: {request}")
    return _readable_each(request) if isinstance(request, AsyncIterator) else request


async def _readable_each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield readable(request)


def unary(method: Method[T]) -> Method[T]:
    """Answers a Refused with its code and message."""

    @functools.wraps(method)
    async def answer(self: ReplayService, request: Any, context: Context) -> T:
        try:
            with self._call():
                return await method(self, readable(request), context)
        except Refused as refusal:
            await context.abort(refusal.code, refusal.message)

    return answer


def stream(method: Callable[..., AsyncGenerator[T]]) -> Callable[..., Awaitable[None]]:
    """The same for a method that answers with payloads; a client that does not read them is not waited for long."""

    @functools.wraps(method)
    async def answer(self: ReplayService, request: Any, context: Context) -> None:
        try:
            with self._call():
                async with aclosing(method(self, readable(request), context)) as responses:
                    await self._send(responses, context)
        except Refused as refusal:
            await context.abort(refusal.code, refusal.message)

    return answer


def endless(method: Callable[..., AsyncIterator[T]]) -> Callable[..., AsyncIterator[T]]:
    """The same for a stream that lasts until its client goes: the end of the server ends it as well.

    Its client may take its time to read: the server holds little for it meanwhile.
    """

    @functools.wraps(method)
    async def answer(self: ReplayService, request: Any, context: Context) -> AsyncIterator[T]:
        task = asyncio.current_task()
        assert task is not None
        self._endless.add(task)
        try:
            with self._call():
                async for response in method(self, readable(request), context):
                    yield response
        except Refused as refusal:
            await context.abort(refusal.code, refusal.message)
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
        self._calls = 0
        unfinished = max(limits.max_unfinished_bytes, buffer.max_payload_bytes)
        self._unfinished = Budget(unfinished, "bytes of items that are not complete (max_unfinished_bytes)")
        self._waiting = Budget(limits.max_waiting_bytes, "bytes of items that wait for their table (max_waiting_bytes)")
        self._in_hand = Budget(MAX_ROWS_IN_HAND, "samples under leases or drawn ahead")
        self._answers: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By connection: each answer with payloads that is under way holds one of its MAX_ANSWERS."""
        self.server_id = secrets.randbits(63)
        self._started = buffer.clock()
        self._insert_streams = 0
        self._sample_streams = 0
        self._streams_of: Counter[str] = Counter()
        """Sample streams, by connection."""
        self._leases: dict[int, tuple[asyncio.TimerHandle, ExitStack]] = {}
        """By batch: what ends the lease, and its share of `_in_hand`."""
        self._settled: dict[int, bool] = {}
        """The last batches that were acknowledged (False) or given back (True), so that a retry is recognised."""
        self._endless: set[asyncio.Task[Any]] = set()
        self._closing = False
        if buffer.admission is not None:  # from before a restart
            for when in buffer.admission.expiries():
                self._expire_permits_at(when)

    def close(self) -> None:
        """Ends the streams that would not end by themselves."""
        self._closing = True
        for task in self._endless:
            task.cancel()

    @contextmanager
    def _call(self) -> Iterator[None]:
        if self._calls >= self._limits.max_calls:
            raise full(f"{self._calls} calls are open, which is as many as this server takes (max_calls); try later")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    async def _send(self, responses: AsyncIterator[Any], context: Context) -> None:
        """Sends an answer with payloads. Raises Refused where the client does not read it."""
        stall, begun = self._limits.stall_timeout, False
        try:
            async for response in responses:
                async with asyncio.timeout(stall):
                    if not begun:
                        await self._begin_answer(context)
                        begun = True
                    await context.write(response)
        except TimeoutError:
            raise deadline(
                f"the answer was not read: the client took none of it for {stall:g} s (stall_timeout), or did not read "
                f"{MAX_ANSWERS} answers before it"
            ) from None

    async def _begin_answer(self, context: Context) -> None:
        """Waits while too many answers to this connection are under way."""
        slots = self._answers.setdefault(context.peer(), asyncio.Semaphore(MAX_ANSWERS))
        await slots.acquire()
        # At the very end of the call: an answer that is not read stays in gRPC, even if we have given it up.
        context.add_done_callback(lambda *_: slots.release())  # type: ignore[arg-type]  # no lambda is generic

    # ------------------------------------------------------------------------------------------------ insert

    @unary
    async def Insert(self, request: Frame[pb.InsertRequest], context: Context) -> pb.InsertResponse:
        whole = pb.InsertResponse()
        async for part in self._insert(_once(request), context.peer()):
            whole.decided += part.decided
            whole.errors.extend(part.errors)
        refuse(whole, request.head.keys, await self._durable())
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
                        taken, pending = self.buffer.insert(inserts, self._deadline(message.timeout))
                        response.decided += taken
                        if pending is not None:
                            if response.decided:
                                yield response
                                response = pb.InsertResponse()
                            try:
                                with self._waiting.held(client, message.nbytes):
                                    await self._wait(pending, self.buffer.time_out, self.buffer.abandon)
                            except Refused:
                                self.buffer.abandon(pending)  # unless that is over
                                raise
                            response.decided += 1
                            taken += 1
                    except Refused as refusal:
                        key = inserts.keys[0]
                        response.errors.add(key=key, code=refusal.code.value[0], message=refusal.message)
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
        batch_id, batch, payloads = await self._draw(request)
        settled = False
        with ExitStack() as held:
            try:
                if request.lease:
                    held.enter_context(self._in_hand.held(context.peer(), len(batch)))
                *others, last = self._sample_responses(batch_id, batch, payloads)
                for response in others:
                    yield response
                if self._journal is not None and not request.lease:
                    # A reader that has it all may rely on it that nobody gets it again, whatever happens to us.
                    settled = True
                    self.buffer.take(batch_id, sent=True)
                    await self._durable()
                yield last
                if request.lease:
                    settled = True
                    settle = functools.partial(self._settle_lease, batch_id, give_back=True)
                    timer = asyncio.get_running_loop().call_later(request.lease, settle)
                    self._leases[batch_id] = timer, held.pop_all()
                elif not settled:
                    settled = True
                    self.buffer.take(batch_id, sent=True)
            finally:
                if not settled:
                    self.buffer.give_back(batch_id)

    @endless
    async def SampleStream(  # type: ignore[override]
        self, requests: AsyncIterator[pb.SampleStreamRequest], context: Context
    ) -> AsyncIterator[Frame[pb.SampleResponse]]:
        reader = aiter(requests)
        first = await anext(reader, None)
        if first is None or not first.HasField("open"):
            raise invalid("the first message of a sample stream must have `open`")
        client = context.peer()
        if self._streams_of[client] >= MAX_SAMPLE_STREAMS:
            raise full(f"{MAX_SAMPLE_STREAMS} sample streams are open on this connection: use fewer, or connect anew")
        credit = asyncio.Semaphore(_credit(first, first.open))
        untaken: dict[int, tuple[Batch, ExitStack]] = {}
        some_taken = asyncio.Event()
        # Bounded: a reader that is slow holds a few messages here, and the payloads of its batches in the tables.
        outgoing: asyncio.Queue[Frame[pb.SampleResponse] | Exception | None] = asyncio.Queue(maxsize=4)
        whole_batch = asyncio.Lock()  # the messages of a batch follow each other

        async def draw() -> None:
            try:
                while True:
                    await credit.acquire()
                    while sum(int(batch.sizes.sum()) for batch, _ in untaken.values()) >= MAX_BYTES_AHEAD:
                        some_taken.clear()
                        await some_taken.wait()
                    batch_id, batch, payloads = await self._draw(first.open)
                    untaken[batch_id] = batch, (share := ExitStack())
                    share.enter_context(self._in_hand.held(client, len(batch)))
                    async with whole_batch:
                        for response in self._sample_responses(batch_id, batch, payloads):
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
                        _, share = untaken.pop(request.take)
                        share.close()
                        some_taken.set()
                        taken = self.buffer.take(request.take)
                        if taken:
                            await self._durable()
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
        self._streams_of[client] += 1
        try:
            while (response := await outgoing.get()) is not None:
                if isinstance(response, Exception):
                    raise response
                yield response
        finally:
            self._sample_streams -= 1
            self._streams_of[client] -= 1
            if not self._streams_of[client]:
                del self._streams_of[client]
            for task in tasks:
                task.cancel()
            # Before anything is awaited: a second cancellation would skip what comes after that.
            for batch_id, (_, share) in untaken.items():
                share.close()
                self.buffer.give_back(batch_id)
            await asyncio.gather(*tasks, return_exceptions=True)

    @unary
    async def AcknowledgeSamples(
        self, request: pb.AcknowledgeSamplesRequest, context: Context
    ) -> pb.AcknowledgeSamplesResponse:
        if len(request.batches) > MAX_ROWS:
            raise invalid(f"{len(request.batches)} batches: at most {MAX_ROWS} in one request")
        missing = []
        for batch in request.batches:
            if self._settle_lease(batch, request.give_back):
                self._settled[batch] = request.give_back
            elif self._settled.get(batch) is not request.give_back:  # otherwise it is a retry, whose answer was lost
                missing.append(batch)
        while len(self._settled) > MAX_ROWS:
            del self._settled[next(iter(self._settled))]
        await self._durable()
        return pb.AcknowledgeSamplesResponse(applied=len(request.batches) - len(missing), missing=missing)

    def _settle_lease(self, batch_id: int, give_back: bool) -> bool:
        lease = self._leases.pop(batch_id, None)
        if lease is None:
            return False
        timer, held = lease
        timer.cancel()
        held.close()
        if give_back:
            self.buffer.give_back(batch_id)
        else:
            self.buffer.take(batch_id, sent=True)
        return True

    async def _draw(self, request: pb.SampleRequest) -> tuple[int, Batch, list[Payload]]:
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
        deadline_at = self._deadline(_timeout(request))
        while True:
            pending = self.buffer.sample(request.table, wanted, deadline_at)
            try:
                batch_id, batch = await self._wait(pending, self.buffer.time_out, self.buffer.abandon)
            except asyncio.CancelledError:
                if pending.drawn is not None:  # drawn in the moment in which the client went away
                    self.buffer.give_back(pending.drawn)
                raise
            try:
                return batch_id, batch, self.buffer.payloads(batch.keys.tolist())
            except DamagedPayloads as damage:  # others take their place
                self.buffer.give_back(batch_id)
                self.buffer.discard(damage.keys)

    def _sample_responses(
        self, batch_id: int, batch: Batch, payloads: list[Payload]
    ) -> Iterator[Frame[pb.SampleResponse]]:
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
        return split_payloads(first, payloads)

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
        payloads: list[Payload] = []
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
        finally:
            buffer.let_go(keys)

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
        server_info.version = version("replay-server")
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
        pending = admission.acquire(request.count, self._deadline(_timeout(request)))
        try:
            lease = await self._wait(pending, admission.time_out, admission.abandon)
            await self._durable()
        except asyncio.CancelledError:
            if pending.lease is not None:
                admission.release(pending.lease.id)
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
        listed = await asyncio.to_thread(self._checkpoints().directory.list, request.verify)
        return pb.ListCheckpointsResponse(checkpoints=[info.listed_checkpoint(entry) for entry in listed])

    def _checkpoints(self) -> Checkpointer:
        if self._checkpointer is None:
            raise unsupported(
                "this server has no place for checkpoints: set dir in [checkpoints], or data_dir in [server]"
            )
        return self._checkpointer

    # ------------------------------------------------------------------------------------------------ waiting

    async def _durable(self) -> frozenset[int]:
        """Returns when all changes until now are written, at once if that is not asked for; what could not be."""
        return frozenset() if self._journal is None else await self._journal.durable()

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


def _portions(parts: Iterable[Inserts]) -> Iterator[Inserts]:
    for part in parts:
        if len(part) <= _PORTION:
            yield part
        else:
            yield from (part[at : at + _PORTION] for at in range(0, len(part), _PORTION))


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
