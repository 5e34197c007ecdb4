"""What people look at first stands first, can be searched and smoothed, and is there for a finger on a phone too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replay_client import ReplayClient
from replay_client.testing import make_group
from replay_dashboard.app import Settings
from replay_server import ReplayServer, TableConfig
from tests.dashboard.conftest import PHONE, serving, until
from tests.dashboard.load import Run, make_tokenizer

GREEN = """() => {
    const probe = document.body.appendChild(Object.assign(document.createElement('i'), { className: 'fine' }));
    const colour = getComputedStyle(probe).color;
    probe.remove();
    return colour;
}"""
"""The colour of what is well, as the page has it."""
CUT = "all => all.filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.innerText)"


def is_on_the_screen(tab, selector: str) -> bool:
    box = tab.locator(selector).bounding_box()
    size = tab.viewport_size
    return box["y"] >= 0 and box["y"] + box["height"] <= size["height"] + 1 and box["x"] + box["width"] <= size["width"]


# ------------------------------------------------------------------------------------------------ overview


def test_the_overview_begins_with_learning_and_then_the_plumbing(opened, page_url):
    tab = opened(page_url).go("overview")
    tab.wait_for_selector(".answers .text >> text=So the answer is")
    order = tab.eval_on_selector_all("main section[aria-label]", "all => all.map(each => each.ariaLabel)")
    assert order[:3] == ["Health", "Learning", "The run"]
    wanted = ["fresh reward", "entropy (nats)", "kl (nats)", "completion (tokens)", "tokens a second"]
    until(lambda: tab.locator(".learning .spark .label").all_inner_texts()[:5] == wanted)

    def best_is_better():
        best, worst = (float(tab.inner_text(f".answers .{name} h3 a").split()[1]) for name in ("best", "worst"))
        return best > worst

    until(best_is_better)  # all answers of a version may have one reward
    tab.click(".answers .best a")
    tab.wait_for_selector(".group .about")


def test_formulas_stand_behind_a_why_that_stays_open_while_the_page_lives(opened, page_url):
    tab = opened(page_url).go("overview")
    tab.wait_for_selector(".card.table canvas")
    card = ".card.table[aria-label=replay]"
    assert "min_size" not in tab.inner_text(".cards")
    tab.click(f"{card} .limiter summary")
    tab.wait_for_selector(f"{card} .why >> text=≥ min_size 1")
    before = tab.inner_text(f"{card} .leaving")
    until(lambda: tab.inner_text(f"{card} .leaving") != before)
    assert "≥ min_size 1" in tab.inner_text(card)


@pytest.mark.long
def test_the_best_and_the_worst_answer_are_those_of_all_groups_of_the_newest_version(opened, tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    with (
        ReplayServer(tables=[TableConfig(name="pool")], port=0) as server,
        ReplayClient(server.address) as client,
        serving(Settings({"address": server.address}, tmp_path)) as url,
    ):
        tab = opened(url).go("overview")

        def insert(words: list[str], rewards: list[float], version: int) -> None:
            ids = [tokenizer.encode(text).ids for text in words]
            question = tokenizer.encode("What is it?").ids
            group = make_group(prompt=question, completions=ids, rewards=rewards, version=version)
            client.set_policy_version(max(version, client.policy().version))
            client.insert(group, {"pool": 1.0})

        insert(["It is 1", "It is 2"], [0.25, 1.0], version=3)
        tab.wait_for_selector(".answers .best .text >> text=It is 2")
        insert(["It is 3", "It is 4"], [0.5, 0.5], version=4)
        tab.wait_for_selector(".answers .best .text >> text=It is 3")  # both have the same reward
        insert(["It is 5", "It is 6"], [0.25, 0.75], version=4)
        tab.wait_for_selector(".answers .best .text >> text=It is 6")
        insert(["It is 7", "It is 8"], [-0.5, 0.5], version=4)
        tab.wait_for_selector(".answers .worst .text >> text=It is 7")
        insert(["It is 9", "It is 10"], [-2.0, 2.0], version=3)  # it comes late
        tab.wait_for_selector("main >> text=pool")
        until(lambda: tab.inner_text(".node.table small").startswith("5 of"))
        insert(["It is 11", "It is 12"], [-0.75, 0.5], version=4)
        tab.wait_for_selector(".answers .worst .text >> text=It is 11")
        assert tab.inner_text(".answers .best .text") == "It is 6"
        assert "reward 0.75" in tab.inner_text(".answers .best h3")
        assert "of version 4, the newest" in tab.inner_text(".answers .best h3")
        assert "reward -0.75" in tab.inner_text(".answers .worst h3")


@pytest.mark.parametrize(
    ("rewards", "level", "words"),
    [
        ([0.19 + 0.22 * step / 39 for step in range(40)], "ok", "up, from 0.215 to 0.385 (means of 10 steps)"),
        ([0.41 - 0.22 * step / 39 for step in range(40)], "warning", "down, from 0.385 to 0.215 (means of 10"),
        ([0.4] * 40, "idle", "flat, from 0.4 to 0.4"),
        ([0.4] * 3, "idle", "not known yet: 3 steps have a value"),
        ([], "idle", "Not known: the page has no metrics of a trainer"),
    ],
    ids=["rising", "falling", "flat", "too few steps", "no metrics"],
)  # fmt: skip
def test_only_a_run_whose_reward_rises_while_its_trainer_works_is_green(opened, tmp_path, rewards, level, words):
    if rewards:
        lines = [json.dumps({"step": step, "fresh/reward_mean": reward}) for step, reward in enumerate(rewards)]
        (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with (
        ReplayServer(tables=[TableConfig(name="pool")], port=0) as server,
        ReplayClient(server.address, name="trainer-a") as client,
        serving(Settings({"address": server.address}, runs=tmp_path)) as url,
    ):
        client.insert(make_group(), {"pool": 1.0})
        client.sample("pool")
        tab = opened(url).go("overview")
        tab.wait_for_selector(f".learning.{level} .trend >> text={words}")
        tab.wait_for_selector(".answers .best .text")
        tab.wait_for_selector(".answers .worst .text")
        colour = tab.eval_on_selector(".learning .trend", "each => getComputedStyle(each).color")
        assert (colour == tab.evaluate(GREEN)) == (level == "ok")
        client.leave()
        tab.wait_for_selector(".learning:not(.ok)")
        tab.wait_for_selector(".verdict h1 >> text=The run has ended")
        if rewards:
            assert "Trainer trainer-a ended" in tab.inner_text(".learning .trend")


def test_the_list_of_groups_begins_with_the_reward(opened, page_url):
    tab = opened(page_url).go("groups/replay")
    tab.wait_for_selector(".space .row:not(.blank)")
    heads = tab.eval_on_selector_all(".head [role=columnheader]", "all => all.map(each => each.innerText.trim())")
    assert heads[:3] == ["reward", "spread", "prompt"]


# ------------------------------------------------------------------------------------------------ training


@pytest.fixture
def curves(tmp_path: Path):
    """A page of one run of 40 steps: powers of 10, a metric that jumps between 0 and 1, and many others."""
    lines = [
        {
            "step": step,
            "fresh/reward_mean": step % 2,
            "train/powers": 10.0**step,
            "train/entropy": 0.5,
            "train/loss": 0.0,
        }
        | {f"other/{number}": float(number) for number in range(30)}
        for step in range(40)
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (
        ReplayServer(tables=[TableConfig(name="pool")], port=0) as server,
        serving(Settings({"address": server.address}, runs=tmp_path)) as url,
    ):
        yield url


def point(tab, name: str, share: float = 1.0) -> tuple[list[str], float]:
    """The words of a chart at this share of its steps, and how high the point of its line is: 0 at the bottom, 1."""
    chart = tab.locator(f".curve:has(h3:text-is('{name}'))")
    area = chart.locator(".u-over").bounding_box()
    chart.locator(".u-over").hover(position={"x": 1 + share * (area["width"] - 2), "y": 20})
    until(lambda: chart.locator(".tip").is_visible())
    mark = chart.locator(".u-cursor-pt").first.bounding_box()
    height = 1 - (mark["y"] + mark["height"] / 2 - area["y"]) / area["height"]
    return chart.locator(".tip").inner_text().split(), height


def test_training_shows_what_matters_folds_the_rest_and_finds_by_name_and_meaning(opened, curves):
    tab = opened(curves).go("training")
    tab.wait_for_selector(".curve canvas")

    def shown() -> list[str]:
        return tab.eval_on_selector_all(
            ".curve h3", "all => all.filter(each => each.checkVisibility()).map(each => each.innerText)"
        )

    assert shown() == ["fresh/reward_mean", "train/entropy"]
    tab.click("summary >> text=other/")
    tab.wait_for_selector(".curve:has-text('other/0') canvas")
    for words, found in (("THE CURVE TO WATCH", "fresh/reward_mean"), ("loss", "train/loss")):
        tab.fill("input[type=search]", words)
        until(lambda found=found: found in shown() and len(shown()) < 4)
        tab.wait_for_selector(f".curve:has-text('{found}') canvas")


def test_smoothing_shows_a_mean_that_counts_nothing_before_the_first_value(opened, curves):
    tab = opened(curves).go("training")
    tab.wait_for_selector(".curve canvas")
    assert point(tab, "fresh/reward_mean")[0] == ["39", "run", "1"]
    tab.select_option("label:has-text('Smoothing') select", label="strong")
    mean = sum(0.9**age for age in range(0, 40, 2)) / sum(0.9**age for age in range(40))
    until(lambda: point(tab, "fresh/reward_mean")[0] == ["39", "run", f"{mean:.2f}"])


def test_a_log_scale_draws_powers_as_a_line_and_still_says_their_values(opened, curves):
    tab = opened(curves).go("training")
    tab.fill("input[type=search]", "powers")
    tab.wait_for_selector(".curve canvas")
    assert point(tab, "train/powers", 0.5)[1] < 0.1
    tab.check("label:has-text('Log scale') input")
    until(lambda: abs(point(tab, "train/powers", 0.5)[1] - 0.5) < 0.1)
    assert point(tab, "train/powers")[0] == ["39", "run", "1.0e+39"]


def test_no_two_labels_of_an_axis_say_the_same(opened, curves):
    tab = opened(curves).go("training")
    labels = """async (ticks) => {
        const { labels, ago } = await import('/charts.js'), { number } = await import('/dom.js');
        return [labels(ticks, number), labels(ticks.map((tick) => -tick), ago)];
    }"""
    for ticks in ([5400.2, 5400.4, 5400.6], [2_000_100, 2_000_200], [600, 605, 610], [0, 5, 10], [7200, 7230]):
        for texts in tab.evaluate(labels, ticks):
            assert len(set(texts)) == len(ticks), texts


# ------------------------------------------------------------------------------------------------ prompts


def test_prompts_begin_with_a_picture_of_how_groups_of_each_version_were_solved(opened):
    with ReplayServer(tables=[TableConfig(name="pool")], port=0) as server, ReplayClient(server.address) as client:
        for version, rewards in ((1, [0, 0, 0, 0]), (2, [1, 0, 0, 0]), (2, [1, 1, 1, 1]), (3, [1, 1, 1, 1])):
            client.insert(make_group(rewards=rewards, version=version), {"pool": 1.0})
        with serving(Settings({"address": server.address})) as url:
            tab = opened(url).go("prompts")
            until(lambda: tab.locator(".rates svg g").count() == 3)
            until(lambda: tab.locator(".rates svg g").nth(1).locator("title").text_content().count("2 groups"))
            heights = "all => all.map(each => +each.getAttribute('height'))"
            shares = [tab.locator(".rates svg g").nth(at).locator("rect").evaluate_all(heights) for at in range(3)]
            assert shares == [[100, *[0] * 7], [0, 0, 50, *[0] * 4, 50], [*[0] * 7, 100]]
            assert "100 % solved" in tab.inner_text(".rates figcaption")
            assert tab.eval_on_selector("main .card > :first-child", "each => each.className") == "rates"


# ------------------------------------------------------------------------------------------------ a phone


def test_a_tap_tells_what_is_cut_off_and_what_stands_behind_an_element(opened, page_url):
    tab = opened(page_url, viewport=PHONE, has_touch=True).go("training")
    tab.wait_for_selector(".curve canvas")
    meaning = ".curve:has-text('train/entropy') p >> nth=0"
    assert tab.eval_on_selector(meaning, "each => each.scrollHeight > each.clientHeight")
    tab.tap(meaning)
    tab.wait_for_selector("#told >> text=If it falls to 0 and no reward rises, the policy has collapsed")
    assert is_on_the_screen(tab, "#told p")
    tab.tap(".curve h3 >> nth=0")
    tab.wait_for_selector("#told p", state="detached")
    tab.evaluate("location.hash = '#/prompts'")
    tab.wait_for_selector(".rates svg g")
    tab.locator(".rates svg g").last.tap(force=True)
    tab.wait_for_selector("#told >> text=of answers solve")
    assert is_on_the_screen(tab, "#told p")


@pytest.fixture
def still_url(tmp_path: Path):
    """A page of twelve groups that nobody samples: what a test taps is still there when the page asks for it."""
    run = Run(tmp_path)
    with (
        ReplayServer(tables=[TableConfig(name="replay")], port=0) as server,
        ReplayClient(server.address) as client,
        serving(Settings({"address": server.address})) as url,
    ):
        client.set_policy_version(0, str(tmp_path / "weights"))
        for number in range(12):
            client.insert(run.group(number), {"replay": 1.0})
        yield url


@pytest.mark.long
def test_a_phone_shows_the_numbers_of_a_group_sorts_the_list_and_inspects_tokens(opened, still_url):
    tab = opened(still_url, viewport=PHONE, has_touch=True).go("groups/replay")
    tab.wait_for_selector(".space .row:not(.blank)")
    shown = "all => all.filter(each => each.offsetParent).map(each => getComputedStyle(each, '::before').content)"
    names = {each.strip('" ') for each in tab.eval_on_selector_all(".space .row:not(.blank) .num", shown)}
    assert names == {"spread", "length", "log-prob", "stale", "used", "priority", "age"}
    cut = tab.eval_on_selector_all(".space .row:not(.blank) .num, .space .reward", CUT)
    assert cut == []
    tab.select_option(".bar label:has-text('Order') select", label="length")

    def lengths() -> list[float]:
        cells = tab.eval_on_selector_all(
            ".space .row:not(.blank)", "rows => rows.map(row => row.children[3].innerText)"
        )
        return [float(cell) for cell in cells if cell != "–"]

    until(lambda: len(lengths()) > 3 and lengths() == sorted(lengths(), reverse=True))
    tab.tap(".space .row:not(.blank) .reward >> nth=0")
    tab.wait_for_selector(".completion .t")
    tab.tap(".completion .t >> nth=2")
    tab.wait_for_selector(".inspector >> text=id ")
    assert is_on_the_screen(tab, ".inspector")
