"""Measures whether the mismatch falls if the trainer's forward pass takes the experts that the sampler took.

python -m experiments.trainer.routing [SEEDS] [STEPS] [LAYERS]

For each seed, a small Qwen3-MoE learns a made-up language for STEPS steps, so that its routers are not those of a fresh
model. The transformers engine draws with it in bfloat16 and notes the experts of each token. Then the trainer computes
the log-probabilities again: with the experts that its own routers choose, and with those of the sampler, by a hook that
is here and not in the trainer. In float32, and in bfloat16, as a trainer on a GPU may.

With forced experts the weights are still the trainer's own: softmax over its logits of these experts. That is what
others call routing replay (R3).
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from replay_generator.engines import Completion, SamplingConfig
from replay_generator.engines.continuous_batch import routers_of
from replay_generator.engines.transformers import ROUTED, TransformersEngine
from replay_trainer.batching import bare_group, to_batch
from replay_trainer.logprobs import LogprobModel

VOCABULARY = 64
COMPLETIONS, TOKENS = 32, 64
SAMPLING = SamplingConfig(max_tokens=TOKENS)
NEXT = 6
"""Tokens that may follow two others in the made-up language."""


def make_model(seed: int, layers: int) -> Any:
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=16,
            num_experts_per_tok=4,
            norm_topk_prob=True,  # as the published models have it
            max_position_embeddings=256,
            output_router_logits=True,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def text_of(random: np.random.Generator, rows: int, tokens: int, follows_AAN: np.ndarray) -> Tensor:
    """(rows, tokens) ids. Each token is one of the `NEXT` that may follow the two before it; the first is likeliest."""
    ids = random.integers(0, VOCABULARY, (rows, 2))
    chosen = random.choice(NEXT, (rows, tokens), p=np.arange(NEXT, 0, -1) / np.arange(NEXT + 1).sum())
    for place in range(tokens - 2):
        before, last = ids[:, -2] % len(follows_AAN), ids[:, -1] % len(follows_AAN)
        ids = np.concatenate([ids, follows_AAN[before, last, chosen[:, place]][:, None]], axis=1)
    return torch.from_numpy(ids)


def learn(model: Any, seed: int, steps: int) -> float:
    """Trains on the made-up language, with the loss that balances experts. Returns the last loss, in nats."""
    random = np.random.default_rng(seed)
    follows_AAN = random.integers(0, VOCABULARY, (8, 8, NEXT))
    optimizer, loss = torch.optim.AdamW(model.parameters(), lr=2e-3), torch.tensor(torch.nan)
    for _ in range(steps):
        ids = text_of(random, 16, 64, follows_AAN)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def draw(folder: Path, seed: int) -> tuple[list[int], list[Completion]]:
    """A prompt, and what the engine writes after it in bfloat16."""
    prompt = np.random.default_rng(seed).integers(0, VOCABULARY, 8).tolist()

    async def generate() -> list[Completion]:
        engine = TransformersEngine(folder, dtype="bfloat16", seed=seed, routing=True)
        try:
            return await engine.generate(prompt, SAMPLING, COMPLETIONS)
        finally:
            await engine.close()

    return prompt, asyncio.run(generate())


@contextmanager
def forced(model: Any, routed_TLK: Tensor) -> Iterator[list[float]]:
    """In the block, the routers choose these experts for the first T tokens of a row. Yields a list that gets, for each
    router, the share of tokens for which it would have chosen another set."""
    handles, differ = [], list[float]()

    def hook_of(layer: int) -> Any:
        def hook(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits_ME, weights_MK, own_MK = output
            taken_MK = own_MK.clone()
            taken_MK[: len(routed_TLK)] = routed_TLK[:, layer]
            differ.append((own_MK.sort(-1).values != taken_MK.sort(-1).values).any(-1).float().mean().item())
            taken = logits_ME.float().softmax(-1).gather(-1, taken_MK)
            return logits_ME, (taken / taken.sum(-1, keepdim=True)).to(weights_MK.dtype), taken_MK

        return hook

    try:
        handles += [router.register_forward_hook(hook_of(layer)) for layer, router in enumerate(routers_of(model))]
        yield differ
    finally:
        for handle in handles:
            handle.remove()


def mismatch(prompt: Sequence[int], completions: Sequence[Completion], model: Any) -> dict[str, float]:
    """Compares a trainer's log-probabilities with those of the sampler: means over the tokens of all completions."""
    trainer, differ = LogprobModel(model, packing=False), list[float]()
    ratios: dict[str, list[Tensor]] = {"own": [], "forced": []}
    for completion in completions:
        batch = to_batch([bare_group(np.array(prompt), np.array(completion.token_ids))])
        sampled_T = torch.tensor(completion.logprobs)
        routed_TLK = torch.from_numpy(completion.extras[ROUTED]).long()
        with torch.no_grad():
            ratios["own"].append(trainer(batch)[0][0] - sampled_T)
            with forced(model, routed_TLK) as shares:
                ratios["forced"].append(trainer(batch)[0][0] - sampled_T)
        differ += shares
    found = {"other experts": statistics.fmean(differ)}
    for name, each in ratios.items():
        log_ratio_N = torch.cat(each).double()
        found[f"k3, {name}"] = (log_ratio_N.expm1() - log_ratio_N).mean().item()
        found[f"|difference|, {name}"] = log_ratio_N.abs().mean().item()
        found[f"largest, {name}"] = log_ratio_N.abs().max().item()
    return found


def main(seeds: int, steps: int, layers: int) -> None:
    found: dict[str, list[dict[str, float]]] = {"float32": [], "bfloat16": []}
    losses = []
    torch.set_num_threads(1)  # so small a model gains nothing from more, which only wait for each other
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as name:
            folder, model = Path(name), make_model(seed, layers)
            losses.append(learn(model, seed, steps))
            model.config.output_router_logits = False
            model.save_pretrained(folder)
            words = Tokenizer(models.WordLevel({f"w{id}": id for id in range(VOCABULARY)}, unk_token="w0"))
            PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
            prompt, completions = draw(folder, seed)
            for dtype, rows in found.items():
                rows.append(mismatch(prompt, completions, AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)))
    print(f"{seeds} models of {layers} layers, {steps} steps each, last loss {statistics.median(losses):.2f} nats")
    print(f"each: {COMPLETIONS} completions of {TOKENS} tokens drawn in bfloat16; median of the models (range)")
    for dtype, rows in found.items():
        print(f"trainer in {dtype}")
        for name in rows[0]:
            values = [row[name] for row in rows]
            print(f"  {name:22} {statistics.median(values):.2e} ({min(values):.2e} to {max(values):.2e})")
        for kind in ("k3", "|difference|", "largest"):
            shares = [row[f"{kind}, forced"] / row[f"{kind}, own"] for row in rows]
            print(f"  {kind}: forced / own {statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:] or (5, 300, 6)))
