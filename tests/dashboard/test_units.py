"""Durations, sizes and lists as people read them."""

import pytest

from replay_dashboard.units import byte_size, duration, listed


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.9, "9.9 s"),
        (59.4, "59 s"),
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
    [(0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1000, "1.0 kB"), (4_249, "4.2 kB"), (10**9, "1.0 GB"),
     (10**19, "10,000.0 PB")],
)  # fmt: skip
def test_sizes_are_powers_of_a_thousand(count, text):
    assert byte_size(count) == text


def test_long_lists_of_names_are_cut():
    names = [f"t{i}" for i in range(10_000)]
    assert listed(names[:2]) == "t0, t1"
    assert listed(names, most=3) == "t0, t1, t2 and 9997 more"
