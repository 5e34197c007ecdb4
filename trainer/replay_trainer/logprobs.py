"""Log-probabilities of chosen tokens, from any causal language model of transformers.

    hidden states ──▶ those that predict a token of the mask ──▶ head, chunk by chunk ──▶ log-probability, entropy

The (B, T, V) logits are never in memory as a whole, because each chunk of them is computed for the forward pass, and
once more for the backward pass. The exception is the route "logits" (see `Route`).
Axes here: N tokens of the mask, C tokens of a chunk, H hidden size, V vocabulary.

If the model can take packed rows, the sequences of a micro-batch are packed into one row without padding, in which each
shared prefix is present once.

    p p p a a b b b d q q c c      prompt p with completions a, b and b d; prompt q with c
    0 1 2 3 4 3 4 5 6 0 1 2 3      positions

All layers except attention treat each token by itself, so they need to know nothing of the packing. Attention follows
the layout (packing/attention.py). The layout is a keyword argument of the forward call. transformers passes this
argument on to the attention function, also when a layer is recomputed for the backward pass.
"""

from __future__ import annotations

import inspect
import logging
import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from replay_generator.engines.model_checks import check_model, choose_attention, name_of, tolerance_of
from replay_generator.engines.rotary_frequencies import fix_frequencies
from replay_trainer.batching import Batch, ModelInput, bare_group, packed_input, padded_input, to_batch
from replay_trainer.packing.attention import enable_packing, packed_forward
from replay_trainer.packing.sampling_masks import ChunkMasks, TokenMasks

logger = logging.getLogger(__name__)

CHUNK_LOGITS = 2**24
"""The most logits of a chunk: 64 MiB in float32."""

Route = Literal["packed", "padded", "logits"]
"""packed: The base of the model gets one row without padding. The head is computed in chunks.
padded: The base gets padded rows of similar length. The head is computed in chunks.
logits: The whole model gets padded rows, and returns all logits. This is for models for which the other routes do not
work, such as a model whose head is more than a linear layer."""


class LogprobModel(nn.Module):
    """A language model as a function from a micro-batch to the log-probabilities of its completions.

    The constructor tries the routes on a few random tokens, and takes the first route that agrees with the plain model.
    """

    def __init__(
        self,
        model: Any,
        packing: bool = True,
        gradient_checkpointing: bool = False,
        max_length: int | None = None,
    ) -> None:
        """Puts `model` into eval mode, sets its dropout to 0, and chooses its rotary frequencies for `max_length`.

        With dropout, the log-probabilities of sampler, old and new policy would differ at random, which the correction
        would take for a difference between the policies.
        `packing`: False leaves out the route "packed". `max_length`: see `fix_frequencies`; None: the length that
        engines serve by default.

        Raises ValueError for a model that `check_model` refuses, because it is not causal, or because its
        log-probabilities depend on the implementation of attention and nobody knows which are right.
        """
        super().__init__()
        self.model = model.eval()
        switch_off_dropout(model)
        self.max_length = fix_frequencies(model, max_length)
        """The length for which the rotary frequencies were chosen; None: they do not depend on a length."""
        choose_attention(model)  # eager for a model that caps its attention scores, because sdpa leaves the cap out
        check_model(model)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for module in model.modules():
                if isinstance(module, GradientCheckpointingLayer):
                    # Such a layer recomputes only in training mode. Its submodules stay in eval mode.
                    module.training = True
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.route: Route = self._find_route(packing)
        """The route of all forward passes."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(B, T) log-probabilities of the tokens of `batch.mask_BT`, and (B, T) entropies without gradient.

        Both are float32, in nats, and 0 outside the mask. Both are of the distribution softmax(logits / temperature),
        with the temperature of the sampling. If a token has a sampling mask (`batch.sampling_masks`), its softmax goes
        over the tokens that the sampler kept; otherwise the softmax goes over all tokens.
        """
        return self._run(batch, self.route)

    def _run(self, batch: Batch, route: Route) -> tuple[Tensor, Tensor]:
        """The result of `forward`, computed by this route."""
        inputs = packed_input(batch) if route == "packed" else padded_input(batch)
        mask_BT = batch.mask_BT
        ids_N = batch.completion_ids_BT[mask_BT]
        temperature_BT = batch.temperature_B[:, None].expand_as(mask_BT)
        temperature_N = temperature_BT[mask_BT]
        assert inputs.predicts_N.shape == ids_N.shape, (inputs.predicts_N.shape, ids_N.shape)
        sampling_masks = None if batch.sampling_masks is None else batch.sampling_masks.over(mask_BT)
        if route == "logits":
            logits_NV = self._call(self.model, inputs).logits.flatten(0, 1)[inputs.predicts_N]
            logprobs_N, entropy_N = _of_logits(logits_NV, ids_N, temperature_N, sampling_masks)
        else:
            hidden_NH = self._call(self._base(), inputs).last_hidden_state.flatten(0, 1)[inputs.predicts_N]
            head = self.model.get_output_embeddings()
            logprobs_N, entropy_N = chosen_logprobs(
                hidden_NH, head.weight, head.bias, ids_N, temperature_N, sampling_masks
            )
        # `masked_scatter` would take the first values of a longer row without an error.
        assert logprobs_N.shape == entropy_N.shape == ids_N.shape, (logprobs_N.shape, entropy_N.shape, ids_N.shape)
        assert logprobs_N.dtype == torch.float32, logprobs_N.dtype
        zeros_BT = torch.zeros_like(batch.rollout_logprobs_BT)
        return (
            zeros_BT.masked_scatter(mask_BT, logprobs_N),
            zeros_BT.masked_scatter(mask_BT, entropy_N),
        )

    def _call(self, module: Any, inputs: ModelInput) -> Any:
        """Calls `module`, which is the model or its base, with these inputs, and returns its output."""
        optional: dict[str, Any] = {}
        if self._takes_positions:  # a model without this argument counts positions from the left
            optional["position_ids"] = inputs.position_ids_RS
        if inputs.layout is None:
            return module(
                input_ids=inputs.input_ids_RS, attention_mask=inputs.attention_mask_RS, use_cache=False, **optional
            )
        with packed_forward():
            return module(input_ids=inputs.input_ids_RS, use_cache=False, replay_layout=inputs.layout, **optional)

    def _base(self) -> Any:
        """The model without its head."""
        return getattr(self.model, self.model.base_model_prefix)

    @torch.no_grad()
    def _find_route(self, packing: bool) -> Route:
        """The quickest route that computes the log-probabilities of the plain model.

        `packing`: True to try packed rows, too.
        """
        head = self.model.get_output_embeddings()
        # The other routes compute the head themselves, as one linear layer, from the output of the base.
        if type(head) is not nn.Linear or not hasattr(self.model, self.model.base_model_prefix):
            return "logits"
        batch = _trial(self.model)
        expected_BT, _ = self._run(batch, "logits")
        tolerance = tolerance_of(self.model, expected_BT)
        plain_attention = self.model.config._attn_implementation
        routes: list[Route] = ["padded"]
        # `enable_packing` returns False if the model cannot take packed rows.
        if packing and self._takes_positions and enable_packing(self.model):
            routes.insert(0, "packed")  # tried first, because it is quicker
        for route in routes:
            if self._agrees(batch, route, expected_BT, tolerance):
                return route
            if self.model.config._attn_implementation != plain_attention:  # `enable_packing` has changed it
                self.model.set_attn_implementation(plain_attention)
        return "logits"

    def _agrees(self, batch: Batch, route: Route, expected_BT: Tensor, tolerance: float) -> bool:
        """True if `route` computes the log-probabilities `expected_BT` of the plain model, within `tolerance`."""
        try:
            logprobs_BT, _ = self._run(batch, route)
        except Exception as error:  # a model may raise anything for arguments that it does not take
            logger.debug("%s does not take the route %s: %r", name_of(self.model), route, error)
            return False
        return float((logprobs_BT - expected_BT).abs().max()) <= tolerance


def switch_off_dropout(model: nn.Module) -> None:
    """Sets every dropout probability of `model` to 0, in every mode."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_dropout = "dropout" in name or (name == "p" and isinstance(module, nn.Dropout))
            # An attribute that is no float, such as a module, holds no probability.
            if is_dropout and isinstance(value, float):
                setattr(module, name, 0.0)


def _trial(model: Any) -> Batch:
    """A batch of random tokens: completions of unequal lengths with shared prompts. Some completions begin with the
    tokens of another completion."""
    vocabulary = len(model.get_input_embeddings().weight)
    random = np.random.default_rng(0)

    def random_tokens(count: int) -> Any:
        return random.integers(0, vocabulary, count)

    # For each group: the length of its prompt, then the lengths of its completions.
    lengths = [(3, 5, 1, 2), (6, 3, 0, 7)]
    groups = [[random_tokens(length) for length in group] for group in lengths]
    longest = groups[1][-1]
    # For each further completion: how many of its first tokens are those of `longest`, and how many others follow.
    for num_shared, num_own in ((7, 4), (3, 2), (5, 0)):
        groups[1].append(np.concatenate((longest[:num_shared], random_tokens(num_own))))
    return to_batch([bare_group(*group) for group in groups], model.device)


def chosen_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    ids_N: Tensor,
    temperature_N: Tensor,
    masks: TokenMasks | None = None,
) -> tuple[Tensor, Tensor]:
    """The (N,) log-probabilities log softmax((hidden @ weight.T + bias) / temperature)[id], and (N,) entropies.

    Both are float32, in nats.

    `masks`: the sampling masks, which say over what part of the vocabulary the softmax of each token goes. Without
    masks, and for a token without a mask, the softmax goes over the whole vocabulary.

    Logits are computed in the dtype of the weight or, under autocast, in the dtype of autocast. All later values are in
    float32. Only the logits of one chunk are in memory at once, at most CHUNK_LOGITS. The gradient of the
    log-probabilities flows into hidden, weight and bias. The entropies have no gradient.
    """
    # `apply` has no type in torch.
    logprobs_N, entropy_N = _ChosenLogprobs.apply(hidden_NH, weight_VH, bias_V, ids_N, temperature_N, masks)  # type: ignore[no-untyped-call]
    return logprobs_N, entropy_N


def _of_logits(
    logits_NV: Tensor, ids_N: Tensor, temperature_N: Tensor, masks: TokenMasks | None
) -> tuple[Tensor, Tensor]:
    """(N,) log-probabilities of the tokens `ids_N`, and (N,) entropies, from all logits at once."""
    logits_NV = logits_NV.float() / temperature_N[:, None]
    all_masks = None if masks is None else masks.of_chunk(slice(None))
    logsum_N, entropy_N = _logsum_and_entropy(logits_NV, all_masks)
    chosen_N = logits_NV.gather(-1, ids_N[:, None]).squeeze(-1)
    return chosen_N - logsum_N, entropy_N.detach()


def _logsum_and_entropy(logits_CV: Tensor, masks: ChunkMasks | None) -> tuple[Tensor, Tensor]:
    """(C,) logsumexp of the logits, and (C,) entropy of their softmax. For a token with a sampling mask, both go over
    the tokens of its mask only."""
    if masks is None:
        return _logsum_and_entropy_of(logits_CV)
    # In these two, the values of tokens without a mask have no meaning.
    masked_logsum_C, masked_entropy_C = _logsum_and_entropy_of(masks.logits_of(logits_CV))
    if masks.all_known:
        return masked_logsum_C, masked_entropy_C
    logsum_C, entropy_C = _logsum_and_entropy_of(logits_CV)
    known_C = masks.known_C
    return torch.where(known_C, masked_logsum_C, logsum_C), torch.where(known_C, masked_entropy_C, entropy_C)


def _logsum_and_entropy_of(logits_CK: Tensor) -> tuple[Tensor, Tensor]:
    """(C,) logsumexp over the K logits of each token, and (C,) entropy of their softmax.

    Callers must not use the gradient of the entropy, because it lacks the part of the expected logit.
    """
    logsum_C = logits_CK.logsumexp(dim=-1)
    # Entropy = logsumexp - E[logit].
    with torch.no_grad():
        p_CK = (logits_CK - logsum_C[:, None]).exp_()
        # A logit of -inf must add 0 to the sum, but its product 0 * -inf is NaN.
        expected_C = p_CK.mul_(logits_CK).nan_to_num_(nan=0.0).sum(dim=-1)
    return logsum_C, logsum_C - expected_C


class _ChosenLogprobs(torch.autograd.Function):
    """Computes the logits of each chunk in the forward pass and again in the backward pass. Stores no logits between
    the passes."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        ids_N: Tensor,
        temperature_N: Tensor,
        masks: TokenMasks | None,
    ) -> tuple[Tensor, Tensor]:
        """(N,) log-probabilities and (N,) entropies, as in `chosen_logprobs`."""
        device = hidden_NH.device.type
        ctx.product_dtype = weight_VH.dtype  # the dtype of the product of hidden states and weight
        if torch.is_autocast_enabled(device):
            ctx.product_dtype = torch.get_autocast_dtype(device)
        N = len(ids_N)
        V, H = weight_VH.shape
        assert hidden_NH.shape == (N, H), (hidden_NH.shape, weight_VH.shape)
        assert temperature_N.shape == (N,), (temperature_N.shape, N)
        logprobs_N = hidden_NH.new_empty(N, dtype=torch.float32)
        entropy_N = torch.empty_like(logprobs_N)
        logsum_N = torch.empty_like(logprobs_N)
        weight = weight_VH.to(ctx.product_dtype)
        for chunk in _chunks(N, V):
            logits_CV = _logits(hidden_NH[chunk], weight, bias_V, temperature_N[chunk], ctx.product_dtype)
            chunk_masks = None if masks is None else masks.of_chunk(chunk)
            logsum_C, entropy_C = _logsum_and_entropy(logits_CV, chunk_masks)
            chosen_C = logits_CV.gather(-1, ids_N[chunk, None]).squeeze(-1)
            logprobs_N[chunk] = chosen_C - logsum_C
            entropy_N[chunk] = entropy_C
            logsum_N[chunk] = logsum_C
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, ids_N, temperature_N, logsum_N)
        ctx.masks = masks
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor, _entropy_gradient_N: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of hidden, weight and bias, if they are needed, and None for the other inputs of `forward`.

        `gradient_N`: the gradient of the loss with respect to the log-probabilities. The gradient with respect to the
        entropies is not used.
        """
        hidden_NH, weight_VH, bias_V, ids_N, temperature_N, logsum_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_grad_NH = torch.zeros_like(hidden_NH) if needs_hidden else None
        weight_grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        bias_grad_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        weight = weight_VH.to(ctx.product_dtype)
        for chunk in _chunks(len(ids_N), weight_VH.shape[0]):
            # The gradient of the loss with respect to the logits before their division by the temperature is
            # (onehot(id) - p) * scale. It is computed in place, in the memory of the logits.
            scale_C1 = (gradient_N[chunk] / temperature_N[chunk])[:, None]
            grad_CV = _logits(hidden_NH[chunk], weight, bias_V, temperature_N[chunk], ctx.product_dtype)
            grad_CV.sub_(logsum_N[chunk, None]).exp_()  # p, the probability of each token of the vocabulary
            grad_CV.mul_(-scale_C1)
            if ctx.masks is not None:  # p is 0 outside the sampling mask
                grad_CV = ctx.masks.of_chunk(chunk).within(grad_CV)
            grad_CV.scatter_add_(-1, ids_N[chunk, None], scale_C1)  # adds onehot(id) * scale
            if bias_grad_V is not None:
                bias_grad_V += grad_CV.sum(dim=0)
            grad_CV = grad_CV.to(ctx.product_dtype)
            if hidden_grad_NH is not None:
                hidden_grad_NH[chunk] = (grad_CV @ weight).to(hidden_NH.dtype)
            if weight_grad_VH is not None:
                if ctx.product_dtype == torch.float32:  # addmm_ takes one dtype only, and the sum is in float32
                    weight_grad_VH.addmm_(grad_CV.T, hidden_NH[chunk].to(ctx.product_dtype))
                else:
                    weight_grad_VH += grad_CV.T @ hidden_NH[chunk].to(ctx.product_dtype)
        if weight_grad_VH is not None:
            weight_grad_VH = weight_grad_VH.to(weight_VH.dtype)
        if bias_grad_V is not None:
            bias_grad_V = bias_grad_V.to(bias_V.dtype)
        return hidden_grad_NH, weight_grad_VH, bias_grad_V, None, None, None


def _chunks(N: int, V: int) -> list[slice]:
    """Divides N tokens into chunks of about the same size. A chunk has at most CHUNK_LOGITS logits, or is one token."""
    size = max(CHUNK_LOGITS // V, 1)
    count = math.ceil(N / size)
    chunks = [slice(N * i // count, N * (i + 1) // count) for i in range(count)]
    assert sum(chunk.stop - chunk.start for chunk in chunks) == N, (chunks, N)
    return chunks


def _logits(
    hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature_C: Tensor, product_dtype: torch.dtype
) -> Tensor:
    """(C, V) logits divided by the temperature, in float32.

    `product_dtype`: the dtype in which the product of hidden states and weight is computed; `weight_VH` has it already.
    """
    logits_CV = hidden_CH.to(product_dtype) @ weight_VH.T
    if bias_V is not None:
        logits_CV += bias_V.to(product_dtype)
    return logits_CV.float().div_(temperature_C[:, None])
