"""Tasks of the package reasoning-gym, scored by its own scorers on the last number of an answer.

    chain_sum     "5 + 9 - 7 ="           three terms of one digit
    two_terms     "5 + 9 ="               two of them: 160 problems to train on, so a run may have 160 groups
    gcd           "… numbers: 12, 20"     two numbers up to 60
    products      "4 * 7"                 two factors of one or two digits
    letters       "How many times does the letter "m" appear in the text: …"   three to six words
    long_products "4 * 7 * 3"             three factors of one digit
    two_digits    "42 - 25 ="             two terms of two digits
    formed        chain_sum, from a start that has its answers' form: the number alone

Where success is rare, look first at how often the most frequent answer is right, for it is what a policy learns first:
"1" is right for 53 % of the held-out problems of `letters`, "0" for 28 % of `long_products`; two_digits has none such.

A small chat model wraps its answer into a sentence. So the last number of its text is judged, and not the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TRAIN_ROWS, HELD_OUT_ROWS = 1024, 40
SUMS = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class GymTask:
    """A generator of reasoning-gym and its options."""

    name: str
    generator: str
    options: Mapping[str, int]
    max_tokens: int = 24
    """The longest completion that may be sampled, its end-of-sequence token included."""
    formed: bool = False
    """Whether the model learns the form of the answers, and no skill, before the run starts."""


@dataclass(frozen=True)
class GymProblems:
    """Entries of reasoning-gym with different questions: question, answer, metadata."""

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    """The same for every seed."""
    data: Any = field(repr=False)
    """The data set, which scores answers."""

    def score(self, entry: dict[str, Any], text: str) -> float:
        """1 if the last number of `text` is right, else 0: what the scorer calls partly right is wrong."""
        number = last_number(text)
        return float(number is not None and self.data.score_answer(number, entry) >= 1.0)


GYM_TASKS = {
    task.name: task
    for task in (
        GymTask("chain_sum", "chain_sum", SUMS),
        GymTask("formed", "chain_sum", SUMS, formed=True),
        GymTask("two_terms", "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
        GymTask("gcd", "gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 60}),
        GymTask("products", "products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
        GymTask("letters", "letter_counting", {"min_words": 3, "max_words": 6}),
        GymTask("long_products", "products", {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
        GymTask("two_digits", "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}),
    )
}


def last_number(text: str) -> str | None:
    """The last number in a text, as it is written there; None: there is none."""
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def gym_problems(task: GymTask, seed: int) -> GymProblems:
    """Problems without a question twice: those of training differ by seed, and none of them is held out."""
    import reasoning_gym

    held_out = _distinct(reasoning_gym.create_dataset(task.generator, size=400, seed=10**6, **task.options))
    held_out = held_out[:HELD_OUT_ROWS]
    questions = {entry["question"] for entry in held_out}
    data = reasoning_gym.create_dataset(task.generator, size=2 * TRAIN_ROWS, seed=seed, **task.options)
    train = [entry for entry in _distinct(data) if entry["question"] not in questions]
    return GymProblems(train[:TRAIN_ROWS], held_out, data)


def _distinct(data: Any) -> list[dict[str, Any]]:
    return list({entry["question"]: entry for entry in data}.values())
