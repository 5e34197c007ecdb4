"""The page in a real browser: every view on a run at work, and hostile text in all of them."""

from __future__ import annotations

import pytest

from tests.client.dashboard.conftest import PHONE


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", ["laptop", "phone"])
def test_the_overview_shows_the_run_alive(opened, page_url, theme, size):
    options = {"viewport": PHONE, "color_scheme": theme} if size == "phone" else {"color_scheme": theme}
    tab = opened(page_url, **options).go("overview")
    tab.wait_for_selector(".picture .node.table >> text=rollouts")
    tab.wait_for_selector(".card.table canvas")
    before = tab.inner_text(".card.table dl")
    tab.wait_for_function("before => document.querySelector('.card.table dl').innerText !== before", arg=before)
    assert tab.evaluate("document.documentElement.dataset.theme") == theme
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
