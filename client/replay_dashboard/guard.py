"""Guard: refuses requests that may not reach the page, and sets the security headers of every response.

`Protocol` and `body_of` bound how long a browser may take to send a request, and how large its body may be.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

import h11
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from replay_protos import connection_bounds

COOKIE = "replay_dashboard"
"""The name of the cookie that holds a viewer's token."""
MOST_BODY_BYTES = 4096
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""The security headers of every response: the page runs only its own scripts, and other sites cannot embed it."""


class Guard:
    """Wraps the application. The files of the page are public; every answer about the server needs the token."""

    def __init__(self, app: ASGIApp, token: str | None, names: Iterable[str] = ()) -> None:
        """`token`: the token that a viewer needs; None: viewers need none.

        `names`: host names, beside the machine's own, under which the page answers.
        """
        self._app = app
        self._token = token
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with a refusal if there is one, otherwise by the application; both with HEADERS."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        application = self._app
        if scope["type"] == "http":
            # A refusal is a response, and so an application that answers every request with this response.
            application = self._refusal(Request(scope)) or application
        await application(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> JSONResponse | None:
        """The response that refuses the request; None: the application may answer it."""
        path = request.url.path
        is_login = path == "/api/login"
        is_api = path.startswith("/api/")
        if request.method != ("POST" if is_login else "GET"):
            return _refuse(405, "the page only reads: use GET")
        if not self._is_own(request.headers.get("host", "")):
            return _refuse(403, "this page does not answer under that host name; allow it with --allow-host NAME")
        # A page of another site must not use this machine's browser to read the buffer, or to log a visitor in here.
        if is_api and request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return _refuse(403, "this request comes from another site: open the page itself")
        if is_api and not is_login and not accepts(self._token, request.cookies.get(COOKIE, "")):
            return _refuse(401, "a token is needed: open the address that `replay dashboard` printed")
        return None

    def _is_own(self, host: str) -> bool:
        """True if `host`, a Host header, is an address, or one of the page's own names.

        This refuses DNS rebinding, in which the DNS resolves an attacker's host name to this machine. That attack needs
        a name, so any address is allowed.
        """
        if host.startswith("["):  # an address of IPv6, perhaps with a port
            name = host[: host.rfind("]") + 1]
        else:
            name, _, _ = host.partition(":")  # without the port
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:  # no address
            return name.lower() in self._names
        return True


def accepts(token: str | None, viewer_token: str) -> bool:
    """True if a viewer with this token may see the page. Compares in constant time."""
    return token is None or hmac.compare_digest(token.encode(), viewer_token.encode())


def _refuse(status: int, problem: str) -> JSONResponse:
    return JSONResponse({"problem": problem}, status)


class BodyTooLargeError(Exception):
    """A body has more than MOST_BODY_BYTES."""


async def body_of(request: Request) -> bytes:
    """The body of a request. Raises BodyTooLargeError as soon as MOST_BODY_BYTES are exceeded."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY_BYTES:
            raise BodyTooLargeError(f"the body has more than {MOST_BODY_BYTES} bytes")
    return body


class Protocol(H11Protocol):
    """One connection. It is closed if a request is not complete in time: uvicorn would wait for the rest without end.

    If too many connections are open, the oldest connection with an incomplete request is closed to make room for the
    new connection. If the oldest one has waited less than SECONDS_SAFE, the new connection is closed instead: its
    browser tries again.
    """

    _late: asyncio.TimerHandle | None = None
    """Closes the connection at the end of its time; None: no request of the connection is incomplete."""
    _halves: dict[Protocol, float] = {}  # noqa: RUF012
    """All connections of this process with an incomplete request, and the loop's time at which each began to wait. The
    one that has waited longest comes first."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()  # a new connection counts as one with an incomplete request, so `_halves` is not empty
        if len(self.connections) > connection_bounds.most_connections():
            oldest, since = next(iter(self._halves.items()))
            if self.loop.time() < since + connection_bounds.SECONDS_SAFE:
                oldest = self
            oldest.transport.abort()
            oldest._end_watch()  # now: `connection_lost` is called later

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_watch()

    def _watch(self) -> None:
        """Begins the time of a request, or ends it if the request is complete."""
        # IDLE: the head of the request is not complete, or has not begun. SEND_BODY: the body is not complete.
        is_incomplete = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if not is_incomplete:
            self._end_watch()
        elif self._late is None:
            self._halves[self] = self.loop.time()
            self._late = self.loop.call_later(connection_bounds.SECONDS_PER_REQUEST, self.transport.abort)

    def _end_watch(self) -> None:
        """Ends the time of a request, so that it no longer closes the connection."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
            self._halves.pop(self, None)
