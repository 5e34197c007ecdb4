"""A step's tokens a second with common beginnings computed once, against without.

    python -m experiments.trainer.shared [--rounds 5] [--threads 1] [--device cpu]

Three sides train the same batches with the same model and the same budget of a micro-batch, by turns:

    all       what any sequences of a micro-batch begin with is computed once: what the trainer does
    prompt    the prompt of a group is computed once, and nothing else
    none      every sequence is computed by itself, packed without padding

A step is the forward and backward passes, the clipping and the optimizer's update. Tokens are those trained on. On a
CPU seconds are CPU seconds of the process: other work on the machine disturbs them less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.trainer.workload import Workload
from replay_client import RolloutGroup
from replay_trainer import GRPOConfig
from replay_trainer.batching import Batch, micro_batches, to_batch
from replay_trainer.correction import PRESETS
from replay_trainer.logprobs import LogprobModel
from replay_trainer.packing.beginnings import Beginnings
from replay_trainer.passes import Passes
from replay_trainer.ranks import Ranks

G = 8
BUDGET = 8192
"""Tokens of a micro-batch: what fits into memory is the same for every side."""
WORKLOAD = Workload()
"""The model is that of `benchmarks.trainer.run`, and so are the lengths of the single turn."""
Tokens = Callable[[int], list[int]]
"""So many new tokens."""


def random_tokens() -> Tokens:
    """The same tokens for every process."""
    random = np.random.default_rng(0)
    return lambda count: list(random.integers(3, WORKLOAD.vocabulary, count).tolist())


def _group(prompt: Sequence[int], rows: Sequence[tuple[list[int], list[bool]]], sequences: int = 1) -> RolloutGroup:
    """A group of G rollouts of `sequences` each; every row has its tokens, and which of them the policy wrote."""
    written_T = np.array([each for _, written in rows for each in written])
    return RolloutGroup(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array([token for tokens, _ in rows for token in tokens], np.int32),
        completion_lengths=np.array([len(tokens) for tokens, _ in rows], np.int32),
        rollout_logprobs=np.where(written_T, -1.0, np.nan).astype(np.float32),
        loss_mask=written_T,
        sequence_counts=None if sequences == 1 else np.full(G, sequences, np.int32),
        rewards=np.arange(G, dtype=np.float32) % 2,
        advantages=np.where(np.arange(G) % 2, 1.0, -1.0).astype(np.float32),
    )


def single_turn() -> list[RolloutGroup]:
    """4 prompts of 48 to 96 tokens, each with 8 completions of 16 to 256 tokens."""
    groups = WORKLOAD.make_groups()
    return [_group(group.prompt, [(ids, [True] * len(ids)) for ids in group.completions]) for group in groups]


def four_sequences(turns: int = 4, written: int = 32, answered: int = 32) -> list[RolloutGroup]:
    """2 prompts of 64 tokens, 8 rollouts of 4 turns. Each turn is a sequence that begins with all turns before it."""
    tokens, groups = random_tokens(), []
    for _ in range(2):
        rows = []
        for _ in range(G):
            known: list[int] = []
            for _ in range(turns):
                rows.append((known + (text := tokens(written)), [False] * len(known) + [True] * written))
                known = known + text + tokens(answered)
        groups.append(_group(tokens(64), rows, turns))
    return groups


def long_context() -> list[RolloutGroup]:
    """2 tasks behind one system prompt of 256 tokens. All 8 rollouts of a task make the same first call of 8 tokens,
    and get the same output of 256. Their answers have 32 to 96 tokens."""
    tokens, groups = random_tokens(), []
    system = tokens(256)
    for _ in range(2):
        call, output = tokens(8), tokens(256)
        answers = [tokens(length) for length in np.linspace(32, 96, G).astype(int)]
        masks = [[True] * len(call) + [False] * len(output) + [True] * len(answer) for answer in answers]
        rows = [(call + output + answer, mask) for answer, mask in zip(answers, masks, strict=True)]
        groups.append(_group(system + tokens(32), rows))
    return groups


SHAPES = {
    "single turn, G = 8": single_turn,
    "4 turns in 4 sequences a rollout": four_sequences,
    "a long common context": long_context,
}
SIDES = ("all", "prompt", "none")


def sharing(batch: Batch, side: str) -> Batch:
    """The batch, with the beginnings that this side shares."""
    if side == "all":
        return batch
    shared_B = np.zeros_like(batch.group_B)
    if side == "prompt":
        follows_B = np.diff(batch.group_B, prepend=-1) == 0
        shared_B[follows_B] = batch.prompt_lengths_U[batch.group_B][follows_B]
    return replace(batch, beginnings=Beginnings(np.arange(batch.num_rows), shared_B))


def computed(batch: Batch) -> int:
    """Tokens that the model reads in a pass."""
    return sum(
        int(part.input_lengths_B.sum() - part.beginnings.shared_B.sum()) for _, part in micro_batches(batch, BUDGET)
    )


class Steps:
    """Steps of one side; every side has a model of its own, from one seed."""

    def __init__(self, groups: Sequence[RolloutGroup], side: str, device: str, folder: str) -> None:
        config = GRPOConfig(
            output_dir=folder, device=device, correction=PRESETS["off"](), max_tokens_per_micro_batch=BUDGET
        )
        policy = LogprobModel(WORKLOAD.make_model().to(device))
        assert policy.route == "packed"
        self.passes = Passes(policy, None, None, config, Ranks(device), partitioned=False)
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
        self.batch = sharing(to_batch(groups, device), side)
        self.loss = 0.0

    def seconds(self) -> float:
        """The time of one step."""
        clock = time.perf_counter if self.batch.device.type == "cuda" else time.process_time
        start = clock()
        _, self.loss, _ = self.passes.backward(self.batch, None)
        self.passes.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.batch.device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - start


def measure(shape: str, rounds: int, device: str) -> Iterator[dict[str, Any]]:
    """A row for each side. The sides take turns; the first step of each is not counted."""
    groups = SHAPES[shape]()
    with tempfile.TemporaryDirectory() as folder:
        sides = {side: Steps(groups, side, device, folder) for side in SIDES}
        for each in sides.values():
            each.seconds()
        taken: dict[str, list[float]] = {side: [] for side in SIDES}
        for turn in range(rounds):
            for side in SIDES if turn % 2 else reversed(SIDES):
                taken[side].append(sides[side].seconds())
    for side, steps in sides.items():
        tokens = int(steps.batch.mask_BT.sum())
        ratios = [none / mine for none, mine in zip(taken["none"], taken[side], strict=True)]
        yield {
            "shape": shape,
            "side": side,
            "tokens_read": computed(steps.batch),
            "tokens_trained": tokens,
            "tokens_per_second": tokens / statistics.median(taken[side]),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "loss": steps.loss,
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.trainer.shared", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="counted steps of each side")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on the CPU")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| shape | shared | tokens read | tokens trained on a second | against none |\n|---|---|---|---|---|")
    for shape in SHAPES:
        for row in measure(shape, options.rounds, options.device):
            ratios = f"{row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})"
            print(
                f"| {shape} | {row['side']} | {row['tokens_read']} | {row['tokens_per_second']:.0f} | {ratios} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
