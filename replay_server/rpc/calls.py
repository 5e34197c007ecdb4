"""Calls: reads the requests of gRPC methods, sends their responses, and tells clients why a call ends early.

* `Call` is one call. It carries requests and responses, through rings if its client wants that.
* `Method` runs, counts and times the calls of one method. If a call raises Refused, the client gets code, message and
  reason.
* `once` answers a repeated request with its first answer.
* `Multiplex` carries methods with one short response, one call after the other, on an open stream. In gRPC for Python a
  message on an open stream costs half as much as a call (docs/record/performance.md).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
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
"""gRPC's status codes by their numbers, which are the numbers of `Code`."""


class Call:
    """One call of a client. The functions that answer methods read requests and write responses only through it."""

    def __init__(self, method: Method, context: Context) -> None:
        self.context = context
        """gRPC's side of the call, with its metadata."""
        self.client = context.peer()
        """The client's connection, by gRPC's name for it."""
        self.carrier = Carrier(method.rings, self.client) if method.rings is not None else None
        """Moves payloads into and out of rings, the memory that the server shares with a client on the same machine.

        None: payloads of this method never lie in rings."""
        self._method = method
        self._requested_at: float | None = None
        """The time at which the last request of a stream came.

        None: no request has come, the last request has a response already, or the method's latency is not measured."""

    async def read(self) -> Any:
        """Returns the next request of a stream; None: the client has ended the stream.

        Raises Refused if the bytes of the request are no message.
        """
        request = await self.context.read()
        if request is grpc.aio.EOF:
            return None
        if self._method.latencies is not None:
            self._requested_at = time.perf_counter()
        return self.readable(request)

    def readable(self, request: Any) -> Any:
        """Returns the request with its payloads. If they lie in a ring, takes them out of the ring.

        Raises Refused if `request` is the error that `Method.parse` returned because the bytes are no message.
        """
        if isinstance(request, DecodeError):
            raise invalid(f"the bytes are no message of this protocol: {request}")
        if self.carrier is None:
            return request
        return self.carrier.bring(request)

    async def write(self, response: Any) -> None:
        """Sends a response. Raises Refused if the client does not read the response within `stall_timeout` seconds.

        An endless stream has no `stall_timeout`: its client may read as slowly as it likes, because the server holds
        little memory for the stream.
        """
        # Only the first response to each request is timed.
        latencies = self._method.latencies
        if latencies is not None:
            seconds = None
            if self._requested_at is not None:
                seconds = time.perf_counter() - self._requested_at
            latencies.responded(self._method.name, response, seconds)
            self._requested_at = None
        stall = self._method.stall_timeout
        if stall is None:  # most calls have no timeout, and need not spend the 2 us that a timeout takes
            await self._send(response)
            return
        try:
            async with asyncio.timeout(stall):
                await self._send(response)
        except TimeoutError:
            why = f"the answer was not read: the client took none of it for {stall:g} s (stall_timeout)"
            raise deadline(why) from None

    async def _send(self, response: Any) -> None:
        """Sends a response, with its payload through a ring if possible."""
        if self.carrier is not None:
            response = await self.carrier.place(response)
            if response is None:  # the carrier has kept the response, and will send it in the next message
                return
        await self.context.write(response)


class Method:
    """One gRPC method, with the function that answers its calls.

    The function gets the request and the call, or only the call if the client sends a stream.
    """

    def __init__(
        self,
        descriptor: MethodDescriptor,
        behavior: Callable[..., Awaitable[Any]],
        backend: Backend,
        rings: Rings,
        latencies: Latencies | None,
    ) -> None:
        """`behavior` is the function that answers calls. `latencies` times and counts the calls; None: they are neither
        timed nor counted.

        `descriptor` describes the method as in replay.proto. It says which messages are streams and which have
        payloads, and from this follows whether a call is endless.
        """
        self.name = descriptor.name
        request = GetMessageClass(descriptor.input_type)
        response = GetMessageClass(descriptor.output_type)
        requests_have_payloads = "payloads" in descriptor.input_type.fields_by_name
        responses_have_payloads = "payloads" in descriptor.output_type.fields_by_name
        self._parse = frame_reader(request) if requests_have_payloads else request.FromString
        self.serialize: Callable[[Any], bytes] = response.SerializeToString
        if responses_have_payloads:
            self.serialize = write_frame
        self._behavior = behavior
        self._backend = backend
        self._client_streaming = descriptor.client_streaming
        self._server_streaming = descriptor.server_streaming
        self._endless = descriptor.client_streaming or (descriptor.server_streaming and not responses_have_payloads)
        """True if a call lasts until its client ends it, or the server stops. A method that answers one request with
        payloads (Sample, Get) ends after the last payload."""
        self.rings: Rings | None = None
        """The rings of the clients; None: payloads of this method never lie in rings."""
        if responses_have_payloads or (requests_have_payloads and self._endless):
            self.rings = rings
        self.stall_timeout: float | None = None
        """Seconds for which the client of a call may leave a response unread; None: for ever."""
        if responses_have_payloads and not self._endless:
            self.stall_timeout = backend.limits.stall_timeout
        self.latencies = latencies
        # The metric of a timed method must exist before the first call. An endless stream that only the server sends
        # (WatchPolicy) is counted but not timed.
        is_timed = self._client_streaming or not self._endless
        if latencies is not None and is_timed:
            latencies.expect(self.name)

    def handler(self, traced: Callable[[str, Any], Any] | None) -> grpc.RpcMethodHandler[Any, Any]:
        """Returns the handler that gRPC calls. If the method is not endless, `traced` wraps its `respond` in spans."""
        # (whether the client streams, whether the server streams) -> the function that makes the handler. No method has
        # a stream of requests and a single response.
        handler_makers = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }
        make_handler = handler_makers[self._client_streaming, self._server_streaming]
        respond: Callable[..., Any] = self.respond
        if traced is not None and not self._endless:
            respond = traced(self.name, self.respond)
        return make_handler(respond, self.parse, self.serialize)

    def parse(self, data: bytes) -> Any:
        """Parses the request in `data`. If the bytes are no such message, returns the DecodeError instead.

        If this raised the error, gRPC would log a traceback for each bad message, and end the call with UNKNOWN.
        """
        try:
            return self._parse(data)
        except DecodeError as error:
            return error

    async def respond(self, request: Any, context: Context) -> Any:
        """Answers a call that comes from gRPC.

        If the client sends a stream, `request` is not used, because the method reads the requests through the call.
        """
        try:
            return await self.answer(request, Call(self, context))
        except Refused as refusal:
            metadata: tuple[tuple[str, str], ...] = ()
            if refusal.reason:
                metadata = ((REASON_KEY, str(refusal.reason)),)
            await context.abort(_STATUS[refusal.code], refusal.message, metadata)

    async def answer(self, request: Any, call: Call) -> Any:
        """Runs the method for one call. Returns the response, or None if the method has sent a stream of responses.

        Raises Refused if the method does.
        """
        code = "UNKNOWN"  # gRPC's status of a call that ends with an exception that is not handled below
        began = time.perf_counter()
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
                # If the call was endless, or ended with an error, the client may have left bytes in the ring unread.
                client_has_read_all = code == "OK" and not self._endless
                call.carrier.close(reuse_writer=client_has_read_all)
            if self.latencies is not None:
                seconds = None if self._endless else time.perf_counter() - began
                self.latencies.ended(self.name, code, seconds)


class Multiplex:
    """The gRPC method Multiplex, which runs calls of SHORT_METHODS on an open stream."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        """`methods` are all methods of the service, by name."""
        self._methods = methods

    async def Multiplex(self, call: Call) -> None:
        """Answers the requests of a stream one after the other, until the client ends it."""
        while (request := await call.read()) is not None:
            await call.write(await self._respond(request, call))

    async def _respond(self, request: pb.CallRequest, call: Call) -> pb.CallResponse:
        """Runs one call and returns its response.

        If the call is refused, the response says so, and the stream goes on.
        """
        try:
            if request.method not in SHORT_METHODS:
                raise invalid(f"method {request.method[:100]!r}: one of {', '.join(SHORT_METHODS)}")
            method = self._methods[request.method]
            # This is counted and timed as a call of `method`, although it runs within this call of Multiplex.
            parsed = method.parse(request.request)
            response = await method.answer(parsed, call)
        except Refused as refusal:
            if refusal.code is Code.UNAUTHENTICATED:  # the token was revoked, which ends the stream
                raise
            return pb.CallResponse(code=refusal.code, message=refusal.message, reason=refusal.reason)
        return pb.CallResponse(response=method.serialize(response))


def once(response_type: type[M]) -> Callable[[Callable[..., Awaitable[M]]], Callable[..., Awaitable[M]]]:
    """Decorates a method so that a repeated request, which has the same `request` id, gets the first answer again.

    A request and its retries therefore have the effect of one call, also after a broken connection or, in durable mode,
    after a kill of the server. The response is sent only when everything that the method changed is written. The method
    must not await anything after its change, so that one commit writes the change and the answer.
    """

    def decorate(method: Callable[..., Awaitable[M]]) -> Callable[..., Awaitable[M]]:
        @functools.wraps(method)
        async def respond(self: Any, request: Any, call: Call) -> M:
            """Takes the place of `method`: answers a request, or repeats the first answer."""
            buffer = self.backend.buffer
            if not request.request:  # a request without an id is never repeated
                response = await method(self, request, call)
                await self.backend.durable()
                return response
            digest = _digest(request)
            answer = first_answer(buffer, request.request, digest)
            if answer is not None:
                response = response_type.FromString(answer)
            else:  # this is the first request with the id
                response = await method(self, request, call)
                buffer.answers.remember([request.request], (digest, response.SerializeToString()))
            await self.backend.durable()
            return response

        return respond

    return decorate


def _digest(request: Message) -> bytes:
    """A hash of the request's content, followed by the name of the request's type.

    Two requests with one id count as the same request if their digests are equal.
    """
    content = request.SerializeToString(deterministic=True)
    content_hash = hashlib.blake2b(content, digest_size=8).digest()
    type_name = type(request).__name__.encode()
    return content_hash + type_name


def first_answer(buffer: ReplayBuffer, request_id: int, digest: bytes) -> bytes | None:
    """The first answer to the request with this id; None if no request with this id has been answered.

    Raises Refused if the first request with this id had another `digest`, because it was another request.
    """
    answer = buffer.answers.get(request_id)
    if answer is None:
        return None
    first_digest, first_response = answer
    if first_digest != digest:
        raise invalid(f"request {request_id} was another request before: choose a new number for each")
    return first_response


def split_payloads(first: M, payloads: Iterable[Payload]) -> Iterator[Frame[M]]:
    """Yields `first` with as many payload bytes as fit, then messages with the rest of the bytes.

    Each chunk is put whole into one message, so that the reader need not join parts of a chunk. Only a chunk that is
    larger than two messages is divided, because otherwise the server would hold the whole chunk in memory for a client
    that does not read.
    """
    head = first
    chunks: list[bytes | memoryview] = []
    filled = 0
    for chunk in _short_chunks(payloads):
        if filled and filled + len(chunk) > BYTES_PER_MESSAGE:
            yield Frame(head, chunks)
            head = type(first)()  # later messages have nothing but payload bytes
            chunks = []
            filled = 0
        chunks.append(chunk)
        filled += len(chunk)
    yield Frame(head, chunks)


def _short_chunks(payloads: Iterable[Payload]) -> Iterator[bytes | memoryview]:
    """Yields the chunks of payloads. A chunk larger than two messages is divided into parts of one message each."""
    for payload in payloads:
        for chunk in payload:
            if len(chunk) <= 2 * BYTES_PER_MESSAGE:
                yield chunk
                continue
            view = memoryview(chunk)
            for start in range(0, len(view), BYTES_PER_MESSAGE):
                yield view[start : start + BYTES_PER_MESSAGE]
