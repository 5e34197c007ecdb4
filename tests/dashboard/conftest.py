"""The page in a browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import functools
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from replay_client.testing import until  # noqa: F401, tests of the page import it from here
from replay_dashboard import app
from replay_dashboard.app import PageServer, Settings
from tests.dashboard.load import Run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
CHANGED = "net::ERR_NETWORK_CHANGED"
"""Chromium drops what it loads when another test makes or ends a network of containers."""
LAPTOP, PHONE = {"width": 1366, "height": 768}, {"width": 390, "height": 844}


STOPPED: set[str] = set()
"""Addresses of pages that their test has stopped. A tab that is still open asks them once more, in vain."""


@contextmanager
def serving(settings: Settings, port: int = 0) -> Iterator[str]:
    """The address of a page, in this process."""
    listener = socket.create_server(("127.0.0.1", port))
    server = PageServer(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    STOPPED.discard(url)
    try:
        yield url
    finally:
        STOPPED.add(url)
        server.should_exit = True
        thread.join(timeout=15)
        listener.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Lives for one module: while playwright runs, this thread has its event loop, and async tests need theirs."""
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=[*QUIET, "--disable-sync"])
        yield launched
        launched.close()


class Page:
    """A tab that fails the test when the page complains, breaks its policy or asks another host."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.complaints: list[str] = []
        self.interrupted = False
        self.tab = browser.new_page(
            **({"viewport": LAPTOP, "permissions": ["clipboard-read", "clipboard-write"]} | options)
        )
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("console", lambda message: message.type == "error" and self._note(message.text))
        self.tab.on("request", lambda request: request.url.startswith(url) or self.complaints.append(request.url))
        self.tab.set_default_timeout(120_000)

    def _note(self, complaint: str) -> None:
        if CHANGED in complaint:
            self.interrupted = True
        elif self.url not in STOPPED or "net::ERR_" not in complaint:
            self.complaints.append(complaint)

    def go(self, view: str) -> Any:
        """Opens a view, and again if that was interrupted."""
        load = functools.partial(self.tab.goto, f"{self.url}/#/{view}")
        self.interrupted = True
        while self.interrupted:
            self.interrupted = False
            try:
                load()
            except Exception as error:
                if CHANGED not in str(error):
                    raise
                self.interrupted = True
            load = self.tab.reload
        return self.tab


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Page]]:
    pages: list[Page] = []

    def open_page(url: str, **options: Any) -> Page:
        pages.append(Page(browser, url, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        if not page.tab.is_closed():  # pytest shows this only if the test fails, mostly for a text that never came
            print(f"{page.tab.url}, interrupted: {page.interrupted}", page.tab.inner_text("body")[:4000], sep="\n")
        page.tab.close()
        assert page.complaints == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run at work, shared by the tests that only look."""
    with Run(tmp_path_factory.mktemp("run"), rate=10.0) as running:
        yield running


@pytest.fixture(scope="module")
def page_url(run: Run) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(app, "READING", 0.5)  # the tests do not wait for the budget
        with serving(Settings({"address": run.server.address}, runs=Path(run.folder) / "runs")) as url:
            yield url
