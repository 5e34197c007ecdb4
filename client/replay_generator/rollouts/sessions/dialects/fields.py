"""Fields: the parts of a body that all dialects read and write in the same way.

These parts are the texts, the calls, the tools, the errors, and the fields that are refused. A client that sends an
earlier answer back may write the answer in several ways. The content may be missing, empty, or a list of parts, and the
arguments of calls may be JSON or objects. The functions here make equal messages of all these ways. They expect a body
of the right form. For any other body they may raise any error, and the endpoint then refuses the request.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replay_generator.notices import say_once
from replay_generator.rollouts.sessions.turns import Ask, Refusal, object_of

MODEL = "policy"
"""The name of the policy as a model."""
# The remedies that refusals give to the author of a client.
DRAWN = "leave it out, since tokens are drawn as the generator is configured"
"""The remedy for a field that changes how tokens are drawn, or what the policy reads."""
FREE = "leave it out and ask in words, since nothing forces a form on what the policy writes"
"""The remedy for a field that forces a form on the answer."""
WHOLE = "send the whole conversation instead, since nothing is stored"
"""The remedy for a field that refers to something that the server would have to store."""
LOGPROBS_STORED = "leave it out, since the generator keeps the log-probabilities itself"
"""The remedy for a field that asks for log-probabilities, or for tokens."""
MOST = 4096
"""The most messages in a request, and also the most tools, and the most texts of `stop`."""
REFUSED = {
    "leave it out, and ask once more for another turn": "n best_of",
    DRAWN: "presence_penalty frequency_penalty repetition_penalty length_penalty logit_bias min_tokens "
    "ignore_eos stop_token_ids bad_words allowed_token_ids use_beam_search suffix echo chat_template "
    "chat_template_kwargs documents continue_final_message logits_processors thinking_token_budget "
    "truncate_prompt_tokens prompt_embeds include_stop_str_in_output",
    LOGPROBS_STORED: (
        "logprobs top_logprobs prompt_logprobs return_token_ids return_tokens_as_token_ids return_prompt_text"
    ),
    FREE: "response_format output_format structured_outputs guided_json guided_regex guided_choice guided_grammar",
    WHOLE: "previous_response_id conversation background",
    "send tools and tool_choice instead": "functions function_call",
    "leave it out, since the policy writes text": "modalities",
}
"""Fields that are refused, because they would change an answer or its log-probabilities. The key is the remedy in the
refusal. The value has the names of the fields, with spaces between them.

All fields that are neither in this list nor read elsewhere are ignored, because they change no token."""
_NEUTRAL: tuple[Any, ...] = (False, [], {}, ["text"], {"type": "text"})
"""The neutral values of most fields: a field with such a value asks for nothing, and is not refused. 0 is neutral too,
because it equals False."""
_NEUTRAL_ONE = ("n", "best_of", "repetition_penalty", "length_penalty")
"""Fields whose only neutral value is 1. True is neutral too, because it equals 1."""
_NEVER_NEUTRAL = ("prompt_logprobs", "truncate_prompt_tokens")
"""Fields without a neutral value: even 0 asks for something."""
_NEUTRAL_TRUE = ("skip_special_tokens", "add_generation_prompt")
"""Fields whose only neutral value is true."""
_PROVIDER_TOOLS = ("web_search_options", "mcp_servers", "container")
"""Fields for tools that a provider would run itself. These tools are left out, with a notice in the log."""
_NO_TOOL = ("none", {"type": "none"})
"""The values of `tool_choice` that forbid calls."""
_ROLES = {"system": "system", "developer": "system", "user": "user"}
"""The roles of messages that are neither of the policy nor of a tool. The key is the role in the request, and the value
is the role that the chat template gets."""


def refused(name: str, value: object, remedy: str) -> Refusal:
    """The refusal of a field. `remedy`: what the author of the client can do."""
    return Refusal(f"{name} {reprlib.repr(value)} is not served: {remedy}", field=name)


def few(name: str, value: Any) -> Any:
    """Returns the value unchanged. Raises Refusal if the value is a list of more than MOST elements. `name`: the name
    of the elements in the error message."""
    if isinstance(value, list | tuple) and len(value) > MOST:
        raise Refusal(f"the request has {len(value)} {name}, and at most {MOST} are served", field=name)
    return value


def check(body: Mapping[str, Any], name: str, remedy: str, neutral: Iterable[Any] = _NEUTRAL) -> None:
    """Raises Refusal if the body has a field whose value is not in `neutral`. `remedy`: what the author of the client
    can do."""
    value = body.get(name)
    if value is not None and value not in neutral:
        raise refused(name, value, remedy)


def ask_of(body: Mapping[str, Any], **conversation: Any) -> Ask:
    """The request as an Ask. `conversation`: the fields of the Ask that differ between dialects.

    Raises Refusal for a field that asks for something that the server does not do.
    """
    _check_all(body)
    # The dialects have checked the number of messages already, but some make several messages of one.
    few("messages", conversation.get("messages"))
    # A request of Completions has a prompt in the place of messages.
    has_empty_list = "messages" in conversation and not conversation["messages"]
    if has_empty_list:
        raise Refusal("the request has no message: send one that the policy is to answer", field="messages")
    max_tokens = _max_tokens_of(body)
    stop = _stop_of(body)
    sampling = {}
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if body.get(name) is not None:
            sampling[name] = body[name]
    model = body.get("model")
    if not isinstance(model, str):
        model = ""
    return Ask(**conversation, max_tokens=max_tokens, stop=stop, sampling=sampling, model=model)


def _check_all(body: Mapping[str, Any]) -> None:
    """Raises Refusal if any field in REFUSED, or in _NEUTRAL_TRUE, has a value that is not neutral. Logs that fields
    in _PROVIDER_TOOLS are left out."""
    for remedy, names in REFUSED.items():
        for name in names.split():
            neutral = _NEUTRAL
            if name in _NEUTRAL_ONE:
                neutral = (1,)
            elif name in _NEVER_NEUTRAL:
                neutral = ()
            check(body, name, remedy, neutral)
    for name in _NEUTRAL_TRUE:
        check(body, name, DRAWN, neutral=(True,))
    for name in _PROVIDER_TOOLS:
        if body.get(name):
            _left_out(name)


def _max_tokens_of(body: Mapping[str, Any]) -> int | None:
    """The most tokens of a turn; None: the request has no limit. Raises Refusal for a value that is no such number."""
    max_tokens: int | None = None
    for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        value = body.get(name)
        if value is None:
            continue
        is_count = type(value) is int and value >= 1  # True is no count, although it is an int
        if not is_count:
            raise refused(name, value, "send a whole number of at least 1")
        if max_tokens is None:  # the first of these fields counts
            max_tokens = value
    return max_tokens


def _stop_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts that end a turn. Raises Refusal for a value that is no text, and for an empty text."""
    stop = body.get("stop") or body.get("stop_sequences") or ()  # OpenAI's name of the field, and Anthropic's
    few("texts of stop", stop)
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in texts):
        raise refused("stop", texts, "send texts of at least one character")
    return texts


def kind_of(part: Mapping[str, Any], *served: str | None) -> Any:
    """The `type` of a part of a request. Raises Refusal for a type that is not in `served`. None in `served`: the part
    may have no type."""
    kind = part.get("type")
    if kind not in served:
        choices = " or ".join(name for name in served if name)
        raise refused("type", kind, f"send {choices} here")
    return kind


def text_of(content: Any) -> str:
    """The text of a message. `content`: the text, or a list of parts, or None. The texts of parts are joined without a
    separator, and None becomes "". Raises Refusal for a part that is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        kind_of(part, "text", "input_text", "output_text")
        texts.append(part["text"])
    return "".join(texts)


def input_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of the user, or of the system, in the form of `Ask.messages`. Raises Refusal for any other role."""
    role = message["role"]
    if role not in _ROLES:
        raise refused("role", role, f"send {', '.join(_ROLES)}, or one of those that answer")
    return {"role": _ROLES[role], "content": text_of(message["content"])}


def answered(id: Any, content: Any) -> dict[str, Any]:
    """A message of a tool, in the form of `Ask.messages`. `id`: the id of the call that the tool answers. Raises
    Refusal if the id is no text."""
    return {"role": "tool", "tool_call_id": _id_of(id), "content": text_of(content)}


def _id_of(id: Any) -> str:
    """The id of a call. Raises Refusal if the id is no text."""
    if not isinstance(id, str):
        raise refused("the id of a call", id, "send the text that the call was answered with")
    return id


def assistant_message(text: str | None, thoughts: str | None = "", calls: Sequence[Any] = ()) -> dict[str, Any]:
    """A message of the policy, in the form of `Ask.messages`. `calls`: the results of `call_of`. Raises Refusal for
    thoughts that are no text."""
    if not isinstance(thoughts, str | None):
        raise refused("reasoning_content", thoughts, "send the thoughts as the text that they were answered with")
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def call_of(id: Any, function: Mapping[str, Any]) -> dict[str, Any]:
    """A call in a turn of the policy that a client sends back. `function`: an object with the name and the arguments.

    The client sends the arguments as an object, as the JSON of an object, or as the text that the policy wrote in the
    place of an object. JSON of an object becomes the object. Raises Refusal for an id or a name that is no text, and
    for arguments of any other type.
    """
    name = function["name"]
    if not isinstance(name, str):
        raise refused("the name of a call", name, "send the text that the call was answered with")
    arguments = function.get("arguments", function.get("input"))  # OpenAI's name of the field, and Anthropic's
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, dict | str):
        raise refused("arguments", arguments, "send those of a call as they were answered")
    if isinstance(arguments, str):
        parsed = object_of(arguments)
        if parsed is not None:  # otherwise the text stays, as the policy wrote it
            arguments = parsed
    return {"id": _id_of(id), "type": "function", "function": {"name": name, "arguments": arguments}}


def tools_of(body: Mapping[str, Any], *kinds: str | None) -> list[dict[str, Any]]:
    """The tools of a request, in the form that `vllm serve` gives to the chat template. The list is empty if the
    request says that no tool may be called.

    `kinds`: the values of `type` that are served; None: a tool may have no type. Tools of other kinds are left out,
    because no chat template has a form for them. A request may ask that arguments match their schema (`strict`), or
    that the policy calls one tool at a time. Such a request is served, but without a guarantee, because nothing forces
    the policy to write such calls. Raises Refusal for a `tool_choice` that forces a call, and for a name that is no
    text.
    """
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        # This field asks for one call at a time. The server cannot guarantee this, but serves the request.
        choice = {name: value for name, value in choice.items() if name != "disable_parallel_tool_use"}
    check({"tool_choice": choice}, "tool_choice", FREE, neutral=("auto", {"type": "auto"}, *_NO_TOOL))
    tools = []
    for tool in few("tools", body.get("tools") or ()):
        if tool.get("type") not in kinds:
            # A tool without a type raises KeyError here, and the endpoint refuses the request.
            _left_out(f"a tool of the kind {tool['type']!r:.80}")
            continue
        sent = tool.get("function", tool)  # Chat has the fields in `function`, the other protocols in the tool itself
        if not isinstance(sent["name"], str):
            raise refused("the name of a tool", sent["name"], "send a text")
        function = {
            "name": sent["name"],
            "description": sent.get("description"),
            "parameters": sent.get("parameters", sent.get("input_schema")),
        }
        for name in ("strict", "defer_loading"):  # clients send these fields beside `name`, or beside `function`
            value = sent.get(name, tool.get(name))
            if value is not None:
                function[name] = value
        tools.append({"type": "function", "function": function})
    if choice in _NO_TOOL:  # checked after the loop, so that tools of a wrong form are refused all the same
        return []
    return tools


def _left_out(what: str) -> None:
    """Logs once that the policy is not told of something that an agent has sent."""
    say_once(f"an agent sends {what}, which the policy is not told: no chat template has a form for it")


def error_of(refusal: Refusal) -> dict[str, Any]:
    """The error of a refusal in OpenAI's form. Anthropic's clients, too, find `type` and `message` in this form.

    `type` names the kind of error that clients expect with the HTTP status.
    """
    kinds = {404: "not_found_error", 413: "request_too_large", 422: "api_error", 429: "rate_limit_error"}
    if refusal.status in kinds:
        kind = kinds[refusal.status]
    elif refusal.status < 500:
        kind = "invalid_request_error"
    else:
        kind = "api_error"
    return {"message": str(refusal), "type": kind, "param": None, "code": refusal.code}
