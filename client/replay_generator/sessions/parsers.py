"""Parsers: which part of a turn are thoughts, which are calls of tools, and which is text, by vLLM's own parsers.

Each family of models writes calls and thoughts in a format of its own. vLLM has a parser for each, by the names that
`vllm serve --tool-call-parser` and `--reasoning-parser` take; whoever serves the model later uses the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from replay_generator.engines import Completion, text_of
from replay_generator.sessions.turns import WrittenCall


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
    ) -> tuple[str, str, list[WrittenCall]]:
        """The thoughts, the text and the calls of a turn up to the text that stopped it. `arguments`: of the chat
        template."""
        text, ids = completion.text, completion.token_ids
        if self._kind is None:
            return "", _up_to(stopped_by, text), []
        request = self._request(
            model="", messages=[], tools=list(tools) or None, chat_template_kwargs=dict(arguments) or None
        )
        parser = self._kind(tokenizer, request.tools, chat_template_kwargs=dict(arguments))
        if not parser.adjust_request(request).skip_special_tokens:  # some formats consist of them
            ended = completion.finish_reason == "stop" and ids[-1] in tokenizer.all_special_ids
            text = text_of(tokenizer, ids[: len(ids) - ended], skip_special_tokens=False)
        thoughts, said, calls = parser.parse(_up_to(stopped_by, text), request, bool(tools), ids)
        named = [
            WrittenCall(each.id or f"call_{secrets.token_hex(12)}", each.name, each.arguments) for each in calls or ()
        ]
        return thoughts or "", said or "", named


def _up_to(end: str | None, text: str) -> str:
    return text if end is None else text.partition(end)[0]
