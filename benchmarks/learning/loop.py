"""One run: an arm trains one warm start for a budget of generated tokens, through a real replay server.

    sample_groups ──▶ rollouts ──▶ fresh groups ─┐
    (one process)         └─▶ replay ──▶ replayed ┴─▶ correction, loss, AdamW ──▶ the next policy version

The server, its tables, the client, the replacement of zero-variance groups, the correction and the loss are the
project's own. Only the generator and the order of the two are the harness's: they take turns in one process, so that a
run repeats exactly and costs seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from benchmarks.learning.arms import GROUP_SIZE, Arm
from benchmarks.learning.model import sample_groups, warm_start
from benchmarks.learning.prompts import prompt_choice
from benchmarks.learning.stored import DistinctAnswers, right_answers
from benchmarks.learning.tasks import Row, load_task
from benchmarks.learning.variety import HeldOut
from replay_client import ReplayClient, RolloutGroup, Sample
from replay_client.generator.rewards import load_priority
from replay_client.scoring import carries_gradient
from replay_server import ReplayServer, TableConfig
from replay_trainer import ZeroVarianceReplacer
from replay_trainer.batching import Batch, to_batch
from replay_trainer.groups import GroupSource
from replay_trainer.logprobs import LogprobModel
from replay_trainer.losses import corrected_policy_loss
from replay_trainer.ranks import Ranks

IN_PROCESS = "in-process"
EVALUATIONS = 12
"""Points of a curve after its start."""


@dataclass(frozen=True)
class Settings:
    """Settings that all arms of a comparison share."""

    task: str
    regime: str
    seed: int
    learning_rate: float
    budget: int
    """Generated tokens, after which the run ends."""


@dataclass(frozen=True)
class Point:
    """Where a run stood at one evaluation; all counts since its start, evaluations not counted in the times."""

    generated_tokens: int
    trained_tokens: int
    steps: int
    seconds: float
    cpu_seconds: float
    solve_rate: float


def run(arm: Arm, settings: Settings, warm_starts: Path) -> dict[str, Any]:
    """Trains and returns the run's record: arm, settings, curve, and means over its steps."""
    task = load_task(settings.task)
    model, problems = warm_start(warm_starts, task, settings.regime, settings.seed)
    held_out = HeldOut(problems.held_out)
    torch.manual_seed(settings.seed)
    start, variety = held_out.measure(model)
    with ReplayServer(tables(arm, settings.seed), port=0) as server, ReplayClient(server.address) as client:
        steps = _Steps(arm, settings, model, problems.train, task.max_tokens, client)
        curve, varieties = [Point(0, 0, 0, 0.0, 0.0, start)], [variety]
        wall = cpu = 0.0
        while steps.generated_tokens < settings.budget:
            wall_before, cpu_before = time.perf_counter(), time.process_time()
            steps.step()
            wall += time.perf_counter() - wall_before
            cpu += time.process_time() - cpu_before
            if steps.generated_tokens >= len(curve) * settings.budget / EVALUATIONS:
                rate, variety = held_out.measure(model)
                varieties.append(variety)
                curve.append(Point(steps.generated_tokens, steps.trained_tokens, steps.version, wall, cpu, rate))
    return {
        "arm": arm.name,
        **asdict(settings),
        "engine": IN_PROCESS,
        "curve": [list(asdict(point).values()) for point in curve],
        "variety": [list(asdict(each).values()) for each in varieties],
        "means": {name: float(np.mean(values)) for name, values in steps.facts.items()},
    }


def tables(arm: Arm, seed: int) -> list[TableConfig]:
    """A queue of fresh groups that feeds the pool of `arm`."""
    sampler: dict[str, Any] = {"type": "prioritized", "exponent": arm.exponent}
    if arm.pools and arm.half_life is not None:
        sampler["half_life"] = arm.half_life
    rollouts = TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 4096}, forward_to="replay")
    pool = TableConfig(
        name="replay",
        sampler=sampler,
        remover=arm.remover,
        max_size=arm.pool_size,
        max_times_sampled=arm.max_times_sampled,
        max_staleness=arm.max_staleness,
        seed=seed,
    )
    return [rollouts, pool]


class _Steps:
    """The state of one run between its steps."""

    def __init__(
        self, arm: Arm, settings: Settings, model: Any, rows: list[Row], max_tokens: int, client: ReplayClient
    ) -> None:
        self.arm, self.client, self.model, self.rows, self.max_tokens = arm, client, model, rows, max_tokens
        self.policy = LogprobModel(model, packing=False)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01, fused=True)
        self.prompts = prompt_choice(arm.prompts, len(rows), settings.seed)
        self.random = torch.Generator().manual_seed(settings.seed)
        self.source = self._source()
        self.answers = DistinctAnswers()
        self.version = self.generated_tokens = self.trained_tokens = 0
        self.facts: dict[str, list[float]] = {}
        self._sampler = model
        self._past: deque[dict[str, Any]] = deque()
        if arm.lag:
            self._sampler = type(model)(model.config).eval()

    def step(self) -> None:
        """Generates, draws, trains, and makes the next policy version."""
        taken = self.source.next(self.version + 1)
        self._note("zero_variance", taken.counts["groups_zero_variance"] / max(1, len(taken.fresh)))
        self._note("replayed", len(taken.replaced))
        if taken.replaced:
            self._note("staleness", taken.stats["staleness_mean"])
        groups = taken.groups
        if self.arm.stored == "right":
            groups = [right_answers(group) if i in taken.replaced else group for i, group in enumerate(groups)]
        self._train(groups)
        if self.arm.stored == "distinct":
            for answer in [answer for sample in taken.fresh for answer in self.answers.new(sample.group)]:
                self.client.insert(answer, {"replay": 1.0})
        self.version += 1
        self.client.set_policy_version(self.version)

    def _source(self) -> GroupSource:
        """As GRPOTrainer makes it from `zero_variance` and `replay_share`."""
        arm = self.arm
        return GroupSource(
            self._batches(),
            ZeroVarianceReplacer(self.client, "replay"),
            Ranks("cpu"),
            "run",
            zero_variance="none" if arm.zero_variance == "keep" else arm.zero_variance,
            size=arm.fresh,
            added=arm.replay,
            start=arm.start,
        )

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
            self._sampler.load_state_dict(self._past[0]["state"])
        chosen = self.prompts.next(count, self.version)
        rows = [self.rows[index] for index in chosen]
        groups = sample_groups(self._sampler, rows, GROUP_SIZE, self.max_tokens, self.version - lag, self.random)
        for index, group in zip(chosen, groups, strict=True):
            self.prompts.told(index, group)
            self.generated_tokens += group.completion_ids.size
            self.client.insert(group, {"rollouts": self._priority(group)})
        return self.client.sample("rollouts", count, timeout=30.0)

    def _priority(self, group: RolloutGroup) -> float:
        if not self.arm.pools or self.arm.stored == "distinct":
            return 0.0
        return load_priority(self.arm.priority)(group)

    def _train(self, groups: list[RolloutGroup]) -> None:
        """As GRPOTrainer's update with loss_type="dapo", as often as the arm says."""
        if not groups:
            return
        tokens = sum(group.completion_ids.size for group in groups)
        self._note("groups", len(groups))
        # Groups without variance have a gradient of exactly 0. They count in the denominator, and are computed for
        # nothing: leaving them out halves the time of a run.
        informative = [group for group in groups if carries_gradient(group)]
        batch = to_batch(informative) if informative else None
        old_BT: torch.Tensor | None = None
        for _ in range(self.arm.num_iterations):
            self.trained_tokens += tokens
            self.optimizer.zero_grad(set_to_none=False)
            if batch is not None:
                logprobs_BT, _ = self.policy(batch)
                old_BT = logprobs_BT.detach() if old_BT is None else old_BT
                self._backward(batch, logprobs_BT, old_BT, tokens)
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    def _backward(self, batch: Batch, logprobs_BT: torch.Tensor, old_BT: torch.Tensor, tokens: int) -> None:
        loss, metrics = corrected_policy_loss(
            logprobs_BT,
            old_BT,
            batch.rollout_logprobs_BT,
            batch.advantages_B,
            batch.mask_BT,
            self.arm.correction,
            self.arm.loss,
            normalizer=tokens,
        )
        torch.autograd.backward(loss)
        self._note("entropy", -float(logprobs_BT.detach()[batch.mask_BT].mean()))
        for name in ("ess", "kl", "ratio_mean", "off_policy_sequence_fraction"):
            if name in metrics:
                self._note(name, metrics[name])

    def _note(self, name: str, value: float) -> None:
        self.facts.setdefault(name, []).append(value)
