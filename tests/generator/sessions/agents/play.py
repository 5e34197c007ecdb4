"""Plays a client against the address of real rollouts, and compares every trained token with what the engine drew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from replay_generator import GeneratorConfig
from replay_generator.engines import SamplingConfig
from replay_generator.rollouts.sessions import load_sessions
from tests.generator.sessions.agents.catalog import Client
from tests.generator.sessions.test_session import Drawing
from tests.kit.clients import RecordingClient
from tests.kit.engines import assert_drawn
from tests.kit.generators import generate
from tests.kit.models import make_chat_tokenizer, shipped_template

ROLLOUTS = 2
PROTOCOLS = {
    "/chat/completions": "chat",
    "/completions": "completions",
    "/responses": "responses",
    "/messages": "messages",
}
"""By the end of a path; the first decides."""
TEMPLATE = "qwen3_5_nothink_training"
"""Of TRL. Like those of many newer models it refuses messages of the system in the middle."""
NOBODY = "http://127.0.0.1:9"
"""A proxy that is not there: a client that asks anybody but the address of its rollout gets no answer."""


@dataclass
class Replying(Drawing):
    """Draws what `reply` says to the text that it read."""

    reply: Callable[[str], str] = field(kw_only=True)

    def text_of(self, prompt_ids: list[int]) -> str:
        return self.reply(self.tokenizer.decode(prompt_ids))


async def observe(
    client: Client, untrained_models: Sequence[str] = (), is_left_out: Callable[[str], bool] = lambda read: False
) -> dict[str, Any]:
    """What a client did in each of several rollouts: a row of the table. Fails if a trained token is another one than
    the engine drew, and if the client did not end its task.

    `untrained_models`: of GeneratorConfig. `is_left_out`: whether what the policy read then is of one of them.
    """
    tokenizer = make_chat_tokenizer(shipped_template(TEMPLATE))
    engine = Replying(reply=client.policy, max_length=1_000_000, tokenizer=tokenizer)
    recording = RecordingClient()
    settings = {
        "group_size": ROLLOUTS,
        "max_groups": 1,
        "sampling": SamplingConfig(max_tokens=400),
        "tool_parser": "hermes",
        "rollout_timeout": 300.0,
        "untrained_models": tuple(untrained_models),
    }
    hook: Any = load_sessions(client.command, None, GeneratorConfig(**settings), needs_reward=True)
    protocols: Counter[str] = Counter()

    @web.middleware
    async def watch(request: web.Request, handler: Any) -> Any:
        answer = await handler(request)
        path = request.path.rstrip("/")
        ends = [end for end in PROTOCOLS if path.endswith(end)]
        if request.method == "POST" and ends and answer.status == 200:
            streams = answer.content_type == "text/event-stream"
            protocols[f"{PROTOCOLS[ends[0]]}{', streamed' if streams else ''}"] += 1
        return answer

    hook.app.middlewares.append(watch)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            patch.setenv(name, NOBODY)
        row = {"prompt": client.asks, "answer": "twenty-five"}
        await generate(recording, engine, hook, reward=None, prompts=[row], **settings)
    ((group, _),) = recording.inserts
    assert group.rewards.tolist() == [1.0] * ROLLOUTS
    turns = len(engine.drawn)
    trained = [each for each in engine.drawn if not is_left_out(tokenizer.decode(each[0]))]
    engine.drawn = trained
    if client.cuts_ends:  # before the token with which the policy ended its turn
        engine.drawn = [(before, each.cut(len(each.token_ids) - 1, each.text)) for before, each in engine.drawn]
    assert_drawn([group], engine)
    sequences = ROLLOUTS if group.sequence_counts is None else int(group.sequence_counts.sum())
    refused = int(group.extras["rewards/rollout/refusals"].sum())
    assert protocols.total() == turns
    return {
        "client": client.name,
        "package": client.package,
        "version": client.packages.installed(client.package),
        "protocol": "; ".join(sorted(protocols)),
        "turns": _each(turns),
        "sequences": _each(sequences),
        "refused": _each(refused),
    }


def _each(count: int) -> int:
    """Of each rollout: all do the same."""
    assert count % ROLLOUTS == 0
    return count // ROLLOUTS
