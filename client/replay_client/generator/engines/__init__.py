"""What the generator asks of an inference engine: completions with the sampler's log-probabilities, and new weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

LOGPROBS_MODE = "processed_logprobs"
"""What `Completion.logprobs` are taken of: what tokens are drawn from, after temperature, top_k and top_p."""


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are drawn.

    The trainer can only recompute what it knows of: it divides its logits by the same temperature. With `top_p` or
    `top_k` the log-probabilities are conditional on the kept tokens, which the trainer's are not, so leave both off
    unless the correction is told about them.
    """

    temperature: float = 1.0
    """Divides the logits. Above 0, for a greedy choice has no log-probability to correct with, and at most 2."""
    top_p: float = 1.0
    """Keeps the smallest set of most likely tokens whose probabilities reach this sum. 1: all."""
    top_k: int = 0
    """Keeps this many of the most likely tokens. 0: all."""
    max_tokens: int = 256
    """Longest completion, in tokens; one that reaches it ends with finish reason "length"."""
    seed: int | None = None
    """Makes the completions of a request repeatable; None draws from the engine's own stream."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature <= 2:
            raise ValueError(f"temperature must be above 0 and at most 2, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or more, not {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")

    def describe(self) -> dict[str, Any]:
        """The fields as a group stores them, with what its log-probabilities are taken of."""
        return {**asdict(self), "logprobs_mode": LOGPROBS_MODE}


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt."""

    token_ids: list[int]
    """With the end-of-sequence token, if the model wrote one."""
    logprobs: list[float]
    """Of each token, in nats, under the distribution it was drawn from; NaN where the engine does not know."""
    text: str
    """Decoded, without special tokens."""
    finish_reason: str
    """Why it ended: "stop" (the model said so), "length" (`max_tokens` or the engine's `max_length`), or another."""
    policy_versions: list[int]
    """Of each token, the version of the weights that drew it."""


class Engine(Protocol):
    """An inference engine with one set of weights, used from one event loop.

    Any number of `generate` calls may be under way at once. Each ends when its own completions have ended, whatever
    runs beside it.
    """

    tokenizer: Any
    """A `transformers` tokenizer: the generator uses `encode`."""
    max_length: int
    """Most tokens that a prompt and its completion may have together."""

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int) -> list[Completion]:
        """Draw `n` completions of a prompt of fewer than `max_length` tokens."""
        ...

    async def load_weights(self, path: str, version: int) -> None:
        """Replace the weights by those of a folder in Hugging Face's format, which draw tokens from now on.

        Completions under way stop for it and go on with the new weights: the tokens that they have stay, with the
        log-probabilities and the version they were drawn with, and their keys and values are computed anew, so that
        what follows is distributed exactly as the new weights say. Until a version is loaded it is 0.

        Raises FileNotFoundError if the folder is gone or holds no weights. No token is drawn from weights that were
        loaded in part: after a failure that left such, completions wait for the next call that succeeds.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability at temperature 1 of each token but the first, given those before it: (len - 1,) nats."""
        ...

    async def close(self) -> None:
        """Free what the engine holds, its processes included. Closing twice is harmless."""
        ...


__all__ = ["LOGPROBS_MODE", "Completion", "Engine", "SamplingConfig"]
