"""The soak finds what grows, and a short one runs through."""

import pytest

from tests.system.soak import GROWTH, growth, soak


def rows(name: str, values: list[float]) -> list[dict[str, float]]:
    return [dict.fromkeys(GROWTH, 1.0) | {name: value} for value in values]


@pytest.mark.parametrize("name", GROWTH)
def test_what_grows_is_named_and_what_is_level_is_not(name):
    level = [200_000.0 + (n % 3) for n in range(90)]
    assert growth(rows(name, level)) == []
    (problem,) = growth(rows(name, [value * 1.05**n for n, value in enumerate(level)]))
    assert problem.startswith(f"{name} grew from")


def test_growth_while_it_warms_up_is_none():
    assert growth(rows("memory_mb", [100.0] * 30 + [900.0] * 60)) == []


@pytest.mark.long
@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_short_soak_ends_well(shared_memory):
    """Too short to see anything grow; everybody works, nothing is left, and the server ends with status 0."""
    problems = soak(minutes=0.2, data_dir=None, shared_memory=shared_memory)
    assert [problem for problem in problems if " grew " not in problem] == []
