"""An agent for the task of tools.py. It knows nothing of training, and is written with the package `openai`.

The agent asks a chat model, computes the product that the model calls for, and sends it the result. The next message of
the model is the answer. `replay generate --agent` gives the agent an address where the policy answers.
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from examples.demo.tools import calculator
from replay_generator import Task
from replay_generator.rollouts.sessions.agents import Address

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes the product of two numbers.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
client = AsyncOpenAI(base_url="http://nobody", api_key="none")
"""The client whose connections all agents share. `play` gives it the address of the policy."""


async def play(task: Task, address: Address) -> dict[str, Any]:
    """Answers one question, in two turns at most. The metric `called` is 1 if it used the calculator."""
    model = client.with_options(**address.openai)
    called = False
    messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
    for _ in range(2):
        answer = await model.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message: Any = answer.choices[0].message
        if not message.tool_calls:
            break
        called = True
        messages.append(message)
        for call in message.tool_calls:
            result = _computed(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    reward = float((message.content or "").strip() == task.row["answer"])
    return {"reward": reward, "metrics": {"called": float(called)}}


def _computed(arguments: str) -> str:
    """The result of a call of the calculator, or the error that the model gets instead."""
    try:
        return calculator(**json.loads(arguments))
    except (TypeError, ValueError) as error:
        return f"error: {error}"
