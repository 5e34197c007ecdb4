"""The usual interval: of steps, and of bursts of groups, through stalls."""

import numpy as np
import pytest

from replay_server.tables.meters import ArrivalTimes, StepTimes


def rhythm_of(pauses, arrivals):
    now = 100.0
    arrivals.beat(now)
    for pause in pauses:
        now += pause
        arrivals.beat(now)
    return arrivals


def burst(groups, seconds, then):
    """Pauses of so many groups within so many seconds, and a silence after them."""
    return [*[seconds / groups] * groups, then]


@pytest.mark.parametrize(
    ("pauses", "usual"),
    [
        pytest.param([], 0.0, id="nothing yet"),
        pytest.param([30.0, 30.0], 0.0, id="two pauses are too few"),
        pytest.param([30.0, 31.0, 32.0], 31.0, id="three are enough"),
        pytest.param([31.0] * 40 + [600.0, 3000.0], 31.0, id="two stalls among steps"),
        pytest.param([31.0] * 40 + [60.0] * 4, 31.0, id="some steps that evaluate"),
        pytest.param([15.7] * 40 + [27.0, 60.0, 40.0, 90.0, 45.0], 15.7, id="many stalls among steps"),
        pytest.param([3.0] * 300 + [90.0] * 20, 90.0, id="steps that became longer"),
        pytest.param([90.0] * 300 + [3.0] * 260, 3.0, id="steps that became shorter"),
    ],
)
def test_the_usual_interval_is_that_of_steps(pauses, usual):
    assert rhythm_of(pauses, StepTimes()).interval == pytest.approx(usual)


@pytest.mark.parametrize(
    ("pauses", "least", "most"),
    [
        pytest.param(burst(64, 0.5, 30.0) * 6, 30.0, 30.6, id="64 groups at once in steps of half a minute"),
        pytest.param(burst(64, 9.0, 81.0) * 6, 80.0, 83.0, id="bursts that last for seconds"),
        pytest.param(burst(640, 60.0, 30.0) * 6, 30.0, 32.0, id="groups that stream for most of the step"),
        pytest.param([0.05] * 2000, 1.0, 1.1, id="groups that stream without a pause"),
        pytest.param(burst(64, 0.5, 30.0) * 6 + [900.0] + burst(64, 0.5, 30.0), 30.0, 30.6, id="a restart between"),
    ],
)
def test_a_burst_counts_once(pauses, least, most):
    assert least <= rhythm_of(pauses, ArrivalTimes(apart=1.0)).interval() <= most


@pytest.mark.parametrize(
    ("pauses", "step", "usual"),
    [
        pytest.param(burst(8, 4.0, 11.7) * 20 + [60.0, 40.0, 90.0, 45.0], 15.7, 11.7, id="many stalls among bursts"),
        pytest.param([75.0] * 20, 15.0, 75.0, id="a table that is fed every fifth step"),
        pytest.param([1.2] * 20, 15.0, 1.2, id="groups that stream"),
    ],
)
def test_bursts_are_told_from_stalls_by_the_steps_of_the_trainer(pauses, step, usual):
    assert rhythm_of(pauses, ArrivalTimes(apart=1.0)).interval(step) == pytest.approx(usual, abs=1.0)


def test_jitter_makes_the_interval_that_of_a_middling_step():
    steps = np.random.default_rng(3).uniform(20.0, 40.0, size=200).tolist()
    assert 25.0 < rhythm_of(steps, StepTimes()).interval < 35.0
