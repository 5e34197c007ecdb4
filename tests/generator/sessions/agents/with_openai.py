"""The package `openai`: a loop with tools. Its argument is "chat", "chat-stream" or "responses"."""

import json
import sys

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


def result_of(name: str, arguments: str) -> str:
    given = json.loads(arguments)
    return str(given["a"] + given["b"] if name == "add" else given["a"] * given["b"])


def by_chat(client: OpenAI, prompt: str) -> str:
    tools = []
    for name in ("add", "multiply"):
        tools.append({"type": "function", "function": {"name": name, "parameters": PARAMETERS}})
    messages = [{"role": "user", "content": prompt}]
    while True:
        if sys.argv[1] == "chat":
            answer = client.chat.completions.create(model="policy", messages=messages, tools=tools)
        else:
            with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as stream:
                answer = stream.get_final_completion()
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = result_of(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def by_responses(client: OpenAI, prompt: str) -> str:
    tools = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in ("add", "multiply")]
    items = [{"role": "user", "content": prompt}]
    while True:
        answer = client.responses.create(model="policy", input=items, tools=tools)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        for call in calls:
            result = result_of(call.name, call.arguments)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


row = json.loads(sys.stdin.readline())
play = by_responses if sys.argv[1] == "responses" else by_chat
print(json.dumps({"reward": float(play(OpenAI(), row["prompt"]) == row["answer"])}))
