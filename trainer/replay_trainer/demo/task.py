"""A tiny verifiable task: sums whose answer is written least significant digit first.

"58+7=" is answered by "56" (65 reversed) and an end-of-sequence token. Writing the units first lets a carry be resolved
locally, so that a model of about a million parameters learns the task in seconds. The sizes of the operands are mixed,
so prompts have 4 to 6 characters and answers 1 to 4 digits, and a half-trained model solves some sizes always and
others never.

    python -m replay_trainer.demo.task make FOLDER SEED TARGET       model/ (random), prompts.jsonl
    python -m replay_trainer.demo.task warm-up FOLDER SEED TARGET    warm/: the model after a short supervised phase
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

Row = dict[str, str]
Progress = Callable[[dict[str, float]], None]

CHARACTERS = "0123456789+-=*? abcdefghijklmnopqrstuvwxyz"
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
MAX_NEW_TOKENS = 9
"""The longest answer of any kind of problem, with its end-of-sequence token."""

# (digits of the first operand, digits of the second) -> share of the problems.  A second operand of
# one digit is learnt first; 2+2 digits stays hard and keeps some groups all wrong for long.
SIZES: dict[tuple[int, int], float] = {(1, 1): 0.05, (2, 1): 0.35, (3, 1): 0.45, (2, 2): 0.15}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; can be saved, and loaded again with `AutoTokenizer`."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNK, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, unk_token=UNK, padding_side="left"
    )


def make_model(seed: int) -> Qwen2ForCausalLM:
    """A freshly initialised Qwen2 of 1.0 million parameters for `make_tokenizer`'s tokens.

    The initial weights are four times the usual size, with which so small a model learns sooner.
    """
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(CHARACTERS) + 3,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=64,
        initializer_range=0.08,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def a_sum(rng: random.Random) -> tuple[str, str]:
    """A prompt and its answer; operand sizes are drawn from SIZES."""
    sizes, shares = list(SIZES), list(SIZES.values())
    first, second = (
        rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits) for digits in rng.choices(sizes, shares)[0]
    )
    return f"{first}+{second}=", str(first + second)[::-1]


def two_steps(rng: random.Random) -> tuple[str, str]:
    """A prompt with three operands and its answer, the sums on the way: "38+5+9=" and "34 25" (43 and 52)."""
    first, second, third = rng.randrange(10, 100), rng.randrange(1, 10), rng.randrange(1, 10)
    middle = first + second
    return f"{first}+{second}+{third}=", f"{str(middle)[::-1]} {str(middle + third)[::-1]}"


PROBLEMS: dict[str, Callable[[random.Random], tuple[str, str]]] = {"sums": a_sum, "steps": two_steps}


def problems(seed: int, count: int, kind: str = "sums") -> list[Row]:
    """`count` distinct problems of one of PROBLEMS."""
    rng = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < count:
        prompt, answer = PROBLEMS[kind](rng)
        rows[prompt] = answer
    return [{"prompt": prompt, "answer": answer} for prompt, answer in rows.items()]


@torch.no_grad()
def sample(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]
) -> tuple[Tensor, Tensor, Tensor]:
    """One completion per prompt at temperature 1.

    Returns the left-padded prompts (ids, mask) and the completions, padded after their eos.
    """
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    prompt_mask, step, cache, tokens = mask, ids, None, []
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    alive = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(MAX_NEW_TOKENS):
        out = model(
            input_ids=step,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, logits = out.past_key_values, out.logits[:, -1]
        chosen = torch.multinomial(logits.float().softmax(-1), 1)[:, 0]
        tokens.append(torch.where(alive, chosen, pad))
        alive = alive & (chosen != eos)
        if not alive.any():
            break
        step, position = chosen[:, None], position[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
    return ids, prompt_mask, torch.stack(tokens, dim=1)


def is_right(tokenizer: PreTrainedTokenizerFast, completion: Sequence[int], answer: str) -> bool:
    """Whether the text before the first eos is the answer; without an eos it is not."""
    tokens = list(completion)
    if tokenizer.eos_token_id not in tokens:
        return False
    return bool(tokenizer.decode(tokens[: tokens.index(tokenizer.eos_token_id)]) == answer)


def solve_rate(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]) -> float:
    """Share of the rows solved by one completion each, sampled at temperature 1."""
    completions = sample(model, tokenizer, [row["prompt"] for row in rows])[2].tolist()
    right = [is_right(tokenizer, completion, row["answer"]) for completion, row in zip(completions, rows, strict=True)]
    return sum(right) / len(right)


def _supervised_batch(tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Right-padded ids and labels; only the answer and its eos carry a label."""
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    prompts = [tokenizer(r["prompt"])["input_ids"] for r in rows]
    answers = [[*tokenizer(r["answer"])["input_ids"], eos] for r in rows]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(rows), width), pad)
    labels = torch.full((len(rows), width), -100)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[Row],
    *,
    target_solve_rate: float = 0.40,
    seed: int = 0,
    max_seconds: float = 120.0,
    progress: Progress | None = None,
    learning_rate: float = 1.5e-3,
    batch_size: int = 64,
    ramp_steps: int = 20,
    check_every: int = 5,
    check_rows: int = 256,
) -> dict[str, float]:
    """Train on the answers until the sampled solve rate reaches its target, or time is up.

    The number of steps needed differs by seed, so the solve rate at temperature 1 ends the
    training.  Returns (and hands to `progress`) steps, seconds, loss and solve_rate.
    """
    start = time.perf_counter()
    rng = random.Random(seed)
    torch.manual_seed(seed)
    checked = rng.sample(rows, min(check_rows, len(rows)))
    all_ids, all_labels = _supervised_batch(tokenizer, rows)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    stats: dict[str, float] = {"steps": 0, "seconds": 0.0, "loss": float("nan"), "solve_rate": 0.0}
    model.train()
    while time.perf_counter() - start < max_seconds:
        step = int(stats["steps"]) + 1
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, step / ramp_steps)
        index = torch.tensor(rng.sample(range(len(rows)), min(batch_size, len(rows))))
        ids, labels = all_ids[index], all_labels[index]
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        stats |= {"steps": step, "seconds": time.perf_counter() - start, "loss": loss.item()}
        if step % check_every == 0:
            stats["solve_rate"] = solve_rate(model, tokenizer, checked)
            stats["seconds"] = time.perf_counter() - start
            if progress is not None:
                progress(dict(stats))
            if stats["solve_rate"] >= target_solve_rate:
                break
    model.eval()
    return stats


def main(command: str, folder: Path, seed: int, target_solve_rate: float, kind: str = "sums") -> None:
    """Does one of the two commands above; prints progress as JSON lines."""
    tokenizer, rows = make_tokenizer(), problems(seed, 3000, kind)
    logging.disable_progress_bar()
    if command == "make":
        make_model(seed).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    # One thread: with two, a second busy process on two cores makes this five times slower.
    torch.set_num_threads(1)
    model = make_model(seed)
    stats = warm_up(
        model,
        tokenizer,
        rows,
        seed=seed,
        target_solve_rate=target_solve_rate,
        progress=lambda stats: print(json.dumps(stats), flush=True),
    )
    if stats["solve_rate"] < target_solve_rate:
        sys.exit(
            f"the warm-up reached a solve rate of {stats['solve_rate']:.2f} in {stats['seconds']:.0f} s, not "
            f"{target_solve_rate}: try another --seed"
        )
    model.save_pretrained(folder / "warm")
    tokenizer.save_pretrained(folder / "warm")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), *sys.argv[5:])
