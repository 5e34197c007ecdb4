"""Turns: the request of a client of a session, and the answer, in the words that all protocols share.

    a request of OpenAI or Anthropic ──dialect──▶ Ask ──Session──▶ Answer ──dialect──▶ a body, or events

Messages and tools of an Ask have the form that chat templates take, which is that of OpenAI's chat completions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_NESTED = 64
"""The most objects and lists within each other in the arguments of a call. Clients read them by recursion."""


MOST_SENTENCE = 2000
"""The most characters of a refusal. Some refusals repeat words of the request."""


class Refusal(Exception):
    """A request that is not served. The message is a sentence for the author of the client."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, field: str | None = None) -> None:
        """`status`: the status of HTTP. After 429, and after 500 and above, clients send the request again by
        themselves. `code`: OpenAI's word for the kind of refusal, such as "context_length_exceeded"; None: there is
        none. `field`: the field of the request that is the reason; None: there is another reason."""
        message = whole_text(message)[:MOST_SENTENCE]
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = field or code or message
        """The log shows one refusal of each kind."""


@dataclass(frozen=True)
class Ask:
    """One request for a turn of the policy."""

    messages: Sequence[Mapping[str, Any]] = ()
    """Each has `role` ("system", "user", "assistant", "tool") and `content`, a text. One of the assistant may have
    `tool_calls`, whose `function` has `name` and `arguments`: an object, or the text that the policy wrote in the place
    of one. One of a tool has `tool_call_id`."""
    prompt: str | Sequence[int] | None = None
    """A text, or token ids, in the place of messages."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Each is `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    max_tokens: int | None = None
    """The most tokens of the turn; None: the generator's own limit."""
    stop: Sequence[str] = ()
    """Texts that end the turn; they are not part of the answer."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The values of `temperature`, `top_p`, `top_k` and `min_p` that the client sends."""
    model: str = ""
    """The name by which the client asks for the policy; "": it gives none."""
    size: int = 0
    """Bytes of the request; 0: it did not come through a network."""
    objects_only: bool = False
    """True if the protocol takes only objects as arguments of calls. A turn with other arguments is answered as a
    text."""


@dataclass(frozen=True)
class WrittenCall:
    """One call that the policy wrote."""

    id: str
    name: str
    arguments: str
    """As the policy wrote them: the JSON of an object, unless the policy slipped."""

    @property
    def object(self) -> dict[str, Any] | None:
        """The arguments as an object that all clients can read; None: they are no such object."""
        return object_of(self.arguments)


@dataclass(frozen=True)
class Answer:
    """One turn of the policy."""

    id: str
    """A unique id of letters and digits."""
    text: str
    """The text of the turn, without thoughts, calls and special tokens."""
    reasoning: str
    """The thoughts of the turn; "": it has none, or no parser of thoughts was named."""
    calls: Sequence[WrittenCall]
    finish_reason: str
    """"stop": the policy ended the turn, or wrote a text of `Ask.stop`; "length": the turn was cut off."""
    stopped_by: str | None
    """The text of `Ask.stop` that ended the turn; None: no text did."""
    prompt_tokens: int
    completion_tokens: int


def object_of(arguments: str) -> dict[str, Any] | None:
    """The object whose JSON a text is; an empty object for an empty text. None: some client cannot read it.

    Some clients cannot read NaN, numbers beyond those of floating point, half of a surrogate pair, and more than
    MOST_NESTED levels.
    """
    try:
        value = json.loads(arguments or "{}")
        if not isinstance(value, dict):
            return None
        if is_deep(value, MOST_NESTED):
            return None
        # Raises for NaN, for infinity, and for half of a surrogate pair.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def characters_of(ask: Ask) -> int:
    """The number of characters of a request that the policy reads with any template: contents, tools, and a prompt.

    Thoughts and calls of earlier turns do not count: a template may leave them out.
    """
    if isinstance(ask.prompt, str):
        return len(ask.prompt)
    count = 0
    parts: list[Any] = [message.get("content") for message in ask.messages]
    parts += ask.tools
    while parts:
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
    """True if some list or object stands inside of at least `levels` others."""
    values = [value]
    for _ in range(levels):
        inner_values: list[Any] = []
        for outer in values:
            if isinstance(outer, dict):
                inner_values += outer.values()
            elif isinstance(outer, list):
                inner_values += outer
        values = inner_values
    return any(isinstance(inner, dict | list) for inner in values)


def whole_text(text: str) -> str:
    """The text with U+FFFD in the place of each single half of a surrogate pair, which UTF-8 cannot encode."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
