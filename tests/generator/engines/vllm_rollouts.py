"""Rollouts of several turns with a real engine: what they have to hold, in process and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from replay_client import RolloutGroup
from replay_generator import Rollout, RolloutPolicy, RolloutSequence, Task
from replay_generator.engines import Engine, SamplingConfig
from replay_generator.rollouts import RolloutHook, group_of_rollouts, play
from replay_generator.tool_loop import ToolCall, tool_loop

TOOL = [9, 5]
"""What the tool of `two_turns` answers, as tokens."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ {'user': '', 'assistant': '=', 'tool': '?'}[message['role']] }}"
    "{{ message['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
"""Of characters that the small model's tokenizer has."""
PROMPT = "12+3"


async def group_of(
    engine: Engine, hook: RolloutHook, prompt_ids: Sequence[int], sampling: SamplingConfig, size: int, **fields: Any
) -> RolloutGroup:
    """The group that the generator would make of these rollouts, all with the reward of their index."""
    tasks = [
        Task("p", list(prompt_ids), {}, None, index, sampling, engine.tokenizer, engine.max_length)
        for index in range(size)
    ]
    played: dict[int, Rollout] = {}

    async def finished(index: int, rollout: Rollout) -> None:
        played[index] = rollout

    tasks = [replace(task, **fields) for task in tasks]
    failures = await play(hook, tasks, engine, None, [], finished, early=True)
    assert not failures, repr(failures[0])
    rewards, rollouts = np.arange(size, dtype=np.float32), [played[index] for index in sorted(played)]
    return group_of_rollouts(rollouts, 0, rewards=rewards, advantages=rewards, sampling=sampling.describe())


def two_turns(
    first: SamplingConfig, between: Callable[[], Awaitable[None]] | None = None, size: int = 0
) -> RolloutHook:
    """A hook: the policy writes by `first`, the tool answers, and the policy goes on. `between` happens once, when the
    first turns of all `size` rollouts have ended."""
    ended: list[int] = []
    happened = asyncio.Event()

    async def rollout(task: Task, policy: RolloutPolicy) -> Rollout:
        sequence = RolloutSequence(task.prompt_ids)
        sequence.sampled(await policy.generate(sequence.token_ids, first))
        if between is not None:
            ended.append(task.index)
            if len(ended) == size:
                try:
                    await between()
                finally:
                    happened.set()
            await happened.wait()
        sequence.given(TOOL)
        sequence.sampled(await policy.generate(sequence.token_ids))
        return Rollout([sequence])

    return rollout


def tools_at_work(engine: Engine, monkeypatch: Any) -> RolloutHook:
    """The tool loop, with a tool that is called by every turn that ends by itself, and counts its characters."""
    monkeypatch.setattr(engine.tokenizer, "chat_template", CHAT_TEMPLATE, raising=False)

    def count(text: str) -> str:
        """Counts.

        Args:
            text: What is counted.
        """
        return str(len(text))

    return tool_loop([count], max_turns=3, parse=lambda text: [ToolCall("count", {"text": text})])


async def tool_group(engine: Engine, monkeypatch: Any, sampling: SamplingConfig, size: int) -> RolloutGroup:
    """A group of the tool loop, of which what the tools answered is checked."""
    hook = tools_at_work(engine, monkeypatch)
    messages = ({"role": "user", "content": PROMPT},)
    prompt_ids = engine.tokenizer.encode(f"{PROMPT}<eos>=", add_special_tokens=False)
    group = await group_of(engine, hook, prompt_ids, sampling, size, messages=messages)
    called = 0
    for span, ids in zip(group.sequence_spans(), group.completions(), strict=True):
        trained = group.trained_mask[span]
        edges = np.flatnonzero(np.diff(trained)) + 1  # where the policy stops, or goes on
        turns = [turn.tolist() for turn in np.split(ids, edges)]
        for said, answer in zip(turns[::2], turns[1::2], strict=False):
            length = len(engine.tokenizer.decode(said, skip_special_tokens=True))
            assert said[-1] == engine.tokenizer.eos_token_id
            assert engine.tokenizer.decode(answer) == f"?{length}<eos>="
            called += 1
    assert called, "no turn ended by itself"
    return group
