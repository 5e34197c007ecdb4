"""Answers: bounded by number and by bytes, and watchers hear of every change."""

import pytest

from replay_server.tables import answers
from replay_server.tables.answers import Answer, Answers


class Watcher:
    def __init__(self):
        self.changes = []

    def answers_changed(self, request_ids):
        self.changes.append(list(request_ids))


@pytest.mark.parametrize(("bound", "value"), [("MAX_ANSWERS", 2), ("MAX_BYTES", 25)])
def test_the_oldest_answers_are_forgotten_first(monkeypatch, bound, value):
    monkeypatch.setattr(answers, bound, value)
    watcher = Watcher()
    remembered = Answers([watcher])
    for request in (1, 2, 3):
        remembered.remember(request, Answer(b"digest", bytes(10)))
    assert [remembered.get(request) is not None for request in (1, 2, 3)] == [False, True, True]
    assert watcher.changes == [[1], [2], [3, 1]]


def test_the_newest_answer_stays_however_large_it_is(monkeypatch):
    monkeypatch.setattr(answers, "MAX_BYTES", 5)
    remembered = Answers([])
    remembered.remember(1, Answer(b"digest", bytes(10)))
    remembered.remember(2, Answer(b"digest", bytes(10)))
    assert (remembered.get(1), remembered.get(2)) == (None, Answer(b"digest", bytes(10)))


def test_loaded_answers_keep_their_order_and_their_bytes(monkeypatch):
    monkeypatch.setattr(answers, "MAX_BYTES", 25)
    remembered = Answers([])
    remembered.load([(9, Answer(b"", bytes(10))), (1, Answer(b"", bytes(10)))])
    remembered.remember(5, Answer(b"", bytes(10)))
    assert [request for request in (9, 1, 5) if remembered.get(request)] == [1, 5]
