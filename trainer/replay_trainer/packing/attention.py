"""Attention of a packed row: each token attends to what precedes it in its own sequence, and to nothing else.

    layout         runs of tokens, each with the parts of earlier runs that precede it (see shared_prefixes.py)
    for each run   its queries, and the keys and values of all that precedes them and of itself: one causal attention

There is no mask of S x S entries, and a model needs nothing but transformers' interface of attention functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import starmap
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from replay_trainer.packing.shared_prefixes import Layout

ATTENTION = "replay_packed"
"""Name of the attention implementation; without a layout it is transformers' sdpa."""
_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
_WITHOUT_EFFECT = {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "cache_position"}
"""What models hand to their attention and sdpa does not need for a causal row. All else may change the result."""

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
    """The window of the layers that get this mask, for packed rows; else the mask of transformers' sdpa.

    A window is one number (1, 1, 1, 1), in tokens; None: these layers attend to all that precedes. sdpa knows windows
    by their masks alone, and not every layer of a model names its own.
    """
    if not _packing.get():
        mask: Tensor | None = sdpa_mask(*args, **kwargs)
        return mask
    window = kwargs.get("local_size")
    config = kwargs["config"]
    if window is None:
        return None
    if window != getattr(config, "sliding_window", None):
        raise NotImplementedError(f"a mask of {window} tokens is no sliding window: packed attention has no other")
    return torch.full((1, 1, 1, 1), window)


def _window_of(mask: Tensor | None, named: int | None) -> int | None:
    """The window of a layer, from what `packed_mask` made for it. `named`: what the layer says of it, if anything.

    Raises NotImplementedError if the two are not one.
    """
    window = None if mask is None else int(mask)
    if named is not None and named != window:
        raise NotImplementedError(f"the layer names a window of {named} tokens, and its mask has {window}")
    return window


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
    for name, argument in kwargs.items():
        if argument is not None and name not in _WITHOUT_EFFECT:
            raise NotImplementedError(f"packed attention has no {name}")
    assert query.shape[0] == 1, f"a packed row is one row, not {query.shape[0]}"
    assert query.shape[1] % key.shape[1] == 0, (query.shape, key.shape)
    window = _window_of(attention_mask, sliding_window)
    # Under autocast, rotated queries and keys come in float32.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    repeats = query.shape[1] // key.shape[1]

    def attend(query_HLD: Tensor, key_HSD: Tensor, value_HSD: Tensor) -> Tensor:
        """The last L of S positions attend to all positions up to their own."""
        L = query_HLD.shape[2]
        S = key_HSD.shape[2]
        assert L <= S == value_HSD.shape[2], (query_HLD.shape, key_HSD.shape, value_HSD.shape)
        if repeats > 1:
            key_HSD = key_HSD.repeat_interleave(repeats, 1)
            value_HSD = value_HSD.repeat_interleave(repeats, 1)
        if window is not None and window < S:
            distance_LS = torch.arange(S - L, S, device=query.device)[:, None] - torch.arange(S, device=query.device)
            mask: Any = (distance_LS >= 0) & (distance_LS < window)
        elif L == S:
            return scaled_dot_product_attention(query_HLD, key_HSD, value_HSD, is_causal=True, scale=scaling)
        else:
            mask = causal_lower_right(L, S)
        return scaled_dot_product_attention(query_HLD, key_HSD, value_HSD, attn_mask=mask, scale=scaling)

    # One split, and slices of its parts: a slice of the whole row would cost the whole row in the backward pass.
    lengths = [run.length for run in replay_layout]
    parts = [torch.split(each, lengths, dim=2) for each in (query, key, value)]
    known: dict[tuple[int, int], list[Tensor]] = {}

    def first_of(run: int, tokens: int) -> list[Tensor]:
        """Query, key and value of the first tokens of a run; the same tensors for all runs that follow them."""
        if (run, tokens) not in known:
            known[run, tokens] = [part[run][:, :, :tokens] for part in parts]
        return known[run, tokens]

    outputs: list[Tensor] = []
    for index, run in enumerate(replay_layout):
        assert all(earlier < index for earlier, _ in run.before), (index, run)
        own = [part[index] for part in parts]
        if not run.before:
            outputs.append(attend(*own))
            continue
        path = [*starmap(first_of, run.before), own]
        key_S = torch.cat([key_of_run for _, key_of_run, _ in path], dim=2)
        value_S = torch.cat([value_of_run for _, _, value_of_run in path], dim=2)
        begun = key_S.shape[2] - run.length
        if query.is_cuda or begun > run.length:
            outputs.append(attend(own[0], key_S, value_S))
        else:
            # On a CPU a mask costs all of L x S. Causal attention from the first token costs half of S x S.
            query_S = torch.cat([query_of_run for query_of_run, _, _ in path], dim=2)
            outputs.append(attend(query_S, key_S, value_S)[:, :, begun:])
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, packed_mask)
