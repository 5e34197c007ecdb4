"""What a client of a session asks, and what it is answered, in the words that all protocols share.

    a request of OpenAI or Anthropic ──dialect──▶ Ask ──Session──▶ Answer ──dialect──▶ a body, or events

Messages and tools of an Ask have the form that chat templates take, which is that of OpenAI's chat completions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_NESTED = 64
"""Objects and lists within each other in the arguments of a call. Clients read them by recursion."""


MOST_SENTENCE = 2000
"""Characters of a refusal. Some repeat words of the request."""


class Refusal(Exception):
    """A request that is not served, in a sentence for whoever wrote the client."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, field: str | None = None) -> None:
        """`status`: of HTTP. Clients try 429 and those from 500 again by themselves. `code`: OpenAI's word for the kind
        of refusal, such as "context_length_exceeded"; None: there is none. `field`: of the request, the reason; None:
        it is another one."""
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
    """In the place of messages: a text, or token ids."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Each is `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    max_tokens: int | None = None
    """Of the turn; None: as many as the generator's own limit."""
    stop: Sequence[str] = ()
    """Texts that end the turn; they are not part of the answer."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """What the client says of `temperature`, `top_p`, `top_k` and `min_p`, where it says anything."""
    model: str = ""
    """The name by which the client asks for the policy; "": it gives none."""
    size: int = 0
    """Bytes of the request; 0: it came by no network."""
    objects_only: bool = False
    """Whether the protocol takes only objects as arguments of calls. A turn with others is answered as a text."""


@dataclass(frozen=True)
class WrittenCall:
    """One call that the policy wrote."""

    id: str
    name: str
    arguments: str
    """As the policy wrote them: the JSON of an object, unless the policy slipped."""

    @property
    def object(self) -> dict[str, Any] | None:
        """The arguments as an object that all clients can read; None: they are none."""
        return object_of(self.arguments)


@dataclass(frozen=True)
class Answer:
    """One turn of the policy."""

    id: str
    """Of its own, of letters and digits."""
    text: str
    """Without thoughts, calls and special tokens."""
    reasoning: str
    """Its thoughts; "": none, or no parser of thoughts was named."""
    calls: Sequence[WrittenCall]
    finish_reason: str
    """"stop": the policy ended it, or wrote a text of `Ask.stop`; "length": it was cut off."""
    stopped_by: str | None
    """The text of `Ask.stop` that ended it; None: none did."""
    prompt_tokens: int
    completion_tokens: int


def object_of(arguments: str) -> dict[str, Any] | None:
    """The object whose JSON a text is; of an empty text an empty one. None: it is no JSON that all clients can read.

    Some cannot read NaN, numbers beyond those of floating point, half a surrogate, and more than MOST_NESTED levels.
    """
    try:
        found = json.loads(arguments or "{}")
        if not isinstance(found, dict) or is_deep(found, MOST_NESTED):
            return None
        json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return found


def characters_of(ask: Ask) -> int:
    """Characters of a request that the policy reads, whatever the template: contents, tools, and a prompt of text.

    A template may leave out thoughts and calls of earlier turns.
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
    """Whether lists and objects stand in that many others, or in more."""
    level = [value]
    for _ in range(levels):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        level = inner
    return any(isinstance(each, dict | list) for each in level)


def whole_text(text: str) -> str:
    """The text with U+FFFD in the place of each half of a surrogate pair, which nobody can send."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
