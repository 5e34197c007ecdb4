"""Rollouts of several turns with a real engine: what they have to hold, in process and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from replay_client import RolloutGroup
from replay_generator import Rollout, RolloutPolicy, RolloutSequence, Task
from replay_generator.engines import Engine, SamplingConfig
from replay_generator.groups.assembly import assemble
from replay_generator.rollouts.rollout import PlayedRollout, RolloutHook, play

TOOL = [9, 5]
"""What the tool of `two_turns` answers, as tokens."""


async def group_of(
    engine: Engine, hook: RolloutHook, prompt_ids: Sequence[int], sampling: SamplingConfig, size: int
) -> RolloutGroup:
    """The group that the generator would make of these rollouts, all with the reward of their index."""
    tasks = [
        Task("p", list(prompt_ids), {}, None, index, sampling, engine.tokenizer, engine.max_length)
        for index in range(size)
    ]
    played: dict[int, PlayedRollout] = {}

    async def finished(index: int, rollout: PlayedRollout) -> None:
        played[index] = rollout

    failures = await play(hook, tasks, engine, None, [], finished, early=True)
    assert not failures, repr(failures[0])
    rewards, rollouts = np.arange(size, dtype=np.float32), [played[index] for index in sorted(played)]
    return assemble(rollouts, 0, rewards=rewards, advantages=rewards, sampling=sampling.describe())


def two_turns(
    first: SamplingConfig, between: Callable[[], Awaitable[None]] | None = None, size: int = 0
) -> RolloutHook:
    """A hook: the policy writes by `first`, the tool answers, and the policy goes on. `between` happens once, when the
    first turns of all `size` rollouts have ended."""
    ended: list[int] = []
    happened = asyncio.Event()

    async def rollout(task: Task, policy: RolloutPolicy) -> Rollout:
        sequence = RolloutSequence(task.prompt_ids)
        sequence.append_completion(await policy.generate(sequence.token_ids, first))
        if between is not None:
            ended.append(task.index)
            if len(ended) == size:
                try:
                    await between()
                finally:
                    happened.set()
            await happened.wait()
        sequence.append_observation(TOOL)
        sequence.append_completion(await policy.generate(sequence.token_ids))
        return Rollout([sequence])

    return rollout
