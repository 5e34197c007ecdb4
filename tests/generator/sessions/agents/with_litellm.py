"""The package `litellm`: a loop with a tool. Its argument is the model, whose first part names the protocol."""

import json
import sys

import litellm

row = json.loads(sys.stdin.readline())
parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
tools = []
for name in ("add", "multiply"):
    tools.append({"type": "function", "function": {"name": name, "description": name, "parameters": parameters}})
messages = [{"role": "system", "content": "Compute."}, {"role": "user", "content": row["prompt"]}]
said = ""
for _ in range(4):
    answer = litellm.completion(model=sys.argv[1], messages=messages, tools=tools).choices[0].message
    messages.append(answer)
    said = answer.content or ""
    for call in answer.tool_calls or ():
        given = json.loads(call.function.arguments)
        result = given["a"] + given["b"] if call.function.name == "add" else given["a"] * given["b"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    if not answer.tool_calls:
        break
print(json.dumps({"reward": float(said == row["answer"])}))
