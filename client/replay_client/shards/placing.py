"""Placing: to which shard a key belongs, by rendezvous hashing.

Each shard gives each key a score, and the key belongs to the shard with the highest one. Every client finds the same
shard without asking anybody. Another shard more or less moves only the keys that it wins or loses, 1 of N.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from replay_client.requests import FIRST_KEY, LAST_KEY

Keys = npt.NDArray[np.uint64]


class Rendezvous:
    """The scores of the shards with these names. Their order does not matter."""

    def __init__(self, names: Sequence[str]) -> None:
        self._seeds = np.array([xxhash.xxh64_intdigest(name.encode()) for name in names], dtype=np.uint64)

    def owners(self, keys: Keys) -> npt.NDArray[np.int64]:
        """The index of the shard to which each of `keys` (K,) belongs, as (K,)."""
        return np.asarray(np.argmax(self._scores(keys), axis=1), dtype=np.int64)

    def order(self, key: int) -> list[int]:
        """All shards for one key, the owner first."""
        order: list[int] = np.argsort(self._scores(np.array([key], dtype=np.uint64))[0])[::-1].tolist()
        return order

    def _scores(self, keys: Keys) -> Keys:
        """splitmix64 of key xor seed, as (K, N). Wraps around at 64 bits, as that function does."""
        mixed = keys[:, None] ^ self._seeds[None, :]
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def chosen_by_client(key: int) -> bool:
    """Whether a KeySequence chose this key at random, so that no other process can have tried it before."""
    return FIRST_KEY <= key <= LAST_KEY
