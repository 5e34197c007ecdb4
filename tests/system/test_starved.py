"""Two environments, one ten times slower than the other: nobody is starved in silence.

Both run through the real generator, server and trainer. Only the engine is made up. Its completions take a fixed
number of the trainer's steps, however fast the machine is: so a slow machine changes nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from replay_client import ReplayClient, RolloutGroup
from replay_client.records import ServerInfo
from replay_dashboard.diagnosis import Finding, Level, diagnose
from replay_dashboard.tag_counts import tag_counts
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.groups import inserting
from replay_generator.prompts.prompt import Prompt
from replay_server import TableConfig
from replay_trainer import Callback, StepReport
from tests.kit.clocks import in_a_thread
from tests.kit.stack import Stack, Worker
from tests.kit.trainers import make_trainer

GROUPS, BATCH, GROUP_SIZE = 500, 8, 4
STEPS = 60
"""Steps on 480 of the groups. The others are in the queue, or under way, when the trainer ends."""
FAST_STEPS, SLOW_STEPS = 0.4, 4.0
"""Steps of the trainer in which a completion is generated."""
TOKENS = {"fast": 4, "slow": 24}
PROMPTS = {"fast": [3, 4], "slow": [5, 6]}


class Words:
    """A tokenizer whose prompts are the names of the environments."""

    def encode(self, text: str) -> list[int]:
        return PROMPTS[text]


@dataclass
class PacedEngine:
    """An engine whose completions take some steps of the trainer."""

    tokenizer: Any = field(default_factory=Words)
    max_length: int = 64
    model: str | None = None
    version: int = 0
    step_seconds: float = 0.05
    """Seconds of the trainer's last step, without its wait for groups."""

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, *_: Any) -> list[Completion]:
        environment = "slow" if list(prompt_ids) == PROMPTS["slow"] else "fast"
        version = self.version
        steps = SLOW_STEPS if environment == "slow" else FAST_STEPS
        await asyncio.sleep(steps * self.step_seconds)
        tokens = TOKENS[environment]
        logprobs = [-1.0] * tokens
        # The reward is the text: each group has good and bad completions.
        return [
            Completion([7 + index] * tokens, logprobs, str(index % 2), "stop", [version] * tokens) for index in range(n)
        ]

    async def load_weights(self, path: str, version: int) -> None:
        self.version = version

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [0.0] * (len(token_ids) - 1)

    async def close(self) -> None:
        """It holds nothing."""


class Ledger(Callback):
    """The groups of each environment that the generator finished, and those that the trainer trained on."""

    def __init__(self, engine: PacedEngine) -> None:
        self.finished: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()
        self.ratios: list[float] = []
        """Of each step: what the trainer says, divided by what this ledger says."""
        self.enough = False
        """Whether the trainer is to stop."""
        self._engine = engine

    def finish(self, group: RolloutGroup) -> bool:
        """The generator's group filter."""
        self.finished[self._environment_of(group)] += 1
        return True

    def on_step(self, trainer: Any, report: StepReport) -> None:
        metrics = report.metrics
        self._engine.step_seconds = metrics["time/step"] - metrics["time/sample"]
        for sample in report.samples:
            self.trained[self._environment_of(sample.group)] += 1
        own_ratio = self._mean_length(self.trained) / self._mean_length(self.finished)
        self.ratios.append(metrics["train/length_ratio"] / own_ratio)
        if self.enough:
            trainer.stop()

    @staticmethod
    def _environment_of(group: RolloutGroup) -> str:
        return "slow" if group.prompt_ids.tolist() == PROMPTS["slow"] else "fast"

    @staticmethod
    def _mean_length(groups: Counter[str]) -> float:
        return sum(TOKENS[environment] * count for environment, count in groups.items()) / groups.total()


def prompts() -> list[Prompt]:
    """Both environments in turn."""
    return [
        Prompt(f"p{number}", environment, {}, {"environment": environment})
        for number in range(GROUPS // 2)
        for environment in ("fast", "slow")
    ]


def queue(max_staleness: int, max_size: int) -> TableConfig:
    limiter = {"type": "queue", "max_size": max_size}
    return TableConfig(name="rollouts", rate_limiter=limiter, max_staleness=max_staleness)


def reward(row: Any, text: str) -> float:
    return float(text)


def starved(info: ServerInfo) -> Finding | None:
    """What the doctor says of starved environments."""
    findings = diagnose(info, info.version, info.time)
    return next((finding for finding in findings if finding.rule.startswith("starved")), None)


def start_trainer(address: str, folder: Path, ledger: Ledger, steps: int) -> Any:
    def train() -> int:
        with ReplayClient(address) as client:
            trainer = make_trainer(
                client,
                folder,
                callbacks=[ledger],
                max_steps=steps,
                groups_per_step=BATCH,
                zero_variance="none",
                prefetch=0,
                sample_timeout=60.0,
            )
            return trainer.train()

    return in_a_thread(train)


async def generate(stack: Stack, engine: PacedEngine, ledger: Ledger, prompts: list[Prompt], **config: Any) -> Worker:
    return await stack.generate(
        engine=engine,
        prompts=prompts,
        reward=reward,
        group_filter=ledger.finish,
        group_size=GROUP_SIZE,
        permit_timeout=60.0,
        reload="in_flight",
        wait_for_policy=True,
        probe_tolerance=math.inf,
        **config,
    )


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(inserting, "SECONDS_PER_LOOK", 0.1)


@pytest.mark.long
async def test_with_permits_a_slow_environment_is_trained_on_like_a_fast_one(tmp_path):
    engine = PacedEngine()
    ledger = Ledger(engine)
    admission = {"max_staleness": 2}
    async with Stack(
        tables=[queue(max_staleness=12, max_size=GROUPS)], groups=BATCH, admission=admission, timeout=60.0
    ) as stack:
        training = start_trainer(stack.address, tmp_path, ledger, STEPS)
        generator = await generate(stack, engine, ledger, prompts(), max_concurrent_groups=None)
        steps = await asyncio.wrap_future(training)
        await generator.stop()
        info = await stack.client.server_info()
    (counts,) = tag_counts(info, info.tables["rollouts"])
    assert steps == STEPS
    assert counts.tag == "environment"
    assert {name: value.sampled for name, value in counts.values.items()} == dict(ledger.trained)
    assert ledger.trained.total() >= 0.95 * counts.generated
    for environment in counts.values.values():
        assert environment.stale <= 0.05 * environment.generated
    assert starved(info) is None
    assert ledger.ratios[-1] == pytest.approx(1.0, abs=0.02)


async def test_with_a_tight_bound_the_doctor_names_the_environment_and_what_it_loses(tmp_path):
    engine = PacedEngine()
    ledger = Ledger(engine)
    async with Stack(tables=[queue(max_staleness=1, max_size=2 * BATCH)], timeout=60.0) as stack:
        training = start_trainer(stack.address, tmp_path, ledger, GROUPS)
        await generate(stack, engine, ledger, prompts() * 10, max_concurrent_groups=4 * BATCH)
        infos = [await stack.client.server_info()]
        async with asyncio.timeout(60.0):  # a minute is promised
            while starved(infos[-1]) is None:
                await asyncio.sleep(0.05)
                infos.append(await stack.client.server_info())
        ledger.enough = True
        await asyncio.wrap_future(training)
    finding = starved(infos[-1])
    (counts,) = tag_counts(infos[-1], infos[-1].tables["rollouts"])
    slow = counts.values["slow"]
    assert finding is not None
    assert finding.check == "rollouts"
    assert finding.message.startswith("groups with the tag environment=slow starve: ")
    assert f"{slow.stale / slow.generated:.0%} of {slow.generated} groups" in finding.message
    assert "use [admission]" in finding.remedy
    assert finding.level is (Level.FAILURE if slow.stale > slow.generated / 2 else Level.WARNING)
