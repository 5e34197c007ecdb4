"""The package `langchain-openai`: a loop with tools that are bound to a chat model."""

import json
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@tool
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


tools = {"add": add, "multiply": multiply}
row = json.loads(sys.stdin.readline())
model = ChatOpenAI(model="policy", use_responses_api=sys.argv[1] == "responses").bind_tools(list(tools.values()))
messages = [SystemMessage("Compute."), HumanMessage(row["prompt"])]
said = ""
for _ in range(4):
    answer = model.invoke(messages)
    messages.append(answer)
    said = answer.text
    for call in answer.tool_calls:
        messages.append(tools[call["name"]].invoke(call))
    if not answer.tool_calls:
        break
print(json.dumps({"reward": float(said == row["answer"])}))
