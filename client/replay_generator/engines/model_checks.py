"""Checks of a language model of transformers: that it is causal, and that its attention computes the right scores.

The checks cost a few forward passes of some tokens when a model is loaded. A model that fails a check is refused in one
sentence, instead of being trained with wrong log-probabilities.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SDPA_IS_RIGHT = {
    "falcon": "its eager attention adds the biases of ALiBi before it scales the scores, sdpa adds them scaled",
}
"""The types of models whose sdpa and eager attention differ, and the reason that sdpa is right."""
_ROWS = 2
_TOKENS = 12
"""A model is checked with batches of `_ROWS` rows of `_TOKENS` tokens."""
_TRIES = 3
"""The number of batches for a model that computes in less than float32. The model passes if one batch passes, because
rounding may route a token to different experts in two computations of the same batch."""


def tolerance_of(model: Any, logprobs: Tensor) -> float:
    """The largest difference in nats that rounding can make between two computations of these log-probabilities."""
    relative = 1e-4 if exact(model) else 3e-2
    return relative * float(logprobs.abs().max())


def exact(model: Any) -> bool:
    """True if the model computes in float32 or better."""
    dtype = model.get_input_embeddings().weight.dtype
    return bool(torch.finfo(dtype).eps <= torch.finfo(torch.float32).eps)


def tries_of(model: Any) -> range:
    """The seeds of the batches with which a model is checked. The model passes if one of the batches passes."""
    if exact(model):
        return range(1)
    return range(_TRIES)


def name_of(model: Any) -> str:
    """The name of the model in errors."""
    config = model.config
    path = getattr(config, "_name_or_path", "")
    if not path:
        return str(config.model_type)
    return f"{config.model_type} ({path})"


def choose_attention(model: Any) -> bool:
    """Switches a model that caps its attention scores to eager attention.

    The reason is that sdpa leaves the cap out, and vLLM does not. Returns True if the model was switched. Raises
    ValueError if the model cannot be switched.
    """
    cap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if not cap or model.config._attn_implementation not in _SDPA:
        return False
    model.set_attn_implementation("eager")
    if model.config._attn_implementation != "eager":
        raise ValueError(
            f"{name_of(model)} has attn_logit_softcapping = {cap}, which sdpa leaves out: load it with "
            "attn_implementation='eager'"
        )
    logger.warning(
        "%s has attn_logit_softcapping = %g, which sdpa leaves out: it computes with eager attention. Nothing is "
        "packed, and the memory of a pass grows with the square of the longest sequence (said once)",
        name_of(model),
        cap,
    )
    return True


_SDPA = ("sdpa", "replay_packed")
"""Implementations of attention that compute the same as transformers' sdpa. "replay_packed" is the trainer's own, which
computes the same unless the trainer packs rows."""


@torch.no_grad()
def check_model(model: Any) -> None:
    """Checks that no token sees a later token, and that sdpa computes the same as the model's eager attention.

    Raises ValueError, which names the model. The check leaves the model as it was.
    """
    difference = _difference(model, _compare_with_other_last_token)
    if difference:
        raise ValueError(
            f"{name_of(model)} is no causal language model: after a change of the last token, log-probabilities of "
            f"earlier ones differ by {difference:.3g} nats. Take a model that predicts each token from those before it"
        )
    if model.config._attn_implementation not in _SDPA or model.config.model_type in SDPA_IS_RIGHT:
        return
    difference = _difference(model, _compare_with_eager)
    if difference:
        raise ValueError(
            f"{name_of(model)}: with sdpa and with eager attention its log-probabilities differ by {difference:.3g} "
            "nats, and nobody has found out which are right. Load it with attn_implementation='eager' if you know that "
            "those are, or take another model"
        )


def _difference(model: Any, compare: Callable[[Any, Tensor], tuple[float, Tensor]]) -> float:
    """The difference in nats between two ways to compute log-probabilities; 0: the model passes.

    The model passes if the difference is only rounding in one of the tries. `compare` computes the log-probabilities of
    a batch in both ways. It returns the largest difference between the two results, and one of the results.
    """
    vocabulary = len(model.get_input_embeddings().weight)
    difference = 0.0
    for seed in tries_of(model):
        random = torch.Generator().manual_seed(seed)
        ids_BT = torch.randint(0, vocabulary, (_ROWS, _TOKENS), generator=random).to(model.device)
        difference, logprobs = compare(model, ids_BT)
        if not logprobs.isfinite().all():
            return 0.0  # the weights are damaged: the probe of the first version reports that
        if difference <= tolerance_of(model, logprobs):
            return 0.0
    return difference


def _compare_with_other_last_token(model: Any, ids_BT: Tensor) -> tuple[float, Tensor]:
    """Compares log-probabilities of earlier tokens before and after a change of the last token, for `_difference`."""
    vocabulary = len(model.get_input_embeddings().weight)
    changed_ids_BT = ids_BT.clone()
    changed_ids_BT[:, -1] = (changed_ids_BT[:, -1] + 1) % vocabulary
    before_BTV = _logprobs(model, ids_BT)
    after_BTV = _logprobs(model, changed_ids_BT)
    difference = (after_BTV[:, :-1] - before_BTV[:, :-1]).abs().max()
    return float(difference), before_BTV


def _compare_with_eager(model: Any, ids_BT: Tensor) -> tuple[float, Tensor]:
    """Compares the log-probabilities with sdpa and with eager attention, for `_difference`."""
    with_sdpa_BTV = _logprobs(model, ids_BT)
    with _eager(model):
        try:
            eager_BTV = _logprobs(model, ids_BT)
        except ValueError:
            return 0.0, with_sdpa_BTV  # the model has no eager attention to compare with
    difference = (eager_BTV - with_sdpa_BTV).abs().max()
    return float(difference), with_sdpa_BTV


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    """Lets the model compute with eager attention inside the `with` block."""
    before = model.config._attn_implementation

    def use(implementation: str) -> None:
        """Switches the model to an implementation of attention."""
        if model._can_set_attn_implementation():
            model.set_attn_implementation(implementation)
        else:
            # Older models with several implementations of attention read this field in each forward pass.
            model.config._attn_implementation = implementation

    use("eager")
    try:
        yield
    finally:
        use(before)


def _logprobs(model: Any, ids_BT: Tensor) -> Tensor:
    """The log-probabilities (B, T, V) for the token that follows each token. Raises ValueError if the model fails."""
    try:
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    except Exception as error:
        raise ValueError(
            f"{name_of(model)} cannot complete a text: a forward pass of {ids_BT.shape[1]} tokens fails with "
            f"{type(error).__name__}: {error}"
        ) from error
    logprobs_BTV: Tensor = logits_BTV.float().log_softmax(-1)
    return logprobs_BTV
