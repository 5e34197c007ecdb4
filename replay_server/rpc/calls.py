"""Calls: how a gRPC method gets its requests, sends its responses, and tells its client why it ends early.

* `Call` is one call: the way of its requests and responses, through rings where its client wants that.
* `Method` runs the calls of one method. It counts and times them. A Refused ends a call with code, message and reason.
* `once` lets a request that comes again get the answer of its first time.
* `Multiplex` carries methods with one short response, one call after the other, on an open stream. To gRPC in Python a
  message on an open stream costs half of a call (docs/record/performance.md).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from replay_protos import REASON_KEY, SHORT_METHODS
from replay_protos import replay_pb2 as pb
from replay_protos.framing import BYTES_PER_MESSAGE, Frame, frame_reader, write_frame
from replay_server.errors import Code, Refused, deadline, invalid
from replay_server.rpc.clients import Context
from replay_server.rpc.limits import Backend
from replay_server.rpc.ring_transfer import Carrier, Rings
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.table import Payload

if TYPE_CHECKING:
    from replay_server.telemetry.prometheus import Latencies

M = TypeVar("M", bound=Message)
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class Call:
    """One call of a client. Its context names the client; everything else goes through the call."""

    def __init__(self, method: Method, context: Context) -> None:
        self.context = context
        self.client = context.peer()
        """The connection."""
        self.carrier = Carrier(method.rings, self.client) if method.rings is not None else None
        self._method = method
        self._came: float | None = None
        """When the last request of a stream came that has no response yet; None: there is none."""

    async def read(self) -> Any:
        """The next request of a stream; None: the client has ended it. Raises Refused if its bytes are no message."""
        if (request := await self.context.read()) is grpc.aio.EOF:
            return None
        if self._method.latencies is not None:
            self._came = time.perf_counter()
        return self.readable(request)

    def readable(self, request: Any) -> Any:
        """The request, with the payloads that lie in a ring. Raises Refused if its bytes are no message."""
        if isinstance(request, DecodeError):
            raise invalid(f"the bytes are no message of this protocol: {request}")
        return request if self.carrier is None else self.carrier.bring(request)

    async def write(self, response: Any) -> None:
        """Sends a response. Raises Refused if it is not read for `stall_timeout` seconds.

        The client of a stream may read slowly: the server holds little for it meanwhile.
        """
        if (latencies := self._method.latencies) is not None:
            seconds = None if self._came is None else time.perf_counter() - self._came
            latencies.responded(self._method.name, response, seconds)
            self._came = None
        stall = self._method.stall_timeout
        try:
            async with asyncio.timeout(stall) if stall is not None else nullcontext():  # 2 us less
                if self.carrier is None or (response := await self.carrier.place(response)) is not None:
                    await self.context.write(response)
        except TimeoutError:
            why = f"the answer was not read: the client took none of it for {stall:g} s (stall_timeout)"
            raise deadline(why) from None


class Method:
    """One gRPC method, with the function that answers its calls: of a request and the call, or of the call alone."""

    def __init__(
        self,
        descriptor: MethodDescriptor,
        behavior: Callable[..., Awaitable[Any]],
        backend: Backend,
        rings: Rings,
        latencies: Latencies | None,
    ) -> None:
        self.name = descriptor.name
        request, response = GetMessageClass(descriptor.input_type), GetMessageClass(descriptor.output_type)
        framed = "payloads" in descriptor.input_type.fields_by_name
        self._parse = frame_reader(request) if framed else request.FromString
        frames = "payloads" in descriptor.output_type.fields_by_name
        self.serialize: Callable[[Any], bytes] = write_frame if frames else response.SerializeToString
        self._behavior = behavior
        self._backend = backend
        self._client_streaming, self._server_streaming = descriptor.client_streaming, descriptor.server_streaming
        self._endless = descriptor.client_streaming or (descriptor.server_streaming and not frames)
        """Whether a call lasts until its client ends it, or the server stops."""
        self.rings = rings if frames or (framed and self._endless) else None
        self.stall_timeout = backend.limits.stall_timeout if frames and not self._endless else None
        self.latencies = latencies
        if latencies is not None and (self._client_streaming or not self._endless):
            latencies.expect(self.name)

    def handler(self, traced: Callable[[str, Any], Any] | None) -> grpc.RpcMethodHandler[Any, Any]:
        """What gRPC calls. `traced` wraps, with the name, what answers calls of one request."""
        kinds = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }
        respond = self.respond if traced is None or self._endless else traced(self.name, self.respond)
        return kinds[self._client_streaming, self._server_streaming](respond, self.parse, self.serialize)

    def parse(self, data: bytes) -> Any:
        """Returns an error instead of raising it: gRPC would log a traceback for each bad message, and say UNKNOWN."""
        try:
            return self._parse(data)
        except DecodeError as error:
            return error

    async def respond(self, request: Any, context: Context) -> Any:
        """Answers a call. `request` is one request, or belongs to a stream, whose requests the call reads."""
        try:
            return await self.answer(request, Call(self, context))
        except Refused as refusal:
            reason = ((REASON_KEY, str(refusal.reason)),) if refusal.reason else ()
            await context.abort(_STATUS[refusal.code], refusal.message, reason)

    async def answer(self, request: Any, call: Call) -> Any:
        """The response to one request, or None after all responses of a stream. Raises Refused."""
        code, began = "UNKNOWN", time.perf_counter()
        try:
            with self._backend.calls.counted(self.name, self._endless):
                if self._client_streaming:
                    response = await self._behavior(call)
                else:
                    response = await self._behavior(call.readable(request), call)
            code = "OK"
            return response
        except Refused as refusal:
            code = refusal.code.name
            raise
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        finally:
            if call.carrier is not None:
                call.carrier.close(reuse_writer=code == "OK" and not self._endless)
            if self.latencies is not None:
                self.latencies.ended(self.name, code, None if self._endless else time.perf_counter() - began)


class Multiplex:
    """The method of this name: calls of SHORT_METHODS on an open stream."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        """`methods`: of the whole service."""
        self._methods = methods

    async def Multiplex(self, call: Call) -> None:
        while (request := await call.read()) is not None:
            await call.write(await self._respond(request, call))

    async def _respond(self, request: pb.CallRequest, call: Call) -> pb.CallResponse:
        try:
            if request.method not in SHORT_METHODS:
                raise invalid(f"method {request.method[:100]!r}: one of {', '.join(SHORT_METHODS)}")
            method = self._methods[request.method]
            response = await method.answer(method.parse(request.request), call)
        except Refused as refusal:
            if refusal.code is Code.UNAUTHENTICATED:  # a token that is revoked ends the stream
                raise
            return pb.CallResponse(code=refusal.code, message=refusal.message, reason=refusal.reason)
        return pb.CallResponse(response=method.serialize(response))


def once(response_type: type[M]) -> Callable[[Callable[..., Awaitable[M]]], Callable[..., Awaitable[M]]]:
    """A request that comes again, with the same id in `request`, gets the answer of its first time.

    So a retry after a broken connection, or after a kill in durable mode, has the effect of one call. The response
    waits until all that the method changed is written. The method must not wait after its change, so that one commit
    writes the change and the answer.
    """

    def decorate(method: Callable[..., Awaitable[M]]) -> Callable[..., Awaitable[M]]:
        @functools.wraps(method)
        async def respond(self: Any, request: Any, call: Call) -> M:
            buffer, response = self.backend.buffer, None
            if request.request:
                digest = hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=8).digest()
                digest += type(request).__name__.encode()
                if (answer := first_answer(buffer, request.request, digest)) is not None:
                    response = response_type.FromString(answer)
            if response is None:
                response = await method(self, request, call)
                if request.request:
                    buffer.answers.remember([request.request], (digest, response.SerializeToString()))
            await self.backend.durable()
            return response

        return respond

    return decorate


def first_answer(buffer: ReplayBuffer, request: int, digest: bytes) -> bytes | None:
    """What the request with this number was answered; None: it has not come before.

    Raises Refused if it was another request: one with another `digest`.
    """
    if (answer := buffer.answers.get(request)) is None:
        return None
    first_digest, first_response = answer
    if first_digest != digest:
        raise invalid(f"request {request} was another request before: choose a new number for each")
    return first_response


def split_payloads(first: M, payloads: Iterable[Payload]) -> Iterator[Frame[M]]:
    """`first` with as many payload bytes as fit, then messages with the rest of the bytes.

    A chunk goes into one message, so that the reader need not join it, unless it is much larger than a message: a
    client that does not read would keep all of it in memory.
    """
    head, filled = first, 0
    chunks: list[bytes | memoryview] = []
    for chunk in _short_chunks(payloads):
        if filled and filled + len(chunk) > BYTES_PER_MESSAGE:
            yield Frame(head, chunks)
            head, chunks, filled = type(first)(), [], 0
        chunks.append(chunk)
        filled += len(chunk)
    yield Frame(head, chunks)


def _short_chunks(payloads: Iterable[Payload]) -> Iterator[bytes | memoryview]:
    for payload in payloads:
        for chunk in payload:
            if len(chunk) <= 2 * BYTES_PER_MESSAGE:
                yield chunk
            else:
                view = memoryview(chunk)
                yield from (view[at : at + BYTES_PER_MESSAGE] for at in range(0, len(view), BYTES_PER_MESSAGE))
