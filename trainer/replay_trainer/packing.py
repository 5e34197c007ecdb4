"""Packing: prompts and completions of a micro-batch in one row, without padding and with each prompt only once.

    p p p a a b b b q q c c c c d          two groups: prompt p with completions a, b; prompt q with c, d
    0 1 2 3 4 3 4 5 0 1 2 3 4 5 2          positions

Everything except attention treats tokens one by one, so it computes exactly these tokens. Attention follows the layout:
a prompt attends to itself, a completion to its prompt and itself. The layout is a keyword of the forward call, which
transformers passes on to the attention function. A layer that is recomputed for the backward pass gets it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "replay_packed"
"""Name of the attention implementation; without a layout it is transformers' sdpa."""
_PLAIN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Segment:
    """One group in a packed row."""

    start: int
    """Position of its first prompt token."""
    prompt: int
    """Tokens of the prompt."""
    completions: tuple[int, ...]
    """Tokens of each completion; they follow the prompt one after another."""


Layout = tuple[Segment, ...]

_packing: ContextVar[bool] = ContextVar("packing", default=False)


def enable_packing(model: Any) -> bool:
    """Give `model` the packed attention. Returns False, and changes nothing, if the model cannot take it.

    It cannot if it does not call its attention through transformers' interface, or if it has layers that mix tokens in
    another way. The caller must still check the results: some models ignore the interface.
    """
    settable = getattr(model, "_can_set_attn_implementation", None)
    layers = set(getattr(model.config.get_text_config(), "layer_types", None) or _PLAIN_LAYERS)
    if settable is None or not settable() or not layers <= _PLAIN_LAYERS:
        return False
    if model.config._attn_implementation in (ATTENTION, "sdpa"):
        model.set_attn_implementation(ATTENTION)
    return bool(model.config._attn_implementation == ATTENTION)


@contextmanager
def packed_forward() -> Iterator[None]:
    """In this context, packed attention makes no mask of S x S entries: the layout replaces it."""
    token = _packing.set(True)
    try:
        yield
    finally:
        _packing.reset(token)


def packed_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """No mask for packed rows, else the mask of transformers' sdpa."""
    return None if _packing.get() else sdpa_mask(*args, **kwargs)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    replay_layout: Layout | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one packed row; query (1, H, N, D), key and value (1, H or less, N, D) -> (1, N, H, D).

    Raises NotImplementedError for variants that scaled_dot_product_attention does not have.
    """
    if replay_layout is None:
        # The function of transformers has no type for its result.
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"packed attention has no {name}")
    # Under autocast, rotated queries and keys come in float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    repeats = query.shape[1] // key.shape[1]

    def attend(query_HLD: Tensor, key_HSD: Tensor, value_HSD: Tensor) -> Tensor:
        """The last L of S positions attend to all positions up to their own."""
        L, S = query_HLD.shape[2], key_HSD.shape[2]
        if repeats > 1:
            key_HSD, value_HSD = key_HSD.repeat_interleave(repeats, 1), value_HSD.repeat_interleave(repeats, 1)
        if sliding_window is not None and sliding_window < S:
            distance_LS = torch.arange(S - L, S, device=query.device)[:, None] - torch.arange(S, device=query.device)
            mask: Any = (distance_LS >= 0) & (distance_LS < sliding_window)
        elif L == S:
            return scaled_dot_product_attention(query_HLD, key_HSD, value_HSD, is_causal=True, scale=scaling)
        else:
            mask = causal_lower_right(L, S)
        return scaled_dot_product_attention(query_HLD, key_HSD, value_HSD, attn_mask=mask, scale=scaling)

    outputs: list[Tensor] = []
    for segment in replay_layout:
        end = segment.start + segment.prompt
        prompt = slice(segment.start, end)
        query_p, key_p, value_p = query[:, :, prompt], key[:, :, prompt], value[:, :, prompt]
        if segment.prompt:  # rows that each have a context may share no token
            outputs.append(attend(query_p, key_p, value_p))
        for length in segment.completions:
            completion = slice(end, end + length)
            query_c, key_c, value_c = query[:, :, completion], key[:, :, completion], value[:, :, completion]
            key_c, value_c = torch.cat([key_p, key_c], dim=2), torch.cat([value_p, value_c], dim=2)
            if query.is_cuda or segment.prompt > length:
                outputs.append(attend(query_c, key_c, value_c))
            else:
                # On a CPU a mask costs all of L x S. Causal attention from the start of the prompt costs half of S x S.
                outputs.append(attend(torch.cat([query_p, query_c], dim=2), key_c, value_c)[:, :, segment.prompt :])
            end += length
    return torch.cat(outputs, dim=2).transpose(1, 2), None


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, packed_mask)
