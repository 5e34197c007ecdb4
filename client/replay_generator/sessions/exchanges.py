"""Exchanges: what an agent asked and the policy drew, as a tree, and the sequences of a rollout that come of it.

A client sends the whole conversation each time. The exchange that its messages begin with is found by them, and what
is asked now goes on after the tokens of that one, as they were drawn. One that goes on at the end of a branch makes
the branch longer. One that goes on where another already does, as sub-agents do that share a beginning, begins a branch
of its own. A conversation that begins with no exchange, for example because the agent has edited or compacted it,
begins a tree of its own.

Each branch becomes a sequence. A turn that several branches share is trained on in the first of them, and is context in
the others. A turn that no client has read, because it hung up and never asked again, belongs to none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replay_client.kept import other_sampling
from replay_generator.chat import Message
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.rollouts import RolloutError, RolloutSequence
from replay_generator.sessions.conversation import Conversation
from replay_generator.sessions.turns import object_of

_EARLIER = "earlier"
"""The role of a turn of the policy that another sequence of the rollout is trained on."""


@dataclass(eq=False)
class Exchange:
    """Tokens that the policy was given, and the completion that it drew after them."""

    before: Exchange | None
    """The one whose tokens it goes on after; None: it is the first of its tree."""
    given: list[int]
    """Tokens behind those of `before`."""
    role: str = "prompt"
    words: str = ""
    """Who gave these tokens, and as which text."""
    conversation: Conversation | None = None
    """As the policy read it; None: it was asked with tokens or with a text."""
    token_ids: list[int] = field(default_factory=list)
    """All tokens, from the first of the tree on; with those of the completion, once it is drawn."""
    completion: Completion | None = None
    """None: it is not drawn yet."""
    sampling: SamplingConfig | None = None
    """How it was drawn."""
    text: str = ""
    """Of one that was asked with a text: that, and what was drawn after it."""
    read: bool = False
    """Whether the client has the whole answer."""
    followed: bool = False
    """Whether somebody goes on after it."""

    def __post_init__(self) -> None:
        self.token_ids = [*(self.before.token_ids if self.before else ()), *self.given]

    @property
    def path(self) -> list[Exchange]:
        """Those from the first of its tree to itself."""
        return [*(self.before.path if self.before else ()), self]


class Exchanges:
    """Those of one rollout, in the order in which they were drawn."""

    def __init__(self) -> None:
        self._drawn: list[Exchange] = []
        self._known: dict[bytes, list[Exchange]] = {}
        """By the digest of a conversation that ends with an answer: those that gave it, the oldest first."""

    def add(self, exchange: Exchange, completion: Completion, sampling: SamplingConfig) -> None:
        exchange.completion, exchange.sampling = completion, sampling
        exchange.token_ids = [*exchange.token_ids, *completion.token_ids]
        self._drawn.append(exchange)

    def answered(self, exchange: Exchange, tools: Sequence[Any], messages: Sequence[Message]) -> None:
        """A request that begins with these messages, whose last is the answer, goes on after this exchange."""
        self._known.setdefault(_digests(tools, messages)[-1], []).append(exchange)

    def after_messages(self, tools: Sequence[Any], messages: Sequence[Message]) -> tuple[Exchange | None, int]:
        """The last exchange that these messages begin with, and how many of them are its own: all, if they end with its
        answer. Of several that
        answered alike: one that was read, and of these the oldest that nobody goes on after."""
        digests = _digests(tools, messages)
        for count in range(len(digests), 0, -1):
            if found := self._known.get(digests[count - 1]):
                return min(found, key=lambda each: (not each.read, each.followed)), count
        return None, 0

    def after_tokens(self, token_ids: Sequence[int]) -> Exchange | None:
        """The longest exchange that these tokens go on after."""
        begun = (each for each in self._drawn if each.token_ids == token_ids[: len(each.token_ids)])
        return max(begun, key=lambda each: len(each.token_ids), default=None)

    def after_text(self, text: str) -> Exchange | None:
        """The longest exchange that this text goes on after."""
        begun = (each for each in self._drawn if each.text and text.startswith(each.text))
        return max(begun, key=lambda each: len(each.text), default=None)

    def that_drew(self, token_ids: Sequence[int], besides: Sequence[Exchange]) -> Exchange:
        """The exchange whose last token is that of these. Of several: one that is not among `besides`. Raises
        RolloutError if there is none."""
        found = [each for each in self._drawn if each.token_ids == token_ids]
        if not found:
            raise RolloutError(f"the environment has {len(token_ids)} tokens that the engine did not draw like this")
        return next((each for each in found if each not in besides), found[0])

    def sequences(self, assumed: SamplingConfig, last: Sequence[Exchange] | None = None) -> list[RolloutSequence]:
        """A sequence for each branch. `assumed`: what the trainer assumes of the sampling. `last`: only the branches
        that end with these; None: all that a client has read.

        Raises RolloutError for a turn that was drawn in another way.
        """
        if last is None:
            kept = {id(each) for exchange in self._drawn if exchange.read for each in exchange.path}
            inner = {id(each.before) for each in self._drawn if id(each) in kept}
            last = [each for each in self._drawn if id(each) in kept - inner]
        taught: set[Exchange] = set()
        return [_sequence(each.path, taught, vars(assumed)) for each in last if each not in taught]


def _sequence(path: Sequence[Exchange], taught: set[Exchange], assumed: Mapping[str, Any]) -> RolloutSequence:
    """The sequence of a branch. Adds to `taught` what is trained on in it."""
    sequence = RolloutSequence(path[0].given, text=path[0].words)
    for exchange in path:
        assert exchange.completion is not None
        assert exchange.sampling is not None
        if exchange is not path[0]:
            sequence.given(exchange.given, role=exchange.role, text=exchange.words)
        if exchange in taught:
            sequence.given(exchange.completion.token_ids, role=_EARLIER, text=exchange.completion.text)
            continue
        if other := other_sampling(vars(exchange.sampling), assumed):
            name, drew, wanted = other
            raise RolloutError(
                f"the environment drew with {name} {drew}, and the trainer assumes that of the generator, {wanted}: "
                "give the generator that one, or take it out of the environment's `sampling`"
            )
        sequence.sampled(exchange.completion)
        taught.add(exchange)
    return sequence


def _digests(tools: Sequence[Any], messages: Sequence[Message]) -> list[bytes]:
    """Of the conversations that end with each of the messages. What clients change when they repeat an answer does
    not count: its thoughts, the ids of its calls, white space around its text."""
    digest, digests = hashlib.sha256(json.dumps(tools, sort_keys=True).encode()), []
    for message in messages:
        told: Any = message
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            told = (
                (message.get("content") or "").strip(),
                [(call["name"], _object(call["arguments"])) for call in calls],
            )
        digest.update(json.dumps(told, sort_keys=True).encode() + b"\n")
        digests.append(digest.digest())
    return digests


def _object(arguments: Any) -> Any:
    """The arguments of a call, which clients repeat as an object or as JSON."""
    found = object_of(arguments) if isinstance(arguments, str) else None
    return arguments if found is None else found
