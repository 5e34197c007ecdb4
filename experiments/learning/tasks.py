"""Verifiable tasks made from a seed: a prompt, and the one text that answers it.

    sums     "58+7="      "56"         an addition, units first; operand sizes as in the demo
    steps    "38+5+9="    "34 25"      both sums on the way, units first: every step must be right
    sort     "52817?"     "12578"      held out: nothing was tuned on it
    reverse  "52817?"     "71825"      held out too
    split    "473="       "964+4"      any two numbers that add up to it, the second one of a digit: nine right answers

All right answers of a prompt are known, so a model's solve rate at temperature 1 is computed exactly, as the mean of
their probability, without sampling.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from examples.demo.task import a_sum, two_steps

Row = dict[str, str]
"""prompt; answer: the one to learn in the warm-up; answers: if there are several, all of them, with spaces between."""


@dataclass(frozen=True)
class Task:
    """Draws one problem: `problem(rng)` returns a prompt and its answer, in the demo's characters."""

    name: str
    problem: Callable[[random.Random], tuple[str, str]]
    max_tokens: int
    """The longest completion that may be sampled, its end-of-sequence token included."""
    answers: Callable[[str], list[str]] | None = None
    """All right answers to a prompt; None: that of `problem` is the only one."""


@dataclass(frozen=True)
class Problems:
    """Disjoint rows: for the supervised warm-up, for the RL prompts, and held out for the solve rate."""

    warm_up: list[Row]
    train: list[Row]
    held_out: list[Row]


def _digits(rng: random.Random) -> str:
    return "".join(str(rng.randrange(10)) for _ in range(rng.choice((4, 5, 6))))


def _sort(rng: random.Random) -> tuple[str, str]:
    digits = _digits(rng)
    return digits + "?", "".join(sorted(digits))


def _reverse(rng: random.Random) -> tuple[str, str]:
    digits = _digits(rng)
    return digits + "?", digits[::-1]


def _split(rng: random.Random) -> tuple[str, str]:
    total, second = rng.randrange(10 ** rng.choice((2, 3, 3)), 10**4), rng.randrange(1, 10)
    return f"{total}=", f"{str(total - second)[::-1]}+{second}"


def _splits(prompt: str) -> list[str]:
    total = int(prompt[:-1])
    return [f"{str(total - second)[::-1]}+{second}" for second in range(1, 10)]


TASKS = {
    task.name: task
    for task in (
        Task("sums", a_sum, 6),
        Task("steps", two_steps, 9),
        Task("sort", _sort, 8),
        Task("reverse", _reverse, 8),
        Task("split", _split, 7, _splits),
    )
}
WARM_UP_ROWS, TRAIN_ROWS, HELD_OUT_ROWS = 3000, 512, 512


def load_task(name: str) -> Task:
    """One of TASKS, or any Task as "package.module:attribute". Raises ValueError for a name that is neither."""
    if name in TASKS:
        return TASKS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"there is no task {name!r}; there are {', '.join(TASKS)}, or 'package.module:attribute'")
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, Task):
        raise ValueError(f"{name!r} is a {type(found).__name__}, not a experiments.learning.tasks.Task")
    return found


def make_problems(task: Task, seed: int) -> Problems:
    """Distinct problems of `task`, the same for the same seed."""
    rng = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < WARM_UP_ROWS + TRAIN_ROWS + HELD_OUT_ROWS:
        prompt, answer = task.problem(rng)
        rows[prompt] = answer
    every = [_row(task, prompt, answer) for prompt, answer in rows.items()]
    rng.shuffle(every)
    return Problems(
        every[:WARM_UP_ROWS], every[WARM_UP_ROWS : WARM_UP_ROWS + TRAIN_ROWS], every[WARM_UP_ROWS + TRAIN_ROWS :]
    )


def right_texts(row: Row) -> list[str]:
    """All right answers of a row."""
    return row["answers"].split() if "answers" in row else [row["answer"]]


def _row(task: Task, prompt: str, answer: str) -> Row:
    row = {"prompt": prompt, "answer": answer}
    return row if task.answers is None else row | {"answers": " ".join(task.answers(prompt))}
