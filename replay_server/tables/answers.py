"""Answers: what requests that change something were answered last. A retry gets the answer of its first time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from replay_server.tables.items import Watcher

MAX_ANSWERS = 1 << 16
MAX_BYTES = 64 << 20


class Answer(NamedTuple):
    digest: bytes
    """Of the request: the same id with another request is no retry."""
    message: bytes


class Answers:
    """By the id that the client chose for its request. The oldest are forgotten."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers
        self._answers: dict[int, Answer] = {}
        self._bytes = 0

    def get(self, request_id: int) -> Answer | None:
        return self._answers.get(request_id)

    def remember(self, request_id: int, answer: Answer) -> None:
        """Call it in the same step as the change, so that one commit writes both."""
        self._answers[request_id] = answer
        self._bytes += len(answer.message)
        changed = [request_id]
        while len(self._answers) > MAX_ANSWERS or (self._bytes > MAX_BYTES and len(self._answers) > 1):
            oldest = next(iter(self._answers))
            self._bytes -= len(self._answers.pop(oldest).message)
            changed.append(oldest)
        for watcher in self._watchers:
            watcher.answers_changed(changed)

    def load(self, answers: Iterable[tuple[int, Answer]]) -> None:
        """Those of an older server, from the oldest to the newest."""
        self._answers = dict(answers)
        self._bytes = sum(len(answer.message) for answer in self._answers.values())
