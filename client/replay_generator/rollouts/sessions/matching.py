"""Matching: which messages of the assistant are turns of ours, however their client writes them.

A message is ours if the conversation before it is that of an exchange (exchanges.py), and

* its text and its calls are those of the answer exactly, or
* the ids of its calls are those of the answer. Then numbers may be spelt otherwise, as JavaScript does it (100.0 as
  100), and the text may be missing.

Its thoughts may be missing, and are never others. Whatever differs besides makes it a message of somebody else: the
policy would read what the agent did not send.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from replay_generator.prompts.chat import Message
from replay_generator.rollouts.sessions.turns import Answer, object_of

_Call = tuple[str, str, Any]
"""The id of a call, the name of its function, and its arguments: an object, or the text in its place."""


def difference(answer: Answer, message: Message) -> str:
    """What makes a message of the assistant another one than an answer; "": nothing, it is ours."""
    wrote, calls = _calls_of(answer), _calls(message)
    is_ours = has_ids(answer, message)
    thoughts = str(message.get("reasoning_content") or "")
    if thoughts.strip() and thoughts.strip() != answer.reasoning.strip():
        return "its thoughts"
    text = message.get("content") or ""
    if text != answer.text and not (is_ours and not text):
        return "its text"
    if [name for _, name, _ in calls] != [name for _, name, _ in wrote]:
        return "its calls"
    for (_, name, arguments), (_, _, own) in zip(calls, wrote, strict=True):
        if not _same(arguments, own, exactly=not is_ours):
            return f"the arguments of its call of {name!r:.80}"
    return ""


def has_ids(answer: Answer, message: Message) -> bool:
    """Whether a message has calls, all of them with the ids of the answer's."""
    calls = _calls(message)
    return bool(calls) and [id for id, _, _ in calls] == [call.id for call in answer.calls]


def has_thoughts(answer: Answer, message: Message) -> bool:
    """Whether a message has the thoughts of an answer."""
    thoughts = str(message.get("reasoning_content") or "").strip()
    return bool(thoughts) and thoughts == answer.reasoning.strip()


def in_order(messages: Sequence[Message], known: Mapping[str, Any]) -> list[Message]:
    """The messages, the results of parallel calls in the order of the calls. `known`: the ids of calls of ours.

    That is so for the messages directly behind our turn, if their ids are exactly those of its calls, each once.
    """
    ordered = list(messages)
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        ids = [id for id, _, _ in _calls(message)]
        if len(ids) < 2 or not all(id in known for id in ids):
            continue
        results = messages[at + 1 : at + 1 + len(ids)]
        if any(each["role"] != "tool" for each in results):
            continue
        by_id = {each.get("tool_call_id"): each for each in results}
        if len(results) == len(ids) == len(set(ids)) and set(by_id) == set(ids):
            ordered[at + 1 : at + 1 + len(ids)] = [by_id[id] for id in ids]
    return ordered


def begun(tools: Sequence[Any]) -> bytes:
    """The digest of a conversation without messages."""
    return hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).digest()


def followed_by(digest: bytes, message: Message) -> bytes:
    """The digest of a conversation with another message, to the byte. `digest`: of the conversation before it."""
    encoded = json.dumps(message, sort_keys=True).encode()
    return hashlib.sha256(digest + encoded).digest()


def _calls(message: Message) -> list[_Call]:
    calls = message.get("tool_calls") or ()
    return [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]


def _calls_of(answer: Answer) -> list[_Call]:
    """Those of an answer, as the dialects tell calls that a client repeats."""
    found = []
    for call in answer.calls:
        arguments: Any = object_of(call.arguments)
        found.append((call.id, call.name, call.arguments if arguments is None else arguments))
    return found


def _same(one: Any, other: Any, *, exactly: bool) -> bool:
    """Whether two values of JSON are equal. `exactly`: 100 and 100.0 are two numbers."""
    pairs = [(one, other)]
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
    return isinstance(value, int | float) and not isinstance(value, bool)
