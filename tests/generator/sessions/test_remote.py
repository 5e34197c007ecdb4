"""Agents that run elsewhere: they come for rollouts with a token, play, and say how each ended."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from tokenizers import processors

from replay_client import AsyncReplayClient
from replay_client.testing import async_until
from replay_generator import GeneratorConfig, PromptError, RolloutGenerator
from replay_generator.rollouts.sessions import load_sessions, remote
from replay_generator.rollouts.sessions.agents import SessionHook
from replay_server import AdmissionConfig, ReplayServer, TableConfig
from tests.certificates import make_certificate
from tests.generator.sessions.test_session import Drawing, user
from tests.kit.clients import RecordingClient
from tests.kit.clocks import stopped_clock, turns
from tests.kit.generators import make_prompts
from tests.kit.processes import free_port

LONG = 600.0


@dataclass
class Run:
    """A generator whose agents are elsewhere, and what they say to it."""

    url: str
    http: aiohttp.ClientSession
    generator: RolloutGenerator
    hook: Any
    client: Any
    token: str | None
    tls: Any

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        """The status and the answer."""
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        url = path if path.startswith("http") else self.url + path
        async with self.http.post(url, json=body, headers=headers, ssl=self.tls) as response:
            return response.status, await (response.json() if "json" in response.content_type else response.text())

    async def taken(self) -> dict[str, Any]:
        status, offer = await self.post("/sessions")
        assert status == 200, offer
        return offer

    async def ask(self, offer: dict[str, Any]) -> int:
        body = {"model": "any", "messages": [user("ab")]}
        return (await self.post(f"{offer['openai_base_url']}/chat/completions", body))[0]

    async def end(self, offer: dict[str, Any], **said: Any) -> tuple[int, Any]:
        return await self.post(f"/sessions/{offer['id']}/end", said)

    async def group(self) -> Any:
        await self.client.inserted(1)
        return self.client.inserts[0][0]


@asynccontextmanager
async def running(
    *,
    engine: Drawing | None = None,
    group_size: int = 2,
    host: str = "127.0.0.1",
    token: str | None = None,
    tls: Any = True,
    client: Any = None,
    **config: Any,
) -> AsyncIterator[Run]:
    port = free_port()
    client = RecordingClient() if client is None else client
    given = {"group_size": group_size, "max_groups": 1, "max_concurrent_groups": 1, "stop_grace": 0.1, **config}
    settings = GeneratorConfig(**given)
    hook = load_sessions(None, f"{host}:{port}", settings, needs_reward=True)
    generator = RolloutGenerator(client, engine or Drawing(), make_prompts(), None, settings, rollout=hook)  # type: ignore[arg-type]
    run = asyncio.create_task(generator.run())
    url = f"http{'s' if tls is not True else ''}://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as http:
        found = Run(url, http, generator, hook, client, token, tls)
        await async_until(lambda: generator.stats["groups_in_flight"])
        try:
            yield found
        finally:
            generator.stop()
            await run


# ------------------------------------------------------------------------------------------------ a rollout


async def test_agents_take_the_rollouts_of_a_group_ask_at_their_addresses_and_end_them():
    engine = Drawing()
    async with running(engine=engine) as run:
        offers = [await run.taken(), await run.taken()]
        for reward, offer in enumerate(offers):
            assert offer["row"] == {"prompt": "0+1=", "prompt_id": "p0"}
            assert offer["prompt"] == "0+1="
            assert offer["deadline"] == LONG
            assert offer["address"] == f"{run.url}/sessions/{offer['id']}" == offer["anthropic_base_url"]
            assert offer["openai_base_url"] == f"{offer['address']}/v1"
            assert await run.ask(offer) == 200
            assert await run.end(offer, reward=reward, metrics={"steps": 4}) == (200, {"ended": offer["id"]})
        group = await run.group()
    assert len({offer["id"] for offer in offers}) == 2
    assert sorted(group.rewards.tolist()) == [0.0, 1.0]
    assert group.extras["rewards/rollout/steps"].tolist() == [4.0, 4.0]
    drawn = sorted(logprob for _, each in engine.drawn for logprob in each.logprobs)
    np.testing.assert_allclose(np.sort(group.rollout_logprobs[group.trained_mask]), drawn, rtol=1e-6)


async def test_the_prompt_of_an_offer_is_the_text_of_the_row_without_tokens_of_the_tokenizer():
    engine = Drawing()
    begins = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    engine.tokenizer.backend_tokenizer.post_processor = begins
    assert engine.tokenizer.decode(engine.tokenizer.encode("0+1=")).startswith("<s>")
    async with running(engine=engine, group_size=1) as run:
        offer = await run.taken()
        assert offer["prompt"] == "0+1="
        await run.ask(offer)
        await run.end(offer, reward=1.0)
        await run.group()


async def test_where_no_rollout_waits_a_client_is_told_to_come_again(monkeypatch):
    monkeypatch.setattr(remote, "PATIENCE", 0.05)
    async with running(group_size=1) as run:
        offer = await run.taken()
        async with run.http.post(f"{run.url}/sessions") as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
        assert await run.ask(offer) == 200


async def test_a_client_that_hangs_up_while_it_waits_gets_no_rollout():
    async with running(group_size=1, max_groups=2) as run:
        first = await run.taken()
        await run.ask(first)
        waiting = asyncio.create_task(run.post("/sessions"))
        await asyncio.sleep(0.2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await run.end(first, reward=1.0)  # the next group begins
        second = await run.taken()
        assert await run.ask(second) == 200
        assert (await run.end(second, reward=1.0))[0] == 200
        await run.client.inserted(2)


async def test_an_end_that_comes_again_has_the_same_answer_and_another_one_has_none():
    async with running() as run:
        offer = await run.taken()
        await run.ask(offer)
        first = await run.end(offer, reward=1.0)
        assert await run.end(offer, reward=1.0) == first
        assert (await run.end(offer, reward=0.0))[0] == 404
        assert await run.ask(offer) == 404
        other = await run.taken()
        await run.ask(other)
        await run.end(other, reward=0.0)
        assert await run.end(offer, reward=1.0) == first
        assert sorted((await run.group()).rewards.tolist()) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, 'gave no {"reward": NUMBER}'),
        ({"reward": 1.0, "metrics": {"steps": None}}, "metrics.steps must be a number"),
        ({"rewards": 1.0}, "did you mean 'reward'?"),
        ("it failed", "an end is an object"),
    ],
)
async def test_an_end_that_is_none_is_refused_and_the_rollout_goes_on(said, why):
    async with running(group_size=1) as run:
        offer = await run.taken()
        await run.ask(offer)
        status, text = await run.post(f"/sessions/{offer['id']}/end", said)
        assert status == 400
        assert why in text
        assert (await run.end(offer, reward=1.0))[0] == 200
        await run.group()


async def test_an_agent_that_failed_loses_its_rollout_and_the_group_remembers_why():
    async with running(group_size=3, min_rollouts=1) as run:
        for said in ({"failed": "its browser is gone"}, {"reward": 0.0}, {"reward": 1.0}):
            offer = await run.taken()
            if said != {"reward": 0.0}:
                await run.ask(offer)
            assert (await run.end(offer, **said))[0] == 200
        group = await run.group()
    assert group.rewards.tolist() == [1.0]
    silent, lost = sorted(group.meta["failures"])
    assert "the agent elsewhere failed: its browser is gone" in lost
    assert "the agent asked the policy for nothing" in silent
    assert run.generator.stats["rollouts_failed"] == 2


async def test_what_is_not_ended_before_its_deadline_is_offered_anew_under_another_address(caplog):
    async with running(group_size=1, session_timeout=0.5) as run:
        dead = await run.taken()
        assert await run.ask(dead) == 200
        again = await run.taken()
        assert again["row"] == dead["row"]
        assert again["deadline"] == 0.5
        assert again["id"] != dead["id"]
        assert (await run.end(dead, reward=9.0))[0] == 404
        assert await run.ask(dead) == 404
        assert await run.ask(again) == 200
        assert (await run.end(again, reward=1.0))[0] == 200
        group = await run.group()
    assert group.rewards.tolist() == [1.0]
    assert int(group.trained_mask.sum()) == 5
    assert "prompt 'p0': an agent elsewhere did not end rollout 0 in time" in caplog.text


DAY = 86_400.0


async def test_a_rollout_that_nobody_takes_waits_for_ever_and_that_is_said_once(caplog):
    async with running(group_size=2, rollout_timeout=10.0) as run:
        with stopped_clock() as go_on:
            for _ in range(20):
                go_on(DAY)
                await turns()
        assert run.generator.stats["groups_in_flight"] == 1
        assert run.generator.stats["rollouts_failed"] == 0
        for reward in (0.0, 1.0):
            offer = await run.taken()
            assert await run.ask(offer) == 200
            assert (await run.end(offer, reward=reward))[0] == 200
        group = await run.group()
    assert sorted(group.rewards.tolist()) == [0.0, 1.0]
    said = [record.getMessage() for record in caplog.records if "no agent has come to" in record.getMessage()]
    assert len(said) == 1
    assert f"start agents that POST to {run.url}/sessions" in said[0]


async def test_the_time_of_a_rollout_begins_when_an_agent_takes_it_and_then_it_fails_alone():
    async with running(group_size=2, min_rollouts=1, rollout_timeout=3000.0, session_timeout=2000.0) as run:
        with stopped_clock() as go_on:
            await turns()
            go_on(DAY)
            await turns()
        first = await run.taken()
        await run.ask(first)
        with stopped_clock() as go_on:
            go_on(2000.0)  # its session ends, and it is offered anew
            await turns()
            go_on(DAY)
            await turns()
        other, again = await run.taken(), await run.taken()
        await run.ask(other)
        assert (await run.end(other, reward=1.0))[0] == 200
        with stopped_clock() as go_on:
            await turns()
            go_on(1000.0)  # with the time of the first agent it is enough
            await turns()
        group = await run.group()
    assert len({offer["id"] for offer in (first, other, again)}) == 3
    assert group.rewards.tolist() == [1.0]
    assert "longer than 3000 s (rollout_timeout): the agent elsewhere that took it has" in group.meta["failures"][0]


class OfNobody:
    """A hook of which the generator does not know that agents play."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    async def __aenter__(self) -> None:
        await self._hook.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        await self._hook.__aexit__(*error)

    async def __call__(self, *task: Any) -> Any:
        return await self._hook(*task)


@pytest.mark.parametrize(
    ("setting", "agents", "groups"),
    [(None, True, 2), ("skip", True, 2), ("raise", True, 0), (None, False, 0), ("skip", False, 2)],
    ids=ascii,
)
async def test_a_failed_rollout_ends_the_run_unless_agents_play_or_that_is_wanted_otherwise(setting, agents, groups):
    async def agent(task: Any, address: Any) -> float:
        if task.prompt_id == "p0":
            raise OSError("no browser")
        async with aiohttp.ClientSession() as http:
            body = {"model": "any", "messages": [user("ab")]}
            async with http.post(f"{address.url}/v1/chat/completions", json=body) as response:
                assert response.status == 200
        return 1.0

    config = GeneratorConfig(group_size=1, max_concurrent_groups=1, on_prompt_error=setting)
    client = RecordingClient()
    hook: Any = SessionHook(agent, config, needs_reward=True)
    if not agents:
        hook = OfNobody(hook)
    generator = RolloutGenerator(client, Drawing(), make_prompts(3), None, config, rollout=hook)  # type: ignore[arg-type]
    if groups:
        await generator.run()
    else:
        with pytest.raises(PromptError, match="no browser"):
            await generator.run()
    assert len(client.inserts) == groups


# ------------------------------------------------------------------------------------------------ partial


@asynccontextmanager
async def partial_groups(**config: Any) -> AsyncIterator[Run]:
    """A generator whose rollouts are stored in a server while their group is partial."""
    tables = [TableConfig(name="rollouts"), TableConfig(name="partial_groups")]
    permits = AdmissionConfig(
        table="rollouts", fresh_groups_per_step=8, max_staleness=1, permit_tables="partial_groups"
    )
    with ReplayServer(tables=tables, admission=permits, port=0) as server:
        async with (
            AsyncReplayClient(server.address) as client,
            running(client=client, partial_groups_table="partial_groups", **config) as run,
        ):
            yield run


async def test_an_end_is_answered_when_the_server_has_the_rollout():
    async with partial_groups(group_size=3) as run:
        for ended in range(1, 3):
            offer = await run.taken()
            await run.ask(offer)
            assert (await run.end(offer, reward=1.0))[0] == 200
            assert run.generator.stats["rollouts_stored"] == ended
        last = await run.taken()
        await run.ask(last)
        assert (await run.end(last, reward=0.0))[0] == 200
        assert (await run.end(last, reward=0.0))[0] == 200  # again


async def test_an_end_of_a_rollout_that_no_group_will_have_is_not_acknowledged():
    async with partial_groups(group_size=2) as run:
        offer = await run.taken()
        await run.ask(offer)
        await run.client.reset("partial_groups")
        status, text = await run.end(offer, reward=1.0)
        assert status == 410
        assert "the generator has given up the group of the rollout" in text
        assert (await run.end(offer, reward=1.0))[0] == 410


# ------------------------------------------------------------------------------------------------ tokens and TLS


async def test_with_a_token_file_rollouts_are_for_those_who_have_the_token_that_is_there_now(tmp_path):
    path = tmp_path / "token"
    path.write_text("one-token-of-the-run\n")
    async with running(group_size=1, sessions_token_file=path, token="one-token-of-the-run") as run:
        offer = await run.taken()
        for run.token in ("another", "one-token-of-the-ru", "ü", "", None, offer["id"]):
            assert (await run.post("/sessions"))[0] == 401
            assert (await run.end(offer, reward=1))[0] == 401
        assert await run.ask(offer) == 200  # its address is secret enough
        path.write_text("the-next-token")
        run.token = "one-token-of-the-run"
        assert (await run.end(offer, reward=1))[0] == 401
        run.token = "the-next-token"
        assert (await run.end(offer, reward=1))[0] == 200
        await run.group()


async def test_with_a_certificate_all_goes_over_tls(tmp_path):
    authority = make_certificate(tmp_path, "authority")
    own = make_certificate(tmp_path, "server", authority)
    trusting = ssl.create_default_context(cafile=str(authority.cert))
    files = {"sessions_tls_cert": str(own.cert), "sessions_tls_key": str(own.key)}
    async with running(group_size=1, tls=trusting, **files) as run:
        offer = await run.taken()
        assert offer["address"].startswith("https://127.0.0.1:")
        assert await run.ask(offer) == 200
        assert (await run.end(offer, reward=1.0))[0] == 200
        await run.group()


@pytest.mark.parametrize(
    ("address", "settings", "says"),
    [
        ("0.0.0.0:7403", {}, "other machines reach it, so it needs a sessions_token_file"),
        ("example.org:7403", {}, "other machines reach it"),
        ("127.0.0.1", {}, "sessions must be host:port"),
        ("127.0.0.1:7403", {"sessions_token_file": "/nowhere/token"}, "sessions_token_file /nowhere/token"),
        ("127.0.0.1:7403", {"sessions_tls_cert": "/nowhere/cert"}, "a certificate and its key go together"),
        ("127.0.0.1:7403", {"tool_parser": 7}, "tool_parser must be a text"),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_run(address, settings, says):
    with pytest.raises(ValueError, match=says):
        load_sessions(None, address, GeneratorConfig(**settings), needs_reward=True)


def test_an_address_that_other_machines_reach_without_tls_is_warned_of(tmp_path, caplog):
    path = Path(tmp_path / "token")
    path.write_text("a-token-of-the-run")
    load_sessions(None, "0.0.0.0:7403", GeneratorConfig(sessions_token_file=path), needs_reward=True)
    assert "sessions at 0.0.0.0:7403 without TLS" in caplog.text
