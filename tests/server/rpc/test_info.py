"""Server info: what it says of a table too large to be looked at item by item."""

import numpy as np
import pytest

from replay_server.rpc.info import table_info
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.config import TableConfig
from replay_server.tables.meters import MANY, Quantiles


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def test_up_to_many_values_every_quantile_is_exact(rng):
    values = rng.permutation(np.arange(MANY, dtype=np.float64))
    assert vars(Quantiles.of(values)) == pytest.approx(
        {
            "min": 0,
            "p10": 0.1 * (MANY - 1),
            "p50": 0.5 * (MANY - 1),
            "p90": 0.9 * (MANY - 1),
            "max": MANY - 1,
            "mean": (MANY - 1) / 2,
        }
    )


def test_of_more_values_the_extremes_and_the_mean_are_exact_and_the_rest_is_near(rng):
    values = rng.lognormal(sigma=3.0, size=200_000)
    found = Quantiles.of(values)
    assert (found.min, found.max, found.mean) == (values.min(), values.max(), pytest.approx(values.mean()))
    for share, estimate in ((0.1, found.p10), (0.5, found.p50), (0.9, found.p90)):
        assert (values < estimate).mean() == pytest.approx(share, abs=0.04)  # seven standard deviations


def test_what_was_deleted_is_in_no_figure_of_the_table(rng):
    buffer = ReplayBuffer([TableConfig(name="pool", max_size=100_000)], lambda: 0.0)
    table = buffer.tables["pool"]
    keys = list(range(1, 50_001))
    table.on_leave = lambda keys: None
    table.insert(keys, np.arange(1.0, 50_001), np.arange(50_000), np.ones(50_000, dtype=np.int64))
    table.delete([key for key in keys if key % 5 or key < 10_000 or key > 40_000])
    priority = table_info(buffer, table).priority
    assert table.size == 6001
    assert (priority.min, priority.p50, priority.max, priority.mean) == (10_000, 25_000, 40_000, 25_000)
