"""Tool loop: a rollout in which the policy calls Python functions, turn by turn, in the format of its chat template.

    prompt with the tools ──▶ the policy writes ──▶ no call: the rollout ends
                                   ▲                  a call ──▶ the function ──▶ its answer, as a turn of the tool
                                   └──────────────────────────────────────────────────────┘

What the policy wrote stays as the ids that it drew. Only what stands between two of its turns is made of text: the
template renders the conversation with a mark in the place of each turn of the policy, and what follows the last mark
is tokenized by itself.

Some templates render earlier turns differently later, for example without their thoughts. Whoever uses the model by
such a template lets it read something else than what it would be trained on. So each rendering, with the marks and
with the words of the policy, has to begin with the one before. If it does not, the rollout fails and says so. White
space in the words may differ: templates trim it, and the tokens are those of the policy anyway.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replay_client.waits import in_daemon_thread
from replay_generator.rollouts import Rollout, RolloutError, RolloutHook, RolloutPolicy, RolloutSequence, Task

_THINKS, _THOUGHT = "<think>", "</think>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call that the policy wrote."""

    name: str
    arguments: Mapping[str, Any]


def json_calls(text: str) -> list[ToolCall]:
    """The calls of a turn in the format of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Raises ValueError for a call that is not in this format; the policy gets its message as the answer of the tool.
    """
    calls = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f'not a call: {body:.200}; write {{"name": ..., "arguments": {{...}}}}') from None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError(f"not a call: {body:.200}; the name is a string, and the arguments are an object")
        calls.append(ToolCall(name, arguments))
    return calls


def tool_loop(
    tools: Sequence[Callable[..., Any]],
    *,
    max_turns: int = 8,
    parse: Callable[[str], Sequence[ToolCall]] = json_calls,
) -> RolloutHook:
    """A hook for the generator in which the policy may call `tools`, until it writes a turn without a call.

    The tools are Python functions with types and a docstring, as `transformers` wants them for its chat templates; the
    async ones are awaited, the others run in a thread. What a tool raises goes back to the policy as its answer. After
    `max_turns` turns of the policy the rollout ends with the reason "turns". `parse` finds the calls in a turn; the
    ValueError that it raises goes back to the policy too. `Rollout.info["calls"]` has all calls, in order.

    The prompts must consist of messages, and the tokenizer needs a chat template.
    """
    by_name = {tool.__name__: tool for tool in tools}
    if len(by_name) < len(tools):
        raise ValueError(f"tools need names of their own, not {', '.join(tool.__name__ for tool in tools)}")
    if max_turns < 1:
        raise ValueError(f"max_turns must be at least 1, not {max_turns}")

    async def play(task: Task, policy: RolloutPolicy) -> Rollout:
        conversation = _Conversation(task, list(tools))
        sequence, calls = RolloutSequence(conversation.begin()), []
        for turn in range(1, max_turns + 1):
            said = sequence.sampled(await policy.generate(sequence.token_ids))
            if sequence.finish_reason != "stop":
                break
            try:
                wanted = list(parse(said.text))
                answers = [await _answer(by_name, call) for call in wanted]
                calls += wanted
                if not wanted:
                    break
            except ValueError as error:
                answers = [f"error: {error}"]
            if turn == max_turns:
                return Rollout([sequence], finish_reason="turns", info={"calls": calls})
            sequence.given(conversation.answer(said.text, answers, sequence.token_ids[-1]), text="\n".join(answers))
            if len(sequence.token_ids) >= task.max_length:
                return Rollout([sequence], finish_reason="length", info={"calls": calls})
        return Rollout([sequence], info={"calls": calls})

    return play


async def _answer(tools: Mapping[str, Callable[..., Any]], call: ToolCall) -> str:
    """What the tool returns, as text; or, in words, why it does not."""
    if (tool := tools.get(call.name)) is None:
        return f"error: there is no tool {call.name!r:.80}; there are {', '.join(tools)}"
    try:
        if inspect.iscoroutinefunction(tool):
            answer = await tool(**call.arguments)
        else:
            answer = await in_daemon_thread(lambda: tool(**call.arguments))
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
    return answer if isinstance(answer, str) else json.dumps(answer, default=str)


class _Conversation:
    """The messages of one rollout as the chat template renders them."""

    def __init__(self, task: Task, tools: list[Callable[..., Any]]) -> None:
        if task.messages is None or not getattr(task.tokenizer, "chat_template", None):
            raise RolloutError("a tool loop needs prompts of messages (--chat), and a chat template that knows tools")
        if task.messages[-1]["role"] == "assistant":
            raise RolloutError("the prompt ends with words of the assistant: end it with a message of the user")
        self._task, self._tools = task, tools
        self._said: list[Mapping[str, Any]] = list(task.messages)
        """The conversation with what the policy wrote."""
        self._marked: list[Mapping[str, Any]] = list(task.messages)
        """The same with a mark in the place of each of its turns."""
        self._rendered = ""
        """What all renderings of `_marked` from now on begin with."""

    def begin(self) -> list[int]:
        """The tokens before the first turn of the policy."""
        self._rendered = self._render(self._marked)
        return self._tokens(self._rendered)

    def answer(self, said: str, answers: Sequence[str], last_token: int) -> list[int]:
        """The tokens between a turn of the policy, which is `said` and ended with `last_token`, and its next one."""
        first, place = len(self._said) == len(self._task.messages or ()), f"{len(self._said)}-{id(self)}"
        given = [{"role": "tool", "content": answer} for answer in answers]
        read = _without_space(self._render(self._said) + said)
        # No text has these marks by chance, and no template changes them. Some move thoughts, so they have a mark too.
        mark = f"[turn-{place}]"
        if _THOUGHT in said:
            mark = f"{_THINKS * (_THINKS in said)}\n[thought-{place}]\n{_THOUGHT}\n\n{mark}".lstrip("\n")
        turn = {"role": "assistant", "content": mark}
        if first and f"[answer-{place}]" not in self._render(
            [*self._marked, turn, {"role": "tool", "content": f"[answer-{place}]"}]
        ):
            raise RolloutError("the chat template leaves out the answer of a tool: use one that knows the role tool")
        self._said += [{"role": "assistant", "content": said}, *given]
        self._marked += [turn, *given]
        text, begins = self._render(self._marked), self._rendered + mark
        if not text.startswith(begins):
            raise RolloutError(
                "the chat template renders earlier turns differently after an answer of a tool, so the policy would "
                "read what it never wrote: use a template that keeps all turns as they are"
            )
        if not _without_space(self._render(self._said)).startswith(read):
            raise RolloutError(
                "the chat template leaves out or changes what the policy wrote in an earlier turn, for example its "
                "thoughts: use a template that keeps all turns as they are, or a hook of your own that begins a new "
                "RolloutSequence for each turn"
            )
        self._rendered = text
        # The template ends the turn of the policy as the policy has ended it.
        ending = self._task.tokenizer.decode([last_token])
        return self._tokens(text.removeprefix(begins).removeprefix(ending))

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return str(
            self._task.tokenizer.apply_chat_template(
                messages,
                tools=self._tools or None,
                add_generation_prompt=True,
                tokenize=False,
                **self._task.chat_template,
            )
        )

    def _tokens(self, text: str) -> list[int]:
        return [int(token) for token in self._task.tokenizer.encode(text, add_special_tokens=False)]


def _without_space(text: str) -> str:
    return "".join(text.split())
