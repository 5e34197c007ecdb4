"""Rollouts of several turns and sequences in a browser: who wrote what, what is trained on, and tags as filters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from replay_client import ReplayClient, RolloutGroup, group_from_rows
from replay_client.testing import make_group
from replay_dashboard import app
from replay_dashboard.app import Settings
from replay_server import ReplayServer, TableConfig
from tests.dashboard.conftest import LAPTOP, PHONE, serving, until
from tests.dashboard.load import HOSTILE, make_tokenizer
from tests.dashboard.test_page import check_accessibility

PROMPT = "Ada has 31 apples and gets 47 more."
CALL, ANSWER, SAID = "Let me add them. 31 + 47", "78", "So the answer is 78."
BRIEF = "First the tens, then the ones."


def make_agents(tokenizer: Any, *, told: bool = True, role: str = "tool", **fields: Any) -> RolloutGroup:
    """Two rollouts: one calls a tool and starts a second agent, whose context is its own; one answers at once."""
    agent = [("assistant", CALL), (role, ANSWER), ("assistant", SAID)]
    played = [("", agent), (BRIEF, [("assistant", SAID)]), ("", [("assistant", SAID)])]

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    wrote = [[who == "assistant" for who, text in parts for _ in ids(text)] for _, parts in played]
    heads = [["prompt", len(ids(PROMPT)) + len(ids(context))] for context, _ in played]
    turns = [
        [head, *([who, len(ids(text))] for who, text in parts)] for head, (_, parts) in zip(heads, played, strict=True)
    ]
    return group_from_rows(
        prompts=[ids(PROMPT) + ids(context) for context, _ in played],
        completions=[[token for _, text in parts for token in ids(text)] for _, parts in played],
        logprobs=[np.where(mask, -0.5, np.nan) for mask in wrote],
        loss_masks=wrote,
        sequence_counts=[2, 1],
        **{
            "rewards": [1.0, 0.0],
            "advantages": [0.7, -0.7],
            "finish_reasons": ["stop", "length"],
            "meta": {"turns": turns} if told else {},
            **fields,
        },
    )


@contextmanager
def page_of(folder: Any) -> Iterator[tuple[ReplayClient, str, Any]]:
    """A client of a server, a page that shows it, and the page's tokenizer."""
    tokenizer = make_tokenizer(folder)
    tables = [TableConfig(name="pool"), TableConfig(name="other")]
    with (
        pytest.MonkeyPatch.context() as patched,
        ReplayServer(tables=tables, port=0) as server,
        ReplayClient(server.address) as client,
    ):
        patched.setattr(app, "READING", 0.5)  # the tests do not wait for the budget
        with serving(Settings({"address": server.address}, folder)) as url:
            yield client, url, tokenizer


def texts(tab: Any, selector: str) -> list[str]:
    """The texts of elements. What the browser has not drawn yet (content-visibility) has none, so this waits for it."""
    found: list[str] = []

    def are_drawn() -> bool:
        found[:] = [" ".join(text.split()) for text in tab.locator(selector).all_inner_texts()]
        return all(found)

    until(are_drawn)
    return found


def choose(tab: Any, colour: str) -> None:
    tab.select_option("label:has-text('Colour') select", label=colour)


@pytest.mark.parametrize(("viewport", "stacked"), [(LAPTOP, False), (PHONE, True)], ids=["laptop", "phone"])
def test_a_rollout_shows_its_turns_and_its_sequences_side_by_side_where_they_fit(opened, tmp_path, viewport, stacked):
    with page_of(tmp_path) as (client, url, tokenizer):
        tab = opened(url, viewport=viewport).go(f"group/{client.insert(make_agents(tokenizer), {'pool': 1.0})}")
        tab.wait_for_selector(".turn .t")
        size = len(tokenizer.encode(CALL).ids)
        assert texts(tab, "[data-row='0'] .turn") == [
            f"assistant {size} tokens · trained on · log-prob -0.50 {CALL}",
            f"tool {len(tokenizer.encode(ANSWER).ids)} tokens · not trained on {ANSWER}",
            f"assistant {len(tokenizer.encode(SAID).ids)} tokens · trained on · log-prob -0.50 {SAID}",
        ]
        assert texts(tab, "[data-row='1'] .turn")[0].endswith(f"not trained on {BRIEF}")
        assert tab.locator("[data-row='1'] .off").count() == len(tokenizer.encode(BRIEF).ids)
        both, one = tokens_of(tokenizer, CALL, ANSWER, SAID, SAID), tokens_of(tokenizer, SAID)
        assert texts(tab, ".rollout > h2") == [
            f"Rollout 0 reward 1 advantage +0.70 2 sequences · {both} tokens · ended by stop",
            f"Rollout 1 reward 0 advantage -0.70 1 sequence · {one} tokens · ended by length",
        ]
        assert "turns" not in tab.inner_text(".about")
        boxes = [tab.locator(f"[data-row='{row}']").bounding_box() for row in (0, 1)]
        assert (boxes[0]["x"] == boxes[1]["x"]) == stacked
        assert (boxes[0]["y"] == boxes[1]["y"]) == (not stacked)
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        tab.hover("[data-row='0'] .turn.tool .t >> nth=0")
        tab.wait_for_selector(".inspector >> text=tool")
        assert "not trained on" in tab.inner_text(".inspector")
        check_accessibility(tab)


def tokens_of(tokenizer: Any, *parts: str) -> int:
    return sum(len(tokenizer.encode(part).ids) for part in parts)


def test_the_mask_and_the_advantages_of_tokens_are_colours_of_what_is_trained_on_alone(opened, tmp_path):
    with page_of(tmp_path) as (client, url, tokenizer):
        group = make_agents(tokenizer)
        group.token_advantages = np.where(group.trained_mask, -0.25, 0).astype(np.float32)
        spans = group.sampled_spans()
        group.token_advantages[spans[0]] *= -2
        tab = opened(url).go(f"group/{client.insert(group, {'pool': 1.0})}")
        tab.wait_for_selector(".turn .t")
        assert "advantage +0.50" in texts(tab, "[data-row='0'] .turn")[0]
        choose(tab, "mask")
        tab.wait_for_selector(".scale >> text=not trained on")
        trained, masked = int(group.trained_mask.sum()), int((~group.trained_mask).sum())
        assert tab.locator(".completion .t.on").count() == trained
        assert tab.locator(".completion .t.off").count() == masked
        choose(tab, "token advantage")
        tab.wait_for_selector(".scale >> text=encouraged")
        trained_in_first = int(group.trained_mask[spans[0]].sum())
        assert tab.locator("[data-row='0'] .t.r7").count() == trained_in_first, "+0.5 is the end of the scale"
        in_second = spans[1].stop - spans[1].start
        assert tab.locator("[data-row='1'] .t.r2").count() == in_second, "-0.25 is a quarter: the scale is around 0"
        assert tab.locator(".completion .t.off").count() == masked
        check_accessibility(tab)


def test_without_roles_the_parts_of_the_mask_are_shown(opened, tmp_path):
    with page_of(tmp_path) as (client, url, tokenizer):
        group = make_agents(tokenizer, told=False)
        plain = client.insert(make_group(), {"pool": 1.0})
        tab = opened(url).go(f"group/{client.insert(group, {'pool': 1.0})}")
        tab.wait_for_selector(".turn .t")
        kinds = [each.split(" · ")[1].split(" ")[0] for each in texts(tab, "[data-row='0'] .turn")]
        assert kinds == ["trained", "not", "trained"]
        assert texts(tab, ".turn .who b") == ["own context"]
        tab.evaluate("key => location.hash = `#/group/${key}`", str(plain))
        tab.wait_for_selector(f"h1 >> text={plain}")
        tab.wait_for_selector(".completion .t")
        assert tab.locator(".turn, .rollout, .strip-of-turns").count() == 0


def test_hostile_roles_and_tags_stay_text(opened, tmp_path):
    with page_of(tmp_path) as (client, url, tokenizer):
        tags = {HOSTILE[2][:60]: HOSTILE[0], "bidi": HOSTILE[3]}
        key = client.insert(make_agents(tokenizer, role=HOSTILE[2]), {"pool": 1.0}, tags=tags)
        tab = opened(url).go(f"group/{key}")
        tab.wait_for_selector(f".who b >> text={HOSTILE[2]}")
        tab.wait_for_selector(f".chip >> text={HOSTILE[0]}")
        tab.wait_for_selector(".chip >> text=⟨U+202E⟩esrever⟨U+202C⟩")
        tab.click(f".chip >> text={HOSTILE[0]}")
        tab.wait_for_selector(f".groups .chip.on >> text={HOSTILE[0]}")
        tab.wait_for_selector(".count >> text=1 of 1 group")
        assert tab.locator("main img, main script, main h1 >> text=owned").count() == 0
        assert tab.title() == "groups · replay"
        check_accessibility(tab)


def test_tags_filter_the_list_from_its_side_from_a_row_and_from_a_group(opened, tmp_path):
    with page_of(tmp_path) as (client, url, _):
        for number in range(6):
            tags = {"environment": "math" if number % 2 else "code", "level": number // 2}
            client.insert(make_group(prompt_id=f"p{number}"), {"pool": 1.0}, tags=tags)
        last = client.insert(make_group(prompt_id="p6"), {"other": 1.0}, tags={"environment": "math"})
        tab = opened(url).go("groups/pool")

        def shown() -> list[str]:
            return sorted(texts(tab, ".space .row:not(.blank) .prompt b"))

        until(lambda: len(shown()) == 6)
        tab.click(".filters .chip >> text=math")
        until(lambda: shown() == ["p1", "p3", "p5"])
        tab.wait_for_selector(".count >> text=3 of 6 groups")
        tab.click(".chip[title='level=2']")
        until(lambda: shown() == ["p5"])
        tab.click(".filters .chip >> text=code")  # the other value of the tag
        until(lambda: shown() == ["p4"])
        tab.click("text=Clear filters")
        until(lambda: len(shown()) == 6)
        assert tab.locator(".note.tag >> text=level=0").count() == 2  # a number has its name beside it
        tab.click(".space .row:not(.blank) .note.tag:has-text('code') >> nth=0")
        until(lambda: shown() == ["p0", "p2", "p4"])
        assert tab.evaluate("location.hash") == "#/groups/pool"  # a click on a tag opens no group
        check_accessibility(tab)
        tab.evaluate("key => location.hash = `#/group/${key}`", str(last))
        tab.click(".about .chip >> text=math")
        until(lambda: shown() == ["p6"])
        assert tab.inner_text(".tabs [aria-current]").startswith("other")
