"""Exchanges: the requests of an agent and the completions of the policy, as a tree from which sequences are made.

An exchange is one request with its completion. A client sends the whole conversation with each request. The first
messages of a request tell which exchange was the last one of this conversation (matching.py has the rule). The new
exchange continues the tokens of that exchange, as they were drawn.

* A request that continues the last exchange of a branch makes the branch longer.
* A request that continues an exchange which another request has continued already begins a new branch. For example,
  several sub-agents may continue the same exchange.
* A conversation that begins with no known exchange begins a new tree, for example after the agent has edited or
  compacted the conversation.

An exchange holds only its own tokens, so that a session of many turns takes no more memory than its tokens do.

Each branch becomes a sequence. A turn that several branches share is trained on in the first of these sequences, and is
context in the others. A turn at the end of a branch belongs to no sequence if the client never read the answer, because
it hung up before and did not send the request again. A turn that was requested from a model of `untrained_models` is
not trained on. Such a turn belongs to a sequence only as context of later turns that are trained on.
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
    """The exchange that this one continues; None: this is the first exchange of its tree."""
    new_ids: list[int]
    """The tokens between the completion of `before` and the completion of this exchange."""
    role: str = "prompt"
    """The role in which `new_ids` are given to the policy, such as "user" or "tool"."""
    words: str = ""
    """`new_ids` as text; "": the client sent tokens."""
    conversation: Conversation | None = None
    """The conversation as the policy read it; None: the client sent tokens or a text."""
    completion: Completion | None = None
    """The completion; None: it is not drawn yet."""
    sampling: SamplingConfig | None = None
    """The sampling with which the completion was drawn; None: it is not drawn yet."""
    text: str = ""
    """The text that the client sent, with the completion behind it; "": the client sent no text."""
    read: bool = False
    """True once the client has received the whole answer."""
    is_trained: bool = True
    """True if the completion is trained on. Otherwise it is only context of the exchanges that continue this one."""
    followed: bool = False
    """True once a request has continued this exchange."""
    answer: Answer | None = None
    """The answer to the request; None: the completion is not parsed yet, or the client sent tokens or a text."""
    digest: bytes = b""
    """The digest of the conversation with its answer (matching.followed_by); b"": there is no answer."""
    size: int = field(init=False)
    """The number of `token_ids`."""

    def __post_init__(self) -> None:
        self.size = len(self.new_ids)
        if self.before is not None:
            self.size += self.before.size

    @property
    def token_ids(self) -> list[int]:
        """All tokens of the path, from the first exchange of the tree to this one. They include the completion once it
        is drawn."""
        ids: list[int] = []
        for exchange in self.path:
            ids += exchange.new_ids
            if exchange.completion is not None:
                ids += exchange.completion.token_ids
        return ids

    @property
    def path(self) -> list[Exchange]:
        """The exchanges from the first one of the tree to this one."""
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
        while exchange is not None:  # compares from the last tokens to the first
            completion_ids = exchange.completion.token_ids if exchange.completion else []
            for own_ids in (completion_ids, exchange.new_ids):
                start = end - len(own_ids)
                if list(token_ids[start:end]) != list(own_ids):
                    return False
                end = start
            exchange = exchange.before
        return True


@dataclass(frozen=True)
class Beginning:
    """The messages of a request, and how many of them belong to known exchanges."""

    messages: Sequence[Message]
    """All messages of the request, in the order in which the policy reads them."""
    before: Exchange | None
    """The known exchange that the request continues: the messages begin with its conversation and its answer. If there
    are several such exchanges, the latest in the conversation. None: there is no such exchange."""
    count: int
    """The number of messages that belong to known exchanges: those of the conversation of `before`, and its answer. All
    later messages are new."""
    digests: Sequence[bytes]
    """The first digest is that of the messages up to and including the answer of `before`. Then comes, for each new
    message, the digest of the messages up to and including this one. So the last digest is that of all messages."""


class Exchanges:
    """The exchanges of one rollout, in the order in which they were drawn."""

    def __init__(self) -> None:
        self._drawn: list[Exchange] = []
        """All exchanges, the oldest first."""
        self._by_conversation: dict[bytes, list[Exchange]] = {}
        """The digest of a conversation, without the answer -> the exchanges that answered it, the oldest first."""
        self._beginnings: set[bytes] = set()
        """The digests of all conversations that were answered, and of their beginnings."""
        self._by_call_id: dict[str, Exchange] = {}
        """The id of a call -> the exchange whose completion has this call."""

    def add(self, exchange: Exchange, completion: Completion, sampling: SamplingConfig) -> None:
        """Adds an exchange, once its completion is drawn. From now on `after_tokens` and `after_text` find it."""
        exchange.completion = completion
        exchange.sampling = sampling
        exchange.size += len(completion.token_ids)
        self._drawn.append(exchange)

    def answered(self, exchange: Exchange, beginning: Beginning, answer: Answer) -> None:
        """Notes the answer to a request. From now on `after_messages` finds the exchange.

        `beginning`: the result of `after_messages` for the messages of the request.
        """
        digest = beginning.digests[-1]  # of all messages of the request
        exchange.answer = answer
        # The id stands for the answer, so that two exchanges with equal answers have different digests.
        exchange.digest = followed_by(digest, {"answer": answer.id})
        self._by_conversation.setdefault(digest, []).append(exchange)
        self._beginnings.update(beginning.digests)
        for call in answer.calls:
            self._by_call_id[call.id] = exchange

    def after_messages(self, tools: Sequence[Any], messages: Sequence[Message]) -> Beginning:
        """Finds the known exchanges with which these messages begin. `tools`: the tools of the request.

        Goes through the messages one by one, and stops at the first message that continues no known conversation. The
        digest of a conversation does not depend on how a client writes the answers of the policy, because the id of an
        answer stands for the answer. If a message is the answer of several exchanges, the one with the lowest `_rank`
        counts. Among exchanges with equal ranks, the one that answered the conversation with the lowest digest counts;
        if they answered the same conversation, the oldest.
        """
        messages = in_order(messages, self._by_call_id)  # puts results of parallel calls into the order of the calls
        start = begun(tools)  # the digest before the first message
        # The digests of the known conversations that the messages up to here stand for. There may be several, because a
        # message of the assistant may be the answer of several exchanges.
        reached: set[bytes] = {start}
        best: Exchange | None = None  # the exchange that the messages up to here continue
        count = 0  # the number of messages up to and including the answer of `best`
        for number, message in enumerate(messages, start=1):
            # Digests of the known conversations that continue a conversation of `reached` with exactly this message.
            following = {followed_by(digest, message) for digest in reached} & self._beginnings
            differs = ""  # the part in which the message differs from a known answer
            if message["role"] == "assistant":
                # Sorted, because the order of a set of bytes differs from process to process.
                answered, differs = self._answered_by(message, sorted(reached))
                following.update(exchange.digest for exchange in answered)
                if answered:
                    best = min(answered, key=lambda exchange: _rank(exchange, message))
                    count = number
            if not following:  # no known conversation has this message, so this message and all later ones are new
                self._say_what_differs(messages, number, differs)
                break
            reached = following
        digests = [start if best is None else best.digest]
        for message in messages[count:]:
            digests.append(followed_by(digests[-1], message))
        return Beginning(messages, best, count, digests)

    def _answered_by(self, message: Message, conversations: Iterable[bytes]) -> tuple[list[Exchange], str]:
        """The exchanges that answered one of these conversations, given by their digests, with this message of the
        assistant.

        Also returns the part in which the message differs from the answer that was compared last; "": it does not
        differ, or there was no answer to compare.
        """
        answered: list[Exchange] = []
        differs = ""
        for digest in conversations:
            for exchange in self._by_conversation.get(digest, ()):
                assert exchange.answer is not None
                differs = difference(exchange.answer, message)
                if not differs:
                    answered.append(exchange)
        return answered, differs

    def _say_what_differs(self, messages: Sequence[Message], number: int, differs: str) -> None:
        """Logs which message of a conversation is the first one that belongs to no known exchange.

        `number`: the number of this message, from 1. `differs`: the part in which the message differs from an answer;
        "": unknown. Logs nothing if every conversation is new, or if this conversation only goes on.
        """
        if not self._by_conversation:  # every conversation is new, because none was answered yet
            return
        unknown = messages[number - 1 :]
        # The conversation only goes on if none of these messages is of the assistant.
        if all(message["role"] != "assistant" for message in unknown):
            return
        role = unknown[0]["role"]
        what = ""
        if differs:
            what = f" in {differs}"
        kind = f"differs {role} {differs}"  # one notice for each role and part that differs
        say_once(
            f"a conversation begins a new sequence: message {number}, of the {role}, is another one than before{what}",
            kind,
        )

    def after_tokens(self, token_ids: Sequence[int]) -> Exchange | None:
        """The longest exchange whose tokens stand at the beginning of `token_ids`; None: there is no such exchange."""
        longest: Exchange | None = None
        for exchange in self._drawn:
            # The size is compared first, because `begins` is slow.
            if exchange.size > len(token_ids) or not exchange.begins(token_ids):
                continue
            if longest is None or exchange.size > longest.size:
                longest = exchange
        return longest

    def after_text(self, text: str) -> Exchange | None:
        """The longest exchange whose text stands at the beginning of `text`; None: there is no such exchange."""
        longest: Exchange | None = None
        for exchange in self._drawn:
            # An exchange without a text answers messages or tokens.
            if not exchange.text or not text.startswith(exchange.text):
                continue
            if longest is None or len(exchange.text) > len(longest.text):
                longest = exchange
        return longest

    def that_drew(self, token_ids: Sequence[int], besides: Sequence[Exchange]) -> Exchange:
        """The exchange whose tokens, with those of all exchanges before it, are exactly `token_ids`.

        If several exchanges have these tokens, returns the oldest that is not in `besides`, or the oldest of all if all
        are in `besides`. Raises RolloutError if no exchange has these tokens.
        """
        size = len(token_ids)
        matching = [exchange for exchange in self._drawn if exchange.size == size and exchange.begins(token_ids)]
        if not matching:
            raise RolloutError(f"the environment has {counted(size, 'token')} that the engine did not draw like this")
        for exchange in matching:
            if exchange not in besides:
                return exchange
        return matching[0]

    @property
    def has_read(self) -> bool:
        """True if the client has read at least one completion."""
        return any(exchange.read for exchange in self._drawn)

    def sequences(self, assumed: SamplingConfig, ends: Sequence[Exchange] | None = None) -> list[RolloutSequence]:
        """A sequence for each branch. `assumed`: the sampling that the trainer assumes. `ends`: the last exchange of
        each branch; None: each branch ends with the last completion that a client has read and that is trained on.

        The list is empty if there is nothing to train on. Raises RolloutError for a turn that is trained on, but was
        drawn with another sampling than `assumed`.
        """
        if ends is None:
            ends = self._ends_of_branches()
        trained: set[Exchange] = set()  # the exchanges that the sequences so far are trained on
        sequences = []
        for exchange in ends:
            if exchange in trained:  # this branch is the beginning of an earlier branch
                continue
            sequences.append(_sequence(exchange.path, trained, vars(assumed)))
        return sequences

    def _ends_of_branches(self) -> list[Exchange]:
        """The last exchange of each branch. A branch ends with the last completion that a client has read and that is
        trained on."""
        in_branches: set[Exchange] = set()  # the exchanges of all branches
        for exchange in self._drawn:
            if exchange.read and exchange.is_trained:
                in_branches.update(exchange.path)  # also unread exchanges before this one, which are its context
        continued = {exchange.before for exchange in in_branches}  # the exchanges that are not at the end of a branch
        return [exchange for exchange in self._drawn if exchange in in_branches and exchange not in continued]


def _sequence(path: Sequence[Exchange], trained: set[Exchange], assumed: Mapping[str, Any]) -> RolloutSequence:
    """The sequence of a branch. `path`: the exchanges of the branch. `assumed`: the sampling that the trainer assumes.

    Exchanges in `trained` are only context in this sequence, because an earlier sequence is trained on them. Exchanges
    whose `is_trained` is False are only context, too. This sequence is trained on all other exchanges, and they are
    added to `trained`. Raises RolloutError if one of these was drawn with another sampling than `assumed`.
    """
    sequence = RolloutSequence(path[0].new_ids, text=path[0].words)
    for exchange in path:
        assert exchange.completion is not None
        assert exchange.sampling is not None
        if exchange is not path[0]:  # the sequence began with the `new_ids` of the first exchange
            sequence.append_observation(exchange.new_ids, role=exchange.role, text=exchange.words)
        if exchange in trained or not exchange.is_trained:
            role = _EARLIER if exchange.is_trained else _UNTRAINED
            sequence.append_observation(exchange.completion.token_ids, role=role, text=exchange.completion.text)
            continue
        # The name of the first setting that differs, the value of the turn, and the value that the trainer assumes.
        differing = other_sampling(vars(exchange.sampling), assumed)
        if differing:
            name, drawn_value, assumed_value = differing
            raise RolloutError(
                f"the environment drew with {name} {drawn_value}, and the trainer assumes that of the generator, "
                f"{assumed_value}: give the generator that one, or take it out of the environment's `sampling`"
            )
        sequence.append_completion(exchange.completion)
        trained.add(exchange)
    return sequence


def _rank(exchange: Exchange, message: Message) -> tuple[bool, ...]:
    """The rank of an exchange whose answer matches a message of the assistant. The lowest rank fits best.

    Four things make an exchange fit better, the most important first: its answer has the ids of the calls of the
    message; its answer has the thoughts of the message; a client has read its answer; no request has continued it. Each
    of them has an element in the rank, which is False, and thus lower, if it holds.
    """
    assert exchange.answer is not None
    answer = exchange.answer
    return (
        not has_ids(answer, message),
        not has_thoughts(answer, message),
        not exchange.read,
        exchange.followed,
    )
