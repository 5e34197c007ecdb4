"""How long a pool waits: for groups, and for a server that is away. The clock is the test's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from replay_adapters.group_pool import GroupPool
from replay_client import RolloutGroup, waits
from replay_client.errors import DeadlineExceededError, ServerUnavailableError
from replay_client.testing import make_group

SECONDS = 10.0
"""The timeout of the pool."""


class Clock:
    """Replaces the module `time` in `replay_client.waits`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(waits, "time", clock)
    return clock


class Client:
    """Stands for the client of a server that answers each request after some seconds, or that is away."""

    def __init__(self, clock: Clock, answers: Iterable[Any] = ()) -> None:
        """`answers`: (seconds, groups or error) of each request for samples."""
        self.clock = clock
        self.away = False
        """True: `policy` waits for its whole timeout, in vain."""
        self.timeouts: list[float] = []
        """The timeout of each request."""
        self.excluded: list[list[int]] = []
        """The excluded keys of each request for samples."""
        self._answers: Iterator[Any] = iter(answers)

    def server_info(self, **_: Any) -> None:
        """The pool asks for its table when it is made."""

    def policy(self, *, timeout: float) -> Any:
        self.timeouts.append(timeout)
        if self.away:
            self.clock.now += timeout
            raise ServerUnavailableError("no replay server answers")
        return SimpleNamespace(version=0)

    def sample(self, _: str, __: int, *, timeout: float, exclude: Iterable[int], **___: Any) -> list[Any]:
        self.timeouts.append(timeout)
        self.excluded.append(list(exclude))
        seconds, answer = next(self._answers)
        if seconds > timeout:
            raise DeadlineExceededError("sampling blocked")
        self.clock.now += seconds
        if isinstance(answer, Exception):
            raise answer
        return [SimpleNamespace(group=group, info=SimpleNamespace(key=1, staleness=0)) for group in answer]


def make_pool(client: Client, **options: Any) -> GroupPool:
    return GroupPool(client, timeout=SECONDS, **({"on_empty": "wait"} | options))  # type: ignore[arg-type]


SMALL = make_group(rewards=[0.0, 1.0])
LARGE = make_group(rewards=[0.0, 1.0, 1.0])


def is_large(group: RolloutGroup) -> bool:
    return group.group_size == LARGE.group_size


def test_groups_that_are_not_accepted_do_not_prolong_a_draw(clock):
    client = Client(clock, [(4.0, [SMALL])] * 9)
    with pytest.raises(DeadlineExceededError, match="sampling blocked"):
        make_pool(client).draw(1, "step", is_large)
    assert client.timeouts == [10.0, 6.0, 2.0]


def test_the_time_for_groups_begins_anew_when_the_server_is_back(clock):
    client = Client(clock, [(8.0, ServerUnavailableError("it restarts")), (8.0, [LARGE])])
    [sample] = make_pool(client).draw(1, "step", is_large)
    assert sample.group is LARGE
    assert client.timeouts == [10.0, 10.0]


def test_each_request_of_a_draw_excludes_the_keys(clock):
    client = Client(clock, [(0.0, [SMALL]), (0.0, [LARGE])])
    make_pool(client).draw(1, "step", is_large, exclude=iter([7, 8]))
    assert client.excluded == [[7, 8], [7, 8]]


def test_a_call_that_does_not_reach_the_server_ends_after_the_timeout(clock):
    client = Client(clock)
    client.away = True
    pool = make_pool(client)
    assert pool.ask(client.policy) is None  # type: ignore[arg-type]
    assert client.timeouts == [10.0]
    assert pool.problem is not None


def test_a_draw_that_would_wait_for_groups_does_not_wait_for_a_server_that_is_known_to_be_away(clock):
    client = Client(clock, [(0.0, [LARGE])])
    pool = make_pool(client)
    client.away = True
    pool.ask(client.policy)  # type: ignore[arg-type]
    client.timeouts.clear()
    assert pool.draw(1, "step", is_large) == []
    assert client.timeouts == [1.0]
    client.away = False
    assert len(pool.draw(1, "next step", is_large)) == 1
    assert pool.problem is None
