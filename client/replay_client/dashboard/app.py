"""The application: its routes, and what runs behind them."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from replay_client.aio import AsyncReplayClient
from replay_client.dashboard import group as documents
from replay_client.dashboard.budget import Budget
from replay_client.dashboard.catalog import Catalog
from replay_client.dashboard.guard import COOKIE, Guard
from replay_client.dashboard.health import signals
from replay_client.dashboard.live import MOST_VIEWERS, Live, dumps
from replay_client.dashboard.prompts import PromptLog
from replay_client.dashboard.query import MOST_ROWS, Query, View
from replay_client.dashboard.tokens import TokenText
from replay_client.dashboard.training import Runs
from replay_client.errors import ReplayError
from replay_client.records import StoredItem

PAGE = Path(__file__).parent / "page"
LOOKING, READING = 0.005, 0.01
"""Shares of time in which the server may work for the poller, and for lists and groups."""
CURVES = {"entropy": "train/entropy", "reward": "fresh/reward_mean", "ess": "correction/ess"}
"""Metrics of the newest run that every look tells."""
KEPT_ITEMS, KEPT_BYTES = 16, 256 << 20
"""Groups that were looked at last, which can be seen after they have left the server."""


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
        self.reading = Budget(READING, 0.5)
        self.catalog = Catalog(self.client, self.reading, self.text, self.prompts)
        self.live = Live(self.client, Budget(LOOKING, 0.1, alike=True), self.more)
        self._items: OrderedDict[int, StoredItem] = OrderedDict()
        self._views: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    async def run(self) -> None:
        await asyncio.gather(
            self.live.run(), self.catalog.run(self.live.tables, lambda: self.live.watched), self.follow_files()
        )

    async def follow_files(self) -> None:
        while True:
            await asyncio.to_thread(self.runs.read)
            if self.live.info is not None:
                with suppress(ValueError):  # weights without a tokenizer that can be read: ids are shown
                    self.text.find(self.live.info.policy.weights)
            await asyncio.sleep(2.0 if self.live.info is not None else 0.2)

    def more(self) -> dict[str, Any]:
        versions, newest = self.prompts.by_version(), self.runs.newest()
        lists = {name: View(snapshot, self.catalog.facts) for name, snapshot in self.catalog.snapshots.items()}
        return {
            "lists": {
                name: {"id": v.snapshot.id, "items": len(v.snapshot.keys), "read": v.read, "histograms": self._of(v)}
                for name, v in lists.items()
            },
            "lists_problem": self.catalog.problem,
            "tokenizer": self.text.source,
            "runs_version": self.runs.version,
            "versions": versions[-200:],
            "signals": signals(newest, versions),
            "curves": {name: newest.get(metric, [])[-200:] for name, metric in CURVES.items()},
        }

    def _of(self, view: View) -> Any:
        return self._cached(("histograms", view.snapshot.id, view.read), lambda: view.histograms(view.everything()))

    def _cached(self, key: tuple[Any, ...], make: Any) -> Any:
        if key not in self._views:
            self._views[key] = make()
            while len(self._views) > 64:
                self._views.popitem(last=False)
        return self._views[key]

    async def item(self, key: int) -> StoredItem | None:
        """The item, from the server or, when it has left it, as it was when it was looked at."""
        if self.live.watched or key not in self._items:
            async with self.reading.call():
                for item in await self.client.get([key]):
                    self._items[key] = item
                    self._items.move_to_end(key)
        kept = list(self._items.values())
        while len(self._items) > KEPT_ITEMS or (
            len(self._items) > 1 and sum(len(i.payload) for i in kept) > KEPT_BYTES
        ):
            self._items.popitem(last=False)
            kept = list(self._items.values())
        return self._items.get(key)

    def groups(self, given: dict[str, str]) -> dict[str, Any]:
        """A window of the list. Raises ValueError for what cannot be asked."""
        table = given.get("table", "")
        snapshot = self.catalog.held(int(given["snapshot"])) if "snapshot" in given else None
        snapshot = snapshot or self.catalog.snapshots.get(table)
        offset, limit = int(given.get("offset", 0)), min(MOST_ROWS, int(given.get("limit", 100)))
        if snapshot is None or offset < 0 or limit < 0:
            return {"rows": [], "matching": 0, "total": 0, "read": 0, "snapshot": None, "histograms": {}, "facets": {}}
        query = Query.of(given)
        view = View(snapshot, self.catalog.facts)
        rows = self._cached(("rows", snapshot.id, self.catalog.facts.version, query), lambda: view.select(query))
        window = rows[offset : offset + limit].tolist()
        self.catalog.show(snapshot)
        self.catalog.want([int(snapshot.keys[row]) for row in window])
        return {
            "snapshot": snapshot.id,
            "matching": len(rows),
            "total": len(snapshot.keys),
            "read": view.read,
            "rows": [view.row(row) for row in window],
            "histograms": view.histograms(rows),
            "facets": view.facets(),
        }


def create_app(settings: Settings) -> Starlette:
    """The page and what it asks for. Raises ValueError for settings that cannot be used."""
    TokenText(settings.tokenizer)
    guard = Guard(lambda *_: None, settings.token)  # type: ignore[arg-type]

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

    async def login(request: Request) -> Response:
        body = await request.body()
        try:
            token = str(json.loads(body[:4096])["token"])
        except (ValueError, KeyError, TypeError):
            token = ""
        if not guard.accepts(token):
            return Response(
                dumps({"problem": "that is not the token of this page"}), 401, media_type="application/json"
            )
        response = Response(status_code=204)
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=request.url.scheme == "https")
        return response

    async def live(request: Request) -> Response:
        looks = request.app.state.dashboard.live
        if looks.viewers >= MOST_VIEWERS:
            return Response(dumps({"problem": f"{MOST_VIEWERS} viewers look already"}), 503)
        return StreamingResponse(looks.events(), media_type="text/event-stream")

    async def answer(make: Any, request: Request) -> Response:
        """JSON of what `make` returns; errors of the server and of the request as `problem`."""
        try:
            found = await make(request.app.state.dashboard, request)
            status = 200 if found is not None else 404
            found = found or {"problem": "this server holds no such group: it was consumed, evicted or dropped"}
        except ReplayError as error:
            found, status = {"problem": str(error)}, 502
        except ValueError as error:
            found, status = {"problem": str(error)}, 400
        return Response(await asyncio.to_thread(dumps, found), status, media_type="application/json")

    async def groups(d: Dashboard, request: Request) -> Any:
        return await asyncio.to_thread(d.groups, dict(request.query_params))

    async def group(d: Dashboard, request: Request) -> Any:
        item = await d.item(int(request.path_params["key"]))
        return item and await asyncio.to_thread(documents.item_document, item, d.text)

    async def whole(d: Dashboard, request: Request) -> Any:
        item = await d.item(int(request.path_params["key"]))
        return item and await asyncio.to_thread(documents.whole_document, item, d.text)

    async def tokens(d: Dashboard, request: Request) -> Any:
        item, given = await d.item(int(request.path_params["key"])), request.query_params
        row, start, stop = (int(given.get(name, 0)) for name in ("completion", "start", "stop"))
        return item and await asyncio.to_thread(documents.window, item.group, row, start, stop, d.text)

    async def training(d: Dashboard, request: Request) -> Any:
        return await asyncio.to_thread(d.runs.document, request.query_params.getlist("run"))

    async def prompts(d: Dashboard, request: Request) -> Any:
        given = request.query_params
        offset, limit = int(given.get("offset", 0)), min(MOST_ROWS, int(given.get("limit", 100)))
        return d.prompts.rows(
            given.get("search", ""), given.get("sort", "seen"), given.get("descending") == "1", max(0, offset), limit
        )

    routes = [
        Route("/api/login", login, methods=["POST"]),
        Route("/api/live", live),
        Route("/api/groups", partial(answer, groups)),
        Route("/api/groups/{key:int}", partial(answer, group)),
        Route("/api/groups/{key:int}/whole", partial(answer, whole)),
        Route("/api/groups/{key:int}/tokens", partial(answer, tokens)),
        Route("/api/training", partial(answer, training)),
        Route("/api/prompts", partial(answer, prompts)),
        Mount("/", StaticFiles(directory=PAGE, html=True)),
    ]
    middleware = [Middleware(Guard, token=settings.token, names=settings.allow_hosts)]
    return Starlette(routes=routes, middleware=middleware, lifespan=lifespan)
