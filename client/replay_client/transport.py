"""Transport: how messages reach one server, over gRPC.

This is the only seam between the client and the network: a call with one answer, and streams of messages. Everything
above it runs on any transport: `rings` sends payloads through shared memory, and tests bring servers of their own. A
transport raises grpc.aio.AioRpcError, and its connection turns that into the errors of the client.
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
"""What a transport says that has not tried shared memory yet."""
_MOST_IDLE = 16
"""Streams of one kind that stay open."""
_GOODBYE = 1.0
"""Seconds that the server has to end a stream."""
_OPTIONS: Final = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A server that restarts may have another address under the same name. gRPC's default looks a name up again only
    # after 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]
_LARGE = 128 << 10
"""Bytes of a response whose memory malloc may give back to the system, as soon as it is freed."""
_BOTH, _ANSWERS = "stream_stream", "unary_stream"
_MESSAGES: Final[dict[str, tuple[str, Any, Any]]] = {
    "InsertStream": (_BOTH, write_frame, pb.InsertResponse.FromString),
    "Draw": (_BOTH, pb.DrawRequest.SerializeToString, frame_reader(pb.SampleResponse)),
    "Multiplex": (_BOTH, pb.CallRequest.SerializeToString, pb.CallResponse.FromString),
    "ShareMemory": (_BOTH, pb.ShareMemoryRequest.SerializeToString, pb.ShareMemoryResponse.FromString),
    "WatchPolicy": (_ANSWERS, pb.GetPolicyRequest.SerializeToString, pb.Policy.FromString),
    "Get": (_ANSWERS, pb.GetRequest.SerializeToString, frame_reader(pb.GetResponse)),
}
"""The methods that are streams: how gRPC calls them, and how it writes and reads their messages."""


def failure(code: grpc.StatusCode | int, details: str, reason: str = "") -> grpc.aio.AioRpcError:
    """The error with which a call would fail that the server refuses for this reason."""
    status = code if isinstance(code, grpc.StatusCode) else STATUSES[code]
    trailing = grpc.aio.Metadata(*([(REASON_KEY, reason)] if reason else ()))
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailing, details)


class Stream:
    """Messages to and from a server. Those of InsertStream, Draw and Get are frames.

    What Draw and Get read has one payload for each row, however many messages carried it.
    """

    def __init__(self, call: Any) -> None:
        """`call`: that of gRPC."""
        self._call = call

    @property
    def bytes_per_message(self) -> int:
        """About how many payload bytes a message should carry."""
        return BYTES_PER_MESSAGE

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended."""
        return bool(self._call.done())

    async def write(self, message: Any) -> None:
        """Sends a message. Raises AioRpcError or InvalidStateError if the stream has ended; `read` has the reason."""
        await self._call.write(message)

    async def read(self) -> Any:
        """The next message. Raises AioRpcError if the stream has ended."""
        call = self._call
        if (message := await call.read()) is not grpc.aio.EOF:
            return message
        if (code := await call.code()) is grpc.StatusCode.OK:
            raise failure(grpc.StatusCode.UNAVAILABLE, "the server ended the stream without an error")
        raise grpc.aio.AioRpcError(
            code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )

    async def end(self, reader: asyncio.Task[None] | None = None) -> bool:
        """Ends the stream in good order. `reader` is the task that reads it, if there is one.

        Returns whether the server has ended it too; otherwise the stream is cancelled.
        """

        # After a cancelled stream gRPC would call the event loop once more, and the loop may be closed by then.
        async def read_on() -> None:
            while await self._call.read() is not grpc.aio.EOF:
                pass

        ended = False
        # InternalError: the call broke in this moment, and gRPC cannot say more to the server.
        with suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(_GOODBYE):
                await self._call.done_writing()
                await (asyncio.wait([reader]) if reader else read_on())
                ended = True
        if not ended:
            self.cancel()
        return ended

    def cancel(self) -> None:
        """Ends the stream at once."""
        self._call.cancel()


class Rows:
    """The payloads of one response. No byte is copied twice.

    `keep` turns a row that lies in one message into its payload. For a row of several messages, this allocates all of
    its memory when the first bytes come, and copies each message straight to its place.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._gap = memoryview(b"")
        """Where the bytes go that the last of `payloads` still lacks."""
        self.missing = sum(sizes)
        """The payload bytes that have not come."""
        self.payloads: list[Buffer] = []
        """One for each row; complete when nothing is missing."""
        if self.missing >= _LARGE:
            keep_freed_memory()
        self.add(b"", memoryview)  # the empty rows at the start

    def add(self, data: Buffer, keep: Keep) -> None:
        """Adds the bytes that come next. Raises ReplayError if they are more than announced, or have no room."""
        data = memoryview(data)
        end, at = len(data), min(len(self._gap), len(data))
        if end > self.missing:
            raise ReplayError(f"the server sent {end - self.missing} payload bytes more than payload_sizes says")
        self.missing -= end
        if at:
            self._gap[:at] = data[:at]
            self._gap = self._gap[at:]
        sizes, row = self._sizes, len(self.payloads)
        while row < len(sizes) and (at < end or not (sizes[row] or self._gap)):
            size = sizes[row]
            if at + size <= end:
                self.payloads.append(keep(data[at : at + size]))
            else:
                self._begin(size, data[at:])
            at += size
            row += 1

    def _begin(self, size: int, start: memoryview) -> None:
        try:
            # numpy, too, asks the system for huge pages where they pay.
            buffer = (np.empty(size, dtype=np.uint8) if size < LARGE_BUFFER else large_buffer(size)).data
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            raise ReplayError(f"the server has a payload of {size} bytes, for which there is no memory") from error
        buffer[: len(start)] = start
        self._gap = buffer[len(start) :]
        self.payloads.append(buffer.toreadonly())


class BatchStream(Stream):
    """A call whose answers have payloads: it puts the messages of each answer together."""

    async def read(self) -> Frame[Any]:
        frame = await super().read()
        head, rows = frame.head, Rows(frame.head.payload_sizes)
        await self._on_first_frame(frame)
        pass_on(frame, self._reader_of, rows.add)
        while rows.missing:
            frame = await super().read()
            pass_on(frame, self._reader_of, rows.add)
        return Frame(head, rows.payloads)

    async def _on_first_frame(self, frame: Frame[Any]) -> None:
        """The first message of an answer has come."""

    def _reader_of(self, ring_id: int) -> RingReader | None:
        """The ring through which payloads come; None: this stream has none."""
        return None


class IdleStreams:
    """Streams that stay open between the exchanges of one kind. An exchange on one costs half of a call of its own.

    Each stream carries one exchange at a time. So an exchange that waits holds up no other one.
    """

    def __init__(self, open_stream: Callable[[], Stream]) -> None:
        self._open = open_stream
        self._idle: list[Stream] = []
        self._busy = 0

    @property
    def free(self) -> bool:
        """Whether fewer streams are in use than may stay open."""
        return self._busy < _MOST_IDLE

    async def exchange(self, messages: Callable[[int], Iterable[Any]], timeout: float | None) -> Any:
        """Sends `messages(bytes of one)`. Returns the answer; raises AioRpcError if it is late or the stream breaks."""
        stream = self._idle.pop() if self._idle else self._open()
        self._busy += 1
        try:
            async with asyncio.timeout(timeout):
                with suppress(asyncio.InvalidStateError):  # it ended while it was idle; the read raises the reason
                    for message in messages(stream.bytes_per_message):
                        await stream.write(message)
                answer = await stream.read()
        except TimeoutError:
            stream.cancel()
            raise failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None  # as gRPC says it
        except grpc.aio.AioRpcError:
            for broken in [stream, *self._idle]:  # they share a connection, so all of them are broken
                broken.cancel()
            self._idle.clear()
            raise
        except BaseException:
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
        idle, self._idle = self._idle, []
        await asyncio.gather(*(stream.end() for stream in idle))


class Transport:
    """The way to one server: its messages and payloads go over a gRPC channel. It belongs to one event loop."""

    def __init__(self, access: Access) -> None:
        self._channel, self._metadata = access.channel(_OPTIONS), access.metadata
        self._stub: Any = ReplayStub(self._channel)
        self._methods: dict[str, Any] = {
            method: getattr(self._channel, kind)(f"/{SERVICE}/{method}", write, read)
            for method, (kind, write, read) in _MESSAGES.items()
        }
        self.inserts = IdleStreams(partial(self.stream, "InsertStream"))
        self.short_calls = IdleStreams(partial(self.stream, "Multiplex"))

    @property
    def carries(self) -> str:
        """How payloads travel: "shared memory", or "grpc: " with the reason."""
        return "grpc: shared memory is turned off in this client (shared_memory=False)"

    async def find_out(self) -> None:
        """Waits until it is known whether the server is on this host."""

    async def call(self, method: str, request: Message, timeout: float | None) -> Any:
        """The answer to one request, within `timeout` seconds. Raises AioRpcError."""
        if method == "Get":
            return await self.stream(method, request, timeout).read()
        metadata = (*self._metadata, *tracing.carrier().items())
        return await getattr(self._stub, method)(request, timeout=timeout, metadata=metadata)

    def stream(self, method: str, request: Message | None = None, timeout: float | None = None) -> Stream:
        """Opens a stream; `request`: of a method that takes one and answers with many messages."""
        call = self._open(method, request, timeout)
        return BatchStream(call) if method in ("Draw", "Get") else Stream(call)

    def _open(self, method: str, request: Message | None = None, timeout: float | None = None) -> Any:
        requests = () if request is None else (request,)
        return self._methods[method](*requests, timeout=timeout, metadata=self._metadata)

    def state(self) -> ChannelConnectivity:
        """Whether the server can be reached. Tries to connect."""
        return self._channel.get_state(try_to_connect=True)

    async def changed(self, state: ChannelConnectivity) -> None:
        """Returns when the state is another one."""
        await self._channel.wait_for_state_change(state)

    async def end_idle(self) -> None:
        """Ends the streams that stay open between exchanges."""
        await self.inserts.close()
        await self.short_calls.close()

    async def close(self) -> None:
        """Ends the connection."""
        await self.end_idle()
        await self._channel.close()


# ------------------------------------------------------------------------------------------------------------- forks

# gRPC can follow a fork only while none of its threads runs. Its asyncio interface runs one as long as any channel,
# call or server of it is alive, in this package or elsewhere in the process. In a process forked meanwhile every call
# hangs.

_POLLER = "(_poll_wrapper)"
"""The name of the thread of grpc.aio ends so; gRPC has no function that tells whether it runs."""

_forks = 0
_in_use_at_fork = False
_broken = False


def forks() -> int:
    """How many forks lie between the first process and this one. Cheaper than asking for the process id."""
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
    return any(thread.name.endswith(_POLLER) for thread in threading.enumerate())


def _before() -> None:
    global _in_use_at_fork
    _in_use_at_fork = _in_use()
    if _in_use_at_fork:
        # A call of gRPC that has ended is part of a reference cycle, and keeps its closed channel alive.
        gc.collect()
        _in_use_at_fork = _in_use()


def _after_in_child() -> None:
    global _forks, _broken
    _forks += 1
    _broken = _broken or _in_use_at_fork


os.register_at_fork(before=_before, after_in_child=_after_in_child)
