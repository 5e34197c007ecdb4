"""Keys spread evenly over shards, and move only where they must."""

import numpy as np

from replay_client.requests import KeySequence
from replay_client.shards.placing import Rendezvous, is_random_key

NAMES = [f"shard-{number}" for number in range(8)]


def test_keys_of_a_sequence_and_small_numbers_spread_evenly():
    sequence = KeySequence()
    for keys in (np.arange(80_000, dtype=np.uint64), np.array([next(sequence) for _ in range(80_000)], np.uint64)):
        counts = np.bincount(Rendezvous(NAMES).owners(keys), minlength=8)
        assert ((counts - 10_000) ** 2 / 10_000).sum() < 60.0  # chi-square with 7 degrees of freedom: 1 in 10^9


def test_another_shard_takes_its_share_and_nothing_else_moves():
    keys = np.arange(10_000, dtype=np.uint64)
    before, after = Rendezvous(NAMES[:7]).owners(keys), Rendezvous(NAMES).owners(keys)
    assert set(after[before != after]) == {7}
    assert 0.10 < (before != after).mean() < 0.15


def test_the_owner_comes_first_whatever_the_order_of_the_names():
    there, back = Rendezvous(NAMES), Rendezvous(NAMES[::-1])
    for key in (0, 1, 1 << 63, (1 << 64) - 1):
        assert there.order(key)[0] == there.owner(key) == there.owners(np.array([key], np.uint64))[0]
        assert [NAMES[index] for index in there.order(key)] == [NAMES[::-1][index] for index in back.order(key)]


def test_the_owner_of_one_key_after_the_other_is_that_of_all_at_once():
    there = Rendezvous(NAMES)
    keys = [*range(250, 600), 7, *range((1 << 64) - 300, 1 << 64)]
    assert [there.owner(key) for key in keys] == there.owners(np.array(keys, np.uint64)).tolist()


def test_a_key_that_a_client_chose_is_known_by_its_range():
    assert all(is_random_key(next(KeySequence())) for _ in range(100))
    assert not any(map(is_random_key, (0, 12345, 1 << 63)))
