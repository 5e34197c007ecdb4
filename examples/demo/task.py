"""A tiny verifiable task: sums whose answer is written least significant digit first.

"58+7=" is answered by "56" (65 reversed) and an end-of-sequence token. Writing the units first lets a carry be resolved
locally, so that a model of about a million parameters learns the task in seconds. The sizes of the operands are mixed,
so prompts have 4 to 6 characters and answers 1 to 4 digits, and a half-trained model solves some sizes always and
others never.

    python -m examples.demo.task make FOLDER SEED TARGET       warm/, a random model, and prompts.jsonl
    python -m examples.demo.task warm-up FOLDER SEED TARGET    warm/ again: the model after a short supervised phase
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from examples.demo import tools

Row = dict[str, str]
Batch = tuple[Tensor, Tensor]
"""Right-padded ids (R, S), and labels (R, S) that are -100 outside the tokens of the policy."""

CHARACTERS = "0123456789+-=*? abcdefghijklmnopqrstuvwxyz"
PAD = "<pad>"
EOS = "<eos>"
UNK = "<unk>"
PAD_ID = 0
EOS_ID = 1
_IDS = {character: index + 3 for index, character in enumerate(CHARACTERS)}
_WARM_UP_BATCH = 64
_CHECKED = 256
"""Rows with which the warm-up is checked."""
_RAMP_STEPS = 20
"""Steps of the warm-up in which the learning rate rises."""
_WARM_UP_SECONDS = 120.0
"""Processor seconds after which a warm-up without its solve rate has failed. On a busy machine it may take longer."""

# (digits of the first operand, digits of the second) -> share of the problems. The model learns a second operand of one
# digit first. Sums of 2+2 digits stay hard, so that for a long time some groups have only wrong rollouts.
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


def make_model(seed: int, vocabulary: int = len(CHARACTERS) + 3) -> Qwen2ForCausalLM:
    """A freshly initialised Qwen2 of 1.0 million parameters, for `make_tokenizer`'s tokens unless told otherwise.

    The initial weights are four times the usual size, because so small a model then learns sooner.
    """
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=64,
        initializer_range=0.08,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def a_sum(rng: random.Random) -> tuple[str, str]:
    """A prompt and its answer; operand sizes are drawn from SIZES."""
    sizes = list(SIZES)
    shares = list(SIZES.values())
    first_digits, second_digits = rng.choices(sizes, shares)[0]
    first = _number(rng, first_digits)
    second = _number(rng, second_digits)
    return f"{first}+{second}=", _reversed(first + second)


def _number(rng: random.Random, digits: int) -> int:
    """A random number with this many digits; 0 has one digit."""
    least = 10 ** (digits - 1) if digits > 1 else 0
    return rng.randrange(least, 10**digits)


def _reversed(number: int) -> str:
    """The digits of a number, the least significant one first."""
    return str(number)[::-1]


def two_steps(rng: random.Random) -> tuple[str, str]:
    """A prompt with three operands, and its answer, the two partial sums: "38+5+9=" and "34 25" (43 and 52)."""
    first = rng.randrange(10, 100)
    second = rng.randrange(1, 10)
    third = rng.randrange(1, 10)
    middle = first + second
    return f"{first}+{second}+{third}=", f"{_reversed(middle)} {_reversed(middle + third)}"


PROBLEMS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "sums": a_sum,
    "steps": two_steps,
    "tools": tools.a_product,
}
"""For each kind of problem, by name: the function that makes a prompt and its answer."""


def problems(seed: int, count: int, kind: str = "sums") -> list[Row]:
    """`count` distinct problems of one of PROBLEMS."""
    rng = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < count:
        prompt, answer = PROBLEMS[kind](rng)
        rows[prompt] = answer
    return [{"prompt": prompt, "answer": answer} for prompt, answer in rows.items()]


def encode(text: str) -> list[int]:
    """The tokens that `make_tokenizer` gives for a text of CHARACTERS."""
    return [_IDS[character] for character in text]


def supervised_batch(rows: Sequence[Row]) -> Batch:
    """The prompts with their answers. The labels are the answers."""
    conversations = []
    for row in rows:
        prompt = encode(row["prompt"])
        answer = [*encode(row["answer"]), EOS_ID]
        conversations.append((prompt, answer))
    return padded(conversations)


def padded(conversations: Sequence[Sequence[list[int]]]) -> Batch:
    """The batch of R conversations, each a list of turns in tokens. The labels are every second turn: the policy's."""
    shape = (len(conversations), max(sum(map(len, turns)) for turns in conversations))
    ids_RS = torch.full(shape, PAD_ID)
    labels_RS = torch.full(shape, -100)
    for row, turns in enumerate(conversations):
        start = 0
        for number, turn in enumerate(turns):
            end = start + len(turn)
            ids_RS[row, start:end] = torch.tensor(turn)
            if number % 2:
                labels_RS[row, start:end] = ids_RS[row, start:end]
            start = end
    return ids_RS, labels_RS


@torch.no_grad()
def solve_rate(model: Any, ids: Tensor, labels: Tensor) -> float:
    """The mean probability, at temperature 1, of sampling exactly the labelled answers (R, S)."""
    logprobs = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    wanted = labels[:, 1:]
    chosen = logprobs.gather(-1, wanted.clamp_min(0)[..., None])[..., 0]
    return float(torch.where(wanted >= 0, chosen, 0.0).sum(1).exp().mean())


def warm_up(
    model: Any, rows: Sequence[Row], checked: Sequence[Row], *, seed: int, learning_rate: float, check_every: int
) -> Iterator[dict[str, float]]:
    """Runs `imitate` on the answers of `rows`, checked with the answers of `checked`."""
    taught = supervised_batch(rows)
    held_out = supervised_batch(checked)
    return imitate(model, taught, held_out, seed=seed, learning_rate=learning_rate, check_every=check_every)


def imitate(
    model: Any, taught: Batch, checked: Batch, *, seed: int, learning_rate: float, check_every: int
) -> Iterator[dict[str, float]]:
    """Trains on the labels of `taught`, without end. Yields `steps`, `loss`, and the `solve_rate` of `checked`.

    There is a result every `check_every` steps. The number of steps that a model needs differs by seed, so the caller
    ends the training by the solve rate.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    ids, labels = taught
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    for step in itertools.count(1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, step / _RAMP_STEPS)
        index = torch.tensor(rng.sample(range(len(ids)), _WARM_UP_BATCH))
        logits = model(input_ids=ids[index], use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[index, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % check_every == 0:
            yield {"steps": step, "loss": loss.item(), "solve_rate": solve_rate(model, *checked)}


def lessons(tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row], kind: str) -> tuple[Batch, Batch]:
    """The batch that the warm-up of one of PROBLEMS teaches, and the batch that checks it."""
    if kind != "tools":
        return supervised_batch(rows), supervised_batch(rows[:_CHECKED])
    with_tool = tools.demonstrations(tokenizer, rows, with_tool=True)
    alone = tools.demonstrations(tokenizer, rows, with_tool=False)
    # Most demonstrations are without the tool, so that the policy begins with few calls.
    return padded(with_tool + 2 * alone), padded(with_tool[:_CHECKED])


def main(command: str, folder: Path, seed: int, target_solve_rate: float, kind: str = "sums") -> None:
    """Does one of the two commands above, and prints its progress as JSON lines."""
    tokenizer = make_tokenizer()
    rows = problems(seed, 3000, kind)
    if kind == "tools":
        tools.teach_chat(tokenizer)
    model = make_model(seed, len(tokenizer))
    logging.disable_progress_bar()
    if command == "make":
        save(model, tokenizer, folder / "warm")
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / "prompts.jsonl").write_text("".join(lines))
        return
    # One thread: with two, a second busy process on two cores makes this five times slower.
    torch.set_num_threads(1)
    taught, checked = lessons(tokenizer, rows, kind)
    end = time.process_time() + _WARM_UP_SECONDS
    for stats in imitate(model, taught, checked, seed=seed, learning_rate=1.5e-3, check_every=2):
        print(json.dumps(stats), flush=True)
        if stats["solve_rate"] >= target_solve_rate:
            break
        if time.process_time() > end:
            sys.exit(
                f"the warm-up reached a solve rate of {stats['solve_rate']:.2f} in {_WARM_UP_SECONDS:.0f} s of "
                f"computing, not {target_solve_rate}: try another --seed"
            )
    save(model, tokenizer, folder / "warm")


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes a model. An older model is replaced file by file, because an engine may be reading it."""
    unfinished = folder.with_name(f"{folder.name}.new")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    folder.mkdir(exist_ok=True)
    for path in unfinished.iterdir():
        path.replace(folder / path.name)
    unfinished.rmdir()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), *sys.argv[5:])
