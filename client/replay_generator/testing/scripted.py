"""ScriptedEngine: an engine without a model, which answers with the completions that a test gives it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from replay_generator.engines import Completion, OnFinished, SamplingConfig

EOS = 1
"""The token that ends a completion."""


class Letters:
    """A tokenizer with one token for each character. The token id is the code point of the character."""

    def encode(self, text: str, **_: Any) -> list[int]:
        """The token of each character. Options, such as add_special_tokens, change nothing."""
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """The characters of the tokens; EOS has no character. Options change nothing."""
        return "".join(chr(token) for token in token_ids if token != EOS)


def make_completion(text: str, *, logprob: float = -1.0, finish_reason: str = "stop") -> Completion:
    """A completion with this text, in the tokens of Letters. If `finish_reason` is "stop", EOS is its last token.

    `logprob`: the log-probability of every token, in nats.
    """
    token_ids = Letters().encode(text)
    if finish_reason == "stop":
        token_ids.append(EOS)
    logprobs = [logprob] * len(token_ids)
    return Completion(token_ids, logprobs, text, finish_reason, policy_versions=[0] * len(token_ids))


@dataclass
class ScriptedEngine:
    """An engine for tests of rewards, hooks and generators. It needs no model, and records its requests.

        engine = ScriptedEngine(completions=[make_completion("7"), make_completion("8")])

    The n completions of a request are the first n of `completions`. If there are fewer than n, they are repeated from
    the first one on. A request gets the same completions whatever its prompt, its seed and its `max_tokens` are. All
    their tokens have the version of the weights that were loaded when the request began.
    """

    tokenizer: Any = field(default_factory=Letters)
    """The tokenizer of prompts. Your hook gets it as `task.tokenizer`."""
    max_length: int = 64
    """The most tokens of a prompt with one completion."""
    vocabulary: int | None = None
    """The number of tokens of the model. None: unknown, so no token id counts as too large."""
    model: str | None = None
    """The folder of the first weights; None: the engine has no such folder."""
    completions: Sequence[Completion] = (
        Completion([7, 8, EOS], [-0.1, -0.2, -0.3], "78", "stop", []),
        Completion([], [], "", "abort", []),
        Completion([9], [float("nan")], "9", "length", []),
    )
    """The script. The default has three kinds of completions: a whole one, an empty one, and one that was cut off and
    whose log-probability is unknown."""
    hold: asyncio.Event | None = None
    """Requests do not end before this event is set. None: they end at once."""
    probe_scores: list[float] = field(default_factory=list)
    """The numbers that `score` returns, whatever tokens it gets."""
    prompts: list[list[int]] = field(default_factory=list)
    """The prompt of each request, as tokens."""
    seeds: list[int | None] = field(default_factory=list)
    """The seed of each request."""
    generating: int = 0
    """The number of requests that are under way."""
    most_generating: int = 0
    """The largest number of requests that were under way at the same time."""
    loaded: list[str] = field(default_factory=list)
    """The folders whose weights were loaded, in order."""
    generating_at_load: list[int] = field(default_factory=list)
    """The number of requests that were under way at each load."""
    version: int = 0
    """The version of the weights that were loaded last."""
    closed: int = 0
    """The number of calls of `close`."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, finished: OnFinished | None = None
    ) -> list[Completion]:
        """Records the request, and returns the first n completions of the script, which begins anew after its last one.

        An engine need not call `finished`, and this engine never calls it.
        """
        version = self.version
        self.prompts.append([*prompt_ids])
        self.seeds.append(sampling.seed)
        self.generating += 1
        self.most_generating = max(self.most_generating, self.generating)
        try:
            await asyncio.sleep(0)  # lets other requests begin, as every real engine does
            if self.hold is not None:
                await self.hold.wait()
        finally:
            self.generating -= 1
        drawn = []
        for index in range(n):
            drawn.append(self.completions[index % len(self.completions)])
        return [replace(completion, policy_versions=[version] * len(completion.token_ids)) for completion in drawn]

    def release(self) -> None:
        """Sets the event `hold`, so that the requests that wait for it end, and later requests do not wait."""
        assert self.hold is not None
        self.hold.set()

    async def load_weights(self, path: str, version: int) -> None:
        """Records the folder and the version. Reads no file. Raises FileNotFoundError if there is no such folder."""
        if not Path(path).is_dir():
            raise FileNotFoundError(f"no *.safetensors in {path}")
        self.generating_at_load.append(self.generating)
        await asyncio.sleep(0)  # requests may begin or end while weights are loaded
        self.loaded.append(path)
        self.version = version

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Returns `probe_scores`."""
        return self.probe_scores

    async def close(self) -> None:
        """Counts this call in `closed`."""
        self.closed += 1


__all__ = ["EOS", "Letters", "ScriptedEngine", "make_completion"]
