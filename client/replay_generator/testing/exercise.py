"""exercise_engine: checks everything that a generator relies on in an engine.

* No reference model is needed: the log-probabilities of `generate` are compared with those of `score` for the same
  tokens.
* No check fails by chance, or because the machine is busy. A random result counts as a fault only if a correct engine
  gives such a result less than once in a million runs. No check depends on how long something takes, except that a call
  must return within `timeout`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np

from replay_client.columns import OFFSETS, RAGGED
from replay_client.sampling_masks import SAMPLING_MASK
from replay_client.testing import PATIENCE
from replay_generator.engines import Completion, Engine, OnFinished, SamplingConfig, fault_of, text_of, why_unfit
from replay_generator.rollouts.played_sequence import check_sequences
from replay_generator.rollouts.rollout import RolloutSequence
from replay_protos.words import counted

T = TypeVar("T")

TEXTS = ("1+1=", "12+7=?", "3 + a")
"""The prompts of all checks."""
MEMBERS = ("tokenizer", "max_length", "model", "generate", "load_weights", "score", "close")
"""Methods and attributes that every engine must have."""
IMPOSSIBLE = -25.0
"""A bound on the log-probability of equal results, in nats.

If two results that should differ are equal, and the log-probability of drawing such a result is below this bound, the
engine has a fault, because a correct engine would hardly ever draw the same result twice."""
DEVIATIONS = 7.0
"""The frequency of a token may differ from its probability by at most this many standard deviations."""
MANY = 16
"""The number of completions of each request in a comparison of requests. With this number, a correct engine hardly ever
draws equal completions by chance, even if the model ends most of them after few tokens."""
TRIES = 10
"""The most attempts of a check that only works if requests are under way at the right moment."""


async def exercise_engine(
    make: Callable[[], Engine | Awaitable[Engine]],
    *,
    weights: Sequence[str | PathLike[str]] = (),
    seeds: bool = True,
    exact_versions: bool = True,
    tolerance: float = 0.02,
    timeout: float = PATIENCE,
) -> None:
    """Checks everything that a generator relies on in your engine, and closes the engine.

        asyncio.run(exercise_engine(lambda: MyEngine("model"), weights=["step-1", "step-2"]))

    * `make` returns a new engine. Its model must not always draw the same token.
    * `weights`: two folders with different weights of this model. Without them, only the errors of `load_weights` are
      checked.
    * `seeds` False: in this engine the same seed need not give the same completions.
    * `exact_versions` False: if new weights are loaded while a completion is under way, the engine does not know which
      token of the completion was the first with the new weights.
    * `tolerance`: the largest difference between two log-probabilities of the same token, in nats. Use 0.02 for
      float32, and 0.5 for bfloat16.
    * `timeout`: seconds after which a call counts as stuck.

    One prompt is as long as `max_length` of the engine allows, so make an engine with a small `max_length`.

    Raises AssertionError at the first fault. Its message says what the engine did, and what it must do. Errors of the
    engine itself are not caught.
    """
    if weights and len(weights) != 2:
        raise ValueError(f"weights has {counted(len(weights), 'folder')}: give two, or none")
    made = make()
    if inspect.isawaitable(made):
        engine = await made
    else:
        engine = made
    try:
        exercise = _Exercise(engine, tolerance, timeout)
        await exercise.check_requests()
        await exercise.check_distributions()
        await exercise.check_draws(seeds)
        await exercise.check_concurrency()
        await exercise.check_cancellation()
        await exercise.check_missing_weights()
        if weights:
            first, second = (str(folder) for folder in weights)
            await exercise.check_weights(first, second, exact_versions)
    except BaseException:
        with contextlib.suppress(Exception):  # an error of `close` must not hide the fault
            await engine.close()
        raise
    await exercise.close()


class _Exercise:
    """The checks of one engine, in the order in which `exercise_engine` makes them. Each check raises AssertionError at
    the first fault."""

    def __init__(self, engine: Engine, tolerance: float, timeout: float) -> None:
        """`tolerance`, `timeout`: see `exercise_engine`.

        Raises AssertionError if the engine lacks a method or an attribute, or if one of its attributes is wrong.
        """
        self._engine = engine
        self._tolerance = tolerance
        self._timeout = timeout
        self._version = 0
        """The policy version of the weights that the engine has loaded; 0: the first weights."""
        self._vocabulary = getattr(engine, "vocabulary", None)
        self._check_members()
        self._prompts = [self._encoded(text) for text in TEXTS]
        """The prompts of all checks, as tokens."""
        longest_prompt = max(len(prompt) for prompt in self._prompts)
        self._long_max_tokens = min(60, engine.max_length - 1 - longest_prompt)
        """`max_tokens` of requests for long completions: at most 60, so that the checks take little time. A prompt with
        such a completion leaves room for one more token, because vLLM needs that room to score the completion."""
        if self._long_max_tokens < 1:
            self._fail(
                f"its max_length is {engine.max_length}, and the longest prompt of the checks has "
                f"{counted(longest_prompt, 'token')}: make it with {longest_prompt + 2} or more"
            )

    def _fail(self, sentence: str) -> NoReturn:
        """Raises AssertionError with the class of the engine and this sentence, whose subject is the engine."""
        raise AssertionError(f"{type(self._engine).__name__}: {sentence}")

    # ------------------------------------------------------------------------------------------------ members

    def _check_members(self) -> None:
        """Checks that the engine has all methods and attributes, and that the attributes have the right types."""
        for name in MEMBERS:
            if not hasattr(self._engine, name):
                self._fail(f"it has no {name}: the class Engine in replay_generator.engines says what that is")
        try:
            # `bind` raises TypeError if `generate` cannot be called with these arguments. It does not call `generate`.
            inspect.signature(self._engine.generate).bind([3], SamplingConfig(), 1, None)
        except TypeError as error:
            self._fail(f"generate must take (prompt_ids, sampling, n, finished=None): {error}")
        length = self._engine.max_length
        if not isinstance(length, int) or length < 2:
            self._fail(f"its max_length is {length!r}: it must be the most tokens of a prompt with its completion")
        if self._vocabulary is not None and not isinstance(self._vocabulary, int):
            self._fail(f"its vocabulary is {self._vocabulary!r}: it must be the number of tokens, or None if unknown")
        model = self._engine.model
        if model is not None and not isinstance(model, str):
            self._fail(f"its model is {model!r}: it must be the folder of the first weights as a str, or None")

    def _encoded(self, text: str) -> list[int]:
        """The tokens of a prompt. Fails unless the engine can continue these tokens."""
        ids = [*self._engine.tokenizer.encode(text)]
        if not all(isinstance(token, int) for token in ids):
            self._fail(f"its tokenizer.encode({text!r}) returned {ids!r:.80}: it must return integers")
        why = why_unfit(self._engine, ids)
        if why:
            self._fail(f"it cannot go on after its own tokenizer's tokens of {text!r}: {why}")
        return ids

    # ------------------------------------------------------------------------------------------------ one request

    async def _within(self, call: str, work: Awaitable[T]) -> T:
        """Awaits `work`, a call of the engine, and returns its result. Fails if the call takes longer than the timeout.

        `call`: the call in words, for the message.
        """
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                return await work
        except TimeoutError:
            if limit.expired():
                self._fail(f"{call} did not return within {self._timeout:g} s: every call must come to an end")
            raise  # a TimeoutError of the engine itself

    async def _draw(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        n: int,
        finished: OnFinished | None = None,
        versions: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Draws `n` completions, and checks each of them.

        `finished`: see Engine.generate; None: the argument is left out. `versions`: the policy versions that the tokens
        of the completions may have; None: only the version that is loaded.
        """
        if finished is None:  # leaving it out also checks that the engine does not need the argument
            work = self._engine.generate([*prompt_ids], sampling, n)
        else:
            work = self._engine.generate([*prompt_ids], sampling, n, finished)
        completions = await self._within("generate", work)
        if len(completions) != n:
            self._fail(f"generate returned {counted(len(completions), 'completion')} for n = {n}: it must return n")
        if versions is None:
            versions = [self._version]
        for number, completion in enumerate(completions):
            try:
                self._check_completion(completion, prompt_ids, sampling, versions)
            except AssertionError as error:  # its message begins with the verb
                self._fail(f"completion {number} of {n} {error}")
        return completions

    def _check_completion(
        self, completion: Completion, prompt_ids: Sequence[int], sampling: SamplingConfig, versions: Sequence[int]
    ) -> None:
        """Raises AssertionError for a completion that no policy can have drawn.

        The message begins with the verb, because `_draw` puts the number of the completion before it as the subject.
        """
        fault = fault_of(completion, sampling, self._vocabulary)  # a generator makes the same check in a run
        assert not fault, fault  # "": no fault
        length = len(completion.token_ids)
        limit = min(sampling.max_tokens, self._engine.max_length - len(prompt_ids))
        assert length <= limit, (
            f"has {counted(length, 'token')} after a prompt of {len(prompt_ids)}, and max_length is "
            f"{self._engine.max_length}: both together must fit into it"
        )
        self._check_end(completion, limit)
        self._check_text(completion)
        token_versions = completion.policy_versions
        assert all(version in versions for version in token_versions), (
            f"has the policy_versions {sorted({*token_versions})}, and the weights in the engine have the version "
            f"{' or '.join(map(str, versions))}: each token needs the version that drew it, and the first weights are 0"
        )
        assert token_versions == sorted(token_versions), (
            f"has the policy_versions {token_versions}: they must not fall, because weights only get newer"
        )
        mask = completion.loss_mask
        assert mask is None or len(mask) == length, (
            f"has {counted(length, 'token')} and a loss_mask of {len(mask or ())}: it needs as many"
        )
        self._check_extras(completion, prompt_ids, sampling)

    def _check_end(self, completion: Completion, limit: int) -> None:
        """Raises AssertionError if the finish reason contradicts the number of tokens or the last token.

        `limit`: the most tokens that the completion may have.
        """
        ids = completion.token_ids
        reason = completion.finish_reason
        assert reason in ("stop", "length"), (
            f"has the finish_reason {reason!r}, and nobody ended it: it must be 'stop' (by the model) or 'length'"
        )
        assert ids, f"has the finish_reason {reason!r} and no token: the end-of-sequence token belongs to token_ids"
        if reason == "length":
            assert len(ids) == limit, (
                f"has the finish_reason 'length' with {counted(len(ids), 'token')}, and may have {limit}: 'length' "
                "means that it has reached max_tokens or max_length"
            )
        tokenizer = self._engine.tokenizer
        end = getattr(tokenizer, "eos_token_id", None)  # None: unknown, so the next two checks pass
        assert end not in ids[:-1], f"goes on after the end-of-sequence token {end}: it must end with that token"
        if reason == "length":
            assert ids[-1] != end, (
                f"ends with the end-of-sequence token {end}, and has the finish_reason 'length': it must be 'stop'"
            )
        special_ids = getattr(tokenizer, "all_special_ids", None)  # None or empty: unknown
        if reason == "stop" and special_ids:
            assert ids[-1] in special_ids, (
                f"has the finish_reason 'stop' and ends with {ids[-1]}, which is no special token of its tokenizer: "
                "the end-of-sequence token belongs to token_ids"
            )

    def _check_text(self, completion: Completion) -> None:
        """Raises AssertionError if the text of the completion is not the text of its tokens.

        If the tokenizer has no `decode`, only the type of the text is checked.
        """
        text = completion.text
        assert isinstance(text, str), f"has the text {text!r}: it must be a str"
        if not hasattr(self._engine.tokenizer, "decode"):
            return
        decoded = text_of(self._engine.tokenizer, completion.token_ids, skip_special_tokens=True)
        # Engines differ in how they write spaces and incomplete characters, so these are not compared.
        assert _without_space(text) == _without_space(decoded), (
            f"has the text {text!r:.80}, and its tokens read {decoded!r:.80}: the text is that of the completion "
            "alone, without special tokens"
        )

    def _check_extras(self, completion: Completion, prompt_ids: Sequence[int], sampling: SamplingConfig) -> None:
        """Raises AssertionError if no group can hold the completion with its extras, or if a sampling mask is unwanted,
        is too large, or lacks the token that was drawn.

        `_check_mask` checks whether a mask has the right tokens, because that needs scores.
        """
        sequence = RolloutSequence(prompt_ids)
        sequence.append_completion(completion)
        try:
            check_sequences([sequence.read()])
        except (ValueError, TypeError, KeyError) as error:
            raise AssertionError(f"fits no group: {error}") from error
        if SAMPLING_MASK not in completion.extras:
            return
        # `largest_mask` is the most tokens that a mask may have; 0: the sampling wants no masks.
        assert sampling.largest_mask, "has sampling masks, and its sampling wants none: leave the column out"
        assert completion.axes.get(SAMPLING_MASK) == RAGGED, f"has sampling masks without the axis {RAGGED!r}"
        for step, mask in enumerate(_masks(completion)):  # an empty mask is unknown, and passes
            token = completion.token_ids[step]
            assert len(mask) <= sampling.largest_mask, (
                f"has a sampling mask of {len(mask)} tokens, and the largest that is wanted has "
                f"{sampling.largest_mask}: leave a larger one empty"
            )
            assert not mask or token in mask, (
                f"has a sampling mask for its token {step} without {token}, which was drawn: a mask has the tokens "
                "that top_p, top_k and min_p kept"
            )

    async def _score(self, token_ids: Sequence[int]) -> list[float]:
        """Returns what the engine's `score` says of T tokens: the log-probability of each but the first (T - 1,).

        Fails if `score` returns more or fewer numbers, or a number that is no log-probability.
        """
        scores = await self._within("score", self._engine.score([*token_ids]))
        if len(scores) != len(token_ids) - 1:
            self._fail(
                f"score returned {counted(len(scores), 'number')} for {len(token_ids)} tokens: it must return one for "
                "each token but the first"
            )
        for score in scores:
            is_logprob = math.isfinite(score) and score <= self._tolerance  # rounding may give more than 0
            if not is_logprob:
                self._fail(f"score returned {score:g}: a log-probability is finite, and at most 0")
        return [float(score) for score in scores]

    async def _check_logprobs(
        self, prompt_ids: Sequence[int], completion: Completion, version: int | None = None
    ) -> None:
        """Compares the log-probabilities of a completion, drawn at temperature 1, with the scores of its tokens.

        `version`: only tokens of this version are compared; None: all tokens.
        """
        scores = await self._score([*prompt_ids, *completion.token_ids])
        mask = completion.loss_mask or [True] * len(completion.token_ids)
        # The first token of the prompt has no score, so `scores` begins with the score of the prompt's second token.
        completion_scores = scores[len(prompt_ids) - 1 :]
        for step, score in enumerate(completion_scores):
            logprob = completion.logprobs[step]
            is_of_version = version is None or version == completion.policy_versions[step]
            if mask[step] and is_of_version:
                self._check_token(step, logprob, [score])

    def _check_token(self, step: int, logprob: float, scores: Sequence[float]) -> None:
        """Fails unless a log-probability is unknown (NaN), or agrees with one of `scores`.

        `step`: the index of the token in its completion.
        """
        # For NaN every comparison is False, so an unknown log-probability passes.
        if all(abs(logprob - score) > self._tolerance for score in scores):
            expected = " or ".join(f"{score:.4f}" for score in scores)
            self._fail(
                f"token {step} of a completion has the log-probability {logprob:.4f}, and score says {expected}: both "
                "must be that of the token after all tokens before it, by the weights of its version"
            )

    # ------------------------------------------------------------------------------------------------ the checks

    async def check_requests(self) -> None:
        """Checks that requests of any size get all completions, that a policy can have drawn each of these, and that
        the engine calls `finished` rightly.

        `_draw` checks the number of completions, and each completion. It does so in all other checks too.
        """
        for prompt_ids in self._prompts:
            for max_tokens, n in ((1, 1), (8, 3), (self._long_max_tokens, 2)):
                sampling = SamplingConfig(max_tokens=max_tokens)
                for completion in await self._draw(prompt_ids, sampling, n):
                    await self._check_logprobs(prompt_ids, completion)
        prompt_ids = self._prompts[0]
        # The longest prompt repeats a short one. It leaves room for one token.
        longest_prompt = (prompt_ids * self._engine.max_length)[: self._engine.max_length - 1]
        await self._draw(longest_prompt, SamplingConfig(max_tokens=8), 2)
        await self._check_finished(prompt_ids)

    async def _check_finished(self, prompt_ids: Sequence[int]) -> None:
        """Checks the calls of `finished`, with which an engine reports that one completion of a request has ended.

        An engine may leave out such calls. If it makes them, they must come on the event loop, at most once for each
        completion, and with the completion that `generate` returns later.
        """
        finished_early: dict[int, Completion] = {}  # by the number of the completion
        faults: list[str] = []
        event_loop_thread = threading.get_ident()

        def finished(number: int, completion: Completion) -> None:
            """Records the completion and the faults of this call. Raises nothing: an engine may catch errors."""
            if threading.get_ident() != event_loop_thread:
                faults.append("from another thread: it must be called on the event loop")
            if number in finished_early:
                faults.append(f"twice with the number {number}: each completion ends once")
            finished_early[number] = completion

        completions = await self._draw(prompt_ids, SamplingConfig(max_tokens=self._long_max_tokens), 6, finished)
        for number, completion in finished_early.items():
            if number not in range(6):
                faults.append(f"with the number {number}: the numbers of 6 completions are 0 to 5")
            elif completion.token_ids != completions[number].token_ids:
                faults.append(f"with another completion than generate returned as number {number}")
        if faults:
            self._fail(f"generate called finished {faults[0]}")

    async def check_distributions(self) -> None:
        """Checks that tokens are drawn as often as their log-probabilities say, and that temperature, top_k, top_p and
        min_p change these log-probabilities rightly."""
        prompt_ids = self._prompts[0]
        n = 256
        completions = await self._draw(prompt_ids, SamplingConfig(max_tokens=1), n)
        counts = Counter(completion.token_ids[0] for completion in completions)
        scores: dict[int, float] = {}  # the log-probability of each first token at temperature 1
        await self._add_scores(scores, prompt_ids, tokens=counts.keys())
        for token, count in counts.items():
            probability = math.exp(scores[token])
            if probability <= 0.02:
                continue  # the bound below would be too narrow: a rare token may be drawn several times by chance
            # The standard deviation of the frequency of a token in n draws. Rounding may give a probability above 1.
            deviation = math.sqrt(probability * (1 - min(probability, 1.0)) / n)
            largest_difference = DEVIATIONS * deviation + self._tolerance
            if abs(count / n - probability) > largest_difference:
                self._fail(
                    f"it drew the token {token} in {count} of {n} completions, and gives it the probability "
                    f"{probability:.3f}: tokens must be drawn as often as their probabilities say"
                )
        for sampling in SAMPLINGS:
            await self._check_first(prompt_ids, sampling, scores)

    async def _add_scores(self, scores: dict[int, float], prompt_ids: Sequence[int], tokens: Iterable[int]) -> None:
        """Adds to `scores` the log-probability, at temperature 1, of each of `tokens` as the first token behind the
        prompt."""
        for token in tokens:
            if token not in scores:
                token_scores = await self._score([*prompt_ids, token])
                scores[token] = token_scores[-1]

    async def _check_first(self, prompt_ids: Sequence[int], sampling: SamplingConfig, scores: dict[int, float]) -> None:
        """Draws completions of one token with this sampling, and checks them. The sampling must keep each token that
        was drawn, and the log-probability of the token must be the one that the sampling gives to it.

        `scores`: the log-probability, at temperature 1, of each first token that was drawn so far. This method adds the
        tokens that it draws.
        """
        completions = await self._draw(prompt_ids, sampling, 64)
        logprobs = {completion.token_ids[0]: completion.logprobs[0] for completion in completions}
        await self._add_scores(scores, prompt_ids, tokens=logprobs.keys())
        for token in logprobs:
            self._check_kept(token, sampling, scores)
        self._check_processed(logprobs, sampling, scores)
        if SAMPLING_MASK in completions[0].extras:
            await self._check_mask(prompt_ids, completions, scores)

    def _check_kept(self, token: int, sampling: SamplingConfig, scores: dict[int, float]) -> None:
        """Checks that top_k, top_p and min_p keep a token that was drawn.

        `scores`: the log-probabilities, at temperature 1, of this token and of some others. The check does not find all
        faults, because there may be likelier tokens whose scores are unknown.
        """
        how = _described(sampling)
        # The scores of the tokens that are likelier than this token by more than the rounding.
        likelier = [score for score in scores.values() if score > scores[token] + self._tolerance]
        if sampling.top_k and len(likelier) >= sampling.top_k:
            self._fail(f"with {how} it drew the token {token}, and at least {len(likelier)} others are likelier")
        # top_p keeps a token only if all likelier tokens together have a probability below top_p.
        share = sum(math.exp(score) for score in likelier)
        if sampling.top_p < 1 and share > sampling.top_p + self._tolerance:
            self._fail(f"with {how} it drew the token {token}, and likelier ones have the probability {share:.2f}")
        # min_p keeps a token only if its probability is at least min_p times the highest one. `least_score` is the
        # logarithm of this product. If min_p is 0, which has no logarithm, 1e-300 stands for it.
        least_score = max(scores.values()) + math.log(sampling.min_p or 1e-300)
        if scores[token] < least_score - self._tolerance:
            self._fail(f"with {how} it drew the token {token}, which is less likely than that")

    def _check_processed(self, logprobs: dict[int, float], sampling: SamplingConfig, scores: dict[int, float]) -> None:
        """Checks that log-probabilities are those after the temperature, relative to the tokens that sampling keeps.

        `logprobs`: the log-probability of each token that was drawn. It must be score / temperature - c. The number c
        is the same for every token, because the probabilities of all kept tokens are divided by the same sum.
        """
        known = {token: logprob for token, logprob in logprobs.items() if not math.isnan(logprob)}
        # temperature * logprob - score is -temperature * c, the same number for every token.
        shifts = [sampling.temperature * logprob - scores[token] for token, logprob in known.items()]
        spread = max(shifts, default=0.0) - min(shifts, default=0.0)
        is_wrong = spread > 3 * self._tolerance  # the rounding errors of two log-probabilities and two scores add up
        # top_k 1 keeps only one token, so its probability is 1.
        if sampling.top_k == 1 and any(abs(logprob) > self._tolerance for logprob in known.values()):
            is_wrong = True
        if is_wrong:
            self._fail(
                f"with {_described(sampling)} the log-probabilities of its tokens are not those of the distribution "
                "that it draws from: they must be computed after the temperature, and of the tokens that were kept "
                "alone (processed_logprobs in vLLM)"
            )

    async def _check_mask(
        self, prompt_ids: Sequence[int], completions: Sequence[Completion], scores: dict[int, float]
    ) -> None:
        """Checks that the log-probability of a first token is relative to the tokens of its sampling mask.

        Only the completion whose first token has the smallest mask is checked, because it needs the fewest scores.
        """
        with_mask = [completion for completion in completions if _masks(completion)[0]]
        if not with_mask:  # all masks are empty, which means unknown
            return
        completion = min(with_mask, key=lambda completion: len(_masks(completion)[0]))
        mask = _masks(completion)[0]
        await self._add_scores(scores, prompt_ids, tokens=mask)
        kept_probability = sum(math.exp(scores[token]) for token in mask)
        expected = scores[completion.token_ids[0]] - math.log(kept_probability)
        if abs(completion.logprobs[0] - expected) > 2 * self._tolerance:  # the rounding errors of several scores add up
            self._fail(
                f"a token has the log-probability {completion.logprobs[0]:.4f}, and {expected:.4f} among the tokens of "
                "its sampling mask: a mask has all tokens that were kept, and no others"
            )

    async def check_draws(self, seeds: bool) -> None:
        """Checks that each request without a seed draws new completions, and that the completions of a request with a
        seed differ from each other.

        If `seeds`, also checks that the same seed draws the same completions again, and that different seeds draw
        different completions.
        """
        prompt_ids, other_ids, _ = self._prompts
        unseeded = SamplingConfig(max_tokens=self._long_max_tokens)
        first = await self._draw(prompt_ids, unseeded, MANY)
        second = await self._draw(prompt_ids, unseeded, MANY)
        if _are_suspiciously_equal(first, second):
            self._fail("two requests without a seed got the same completions: each must be drawn anew")
        seeded = SamplingConfig(max_tokens=self._long_max_tokens, seed=7)
        alone = await self._draw(prompt_ids, seeded, MANY)
        if _are_suspiciously_equal(alone[:-1], alone[1:]):  # each completion equals the next, so all are the same
            self._fail("all completions of a request with a seed are the same: each needs a stream of its own")
        if not seeds:
            return
        requests = (self._draw(prompt_ids, seeded, MANY), self._draw(other_ids, unseeded, 3))
        together, _ = await asyncio.gather(*requests)
        if [completion.token_ids for completion in alone] != [completion.token_ids for completion in together]:
            self._fail(
                "a request with the seed 7 got other completions than before: the same request with the same seed must "
                "get the same, whatever else is under way (if it cannot, call exercise_engine with seeds=False)"
            )
        other_seed = await self._draw(prompt_ids, SamplingConfig(max_tokens=self._long_max_tokens, seed=8), MANY)
        if _are_suspiciously_equal(alone, other_seed):
            self._fail("requests with the seeds 7 and 8 got the same completions: seeds must differ in what they draw")

    async def check_concurrency(self) -> None:
        """Checks that requests under way at the same time do not mix their completions, and that a long request does
        not hold up a short one."""

        async def draw_and_check(prompt_ids: Sequence[int], sampling: SamplingConfig, n: int) -> None:
            """Draws completions, and compares their log-probabilities with their scores after this prompt."""
            for completion in await self._draw(prompt_ids, sampling, n):
                await self._check_logprobs(prompt_ids, completion)

        requests = []
        for number in range(12):  # requests of different prompts, lengths and numbers of completions
            sampling = SamplingConfig(max_tokens=1 + number * self._long_max_tokens // 12)
            requests.append(draw_and_check(self._prompts[number % 3], sampling, n=1 + number % 4))
        await asyncio.gather(*requests)
        for _ in range(TRIES):
            if not await self._long_before_short():  # one attempt without a fault is enough
                return
        self._fail(
            "a request for one token waited until a long request that came before it had ended: each must return when "
            "its own completions have ended"
        )

    async def _long_before_short(self) -> bool:
        """True if a request for long completions ended before a later request for a single token, which is a fault.

        False if the short request ended first. Also False if all completions of the long request have few tokens,
        because then the order says nothing about the engine.
        """
        ended: list[int] = []  # the `max_tokens` of each request, in the order in which the requests ended

        async def ask(max_tokens: int, n: int) -> int:
            """Draws `n` completions. Returns the number of tokens of the longest one."""
            completions = await self._draw(self._prompts[0], SamplingConfig(max_tokens=max_tokens), n)
            ended.append(max_tokens)
            return max(len(completion.token_ids) for completion in completions)

        most_tokens, _ = await asyncio.gather(ask(self._long_max_tokens, n=16), ask(max_tokens=1, n=1))
        is_long_first = ended[0] != 1
        # If the longest completion has at most 8 tokens, the long request may well end first in a correct engine.
        return is_long_first and most_tokens > 8

    async def check_cancellation(self) -> None:
        """Checks that cancelled requests end, and that the other requests go on."""
        sampling = SamplingConfig(max_tokens=self._long_max_tokens)
        given_up = []
        for _ in range(32):
            request = self._engine.generate([*self._prompts[0]], sampling, 4)
            given_up.append(asyncio.ensure_future(request))
        kept = asyncio.create_task(self._draw(self._prompts[1], sampling, 3))
        # This gives the engine time to begin the requests. On a busy machine it may not have begun them by then, or may
        # have ended them already. The checks below hold in these cases too.
        await asyncio.sleep(0.01)
        cancelled = []
        for task in given_up:
            if task.cancel():  # False: the request had ended before
                cancelled.append(task)
        await self._within("generate, once it was cancelled,", asyncio.wait(given_up))
        for task in cancelled:
            if not task.cancelled():
                self._fail("generate returned although it was cancelled: it must let CancelledError through")
        for completion in await kept:
            await self._check_logprobs(self._prompts[1], completion)
        await self._draw(self._prompts[2], sampling, 2)

    async def check_missing_weights(self) -> None:
        """Checks that `load_weights` raises FileNotFoundError for a folder that is gone or holds no weights, and that
        the engine then goes on with its old weights."""
        with tempfile.TemporaryDirectory() as empty:
            for folder in (empty, str(Path(empty) / "gone")):
                raised = "nothing"
                try:
                    await self._within("load_weights", self._engine.load_weights(folder, self._version + 1))
                except FileNotFoundError:  # as it must be
                    continue
                except Exception as error:
                    raised = f"{type(error).__name__}: {error}"
                what = "holds no weights" if folder == empty else "is gone"
                self._fail(f"load_weights raised {raised} for a folder that {what}: it must raise FileNotFoundError")
        # The engine must still draw with its old weights.
        await self._draw(self._prompts[0], SamplingConfig(max_tokens=4), 2)

    async def check_weights(self, first: str, second: str, exact_versions: bool) -> None:
        """Checks that the engine uses new weights at once, also for requests under way, and that each token has the
        version of the weights that drew it.

        `first` and `second` are two folders with different weights.
        """
        ids = [*self._prompts[0], *self._prompts[1]]
        await self._load(first)
        before = await self._score(ids)
        await self._load(second)
        after = await self._score(ids)
        largest_change = max(abs(old - new) for old, new in zip(before, after, strict=True))
        if largest_change <= self._tolerance:
            self._fail(
                "score says the same of the weights of both folders: load_weights must replace the weights (and the "
                "two folders must hold different ones)"
            )
        for prompt_ids in self._prompts:
            for completion in await self._draw(prompt_ids, SamplingConfig(max_tokens=self._long_max_tokens), 2):
                await self._check_logprobs(prompt_ids, completion)
        for _ in range(TRIES):
            if await self._check_reload(first, second, exact_versions):
                break
        # It is no fault if no attempt found requests under way, because an engine may let them end before it loads.
        await self._check_damaged(first, second)

    async def _load(self, folder: str) -> None:
        """Loads the weights of a folder as the next policy version."""
        await self._within("load_weights", self._engine.load_weights(folder, self._version + 1))
        self._version += 1

    async def _check_reload(self, first: str, second: str, exact_versions: bool) -> bool:
        """Checks completions that are under way while new weights are loaded. They must go on, and each token must have
        the log-probability that the weights of its version give to the token.

        `first` and `second`: the folders of the old and of the new weights. Returns True if a completion has tokens of
        both versions, so that this attempt found requests under way.
        """
        sampling = SamplingConfig(max_tokens=self._long_max_tokens)
        await self._load(first)
        versions = [self._version, self._version + 1]
        tasks = []
        for prompt_ids in self._prompts:
            tasks.append(asyncio.create_task(self._draw(prompt_ids, sampling, 4, versions=versions)))
        # asyncio starts the tasks only when this method waits, which it first does in the first of these two short
        # requests. So the requests of the tasks reach the engine before the second short request. When the second short
        # request has ended, the engine has begun the requests of the tasks.
        for _ in range(2):
            await self._draw(self._prompts[0], SamplingConfig(max_tokens=2), 1)
        await self._load(second)
        drawn = []  # each completion with its prompt
        for prompt_ids, completions in zip(self._prompts, await asyncio.gather(*tasks), strict=True):
            drawn += [(prompt_ids, completion) for completion in completions]
        new_scores = [await self._score([*prompt_ids, *completion.token_ids]) for prompt_ids, completion in drawn]
        # The engine has only one set of weights. Load the old ones again, because their scores are needed too.
        await self._load(first)
        old_version, new_version = versions
        for (prompt_ids, completion), new in zip(drawn, new_scores, strict=True):
            old = await self._score([*prompt_ids, *completion.token_ids])
            start = len(prompt_ids) - 1  # the index of the score of the completion's first token
            self._check_versions(completion, {old_version: old[start:], new_version: new[start:]}, exact_versions)
        return any(_has_both_versions(completion) for _, completion in drawn)

    def _check_versions(
        self, completion: Completion, scores: Mapping[int, Sequence[float]], exact_versions: bool
    ) -> None:
        """Checks that each token of a completion has the log-probability that the weights of its version give to it.

        `scores`: by policy version, the scores of the completion's tokens. `exact_versions` False: in a completion with
        both versions, a token may be of either version. So may the only token of a completion, because one token cannot
        show two versions.
        """
        could_show_both = _has_both_versions(completion) or len(completion.token_ids) == 1
        may_be_of_either = not exact_versions and could_show_both
        for step, version in enumerate(completion.policy_versions):
            if may_be_of_either:
                expected = [version_scores[step] for version_scores in scores.values()]
            else:
                expected = [scores[version][step]]
            self._check_token(step, completion.logprobs[step], expected)

    async def _check_damaged(self, first: str, second: str) -> None:
        """Checks that the engine draws no token with damaged weights. After a load of damaged weights it must either
        wait for whole weights, or go on with the old ones.

        `first` and `second`: folders with different weights.
        """
        await self._load(first)
        old = self._version
        sampling = SamplingConfig(max_tokens=self._long_max_tokens)
        with tempfile.TemporaryDirectory() as temporary:
            damaged = Path(shutil.copytree(second, Path(temporary) / "damaged"))
            weights_file = max(damaged.iterdir(), key=lambda file: file.stat().st_size)  # the largest file
            content = weights_file.read_bytes()
            weights_file.write_bytes(content[: len(content) // 2])
            try:
                await self._within("load_weights", self._engine.load_weights(str(damaged), old + 1))
            except Exception:  # any error is right
                pass
            else:
                self._fail("load_weights raised nothing for a file that is cut off: it must raise an error")
        # The damaged weights would have had the version old + 1, and the whole weights below have old + 2. The engine
        # may have noticed the damage before it gave up the old weights, and then goes on drawing with them.
        task = asyncio.create_task(self._draw(self._prompts[0], sampling, 4, versions=[old, old + 2]))
        await asyncio.wait([task], timeout=0.1)  # time in which a wrong engine would draw tokens
        self._version = old + 1  # so that `_load` gives the whole weights the version old + 2
        await self._load(second)
        completions = await task
        # Each token must have the log-probability that the weights of its version give to it.
        for completion in completions:
            await self._check_logprobs(self._prompts[0], completion, version=self._version)
        await self._load(first)  # the weights that had the version `old`
        for completion in completions:
            await self._check_logprobs(self._prompts[0], completion, version=old)

    async def close(self) -> None:
        """Closes the engine twice, because a second call must do no harm."""
        for _ in range(2):
            await self._within("close", self._engine.close())


SAMPLINGS = (
    SamplingConfig(max_tokens=1, temperature=1.5),
    SamplingConfig(max_tokens=1, top_k=1),
    SamplingConfig(max_tokens=1, top_k=3),
    SamplingConfig(max_tokens=1, top_p=0.5),
    SamplingConfig(max_tokens=1, min_p=0.3),
    SamplingConfig(max_tokens=1, top_p=0.5, sampling_masks=0),
)
"""The samplings with which `check_distributions` draws first tokens of completions, apart from the default."""


def _described(sampling: SamplingConfig) -> str:
    """The settings of a sampling that differ from the defaults, as text."""
    default = vars(SamplingConfig(max_tokens=sampling.max_tokens))
    changed = {name: value for name, value in vars(sampling).items() if value != default[name]}
    return ", ".join(f"{name} = {value}" for name, value in changed.items())


def _without_space(text: str) -> str:
    """The text without white space, and without U+FFFD, which stands for an incomplete character."""
    return "".join(text.replace("\ufffd", "").split())


def _masks(completion: Completion) -> list[list[int]]:
    """The sampling mask of each token, as a list of tokens; empty: the mask is unknown."""
    values = completion.extras[SAMPLING_MASK]
    offsets = completion.extras[SAMPLING_MASK + OFFSETS]
    return [values[start:end].tolist() for start, end in pairwise(offsets.tolist())]


def _has_both_versions(completion: Completion) -> bool:
    """True if some tokens of a completion are of the old version and the others of the new version."""
    return len({*completion.policy_versions}) == 2


def _are_suspiciously_equal(first: Sequence[Completion], second: Sequence[Completion]) -> bool:
    """True if both lists have the same tokens, and this is too improbable for chance: the log-probability of all tokens
    of one list together is below IMPOSSIBLE. Tokens whose log-probability is unknown (NaN) do not count."""
    if [completion.token_ids for completion in first] != [completion.token_ids for completion in second]:
        return False
    total = sum(float(np.nansum(completion.logprobs)) for completion in second)
    return total < IMPOSSIBLE


__all__ = ["exercise_engine"]
