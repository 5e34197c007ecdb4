"""Rollouts: records of what the policy did with one task, and the hook that plays a rollout.

    async def rollout(task: Task, policy: RolloutPolicy) -> Rollout:
        sequence = RolloutSequence(task.prompt_ids)
        while True:
            turn = sequence.append_completion(await policy.generate(sequence.token_ids))
            if (answer := await tool(turn.text)) is None:
                return Rollout([sequence])
            sequence.append_observation(task.tokenizer.encode(answer), role="tool", text=answer)

The generator calls the hook once for each of the G rollouts of a group, all at the same time. The generator does
everything else: permits, new weights, rewards, advantages, the insert. If a call of the hook raises an error, only its
own rollout is lost.

Token in, token out: a sequence keeps the token ids that the engine drew, and the next request sends these ids. No text
of the policy is tokenized again, because this sometimes gives other ids than those that were drawn. The engine has
computed no log-probabilities for such other ids. Tokens that the policy did not write (the output of a tool, the words
of a user) are added with `append_observation`. Trainers do not train on these tokens.

A rollout may have several sequences: those of an agent and its sub-agents, or those before and after a compaction of
the conversation. The rollout still counts once, with one reward.
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
    """A rollout failed. The other rollouts of its group go on."""


@dataclass(frozen=True)
class Task:
    """The task of one rollout. The generator makes the task, and the hook reads it."""

    prompt_id: str
    """The id of the prompt, which is the same in every epoch."""
    prompt_ids: list[int]
    """(P,) tokens of the prompt. If the prompt is a list of messages, the tokenizer's chat template has rendered it."""
    row: Mapping[str, Any]
    """The whole row of the prompt, a value for each name of a column. Reward functions get the same row."""
    messages: tuple[Mapping[str, Any], ...] | None
    """The messages of the prompt; None: the prompt is a text."""
    index: int
    """The number of this rollout in its group, from 0 to G - 1."""
    sampling: SamplingConfig
    """The sampling of tokens, unless the hook asks for another one."""
    tokenizer: Any
    """The tokenizer of the engine."""
    max_length: int
    """The most tokens of a sequence in the engine: the tokens that the engine is given, plus those that it draws."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template: those of `GeneratorConfig.chat_template_kwargs`, and those of the row."""
    began: datetime = field(default_factory=datetime.now)
    """The time at which the group began. Templates that ask for today's date get this day, even after midnight."""
    text: str = ""
    """The prompt if it is a text; "": the prompt is a list of messages."""


@dataclass(frozen=True)
class Turn:
    """Consecutive tokens of a sequence that the policy wrote together, or was given together."""

    role: str
    """"assistant": the policy wrote the tokens. Any other role, such as "prompt", "tool" or "user": the tokens were
    given to the policy."""
    tokens: int
    """The number of tokens."""
    text: str = ""
    """The tokens as text; "": the text is unknown, or empty."""


class RolloutSequence:
    """The tokens of one sequence in order. Each token was either drawn from the policy or given to it."""

    def __init__(self, token_ids: Sequence[int], *, text: str = "") -> None:
        """`token_ids`: the first tokens of the sequence, for example `task.prompt_ids`. `text`: these tokens as text;
        "": unknown."""
        self.token_ids: list[int] = []
        """All tokens so far."""
        self.sampled_mask: list[bool] = []
        """A flag for each token. True: the policy wrote the token, and may be trained on it."""
        self.logprobs: list[float] = []
        """The log-probability of each token, in nats. NaN: the log-probability is unknown, or the policy did not write
        the token."""
        self.policy_versions: list[int] = []
        """The policy version that drew each token. A token that the policy did not write has the version of the token
        before it. -1: no drawn token stands before it."""
        self.drawn: list[tuple[int, Mapping[str, npt.NDArray[Any]], Mapping[str, str]]] = []
        """One entry for each completion that has extras. An entry has the index in the sequence of the completion's
        first token, the extras by name, and the axis of each extra by name."""
        self.turns: list[Turn] = []
        self.finish_reason = ""
        """The reason why the last completion ended; "": there was no completion."""
        self.append_observation(token_ids, role="prompt", text=text)

    def append_completion(self, completion: Completion) -> Turn:
        """Adds a completion of the policy. Returns the turn that it becomes, so that the hook can read its text."""
        length = len(completion.token_ids)
        if completion.extras:
            start = len(self.token_ids)
            self.drawn.append((start, completion.extras, completion.axes))
        mask = completion.loss_mask
        if mask is None:  # the policy wrote all tokens of the completion
            mask = [True] * length
        self._add(completion.token_ids, mask, completion.logprobs, completion.policy_versions)
        self.finish_reason = completion.finish_reason
        turn = Turn("assistant", length, completion.text)
        self.turns.append(turn)
        return turn

    def append_observation(self, token_ids: Sequence[int], *, role: str = "tool", text: str = "") -> None:
        """Adds tokens that the policy did not write, such as the output of a tool. `role`: the role of the new turn.
        `text`: the tokens as text; "": unknown."""
        length = len(token_ids)
        version = -1  # no drawn token stands before these tokens
        if self.policy_versions:
            version = self.policy_versions[-1]
        self._add(token_ids, [False] * length, [float("nan")] * length, [version] * length)
        self.turns.append(Turn(role, length, text))

    def _add(
        self, token_ids: Sequence[int], mask: Sequence[bool], logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """Adds tokens, with a flag of `sampled_mask`, a log-probability and a policy version for each."""
        self.token_ids += _integers(token_ids)
        self.sampled_mask += mask
        self.logprobs += logprobs
        self.policy_versions += versions

    @property
    def head(self) -> int:
        """The number of tokens before the first turn of the policy. If the policy wrote nothing: all tokens."""
        count = 0
        for turn in self.turns:
            if turn.role == "assistant":
                break
            count += turn.tokens
        return count

    def read(self) -> PlayedSequence:
        """The sequence as arrays. Raises an error if its tokens, log-probabilities or versions are no numbers."""
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
    """The tokens as integers of Python. Raises RolloutError for tokens that are no integers."""
    try:
        # `operator.index` takes the integers of Python, NumPy and torch, and raises TypeError for a float.
        return [index(token) for token in token_ids]
    except TypeError:
        raise RolloutError(
            f"tokens are integers, not {token_ids!r:.80}: a text goes through task.tokenizer.encode"
        ) from None


@dataclass
class Rollout:
    """The record of what the policy did with one task."""

    sequences: list[RolloutSequence]
    """At least one sequence. Each begins with tokens that the policy was given."""
    reward: float | None = None
    """The reward that the environment gives; None: it gives none. This reward is added to the reward of the reward
    functions."""
    finish_reason: str = ""
    """The reason why the rollout ended; "": the reason of the last completion of the last sequence."""
    info: dict[str, Any] = field(default_factory=dict)
    """Facts of the rollout for reward functions, by name, for example which tools were called. The finished group does
    not have these facts."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further numbers of the environment, by name, such as the parts of its reward. They are not added to the reward. A
    metric that all rollouts of a group have is stored and reported as `rollout/NAME`, beside the values of reward
    functions."""
    on_settled: Callable[[str], None] | None = field(default=None, repr=False, compare=False)
    """A function that is called once: with "" when the rollout is safe, or with the reason why no group will have the
    rollout. None: there is no such function.

    If the generator stores partial groups, a rollout is safe once it is stored. Otherwise a rollout is safe once it is
    played."""

    def settle(self, why_lost: str = "") -> None:
        """Calls `on_settled` with `why_lost`; "": the rollout is safe. Further calls of `settle` do nothing."""
        callback = self.on_settled
        self.on_settled = None  # removed before the call, so that the callback is called at most once
        if callback is not None:
            callback(why_lost)

    @property
    def turns(self) -> list[Turn]:
        """The turns of all sequences, in the order of the sequences."""
        turns: list[Turn] = []
        for sequence in self.sequences:
            turns += sequence.turns
        return turns

    @property
    def text(self) -> str:
        """The text of the policy's last turn; "": the policy wrote nothing. Reward functions without a parameter
        `rollout` score only this text."""
        for turn in reversed(self.turns):
            if turn.role == "assistant":
                return turn.text
        return ""


@dataclass(frozen=True)
class PlayedRollout:
    """A finished rollout, and its sequences as they were when the rollout was read.

    A rollout is read once: when its hook returns it, or when it is read from a table. Later changes of the sequences
    of `rollout` have no effect.
    """

    rollout: Rollout
    sequences: tuple[PlayedSequence, ...]

    @classmethod
    def of(cls, rollout: Rollout) -> PlayedRollout:
        """Reads the sequences. Raises the errors of `RolloutSequence.read`."""
        return cls(rollout, tuple(sequence.read() for sequence in rollout.sequences))


Unanswered = list[tuple[float, str]]
"""The requests that the engine has not answered yet, the oldest first. An entry is the time at which the request began,
on the clock of the event loop, and a description of the request."""


class RolloutPolicy:
    """The policy, for the rollouts of one group.

    Rollouts that ask for a completion of the same tokens at the same moment share one request to the engine. The engine
    computes the tokens of the request only once. In their first turn, all rollouts of a group share a request.
    """

    def __init__(
        self, engine: Engine, sampling: SamplingConfig, unanswered: Unanswered, *, early: bool = False
    ) -> None:
        """`sampling`: the sampling of a request for which the hook gives none. `unanswered`: the list in which the
        policy keeps its requests while they are under way. `early` True: a rollout goes on as soon as its own
        completion has ended. Otherwise the rollout waits for all completions of its request."""
        self._engine = engine
        self._sampling = sampling
        self._unanswered = unanswered
        self._early = early
        self._waiting: dict[tuple[tuple[int, ...], SamplingConfig], list[asyncio.Future[Completion]]] = {}
        """The requests that are not sent yet. The key has the tokens and the sampling of a request. The value has a
        future for each rollout that waits for a completion of this request."""
        self._requests: set[asyncio.Task[None]] = set()
        """The tasks of the requests that are under way."""
        self._sent = 0
        """The number of requests that were sent."""
        self.failure: BaseException | None = None
        """The first error of the engine other than CompletionError; None: the engine did not fail. This error ends the
        whole group."""

    async def generate(self, token_ids: Sequence[int], sampling: SamplingConfig | None = None) -> Completion:
        """Draws one completion of `token_ids`. `sampling` None: the sampling of the generator's settings.

        The first rollout that asks for these tokens schedules one request to the engine. Rollouts that ask for the same
        tokens before the request is sent only add their futures to `_waiting`.

        Raises RolloutError if the tokens leave no room for another token, or if the model lacks one of them. Raises
        CompletionError if no policy can have drawn what the engine returned. Raises any other error of the engine.
        """
        ids = tuple(_integers(token_ids))
        why = why_unfit(self._engine, ids)
        if why:
            raise RolloutError(f"the policy was asked to go on after {why}")
        request = (ids, sampling or self._sampling)
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Completion] = loop.create_future()
        if request not in self._waiting:
            self._waiting[request] = []
            # `call_soon` runs `_send` after all rollouts that can run now, so that these rollouts may join the request.
            loop.call_soon(self._send, request)
        self._waiting[request].append(reply)
        return await reply

    def _send(self, request: tuple[tuple[int, ...], SamplingConfig]) -> None:
        """Sends a request to the engine, for all rollouts that wait for it. The event loop calls this method, because
        `generate` has scheduled it."""
        # The future of a rollout that was given up while it waited is cancelled, and thus done.
        waiting = [reply for reply in self._waiting.pop(request) if not reply.done()]
        if not waiting:
            return
        token_ids, sampling = request
        task = asyncio.create_task(self._ask(token_ids, sampling, waiting))
        self._requests.add(task)  # until the task ends, so that `close` can cancel it
        task.add_done_callback(self._requests.discard)

    async def _ask(
        self, token_ids: tuple[int, ...], sampling: SamplingConfig, waiting: list[asyncio.Future[Completion]]
    ) -> None:
        """Asks the engine for a completion for each future of `waiting`. Sets each future to its completion or an
        error."""
        is_first = self._sent == 0
        if sampling.seed is not None and not is_first:
            # With the same seed, two rollouts that reach the same tokens at different times would get the same
            # completion.
            seed = random.Random(f"{sampling.seed}/request {self._sent}").getrandbits(31)
            sampling = replace(sampling, seed=seed)
        self._sent += 1
        engine_name = type(self._engine).__name__
        vocabulary = getattr(self._engine, "vocabulary", None)
        n = len(waiting)

        def finished(number: int, completion: Completion | None) -> None:
            """Sets one future. With `early`, the engine calls this as soon as a completion has ended. When the engine
            has returned, `_ask` itself calls this for every completion."""
            reply = waiting[number]
            if reply.done():  # the rollout was given up, or the engine has called `finished` for it already
                return
            fault = fault_of(completion, sampling, vocabulary)
            if fault:
                reply.set_exception(CompletionError(f"completion {number} of {engine_name} {fault}"))
            elif completion is not None:  # always true: `fault_of` has a fault for None
                reply.set_result(completion)

        entry = (asyncio.get_running_loop().time(), f"{counted(n, 'completion')} of {engine_name}")
        self._unanswered.append(entry)
        try:
            if self._early:
                completions = await self._engine.generate(list(token_ids), sampling, n, finished)
            else:
                completions = await self._engine.generate(list(token_ids), sampling, n)
            for number in range(n):
                completion = None  # if the engine returned too few completions, `finished` sets an error
                if number < len(completions):
                    completion = completions[number]
                finished(number, completion)
        except Exception as error:
            # A CompletionError fails only the rollouts of this request. Any other error ends the whole group.
            if not isinstance(error, CompletionError) and self.failure is None:
                self.failure = error
            for reply in waiting:
                if not reply.done():
                    reply.set_exception(error)
        finally:
            self._unanswered.remove(entry)

    async def close(self) -> None:
        """Cancels the requests that are still under way. Called when no rollout waits for them any more."""
        for task in list(self._requests):
            task.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)


RolloutHook = Callable[[Task, RolloutPolicy], Awaitable[Rollout]]
"""Plays one rollout. If the hook raises an exception, the rollout has failed.

If the hook is also an asynchronous context manager, the generator enters it before the first rollout and leaves it
after the last one. So a hook can start and end servers of its own."""


def held(hook: RolloutHook) -> AbstractAsyncContextManager[Any]:
    """The context in which `hook` may be called: the hook itself if it is a context manager, otherwise an empty
    context."""
    if isinstance(hook, AbstractAsyncContextManager):
        return user_code.entered(hook)
    return nullcontext()


_limit: ContextVar[asyncio.Timeout | None] = ContextVar("_limit", default=None)
"""The time limit of the rollout that is played in this context."""


@contextmanager
def uncounted() -> Iterator[None]:
    """Stops the clock of `rollout_timeout` inside the block. A hook waits in this block while nobody plays the rollout
    yet."""
    limit = _limit.get()  # set by `_attempt`
    if limit is None:  # the hook is called without `play`, so nobody limits its time
        yield
        return
    deadline = limit.when()
    if deadline is None:  # there is no `rollout_timeout`, or another wait has stopped the clock already
        yield
        return
    loop = asyncio.get_running_loop()
    seconds_left = deadline - loop.time()
    limit.reschedule(None)  # stops the clock
    try:
        yield
    finally:
        limit.reschedule(loop.time() + seconds_left)  # the clock goes on


async def single_turn(task: Task, policy: RolloutPolicy) -> Rollout:
    """Plays a rollout that is one completion of the prompt. The generator uses this hook if it is given no other."""
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
    """Plays one rollout for each of `tasks`, all at the same time.

    `timeout`: the most seconds of each rollout; None: there is no limit. `finished` is awaited for each rollout as soon
    as it is finished, with the number of the rollout and the rollout. `early`, `unanswered`: see RolloutPolicy.

    `patience` is called before each wait for the next rollout. It returns the most seconds of this wait; None: there is
    no limit. If no rollout is finished in this time, all remaining rollouts are given up.

    Returns the errors of the rollouts that failed, but no errors for rollouts that were given up. Raises any error of
    `finished`. Raises any error of the engine except CompletionError, which fails only its own rollout.
    """
    policy = RolloutPolicy(engine, tasks[0].sampling, unanswered, early=early)  # all tasks have the same sampling

    async def play_one(task: Task) -> Exception | None:
        """Plays one rollout. Returns the error with which the rollout failed; None: it did not fail."""
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
            if not done:  # no rollout was finished within `patience`
                break
            for attempt in done:
                attempt.result()  # raises an error of `finished`, or of an engine that failed
    finally:
        for attempt in running:
            attempt.cancel()
        # This only waits for the end of all attempts. If one had an error, `result` has raised it above.
        await asyncio.gather(*attempts, return_exceptions=True)
        await policy.close()
    failures = []
    for attempt in attempts:
        if attempt in running:  # the rollout was given up when `patience` ended
            continue
        failure = attempt.result()
        if failure is not None:
            failures.append(failure)
    return failures


async def _attempt(
    hook: RolloutHook, task: Task, policy: RolloutPolicy, engine: Engine, timeout: float | None
) -> PlayedRollout | Exception:
    """Plays one rollout with `hook`. Returns the rollout, or the error with which the hook failed.

    `timeout`: the most seconds of the rollout; None: there is no limit. If the engine failed, raises its error.
    """
    returned: Any = None
    try:
        async with asyncio.timeout(timeout) as limit:
            _limit.set(limit)  # for `uncounted`; only this task sees the value
            playing = user_code.call_here(hook, task, policy)
            if not inspect.isawaitable(playing):
                shown = user_code.shown(playing, 80)
                raise RolloutError(f"the hook returned {shown} without being awaited: write async def")
            returned = await user_code.awaited(hook, playing)
            return read(returned, engine)
    except Exception as error:
        if isinstance(returned, Rollout):  # the hook has returned a rollout, and `read` has refused it
            returned.settle(f"no group can have the rollout: {error}")
        if policy.failure is not None:  # the engine has failed, so the error of the hook is only a consequence
            raise policy.failure from None
        if isinstance(error, TimeoutError) and limit.expired():
            # `__cause__` is the CancelledError that ended the hook. Some hooks add a note to it, which says what they
            # waited for.
            notes = getattr(error.__cause__, "__notes__", ["does its engine hang?"])
            return RolloutError(f"it took longer than {timeout:g} s (rollout_timeout): {notes[0]}")
        return error


def read(returned: Any, engine: Engine) -> PlayedRollout:
    """The rollout that a hook returned, with its sequences as arrays.

    Raises RolloutError if no group can be made of the rollout, or if the model of the engine lacks a token.
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
            f"a sequence by `append_completion` and `append_observation`"
        ) from error
    return played


def checked(rollout: Any) -> Rollout:
    """Checks a rollout, and replaces its reward and its metrics by floats. Returns the same rollout.

    Raises RolloutError if `rollout` is no Rollout, or if no group can be made of it. Only `read` checks the tokens of
    the sequences.
    """
    if not isinstance(rollout, Rollout):
        returned = user_code.shown(rollout, 80)
        raise RolloutError(f"the hook returned {returned}, not a Rollout: return Rollout([sequence])")
    if not rollout.sequences:
        raise RolloutError("the hook returned a rollout without sequences: return Rollout([sequence])")
    for sequence in rollout.sequences:
        if not isinstance(sequence, RolloutSequence):
            returned = user_code.shown(sequence, 80)
            raise RolloutError(f"the hook returned a rollout of {returned}, which is no RolloutSequence")
    distinct_ids = {id(sequence) for sequence in rollout.sequences}
    if len(distinct_ids) < len(rollout.sequences):
        raise RolloutError("the hook returned one sequence twice: make a RolloutSequence for each")
    if not isinstance(rollout.info, Mapping):
        raise RolloutError(f"info must be a dictionary, not {user_code.shown(rollout.info, 80)}")
    if all(turn.role != "assistant" for turn in rollout.turns):
        raise RolloutError(
            "the policy wrote nothing in the rollout: add what policy.generate returns by `append_completion`"
        )
    try:
        rollout.reward, rollout.metrics = numbers_of(rollout.reward, rollout.metrics)
        for turn in rollout.turns:
            check_name(turn.role, "the role of a turn")
        # A rollout that gives no reason has the reason of its last sequence, so both are checked.
        for reason in (rollout.finish_reason, rollout.sequences[-1].finish_reason):
            # Only None and "" mean that there is no reason. Other false values, such as 0, are errors of the hook.
            is_absent = reason is None or (isinstance(reason, str) and not reason)
            if not is_absent:
                check_name(reason, "finish_reason")
    except ValueError as error:
        raise RolloutError(f"the hook returned a rollout that no group can hold: {error}") from error
    return rollout


def why_unreadable(engine: Engine, rollout: Rollout) -> str:
    """A token of the rollout that the model of the engine does not have, with the remedy; "": the model has all tokens.

    `generate` has checked only the tokens of its requests. The last tokens of a rollout were in no request, but the
    trainer reads them.
    """
    for sequence in rollout.sequences:
        why = why_unknown(engine, sequence.token_ids)
        if why:
            return why
    return ""


def where(failure: Exception) -> str:
    """The line of the hook's own file from which an error of `play` came, as file and line in brackets; "" if the error
    did not come from the user's code.

    The frames of this package come first in the traceback, so the first frame outside of the package is the hook's.
    """
    frames = traceback.extract_tb(failure.__traceback__)
    users_frames = [frame for frame in frames if user_code.PACKAGE not in Path(frame.filename).parents]
    if not users_frames:
        return ""
    return user_code.own_line(users_frames)
