"""Connection: sends calls to one server, with the same rules for deadlines, retries and errors for all calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, SupportsFloat, TypeVar

import grpc
from google.protobuf.message import Message

from replay_client.access import TLS, Access
from replay_client.errors import (
    GONE,
    AuthenticationError,
    ClientClosedError,
    DeadlineExceededError,
    InvalidRequestError,
    ReplayError,
    ServerUnavailableError,
    error_of,
)
from replay_client.records import ItemPage, MutationResult, PermitGrant, Policy, grant_of, item_page_of
from replay_client.requests import Item, once, pack_items, unchanged_row
from replay_client.rings import RingTransport
from replay_client.transport import NOT_KNOWN, Transport, check_grpc, failure, forks
from replay_client.waits import Patience
from replay_protos import REASON_KEY, SHORT_METHODS
from replay_protos import replay_pb2 as pb
from replay_protos.framing import SERVICE
from replay_protos.transport import proxy_remedy

T = TypeVar("T")

_SHORT_BYTES = 1 << 20
"""The most bytes of a request that is sent on an idle stream. For a larger request, a call of its own costs no more."""
_GRACE = 5.0
"""Seconds that an RPC may last after the timeout of its call, so that the server can still say why the call waited."""
_FIRST_PAUSE = 0.05
"""Seconds between the first two attempts to reach a server that does not answer. Each pause is twice the one before."""
_LONGEST_PAUSE = 1.0
"""Seconds of the longest of these pauses."""
LATE_SECONDS = 0.5
"""Seconds after which the client probes one of several servers that has not answered a call (`Shard.doubt`)."""


class Unset:
    """The type of DEFAULT."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = Unset()
"""The default of every `timeout`: the client's own timeout."""
Timeout = float | None | Unset
"""Seconds; None waits for ever."""


class Connection:
    """A client's connection to one server.

    The constructor raises RuntimeError in a forked process in which gRPC cannot work.
    """

    name = ""
    """The name of this server, if the client has several servers; empty: the client has one server."""
    is_up = True
    """True while the server can be reached. It is always True for the only server of a client, because no code watches
    whether that server can be reached."""

    def __init__(self, access: Access, timeout: float | None) -> None:
        check_grpc()
        self.access = access
        self.timeout = timeout
        """Seconds; the timeout of a call that has none of its own. None: no limit."""
        self._transport: Transport | None = None
        self._forks_when_made = 0
        """The value of `forks()` when the transport was made."""
        self._old_transports: list[Transport] = []
        """The transports to earlier addresses, on which calls may still be under way."""
        self._closed = False

    @property
    def address(self) -> str:
        """host:port, or NAME=host:port."""
        return self.access.address

    @property
    def carries(self) -> str:
        """The transport of payloads: "shared memory", or "grpc: " with the reason why it is not shared memory."""
        return NOT_KNOWN if self._transport is None else self._transport.carries

    async def find_transport(self) -> str:
        """Finds out whether the server is on this host, and returns `carries`, which is then known."""
        await self.transport.find_out()
        return self.carries

    @property
    def transport(self) -> Transport:
        """The transport to the server. It sends each call once, without retries.

        Raises ClientClosedError after `close`, and RuntimeError after a fork.
        """
        # A transport belongs to the event loop that runs when the transport is made. So it is made at the first use.
        if self._transport is None:
            if self._closed:
                raise ClientClosedError("this client is closed")
            check_grpc()
            self._transport = open_transport(self.access)
            self._forks_when_made = forks()
        elif self._forks_when_made != forks():
            raise RuntimeError(
                "this client was used before a fork and does not work after it; make one in each process"
            )
        return self._transport

    def move(self, address: str) -> None:
        """Sends new attempts to `address`. An attempt that is under way stays on the old transport."""
        self.access = replace(self.access, address=address)
        if self._transport is not None:
            self._old_transports.append(self._transport)
            self._transport = None

    async def call(self, attempt: Callable[[float | None], Awaitable[T]], timeout: float | None) -> T:
        """Returns the result of `attempt(rpc_timeout)`. Tries again until a server answers or the timeout ends.

        `rpc_timeout`: the seconds for one attempt; None: no limit.
        """
        patience = self.patience(timeout)
        deadline = patience.start()  # the timeout begins now, and not at the first failure

        async def attempt_in_time() -> T:
            """One attempt, within the time that is left."""
            rpc_timeout = deadline.seconds
            if rpc_timeout is not None:
                rpc_timeout += _GRACE  # so that the server can still answer why the request had to wait
            return await attempt(rpc_timeout)

        return await patience.result(attempt_in_time)

    def patience(self, timeout: float | None) -> Patience:
        """Returns a Patience for calls. It tries again while the server does not answer, and raises other errors at
        once."""

        async def judge(error: Exception, late: bool) -> None:
            """Raises an error to end the attempts, or returns to let another attempt follow.

            `Patience` calls this after each attempt that failed. `late`: no time is left for another attempt.
            """
            if not isinstance(error, grpc.aio.AioRpcError):  # an error of this client, such as ClientClosedError
                raise error
            details = error.details() or ""
            remedy = _tls_remedy(details, self.access.tls)
            if remedy is not None:
                raise AuthenticationError(f"{self.address}: {remedy}") from None
            if error.code() not in GONE_CODES:  # a server has answered, so another attempt would not help
                raise reported(error, self.address, timeout) from None
            if not late:
                return
            has_reason = bool((error.trailing_metadata() or {}).get(REASON_KEY))
            if has_reason:  # a server answers, and gives the reason why it cannot serve the request now
                raise reported(error, self.address, timeout) from None
            raise self._no_answer(details, timeout) from None

        return Patience(judge, timeout, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE)

    def _no_answer(self, details: str, timeout: float | None) -> ServerUnavailableError:
        """Returns the error of a call that no server has answered in time. `details` is the text of gRPC's error."""
        waited = f" (tried for {timeout:.3g} s)" if timeout else ""
        host = self.address.rpartition(":")[0]
        return ServerUnavailableError(
            f"no replay server answers at {self.address}{waited}: {details}; is it running (`replay serve`), "
            f"and is the address right?{_closed_remedy(details, self.access.tls)}{proxy_remedy(host)}"
        )

    async def unary(self, method: str, request: Message, timeout: float | None) -> Any:
        """Returns the server's answer to one request. Tries again until the server answers or the timeout ends."""
        # A short request may be sent on an idle stream, which costs half as much as a call of its own.
        short_request: bytes | None = None
        if method in SHORT_METHODS and request.ByteSize() <= _SHORT_BYTES:
            short_request = request.SerializeToString()

        async def attempt(seconds: float | None) -> Any:
            """Sends the request once: on a stream if it is short and few streams are busy, otherwise as a call."""
            transport = self.transport
            if short_request is not None and transport.short_calls.free:
                requests = [pb.CallRequest(method=method, request=short_request)]
                # `exchange` passes to the lambda how many bytes a message should carry. The lambda ignores this number,
                # because a short request is one message.
                answer = await transport.short_calls.exchange(lambda _: requests, seconds)
                if answer.code:  # 0 is the code of success
                    raise failure(answer.code, answer.message, answer.reason)
                return pb.MutationResponse.FromString(answer.response)  # the response of all SHORT_METHODS
            return await transport.call(method, request, seconds)

        return await self.call(attempt, timeout)

    async def insert(self, item: Item) -> pb.InsertResponse:
        """Inserts or extends one item. Tries again like `unary`. Raises the server's error if it refuses the item."""

        async def attempt(seconds: float | None) -> Any:
            # `exchange` passes to the lambda how many payload bytes each message should carry.
            return await self.transport.inserts.exchange(lambda size: pack_items([item], size), seconds)

        answer: pb.InsertResponse = await self.call(attempt, item.timeout)
        if answer.errors:
            error = answer.errors[0]  # the only one, because the request has one item
            raise error_of(error.code, error.message, error.reason)
        return answer

    def doubt(self) -> None:
        """Does nothing. It is called when an answer is late, and `Shard`, one of several servers, then probes its
        server."""

    async def close(self) -> None:
        """Closes the channels to the server.

        When the last channel of a process is closed, gRPC ends its threads, so the process may fork safely.
        """
        transports = list(self._old_transports)
        if self._transport is not None:
            transports.append(self._transport)
        self._transport = None
        self._closed = True
        for transport in transports:
            await transport.close()


class OneServer(Connection):
    """The only server of a client. Each request goes straight to it.

    It has the methods of the four classes that a client of several servers uses in its place: Fleet, Placement,
    PolicyBoard and PermitOffice. `aio.servers_of` chooses when the client is made. A method without a docstring does
    what the docstring in its class of `replay_client.shards` says. Timeouts are in seconds; None waits for ever. Errors
    are those of `Connection.unary`.
    """

    decided = True
    """Always True. In a Fleet, it is True once the Fleet has tried to reach each server. A writer waits until it is
    True."""

    def __init__(self, access: Access, timeout: float | None) -> None:
        super().__init__(access, timeout)
        self.shards = [self]
        """All servers of the client: this one."""
        self.listeners: list[Callable[[Any], None]] = []
        """Functions that a Fleet calls when a server becomes reachable or unreachable. They are never called here."""

    # ------------------------------------------------------------------------------------------------ as a Fleet

    def connect(self) -> None:
        """Does nothing: the first request connects."""

    def up(self) -> list[OneServer]:
        return self.shards

    async def ask(self, method: str, request: Message, timeout: float | None, read: Callable[[Any], T]) -> T:
        return read(await self.unary(method, request, timeout))

    ask_all = ask

    async def pages(self, request: pb.ListItemsRequest, timeout: float | None) -> ItemPage:
        return await self.ask("ListItems", request, timeout, item_page_of)

    async def say(self, method: str, request: Message, timeout: float | None) -> None:
        with suppress(DeadlineExceededError, *GONE):  # no server needs this message, so it may be lost
            await self.unary(method, request, timeout)

    # -------------------------------------------------------------------------------------------- as a Placement

    def shard_for(self, item: Item) -> OneServer:
        return self

    def forget(self, item: Item, shard: Connection) -> bool:
        """Returns False: the item cannot be inserted into another server, because there is none."""
        return False

    async def settle(self, item: Item) -> None:
        """Does nothing: this server granted all permits, so none has to be released on another server."""

    async def extend(self, item: Item) -> pb.UnchangedRow | None:
        return unchanged_row(await self.insert(item))

    async def change(self, method: str, request: Message, timeout: float | None) -> MutationResult:
        answer = await self.unary(method, request, timeout)
        return MutationResult(answer.applied, tuple(answer.missing))

    # ---------------------------------------------------------------------- as a PolicyBoard and a PermitOffice

    async def publish(self, request: pb.SetPolicyVersionRequest, timeout: float | None) -> Policy:
        request.shard_index.shards = 1  # this server alone grants all permits
        answer = await self.unary("SetPolicyVersion", request, timeout)
        policy: Policy = answer.policy
        return policy

    def watch(self) -> AsyncGenerator[Policy]:
        return watch_policy(self)

    async def acquire(self, request: pb.AcquirePermitsRequest, timeout: float | None) -> PermitGrant:
        answer = await self.unary("AcquirePermits", once(request), timeout)
        return grant_of(answer)

    async def release(self, grant: PermitGrant, request: pb.ReleasePermitsRequest, timeout: float | None) -> int:
        answer = await self.unary("ReleasePermits", once(request), timeout)
        return int(answer.released)


def open_transport(access: Access) -> Transport:
    """Makes a transport to the server at the address of `access`, with shared memory unless it is turned off."""
    return RingTransport(access) if access.shared_memory else Transport(access)


async def watch_policy(connection: Connection) -> AsyncGenerator[Policy]:
    """Yields the current policy of one server, then every new one. Connects again by itself if the stream breaks.

    Raises ServerUnavailableError if the server does not answer within the timeout of `connection`. Raises other errors
    of the stream at once.
    """
    patience = connection.patience(connection.timeout)
    last_policy: tuple[int, str] | None = None  # the version and the weights that were yielded last
    while True:
        stream = connection.transport.stream("WatchPolicy", pb.GetPolicyRequest())
        try:
            while True:
                message = await stream.read()
                patience.renew()  # the timeout starts anew, because the server answers
                policy = (message.version, message.weights)
                if policy != last_policy:  # on a new stream, the server first sends the current policy again
                    last_policy = policy
                    yield message
        except grpc.aio.AioRpcError as error:
            await patience.pause_or_raise(error)  # raises if no other attempt follows
        finally:
            stream.cancel()


GONE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)
"""The status codes that mean that the server does not answer now.

If the client writes to a stream that has just ended, grpc.aio reports INTERNAL and not the true status. A server that
stops without a grace period ends its calls with CANCELLED. A call that this client cancels has no such code, but raises
asyncio's CancelledError.
"""


def reported(error: grpc.aio.AioRpcError, address: str, timeout: float | None) -> ReplayError:
    """Converts gRPC's error of a failed call to an error of this package. `timeout`: seconds of the call."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and error.details() == "Deadline Exceeded":
        # This text is from gRPC and not from the server. So the server did not answer, even within _GRACE more seconds.
        return error_of(error.code(), f"{address} did not answer within {timeout} s")
    if error.code() is grpc.StatusCode.UNIMPLEMENTED and error.details() == "Method not found!":
        # This text is from gRPC, too. The server lacks the service, or this method of the service.
        problem = f"{address} is of another version than this client, which speaks {SERVICE}"
        return error_of(error.code(), f"{problem}: install one version of replay-server on both sides")
    reason = (error.trailing_metadata() or {}).get(REASON_KEY, "")
    return error_of(error.code(), error.details() or "", str(reason))


def _tls_remedy(details: str, tls: TLS | None) -> str | None:
    """Returns the remedy for a failed TLS handshake. None: the failure is of another kind.

    `details`: the text of gRPC's error, from which the kind of the failure is known.
    """
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
    """Returns the remedy if the server closed the connection at once; empty: the failure is of another kind.

    `details`: the text of gRPC's error. This text does not say why the server closed the connection, so the remedy is a
    guess from the TLS settings of the client.
    """
    if "Socket closed" not in details and "Connection reset by peer" not in details:
        return ""
    if tls is None:
        return " A server that uses TLS closes a connection without it: try tls=... (REPLAY_TLS_CA, --tls-ca)"
    if tls.cert is None:
        return " It may want a certificate of this client: try tls_cert and tls_key (REPLAY_TLS_CERT, REPLAY_TLS_KEY)"
    return " It may not accept this client's certificate: its tls_client_ca must be the authority that signed that one"


def seconds_of(timeout: Timeout, default: float | None) -> float | None:
    """Returns the timeout in seconds; None: no limit. Raises InvalidRequestError for a value that is no timeout.

    `default`: the result for DEFAULT.
    """
    if isinstance(timeout, Unset):
        return default
    check_timeout(timeout)
    return timeout


def check_timeout(timeout: float | None) -> None:
    """Raises InvalidRequestError unless the timeout is None or a number of seconds that is at least 0."""
    if timeout is not None and not (isinstance(timeout, SupportsFloat) and timeout >= 0):
        raise InvalidRequestError(f"timeout must be seconds from 0, or None to wait for ever, not {timeout!r}")
