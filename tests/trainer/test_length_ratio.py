"""LengthRatio: the mean length trained on, compared with that of all that was generated."""

import math
from pathlib import Path
from typing import Any

import pytest

from replay_client import ReplayClient
from replay_client.errors import StaleItemError
from replay_client.testing import make_group
from replay_server import ReplayServer, TableConfig
from replay_trainer import Callback, StepReport
from replay_trainer.metrics import RATIO_STEPS, LengthRatio, Lengths
from tests.kit.trainers import lines_of, make_trainer


def test_the_ratio_is_below_1_when_long_completions_are_lost():
    ratio = LengthRatio(whole=True)
    assert ratio.add([10, 10], Lengths(completions=4, tokens=80)) == pytest.approx(0.5)


def test_a_run_that_goes_on_compares_only_what_happens_from_now_on():
    ratio = LengthRatio(whole=False)
    assert math.isnan(ratio.add([10], Lengths(completions=100, tokens=9000)))
    assert ratio.add([10], Lengths(completions=101, tokens=9020)) == pytest.approx(0.5)


def test_steps_of_long_ago_do_not_count():
    ratio = LengthRatio(whole=True)
    ratio.add([1000], Lengths(completions=1, tokens=1000))
    for step in range(1, RATIO_STEPS + 1):
        last = ratio.add([10], Lengths(completions=1 + step, tokens=1000 + 20 * step))
    assert last == pytest.approx(0.5)


def test_what_was_trained_on_while_the_server_was_away_is_made_up_for():
    ratio = LengthRatio(whole=True)
    assert math.isnan(ratio.add([30], None))
    assert ratio.add([10], Lengths(completions=2, tokens=80)) == pytest.approx(0.5)


def test_a_server_that_counts_anew_begins_the_comparison_anew():
    ratio = LengthRatio(whole=True)
    ratio.add([10], Lengths(completions=10, tokens=100))
    assert math.isnan(ratio.add([10], Lengths(completions=1, tokens=10)))
    assert ratio.add([10], Lengths(completions=2, tokens=20)) == pytest.approx(1.0)


def test_lengths_that_nobody_knows_have_no_ratio():
    assert math.isnan(LengthRatio(whole=True).add([10], Lengths()))


class Environments(Callback):
    """Two environments that go on after each step, and a ledger of what became of their completions."""

    def __init__(self, client: ReplayClient) -> None:
        self._client = client
        self._generated: list[int] = []
        """The lengths of all completions, those of groups that the server refused among them."""
        self._trained: list[int] = []
        self.refused = 0
        self.ratios: list[float] = []
        """After each step."""

    def generate(self) -> None:
        """Three short groups of the newest policy, and a long one that began with the first policy."""
        newest = self._client.policy().version
        for lengths, version in (([3, 5], newest), ([4, 4], newest), ([2, 6], newest), ([20, 28], 0)):
            self._generated += lengths
            try:
                self._client.insert(make_group(lengths=lengths, version=version), {"rollouts": 1.0})
            except StaleItemError:
                self.refused += 1

    def on_step(self, trainer: Any, report: StepReport) -> None:
        for sample in report.samples:
            self._trained += sample.group.rollout_lengths.tolist()
        trained_mean = sum(self._trained) / len(self._trained)
        generated_mean = sum(self._generated) / len(self._generated)
        self.ratios.append(trained_mean / generated_mean)
        self.generate()


def test_the_ratio_of_a_run_that_loses_its_long_groups_is_that_of_a_ledger(tmp_path: Path):
    table = TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 100}, max_staleness=2)
    few = {"max_steps": 20, "groups_per_step": 2, "zero_variance": "none", "prefetch": 0, "sample_timeout": 60.0}
    with ReplayServer([table], port=0) as server, ReplayClient(server.address) as client:
        environments = Environments(client)
        environments.generate()
        make_trainer(client, tmp_path, callbacks=[environments], **few).train()
    found = [line["train/length_ratio"] for line in lines_of(tmp_path)]
    assert environments.refused > 10
    assert found[-1] < 0.7
    assert found == pytest.approx(environments.ratios)
