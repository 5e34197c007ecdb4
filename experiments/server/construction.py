"""Measures what groups under construction cost: a generator with vLLM works with `building` and without it in turn.

    python -m experiments.server.construction [--tokens 5] [--rounds 5] [--seconds 5]

A model of a million parameters writes 8 completions of each prompt, as long as --tokens says in the mean and at most
four times as long; a second process samples the queue. Both sides use one engine in one process, in the order ABBA.
Compared are finished groups a second, and the CPU seconds of a group: those of the generator, its engine, the server
and the reader together, which mean something on a busy machine too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from examples.demo.task import EOS_ID, make_tokenizer
from experiments.serving import serve
from replay_client import AsyncReplayClient
from replay_generator import GeneratorConfig, RolloutGenerator
from replay_generator.engines import SamplingConfig
from replay_generator.engines.vllm import VLLMEngine

CONFIG = """
[admission]
groups_per_step = 1_000_000
max_staleness = 2
building = "building"

[[tables]]
name = "rollouts"
rate_limiter = { type = "queue", max_size = 512 }
"""
WIDTH = 192
DRAIN = """
import sys
from replay_client import ReplayClient
from replay_client.errors import DeadlineExceededError
with ReplayClient(sys.argv[1]) as client, client.sampler("rollouts") as sampler:
    while True:
        try:
            next(sampler)
        except DeadlineExceededError:
            pass
"""


class KeptEngine(VLLMEngine):
    """An engine that several generators use, one after the other: their ends do not close it."""

    async def close(self) -> None:
        """Nothing: `end` closes it."""

    async def end(self) -> None:
        await super().close()


def make_model(folder: Path, tokens: int) -> Path:
    """A model that ends a completion after each token with a probability of 1 in `tokens`, whatever it has read.

    All its embeddings are ones, its layers add nothing to them, and its last layer looks at their sum.
    """
    tokenizer = make_tokenizer()
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=3,
            max_position_embeddings=4 * tokens + 16,
            tie_word_embeddings=False,
            eos_token_id=EOS_ID,
            bos_token_id=None,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[EOS_ID] = math.log((len(tokenizer) - 1) / (tokens - 1)) / WIDTH
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


Figures = npt.NDArray[np.float64]
"""Groups a second, and CPU seconds of each."""


def cpu_seconds() -> float:
    """Used until now by this process and all that it has started."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True)))


async def generate(address: str, engine: KeptEngine, building: str | None, options: argparse.Namespace) -> Figures:
    """Lets a generator work for `options.seconds`, and measures it."""
    done = 0

    def count(_: object) -> None:
        nonlocal done
        done += 1

    config = GeneratorConfig(
        tables={"rollouts": 1.0},
        group_size=8,
        sampling=SamplingConfig(max_tokens=4 * options.tokens),
        building=building,
        follow_policy=False,
    )
    async with AsyncReplayClient(address) as client:
        prompts = ({"prompt": f"{number % 100}+1="} for number in itertools.count())
        generator = RolloutGenerator(
            client, engine, prompts, lambda row, text: float(len(text) % 2), config, on_group=count
        )
        running = asyncio.create_task(generator.run())
        while not done:
            await asyncio.sleep(0.01)
        began, used, done = time.monotonic(), cpu_seconds(), 0
        await asyncio.sleep(options.seconds)
        figures = np.array([done / (time.monotonic() - began), (cpu_seconds() - used) / done])
        generator.stop()
        await running
    return figures


async def compare(address: str, folder: Path, options: argparse.Namespace) -> None:
    """Prints the figures of both sides, and their ratios."""
    engine = KeptEngine(make_model(folder / "model", options.tokens))
    try:
        plain, ratios = [], []
        for number in range(options.rounds + 1):
            found: dict[str | None, Figures] = {None: np.zeros(2), "building": np.zeros(2)}
            for building in (None, "building", "building", None):
                found[building] += await generate(address, engine, building, options) / 2
            if number:  # the first one warms up
                ratios.append(found["building"] / found[None])
                plain.append(found[None])
                print("plain, under construction:", *found.values(), flush=True)
    finally:
        await engine.end()
    names = "groups a second", "CPU seconds of a group"
    for name, each, ratio in zip(names, np.median(plain, axis=0), np.array(ratios).T, strict=True):
        low, middle, high = statistics.quantiles(ratio, n=4)
        print(f"{options.tokens} tokens, {name}: {each:.3g} without; under construction {middle:.3f} ", end="")
        print(f"of it (quartiles {low:.3f}, {high:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=5, help="of a completion, in the mean")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each side in a quarter of a round")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(Path(folder), CONFIG) as server,
        subprocess.Popen([sys.executable, "-c", DRAIN, server.address]) as drain,
    ):
        try:
            asyncio.run(compare(server.address, Path(folder), options))
        finally:
            drain.kill()


if __name__ == "__main__":
    main()
