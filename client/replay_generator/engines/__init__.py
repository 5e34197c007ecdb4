"""Engine: the interface of an inference engine, which draws completions and loads new weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import Field

from replay_client.columns import OFFSETS, RAGGED
from replay_client.errors import ReplayError
from replay_client.rollout import MAX_LOGPROB
from replay_client.sampling_masks import CUT_OFF, truncates
from replay_client.settings import Count, Share, settings
from replay_protos.words import counted

LOGPROBS_MODE = "processed_logprobs"
"""The mode of `Completion.logprobs`. They are of the distribution from which tokens are drawn, which is the one after
temperature, min_p, top_k and top_p."""


class EngineError(ReplayError):
    """An engine died, or cannot do its task. The message has the reason and the remedy."""


class CompletionError(EngineError):
    """An engine returned a completion that no policy can have drawn. The rollout that requested it fails."""


@settings()
class SamplingConfig:
    """The settings for drawing completions.

    The trainer computes log-probabilities again, with its logits divided by the same temperature. With `top_p`, `top_k`
    or `min_p`, the engine's log-probabilities are relative to the kept tokens. Therefore the engine returns the ids of
    the kept tokens (`sampling_masks`), and the trainer divides by the probability of these tokens too.
    """

    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Divides the logits; above 0 and at most 2.

    It cannot be 0, because the log-probability of a greedy choice says nothing."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keeps the most likely tokens, up to this total probability; 1: all."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Keeps this many of the most likely tokens; 0: all."""
    min_p: Share = 0.0
    """Keeps tokens with at least this share of the highest probability; 0: all. Applied before top_k and top_p."""
    sampling_masks: Annotated[int, Field(ge=0, lt=2**31 - 1)] = 512
    """The most ids of kept tokens to store for a token; 0: none. Only with top_p, top_k or min_p.

    An id takes 4 bytes. A larger set of ids is left out and counted. For such a token, the trainer computes the
    log-probability relative to all tokens of the vocabulary."""
    max_tokens: Annotated[Count, Field(lt=2**31)] = 256
    """The most tokens of a completion. A completion that reaches this length has the finish reason "length"."""
    seed: int | None = None
    """Makes the completions of a request repeatable. None: the engine uses its own stream of random numbers."""

    @property
    def largest_mask(self) -> int:
        """The most ids of the mask of one token; 0: no masks are stored.

        No masks are stored if none are wanted, or if sampling keeps all tokens.
        """
        if not truncates(vars(self)):
            return 0
        return self.sampling_masks

    def describe(self) -> dict[str, Any]:
        """The fields as a group stores them, with `logprobs_mode`, and without `sampling_masks`."""
        fields = asdict(self)
        del fields["sampling_masks"]  # it says what to store, and not how tokens are drawn
        if not self.min_p:
            del fields["min_p"]  # a group without the field has min_p 0, and is smaller
        return {**fields, "logprobs_mode": LOGPROBS_MODE}


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt."""

    token_ids: list[int]
    """(T,) with the end-of-sequence token, if the model wrote one."""
    logprobs: list[float]
    """(T,) of each token, in nats, under the distribution from which it was drawn; NaN: unknown."""
    text: str
    """Decoded, without special tokens."""
    finish_reason: str
    """Why the completion ended: "stop" (by the model), "length" (`max_tokens` or the engine's `max_length`), or another
    reason."""
    policy_versions: list[int]
    """(T,) of each token, the version of the weights that drew it."""
    loss_mask: list[bool] | None = None
    """(T,) False for tokens that the policy did not write, if the engine itself plays several turns. No trainer trains
    on these tokens. None: the policy wrote all tokens."""
    extras: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Arrays of the completion, such as log-probabilities of other tokens, by their names in the `extras` of the group.
    If a completion lacks an array that other completions have, its tokens get 0, or an empty set."""
    axes: Mapping[str, str] = field(default_factory=dict)
    """The axis of each extra, by its name, as in RolloutGroup. "token": T rows; also the axis of names that are absent
    here. "ragged:token": a set for each of the T tokens, with T + 1 offsets. "whole": a row for each token that the
    engine has read, in order, from the first token of the prompt on."""

    def cut(self, tokens: int, text: str) -> Completion:
        """The completion of only the first `tokens`, whose text is `text`, as if the policy had ended it there."""
        dropped = len(self.token_ids) - tokens

        def first_rows(name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            """The part of an extra that belongs to the first `tokens`."""
            if self.axes.get(name.removesuffix(OFFSETS)) != RAGGED:
                return values[: len(values) - dropped]  # a row for each token, of the prompt too for the axis "whole"
            if name.endswith(OFFSETS):
                return values[: tokens + 1]
            end = self.extras[name + OFFSETS][tokens]  # the end of the set of the last token that stays
            return values[:end]

        return replace(
            self,
            token_ids=self.token_ids[:tokens],
            logprobs=self.logprobs[:tokens],
            text=text,
            finish_reason="stop",
            policy_versions=self.policy_versions[:tokens],
            loss_mask=None if self.loss_mask is None else self.loss_mask[:tokens],
            extras={name: first_rows(name, values) for name, values in self.extras.items()},
        )


OnFinished = Callable[[int, Completion], None]
"""Receives the number of a completion in its request, and the completion."""

_TOKEN_LIMIT = 1 << 31
"""A group holds only token ids below this number, because they are int32."""


def fault_of(completion: Completion | None, sampling: SamplingConfig, vocabulary: int | None) -> str:
    """The reason that no policy can have drawn this completion, with the remedy; "": the completion is valid.

    Completions of all engines are checked here, and nowhere else. `completion` None: the engine returned too few
    completions. `vocabulary`: the number of tokens of the model; None: unknown. NaN stands for an unknown
    log-probability, and is valid.
    """
    if completion is None:
        return "is missing: an engine returns as many as it is asked for"
    if completion.finish_reason == "error":
        return "has the finish_reason 'error': the log of the engine says why"
    tokens_T = np.asarray(completion.token_ids)
    logprobs_T = np.asarray(completion.logprobs, np.float64)
    num_versions = len(completion.policy_versions)
    length = counted(tokens_T.size, "token")
    if not tokens_T.size == logprobs_T.size == num_versions:
        return f"has {length}, {logprobs_T.size} logprobs, {num_versions} policy_versions: it needs as many"
    # A completion with a loss mask has several turns. `max_tokens` limits each turn, and not all together.
    if tokens_T.size > sampling.max_tokens and completion.loss_mask is None:
        return f"has {length}, and max_tokens is {sampling.max_tokens}: does the engine know that?"
    limit = vocabulary or _TOKEN_LIMIT
    wrong_tokens = tokens_T[(tokens_T < 0) | (tokens_T >= limit)]
    if wrong_tokens.size:
        token = wrong_tokens[0]
        return f"has the token {token}, and the model those from 0 to {limit - 1}: give the engine the same model"
    # NaN passes: a comparison with NaN is False.
    wrong_logprobs = logprobs_T[(logprobs_T < CUT_OFF) | (logprobs_T > MAX_LOGPROB)]
    if wrong_logprobs.size:
        logprob = wrong_logprobs[0]
        return f"has the log-probability {logprob:g}: that of a drawn token is finite, at most 0, or NaN if unknown"
    return ""


def why_unfit(engine: Engine, token_ids: Sequence[int]) -> str:
    """The reason that the engine cannot continue these tokens, with the remedy; "" if it can."""
    if not 0 < len(token_ids) < engine.max_length:
        return f"{len(token_ids)} tokens; the engine takes 1 to {engine.max_length - 1}, and draws one more"
    why = why_unknown(engine, token_ids)
    if why:
        return why
    if getattr(engine, "vocabulary", None) is not None:
        return ""
    # The model's number of tokens is unknown. So the tokens of the tokenizer are allowed, and no others, because the
    # engine may die of a token that its model does not have.
    highest = max(token_ids)
    size = _size_of(engine.tokenizer, highest)
    if size is not None and highest >= size:
        return f"the token {highest}, and its tokenizer has the tokens 0 to {size - 1}"
    return ""


def why_unknown(engine: Engine, token_ids: Sequence[int]) -> str:
    """One of these tokens that the engine's model does not have, with the remedy; "" if the model has all.

    An engine may die of a token for which its model has no row. `Engine.vocabulary` decides, and not the tokenizer: a
    tokenizer may have tokens that the model lacks, and a model may draw tokens that the tokenizer lacks.
    """
    lowest = min(token_ids, default=0)
    highest = max(token_ids, default=0)
    vocabulary = getattr(engine, "vocabulary", None)
    if lowest < 0:
        return f"the token {lowest}, and tokens are 0 or above"
    limit = vocabulary or _TOKEN_LIMIT
    if highest < limit:
        return ""
    if vocabulary is None:
        return f"the token {highest}, and no group holds tokens from {_TOKEN_LIMIT} on"
    wrong = f"the token {highest}, and the model has the tokens 0 to {vocabulary - 1}"
    size = _size_of(engine.tokenizer, highest)
    if size is not None and highest < size:
        return f"{wrong}: its tokenizer was extended, so resize its embedding too, or leave out the text of this token"
    return f"{wrong}: give the engine the model that these tokens are of"


def _size_of(tokenizer: Any, token: int) -> int | None:
    """The number of tokens of a tokenizer; None: unknown.

    The ids of a tokenizer may have gaps, so an id may be above the number of tokens. If `token` is not below that
    number, the result is at least the highest id plus one.
    """
    if not hasattr(tokenizer, "__len__"):
        return None
    size = len(tokenizer)
    if token >= size and hasattr(tokenizer, "get_vocab"):  # only in this case, because it is slow to list all ids
        highest_id = max(tokenizer.get_vocab().values(), default=-1)
        size = max(size, highest_id + 1)
    return size


def text_of(tokenizer: Any, token_ids: Sequence[int], **options: Any) -> str:
    """The text of these tokens, by `tokenizer.decode`, which gets `options`.

    A model may draw tokens that only pad its embedding. They have no text, so this leaves them out. Some tokenizers do
    so themselves, and others raise an error.
    """
    try:
        return str(tokenizer.decode(token_ids, **options))
    except Exception:
        if not hasattr(tokenizer, "get_vocab"):
            raise
        known = set(tokenizer.get_vocab().values())
        readable = [token for token in token_ids if token in known]
        if len(readable) == len(token_ids):  # the tokenizer has all tokens, so the error has another cause
            raise
        return str(tokenizer.decode(readable, **options))


class Engine(Protocol):
    """An inference engine with one set of weights, used from one event loop.

    Any number of `generate` calls may be under way at once. Each returns when its own completions have ended.
    """

    tokenizer: Any
    """A tokenizer of `transformers`, or an object with the same methods."""
    max_length: int
    """The most tokens of a prompt with one completion. If a model has several sets of rotary frequencies, this length
    also chooses one of them. An engine whose frequencies were chosen by a greater length has that length as
    `served_length`."""
    vocabulary: int | None
    """The number of tokens of the model, with those that only pad its embedding; None: unknown.

    The generator uses no other tokens than these. If the number is unknown, the tokenizer decides.
    """

    @property
    def model(self) -> str | None:
        """The folder of the weights that the engine started with, or their name on the hub; None: unknown."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, finished: OnFinished | None = None
    ) -> list[Completion]:
        """Draws `n` completions of a prompt of fewer than `max_length` tokens.

        `finished` is called on the event loop with the number of a completion, from 0 to n - 1, and the completion. The
        call comes as soon as this completion has ended, while others may still be drawn. If an engine only knows that a
        completion has ended when all of them have ended, it need not call `finished`.
        """
        ...

    async def load_weights(self, path: str, version: int) -> None:
        """Replaces the weights by those of a folder in Hugging Face's format. The first weights have version 0.

        Completions under way pause, and continue with the new weights. Their tokens stay, each with its log-probability
        and version. The keys and values of these tokens are computed again, so that the next tokens are distributed
        exactly as the new weights say.

        Raises FileNotFoundError if the folder is gone or holds no weights. No token is drawn from partly loaded
        weights: after a load that failed halfway, completions wait for the next call that succeeds.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """The log-probability (T - 1,) in nats of each token but the first, given all before it, at temperature 1."""
        ...

    async def close(self) -> None:
        """Frees memory and processes of the engine. A second call is harmless."""
        ...


__all__ = [
    "LOGPROBS_MODE",
    "Completion",
    "CompletionError",
    "Engine",
    "EngineError",
    "OnFinished",
    "SamplingConfig",
    "text_of",
]
