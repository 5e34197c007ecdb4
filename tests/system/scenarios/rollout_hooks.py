"""A hook for `replay generate --rollout` whose groups tell whether they are whole: see `rollouts.faults`."""

from __future__ import annotations

import asyncio
import random

from replay_generator import Rollout, RolloutPolicy, RolloutSequence, Task

TOOL = [5, 6, 7]
"""What the tool answers, as tokens."""
FAILS = 0.05
"""How likely a rollout fails after each of its turns."""


async def several_turns(task: Task, policy: RolloutPolicy) -> Rollout:
    """One to three turns with a tool between them, now and then a second sequence, now and then a failure.

    The reward is the number of tokens that the policy wrote.
    """
    sequences = [RolloutSequence(task.prompt_ids)]
    if random.random() < 0.3:
        sequences.append(RolloutSequence([*task.prompt_ids, *TOOL]))
    for sequence in sequences:
        sequence.append_completion(await policy.generate(sequence.token_ids))
        for _ in range(random.randrange(3)):
            await asyncio.sleep(random.random() * 0.02)  # as long as a tool takes
            if random.random() < FAILS:
                raise RuntimeError("the environment broke")
            sequence.append_observation(TOOL, text="567")
            sequence.append_completion(await policy.generate(sequence.token_ids))
    return Rollout(sequences, reward=float(sum(sum(sequence.sampled_mask) for sequence in sequences)))
