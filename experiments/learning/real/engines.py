"""vLLM against ContinuousBatch on SmolLM2: what generating one step costs, and taking new weights.

    OMP_NUM_THREADS=1 python -m experiments.learning.real.engines --rounds 7

A step of the recipe has four prompts with eight answers of at most 24 tokens each. Both engines generate the same
prompts in turns, in bfloat16 and on one thread, so that other work on the machine slows both. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from experiments.learning.arms import GROUP_SIZE
from experiments.learning.real.gym import GYM_TASKS, gym_problems
from experiments.learning.real.pretrained import PretrainedPolicy
from experiments.learning.real.smollm2 import smollm2
from replay_generator.engines import SamplingConfig

GROUPS = 4
"""Prompts of a step."""
MAX_LENGTH = 256


async def measure(policy: PretrainedPolicy, vllm: Any, path: Path, rounds: int, max_tokens: int) -> dict[str, Any]:
    """Measures the seconds and tokens of each engine in each round, and the seconds in which it loads new weights."""
    sampling = SamplingConfig(max_tokens=max_tokens)
    found: dict[str, Any] = {"ContinuousBatch": [], "vLLM": [], "ContinuousBatch weights": [], "vLLM weights": []}
    for number in range(rounds + 1):
        chosen = range(GROUPS * number, GROUPS * (number + 1))
        begin = time.perf_counter()
        policy.load()
        loaded = time.perf_counter()
        groups = policy.generate(chosen, GROUP_SIZE, number)
        ended = time.perf_counter()
        await vllm.load_weights(str(path), number)
        vllm_loaded = time.perf_counter()
        answers = await asyncio.gather(
            *(vllm.generate(group.prompt_ids.tolist(), sampling, GROUP_SIZE) for group in groups)
        )
        vllm_ended = time.perf_counter()
        if number == 0:  # both compile and allocate in their first round
            continue
        found["ContinuousBatch weights"].append(loaded - begin)
        found["vLLM weights"].append(vllm_loaded - ended)
        found["ContinuousBatch"].append((ended - loaded, sum(group.num_tokens for group in groups)))
        tokens = sum(len(answer.token_ids) for each in answers for answer in each)
        found["vLLM"].append((vllm_ended - vllm_loaded, tokens))
    return found


def lines_of(found: dict[str, Any]) -> list[str]:
    """Lines of Markdown, a row an engine."""
    lines = ["| engine | tokens a second | seconds a step of 32 answers | new weights, seconds |", "|---|---|---|---|"]
    for name in ("ContinuousBatch", "vLLM"):
        rounds = found[name]
        rate = statistics.median(tokens / seconds for seconds, tokens in rounds)
        step = statistics.median(seconds for seconds, _ in rounds)
        weights = statistics.median(found[f"{name} weights"])
        lines.append(f"| {name} | {rate:.0f} | {step:.2f} | {weights:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", type=Path, default=Path("runs/real"), help="where the converted model is kept")
    arguments = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from replay_generator.engines.vllm import VLLMEngine

    task, path = GYM_TASKS["two_terms"], smollm2(arguments.models)
    vllm = VLLMEngine(path, dtype="bfloat16", max_length=MAX_LENGTH, seed=0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    policy = PretrainedPolicy(model, AutoTokenizer.from_pretrained(path), gym_problems(task, 0), task.max_tokens, 0)

    async def both() -> dict[str, Any]:
        try:
            return await measure(policy, vllm, path, arguments.rounds, task.max_tokens)
        finally:
            await vllm.close()

    print("\n".join(lines_of(asyncio.run(both()))))


if __name__ == "__main__":
    main()
