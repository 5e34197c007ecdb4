"""Guard: what a request must have to reach the page, and the headers of every answer."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "replay_dashboard"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Wraps the application. Page files are public; whatever tells of the server wants the token."""

    def __init__(self, app: ASGIApp, token: str | None, names: Iterable[str] = ()) -> None:
        """`token`: None on loopback. `names`: host names under which the page may be asked for."""
        self._app = app
        self._token = None if token is None else token.encode()
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(scope, Headers(scope=scope))
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        login = scope["path"] == "/api/login"
        if scope["method"] != ("POST" if login else "GET"):
            return _refuse(405, "the page only reads: use GET")
        if not self._is_own(headers.get("host", "")):
            return _refuse(403, "this page is not known by that host name; name it with --allow-host")
        if not scope["path"].startswith("/api/"):
            return None
        # A page of another site must not read what lies on this machine, or log its visitors in.
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return _refuse(403, "only this page may ask")
        if self._token is not None and not login and not self.accepts(_token_of(headers)):
            return _refuse(401, "a token is needed: open the address that `replay dashboard` printed")
        return None

    def accepts(self, token: str) -> bool:
        """Compares in constant time."""
        return self._token is None or hmac.compare_digest(self._token, token.encode())

    def _is_own(self, host: str) -> bool:
        """DNS rebinding needs a name: addresses are always the page's own, names only those that it has."""
        name = (host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]).lower()
        try:
            ipaddress.ip_address(name.strip("[]"))
            return True
        except ValueError:
            return name in self._names


def _token_of(headers: Headers) -> str:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel else ""


def _refuse(status: int, problem: str) -> JSONResponse:
    return JSONResponse({"problem": problem}, status)
