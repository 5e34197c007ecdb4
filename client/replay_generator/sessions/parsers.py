"""Parsers: which part of a turn are thoughts, which are calls of tools, and which is text, by vLLM's own parsers.

Each family of models writes calls and thoughts in a format of its own. vLLM has a parser for each, by the names that
`vllm serve --tool-call-parser` and `--reasoning-parser` take; whoever serves the model later uses the same.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from replay_generator.engines import Completion, text_of
from replay_generator.sessions.turns import WrittenCall, whole_text

logger = logging.getLogger(__name__)


class Parsers:
    """The parsers of one model, for all its sessions."""

    def __init__(self, tool_parser: str | None = None, reasoning_parser: str | None = None) -> None:
        """Raises ValueError for a name that vLLM does not know, and if vLLM is not installed. Without names every turn
        is text."""
        self.knows_tools = tool_parser is not None
        self._kind: Any = None
        if not (tool_parser or reasoning_parser):
            return
        try:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.parser import ParserManager
            from vllm.reasoning import ReasoningParserManager
            from vllm.tool_parsers import ToolParserManager
        except ImportError as missing:
            raise ValueError(f"tool_parser and reasoning_parser name parsers of vLLM 0.32: {missing}") from missing
        for option, name, known in (
            ("tool_parser", tool_parser, ToolParserManager.list_registered()),
            ("reasoning_parser", reasoning_parser, ReasoningParserManager.list_registered()),
        ):
            if name is not None and name not in known:
                raise ValueError(f"{option} {name!r} is none of vLLM's: {', '.join(known)}")
        self._request = ChatCompletionRequest
        self._kind = ParserManager.get_parser(tool_parser, reasoning_parser, True)

    def parse(
        self,
        tokenizer: Any,
        completion: Completion,
        stopped_by: str | None,
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        *,
        objects_only: bool = False,
    ) -> tuple[str, str, list[WrittenCall]]:
        """The thoughts, the text and the calls of a turn up to the text that stopped it. `arguments`: of the chat
        template. `objects_only`: see Ask.

        A policy may write anything. A turn at which the parser fails is a text, as it is written.
        """
        if self._kind is None:
            return "", _up_to(stopped_by, completion.text), []
        request = self._request(
            model="", messages=[], tools=list(tools) or None, chat_template_kwargs=dict(arguments) or None
        )
        parser = self._kind(tokenizer, request.tools, chat_template_kwargs=dict(arguments))
        text, ids = completion.text, completion.token_ids
        if not parser.adjust_request(request).skip_special_tokens:  # some formats consist of them
            ended = completion.finish_reason == "stop" and ids[-1] in tokenizer.all_special_ids
            text = text_of(tokenizer, ids[: len(ids) - ended], skip_special_tokens=False)
        text = _up_to(stopped_by, text)
        if tools:
            try:
                thoughts, said, written = _parsed(parser, text, request, ids, with_calls=True)
            except Exception as error:  # of the parser of some model
                logger.debug("a turn of the policy is a text: its parser fails: %s: %s", type(error).__name__, error)
            else:
                if not objects_only or all(call.object is not None for call in written):
                    return thoughts, said, written
        try:
            thoughts, said, _ = _parsed(parser, text, request, ids, with_calls=False)
        except Exception as error:
            logger.debug("a turn of the policy is a text: its parser fails: %s: %s", type(error).__name__, error)
            return "", whole_text(text), []
        return thoughts, said, []


def _parsed(
    parser: Any, text: str, request: Any, ids: Sequence[int], *, with_calls: bool
) -> tuple[str, str, list[WrittenCall]]:
    """The thoughts, the text and the calls that vLLM's parser finds. Raises whatever the parser does."""
    thoughts, said, found = parser.parse(text, request, with_calls, ids)
    calls = []
    for call in found or ():
        id = call.id or f"call_{secrets.token_hex(12)}"
        calls.append(WrittenCall(whole_text(id), whole_text(call.name), whole_text(call.arguments)))
    return whole_text(thoughts or ""), whole_text(said or ""), calls


def _up_to(end: str | None, text: str) -> str:
    return text if end is None else text.partition(end)[0]
