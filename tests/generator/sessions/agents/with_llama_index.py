"""An agent of the package `llama-index-core`, with the model of `llama-index-llms-openai`."""

import asyncio
import json
import sys

from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.llms.openai import OpenAI


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


async def main() -> None:
    row = json.loads(sys.stdin.readline())
    kind = {"function": FunctionAgent, "react": ReActAgent}[sys.argv[1]]
    agent = kind(tools=[add, multiply], llm=OpenAI(model="gpt-4.1", temperature=1.0), system_prompt="Compute.")
    answer = await agent.run(row["prompt"])
    print(json.dumps({"reward": float(str(answer).strip() == row["answer"])}))


asyncio.run(main())
