"""Server info: what it says of a table too large to be looked at item by item."""

import numpy as np
import pytest

from replay_server.rpc.info import MANY, quantiles_of, table_info
from replay_server.tables.config import TableConfig
from tests.kit.tables import insert_rows, remove_rows, replay_buffer


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def test_up_to_many_values_every_quantile_is_exact(rng):
    values = rng.permutation(np.arange(MANY, dtype=np.float64))
    found = quantiles_of(values)
    assert found.min == 0
    assert found.max == MANY - 1
    assert found.mean == (MANY - 1) / 2
    assert [found.p10, found.p50, found.p90] == pytest.approx([share * (MANY - 1) for share in (0.1, 0.5, 0.9)])


def test_of_more_values_the_extremes_and_the_mean_are_exact_and_the_rest_is_near(rng):
    values = rng.lognormal(sigma=3.0, size=200_000)
    found = quantiles_of(values)
    assert found.min == values.min()
    assert found.max == values.max()
    assert found.mean == pytest.approx(values.mean())
    for share, estimate in ((0.1, found.p10), (0.5, found.p50), (0.9, found.p90)):
        assert (values < estimate).mean() == pytest.approx(share, abs=0.04)  # seven standard deviations


def test_what_was_deleted_is_in_no_figure_of_the_table(rng):
    buffer = replay_buffer([TableConfig(name="pool", max_size=100_000)], lambda: 0.0)
    table = buffer.tables["pool"]
    keys = list(range(1, 50_001))
    table.on_leave = remove_rows
    insert_rows(table, {key: float(key) for key in keys}, np.arange(50_000))
    table.delete([key for key in keys if key % 5 or key < 10_000 or key > 40_000])
    priority = table_info(buffer, table).priority
    assert table.size == 6001
    assert priority.min == 10_000
    assert priority.p50 == 25_000
    assert priority.max == 40_000
    assert priority.mean == 25_000


def test_the_limiter_says_where_it_stands_in_its_window(rng):
    limiter = {"type": "sample_to_insert_ratio", "samples_per_insert": 2.0, "min_size": 3, "error_buffer": 4.0}
    buffer = replay_buffer([TableConfig(name="pool", rate_limiter=limiter)], lambda: 0.0)
    table = buffer.tables["pool"]
    table.on_leave = remove_rows
    insert_rows(table, dict.fromkeys([1, 2, 3, 4], 1.0))
    said = table_info(buffer, table).limiter
    assert said.samples_per_insert == 2.0
    assert said.min_size == 3
    assert said.min_diff == 2.0
    assert said.max_diff == 10.0
    assert said.difference == 8.0
    assert said.size == 4
    assert table.limiter.can_insert(1)
    assert not table.limiter.can_insert(2)  # (difference + 2 * spi = 12) > max_diff
    assert table.limiter.can_sample(6)
    assert not table.limiter.can_sample(7)  # (difference - 7 = 1) < min_diff


def test_a_limiter_without_a_window_has_no_bounds():
    buffer = replay_buffer([TableConfig(name="pool")], lambda: 0.0)
    said = table_info(buffer, buffer.tables["pool"]).limiter
    assert said.min_size == 1
    assert said.min_diff == -np.inf
    assert said.max_diff == np.inf
