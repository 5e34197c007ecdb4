"""Tool loop: a rollout in which the policy calls Python functions, turn by turn, in the format of its chat template.

    prompt with the tools ──▶ the policy writes ──▶ no call: the rollout ends
                                   ▲                  a call ──▶ the function ──▶ its answer, as a turn of the tool
                                   └──────────────────────────────────────────────────────┘

A turn of the policy stays in the sequence as the token ids that the policy drew (sessions/conversation.py). If the chat
template would render the turn as another text, the rollout fails, with an error that says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replay_generator.prompts.chat import tools_of
from replay_generator.rollouts.rollout import Rollout, RolloutError, RolloutHook, RolloutPolicy, RolloutSequence, Task
from replay_generator.rollouts.sessions.conversation import Conversation
from replay_generator.user_code import calls as user_code

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
"""One call in the text of a turn. A call at the end of the text may lack its closing tag."""


@dataclass(frozen=True)
class ToolCall:
    """One call that the policy wrote."""

    name: str
    arguments: Mapping[str, Any]


def json_calls(text: str) -> list[ToolCall]:
    """The calls of a turn in the format of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    The list is empty if the turn has no call. Raises ValueError for a call that is not in this format. The tool loop
    gives the message of this error to the policy, in the place of an answer of a tool.
    """
    calls = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
            name = call["name"]
            arguments = call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
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
    """Makes a hook for the generator: the policy may call `tools` until it writes a turn without a call.

    The tools are Python functions with types and a docstring, as `transformers` wants them for its chat templates. An
    async tool is awaited, and any other tool runs in a thread. If a tool raises an error, the policy reads the error as
    the answer of the tool. After `max_turns` turns of the policy the rollout ends with the finish reason "turns".
    `parse` finds the calls in the text of a turn. If `parse` raises ValueError, the policy reads this error as the
    answer of the tool. `Rollout.info["calls"]` has all calls, in order.

    The prompts must consist of messages, and the tokenizer needs a chat template. If the row of a prompt has `tools`,
    the policy may call only the functions that these `tools` name, and the template gets the descriptions of the
    functions from the row. If the last message of the prompt is a message of the assistant, the first turn of the
    policy continues that message.

    Raises ValueError for two tools with one name, and for a `max_turns` below 1.
    """
    by_name = {tool.__name__: tool for tool in tools}
    if len(by_name) < len(tools):
        raise ValueError(f"tools need names of their own, not {', '.join(tool.__name__ for tool in tools)}")
    if max_turns < 1:
        raise ValueError(f"max_turns must be at least 1, not {max_turns}")

    async def play(task: Task, policy: RolloutPolicy) -> Rollout:
        """The hook: plays one rollout, turn by turn."""
        if task.messages is None:
            raise RolloutError("a tool loop needs prompts of messages (--chat), and a chat template that knows tools")
        row_tools = tools_of(task.row.get("tools"))
        callable_tools = _chosen(by_name, row_tools)
        # `prompt_ids`: the tokens of the messages and tools, as the chat template renders them.
        conversation, prompt_ids = Conversation.begin(task, task.messages, row_tools or tools)
        sequence = RolloutSequence(prompt_ids)
        calls: list[ToolCall] = []
        for turn_number in range(1, max_turns + 1):
            completion = await policy.generate(sequence.token_ids)
            turn = sequence.append_completion(completion)
            is_cut_off = sequence.finish_reason != "stop"  # the finish reason of the completion that was just added
            if is_cut_off:  # the calls of the turn may be incomplete, and there may be no room for another turn
                break
            try:
                turn_calls = list(user_code.call_plain(parse, turn.text))
                answers = [await _answer(callable_tools, call) for call in turn_calls]
                calls += turn_calls
                if not turn_calls:  # without a call, this turn is the policy's final answer
                    break
            except ValueError as error:  # raised by `parse`, because `_answer` returns errors as text
                answers = [f"error: {error}"]
            if turn_number == max_turns:  # the tools have run, but the policy has no turn left to read their answers
                return Rollout([sequence], finish_reason="turns", info={"calls": calls})
            messages = [{"role": "tool", "content": answer} for answer in answers]
            # `observation_ids`: the tokens of the answers, and the tokens with which the template begins the next turn.
            conversation, observation_ids = conversation.go_on(turn.text, sequence.token_ids[-1], messages)
            sequence.append_observation(observation_ids, text="\n".join(answers))
            if len(sequence.token_ids) >= task.max_length:  # no room for a token of the next turn
                return Rollout([sequence], finish_reason="length", info={"calls": calls})
        return Rollout([sequence], info={"calls": calls})

    return play


def _chosen(
    functions: Mapping[str, Callable[..., Any]], row_tools: Sequence[Mapping[str, Any]]
) -> Mapping[str, Callable[..., Any]]:
    """The functions that the policy may call in a rollout, by name.

    `functions`: all functions of the tool loop, by name. `row_tools`: the descriptions of tools in the row; if there
    are any, the policy may call only the functions that these descriptions name. Raises RolloutError for a name that is
    not among the functions.
    """
    if not row_tools:
        return functions
    chosen = {}
    for tool in row_tools:
        name = tool.get("function", tool)["name"]  # some data sets have the description without {"function": ...}
        if name not in functions:
            raise RolloutError(
                f"the row's 'tools' name {name!r:.80}, and the tool loop has {', '.join(functions)}: give it this "
                "function too, or leave out the column"
            )
        chosen[name] = functions[name]
    return chosen


async def _answer(tools: Mapping[str, Callable[..., Any]], call: ToolCall) -> str:
    """Calls a tool. Returns its result as text: a str as it is, any other result as JSON. If the call fails, returns a
    text that says why: errors of the tool are not raised.

    `tools`: the functions that may be called, by name.
    """
    tool = tools.get(call.name)
    if tool is None:
        return f"error: there is no tool {call.name!r:.80}; there are {', '.join(tools)}"
    try:
        answer = await user_code.call(tool, **call.arguments)
        if isinstance(answer, str):
            return answer
        return str(user_code.call_here(json.dumps, answer, default=_as_json))
    except Exception as error:
        return f"error: {user_code.in_words(error)}"


def _as_json(value: Any) -> Any:
    """Converts a value that JSON cannot hold into a value that JSON can hold. `json.dumps` calls this function.

    Tensors, and arrays and numbers of NumPy, become lists and numbers of Python. Any other value becomes its `str`.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
