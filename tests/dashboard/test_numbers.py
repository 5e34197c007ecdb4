"""The page gives the numbers of its charts, the settings of runs and what differs, and the sessions of agents."""

from __future__ import annotations

import csv
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay_client import ReplayClient
from replay_client.testing import make_group
from replay_dashboard import training
from replay_dashboard.app import Settings
from replay_dashboard.configuration import HIDDEN, MOST_SETTINGS, MOST_SHOWN, TOO_DEEP, configuration_of
from replay_dashboard.training import Runs
from replay_server import ReplayServer, TableConfig
from tests.dashboard.conftest import serving, until
from tests.dashboard.test_page import check_accessibility

SERVE = """
[server]
listen = "127.0.0.1:0"

[[tables]]
name = "rollouts"
max_size = 512
"""


def make_run(folder: Path, steps: int, **train: object) -> None:
    """A folder as `replay run` writes it."""
    (folder / "config").mkdir(parents=True)
    (folder / "train").mkdir()
    lines = [f"{name} = {json.dumps(value)}" for name, value in train.items()]
    (folder / "config/train.toml").write_text("\n".join(["[train]", *lines]))
    (folder / "config/serve.toml").write_text(SERVE)
    (folder / "config/client.toml").write_text('token_file = "/secret"\n')
    metrics = [{"step": step, "fresh/reward_mean": step / 10, "train/entropy": 0.5} for step in range(1, steps + 1)]
    (folder / "train/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))


@pytest.fixture
def page_of_runs(runs: Path) -> Iterator[str]:
    with ReplayServer(tables=[TableConfig(name="pool")], port=0) as server:
        settings = Settings({"address": server.address}, runs=runs)
        with serving(settings) as url:
            yield url


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path / "first", 3, learning_rate=1e-6, loss_type="grpo")
    make_run(tmp_path / "second", 4, learning_rate=2e-6, loss_type="grpo", beta=0.1)
    return tmp_path


def saved(tab, name: str) -> list[list[str]]:
    """The rows of the file that a chart gives."""
    with tab.expect_download() as download:
        tab.click(f"button[aria-label='CSV of {name}']")
    with Path(download.value.path()).open(newline="") as file:
        return list(csv.reader(file))


# ------------------------------------------------------------------------------------------------ numbers


def test_every_chart_gives_its_numbers(opened, runs):
    with ReplayServer(tables=[TableConfig(name="pool")], port=0) as server, ReplayClient(server.address) as client:
        for version, rewards in ((1, [0.0, 0.0]), (2, [0.0, 1.0]), (2, [0.0, 1.0])):
            client.insert(make_group(rewards=rewards, version=version), {"pool": 1.0})
        with serving(Settings({"address": server.address}, runs=runs)) as url:
            tab = opened(url).go("overview")
            tab.wait_for_selector(".histogram:has-text('mean reward') svg")
            histogram = saved(tab, "mean reward")
            assert histogram[0] == ["from", "to", "groups"]
            assert sum(int(row[2]) for row in histogram[1:]) == 3
            head, *points = saved(tab, "size of pool")
            assert head == ["time", "groups"]
            assert points[-1][1] == "3"
            assert saved(tab, "inserts and samples a second of pool")[0] == ["time", "in", "out"]
            assert saved(tab, "fresh reward")[0] == ["number", "fresh reward"]
            check_accessibility(tab)
            tab = opened(url).go("prompts")
            tab.wait_for_selector(".rates svg g")
            until(lambda: [row[:3] for row in saved(tab, "solve rates")[1:]] == [["1", "1", "0"], ["2", "2", "0.5"]])
            tab = opened(url).go("training")
            tab.wait_for_selector(".curve canvas")
            for run in ("first/train", "second/train"):
                tab.check(f".runs label:has-text('{run}') input")
            tab.wait_for_selector(".configuration .differs")
            rows = saved(tab, "fresh/reward_mean")
            assert sorted(rows[0]) == ["first/train", "second/train", "step"]
            assert [row[0] for row in rows[1:]] == ["1", "2", "3", "4"]
            assert sorted(rows[-1]) == ["", "0.4", "4"]


def test_a_text_that_a_spreadsheet_would_run_is_a_text(opened, page_of_runs):
    tab = opened(page_of_runs).go("training")
    rows = ["=1+1", "a,b", 'say "x"', -1, None]
    found = tab.evaluate("async (row) => (await import('/csv.js')).csvOf([row])", rows)
    assert found == '\'=1+1,"a,b","say ""x""",-1,\n'


def test_a_number_that_rounds_up_to_the_next_unit_is_written_in_it(opened, page_of_runs):
    tab = opened(page_of_runs).go("training")
    sizes = tab.evaluate("async (given) => given.map((await import('/dom.js')).bytes)", [999, 99_960, 999_960, 10**9])
    assert sizes == ["999 B", "100 kB", "1.0 MB", "1.0 GB"]
    durations = tab.evaluate("async (given) => given.map((await import('/dom.js')).duration)", [9.9, 9.96, 59.7, 200])
    assert durations == ["9.9 s", "10 s", "1 min 0 s", "3 min 20 s"]


# ------------------------------------------------------------------------------------------------ configuration


def test_the_settings_of_a_run_are_shown_and_of_two_runs_what_differs(opened, page_of_runs):
    tab = opened(page_of_runs).go("training")
    tab.wait_for_selector(".configuration tbody tr")
    shown = tab.inner_text(".configuration")
    assert "serve.tables.rollouts.max_size" in shown
    assert "secret" not in shown
    for run in ("first/train", "second/train"):
        tab.check(f".runs label:has-text('{run}') input")
    until(lambda: tab.locator(".configuration thead th").count() == 3)
    names = "all => all.map(each => each.innerText)"
    assert tab.eval_on_selector_all(".configuration tbody th", names) == ["train.beta", "train.learning_rate"]
    assert "2 differences of 6 settings" in tab.inner_text(".configuration h2")
    heads = tab.eval_on_selector_all(".configuration thead th", names)
    rates = tab.eval_on_selector_all(".configuration tbody tr:last-child td", names)
    assert dict(zip(heads[1:], rates, strict=True)) == {"first/train": "1e-06", "second/train": "2e-06"}
    check_accessibility(tab)
    tab.uncheck(".configuration input")
    until(lambda: tab.locator(".configuration tbody tr").count() == 6)


def test_what_is_no_file_of_settings_is_left_out_and_nothing_outside_of_the_folder_is_read(tmp_path):
    make_run(tmp_path / "run", 1, learning_rate=1e-6)
    inner = tmp_path / "run/train"
    assert configuration_of(inner, inner) == {}
    (inner / "config.json").write_text('{"model_type": "qwen2"}')  # of a model
    assert configuration_of(inner, inner) == {}
    (inner / "settings.json").write_text('{"loss_type": "grpo", "correction": {"clip_max": 1.0}}')
    assert configuration_of(inner, inner) == {"train.correction.clip_max": "1.0", "train.loss_type": '"grpo"'}
    (tmp_path / "run/config/serve.toml").write_text("not toml")
    found = configuration_of(inner, tmp_path)
    assert found["train.learning_rate"] == "1e-06"
    assert not [name for name in found if name.startswith("serve")]


@pytest.mark.parametrize("link", ["config", "config/serve.toml", "config/train.toml", "train/settings.json", "train"])
def test_no_link_leads_out_of_the_folder(tmp_path, link):
    make_run(tmp_path / "outside", 1, learning_rate=1e-6)
    (tmp_path / "outside/train/settings.json").write_text('{"beta": 0.1}')
    root = tmp_path / "runs"
    (root / "run/train").mkdir(parents=True)
    (root / "run/config").mkdir()
    if (root / "run" / link).is_dir():
        (root / "run" / link).rmdir()
    (root / "run" / link).symlink_to(tmp_path / "outside" / link)
    assert configuration_of(root / "run/train", root) == {}
    (root / "linked").symlink_to(root)
    assert configuration_of(root / "linked/run/train", root / "linked") == {}


def test_links_within_the_folder_are_followed_and_what_is_no_file_is_left_out(tmp_path):
    make_run(tmp_path / "first", 1, learning_rate=1e-6)
    make_run(tmp_path / "second", 1)
    (tmp_path / "second/config/train.toml").unlink()
    (tmp_path / "second/config/train.toml").symlink_to(tmp_path / "first/config/train.toml")
    (tmp_path / "second/config/generate-1.toml").symlink_to(tmp_path / "second/config/generate-1.toml")
    os.mkfifo(tmp_path / "second/train/settings.json")
    found = configuration_of(tmp_path / "second/train", tmp_path)
    assert found["train.learning_rate"] == "1e-06"
    assert not [name for name in found if name.startswith("generate")]


def test_the_settings_of_runs_are_read_while_their_metrics_may_be_read(runs, monkeypatch):
    read = Runs(runs)
    read.read()
    asked: list[str] = []

    def other_thread_asks(folder: Path, root: Path) -> dict[str, str]:
        thread = threading.Thread(target=lambda: asked.append(read.newest_name()), daemon=True)
        thread.start()
        until(lambda: asked, timeout=10.0)
        return configuration_of(folder, root)

    monkeypatch.setattr(training, "configuration_of", other_thread_asks)
    (found,) = read.document(["first/train"])["configurations"]
    assert found["train.learning_rate"] == "1e-06"


@pytest.mark.parametrize(
    "line",
    [
        'engine_arg = ["api_key=hunter2", "dtype=float32"]',
        'engine_arg = { api_key = "hunter2", dtype = "float32" }',
        'environment_args = \'{"agent": {"user": "hunter2"}}\'',
        'environment_args = { agent = { user = "hunter2" } }',
        'tags = { HF_TOKEN = "hunter2" }',
        'tags = { secret = ["hunter2"] }',
        'password = { of = [{ name = "a", value = "hunter2" }] }',
        "some = [[{ apiKey = 'hunter2' }, 1]]",
        "some = [['password=hunter2']]",
    ],
)
def test_what_may_be_a_secret_is_set_and_not_shown(tmp_path, line):
    make_run(tmp_path, 1)
    (tmp_path / "config/generate-1.toml").write_text(f"[generate]\n{line}\n")
    found = configuration_of(tmp_path / "train", tmp_path)
    said = {name: value for name, value in found.items() if name.startswith("generate-1")}
    assert "hunter2" not in str(said)
    assert any(HIDDEN in value for value in said.values())
    assert ("float32" in str(said)) == ("float32" in line)


def test_what_is_no_secret_is_shown(tmp_path):
    own = {"max_tokens": 512, "token_file": "x", "sampling_key": None, "weights_allow_insecure_token": False}
    (tmp_path / "settings.json").write_text(json.dumps(own))
    assert configuration_of(tmp_path, tmp_path) == {f"train.{name}": json.dumps(own[name]) for name in sorted(own)}


def nested(opening: str, closing: str, times: int) -> str:
    return opening * times + "1" + closing * times


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (nested('{"a":', "}", 16), {"train" + 16 * ".a": "1"}),
        (nested('{"a":', "}", 17), {"train" + 16 * ".a": TOO_DEEP}),
        (nested('{"a":', "}", 900), {"train" + 16 * ".a": TOO_DEEP}),
        (nested("[", "]", 900), {"train" + 16 * ".0": TOO_DEEP}),
        (nested('[{"a":', "}]", 450), {"train" + 8 * ".0.a": TOO_DEEP}),
        (nested('{"a":', "}", 100_000), {}),
        ('{"a": [{"name": {"b": 1}}]}', {"train.a.0.name.b": "1"}),
        ('{"a": [1, "b"], "c": [], "d": {}}', {"train.a": '[1, "b"]', "train.c": "[]"}),
        (json.dumps({"a" * 100_000: 1}), {"train." + "a" * (MOST_SHOWN - len("train.")): "1"}),
    ],
    ids=["16", "17", "900", "lists", "both", "beyond what Python reads", "a name that is none", "lists of values", "a"],
)
def test_settings_may_be_nested_and_named_as_they_like(tmp_path, text, expected):
    (tmp_path / "settings.json").write_text(text)
    assert configuration_of(tmp_path, tmp_path) == expected


def test_a_dotted_name_may_have_any_number_of_parts(tmp_path):
    make_run(tmp_path, 1)
    (tmp_path / "config/train.toml").write_text("a." * 3000 + "a = 1")
    found = configuration_of(tmp_path / "train", tmp_path)
    assert found["train" + 16 * ".a"] == TOO_DEEP


def test_of_one_file_only_so_many_settings_are_shown(tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps({str(number): number for number in range(MOST_SETTINGS + 5)}))
    assert len(configuration_of(tmp_path, tmp_path)) == MOST_SETTINGS


# ------------------------------------------------------------------------------------------------ sessions


ODD = {"toString": 1, "valueOf": 1}
"""JavaScript makes no text of it."""


@pytest.mark.parametrize(
    "odd",
    [{"silent": "5"}, {"silent": ODD}, {"refused": {"401": ODD}}, {"refused": "401"}, {"reason": ODD}, {"nobody": "2"}],
    ids=str,
)
def test_what_a_client_says_of_its_sessions_may_be_anything(opened, odd):
    with (
        ReplayServer(tables=[TableConfig(name="pool")], port=0) as server,
        ReplayClient(server.address, name="gen-a") as client,
        serving(Settings({"address": server.address})) as url,
    ):
        client.describe({"part": '"generator"', "sessions": json.dumps({"open": 1} | odd)})
        tab = opened(url).go("overview")
        tab.wait_for_selector(".sessions tbody tr")
        cells = tab.eval_on_selector_all(".sessions tbody tr > *", "all => all.map(each => each.innerText)")
        assert cells == ["gen-a", "1", "–", "–", "–", "–", "none"]


def test_sessions_of_agents_are_shown_with_whom_they_wait_for_and_what_was_refused(opened):
    told = {"open": 8, "nobody": 2, "policy": 1, "agent": 5, "silent": 130, "refused": {"401": 3}, "reason": "no token"}
    with (
        ReplayServer(tables=[TableConfig(name="pool")], port=0) as server,
        ReplayClient(server.address, name="gen-a") as client,
        ReplayClient(server.address, name="gen-b") as other,
        serving(Settings({"address": server.address})) as url,
    ):
        client.describe({"part": '"generator"', "sessions": json.dumps(told)})
        other.describe({"part": '"generator"', "sessions": '"nonsense"'})
        tab = opened(url).go("overview")
        tab.wait_for_selector(".sessions tbody tr")
        cells = "all => all.map(each => each.innerText)"
        row = tab.eval_on_selector_all(".sessions tbody tr > *", cells)
        assert row == ["gen-a", "8", "2", "1", "5", "2 min 10 s", "3 × 401"]
        check_accessibility(tab)


@pytest.mark.parametrize("rest", ["", '{"step": 1'])
def test_a_file_that_became_shorter_is_a_new_version(tmp_path, rest):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')
    runs = Runs(tmp_path)
    runs.read()
    version = runs.version
    file.write_text(rest)
    runs.read()
    assert runs.document([])["runs"][0]["steps"] == 0
    assert runs.version > version
