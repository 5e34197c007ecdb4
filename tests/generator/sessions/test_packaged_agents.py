"""Agents of the package index, as they are, in an environment of their own: `make test-long` makes .venv-agents."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from replay_generator import GeneratorConfig
from replay_generator.engines import SamplingConfig
from replay_generator.sessions import load_sessions
from tests.docs.blocks import ROOT
from tests.generator.factories import RecordingClient, assert_drawn, generate
from tests.generator.sessions.test_session import Drawing

PYTHON = ROOT / ".venv-agents" / "bin" / "python"
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-long makes .venv-agents"),
]


@dataclass
class Replying(Drawing):
    """Draws what `reply` says to the tokens that it read."""

    reply: Callable[[str], str] = field(kw_only=True)

    def text_of(self, prompt_ids: list[int]) -> str:
        return self.reply("".join(self.tokenizer.convert_ids_to_tokens(prompt_ids)))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def of_openai_agents(read: str) -> str:
    """Calls both tools, hands over, and the other agent says the result."""
    if "Say the result in words" in read:
        return "twenty-five"
    calls = [call("add", a=2, b=3), call("multiply", a=5, b=5), call("transfer_to_teller")]
    return calls[read.count("<s>tool")]


def of_smolagents(read: str) -> str:
    if "Observation" not in read.rpartition("25?")[2]:
        return "Thought: compute.\n<code>\nprint((2 + 3) * 5)\n</code>"
    return "Thought: done.\n<code>\nfinal_answer('twenty-five')\n</code>"


def of_mini_swe_agent(read: str) -> str:
    commands = ["echo twenty-five > answer", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    return call("bash", command=commands[read.count("<s>tool")])


@pytest.mark.parametrize(
    ("program", "reply", "turns"),
    [
        ("with_openai_agents", of_openai_agents, 4),
        ("with_smolagents", of_smolagents, 2),
        ("with_mini_swe_agent", of_mini_swe_agent, 2),
    ],
)
async def test_an_agent_of_the_index_is_trained_on_as_the_engine_drew_it(program, reply, turns):
    engine, client = Replying(reply=reply, max_length=100_000), RecordingClient()
    sampling = SamplingConfig(max_tokens=400)
    given = {"group_size": 2, "sampling": sampling, "tool_parser": "hermes", "rollout_timeout": 300.0}
    config = GeneratorConfig(max_groups=1, **given)
    hook = load_sessions(f"{PYTHON} {Path(__file__).parent / 'agents' / program}.py", None, config, needs_reward=True)
    prompts = [{"prompt": "What is (2 + 3) * 5, 25?", "answer": "twenty-five"}]
    await generate(client, engine, hook, reward=None, prompts=prompts, **given)
    ((group, _),) = client.inserts
    assert group.rewards.tolist() == [1.0, 1.0]
    assert len(engine.drawn) == 2 * turns
    if program == "with_smolagents":  # it asks to stop at the end of the code: before the end of the turn
        engine.drawn = [(before, each.cut(len(each.token_ids) - 1, each.text)) for before, each in engine.drawn]
    assert_drawn([group], engine)
