"""Shapes of groups: what the field stores for a prompt, as a table. Its numbers are random, so a mistake shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from replay_client import RolloutGroup
from replay_client.scoring import group_advantages

PROMPT = 5
LAYERS, EXPERTS = 48, 8

Array = npt.NDArray[Any]


def make_shape(
    lengths: Sequence[int], *, counts: Sequence[int] | None = None, seed: int = 0, **fields: Any
) -> RolloutGroup:
    """A group of sequences of these lengths, with random tokens, log-probabilities and rewards."""
    rng = np.random.default_rng(seed)
    tokens, rollouts = sum(lengths), len(counts or lengths)
    rewards = rng.normal(size=rollouts).astype(np.float32)
    return RolloutGroup(
        **{
            "prompt_ids": rng.integers(0, 150_000, PROMPT, dtype=np.int32),
            "completion_ids": rng.integers(0, 150_000, tokens, dtype=np.int32),
            "completion_lengths": np.array(lengths, np.int32),
            "sequence_counts": counts,
            "rollout_logprobs": -rng.exponential(size=tokens).astype(np.float32),
            "rewards": rewards,
            "advantages": group_advantages(rewards),
            "policy_version": 7,
            "prompt_id": f"prompt/{seed}",
            "finish_reasons": tuple("stop" if row % 2 else "length" for row in range(rollouts)),
            "sampling": {"temperature": 0.8, "top_p": 0.95},
            **fields,
        }
    )


def with_extras(group: RolloutGroup, extras: dict[str, Array], axes: dict[str, str]) -> RolloutGroup:
    """The same with more arrays."""
    return replace(group, extras=group.extras | extras, axes=group.axes | axes)


def with_tools(group: RolloutGroup) -> RolloutGroup:
    """The same with every third run of three tokens written by a tool: masked, without log-probability."""
    tool_T = np.arange(group.num_tokens) // 3 % 3 == 2
    logprobs_T = np.where(tool_T, np.float32(np.nan), group.rollout_logprobs)
    return replace(group, rollout_logprobs=logprobs_T, loss_mask=~tool_T)


def with_contexts(group: RolloutGroup, contexts: Sequence[int]) -> RolloutGroup:
    """The same with this many tokens of context at the head of each sequence."""
    logprobs_T = group.rollout_logprobs.copy()
    for span, context in zip(group.sequence_spans(), contexts, strict=True):
        logprobs_T[span.start : span.start + context] = math.nan
    return replace(group, context_lengths=np.array(contexts, np.int32), rollout_logprobs=logprobs_T)


def with_token_advantages(group: RolloutGroup) -> RolloutGroup:
    values_T = np.random.default_rng(1).normal(size=group.num_tokens).astype(np.float32)
    return replace(group, token_advantages=values_T * group.trained_mask)


def with_routing(group: RolloutGroup) -> RolloutGroup:
    """The experts of each layer, for the shared prompt and for all tokens behind it (R3)."""
    rows = group.prompt_ids.size + group.num_tokens
    chosen = np.random.default_rng(2).integers(0, 256, (rows, LAYERS, EXPERTS), dtype=np.uint8)
    return with_extras(group, {"routed_experts": chosen}, {"routed_experts": "whole"})


Columns = tuple[dict[str, Array], dict[str, str]]
"""Arrays and their axes."""


def sampling_masks_of(group: RolloutGroup) -> Columns:
    """The tokens that top-p kept, a set for each token; those of tools have none."""
    rng = np.random.default_rng(3)
    sizes_T = rng.integers(1, 40, group.num_tokens) * group.trained_mask
    offsets = np.concatenate(([0], np.cumsum(sizes_T))).astype(np.int64)
    kept = rng.integers(0, 150_000, int(offsets[-1]), dtype=np.int32)
    return {"kept": kept, "kept/offsets": offsets}, {"kept": "ragged:token"}


def teacher_of(group: RolloutGroup) -> Columns:
    """The 20 likeliest tokens of a teacher, and their log-probabilities in half the bytes."""
    rng = np.random.default_rng(4)
    shape = (group.num_tokens, 20)
    likeliest = rng.integers(0, 150_000, shape, dtype=np.int32)
    logprobs = (-rng.exponential(size=shape)).astype(ml_dtypes.bfloat16)
    axes = {"teacher_ids": "token", "teacher_logprobs": "token"}
    return {"teacher_ids": likeliest, "teacher_logprobs": logprobs}, axes


def turn_rewards_of(group: RolloutGroup) -> Columns:
    """Rewards of turns, each a sequence of its own, and of judges, for each rollout."""
    rng = np.random.default_rng(5)
    turns, judges = rng.normal(size=group.num_sequences), rng.normal(size=(group.group_size, 3))
    axes = {"turn_rewards": "sequence", "rewards/judges": "rollout"}
    return {"turn_rewards": turns.astype(np.float32), "rewards/judges": judges}, axes


def with_images(group: RolloutGroup) -> RolloutGroup:
    """Two images of the prompt as bfloat16, any bits among them; one for each rollout; and where they stand."""
    rng = np.random.default_rng(6)
    pixels = rng.integers(0, 2**16, (2, 3, 96, 128), dtype=np.uint16).view(ml_dtypes.bfloat16)
    drawn = rng.normal(size=(group.group_size, 3, 8, 8)).astype(ml_dtypes.bfloat16)
    extras = {"pixels": pixels, "drawn": drawn, "grid": np.array([[1, 6, 8]] * 2)}
    return with_extras(group, extras, {"pixels": "group", "drawn": "rollout"})


LENGTHS = (11, 0, 30, 7)
COUNTS = (2, 1, 1)
SINGLE = make_shape(LENGTHS)
AGENTS = make_shape(LENGTHS, counts=COUNTS)
TOOLS = with_tools(SINGLE)
EVERYTHING = with_images(with_routing(with_token_advantages(with_contexts(with_tools(AGENTS), (3, 0, 9, 7)))))
for columns_of in (teacher_of, sampling_masks_of, turn_rewards_of):
    EVERYTHING = with_extras(EVERYTHING, *columns_of(EVERYTHING))

SHAPES = {
    "one turn": SINGLE,
    "one turn with nothing but what is needed": replace(SINGLE, finish_reasons=None, sampling={}, prompt_id=""),
    "log-probabilities that are unknown": replace(SINGLE, rollout_logprobs=np.full(48, np.nan, np.float32)),
    "versions that change on the way": with_extras(
        replace(SINGLE, policy_version_end=9),
        {"policy_versions": 7 + np.arange(48) // 16},
        {"policy_versions": "token"},
    ),
    "several turns in one flat sequence": TOOLS,
    "rows with prompts of their own": with_contexts(SINGLE, (1, 0, 30, 2)),
    "several sequences of a rollout": AGENTS,
    "contexts that were compacted": with_contexts(AGENTS, (0, 0, 12, 7)),
    "sub-agents with tools and contexts": with_contexts(with_tools(AGENTS), (3, 0, 9, 7)),
    "advantages of tokens": with_token_advantages(with_tools(SINGLE)),
    "routed experts": with_routing(SINGLE),
    "routed experts of agents": with_routing(AGENTS),
    "sampling masks": with_extras(TOOLS, *sampling_masks_of(TOOLS)),
    "likeliest tokens of a teacher": with_extras(TOOLS, *teacher_of(TOOLS)),
    "rewards of turns": with_extras(AGENTS, *turn_rewards_of(AGENTS)),
    "images in bfloat16": with_images(SINGLE),
    "everything": EVERYTHING,
    "arrays without an axis, numbers and nothing": with_extras(
        SINGLE,
        {"like_tokens": np.arange(48), "number": np.float64(0.1), "nothing": np.zeros((0, 3), np.complex64)},
        {},
    ),
}
"""The groups by what they are."""


LATER = {
    f"{name}, with columns that arrive later": name
    for name in ("one turn", "several turns in one flat sequence", "several sequences of a rollout")
}
"""Shapes that are stored without some of their columns: the name of what is stored first."""
COLUMNS = (teacher_of, sampling_masks_of, turn_rewards_of)
"""What arrives later, one after the other."""


def in_the_end() -> dict[str, RolloutGroup]:
    """The groups of LATER when all columns are there."""
    groups = {name: SHAPES[first] for name, first in LATER.items()}
    for later in COLUMNS:
        groups = {name: with_extras(group, *later(group)) for name, group in groups.items()}
    return groups
