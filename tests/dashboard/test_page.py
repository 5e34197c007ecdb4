"""The page in a real browser: every view on a run at work, in both themes, with all that can go wrong around it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from replay_client import ReplayClient
from replay_client.testing import make_group
from replay_dashboard import app
from replay_dashboard.app import Settings
from replay_generator.prompts.prompt import Prompt
from replay_generator.prompts.stored import PromptCursor, StoredPrompt
from replay_server import ReplayServer, TableConfig
from replay_server.rpc import info as rpc_info
from tests.client.shards.conftest import connected
from tests.dashboard.conftest import LAPTOP, PHONE, serving, until
from tests.dashboard.load import HOSTILE, make_tokenizer
from tests.kit.clocks import in_a_thread
from tests.kit.groups import make_sequences
from tests.kit.processes import free_port, server_process

AXE = Path(__file__).with_name("axe.min.js").read_text()
LEVEL_AA = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
ANSWERS = "performance.getEntriesByType('resource').length"
VIEWS = ("overview", "groups/replay", "training", "prompts")


@pytest.fixture(scope="module", autouse=True)
def without_budget() -> Iterator[None]:
    """A page that may read for half of the time. Its own budget lets it wait 66 times as long as an answer took."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(app, "READING", 0.5)
        yield


def rows_of(tab) -> list[str]:
    return tab.eval_on_selector_all(".space .row:not(.blank)", "rows => rows.map(row => row.innerText)")


def open_group(tab) -> None:
    """Opens the first group of a list, among those that are whole."""
    tab.fill("input[type=search] >> nth=1", "add-")
    # Before the list is filtered, its first row may be one that cannot be read.
    until(lambda: (rows := rows_of(tab)) and all("add-" in row for row in rows))
    tab.click(".space .row:not(.blank) .key a")
    tab.wait_for_selector(".group .about")


def check_accessibility(tab) -> None:
    """Nothing on the page violates the rules of WCAG at level AA."""
    if not tab.evaluate("'axe' in window"):
        tab.evaluate(f"{AXE}; 0")
    found = tab.evaluate("tags => axe.run(document, {runOnly: tags})", LEVEL_AA)
    assert [(each["id"], [node["html"][:120] for node in each["nodes"][:3]]) for each in found["violations"]] == []


@pytest.mark.parametrize(("theme", "viewport"), [("light", LAPTOP), ("dark", PHONE)], ids=["light", "dark phone"])
def test_every_view_shows_the_run_alive_within_the_screen_and_to_everybody(opened, page_url, theme, viewport):
    tab = opened(page_url, color_scheme=theme, viewport=viewport).go("overview")
    tab.wait_for_selector(".picture .node.table >> text=rollouts")
    tab.wait_for_selector(".card.table canvas")
    before = tab.inner_text(".card.table dl")
    until(lambda: tab.inner_text(".card.table dl") != before)
    assert tab.evaluate("document.documentElement.dataset.theme") == theme
    for view in (*VIEWS, "group"):
        tab.evaluate("view => location.hash = `#/${view}`", "groups/replay" if view == "group" else view)
        if view == "group":
            open_group(tab)
        until(lambda: len(tab.inner_text("main")) > 100)
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        check_accessibility(tab)


def test_several_servers_are_one_run_with_a_row_for_each(opened):
    tables = [TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 100})]
    with ReplayServer(tables, 0) as first, ReplayServer(tables, 0) as second:
        addresses = [first.address, second.address]
        with connected(addresses) as client:
            for seed in range(20):
                client.insert(make_group(seed=seed), {"rollouts": 1.0})
            sizes = [client.server_info().shards[name].tables["rollouts"].size for name in addresses]
        with serving(Settings({"address": ",".join(addresses)})) as url:
            tab = opened(url).go("overview")
            tab.wait_for_selector(".card.shards tbody tr")
            tab.wait_for_selector(".picture .node.table >> text=20 of 200")  # both have answered the page
            check_accessibility(tab)
            rows = tab.eval_on_selector_all(
                ".card.shards tbody tr", "rows => rows.map(row => [...row.children].map(cell => cell.innerText))"
            )
            assert [row[:3] for row in rows] == [
                [address, "0", str(n)] for address, n in zip(addresses, sizes, strict=True)
            ]


@pytest.mark.long
def test_a_server_of_several_that_hangs_is_named_first_until_it_answers(opened, tmp_path):
    with (
        server_process(tmp_path) as first,
        server_process(tmp_path) as second,
        serving(Settings({"address": f"{first.address},{second.address}"})) as url,
    ):
        tab = opened(url).go("overview")
        tab.wait_for_selector(".card.shards tbody tr")
        assert second.address not in tab.inner_text(".verdict")
        os.kill(second.process.pid, signal.SIGSTOP)
        tab.wait_for_selector(f".verdict h1 >> text=shard {second.address}: does not answer")
        assert "the others go on" in tab.inner_text(".verdict .remedy")
        tab.wait_for_selector(f".card.shards tr.gone:has-text('{second.address}')")
        check_accessibility(tab)
        os.kill(second.process.pid, signal.SIGCONT)
        until(lambda: second.address not in tab.inner_text(".verdict"))


LONG_NAME = "rollouts-of-the-second-environment-with-long-answers"


@pytest.mark.parametrize("viewport", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_it_says_first_what_blocks_the_run_and_cuts_nothing_off_and_then_that_it_goes_on(opened, monkeypatch, viewport):
    for name in ("LONG_WAIT", "FIRST_STEPS"):
        monkeypatch.setattr(rpc_info, name, 1.0)
    queue = TableConfig(name=LONG_NAME, rate_limiter={"type": "queue", "max_size": 2})
    with ReplayServer(tables=[queue], port=0) as server, ReplayClient(server.address, timeout=120.0) as client:
        client.insert(make_group(), {LONG_NAME: 1.0})
        client.sample(LONG_NAME)  # a trainer has come before
        writer = client.writer()
        for _ in range(4):
            writer.insert(make_group(), {LONG_NAME: 1.0})
        with serving(Settings({"address": server.address})) as url:
            tab = opened(url, viewport=viewport).go("overview")
            tab.wait_for_selector(f"h1 >> text=Inserts into {LONG_NAME} are blocked: nobody samples it")
            tab.wait_for_selector(f".pill >> text=Inserts into {LONG_NAME} are blocked")
            assert "max_diff 2" in tab.inner_text(".verdict")
            assert "see whether a trainer runs" in tab.inner_text(".verdict .remedy")
            assert "to insert" in tab.inner_text(".edge.in")
            cut = "all => all.filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.innerText)"
            assert tab.eval_on_selector_all(".state, .pill, .pill span", cut) == []
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
            for _ in range(2):
                client.sample(LONG_NAME, 2)
            until(lambda: "blocked" not in tab.inner_text(".verdict h1"))
        writer.close()


def test_it_says_which_column_groups_wait_for_and_that_nobody_extends_them(opened, monkeypatch):
    for name in ("LONG_WAIT", "FIRST_STEPS"):
        monkeypatch.setattr(rpc_info, name, 1.0)
    table = TableConfig(name="rollouts", sampler="fifo", requires=["teacher_logprobs"])
    with ReplayServer(tables=[table], port=0) as server, ReplayClient(server.address, name="gen-a") as client:
        keys = [client.insert(make_group(), {"rollouts": 1.0}) for _ in range(3)]
        trainer = in_a_thread(client.sample, "rollouts", 3, timeout=None)
        with serving(Settings({"address": server.address})) as url:
            tab = opened(url).go("overview")
            tab.wait_for_selector(".verdict h1 >> text=rollouts is blocked: nobody extends its items")
            assert "waits for teacher_logprobs: 3 items; nobody has extended one for" in tab.inner_text(".verdict")
            assert "waits for teacher_logprobs: 3 groups" in tab.inner_text("section[aria-label=rollouts]")
            tab.click(".limiter summary")
            tab.wait_for_selector(".limiter .why >> text=samples wait: size without those that wait 0 < min_size 1")
            check_accessibility(tab)
            for key in keys:
                client.extend(key, {"teacher_logprobs": np.zeros(6, np.float32)})
            trainer.result()
            until(lambda: "teacher_logprobs" not in tab.inner_text("main"))


def test_a_trainer_that_is_gone_is_named(opened, monkeypatch):
    monkeypatch.setattr(rpc_info, "LONG_WAIT", 1.0)
    with (
        ReplayServer(tables=[TableConfig(name="pool")], port=0) as server,
        ReplayClient(server.address, name="trainer-a") as client,
        ReplayClient(server.address, name="gen-a") as generator,
        serving(Settings({"address": server.address})) as url,
    ):
        generator.insert(make_group(), {"pool": 1.0})
        for version in range(1, 6):
            client.set_policy_version(version)
        tab = opened(url).go("overview")
        tab.wait_for_selector(".verdict h1 >> text=The trainer is gone")
        assert "no new policy version since version 5" in tab.inner_text(".verdict")
        assert "trainer-a (" in tab.inner_text(".verdict")
        assert "trainer-a" in tab.inner_text(".node.trainer.gone")
        assert "usually every " in tab.inner_text(".back")
        rows = tab.eval_on_selector_all(
            ".card.clients tbody tr", "rows => rows.map(row => [row.children[0].innerText, row.children[1].innerText])"
        )
        assert sorted(rows) == [["gen-a", "generator"], ["trainer-a", "trainer"]]
        check_accessibility(tab)
        client.leave()
        tab.wait_for_selector(".card.clients tr:has-text('trainer-a') >> text=ended")
        until(lambda: "gone" not in tab.inner_text(".verdict h1"))


def test_the_text_of_a_prompt_comes_before_its_name_if_that_is_a_hash(opened, tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    prompt = "Ada has 3 apples and gets 4 more."
    name = Prompt.of({"prompt": prompt}).prompt_id
    with ReplayServer(tables=[TableConfig(name="pool")], port=0) as server, ReplayClient(server.address) as client:
        client.insert(make_group(prompt=tokenizer.encode(prompt).ids, prompt_id=name), {"pool": 1.0})
        client.insert(make_group(prompt=tokenizer.encode(prompt).ids, prompt_id="add-7"), {"pool": 1.0})
        with serving(Settings({"address": server.address}, tmp_path)) as url:
            tab = opened(url).go("groups/pool")
            for view, cells in (
                ("groups/pool", ".space .row .prompt"),
                ("prompts", ".strip:not(.head) > :first-child"),
            ):
                tab.evaluate("view => location.hash = `#/${view}`", view)
                until(lambda cells=cells: tab.locator(cells, has_text="Ada").count() == 2)
                shown = sorted("".join(text.split()) for text in tab.locator(cells).all_inner_texts())
                assert shown == ["".join(text.split()) for text in (f"{prompt} {name[:8]}…", f"add-7 {prompt}")]


def test_groups_are_filtered_by_notes_bars_and_text_and_sorted_by_column(opened, page_url):
    tab = opened(page_url).go("groups/replay")
    tab.wait_for_selector(".space .row:not(.blank) .note")
    tab.keyboard.press("h")
    tab.wait_for_selector("button.hold >> text=Held")
    tab.click(".head button >> text=length")
    tab.wait_for_selector("[role=columnheader][aria-sort=descending] >> text=length")

    def lengths() -> list[float]:
        cells = tab.eval_on_selector_all(
            ".space .row:not(.blank)", "rows => rows.map(row => row.children[3].innerText)"
        )
        return [float(cell) for cell in cells if cell != "–"]

    until(lambda: len(lengths()) > 5 and lengths() == sorted(lengths(), reverse=True))
    tab.click(".chip >> text=all cut off")
    until(lambda: rows_of(tab) and all("all cut off" in row for row in rows_of(tab)))
    tab.click("text=Clear filters")
    tab.click(".histogram:has-text('mean reward') g.bin:last-child", force=True)
    tab.wait_for_selector(".histogram >> text=mean reward: ")

    def is_a_part() -> bool:
        found, _, all_groups = tab.inner_text(".count").partition(" of ")
        return found != all_groups.split(" ")[0]

    until(is_a_part)
    tab.click("text=Clear filters")
    tab.fill("input[type=search] >> nth=0", "wait, let me check")
    until(lambda: "of" in tab.inner_text(".count") and rows_of(tab))
    tab.fill("input[type=search] >> nth=0", "no group has this text")
    until(lambda: tab.inner_text(".count").startswith("0 of"))


@pytest.mark.long
def test_a_live_list_follows_and_a_held_one_stays(opened, page_url):
    held, live = (opened(page_url).go("groups/replay") for _ in range(2))

    def keys_of(tab) -> list[str]:
        return tab.eval_on_selector_all(".space .key a", "all => all.map(each => each.title)")

    def until_changed(tab) -> None:
        before = keys_of(tab)[:1]
        until(lambda: keys_of(tab) and keys_of(tab)[:1] != before)

    for tab in (held, live):
        tab.wait_for_selector(".space .row:not(.blank)")
        until_changed(tab)
    held.keyboard.press("h")
    held.wait_for_selector("button.hold >> text=Held")
    until_changed(live)  # the question that was open when the list was held has been answered
    seen = keys_of(held), held.evaluate(ANSWERS)
    for _ in range(2):
        until_changed(live)
    assert (keys_of(held), held.evaluate(ANSWERS)) == seen


def test_a_group_is_read_token_by_token(opened, page_url):
    tab = opened(page_url).go("groups/replay")
    open_group(tab)
    tab.wait_for_selector(".completion .t")
    rewards = tab.eval_on_selector_all(
        ".completion h2 b", "all => all.map(each => parseFloat(each.innerText.slice(7)))"
    )
    assert len(rewards) == 8
    assert rewards == sorted(rewards, reverse=True)
    assert "How many" in tab.inner_text(".prompt .text")
    tab.hover(".completion .t >> nth=2")
    tab.wait_for_selector(".inspector >> text=log-prob")
    tab.select_option("label:has-text('Colour') select", label="ratio to old_logprobs")
    tab.wait_for_selector(".completion .t.r3, .completion .t.r4")
    # The best and the worst differ; any other two may be the same.
    best, worst = (tab.get_attribute(f".completion >> nth={row}", "data-row") for row in (0, -1))
    tab.select_option("label:has-text('Compare') select", label=best)
    tab.select_option("label:has-text('with') select", label=worst)
    tab.wait_for_selector(".difference .differs")
    tab.click("text=Copy as Python")
    tab.wait_for_selector("dialog[open]")
    assert "client.get([" in tab.evaluate("navigator.clipboard.readText()")


def test_each_sequence_says_which_rollout_it_is_of_and_each_extra_which_axis_it_has(opened):
    group = make_sequences(extras={"entropy": np.arange(8.0), "image": np.zeros((2, 2))}, axes={"entropy": "whole"})
    with ReplayServer(tables=[TableConfig(name="pool")], port=0) as server, ReplayClient(server.address) as client:
        key = client.insert(group, {"pool": 1.0})
        with serving(Settings({"address": server.address})) as url:
            tab = opened(url).go(f"group/{key}")
            tab.wait_for_selector(".completion .t")
            # By reward: both sequences of the first rollout stand in it, and it counts once.
            assert tab.eval_on_selector_all(".rollout h2 b", "all => all.map(each => each.innerText)") == [
                "reward 1",
                "reward 0",
            ]
            assert "2 sequences · 3 tokens · ended by stop" in tab.inner_text(".rollout >> nth=0")
            heads = "all => all.map(each => each.innerText)"
            assert tab.eval_on_selector_all(".completion h3", heads) == [
                "#0 sequence 1 of 2",
                "#1 sequence 2 of 2",
                "#2",
            ]
            assert "ended by length" in tab.inner_text(".rollout >> nth=1")
            assert "0.50 mean of 2, 0 to 1" in tab.inner_text(".about")
            tab.click(".about summary")
            assert "float64 [8], 64 B axis whole: 0 1" in tab.inner_text(".about details")
            assert "float64 [2, 2], 32 B 0 0" in tab.inner_text(".about details")
            tab.hover(".prompt .t >> nth=1")
            tab.wait_for_selector(".inspector >> text=entropy 1")


def test_hostile_text_stays_text_in_every_view(opened, tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    texts = HOSTILE
    group = make_group(
        prompt=tokenizer.encode(HOSTILE[0]).ids,
        lengths=[len(tokenizer.encode(text).ids) for text in texts],
        rewards=[float(row) for row in range(len(texts))],
        prompt_id=HOSTILE[1],
        finish_reasons=HOSTILE,
        meta={HOSTILE[2]: HOSTILE[3]},
        extras={HOSTILE[4]: np.arange(3.0)},
    )
    group.completion_ids = np.concatenate([tokenizer.encode(text).ids for text in texts]).astype(np.int32)
    with ReplayServer(tables=[TableConfig(name="pool")], port=0) as server:
        runs = tmp_path / "runs" / "<i>run"
        runs.mkdir(parents=True)
        (runs / "metrics.jsonl").write_text(json.dumps({"step": 1, "fresh/<img src=x>": 1.0}) + "\n")
        with (
            ReplayClient(server.address) as client,
            serving(Settings({"address": server.address}, tmp_path, runs=tmp_path / "runs")) as url,
        ):
            key = client.insert(group, {"pool": 1.0})
            tab = opened(url).go("overview")
            for view in ("groups", "prompts", "training", f"group/{key}"):
                tab.evaluate("view => location.hash = `#/${view}`", view)
                text = "<i>run" if view == "training" else "<img src=x"
                tab.wait_for_selector(f"main :text('{text}')")
                assert tab.locator("main img, main b b, main script, main h1 >> text=owned").count() == 0
            assert HOSTILE[0] in tab.inner_text(".prompt .text")
            shown = "\n".join(tab.locator(".completion .text").all_inner_texts())
            assert all(text in shown for text in (HOSTILE[0], HOSTILE[2], HOSTILE[4]))
            assert "⟨U+202E⟩esrever⟨U+202C⟩" in shown
            assert tab.title() == "groups · replay"


def test_damaged_payloads_and_raw_bytes_are_shown_as_what_they_are(opened):
    with ReplayServer(tables=[TableConfig(name="pool")], port=0) as server, ReplayClient(server.address) as client:
        damaged = client.insert(make_group().encode()[:200], {"pool": 1.0})
        raw = client.insert(b"<b>raw</b>\x00\xff", {"pool": 1.0})
        with serving(Settings({"address": server.address})) as url:
            tab = opened(url).go("groups/pool")
            tab.wait_for_selector(".note >> text=raw bytes")
            tab.wait_for_selector(".note >> text=damaged")
            tab.evaluate("key => location.hash = `#/group/${key}`", str(damaged))
            tab.wait_for_selector("h2 >> text=A damaged group")
            tab.evaluate("key => location.hash = `#/group/${key}`", str(raw))
            tab.wait_for_selector("h2 >> text=Raw bytes, not a group")
            assert "3c 62 3e 72 61 77" in tab.inner_text("pre")
            assert "<b>raw</b>.." in tab.inner_text("pre")


def test_a_balanced_table_shows_its_shares_and_groups_their_tags(opened):
    balance = {"tag": "environment", "weights": {"math": 3.0}}
    with (
        ReplayServer(tables=[TableConfig(name="pool", balance=balance)], port=0) as server,
        ReplayClient(server.address) as client,
        serving(Settings({"address": server.address})) as url,
    ):
        for environment in ("math", "<b>code</b>"):
            key = client.insert(make_group(), {"pool": 1.0}, tags={"environment": environment})
        tab = opened(url).go("overview")
        shares = "draws balanced over environment: math 75 % (1 group), <b>code</b> 25 % (1 group)"
        tab.wait_for_selector(f"small >> text={shares}")
        tab.evaluate("location.hash = '#/groups/pool'")
        tab.wait_for_selector(".note.tag[title='Groups with environment=math'] >> text=math")
        tab.evaluate("key => location.hash = `#/group/${key}`", str(key))
        tab.wait_for_selector("dt >> text=tag environment")


def test_groups_begin_with_the_table_that_holds_the_most_and_an_empty_one_says_so(opened):
    tables = [TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 8}), TableConfig(name="replay")]
    with ReplayServer(tables, port=0) as server, ReplayClient(server.address) as client:
        client.insert(make_group(), {"replay": 1.0})
        with serving(Settings(access={"address": server.address})) as url:
            tab = opened(url).go("groups")
            tab.wait_for_selector(".space .row:not(.blank)")
            assert tab.inner_text(".tabs [aria-current]").startswith("replay")
            tab.click(".tabs >> text=rollouts")
            tab.wait_for_selector(".space .row.none >> text=rollouts holds no group now")


@pytest.mark.long
def test_a_hundred_thousand_items_scroll_to_the_last(opened, tmp_path):
    config = '[server]\nmax_bytes = "1GB"\n[[tables]]\nname = "pool"\nmax_size = 200000\n'
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        with client.writer(max_in_flight=2000) as writer:
            for number in range(100_000):
                writer.insert(b"x" * 40, {"pool": 1.0 + number % 7})
        with serving(Settings({"address": server.address})) as url:
            tab = opened(url).go("groups/pool")
            tab.wait_for_selector(".count >> text=100,000 of 100,000 groups")
            tab.keyboard.press("h")
            tab.evaluate("list => list.scrollTop = list.scrollHeight", tab.query_selector(".rows"))
            tab.wait_for_selector('.row[aria-rowindex="100001"]:not(.blank)')
            assert tab.locator(".space .row").count() < 60
            tab.click(".histogram:has-text('priority') g.bin:first-child", force=True)
            tab.wait_for_selector(".count >> text=14,286 of 100,000 groups")


def test_a_group_of_64_times_8192_tokens_is_cut_with_a_button_for_the_rest(opened, tmp_path):
    make_tokenizer(tmp_path)
    group = make_group(lengths=[8192] * 64, rewards=[float(row % 2) for row in range(64)])
    with ReplayServer(tables=[TableConfig(name="pool")], port=0) as server, ReplayClient(server.address) as client:
        key = client.insert(group, {"pool": 1.0})
        with serving(Settings({"address": server.address}, tmp_path)) as url:
            tab = opened(url).go(f"group/{key}")
            tab.wait_for_selector(".completion")
            assert tab.locator(".completion").count() == 16
            assert tab.locator(".completion .t").count() == 16 * 256
            tab.click(".completion >> nth=0 >> text=Show the rest: 7,936 tokens")
            until(lambda: tab.locator(".completion >> nth=0").locator(".t").count() == 8192)
            tab.click("text=Show 16 more of 64 completions")
            until(lambda: tab.locator(".completion").count() == 32)


@pytest.mark.long
def test_a_server_that_goes_and_comes_back_is_followed(opened, tmp_path):
    address = f"127.0.0.1:{free_port()}"
    with (
        server_process(tmp_path, address=address) as server,
        ReplayClient(address) as client,
        serving(Settings({"address": address})) as url,
    ):
        client.insert(make_group(), {"replay": 1.0})
        tab = opened(url).go("overview")
        tab.wait_for_selector(".node.table >> text=1 of")
        server.kill()
        tab.wait_for_selector("#banner >> text=The server has not answered")
        assert "The server does not answer" in tab.inner_text(".verdict h1")
        until(lambda: "no replay server answers" in tab.inner_text(".verdict"))
        assert tab.inner_text("body").count("no replay server answers") == 1
        with server_process(tmp_path, address=address):
            tab.wait_for_selector("#banner p", state="detached")
            client.insert(make_group(), {"replay": 1.0})
            client.insert(make_group(), {"replay": 1.0})
            tab.wait_for_selector(".node.table >> text=2 of")


def test_the_page_says_when_its_own_process_is_gone(browser):
    with ReplayServer(tables=[TableConfig(name="pool")], port=0) as server:
        tab = browser.new_page()
        with serving(Settings({"address": server.address}), port=free_port()) as url:
            tab.goto(url)
            tab.wait_for_selector(".node.table")
        tab.wait_for_selector("#banner >> text=dashboard's process has not answered")
        with serving(Settings({"address": server.address}), port=int(url.rpartition(":")[2])):
            tab.wait_for_selector("#banner p", state="detached")
        tab.close()


def test_curves_grow_with_the_files_and_runs_lie_over_each_other(opened, run, page_url):
    tab = opened(page_url).go("training")
    tab.wait_for_selector(".curve canvas")
    steps = tab.inner_text(".runs label:has-text('now') small")
    until(lambda: tab.inner_text(".runs label:has-text('now') small") != steps)
    assert "The curve to watch" in tab.inner_text(".curve:has-text('fresh/reward_mean') p >> nth=0")
    tab.check("label:has-text('baseline') input")
    tab.wait_for_selector(".runs label.series2")
    tab.hover(".curve .u-over >> nth=0")
    until(lambda: "baseline" in "".join(tab.locator(".tip:visible").all_inner_texts()))


def test_prompts_are_found_and_ordered_by_how_often_they_are_solved(opened, page_url):
    tab = opened(page_url).go("prompts")
    tab.wait_for_selector(".strip .heat i[class]")
    tab.select_option("label:has-text('Order') select", label="hardest")

    def solved() -> list[int]:
        cells = tab.eval_on_selector_all(".strip:not(.head)", "rows => rows.map(row => row.children[1].innerText)")
        return [int(cell.split()[0]) for cell in cells]

    until(lambda: len(solved()) > 3 and solved() == sorted(solved()))
    tab.fill("input[type=search]", "add-00")
    until(lambda: 0 < len(solved()) <= 10)


def test_prompts_of_a_table_stand_beside_those_whose_groups_were_read(opened):
    tables = [TableConfig(name="rollouts"), TableConfig(name="prompts", sampler="max_heap")]
    with ReplayServer(tables=tables, port=0) as server, ReplayClient(server.address) as client:
        for number in range(3):
            stored = StoredPrompt(Prompt.of({"prompt": f"{number}+1=", "prompt_id": f"p{number}"}), 0, number)
            client.insert(stored.encode(), {"prompts": 0.25 - 0.1 * number})
        cursor = PromptCursor(1, 0, 9, "", 2, 3)
        client.insert(cursor.encode(), {"prompts": 0.0}, tags={"prompts": "epoch 2, 3 of 9"})
        client.sample("prompts")
        with serving(Settings({"address": server.address})) as url:
            tab = opened(url).go("prompts")
            tab.wait_for_selector(".prompts p:has-text('prompts epoch 2, 3 of 9 loaded, 3 there now')")
            tab.select_option("label:has-text('Order') select", label="highest priority")
            tab.wait_for_selector(".strip:not(.head):has-text('p0') span:has-text('0 of 1')")
            rows = tab.eval_on_selector_all(".strip:not(.head)", "rows => rows.map(row => row.children[0].innerText)")
            assert [row[:2] for row in rows] == ["p0", "p1", "p2"]


def test_keys_do_what_the_help_says(opened, page_url):
    tab = opened(page_url, color_scheme="light").go("groups/replay")
    tab.wait_for_selector(".space .row:not(.blank)")
    tab.keyboard.press("1")
    tab.wait_for_selector(".node.table")
    tab.keyboard.press("2")
    tab.wait_for_selector(".space .row:not(.blank)")
    tab.keyboard.press("h")
    tab.keyboard.press("j")
    tab.keyboard.press("j")
    tab.wait_for_selector('.row.focused[aria-rowindex="4"]')
    tab.keyboard.press("k")
    key = tab.get_attribute('.row[aria-rowindex="3"] .key a', "title")
    tab.keyboard.press("Enter")
    tab.wait_for_selector(f".group h1 >> text={key}")
    tab.keyboard.press("Escape")
    tab.wait_for_selector(".groups")
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.type") == "search"
    tab.keyboard.press("Escape")
    tab.keyboard.press("t")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    tab.keyboard.press("?")
    tab.wait_for_selector("dialog[open] >> text=light or dark")


def test_a_page_with_a_token_opens_by_its_address_and_asks_otherwise(browser, run):
    with serving(Settings({"address": run.server.address}, token="s3cret")) as url:
        tab = browser.new_page()
        tab.goto(url)
        tab.wait_for_selector("dialog[open] >> text=A token is needed")
        assert tab.locator(".node").count() == 0
        tab.fill("#token", "wrong")
        tab.click("dialog button >> text=Enter")
        tab.wait_for_selector("dialog >> text=that is not the token")
        tab.goto(f"{url}/?again#token=s3cret")
        tab.wait_for_selector(".node.table")
        assert "s3cret" not in tab.evaluate("location.href + document.cookie")
        tab.close()
