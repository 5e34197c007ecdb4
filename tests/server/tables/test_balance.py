"""Balance: shares of values by chi-square, for each sampler, also where values are empty, excluded or used up.

Seeds are fixed, and each bound lets chance alone fail less than once in a million runs with other seeds.
"""

import re
from collections import Counter

import numpy as np
import pytest

from replay_protos.labels import Labels, labels_of
from replay_server import TableConfig
from replay_server.errors import Code, Refused
from replay_server.tables.balance import ValueRows, choose
from replay_server.tables.columns import MAX_BALANCED
from replay_server.tables.table import SampleRequest, Table
from tests.kit.tables import insert_rows, remove_rows, replay_buffer, rows_of

Z_LIMIT = 5.0
"""Standard deviations of a count that is nearly normal: chance goes beyond once in 1.7 million times."""
SAMPLERS = ["uniform", "prioritized", "fifo", "lifo", "min_heap", "max_heap"]
RANDOM = ["uniform", "prioritized"]


class Pool(Table):
    """A table whose items have the tag `environment`: `{"math": 3}` are three items of priority 1, 2 and 3."""

    def __init__(self, sampler: str = "uniform", weights: dict[str, float] | None = None, **options):
        balance = options.pop("balance", {"tag": "environment", "weights": weights or {}})
        config = TableConfig(name="pool", sampler=sampler, seed=3, balance=balance, **options)
        self.tags: dict[int, str | int | None] = {}
        super().__init__(
            config,
            lambda: 0.0,
            remove_rows,
            self.labels_of_keys,
        )

    def labels_of_keys(self, keys: list[int]) -> list[Labels]:
        return [labels_of([], {"environment": v, "x": 1} if (v := self.tags[key]) is not None else {}) for key in keys]

    def fill(self, **items: int) -> "Pool":
        for value, n in items.items():
            self.add([None if value == "none" else value] * n, np.arange(1.0, n + 1))
        return self

    def add(self, values: list[str | int | None], priorities) -> list[int]:
        keys = [len(self.tags) + 1 + row for row in range(len(values))]
        self.tags.update(zip(keys, values, strict=True))
        insert_rows(self, dict(zip(keys, priorities, strict=True)), labels=self.labels_of_keys(keys))
        return keys

    def drawn(self, n: int, **request) -> list[int]:
        batch = self.draw(SampleRequest(n, n, **request), n)
        self.acknowledge(batch)
        return batch.keys.tolist()

    def keys_of(self, value: str | int | None) -> list[int]:
        return [key for key, of in self.tags.items() if of == value and key in self]


def assert_shares(counts: Counter, shares: dict, draws: int) -> None:
    """Each count is binomial, so its distance from its expectation has a known spread."""
    assert sum(counts.values()) == draws
    for value, share in shares.items():
        spread = np.sqrt(draws * share * (1 - share))
        assert abs(counts[value] - draws * share) <= Z_LIMIT * spread, (value, counts, share)


def assert_distribution(counts: dict, shares: dict) -> None:
    """Chi-square, as a normal z-score by Wilson and Hilferty."""
    draws, degrees = sum(counts.values()), len(shares) - 1
    statistic = sum((counts.get(key, 0) - draws * share) ** 2 / (draws * share) for key, share in shares.items())
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))
    assert z < Z_LIMIT, (statistic, degrees)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("distinct", [True, False], ids=["distinct", "repeats"])
def test_values_are_drawn_by_their_weights_whatever_the_table_holds_of_each(sampler, distinct):
    pool = Pool(sampler, {"math": 2.0, "code": 1.0}).fill(math=5, code=200, none=40)
    draws = 4_000
    counts = Counter(pool.tags[key] for _ in range(draws) for key in pool.drawn(1, distinct=distinct))
    assert_shares(counts, {"math": 0.5, "code": 0.25, None: 0.25}, draws)


@pytest.mark.parametrize("sampler", RANDOM)
@pytest.mark.parametrize("rows", [1, 16])
def test_within_a_value_items_are_drawn_as_the_sampler_does(sampler, rows):
    pool = Pool(sampler, {"math": 3.0}).fill(math=6, code=12)
    counts = Counter(key for _ in range(12_000 // rows) for key in pool.drawn(rows, distinct=False))
    shares = {}
    for value, share in (("math", 0.75), ("code", 0.25)):
        keys = pool.keys_of(value)
        weights = np.arange(1.0, len(keys) + 1) if sampler == "prioritized" else np.ones(len(keys))
        shares |= dict(zip(keys, share * weights / weights.sum(), strict=True))
    assert_distribution(counts, shares)


def test_a_value_whose_items_all_have_priority_0_is_empty_until_one_of_them_has_more():
    pool = Pool("prioritized", {"math": 1000.0}).fill(code=5)
    keys = pool.add(["math"] * 3, [0.0, 0.0, 0.0])
    assert set(pool.drawn(5)) == set(pool.keys_of("code"))
    pool.update_priorities(np.array(keys[:1], dtype=np.uint64), np.array([1.0]))
    assert pool.available(SampleRequest(9, 1)) == 6
    # Without the update going through, chance would draw `code` in all of 3 draws once in 10^9 times.
    assert {pool.tags[key] for _ in range(3) for key in pool.drawn(1)} == {"math"}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_excluded_items_and_those_of_a_scope_count_as_gone_from_their_value(sampler):
    pool = Pool(sampler, {"math": 9.0}).fill(math=3, code=50)
    math = pool.keys_of("math")
    assert not set(pool.drawn(40, exclude=frozenset(math))) & set(math)
    first = pool.drawn(30, scope="step")
    second = pool.drawn(23, scope="step")
    assert sorted(first + second) == sorted(pool.tags)
    draws = 2_000
    counts = Counter(pool.tags[key] for _ in range(draws) for key in pool.drawn(1, exclude=frozenset(math[1:])))
    assert_shares(counts, {"math": 0.9, "code": 0.1}, draws)


def test_to_exclude_an_item_that_waits_excludes_no_other():
    pool = Pool(requires=["teacher"])

    def add(key: int, columns: list[str]) -> None:
        insert_rows(pool, {key: 1.0}, labels=[labels_of(columns, {"environment": "math"})])

    add(1, ["teacher"])
    pool.delete([1])
    add(2, [])  # it waits, in the slot that item 1 had
    add(3, ["teacher"])  # it has the place of item 1 among the items of its value
    assert pool.drawn(1, exclude=frozenset([2])) == [3]
    assert pool.available(SampleRequest(1, 1, exclude=frozenset([2]))) == 1


def test_distinct_draws_choose_values_as_draws_one_after_the_other_do():
    weights, left, n, times = [4.0, 2.0, 0.0, 1.0], [1, 2, 5, 2], 4, 20_000
    rng = np.random.default_rng(5)
    # Exact probabilities of each sequence, by the definition.
    shares: dict[tuple[int, ...], float] = {}

    def follow(sequence: tuple[int, ...], probability: float) -> None:
        if len(sequence) == n:
            shares[sequence] = probability
            return
        alive = [value for value in range(4) if weights[value] and sequence.count(value) < left[value]]
        total = sum(weights[value] for value in alive)
        for value in alive:
            follow((*sequence, value), probability * weights[value] / total)

    follow((), 1.0)
    counts = Counter(tuple(choose(np.array(weights), np.array(left), n, rng).tolist()) for _ in range(times))
    assert counts.keys() <= shares.keys()
    assert_distribution(counts, shares)


def test_ages_count_within_a_value_and_after_the_version_moved():
    pool = Pool(sampler={"type": "prioritized", "half_life": 1.0})
    for version in (0, 3):
        pool.set_policy_version(version)
        keys = [version + 1, version + 2]
        pool.tags |= {keys[0]: "math", keys[1]: "code"}
        insert_rows(pool, dict.fromkeys(keys, 1.0), version, pool.labels_of_keys(keys))
    pool.set_policy_version(2)  # a rollback: items of version 3 count as those of 2
    batch = pool.draw(SampleRequest(4, 4), 4)
    found = dict(zip(batch.keys.tolist(), batch.probabilities.tolist(), strict=True))
    assert found == pytest.approx({1: 0.1, 2: 0.1, 4: 0.4, 5: 0.4})


def first_probabilities(pool: Pool) -> tuple[list[int], list[float]]:
    batch = pool.draw(SampleRequest(pool.size, 1), pool.size)
    return batch.keys.tolist(), batch.probabilities.tolist()


def test_values_are_forgotten_with_their_last_item_and_shares_hold_over_much_churn():
    rng = np.random.default_rng(2)
    pool = Pool("prioritized", {"v1": 2.0}, max_size=60)
    for step in range(400):
        values = [f"v{rng.integers(step // 40, step // 40 + 4)}" for _ in range(int(rng.integers(1, 8)))]
        pool.add(values, rng.random(len(values)) + 0.1)
        if step % 3 == 0:
            pool.delete([int(key) for key in rng.choice(pool.columns.key[pool.columns.occupied()], 3, replace=False)])
        keys, probabilities = first_probabilities(pool)
        weights = {value: 2.0 if value == "v1" else 1.0 for value in {pool.tags[key] for key in keys}}
        for value, weight in weights.items():
            rows = [row for row, key in enumerate(keys) if pool.tags[key] == value]
            priorities = pool.columns.priority[[pool.columns.slot(keys[row]) for row in rows]]
            expected = weight / sum(weights.values()) * priorities / priorities.sum()
            assert [probabilities[row] for row in rows] == pytest.approx(expected.tolist())
        tag = pool.columns.tags["environment"]
        assert len(tag) == 1 + len(weights)
        assert len(tag.values) <= 20  # codes are used again


def test_a_part_of_a_batch_has_so_many_rows_of_each_value():
    pool = Pool("fifo").fill(math=5, code=2)
    wanted = (ValueRows("math", 2, 0.5), ValueRows("code", 3, 0.25), ValueRows("law", 1, 0.25))
    request = SampleRequest(6, 1, values=wanted)
    assert pool.available(request) == 4
    batch = pool.draw(request, 4)
    assert batch.keys.tolist() == pool.keys_of("math")[:2] + pool.keys_of("code")
    assert batch.probabilities.tolist() == [0.5, 0.0, 0.25, 0.0]
    repeats = pool.draw(SampleRequest(3, 3, distinct=False, values=(ValueRows("code", 3, 1.0),)), 3)
    assert repeats.keys.tolist() == pool.keys_of("code")[:1] * 3


def test_weights_are_told_value_by_value_without_what_the_request_leaves_out():
    pool = Pool("prioritized", {"math": 2.0, "law": 0.0}).fill(math=3, code=2, law=4)
    math = pool.keys_of("math")
    told = pool.weigh(SampleRequest(1, 1, exclude=frozenset(math[:1])))
    assert {tuple(value.values()) for value in told["values"]} == {
        ("math", 2.0, 5.0, 13.0, 2),
        ("code", 1.0, 3.0, 5.0, 2),
    }
    assert told["items"] == 4
    assert not Pool(balance=None).fill(math=3).weigh(SampleRequest(1, 1))["values"]


# ------------------------------------------------------------------------------------------------- configuration

QUEUE = (
    "table 't': balance is not for a {kind}: a full {kind} of one value and a draw that waits for another would wait "
    "for ever; forward its items to a table with balance"
)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"balance": {"tag": "e"}, "rate_limiter": {"type": "queue", "max_size": 4}}, QUEUE.format(kind="queue")),
        ({"balance": {"tag": "e"}, "rate_limiter": {"type": "stack", "max_size": 4}}, QUEUE.format(kind="stack")),
        (
            {"balance": {"tag": "e", "weights": {"math": -1}}},
            "balance.weights.math must be at least 0, not -1",
        ),
        (
            {"balance": {"tag": "e", "weights": {"math": float("nan")}}},
            "balance.weights.math must be a finite number, not nan",
        ),
        ({"balance": {"tag": ""}}, "balance.tag must have at least 1 character, not ''"),
        ({"balance": {"tga": "e"}}, "balance: there is no 'tga'; did you mean 'tag'?"),
        ({"index": ["a", "a"]}, "table 't': index names one twice: a, a"),
        ({"index": ["x" * 65]}, f"index.0 must have at most 64 characters, not '{'x' * 65}'"),
        (
            {"index": list("abcde")},
            "index must have at most 4 items, not 5",
        ),
    ],
)
def test_what_cannot_be_balanced_or_indexed_is_refused_with_one_line(options, line):
    with pytest.raises(ValueError, match=f"^TableConfig: {re.escape(line)}$"):
        TableConfig(name="t", **options)


def test_the_tag_of_a_balance_and_the_environment_are_indexed_without_being_named():
    assert TableConfig(name="t", index=["a"], balance={"tag": "b"}).indexed == ("a", "environment", "b")
    assert TableConfig(name="t", index=["b"], balance={"tag": "b"}).indexed == ("b", "environment")


def test_balance_begins_changes_and_ends_while_the_server_runs():
    pool = Pool(balance=None, max_times_sampled=100_000).fill(math=2, code=98)

    def share_of_math() -> float:
        keys, probabilities = first_probabilities(pool)
        return sum(p for key, p in zip(keys, probabilities, strict=True) if pool.tags[key] == "math")

    def configure(**changes) -> None:
        config = TableConfig.model_validate(pool.config.model_dump(exclude_unset=True) | changes)
        pool.configure(config, pool.tags_for(config))

    assert share_of_math() == pytest.approx(0.02)
    reserved = pool.draw(SampleRequest(1, 1, exclude=frozenset(pool.keys_of("code"))), 1)
    configure(balance={"tag": "environment"})
    assert share_of_math() == pytest.approx(0.5)
    configure(balance={"tag": "environment", "weights": {"math": 4.0}}, sampler="prioritized")
    pool.requeue(reserved)
    assert share_of_math() == pytest.approx(0.8)
    configure(index=["environment"], balance=None, sampler="uniform")
    assert share_of_math() == pytest.approx(0.02)


def test_an_item_with_one_value_more_than_can_be_balanced_is_refused_alone_and_is_welcome_when_one_has_left():
    balanced = TableConfig(name="pool", balance={"tag": "prompt"})
    buffer = replay_buffer([balanced, TableConfig(name="other", forward_to="pool")], lambda: 0.0)

    def insert(keys: range, table: str = "pool") -> int:
        labels = [labels_of([], {"prompt": key}) for key in keys]
        return buffer.insert(rows_of(keys, {table: 1.0}, labels=labels))[0]

    full = range(1, MAX_BALANCED)  # items without the tag are one value more
    assert insert(full) == len(full)
    line = f"tag 'prompt' of an item is '5000', and table 'pool' balances {MAX_BALANCED} values of it already: "
    for batch in (range(5000, 5001), range(5000, 5003)):
        with pytest.raises(Refused, match=f"^{line}balance a tag with fewer values$") as refused:
            insert(batch)
        assert refused.value.code is Code.INVALID_ARGUMENT
    assert buffer.tables["pool"].size == len(full)
    insert(range(6000, 6001), "other")
    batch_id, _ = buffer.sample("other", SampleRequest(1, 1)).result()
    buffer.acknowledge(batch_id)
    assert buffer.tables["other"].counters.forward_refused == 1
    buffer.delete("pool", [17])
    assert insert(range(5000, 5001)) == 1


def test_a_table_with_too_many_values_cannot_begin_to_balance_them():
    buffer = replay_buffer([TableConfig(name="pool")], lambda: 0.0)
    n = MAX_BALANCED
    labels = [labels_of([], {"prompt": key}) for key in range(n)]
    buffer.insert(rows_of(range(1, n + 1), {"pool": 1.0}, labels=labels))
    with pytest.raises(Refused, match=f"its items have {n + 1} values of the tag 'prompt', and at most {n} can be"):
        buffer.update_table("pool", {"balance": {"tag": "prompt"}})
    assert buffer.tables["pool"].config.balance is None
    buffer.delete("pool", [1])
    assert buffer.update_table("pool", {"balance": {"tag": "prompt"}}).available(SampleRequest(1, 1)) == n - 1
