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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from replay_client.kept import TRUNCATING, other_sampling
from replay_client.waits import in_daemon_thread
from replay_generator.chat import Message, rendered_ids, text_ids
from replay_generator.engines import Completion, CompletionError, text_of
from replay_generator.rollouts import Rollout, RolloutError, RolloutPolicy, Task
from replay_generator.sessions.conversation import Conversation
from replay_generator.sessions.exchanges import Beginning, Exchange, Exchanges
from replay_generator.sessions.notices import say_once
from replay_generator.sessions.parsers import Parsers
from replay_generator.sessions.turns import Answer, Ask, Refusal, WrittenCall

T = TypeVar("T")
_SHORT = 20_000
"""Characters of a conversation that is rendered and tokenized in some milliseconds."""


class Session:
    """What one rollout asks the policy for. Its `id` is a secret: whoever knows it may ask."""

    def __init__(self, task: Task, policy: RolloutPolicy, parsers: Parsers) -> None:
        self.id = secrets.token_urlsafe(16)
        self.task = task
        self.exchanges = Exchanges()
        self.context_full = False
        """Whether a request left no room for another token."""
        self.answers: list[Answer] = []
        """What the agent was answered, in order."""
        self.last_refusal: Refusal | None = None
        self.refusals = 0
        """Requests that were refused; without those that were too long for the model."""
        self.fault: CompletionError | None = None
        """What no policy can have drawn, and the engine returned. The rollout has failed."""
        self._policy, self._parsers = policy, parsers
        self._asked: dict[bytes, asyncio.Task[Answer]] = {}
        """By the digest of a request: the newest turn that it asked for."""
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
        turn = self._asked.get(digest) if repeated else None
        if turn is None or (turn.done() and (turn.cancelled() or turn.exception() is not None)):
            turn = self._asked[digest] = self._begin(self._turn(ask))
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
        self.last_refusal = refusal
        if refusal.code != "context_length_exceeded":
            self.refusals += 1
            say_once(f"a request of an agent is refused: {refusal}", f"refused {refusal.kind}")

    async def draw(self, token_ids: Sequence[int], params: Mapping[str, Any]) -> Completion:
        """A completion of these tokens, for a client that makes tokens itself. `params`: what it says of sampling."""
        known = ("temperature", *TRUNCATING, "max_tokens")
        given = {name: params[name] for name in known if params.get(name) is not None}
        exchange, _ = await self._exchange(Ask(prompt=token_ids))
        return await _result(self._begin(self._draw(exchange, given, ())))

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
        size = exchange.size
        if size >= self.task.max_length:
            self.context_full = True
            raise Refusal(
                f"the request has {size} tokens, and the model takes {self.task.max_length} with those that it draws",
                code="context_length_exceeded",
            )
        limit = min(ask.max_tokens or self.task.sampling.max_tokens, self.task.sampling.max_tokens)
        parser = self._parsers.ready(self.task.tokenizer, exchange.token_ids, ask.tools, self.task.chat_template)
        completion = await self._draw(exchange, {"max_tokens": limit}, ask.stop)
        stopped_by = _first(ask.stop, completion.text)
        thoughts, text, calls = parser.parse(completion, stopped_by, objects_only=ask.objects_only)
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

    async def _exchange(self, ask: Ask) -> tuple[Exchange, Beginning | None]:
        """The exchange of a request, before its completion, and what is known of its messages; None: it has none.
        Raises Refusal."""
        try:
            if isinstance(ask.prompt, str):
                return self._of_text(ask.prompt), None
            if ask.prompt is None:
                beginning = self.exchanges.after_messages(ask.tools, ask.messages)
                return await self._of_messages(ask.tools, beginning), beginning
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

    async def _of_messages(self, tools: Sequence[Any], beginning: Beginning) -> Exchange:
        before = beginning.before
        messages = [self._without_slips(message) for message in beginning.messages]
        new = messages[beginning.count :]
        if before and before.conversation and before.completion:
            go_on, drawn = before.conversation.go_on, before.completion
            last = (drawn.token_ids or before.given)[-1]
            before.followed = True
            try:
                conversation, given = await _rendered(messages, lambda: go_on(drawn.text, last, new))
                role = new[-1]["role"] if new else "user"
                return Exchange(before, given, role, _words(new), conversation)
            except RolloutError as error:
                say_once(f"a conversation goes on in a sequence of its own: {error}")
        ended = before is not None and not new
        if messages[-1]["role"] == "assistant" and not ended:
            raise RolloutError("the conversation ends with words of the assistant: end it with a message of the user")

        def begin() -> tuple[Conversation, list[int]]:
            return Conversation.begin(self.task, messages, tools, ended=ended)

        conversation, given = await _rendered(messages, begin)
        return Exchange(None, given, words=_words(messages), conversation=conversation)

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


def _first(texts: Sequence[str], said: str) -> str | None:
    """The one that comes first in what was said."""
    return min((text for text in texts if text in said), key=said.find, default=None)


async def _rendered(messages: Sequence[Message], work: Callable[[], T]) -> T:
    """What `work` makes of the messages; of many in a thread, so that others need not wait for it."""
    if sum(len(message.get("content") or "") for message in messages) < _SHORT:
        return work()
    return cast("T", await in_daemon_thread(work))


def _words(messages: Sequence[Message]) -> str:
    return "\n".join(str(message.get("content") or "") for message in messages)


async def _result(task: asyncio.Task[T]) -> T:
    """Of a task that goes on if its caller is cancelled. Raises Refusal if the session has ended it."""
    await asyncio.wait({task})
    if task.cancelled():
        raise Refusal("the session has ended", status=410)
    return task.result()
