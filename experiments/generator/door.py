"""What does the door of agents cost? The same turns, asked of the policy at once and through the address of a session.

    python -m experiments.generator.door --model FOLDER [--engine vllm] [--at-once 64] [--tokens 16] [--rounds 5]

The model is a demo's: `make demo` leaves one in its folder, as model/. Each rollout has two turns. At once: a hook
asks the policy. Through the door: a process of its own sends chat completions, over a connection for each rollout and
without any package of agents. The order of the two changes with each round. Printed are the medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import aiohttp

from replay_generator import GeneratorConfig, Rollout, RolloutSequence
from replay_generator.engines import SamplingConfig
from replay_generator.rollouts.rollout import PlayedRollout, RolloutHook, RolloutPolicy, Task, held, play
from replay_generator.rollouts.sessions import load_sessions
from replay_generator.rollouts.sessions.conversation import Conversation

ENGINES = {"vllm": "vllm:VLLMEngine", "transformers": "transformers:TransformersEngine"}
ASKED = ({"role": "user", "content": "12*34"},)
AGAIN = {"role": "user", "content": "56*78"}


async def at_once(task: Task, policy: RolloutPolicy) -> Rollout:
    conversation, begins = Conversation.begin(task, ASKED)
    sequence = RolloutSequence(begins)
    said = sequence.append_completion(await policy.generate(sequence.token_ids))
    _, between = conversation.go_on(said.text, sequence.token_ids[-1], [AGAIN])
    sequence.append_observation(between)
    sequence.append_completion(await policy.generate(sequence.token_ids))
    return Rollout([sequence], reward=0.0)


def agents(port: int, at_once: int) -> None:
    """Agents that take sessions, again and again."""

    async def one(http: aiohttp.ClientSession) -> None:
        while True:
            async with http.post("/sessions", json={}) as answer:
                if answer.status != 200:
                    continue
                session = await answer.json()
            messages: list[Any] = list(ASKED)
            for _ in range(2):
                address = f"/sessions/{session['id']}/v1/chat/completions"
                async with http.post(address, json={"model": "policy", "messages": messages}) as answer:
                    messages += [(await answer.json())["choices"][0]["message"], AGAIN]
            async with http.post(f"/sessions/{session['id']}/end", json={"reward": 0.0}):
                pass

    async def all_of_them() -> None:
        connector = aiohttp.TCPConnector(limit=at_once)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector) as http:
            await asyncio.gather(*(one(http) for _ in range(at_once)))

    asyncio.run(all_of_them())


async def measure(engine: Any, hook: RolloutHook, count: int, sampling: SamplingConfig) -> tuple[float, float]:
    """Tokens a second, and seconds of CPU of this process for a thousand tokens."""
    tasks = [Task("p", [], {}, ASKED, index, sampling, engine.tokenizer, engine.max_length) for index in range(count)]
    tokens = 0

    async def finished(_: int, played: PlayedRollout) -> None:
        nonlocal tokens
        tokens += sum(int(sequence.sampled_mask.sum()) for sequence in played.sequences)

    began, cpu = time.monotonic(), time.process_time()
    if failures := await play(hook, tasks, engine, None, [], finished, early=True):
        raise failures[0]
    return tokens / (time.monotonic() - began), 1000 * (time.process_time() - cpu) / tokens


async def compare(model: str, engine: str, max_length: int | None, count: int, tokens: int, rounds: int) -> None:
    module, _, kind = ENGINES[engine].partition(":")
    running = getattr(import_module(f"replay_generator.engines.{module}"), kind)(model, seed=0, max_length=max_length)
    sampling, port = SamplingConfig(max_tokens=tokens), 20_000 + os.getpid() % 10_000
    door = load_sessions(None, f"127.0.0.1:{port}", GeneratorConfig(sampling=sampling), needs_reward=True)
    found: dict[str, list[tuple[float, float]]] = {"at once": [], "through the door": []}
    async with held(door):
        process = get_context("spawn").Process(target=agents, args=(port, count), daemon=True)
        process.start()
        ways: Sequence[tuple[str, RolloutHook]] = [("at once", at_once), ("through the door", door)]
        for number in range(-1, rounds):
            for name, hook in ways if number % 2 else reversed(ways):
                result = await measure(running, hook, count, sampling)
                if number >= 0:
                    found[name].append(result)
        process.kill()
    await running.close()
    for name, results in found.items():
        pace, cpu = (statistics.median(column) for column in zip(*results, strict=True))
        print(f"{name:<17} {pace:7.0f} tokens/s  {cpu:6.2f} s of CPU of the generator for a thousand tokens")
    ratios = [b[0] / a[0] for a, b in zip(*found.values(), strict=True)]
    print(f"ratio of the rounds: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    asyncio.run(compare(given.model, given.engine, given.max_length, given.at_once, given.tokens, given.rounds))


if __name__ == "__main__":
    main()
