"""Checks that a language model of transformers computes what others compute for it: which attention, and in order.

They cost a few forward passes of some tokens when a model is loaded. A model that would compute something else is
refused in one sentence, instead of being trained on it.
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
"""Models whose sdpa and eager attention differ, and why sdpa is right, by their `model_type`."""
_ROWS, _TOKENS = 2, 12
"""The shape of the batch in which a model is checked."""
_TRIES = 3
"""Outside float32 two ways to compute may route a token to other experts. Another batch then tells."""


def tolerance_of(model: Any, logprobs: Tensor) -> float:
    """The difference in nats that is rounding between two ways to compute these log-probabilities, and no error."""
    relative = 1e-4 if exact(model) else 3e-2
    return relative * float(logprobs.abs().max())


def exact(model: Any) -> bool:
    """Whether the model computes in float32 or better."""
    dtype = model.get_input_embeddings().weight.dtype
    return bool(torch.finfo(dtype).eps <= torch.finfo(torch.float32).eps)


def tries_of(model: Any) -> range:
    """The seeds of the batches of which one must agree."""
    return range(1 if exact(model) else _TRIES)


def name_of(model: Any) -> str:
    """The model as an error names it."""
    config = model.config
    where = getattr(config, "_name_or_path", "")
    return f"{config.model_type} ({where})" if where else str(config.model_type)


def choose_attention(model: Any) -> bool:
    """Let a model that caps its attention scores compute them eagerly: sdpa leaves the cap out, and vLLM does not.

    Returns whether the model was switched. Raises ValueError if it cannot be.
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
"""Implementations of attention that are transformers' sdpa for a row without a layout."""


@torch.no_grad()
def check_model(model: Any) -> None:
    """Check that no token sees a later one, and that sdpa computes what the model's own code computes.

    Raises ValueError that names the model. It leaves the model as it was.
    """
    why = _why(model, _moves_earlier_tokens)
    if why:
        raise ValueError(
            f"{name_of(model)} is no causal language model: after a change of the last token, log-probabilities of "
            f"earlier ones differ by {why:.3g} nats. Take a model that predicts each token from those before it"
        )
    if model.config._attn_implementation not in _SDPA or model.config.model_type in SDPA_IS_RIGHT:
        return
    why = _why(model, _differs_from_eager)
    if why:
        raise ValueError(
            f"{name_of(model)}: with sdpa and with eager attention its log-probabilities differ by {why:.3g} nats, and "
            "nobody has found out which are right. Load it with attn_implementation='eager' if you know that those "
            "are, or take another model"
        )


def _why(model: Any, difference: Callable[[Any, Tensor], tuple[float, Tensor]]) -> float:
    """The difference in nats that shows up in each try; 0: in one try it was rounding."""
    vocabulary = len(model.get_input_embeddings().weight)
    found = 0.0
    for seed in tries_of(model):
        random = torch.Generator().manual_seed(seed)
        ids_BT = torch.randint(0, vocabulary, (_ROWS, _TOKENS), generator=random).to(model.device)
        found, logprobs = difference(model, ids_BT)
        if not logprobs.isfinite().all():
            return 0.0  # such weights are damaged, and the probe of the first version says so
        if found <= tolerance_of(model, logprobs):
            return 0.0
    return found


def _moves_earlier_tokens(model: Any, ids_BT: Tensor) -> tuple[float, Tensor]:
    vocabulary = len(model.get_input_embeddings().weight)
    other_BT = ids_BT.clone()
    other_BT[:, -1] = (other_BT[:, -1] + 1) % vocabulary
    before_BTV = _logprobs(model, ids_BT)
    after_BTV = _logprobs(model, other_BT)
    moved = (after_BTV[:, :-1] - before_BTV[:, :-1]).abs().max()
    return float(moved), before_BTV


def _differs_from_eager(model: Any, ids_BT: Tensor) -> tuple[float, Tensor]:
    with_sdpa_BTV = _logprobs(model, ids_BT)
    with _eager(model):
        try:
            eager_BTV = _logprobs(model, ids_BT)
        except ValueError:
            return 0.0, with_sdpa_BTV  # the model has no eager attention that sdpa could differ from
    return float((eager_BTV - with_sdpa_BTV).abs().max()), with_sdpa_BTV


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    """Inside, the model computes with eager attention."""
    before = model.config._attn_implementation

    def use(implementation: str) -> None:
        if model._can_set_attn_implementation():
            model.set_attn_implementation(implementation)
        else:
            # Models of the older kind look at their configuration in each forward pass, if they have a choice at all.
            model.config._attn_implementation = implementation

    use("eager")
    try:
        yield
    finally:
        use(before)


def _logprobs(model: Any, ids_BT: Tensor) -> Tensor:
    """(B, T, V) log-probabilities of what follows each token. Raises ValueError if the forward pass fails."""
    try:
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    except Exception as error:
        raise ValueError(
            f"{name_of(model)} cannot complete a text: a forward pass of {ids_BT.shape[1]} tokens fails with "
            f"{type(error).__name__}: {error}"
        ) from error
    logprobs_BTV: Tensor = logits_BTV.float().log_softmax(-1)
    return logprobs_BTV
