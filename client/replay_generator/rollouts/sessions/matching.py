"""Matching: decides which assistant messages in a request are turns of our policy, even if a client rewrote them.

A message is a turn of our policy if the conversation before the message is the conversation of an exchange
(exchanges.py), and one of these two conditions holds:

* The text and the calls of the message are exactly those of the answer.
* The message has calls whose ids are those of the answer, and its text and calls are those of the answer. But numbers
  in the calls may be written in another way, as JavaScript writes 100.0 as 100, and the text may be missing.

The thoughts of the message may be missing, but may not differ. A message with any other difference is no turn of our
policy. If such a message were replaced by the policy's turn, the policy would read something that the agent did not
send.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Any

from replay_generator.prompts.chat import Message
from replay_generator.rollouts.sessions.turns import Answer, object_of

_Call = tuple[str, str, Any]
"""The id of a call, the name of its function, and its arguments: an object, or the text that the policy wrote in the
place of an object."""


def difference(answer: Answer, message: Message) -> str:
    """The part in which a message of the assistant differs from an answer, in words; "": the message is this turn of
    the policy."""
    answer_calls = _calls_of_answer(answer)
    calls = _calls_of_message(message)
    has_same_ids = has_ids(answer, message)
    thoughts = str(message.get("reasoning_content") or "").strip()
    if thoughts and thoughts != answer.reasoning.strip():
        return "its thoughts"
    text = message.get("content") or ""
    may_be_left_out = has_same_ids  # then the text of the message may be missing
    if text != answer.text and (text or not may_be_left_out):
        return "its text"
    if [name for _, name, _ in calls] != [name for _, name, _ in answer_calls]:
        return "its calls"
    for (_, name, arguments), (_, _, answer_arguments) in zip(calls, answer_calls, strict=True):
        if not _same(arguments, answer_arguments, exactly=not has_same_ids):
            return f"the arguments of its call of {name!r:.80}"
    return ""


def has_ids(answer: Answer, message: Message) -> bool:
    """True if a message has calls, and their ids are those of the answer's calls."""
    ids = [id for id, _, _ in _calls_of_message(message)]
    return bool(ids) and ids == [call.id for call in answer.calls]


def has_thoughts(answer: Answer, message: Message) -> bool:
    """True if a message has thoughts, and they are those of the answer."""
    thoughts = str(message.get("reasoning_content") or "").strip()
    return bool(thoughts) and thoughts == answer.reasoning.strip()


def in_order(messages: Sequence[Message], policy_call_ids: Collection[str]) -> list[Message]:
    """The messages, with the results of parallel calls in the order of the calls. `policy_call_ids`: the ids of all
    calls that the policy wrote.

    Results are put in order if they stand directly behind a turn of the policy, and if they have exactly the ids of
    the calls in this turn, each once.
    """
    ordered = list(messages)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        ids = [id for id, _, _ in _calls_of_message(message)]
        if len(ids) < 2:  # there is no order
            continue
        if not all(id in policy_call_ids for id in ids):  # somebody else wrote these calls
            continue
        start = index + 1
        end = start + len(ids)
        results = messages[start:end]
        if any(result["role"] != "tool" for result in results):  # a result is missing, or stands elsewhere
            continue
        by_id = {result.get("tool_call_id"): result for result in results}
        has_one_for_each_call = len(results) == len(ids) == len(set(ids)) and set(by_id) == set(ids)
        if has_one_for_each_call:
            ordered[start:end] = [by_id[id] for id in ids]
    return ordered


def begun(tools: Sequence[Any]) -> bytes:
    """The digest of a conversation that has these tools and no messages."""
    return hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).digest()


def followed_by(digest: bytes, message: Message) -> bytes:
    """The digest of a conversation with one more message. `digest`: the digest of the conversation before this message.

    Conversations with equal digests have equal tools and equal messages.
    """
    encoded = json.dumps(message, sort_keys=True).encode()
    return hashlib.sha256(digest + encoded).digest()


def _calls_of_message(message: Message) -> list[_Call]:
    """The calls of a message of the assistant."""
    calls = message.get("tool_calls") or ()
    return [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]


def _calls_of_answer(answer: Answer) -> list[_Call]:
    """The calls of an answer, in the form in which a message has them when a client sends the answer back."""
    calls = []
    for call in answer.calls:
        arguments: Any = object_of(call.arguments)
        if arguments is None:
            arguments = call.arguments
        calls.append((call.id, call.name, arguments))
    return calls


def _same(one: Any, other: Any, *, exactly: bool) -> bool:
    """True if two JSON values are equal. `exactly` True: 100 and 100.0 are not equal.

    There is no recursion, because a client may send deeply nested values.
    """
    pairs = [(one, other)]  # the values that are still to be compared
    while pairs:
        one, other = pairs.pop()
        if isinstance(one, dict) and isinstance(other, dict):
            if one.keys() != other.keys():
                return False
            pairs += [(one[name], other[name]) for name in one]
        elif isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return False
            pairs += zip(one, other, strict=True)
        elif _is_number(one) and _is_number(other):
            if one != other or (exactly and type(one) is not type(other)):
                return False
        elif type(one) is not type(other) or one != other:
            return False
    return True


def _is_number(value: Any) -> bool:
    """True for numbers of JSON. In Python, True and False are ints too."""
    return isinstance(value, int | float) and not isinstance(value, bool)
