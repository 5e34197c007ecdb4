"""Generators without a server, and the prompts that they ask."""

from __future__ import annotations

from typing import Any

from replay_client.rollout import RolloutGroup
from replay_generator import GeneratorConfig, RolloutGenerator
from replay_generator.prompts.prompt import Prompt
from tests.generator.factories import ScriptedEngine
from tests.kit.clients import RecordingClient
from tests.kit.engines import SAID


def make_prompts(count: int = 10_000, *, text: str = "{}+1=") -> list[Prompt]:
    return [Prompt.of({"prompt": text.format(index), "prompt_id": f"p{index}"}) for index in range(count)]


def zero(row: Any, text: str) -> float:
    return 0.0


async def generate(
    client: Any, engine: Any, hook: Any, *, reward: Any = zero, prompts: Any = None, **config: Any
) -> Any:
    config = {"group_size": 4, "max_groups": 1, "max_concurrent_groups": 1} | config
    prompts = make_prompts() if prompts is None else prompts
    generator = RolloutGenerator(client, engine, prompts, reward, GeneratorConfig(**config), rollout=hook)
    await generator.run()
    return generator.stats


async def played(hook: Any, engine: Any = None, **config: Any) -> RolloutGroup:
    """The group that a hook makes of one prompt. Where there is none, it raises why."""
    client = RecordingClient()
    config = {"on_prompt_error": "raise"} | config
    await generate(client, ScriptedEngine(completions=[SAID]) if engine is None else engine, hook, **config)
    return client.inserts[0][0]
