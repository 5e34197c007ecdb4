"""Attention of a packed row: each token attends to itself and to the tokens before it in its own sequence.

    layout         runs of tokens, each with the parts of earlier runs that precede it (see shared_prefixes.py)
    for each run   one causal attention: the queries of the run, and the keys and values of those parts and of the run

No mask of S x S entries is made for the S tokens of a row. A model only has to call its attention through
transformers' interface of attention functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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
"""The types of layers, in the configuration of a model, that packed attention can compute."""
_WITHOUT_EFFECT = {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "cache_position"}
"""Arguments that models pass to their attention, and that do not change the result for a causal row. Any other argument
may change the result, and is refused."""

_packing: ContextVar[bool] = ContextVar("packing", default=False)
"""True inside of `packed_forward`."""


def enable_packing(model: Any) -> bool:
    """Gives `model` the packed attention. Returns False if the model cannot take it, and then changes nothing.

    A model can take packed attention if it calls its attention through transformers' interface, if no layer mixes
    tokens in another way, and if its implementation of attention is sdpa. The caller must still check the results,
    because some models ignore the interface.
    """
    # transformers' own test of whether the model calls its attention through the interface.
    can_set_attention = getattr(model, "_can_set_attn_implementation", None)
    if can_set_attention is None or not can_set_attention():
        return False
    layers = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if not _PLAIN_LAYERS.issuperset(layers):
        return False
    # Packed attention computes what sdpa computes. So a model with another implementation, such as eager, keeps that.
    if model.config._attn_implementation in (ATTENTION, "sdpa"):
        model.set_attn_implementation(ATTENTION)
    return bool(model.config._attn_implementation == ATTENTION)


@contextmanager
def packed_forward() -> Iterator[None]:
    """In this context, `packed_mask` makes no mask of S x S entries, because the layout takes its place."""
    token = _packing.set(True)
    try:
        yield
    finally:
        _packing.reset(token)


def packed_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Makes the mask that transformers passes to layers. For packed rows, the mask is the attention window of these
    layers; otherwise, it is the mask of transformers' sdpa.

    The window is one number of tokens in a tensor of shape (1, 1, 1, 1). None: these layers attend to all earlier
    tokens. The window must come to the layers as their mask, because not every layer of a model names its window.
    """
    if not _packing.get():
        mask: Tensor | None = sdpa_mask(*args, **kwargs)
        return mask
    window = kwargs.get("local_size")  # transformers' name for the window of the layers
    if window is None:
        return None
    if window != getattr(kwargs["config"], "sliding_window", None):
        raise NotImplementedError(f"a mask of {window} tokens is no sliding window: packed attention has no other")
    return torch.full((1, 1, 1, 1), window)


def _window_of(mask: Tensor | None, named: int | None) -> int | None:
    """The window of a layer, from the mask that `packed_mask` made for it.

    `named`: the window that the layer itself names, if any. Raises NotImplementedError if `named` is another window.
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

    H heads, N tokens of the row, D dimensions of a head. Without `replay_layout`, computes transformers' sdpa.
    Raises NotImplementedError for an argument of a variant of attention that scaled_dot_product_attention lacks.
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
    # Under autocast, rotated queries and keys are in float32, and values are not.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    repeats = query.shape[1] // key.shape[1]  # heads of queries that share one head of keys and values

    def attend(query_HLD: Tensor, key_HSD: Tensor, value_HSD: Tensor) -> Tensor:
        """Attention of the last L of S positions. Each attends to the positions up to its own, in its window.

        The tensors have an axis of size 1 before those in their names: (1, H, L, D) and (1, H, S, D).
        """
        L = query_HLD.shape[2]
        S = key_HSD.shape[2]
        assert L <= S == value_HSD.shape[2], (query_HLD.shape, key_HSD.shape, value_HSD.shape)
        if repeats > 1:
            key_HSD = key_HSD.repeat_interleave(repeats, 1)
            value_HSD = value_HSD.repeat_interleave(repeats, 1)
        if window is not None and window < S:
            positions_S = torch.arange(S, device=query.device)
            distance_LS = positions_S[S - L :, None] - positions_S
            mask_LS = (distance_LS >= 0) & (distance_LS < window)
            return scaled_dot_product_attention(query_HLD, key_HSD, value_HSD, attn_mask=mask_LS, scale=scaling)
        if L == S:
            return scaled_dot_product_attention(query_HLD, key_HSD, value_HSD, is_causal=True, scale=scaling)
        mask: Any = causal_lower_right(L, S)
        return scaled_dot_product_attention(query_HLD, key_HSD, value_HSD, attn_mask=mask, scale=scaling)

    # The row is split once, and the parts are sliced. The backward pass of a slice costs as much as the sliced tensor,
    # so each slice of the whole row would cost as much as the whole row.
    lengths = [run.length for run in replay_layout]
    queries = torch.split(query, lengths, dim=2)
    keys = torch.split(key, lengths, dim=2)
    values = torch.split(value, lengths, dim=2)
    # (index of a run, number of its first tokens) -> query, key and value of these tokens
    begins: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def begin_of(index: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the first `tokens` tokens of a run. All runs that continue these tokens get the same
        tensors."""
        if (index, tokens) not in begins:
            begins[index, tokens] = (
                queries[index][:, :, :tokens],
                keys[index][:, :, :tokens],
                values[index][:, :, :tokens],
            )
        return begins[index, tokens]

    outputs: list[Tensor] = []
    for index, run in enumerate(replay_layout):
        assert all(earlier < index for earlier, _ in run.before), (index, run)
        if not run.before:
            outputs.append(attend(queries[index], keys[index], values[index]))
            continue
        before = [begin_of(earlier, tokens) for earlier, tokens in run.before]
        queries_before, keys_before, values_before = zip(*before, strict=True)
        key_S = torch.cat([*keys_before, keys[index]], dim=2)
        value_S = torch.cat([*values_before, values[index]], dim=2)
        num_before = key_S.shape[2] - run.length
        if query.is_cuda or num_before > run.length:
            outputs.append(attend(queries[index], key_S, value_S))
        else:
            # On a CPU, attention with a mask costs all of L x S, for the L tokens of the run and S tokens in all.
            # Causal attention of all S tokens costs half of S x S, which is less if at most L tokens precede the run.
            # The outputs of the tokens before the run are cut off.
            query_S = torch.cat([*queries_before, queries[index]], dim=2)
            output_S = attend(query_S, key_S, value_S)
            outputs.append(output_S[:, :, num_before:])
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, packed_mask)
