"""Loss functions of the user: `loss_type = "package.module:function"`.

The function returns the loss of each token. The trainer does the rest as with its own losses: it multiplies the losses
by the weights of the correction, leaves out the tokens that the correction rejects, and sums over tokens, micro-batches
and ranks.

    @loss_function(aggregate_like="grpo")
    def pull(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT = -inputs.advantages_BT * inputs.ratio_BT
        return loss_BT, {"ratio_squared": inputs.ratio_BT.square()}

Axes: B rollouts, T tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from replay_client.settings import check_choice, load_function, raised_in
from replay_trainer.config import BUILT_IN_LOSSES, LossConfig
from replay_trainer.correction.config import LOG_RATIO_LIMIT

Metric = Tensor | float
LossFunction = Callable[["LossInputs"], tuple[Tensor, Mapping[str, Metric]]]
F = TypeVar("F", bound=LossFunction)
Aggregation = Literal["dapo", "grpo", "dr_grpo"]
"""The built-in losses that a loss function can name. The losses of its tokens are then summed and divided as those of
the named loss."""

_ATTRIBUTE = "replay_loss"
"""The attribute of a decorated function that holds its LossTraits."""


@dataclass(frozen=True)
class LossInputs:
    """The input of a loss function: the rollouts of one micro-batch, each as a row.

    Every tensor is 0 (or False) outside of `mask_BT`. The gradient flows through `logprobs_BT` alone.
    """

    logprobs_BT: Tensor
    """log-probabilities of the tokens under the policy that is trained, in nats, float32 or more."""
    old_logprobs_BT: Tensor
    """log-probabilities under the policy before the step; with the objective "bypass", the log-probabilities of the
    rollout engine."""
    advantages_BT: Tensor
    """The advantage of each token."""
    mask_BT: Tensor
    """True for the tokens to train on, before the correction rejects any."""
    weights_BT: Tensor
    """The weights of the correction; 1 without a correction. The trainer multiplies the loss by these weights, so the
    function must not."""
    correction_mask_BT: Tensor
    """True for the tokens of `mask_BT` that the correction accepts. The trainer leaves all other tokens out of the
    sum."""
    normalizer: float
    """The number by which the trainer divides the sum of the losses: the tokens or rollouts of the whole step, over all
    micro-batches and ranks."""
    config: LossConfig
    """The constants: `epsilon`, `clip_high`, `max_completion_length`."""

    @cached_property
    def log_ratio_BT(self) -> Tensor:
        """`logprobs_BT` - `old_logprobs_BT`, clamped to ±20 nats as in the losses of the trainer."""
        return (self.logprobs_BT - self.old_logprobs_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    @cached_property
    def ratio_BT(self) -> Tensor:
        """The importance ratio of each token: the exponential of `log_ratio_BT`."""
        return self.log_ratio_BT.exp()


@dataclass(frozen=True)
class LossTraits:
    """The properties of a loss that the trainer must know."""

    aggregate_like: str
    """The built-in loss that is summed and divided in the same way (see the table of `replay_trainer.losses`)."""
    reads_whole_rollouts: bool
    """True if the loss of a token depends on other tokens of its rollout. If a micro-batch has only some sequences of a
    rollout, such a loss needs one more forward pass."""


def loss_function(*, aggregate_like: Aggregation = "dapo", reads_whole_rollouts: bool = True) -> Callable[[F], F]:
    """Decorates a loss function. A function without this decorator is treated as if it had the default values.

    aggregate_like: the losses of the tokens become one number as with this built-in loss. "dapo" divides the sum over
    all tokens by their number, "grpo" takes the mean of the rollouts' means, and "dr_grpo" divides the sum over all
    tokens by the number of rollouts times max_completion_length.
    reads_whole_rollouts: False promises that the loss of a token depends on no other token. This saves a forward pass
    for rollouts of several sequences.

    Raises ValueError for another `aggregate_like`.
    """
    check_choice("aggregate_like", aggregate_like, get_args(Aggregation))
    traits = LossTraits(aggregate_like, reads_whole_rollouts)

    def decorate(function: F) -> F:
        setattr(function, _ATTRIBUTE, traits)
        return function

    return decorate


def traits_of(loss_type: str) -> LossTraits:
    """The traits of a built-in loss, or of a function of the user. Raises ValueError as `load_loss` does."""
    if loss_type in BUILT_IN_LOSSES:
        is_gspo = loss_type == "gspo"  # the only built-in loss with one ratio for all tokens of a rollout
        return LossTraits(aggregate_like=loss_type, reads_whole_rollouts=is_gspo)
    function = load_loss(loss_type)
    default = LossTraits(aggregate_like="dapo", reads_whole_rollouts=True)
    traits: LossTraits = getattr(function, _ATTRIBUTE, default)
    return traits


@lru_cache
def load_loss(loss_type: str) -> LossFunction:
    """The function that "package.module:function" names. Raises ValueError if there is none."""
    return load_function("loss_type", loss_type, built_in={})


def token_losses(inputs: LossInputs, loss_type: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Calls the user's function, and checks its result. Returns the (B, T) losses of the tokens, and each metric as
    (B, T) values.

    Raises ValueError, which names the function, if the function raises an exception or returns a result that cannot be
    trained on.
    """
    try:
        result = load_loss(loss_type)(inputs)
    except Exception as error:
        place = raised_in(error, skip=1)  # the file and line in the user's code; skips the frame of `token_losses`
        raise ValueError(f"the loss function {loss_type!r} raised {type(error).__name__}: {error}{place}") from error
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(
            f"the loss function {loss_type!r} must return the losses of the tokens and a dict of metrics, "
            f"not {_type_or_shape(result)}"
        )
    loss_BT, metrics = result
    shape = tuple(inputs.mask_BT.shape)
    if not (isinstance(loss_BT, Tensor) and tuple(loss_BT.shape) == shape):
        raise ValueError(
            f"the loss function {loss_type!r} must return one loss for each token, a tensor of shape {shape}, "
            f"not {_type_or_shape(loss_BT)}"
        )
    # A caller that only wants the value of the loss passes log-probabilities without a gradient.
    if inputs.logprobs_BT.requires_grad and not loss_BT.requires_grad:
        raise ValueError(
            f"the loss function {loss_type!r} returned a loss without a gradient: it must depend on logprobs_BT, "
            f"without detach() or no_grad()"
        )
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"the loss function {loss_type!r} must return its metrics as a dict, not {_type_or_shape(metrics)}"
        )
    return loss_BT, {str(name): _metric_by_token(name, value, inputs, loss_type) for name, value in metrics.items()}


def check_loss(config: LossConfig, device: torch.device | str = "cpu") -> None:
    """Calls the user's function once with two made-up rollouts, so that a mistake ends a run before its first step.

    Does nothing for a built-in loss. device: the device of the rollouts. Pass the device of the training, because the
    function may have tensors of its own there.

    Raises ValueError as `token_losses` does. Also raises it if a loss or the gradient is not finite, if the gradient is
    0 everywhere, and if the function aggregates like dr_grpo without max_completion_length.
    """
    if config.loss_type in BUILT_IN_LOSSES:
        return
    if traits_of(config.loss_type).aggregate_like == "dr_grpo" and config.max_completion_length is None:
        raise ValueError(f"the loss {config.loss_type!r} aggregates like dr_grpo, and needs max_completion_length")
    # Two rollouts of 3 and 2 tokens, one with a positive and one with a negative advantage. The policy is near the old
    # policy.
    mask_BT = torch.tensor([[True, True, True], [True, True, False]], device=device)
    old_BT = torch.tensor([[-0.5, -1.0, -2.0], [-0.1, -3.0, 0.0]], device=device)
    log_ratios_T = torch.tensor([0.0, 0.1, -0.4], device=device)
    advantages_B1 = torch.tensor([[1.0], [-1.0]], device=device)
    logprobs_BT = torch.where(mask_BT, old_BT + log_ratios_T, 0.0).requires_grad_()
    inputs = LossInputs(
        logprobs_BT=logprobs_BT,
        old_logprobs_BT=old_BT,
        advantages_BT=torch.where(mask_BT, advantages_B1, 0.0),
        mask_BT=mask_BT,
        weights_BT=mask_BT.float(),
        correction_mask_BT=mask_BT,
        normalizer=5.0,  # the number of tokens in the mask
        config=config,
    )
    loss_BT, _ = token_losses(inputs, config.loss_type)
    try:
        (gradient_BT,) = torch.autograd.grad(loss_BT[mask_BT].sum(), logprobs_BT)
    except RuntimeError as error:
        raise ValueError(f"the loss function {config.loss_type!r} has no gradient by logprobs_BT: {error}") from error
    if not loss_BT[mask_BT].isfinite().all():
        raise ValueError(
            f"the loss function {config.loss_type!r} is not finite for two ordinary rollouts: "
            f"{loss_BT[mask_BT].tolist()}"
        )
    if not gradient_BT.isfinite().all():
        raise ValueError(
            f"the gradient of the loss function {config.loss_type!r} is not finite for two ordinary rollouts: "
            f"{gradient_BT.tolist()}"
        )
    if not gradient_BT.any():
        raise ValueError(
            f"the gradient of the loss function {config.loss_type!r} is 0 for two ordinary rollouts: it would learn "
            f"nothing"
        )


def _metric_by_token(name: object, value: object, inputs: LossInputs, loss_type: str) -> Tensor:
    """A metric of the user's function as (B, T) values. The function may return one number, or one for each token."""
    shape = inputs.mask_BT.shape
    if isinstance(value, Tensor) and value.shape == shape:
        return value.detach().float()
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().float().reshape(1, 1).expand(shape)
    if isinstance(value, bool | int | float):
        return torch.full(shape, float(value), device=inputs.mask_BT.device)
    raise ValueError(
        f"the metric {name!r} of the loss function {loss_type!r} must be a number or a tensor of shape {tuple(shape)}, "
        f"not {_type_or_shape(value)}"
    )


def _type_or_shape(value: Any) -> str:
    """Describes a value in an error: by its type, or by its shape if it is a tensor."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
