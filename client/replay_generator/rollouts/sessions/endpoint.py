"""SessionServer: the address at which agents ask the policy in the protocols of OpenAI and Anthropic.

    /sessions/ID/v1/… ──▶ the dialect of the path ──Ask──▶ the session ──Answer──▶ a body, or events

* The end of a path decides which function answers. Clients differ in what they write before this end: nothing, /v1, or
  /v1 twice.
* An answer is sent when the policy has written all of it. If the client asked for a stream, the server sends comments
  until then, so that the connection stays open.
* After a failure the client gets an HTTP status, and a body in the form of the protocol. If a stream has begun, the
  failure is the last event of the stream.
* If a client hangs up, the policy goes on writing the turn, because the client may send the request again. The client
  then gets the answer. Only the end of the session ends turns. But the request no longer counts among those that are
  answered at the same time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from ssl import SSLContext
from typing import Any, TypeVar

from aiohttp import web

from replay_generator.notices import Watch
from replay_generator.rollouts.rollout import RolloutError
from replay_generator.rollouts.sessions.connections import Connections
from replay_generator.rollouts.sessions.dialects.chat import Chat, Completions
from replay_generator.rollouts.sessions.dialects.fields import MODEL
from replay_generator.rollouts.sessions.dialects.messages import Messages
from replay_generator.rollouts.sessions.dialects.responses import Responses
from replay_generator.rollouts.sessions.large_requests import worked
from replay_generator.rollouts.sessions.refusals import Refusals
from replay_generator.rollouts.sessions.session import Session
from replay_generator.rollouts.sessions.turns import Answer, Ask, Refusal, is_deep
from replay_protos import connection_bounds

logger = logging.getLogger(__name__)

_REFUSALS = web.AppKey("refusals", Refusals)
"""The key of the server's Refusals in its application."""
T = TypeVar("T")
Dialect = Chat | Responses | Messages
"""A protocol. The class Chat says what its methods do."""
_MOST = 32
"""The most requests of one session that are answered at the same time. Further requests wait. As many more may be under
way for clients that have hung up."""
MOST_WAITING = 1024
"""The most requests of one session that wait."""
MOST_WAITING_BYTES = 64 << 20
"""The most bytes of the requests of one session that wait, all bodies together."""
_MOST_VALUES = 1 << 18
"""The most JSON values in a request, besides one value for each token that fits into the engine. The JSON parser lets
no other thread run until it has read the last value. For this number of values it needs some hundredths of a second."""
_MOST_NESTED = 256
"""The deepest nesting of lists and objects in a request. Templates and `json` read and write nested values by
recursion, which has a limit."""
_EMPTY = Answer("", "", "", (), "stop", None, 0, 0)
"""An empty answer. `_parsed` tries to write this answer before the policy draws a real one."""
_QUIET_S = 10.0
"""Seconds between two comments on a stream that waits for its answer."""
_LOOK_S = 1.0
"""Seconds between two looks at whether a client has hung up."""


class _AtDebug(logging.LoggerAdapter[logging.Logger]):
    """A logger for aiohttp that logs exceptions at level DEBUG.

    aiohttp logs an exception for bytes that are no request. Anybody can send such bytes as often as they like. At level
    ERROR, they would fill the log.
    """

    def exception(self, msg: object, *args: object, **options: Any) -> None:
        """Logs an exception at level DEBUG."""
        self.debug(msg, *args, **{"exc_info": True, **options})


@web.middleware
async def _faults(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
    """Answers a request whose handler raises an error, and counts the refusal. Logs errors of this server."""
    try:
        return await handler(request)
    except web.HTTPException as error:  # aiohttp turns this error into an answer
        request.config_dict[_REFUSALS].count(error.status, error.text or error.reason)
        raise
    except ConnectionError:  # the client has hung up, so nobody can be answered
        raise
    except Refusal as refusal:
        request.config_dict[_REFUSALS].count(refusal.status, str(refusal))
        return web.Response(status=refusal.status, text=str(refusal))
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        request.config_dict[_REFUSALS].count(500, f"{type(error).__name__}: {error}")
        return web.Response(status=500, text=f"the generator failed with {type(error).__name__}")


class _Line:
    """The requests of one session. At most _MOST of them are answered at the same time, and the others wait in line."""

    def __init__(self, *, is_taken: bool) -> None:
        """`is_taken` False: the session waits until an agent takes it."""
        self.is_taken = is_taken
        """True once an agent has taken the session."""
        self.under_way = 0
        """The number of requests that are being answered, or wait."""
        self.silent_since = time.monotonic()
        """The time at which the last request was answered. Before the first request: the time at which an agent took
        the session."""
        self._turns = asyncio.Semaphore(_MOST)
        """Bounds the number of requests that are being answered, without those in `_gone`."""
        self._gone = 0
        """The number of requests that are being answered, and whose clients have hung up. At most _MOST."""
        self._waiting = 0
        """The number of requests that wait."""
        self._waiting_bytes = 0
        """The bytes of the requests that wait, all bodies together."""

    def take(self) -> None:
        """Notes that an agent has taken the session."""
        self.is_taken = True
        self.silent_since = time.monotonic()

    @asynccontextmanager
    async def turn(self, request: web.Request, size: int) -> AsyncIterator[None]:
        """Waits until a request of `size` bytes may be answered. The block then answers the request.

        If the client hangs up, the next request may be answered beside this one. Raises Refusal if the line is full, or
        if the client hangs up while its request waits.
        """
        is_full = self._waiting >= MOST_WAITING or self._waiting_bytes + size > MOST_WAITING_BYTES
        must_wait = self._turns.locked()
        if must_wait and is_full:
            why = f"the session has {_MOST} requests under way, and {self._waiting} wait: wait for an answer"
            raise Refusal(why, status=429)
        self.under_way += 1
        self._waiting += 1
        self._waiting_bytes += size
        try:
            await self._acquire(request, size)
            leaving = asyncio.create_task(self._leave_when_gone(request))
            try:
                yield
            finally:
                if leaving.done():
                    self._gone -= 1
                else:
                    leaving.cancel()
                    self._turns.release()
        finally:
            self.under_way -= 1
            self.silent_since = time.monotonic()

    async def _acquire(self, request: web.Request, size: int) -> None:
        """Waits until a request of `size` bytes may be answered, and then no longer counts it as waiting.

        Raises Refusal if the client hangs up first.
        """
        try:
            if self._turns.locked():
                await self._wait_in_line(request)
            else:
                await self._turns.acquire()  # returns at once, so that no other request is counted meanwhile
        finally:  # also after an error, because then the request no longer waits either
            self._waiting -= 1
            self._waiting_bytes -= size

    async def _wait_in_line(self, request: web.Request) -> None:
        """Waits until a request may be answered. Raises Refusal if its client hangs up first."""
        acquiring = asyncio.ensure_future(self._turns.acquire())
        try:
            while not acquiring.done():
                if _has_hung_up(request):
                    raise Refusal("the client has hung up while its request waited", status=410)
                await asyncio.wait({acquiring}, timeout=_LOOK_S)
        except BaseException:
            if not acquiring.cancel():  # the request may be answered already
                self._turns.release()
            raise

    async def _leave_when_gone(self, request: web.Request) -> None:
        """Waits until the client of a request has hung up, and then lets another request be answered.

        The turn for the client is still drawn, because the client may send its request again. Waits also until fewer
        than _MOST such requests are left, because each of them costs memory.
        """
        while not _has_hung_up(request) or self._gone >= _MOST:
            await asyncio.sleep(_LOOK_S)
        self._gone += 1
        self._turns.release()


class SessionServer(Watch):
    """An HTTP server for sessions. Everybody who knows the address of a session may send requests to this session."""

    agents_come = False
    """True if a session begins without an agent, and waits until an agent takes it (`take`)."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        ssl_context: SSLContext | None = None,
        largest: int = 8 << 20,
        posted: Sequence[PostedPath] = (),
    ) -> None:
        """`port` 0: any free port. `ssl_context` None: without encryption. `largest`: the most bytes of a request; the
        default has room for a million tokens. `posted`: paths of a session that are served besides those of OpenAI and
        Anthropic."""
        self._posted = (*posted, *_POSTED)
        """All paths of a session to which a client may send POST. The first entry that fits a request decides."""
        self.app = web.Application(client_max_size=largest, middlewares=[self._answering, _faults])
        """The application. A subclass may add routes before the server is entered."""
        self.app[_REFUSALS] = Refusals()
        self.base_url = ""
        """Scheme, host and port of the server; "": the server is not entered yet."""
        self._host = host
        self._port = port
        self._ssl = ssl_context
        self._sessions: dict[str, tuple[Session, _Line]] = {}
        """The open sessions, each with the line of its requests, by the id of the session."""
        self._connections: Connections | None = None
        """Accepts connections at the address of the server; None: the server is not entered yet."""
        self._runner = web.AppRunner(self.app, access_log=None, shutdown_timeout=1.0, logger=_AtDebug(logger, {}))
        """Makes aiohttp's protocol for each connection that `_connections` accepts. When the server ends, requests
        under way have one more second."""

    async def __aenter__(self) -> SessionServer:
        """Starts the server. Raises OSError if its address is not available."""
        # aiohttp takes the first route that fits a path. These two routes together fit every path, so they are added
        # last, after the routes of a subclass. The second route catches the paths that name no session. `_serve`
        # refuses requests for these paths.
        self.app.router.add_route("*", "/sessions/{id}{rest:/.*|}", self._serve)
        self.app.router.add_route("*", "/{rest:.*}", self._serve)
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        self._connections = Connections(server, self._ssl)
        try:
            host, port = await self._connections.listen(self._host, self._port)
        except BaseException:
            await self._runner.cleanup()
            raise
        scheme = "http" if self._ssl is None else "https"
        if ":" in host:  # an address of IPv6
            host = f"[{host}]"
        self.base_url = f"{scheme}://{host}:{port}"
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._connections is not None:
            await self._connections.close()
        await self._runner.cleanup()

    @web.middleware
    async def _answering(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Notes the beginning and the end of each answer in Connections, which closes no connection in between."""
        assert self._connections is not None
        async with self._connections.answering(request):
            return await handler(request)

    @property
    def description(self) -> dict[str, str]:
        """The state of the sessions, for the replay server: JSON under the key "sessions".

        `open`: the number of open sessions, which is the sum of the next three. `nobody`: the number of sessions that
        wait until an agent takes them. `policy`: the number of sessions with a request that the policy answers.
        `agent`: the number of sessions whose agent has to send the next request, or the end. `silent`: the longest time
        without a request among the sessions of `agent`, in seconds, rounded down to tens. The JSON also has the facts
        of Refusals.
        """
        lines = [line for _, line in self._sessions.values()]
        taken = [line for line in lines if line.is_taken]
        silent = [line for line in taken if not line.under_way]  # these sessions wait for a request of their agent
        facts: dict[str, Any] = {
            "open": len(lines),
            "nobody": len(lines) - len(taken),
            "policy": len(taken) - len(silent),
            "agent": len(silent),
        }
        if silent:
            longest = time.monotonic() - min(line.silent_since for line in silent)
            facts["silent"] = 10 * int(longest / 10)
        return {"sessions": json.dumps(facts | self.app[_REFUSALS].facts())}

    def open(self, session: Session) -> str:
        """Serves a session from now on. Returns the address of the session, which is the base URL for clients of
        Anthropic. The base URL for clients of OpenAI is this address with "/v1" behind it."""
        line = _Line(is_taken=not self.agents_come)
        self._sessions[session.id] = (session, line)
        return f"{self.base_url}/sessions/{session.id}"

    def take(self, session_id: str) -> None:
        """Notes that an agent has taken an open session."""
        _, line = self._sessions[session_id]
        line.take()

    def close(self, session: Session) -> None:
        """Stops serving a session."""
        self._sessions.pop(session.id, None)

    @asynccontextmanager
    async def playing(self, session: Session) -> AsyncIterator[str]:
        """Serves a session until the block ends, and yields the address of the session. The block plays the rollout.

        If the session has a fault (`Session.fault`), raises this fault, even if the block ends without an error. If the
        block raises a RolloutError, the last refusal of the session is added to the message of this error.
        """
        try:
            yield self.open(session)
            if session.fault is not None:
                raise session.fault
        except Exception as error:
            if session.fault is not None and error is not session.fault:
                # An agent whose request fails because of the fault may raise any error.
                raise session.fault from error
            refusal = session.last_refusal
            # An agent whose request was refused often ends without a result. Then the refusal is the real reason.
            must_add = isinstance(error, RolloutError) and refusal is not None and refusal not in str(error)
            if not must_add:
                raise
            why = f"{error}; the last request that was refused: {refusal}"
            raise RolloutError(why).with_traceback(error.__traceback__) from error
        finally:
            self.close(session)
            await session.close()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        """Answers a request for a session. After an error, the answer is a refusal in the form of the protocol."""
        dialect, work = _work_of(request, self._posted)
        session, line = self._sessions.get(request.match_info.get("id", ""), (None, None))
        try:
            if session is None or line is None:
                raise Refusal("no session is open at this address: it has ended, or never began", status=404)
            raw = await read_body(request)
            async with line.turn(request, len(raw)):
                if _has_hung_up(request):  # nobody would read the turn
                    raise Refusal("the client has hung up while its request waited", status=410)
                return await work(dialect, session, request, raw)
        except Exception as error:
            # The session remembers only the refusals of POST requests, because other requests ask nothing of the
            # policy.
            asked_session = session if request.method == "POST" else None
            refusal = _refusal(request, error, asked_session)
            headers = {"Retry-After": "1"} if refusal.status == 429 else None
            return web.json_response(dialect.error(refusal), status=refusal.status, headers=headers)


def _has_hung_up(request: web.Request) -> bool:
    """True if the client of a request has closed its connection."""
    return request.transport is None or request.transport.is_closing()


Work = Callable[[Dialect, Session, web.Request, bytes], Awaitable[web.StreamResponse]]
"""A function that answers a request to a session. Its last argument is the body of the request. Raises Refusal."""
PostedPath = tuple[str, Dialect, Work]
"""The end of a path, the dialect of refusals at this path, and the function that answers requests for this path."""


async def _answer(dialect: Dialect, session: Session, request: web.Request, raw: bytes) -> web.StreamResponse:
    """Answers a request with a turn of the policy, as a body or as a stream."""
    key = request.headers.get("Idempotency-Key", "")
    # In this header, the clients of OpenAI and Anthropic count how often they have repeated the request.
    is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
    may_be_repeated = bool(key) or is_retry
    ask, body = await _ask(dialect, session, raw)
    size = len(raw)
    # Requests with the same path, key and body have equal digests, and count as one request.
    path_and_key = b"\n".join([dialect.path.encode(), key.encode(errors="surrogatepass"), b""])
    digest = await worked(size, partial(_digest_of, path_and_key, raw))
    # A task of its own: if this handler ends or is cancelled early, the task goes on, because `asyncio.wait` does not
    # cancel what it waits for.
    drawing = asyncio.ensure_future(session.ask(ask, digest, may_be_repeated))
    streams = bool(body.get("stream"))
    content_type = "text/event-stream" if streams else "application/json"
    response = web.StreamResponse(headers={"Content-Type": content_type})
    await asyncio.wait({drawing}, timeout=_QUIET_S)
    while not drawing.done():
        if streams:  # the first comment begins the stream, with status 200
            await _written(request, response, b": waiting\n\n")
        await asyncio.wait({drawing}, timeout=_QUIET_S)
    try:
        answer = await drawing
        data = await worked(size, lambda: _answered(dialect, answer, body))
    except Exception as error:
        has_begun = response.prepared  # True: the client has the status 200 and the beginning of the stream already
        if not has_begun:  # then `_serve` answers with a status and a body
            raise
        refusal = _refusal(request, error, session)
        last_event = _event(dialect.error(refusal))
        await _written(request, response, last_event, is_end=True)
    else:
        is_read = await _written(request, response, data, is_end=True)
        if is_read:
            session.delivered(answer)
    return response


async def _count(dialect: Dialect, session: Session, request: web.Request, raw: bytes) -> web.StreamResponse:
    """Answers a request with the number of tokens that the policy would read for it."""
    ask, _ = await _ask(dialect, session, raw)
    return web.json_response({"input_tokens": await session.count(ask)})


async def _models(dialect: Dialect, session: Session, request: web.Request, raw: bytes) -> web.StreamResponse:
    """Answers with the list of models, which has only the policy."""
    return web.json_response({"object": "list", "data": [_card(session, MODEL)]})


async def _model(dialect: Dialect, session: Session, request: web.Request, raw: bytes) -> web.StreamResponse:
    """Answers with the description of one model. Every name stands for the policy."""
    _, _, name = request.path.rstrip("/").rpartition("/models/")
    return web.json_response(_card(session, name))


def _card(session: Session, name: str) -> dict[str, Any]:
    """The description of the policy in a list of models. `name`: the name by which the client asks for the policy."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "replay",
        "max_model_len": session.task.max_length - 1,  # the longest prompt that leaves room for a token of the policy
    }


async def _unknown(dialect: Dialect, session: Session, request: web.Request, raw: bytes) -> web.StreamResponse:
    """Refuses a request for a path that is not served."""
    if request.headers.get("Upgrade", "").lower() == "websocket":
        # Codex tries a web socket first. After status 426 Codex sends a POST at once, and after any other status only
        # seven seconds later.
        raise Refusal("no path is served by web sockets: send a request by POST", status=426)
    paths = ", ".join(dialect.path for dialect in (Chat, Completions, Responses, Messages))
    path = request.match_info["rest"] or "/"
    raise Refusal(f"{request.method} {path} is not served; there are {paths}", status=404, field="path")


_CHAT = Chat()
_MESSAGES = Messages()
_POSTED: tuple[PostedPath, ...] = (
    ("/chat/completions", _CHAT, _answer),
    ("/completions", Completions(), _answer),
    ("/responses", Responses(), _answer),
    ("/messages/count_tokens", _MESSAGES, _count),
    ("/messages", _MESSAGES, _answer),
)
"""The paths of OpenAI and Anthropic. The first entry whose text is the end of the requested path decides."""


def _work_of(request: web.Request, posted: Sequence[PostedPath]) -> tuple[Dialect, Work]:
    """The dialect of a request, and the function that answers the request. `posted`: the paths for POST."""
    path = request.path.rstrip("/")
    if request.method == "POST":
        for end, dialect, work in posted:
            if path.endswith(end):
                return dialect, work
    elif request.method == "GET" and path.endswith("/models"):
        return _CHAT, _models
    elif request.method == "GET" and "/models/" in path:
        return _CHAT, _model
    return _CHAT, _unknown


def _digest_of(*parts: bytes) -> bytes:
    """The SHA-256 digest of the parts, joined without separators."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


async def _ask(dialect: Dialect, session: Session, raw: bytes) -> tuple[Ask, dict[str, Any]]:
    """The request as an Ask, and its body as an object. `raw`: the body, as JSON. Raises Refusal."""
    return await worked(len(raw), lambda: _parsed(dialect, session.answers, session.task.max_length, raw))


def _parsed(dialect: Dialect, answers: Sequence[Answer], max_length: int, raw: bytes) -> tuple[Ask, dict[str, Any]]:
    """The request as an Ask, and its body as an object. `raw`: the body, as JSON. `answers`: the earlier answers of the
    session. `max_length`: the most tokens of a sequence in the engine. Raises Refusal.

    If the request is large, this function runs in a thread.
    """

    def read(body: dict[str, Any]) -> tuple[Ask, dict[str, Any]]:
        """The Ask of a body, and the body. `parsed` calls this function after it has checked the body."""
        if isinstance(dialect, Responses):
            ask = dialect.ask(body, answers)
        else:
            ask = dialect.ask(body)
        # Tries to write an empty answer, so that a request to which no answer can be written is refused before a turn
        # is drawn.
        _answered(dialect, _EMPTY, body)
        return replace(ask, size=len(raw)), body

    return parsed(dialect.path, raw, max_length, read)


def parsed(path: str, raw: bytes, max_length: int, read: Callable[[dict[str, Any]], T]) -> T:
    """Parses the body of a request, calls `read` with it, and returns the result.

    `raw`: the body, as JSON. `path`: the path, for error messages. `max_length`: the most tokens of a sequence in the
    engine. `read` gets the body as an object. Raises Refusal for a body that is too large, or that is no request for
    this path.
    """
    try:
        value_count = _count_values(raw)
        most_values = _MOST_VALUES + max_length
        if value_count > most_values:
            raise Refusal(
                f"the request has {value_count} values, and at most {most_values} are served: send less",
                status=413,
                field="body",
            )
        # JSON is UTF-8. From bytes, `json.loads` would also read half of a surrogate pair, which no text can hold.
        body = json.loads(raw.decode("utf-8-sig"))
        if is_deep(body, _MOST_NESTED):
            raise Refusal(f"the request has more than {_MOST_NESTED} lists and objects in each other", field="body")
        if rb"\u" in raw:
            # An escape such as \ud800 stands for half of a surrogate pair, which is no text. `encode` raises an error
            # for such a half.
            json.dumps(body, ensure_ascii=False).encode()
        return read(body)
    except Refusal:
        raise
    except Exception as error:  # the body is cut off, or does not have the form that this path takes
        why = f"this is no request for {path}: {type(error).__name__}: {error}"
        raise Refusal(why, field=f"body of {path}") from error


_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
"""A string in a JSON text, with its quotes. A backslash and the byte after it do not end the string."""


def _count_values(raw: bytes) -> int:
    """Counts the lists, objects and commas of a JSON text. A text with N of them has at most N + 1 values.

    If the text has few brackets and commas, those in its strings are counted, too.

    This function runs before the JSON parser, because the parser lets no other thread run until it has read the last
    value. Here, other threads can run after each string of the text.
    """
    count = _count_brackets_and_commas(raw)
    if count <= _MOST_VALUES:  # few enough, even with those in strings
        return count
    for string in _STRING.finditer(raw):  # subtracts those in strings
        count -= _count_brackets_and_commas(string[0])
    return count


def _count_brackets_and_commas(raw: bytes) -> int:
    """The number of opening brackets, opening braces and commas in a part of a JSON text, also in strings."""
    return raw.count(b"[") + raw.count(b"{") + raw.count(b",")


async def read_body(request: web.Request) -> bytes:
    """The whole body of a request. Raises Refusal for a body that is too large, or that contradicts its headers.

    Unlike `request.read`, this function leaves no copy of the body in the request.
    """
    body = bytearray()
    try:
        async for piece in request.content.iter_any():
            body += piece
            if len(body) > request.client_max_size:
                raise Refusal(
                    f"the request is too large: at most {request.client_max_size} bytes are served",
                    status=413,
                    field="body",
                )
    except Refusal:
        raise
    except Exception as error:  # the length, the chunks or the compression of the body is wrong
        why = f"the body is not what its headers say: {type(error).__name__}: {error}"
        raise Refusal(why, field="body") from error
    return bytes(body)


def _answered(dialect: Dialect, answer: Answer, body: dict[str, Any]) -> bytes:
    """The bytes of an answer: its JSON, or its events if the request asks for a stream. `body`: the body of the
    request."""
    if body.get("stream"):
        return b"".join(_event(data) for data in dialect.events(answer, body))
    return json.dumps(dialect.answer(answer, body)).encode()


def _event(data: dict[str, Any] | str) -> bytes:
    """A server-sent event. In protocols that name their events, the name is the `type` in the data."""
    if isinstance(data, str):
        return f"data: {data}\n\n".encode()
    encoded = json.dumps(data)
    if "type" in data:
        return f"event: {data['type']}\ndata: {encoded}\n\n".encode()
    return f"data: {encoded}\n\n".encode()


def _refusal(request: web.Request, error: Exception, session: Session | None) -> Refusal:
    """The refusal that a client gets after an error. Counts it in Refusals. `session`: the session that has to remember
    the refusal; None: no session has to."""
    if not isinstance(error, Refusal):  # an error of the engine, or of this server
        logger.error("a request of an agent failed with %s: %s", type(error).__name__, error)
        error = Refusal(f"the policy failed with {type(error).__name__}: {error}", status=500)
        session = None  # sessions remember only refusals for which the agent is responsible
    request.config_dict[_REFUSALS].count(error.status, str(error))
    if session is not None:
        session.refused(error)
    return error


async def _written(request: web.Request, response: web.StreamResponse, data: bytes, *, is_end: bool = False) -> bool:
    """Writes data to a client. Returns True if the client was still connected when all data was written. `is_end`: the
    data is the end of the answer.

    A client that does not read is disconnected after SECONDS_IDLE.
    """
    try:
        if request.transport is not None:
            # Without a buffer in this process, `write` returns only once the kernel has all data.
            request.transport.set_write_buffer_limits(0)
        async with asyncio.timeout(connection_bounds.SECONDS_IDLE):
            await response.prepare(request)
            await response.write(data)
            if is_end:
                await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        return False
    except ConnectionError:
        return False
    return request.transport is not None and not request.transport.is_closing()
