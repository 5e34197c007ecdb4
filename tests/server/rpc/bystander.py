"""A bystander: a client whose calls must not suffer from what others do."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from replay_client import ReplayClient


@contextmanager
def bystander(client: ReplayClient) -> Iterator[list[float]]:
    """The seconds that one small call after the other takes while the block runs."""
    seconds: list[float] = []
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            started = time.monotonic()
            client.policy()
            seconds.append(time.monotonic() - started)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield seconds
    finally:
        stop.set()
        thread.join()
