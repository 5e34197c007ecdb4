"""Tiny models of some fifty families, at least one of each mechanism, and what trainer and engines make of them.

Their windows are longer than the trial of a route, and shorter than the sequences of a test: nothing that a trial does
not see may change what a model computes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

torch.set_num_threads(1)  # matrices this small only wait for a second one

VOCABULARY = 64
WINDOW = 24
"""Tokens. A trial has at most 18 positions, and sequences here have up to 69."""
ORIGINAL = 32
"""Tokens, for which frequencies were trained that depend on the length."""


@dataclass(frozen=True)
class Family:
    """A small model, and by which route it is trained."""

    kind: str
    """The `model_type` of transformers."""
    route: str = "packed"
    """Of the trainer; "refused": the trainer does not take it."""
    engine: bool = True
    """Whether the transformers engine draws from it; False: it refuses it."""
    max_length: int | None = None
    """Of trainer and engine; None: the default."""
    longest: int = 69
    """Tokens of the longest sequence that the model is given here."""
    read_as: int = 0
    """Tokens to which a sequence is filled up, for the plain model to choose the frequencies of long ones."""
    config: Mapping[str, Any] = field(default_factory=dict)

    def make(self, seed: int = 0) -> Any:
        """The model with random weights, in eval mode, with the attention that transformers chooses."""
        torch.manual_seed(seed)
        config = AutoConfig.for_model(self.kind, **{**SMALL, **self.config})
        model = AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.15)
        return model

    @torch.no_grad()
    def alone(self, model: Any, token_ids: Sequence[int]) -> Tensor:
        """(T - 1,) log-probabilities of all tokens but the first: one plain forward pass of a fresh copy."""
        fresh = copy.deepcopy(model)
        filled = [*token_ids, *[5] * (self.read_as - len(token_ids))]
        logits = fresh(input_ids=torch.tensor([filled])).logits[0, : len(token_ids) - 1]
        return logits.float().log_softmax(-1).gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]

    def reference(self, seed: int = 0) -> Any:
        """The model that computes what is right: with eager attention, unless sdpa is known to be right."""
        model = self.make(seed)
        if self.kind != "falcon" and model._can_set_attn_implementation():
            model.set_attn_implementation("eager")
        return model


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK_MOE = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
HALVES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
BART = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
BERT = {"is_decoder": False}


def longrope(**more: Any) -> dict[str, Any]:
    """Frequencies with short and long factors, for heads of 8."""
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [2.0, 4.0, 8.0, 16.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL}
    return {"rope_parameters": rope | factors | more, "original_max_position_embeddings": ORIGINAL}


def scaled(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0} | more}


FEW = {
    "llama": Family("llama"),
    "qwen2, window": Family(
        "qwen2", config={"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "gemma2, cap and window": Family(
        "gemma2", "logits", config=HALVES | {"head_dim": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}
    ),
    "phi3, long factors": Family("phi3", max_length=128, read_as=ORIGINAL + 1, config=longrope()),
    "qwen2_moe, window": Family(
        "qwen2_moe",
        config=MOE
        | {
            "shared_expert_intermediate_size": 16,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
    "falcon, ALiBi": Family("falcon", "padded", config={"alibi": True, "new_decoder_architecture": False}),
    "gpt_oss, sinks": Family("gpt_oss", "padded", config=LOCAL_MOE | HALVES | {"head_dim": 8}),
    "qwen3_next, linear attention": Family(
        "qwen3_next", "padded", config=MOE | LINEAR | {"shared_expert_intermediate_size": 16}
    ),
}
"""Those that `make test` looks at."""
MANY = {
    "mistral, window": Family("mistral", config={"sliding_window": WINDOW}),
    "qwen2, tied": Family("qwen2", config={"tie_word_embeddings": True}),
    "qwen3": Family("qwen3", config={"head_dim": 8}),
    "qwen3_moe": Family("qwen3_moe", config=MOE | {"head_dim": 8}),
    "mixtral": Family("mixtral", config=LOCAL_MOE),
    "olmo2": Family("olmo2"),
    "olmo3, window": Family("olmo3", config=HALVES),
    "olmoe": Family("olmoe", config=MOE),
    "gemma": Family("gemma", config={"head_dim": 8}),
    "gemma3, window": Family("gemma3_text", config=HALVES | {"head_dim": 8}),
    "phi": Family("phi"),
    "phi3, short factors": Family("phi3", longest=ORIGINAL, config=longrope()),
    "phimoe, window in the mask": Family(
        "phimoe",
        longest=ORIGINAL,
        config=LOCAL_MOE | longrope(short_mscale=1.1, long_mscale=1.2) | {"sliding_window": WINDOW},
    ),
    "cohere": Family("cohere", "logits"),
    "cohere2, window": Family("cohere2", "logits", config=HALVES),
    "granite": Family("granite", "logits", config={"logits_scaling": 2.0}),
    "granitemoe": Family("granitemoe", "logits", config=LOCAL_MOE | {"logits_scaling": 2.0}),
    "starcoder2, window": Family("starcoder2", config={"sliding_window": WINDOW}),
    "stablelm": Family("stablelm", "padded"),
    "gpt2": Family("gpt2", config=GPT2),
    "opt": Family("opt", config={"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt_neox": Family("gpt_neox"),
    "gptj": Family("gptj", "padded", config=GPT2 | {"rotary_dim": 4}),
    "codegen": Family("codegen", "padded", config=GPT2 | {"rotary_dim": 4}),
    "gpt_bigcode": Family("gpt_bigcode", config=GPT2),
    "bloom, ALiBi": Family("bloom", "padded", config={"n_layer": 2, "n_head": 4}),
    "mpt, ALiBi": Family("mpt", "padded", config={"d_model": 32, "n_heads": 4, "n_layers": 2}),
    "falcon, rotary": Family("falcon", "padded", config={"alibi": False, "new_decoder_architecture": False}),
    "deepseek_v2, MLA": Family("deepseek_v2", config=MLA | DEEPSEEK_MOE),
    "deepseek_v3, MLA": Family("deepseek_v3", config=MLA | DEEPSEEK_MOE),
    "llama4, chunks": Family(
        "llama4_text",
        "logits",
        config=LOCAL_MOE
        | {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "glm4": Family("glm4", config={"head_dim": 8}),
    "ernie4_5": Family("ernie4_5", config={"head_dim": 8}),
    "exaone4, window": Family("exaone4", config=HALVES),
    "smollm3, layers without positions": Family("smollm3", config={"no_rope_layers": [1, 0]}),
    "nemotron": Family("nemotron", "padded"),
    "persimmon": Family("persimmon", config={"num_key_value_heads": 4}),
    "afmoe, gates": Family("afmoe", config=MOE | HALVES | {"head_dim": 8, "num_dense_layers": 1}),
    "jetmoe": Family("jetmoe", config=LOCAL_MOE | {"kv_channels": 8, "num_key_value_heads": 2}),
    "lfm2, convolutions": Family("lfm2", "padded", config={"layer_types": ["conv", "full_attention"]}),
    "llama, long factors": Family("llama", max_length=128, read_as=ORIGINAL + 1, config=longrope()),
    "llama, dynamic": Family(
        "llama", longest=ORIGINAL, config=scaled("dynamic") | {"max_position_embeddings": ORIGINAL}
    ),
    "llama, yarn": Family("llama", config=scaled("yarn", original_max_position_embeddings=ORIGINAL)),
    "llama, linear": Family("llama", config=scaled("linear")),
    "llama, llama3": Family(
        "llama",
        config=scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL),
    ),
    "bart, positions of the row": Family("bart", "padded", engine=False, config=BART),
    "moshi, window of the cache alone": Family(
        "moshi", "padded", engine=False, config={"ffn_dim": 48, "head_dim": 8, "sliding_window": WINDOW}
    ),
    "mamba, no cache of keys": Family(
        "mamba", "padded", engine=False, config={"state_size": 8, "num_hidden_layers": 2}
    ),
    "deepseek_v4, compressed keys": Family(
        "deepseek_v4",
        "padded",
        engine=False,
        config={
            "head_dim": 8,
            "q_lora_rank": 16,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "sliding_window": WINDOW,
            "layer_types": ["heavily_compressed_attention", "heavily_compressed_attention"],
        },
    ),
    "bert": Family("bert", "refused", engine=False, config=BERT),
    "roberta": Family("roberta", "refused", engine=False, config=BERT),
    "gemma3, both ways": Family(
        "gemma3_text",
        "refused",
        engine=False,
        config=HALVES | {"head_dim": 8, "use_bidirectional_attention": True},
    ),
}
"""All others."""
FAMILIES = FEW | MANY
