"""Small models, probes and a client that records, for the tests of the generator and its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from replay_generator.engines import Completion, SamplingConfig

EOS = 1


class Letters:
    """A tokenizer with a token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


@dataclass
class ScriptedEngine:
    """An engine whose completions are made up; `hold` keeps generations from ending."""

    tokenizer: Any = field(default_factory=Letters)
    max_length: int = 64
    model: str | None = None
    completions: Sequence[Completion] = (
        Completion([7, 8, EOS], [-0.1, -0.2, -0.3], "78", "stop", []),
        Completion([], [], "", "abort", []),
        Completion([9], [float("nan")], "9", "length", []),
    )
    hold: asyncio.Event | None = None
    generating: int = 0
    most_generating: int = 0
    seeds: list[int | None] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    version: int = 0
    generating_at_load: list[int] = field(default_factory=list)
    probe_scores: list[float] = field(default_factory=list)
    closed: int = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, *_: Any) -> list[Completion]:
        version = self.version
        self.generating += 1
        self.most_generating = max(self.most_generating, self.generating)
        self.seeds.append(sampling.seed)
        try:
            await asyncio.sleep(0)
            if self.hold is not None:
                await self.hold.wait()
        finally:
            self.generating -= 1
        drawn = [self.completions[index % len(self.completions)] for index in range(n)]
        return [replace(each, policy_versions=[version] * len(each.token_ids)) for each in drawn]

    def let_go(self) -> None:
        """Ends the generations that `hold` keeps, and keeps no other."""
        assert self.hold is not None
        self.hold.set()

    async def load_weights(self, path: str, version: int) -> None:
        if not Path(path).is_dir():
            raise FileNotFoundError(f"no *.safetensors in {path}")
        self.generating_at_load.append(self.generating)
        await asyncio.sleep(0)
        self.loaded.append(path)
        self.version = version

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return self.probe_scores

    async def close(self) -> None:
        self.closed += 1
