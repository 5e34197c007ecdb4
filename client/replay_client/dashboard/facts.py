"""Facts: what the page knows of a group without its payload, in columns, so that 100,000 of them sort at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from replay_client.dashboard.tokens import TokenText
from replay_client.rollout import MAGIC, RolloutGroup

COLUMNS = (
    *("reward_mean", "reward_std", "reward_max", "completions", "prompt_tokens", "length_mean", "length_max"),
    *("logprob_mean", "truncated_share", "solved_share"),
)
"""Numbers of a group; NaN where they are not known."""
NOTES = ("damaged", "raw bytes", "no variance", "all cut off", "identical answers", "no log-probs", "bad log-probs")
"""What is odd about a group; a bit each."""
SEARCHED = 16_000
"""Characters of a group that text search looks at."""
TEXT_BYTES = 256 << 20
"""Characters of all groups together that are kept for text search."""


@dataclass
class Facts:
    """One group, or what its payload is instead."""

    numbers: dict[str, float] = field(default_factory=dict)
    notes: int = 0
    finish: frozenset[str] = frozenset()
    prompt_id: str = ""
    prompt: str = ""
    """The begin of the prompt's text."""
    text: str = ""
    """What text search looks at, in lower case."""


def facts_of(payload: bytes | memoryview, text: TokenText, solved_above: float) -> Facts:
    """The facts of a payload, whatever it holds."""
    try:
        group = RolloutGroup.decode(payload)
    except ValueError:
        looks_like_one = bytes(memoryview(payload)[: len(MAGIC) - 1]) == MAGIC[:-1]
        return Facts(notes=_bits("damaged" if looks_like_one else "raw bytes"))
    with np.errstate(all="ignore"):  # rewards and log-probabilities may be infinite
        return _facts(group, text, solved_above)


def _facts(group: RolloutGroup, text: TokenText, solved_above: float) -> Facts:
    rewards, logprobs = group.rewards.astype(np.float64), group.rollout_logprobs
    known = logprobs[~np.isnan(logprobs)]
    reasons = group.finish_reasons or ()
    completions = [ids.tobytes() for ids in group.completions()]
    notes = {
        "no variance": len(rewards) > 1 and float(np.ptp(rewards)) <= 1e-6,
        "all cut off": bool(reasons) and set(reasons) == {"length"},
        "identical answers": len(completions) > 1 and len(set(completions)) == 1,
        "no log-probs": known.size == 0 and logprobs.size > 0,
        "bad log-probs": known.size > 0 and (float(known.max()) > 1e-3 or not np.isfinite(known).all()),
    }
    prompt = text.text(group.prompt_ids[:4096].tolist())
    words = [prompt]
    for ids in group.completions():
        if (left := SEARCHED - sum(map(len, words))) <= 0 or not text.known:
            break
        words.append(text.text(ids[:left].tolist()))
    return Facts(
        numbers={
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "reward_max": float(rewards.max()),
            "completions": float(rewards.size),
            "prompt_tokens": float(group.prompt_ids.size),
            "length_mean": float(group.completion_lengths.mean()),
            "length_max": float(group.completion_lengths.max()),
            "logprob_mean": float(known.mean(dtype=np.float64)) if known.size else np.nan,
            "truncated_share": reasons.count("length") / len(reasons) if reasons else np.nan,
            "solved_share": float((rewards > solved_above).mean()),
        },
        notes=_bits(*(name for name, holds in notes.items() if holds)),
        finish=frozenset(reason[:40] for reason in reasons),
        prompt_id=group.prompt_id[:200] if isinstance(group.prompt_id, str) else repr(group.prompt_id)[:200],
        prompt=prompt[-160:] if len(prompt) <= 160 else f"{prompt[:80]} … {prompt[-76:]}",
        text="\n".join(words)[:SEARCHED].lower(),
    )


def _bits(*names: str) -> int:
    return sum(1 << NOTES.index(name) for name in names)


class FactsStore:
    """The facts of many groups, a slot each. Slots of groups that are gone are used again."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.numbers = {name: np.full(1024, np.nan, dtype=np.float32) for name in COLUMNS}
        self.notes = np.zeros(1024, dtype=np.int64)
        self.finish = np.zeros(1024, dtype=np.int64)
        self.reasons: list[str] = []
        """Finish reasons seen; the bit of each in `finish` is its index. More than 62 share the last."""
        self.rows: list[Facts] = []
        self.version = 0
        """Grows with every change."""
        self._free: list[int] = []
        self._text = 0

    def __len__(self) -> int:
        return len(self.slots)

    def put(self, key: int, facts: Facts) -> None:
        if key in self.slots:
            return
        slot = self._free.pop() if self._free else len(self.rows)
        if slot == len(self.rows):
            self.rows.append(facts)
            if slot == self.notes.size:
                self._grow()
        if self._text + len(facts.text) > TEXT_BYTES:
            facts.text = ""
        self._text += len(facts.text)
        self.rows[slot], self.slots[key] = facts, slot
        for name, column in self.numbers.items():
            column[slot] = facts.numbers.get(name, np.nan)
        self.notes[slot] = facts.notes
        self.finish[slot] = sum({1 << self._reason(reason) for reason in facts.finish})
        self.version += 1

    def forget(self) -> set[int]:
        """Forgets all groups. Returns their keys."""
        keys = set(self.slots)
        self.keep_only(set())
        return keys

    def keep_only(self, keys: set[int]) -> None:
        """Forgets all other groups."""
        for key in self.slots.keys() - keys:
            slot = self.slots.pop(key)
            self._text -= len(self.rows[slot].text)
            self.rows[slot] = Facts()
            self._free.append(slot)
            self.version += 1

    def slots_of(self, keys: Iterable[int]) -> npt.NDArray[np.int64]:
        """The slot of each key; -1: its payload has not been read."""
        find = self.slots.get
        return np.fromiter((find(key, -1) for key in keys), dtype=np.int64)

    def _reason(self, reason: str) -> int:
        if reason not in self.reasons and len(self.reasons) < 62:
            self.reasons.append(reason)
        return self.reasons.index(reason) if reason in self.reasons else 61

    def _grow(self) -> None:
        size = self.notes.size
        self.notes, self.finish = (np.concatenate([c, np.zeros(size, np.int64)]) for c in (self.notes, self.finish))
        for name, column in self.numbers.items():
            self.numbers[name] = np.concatenate([column, np.full(size, np.nan, dtype=np.float32)])
