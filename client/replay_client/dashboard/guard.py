"""Guard: refuses requests that may not reach the page, and sets the security headers of every response."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "replay_dashboard"
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


class Guard:
    """Wraps the application. The files of the page are public; every answer about the server needs the token."""

    def __init__(self, app: ASGIApp, token: str | None, names: Iterable[str] = ()) -> None:
        """`token`: None on loopback. `names`: host names under which the page may be asked for."""
        self._app = app
        self._token = token
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(Request(scope)) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> JSONResponse | None:
        path, login = request.url.path, request.url.path == "/api/login"
        if request.method != ("POST" if login else "GET"):
            return _refuse(405, "the page only reads: use GET")
        if not self._is_own(request.headers.get("host", "")):
            return _refuse(403, "this page does not answer under that host name; allow it with --allow-host NAME")
        # A page of another site must not read what lies on this machine, or log its visitors in.
        if path.startswith("/api/") and request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return _refuse(403, "this request comes from another site: open the page itself")
        if path.startswith("/api/") and not login and not accepts(self._token, request.cookies.get(COOKIE, "")):
            return _refuse(401, "a token is needed: open the address that `replay dashboard` printed")
        return None

    def _is_own(self, host: str) -> bool:
        """Whether the Host header is an address, or one of the page's own names.

        This refuses DNS rebinding, in which a foreign name leads a browser to this machine. That attack needs a name,
        so any address is allowed.
        """
        name = (host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]).lower()
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in self._names
        return True


def accepts(token: str | None, given: str) -> bool:
    """Whether a viewer with the token `given` may see the page; compares in constant time."""
    return token is None or hmac.compare_digest(token.encode(), given.encode())


def _refuse(status: int, problem: str) -> JSONResponse:
    return JSONResponse({"problem": problem}, status)
