"""The steps of one run: generate, draw, train, next version. Any policy takes them: a tiny one or a pretrained one.

policy.sample ──▶ rollouts ──▶ fresh groups ─┐
                      └─▶ replay ──▶ stored ─┴─▶ correction, loss, AdamW ──▶ the next policy version
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from experiments.learning.arms import GROUP_SIZE, Arm
from experiments.learning.stored import DistinctAnswers
from replay_client import ReplayClient, RolloutGroup, Sample
from replay_client.scoring import carries_gradient
from replay_generator.priorities import load_priority
from replay_trainer import GRPOConfig, ZeroVarianceReplacer
from replay_trainer.batching import Batch, micro_batches, to_batch
from replay_trainer.groups import GroupSource
from replay_trainer.logprobs import LogprobModel
from replay_trainer.losses import corrected_policy_loss
from replay_trainer.ranks import Ranks
from replay_trainer.stopping import Stopping


class Policy(Protocol):
    """A model to train, and how it is sampled."""

    model: Any
    prompts: int
    """Number of its prompts."""
    packing: bool
    bf16: bool
    """Whether the trainer computes its passes in bfloat16."""
    max_tokens_per_micro_batch: int | None
    """None: a step is one micro-batch."""

    def sample(
        self, chosen: Sequence[int], group_size: int, version: int, state: Mapping[str, Any] | None
    ) -> list[RolloutGroup]:
        """A scored group of each chosen prompt, from the model as it is or with the weights of `state`."""


def _epochs(count: int, seed: int) -> Iterator[int]:
    """All prompts in a random order, then all again in another."""
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.permutation(count).tolist()


class Steps:
    """The state of one run between its steps."""

    def __init__(self, arm: Arm, learning_rate: float, seed: int, policy: Policy, client: ReplayClient) -> None:
        self.arm, self.client, self.policy, self.model = arm, client, policy, policy.model
        self.logprobs = LogprobModel(self.model, packing=policy.packing)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.01, fused=True)
        self.prompts = _epochs(policy.prompts, seed)
        self.source = self._source()
        self.answers = DistinctAnswers()
        self.version = self.generated_tokens = self.trained_tokens = 0
        self.facts: dict[str, list[float]] = {}
        """By name, the values of all steps that have one."""
        self.last: dict[str, float] = {}
        """The facts of the last step."""
        self._past: deque[dict[str, Any]] = deque()

    def step(self) -> None:
        """Generates, draws, trains, and makes the next policy version."""
        self.last = {}
        taken = self.source.replace(self.version + 1, self.source.collect())
        self._note("zero_variance", taken.counts["groups_zero_variance"] / max(1, len(taken.fresh)))
        self._note("replayed", len(taken.replaced))
        if taken.replaced:
            self._note("staleness", taken.stats["staleness_mean"])
        fresh = [sample.group for sample in taken.fresh]
        self._note("reward", float(np.mean([group.rewards.mean() for group in fresh])))
        self._note("length", float(np.mean([group.rollout_lengths.mean() for group in fresh])))
        self._note("fresh_entropy", -float(np.concatenate([group.rollout_logprobs for group in fresh]).mean()))
        self._note("pass_at_8", float(np.mean([group.rewards.any() for group in fresh])))
        self._train(taken.groups, [i in taken.replaced for i in range(len(taken.groups))])
        if self.arm.stored == "distinct":
            for answer in [answer for sample in taken.fresh for answer in self.answers.new(sample.group)]:
                self.client.insert(answer, {"replay": 1.0})
        self.version += 1
        self.client.set_policy_version(self.version)

    def _source(self) -> GroupSource:
        """As GRPOTrainer makes it from `zero_variance` and `replay_share`."""
        arm, groups = self.arm, self.arm.fresh + self.arm.replay
        config = GRPOConfig(
            output_dir="",
            groups_per_step=groups,
            replay_share=arm.replay / groups,
            zero_variance="none" if arm.zero_variance == "keep" else arm.zero_variance,
            replay_start_step=arm.start,
        )
        ranks = Ranks("cpu")
        replacer = ZeroVarianceReplacer(self.client, "replay")
        return GroupSource(self._batches(), replacer, ranks, "run", config, Stopping(ranks))

    def _batches(self) -> Iterator[list[Sample]]:
        while True:
            yield self._generate(self.arm.fresh)

    def _generate(self, count: int) -> list[Sample]:
        lag = min(self.arm.lag, self.version)
        if self.arm.lag:
            state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            if not self._past or self._past[-1]["version"] != self.version:
                self._past.append({"version": self.version, "state": state})
            if len(self._past) > self.arm.lag + 1:
                self._past.popleft()
        chosen = list(islice(self.prompts, count))
        past = self._past[0]["state"] if self.arm.lag else None
        groups = self.policy.sample(chosen, GROUP_SIZE, self.version - lag, past)
        for group in groups:
            self.generated_tokens += group.completion_ids.size
            self.client.insert(group, {"rollouts": self._priority(group)})
        return self.client.sample("rollouts", count, timeout=30.0)

    def _priority(self, group: RolloutGroup) -> float:
        if not self.arm.pools or self.arm.stored == "distinct":
            return 0.0
        return load_priority(self.arm.priority)(group)

    def _train(self, groups: list[RolloutGroup], stored: list[bool]) -> None:
        """As GRPOTrainer's update with loss_type="dapo", as often as the arm says. `stored`: groups of the pool."""
        if not groups:
            return
        self._note("groups", len(groups))
        # Groups without variance have a gradient of exactly 0. They count in the denominator, and are computed for
        # nothing: leaving them out halves the time of a run.
        kept = [i for i, group in enumerate(groups) if carries_gradient(group)]
        stored_U = np.array([stored[i] for i in kept], np.bool_)
        tokens = sum(group.completion_ids.size for group in groups if not carries_gradient(group))
        batch: Batch | None = None
        if kept:
            batch = to_batch([groups[i] for i in kept], self.model.device)
            if self.arm.stored == "right":
                batch = batch.without_wrong(np.flatnonzero(stored_U).tolist())
            tokens += int(batch.mask_BT.sum())
        old_BT: torch.Tensor | None = None
        for _ in range(self.arm.num_iterations):
            self.trained_tokens += tokens
            self.optimizer.zero_grad(set_to_none=False)
            if batch is not None:
                current_BT = self._backward(batch, old_BT, tokens)
                if old_BT is None:
                    old_BT = current_BT
                    self._note_drifts(batch, current_BT, stored_U)
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    def _backward(self, batch: Batch, old_BT: torch.Tensor | None, tokens: int) -> torch.Tensor:
        """Adds the gradient of the loss; returns the (B, T) log-probabilities before the update."""
        current_BT = torch.zeros_like(batch.rollout_logprobs_BT)
        sums: dict[str, float] = {}
        for rows, micro in self._micro_batches(batch):
            T = micro.mask_BT.shape[1]
            with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.policy.bf16):
                logprobs_BT, _ = self.logprobs(micro)
            current_BT[rows, :T] = logprobs_BT.detach()
            loss, metrics = corrected_policy_loss(
                logprobs_BT,
                logprobs_BT.detach() if old_BT is None else old_BT[rows, :T],
                micro.rollout_logprobs_BT,
                micro.advantages_B,
                micro.mask_BT,
                self.arm.correction,
                self.arm.loss,
                normalizer=tokens,
            )
            torch.autograd.backward(loss)
            for name in ("ess", "kl", "ratio_mean"):
                if name in metrics:
                    sums[name] = sums.get(name, 0.0) + metrics[name] * int(micro.mask_BT.sum())
        self._note("entropy", -float(current_BT[batch.mask_BT].mean()))
        for name, total in sums.items():
            self._note(name, total / int(batch.mask_BT.sum()))
        return current_BT

    def _micro_batches(self, batch: Batch) -> Iterable[tuple[Any, Batch]]:
        if self.policy.max_tokens_per_micro_batch is None:
            return [(slice(None), batch)]
        return micro_batches(batch, self.policy.max_tokens_per_micro_batch, self.logprobs.route == "packed")

    def _note_drifts(self, batch: Batch, current_BT: torch.Tensor, stored_U: Any) -> None:
        """How much less likely each kind of answer is than when it was sampled: mean nats a token of log(b/θ)."""
        difference_BT = torch.where(batch.mask_BT, batch.rollout_logprobs_BT - current_BT, 0.0)
        drift_B = (difference_BT.sum(1) / batch.mask_BT.sum(1).clamp_min(1)).cpu().numpy()
        stored_B, right_B = stored_U[batch.group_B], batch.advantages_B.cpu().numpy() > 0
        lengths = [batch.completion_lengths_B[batch.group_B == group].mean() for group in np.flatnonzero(stored_U)]
        if lengths:
            self._note("stored_length", float(np.mean(lengths)))
        parts = {"drift_fresh": ~stored_B, "drift_right": stored_B & right_B, "drift_wrong": stored_B & ~right_B}
        for name, chosen_B in parts.items():
            if chosen_B.any():
                self._note(name, float(drift_B[chosen_B].mean()))
        threshold = self.arm.correction.off_policy_mask_threshold
        if threshold is not None and (wrong_B := parts["drift_wrong"]).any():
            self._note("masked_wrong", float((drift_B[wrong_B] > threshold).mean()))

    def _note(self, name: str, value: float) -> None:
        self.facts.setdefault(name, []).append(value)
        self.last[name] = value
