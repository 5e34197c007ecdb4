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
"""The security headers of every response. With them, the page runs only its own scripts, and no other site can embed
the page."""


class Guard:
    """Wraps the application. Anybody may read the files of the page. Every answer about the server needs the token."""

    def __init__(self, app: ASGIApp, token: str | None, names: Iterable[str] = ()) -> None:
        """`token`: the token that a viewer needs; None: viewers need none.

        `names`: host names, beside the machine's own, under which the page answers.
        """
        self._app = app
        self._token = token
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses the request, or hands it to the application. In both cases, adds HEADERS to the response."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        responder = self._app
        if scope["type"] == "http":
            refusal = self._refusal(Request(scope))
            if refusal is not None:
                responder = refusal  # in Starlette, a response is itself an application, which sends this response
        await responder(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> JSONResponse | None:
        """The response that refuses the request; None: the application may answer it."""
        path = request.url.path
        is_login = path == "/api/login"
        is_api = path.startswith("/api/")
        allowed_method = "POST" if is_login else "GET"
        if request.method != allowed_method:
            return _refuse(405, "the page only reads: use GET")
        if not self._is_own(request.headers.get("host", "")):
            return _refuse(403, "this page does not answer under that host name; allow it with --allow-host NAME")
        # A page of another site must not use this machine's browser to read the buffer, or to log a visitor in here.
        fetch_site = request.headers.get("sec-fetch-site", "none")  # "none": no page made the request
        if is_api and fetch_site not in ("same-origin", "none"):
            return _refuse(403, "this request comes from another site: open the page itself")
        if is_api and not is_login and not accepts(self._token, request.cookies.get(COOKIE, "")):
            return _refuse(401, "a token is needed: open the address that `replay dashboard` printed")
        return None

    def _is_own(self, host: str) -> bool:
        """True if `host`, a Host header, is an IP address, or one of the page's own names.

        This check stops DNS rebinding, an attack in which the DNS resolves an attacker's host name to this machine. The
        attack needs a host name, so any IP address is allowed.
        """
        if host.startswith("["):  # an address of IPv6, perhaps with a port
            name = host[: host.rfind("]") + 1]
        else:
            name, _, _ = host.partition(":")  # without the port
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:  # it is a name and no IP address
            return name.lower() in self._names
        return True


def accepts(token: str | None, viewer_token: str) -> bool:
    """True if a viewer with the token `viewer_token` may see the page. Compares in constant time.

    `token` is the token that viewers need; None: they need none.
    """
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
    """One connection. It is closed if a request is not complete in time, because uvicorn would wait for ever.

    If there are too many connections, the one that has waited longest for the rest of a request is closed to make room
    for the new one. If it has waited less than SECONDS_SAFE, the new connection is closed instead. The browser of the
    new connection then tries again.
    """

    _timer: asyncio.TimerHandle | None = None
    """Closes the connection when the time for its request is up; None: no request of the connection is incomplete."""
    _incomplete: dict[Protocol, float] = {}  # noqa: RUF012
    """All connections of this process with an incomplete request, and the loop's time at which each began to wait for
    the rest of its request. The connection that has waited longest comes first."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._update_timer()  # a new connection counts as one with an incomplete request: `_incomplete` is not empty
        if len(self.connections) > connection_bounds.most_connections():
            oldest, since = next(iter(self._incomplete.items()))
            is_safe = self.loop.time() < since + connection_bounds.SECONDS_SAFE
            victim = self if is_safe else oldest
            victim.transport.abort()
            victim._stop_timer()  # at once, because asyncio calls `connection_lost` only later

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _update_timer(self) -> None:
        """Stops the timer if the request is complete. Otherwise starts the timer, if it is not running yet."""
        # IDLE: the head of the request is not complete, or has not begun. SEND_BODY: the body is not complete.
        is_incomplete = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if not is_incomplete:
            self._stop_timer()
        elif self._timer is None:
            self._incomplete[self] = self.loop.time()
            self._timer = self.loop.call_later(connection_bounds.SECONDS_PER_REQUEST, self.transport.abort)

    def _stop_timer(self) -> None:
        """Stops the timer, so that it no longer closes the connection. Does nothing if no timer runs."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        self._incomplete.pop(self, None)
