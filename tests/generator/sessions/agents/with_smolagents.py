"""An agent of the package `smolagents`: it writes Python, which runs in this process, until it gives a final answer."""

import json
import sys

from smolagents import CodeAgent, OpenAIServerModel

row = json.loads(sys.stdin.readline())
model = OpenAIServerModel("policy")
agent = CodeAgent(tools=[], model=model, max_steps=3, verbosity_level=0)
answer = agent.run(row["prompt"])
steps = len([step for step in agent.memory.steps if type(step).__name__ == "ActionStep"])
print(json.dumps({"reward": float(str(answer) == row["answer"]), "metrics": {"steps": steps}}))
