"""What the page is told, and to whom: requests to the application, without a browser."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode, urlsplit

import ml_dtypes
import numpy as np
import pytest

from replay_client import AsyncReplayClient, ReplayClient, group_from_rows
from replay_client.testing import make_group
from replay_dashboard import app as dashboard_app
from replay_dashboard import live
from replay_dashboard.app import Settings
from replay_server import ReplayServer, TableConfig
from tests.dashboard.conftest import serving, until
from tests.dashboard.load import make_tokenizer
from tests.kit.groups import make_sequences


def answer_of(url: str, path: str, method: str = "GET", body: str = "", **headers: str) -> tuple[int, dict, Any]:
    """Status, headers and body of an answer; JSON is read."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    data = response.read()
    kind = response.headers.get("content-type", "")
    connection.close()
    return response.status, dict(response.headers.items()), json.loads(data) if "json" in kind else data


def asked(url: str, path: str) -> Any:
    status, _, found = answer_of(url, path)
    assert status == 200, found
    return found


def looks_of(url: str, **headers: str) -> Iterator[dict]:
    """What the stream of a viewer tells, for ever."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("GET", "/api/live", headers=headers)
    response, event = connection.getresponse(), ""
    try:
        while line := response.readline().decode().strip() or response.readline().decode().strip():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif event == "look":
                yield json.loads(line.removeprefix("data: "))
    finally:
        response.close()
        connection.close()


@pytest.fixture
def pool():
    with ReplayServer(tables=[TableConfig(name="pool")], port=0) as server, ReplayClient(server.address) as client:
        yield client


@pytest.fixture
def url(pool):
    with serving(Settings({"address": pool.address})) as url:
        yield url


# ------------------------------------------------------------------------------------------------ who may look


def test_every_answer_forbids_foreign_code_and_frames(url):
    for path in ("/", "/main.js", "/uplot/uPlot.js", "/api/groups?table=pool", "/api/nothing", "/../app.py"):
        _, headers, _ = answer_of(url, path)
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[("evil.example", 403), ("localhost.evil.example:80", 403), ("127.0.0.1.evil.example", 403), ("", 403)],
        *[("localhost:7402", 200), ("127.0.0.1", 200), ("[::1]:7402", 200), (socket.gethostname(), 200)],
    ],
)
def test_only_its_own_names_reach_the_page(url, host, status):
    for path in ("/", "/api/groups?table=pool"):
        assert answer_of(url, path, Host=host)[0] == status


def test_a_name_that_was_allowed_reaches_the_page(pool):
    with serving(Settings({"address": pool.address}, allow_hosts=("Replay.Example",))) as url:
        assert answer_of(url, "/api/prompts", Host="replay.example:80")[0] == 200


def test_pages_of_other_sites_may_not_ask(url):
    assert answer_of(url, "/api/groups?table=pool", Sec_Fetch_Site="cross-site")[0] == 403
    assert answer_of(url, "/api/groups?table=pool", Sec_Fetch_Site="same-site")[0] == 403
    assert answer_of(url, "/api/groups?table=pool", Sec_Fetch_Site="same-origin")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_but_reading_is_allowed(url, method):
    assert answer_of(url, "/api/groups?table=pool", method)[0] == 405


def test_with_a_token_nothing_of_the_server_is_told_without_it(pool):
    with serving(Settings({"address": pool.address}, token="s3cret")) as url:
        assert answer_of(url, "/")[0] == 200  # the page itself holds no secret
        for path in ("live", "groups?table=pool", "groups/1", "groups/1/tokens", "training", "prompts"):
            assert answer_of(url, f"/api/{path}")[0] == 401
            assert answer_of(url, f"/api/{path}", Cookie="replay_dashboard=wrong")[0] == 401
        for body in ('{"token": "wrong"}', "{}", "[", '{"token": null}', '"s3cret"'):
            status, headers, _ = answer_of(url, "/api/login", "POST", body)
            assert status == 401
            assert "set-cookie" not in headers
        status, headers, _ = answer_of(url, "/api/login", "POST", '{"token": "s3cret"}')
        cookie = headers["set-cookie"]
        assert status == 204
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert answer_of(url, "/api/prompts", Cookie=cookie.partition(";")[0])[0] == 200


# ------------------------------------------------------------------------------------------------ what is told


def test_ten_viewers_cost_the_server_no_more_than_one(pool, url, monkeypatch):
    asked_at = []

    async def server_info(client, **given):
        asked_at.append(given)
        return await original(client, **given)

    original = AsyncReplayClient.server_info
    monkeypatch.setattr(AsyncReplayClient, "server_info", server_info)
    viewers = [looks_of(url) for _ in range(10)]
    begin = min(next(viewer)["point"]["t"] for viewer in viewers)
    for _ in range(4):
        last = next(viewers[0])["point"]["t"]
    asked = len(asked_at)  # now: while others read what was sent to them, the page goes on asking
    assert 3 <= asked <= round(last - begin) + 2  # one a second, whoever looks
    for viewer in viewers[1:]:
        for _ in range(4):
            assert next(viewer)["point"]["t"] >= begin
    for viewer in viewers:
        viewer.close()


def test_more_viewers_than_allowed_are_told_so(url, monkeypatch):
    monkeypatch.setattr(dashboard_app, "MOST_VIEWERS", 2)
    viewers = [looks_of(url) for _ in range(2)]
    for viewer in viewers:
        next(viewer)
    status, _, found = answer_of(url, "/api/live")
    assert status == 503
    assert "2 viewers" in found["problem"]
    for viewer in viewers:
        viewer.close()
    until(lambda: answer_is_a_stream(url))


def answer_is_a_stream(url: str) -> bool:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("GET", "/api/live")
    status = connection.getresponse().status
    connection.close()
    return status == 200


def test_lists_filter_sort_and_count(pool, url):
    for number in range(40):
        group = make_group(rewards=[number / 40, 0.0, 0.0], prompt_id=f"prompt-{number}", finish_reasons=["stop"] * 3)
        pool.insert(group, {"pool": float(number)})
    flat = pool.insert(make_group(rewards=[1.0, 1.0, 1.0], finish_reasons=["length"] * 3), {"pool": 99.0})
    raw = pool.insert(b"raw", {"pool": 0.5})
    until(lambda: asked(url, "/api/groups?table=pool")["read"] == 42)

    def keys(query: str) -> list[str]:
        return [row["key"] for row in asked(url, f"/api/groups?table=pool&{query}")["rows"]]

    by_reward = asked(url, "/api/groups?table=pool&sort=reward_mean&descending=1&limit=3")
    assert [row["reward_mean"] for row in by_reward["rows"]] == pytest.approx([1.0, 39 / 120, 38 / 120])
    assert by_reward["matching"] == 42
    assert by_reward["total"] == 42
    assert keys("sort=reward_mean&descending=1&offset=41") == [str(raw)]  # what has no reward comes last
    assert len(keys("bound=priority:10:19")) == 10
    assert len(keys("bound=priority:10:19&bound=reward_mean:0.1:1")) == 8
    assert keys("flag=no+variance&flag=all+cut+off") == [str(flat)]
    assert keys("flag=raw+bytes") == [str(raw)]
    assert len(keys("flag=ended+by+stop")) == 40
    assert len(keys("prompt=PROMPT-3")) == 11
    assert keys("flag=nothing+has+this") == []
    histogram = asked(url, "/api/groups?table=pool&bound=priority:10:19")["histograms"]["priority"]
    assert sum(histogram["all"]) == 42
    assert sum(histogram["matching"]) == 10
    assert asked(url, "/api/groups?table=nothing")["rows"] == []


def test_a_list_is_filtered_by_tags_as_the_command_line_does_and_counts_their_values(pool, url):
    tags = [{"environment": "math", "level": 3}, {"environment": "math", "level": 1}, {"environment": "c=d"}, {}]
    keys = [str(pool.insert(b"x", {"pool": 1.0}, tags=each)) for each in tags]

    def found(*wanted: str) -> set[int]:
        query = urlencode([("table", "pool"), *(("tag", each) for each in wanted)])
        return {keys.index(row["key"]) for row in asked(url, f"/api/groups?{query}")["rows"]}

    until(lambda: found() == {0, 1, 2, 3})
    assert found("environment=math") == {0, 1}
    assert found("environment=math", "level=3") == {0}
    assert found("environment=c=d") == {2}
    assert found("level=") == {2, 3}
    assert found("environment=mat") == set()
    assert found("environment=math", "environment=c=d") == set()
    for wanted in ("environment=math", "level="):
        assert len(found(wanted)) == pool.list_items("pool", tags=dict([wanted.split("=", 1)])).matching
    listed = asked(url, "/api/groups?table=pool&tag=level%3D3")["tags"]
    assert listed == [
        {"name": "environment", "values": [["environment=math", 2], ["environment=c=d", 1]], "others": 0},
        {"name": "level", "values": [["level=1", 1], ["level=3", 1]], "others": 0},
    ]


def test_only_the_most_frequent_values_of_a_tag_are_counted(pool, url):
    for number in range(30):
        pool.insert(b"x", {"pool": 1.0}, tags={"prompt_id": f"p{min(number, 26):02}"})
    until(lambda: asked(url, "/api/groups?table=pool")["total"] == 30)
    ((counted),) = asked(url, "/api/groups?table=pool")["tags"]
    assert counted["values"][0] == ["prompt_id=p26", 4]
    assert len(counted["values"]) == 12
    assert counted["others"] == 15


@pytest.mark.parametrize(
    "query",
    [
        *("tag=math", "tag==math", "sort=nothing", "offset=x", "snapshot=x"),
        *("bound=priority", "bound=nothing:0:1", "bound=priority:a:b"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_a_reason(url, query):
    status, _, found = answer_of(url, f"/api/groups?table=pool&{query}")
    assert status == 400
    assert found["problem"]


def test_a_held_snapshot_keeps_what_has_left_the_table(pool, url):
    keys = [pool.insert(make_group(), {"pool": 1.0}) for _ in range(5)]
    held = until(lambda: (found := asked(url, "/api/groups?table=pool"))["total"] == 5 and found["snapshot"])
    pool.delete("pool", keys[:3])
    until(lambda: asked(url, "/api/groups?table=pool")["total"] == 2)
    assert asked(url, f"/api/groups?table=pool&snapshot={held}")["total"] == 5


def test_a_group_that_left_the_server_can_still_be_seen_by_whom_looked_at_it(pool, url):
    key = pool.insert(make_group(), {"pool": 3.0})
    assert asked(url, f"/api/groups/{key}")["tables"]["pool"]["priority"] == 3.0
    pool.delete("pool", [key])
    assert asked(url, f"/api/groups/{key}")["tables"] == {}
    status, _, found = answer_of(url, "/api/groups/12345")
    assert status == 404
    assert "no such group" in found["problem"]


def test_windows_of_tokens_together_are_the_completion(pool, tmp_path):
    text = "Größe: 学习 🙂 <b>12 + 30</b> = 42. " * 40
    tokenizer = make_tokenizer(tmp_path)
    ids = tokenizer.encode(text).ids
    group = make_group(lengths=[len(ids), 2], rewards=[1.0, 0.0], loss_mask=[True] * len(ids) + [False, True])
    group.completion_ids = np.array([*ids, 5, 999_999], dtype=np.int32)
    key = pool.insert(group, {"pool": 1.0})
    with serving(Settings({"address": pool.address}, tokenizer=tmp_path)) as url:
        pieces, logprobs = [], []
        for start in range(0, len(ids), 37):
            window = asked(url, f"/api/groups/{key}/tokens?completion=0&start={start}&stop={start + 37}")
            assert window["total"] == len(ids)
            pieces += window["text"]
            logprobs += window["arrays"]["logprob"]
        assert "".join(pieces) == text
        assert logprobs == pytest.approx(group.rollout_logprobs[: len(ids)].tolist())
        last = asked(url, f"/api/groups/{key}/tokens?completion=1&start=0&stop=9")
        assert last["text"][1] == "⟨999999⟩"  # no token of this tokenizer
        assert last["arrays"]["mask"] == [False, True]
        assert answer_of(url, f"/api/groups/{key}/tokens?completion=7")[0] == 400
        whole = asked(url, f"/api/groups/{key}?whole=1")["group"]["completions"][0]["window"]
        assert whole["ids"] == ids
        assert whole["text"] == text


def test_the_context_of_a_completion_is_masked_and_not_counted_as_written_by_the_policy(pool, url):
    group = group_from_rows(
        prompts=[[3, 4], [3, 4, 5, 6]],
        completions=[[7, 8], [7, 8]],
        logprobs=[[-1.0, np.nan], [-2.0, -2.0]],
        rewards=[1, 0],
        advantages=[1, -1],
    )
    found = asked(url, f"/api/groups/{pool.insert(group, {'pool': 1.0})}")["group"]
    first, last = found["completions"]
    names = ("tokens", "context_tokens", "unknown_logprobs", "masked_tokens")
    assert [[each[name] for name in names] for each in (first, last)] == [[2, 0, 1, 0], [2, 2, 0, 0]]
    assert found["masked"]
    assert last["window"]["ids"] == [5, 6, 7, 8]
    assert last["window"]["arrays"]["mask"] == [False, False, True, True]
    until(lambda: asked(url, "/api/groups?table=pool")["read"] == 1)
    (row,) = asked(url, "/api/groups?table=pool&flag=identical+answers")["rows"]
    assert row["length_mean"] == 2


def test_what_a_tool_wrote_is_masked_and_lacks_no_log_probability(pool, url):
    group = make_group(lengths=(3, 1), logprobs=(-1.0, np.nan, np.nan, -1.0), loss_mask=(True, False, True, True))
    (first, _) = asked(url, f"/api/groups/{pool.insert(group, {'pool': 1.0})}")["group"]["completions"]
    assert first["unknown_logprobs"] == 1
    assert first["masked_tokens"] == 1


def test_each_sequence_of_a_rollout_is_shown_with_the_reward_of_its_rollout_which_counts_once(pool, url):
    group = make_sequences(token_advantages=[0.5, 0, 0, 0, 2, 2], loss_mask=[True] * 5 + [False])
    found = asked(url, f"/api/groups/{pool.insert(group, {'pool': 1.0})}")["group"]
    names = ("index", "rollout", "part", "parts", "reward", "finish_reason")
    names += ("tokens", "context_tokens", "masked_tokens")
    assert [[each[name] for name in names] for each in found["completions"]] == [
        [0, 0, 0, 2, 1.0, "stop", 1, 0, 0],
        [1, 0, 1, 2, 1.0, "stop", 2, 0, 0],
        [2, 1, 0, 1, 0.0, "length", 2, 1, 1],
    ]
    assert found["rewards"] == [1.0, 0.0]
    assert found["completions"][2]["window"]["arrays"]["token_advantages"] == [0, 2, 2]
    row = until(lambda: next((r for r in asked(url, "/api/groups?table=pool")["rows"] if r["read"]), None))
    assert row["completions"] == 2
    assert row["reward_mean"] == 0.5
    assert row["length_mean"] == 2.5
    assert row["notes"] == []


def test_turns_of_many_parts_are_bounded_and_the_whole_group_has_them_all(pool, url):
    group = make_group(lengths=(1000, 3), loss_mask=[token % 2 == 0 for token in range(1003)])
    told = [[["prompt", 2], ["assistant", 3]], [["prompt", 2], ["tool", 3]]]
    other = make_group(lengths=(3, 3), loss_mask=[True] * 3 + [False] * 3, meta={"turns": told, "a": 1})
    keys = [pool.insert(each, {"pool": 1.0}) for each in (group, other)]
    first = asked(url, f"/api/groups/{keys[0]}")["group"]["completions"][0]
    assert len(first["turns"]) == 256
    assert first["turn_count"] == 1000
    assert first["turns"][-1] == {"role": None, "start": 255, "stop": 256, "trained": 0}
    assert len(asked(url, f"/api/groups/{keys[0]}?whole=1")["group"]["completions"][0]["turns"]) == 1000
    second = asked(url, f"/api/groups/{keys[1]}")["group"]
    assert second["meta"] == {"a": 1}  # the roles are in the turns
    assert [each["turns"] for each in second["completions"]] == [
        [{"role": "assistant", "start": 0, "stop": 3, "trained": 3}],
        [{"role": "tool", "start": 0, "stop": 3, "trained": 0}],
    ]
    assert asked(url, f"/api/groups/{keys[1]}?whole=1")["group"]["meta"]["turns"] == told


def test_extras_are_cut_by_their_axis_and_never_by_their_shape(pool, url):
    group = make_sequences(
        extras={
            "reference_logprob": np.linspace(-6, -1, 6).astype(ml_dtypes.bfloat16),
            "entropy": np.arange(8, dtype=np.float16),
            "experts": np.zeros((8, 4, 2), np.uint8),
            "like_tokens": np.arange(6),
            "image": np.ones((2, 2), ml_dtypes.bfloat16),
        },
        axes={"reference_logprob": "token", "entropy": "whole", "experts": "whole"},
    )
    key = pool.insert(group, {"pool": 1.0})
    found = asked(url, f"/api/groups/{key}")["group"]
    assert found["per_token"] == ["reference_logprob", "entropy"]
    assert [[each[name] for name in ("name", "dtype", "shape", "axis")] for each in found["extras"]] == [
        ["reference_logprob", "bfloat16", [6], "token"],
        ["entropy", "float16", [8], "whole"],
        ["experts", "uint8", [8, 4, 2], "whole"],
        ["like_tokens", "int64", [6], "group"],
        ["image", "bfloat16", [2, 2], "group"],
    ]
    assert found["extras"][-1]["head"] == [1, 1, 1, 1]
    assert found["prompt"]["arrays"] == {"entropy": [0, 1]}
    arrays = asked(url, f"/api/groups/{key}/tokens?completion=1&start=1&stop=9")["arrays"]
    assert arrays == {"logprob": [-1], "mask": [True], "reference_logprob": [-4], "entropy": [4]}


def test_the_tokenizer_of_the_published_weights_is_found(pool, url, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "weights")
    pool.insert(make_group(prompt=tokenizer.encode("Ada has 3 apples").ids), {"pool": 1.0})
    until(lambda: asked(url, "/api/groups?table=pool")["read"] == 1)
    assert asked(url, "/api/groups?table=pool")["rows"][0]["prompt"] == ""
    pool.set_policy_version(1, str(tmp_path / "weights"))
    row = until(lambda: next((r for r in asked(url, "/api/groups?table=pool")["rows"] if r.get("prompt")), None))
    assert row["prompt"] == "Ada has 3 apples"
    assert asked(url, "/api/groups?table=pool&text=ADA+HAS")["matching"] == 1
    assert asked(url, "/api/prompts")["rows"][0]["groups"] == 1  # read twice, counted once


def test_numbers_that_json_does_not_have_are_null(pool, url):
    group = make_group(meta={"bytes": b"\x00\xff", "nan": float("nan")})
    group.rollout_logprobs[:] = np.nan
    key = pool.insert(group, {"pool": 1.0})
    found = asked(url, f"/api/groups/{key}")["group"]
    assert found["meta"] == {"bytes": "00ff", "nan": None}
    assert found["completions"][0]["mean_logprob"] is None
    row = until(lambda: next((r for r in asked(url, "/api/groups?table=pool")["rows"] if r["read"]), None))
    assert row["logprob_mean"] is None
    assert row["notes"] == ["no log-probs"]


def test_a_slow_viewer_gets_the_newest_look_and_holds_up_nobody(pool, url, monkeypatch):
    monkeypatch.setattr(live, "SECONDS_PER_LOOK", 0.01)
    slow, quick = looks_of(url), looks_of(url)
    next(slow)
    times = [next(quick)["time"] for _ in range(5)]
    assert times == sorted(set(times))
    slow.close()
    quick.close()
