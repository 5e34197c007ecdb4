"""Parsers: divides a turn into thoughts, tool calls and text, by vLLM's own parsers.

Each family of models writes calls and thoughts in a format of its own. vLLM has a parser for each format. The names of
the parsers are those that `vllm serve --tool-call-parser` and `--reasoning-parser` take, so that `vllm serve` can later
serve the trained model with the same parsers.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replay_generator.engines import Completion, text_of
from replay_generator.rollouts.sessions.turns import Refusal, WrittenCall, whole_text

logger = logging.getLogger(__name__)

_HARMONY = ("openai", "openai_gptoss")
"""The names of vLLM's parsers for gpt-oss. These are refused, because no chat template continues a conversation of
gpt-oss."""


class Parsers:
    """The parsers of one model, for all its sessions."""

    def __init__(self, tool_parser: str | None = None, reasoning_parser: str | None = None) -> None:
        """`tool_parser`, `reasoning_parser`: names of vLLM's parsers. Without both names, every turn is only text.
        Raises ValueError for a name that vLLM does not know, and if a name is given but vLLM is not installed."""
        self.knows_tools = tool_parser is not None
        """True if requests may have tools."""
        self._kind: Any = None
        """The class of vLLM's parser; None: every turn is only text."""
        if not (tool_parser or reasoning_parser):  # then vLLM need not be installed
            return
        try:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.parser import ParserManager
            from vllm.reasoning import ReasoningParserManager
            from vllm.tool_parsers import ToolParserManager
        except ImportError as missing:
            raise ValueError(f"tool_parser and reasoning_parser name parsers of vLLM 0.32: {missing}") from missing
        _check_parser("tool_parser", tool_parser, ToolParserManager.list_registered())
        _check_parser("reasoning_parser", reasoning_parser, ReasoningParserManager.list_registered())
        self._request = ChatCompletionRequest
        """The class of the requests that vLLM's parser takes."""
        enable_auto_tools = True  # the policy decides whether it calls tools
        self._kind = ParserManager.get_parser(tool_parser, reasoning_parser, enable_auto_tools)

    def ready(
        self, tokenizer: Any, prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]], template: Mapping[str, Any]
    ) -> TurnParser:
        """The parser for the next turn. `prompt_ids`: the tokens that the policy reads before this turn. `tools`: the
        tools of the request. `template`: the arguments of the chat template. Raises Refusal if the parser cannot use
        the tools or the tokenizer."""
        if self._kind is None:
            return TurnParser(tokenizer)
        try:
            # The parser reads only the tools and the template arguments of this request.
            request = self._request(
                model="", messages=[], tools=list(tools) or None, chat_template_kwargs=dict(template) or None
            )
        except ValueError as error:
            why = f"{type(error).__name__}: {error}"
            raise Refusal(f"the tools are none that the parser can read: {why}", field="tools") from error
        try:
            parser = self._kind(tokenizer, request.tools, chat_template_kwargs=dict(template))
            parser.set_prompt_token_ids(list(prompt_ids))  # the thoughts may begin at the end of the prompt
            # `skip_special_tokens` of the result is False if the parser needs special tokens in the text.
            adjusted = parser.adjust_request(request)
        except Exception as error:  # each parser raises errors of its own if the tokenizer lacks something
            raise Refusal(
                f"the parser that the generator names does not fit the tokenizer: {type(error).__name__}: {error}: "
                "start the generator with the --tool-parser and the --reasoning-parser of its model",
                field="parser",
            ) from error
        return TurnParser(
            tokenizer,
            parser,
            request,
            has_tools=bool(tools),
            skips_special_tokens=adjusted.skip_special_tokens,
        )


def _check_parser(option: str, name: str | None, known: Sequence[str]) -> None:
    """Raises ValueError for a parser that cannot be used. `option`: the setting that names the parser. `name`: the name
    of the parser; None: the setting is not set. `known`: the names of vLLM's parsers."""
    if name is not None and name not in known:
        raise ValueError(f"{option} {name!r} is none of vLLM's: {', '.join(known)}")
    if name in _HARMONY:
        raise ValueError(
            f"{option} {name!r} is not served: the turns of gpt-oss are messages of Harmony, which no chat "
            "template goes on after: train an agent of another model"
        )


@dataclass(frozen=True)
class TurnParser:
    """The parser of one turn."""

    tokenizer: Any
    parser: Any = None
    """vLLM's parser; None: every turn is only text."""
    request: Any = None
    """The request in vLLM's form, which the parser wants with each turn."""
    has_tools: bool = False
    """True if the request has tools. Otherwise no calls are parsed."""
    skips_special_tokens: bool = True
    """False: the parser needs the special tokens in the text, because its format consists of them."""

    def parse(
        self, completion: Completion, stopped_by: str | None, *, objects_only: bool = False
    ) -> tuple[str, str, list[WrittenCall]]:
        """The thoughts, the text and the calls of a turn, in this order.

        `stopped_by`: the text of `Ask.stop` that ended the turn. This text, and all that stands behind it, is left out.
        None: there is no such text. `objects_only` True: if the arguments of any call are no object, all calls stay
        part of the text. The parser may fail, because the policy may write anything. Then the result is the whole turn
        as text.
        """
        if self.parser is None:
            return "", _up_to(stopped_by, completion.text), []
        text = _up_to(stopped_by, self._text_of(completion))
        ids = completion.token_ids
        if self.has_tools:
            try:
                thoughts, content, calls = _parsed(self.parser, text, self.request, ids, with_calls=True)
            except Exception as error:  # each parser raises errors of its own
                logger.debug("a turn of the policy is a text: its parser fails: %s: %s", type(error).__name__, error)
            else:  # the parser has not failed
                if not objects_only or all(call.object is not None for call in calls):
                    return thoughts, content, calls
        # The request has no tools, or the calls cannot be used. So calls stay part of the text, and only thoughts are
        # parsed.
        try:
            thoughts, content, _ = _parsed(self.parser, text, self.request, ids, with_calls=False)
        except Exception as error:
            logger.debug("a turn of the policy is a text: its parser fails: %s: %s", type(error).__name__, error)
            return "", whole_text(text), []
        return thoughts, content, []

    def _text_of(self, completion: Completion) -> str:
        """The text of a completion in the form that the parser wants: with or without special tokens."""
        if self.skips_special_tokens:
            return completion.text
        ids = completion.token_ids
        has_end = completion.finish_reason == "stop" and ids[-1] in self.tokenizer.all_special_ids
        if has_end:
            ids = ids[:-1]  # the token that ends the turn is no part of its text
        return text_of(self.tokenizer, ids, skip_special_tokens=False)


def _parsed(
    parser: Any, text: str, request: Any, ids: Sequence[int], *, with_calls: bool
) -> tuple[str, str, list[WrittenCall]]:
    """The thoughts, the text and the calls that vLLM's parser finds, in this order. `text` and `ids`: the turn as text
    and as tokens. `with_calls` False: no calls are parsed. Raises any error of the parser."""
    thoughts, content, parsed_calls = parser.parse(text, request, with_calls, ids)
    calls = []
    for call in parsed_calls or ():
        id = call.id or f"call_{secrets.token_hex(12)}"  # most models write no ids of calls
        # `whole_text` replaces halves of surrogate pairs, which no answer can hold.
        calls.append(WrittenCall(whole_text(id), whole_text(call.name), whole_text(call.arguments)))
    return whole_text(thoughts or ""), whole_text(content or ""), calls


def _up_to(end: str | None, text: str) -> str:
    """The text before the first place where it has `end`. `end` None: the whole text."""
    if end is None:
        return text
    return text.partition(end)[0]
