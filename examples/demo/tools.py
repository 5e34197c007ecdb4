"""A tiny task with a tool: products of two numbers, which the policy may compute with a calculator, in two turns.

    <user>47*86<eos><assistant>                                                                 the environment
    <tool_call>{"name": "calculator", "arguments": {"expression": "47*86"}}</tool_call><eos>    the policy
    <tool>4042<eos><assistant>                                                                  the environment
    4042<eos>                                                                                   the policy

A model of a million parameters cannot multiply such numbers by itself. The warm-up shows the model answers with the
tool and without, and ends early. So at first the model often answers by itself, and wrongly, or makes mistakes when it
copies. The reward of the answer teaches it to call the calculator, and to copy well.

The texts before and after the expression of a call are one token each. In a larger model they are many tokens, and
nothing else changes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerFast

from replay_generator import Rollout
from replay_generator.rollouts.tool_loop import tool_loop

CALL_BEGINS = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
CALL_ENDS = '"}}</tool_call>'
ROLES = ("<user>", "<assistant>", "<tool>")
TOKENS = (*ROLES, CALL_BEGINS, CALL_ENDS)
"""The tokens that this task adds to the tokenizer of characters."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def calculator(expression: str) -> str:
    """Computes the product of two numbers.

    Args:
        expression: For example "47*86".
    """
    factors = re.fullmatch(r"(\d+)\*(\d+)", expression)
    if factors is None:
        raise ValueError("write it as 47*86")
    return str(int(factors[1]) * int(factors[2]))


rollout = tool_loop([calculator], max_turns=2)
"""The hook for `replay generate --rollout`."""


def called(row: Mapping[str, Any], text: str, rollout: Rollout) -> float:
    """A reward function of weight 0: 1 for a rollout that called the calculator."""
    return float(bool(rollout.info["calls"]))


def a_product(rng: random.Random) -> tuple[str, str]:
    """A prompt with two factors of two digits, and its answer: "47*86" and "4042"."""
    first = rng.randrange(10, 100)
    second = rng.randrange(10, 100)
    return f"{first}*{second}", str(first * second)


def teach_chat(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Adds TOKENS and the chat template to the tokenizer of the other tasks."""
    tokenizer.add_tokens(list(TOKENS))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def demonstrations(
    tokenizer: Any, rows: Iterable[Mapping[str, str]], *, with_tool: bool
) -> list[tuple[list[int], ...]]:
    """For each row the tokens of its turns, as the tool loop makes them.

    Turns of the environment and of the policy alternate; the first is the environment's.
    """
    conversations = []
    for row in rows:
        message = {"role": "user", "content": row["prompt"]}
        turns = [tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)]
        if with_tool:
            turns.append(CALL_BEGINS + row["prompt"] + CALL_ENDS + tokenizer.eos_token)
            turns.append(f"<tool>{row['answer']}{tokenizer.eos_token}<assistant>")
        turns.append(row["answer"] + tokenizer.eos_token)
        conversations.append(tuple(tokenizer.encode(turn, add_special_tokens=False) for turn in turns))
    return conversations
