"""Session: one rollout that an agent plays through an address.

    a request ──▶ the exchange that it goes on after, and the tokens of what is new ──▶ the policy ──▶ a completion
                                                                                              │
    Rollout ◀── sequences ◀── the tree of exchanges (exchanges.py) ◀──────────────────────────┴──▶ Answer

Only what is new in a request is rendered and tokenized; no token that the policy drew ever is. Each turn is drawn by a
task of its own: a client that hangs up does not end it, because it may ask again for the answer.
"""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_left
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from replay_client.sampling_masks import other_sampling
from replay_generator.config import MOST_BYTES, MOST_TURNS
from replay_generator.engines import Completion, CompletionError, text_of
from replay_generator.notices import say_once
from replay_generator.prompts.chat import Message, rendered_ids, text_ids
from replay_generator.rollouts.rollout import Rollout, RolloutError, RolloutPolicy, Task
from replay_generator.rollouts.sessions.conversation import Conversation
from replay_generator.rollouts.sessions.exchanges import Beginning, Exchange, Exchanges
from replay_generator.rollouts.sessions.large_requests import worked
from replay_generator.rollouts.sessions.parsers import Parsers, TurnParser
from replay_generator.rollouts.sessions.turns import Answer, Ask, Refusal, WrittenCall, characters_of
from replay_protos.words import counted

T = TypeVar("T")
_LONGEST = 128
"""Characters of a token. Few vocabularies have a longer one."""
_TOKEN = 64
"""Bytes that a token takes, with its log-probability and its version."""


class Session:
    """What one rollout asks the policy for. Its `id` is a secret: whoever knows it may ask."""

    def __init__(
        self,
        task: Task,
        policy: RolloutPolicy,
        parsers: Parsers,
        *,
        most_turns: int = MOST_TURNS,
        most_bytes: int = MOST_BYTES,
        untrained_models: Collection[str] = (),
    ) -> None:
        """`most_turns`, `most_bytes`, `untrained_models`: `max_session_turns`, `max_session_bytes` and
        `untrained_models` of GeneratorConfig."""
        self.id = secrets.token_urlsafe(16)
        self.task = task
        self.exchanges = Exchanges()
        self.context_full = False
        """Whether a request left no room for another token."""
        self.answers: list[Answer] = []
        """What the agent was answered, in order."""
        self.last_refusal: str | None = None
        self.refusals = 0
        """Requests that were refused; without those that were too long for the model."""
        self.fault: CompletionError | None = None
        """What no policy can have drawn, and the engine returned. The rollout has failed."""
        self._policy, self._parsers = policy, parsers
        self._most_turns = most_turns
        self._most_bytes = most_bytes
        self._untrained_models = untrained_models
        self._turns = 0
        """Those that were drawn, and those under way."""
        self._bytes = 0
        """Of the texts and tokens of these turns."""
        self._turns_by_request: dict[bytes, asyncio.Task[Answer]] = {}
        """By the digest of a request: the newest turn that it asked for, unless this failed."""
        self._answered: dict[str, Exchange] = {}
        """By the id of an answer."""
        self._slips: dict[WrittenCall, str] = {}
        """By a call whose arguments are no object: the text of its turn."""
        self._under_way: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def ask(self, ask: Ask, digest: bytes, repeated: bool = False) -> Answer:
        """The next turn. `digest`: of the request; one that is `repeated` gets the answer of the first.

        A caller that is cancelled does not end the drawing. Raises Refusal, and any error of the engine.
        """
        turn = self._turns_by_request.get(digest) if repeated else None
        if turn is None:
            turn = self._begin(self._turn(ask))
            self._turns_by_request[digest] = turn
            turn.add_done_callback(partial(self._forget_failed, digest))
        return await _result(turn)

    async def count(self, ask: Ask) -> int:
        """How many tokens the policy would read. Raises Refusal."""
        exchange, _ = await self._exchange(ask)
        return exchange.size

    def delivered(self, answer: Answer) -> None:
        """The client has the whole answer."""
        self._answered[answer.id].read = True

    def refused(self, refusal: Refusal) -> None:
        """A request of the agent was refused. An agent may swallow that, so the log and the rollout say it."""
        if refusal.status in (410, 429):  # it comes too late, or it may come again
            return
        self.last_refusal = str(refusal)  # the refusal itself has the request in its traceback
        if refusal.code != "context_length_exceeded":
            self.refusals += 1
            say_once(f"a request of an agent is refused: {refusal}", f"refused {refusal.kind}")

    async def draw(self, ask: Ask) -> Completion:
        """A completion of the tokens that a client made itself, drawn with the sampling that it asks for.

        Raises Refusal, and any error of the engine.
        """
        exchange, _ = await self._exchange(ask)
        limit = ask.max_tokens or self.task.sampling.max_tokens
        return await _result(self._begin(self._drawn_within_bounds(ask, exchange, limit, ask.sampling)))

    def rollout(
        self,
        reward: float | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """What the agent has played, with its reward; see Rollout. Raises RolloutError if it is nothing, and
        CompletionError if the engine returned what no policy can have drawn."""
        if self.fault is not None:
            raise self.fault
        sequences = self.exchanges.sequences(self.task.sampling)
        if not sequences and self.exchanges.has_read:
            raise RolloutError("the agent has read no answer but those of untrained_models")
        if not sequences and self.answers:
            raise RolloutError("the agent has read no answer: it hung up before each was sent")
        if not sequences and self.last_refusal is not None:
            raise RolloutError("the agent was answered nothing")
        if not sequences:
            raise RolloutError(
                "the agent asked the policy for nothing: its address is in OPENAI_BASE_URL and ANTHROPIC_BASE_URL"
            )
        finish_reason = "length" if self.context_full else ""
        counted = {"refusals": float(self.refusals), **(metrics or {})}
        return Rollout(sequences, reward, finish_reason, dict(info or {}), counted)

    async def close(self) -> None:
        """Ends the requests under way, and refuses further ones."""
        self._closed = True
        for task in (under_way := list(self._under_way)):
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def _forget_failed(self, digest: bytes, turn: asyncio.Task[Answer]) -> None:
        """A request that failed is drawn anew when it comes again. Its error has the whole request in its traceback."""
        if (turn.cancelled() or turn.exception() is not None) and self._turns_by_request.get(digest) is turn:
            del self._turns_by_request[digest]

    def _begin(self, turn: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(turn)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        if self._closed:
            task.cancel()
        return task

    # ------------------------------------------------------------------------------------------------ a turn

    async def _turn(self, ask: Ask) -> Answer:
        own = vars(self.task.sampling)
        if other := other_sampling({**own, **ask.sampling}, own):
            name, wanted, has = other
            raise Refusal(
                f"{name} {wanted} is not that of the generator, {has}, which the trainer assumes: leave it out",
                field=name,
            )
        if ask.tools and not self._parsers.knows_tools:
            raise Refusal(
                "the request has tools: start the generator with --tool-parser, the name of the parser", field="tools"
            )
        exchange, beginning = await self._exchange(ask)
        exchange.is_trained = ask.model not in self._untrained_models
        size = exchange.size
        if size >= self.task.max_length:
            raise self._full(counted(size, "token"))
        limit = min(ask.max_tokens or self.task.sampling.max_tokens, self.task.sampling.max_tokens)
        task = self.task

        def ready() -> TurnParser:
            return self._parsers.ready(task.tokenizer, exchange.token_ids, ask.tools, task.chat_template_kwargs)

        parser = await worked(ask.size + size, ready)
        completion = await self._drawn_within_bounds(ask, exchange, limit)
        stopped_by = _first(ask.stop, completion.text)

        def parse() -> tuple[str, str, list[WrittenCall]]:
            return parser.parse(completion, stopped_by, objects_only=ask.objects_only)

        thoughts, text, calls = await worked(len(completion.text), parse)
        for call in calls:
            if call.object is None:
                self._slips[call] = completion.text
        exchange.text = f"{ask.prompt}{completion.text}" if isinstance(ask.prompt, str) else ""
        drawn, name = len(completion.token_ids), secrets.token_hex(12)
        self._answered[name] = exchange
        answer = Answer(name, text, thoughts, calls, completion.finish_reason, stopped_by, size, drawn)
        self.answers.append(answer)
        if beginning is not None:
            self.exchanges.answered(exchange, beginning, answer)
        return answer

    async def _drawn_within_bounds(
        self, ask: Ask, exchange: Exchange, limit: int, sampling: Mapping[str, Any] = MappingProxyType({})
    ) -> Completion:
        """Draws a turn, if the session may have one more. `sampling`: in the place of the generator's own. Raises
        Refusal."""
        begun = len(exchange.words) if exchange.before is not None else max(ask.size, len(exchange.words))
        new = begun + _TOKEN * (len(exchange.new_ids) + limit)
        for name, has, more, most in (
            ("max_session_turns", self._turns, 1, self._most_turns),
            ("max_session_bytes", self._bytes, new, self._most_bytes),
        ):
            if has + more > most:
                self.context_full = True
                raise Refusal(
                    f"the rollout has {has}, and this turn needs {more}: the generator's {name} is {most}: end the "
                    "rollout",
                    field=name,
                )
        self._turns += 1
        self._bytes += new
        try:
            completion = await self._draw(exchange, {**sampling, "max_tokens": limit}, ask.stop)
        except BaseException:
            self._turns -= 1
            self._bytes -= new
            raise
        self._bytes -= _TOKEN * (limit - len(completion.token_ids))
        assert self._bytes >= 0, self._bytes
        assert 0 < self._turns <= self._most_turns, (self._turns, self._most_turns)
        return completion

    def _full(self, what: str) -> Refusal:
        """The refusal of a request that leaves no room for another token."""
        self.context_full = True
        return Refusal(
            f"the request has {what}, and the model takes {self.task.max_length} tokens with those that it draws",
            code="context_length_exceeded",
        )

    async def _exchange(self, ask: Ask) -> tuple[Exchange, Beginning | None]:
        """The exchange of a request, before its completion, and what is known of its messages; None: it has none.
        Raises Refusal."""
        if ask.prompt is not None and not isinstance(ask.prompt, str) and len(ask.prompt) >= self.task.max_length:
            raise self._full(counted(len(ask.prompt), "token"))
        size = ask.size or characters_of(ask)
        return await worked(size, lambda: self._exchange_of(ask))

    def _exchange_of(self, ask: Ask) -> tuple[Exchange, Beginning | None]:
        """As `_exchange`. It runs in a thread where the request is large."""
        characters = characters_of(ask)
        if characters > _LONGEST * self.task.max_length:
            longest = max(_LONGEST, max(map(len, self.task.tokenizer.get_vocab())))
            if characters > longest * self.task.max_length:  # no vocabulary makes so few tokens of them
                raise self._full(counted(characters, "character"))
        try:
            if isinstance(ask.prompt, str):
                return self._of_text(ask.prompt), None
            if ask.prompt is None:
                beginning = self.exchanges.after_messages(ask.tools, ask.messages)
                return self._of_messages(ask.tools, beginning), beginning
            ids = list(ask.prompt)
            before = self.exchanges.after_tokens(ids)
            if before is None:
                return Exchange(None, ids), None
            return Exchange(before, ids[before.size :], "user"), None
        except RolloutError as error:
            raise Refusal(str(error)) from error

    def _of_text(self, text: str) -> Exchange:
        tokenizer = self.task.tokenizer
        if not (before := self.exchanges.after_text(text)):
            return Exchange(None, text_ids(tokenizer, text), words=text)
        # Where the policy ended its turn, the client may have written this as text.
        new = text.removeprefix(before.text).removeprefix(text_of(tokenizer, before.token_ids[-1:]))
        return Exchange(before, rendered_ids(tokenizer, new), "user", new)

    def _of_messages(self, tools: Sequence[Any], beginning: Beginning) -> Exchange:
        before = beginning.before
        messages = [self._without_slips(message) for message in beginning.messages]
        new = messages[beginning.count :]
        if before and before.conversation and before.completion:
            go_on, drawn = before.conversation.go_on, before.completion
            last = (drawn.token_ids or before.new_ids)[-1]
            before.followed = True
            try:
                conversation, new_ids = go_on(drawn.text, last, new)
                role = new[-1]["role"] if new else "user"
                return Exchange(before, new_ids, role, _words(new), conversation)
            except RolloutError as error:
                say_once(f"a conversation goes on in a sequence of its own: {error}")
        ended = before is not None and not new
        if messages[-1]["role"] == "assistant" and not ended:
            raise RolloutError("the conversation ends with words of the assistant: end it with a message of the user")

        conversation, new_ids = Conversation.begin(self.task, messages, tools, ended=ended)
        return Exchange(None, new_ids, words=_words(messages), conversation=conversation)

    def _without_slips(self, message: Message) -> Message:
        """The message; a turn of ours with a call that has no object as arguments as the text that the policy wrote.

        No template can be told such a call.
        """
        for call in message.get("tool_calls") or ():
            function = call["function"]
            if isinstance(function["arguments"], str):
                text = self._slips.get(WrittenCall(call["id"], function["name"], function["arguments"]))
                if text is not None:
                    return {"role": "assistant", "content": text}
        return message

    async def _draw(self, exchange: Exchange, sampling: Mapping[str, Any], stop: Sequence[str]) -> Completion:
        """Draws the completion of an exchange. The text of `stop` that comes first ends it. Raises Refusal."""
        if self.fault is not None:
            raise _faulty(self.fault)
        config = replace(self.task.sampling, **sampling)
        try:
            completion = await self._policy.generate(exchange.token_ids, config)
        except RolloutError as error:  # the same request would fail again
            raise Refusal(str(error)) from error
        except CompletionError as error:
            self.fault = error
            raise _faulty(error) from error
        if text := _first(stop, completion.text):
            ids = completion.token_ids

            def begins(size: int) -> str:
                return text_of(self.task.tokenizer, ids[:size], skip_special_tokens=True)

            size = bisect_left(range(len(ids)), True, key=lambda n: text in begins(n + 1))
            completion = completion.cut(size + 1, begins(size + 1))
        self.exchanges.add(exchange, completion, config)
        return completion


def _faulty(fault: CompletionError) -> Refusal:
    """Clients try 422 not again: the rollout has failed, whatever they do."""
    return Refusal(f"the rollout has failed: {fault}", status=422, field="completion")


def _first(texts: Sequence[str], output: str) -> str | None:
    """The one that comes first in what was said."""
    return min((text for text in texts if text in output), key=output.find, default=None)


def _words(messages: Sequence[Message]) -> str:
    return "\n".join(str(message.get("content") or "") for message in messages)


async def _result(task: asyncio.Task[T]) -> T:
    """Of a task that goes on if its caller is cancelled. Raises Refusal if the session has ended it."""
    await asyncio.wait({task})
    if task.cancelled():
        raise Refusal("the session has ended", status=410)
    return task.result()
