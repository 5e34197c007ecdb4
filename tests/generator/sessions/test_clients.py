"""Agents that are written with the real `openai` and `anthropic`: what comes into groups is what the engine drew."""

import json
import sys
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from replay_generator import GeneratorConfig, RolloutGenerator
from replay_generator.engines import SamplingConfig
from replay_generator.prompts.prompt import cycle_prompts
from replay_generator.rollouts.sessions import load_sessions
from tests.docs.blocks import ROOT, write_files
from tests.kit.clients import RecordingClient
from tests.kit.engines import RecordedEngine, assert_drawn
from tests.kit.models import recomputed, save_model

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
PROMPTS = [{"prompt": f"{first}+1=", "answer": str(first + 1)} for first in range(9)]
SAMPLING = SamplingConfig(temperature=0.8, max_tokens=5)
TURNS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


async def with_openai(task: Any, address: Any) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
    async with openai.AsyncOpenAI(**address.openai) as client:
        for _ in range(TURNS):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "?"}]
    return ended(messages[-2].content or "")


async def with_openai_in_a_stream(task: Any, address: Any) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
    async with openai.AsyncOpenAI(**address.openai) as client:
        for _ in range(TURNS):
            pieces = await client.chat.completions.create(model="policy", messages=messages, stream=True)
            said = "".join([piece.choices[0].delta.content or "" async for piece in pieces if piece.choices])
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "?"}]
    return ended(messages[-2]["content"])


async def with_responses(task: Any, address: Any) -> dict[str, Any]:
    items: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
    async with openai.AsyncOpenAI(**address.openai) as client:
        for turn in range(TURNS):
            if turn % 2:
                # Its own helper fails at an answer that is cut off.
                async for event in await client.responses.create(model="policy", input=items, stream=True):
                    answer: Any = getattr(event, "response", None)
            else:
                answer = await client.responses.create(model="policy", input=items, store=False)
            items += [*answer.output, {"role": "user", "content": "?"}]
    return ended(answer.output_text)


async def with_anthropic(task: Any, address: Any) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
    async with anthropic.AsyncAnthropic(**address.anthropic) as client:
        for turn in range(TURNS):
            asked: Any = {"model": "policy", "messages": messages, "max_tokens": 5}
            if turn % 2:
                async with client.messages.stream(**asked) as stream:
                    answer: Any = await stream.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            said = "".join(block.text for block in answer.content)
            messages += [{"role": "assistant", "content": answer.content or said}, {"role": "user", "content": "?"}]
    return ended(said)


def ended(said: str) -> dict[str, Any]:
    return {"reward": sum(map(str.isdigit, said)) / 5, "metrics": {"letters": float(len(said))}}


PROGRAM = """
import json, sys
import openai
row, client = json.loads(sys.stdin.readline()), openai.OpenAI()
messages, said = [{"role": "user", "content": row["prompt"]}], ""
for _ in range(3):
    said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "?"}]
print("I answered", said)
print(json.dumps({"reward": sum(map(str.isdigit, said)) / 5, "metrics": {"letters": len(said)}}))
"""


async def played(agent: str, engine: Any, **settings: Any) -> tuple[Any, list[Any]]:
    given: dict[str, Any] = {"group_size": 4, "max_groups": 1, "sampling": SAMPLING}
    config = GeneratorConfig(**(given | settings))
    client, hook = RecordingClient(), load_sessions(agent, None, config, needs_reward=True)
    generator = RolloutGenerator(client, engine, cycle_prompts(PROMPTS, seed=0), config=config, rollout=hook)
    await generator.run()
    return generator.stats, [group for group, _ in client.inserts]


AGENTS = [with_openai, with_openai_in_a_stream, with_responses, with_anthropic]


@pytest.mark.parametrize("agent", [*(f"{__name__}:{each.__name__}" for each in AGENTS), "a command"])
async def test_turns_of_an_agent_are_trained_on_as_the_engine_drew_them(model, tmp_path, agent):
    if agent == "a command":
        (tmp_path / "agent.py").write_text(PROGRAM)
        agent = f"{sys.executable} {tmp_path / 'agent.py'}"
    engine = RecordedEngine(model)
    _, groups = await played(agent, engine)
    assert_drawn(groups, engine)
    assert len(engine.drawn) == 4 * TURNS
    for group in groups:
        # White space is all that a template may change, and this model may end a turn with it.
        assert group.sequence_counts is None, json.dumps(group.meta["turns"])
        for turns, ids, span in zip(group.meta["turns"], group.completions(), group.sequence_spans(), strict=True):
            assert [role for role, _ in turns] == ["prompt", *["assistant", "user"] * (TURNS - 1), "assistant"]
            expected = np.array(recomputed(model, group.prompt_ids.tolist(), ids.tolist(), SAMPLING))
            trained = group.trained_mask[span]
            np.testing.assert_allclose(group.rollout_logprobs[span][trained], expected[trained], atol=1e-4)
        said = [
            engine.tokenizer.decode(ids[-turns[-1][1] :], skip_special_tokens=True)
            for ids, turns in zip(group.completions(), group.meta["turns"], strict=True)
        ]
        np.testing.assert_allclose(group.rewards, [sum(map(str.isdigit, each)) / 5 for each in said])
        assert group.extras["rewards/rollout/letters"].shape == (4,)


@pytest.mark.parametrize("agent", ["my_agents:play", "my_agent.py"])
async def test_the_examples_of_the_page_play(model, tmp_path, monkeypatch, agent):
    write_files(ROOT / "docs/how-to/any-agent.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if agent.endswith(".py"):
        agent = f"{sys.executable} {tmp_path / agent}"
    engine = RecordedEngine(model)
    _, groups = await played(agent, engine)
    assert_drawn(groups, engine)
    assert len(engine.drawn) == 4 * 2  # a model with random weights is never right
    (group,) = groups
    assert group.rewards.tolist() == [0.0] * 4


async def with_openai_and_a_title(task: Any, address: Any) -> dict[str, Any]:
    async with openai.AsyncOpenAI(**address.openai) as client:
        asked = [{"role": "user", "content": "A title for: " + task.row["prompt"]}]
        title = await client.chat.completions.create(model="titles", messages=asked)
    assert title.choices[0].message.role == "assistant"
    return await with_openai(task, address)


async def with_anthropic_and_a_title(task: Any, address: Any) -> dict[str, Any]:
    async with anthropic.AsyncAnthropic(**address.anthropic) as client:
        asked: Any = [{"role": "user", "content": "A title for: " + task.row["prompt"]}]
        await client.messages.create(model="titles", messages=asked, max_tokens=5)
    return await with_anthropic(task, address)


async def with_responses_and_a_title(task: Any, address: Any) -> dict[str, Any]:
    async with openai.AsyncOpenAI(**address.openai) as client:
        await client.responses.create(model="titles", input="A title for: " + task.row["prompt"], store=False)
    return await with_responses(task, address)


@pytest.mark.parametrize("untrained", [(), ("titles",)], ids=["trained", "left out"])
@pytest.mark.parametrize("agent", [with_openai_and_a_title, with_anthropic_and_a_title, with_responses_and_a_title])
async def test_a_title_is_trained_on_with_the_reward_of_the_task_unless_its_model_is_left_out(model, agent, untrained):
    engine = RecordedEngine(model)
    _, groups = await played(f"{__name__}:{agent.__name__}", engine, untrained_models=untrained)
    assert len(engine.drawn) == 4 * (1 + TURNS)
    (group,) = groups
    counts = [1] * 4 if group.sequence_counts is None else group.sequence_counts.tolist()
    assert counts == [1 if untrained else 2] * 4
