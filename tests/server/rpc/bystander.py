"""A bystander: a client whose calls must not suffer from what others do."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from replay_client import Policy, ReplayClient


@contextmanager
def bystander(client: ReplayClient) -> Iterator[list[Policy]]:
    """One small call after the other while the block runs; yields their answers.

    A call that reaches the client's deadline fails the block.
    """
    answers: list[Policy] = []
    failures: list[Exception] = []
    stop = threading.Event()

    def call() -> None:
        try:
            while not stop.is_set():
                answers.append(client.policy())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()
    assert failures == []
