"""Lets TRL's real AsyncGRPOTrainer train on a CPU. Import it before a trainer is made.

TRL's packed attention calls the variable-length kernel of flash-attention, and its statistics ask for the peak rate of
a GPU. Both are replaced; everything else is TRL's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import trl.experimental.async_grpo.async_grpo_trainer as trainer_module
import trl.experimental.async_grpo.packing as packing
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

OPTIONS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "disable_tqdm": True,
    "learning_rate": 1e-3,
}
"""What AsyncGRPOConfig needs for it."""


def _attention(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, *_: Any, **options: Any) -> Tensor:
    """(tokens of all sequences, heads, size): causal attention, each sequence on its own."""
    outputs = []
    for i in range(len(ends_q) - 1):
        of_q, of_k = slice(int(ends_q[i]), int(ends_q[i + 1])), slice(int(ends_k[i]), int(ends_k[i + 1]))
        query = q[of_q].transpose(0, 1)
        key, value = (x[of_k].repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (k, v))
        before = key.shape[1] - query.shape[1]
        mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(before)
        scale = options["softmax_scale"]
        outputs.append(scaled_dot_product_attention(query, key, value, mask, scale=scale).transpose(0, 1))
    return torch.cat(outputs)


packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_attention)
trainer_module.get_peak_flops_per_device = lambda *_: None
