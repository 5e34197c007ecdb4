"""Takes the pictures of docs/how-to/look.md: `python -m tests.dashboard.pictures`, about three minutes."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from replay_dashboard.app import Settings
from tests.dashboard.conftest import CHROMIUM, QUIET, serving
from tests.dashboard.load import Run

IMAGES = Path(__file__).parents[2] / "docs/images"


def take(browser: Any, url: str, view: str, name: str, theme: str, height: int, prepare: str = "") -> None:
    tab = browser.new_page(viewport={"width": 1280, "height": height}, color_scheme=theme)
    tab.goto(f"{url}/#/{view}")
    tab.wait_for_timeout(6000)
    if prepare:
        tab.evaluate(prepare)
        tab.wait_for_timeout(2500)
    tab.screenshot(path=IMAGES / f"{name}.png")
    tab.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        with Run(Path(folder) / "healthy") as run:
            settings = Settings({"address": run.server.address}, runs=Path(folder) / "healthy/runs")
            with serving(settings) as url:
                time.sleep(75)
                take(browser, url, "overview", "dashboard", "light", 800)
                take(browser, url, "groups/replay", "dashboard-groups", "light", 720)
                both = "document.querySelectorAll('.runs input').forEach(box => box.checked || box.click())"
                take(browser, url, "training", "dashboard-training", "dark", 720, both)
                # A group with turns of a tool.
                click = (
                    "[...document.querySelectorAll('.space .row')].find(row => "
                    "row.innerText.includes('calculator')).querySelector('.key a').click()"
                )
                take(browser, url, "groups/replay", "dashboard-group", "dark", 720, click)
        with Run(Path(folder) / "blocked", "blocked") as run, serving(Settings({"address": run.server.address})) as url:
            time.sleep(45)
            take(browser, url, "overview", "dashboard-blocked", "dark", 440)
        browser.close()


if __name__ == "__main__":
    main()
