"""What the trainer says while it waits for groups."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from replay_client.errors import DeadlineExceededError, ReplayError, ServerUnavailableError, TableNotFoundError
from replay_client.testing import until
from replay_trainer.background import ServerWaits
from tests.kit.clocks import in_a_thread


class Server:
    """The part of ReplayClient that ServerWaits asks. Each answer is one server id, or None: no server."""

    def __init__(self, *ids: int | None) -> None:
        self._ids = itertools.chain(ids, itertools.repeat(ids[-1]))

    def server_info(self, *, tables: list[str], timeout: float) -> Any:
        if (number := next(self._ids)) is None:
            raise ServerUnavailableError("no replay server answers")
        table = SimpleNamespace(sampling=SimpleNamespace(reason="rollouts: sampling blocked: items there: 0"))
        return SimpleNamespace(server_id=number, items=0, tables={"rollouts": table})


def test_a_long_wait_is_logged_with_its_reason_again_and_again_and_at_its_end(caplog):
    caplog.set_level(logging.WARNING)
    go_on = threading.Event()

    def batches() -> Iterator[int]:
        go_on.wait(60)
        yield 1

    watched = ServerWaits(Server(7, None, 8), "rollouts", seconds=0.02).watch(batches())
    trainer = in_a_thread(list, watched)
    until(lambda: len(caplog.messages) >= 3)
    go_on.set()
    assert trainer.result(60) == [1]
    assert "items there: 0" in caplog.messages[0]
    assert "no replay server answers" in caplog.messages[1]
    assert "the server was restarted, and holds 0 items now" in caplog.messages[2]
    assert caplog.messages[-1].startswith("the trainer goes on after")


def test_a_server_that_goes_and_comes_back_is_told_once_and_at_once(caplog):
    caplog.set_level(logging.WARNING)
    asked = []

    class Counted(Server):
        def server_info(self, **options: Any) -> Any:
            asked.append(options)
            return super().server_info(**options)

    def batches() -> Iterator[int]:
        until(lambda: len(asked) >= 12, timeout=60)
        yield 1

    server = Counted(7, 7, None, None, None, 8, 8, None, 8)
    # Half a minute would not end here: what is said is said because of the server.
    assert list(ServerWaits(server, "rollouts", seconds=1e6, look_seconds=0.01).watch(batches())) == [1]
    said = [message.partition(": ")[2].partition(" (for")[0] for message in caplog.messages[:-1]]
    assert [words.partition(";")[0] for words in said] == [
        "no replay server answers",
        "the server was restarted, and holds 0 items now",
        "no replay server answers",
        "the server answers again",
    ]
    assert caplog.messages[-1].startswith("the trainer goes on after")


def test_short_waits_are_not_logged_and_the_end_of_the_batches_ends_the_watch(caplog):
    caplog.set_level(logging.WARNING)
    assert list(ServerWaits(Server(1), "rollouts").watch(iter([1, 2, 3]))) == [1, 2, 3]
    assert caplog.messages == []


def test_an_error_of_the_stream_reaches_the_trainer(caplog):
    def batches() -> Iterator[int]:
        yield 1
        raise TableNotFoundError("gone")

    watched = ServerWaits(Server(1), "rollouts").watch(batches())
    assert next(watched) == 1
    with pytest.raises(TableNotFoundError, match="gone"):
        next(watched)


class Away(Server):
    """Is away for this many calls of `policy`; those without a timeout wait until it is back, unless it never is."""

    def __init__(self, calls: float) -> None:
        super().__init__(7)
        self.calls = calls

    def policy(self, timeout: float | None = None) -> None:
        self.calls -= 1
        if self.calls >= 0 and (timeout is not None or self.calls == math.inf):
            raise ServerUnavailableError("no replay server answers")


@pytest.mark.parametrize(
    ("error", "away", "ends_with"),
    [
        (DeadlineExceededError("no batch"), 2, None),
        (ServerUnavailableError("gone"), 2, None),
        (DeadlineExceededError("no batch"), 0, "no batch"),
        (DeadlineExceededError("no batch"), math.inf, "no replay server answers"),
        (ServerUnavailableError("gone"), math.inf, "no replay server answers"),
    ],
    ids=["a deadline meanwhile", "no connection", "a deadline", "a deadline, and no server", "no server"],
)
def test_a_deadline_does_not_count_while_the_server_is_away(error, away, ends_with):
    class Batches:
        def __init__(self) -> None:
            self.results = iter([error, 1])

        def __next__(self) -> int:
            if isinstance(result := next(self.results), Exception):
                raise result
            return result

    watched = ServerWaits(Away(away), "rollouts").watch(Batches())
    if ends_with is None:
        assert next(watched) == 1
    else:
        with pytest.raises(ReplayError, match=ends_with):
            next(watched)


def test_a_wait_inside_of_a_wait_and_a_quiet_one_are_not_told(caplog):
    caplog.set_level(logging.WARNING)
    waits = ServerWaits(Server(7), seconds=0.02)
    quiet = ServerWaits(Server(7), seconds=0.02, quiet=True)
    with quiet.waiting("for nothing"), waits.waiting("to announce"), waits.waiting("for groups"):
        until(lambda: len(caplog.messages) >= 2)
    assert {message.partition(":")[0] for message in caplog.messages[:-1]} == {"waiting to announce"}
    assert "the server answers" in caplog.messages[0]
