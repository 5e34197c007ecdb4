"""Passes: forward and backward passes over a batch, micro-batch by micro-batch, on all ranks together.

* If groups make a pass fail, the pass raises StepFailure. No weight has changed then.
* Two micro-batches may hold different sequences of one rollout. For most losses this does not matter, because the loss
  of a token depends on no other token of its rollout, or only on the number of tokens. But some losses need the ratios
  of the other tokens: gspo, a loss of the user unless it declares reads_whole_rollouts=False, and any loss with a
  correction of whole rollouts. For such losses, a first pass computes all log-probabilities. Then the gradient of the
  loss with respect to each log-probability is computed without the model, and a second pass propagates this gradient
  through the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from replay_client.waits import beat
from replay_trainer.batching import Batch, bare_group, micro_batches, to_batch
from replay_trainer.config import GRPOConfig
from replay_trainer.correction import Correction, CorrectionConfig, correct
from replay_trainer.logprobs import LogprobModel
from replay_trainer.loss_functions import traits_of
from replay_trainer.losses import corrected_policy_loss, kl_loss, loss_normalizer
from replay_trainer.metrics import Metrics
from replay_trainer.packing.shared_prefixes import Ints
from replay_trainer.ranks import Ranks, gather_full
from replay_trainer.weights import Adapter


class StepFailure(Exception):
    """A pass failed because of its groups. Unless `alone` is True, all ranks raise a StepFailure together, each with
    the groups of its own batch.

    `reason`: a text for people. `groups`: the indices of this rank's groups that caused the failure; may be empty.
    `alone`: True if only this rank raises one. The other ranks do not know of the failure, and wait for this rank.
    """

    def __init__(self, reason: str, groups: Sequence[int], *, alone: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.groups = groups
        self.alone = alone


@dataclass
class Passes:
    """The passes of one rank. All ranks call the methods together, each with a batch of its own."""

    policy: LogprobModel
    reference: LogprobModel | None
    """The model of the KL penalty; None: beta is 0. With an `adapter`, it is the policy itself, which computes the
    reference with the adapter switched off."""
    adapter: Adapter | None
    config: GRPOConfig
    ranks: Ranks
    partitioned: bool
    """True if each rank has a part of the weights."""

    def __post_init__(self) -> None:
        self._failing: Callable[[], list[int]] = list
        """A function that finds the groups that made the last backward pass fail. Before the first pass it is `list`,
        which returns no groups."""

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """(B, T) log-probabilities of the batch under the current weights. Raises StepFailure if memory runs out."""
        return self._without_gradient(batch, lambda micro: self._forward(self.policy, micro)[0])

    def backward(self, batch: Batch, old_BT: Tensor | None) -> tuple[Tensor, float, Metrics]:
        """Computes the gradient of the loss of the step over all ranks, and adds it to the `grad` of the weights.

        `old_BT`: the log-probabilities under the old weights; None: the current weights are the old weights, and this
        pass computes the log-probabilities. With batch_normalize, one more pass may come first to compute
        log-probabilities, because the correction weight of each token depends on those of all tokens.

        Returns (the old log-probabilities, the loss over all ranks, the metrics of the loss). Raises StepFailure if
        memory runs out, or if the loss is not finite.
        """
        config = self.config
        ranks = self.ranks
        assert old_BT is None or old_BT.shape == batch.mask_BT.shape, "the old log-probabilities are of another batch"
        own_count = loss_normalizer(batch.rollouts.mask_JT, config.loss_type)
        (count_of_all_ranks,) = ranks.sum([own_count])
        normalizer = max(count_of_all_ranks, 1)
        mean_weight = None
        if config.correction.batch_normalize:
            # "decoupled" corrects with ratios of the old weights. All other objectives correct with ratios of the
            # current weights.
            if config.correction.objective == "decoupled" and old_BT is not None:
                source_BT = old_BT
            else:
                source_BT = self.logprobs(batch)
            if old_BT is None:
                old_BT = source_BT
            mean_weight = self._mean_weight(batch, source_BT)
        loss_of = partial(self._loss, normalizer=normalizer, mean_weight=mean_weight)

        # The branch for whole rollouts below computes these two at once. Otherwise `pass_through` fills in their rows.
        current_BT = torch.zeros_like(batch.rollout_logprobs_BT)
        reference_BT = None if self.reference is None else torch.zeros_like(current_BT)
        # The gradient of the loss with respect to each log-probability; None: each micro-batch has a loss of its own.
        slopes_BT: Tensor | None = None
        # Sums over the micro-batches of this rank: the loss, the number of tokens, and each metric by its name. A
        # metric is summed over the tokens.
        sums: dict[str, float] = {"loss": 0.0, "tokens": 0.0}

        def add_to_sums(tokens: int, metrics: Metrics, loss: float = 0.0) -> None:
            """Adds a loss and metrics to `sums`. The metrics are means over `tokens` tokens."""
            sums["loss"] += loss
            for name, value in metrics.items():
                sums.setdefault(name, 0.0)
                if tokens:  # a mean over no tokens is NaN
                    sums[name] += tokens * value

        if self._needs_whole_rollouts(batch):
            # As the docstring of the module says: a first pass, and then the gradient of the loss without the model.
            current_BT = self.logprobs(batch)
            if reference_BT is not None:
                reference_BT = self._without_gradient(batch, self._reference_logprobs)
            leaf_BT = current_BT.clone().requires_grad_()
            loss, metrics = loss_of(batch, leaf_BT, old_BT, reference_BT)
            (slopes_BT,) = torch.autograd.grad(loss, leaf_BT)
            assert slopes_BT is not None
            assert slopes_BT.shape == batch.mask_BT.shape, (slopes_BT.shape, batch.mask_BT.shape)
            add_to_sums(int(batch.mask_BT.sum()), metrics, loss.item())

        def pass_through(rows: Ints, micro: Batch) -> None:
            """Adds the gradient of a micro-batch. `rows`: its rows in the batch; no rows: the micro-batch is idle."""
            logprobs_BT, entropy_BT = self._forward(self.policy, micro)
            tokens = int(micro.mask_BT.sum())
            sums["tokens"] += tokens
            if slopes_BT is None:
                _put(current_BT, rows, logprobs_BT.detach())
                micro_reference_BT = None
                if reference_BT is not None:
                    micro_reference_BT = self._reference_logprobs(micro)
                    _put(reference_BT, rows, micro_reference_BT)
                micro_old_BT = _part(old_BT, rows, micro)
                loss, metrics = loss_of(micro, logprobs_BT, micro_old_BT, micro_reference_BT)
                add_to_sums(tokens, metrics, loss.item())
            else:
                micro_slopes_BT = _part(slopes_BT, rows, micro)
                if micro_slopes_BT is None:  # an idle micro-batch, whose gradient is zero
                    loss = (logprobs_BT * 0.0).sum()
                else:
                    # The gradient of this sum with respect to each log-probability is the slope of the log-probability.
                    loss = (logprobs_BT * micro_slopes_BT).sum()
            if self.partitioned:
                # The gradients of the ranks must be summed, because the normalizer counts the tokens of all ranks. But
                # FSDP averages the gradients, so the loss is multiplied by the number of ranks.
                loss = loss * ranks.size
            torch.autograd.backward(loss)
            mean_entropy = float(entropy_BT[micro.mask_BT].mean())
            add_to_sums(tokens, {"entropy": mean_entropy})

        # The groups of the micro-batch in which memory ran out; empty: memory did not run out on this rank.
        too_large = self._each(batch, pass_through)
        # For each rank: (the names of its sums, True if memory ran out).
        parts = ranks.all((set(sums), bool(too_large)))
        if any(ran_out for _, ran_out in parts):
            raise StepFailure(self._out_of_memory, too_large)
        assert sums["tokens"] == int(batch.mask_BT.sum()), f"{sums['tokens']} tokens had a gradient, once each"
        # All ranks must sum the same metrics in the same order. But a rank without groups has fewer metrics than other
        # ranks, so it adds 0 for each metric that it lacks.
        names_of_all: set[str] = set()
        for names, _ in parts:
            names_of_all |= names
        names_in_order = sorted(names_of_all)
        sums_of_all = ranks.sum([sums.get(name, 0.0) for name in names_in_order])
        totals = dict(zip(names_in_order, sums_of_all, strict=True))
        total_loss = totals.pop("loss")
        total_tokens = totals.pop("tokens")
        self._failing = partial(_groups_not_finite, loss_of, batch, current_BT, old_BT, reference_BT)
        if not math.isfinite(total_loss):
            raise StepFailure(f"its loss was {total_loss}", self._failing())
        if not self.partitioned:
            ranks.sum_gradients(self.policy.parameters())
        means: Metrics = {}
        if total_tokens:
            means = {name: total / total_tokens for name, total in totals.items()}
        if old_BT is None:
            old_BT = current_BT
        return old_BT, total_loss, means

    def clip(self) -> float:
        """Scales the gradient so that its norm is at most max_grad_norm. Returns the norm that the gradient had before,
        which is the same on every rank.

        Raises StepFailure if the norm is not finite.
        """
        parameters = [parameter for parameter in self.policy.parameters() if parameter.grad is not None]
        norm_before = nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
        norm = float(gather_full(norm_before))  # with partitioned weights, `norm_before` is a DTensor
        if not math.isfinite(norm):
            raise StepFailure(f"its gradient norm was {norm}", self._failing())
        return norm

    # ----------------------------------------------------------------------------------------------- micro-batches

    @property
    def _out_of_memory(self) -> str:
        """The `reason` of a StepFailure if memory ran out."""
        return (
            f"memory ran out in a micro-batch with it: lower max_tokens_per_micro_batch (now "
            f"{self.config.max_tokens_per_micro_batch}), or set max_group_tokens below what fits"
        )

    def _without_gradient(self, batch: Batch, compute: Callable[[Batch], Tensor]) -> Tensor:
        """Calls `compute` with each micro-batch. Returns the results as (B, T) values of the whole batch.

        `compute` must return values without a gradient. Raises StepFailure if memory runs out.
        """
        values_BT = torch.zeros_like(batch.rollout_logprobs_BT)
        too_large = self._each(batch, lambda rows, micro: _put(values_BT, rows, compute(micro)))
        if any(self.ranks.all(bool(too_large))):
            raise StepFailure(self._out_of_memory, too_large)
        return values_BT

    def _needs_whole_rollouts(self, batch: Batch) -> bool:
        """True if, on any rank, the loss of a token may depend on tokens in another micro-batch."""
        reads_whole_rollouts = traits_of(self.config.loss_type).reads_whole_rollouts
        if not reads_whole_rollouts and not self.config.correction.judges_rollouts:
            return (
                False  # all ranks return here, because they have the same configuration, so none waits in `all` below
            )
        is_split = False  # True if a rollout of this rank has rows in several micro-batches
        if batch.rollouts.joins:  # some rollouts have several rows
            rollouts_of_parts = [np.unique(batch.rollout_B[rows]) for rows, _ in self._cut(batch)]
            # This sum counts a rollout once for each micro-batch that has rows of the rollout.
            count = sum(len(rollouts) for rollouts in rollouts_of_parts)
            is_split = count > len(batch.rollouts.first_J)
        return any(self.ranks.all(is_split))

    def _each(self, batch: Batch, work: Callable[[Ints, Batch], None]) -> list[int]:
        """Calls `work` with each micro-batch: `work(rows, micro)`. Returns an empty list if all calls succeed.

        If memory runs out in a micro-batch, leaves out the later micro-batches and returns the groups of the
        micro-batch that failed. But if weights are partitioned, raises StepFailure with `alone` instead, because the
        other ranks wait for this rank inside the pass.
        """
        for rows, micro in self._micro_batches(batch):
            try:
                work(rows, micro)
                continue
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
            # These lines are not in the `except` block, because the error would still keep the frames of the failed
            # call there. Here the tensors of these frames are free.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            groups: list[int] = np.unique(batch.group_B[rows]).tolist()
            if self.partitioned:
                raise StepFailure(self._out_of_memory, groups, alone=True)
            return groups
        return []

    def _micro_batches(self, batch: Batch) -> list[tuple[Ints, Batch]]:
        """The micro-batches of this rank. With partitioned weights, idle micro-batches without rows follow.

        A forward pass of partitioned layers waits for all ranks. So every rank must make as many forward passes as the
        rank with the most micro-batches.
        """
        parts = list(self._cut(batch))
        if self.partitioned:
            most = max(self.ranks.all(len(parts)))
            idle = most - len(parts)
            assert idle >= 0, "the busiest rank is no less busy than this one"
            no_rows = np.zeros(0, np.int64)
            parts += [(no_rows, _idle_batch(batch.device))] * idle
        return parts

    def _cut(self, batch: Batch) -> Iterator[tuple[Ints, Batch]]:
        """Cuts the batch of this rank into micro-batches: (the indices of the rows, a batch of only these rows)."""
        return micro_batches(batch, self.config.max_tokens_per_micro_batch, packed=self.policy.route == "packed")

    def _forward(self, policy: LogprobModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """(B, T) log-probabilities of the tokens, and (B, T) entropies."""
        # Partitioned weights need no autocast, because FSDP gathers them in bfloat16 already.
        autocast = self.config.bf16 and not self.partitioned
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=autocast):
            logprobs_BT, entropy_BT = policy(batch)
        assert logprobs_BT.shape == batch.mask_BT.shape, (logprobs_BT.shape, batch.mask_BT.shape)
        assert not entropy_BT.requires_grad, "the entropy is a metric, and no part of the loss"
        beat()  # tells a health check that the trainer is working
        return logprobs_BT, entropy_BT

    @torch.no_grad()
    def _reference_logprobs(self, batch: Batch) -> Tensor:
        """(B, T) log-probabilities under the reference model."""
        assert self.reference is not None
        without_adapter = nullcontext() if self.adapter is None else self.adapter.off()
        with without_adapter:
            logprobs_BT, _ = self._forward(self.reference, batch)
        return logprobs_BT

    # -------------------------------------------------------------------------------------------------------- loss

    def _loss(
        self,
        batch: Batch,
        logprobs_BT: Tensor,
        old_BT: Tensor | None,
        reference_BT: Tensor | None,
        *,
        normalizer: float,
        mean_weight: float | None,
    ) -> tuple[Tensor, Metrics]:
        """The part of the step's loss that the rows of `batch` add, and the metrics of this part.

        `old_BT` None: `logprobs_BT` are also the old log-probabilities. `reference_BT` None: there is no KL penalty.
        """
        config = self.config
        rollouts = batch.rollouts
        tokens_J = rollouts.join(batch.rollout_tokens_B)
        logprobs_JT = rollouts.join(logprobs_BT)
        if old_BT is None:
            old_BT = logprobs_BT.detach()
        loss, metrics = corrected_policy_loss(
            logprobs=logprobs_JT,
            old_logprobs=rollouts.join(old_BT),
            rollout_logprobs=rollouts.join(batch.rollout_logprobs_BT),
            advantages=rollouts.join(batch.advantages_under(old_BT)),
            mask=rollouts.mask_JT,
            correction=config.correction,
            config=config,
            mean_weight=mean_weight,
            normalizer=normalizer,
            tokens=tokens_J,
        )
        if reference_BT is not None:
            penalty, kl_metrics = kl_loss(
                logprobs_JT,
                rollouts.join(reference_BT),
                rollouts.mask_JT,
                config.beta,
                config,
                normalizer=normalizer,
                tokens=tokens_J,
            )
            loss = loss + penalty
            metrics = metrics | kl_metrics
        if batch.teacher_logprobs_BT is not None:
            difference_BT = logprobs_BT.detach() - batch.teacher_logprobs_BT
            metrics["teacher_kl"] = float(difference_BT[batch.mask_BT].mean())
        return loss, metrics

    def _mean_weight(self, batch: Batch, source_BT: Tensor) -> float | None:
        """The mean correction weight of the step over all ranks; None: the step has no tokens."""
        corrected = correct_batch(batch, source_BT, self.config.correction)
        total, count = self.ranks.sum(corrected.weight_totals())
        return total / count if count else None


def correct_batch(batch: Batch, old_BT: Tensor, config: CorrectionConfig) -> Correction:
    """The correction of a batch, with one row for each rollout: see `batching.Rollouts`."""
    rollouts = batch.rollouts
    return correct(
        rollouts.join(old_BT),
        rollouts.join(batch.rollout_logprobs_BT),
        rollouts.mask_JT,
        config,
        advantages=rollouts.join(batch.advantages_under(old_BT)),
    )


def _groups_not_finite(
    loss_of: Callable[..., tuple[Tensor, Metrics]],
    batch: Batch,
    current_BT: Tensor,
    old_BT: Tensor | None,
    reference_BT: Tensor | None,
) -> list[int]:
    """Finds the groups whose own loss is not finite, or whose gradient has a squared norm that is not finite.

    The gradient here is that with respect to the log-probabilities. Its norm is squared because `clip` squares the
    whole gradient in float32, in which the square of a finite number may be infinite.
    """
    not_finite = []
    for group in np.unique(batch.group_B).tolist():
        rows = np.flatnonzero(batch.group_B == group)
        part = batch.select(rows)
        T = part.mask_BT.shape[1]
        old = None if old_BT is None else old_BT[rows, :T]
        reference = None if reference_BT is None else reference_BT[rows, :T]
        # An index array such as `rows` makes a copy, so `current_BT` itself needs no gradient.
        logprobs_BT = current_BT[rows, :T].requires_grad_()
        loss, _ = loss_of(part, logprobs_BT, old, reference)
        (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
        if not (loss.isfinite() and gradient_BT.square().sum().isfinite()):
            not_finite.append(group)
    return not_finite


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """True if the error says that memory ran out, on a GPU or on a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "can't allocate memory" in str(error)  # on a CPU, torch raises a plain RuntimeError with this text


def _idle_batch(device: torch.device) -> Batch:
    """A batch of one token that is not trained on, for the forward pass of an idle micro-batch."""
    return to_batch([bare_group([0], [0], loss_mask=np.zeros(1, np.bool_))], device)


def _part(values_BT: Tensor | None, rows: Ints, micro: Batch) -> Tensor | None:
    """The values of the rows of a micro-batch; None if `values_BT` is None, or if the micro-batch is idle."""
    assert not rows.size or rows.size == micro.num_rows, (rows.size, micro.num_rows)
    if values_BT is None or not rows.size:
        return None
    return values_BT[rows, : micro.mask_BT.shape[1]]


def _put(values_BT: Tensor, rows: Ints, part_BT: Tensor) -> None:
    """Writes `part_BT`, the values of a micro-batch, into `values_BT`, to these rows. Writes nothing if the micro-batch
    is idle (see `_micro_batches`), and so has no rows."""
    if rows.size:
        assert part_BT.shape[0] == rows.size, (part_BT.shape, rows.size)  # torch would broadcast one row
        values_BT[rows, : part_BT.shape[1]] = part_BT
