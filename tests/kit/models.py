"""Tiny models, their versions and adapters as a trainer saves them, and what transformers says of their tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from replay_generator.engines import SamplingConfig
from replay_generator.engines.weights import Probe
from replay_generator.testing import EOS

torch.set_num_threads(1)  # matrices this small only wait for a second one

VOCABULARY = 16
CHARACTERS = "0123456789+=? abcdefghij"

EXACT = 1e-4
"""Nats. On the models that are made here float32 is at most 1e-5 off float64. A token with the weights of another
version is off by some tenths and more in the median."""


def save_model(folder: Path, *, seed: int = 0, tied: bool = False, sharpness: float = 8.0) -> Path:
    """A Qwen2 of some 20,000 parameters with a character tokenizer, saved as `transformers` does.

    `sharpness` scales the output head, so that its distributions are far from uniform.
    """
    vocabulary = {"<pad>": 0, "<eos>": EOS, "<unk>": 2}
    vocabulary |= {character: index for index, character in enumerate(CHARACTERS, start=len(vocabulary))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharpness)
    model.save_pretrained(folder)
    return folder


def fake_weights(folder: Path, *, probe: list[float] | None = None) -> Path:
    """A folder that stands for a version, with a probe if its log-probabilities are given."""
    folder.mkdir()
    if probe is not None:
        content = {"token_ids": list(range(len(probe) + 1)), "logprobs": probe}
        (folder / "probe.json").write_text(json.dumps(content))
    return folder


def scores(folder: Path, token_ids: Sequence[int]) -> list[float]:
    """What transformers says: log-probabilities at temperature 1 of all tokens but the first."""
    return recomputed(folder, token_ids[:1], token_ids[1:], SamplingConfig())


def recomputed(
    folder: Path, prompt_ids: Sequence[int], completion_ids: Sequence[int], sampling: SamplingConfig
) -> list[float]:
    """Log-probabilities of a completion by one forward pass, without cache, padding or batch."""
    return logprobs_of(loaded(folder), prompt_ids, completion_ids, sampling)


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def logprobs_of(
    model: Any, prompt_ids: Sequence[int], completion_ids: Sequence[int], sampling: SamplingConfig
) -> list[float]:
    """`recomputed` with a model that is loaded."""
    logprobs_TV = distributions(model, prompt_ids, completion_ids, sampling)
    return [logprobs_TV[step, token].item() for step, token in enumerate(completion_ids)]


def distributions(
    model: Any, prompt_ids: Sequence[int], completion_ids: Sequence[int], sampling: SamplingConfig
) -> torch.Tensor:
    """(T, V) log-probabilities that each token of a completion is drawn with."""
    ids = torch.tensor([[*prompt_ids, *completion_ids]])
    with torch.no_grad():
        logits_TV = model(ids).logits[0, len(prompt_ids) - 1 : -1] / sampling.temperature
    for row in logits_TV:
        _restrict(row, sampling)
    return logits_TV.log_softmax(-1)


def _restrict(logits_V: torch.Tensor, sampling: SamplingConfig) -> None:
    """Leave out what min_p, then top_k and then top_p leave out, token by token as their definitions read."""
    ranked = logits_V.argsort(descending=True).tolist()
    likely = logits_V.softmax(-1).tolist()
    for token in ranked:
        if likely[token] < sampling.min_p * likely[ranked[0]]:
            logits_V[token] = -torch.inf
    if sampling.top_k:
        logits_V[ranked[sampling.top_k :]] = -torch.inf
    reached, probabilities = 0.0, logits_V.softmax(-1).tolist()
    for token in ranked:
        if sampling.top_p < 1 and reached >= sampling.top_p:
            logits_V[token] = -torch.inf
        reached += probabilities[token]


def make_version(
    base: Path, folder: Path, *, seed: int = 1, probe: bool = True, probe_error: float = 0.0, drift: float = 0.05
) -> Path:
    """Weights some way off those of `base`, with the probe that a trainer would write (off by `probe_error` nats)."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * drift)
    model.save_pretrained(folder)
    if probe:
        token_ids = [3, 9, 4, 13, 7, 5, 20, 11]
        logprobs = [logprob + probe_error for logprob in scores(folder, token_ids)]
        (folder / "probe.json").write_text(json.dumps({"token_ids": token_ids, "logprobs": logprobs}))
    return folder


def make_adapter(
    base: Path, folder: Path, *, seed: int = 1, probe: bool = True, rank: int = 4, drift: float = 0.1
) -> Path:
    """A LoRA adapter of `base` with random weights, and the probe that a trainer would write.

    With a `drift` of 0.1 the median token is 1.5 nats off the base model, and float32 is at most 1e-5 nats off float64.
    With 0.3 attention is so sharp that float32 itself is up to 1e-3 nats off, which no comparison tells from a fault.
    """
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, drift)
    adapted.save_pretrained(folder)
    if probe:
        token_ids = [3, 9, 4, 13, 7, 5, 20, 11]
        (folder / "probe.json").write_text(json.dumps({"token_ids": token_ids, "logprobs": scores(folder, token_ids)}))
    return folder


def make_chat_tokenizer(template: str | None, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer with a token a byte, and one for each mark that chat templates write; `bos`: it writes <s> first."""
    marks = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: at for at, name in enumerate([*marks[:4], *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=marks[2:4]
    )
    fast.chat_template = template
    return fast


def shipped_template(name: str) -> str:
    """The chat template of a model, as TRL ships it."""
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def make_model(*, seed: int = 0, vocabulary: int = VOCABULARY, tied: bool = False) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return Qwen2ForCausalLM(config).eval()


NEAR = {"atol": 1e-6, "rtol": 1e-4}
"""Tolerance for sums of float32 that are added in another order."""


def assert_same_weights(a: Any, b: Any, **tolerance: float) -> None:
    """`a` and `b` are models, or what their `state_dict` returns. Without a tolerance, every bit is the same."""
    a, b = (each if isinstance(each, dict) else each.state_dict() for each in (a, b))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], **(tolerance or {"atol": 0, "rtol": 0}))


def probe_difference(model: Any, folder: Path) -> float:
    """How far a model that was loaded from the folder is from the trainer's probe, in nats."""
    probe = Probe.read(str(folder))
    assert probe is not None
    ids = torch.tensor([probe.token_ids])
    with torch.no_grad():
        logprobs = model.eval()(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return probe.max_difference(logprobs.tolist())


POISON = 15
"""A token that neither make_batches nor the probe of make_model contains."""


def poison(model: Any, effect: str) -> None:
    """Make `model` fail at sequences with POISON: "nan" computes NaN for them, "memory" asks for too much memory."""

    def harm(_: Any, arguments: tuple[torch.Tensor, ...], embedded: torch.Tensor) -> torch.Tensor:
        there = arguments[0] == POISON
        if effect == "memory" and there.any():
            torch.empty(1 << 60)
        return torch.where(there[..., None], torch.nan, embedded) if effect == "nan" else embedded

    model.get_input_embeddings().register_forward_hook(harm)
