"""Selectors: orders after much churn, distributions by chi-square, and what becomes of priorities that age.

Orders, ties and deletions are stated in reference.py, and compared with it by test_model.py.
"""

import numpy as np
import pytest

from replay_server.tables.columns import Columns
from replay_server.tables.config import SelectorConfig
from tests.kit.tables import slots_of


class Pool:
    """A selector over items named by their key, as a table drives it."""

    def __init__(self, kind: str, **options):
        self.columns = Columns()
        self.selector = SelectorConfig(type=kind, **options).build(self.columns)
        self.rng = np.random.default_rng(7)
        self.order = 0

    def insert(self, key: int, priority: float = 1.0, version: int = 0) -> None:
        self.order += 1
        slots = self.columns.add([key])
        self.columns.priority[slots] = priority
        self.columns.policy_version[slots] = version
        self.columns.order[slots] = self.order
        self.selector.insert(slots)

    def delete(self, key: int) -> None:
        slots = np.array([slots_of(self.columns)[key]])
        self.selector.delete(slots)
        self.columns.leave(slots)
        self.columns.free(slots)

    def update(self, **priorities: float) -> None:
        slots = np.array([slots_of(self.columns)[int(key[1:])] for key in priorities])
        self.columns.priority[slots] = list(priorities.values())
        self.selector.update(slots)

    def select(self, n: int) -> list[int]:
        return self.columns.key[self.selector.select(n, self.rng)[0]].tolist()


def filled(kind: str, *priorities: float, **options) -> Pool:
    pool = Pool(kind, **options)
    for key, priority in enumerate(priorities):
        pool.insert(key, priority)
    return pool


@pytest.mark.parametrize(("kind", "sign"), [("min_heap", 1), ("max_heap", -1)])
@pytest.mark.parametrize("n", [1, 2, 100, 5000])
def test_heaps_name_the_first_of_many_in_order_after_churn(kind, sign, n):
    rng, pool = np.random.default_rng(n), Pool(kind)
    for key in range(3000):
        pool.insert(key, float(rng.integers(50)))
        if key % 3 == 2:
            pool.delete(int(rng.choice(list(slots_of(pool.columns)))))
    columns = pool.columns
    slots = columns.used()[::7]
    columns.priority[slots] = rng.integers(50, size=slots.size)
    pool.selector.update(slots)
    expected = sorted(
        slots_of(columns),
        key=lambda key: (sign * columns.priority[slots_of(columns)[key]], columns.order[slots_of(columns)[key]]),
    )
    assert pool.select(n) == expected[:n]


@pytest.mark.parametrize(("kind", "sign"), [("min_heap", 1), ("max_heap", -1)])
def test_heaps_name_the_first_after_each_change_of_one_of_few_priorities(kind, sign):
    rng = np.random.default_rng(1)
    pool = filled(kind, *rng.integers(4, size=64).tolist())  # as many as a tree has leaves at first
    columns = pool.columns
    slots = slots_of(columns)
    for _ in range(500):
        pool.update(**{f"k{rng.integers(64)}": float(rng.integers(4))})
        first = min(slots, key=lambda key: (sign * columns.priority[slots[key]], columns.order[slots[key]]))
        assert pool.select(1) == [first]


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """z-score of the chi-square statistic (normal approximation: mean k, variance 2 k)."""
    expected = counts.sum() * probabilities
    keep = expected > 5
    statistic = ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    return float((statistic - (keep.sum() - 1)) / np.sqrt(2 * (keep.sum() - 1)))


def first_draws(pool: Pool, draws: int, size: int) -> np.ndarray:
    counts = np.zeros(size)
    for _ in range(draws):
        counts[pool.select(1)[0]] += 1
    return counts


def test_uniform_draws_uniformly():
    counts = first_draws(filled("uniform", *[1.0] * 20), 20_000, 20)
    assert abs(chi_square(counts, np.full(20, 1 / 20))) < 4


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_prioritized_draws_in_proportion_to_priority_to_the_exponent(exponent):
    priorities = np.arange(1.0, 21.0)
    weights = priorities**exponent
    pool = filled("prioritized", *priorities, exponent=exponent)
    assert abs(chi_square(first_draws(pool, 20_000, 20), weights / weights.sum())) < 4
    slots, probabilities = pool.selector.select(5, pool.rng)
    assert probabilities == pytest.approx(weights[pool.columns.key[slots].astype(int)] / weights.sum())


def test_prioritized_draws_right_after_heavy_churn_over_twelve_orders_of_magnitude():
    rng = np.random.default_rng(3)
    pool = Pool("prioritized")
    alive: dict[int, float] = {}
    for key in range(5000):
        alive[key] = float(10.0 ** rng.uniform(-6, 6))
        pool.insert(key, alive[key])
        if len(alive) > 300:
            gone = int(rng.choice(list(alive)))
            pool.delete(gone)
            del alive[gone]
    keys = np.array(list(alive))
    # Ten of about the same size among giants and dwarfs; the dwarfs must neither vanish nor be drawn too often.
    pool.update(**{f"k{key}": priority for key, priority in zip(keys[:10], np.linspace(1e6, 2e6, 10), strict=True)})
    weights = pool.columns.priority[[slots_of(pool.columns)[key] for key in keys]]
    counts = dict.fromkeys(keys.tolist(), 0)
    for _ in range(200):
        slots, _ = pool.selector.select_repeated(500, pool.rng)
        for key in pool.columns.key[slots].tolist():
            counts[key] += 1
    assert abs(chi_square(np.array(list(counts.values())), weights / weights.sum())) < 4
    slots, probabilities = pool.selector.select(300, pool.rng)
    expected = pool.columns.priority[slots] / weights.sum()
    assert probabilities == pytest.approx(expected, rel=1e-12)


def test_distinct_prioritized_draws_are_successive_draws_without_replacement():
    # P(a then b) = w_a / W * w_b / (W - w_a)
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    pool = filled("prioritized", *weights)
    counts = np.zeros((4, 4))
    for _ in range(20_000):
        first, second = pool.select(2)
        counts[first, second] += 1
    total = weights.sum()
    expected = weights[:, None] / total * weights[None, :] / (total - weights[:, None])
    np.fill_diagonal(expected, 0)
    off_diagonal = ~np.eye(4, dtype=bool)
    assert counts[~off_diagonal].sum() == 0
    assert abs(chi_square(counts[off_diagonal], expected[off_diagonal])) < 4


# ------------------------------------------------------------------------------------------------------- freshness


class AgeingPool(Pool):
    """A pool whose items have policy versions; `move` sets the current one as a table does."""

    def move(self, version: int) -> None:
        before, self.columns.current_version = self.columns.current_version, version
        self.selector.version_moved(before)

    def shares(self) -> dict[int, float]:
        """The probability of each item of being drawn first, by key."""
        slots, shares = self.selector.select(len(self.columns), self.rng)
        return dict(zip(self.columns.key[slots].tolist(), shares.tolist(), strict=True))

    def expected_shares(self, exponent: float, half_life: float) -> dict[int, float]:
        """From the definition: priority ** exponent * 2 ** (-staleness / half_life), as shares."""
        weights = {}
        for key, slot in slots_of(self.columns).items():
            staleness = max(0, self.columns.current_version - int(self.columns.policy_version[slot]))
            if (priority := float(self.columns.priority[slot])) > 0:
                weights[key] = np.log2(priority) * exponent - staleness / half_life
        largest = max(weights.values(), default=0.0)
        relative = {key: 2.0 ** (weight - largest) for key, weight in weights.items()}
        return {key: weight / sum(relative.values()) for key, weight in relative.items()}


@pytest.mark.parametrize("half_life", [0.01, 0.7, 5.0, 300.0])
def test_shares_follow_the_definition_through_inserts_updates_deletions_moves_and_rollbacks(half_life):
    rng, exponent = np.random.default_rng(int(half_life * 100)), 0.6
    pool, key = AgeingPool("prioritized", exponent=exponent, half_life=half_life), 0
    for step in range(100):
        current = pool.columns.current_version
        match rng.integers(6):
            case 0 | 1:
                for _ in range(int(rng.integers(1, 40))):
                    version = max(0, current + int(rng.integers(-30, 4)))  # some are ahead of the trainer
                    pool.insert(key, float(rng.choice([0.0, 0.1, 1.0, 8.0])), version)
                    key += 1
            case 2 if slots_of(pool.columns):
                for gone in rng.choice(
                    list(slots_of(pool.columns)), min(20, len(pool.columns)), replace=False
                ).tolist():
                    pool.delete(gone)
            case 3 if slots_of(pool.columns):
                chosen = int(rng.choice(list(slots_of(pool.columns))))
                pool.update(**{f"k{chosen}": float(rng.random() * 4)})
            case 4:
                pool.move(current + int(rng.choice([1, 1, 1, 7, 500])))
            case 5 if step % 5 == 0:
                pool.move(max(0, current - int(rng.choice([1, 20, 2000]))))  # a rollback
        shares, expected = pool.shares(), pool.expected_shares(exponent, half_life)
        assert (
            len(shares)
            == pool.selector.selectable()
            == np.count_nonzero(pool.columns.priority[list(slots_of(pool.columns).values())])
        )
        keys = list(expected)
        assert [shares[each] for each in keys] == pytest.approx([expected[each] for each in keys], rel=1e-6, abs=1e-12)


def test_old_items_keep_their_proportions_when_all_newer_ones_have_left():
    pool = AgeingPool("prioritized", half_life=1.0)
    pool.insert(0, 1.0, 0)
    pool.insert(1, 3.0, 0)
    pool.move(5000)
    pool.insert(2, 1.0, 5000)
    assert pool.shares()[2] == pytest.approx(1.0)
    pool.delete(2)
    assert pool.shares() == pytest.approx({0: 0.25, 1: 0.75})


@pytest.mark.parametrize(("kind", "sign"), [("min_heap", 1), ("max_heap", -1)])
def test_heaps_order_by_aged_priorities_and_after_a_rollback_too(kind, sign):
    rng, half_life = np.random.default_rng(5), 4.0
    pool = AgeingPool(kind, half_life=half_life)
    for key in range(300):
        pool.insert(key, float(rng.choice([0.0, 0.3, 1.0, 7.0])), int(rng.integers(200)))
    for current in (0, 150, 210, 90, 2, 1000):
        pool.move(current)
        columns = pool.columns

        def rank(key: int, columns: Columns = columns) -> tuple[float, int]:
            slot = slots_of(columns)[key]
            counted = min(int(columns.policy_version[slot]), columns.current_version)
            priority = float(columns.priority[slot])
            logarithm = float(np.log2(priority)) if priority else -1e300
            return sign * (logarithm + counted / half_life), int(columns.order[slot])

        assert pool.select(300) == sorted(slots_of(columns), key=rank)


def test_the_largest_priority_at_the_largest_exponent_stays_finite_when_it_ages():
    pool = AgeingPool("prioritized", exponent=7.0, half_life=0.01)
    for version in range(3):
        pool.move(version)
        pool.insert(version, 3.4e38, version)
    assert pool.shares() == pytest.approx({2: 1.0, 1: 2.0**-100, 0: 2.0**-200}, abs=1e-12)


@pytest.mark.parametrize("options", [{"half_life": 0.0}, {"half_life": -1.0}, {"half_life": float("inf")}])
def test_a_half_life_that_is_no_number_of_versions_is_refused(options):
    with pytest.raises(ValueError, match="half_life"):
        SelectorConfig(type="prioritized", **options)


@pytest.mark.parametrize("kind", ["fifo", "lifo", "uniform"])
def test_a_half_life_where_priorities_do_not_count_is_refused(kind):
    with pytest.raises(ValueError, match=f"not to '{kind}'"):
        SelectorConfig(type=kind, half_life=5.0)
