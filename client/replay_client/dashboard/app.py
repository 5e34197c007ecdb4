"""The application: its routes, and what runs behind them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from replay_client.aio import AsyncReplayClient
from replay_client.dashboard.budget import Budget
from replay_client.dashboard.catalog import Catalog
from replay_client.dashboard.documents import dumps
from replay_client.dashboard.group import item_document, window
from replay_client.dashboard.guard import COOKIE, Guard, accepts
from replay_client.dashboard.health import signals
from replay_client.dashboard.live import MOST_VIEWERS, Live
from replay_client.dashboard.prompts import PromptLog
from replay_client.dashboard.query import Query, View
from replay_client.dashboard.tokens import TokenText
from replay_client.dashboard.training import Runs
from replay_client.errors import ReplayError
from replay_client.records import StoredItem

PAGE = Path(__file__).parent / "page"
LOOKING, READING = 0.005, 0.015
"""Shares of time in which the server may work for the poller, and for lists and groups."""
CURVES = {"entropy": "train/entropy", "reward": "fresh/reward_mean", "ess": "correction/ess"}
"""Metrics of the newest run that every look tells."""
KEPT_ITEMS, KEPT_BYTES = 16, 256 << 20
"""Groups that were looked at last, which can be seen after they have left the server."""
MOST_ROWS = 500
"""Rows of one answer."""


@dataclass(frozen=True)
class Settings:
    """What `replay dashboard` was told."""

    access: dict[str, Any] = field(default_factory=dict)
    """How to reach the server: arguments of AsyncReplayClient.from_env."""
    tokenizer: Path | None = None
    runs: Path | None = None
    token: str | None = None
    """What viewers must show; None: nothing."""
    allow_hosts: tuple[str, ...] = ()
    solved_above: float = 0.5


class Dashboard:
    """Everything behind the routes. Made on the event loop that it belongs to."""

    def __init__(self, settings: Settings) -> None:
        self.text = TokenText(settings.tokenizer)
        self.runs = Runs(settings.runs)
        self.prompts = PromptLog(settings.solved_above)
        self.client = AsyncReplayClient.from_env(5.0, **settings.access)
        self.reading = Budget(READING, 1.0)
        self.catalog = Catalog(self.client, self.reading, self.text, self.prompts)
        self.live = Live(self.client, Budget(LOOKING, 0.1, alike=True), self.more)
        self._items: OrderedDict[int, StoredItem] = OrderedDict()
        self._cache: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    async def run(self) -> None:
        await asyncio.gather(
            self.live.run(), self.catalog.run(self.live.tables, self.live.watched), self._follow_files()
        )

    async def _follow_files(self) -> None:
        while True:
            await asyncio.to_thread(self.runs.read)
            if self.live.info is not None:
                with suppress(ValueError):  # weights whose tokenizer cannot be read: ids are shown
                    self.text.find(self.live.info.policy.weights)
            await asyncio.sleep(0.2 if self.live.info is None else 2.0)

    def more(self) -> dict[str, Any]:
        """What each look tells beside the server's own words."""
        versions, newest, lists = self.prompts.by_version(), self.runs.newest(), {}
        for name, snapshot in self.catalog.snapshots.items():
            view = View(snapshot, self.catalog.facts)
            shown = ("staleness", "priority", "reward_mean")
            make = partial(view.histograms, view.everything(), shown)
            histograms = self._cached((snapshot.id, view.read), make)
            counts = {"id": snapshot.id, "items": len(snapshot.keys), "read": view.read}
            lists[name] = counts | {"histograms": histograms}
        return {
            "lists": lists,
            "lists_problem": self.catalog.problem,
            "tokenizer": self.text.source,
            "runs_version": self.runs.version,
            "versions": versions[-200:],
            "signals": signals(newest, versions),
            "curves": {name: newest.get(metric, [])[-200:] for name, metric in CURVES.items()},
        }

    def _cached(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
            if len(self._cache) > 64:
                self._cache.popitem(last=False)
        return self._cache[key]

    async def item(self, key: int, again: bool = False) -> StoredItem | None:
        """The item as the server has it, or as it was when it was looked at last. `again`: asks the server anew."""
        if again or key not in self._items:
            try:
                async with self.reading.call():
                    found = await self.client.get([key])
            except ReplayError:
                if key not in self._items:
                    raise
                return self._items[key]
            if found:
                self._items[key] = found[0]
            elif key in self._items:
                self._items[key] = replace(self._items[key], tables={})
        while len(self._items) > KEPT_ITEMS or sum(len(item.payload) for item in self._items.values()) > KEPT_BYTES:
            oldest = next(iter(self._items))
            if oldest == key:
                break
            del self._items[oldest]
        return self._items.get(key)

    async def groups(self, given: QueryParams) -> dict[str, Any]:
        """A window of the list. Raises ValueError for what cannot be asked."""
        text, prompt = given.get("text", "").lower(), given.get("prompt", "").lower()
        bounds, flags = tuple(given.getlist("bound")), tuple(given.getlist("flag"))
        query = Query(given.get("sort", "age"), given.get("descending") == "1", bounds, flags, prompt, text)
        offset, limit = max(0, int(given.get("offset", 0))), min(MOST_ROWS, int(given.get("limit", 100)))
        snapshot = self.catalog.snapshot(given.get("table", ""), int(given.get("snapshot") or 0))
        if snapshot is None:
            return {"rows": [], "matching": 0, "total": 0, "read": 0, "snapshot": 0, "histograms": {}, "flags": {}}
        view, key = View(snapshot, self.catalog.facts), (snapshot.id, self.catalog.facts.version, query)
        if key not in self._cache:
            found = await asyncio.to_thread(view.select, query)
            histograms = await asyncio.to_thread(view.histograms, found)
            self._cached(key, lambda: (found, {"histograms": histograms, "flags": view.flags()}))
        rows, summary = self._cache[key]
        shown = rows[offset : offset + limit].tolist()
        self.catalog.want(snapshot.keys[shown].tolist())
        return {
            "snapshot": snapshot.id,
            "matching": len(rows),
            "total": len(snapshot.keys),
            "read": view.read,
            "rows": [view.row(row) for row in shown],
            **summary,
        }


class PageServer(uvicorn.Server):
    """Serves the page. It ends the events of its viewers before it waits for their connections."""

    def __init__(self, settings: Settings) -> None:
        """Raises ValueError for settings that cannot be used."""
        self.app = create_app(settings)
        super().__init__(uvicorn.Config(self.app, log_level="warning", access_log=False, timeout_graceful_shutdown=3))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.app.state.dashboard.live.close()
        await super().shutdown(sockets)


def create_app(settings: Settings) -> Starlette:
    """The page and what it asks for. Raises ValueError for settings that cannot be used."""
    TokenText(settings.tokenizer)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.dashboard = dashboard = Dashboard(settings)
        work = asyncio.create_task(dashboard.run())
        try:
            yield
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            await dashboard.client.close()

    async def answer(make: Any, request: Request) -> Response:
        """JSON of what `make` returns; errors of the server and of the request as `problem`."""
        status = 200
        try:
            found = await make(request.app.state.dashboard, request)
            if found is None:
                found, status = {"problem": "the server holds no such group: it was consumed, evicted or dropped"}, 404
        except ReplayError as error:
            found, status = {"problem": str(error)}, 502
        except ValueError as error:
            found, status = {"problem": str(error)}, 400
        return Response(await asyncio.to_thread(dumps, found), status, media_type="application/json")

    async def login(request: Request) -> Response:
        try:
            token = str(json.loads((await request.body())[:4096])["token"])
        except (ValueError, KeyError, TypeError):
            token = ""
        if not accepts(settings.token, token):
            return Response(dumps({"problem": "that is not the token of this page"}), 401)
        response = Response(status_code=204)
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=request.url.scheme == "https")
        return response

    async def live(request: Request) -> Response:
        looks = request.app.state.dashboard.live
        if looks.viewers >= MOST_VIEWERS:
            return Response(dumps({"problem": f"{MOST_VIEWERS} viewers look already"}), 503)
        return StreamingResponse(looks.events(), media_type="text/event-stream")

    async def groups(d: Dashboard, request: Request) -> Any:
        return await d.groups(request.query_params)

    async def group(d: Dashboard, request: Request) -> Any:
        whole = request.query_params.get("whole") == "1"
        item = await d.item(request.path_params["key"], again=not whole)
        return item and await asyncio.to_thread(item_document, item, d.text, whole)

    async def tokens(d: Dashboard, request: Request) -> Any:
        row, start, stop = (int(request.query_params.get(name, 0)) for name in ("completion", "start", "stop"))
        item = await d.item(request.path_params["key"])
        return item and await asyncio.to_thread(window, item.group, row, start, stop, d.text)

    async def training(d: Dashboard, request: Request) -> Any:
        return await asyncio.to_thread(d.runs.document, request.query_params.getlist("run"))

    async def prompts(d: Dashboard, request: Request) -> Any:
        given = request.query_params
        limit = min(2 * MOST_ROWS, int(given.get("limit", 100)))
        return d.prompts.document(
            given.get("search", ""), given.get("sort", ""), given.get("descending") == "1", max(0, limit)
        )

    routes = [
        Route("/api/login", login, methods=["POST"]),
        Route("/api/live", live),
        Route("/api/groups", partial(answer, groups)),
        Route("/api/groups/{key:int}", partial(answer, group)),
        Route("/api/groups/{key:int}/tokens", partial(answer, tokens)),
        Route("/api/training", partial(answer, training)),
        Route("/api/prompts", partial(answer, prompts)),
        Mount("/", StaticFiles(directory=PAGE, html=True)),
    ]
    guard = Middleware(Guard, token=settings.token, names=settings.allow_hosts)
    return Starlette(routes=routes, middleware=[guard], lifespan=lifespan)
