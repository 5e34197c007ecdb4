"""The workload of both sides: a model made from a seed, and batches of made-up groups. Needs torch and transformers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
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
    """The groups and the model of a training step. Lengths are spread evenly from the shortest to the longest."""

    groups: int = 4
    group_size: int = 8
    prompt_tokens: tuple[int, int] = (48, 96)
    completion_tokens: tuple[int, int] = (16, 256)
    micro_batches: int = 4
    size: str = "tiny"
    """The size of the model: one of SIZES."""
    device: str = "auto"
    """cpu or cuda; auto: cuda if it is there."""
    dtype: str = "float32"
    """float32; bfloat16: both sides compute under autocast, and keep weights and optimizer in float32."""
    attention: str = "sdpa"
    """The implementation of attention, as transformers names it."""

    @property
    def rows(self) -> int:
        return self.groups * self.group_size

    @property
    def vocabulary(self) -> int:
        return SIZES[self.size].vocabulary

    @property
    def device_type(self) -> str:
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.device

    @property
    def bf16(self) -> bool:
        return self.dtype == "bfloat16"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def named(cls, text: str) -> Workload:
        """One of WORKLOADS by its name, or the workload of a JSON text of `to_json`."""
        if text in WORKLOADS:
            return WORKLOADS[text]
        fields = json.loads(text)
        for name in ("prompt_tokens", "completion_tokens"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    def make_groups(self) -> list[Group]:
        """The groups of a step. They are the same in every process."""
        random = np.random.default_rng(0)
        lengths = np.linspace(*self.completion_tokens, self.rows).round().astype(int)
        random.shuffle(lengths)
        prompts = np.linspace(*self.prompt_tokens, self.groups).round().astype(int)
        made = []
        for index, prompt in enumerate(prompts):
            group_lengths = lengths[index * self.group_size : (index + 1) * self.group_size]
            rewards = [float(member % 2) for member in range(self.group_size)]
            spread = np.std(rewards, ddof=1) + 1e-4
            made.append(
                Group(
                    prompt=random.integers(3, self.vocabulary, prompt).tolist(),
                    completions=[random.integers(3, self.vocabulary, length).tolist() for length in group_lengths],
                    rewards=rewards,
                    advantages=[(reward - np.mean(rewards)) / spread for reward in rewards],
                )
            )
        return made

    def make_model(self) -> Any:
        """The model, which is the same in every process."""
        size = SIZES[self.size]
        config = Qwen2Config(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            max_position_embeddings=4096,
            tie_word_embeddings=size.tied,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            attn_implementation=self.attention,
        )
        torch.manual_seed(0)
        # Made on the GPU if there is one: random numbers for a billion weights take a minute on one core.
        with torch.device(self.device_type):
            return Qwen2ForCausalLM(config)


@dataclass(frozen=True)
class ModelSize:
    """The shape of a Qwen2 model. Its weights are random: they change neither time nor memory."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool


SIZES = {
    "smallest": ModelSize(512, 128, 352, layers=2, heads=2, kv_heads=1, tied=False),
    "tiny": ModelSize(8192, 256, 704, layers=4, heads=4, kv_heads=2, tied=False),
    "0.5b": ModelSize(151936, 896, 4864, layers=24, heads=14, kv_heads=2, tied=True),
    "1.5b": ModelSize(151936, 1536, 8960, layers=28, heads=12, kv_heads=2, tied=True),
}
"""The last two are Qwen2.5-0.5B and Qwen2.5-1.5B."""
RAGGED = Workload()
"""The workload for speed and memory."""
EQUAL = Workload(
    groups=3,
    group_size=4,
    prompt_tokens=(12, 12),
    completion_tokens=(24, 24),
    micro_batches=1,
    size="smallest",
)
"""The workload for equal gradients. It needs no padding."""
GPU = Workload(prompt_tokens=(128, 256), completion_tokens=(512, 2048), micro_batches=8, size="0.5b", dtype="bfloat16")
"""The workload for a GPU. Its completions are as long as those of reasoning."""
WORKLOADS = {"ragged": RAGGED, "equal": EQUAL, "gpu": GPU}
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo")
LEARNING_RATE = 1e-6
EPSILON = 0.2
EPSILON_HIGH = 0.28
CISPO_CAP = 1.1


def old_offsets(rows: int, tokens: int) -> torch.Tensor:
    """The differences (rows, tokens) of the old policy's log-probabilities, small and large ones for the clip range."""
    return torch.randn(rows, tokens, generator=torch.Generator().manual_seed(1)) * 0.3
