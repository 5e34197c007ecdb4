"""Facts: the numbers, flags and texts that the page keeps of each group. The numbers are stored in columns, so that the
page sorts 100,000 groups fast."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from replay_client.rollout import MAGIC, RolloutGroup
from replay_client.scoring import carries_gradient
from replay_dashboard.group import TokenText
from replay_generator.prompts.stored import PromptCursor, decode_item, is_stored_prompt

COLUMNS = (
    "reward_mean",
    "reward_std",
    "reward_max",
    "completions",
    "length_mean",
    "logprob_mean",
    "truncated_share",
    "solved_share",
)
"""The names of the numbers of a group. A number that is not known is NaN."""
A_PROMPT = "a prompt"
"""The flag of a StoredPrompt in a table of prompts."""
A_CURSOR = "how far prompts are loaded"
"""The flag of a PromptCursor in a table of prompts."""
DAMAGED = "damaged"
RAW_BYTES = "raw bytes"
"""The flag of a payload that is neither a group nor an item of a table of prompts."""
NO_VARIANCE = "no variance"
NOTES = (DAMAGED, RAW_BYTES, NO_VARIANCE, "all cut off", "identical answers", "no log-probs", "bad log-probs")
"""The flags of odd groups. Each finish reason in a group is one more flag, such as "ended by stop"."""
SEARCHED = 16_000
"""Most characters of a group that text search reads."""
TEXT_LIMIT = 256 << 20
"""Most characters of all groups together that are kept for text search. Text search does not find the other groups."""
_MOST_NAME = 200
"""Most characters of a prompt's name that are kept."""


@dataclass
class Facts:
    """The facts of one group, or of a payload that is no group."""

    numbers: dict[str, float] = field(default_factory=dict)
    """The values of COLUMNS, by their names; empty if the payload is no group."""
    flags: frozenset[str] = frozenset()
    prompt_id: str = ""
    prompt: str = ""
    """The text of the prompt; of a long text the beginning and the end."""
    text: str = ""
    """The text that a search reads, in lower case."""


def facts_of(payload: bytes | memoryview, tokenizer: TokenText, solved_reward: float) -> Facts:
    """The facts of a payload. If the payload is no group, this raises no error, and a flag says what the payload is."""
    try:
        group = RolloutGroup.decode(payload)
    except ValueError:
        if is_stored_prompt(payload):
            return _facts_of_prompt(payload)
        # The last byte of MAGIC is the version of the format. It is not compared here, so a group of an unknown version
        # counts as damaged.
        begins_like_a_group = bytes(memoryview(payload)[: len(MAGIC) - 1]) == MAGIC[:-1]
        return Facts(flags=frozenset({DAMAGED if begins_like_a_group else RAW_BYTES}))
    with np.errstate(all="ignore"):  # rewards and log-probabilities may be infinite
        return _facts(group, tokenizer, solved_reward)


def _facts_of_prompt(payload: bytes | memoryview) -> Facts:
    """The facts of an item of a table of prompts."""
    try:
        item = decode_item(payload)
    except ValueError:
        return Facts(flags=frozenset({DAMAGED}))
    if isinstance(item, PromptCursor):
        return Facts(flags=frozenset({A_CURSOR}))
    content = item.prompt.content
    if isinstance(content, str):
        text = content
    else:  # the messages of a chat
        text = "\n".join(str(message["content"]) for message in content)
    return Facts(
        flags=frozenset({A_PROMPT}),
        prompt_id=item.prompt.prompt_id[:_MOST_NAME],
        prompt=_shortened(text),
        text=text[:SEARCHED].lower(),
    )


def _shortened(prompt: str) -> str:
    """The prompt, or its beginning and its end, in at most 160 characters."""
    if len(prompt) <= 160:
        return prompt
    return f"{prompt[:80]} … {prompt[-76:]}"


def _facts(group: RolloutGroup, tokenizer: TokenText, solved_reward: float) -> Facts:
    """The facts of a group. A rollout whose reward is at least `solved_reward` counts as solved."""
    rewards = group.rewards.astype(np.float64)
    logprobs = group.rollout_logprobs
    known_logprobs = logprobs[~np.isnan(logprobs)]
    reasons = [str(reason)[:40] for reason in group.finish_reasons or ()]
    mean_logprob = np.nan
    has_bad_logprobs = False
    if known_logprobs.size:
        mean_logprob = float(known_logprobs.mean(dtype=np.float64))
        # A log-probability is at most 0 (here 1e-3, for rounding), and no sampled token is as unlikely as exp(-1e4).
        has_bad_logprobs = not -1e4 < float(known_logprobs.min()) <= float(known_logprobs.max()) < 1e-3
    notes = {
        NO_VARIANCE: bool(np.isfinite(rewards).all()) and not carries_gradient(group),
        "all cut off": bool(reasons) and set(reasons) == {"length"},
        "identical answers": len(rewards) > 1 and _count_different_answers(group) == 1,
        "no log-probs": known_logprobs.size == 0 and bool(group.sampled_lengths.any()),
        "bad log-probs": has_bad_logprobs,
    }
    flags = [name for name, holds in notes.items() if holds]
    flags += [f"ended by {reason}" for reason in reasons]
    prompt = tokenizer.text(group.prompt_ids[:4096].tolist())  # the rest of a longer prompt is left out
    return Facts(
        numbers={
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "reward_max": float(rewards.max()),
            "completions": float(rewards.size),
            "length_mean": float(group.rollout_lengths.mean()),
            "logprob_mean": mean_logprob,
            "truncated_share": reasons.count("length") / len(reasons) if reasons else np.nan,
            "solved_share": float((rewards >= solved_reward).mean()),
        },
        flags=frozenset(flags),
        prompt_id=str(group.prompt_id)[:_MOST_NAME],
        prompt=_shortened(prompt),
        text=_searched_text(group, prompt, tokenizer),
    )


def _count_different_answers(group: RolloutGroup) -> int:
    """Counts the different answers of a group. Rollouts with the same sampled tokens have the same answer."""
    answers_G: list[list[bytes]] = [[] for _ in group.rewards]  # the sampled tokens of each sequence of a rollout
    for rollout, span in zip(group.sequence_rollouts.tolist(), group.sampled_spans(), strict=True):
        answers_G[rollout].append(group.completion_ids[span].tobytes())
    return len({tuple(answer) for answer in answers_G})


def _searched_text(group: RolloutGroup, prompt: str, tokenizer: TokenText) -> str:
    """The first SEARCHED characters of the prompt and the completions, in lower case."""
    parts = [prompt]
    length = len(prompt)
    if tokenizer.source:
        for ids in group.completions():
            if length >= SEARCHED:
                break
            # Most tokens have at least one character, so no more tokens are decoded than characters are still needed.
            completion = tokenizer.text(ids[: SEARCHED - length].tolist())
            parts.append(completion)
            length += len(completion)
    return "\n".join(parts)[:SEARCHED].lower()


class FactsStore:
    """The facts of many groups. Each group has a slot, which is its index in the arrays and lists of this class.

    A new group gets the slot of a forgotten group, if there is one.
    """

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        """The slot of each group, by the key of its item."""
        self.numbers = np.full((1024, len(COLUMNS)), np.nan, dtype=np.float32)
        """The COLUMNS of each slot. When all slots are used, this array and `flags` become twice as long."""
        self.flags = np.zeros(1024, dtype=np.int64)
        """The flags of each slot, as bits. The index of a flag in `names` is the index of its bit."""
        self.names = list(NOTES)
        """The names of the flags that have a bit of their own, at most 63. All other flags share the last of the 63
        bits, because an int64 has no more usable bits."""
        self.rows: list[Facts] = []
        """The facts of each slot that was ever used; empty facts in a slot that is free."""
        self.version = 0
        """Increases with every change."""
        self._free_slots: list[int] = []
        """The slots of forgotten groups."""
        self._characters = 0
        """Characters of the texts of all groups together: at most TEXT_LIMIT."""

    def put(self, key: int, facts: Facts) -> None:
        """Stores the facts of the group `key`, unless the store has facts of this group."""
        if key in self.slots:
            return
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = len(self.rows)
            self.rows.append(facts)
        if slot == len(self.flags):  # the arrays are full, so double them: the new half has copies until it is used
            self.numbers = np.tile(self.numbers, (2, 1))
            self.flags = np.tile(self.flags, 2)
        if self._characters + len(facts.text) > TEXT_LIMIT:  # text search will not find this group
            facts.text = ""
        self._characters += len(facts.text)
        self.rows[slot] = facts
        self.slots[key] = slot
        self.numbers[slot] = [facts.numbers.get(name, np.nan) for name in COLUMNS]
        bits = {1 << self._bit(name) for name in facts.flags}  # a set, so that flags that share a bit count once
        self.flags[slot] = sum(bits)
        self.version += 1

    def keep_only(self, keys: set[int]) -> None:
        """Forgets the facts of all groups whose keys are not among these."""
        for key in self.slots.keys() - keys:
            slot = self.slots.pop(key)
            self._characters -= len(self.rows[slot].text)
            self.rows[slot] = Facts()
            self._free_slots.append(slot)
            self.version += 1

    def slots_of(self, keys: Iterable[int]) -> npt.NDArray[np.int64]:
        """The slot of each key; -1: there are no facts of this group."""
        return np.fromiter((self.slots.get(key, -1) for key in keys), dtype=np.int64)

    def _bit(self, name: str) -> int:
        """The index of the bit of a flag. A new flag gets the next bit or, if none is left, shares the last bit."""
        if name not in self.names and len(self.names) < 63:
            self.names.append(name)
        if name not in self.names:
            return 62
        return self.names.index(name)
