"""Exchanges: the requests of an agent and the completions of the policy, as a tree of which sequences are made.

A client sends the whole conversation each time. Its messages lead to the exchange that they begin with (matching.py has
the rule), and the new request goes on after the tokens of that exchange, as they were drawn.

* A request that goes on at the end of a branch makes the branch longer.
* A request that goes on where another one already does begins a branch of its own. Sub-agents that share a beginning do
  so.
* A conversation that begins with no exchange, for example because the agent has edited or compacted it, begins a tree
  of its own.

An exchange has only its own tokens, so that a session of many turns takes no more memory than its tokens do.

Each branch becomes a sequence. A turn that several branches share is trained on in the first of them, and is context in
the others. A turn that no client has read belongs to no sequence: the client hung up and never asked again. Neither
does a turn of a model of `untrained_models`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
"""The role of a turn of the policy that no sequence is trained on."""


@dataclass(eq=False)
class Exchange:
    """Tokens that the policy was given, and the completion that it drew after them."""

    before: Exchange | None
    """The exchange after whose tokens this one goes on; None: this is the first of its tree."""
    new_ids: list[int]
    """The tokens behind those of `before`, up to the completion."""
    role: str = "prompt"
    """The side that gave these tokens."""
    words: str = ""
    """These tokens as a text."""
    conversation: Conversation | None = None
    """The conversation as the policy read it; None: the client sent tokens or a text."""
    completion: Completion | None = None
    """The completion; None: it is not drawn yet."""
    sampling: SamplingConfig | None = None
    """The sampling of the completion."""
    text: str = ""
    """The text that the client sent, and the completion behind it; "": the client sent no text."""
    read: bool = False
    """True once the client has the whole answer."""
    is_trained: bool = True
    """True if the completion is trained on. Otherwise it is context of the exchanges that go on after it."""
    followed: bool = False
    """True once another exchange goes on after this one."""
    answer: Answer | None = None
    """The answer that the client got."""
    digest: bytes = b""
    """The digest of the conversation with its answer."""
    size: int = field(init=False)
    """The number of tokens from the first of the tree on; with those of the completion, once it is drawn."""

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
        """The exchanges from the first of the tree to this one."""
        path = []
        exchange: Exchange | None = self
        while exchange is not None:
            path.append(exchange)
            exchange = exchange.before
        path.reverse()
        return path

    def begins(self, token_ids: Sequence[int]) -> bool:
        """True if `token_ids` begins with all tokens of this exchange."""
        end = self.size
        exchange: Exchange | None = self
        while exchange is not None:  # from the last tokens to the first
            completion_ids = exchange.completion.token_ids if exchange.completion else []
            for part in (completion_ids, exchange.new_ids):
                start = end - len(part)
                if list(token_ids[start:end]) != list(part):
                    return False
                end = start
            exchange = exchange.before
        return True


@dataclass(frozen=True)
class Beginning:
    """The known beginning of the messages of a request."""

    messages: Sequence[Message]
    """All messages of the request, in the order in which the policy reads them."""
    before: Exchange | None
    """The last exchange that the messages begin with; None: they begin with none."""
    count: int
    """The number of messages up to `before`, with its answer. The others are new."""
    digests: Sequence[bytes]
    """The digest up to `before`, and that up to each of the new messages. The last one is that of the whole request."""


class Exchanges:
    """The exchanges of one rollout, in the order in which they were drawn."""

    def __init__(self) -> None:
        self._drawn: list[Exchange] = []
        self._by_conversation: dict[bytes, list[Exchange]] = {}
        """The exchanges that answered a conversation, the oldest first, by its digest."""
        self._beginnings: set[bytes] = set()
        """The digests of all beginnings of conversations that were answered."""
        self._call_ids: dict[str, Exchange] = {}
        """The exchange that wrote a call, by the id of the call."""

    def add(self, exchange: Exchange, completion: Completion, sampling: SamplingConfig) -> None:
        exchange.completion = completion
        exchange.sampling = sampling
        exchange.size += len(completion.token_ids)
        self._drawn.append(exchange)

    def answered(self, exchange: Exchange, beginning: Beginning, answer: Answer) -> None:
        """Remembers the answer to a request with these messages. From then on `after_messages` finds the exchange."""
        digest = beginning.digests[-1]
        exchange.answer = answer
        exchange.digest = followed_by(digest, {"answer": answer.id})
        self._by_conversation.setdefault(digest, []).append(exchange)
        self._beginnings.update(beginning.digests)
        for call in answer.calls:
            self._call_ids[call.id] = exchange

    def after_messages(self, tools: Sequence[Any], messages: Sequence[Message]) -> Beginning:
        """The known beginning of these messages.

        Of several exchanges with equal answers it has the best one by `_rank`, and of equally good ones the oldest.
        """
        messages = in_order(messages, self._call_ids)
        start = begun(tools)
        reached: set[bytes] = {start}  # the digests of all known conversations that end here
        best: Exchange | None = None
        count = 0
        for number, message in enumerate(messages, start=1):
            following = {followed_by(digest, message) for digest in reached} & self._beginnings
            differs = ""
            if message["role"] == "assistant":
                for exchange in self._answers_to(reached):
                    assert exchange.answer is not None
                    differs = difference(exchange.answer, message)
                    if differs:
                        continue
                    following.add(exchange.digest)
                    is_first = count < number
                    if is_first or _rank(exchange, message) < _rank(best, message):
                        best = exchange
                        count = number
            if not following:
                self._say_what_differs(messages, number, differs)
                break
            reached = following
        digests = [start if best is None else best.digest]
        for message in messages[count:]:
            digests.append(followed_by(digests[-1], message))
        return Beginning(messages, best, count, digests)

    def _answers_to(self, digests: Iterable[bytes]) -> list[Exchange]:
        """The exchanges that answered the conversations with these digests."""
        exchanges: list[Exchange] = []
        for digest in digests:
            exchanges += self._by_conversation.get(digest, ())
        return exchanges

    def _say_what_differs(self, messages: Sequence[Message], number: int, differs: str) -> None:
        """Says in the log from which message on a conversation goes on after none of the exchanges."""
        if not self._by_conversation:
            return
        unknown = messages[number - 1 :]
        if all(message["role"] != "assistant" for message in unknown):
            return  # no turn of the policy could be found in them
        role = unknown[0]["role"]
        what = ""
        if differs:
            what = f" in {differs}"
        say_once(
            f"a conversation begins a new sequence: message {number}, of the {role}, is another one than before{what}",
            f"differs {role} {differs}",
        )

    def after_tokens(self, token_ids: Sequence[int]) -> Exchange | None:
        """The longest exchange that these tokens go on after."""
        longest: Exchange | None = None
        for exchange in self._drawn:
            if exchange.size > len(token_ids) or not exchange.begins(token_ids):
                continue
            if longest is None or exchange.size > longest.size:
                longest = exchange
        return longest

    def after_text(self, text: str) -> Exchange | None:
        """The longest exchange that this text goes on after."""
        longest: Exchange | None = None
        for exchange in self._drawn:
            if not exchange.text or not text.startswith(exchange.text):
                continue
            if longest is None or len(exchange.text) > len(longest.text):
                longest = exchange
        return longest

    def that_drew(self, token_ids: Sequence[int], besides: Sequence[Exchange]) -> Exchange:
        """The exchange that has exactly these tokens. Of several: the first that is not among `besides`.

        Raises RolloutError if there is none.
        """
        size = len(token_ids)
        found = [exchange for exchange in self._drawn if exchange.size == size and exchange.begins(token_ids)]
        if not found:
            raise RolloutError(f"the environment has {counted(size, 'token')} that the engine did not draw like this")
        for exchange in found:
            if exchange not in besides:
                return exchange
        return found[0]

    @property
    def has_read(self) -> bool:
        """True if the client has read any answer."""
        return any(exchange.read for exchange in self._drawn)

    def sequences(self, assumed: SamplingConfig, last: Sequence[Exchange] | None = None) -> list[RolloutSequence]:
        """A sequence for each branch. `assumed`: the sampling that the trainer assumes. `last`: the exchanges at the
        ends of the branches; None: all branches that a client has read.

        Raises RolloutError for a turn that was drawn in another way.
        """
        if last is None:
            last = self._last_read()
        trained: set[Exchange] = set()
        sequences = []
        for exchange in last:
            if exchange not in trained:
                sequences.append(_sequence(exchange.path, trained, vars(assumed)))
        return sequences

    def _last_read(self) -> list[Exchange]:
        """The last exchanges of all branches that a client has read and that are trained on."""
        on_path: set[Exchange] = set()
        for exchange in self._drawn:
            if exchange.read and exchange.is_trained:
                on_path.update(exchange.path)
        inner = {exchange.before for exchange in on_path}
        return [exchange for exchange in self._drawn if exchange in on_path and exchange not in inner]


def _sequence(path: Sequence[Exchange], trained: set[Exchange], assumed: Mapping[str, Any]) -> RolloutSequence:
    """The sequence of a branch. It is trained on the turns that are not in `trained` yet, and adds them there."""
    sequence = RolloutSequence(path[0].new_ids, text=path[0].words)
    for exchange in path:
        assert exchange.completion is not None
        assert exchange.sampling is not None
        if exchange is not path[0]:
            sequence.append_observation(exchange.new_ids, role=exchange.role, text=exchange.words)
        if exchange in trained or not exchange.is_trained:
            role = _EARLIER if exchange.is_trained else _UNTRAINED
            sequence.append_observation(exchange.completion.token_ids, role=role, text=exchange.completion.text)
            continue
        other = other_sampling(vars(exchange.sampling), assumed)
        if other:
            name, drew, wanted = other
            raise RolloutError(
                f"the environment drew with {name} {drew}, and the trainer assumes that of the generator, {wanted}: "
                "give the generator that one, or take it out of the environment's `sampling`"
            )
        sequence.append_completion(exchange.completion)
        trained.add(exchange)
    return sequence


def _rank(exchange: Exchange | None, message: Message) -> tuple[bool, ...]:
    """The order in which exchanges come into question for a message; the least is best.

    First one whose calls have the ids of the message; then one with its thoughts; then one that was read; then one that
    nobody goes on after.
    """
    assert exchange is not None
    assert exchange.answer is not None
    answer = exchange.answer
    return (
        not has_ids(answer, message),
        not has_thoughts(answer, message),
        not exchange.read,
        exchange.followed,
    )
