"""An agent of the package `openai-agents`: two tools, and another agent to which the first one hands over.

Its argument is the protocol: "responses", which is the package's own choice, or "chat".
"""

import asyncio
import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
if sys.argv[1] == "chat":
    set_default_openai_api("chat_completions")
row = json.loads(sys.stdin.readline())


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


teller = Agent(name="teller", model="policy", instructions="Say the result in words.")
solver = Agent(name="solver", model="policy", instructions="Compute.", tools=[add, multiply], handoffs=[teller])

result = asyncio.run(Runner.run(solver, row["prompt"], max_turns=6))
print("last:", result.last_agent.name)
metrics = {"turns": len(result.raw_responses), "teller": result.last_agent is teller}
print(json.dumps({"reward": float(result.final_output == row["answer"]), "metrics": metrics}))
