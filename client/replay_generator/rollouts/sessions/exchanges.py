"""Exchanges: what an agent asked and the policy drew, as a tree, and the sequences of a rollout that come of it.

A client sends the whole conversation each time. The exchange that its messages begin with is found by them
(matching.py has the rule), and what is asked now goes on after the tokens of that one, as they were drawn. One that
goes on at the end of a branch makes the branch longer. One that goes on where another already does, as sub-agents do
that share a beginning, begins a branch of its own. A conversation that begins with no exchange, for example because the
agent has edited or compacted it, begins a tree of its own.

An exchange has only its own tokens, so that a session of many turns takes no more memory than its tokens do.

Each branch becomes a sequence. A turn that several branches share is trained on in the first of them, and is context in
the others. A turn that no client has read, because it hung up and never asked again, belongs to none, and neither does
one of a model by whose name nothing is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replay_client.sampling_masks import other_sampling
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.notices import say_once
from replay_generator.prompts.chat import Message
from replay_generator.rollouts.rollout import RolloutError, RolloutSequence
from replay_generator.rollouts.sessions.conversation import Conversation
from replay_generator.rollouts.sessions.matching import begun, difference, followed_by, has_ids, has_thoughts, in_order
from replay_generator.rollouts.sessions.turns import Answer
from replay_protos.words import counted

_EARLIER = "earlier"
"""The role of a turn of the policy that another sequence of the rollout is trained on."""
_UNTRAINED = "untrained"
"""The role of a turn of the policy that none is trained on."""


@dataclass(eq=False)
class Exchange:
    """Tokens that the policy was given, and the completion that it drew after them."""

    before: Exchange | None
    """The one whose tokens it goes on after; None: it is the first of its tree."""
    new_ids: list[int]
    """Tokens behind those of `before`."""
    role: str = "prompt"
    words: str = ""
    """Who gave these tokens, and as which text."""
    conversation: Conversation | None = None
    """As the policy read it; None: it was asked with tokens or with a text."""
    completion: Completion | None = None
    """None: it is not drawn yet."""
    sampling: SamplingConfig | None = None
    """How it was drawn."""
    text: str = ""
    """Of one that was asked with a text: that, and what was drawn after it."""
    read: bool = False
    """Whether the client has the whole answer."""
    is_trained: bool = True
    """Whether its completion is trained on. Otherwise it is context of those that go on after it."""
    followed: bool = False
    """Whether somebody goes on after it."""
    answer: Answer | None = None
    """What the client was answered."""
    digest: bytes = b""
    """Of the conversation with its answer."""
    size: int = field(init=False)
    """How many tokens it has, from the first of the tree on; with those of the completion, once it is drawn."""

    def __post_init__(self) -> None:
        self.size = len(self.new_ids)
        if self.before is not None:
            self.size += self.before.size

    @property
    def token_ids(self) -> list[int]:
        """All tokens, from the first of the tree on; with those of the completion, once it is drawn."""
        ids: list[int] = []
        for exchange in self.path:
            ids += exchange.new_ids
            if exchange.completion is not None:
                ids += exchange.completion.token_ids
        return ids

    @property
    def path(self) -> list[Exchange]:
        """Those from the first of its tree to itself."""
        found = []
        exchange: Exchange | None = self
        while exchange is not None:
            found.append(exchange)
            exchange = exchange.before
        return found[::-1]

    def begins(self, token_ids: Sequence[int]) -> bool:
        """Whether tokens begin with all of its own."""
        end = self.size
        exchange: Exchange | None = self
        while exchange is not None:
            for part in (exchange.completion.token_ids if exchange.completion else (), exchange.new_ids):
                if list(token_ids[end - len(part) : end]) != list(part):
                    return False
                end -= len(part)
            exchange = exchange.before
        return True


@dataclass(frozen=True)
class Beginning:
    """What of the messages of a request is known."""

    messages: Sequence[Message]
    """All of the request, in the order in which the policy reads them."""
    before: Exchange | None
    """The last exchange that they begin with; None: they begin with none."""
    count: int
    """How many of them are its own, with its answer."""
    digests: Sequence[bytes]
    """Of the conversations that end with each of the others; the last one is that of the whole request."""


class Exchanges:
    """Those of one rollout, in the order in which they were drawn."""

    def __init__(self) -> None:
        self._drawn: list[Exchange] = []
        self._by_conversation: dict[bytes, list[Exchange]] = {}
        """By the digest of a conversation: the exchanges that answered it, the oldest first."""
        self._beginnings: set[bytes] = set()
        """Digests of all conversations that another one, which was answered, begins with."""
        self._call_ids: dict[str, Exchange] = {}
        """By the id of a call: the exchange that wrote it."""

    def add(self, exchange: Exchange, completion: Completion, sampling: SamplingConfig) -> None:
        exchange.completion, exchange.sampling = completion, sampling
        exchange.size += len(completion.token_ids)
        self._drawn.append(exchange)

    def answered(self, exchange: Exchange, beginning: Beginning, answer: Answer) -> None:
        """A request that begins with these messages and the answer goes on after this exchange."""
        exchange.answer = answer
        exchange.digest = followed_by(beginning.digests[-1], {"answer": answer.id})
        self._by_conversation.setdefault(beginning.digests[-1], []).append(exchange)
        self._beginnings.update(beginning.digests)
        for call in answer.calls:
            self._call_ids[call.id] = exchange

    def after_messages(self, tools: Sequence[Any], messages: Sequence[Message]) -> Beginning:
        """What these messages begin with.

        Of several exchanges that answered alike, the one whose calls have the ids; of these the one with the thoughts;
        then one that was read, and of these the oldest that nobody goes on after.
        """
        messages = in_order(messages, self._call_ids)
        start = begun(tools)
        reached: set[bytes] = {start}
        best: Exchange | None = None
        count = 0
        for number, message in enumerate(messages, start=1):
            following = {followed_by(digest, message) for digest in reached} & self._beginnings
            differs = ""
            if message["role"] == "assistant":
                for exchange in [each for digest in reached for each in self._by_conversation.get(digest, ())]:
                    assert exchange.answer is not None
                    differs = difference(exchange.answer, message)
                    if differs:
                        continue
                    following.add(exchange.digest)
                    if count < number or _rank(exchange, message) < _rank(best, message):
                        best, count = exchange, number
            if not following:
                self._say_what_differs(messages, number, differs)
                break
            reached = following
        digests = [best.digest if best is not None else start]
        for message in messages[count:]:
            digests.append(followed_by(digests[-1], message))
        return Beginning(messages, best, count, digests)

    def _say_what_differs(self, messages: Sequence[Message], number: int, differs: str) -> None:
        """Says from which message on a conversation with turns of the assistant goes on after none of ours."""
        if not self._by_conversation or all(message["role"] != "assistant" for message in messages[number - 1 :]):
            return
        role = messages[number - 1]["role"]
        what = f" in {differs}" if differs else ""
        say_once(
            f"a conversation begins a new sequence: message {number}, of the {role}, is another one than before{what}",
            f"differs {role} {differs}",
        )

    def after_tokens(self, token_ids: Sequence[int]) -> Exchange | None:
        """The longest exchange that these tokens go on after."""
        begun = (each for each in self._drawn if each.size <= len(token_ids) and each.begins(token_ids))
        return max(begun, key=lambda each: each.size, default=None)

    def after_text(self, text: str) -> Exchange | None:
        """The longest exchange that this text goes on after."""
        begun = (each for each in self._drawn if each.text and text.startswith(each.text))
        return max(begun, key=lambda each: len(each.text), default=None)

    def that_drew(self, token_ids: Sequence[int], besides: Sequence[Exchange]) -> Exchange:
        """The exchange whose last token is that of these. Of several: one that is not among `besides`. Raises
        RolloutError if there is none."""
        found = [each for each in self._drawn if each.size == len(token_ids) and each.begins(token_ids)]
        if not found:
            tokens = counted(len(token_ids), "token")
            raise RolloutError(f"the environment has {tokens} that the engine did not draw like this")
        return next((each for each in found if each not in besides), found[0])

    @property
    def has_read(self) -> bool:
        """Whether the client has read any answer."""
        return any(exchange.read for exchange in self._drawn)

    def sequences(self, assumed: SamplingConfig, last: Sequence[Exchange] | None = None) -> list[RolloutSequence]:
        """A sequence for each branch. `assumed`: what the trainer assumes of the sampling. `last`: only the branches
        that end with these; None: all that a client has read.

        Raises RolloutError for a turn that was drawn in another way.
        """
        if last is None:
            kept: set[int] = set()
            for exchange in self._drawn:
                if exchange.read and exchange.is_trained:
                    kept.update(map(id, exchange.path))
            inner = {id(each.before) for each in self._drawn if id(each) in kept}
            last = [each for each in self._drawn if id(each) in kept - inner]
        taught: set[Exchange] = set()
        return [_sequence(each.path, taught, vars(assumed)) for each in last if each not in taught]


def _sequence(path: Sequence[Exchange], taught: set[Exchange], assumed: Mapping[str, Any]) -> RolloutSequence:
    """The sequence of a branch. Adds to `taught` what is trained on in it."""
    sequence = RolloutSequence(path[0].new_ids, text=path[0].words)
    for exchange in path:
        assert exchange.completion is not None
        assert exchange.sampling is not None
        if exchange is not path[0]:
            sequence.append_observation(exchange.new_ids, role=exchange.role, text=exchange.words)
        if exchange in taught or not exchange.is_trained:
            role = _EARLIER if exchange.is_trained else _UNTRAINED
            sequence.append_observation(exchange.completion.token_ids, role=role, text=exchange.completion.text)
            continue
        if other := other_sampling(vars(exchange.sampling), assumed):
            name, drew, wanted = other
            raise RolloutError(
                f"the environment drew with {name} {drew}, and the trainer assumes that of the generator, {wanted}: "
                "give the generator that one, or take it out of the environment's `sampling`"
            )
        sequence.append_completion(exchange.completion)
        taught.add(exchange)
    return sequence


def _rank(exchange: Exchange | None, message: Message) -> tuple[bool, ...]:
    """Which of several exchanges a message is of: the one with the least."""
    assert exchange is not None
    assert exchange.answer is not None
    answer = exchange.answer
    return not has_ids(answer, message), not has_thoughts(answer, message), not exchange.read, exchange.followed
