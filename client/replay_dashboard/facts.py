"""Facts: what the page keeps of each group. Numbers are columns, so that 100,000 groups sort fast."""

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
"""Numbers of a group; NaN where unknown."""
A_PROMPT = "a prompt"
A_CURSOR = "how far prompts are loaded"
"""Flags of the items of a table of prompts."""
DAMAGED = "damaged"
RAW_BYTES = "raw bytes"
NO_VARIANCE = "no variance"
NOTES = (DAMAGED, RAW_BYTES, NO_VARIANCE, "all cut off", "identical answers", "no log-probs", "bad log-probs")
"""Flags of odd groups. Finish reasons are flags as well, such as "ended by stop"."""
SEARCHED = 16_000
"""Characters of a group that text search looks at."""
TEXT_LIMIT = 256 << 20
"""Most characters of all groups together for text search. Further groups are not found by their text."""


@dataclass
class Facts:
    """The facts of one group; for a payload that is no group, only a flag."""

    numbers: dict[str, float] = field(default_factory=dict)
    """The values of COLUMNS, in their order; empty if the payload is no group."""
    flags: frozenset[str] = frozenset()
    prompt_id: str = ""
    prompt: str = ""
    """Beginning and end of the prompt's text."""
    text: str = ""
    """The text that a search reads, in lower case."""


def facts_of(payload: bytes | memoryview, text: TokenText, solved_reward: float) -> Facts:
    """The facts of a payload. It never raises: a payload that is no group has a flag that says so."""
    try:
        group = RolloutGroup.decode(payload)
    except ValueError:
        if is_stored_prompt(payload):
            return _facts_of_prompt(payload)
        # The last byte of MAGIC is the version of the format.
        looks_like_one = bytes(memoryview(payload)[: len(MAGIC) - 1]) == MAGIC[:-1]
        return Facts(flags=frozenset({DAMAGED if looks_like_one else RAW_BYTES}))
    with np.errstate(all="ignore"):  # rewards and log-probabilities may be infinite
        return _facts(group, text, solved_reward)


def _facts_of_prompt(payload: bytes | memoryview) -> Facts:
    try:
        item = decode_item(payload)
    except ValueError:
        return Facts(flags=frozenset({DAMAGED}))
    if isinstance(item, PromptCursor):
        return Facts(flags=frozenset({A_CURSOR}))
    content = item.prompt.content
    if isinstance(content, str):
        text = content
    else:
        text = "\n".join(str(message["content"]) for message in content)
    return Facts(
        flags=frozenset({A_PROMPT}),
        prompt_id=item.prompt.prompt_id[:200],
        prompt=_shortened(text),
        text=text[:SEARCHED].lower(),
    )


def _shortened(prompt: str) -> str:
    return prompt if len(prompt) <= 160 else f"{prompt[:80]} … {prompt[-76:]}"


def _facts(group: RolloutGroup, text: TokenText, solved_reward: float) -> Facts:
    rewards = group.rewards.astype(np.float64)
    logprobs = group.rollout_logprobs
    known = logprobs[~np.isnan(logprobs)]
    reasons = [str(reason)[:40] for reason in group.finish_reasons or ()]
    notes = {
        NO_VARIANCE: bool(np.isfinite(rewards).all()) and not carries_gradient(group),
        "all cut off": bool(reasons) and set(reasons) == {"length"},
        "identical answers": len(rewards) > 1 and _different_answers(group) == 1,
        "no log-probs": known.size == 0 and bool(group.sampled_lengths.any()),
        "bad log-probs": known.size > 0 and not -1e4 < float(known.min()) <= float(known.max()) < 1e-3,
    }
    flags = [name for name, holds in notes.items() if holds]
    flags += [f"ended by {reason}" for reason in reasons]
    prompt = text.text(group.prompt_ids[:4096].tolist())
    return Facts(
        numbers={
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "reward_max": float(rewards.max()),
            "completions": float(rewards.size),
            "length_mean": float(group.rollout_lengths.mean()),
            "logprob_mean": float(known.mean(dtype=np.float64)) if known.size else np.nan,
            "truncated_share": reasons.count("length") / len(reasons) if reasons else np.nan,
            "solved_share": float((rewards >= solved_reward).mean()),
        },
        flags=frozenset(flags),
        prompt_id=str(group.prompt_id)[:200],
        prompt=_shortened(prompt),
        text=_searched_text(group, prompt, text),
    )


def _different_answers(group: RolloutGroup) -> int:
    """The number of different answers: rollouts with the same sampled tokens count once."""
    answers_G: list[list[bytes]] = [[] for _ in group.rewards]
    for rollout, span in zip(group.sequence_rollouts.tolist(), group.sampled_spans(), strict=True):
        answers_G[rollout].append(group.completion_ids[span].tobytes())
    return len({tuple(answer) for answer in answers_G})


def _searched_text(group: RolloutGroup, prompt: str, text: TokenText) -> str:
    """The prompt and the completions in lower case, as far as SEARCHED characters reach."""
    parts = [prompt]
    length = len(prompt)
    if text.source:
        for ids in group.completions():
            if length >= SEARCHED:
                break
            # More tokens than characters that are left are hardly ever needed.
            part = text.text(ids[: SEARCHED - length].tolist())
            parts.append(part)
            length += len(part)
    return "\n".join(parts)[:SEARCHED].lower()


class FactsStore:
    """The facts of many groups, with one slot for each. A new group takes the slot of one that was forgotten."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        """The slot of each group, by the key of its item."""
        self.numbers = np.full((1024, len(COLUMNS)), np.nan, dtype=np.float32)
        """The COLUMNS of each slot. This array and `flags` are doubled when all their slots are used."""
        self.flags = np.zeros(1024, dtype=np.int64)
        """The flags of each slot, as bits."""
        self.names = list(NOTES)
        """Names of the flags; a flag's index is its bit. An int64 has 63 usable bits: further flags share the last."""
        self.rows: list[Facts] = []
        """The facts of each slot that was ever used."""
        self.version = 0
        """Increases with every change."""
        self._free: list[int] = []
        """The slots of forgotten groups."""
        self._characters = 0
        """Characters of the texts of all groups together: at most TEXT_LIMIT."""

    def put(self, key: int, facts: Facts) -> None:
        if key in self.slots:
            return
        slot = self._free.pop() if self._free else len(self.rows)
        if slot == len(self.rows):
            self.rows.append(facts)
        if slot == len(self.flags):
            self.numbers = np.tile(self.numbers, (2, 1))
            self.flags = np.tile(self.flags, 2)
        if self._characters + len(facts.text) > TEXT_LIMIT:
            facts.text = ""
        self._characters += len(facts.text)
        self.rows[slot] = facts
        self.slots[key] = slot
        self.numbers[slot] = [facts.numbers.get(name, np.nan) for name in COLUMNS]
        bits = {1 << self._bit(name) for name in facts.flags}
        self.flags[slot] = sum(bits)
        self.version += 1

    def keep_only(self, keys: set[int]) -> None:
        """Forgets all other groups."""
        for key in self.slots.keys() - keys:
            slot = self.slots.pop(key)
            self._characters -= len(self.rows[slot].text)
            self.rows[slot] = Facts()
            self._free.append(slot)
            self.version += 1

    def slots_of(self, keys: Iterable[int]) -> npt.NDArray[np.int64]:
        """The slot of each key; -1: its payload has not been read."""
        return np.fromiter((self.slots.get(key, -1) for key in keys), dtype=np.int64)

    def _bit(self, name: str) -> int:
        if name not in self.names and len(self.names) < 63:
            self.names.append(name)
        return self.names.index(name) if name in self.names else 62
