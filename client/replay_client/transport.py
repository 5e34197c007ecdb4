"""Transport: sends messages to one server and reads its answers, over gRPC.

The class Transport is the only interface between the client and the network: a call with one answer, and streams of
messages. Other transports have the same interface: `rings` sends payloads through shared memory, and tests define
transports of their own. A transport raises grpc.aio.AioRpcError, and its Connection turns this error into one of
`replay_client.errors`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc
import numpy as np
from google.protobuf.message import Message
from grpc import ChannelConnectivity

from replay_client import tracing
from replay_client.columns import Buffer
from replay_client.errors import STATUSES, ReplayError
from replay_protos import REASON_KEY
from replay_protos import replay_pb2 as pb
from replay_protos.framing import BYTES_PER_MESSAGE, SERVICE, Frame, frame_reader, write_frame
from replay_protos.memory import LARGE_BUFFER, keep_freed_memory, large_buffer
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_protos.shared_memory import Keep, RingReader, pass_on

if TYPE_CHECKING:
    from replay_client.access import Access

NOT_KNOWN = "grpc: no large payload was sent or received yet"
"""The value of `carries` for a transport that has not tried shared memory yet."""
_MOST_IDLE = 16
"""The most streams of one kind that stay open between exchanges."""
_GOODBYE = 1.0
"""Seconds in which the server must end a stream that the client has ended. After that the client cancels the stream."""
_OPTIONS: Final = [
    ("grpc.max_receive_message_length", -1),  # -1: no limit
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A server that restarts may have another address under the same name. gRPC's default looks a name up again only
    # after 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]
"""The options of the gRPC channel."""
_LARGE = 128 << 10
"""The smallest number of payload bytes with which a response is large. malloc may return freed memory of this size to
the system, and must then ask the system for memory at the next response. This costs time, and `keep_freed_memory`
prevents it."""
_MANY_TO_MANY = "stream_stream"
"""The name of the channel's method for calls that send many messages and receive many."""
_ONE_TO_MANY = "unary_stream"
"""The name of the channel's method for calls that send one message and receive many."""
_STREAM_METHODS: Final[dict[str, tuple[str, Any, Any]]] = {
    "InsertStream": (_MANY_TO_MANY, write_frame, pb.InsertResponse.FromString),
    "Draw": (_MANY_TO_MANY, pb.DrawRequest.SerializeToString, frame_reader(pb.SampleResponse)),
    "Multiplex": (_MANY_TO_MANY, pb.CallRequest.SerializeToString, pb.CallResponse.FromString),
    "ShareMemory": (_MANY_TO_MANY, pb.ShareMemoryRequest.SerializeToString, pb.ShareMemoryResponse.FromString),
    "WatchPolicy": (_ONE_TO_MANY, pb.GetPolicyRequest.SerializeToString, pb.Policy.FromString),
    "Get": (_ONE_TO_MANY, pb.GetRequest.SerializeToString, frame_reader(pb.GetResponse)),
}
"""The server's methods that are streams. Name of the method -> the name of the channel's method for such calls, the
function that encodes a message, and the function that decodes an answer."""


def failure(code: grpc.StatusCode | int, details: str, reason: str = "") -> grpc.aio.AioRpcError:
    """The error that a call would raise if the server ended it with this code, these details and this reason."""
    status = code if isinstance(code, grpc.StatusCode) else STATUSES[code]
    trailing = grpc.aio.Metadata()
    if reason:
        trailing = grpc.aio.Metadata((REASON_KEY, reason))
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailing, details)


class Stream:
    """One gRPC call on which messages go to the server and answers come back.

    The requests of InsertStream and the answers of Draw and Get are frames. All others are plain messages of protobuf.
    """

    def __init__(self, call: Any) -> None:
        """`call` is the call object of gRPC."""
        self._call = call

    @property
    def bytes_per_message(self) -> int:
        """The approximate number of payload bytes that a message should carry."""
        return BYTES_PER_MESSAGE

    @property
    def ended(self) -> bool:
        """True once gRPC knows that the stream has ended."""
        return bool(self._call.done())

    async def write(self, message: Any) -> None:
        """Sends a message. Raises AioRpcError or InvalidStateError if the stream has ended.

        `read` then raises an error that says why the stream has ended.
        """
        await self._call.write(message)

    async def read(self) -> Any:
        """The next message. Raises AioRpcError if the stream has ended, even if it ended without an error."""
        call = self._call
        message = await call.read()
        if message is not grpc.aio.EOF:
            return message
        code = await call.code()
        if code is grpc.StatusCode.OK:
            # The server stops, but the caller still expects a message. After UNAVAILABLE the caller tries again.
            raise failure(grpc.StatusCode.UNAVAILABLE, "the server ended the stream without an error")
        raise grpc.aio.AioRpcError(
            code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )

    async def end(self, reader: asyncio.Task[None] | None = None) -> bool:
        """Ends the stream in good order. `reader` is the task that reads the stream, if there is one.

        Returns True if the server then ends the stream too, or if `reader` has already ended because the stream broke.
        Otherwise cancels the stream and returns False.
        """
        # `cancel` is the last resort, because gRPC calls the event loop once more after a cancel. The loop may be
        # closed by then.
        ended = False
        # InternalError: the call broke at this moment, and gRPC cannot send more to the server.
        with suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(_GOODBYE):
                await self._call.done_writing()
                if reader is not None:
                    await asyncio.wait([reader])  # the task ends when it has read the end of the stream
                else:
                    await self._read_to_the_end()
                ended = True
        if not ended:
            self.cancel()
        return ended

    async def _read_to_the_end(self) -> None:
        """Reads and drops messages until the server ends the stream."""
        while await self._call.read() is not grpc.aio.EOF:
            pass

    def cancel(self) -> None:
        """Ends the stream at once."""
        self._call.cancel()


class Rows:
    """Puts together the payloads of one response from the bytes of its messages. No byte is copied twice.

    Each row of the response has one payload. If one message has all bytes of the payload, the argument `keep` of `add`
    makes the payload. If the payload spans several messages, its memory is allocated when its first bytes arrive, and
    the bytes of each message are copied straight into this memory.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes` has the number of payload bytes of each row."""
        self._sizes = sizes
        self._unfilled = memoryview(b"")
        """The part of the last payload whose bytes have not arrived yet."""
        self.missing = sum(sizes)
        """The number of payload bytes that have not arrived."""
        self.payloads: list[Buffer] = []
        """The payload of each row that has begun. The list is complete when no bytes are missing."""
        if self.missing >= _LARGE:
            keep_freed_memory()
        self.add(b"", keep=memoryview)  # adds the empty rows at the start, which need no bytes

    def add(self, data: Buffer, keep: Keep) -> None:
        """Adds the next payload bytes of the response.

        `keep` makes a payload of a part of `data`. The payload is a view, or a copy if the memory of `data` will be
        overwritten. Raises ReplayError if the messages have more bytes than the response announced, or if there is no
        memory for a payload.
        """
        data = memoryview(data)
        end = len(data)
        if end > self.missing:
            raise ReplayError(f"the server sent {end - self.missing} payload bytes more than payload_sizes says")
        self.missing -= end
        # First fill the rest of the last payload, if some of its bytes are missing.
        position = min(len(self._unfilled), end)
        if position:
            self._unfilled[:position] = data[:position]
            self._unfilled = self._unfilled[position:]
        sizes = self._sizes
        row = len(self.payloads)
        # Then add the rows that begin in `data`. An empty row does not wait for bytes, because maybe no further message
        # follows. It is added as soon as the row before it is complete, which means that `_unfilled` is empty.
        while row < len(sizes) and (position < end or (sizes[row] == 0 and not self._unfilled)):
            size = sizes[row]
            if position + size <= end:
                self.payloads.append(keep(data[position : position + size]))
            else:  # the row spans several messages
                self._begin(size, data[position:])
            position += size
            row += 1

    def _begin(self, size: int, start: memoryview) -> None:
        """Allocates the payload of a row that spans several messages, and copies its first bytes into it."""
        try:
            if size < LARGE_BUFFER:  # malloc keeps freed memory of this size for the next payload
                buffer = np.empty(size, dtype=np.uint8).data  # numpy asks for huge pages, as `large_buffer` does
            else:
                buffer = large_buffer(size).data
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            raise ReplayError(f"the server has a payload of {size} bytes, for which there is no memory") from error
        buffer[: len(start)] = start
        self._unfilled = buffer[len(start) :]
        self.payloads.append(buffer.toreadonly())


class BatchStream(Stream):
    """A call whose answers have payloads. An answer may arrive in several messages, which `read` puts together."""

    async def read(self) -> Frame[Any]:
        """The next answer, with one payload for each row. Raises AioRpcError if the stream has ended."""
        frame = await super().read()
        head = frame.head  # the first message has the head of the whole answer; the later ones have only bytes
        rows = Rows(head.payload_sizes)
        await self._on_first_frame(frame)
        # `pass_on` calls `rows.add` with the payload bytes of the frame, which are in the message or in a ring.
        pass_on(frame, self._reader_of, rows.add)
        while rows.missing:
            frame = await super().read()
            pass_on(frame, self._reader_of, rows.add)
        return Frame(head, rows.payloads)

    async def _on_first_frame(self, frame: Frame[Any]) -> None:
        """Called when the first message of an answer has arrived, before its payloads are read."""

    def _reader_of(self, ring_id: int) -> RingReader | None:
        """The ring with this id, through which payloads arrive. None: this stream has no ring with this id."""
        return None


class IdleStreams:
    """Streams of one method that stay open between exchanges. An exchange is one request and its answer.

    An exchange on an open stream costs half as much as a call. Each stream carries one exchange at a time. So an
    exchange whose answer takes long does not delay other exchanges.
    """

    def __init__(self, open_stream: Callable[[], Stream]) -> None:
        """`open_stream` opens a new stream. It is called for an exchange if no stream is idle."""
        self._open = open_stream
        self._idle: list[Stream] = []
        self._busy = 0
        """The number of streams that carry an exchange now."""

    @property
    def free(self) -> bool:
        """True if fewer streams are in use than may stay open."""
        return self._busy < _MOST_IDLE

    async def exchange(self, messages: Callable[[int], Iterable[Any]], timeout: float | None) -> Any:
        """Sends the messages of a request, and returns the answer.

        `messages` makes the messages. Its argument is the number of payload bytes that each message should carry.
        Raises AioRpcError if the answer takes longer than `timeout` seconds, or if the stream breaks.
        """
        stream = self._idle.pop() if self._idle else self._open()
        self._busy += 1
        try:
            async with asyncio.timeout(timeout):
                with suppress(asyncio.InvalidStateError):  # the stream ended while it was idle; `read` says why
                    for message in messages(stream.bytes_per_message):
                        await stream.write(message)
                answer = await stream.read()
        except TimeoutError:
            stream.cancel()
            raise failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None  # gRPC's own words
        except grpc.aio.AioRpcError:
            for broken in [stream, *self._idle]:  # these streams share a connection, so all of them are broken
                broken.cancel()
            self._idle.clear()
            raise
        except BaseException:
            # The caller was cancelled. If the stream stayed open, the next exchange would read the answer of this one.
            stream.cancel()
            raise
        finally:
            self._busy -= 1
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(stream)
        else:
            stream.cancel()
        return answer

    async def close(self) -> None:
        """Ends the idle streams in good order."""
        idle = self._idle
        self._idle = []
        await asyncio.gather(*(stream.end() for stream in idle))


class Transport:
    """Carries messages and payloads to one server and back, over a gRPC channel. It belongs to one event loop."""

    def __init__(self, access: Access) -> None:
        self._channel = access.channel(_OPTIONS)
        self._metadata = access.metadata
        self._stub: Any = ReplayStub(self._channel)
        """The generated code that makes calls with one answer."""
        self._methods: dict[str, Any] = {}
        """The functions that open streams, by the name of the server's method (_STREAM_METHODS)."""
        for method, (kind, encode, decode) in _STREAM_METHODS.items():
            make_method = getattr(self._channel, kind)
            self._methods[method] = make_method(f"/{SERVICE}/{method}", encode, decode)
        self.inserts = IdleStreams(partial(self.stream, "InsertStream"))
        """For inserts of single items."""
        self.short_calls = IdleStreams(partial(self.stream, "Multiplex"))
        """For calls with short requests and short answers."""

    @property
    def carries(self) -> str:
        """How payloads travel: "shared memory", or "grpc: " with the reason why they do not use shared memory."""
        return "grpc: shared memory is turned off in this client (shared_memory=False)"

    async def find_out(self) -> None:
        """Waits until it is known how payloads travel. Does nothing here, because no payload uses shared memory."""

    async def call(self, method: str, request: Message, timeout: float | None) -> Any:
        """Sends one request and returns its answer. Raises AioRpcError if the call fails or takes longer than `timeout`
        seconds."""
        if method == "Get":  # a stream, because the one answer to Get may take several messages
            return await self.stream(method, request, timeout).read()
        metadata = (*self._metadata, *tracing.carrier().items())
        send = getattr(self._stub, method)
        return await send(request, timeout=timeout, metadata=metadata)

    def stream(self, method: str, request: Message | None = None, timeout: float | None = None) -> Stream:
        """Opens a stream. `request`: the request of a method that takes one request and answers with many messages.

        gRPC ends the stream with an error after `timeout` seconds. None: the stream has no limit.
        """
        call = self._open(method, request, timeout)
        if method in ("Draw", "Get"):
            return BatchStream(call)
        return Stream(call)

    def _open(self, method: str, request: Message | None = None, timeout: float | None = None) -> Any:
        """The call object of gRPC for a new stream; the arguments are those of `stream`."""
        requests = () if request is None else (request,)
        return self._methods[method](*requests, timeout=timeout, metadata=self._metadata)

    def state(self) -> ChannelConnectivity:
        """The state of the connection to the server. If there is no connection, starts to connect."""
        return self._channel.get_state(try_to_connect=True)

    async def changed(self, state: ChannelConnectivity) -> None:
        """Waits until the connection is in another state than `state`."""
        await self._channel.wait_for_state_change(state)

    async def end_idle(self) -> None:
        """Ends the idle streams, which would otherwise stay open for the next exchange."""
        await self.inserts.close()
        await self.short_calls.close()

    async def close(self) -> None:
        """Ends the idle streams and the connection."""
        await self.end_idle()
        await self._channel.close()


# ------------------------------------------------------------------------------------------------------------- forks

# A fork is safe for gRPC only while none of gRPC's threads runs. grpc.aio runs a thread as long as any of its channels,
# calls or servers is alive, in this package or elsewhere in the process. If a fork happens while the thread runs, every
# call in the new process hangs.

_POLLER = "(_poll_wrapper)"
"""The end of the name of grpc.aio's thread. gRPC has no function that tells if the thread runs."""

_forks = 0
"""The number of forks between the first process and this one."""
_in_use_at_fork = False
"""True if gRPC was in use just before the last fork. The new process inherits this value from its parent."""
_broken = False
"""True if gRPC was in use at the fork that made this process or one of its ancestors."""


def forks() -> int:
    """The number of forks between the first process and this one. Reading it costs less than reading the process id."""
    return _forks


def check_grpc() -> None:
    """Raises RuntimeError, with the remedy, if gRPC cannot work in this process."""
    if _broken:
        raise RuntimeError(
            "gRPC was in use when this process was forked, and a client would hang here. Start the process with "
            '`spawn` (multiprocessing.get_context("spawn"), DataLoader(..., multiprocessing_context="spawn")), or '
            "close all clients and servers before the fork"
        )


def _in_use() -> bool:
    """True if gRPC's thread runs in this process."""
    return any(thread.name.endswith(_POLLER) for thread in threading.enumerate())


def _before_fork() -> None:
    """Notes if gRPC is in use. Python calls this function in the parent process, just before a fork."""
    global _in_use_at_fork
    _in_use_at_fork = _in_use()
    if _in_use_at_fork:
        # A finished call of gRPC is part of a reference cycle. Until the next garbage collection, the cycle keeps the
        # closed channel of the call alive, and so gRPC's thread. So collect, and look once more.
        gc.collect()
        _in_use_at_fork = _in_use()


def _after_fork_in_child() -> None:
    """Counts the fork, and notes if gRPC cannot work any more. Python calls this function in the new process."""
    global _forks, _broken
    _forks += 1
    _broken = _broken or _in_use_at_fork


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
