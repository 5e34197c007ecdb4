"""The web application: its routes, and the `Dashboard` that answers them."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from replay_client import AsyncReplayClient
from replay_client.access import Access
from replay_client.errors import InvalidRequestError, ReplayError
from replay_client.records import StoredItem
from replay_client.trend import trend_of
from replay_dashboard.budget import Budget
from replay_dashboard.catalog import Catalog
from replay_dashboard.group import TokenText, item_document, window
from replay_dashboard.guard import COOKIE, BodyTooLargeError, Guard, Protocol, accepts, body_of
from replay_dashboard.health import signals
from replay_dashboard.live import MOST_VIEWERS, Live, dumps
from replay_dashboard.prompts import PromptLog
from replay_dashboard.query import Query, View
from replay_dashboard.training import Runs

logger = logging.getLogger(__name__)
PAGE = Path(__file__).parent / "page"
LOOKING, READING = 0.005, 0.015
"""Shares of the server's time that the page may use: LOOKING for the poller of `Live`, READING for lists and groups."""
CURVES = {
    "reward": "fresh/reward_mean",
    "no_variance": "fresh/zero_variance_fraction",
    "length": "fresh/completion_length_mean",
    "entropy": "train/entropy",
    "tokens_per_second": "train/tokens_per_second",
    "kl": "correction/kl",
    "ess": "correction/ess",
}
"""Name of a curve that each update of the page includes -> the metric of the newest run that the curve shows."""
KEPT_BYTES = 256 << 20
"""Most bytes of opened groups that this process keeps. A viewer can still read a kept group after it has left the
server."""
_BYTES_BESIDE_PAYLOAD = 65536
"""An estimate of the memory that a kept item uses beside its payload."""
_CACHED_RESULTS = 64
"""Most results of computations that are cached."""
_NEWEST_POINTS = 200
"""Most points of each curve in an update of the page."""
MOST_ROWS = 500
"""Most rows in one response."""


@dataclass(frozen=True)
class Settings:
    """The options of `replay dashboard`."""

    access: dict[str, Any] = field(default_factory=dict)
    """The arguments of AsyncReplayClient.from_env, with which to reach the server."""
    tokenizer: Path | None = None
    """A tokenizer.json or its folder; None: the page uses the one in the folder of the published weights, if any."""
    runs: Path | None = None
    """The folder below which the metrics.jsonl files of runs lie; None: the page shows no metrics."""
    token: str | None = None
    """The token that a viewer needs; None: viewers need none."""
    allow_hosts: tuple[str, ...] = ()
    """Host names, beside the machine's own, under which the page answers."""
    solved_reward: float = 1.0
    """A completion with at least this reward counts as solved."""


class Dashboard:
    """Answers the routes. Create it on the event loop that runs it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.text = TokenText(settings.tokenizer)
        self.runs = Runs(settings.runs)
        self.prompts = PromptLog(settings.solved_reward)
        self.client = AsyncReplayClient.from_env(5.0, **settings.access)  # a call waits for 5 seconds
        # The arguments of a budget: its share of the server's time, and the seconds of this time that calls may use at
        # once.
        self.reading = Budget(READING, 1.0)
        """The budget of all calls for lists and groups, both for viewers and for `catalog`."""
        self.catalog = Catalog(self.client, self.reading, self.text, self.prompts)
        # The polls of `Live` are alike: all do the same work. After each poll, `Live` calls `more`.
        self.live = Live(self.client, Budget(LOOKING, 0.1, alike=True), self.more)
        self._items: OrderedDict[int, StoredItem] = OrderedDict()
        """Copies of the items that viewers have opened, by key. The item that was opened last is at the end."""
        self._cache: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        """Results of computations. The key of a result has all that the result depends on."""

    async def run(self) -> None:
        """Polls the server, lists its tables, reads groups, and reads files of metrics, for ever."""
        # Before each sweep, the catalog asks `live` whether there are viewers, and for the names of the tables.
        sweeps = self.catalog.run(self.live.tables, self.live.watched)
        await asyncio.gather(self.live.run(), sweeps, self._follow_files())

    async def _follow_files(self) -> None:
        """Reads the files of metrics as they grow, and finds the tokenizer of the published weights, for ever."""
        while True:
            await asyncio.to_thread(self.runs.read)
            if self.live.info is not None:
                with suppress(ValueError):  # if the folder's tokenizer.json is damaged, the page shows ids, not text
                    self.text.find(self.live.info.policy.weights)
            # The first answer of the server names the folder of the weights. Until then, look often, so that the
            # tokenizer is found soon after that answer.
            await asyncio.sleep(0.2 if self.live.info is None else 2.0)

    def more(self) -> dict[str, Any]:
        """The lists, signals and curves that this process adds to the server's numbers in each update of the page."""
        versions = self.prompts.by_version()
        newest_run = self.runs.newest()  # name of a metric -> its values
        lists = {}
        for name, snapshot in self.catalog.snapshots.items():
            view = View(snapshot, self.catalog.facts)
            # A snapshot never changes, so its histograms change only when more of its groups have been read.
            compute = partial(view.histograms, names=("staleness", "priority", "reward_mean"))
            histograms = self._cached((snapshot.id, view.read), compute)
            lists[name] = {"id": snapshot.id, "items": len(snapshot.keys), "read": view.read, "histograms": histograms}
        return {
            "lists": lists,
            "tokenizer": self.text.source,
            "runs_version": self.runs.version,
            "versions": versions[-_NEWEST_POINTS:],
            "signals": signals(newest_run, versions),
            "run": self.runs.newest_name(),
            "trend": trend_of(newest_run.get(CURVES["reward"], [])),
            "curves": {name: newest_run.get(metric, [])[-_NEWEST_POINTS:] for name, metric in CURVES.items()},
            "answers": self._answers(),
        }

    def _answers(self) -> Any:
        """The best and the worst answer of the newest policy version; None: no group of this version that was read has
        a finite reward."""
        answers = self.catalog.answers
        if answers.best is None or answers.worst is None:
            return None
        key = ("answers", answers.best.key, answers.worst.key, self.text.source)
        return self._cached(key, partial(answers.document, self.text))

    def _cached(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """The cached result of `key`. If there is none, calls `compute`, and caches its result."""
        if key not in self._cache:
            self._cache[key] = compute()
            if len(self._cache) > _CACHED_RESULTS:
                self._cache.popitem(last=False)  # the oldest result
        return self._cache[key]

    async def item(self, key: int, again: bool = False) -> StoredItem | None:
        """The item with this key, from the server or from a copy in this process.

        If there is a copy, `again` decides whether to ask the server at all. Without `again`, the copy is returned, so
        that further tokens of an open group cost no call. With `again`, the server is asked, and the copy is returned
        if the server no longer has the item or does not answer.

        None: neither the server nor this process has the item. Raises ReplayError if the server does not answer and
        there is no copy.
        """
        if again or key not in self._items:
            try:
                async with self.reading.call():
                    items = await self.client.get([key])
            except ReplayError:
                if key not in self._items:
                    raise
                return self._items[key]
            if items:
                self._items[key] = items[0]
                self._items.move_to_end(key)
            elif key in self._items:  # the item has left the server, so it is in no table any more
                self._items[key] = replace(self._items[key], tables={})
                self._items.move_to_end(key)
        # Forget the copies that were opened longest ago. The last copy stays, whatever its size.
        while len(self._items) > 1 and self._bytes_of_items() > KEPT_BYTES:
            self._items.popitem(last=False)
        return self._items.get(key)

    def _bytes_of_items(self) -> int:
        """About how many bytes of memory the copies of opened items use."""
        return sum(len(item.payload) + _BYTES_BESIDE_PAYLOAD for item in self._items.values())

    async def groups(self, request: Request) -> Any:
        """The rows `offset` to `offset + limit` of those rows of a table that match the query, and counts of all rows.

        The request names the snapshot that the page shows, so that rows do not move while a viewer scrolls.
        """
        params = request.query_params
        text = params.get("text", "").lower()
        prompt = params.get("prompt", "").lower()
        query = Query(
            sort=params.get("sort", "age"),
            descending=params.get("descending") == "1",
            bounds=tuple(params.getlist("bound")),
            flags=tuple(params.getlist("flag")),
            tags=tuple(params.getlist("tag")),
            prompt=prompt,
            text=text,
        )
        offset = max(0, int(params.get("offset", 0)))
        limit = min(MOST_ROWS, int(params.get("limit", 100)))
        snapshot = self.catalog.snapshot(params.get("table", ""), int(params.get("snapshot") or 0))
        if snapshot is None:  # no such table, or it was not listed yet
            no_summary: dict[str, Any] = {"histograms": {}, "flags": {}, "tags": []}
            return {"rows": [], "matching": 0, "total": 0, "read": 0, "snapshot": 0, **no_summary}
        view = View(snapshot, self.catalog.facts)
        key = (snapshot.id, self.catalog.facts.version, query)
        if key not in self._cache:
            matching_rows = await asyncio.to_thread(view.select, query)
            histograms = await asyncio.to_thread(view.histograms, matching_rows)
            tag_values = await asyncio.to_thread(lambda: snapshot.tag_values)  # the first access computes them
            computed_summary = {"histograms": histograms, "flags": view.flags(), "tags": tag_values}
            self._cached(key, lambda: (matching_rows, computed_summary))
        rows, summary = self._cache[key]
        shown_rows = rows[offset : offset + limit].tolist()
        self.catalog.want(snapshot.keys[shown_rows].tolist())  # so that these groups are read first
        counts = {"snapshot": snapshot.id, "matching": len(rows), "total": len(snapshot.keys), "read": view.read}
        return {**counts, **summary, "rows": [view.row(row) for row in shown_rows]}

    async def group(self, request: Request) -> Any:
        """One group; None if neither the server nor this process has it. With `whole=1`, all of its tokens."""
        whole = request.query_params.get("whole") == "1"
        # The page asks for the whole of a group to download it, while the group is open. So there is a copy, and the
        # copy is used without asking the server, which may have lost the group.
        item = await self.item(int(request.path_params["key"]), again=not whole)
        if item is None:
            return None
        return await asyncio.to_thread(item_document, item, self.text, whole)

    async def tokens(self, request: Request) -> Any:
        """Further tokens of one completion, or of the prompt (completion -1); None if the group is nowhere any more."""
        params = request.query_params
        row = int(params.get("completion", 0))
        start = int(params.get("start", 0))
        stop = int(params.get("stop", 0))
        item = await self.item(int(request.path_params["key"]))
        if item is None:
            return None
        return await asyncio.to_thread(window, item.group, row, start, stop, self.text)

    async def training(self, request: Request) -> Any:
        """The curves of the runs that the parameters `run` name."""
        return await asyncio.to_thread(self.runs.document, request.query_params.getlist("run"))

    async def solve_rates(self, request: Request) -> Any:
        """The solve rate of each prompt, and how many prompts are loaded and waiting in each table of prompts."""
        params = request.query_params
        limit = min(MOST_ROWS, int(params.get("limit", 100)))
        descending = params.get("descending") == "1"
        search = params.get("search", "")
        sort = params.get("sort", "")
        facts = self.catalog.facts
        tables: list[dict[str, Any]] = []
        held: dict[str, dict[str, float]] = {}  # the facts of the prompts in all tables, by the name of the prompt
        for name, snapshot in self.catalog.snapshots.items():
            loaded_and_prompts = self._cached(("prompts", snapshot.id, facts.version), partial(snapshot.prompts, facts))
            if loaded_and_prompts is not None:  # the table is a table of prompts
                loaded, prompts = loaded_and_prompts
                tables.append({"name": name, "loaded": loaded, "waiting": len(prompts)})
                held |= prompts
        return self.prompts.document(search, sort, descending, max(0, limit), held) | {"tables": tables}

    async def login(self, request: Request) -> Response:
        """Checks the token that a viewer sends, and answers with a cookie that holds it."""
        try:
            token = str(json.loads(await body_of(request))["token"])
            token.encode()  # raises ValueError for half of a surrogate pair, which JSON can hold
        except (ValueError, KeyError, TypeError, RecursionError):
            token = ""  # which is refused below, unless viewers need no token
        if not accepts(self.settings.token, token):
            return _json({"problem": "that is not the token of this page"}, 401)
        response = Response(status_code=204)
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=request.url.scheme == "https")
        return response

    async def events(self, request: Request) -> Response:
        """The server-sent events of one viewer."""
        if self.live.viewers >= MOST_VIEWERS:
            return _json({"problem": f"{MOST_VIEWERS} viewers have this page open: close one"}, 503)
        return StreamingResponse(self.live.events(), media_type="text/event-stream")


def answer(method: Callable[[Dashboard, Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """Makes the function of a route that answers with the result of `method` as JSON.

    If the result is None, which only the methods about one group return, the status of the answer is 404. If the result
    is a Response, it is the answer as it is. PROBLEMS has the status for each error that `method` raises.
    """

    async def respond(request: Request) -> Response:
        result = await method(request.app.state.dashboard, request)
        if result is None:
            return _json({"problem": "the server holds no such group: it was consumed, evicted or dropped"}, 404)
        if isinstance(result, Response):
            return result
        return await asyncio.to_thread(_json, result)

    return respond


PROBLEMS = {InvalidRequestError: 400, ReplayError: 502, BodyTooLargeError: 413, ClientDisconnect: 400, ValueError: 400}
"""Class of an error -> status of the answer. The first class that fits an error counts. After ClientDisconnect nobody
reads the answer."""


async def _problem(request: Request, error: Exception) -> Response:
    """The answer to a request that raised one of PROBLEMS."""
    status = next(status for kind, status in PROBLEMS.items() if isinstance(error, kind))
    return _json({"problem": str(error)}, status)


def _json(document: object, status: int = 200) -> Response:
    return Response(dumps(document), status, media_type="application/json")


class PageServer(uvicorn.Server):
    """Serves the page.

    An event stream never ends by itself, and uvicorn waits for open connections. So a shutdown ends the streams first.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises ValueError for settings that cannot be used."""
        # These two only raise for bad settings. `_lifespan` makes the objects that are used, on the event loop.
        Access.find(**settings.access)
        TokenText(settings.tokenizer)
        self._settings = settings
        routes = [
            Route("/api/login", answer(Dashboard.login), methods=["POST"]),
            Route("/api/live", answer(Dashboard.events)),
            Route("/api/groups", answer(Dashboard.groups)),
            Route("/api/groups/{key}", answer(Dashboard.group)),
            Route("/api/groups/{key}/tokens", answer(Dashboard.tokens)),
            Route("/api/training", answer(Dashboard.training)),
            Route("/api/prompts", answer(Dashboard.solve_rates)),
            Mount("/", StaticFiles(directory=PAGE, html=True)),
        ]
        guard = Middleware(Guard, token=settings.token, names=settings.allow_hosts)
        handlers = dict.fromkeys(PROBLEMS, _problem)
        self.app = Starlette(routes=routes, middleware=[guard], exception_handlers=handlers, lifespan=self._lifespan)
        config = uvicorn.Config(
            self.app, http=Protocol, ws="none", log_level="warning", access_log=False, timeout_graceful_shutdown=3
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the event streams, and then closes the connections as uvicorn does."""
        await self.app.state.dashboard.live.close()
        await super().shutdown(sockets)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Runs the `Dashboard` of the application from its start to its shutdown."""
        dashboard = Dashboard(self._settings)
        app.state.dashboard = dashboard
        work = asyncio.create_task(dashboard.run())
        work.add_done_callback(self._end_on_fault)
        try:
            yield
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            await dashboard.client.close()

    def _end_on_fault(self, work: asyncio.Task[None]) -> None:
        """Ends the process if `Dashboard.run` has failed, because otherwise the page would show old numbers as if they
        were new."""
        if work.cancelled():
            return
        fault = work.exception()
        if fault is not None:
            logger.critical("the page ends after a fault of its own", exc_info=fault)
            self.should_exit = True
