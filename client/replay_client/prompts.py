"""Prompts: the rows of a JSON lines file, handed out epoch by epoch in an order that a seed fixes."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One prompt with whatever its reward function needs."""

    prompt_id: str
    """Names it across epochs."""
    text: str
    row: Mapping[str, Any]
    """The whole row, "prompt" included."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Prompt:
        """The prompt in `row["prompt"]`, named by `row["prompt_id"]` or else by a hash of its text.

        Raises ValueError if the text is missing or empty.
        """
        text = row.get("prompt")
        if not isinstance(text, str) or not text:
            raise ValueError(f"'prompt' must be a text that is not empty, not {text!r}")
        prompt_id = row.get("prompt_id")
        if prompt_id is None:
            prompt_id = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return cls(prompt_id=str(prompt_id), text=text, row=row)


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """All prompts of a file with one JSON object a line; empty lines do not count.

    Raises ValueError, naming file and line, for a line that holds no prompt, and for a file without any.
    """
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__} where an object with a 'prompt' belongs")
            prompts.append(Prompt.from_row(row))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts


def cycle_prompts(prompts: Sequence[Prompt], *, seed: int = 0, epochs: int | None = None) -> Iterator[Prompt]:
    """Every prompt once an epoch, in an order that follows from `seed` and the epoch; `epochs` None: for ever."""
    for epoch in range(epochs) if epochs is not None else itertools.count():
        order = list(prompts)
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from order
