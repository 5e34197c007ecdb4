"""Durations, sizes, lists and finish reasons as people read them."""

from types import SimpleNamespace

import numpy as np
import pytest

from replay_dashboard.catalog import LISTED
from replay_dashboard.facts import A_PROMPT, COLUMNS, Facts
from replay_dashboard.query import View
from replay_dashboard.units import byte_size, duration, listed


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.9, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.7, "1 min"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (3599.6, "1 h"),
        (7500, "2 h 5 min"),
        (86_400, "1 d"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations_have_at_most_two_units(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1000, "1.0 kB"), (4_249, "4.2 kB"), (999_949, "999.9 kB"),
     (999_960, "1.0 MB"), (10**9, "1.0 GB"), (10**18 - 1, "1,000.0 PB"), (10**19, "10,000.0 PB")],
)  # fmt: skip
def test_sizes_are_powers_of_a_thousand(count, text):
    assert byte_size(count) == text


def test_long_lists_of_names_are_cut():
    names = [f"t{i}" for i in range(10_000)]
    assert listed(names[:2]) == "t0, t1"
    assert listed(names, most=3) == "t0, t1, t2 and 9997 more"


@pytest.mark.parametrize(
    ("flags", "finish"), [({A_PROMPT}, []), ({"ended by stop", "ended by length", "all cut off"}, ["length", "stop"])]
)
def test_only_finish_reasons_are_shown_as_such(flags, finish):
    facts = SimpleNamespace(
        numbers=np.full((1, len(COLUMNS)), np.nan), flags=np.zeros(1, np.int64), rows=[Facts(flags=frozenset(flags))]
    )
    snapshot = SimpleNamespace(
        keys=np.array([7]),
        columns={name: np.zeros(1) for name in LISTED},
        slots=lambda facts: np.zeros(1, np.int64),
        tags=lambda index: {},
    )
    assert View(snapshot, facts).row(0)["finish"] == finish
