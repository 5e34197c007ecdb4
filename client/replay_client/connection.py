"""Connection: the way to one server. It gives all calls the same deadlines, retries and errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, SupportsFloat, TypeVar

import grpc
from google.protobuf.message import Message

from replay_client import forks
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
from replay_client.records import Policy, policy_of
from replay_client.rings.transport import RingTransport
from replay_client.transport import NOT_KNOWN, GrpcTransport, IdleStreams, Transport, failure
from replay_client.waits import Patience
from replay_protos import REASON_KEY, SHORT_METHODS
from replay_protos import replay_pb2 as pb

T = TypeVar("T")

_SHORT_BYTES = 1 << 20
"""Bytes of a request above which a call of its own costs no more."""
_GRACE = 5.0
"""Seconds after the timeout. In this time the server can still answer why the request waited."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two attempts to reach a server that does not answer. Each pause doubles the one before."""


LATE_SECONDS = 0.5
"""Seconds after which a server of several that has not answered is asked for a sign of life."""


class Unset:
    """The type of DEFAULT."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = Unset()
"""The default of every `timeout`: the client's own timeout."""
Timeout = float | None | Unset
"""Seconds; None waits for ever."""


class Connection:
    """A client's connection to one server. Raises RuntimeError in a forked process in which gRPC cannot work."""

    name = ""
    """The name of this server among those of a client; empty: it is the only one."""
    is_up = True
    """Whether the server can be reached. It stays True for a server that nobody watches."""

    def __init__(self, access: Access, timeout: float | None) -> None:
        forks.check_grpc()
        check_timeout(timeout)
        self.access = access
        self.timeout = timeout
        self._open: _Open | None = None
        self._left: list[_Open] = []
        """Those of earlier addresses."""
        self._closed = False

    @property
    def address(self) -> str:
        return self.access.address

    @property
    def carries(self) -> str:
        """How payloads travel: "shared memory", or "grpc: " with the reason."""
        return NOT_KNOWN if self._open is None else self._open.transport.carries

    async def find_transport(self) -> str:
        """As `carries`, but first finds out whether the server is on this host."""
        await self.transport.find_out()
        return self.carries

    @property
    def transport(self) -> Transport:
        """The way to the server, without retries."""
        return self._opened().transport

    def move(self, address: str) -> None:
        """Send new calls to `address`. Calls under way stay on the old connection and end with it."""
        self.access = replace(self.access, address=address)
        if self._open is not None:
            self._left.append(self._open)
            self._open = None

    def _opened(self) -> _Open:
        # A transport belongs to the event loop that runs when it is made. So make it at the first use.
        if self._open is None:
            if self._closed:
                raise ServerClosedError("this client is closed")
            forks.check_grpc()
            transport = open_transport(self.access)
            inserts, short_calls = (
                IdleStreams(partial(transport.stream, method)) for method in ("InsertStream", "Calls")
            )
            self._open = _Open(transport, inserts, short_calls, forks.count())
        elif self._open.made_at != forks.count():
            raise RuntimeError(
                "this client was used before a fork and does not work after it; make one in each process"
            )
        return self._open

    async def call(self, attempt: Callable[[float | None], Awaitable[T]], timeout: float | None) -> T:
        """The result of `attempt(rpc_timeout)`. Tries again until a server answers or the timeout ends."""
        patience = self.patience(timeout)
        deadline = patience.start()

        async def again() -> T:
            left = deadline.seconds
            return await attempt(None if left is None else left + _GRACE)

        return await patience.result(again)

    def patience(self, timeout: float | None) -> Patience:
        """Tries again for `timeout` seconds while the server does not answer, and raises any other failure at once."""

        async def judge(error: Exception, late: bool) -> None:
            if isinstance(error, grpc.aio.AioRpcError):
                if (raised := self._why_not_again(error, late, timeout)) is None:
                    return
                raise raised from None
            raise error

        return Patience(judge, timeout, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE)

    def _why_not_again(self, error: grpc.aio.AioRpcError, late: bool, timeout: float | None) -> ReplayError | None:
        """The error for the caller of a failed call; None: another attempt may succeed. `late`: no time is left."""
        details = error.details() or ""
        if remedy := _tls_remedy(details, self.access.tls):
            return AuthenticationError(f"{self.address}: {remedy}")
        # grpc.aio reports INTERNAL, and not the true status, for a write to a stream that has just ended. A server that
        # stops without grace ends its calls with CANCELLED; a call that this client cancels raises CancelledError.
        # A server that answers says why it cannot do it now.
        if error.code() not in GONE_CODES or (late and (error.trailing_metadata() or {}).get(REASON_KEY)):
            return reported(error, self.address, timeout)
        if not late:
            return None
        waited = "" if not timeout else f" (tried for {timeout:.3g} s)"
        return ServerUnavailableError(
            f"no replay server answers at {self.address}{waited}: {details}; is it running (`replay serve`), and is "
            f"the address right?{_closed_remedy(details, self.access.tls)}"
        )

    async def unary(self, method: str, request: Message, timeout: float | None) -> Any:
        """The server's answer to one request. Tries again until the server answers or the timeout ends."""
        data = None
        if method in SHORT_METHODS and request.ByteSize() <= _SHORT_BYTES:
            data = request.SerializeToString()

        async def attempt(seconds: float | None) -> Any:
            opened = self._opened()
            if data is not None and opened.short_calls.free:
                answer = await opened.short_calls.exchange([pb.CallRequest(method=method, request=data)], seconds)
                if answer.code:
                    raise failure(answer.code, answer.message, answer.reason)
                return pb.MutationResponse.FromString(answer.response)
            return await opened.transport.call(method, request, seconds)

        return await self.call(attempt, timeout)

    async def insert(self, item: Item) -> pb.InsertResponse:
        """Inserts or extends one item, and tries again likewise. Raises the reason if the server refuses it."""
        frames = list(pack_items([item]))

        async def attempt(seconds: float | None) -> pb.InsertResponse:
            answer: pb.InsertResponse = await self._opened().inserts.exchange(frames, seconds)
            return answer

        answer = await self.call(attempt, item.timeout)
        for error in answer.errors:
            raise error_of(error.code, error.message, error.reason)
        return answer

    def doubt(self) -> None:
        """An answer is late. Whoever has other servers asks this one for a sign of life."""

    async def close(self) -> None:
        """Close the channel. With the last channel gRPC ends its threads; the process may then fork."""
        opened, self._open, self._closed = self._open, None, True
        for each in [*self._left, *([opened] if opened is not None else ())]:
            await each.inserts.close()
            await each.short_calls.close()
            await each.transport.close()


class _Open(NamedTuple):
    """An open transport with its idle streams."""

    transport: Transport
    inserts: IdleStreams
    short_calls: IdleStreams
    made_at: int
    """`forks.count()` then."""


def open_transport(access: Access) -> Transport:
    """The way to the server at the address of `access`."""
    return RingTransport(access) if access.shared_memory else GrpcTransport(access)


async def watch_policy(connection: Connection) -> AsyncGenerator[Policy]:
    """Yields the current policy of one server, then every new one. Connects again by itself."""
    patience = connection.patience(connection.timeout)
    last: tuple[int, str] | None = None
    while True:
        stream = connection.transport.stream("WatchPolicy", pb.GetPolicyRequest())
        try:
            while True:
                message = await stream.read()
                patience.renew()
                if (message.version, message.weights) != last:
                    last = message.version, message.weights
                    yield policy_of(message)
        except grpc.aio.AioRpcError as error:
            await patience.pause_or_raise(error)
        finally:
            stream.cancel()


GONE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)


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


def seconds_of(timeout: Timeout, default: float | None) -> float | None:
    """The timeout in seconds; None: without limit. Raises InvalidRequestError."""
    if isinstance(timeout, Unset):
        return default
    check_timeout(timeout)
    return timeout


def check_timeout(timeout: float | None) -> None:
    if timeout is not None and not (isinstance(timeout, SupportsFloat) and timeout >= 0):
        raise InvalidRequestError(
            f"timeout must be a number of seconds from 0, or None to wait for ever, not {timeout!r}"
        )
