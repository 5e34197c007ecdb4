"""Session: one rollout that an agent plays through an address.

    a request ──▶ the exchange that it continues, and the tokens of its new messages ──▶ the policy ──▶ a completion
                                                                                              │
    Rollout ◀── sequences ◀── the tree of exchanges (exchanges.py) ◀──────────────────────────┴──▶ Answer

Only the new part of a request is rendered and tokenized. For the earlier turns of the policy, the session uses the
tokens that the policy drew. Each turn is drawn by a task of its own. If the client hangs up, the task goes on, because
the client may send its request again.
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
from replay_generator.prompts.chat import ChatError, Message, check_text, rendered_ids, text_ids
from replay_generator.rollouts.rollout import Rollout, RolloutError, RolloutPolicy, Task
from replay_generator.rollouts.sessions.conversation import Conversation
from replay_generator.rollouts.sessions.exchanges import Beginning, Exchange, Exchanges
from replay_generator.rollouts.sessions.large_requests import worked
from replay_generator.rollouts.sessions.parsers import Parsers, TurnParser
from replay_generator.rollouts.sessions.turns import Answer, Ask, Refusal, WrittenCall, characters_of
from replay_protos.words import counted

T = TypeVar("T")
_LONG_TOKEN = 128
"""The number of characters of a very long token. Few vocabularies have a longer one."""
_TOKEN_BYTES = 64
"""The bytes that a token takes in memory, with its log-probability and its policy version."""


class Session:
    """The conversations of one rollout with the policy.

    The `id` of the session is a secret: everybody who knows the id may send requests to the policy.
    """

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
        """The exchanges of all conversations."""
        self.context_full = False
        """True once a request left no room for another token, or exceeded a bound of the session."""
        self.answers: list[Answer] = []
        """The answers to the agent, in order. The agent may have hung up before it got one of them."""
        self.last_refusal: str | None = None
        """The text of the last refusal; None: no request was refused."""
        self.refusals = 0
        """The number of refused requests, without requests that were too long for the model, that came too late, or
        that the client may send again."""
        self.fault: CompletionError | None = None
        """The error of a completion that no policy can have drawn, which makes the rollout fail. None: there was no
        such completion."""
        self._policy = policy
        self._parsers = parsers
        self._most_turns = most_turns
        self._most_bytes = most_bytes
        self._untrained_models = untrained_models
        self._turns = 0
        """The number of turns that were drawn, or are being drawn."""
        self._bytes = 0
        """The bytes of the texts and tokens of these turns. Each token counts as _TOKEN_BYTES. A turn that is being
        drawn counts with the most tokens that it may draw."""
        self._turns_by_request: dict[bytes, asyncio.Task[Answer]] = {}
        """The newest turn of each request, by the digest of the request. Turns that failed are removed."""
        self._answered: dict[str, Exchange] = {}
        """The exchanges that have an answer, by the id of the answer."""
        self._malformed: dict[WrittenCall, str] = {}
        """A call of the policy whose arguments are no object -> the whole text of the turn that has the call."""
        self._under_way: set[asyncio.Task[Any]] = set()
        """The tasks that draw turns."""
        self._closed = False
        """True once `close` was called."""

    async def ask(self, ask: Ask, digest: bytes, repeated: bool = False) -> Answer:
        """Draws the next turn of the policy, and returns the answer.

        `digest`: the digest of the request. `repeated`: True if the client may have sent this request before. If it
        did, it gets the answer to the earlier request. If the caller is cancelled, the turn is still drawn. Raises
        Refusal, and any error of the engine.
        """
        turn = None  # the task that draws the turn
        if repeated:
            turn = self._turns_by_request.get(digest)
        if turn is None:
            turn = self._begin(self._turn(ask))
            self._turns_by_request[digest] = turn
            turn.add_done_callback(partial(self._forget_failed, digest))
        return await _result(turn)

    async def count(self, ask: Ask) -> int:
        """Counts the tokens that the policy would read for this request. Raises Refusal."""
        exchange, _ = await self._exchange(ask)
        return exchange.size

    def delivered(self, answer: Answer) -> None:
        """Notes that the client has the whole answer."""
        self._answered[answer.id].read = True

    def refused(self, refusal: Refusal) -> None:
        """Notes that a request was refused, so that the log and the rollout report the refusal, because the agent may
        not report it."""
        if refusal.status in (410, 429):  # the request came too late, or may come again
            return
        # Only the text is stored: the traceback of the refusal would keep the whole request in memory.
        self.last_refusal = str(refusal)
        if refusal.code != "context_length_exceeded":  # this refusal is usual: clients then compact the conversation
            self.refusals += 1
            say_once(f"a request of an agent is refused: {refusal}", f"refused {refusal.kind}")

    async def draw(self, ask: Ask) -> Completion:
        """Draws the completion of a request, with the sampling that the request asks for.

        This is for clients that send and read token ids themselves, such as `verifiers`. So nothing is parsed, and no
        answer is noted. Raises Refusal, and any error of the engine.
        """
        exchange, _ = await self._exchange(ask)
        # Unlike in `_turn`, the request may ask for more tokens than the generator's own limit.
        limit = ask.max_tokens or self.task.sampling.max_tokens
        drawing = self._begin(self._drawn_within_bounds(ask, exchange, limit, ask.sampling))
        return await _result(drawing)

    def rollout(
        self,
        reward: float | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Makes the rollout of the agent. `reward`, `metrics` and `info`: see Rollout.

        Raises RolloutError if there is nothing to train on, and CompletionError if the engine returned a completion
        that no policy can have drawn.
        """
        if self.fault is not None:
            raise self.fault
        sequences = self.exchanges.sequences(self.task.sampling)
        if not sequences:
            raise RolloutError(self._why_nothing())
        return Rollout(
            sequences,
            reward,
            finish_reason="length" if self.context_full else "",
            info=dict(info or {}),
            metrics={"refusals": float(self.refusals), **(metrics or {})},
        )

    def _why_nothing(self) -> str:
        """The reason why the rollout has no sequence."""
        if self.exchanges.has_read:
            return "the agent has read no answer but those of untrained_models"
        if self.answers:
            return "the agent has read no answer: it hung up before each was sent"
        if self.last_refusal is not None:  # SessionServer.playing adds the refusal to this message
            return "the agent was answered nothing"
        return "the agent asked the policy for nothing: its address is in OPENAI_BASE_URL and ANTHROPIC_BASE_URL"

    async def close(self) -> None:
        """Ends the requests under way, and refuses further ones."""
        self._closed = True
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def _forget_failed(self, digest: bytes, turn: asyncio.Task[Answer]) -> None:
        """Forgets a turn that failed, so that the turn is drawn anew if the client repeats the request.

        This also frees memory, because the traceback of the error holds the whole request. The event loop calls this
        method when the task `turn` has ended.
        """
        has_failed = turn.cancelled() or turn.exception() is not None
        is_newest = self._turns_by_request.get(digest) is turn  # an equal request may have begun another turn
        if has_failed and is_newest:
            del self._turns_by_request[digest]

    def _begin(self, turn: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task that draws a turn. `close` cancels the task if it has not ended by then."""
        task = asyncio.create_task(turn)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        if self._closed:  # the session ended while the request was read
            task.cancel()
        return task

    # ------------------------------------------------------------------------------------------------ a turn

    async def _turn(self, ask: Ask) -> Answer:
        """Draws the turn that a request asks for, parses it, and notes the answer. Raises Refusal, and any error of the
        engine."""
        self._check_servable(ask)
        exchange, beginning = await self._exchange(ask)
        exchange.is_trained = ask.model not in self._untrained_models
        prompt_size = exchange.size  # the number of tokens that the policy reads, because no completion is drawn yet
        if prompt_size >= self.task.max_length:
            raise self._full(counted(prompt_size, "token"))
        task = self.task
        limit = min(ask.max_tokens or task.sampling.max_tokens, task.sampling.max_tokens)

        def ready() -> TurnParser:  # `worked` calls this, perhaps in a thread
            return self._parsers.ready(task.tokenizer, exchange.token_ids, ask.tools, task.chat_template_kwargs)

        # The parser is made before the turn is drawn, so that a request without a usable parser costs no turn.
        parser = await worked(ask.size + prompt_size, ready)
        completion = await self._drawn_within_bounds(ask, exchange, limit)
        stopped_by = _first(ask.stop, completion.text)

        def parse() -> tuple[str, str, list[WrittenCall]]:  # `worked` calls this, perhaps in a thread
            return parser.parse(completion, stopped_by, objects_only=ask.objects_only)

        thoughts, text, calls = await worked(len(completion.text), parse)
        for call in calls:
            if call.object is None:
                self._malformed[call] = completion.text
        exchange.text = ""
        if isinstance(ask.prompt, str):  # a later prompt that begins with `exchange.text` continues this exchange
            exchange.text = f"{ask.prompt}{completion.text}"
        answer = Answer(
            id=secrets.token_hex(12),
            text=text,
            reasoning=thoughts,
            calls=calls,
            finish_reason=completion.finish_reason,
            stopped_by=stopped_by,
            prompt_tokens=prompt_size,
            completion_tokens=len(completion.token_ids),
        )
        self._answered[answer.id] = exchange
        self.answers.append(answer)
        if beginning is not None:  # the request has messages, so a later request may have the answer as a message
            self.exchanges.answered(exchange, beginning, answer)
        return answer

    def _check_servable(self, ask: Ask) -> None:
        """Raises Refusal for a sampling that the trainer does not assume, and for tools if there is no tool parser."""
        own = vars(self.task.sampling)
        # The name of the first setting that differs, the value that the client wants, and the generator's own value.
        # None: no setting differs.
        difference = other_sampling({**own, **ask.sampling}, own)
        if difference:
            name, wanted, assumed = difference
            raise Refusal(
                f"{name} {wanted} is not that of the generator, {assumed}, which the trainer assumes: leave it out",
                field=name,
            )
        if ask.tools and not self._parsers.knows_tools:
            raise Refusal(
                "the request has tools: start the generator with --tool-parser, the name of the parser", field="tools"
            )

    async def _drawn_within_bounds(
        self, ask: Ask, exchange: Exchange, limit: int, sampling: Mapping[str, Any] = MappingProxyType({})
    ) -> Completion:
        """Draws a turn if the bounds of the session allow it.

        `limit`: the most tokens of the turn. `sampling`: values that replace those of the generator, by name. Raises
        Refusal, and any error of the engine.
        """
        # `surrogatepass`: JSON can hold half of a surrogate pair, which has no bytes otherwise.
        text_bytes = len(exchange.words.encode(errors="surrogatepass"))
        if exchange.before is None:  # then all of the request is new, and more than `words`: for example, its tools
            text_bytes = max(ask.size, text_bytes)
        # Bytes for all tokens that the turn may draw are reserved here, because other turns may begin while this turn
        # is drawn. The bytes that the turn did not use are released below.
        turn_bytes = text_bytes + _TOKEN_BYTES * (len(exchange.new_ids) + limit)
        self._check_bound("max_session_turns", self._turns, 1, self._most_turns)
        self._check_bound("max_session_bytes", self._bytes, turn_bytes, self._most_bytes)
        self._turns += 1
        self._bytes += turn_bytes
        try:
            completion = await self._draw(exchange, {**sampling, "max_tokens": limit}, ask.stop)
        except BaseException:
            self._turns -= 1
            self._bytes -= turn_bytes
            raise
        self._bytes -= _TOKEN_BYTES * (limit - len(completion.token_ids))
        assert self._bytes >= 0, self._bytes
        assert 0 < self._turns <= self._most_turns, (self._turns, self._most_turns)
        return completion

    def _check_bound(self, name: str, used: int, more: int, most: int) -> None:
        """Raises Refusal if a turn would exceed a bound of the session. Also notes then that the context is full.

        `name`: the setting of the bound. `used`: the turns or bytes that the session has used so far. `more`: the turns
        or bytes that this turn needs. `most`: the bound.
        """
        if used + more > most:
            self.context_full = True
            raise Refusal(
                f"the rollout has {used}, and this turn needs {more}: the generator's {name} is {most}: end the "
                "rollout",
                field=name,
            )

    def _full(self, what: str) -> Refusal:
        """Notes that the context is full. Returns the refusal of a request that leaves no room for another token.
        `what`: the size of the request, in words."""
        self.context_full = True
        return Refusal(
            f"the request has {what}, and the model takes {self.task.max_length} tokens with those that it draws",
            code="context_length_exceeded",
        )

    async def _exchange(self, ask: Ask) -> tuple[Exchange, Beginning | None]:
        """Makes the exchange for a request, which has no completion yet. Returns (the exchange, the known beginning of
        the request's messages); the beginning is None if the request has no messages. Raises Refusal."""
        prompt = ask.prompt
        # The length of a prompt of tokens is known here, so a prompt that is too long is refused before any work.
        if prompt is not None and not isinstance(prompt, str) and len(prompt) >= self.task.max_length:
            raise self._full(counted(len(prompt), "token"))
        size = ask.size or characters_of(ask)  # `ask.size` is 0 if the request did not come through a network
        return await worked(size, lambda: self._exchange_of(ask))

    def _exchange_of(self, ask: Ask) -> tuple[Exchange, Beginning | None]:
        """Does the work of `_exchange`, which runs in a thread if the request is large. Raises Refusal."""
        self._check_characters(ask)
        try:
            if isinstance(ask.prompt, str):
                return self._of_text(ask.prompt), None
            if ask.prompt is not None:
                return self._of_tokens(list(ask.prompt)), None
            beginning = self.exchanges.after_messages(ask.tools, ask.messages)
            return self._of_messages(ask.tools, beginning), beginning
        except (RolloutError, ChatError) as error:  # the policy cannot answer this prompt: only this request fails
            raise Refusal(str(error)) from error

    def _check_characters(self, ask: Ask) -> None:
        """Raises Refusal if the request has too many characters for the model, even if each token of the request were
        as long as the longest token of the vocabulary.

        This is checked before the request is tokenized, because it takes long to tokenize a huge text.
        """
        characters = characters_of(ask)
        if characters <= _LONG_TOKEN * self.task.max_length:  # the usual case, which needs no look at the vocabulary
            return
        longest_token = max(len(token) for token in self.task.tokenizer.get_vocab())  # in characters
        if characters > max(_LONG_TOKEN, longest_token) * self.task.max_length:
            raise self._full(counted(characters, "character"))

    def _of_text(self, text: str) -> Exchange:
        """Makes the exchange for a prompt that is a text. If the prompt begins with the text of an earlier exchange, it
        continues that exchange. Raises ChatError for half of a surrogate pair."""
        check_text(text)
        tokenizer = self.task.tokenizer
        before = self.exchanges.after_text(text)
        if before is None:
            # Unlike `rendered_ids` below, `text_ids` adds tokens such as BOS at the beginning.
            return Exchange(None, text_ids(tokenizer, text), words=text)
        # The client may have written the last token of the policy's turn, such as the end-of-sequence token, as text.
        ending = text_of(tokenizer, before.token_ids[-1:])
        new = text.removeprefix(before.text).removeprefix(ending)
        return Exchange(before, rendered_ids(tokenizer, new), role="user", words=new)

    def _of_tokens(self, token_ids: list[int]) -> Exchange:
        """Makes the exchange for a prompt of tokens. If the prompt begins with the tokens of an earlier exchange, it
        continues that exchange."""
        before = self.exchanges.after_tokens(token_ids)
        if before is None:
            return Exchange(None, token_ids)
        return Exchange(before, token_ids[before.size :], role="user")

    def _of_messages(self, tools: Sequence[Any], beginning: Beginning) -> Exchange:
        """Makes the exchange for messages.

        The messages continue the exchange `beginning.before`, if there is one and the chat template allows it.
        Otherwise they begin a new tree. Raises RolloutError for messages that the policy cannot answer.
        """
        before = beginning.before
        messages = [self._without_malformed(message) for message in beginning.messages]
        new = messages[beginning.count :]
        # An exchange that `after_messages` has found always has a conversation and a completion.
        if before and before.conversation and before.completion:
            turn_ids = before.completion.token_ids or before.new_ids  # the engine may have drawn no token
            # From now on, if a request fits several exchanges with equal answers, those that no request has continued
            # are preferred to this exchange.
            before.followed = True
            try:
                conversation, new_ids = before.conversation.go_on(before.completion.text, turn_ids[-1], new)
            except RolloutError as error:  # the template changes earlier turns: the messages begin a new tree below
                say_once(f"a conversation goes on in a sequence of its own: {error}")
            else:
                role = new[-1]["role"] if new else "user"
                return Exchange(before, new_ids, role=role, words=_words(new), conversation=conversation)
        # If no message is new, the last message is the policy's own turn, and the policy takes one more turn behind it.
        # Any other last message of the assistant would be continued by the policy, which sessions do not serve.
        ended = before is not None and not new
        if messages[-1]["role"] == "assistant" and not ended:
            raise RolloutError("the conversation ends with words of the assistant: end it with a message of the user")
        conversation, new_ids = Conversation.begin(self.task, messages, tools, ended=ended)
        return Exchange(None, new_ids, words=_words(messages), conversation=conversation)

    def _without_malformed(self, message: Message) -> Message:
        """Replaces a turn of the policy that has a call whose arguments are no object by a message with the whole text
        that the policy wrote, because no chat template has a form for such a call.

        Returns any other message unchanged.
        """
        for call in message.get("tool_calls") or ():
            function = call["function"]
            if not isinstance(function["arguments"], str):  # then the arguments are an object
                continue
            written = WrittenCall(call["id"], function["name"], function["arguments"])
            text = self._malformed.get(written)
            if text is not None:  # None: the client has written this call, and the chat template accepts it or not
                return {"role": "assistant", "content": text}
        return message

    async def _draw(self, exchange: Exchange, sampling: Mapping[str, Any], stop: Sequence[str]) -> Completion:
        """Draws the completion of an exchange, and adds the exchange to the tree.

        `sampling`: values that replace those of the generator, by name. `stop`: texts that end the completion, which is
        cut off behind the first of them. Raises Refusal, and any error of the engine.
        """
        if self.fault is not None:  # the rollout has failed, so no turn is drawn any more
            raise _faulty(self.fault)
        config = replace(self.task.sampling, **sampling)
        try:
            completion = await self._policy.generate(exchange.token_ids, config)
        except RolloutError as error:  # refused with status 400: the same request would fail again
            raise Refusal(str(error)) from error
        except CompletionError as error:
            self.fault = error
            raise _faulty(error) from error
        text = _first(stop, completion.text)
        if text:
            completion = self._cut_behind(text, completion)
        self.exchanges.add(exchange, completion, config)
        return completion

    def _cut_behind(self, text: str, completion: Completion) -> Completion:
        """Cuts a completion behind the token that completes the first occurrence of `text`."""
        ids = completion.token_ids

        def text_up_to(index: int) -> str:
            """The text of the tokens from the first token to the token `index`."""
            return text_of(self.task.tokenizer, ids[: index + 1], skip_special_tokens=True)

        # If the tokens up to one token contain `text`, so do the tokens up to each later token. So bisection finds the
        # index of the first such token.
        last = bisect_left(range(len(ids)), True, key=lambda index: text in text_up_to(index))
        return completion.cut(last + 1, text_up_to(last))


def _faulty(fault: CompletionError) -> Refusal:
    """The refusal after a fault of the engine. No answer could save the rollout, so the refusal has the status 422,
    after which clients do not repeat a request."""
    return Refusal(f"the rollout has failed: {fault}", status=422, field="completion")


def _first(texts: Sequence[str], output: str) -> str | None:
    """The one of `texts` that comes first in `output`; None: `output` contains none of them."""
    contained = [text for text in texts if text in output]
    return min(contained, key=output.find, default=None)


def _words(messages: Sequence[Message]) -> str:
    """The contents of messages as one text, for people who look at the rollout."""
    return "\n".join(str(message.get("content") or "") for message in messages)


async def _result(task: asyncio.Task[T]) -> T:
    """Waits for a task, and returns its result. If the caller is cancelled, the task goes on. Raises any error of the
    task, and Refusal if `close` has cancelled the task."""
    await asyncio.wait({task})  # unlike `await task`, this does not cancel the task if the caller is cancelled
    if task.cancelled():
        raise Refusal("the session has ended", status=410)
    return task.result()
