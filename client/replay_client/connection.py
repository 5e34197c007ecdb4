"""Connection: a gRPC channel to one server. It gives all calls the same deadlines, retries and errors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, SupportsFloat, TypeVar

import grpc
from google.protobuf.message import Message

from replay_client import forks, tracing
from replay_client.access import TLS, Access
from replay_client.errors import (
    AuthenticationError,
    InvalidRequestError,
    ReplayError,
    ServerClosedError,
    ServerUnavailableError,
    error_of,
)
from replay_client.frames import Item, pack_items
from replay_client.shared_memory import SharedInserts, SharedMemory, SharedResponse, SharedSamples
from replay_client.streams import IdleStreams, failure
from replay_protos import REASON_KEY, SHORT_METHODS
from replay_protos import replay_pb2 as pb
from replay_protos.framing import SERVICE, frame_reader, write_frame
from replay_protos.replay_pb2_grpc import ReplayStub

if TYPE_CHECKING:
    from replay_protos.replay_pb2_grpc import ReplayAsyncStub  # a name of the type stubs only

T = TypeVar("T")

_SHORT_BYTES = 1 << 20
"""Bytes of a request above which a call of its own costs no more."""
_GRACE = 5.0
"""Seconds after the timeout. In this time the server can still answer why the request waited."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two attempts to reach a server that does not answer. Each pause doubles the one before."""
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


class Unset:
    """The type of DEFAULT."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = Unset()
"""The default of every `timeout`: the client's own timeout."""
Timeout = float | None | Unset
"""Seconds; None waits for ever."""


class PayloadStub:
    """The methods that carry payloads. Payloads travel in shared memory if possible, otherwise in frames over gRPC."""

    def __init__(self, channel: grpc.aio.Channel, *, shared_memory: bool) -> None:
        self.shared = SharedMemory(channel, wanted=shared_memory)
        inserted, samples, stored = (
            pb.InsertResponse.FromString,
            frame_reader(pb.SampleResponse),
            frame_reader(pb.GetResponse),
        )
        draw, get = pb.DrawRequest.SerializeToString, pb.GetRequest.SerializeToString
        self._insert_stream: Any = channel.stream_stream(f"/{SERVICE}/InsertStream", write_frame, inserted)
        self._draw: Any = channel.stream_stream(f"/{SERVICE}/Draw", draw, samples)
        self.Get = SharedResponse(channel.unary_stream(f"/{SERVICE}/Get", get, stored), self.shared)

    def InsertStream(self) -> SharedInserts:
        return SharedInserts(self._insert_stream(), self.shared)

    def Draw(self, send: Callable[[pb.DrawRequest], None]) -> SharedSamples:
        """`send` writes a request of the shared memory, when no other one is being written."""
        return SharedSamples(self._draw(), self.shared, send)


class Connection:
    """A client's connection to one server. Raises RuntimeError in a forked process in which gRPC cannot work."""

    def __init__(self, access: Access, timeout: float | None) -> None:
        forks.check_grpc()
        check_timeout(timeout)
        self.access = access
        self.address = access.address
        self.timeout = timeout
        self._stubs: _Stubs | None = None
        self._left: list[_Stubs] = []
        """Those of earlier addresses."""
        self._closed = False

    @property
    def transport(self) -> str:
        """How payloads travel: "shared memory", or "grpc: " with the reason."""
        known = self._stubs.payloads.shared.transport if self._stubs is not None else ""
        return known or "grpc: no large payload was sent or received yet"

    async def find_transport(self) -> str:
        """As `transport`, but first finds out whether the server is on this host."""
        await self._open().payloads.shared.find_out()
        return self.transport

    @property
    def stub(self) -> ReplayAsyncStub:
        """The calls without payloads."""
        return self._open().plain

    @property
    def payloads(self) -> PayloadStub:
        """The calls with payloads."""
        return self._open().payloads

    @property
    def channel(self) -> grpc.aio.Channel:
        """The gRPC channel, for a caller that watches its state."""
        return self._open().channel

    def move(self, address: str) -> None:
        """Send new calls to `address`. Calls under way stay on the old connection and end with it."""
        self.access, self.address = replace(self.access, address=address), address
        if self._stubs is not None:
            self._left.append(self._stubs)
            self._stubs = None

    def _open(self) -> _Stubs:
        # A channel belongs to the event loop that runs when it is made. So make it at the first use.
        if self._stubs is None:
            if self._closed:
                raise ServerClosedError("this client is closed")
            forks.check_grpc()
            channel = self.access.channel(_OPTIONS)
            payloads = PayloadStub(channel, shared_memory=self.access.shared_memory)
            plain = ReplayStub(channel)
            inserts, short_calls = IdleStreams(payloads.InsertStream), IdleStreams(plain.Calls)
            self._stubs = _Stubs(channel, plain, payloads, inserts, short_calls, forks.count())
        elif self._stubs.made_at != forks.count():
            raise RuntimeError(
                "this client was used before a fork and does not work after it; make one in each process"
            )
        return self._stubs

    def seconds(self, timeout: Timeout) -> float | None:
        """The timeout in seconds; that of the client if `timeout` is DEFAULT. None: without limit."""
        if isinstance(timeout, Unset):
            return self.timeout
        check_timeout(timeout)
        return timeout

    async def call(self, attempt: Callable[[float | None], Awaitable[T]], timeout: float | None) -> T:
        """The result of `attempt(rpc_timeout)`. Tries again until a server answers or the timeout ends."""
        patience = Patience(self, timeout)
        patience.start()
        while True:
            try:
                return await attempt(None if timeout is None else patience.remaining() + _GRACE)
            except grpc.aio.AioRpcError as error:
                await patience.pause_or_raise(error)

    async def unary(self, method: str, request: Message, timeout: Timeout) -> Any:
        """The server's answer to one request. Tries again until the server answers or the timeout ends."""
        data = None
        if method in SHORT_METHODS and request.ByteSize() <= _SHORT_BYTES:
            data = request.SerializeToString()

        async def attempt(seconds: float | None) -> Any:
            stubs = self._open()
            if data is not None and stubs.short_calls.free:
                answer = await stubs.short_calls.exchange([pb.CallRequest(method=method, request=data)], seconds)
                if answer.code:
                    raise failure(answer.code, answer.message, answer.reason)
                return pb.MutationResponse.FromString(answer.response)
            stub: Any = stubs.payloads if method == "Get" else stubs.plain
            return await getattr(stub, method)(request, timeout=seconds, metadata=tuple(tracing.carrier().items()))

        return await self.call(attempt, self.seconds(timeout))

    async def insert(self, item: Item) -> pb.InsertResponse:
        """Inserts or extends one item, and tries again likewise. Raises the reason if the server refuses it."""
        frames = list(pack_items([item]))

        async def attempt(seconds: float | None) -> pb.InsertResponse:
            answer: pb.InsertResponse = await self._open().inserts.exchange(frames, seconds)
            return answer

        answer = await self.call(attempt, item.timeout)
        for error in answer.errors:
            raise error_of(error.code, error.message, error.reason)
        return answer

    async def close(self) -> None:
        """Close the channel. With the last channel gRPC ends its threads; the process may then fork."""
        stubs, self._stubs, self._closed = self._stubs, None, True
        for each in [*self._left, *([stubs] if stubs is not None else ())]:
            await each.inserts.close()
            await each.short_calls.close()
            await each.payloads.shared.end()
            await each.channel.close()


class _Stubs(NamedTuple):
    """An open channel with its calls."""

    channel: grpc.aio.Channel
    plain: ReplayAsyncStub
    payloads: PayloadStub
    inserts: IdleStreams
    short_calls: IdleStreams
    made_at: int
    """`forks.count()` then."""


GONE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)


class Patience:
    """Decides how long to retry when a server does not answer. Raises any other failure at once."""

    def __init__(self, connection: Connection, timeout: float | None) -> None:
        self._connection = connection
        self._timeout = timeout
        self._pause = _FIRST_PAUSE
        self._end: float | None = None

    def start(self) -> None:
        """Starts the timeout now. Without this it starts at the first failure."""
        self._end = asyncio.get_running_loop().time() + (math.inf if self._timeout is None else self._timeout)

    def renew(self) -> None:
        """Call it when the server has answered. The timeout starts again at the next failure."""
        self._pause = _FIRST_PAUSE
        self._end = None

    def left(self) -> float | None:
        """The seconds that remain; None: there is no end."""
        return None if self._timeout is None else self.remaining()

    def remaining(self) -> float:
        assert self._end is not None
        return max(0.0, self._end - asyncio.get_running_loop().time())

    async def pause_or_raise(self, error: grpc.aio.AioRpcError) -> None:
        """Wait before the next attempt. Raises the ReplayError for `error` if another one is useless or too late."""
        if remedy := _tls_remedy(error.details() or "", self._connection.access.tls):
            raise AuthenticationError(f"{self._connection.address}: {remedy}") from None
        # grpc.aio reports INTERNAL, and not the true status, for a write to a stream that has just ended. A server that
        # stops without grace ends its calls with CANCELLED; a call that this client cancels raises CancelledError.
        if error.code() not in GONE_CODES:
            raise reported(error, self._connection.address, self._timeout) from None
        if self._end is None:
            self.start()
        if self.remaining() <= self._pause:
            if (error.trailing_metadata() or {}).get(REASON_KEY):  # the server answered, and says why
                raise reported(error, self._connection.address, self._timeout) from None
            waited = "" if not self._timeout else f" (tried for {self._timeout:.3g} s)"
            raise ServerUnavailableError(
                f"no replay server answers at {self._connection.address}{waited}: {error.details()}; is it running "
                f"(`replay serve`), and is the address right?"
                f"{_closed_remedy(error.details() or '', self._connection.access.tls)}"
            ) from None
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def reported(error: grpc.aio.AioRpcError, address: str, timeout: float | None) -> ReplayError:
    """The error that a caller gets for a failed call."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and error.details() == "Deadline Exceeded":
        # This text is gRPC's own: the server did not answer, even after the grace.
        return error_of(error.code(), f"{address} did not answer within {timeout} s")
    reason = (error.trailing_metadata() or {}).get(REASON_KEY, "")
    return error_of(error.code(), error.details() or "", str(reason))


def _tls_remedy(details: str, tls: TLS | None) -> str | None:
    """The remedy for a failed TLS handshake, found by gRPC's text. None for other failures, and for passing ones."""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        reason = details.partition("CERTIFICATE_VERIFY_FAILED: ")[2].removesuffix(": OK")
        trusted = "the authorities that gRPC knows" if tls is None or tls.ca is None else str(tls.ca)
        return (
            f"the server's certificate cannot be trusted ({reason}); it is checked against {trusted} (tls_ca, "
            f"REPLAY_TLS_CA): use the certificate of the authority that signed the server's, or renew the server's"
        )
    if "Hostname Verification" in details:
        return (
            "the server's certificate is for another name than this address: use an address that it names, or say "
            "which name to expect (tls_server_name, REPLAY_TLS_SERVER_NAME)"
        )
    if "WRONG_VERSION_NUMBER" in details:
        return "the server does not use TLS: leave out tls (and REPLAY_TLS...), or give the server tls_cert"
    return None


def _closed_remedy(details: str, tls: TLS | None) -> str:
    """Why the server may have closed the connection at once. gRPC does not report the reason, so this is a guess."""
    if "Socket closed" not in details and "Connection reset by peer" not in details:
        return ""
    if tls is None:
        return " A server that uses TLS closes a connection without it: try tls=... (REPLAY_TLS_CA, --tls-ca)"
    if tls.cert is None:
        return " It may want a certificate of this client: try tls_cert and tls_key (REPLAY_TLS_CERT, REPLAY_TLS_KEY)"
    return " It may not accept this client's certificate: its tls_client_ca must be the authority that signed that one"


def check_timeout(timeout: float | None) -> None:
    if timeout is not None and not (isinstance(timeout, SupportsFloat) and timeout >= 0):
        raise InvalidRequestError(
            f"timeout must be a number of seconds from 0, or None to wait for ever, not {timeout!r}"
        )
