"""What all dialects read and write in the same way: fields that are refused, texts, calls, tools, errors.

Equal conversations give equal messages, whichever way a client repeats an answer: no content, an empty one, or parts;
arguments as JSON or as an object. A body of another form raises whatever it comes to, and the endpoint refuses it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replay_generator.notices import say_once
from replay_generator.rollouts.sessions.turns import Ask, Refusal, object_of

MODEL = "policy"
"""The name of the policy."""
DRAWN = "leave it out, since tokens are drawn as the generator is configured"
FREE = "leave it out and ask in words, since nothing forces a form on what the policy writes"
WHOLE = "send the whole conversation instead, since nothing is stored"
LOGPROBS_STORED = "leave it out, since the generator keeps the log-probabilities itself"
MOST = 4096
"""Messages, tools, and texts of `stop` in a request."""
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
"""Fields without which an answer, or its log-probabilities, would be another, by what their client can do.

All others are ignored: they change no token."""
_NEUTRAL: tuple[Any, ...] = (False, [], {}, ["text"], {"type": "text"})
"""Values that ask for nothing. 0 is False."""
_ONE = ("n", "best_of", "repetition_penalty", "length_penalty")
"""Fields that ask for nothing where they are 1. True is 1."""
_EVEN_ZERO = ("prompt_logprobs", "truncate_prompt_tokens")
"""Fields that ask for something with 0 too."""
_TRUE = ("skip_special_tokens", "add_generation_prompt")
"""Fields that ask for nothing where they are true."""
_TOOLS = ("web_search_options", "mcp_servers", "container")
"""Fields with tools that the provider runs."""
_NO_TOOL = ("none", {"type": "none"})
_ROLES = {"system": "system", "developer": "system", "user": "user"}


def refused(name: str, value: object, remedy: str) -> Refusal:
    return Refusal(f"{name} {reprlib.repr(value)} is not served: {remedy}", field=name)


def few(name: str, value: Any) -> Any:
    """The value. Raises Refusal if it is a list of more than MOST."""
    if isinstance(value, list | tuple) and len(value) > MOST:
        raise Refusal(f"the request has {len(value)} {name}, and at most {MOST} are served", field=name)
    return value


def check(body: Mapping[str, Any], name: str, remedy: str, neutral: Iterable[Any] = _NEUTRAL) -> None:
    """Raises Refusal if a field asks for anything."""
    if (value := body.get(name)) is not None and value not in neutral:
        raise refused(name, value, remedy)


def ask_of(body: Mapping[str, Any], **conversation: Any) -> Ask:
    """The request with this conversation. Raises Refusal for what cannot be served honestly."""
    for remedy, names in REFUSED.items():
        for name in names.split():
            neutral = _NEUTRAL
            if name in _ONE:
                neutral = (1,)
            elif name in _EVEN_ZERO:
                neutral = ()
            check(body, name, remedy, neutral)
    for name in _TRUE:
        check(body, name, DRAWN, (True,))
    for name in _TOOLS:
        if body.get(name):
            _left_out(name)
    few("messages", conversation.get("messages"))
    if not conversation.get("messages", True):
        raise Refusal("the request has no message: send one that the policy is to answer", field="messages")
    ways = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    limits = {name: body[name] for name in ways if body.get(name) is not None}
    for name, limit in limits.items():
        if type(limit) is not int or limit < 1:
            raise refused(name, limit, "send a whole number of at least 1")
    stop = few("texts of stop", body.get("stop") or body.get("stop_sequences") or ())
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stop):
        raise refused("stop", stop, "send texts of at least one character")
    sampling = {name: body[name] for name in ("temperature", "top_p", "top_k", "min_p") if body.get(name) is not None}
    model = body.get("model")
    return Ask(
        **conversation,
        max_tokens=next(iter(limits.values()), None),
        stop=stop,
        sampling=sampling,
        model=model if isinstance(model, str) else "",
    )


def kind_of(part: Mapping[str, Any], *served: str | None) -> Any:
    """The `type` of a part of a request, one of those that are served."""
    if (kind := part.get("type")) not in served:
        raise refused("type", kind, f"send {' or '.join(filter(None, served))} here")
    return kind


def text_of(content: Any) -> str:
    """A text, or the texts of parts, joined as they are; "" for None."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content if kind_of(part, "text", "input_text", "output_text"))


def input_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of the user, or of the system."""
    if (role := message["role"]) not in _ROLES:
        raise refused("role", role, f"send {', '.join(_ROLES)}, or one of those that answer")
    return {"role": _ROLES[role], "content": text_of(message["content"])}


def answered(id: Any, content: Any) -> dict[str, Any]:
    """A message of a tool. `id`: of the call. Raises Refusal if it is no text."""
    return {"role": "tool", "tool_call_id": _id_of(id), "content": text_of(content)}


def _id_of(id: Any) -> str:
    if not isinstance(id, str):
        raise refused("the id of a call", id, "send the text that the call was answered with")
    return id


def assistant_message(text: str | None, thoughts: str | None = "", calls: Sequence[Any] = ()) -> dict[str, Any]:
    """A message of the policy. Raises Refusal for thoughts that are no text."""
    if not isinstance(thoughts, str | None):
        raise refused("reasoning_content", thoughts, "send the thoughts as the text that they were answered with")
    message = {"role": "assistant", "content": text, "reasoning_content": thoughts, "tool_calls": calls}
    return {name: value for name, value in message.items() if value or name == "content"}


def call_of(id: Any, function: Mapping[str, Any]) -> dict[str, Any]:
    """A call of the policy. Its arguments are an object, its JSON, or the text that the policy wrote in its place.

    Raises Refusal for an id or a name that is no text.
    """
    name = function["name"]
    if not isinstance(name, str):
        raise refused("the name of a call", name, "send the text that the call was answered with")
    value = function.get("arguments", function.get("input"))
    if value is None or value == "":
        value = {}
    if not isinstance(value, dict | str):
        raise refused("arguments", value, "send those of a call as they were answered")
    arguments = value
    if isinstance(value, str):
        found = object_of(value)
        arguments = value if found is None else found
    return {"id": _id_of(id), "type": "function", "function": {"name": name, "arguments": arguments}}


def tools_of(body: Mapping[str, Any], *kinds: str | None) -> list[dict[str, Any]]:
    """The tools of a request; none if it says that none may be called.

    Nobody can promise that arguments keep to their schema (`strict`), or that the policy calls one at a time: it writes
    what it writes. The template gets tools in the form that `vllm serve` gives it. Tools of other kinds than `kinds`
    are left out: no template can tell them to the policy.
    """
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        choice = {name: value for name, value in choice.items() if name != "disable_parallel_tool_use"}
    check({"tool_choice": choice}, "tool_choice", FREE, ("auto", {"type": "auto"}, *_NO_TOOL))
    tools = []
    for tool in few("tools", body.get("tools") or ()):
        if tool.get("type") not in kinds:
            _left_out(f"a tool of the kind {tool['type']!r:.80}")
            continue
        about = tool.get("function", tool)
        if not isinstance(about["name"], str):
            raise refused("the name of a tool", about["name"], "send a text")
        function = {
            "name": about["name"],
            "description": about.get("description"),
            "parameters": about.get("parameters", about.get("input_schema")),
        }
        for name in ("strict", "defer_loading"):
            value = about.get(name, tool.get(name))
            if value is not None:
                function[name] = value
        tools.append({"type": "function", "function": function})
    return [] if choice in _NO_TOOL else tools


def _left_out(what: str) -> None:
    say_once(f"an agent sends {what}, which the policy is not told: no chat template has a form for it")


def error_of(refusal: Refusal) -> dict[str, Any]:
    """An error as OpenAI has it. Anthropic reads its type and its message."""
    kinds = {404: "not_found_error", 413: "request_too_large", 422: "api_error", 429: "rate_limit_error"}
    kind = kinds.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"message": str(refusal), "type": kind, "param": None, "code": refusal.code}
