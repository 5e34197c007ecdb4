"""Chat: makes text of messages by the tokenizer's chat template. Prompts, hooks and sessions all use `render`.

    messages of a row, a hook or a client ──clean──▶ texts ──ways──▶ the template ──▶ text, and the words to continue

* A null field counts as missing. Arrow has all fields in each message, and null where a message lacks one.
* Content in parts becomes the text of its parts. A part that is no text is refused.
* The template gets the arguments of calls as objects. A template that needs their JSON gets that (`_WAYS`).
* Messages of the system stay where they are. A template that refuses them there gets one, at the top (`_WAYS`).
* A last message of the assistant is not rendered: the policy continues after its words, whatever the template does to
  whole messages.
* Templates that ask for today's date get the day on which the rollout began. Otherwise the head of a conversation would
  change at midnight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import combinations
from typing import Any

from replay_generator.notices import say_once
from replay_generator.prompts.values import HalfSurrogateError, plain_value

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | ..., "content": ...}, and any other field of the chat template."""
_TEXTS = (None, "text", "input_text", "output_text")
"""The values of `type` of a part that is a text."""
_THINKS = "<think>"
_THOUGHT = "</think>"
_OURS = ("conversation", "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize")
"""Arguments of the template that follow from the messages, or that `render` sets."""
_NOTHING_BEFORE = "no message comes before the words of the assistant: begin with one of the user"


class ChatError(ValueError):
    """Messages that no template takes. The text names the message."""


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] = (),
    template: Mapping[str, Any] | None = None,
    began: datetime | None = None,
    *,
    ended: bool = False,
) -> str:
    """The text that the policy continues: the messages, rendered by the tokenizer's chat template.

    `tools`: as the client gave them, or Python functions. `template`: arguments of the template. `began`: when the
    rollout began; None: now. `ended`: the policy begins a new turn, also if the last message is of the assistant.
    Tokenize the text without special tokens: the template has written them. Raises ChatError.
    """
    arguments = dict(template or {})
    written = _template_of(tokenizer, arguments)
    if not written:
        raise ChatError("it is a chat, and the tokenizer has no chat template: give it one, or write a text")
    if "strftime_now" in written:
        arguments.setdefault("strftime_now", (began or datetime.now()).strftime)
    cleaned = clean(messages)
    words = ""
    if cleaned and cleaned[-1]["role"] == "assistant" and not ended:
        words = _words_of(cleaned.pop())
    if not cleaned:
        raise ChatError(_NOTHING_BEFORE)
    if "developer" not in written:
        for message in cleaned:
            if message["role"] == "developer":
                message["role"] = "system"
    failure: Exception | None = None
    for ways, form in _ways(cleaned):
        try:
            rendered = tokenizer.apply_chat_template(
                form, tools=list(tools) or None, add_generation_prompt=True, tokenize=False, **arguments
            )
            _check_arguments(str(rendered), form)
        except Exception as error:  # a template may raise anything
            failure = failure or error
            continue
        whole = f"{rendered}{words}"
        _checked("the chat, as the template renders it,", whole)
        if ways:
            _log_ways(ways, failure)
        return whole
    raise ChatError(f"the chat template refuses the messages: {type(failure).__name__}: {failure}") from failure


def _log_ways(ways: Sequence[_Way], failure: Exception | None) -> None:
    """Logs once that a template refused the usual form of messages, and gets another one."""
    in_words = ", and ".join(_WAYS[way] for way in ways)
    say_once(
        f"the chat template refuses the messages as they are ({type(failure).__name__}: {failure}): it is told "
        f"{in_words}",
        f"told {in_words}",
    )


def rendered_ids(tokenizer: Any, rendered: str) -> list[int]:
    """The tokens of a text that `render` returned, or of a part of it."""
    return [int(token) for token in tokenizer.encode(rendered, add_special_tokens=False)]


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text that the policy continues, which may be one that a template has rendered.

    The tokenizer's first tokens, such as BOS, come before the text, unless it begins with them. They do not come before
    a text with other special tokens if the chat template writes none of them either. Tokens that a tokenizer adds after
    a text, such as EOS, would end it, and are left out. Raises ChatError for half a surrogate.
    """
    _checked("the text", text)
    ids = [int(token) for token in tokenizer.encode(text)]
    special = set(getattr(tokenizer, "all_special_ids", ()))
    if not special.intersection([*ids[:1], *ids[-1:]]):  # the tokenizer has added nothing
        return ids
    plain = rendered_ids(tokenizer, text)
    first = _before(ids, plain)
    if first is None:  # this tokenizer splits a text in another way after its first tokens
        return ids
    if plain[: len(first)] == first:
        return plain
    written = _template_of(tokenizer, {})
    bos = getattr(tokenizer, "bos_token", None)
    writes_first = "bos_token" in written or (bos is not None and bos in written)
    if written and not writes_first and _special_ids(tokenizer).intersection(plain):
        return plain
    return [*first, *plain]


def _before(ids: list[int], plain: list[int]) -> list[int] | None:
    """The tokens of `ids` before `plain`; None: `plain` is not in `ids`."""
    for start in range(len(ids) - len(plain) + 1):
        if ids[start : start + len(plain)] == plain:
            return ids[:start]
    return None


def _special_ids(tokenizer: Any) -> set[int]:
    """The ids of all special tokens, without that of unknown text."""
    found = set(tokenizer.all_special_ids)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    for token_id, token in added.items():
        if token.special:
            found.add(token_id)
    return found - {tokenizer.unk_token_id}


def _template_of(tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    """The source of the template, or of all templates if the tokenizer has several; "": it has none."""
    own = getattr(tokenizer, "chat_template", None) or ""
    wanted = arguments.get("chat_template")
    if not isinstance(own, Mapping):
        return str(wanted or own)
    if wanted:
        return str(own.get(wanted, wanted))  # `wanted` is the name of one of them, or the source of another one
    return "\n".join(map(str, own.values()))


# ------------------------------------------------------------------------------------------------ messages


def clean(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages without null fields, each with its content as a text. Raises ChatError."""
    cleaned = []
    for number, message in enumerate(messages, start=1):
        try:
            cleaned.append(_clean(message))
        except ChatError as error:
            raise ChatError(f"message {number}: {error}") from error
    return cleaned


def _clean(message: Any) -> dict[str, Any]:
    """One message without null fields, with its content as a text. Raises ChatError."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatError(f"each message needs a 'role' and a 'content', not {message!r:.200}")
    if message.get("function_call"):
        raise ChatError("it has a function_call, which no template knows: write it as one of its tool_calls")
    cleaned = {name: value for name, value in message.items() if value is not None}
    calls = _clean_calls(cleaned.pop("tool_calls", None) or [])
    if "content" not in message and not calls:
        raise ChatError(f"each message needs a 'role' and a 'content', not {message!r:.200}")
    cleaned["content"] = text_of(message.get("content"))
    if calls:
        cleaned["tool_calls"] = calls
    return cleaned


def text_of(content: Any) -> str:
    """A text, or the texts of parts, joined as they are; "" for null. Raises ChatError for a part that is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ChatError(f"its content must be a text, or a list of parts, not {content!r:.200}")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping) or part.get("type") not in _TEXTS:
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ChatError(f"a part of its content is {kind!r:.80}, which no text model takes: leave out the row")
        text = part.get("text")
        if not isinstance(text, str | None):
            raise ChatError(f"the 'text' of a part of its content is {text!r:.80}, which is no text")
        others = [name for name, value in part.items() if name not in ("type", "text") and value is not None]
        if text is None and others:  # an image without the type of an image
            raise ChatError(
                f"a part of its content has {', '.join(map(str, others))!r:.80} and no 'text', and no text model "
                "takes that: leave out the row"
            )
        texts.append(text or "")
    return "".join(texts)


def _clean_calls(calls: Any) -> list[dict[str, Any]]:
    """The calls without null fields. Their arguments stay as they are: a null in these belongs to the call.

    `calls`: a list, or its JSON.
    """
    calls = _unpacked("tool_calls", calls) or []
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise ChatError(f"its tool_calls must be a list of objects, not {calls!r:.200}")
    cleaned_calls = []
    for call in calls:
        cleaned = {name: value for name, value in call.items() if value is not None}
        function = cleaned.get("function")
        if isinstance(function, Mapping):
            cleaned["function"] = {name: value for name, value in function.items() if value is not None}
        cleaned_calls.append(cleaned)
    return cleaned_calls


def arguments_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call as an object, which may be given as its JSON. Raises ChatError."""
    value = function.get("arguments")
    if isinstance(value, Mapping):
        return dict(value)
    try:
        arguments = json.loads(value or "{}")
    except (ValueError, TypeError):
        raise ChatError(f"the arguments of a call must be an object, or its JSON, not {value!r:.200}") from None
    except RecursionError:
        raise ChatError("the arguments of a call are nested too deeply") from None
    if not isinstance(arguments, dict):
        raise ChatError(f"the arguments of a call must be an object, or its JSON, not {value!r:.200}")
    checked: dict[str, Any] = _checked("the JSON of the arguments of a call", arguments)
    return checked


def check_words(messages: Sequence[Message]) -> None:
    """Raises ChatError if the last message is one of the assistant that cannot be continued."""
    if messages[-1]["role"] != "assistant":
        return
    _words_of(messages[-1])
    if len(messages) == 1:
        raise ChatError(_NOTHING_BEFORE)


def _checked(name: str, value: Any) -> Any:
    """The value as rows have it (`plain_value`). Raises ChatError for a value that no tokenizer takes."""
    try:
        return plain_value(value)
    except ValueError as error:
        raise ChatError(f"{name} {error}") from error


def functions_of(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    """The function of each call in cleaned messages: its `name` and `arguments`."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call.get("function")
            yield function if isinstance(function, Mapping) else call


def _words_of(message: Message) -> str:
    """The words of the assistant that the policy continues. Raises ChatError for a message without such words."""
    if message.get("tool_calls"):
        raise ChatError("the last message is a call of the assistant: end with the answer of its tool")
    if message.get("reasoning_content"):
        raise ChatError("the last message has reasoning_content: write these thoughts into its content, as they go on")
    return str(message["content"])


# ------------------------------------------------------------------------------------------------ forms of messages

_Messages = list[dict[str, Any]]
_Way = Callable[[_Messages], _Messages]


def _ways(messages: _Messages) -> Iterator[tuple[tuple[_Way, ...], _Messages]]:
    """Yields the messages in each form that some template needs, with the ways that lead to this form.

    The usual form is first; a form that comes again is left out. Raises ChatError for half a surrogate.
    """
    yielded: list[_Messages] = []
    for count in range(len(_WAYS) + 1):
        for chosen in combinations(_WAYS, count):
            form = messages
            for way in chosen:
                form = way(form)
            if _arguments_as_text not in chosen:
                form = _arguments_as_objects(form)
            if form not in yielded:
                yielded.append(form)
                yield chosen, form


def _arguments_as_objects(messages: _Messages) -> _Messages:
    """The messages with the arguments of calls as objects. A text that is no JSON of an object stays as it is.

    Raises ChatError for half a surrogate in the JSON.
    """

    def as_object(function: Mapping[str, Any]) -> Any:
        try:
            return arguments_of(function)
        except ChatError as error:
            if isinstance(error.__cause__, HalfSurrogateError):
                raise
            return function.get("arguments")

    return _with_arguments(messages, as_object)


def _arguments_as_text(messages: _Messages) -> _Messages:
    """The messages with the arguments of calls as JSON. Arguments that are a text stay as they are."""

    def as_text(function: Mapping[str, Any]) -> Any:
        value = function.get("arguments")
        if isinstance(value, str):
            return value
        return json.dumps(value or {}, ensure_ascii=False)

    return _with_arguments(messages, as_text)


def _with_arguments(messages: _Messages, arguments: Callable[[Mapping[str, Any]], Any]) -> _Messages:
    """The messages with other arguments in their calls. `arguments`: makes them from the function of a call."""
    changed = []
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                function = call.get("function")
                if isinstance(function, Mapping):
                    changed_function = {**function, "arguments": arguments(function)}
                    calls.append({**call, "function": changed_function})
                else:
                    calls.append({**call, "arguments": arguments(call)})
            message = {**message, "tool_calls": calls}
        changed.append(message)
    return changed


def _thoughts_apart(messages: _Messages) -> _Messages:
    """The messages with the thoughts at the beginning of the assistant's content moved to `reasoning_content`."""
    changed = []
    for message in messages:
        thoughts, ends, text = message["content"].partition(_THOUGHT)
        if message["role"] == "assistant" and ends and "reasoning_content" not in message:
            thoughts = thoughts.strip().removeprefix(_THINKS).strip()
            message = {**message, "content": text.lstrip("\n"), "reasoning_content": thoughts}
        changed.append(message)
    return changed


def _one_system(messages: _Messages) -> _Messages:
    """The messages with one message of the system, at the top.

    It has the words of all that are at the top. Later ones become words of the user, and join the user's messages
    beside them: many of these templates need turns that alternate.
    """
    top: list[str] = []
    rest = list(messages)
    while rest and rest[0]["role"] == "system":
        top.append(rest.pop(0)["content"])
    changed: _Messages = []
    if top:
        changed.append({**messages[0], "content": "\n\n".join(top)})
    was_system = False
    for message in rest:
        is_system = message["role"] == "system"
        if is_system:
            message = {**message, "role": "user"}
        follows_user = bool(changed) and changed[-1]["role"] == message["role"] == "user"
        if follows_user and (is_system or was_system):
            content = f"{changed[-1]['content']}\n\n{message['content']}"
            changed[-1] = {**changed[-1], "content": content}
        else:
            changed.append(message)
        was_system = is_system
    return changed


_WAYS: dict[_Way, str] = {
    _arguments_as_text: "the arguments of calls as the text of their JSON",
    _thoughts_apart: "the thoughts of the assistant apart from its content, as reasoning_content",
    _one_system: "the messages of the system as one at the top, and later ones as words of the user",
}
"""Changes of messages that some templates need, each with its words in the log. `render` tries them, alone and
together, only if the template refuses the usual form."""


def _check_arguments(rendered: str, messages: _Messages) -> None:
    """Raises ChatError if the template has written arguments as Python does: then it needs their JSON."""
    contents = "\n".join(message["content"] for message in messages)
    for function in functions_of(messages):
        arguments = function.get("arguments")
        if not isinstance(arguments, dict):
            continue
        written = repr(arguments)
        if written == json.dumps(arguments):  # there is no difference
            continue
        if rendered.count(written) > contents.count(written):
            raise ChatError("the template writes the arguments of calls as Python does")


# ------------------------------------------------------------------------------------------------ columns of a row


def tools_of(value: Any) -> list[Any]:
    """The tools in a row's `tools`: a list of objects, or its JSON, as the client gave them. Raises ChatError."""
    tools = _unpacked("tools", value)
    if not tools:
        return []
    if not isinstance(tools, list | tuple):
        raise ChatError(f"'tools' must be a list of objects, or its JSON, not {tools!r:.200}")
    found = []
    for packed_tool in tools:
        tool = _unpacked("tools", packed_tool)
        function = None
        if isinstance(tool, Mapping):
            function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ChatError(
                f"each of 'tools' is an object with the name of its function, not {tool!r:.200}: if the column is not "
                "for the chat template, rename it"
            )
        found.append(tool)
    return found


def template_of(value: Any) -> dict[str, Any]:
    """The arguments of the template in a row's `chat_template_kwargs`: an object, or its JSON. Raises ChatError."""
    arguments = _unpacked("chat_template_kwargs", value) or {}
    if not isinstance(arguments, Mapping):
        raise ChatError(f"'chat_template_kwargs' must be an object, or its JSON, not {arguments!r:.200}")
    for name in arguments:
        if name in _OURS:
            raise ChatError(f"'chat_template_kwargs' has {name!r}, which follows from the messages: leave it out")
    return {str(name): argument for name, argument in arguments.items()}


def _unpacked(name: str, value: Any) -> Any:
    """The value of a column, which may be a JSON text: Arrow has no type for some columns. Raises ChatError."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        unpacked = json.loads(value)
    except ValueError as error:
        raise ChatError(f"{name!r} is a text that is no JSON, {value!r:.200}: {error}") from None
    except RecursionError:
        raise ChatError(f"{name!r} is nested too deeply") from None
    return _checked(f"the JSON of {name!r}", unpacked)
