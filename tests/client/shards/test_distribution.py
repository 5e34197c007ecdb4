"""Draws of a client over several servers follow the priorities, wherever the items are, and whatever has changed."""

import time
from collections import Counter

import numpy as np
import pytest

from replay_client import ReplayClient
from replay_client.shards.sampling import WEIGHTS_AGE
from tests.factories import until

SIZES = (3, 9, 18, 30)
"""Items of each server. The heaviest are on the first."""
ITEMS = sum(SIZES)
ROWS = 50
LIMIT = 137.0
"""The quantile of chi-square with 59 degrees of freedom that is exceeded once in 3 * 10^7 times."""


class Pool:
    """Unequal servers, one client of all, and the priorities that they should have."""

    def __init__(self, service) -> None:
        rng = np.random.default_rng(5)
        weights = np.sort(rng.exponential(size=ITEMS) + 0.05)[::-1].tolist()
        self.priorities: dict[int, float] = {}
        self.owners: dict[int, int] = {}
        for number, (address, size) in enumerate(zip(service.addresses, SIZES, strict=True)):
            with ReplayClient(address) as one:
                for weight in weights[len(self.priorities) :][:size]:
                    key = one.insert(b"", {"pool": weight})
                    self.priorities[key], self.owners[key] = weight, number
        self.client = ReplayClient(service.addresses, timeout=20.0)
        until(lambda: self.client.server_info().gone == ())

    def chi_square(self, draws: int) -> float:
        """Of so many draws, with repeats within a batch, against the priorities."""
        time.sleep(1.1 * WEIGHTS_AGE)  # what the client has heard of the shards before no longer holds
        found: Counter[int] = Counter()
        for _ in range(draws // ROWS):
            found.update(sample.info.key for sample in self.client.sample("pool", ROWS, distinct=False))
        assert found.keys() <= self.priorities.keys()
        total = sum(self.priorities.values())
        expected = {key: found.total() * weight / total for key, weight in self.priorities.items() if weight}
        assert found.keys() <= expected.keys()
        return sum((found[key] - wanted) ** 2 / wanted for key, wanted in expected.items())


@pytest.mark.parametrize("draws", [5_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_draws_follow_the_priorities_also_after_updates_and_with_one_server_away(make_service, draws):
    service = make_service(count=4)
    pool = Pool(service)
    with pool.client as client:
        assert pool.chi_square(draws) < LIMIT
        changed = {key: 3.0 * weight if key % 2 else 0.0 for key, weight in [*pool.priorities.items()][::3]}
        assert client.update_priorities("pool", changed).missing == ()
        pool.priorities |= changed
        assert pool.chi_square(draws) < LIMIT
        service.stop(0)  # with the heaviest items
        until(lambda: client.server_info().gone == (service.addresses[0],))
        pool.priorities = {key: weight for key, weight in pool.priorities.items() if pool.owners[key] != 0}
        assert pool.chi_square(draws) < LIMIT
