"""exercise_engine passes a correct engine, and names the fault of every other one in a sentence."""

import asyncio
import random
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_client.sampling_masks import mask_fields
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.testing import EOS, ScriptedEngine, exercise_engine
from tests.generator.markov_engine import VOCABULARY, MarkovEngine, log_softmax, make_table


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("tables")
    return [make_table(folder / f"step-{step}", seed=step) for step in (1, 2)]


async def test_a_correct_engine_passes(weights):
    await exercise_engine(MarkovEngine, weights=weights)


async def test_an_engine_may_be_made_by_a_coroutine():
    async def make() -> MarkovEngine:
        return MarkovEngine()

    await exercise_engine(make)


async def test_an_engine_is_closed_when_a_check_fails():
    engine = ScriptedEngine()
    with pytest.raises(AssertionError):
        await exercise_engine(lambda: engine)
    assert engine.closed == 1


async def test_an_engine_is_closed_when_it_lacks_a_member():
    engine = ScriptedEngine(max_length=0)
    with pytest.raises(AssertionError, match="its max_length is 0"):
        await exercise_engine(lambda: engine)
    assert engine.closed == 1


async def test_an_engine_that_has_no_room_for_a_completion_and_a_token_more_is_refused():
    engine = ScriptedEngine(max_length=7)
    with pytest.raises(AssertionError, match=r"max_length is 7, and the longest prompt .* 6 tokens: make it with 8"):
        await exercise_engine(lambda: engine)


async def test_one_folder_of_weights_is_refused():
    with pytest.raises(ValueError, match="weights has 1 folder: give two, or none"):
        await exercise_engine(MarkovEngine, weights=["step-1"])


# ------------------------------------------------------------------------------------------------ completions


def completing(change: Callable[[Completion], Completion]) -> type[MarkovEngine]:
    """An engine each of whose completions is changed."""

    class Faulty(MarkovEngine):
        async def complete(self, *request: Any) -> Completion:
            return change(await super().complete(*request))

    return Faulty


def without_end(completion: Completion) -> Completion:
    """The completion without the token that ended it, as some engines return it."""
    if completion.finish_reason != "stop" or len(completion.token_ids) == 1:
        return completion
    return completion.cut(len(completion.token_ids) - 1, completion.text)


class Fewer(MarkovEngine):
    async def generate(self, prompt_ids: Any, sampling: SamplingConfig, n: int, finished: Any = None) -> Any:
        return await super().generate(prompt_ids, sampling, max(1, n - 1), None)


class OneMoreToken(MarkovEngine):
    def has_ended(self, prompt_ids: Any, ids: Any, sampling: SamplingConfig) -> bool:
        return super().has_ended(prompt_ids, ids, replace(sampling, max_tokens=sampling.max_tokens + 1))


class BeyondTheLength(MarkovEngine):
    def has_ended(self, prompt_ids: Any, ids: Any, sampling: SamplingConfig) -> bool:
        return super().has_ended([], ids, sampling)


class PastTheEnd(MarkovEngine):
    def has_ended(self, prompt_ids: Any, ids: Any, sampling: SamplingConfig) -> bool:
        return len(ids) == min(sampling.max_tokens, self.max_length - len(prompt_ids))


COMPLETIONS = {
    "fewer": (Fewer, "generate returned 2 completions for n = 3: it must return n"),
    "too long": (OneMoreToken, "completion 0 of 1 has 2 tokens, and max_tokens is 1: does the engine know that?"),
    "beyond max_length": (
        BeyondTheLength,
        "completion 0 of 2 has 8 tokens after a prompt of 39, and max_length is 40: both together must fit into it",
    ),
    "past the end": (PastTheEnd, f"goes on after the end-of-sequence token {EOS}: it must end with that token"),
    "no end token": (
        completing(without_end),
        "which is no special token of its tokenizer: the end-of-sequence token belongs to token_ids",
    ),
    "nothing drawn": (
        completing(lambda each: each.cut(0, "")),
        "completion 0 of 1 has the finish_reason 'stop' and no token: the end-of-sequence token belongs to token_ids",
    ),
    "aborted": (
        completing(lambda each: replace(each, finish_reason="abort")),
        "has the finish_reason 'abort', and nobody ended it: it must be 'stop' (by the model) or 'length'",
    ),
    "always length": (
        completing(lambda each: replace(each, finish_reason="length")),
        "has the finish_reason 'length'",
    ),
    "a log-probability too few": (
        completing(lambda each: replace(each, logprobs=each.logprobs[1:])),
        "completion 0 of 1 has 1 token, 0 logprobs, 1 policy_versions: it needs as many",
    ),
    "unknown tokens": (
        completing(lambda each: replace(each, token_ids=[VOCABULARY] * len(each.token_ids))),
        f"has the token {VOCABULARY}, and the model those from 0 to {VOCABULARY - 1}",
    ),
    "the prompt in the text": (
        completing(lambda each: replace(each, text=f"1+1={each.text}")),
        "has the text '1+1=",
    ),
    "a special token in the text": (
        completing(lambda each: replace(each, text=f"{each.text}<eos>")),
        "the text is that of the completion alone, without special tokens",
    ),
    "no version": (
        completing(lambda each: replace(each, policy_versions=[-1] * len(each.token_ids))),
        "has the policy_versions [-1], and the weights in the engine have the version 0: each token needs the version "
        "that drew it, and the first weights are 0",
    ),
    "another loss_mask": (
        completing(lambda each: replace(each, loss_mask=[True] * 50)),
        "and a loss_mask of 50: it needs as many",
    ),
    "an extra of another size": (
        completing(lambda each: replace(each, extras={"entropy": np.zeros(50, np.float32)})),
        "fits no group: ",
    ),
    "masks that nobody asked for": (
        completing(lambda each: replace(each, **mask_fields([[token] for token in each.token_ids]))),
        "has sampling masks, and its sampling wants none: leave the column out",
    ),
    "the log-probabilities of other tokens": (
        completing(lambda each: replace(each, logprobs=[*each.logprobs[1:], -0.5])),
        "a completion has the log-probability -0.5000, and score says ",
    ),
}


async def find(engine: type[Any], says: str, **options: Any) -> None:
    """The exercise of an engine ends with one sentence, which says this of it."""
    with pytest.raises(AssertionError, match=re.escape(says)) as caught:
        await exercise_engine(engine, **options)
    sentence = str(caught.value)
    assert sentence.startswith(f"{engine.__name__}: ")
    assert "\n" not in sentence


@pytest.mark.parametrize(("engine", "says"), COMPLETIONS.values(), ids=COMPLETIONS)
async def test_completions_that_no_policy_can_have_drawn_are_found(engine, says):
    await find(engine, says)


# ------------------------------------------------------------------------------------------------ members


def having(**members: Any) -> type[MarkovEngine]:
    return type("Faulty", (MarkovEngine,), members)


async def without_finished(self: Any, prompt_ids: Any, sampling: Any, n: int) -> None:
    """An old signature."""


def with_texts(self: Any) -> None:
    MarkovEngine.__init__(self)
    self.tokenizer.encode = list


async def lost(self: Any, token_ids: Any) -> list[float]:
    return [-1.0] * len(token_ids)


async def positive(self: Any, token_ids: Any) -> list[float]:
    return [1.5] * (len(token_ids) - 1)


MEMBERS = {
    "generate without finished": (
        having(generate=without_finished),
        "generate must take (prompt_ids, sampling, n, finished=None): too many positional arguments",
    ),
    "a tokenizer of texts": (
        having(__init__=with_texts),
        "its tokenizer.encode('1+1=') returned ['1', '+', '1', '=']: it must return integers",
    ),
    "no length": (having(max_length=None), "its max_length is None: it must be the most tokens of a prompt with its"),
    "a vocabulary that is a list": (having(vocabulary=[3]), "its vocabulary is [3]: it must be the number of tokens"),
    "a model that is a path": (having(model=Path("model")), "its model is PosixPath('model'): it must be the folder"),
    "a tokenizer of another model": (
        having(vocabulary=5),
        "it cannot go on after its own tokenizer's tokens of '1+1='",
    ),
    "a score too many": (having(score=lost), "it must return one for each token but the first"),
    "positive scores": (having(score=positive), "score returned 1.5: a log-probability is finite, and at most 0"),
}


@pytest.mark.parametrize(("engine", "says"), MEMBERS.values(), ids=MEMBERS)
async def test_members_that_are_not_those_of_an_engine_are_found(engine, says):
    await find(engine, says)


async def test_a_member_that_is_missing_is_named():
    class Silent:
        tokenizer = model = None
        max_length = 40

    with pytest.raises(
        AssertionError, match=r"Silent: it has no generate: the class Engine in replay_generator\.engines"
    ):
        await exercise_engine(Silent)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ draws


class Greedy(MarkovEngine):
    def choose(self, logprobs_V: Any, stream: random.Random) -> int:
        return int(np.argmax(logprobs_V))


class SameEachTime(MarkovEngine):
    def seed_of(self, sampling: SamplingConfig) -> int:
        return 3 if sampling.seed is None else sampling.seed


class OneStream(MarkovEngine):
    async def complete(self, prompt_ids: Any, sampling: SamplingConfig, stream: random.Random) -> Completion:
        same = stream if sampling.seed is None else random.Random(sampling.seed)
        return await super().complete(prompt_ids, sampling, same)


class WithoutSeeds(MarkovEngine):
    def seed_of(self, sampling: SamplingConfig) -> int:
        return self.seeds.getrandbits(60)


class OneSeed(MarkovEngine):
    def seed_of(self, sampling: SamplingConfig) -> int:
        return super().seed_of(sampling) if sampling.seed is None else 7


def ignoring(*names: str) -> type[MarkovEngine]:
    """An engine that knows nothing of some settings of sampling."""
    neutral = {name: getattr(SamplingConfig(), name) for name in names}

    class Faulty(MarkovEngine):
        def processed(self, logits_V: Any, sampling: SamplingConfig) -> Any:
            return super().processed(logits_V, replace(sampling, **neutral))

    return Faulty


class Raw(MarkovEngine):
    """Draws as it should, and returns log-probabilities of before the cut and the temperature."""

    async def complete(self, prompt_ids: Any, sampling: SamplingConfig, stream: random.Random) -> Completion:
        completion = await super().complete(prompt_ids, sampling, stream)
        scores = await self.score([*prompt_ids, *completion.token_ids])
        return replace(completion, logprobs=scores[len(prompt_ids) - 1 :])


class RawButForTheTemperature(Raw):
    async def complete(self, prompt_ids: Any, sampling: SamplingConfig, stream: random.Random) -> Completion:
        if sampling.temperature != 1.0:
            return await MarkovEngine.complete(self, prompt_ids, sampling, stream)
        return await super().complete(prompt_ids, sampling, stream)


def masking(change: Callable[[int], list[int]]) -> type[MarkovEngine]:
    """An engine whose sampling masks are those that `change` makes of the tokens drawn."""

    class Faulty(MarkovEngine):
        async def complete(self, prompt_ids: Any, sampling: SamplingConfig, stream: random.Random) -> Completion:
            completion = await super().complete(prompt_ids, sampling, stream)
            if not sampling.largest_mask:
                return completion
            return replace(completion, **mask_fields([change(token) for token in completion.token_ids]))

    return Faulty


DRAWS = {
    "greedy": (Greedy, "in 256 of 256 completions, and gives it the probability 0."),
    "the same without a seed": (
        SameEachTime,
        "two requests without a seed got the same completions: each must be drawn anew",
    ),
    "one stream for a request": (
        OneStream,
        "all completions of a request with a seed are the same: each needs a stream of its own",
    ),
    "no seeds": (WithoutSeeds, "a request with the seed 7 got other completions than before: the same request with"),
    "one seed": (OneSeed, "requests with the seeds 7 and 8 got the same completions: seeds must differ in what they"),
    "no temperature": (ignoring("temperature"), "with temperature = 1.5 the log-probabilities of its tokens are not"),
    "no top_k": (ignoring("top_k"), "with top_k = 1 it drew the token "),
    "no top_p": (ignoring("top_p"), "with top_p = 0.5 it drew the token "),
    "no min_p": (ignoring("min_p"), "with min_p = 0.3 it drew the token "),
    "raw log-probabilities": (Raw, "with temperature = 1.5 the log-probabilities of its tokens are not those of the"),
    "those of before the cut": (
        RawButForTheTemperature,
        "with top_k = 1 the log-probabilities of its tokens are not those of the distribution that it draws from: they "
        "must be computed after the temperature, and of the tokens that were kept alone (processed_logprobs in vLLM)",
    ),
    "masks of other tokens": (
        masking(lambda token: [token + 1]),
        "has a sampling mask for its token 0 without ",
    ),
    "masks of too many tokens": (
        masking(lambda token: [*range(VOCABULARY)]),
        "among the tokens of its sampling mask: a mask has all tokens that were kept, and no others",
    ),
    "masks larger than wanted": (
        masking(lambda token: [*range(600)]),
        "has a sampling mask of 600 tokens, and the largest that is wanted has 512: leave a larger one empty",
    ),
}


@pytest.mark.parametrize(("engine", "says"), DRAWS.values(), ids=DRAWS)
async def test_draws_that_differ_from_what_was_asked_for_are_found(engine, says):
    await find(engine, says)


async def test_an_engine_need_not_repeat_completions_for_a_seed_if_its_user_knows():
    await exercise_engine(WithoutSeeds, seeds=False)


async def test_an_engine_need_not_know_log_probabilities_nor_tell_masks():
    def known_to_nobody(completion: Completion) -> Completion:
        return replace(completion, logprobs=[float("nan")] * len(completion.logprobs), extras={}, axes={})

    await exercise_engine(completing(known_to_nobody))


# ------------------------------------------------------------------------------------------------ requests together


class OneAtATime(MarkovEngine):
    def __init__(self) -> None:
        super().__init__()
        self.turn = asyncio.Lock()

    async def generate(self, *request: Any) -> list[Completion]:
        async with self.turn:
            return await super().generate(*request)


class Swapping(MarkovEngine):
    """Answers a request that comes while another one is under way with that one's log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Sequence[int] = ()
        self.under_way = 0

    async def generate(self, prompt_ids: Any, sampling: SamplingConfig, n: int, *rest: Any) -> list[Completion]:
        self.under_way += 1
        try:
            asked = self.last if self.under_way > 1 else prompt_ids
            self.last = prompt_ids
            return await super().generate(asked, sampling, n, *rest)
        finally:
            self.under_way -= 1


def telling(*calls: Callable[[Any, list[Completion]], None]) -> type[MarkovEngine]:
    """An engine that makes these calls of `finished`."""

    class Faulty(MarkovEngine):
        async def generate(self, prompt_ids: Any, sampling: Any, n: int, finished: Any = None) -> list[Completion]:
            completions = await super().generate(prompt_ids, sampling, n)
            for call in calls if finished is not None else ():
                call(finished, completions)
            return completions

    return Faulty


def in_a_thread(finished: Any, completions: list[Completion]) -> None:
    thread = threading.Thread(target=finished, args=(0, completions[0]))
    thread.start()
    thread.join()


class Uncancelled(MarkovEngine):
    async def generate(self, *request: Any) -> list[Completion]:
        work = asyncio.ensure_future(super().generate(*request))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            return await work


class Leaking(MarkovEngine):
    """A request that is cancelled keeps its slot."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = asyncio.Semaphore(24)

    async def generate(self, *request: Any) -> list[Completion]:
        await self.slots.acquire()
        completions = await super().generate(*request)
        self.slots.release()
        return completions


class CancellingAll(MarkovEngine):
    """One request that is cancelled ends the others too."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False

    async def generate(self, prompt_ids: Any, sampling: SamplingConfig, n: int, *rest: Any) -> list[Completion]:
        try:
            completions = await super().generate(prompt_ids, sampling, n, *rest)
        except asyncio.CancelledError:
            self.broken = True
            raise
        return completions[: n - 1] if self.broken and n > 1 else completions


TOGETHER = {
    "one at a time": (
        OneAtATime,
        "a request for one token waited until a long request that came before it had ended: each must return when its "
        "own completions have ended",
    ),
    "swapped": (Swapping, "both must be that of the token after all tokens before it, by the weights of its version"),
    "told twice": (
        telling(lambda finished, each: finished(2, each[2]), lambda finished, each: finished(2, each[2])),
        "generate called finished twice with the number 2: each completion ends once",
    ),
    "told with another number": (
        telling(lambda finished, each: finished(6, each[5])),
        "generate called finished with the number 6: the numbers of 6 completions are 0 to 5",
    ),
    "told another completion": (
        telling(lambda finished, each: finished(0, replace(each[0], token_ids=[2] * 40))),
        "generate called finished with another completion than generate returned as number 0",
    ),
    "told from a thread": (
        telling(in_a_thread),
        "generate called finished from another thread: it must be called on the event loop",
    ),
    "not cancelled": (
        Uncancelled,
        "generate returned although it was cancelled: it must let CancelledError through",
    ),
    "slots that leak": (Leaking, "generate did not return within 2 s: every call must come to an end"),
    "all cancelled": (CancellingAll, "generate returned 2 completions for n = 3"),
}


@pytest.mark.parametrize(("engine", "says"), TOGETHER.values(), ids=TOGETHER)
async def test_requests_that_disturb_each_other_are_found(engine, says):
    await find(engine, says, timeout=2.0 if engine is Leaking else 60.0)


# ------------------------------------------------------------------------------------------------ weights


class NeverMissing(MarkovEngine):
    async def load_weights(self, path: str, version: int) -> None:
        if (Path(path) / "table.npy").exists():
            await super().load_weights(path, version)


class StoppedByMissing(MarkovEngine):
    async def load_weights(self, path: str, version: int) -> None:
        self.whole.clear()
        await super().load_weights(path, version)


class OtherError(MarkovEngine):
    async def load_weights(self, path: str, version: int) -> None:
        try:
            await super().load_weights(path, version)
        except FileNotFoundError as error:
            raise RuntimeError("no such weights") from error


class Unchanged(MarkovEngine):
    async def load_weights(self, path: str, version: int) -> None:
        table_VV = self.table_VV
        await super().load_weights(path, version)
        self.table_VV = table_VV


class OwnVersions(MarkovEngine):
    async def load_weights(self, path: str, version: int) -> None:
        await super().load_weights(path, 100)


class VersionOfTheEnd(MarkovEngine):
    """All tokens of a completion get the version that was loaded last."""

    async def complete(self, *request: Any) -> Completion:
        completion = await super().complete(*request)
        return replace(completion, policy_versions=[self.version] * len(completion.token_ids))


class VersionOfTheStart(MarkovEngine):
    async def complete(self, *request: Any) -> Completion:
        version = self.version
        completion = await super().complete(*request)
        return replace(completion, policy_versions=[version] * len(completion.token_ids))


class OldCache(MarkovEngine):
    """Its prefix cache outlives the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Any] = {}

    def processed(self, logits_V: Any, sampling: SamplingConfig) -> Any:
        key = id(self.table_VV) if self.version < 2 else 0
        if sampling != SamplingConfig(max_tokens=sampling.max_tokens):
            return super().processed(logits_V, sampling)
        last = int(np.flatnonzero((self.table_VV == logits_V).all(-1))[0])
        return self.cache.setdefault((key, last), log_softmax(logits_V))


class GoesOnBroken(MarkovEngine):
    """Draws on after a load that failed, from what it has read."""

    async def load_weights(self, path: str, version: int) -> None:
        try:
            await super().load_weights(path, version)
        except ValueError:
            self.table_VV = np.zeros_like(self.table_VV)
            self.version = version
            self.whole.set()
            raise


class NothingIsDamaged(MarkovEngine):
    async def load_weights(self, path: str, version: int) -> None:
        try:
            await super().load_weights(path, version)
        except ValueError:
            self.whole.set()


WEIGHTS = {
    "no error for what is gone": (
        NeverMissing,
        "load_weights raised nothing for a folder that holds no weights: it must raise FileNotFoundError",
    ),
    "another error for what is gone": (
        OtherError,
        "load_weights raised RuntimeError: no such weights for a folder that holds no weights: it must raise FileNot",
    ),
    "stopped by what is gone": (StoppedByMissing, "generate did not return within 2 s: every call must come to an end"),
    "not replaced": (Unchanged, "score says the same of the weights of both folders: load_weights must replace the"),
    "versions of its own": (
        OwnVersions,
        "has the policy_versions [100], and the weights in the engine have the version",
    ),
    "the version of the end": (VersionOfTheEnd, "by the weights of its version"),
    "the version of the start": (VersionOfTheStart, "by the weights of its version"),
    "an old cache": (OldCache, "by the weights of its version"),
    "draws from broken weights": (GoesOnBroken, "each token needs the version that drew it"),
    "hides broken weights": (
        NothingIsDamaged,
        "load_weights raised nothing for a file that is cut off: it must raise an error",
    ),
}


@pytest.mark.parametrize(("engine", "says"), WEIGHTS.values(), ids=WEIGHTS)
async def test_weights_that_are_not_those_that_were_loaded_are_found(engine, says, weights):
    await find(engine, says, weights=weights, timeout=2.0 if engine is StoppedByMissing else 60.0)


async def test_an_engine_that_cannot_be_closed_twice_is_found():
    class ClosedOnce(MarkovEngine):
        closed = False

        async def close(self) -> None:
            if self.closed:
                await asyncio.Event().wait()
            self.closed = True

    await find(ClosedOnce, "close did not return within 5 s: every call must come to an end", timeout=5.0)
