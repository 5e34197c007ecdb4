"""A correct engine without a model of transformers: the next token depends on the last one, by a table."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from replay_client.sampling_masks import mask_fields
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.testing import EOS

CHARACTERS = "0123456789+=? "
VOCABULARY = 2 + len(CHARACTERS)


class CharacterTokenizer:
    """One token for each of CHARACTERS, and for any other the last of them."""

    eos_token_id = EOS
    all_special_ids = (0, EOS)

    def encode(self, text: str) -> list[int]:
        return [2 + CHARACTERS.find(character) % len(CHARACTERS) for character in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(CHARACTERS[token - 2] for token in token_ids if token > EOS)


def log_softmax(logits_V: Any) -> Any:
    return logits_V - np.log(np.exp(logits_V).sum())


class MarkovEngine:
    """Its weights are `table.npy` (V, V): the logits of the next token after each token."""

    max_length = 40
    vocabulary = VOCABULARY
    model = None

    def __init__(self) -> None:
        self.tokenizer = CharacterTokenizer()
        self.table_VV = np.random.default_rng(0).normal(0, 1.5, (VOCABULARY, VOCABULARY))
        self.version = 0
        self.seeds = random.Random(0)
        self.whole = asyncio.Event()
        """Set while the weights are whole."""
        self.whole.set()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, finished: Any = None
    ) -> list[Completion]:
        seed = self.seed_of(sampling)
        work = (self.complete(prompt_ids, sampling, random.Random(f"{seed} {number}")) for number in range(n))
        completions = await asyncio.gather(*work)
        if finished is not None:
            for number, completion in enumerate(completions):
                finished(number, completion)
        return completions

    def seed_of(self, sampling: SamplingConfig) -> int:
        return self.seeds.getrandbits(60) if sampling.seed is None else sampling.seed

    async def complete(self, prompt_ids: Sequence[int], sampling: SamplingConfig, stream: random.Random) -> Completion:
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        masks: list[list[int]] = []
        while not self.has_ended(prompt_ids, ids, sampling):
            await asyncio.sleep(0)
            await self.whole.wait()
            last = (ids or prompt_ids)[-1]
            logprobs_V = self.processed(self.table_VV[last], sampling)
            ids.append(self.choose(logprobs_V, stream))
            logprobs.append(float(logprobs_V[ids[-1]]))
            versions.append(self.version)
            if sampling.largest_mask:
                masks.append(np.isfinite(logprobs_V).nonzero()[0].tolist())
        reason = "stop" if ids[-1] == EOS else "length"
        return Completion(ids, logprobs, self.tokenizer.decode(ids), reason, versions, **mask_fields(masks))

    def has_ended(self, prompt_ids: Sequence[int], ids: Sequence[int], sampling: SamplingConfig) -> bool:
        is_full = len(ids) == min(sampling.max_tokens, self.max_length - len(prompt_ids))
        return is_full or (len(ids) > 0 and ids[-1] == EOS)

    def choose(self, logprobs_V: Any, stream: random.Random) -> int:
        return stream.choices(range(VOCABULARY), np.exp(logprobs_V))[0]

    def processed(self, logits_V: Any, sampling: SamplingConfig) -> Any:
        logprobs_V = log_softmax(logits_V / sampling.temperature)
        if sampling.min_p:
            logprobs_V[logprobs_V < logprobs_V.max() + np.log(sampling.min_p)] = -np.inf
        order = np.argsort(-logprobs_V)
        if sampling.top_k:
            logprobs_V[order[sampling.top_k :]] = -np.inf
        before = np.cumsum(np.exp(log_softmax(logprobs_V))[order]) - np.exp(log_softmax(logprobs_V))[order]
        if sampling.top_p < 1:
            logprobs_V[order[before >= sampling.top_p]] = -np.inf
        return log_softmax(logprobs_V)

    async def load_weights(self, path: str, version: int) -> None:
        file = Path(path) / "table.npy"
        if not file.exists():
            raise FileNotFoundError(f"no table.npy in {path}")
        self.whole.clear()
        self.table_VV = np.load(file)
        self.version = version
        self.whole.set()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [float(log_softmax(self.table_VV[last])[token]) for last, token in pairwise(token_ids)]

    async def close(self) -> None:
        pass


def make_table(folder: Path, seed: int) -> Path:
    """A folder with weights of MarkovEngine."""
    folder.mkdir()
    np.save(folder / "table.npy", np.random.default_rng(seed).normal(0, 1.5, (VOCABULARY, VOCABULARY)))
    return folder
