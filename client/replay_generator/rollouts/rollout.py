"""Rollouts: what the policy did with one task, and the hook that plays it.

    async def rollout(task: Task, policy: RolloutPolicy) -> Rollout:
        sequence = RolloutSequence(task.prompt_ids)
        while True:
            turn = sequence.append_completion(await policy.generate(sequence.token_ids))
            if (answer := await tool(turn.text)) is None:
                return Rollout([sequence])
            sequence.append_observation(task.tokenizer.encode(answer), role="tool", text=answer)

The generator calls the hook once for each of the G rollouts of a group, all at the same time, and does everything
else: permits, new weights, rewards, advantages, the insert. A hook that raises loses its own rollout alone.

Token in, token out: a sequence keeps the ids that the engine drew, and the policy is asked with them. Nothing is
decoded and tokenized again, because that gives other ids now and then, whose log-probabilities nobody has measured.
What the policy did not write (the output of a tool, the words of a user) is added with `append_observation`. No trainer
trains on it.

A rollout may have several sequences: of an agent and its sub-agents, or from before and after a compaction. It still
counts once, with one reward.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import index
from pathlib import Path
from typing import Any

import numpy.typing as npt

from replay_client.errors import ReplayError
from replay_generator.engines import (
    Completion,
    CompletionError,
    Engine,
    SamplingConfig,
    fault_of,
    why_unfit,
    why_unknown,
)
from replay_generator.rollouts.played_sequence import PlayedSequence, check_sequences
from replay_generator.user_code import calls as user_code
from replay_generator.user_code.results import check_name, numbers_of
from replay_protos.words import counted


class RolloutError(ReplayError):
    """A rollout failed. The others of its group go on."""


@dataclass(frozen=True)
class Task:
    """The task of one rollout. The generator makes it; the hook reads it."""

    prompt_id: str
    """The id of the prompt, which is the same in every epoch."""
    prompt_ids: list[int]
    """(P,) tokens of the prompt, through the tokenizer's chat template if it consists of messages."""
    row: Mapping[str, Any]
    """The whole row with the prompt, which reward functions see too."""
    messages: tuple[Mapping[str, Any], ...] | None
    """The messages of the prompt; None: it is a text."""
    index: int
    """The number of this rollout in its group, from 0 to G - 1."""
    sampling: SamplingConfig
    """The sampling of tokens, unless the hook asks for another one."""
    tokenizer: Any
    """The tokenizer of the engine."""
    max_length: int
    """The most tokens of a sequence in the engine: those that it is given, and those that it draws."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template: `GeneratorConfig.chat_template_kwargs`, and the row's own."""
    began: datetime = field(default_factory=datetime.now)
    """The time at which its group began. Templates that ask for today's date get this day, also after midnight."""
    text: str = ""
    """The prompt, if it is a text."""


@dataclass(frozen=True)
class Turn:
    """Tokens of a sequence that one side wrote."""

    role: str
    """"assistant" for what the policy wrote; "prompt", "tool", "user" or any other for what it was given."""
    tokens: int
    text: str = ""


class RolloutSequence:
    """The tokens of one sequence in order. Each token was either drawn from the policy or given to it."""

    def __init__(self, token_ids: Sequence[int], *, text: str = "") -> None:
        """`token_ids`: the first tokens of the sequence, for example `task.prompt_ids`."""
        self.token_ids: list[int] = []
        """All tokens so far."""
        self.sampled_mask: list[bool] = []
        """A flag for each token. True: the policy wrote the token, and may be trained on it."""
        self.logprobs: list[float] = []
        """The log-probability of each token, in nats. NaN: it is unknown, or the policy did not write the token."""
        self.policy_versions: list[int] = []
        """The version that drew each token. A token that was given has the version of the token before it, or -1."""
        self.drawn: list[tuple[int, Mapping[str, npt.NDArray[Any]], Mapping[str, str]]] = []
        """An entry for each completion that has extras: the index of its first token, the extras, and their axes."""
        self.turns: list[Turn] = []
        self.finish_reason = ""
        """The reason for which the last completion ended; "": there was no completion."""
        self.append_observation(token_ids, role="prompt", text=text)

    def append_completion(self, completion: Completion) -> Turn:
        """Adds what the policy wrote. Returns it as a turn, whose text the hook can read."""
        length = len(completion.token_ids)
        if completion.extras:
            start = len(self.token_ids)
            self.drawn.append((start, completion.extras, completion.axes))
        mask = completion.loss_mask
        if mask is None:
            mask = [True] * length
        self._add(completion.token_ids, mask, completion.logprobs, completion.policy_versions)
        self.finish_reason = completion.finish_reason
        turn = Turn("assistant", length, completion.text)
        self.turns.append(turn)
        return turn

    def append_observation(self, token_ids: Sequence[int], *, role: str = "tool", text: str = "") -> None:
        """Adds what the policy did not write."""
        length = len(token_ids)
        version = -1
        if self.policy_versions:
            version = self.policy_versions[-1]
        self._add(token_ids, [False] * length, [float("nan")] * length, [version] * length)
        self.turns.append(Turn(role, length, text))

    def _add(
        self, token_ids: Sequence[int], mask: Sequence[bool], logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        self.token_ids += _integers(token_ids)
        self.sampled_mask += mask
        self.logprobs += logprobs
        self.policy_versions += versions

    @property
    def head(self) -> int:
        """The number of tokens before the first one that the policy wrote."""
        first = 0
        for turn in self.turns:
            if turn.role == "assistant":
                break
            first += turn.tokens
        return first

    def read(self) -> PlayedSequence:
        """The sequence as arrays. Raises an error for parts that hold no numbers."""
        return PlayedSequence.of(
            self.head,
            self.drawn,
            self.turns,
            token_ids=self.token_ids,
            sampled_mask=self.sampled_mask,
            logprobs=self.logprobs,
            policy_versions=self.policy_versions,
        )


def _integers(token_ids: Sequence[int]) -> list[int]:
    """The tokens as integers of Python. Raises RolloutError if they are none."""
    try:
        return [index(token) for token in token_ids]
    except TypeError:
        raise RolloutError(
            f"tokens are integers, not {token_ids!r:.80}: a text goes through task.tokenizer.encode"
        ) from None


@dataclass
class Rollout:
    """The record of what the policy did with one task."""

    sequences: list[RolloutSequence]
    """At least one. Each begins with the tokens that the policy was given."""
    reward: float | None = None
    """The reward of the environment. It is added to that of the reward functions. None: these alone decide."""
    finish_reason: str = ""
    """The reason for which the rollout ended; "": that of the last completion of its last sequence."""
    info: dict[str, Any] = field(default_factory=dict)
    """Facts of the rollout for reward functions, for example which tools were called. They are not stored."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further numbers of the environment, such as the parts of its reward. Metrics that all rollouts of a group have
    are stored and reported beside the values of reward functions, as `rollout/NAME`. They do not count in the
    reward."""
    on_settled: Callable[[str], None] | None = field(default=None, repr=False, compare=False)
    """A function that is called once: with "" when the rollout is safe, or with the reason why no group will have it.

    The rollout is safe when its table of partial groups has it; without such a table, when it is played."""

    def settle(self, why_lost: str = "") -> None:
        """Calls `on_settled`: the rollout is safe, or no group will have it. Only the first call counts."""
        callback = self.on_settled
        self.on_settled = None
        if callback is not None:
            callback(why_lost)

    @property
    def turns(self) -> list[Turn]:
        """The turns of all sequences, one sequence after the other."""
        turns: list[Turn] = []
        for sequence in self.sequences:
            turns += sequence.turns
        return turns

    @property
    def text(self) -> str:
        """The text that the policy wrote last, which plain reward functions score."""
        for turn in reversed(self.turns):
            if turn.role == "assistant":
                return turn.text
        return ""


@dataclass(frozen=True)
class PlayedRollout:
    """A finished rollout, and its sequences as they were when it was read.

    A rollout is read once: when its hook returns it, or when it comes out of a table. A later change of a sequence does
    not count.
    """

    rollout: Rollout
    sequences: tuple[PlayedSequence, ...]

    @classmethod
    def of(cls, rollout: Rollout) -> PlayedRollout:
        """Reads the sequences. Raises an error for parts that hold no numbers."""
        return cls(rollout, tuple(sequence.read() for sequence in rollout.sequences))


Unanswered = list[tuple[float, str]]
"""The requests that engines have not answered yet, the oldest first. Each has its start on the loop's clock, and a
description."""


class RolloutPolicy:
    """The policy as the rollouts of one group see it.

    Rollouts that ask for the same tokens at the same moment, as all do in their first turn, share one request of the
    engine, which then computes their common beginning once.
    """

    def __init__(
        self, engine: Engine, sampling: SamplingConfig, unanswered: Unanswered, *, early: bool = False
    ) -> None:
        """`early`: a rollout goes on as soon as its own completion has ended. Otherwise it waits for all completions of
        its request. `unanswered`: the list in which the policy enters its requests while they are under way."""
        self._engine = engine
        self._sampling = sampling
        self._unanswered = unanswered
        self._early = early
        self._waiting: dict[tuple[tuple[int, ...], SamplingConfig], list[asyncio.Future[Completion]]] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self._sent = 0
        self.failure: BaseException | None = None
        """The error with which the engine failed; None: it did not fail."""

    async def generate(self, token_ids: Sequence[int], sampling: SamplingConfig | None = None) -> Completion:
        """Draws one completion of `token_ids`. `sampling` None: as the generator is configured.

        Raises RolloutError if the tokens leave no room for one more, or if the model of the engine does not have all of
        them, CompletionError if no policy can have drawn what the engine returned, and any other error of the engine.
        """
        ids = tuple(_integers(token_ids))
        why = why_unfit(self._engine, ids)
        if why:
            raise RolloutError(f"the policy was asked to go on after {why}")
        request = (ids, sampling or self._sampling)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Completion] = loop.create_future()
        if request not in self._waiting:
            self._waiting[request] = []
            # The request is sent after all rollouts that can go on now: they may ask for the same.
            loop.call_soon(self._send, request)
        self._waiting[request].append(done)
        return await done

    def _send(self, request: tuple[tuple[int, ...], SamplingConfig]) -> None:
        waiting = [done for done in self._waiting.pop(request) if not done.done()]
        if waiting:
            token_ids, sampling = request
            task = asyncio.create_task(self._ask(token_ids, sampling, waiting))
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)

    async def _ask(
        self, token_ids: tuple[int, ...], sampling: SamplingConfig, waiting: list[asyncio.Future[Completion]]
    ) -> None:
        if sampling.seed is not None and self._sent:
            # Otherwise two rollouts that come to the same tokens, one after the other, would go on equally.
            seed = random.Random(f"{sampling.seed}/request {self._sent}").getrandbits(31)
            sampling = replace(sampling, seed=seed)
        self._sent += 1
        engine_name = type(self._engine).__name__
        vocabulary = getattr(self._engine, "vocabulary", None)
        n = len(waiting)

        def finished(number: int, completion: Completion | None) -> None:
            done = waiting[number]
            if done.done():  # its rollout was given up meanwhile
                return
            fault = fault_of(completion, sampling, vocabulary)
            if fault:
                done.set_exception(CompletionError(f"completion {number} of {engine_name} {fault}"))
            elif completion is not None:
                done.set_result(completion)

        entry = (asyncio.get_running_loop().time(), f"{counted(n, 'completion')} of {engine_name}")
        self._unanswered.append(entry)
        try:
            if self._early:
                completions = await self._engine.generate(list(token_ids), sampling, n, finished)
            else:
                completions = await self._engine.generate(list(token_ids), sampling, n)
            for number in range(n):
                completion = None  # an engine may return too few
                if number < len(completions):
                    completion = completions[number]
                finished(number, completion)
        except Exception as error:
            if not isinstance(error, CompletionError) and self.failure is None:
                self.failure = error
            for done in waiting:
                if not done.done():
                    done.set_exception(error)
        finally:
            self._unanswered.remove(entry)

    async def close(self) -> None:
        """Ends the requests that nobody waits for any more."""
        for task in list(self._requests):
            task.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)


RolloutHook = Callable[[Task, RolloutPolicy], Awaitable[Rollout]]
"""Plays one rollout. It may raise any exception: then the rollout has failed.

A hook that is an asynchronous context manager too is entered before the first rollout, and left after the last: an
environment may need servers of its own."""


def held(hook: RolloutHook) -> AbstractAsyncContextManager[Any]:
    """The context in which `hook` may be called."""
    if isinstance(hook, AbstractAsyncContextManager):
        return user_code.entered(hook)
    return nullcontext()


_limit: ContextVar[asyncio.Timeout | None] = ContextVar("_limit", default=None)
"""The time limit of the rollout that is played in this context."""


@contextmanager
def uncounted() -> Iterator[None]:
    """Surrounds a wait of a hook in which nobody plays the rollout yet. It does not count in `rollout_timeout`."""
    limit = _limit.get()
    if limit is None:
        yield
        return
    deadline = limit.when()
    if deadline is None:  # another wait has stopped the clock already
        yield
        return
    loop = asyncio.get_running_loop()
    seconds_left = deadline - loop.time()
    limit.reschedule(None)
    try:
        yield
    finally:
        limit.reschedule(loop.time() + seconds_left)


async def single_turn(task: Task, policy: RolloutPolicy) -> Rollout:
    """A rollout of one completion of the prompt. The generator plays it if it has no hook."""
    sequence = RolloutSequence(task.prompt_ids)
    completion = await policy.generate(task.prompt_ids)
    sequence.append_completion(completion)
    return Rollout([sequence])


async def play(
    hook: RolloutHook,
    tasks: Sequence[Task],
    engine: Engine,
    timeout: float | None,
    unanswered: Unanswered,
    finished: Callable[[int, PlayedRollout], Awaitable[None]],
    *,
    early: bool = False,
    patience: Callable[[], float | None] = lambda: None,
) -> list[Exception]:
    """Plays one rollout for each of `tasks`, all at the same time. `timeout`: seconds for each rollout.

    `finished` is awaited with each rollout and its number as soon as the rollout is finished. `patience`: seconds until
    the next rollout must be finished, or all others are given up; None: as long as it needs. `early`, `unanswered`: see
    RolloutPolicy.

    Returns the errors of the rollouts that failed; a rollout that was given up has none. Raises any error of
    `finished`, and any error of the engine but CompletionError, with which only its own rollout fails.
    """
    policy = RolloutPolicy(engine, tasks[0].sampling, unanswered, early=early)

    async def play_one(task: Task) -> Exception | None:
        played = await _attempt(hook, task, policy, engine, timeout)
        if isinstance(played, Exception):
            return played
        await finished(task.index, played)
        return None

    attempts = [asyncio.create_task(play_one(task)) for task in tasks]
    running = set(attempts)
    try:
        while running:
            done, running = await asyncio.wait(running, timeout=patience(), return_when=asyncio.FIRST_COMPLETED)
            if not done:  # patience is at its end
                break
            for attempt in done:
                attempt.result()
    finally:
        for attempt in running:
            attempt.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)  # the error of one is enough
        await policy.close()
    failures = []
    for attempt in attempts:
        if attempt in running:
            continue
        failure = attempt.result()
        if failure is not None:
            failures.append(failure)
    return failures


async def _attempt(
    hook: RolloutHook, task: Task, policy: RolloutPolicy, engine: Engine, timeout: float | None
) -> PlayedRollout | Exception:
    """The rollout that `hook` plays, or the error with which it failed. Raises the error of an engine that failed."""
    returned: Any = None
    try:
        async with asyncio.timeout(timeout) as limit:
            _limit.set(limit)  # in the context of this task alone
            playing = user_code.call_here(hook, task, policy)
            if not inspect.isawaitable(playing):
                shown = user_code.shown(playing, 80)
                raise RolloutError(f"the hook returned {shown} without being awaited: write async def")
            returned = await user_code.awaited(hook, playing)
            return read(returned, engine)
    except Exception as error:
        if isinstance(returned, Rollout):
            returned.settle(f"no group can have the rollout: {error}")
        if policy.failure is not None:
            raise policy.failure from None
        if isinstance(error, TimeoutError) and limit.expired():
            # The cause is the CancelledError of the hook. Hooks add a note to it that says what they waited for.
            notes = getattr(error.__cause__, "__notes__", ["does its engine hang?"])
            return RolloutError(f"it took longer than {timeout:g} s (rollout_timeout): {notes[0]}")
        return error


def read(returned: Any, engine: Engine) -> PlayedRollout:
    """The rollout that a hook returned, with its sequences as arrays.

    Raises RolloutError if no group can be made of it, or if the engine does not know a token.
    """
    rollout = checked(returned)
    why = why_unreadable(engine, rollout)
    if why:
        raise RolloutError(f"the hook returned a sequence with {why}")
    try:
        played = PlayedRollout.of(rollout)
        check_sequences(played.sequences)
    except Exception as error:  # a hook may have put anything into a sequence
        raise RolloutError(
            f"the hook returned a rollout of which no group can be made: {user_code.in_words(error)}; tokens come into "
            f"a sequence by `sampled` and `append_observation`"
        ) from error
    return played


def checked(rollout: Any) -> Rollout:
    """The rollout that a hook returned. Raises RolloutError if no group can be made of it."""
    if not isinstance(rollout, Rollout):
        returned = user_code.shown(rollout, 80)
        raise RolloutError(f"the hook returned {returned}, not a Rollout: return Rollout([sequence])")
    if not rollout.sequences:
        raise RolloutError("the hook returned a rollout without sequences: return Rollout([sequence])")
    for sequence in rollout.sequences:
        if not isinstance(sequence, RolloutSequence):
            returned = user_code.shown(sequence, 80)
            raise RolloutError(f"the hook returned a rollout of {returned}, which is no RolloutSequence")
    if len({id(sequence) for sequence in rollout.sequences}) < len(rollout.sequences):
        raise RolloutError("the hook returned one sequence twice: make a RolloutSequence for each")
    if not isinstance(rollout.info, Mapping):
        raise RolloutError(f"info must be a dictionary, not {user_code.shown(rollout.info, 80)}")
    if all(turn.role != "assistant" for turn in rollout.turns):
        raise RolloutError("the policy wrote nothing in the rollout: add what policy.generate returns by `sampled`")
    try:
        rollout.reward, rollout.metrics = numbers_of(rollout.reward, rollout.metrics)
        for turn in rollout.turns:
            check_name(turn.role, "the role of a turn")
        for reason in (rollout.finish_reason, rollout.sequences[-1].finish_reason):
            is_absent = reason is None or (isinstance(reason, str) and not reason)
            if not is_absent:
                check_name(reason, "finish_reason")
    except ValueError as error:
        raise RolloutError(f"the hook returned a rollout that no group can hold: {error}") from error
    return rollout


def why_unreadable(engine: Engine, rollout: Rollout) -> str:
    """The token of a rollout that the model of the engine does not have, and the remedy; "" if it has all tokens.

    The engine is not asked to go on after the last tokens of a rollout, but the trainer reads them.
    """
    for sequence in rollout.sequences:
        why = why_unknown(engine, sequence.token_ids)
        if why:
            return why
    return ""


def where(failure: Exception) -> str:
    """The line of the hook's own file from which a failure of `play` came; "" if it came from elsewhere."""
    frames = traceback.extract_tb(failure.__traceback__)
    users_frames = [frame for frame in frames if user_code.PACKAGE not in Path(frame.filename).parents]
    if not users_frames:
        return ""
    return user_code.own_line(users_frames)
