"""Turns: the requests of a session's clients, and the answers, in one form for all protocols.

    a request of OpenAI or Anthropic ──dialect──▶ Ask ──Session──▶ Answer ──dialect──▶ a body, or events

The messages and tools of an Ask have the form that chat templates take. This is the form of OpenAI's chat completions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_NESTED = 64
"""The most levels of nested objects and lists in the arguments of a call. The limit exists because clients parse
arguments by recursion, whose depth is limited."""
MOST_SENTENCE = 2000
"""The most characters of a refusal. Some refusals repeat words of the request, which may be long."""


class Refusal(Exception):
    """A request that is not served. The message is a sentence for the author of the client."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, field: str | None = None) -> None:
        """`status`: the HTTP status. Clients repeat a request by themselves after 429 and after every status above 499.
        `code`: OpenAI's word for the kind of refusal, such as "context_length_exceeded"; None: OpenAI has no word for
        it. `field`: the field of the request that is the reason for the refusal; None: no single field is."""
        message = whole_text(message)[:MOST_SENTENCE]
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = field or code or message
        """The kind of the refusal. The log shows only the first refusal of each kind."""


@dataclass(frozen=True)
class Ask:
    """One request for a turn of the policy."""

    messages: Sequence[Mapping[str, Any]] = ()
    """Each message has `role` ("system", "user", "assistant", "tool") and `content`, a text. A message of the assistant
    may have `tool_calls`. The `function` of a call has `name` and `arguments`. The arguments are an object, or the text
    that the policy wrote in the place of an object. A message of a tool has `tool_call_id`."""
    prompt: str | Sequence[int] | None = None
    """A text, or token ids, in the place of messages. None: the request has messages."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Each tool is `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    max_tokens: int | None = None
    """The most tokens of the turn; None: the generator's own limit."""
    stop: Sequence[str] = ()
    """Texts that end the turn. Such a text is not part of the answer."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The values of `temperature`, `top_p`, `top_k` and `min_p` that the client sends."""
    model: str = ""
    """The name by which the client asks for the policy; "": the client sends no name."""
    size: int = 0
    """The number of bytes of the request; 0: the request did not come through a network."""
    objects_only: bool = False
    """True if the protocol allows only objects as arguments of calls. Then a turn that has a call with other arguments
    is answered as text."""


@dataclass(frozen=True)
class WrittenCall:
    """One call that the policy wrote."""

    id: str
    """The id that the policy wrote, or a random id."""
    name: str
    """The name of the function."""
    arguments: str
    """The arguments as the policy wrote them: the JSON of an object, unless the policy made a mistake."""

    @property
    def object(self) -> dict[str, Any] | None:
        """The arguments as an object; None: the arguments are no object that all clients can read."""
        return object_of(self.arguments)


@dataclass(frozen=True)
class Answer:
    """One turn of the policy."""

    id: str
    """A unique id of letters and digits."""
    text: str
    """The text of the turn, without thoughts, calls and special tokens."""
    reasoning: str
    """The thoughts of the turn; "": the turn has no thoughts, or no parser of thoughts was named."""
    calls: Sequence[WrittenCall]
    finish_reason: str
    """"stop": the policy ended the turn, or wrote a text of `Ask.stop`; "length": the turn was cut off."""
    stopped_by: str | None
    """The text of `Ask.stop` that ended the turn; None: no text did."""
    prompt_tokens: int
    """The number of tokens that the policy read before the turn."""
    completion_tokens: int
    """The number of tokens of the turn, with thoughts, calls and special tokens."""


def object_of(arguments: str) -> dict[str, Any] | None:
    """Parses `arguments` as the JSON of an object; "" is an empty object. Returns None if `arguments` are not the JSON
    of an object, or if some clients could not read the object.

    Some clients cannot read NaN, numbers too large for floating point, one half of a surrogate pair, or more than
    MOST_NESTED levels.
    """
    try:
        value = json.loads(arguments or "{}")
        if not isinstance(value, dict):
            return None
        if is_deep(value, MOST_NESTED):
            return None
        # Raises ValueError for NaN, for infinity (which `loads` makes of a number that is too large), and for one half
        # of a surrogate pair.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def characters_of(ask: Ask) -> int:
    """Counts the characters of a request that the policy reads in any case: the contents of the messages and the tools,
    or the text of a prompt. A prompt of tokens counts as 0.

    Thoughts and calls of earlier turns do not count, because a chat template may leave them out.
    """
    if isinstance(ask.prompt, str):
        return len(ask.prompt)
    count = 0
    parts: list[Any] = [message.get("content") for message in ask.messages]
    parts += ask.tools
    while parts:  # not by recursion, because a client may send deeply nested tools
        part = parts.pop()
        if isinstance(part, str):
            count += len(part)
        elif isinstance(part, Mapping):
            parts += part.keys()
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
    return count


def is_deep(value: Any, levels: int) -> bool:
    """True if a list or an object is nested in at least `levels` other lists and objects."""
    values = [value]
    for _ in range(levels):  # goes one level deeper each time: from values to the values inside of them
        inner_values: list[Any] = []
        for outer in values:
            if isinstance(outer, dict):
                inner_values += outer.values()
            elif isinstance(outer, list):
                inner_values += outer
        values = inner_values
    return any(isinstance(inner, dict | list) for inner in values)


def whole_text(text: str) -> str:
    """The text with U+FFFD in the place of each half of a surrogate pair that stands alone. UTF-8 cannot encode such
    halves."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
