"""What generators need: prompts, hooks, rewards; and generators without a server."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from replay_client.rollout import RolloutGroup
from replay_generator import GeneratorConfig, Rollout, RolloutGenerator, RolloutPolicy, RolloutSequence, Task
from replay_generator.engines import Completion
from replay_generator.prompts.prompt import Prompt
from replay_generator.rollouts.rollout import single_turn
from replay_generator.testing import ScriptedEngine
from tests.kit.clients import RecordingClient
from tests.kit.engines import SAID


def make_prompts(count: int = 10_000, *, text: str = "{}+1=") -> list[Prompt]:
    return [Prompt.of({"prompt": text.format(index), "prompt_id": f"p{index}"}) for index in range(count)]


def zero(row: Any, text: str) -> float:
    return 0.0


def by_length(row: Any, text: str) -> float:
    return float(len(text))


class Hook:
    """Plays rollouts one after the other as they are let go, and remembers which it began."""

    def __init__(self, *free: int, fails: tuple[int, ...] = (), info: Any = None) -> None:
        """`free`: numbers of rollouts that need not be let go."""
        self.free = set(free)
        self.fails = fails
        self.info = info
        self.gate = asyncio.Event()
        self.began: dict[str, list[int]] = defaultdict(list)
        self.ended = 0

    async def __call__(self, task: Task, policy: RolloutPolicy) -> Rollout:
        self.began[task.prompt_id].append(task.index)
        if task.index not in self.free:
            await self.gate.wait()
        if task.index in self.fails:
            raise RuntimeError("the environment broke")
        sequence = RolloutSequence(task.prompt_ids)
        sequence.append_completion(await policy.generate(sequence.token_ids))
        sequence.append_observation([9, task.index], text="said")
        sequence.append_completion(await policy.generate(sequence.token_ids))
        info = {"number": task.index} if self.info is None else self.info
        self.ended += 1
        return Rollout([sequence], reward=float(task.index), info=info, metrics={"steps": 2.0})


def make_generator(
    client: Any,
    engine: Any = None,
    *,
    completions: Sequence[Completion] | None = None,
    prompts: Any = None,
    reward: Any = by_length,
    rollout: Any = single_turn,
    group_filter: Any = None,
    on_group: Any = None,
    **config: Any,
) -> RolloutGenerator:
    """A generator of the prompts p0, p1, ..., with the engine, or else with one that draws these completions.

    `config`: fields of GeneratorConfig.
    """
    if engine is None:
        engine = ScriptedEngine() if completions is None else ScriptedEngine(completions=completions)
    settings = {"group_size": 4, "max_concurrent_groups": 2, "stop_grace": 0.2} | config
    return RolloutGenerator(
        client,
        engine,
        make_prompts() if prompts is None else prompts,
        reward,
        GeneratorConfig(**settings),
        rollout=rollout,
        group_filter=group_filter,
        on_group=on_group,
    )


async def running(generator: RolloutGenerator) -> asyncio.Task[None]:
    """The task of a generator, which has begun."""
    task = asyncio.create_task(generator.run())
    await asyncio.sleep(0)
    return task


async def generate(client: Any, engine: Any, hook: Any, *, reward: Any = zero, **options: Any) -> Any:
    """Makes one group, unless told otherwise. Returns the stats of the generator."""
    options = {"max_groups": 1, "max_concurrent_groups": 1} | options
    generator = make_generator(client, engine, rollout=hook, reward=reward, **options)
    await generator.run()
    return generator.stats


async def played(hook: Any, engine: Any = None, **config: Any) -> RolloutGroup:
    """The group that a hook makes of one prompt. Where there is none, it raises why."""
    client = RecordingClient()
    config = {"on_prompt_error": "raise"} | config
    await generate(client, ScriptedEngine(completions=[SAID]) if engine is None else engine, hook, **config)
    return client.inserts[0][0]
