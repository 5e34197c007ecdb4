"""The workload of both sides: a model made from a seed, and batches of made-up groups. Needs torch and transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


@dataclass(frozen=True)
class Group:
    """A prompt with its completions."""

    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float]
    advantages: list[float]


@dataclass(frozen=True)
class Workload:
    """What is trained on. Lengths are spread evenly from the shortest to the longest."""

    groups: int = 4
    group_size: int = 8
    prompt_tokens: tuple[int, int] = (48, 96)
    completion_tokens: tuple[int, int] = (16, 256)
    micro_batches: int = 4
    vocabulary: int = 8192
    hidden: int = 256
    layers: int = 4

    @property
    def rows(self) -> int:
        return self.groups * self.group_size

    def make_groups(self) -> list[Group]:
        """The same for every process."""
        random = np.random.default_rng(0)
        lengths = np.linspace(*self.completion_tokens, self.rows).round().astype(int)
        random.shuffle(lengths)
        prompts = np.linspace(*self.prompt_tokens, self.groups).round().astype(int)
        made = []
        for index, prompt in enumerate(prompts):
            mine = lengths[index * self.group_size : (index + 1) * self.group_size]
            rewards = [float(member % 2) for member in range(self.group_size)]
            spread = np.std(rewards, ddof=1) + 1e-4
            made.append(
                Group(
                    prompt=random.integers(3, self.vocabulary, prompt).tolist(),
                    completions=[random.integers(3, self.vocabulary, length).tolist() for length in mine],
                    rewards=rewards,
                    advantages=[(reward - np.mean(rewards)) / spread for reward in rewards],
                )
            )
        return made

    def make_model(self) -> Any:
        """The same for every process."""
        torch.manual_seed(0)
        return Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=self.vocabulary,
                hidden_size=self.hidden,
                intermediate_size=self.hidden * 11 // 4,
                num_hidden_layers=self.layers,
                num_attention_heads=self.hidden // 64,
                num_key_value_heads=max(self.hidden // 128, 1),
                max_position_embeddings=1024,
                tie_word_embeddings=False,
                pad_token_id=0,
                eos_token_id=1,
                bos_token_id=None,
            )
        )


RAGGED = Workload()
"""For speed and memory."""
EQUAL = Workload(
    groups=3,
    group_size=4,
    prompt_tokens=(12, 12),
    completion_tokens=(24, 24),
    micro_batches=1,
    vocabulary=512,
    hidden=128,
    layers=2,
)
"""For equal numbers: nothing to pad."""
WORKLOADS = {"ragged": RAGGED, "equal": EQUAL}
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo")
LEARNING_RATE = 1e-6
EPSILON, EPSILON_HIGH, CISPO_CAP = 0.2, 0.28, 1.1


def old_offsets(rows: int, tokens: int) -> torch.Tensor:
    """(rows, tokens) what the old policy's log-probabilities differ by: ratios inside and outside of the clip range."""
    return torch.randn(rows, tokens, generator=torch.Generator().manual_seed(1)) * 0.3
