"""Chat: renders messages to a text by the tokenizer's chat template. Prompts, hooks and sessions all use `render`.

    messages of a row, a hook or a client
      ──clean──▶ messages without null fields, whose contents are texts
      ──_forms──▶ the first form of these messages that the template accepts
      ──template──▶ the rendered text, and behind it the words of the assistant that the policy continues

* A null field counts as missing, because Arrow gives each message all fields, with null for each field that the message
  lacks.
* Content in parts becomes the text of its parts. A part that is no text is refused.
* The template gets the arguments of calls as objects. If it needs the JSON of the arguments, it gets JSON (`_CHANGES`).
* System messages stay where they are. If the template accepts only one system message, at the top, it gets only one
  (`_CHANGES`).
* If the last message is of the assistant, the template does not render this message. Its words are put after the
  rendered text, and the policy continues these words.
* A template that asks for today's date gets the day on which the rollout began. Otherwise the beginning of a
  conversation would change at midnight.
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
"""A message: {"role": "system" | "user" | "assistant" | ..., "content": ...}, with any other fields that the chat
template reads."""
_TEXTS = (None, "text", "input_text", "output_text")
"""The values that `type` has in a part of a content if the part is a text. None: the part has no type."""
_THOUGHTS_BEGIN = "<think>"
_THOUGHTS_END = "</think>"
_OURS = ("conversation", "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize")
"""Arguments of the template that follow from the messages, or that `render` sets. Users may not set them."""
_NOTHING_BEFORE = "no message comes before the words of the assistant: begin with one of the user"


class ChatError(ValueError):
    """The chat template cannot render these messages, tools or arguments. The error names the fault."""


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] = (),
    template: Mapping[str, Any] | None = None,
    began: datetime | None = None,
    *,
    ended: bool = False,
) -> str:
    """Renders the messages by the tokenizer's chat template. Returns the text that the policy continues.

    Tokenize this text without adding special tokens, because the template has written them.

    `tools`: as the client gave them, or Python functions. `template`: arguments of the template. `began`: when the
    rollout began; None: now. `ended`: the policy begins a new turn, even if the last message is of the assistant.

    Raises ChatError if the template accepts no form of the messages, or if the messages are faulty.
    """
    arguments = dict(template or {})
    template_source = _template_of(tokenizer, arguments)
    if not template_source:
        raise ChatError("it is a chat, and the tokenizer has no chat template: give it one, or write a text")
    if "strftime_now" in template_source:  # the template asks for the date by this function
        arguments.setdefault("strftime_now", (began or datetime.now()).strftime)
    cleaned = clean(messages)
    words = ""  # the words of the assistant that the policy continues
    if cleaned and cleaned[-1]["role"] == "assistant" and not ended:
        words = _words_of(cleaned.pop())
    if not cleaned:
        raise ChatError(_NOTHING_BEFORE)
    if "developer" not in template_source:  # the template does not know this role
        for message in cleaned:
            if message["role"] == "developer":
                message["role"] = "system"
    failure: Exception | None = None
    for changes, form in _forms(cleaned):
        try:
            rendered = tokenizer.apply_chat_template(
                form, tools=list(tools) or None, add_generation_prompt=True, tokenize=False, **arguments
            )
            _check_arguments(str(rendered), form)  # raises ChatError if the template needs JSON for the arguments
        except Exception as error:  # a template may raise anything
            if failure is None:  # keep the first failure, because it is about the usual form of the messages
                failure = error
            continue
        whole = f"{rendered}{words}"
        _checked("the chat, as the template renders it,", whole)  # raises ChatError for half a surrogate
        if changes:  # this is not the usual form, which has failed with `failure`
            _log_changes(changes, failure)
        return whole
    raise ChatError(f"the chat template refuses the messages: {type(failure).__name__}: {failure}") from failure


def _log_changes(changes: Sequence[_Change], failure: Exception | None) -> None:
    """Logs once that a template has refused the usual form of messages, and which changes it gets instead."""
    in_words = ", and ".join(_CHANGES[change] for change in changes)
    say_once(
        f"the chat template refuses the messages as they are ({type(failure).__name__}: {failure}): it is told "
        f"{in_words}",
        f"told {in_words}",
    )


def rendered_ids(tokenizer: Any, rendered: str) -> list[int]:
    """The tokens of a text that `render` returned, or of a part of such a text."""
    return [int(token) for token in tokenizer.encode(rendered, add_special_tokens=False)]


def check_text(text: str) -> None:
    """Raises ChatError for half a surrogate, which no tokenizer takes."""
    _checked("the text", text)


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text that the policy continues. A template may have rendered the text.

    Puts the tokens that the tokenizer adds at the start, such as BOS, before the tokens of the text. Two kinds of text
    do not get these tokens: a text that already begins with them, and a text that a chat template has rendered, if that
    template never writes BOS. A text that contains special tokens counts as rendered.

    Leaves out the tokens that the tokenizer adds at the end, such as EOS, because they would end the text. But if the
    tokenizer splits the text in another way when it adds tokens, the result is all tokens that it then returns.

    Raises ChatError for half a surrogate, and if there are no tokens, because the policy cannot continue nothing.
    """
    check_text(text)
    ids = _text_ids(tokenizer, text)
    if not ids:
        raise ChatError(f"the text {text!r:.80} has no tokens, and the tokenizer begins with none: write a text")
    return ids


def _text_ids(tokenizer: Any, text: str) -> list[int]:
    """The result of `text_ids`, which may be empty."""
    ids = [int(token) for token in tokenizer.encode(text)]
    special = set(getattr(tokenizer, "all_special_ids", ()))
    if not special.intersection([*ids[:1], *ids[-1:]]):  # the tokenizer has added nothing
        return ids
    plain = rendered_ids(tokenizer, text)
    if not plain:  # nothing shows which of the added tokens stand at the start, and which at the end
        bos = getattr(tokenizer, "bos_token_id", None)
        return [token for token in ids[:1] if token == bos]
    added_at_start = _ids_before(plain, ids)
    if added_at_start is None:  # the tokenizer splits the text in another way when it adds tokens
        return ids
    if plain[: len(added_at_start)] == added_at_start:
        # The text begins with these tokens already, or the tokenizer adds none at the start.
        return plain
    # The text does not begin with these tokens. So a template that writes BOS has not rendered the text. But a template
    # that never writes BOS may have rendered it, and then the text must not get BOS.
    template_source = _template_of(tokenizer, {})
    bos = getattr(tokenizer, "bos_token", None)
    writes_bos = "bos_token" in template_source or (bos is not None and bos in template_source)
    if template_source and not writes_bos:
        has_special_tokens = bool(_special_ids(tokenizer).intersection(plain))
        if has_special_tokens:  # the template has rendered this text
            return plain
    return [*added_at_start, *plain]


def _ids_before(part: list[int], ids: list[int]) -> list[int] | None:
    """The tokens in `ids` before the sequence `part`; None: `ids` does not contain this sequence."""
    for start in range(len(ids) - len(part) + 1):
        if ids[start : start + len(part)] == part:
            return ids[:start]
    return None


def _special_ids(tokenizer: Any) -> set[int]:
    """The ids of all special tokens, without the id of the unknown token, because any text may contain that token."""
    ids = set(tokenizer.all_special_ids)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    for token_id, token in added.items():
        if token.special:
            ids.add(token_id)
    return ids - {tokenizer.unk_token_id}


def _template_of(tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    """The source of the chat template, which the argument `chat_template` may choose; "": there is no template.

    If the tokenizer has several templates, and the argument chooses none, returns the sources of all of them in one
    text, because any of them may be used.
    """
    own = getattr(tokenizer, "chat_template", None) or ""
    wanted = arguments.get("chat_template")
    if not isinstance(own, Mapping):
        return str(wanted or own)
    # The tokenizer has several templates, by name.
    if wanted:
        return str(own.get(wanted, wanted))  # `wanted` names one of these templates, or is itself a source
    return "\n".join(map(str, own.values()))


# ------------------------------------------------------------------------------------------------ messages


def clean(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages without null fields, each with its content as a text. Raises ChatError."""
    cleaned = []
    for number, message in enumerate(messages, start=1):
        try:
            cleaned.append(_clean(message))
        except ChatError as error:  # the error does not name the message
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
    """Converts the content of a message to a text. The texts of parts are joined without a separator; null becomes "".

    Raises ChatError for a part that is no text.
    """
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
        if not isinstance(part, Mapping) or part.get("type") not in _TEXTS:  # for example an image
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ChatError(f"a part of its content is {kind!r:.80}, which no text model takes: leave out the row")
        text = part.get("text")
        if not isinstance(text, str | None):
            raise ChatError(f"the 'text' of a part of its content is {text!r:.80}, which is no text")
        others = [name for name, value in part.items() if name not in ("type", "text") and value is not None]
        if text is None and others:  # for example an image in a part without a type
            names = ", ".join(map(str, others))
            raise ChatError(
                f"a part of its content has {names!r:.80} and no 'text', and no text model takes that: leave out the "
                "row"
            )
        texts.append(text or "")
    return "".join(texts)


def _clean_calls(calls: Any) -> list[dict[str, Any]]:
    """The tool calls of a message without null fields. Raises ChatError.

    The arguments of the calls stay as they are, because a null in arguments may be meant. `calls`: a list, or its JSON.
    """
    calls = _unpacked("tool_calls", calls) or []  # parses a text; [] for a blank one
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
    """The arguments of a call, as an object.

    `function`: the function of the call. Its `arguments` are an object, or the JSON of an object. Raises ChatError for
    any other arguments.
    """
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
    """Raises ChatError if the last message is of the assistant, and the policy cannot continue this message."""
    if messages[-1]["role"] != "assistant":
        return
    _words_of(messages[-1])  # raises ChatError for a message without words
    if len(messages) == 1:
        raise ChatError(_NOTHING_BEFORE)


def _checked(name: str, value: Any) -> Any:
    """Converts the value by `plain_value`. Raises ChatError for half a surrogate, and for a value that is nested too
    deeply. The error calls the value by the given name."""
    try:
        return plain_value(value)
    except ValueError as error:
        raise ChatError(f"{name} {error}") from error


def functions_of(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    """Yields the function of each call in cleaned messages, with its `name` and `arguments`."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            # Some clients write `name` and `arguments` into the call itself.
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
_Change = Callable[[_Messages], _Messages]


def _forms(messages: _Messages) -> Iterator[tuple[tuple[_Change, ...], _Messages]]:
    """Yields each form of the messages that some template needs, with the changes that lead to this form.

    The usual form is first, with no changes. A form that was yielded already is left out. Raises ChatError for half a
    surrogate in the JSON of arguments.
    """
    yielded: list[_Messages] = []
    for count in range(len(_CHANGES) + 1):
        for chosen in combinations(_CHANGES, count):
            form = messages
            for change in chosen:
                form = change(form)
            if _arguments_as_text not in chosen:  # templates usually need objects
                form = _arguments_as_objects(form)
            if form not in yielded:
                yielded.append(form)
                yield chosen, form


def _arguments_as_objects(messages: _Messages) -> _Messages:
    """The messages with the arguments of calls as objects. A text that is not the JSON of an object stays as it is.

    Raises ChatError for half a surrogate in the JSON.
    """

    def as_object(function: Mapping[str, Any]) -> Any:
        """The new arguments of a call, for `_with_arguments`."""
        try:
            return arguments_of(function)
        except ChatError as error:
            if isinstance(error.__cause__, HalfSurrogateError):  # no other form of the messages mends this fault
                raise
            return function.get("arguments")

    return _with_arguments(messages, as_object)


def _arguments_as_text(messages: _Messages) -> _Messages:
    """The messages with the arguments of calls as JSON. Arguments that are a text already stay as they are."""

    def as_text(function: Mapping[str, Any]) -> Any:
        """The new arguments of a call, for `_with_arguments`."""
        value = function.get("arguments")
        if isinstance(value, str):
            return value
        return json.dumps(value or {}, ensure_ascii=False)

    return _with_arguments(messages, as_text)


def _with_arguments(messages: _Messages, new_arguments: Callable[[Mapping[str, Any]], Any]) -> _Messages:
    """The messages with new arguments in their calls, which `new_arguments` returns for the function of each call."""
    changed = []
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                function = call.get("function")
                if isinstance(function, Mapping):  # otherwise the arguments are in the call itself (`functions_of`)
                    changed_function = {**function, "arguments": new_arguments(function)}
                    calls.append({**call, "function": changed_function})
                else:
                    calls.append({**call, "arguments": new_arguments(call)})
            message = {**message, "tool_calls": calls}
        changed.append(message)
    return changed


def _thoughts_apart(messages: _Messages) -> _Messages:
    """The messages, with thoughts at the beginning of an assistant's content moved to its `reasoning_content`."""
    changed = []
    for message in messages:
        thoughts, end_of_thoughts, text = message["content"].partition(_THOUGHTS_END)
        if message["role"] == "assistant" and end_of_thoughts and "reasoning_content" not in message:
            thoughts = thoughts.strip().removeprefix(_THOUGHTS_BEGIN).strip()
            message = {**message, "content": text.lstrip("\n"), "reasoning_content": thoughts}
        changed.append(message)
    return changed


def _one_system(messages: _Messages) -> _Messages:
    """The messages with at most one system message, at the top.

    All system messages at the top are joined into this one. Later system messages become user messages. They are joined
    with the user messages beside them, because many templates that accept only one system message also need turns that
    alternate.
    """
    top: list[str] = []  # the contents of the system messages at the top
    rest = list(messages)  # after the loop: the messages behind these system messages
    while rest and rest[0]["role"] == "system":
        system_message = rest.pop(0)
        top.append(system_message["content"])
    changed: _Messages = []
    if top:
        changed.append({**messages[0], "content": "\n\n".join(top)})
    was_system = False
    for message in rest:
        is_system = message["role"] == "system"
        if is_system:
            message = {**message, "role": "user"}
        follows_user = bool(changed) and changed[-1]["role"] == message["role"] == "user"
        # Two messages that were user messages from the start stay apart.
        if follows_user and (is_system or was_system):
            content = f"{changed[-1]['content']}\n\n{message['content']}"
            changed[-1] = {**changed[-1], "content": content}
        else:
            changed.append(message)
        was_system = is_system
    return changed


_CHANGES: dict[_Change, str] = {
    _arguments_as_text: "the arguments of calls as the text of their JSON",
    _thoughts_apart: "the thoughts of the assistant apart from its content, as reasoning_content",
    _one_system: "the messages of the system as one at the top, and later ones as words of the user",
}
"""Changes of messages that some templates need, each with its description for the log. If a template refuses the usual
form, `render` tries each change alone, and then several changes together."""


def _check_arguments(rendered: str, messages: _Messages) -> None:
    """Raises ChatError if the template has written arguments of calls as Python's repr, so that it needs their JSON."""
    contents = "\n".join(message["content"] for message in messages)
    for function in functions_of(messages):
        arguments = function.get("arguments")
        if not isinstance(arguments, dict):
            continue
        written = repr(arguments)
        if written == json.dumps(arguments):  # repr and JSON are the same, so either is right
            continue
        # A message may contain the same text. Such an occurrence does not count.
        if rendered.count(written) > contents.count(written):
            raise ChatError("the template writes the arguments of calls as Python does")


# ------------------------------------------------------------------------------------------------ columns of a row


def tools_of(value: Any) -> list[Any]:
    """The tools in the field `tools` of a row. Raises ChatError.

    `value`: the value of the field, which is a list of objects, or the JSON of such a list.
    """
    tools = _unpacked("tools", value)
    if not tools:
        return []
    if not isinstance(tools, list | tuple):
        raise ChatError(f"'tools' must be a list of objects, or its JSON, not {tools!r:.200}")
    checked_tools = []
    for packed_tool in tools:
        tool = _unpacked("tools", packed_tool)  # each tool in the list may be JSON
        function = None
        if isinstance(tool, Mapping):
            function = tool.get("function", tool)  # some clients write the function in the place of the tool
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ChatError(
                f"each of 'tools' is an object with the name of its function, not {tool!r:.200}: if the column is not "
                "for the chat template, rename it"
            )
        checked_tools.append(tool)
    return checked_tools


def template_of(value: Any) -> dict[str, Any]:
    """The arguments of the template in the field `chat_template_kwargs` of a row. Raises ChatError.

    `value`: the value of the field, which is an object, or the JSON of an object.
    """
    arguments = _unpacked("chat_template_kwargs", value) or {}
    if not isinstance(arguments, Mapping):
        raise ChatError(f"'chat_template_kwargs' must be an object, or its JSON, not {arguments!r:.200}")
    for name in arguments:
        if name in _OURS:
            raise ChatError(f"'chat_template_kwargs' has {name!r}, which follows from the messages: leave it out")
    return {str(name): argument for name, argument in arguments.items()}


def _unpacked(name: str, value: Any) -> Any:
    """Parses the value of the field `name` if the value is a text, and returns any other value as it is.

    Some fields are stored as JSON, because Arrow has no type for their values. Returns None for a blank text. Raises
    ChatError for a text that is no JSON.
    """
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
