"""The package `anthropic`: a loop with tools, which reads its turns as streams."""

import json
import sys

from anthropic import Anthropic

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"name": name, "input_schema": SCHEMA} for name in ("add", "multiply")]

row = json.loads(sys.stdin.readline())
client = Anthropic()
messages = [{"role": "user", "content": row["prompt"]}]
said = ""
calls = True
while calls:
    with client.messages.stream(model="policy", max_tokens=400, messages=messages, tools=TOOLS) as stream:
        answer = stream.get_final_message()
    messages.append({"role": "assistant", "content": answer.content})
    calls = [block for block in answer.content if block.type == "tool_use"]
    said = "".join(block.text for block in answer.content if block.type == "text")
    results = []
    for call in calls:
        given = call.input
        result = str(given["a"] + given["b"] if call.name == "add" else given["a"] * given["b"])
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": result})
    messages.append({"role": "user", "content": results})
print(json.dumps({"reward": float(said == row["answer"])}))
