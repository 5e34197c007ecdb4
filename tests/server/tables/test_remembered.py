"""Remembered: bounded by number and by bytes, in the order in which ids came, and watchers hear of every id."""

from itertools import count

from replay_server.tables.remembered import Remembered


class Watcher:
    def __init__(self):
        self.heard = []

    def remembered(self, kind, ids):
        self.heard.append((kind, list(ids)))


def answers(*ids, most=1000, most_bytes=1000, size=10):
    found = Remembered("answers", most, most_bytes=most_bytes)
    for one in ids:
        found.remember([one], (bytes(size),))
    return found


def test_the_oldest_are_forgotten_first():
    for bounds in ({"most": 2}, {"most_bytes": 25}):
        assert list(answers(1, 2, 3, **bounds)) == [2, 3]


def test_watchers_hear_of_every_id_and_not_of_what_is_loaded():
    found = Remembered("keys", 10, [watcher := Watcher()])
    found.load([1, 2])
    found.remember([3, 4], "a")
    assert watcher.heard == [("keys", [3, 4])]
    assert [found.get(one) for one in (1, 3, 4, 5)] == [None, "a", "a", None]
    assert found.any_of([5, 2])
    assert not found.any_of([5])


def test_the_newest_answer_stays_however_large_it_is():
    assert list(answers(1, 2, most_bytes=5)) == [2]


def test_what_is_forgotten_no_longer_counts():
    found = answers(1, 2, most_bytes=25)
    found.forget(1)
    found.forget(7)
    found.remember([3], (bytes(10),))
    assert list(found) == [2, 3]


def test_of_many_ids_no_more_than_a_256th_goes_before_the_bound_asks_for_it():
    found, ids = Remembered("keys", 10_000), count()
    for _ in range(100):
        found.remember([next(ids) for _ in range(333)])
        assert len(found) <= 10_000
        assert list(found)[-1] == next(ids) - 1
    assert len(found) >= 10_000 - 333 - 41


def test_an_answer_that_is_remembered_twice_counts_its_bytes_once():
    found = answers(1, 1, 1, 2, 3, most_bytes=35)
    assert list(found) == [1, 2, 3]
    found.check()
