"""A signal ends every wait of a blocking call, also one that comes in the moment before the wait.

Python then notes the signal, and looks at its notes only when the wait ends. The tests bring this about: another thread
receives the signal, so that nothing wakes the one that waits.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replay_client import ReplayClient
from replay_server import ReplayServer, TableConfig
from replay_trainer.background import BackgroundTask


class Heard(Exception):
    """Raised by the handler of the signal."""


@pytest.fixture
def client() -> Iterator[ReplayClient]:
    tables = [TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 1}), TableConfig(name="empty")]
    with ReplayServer(tables=tables, port=0) as server, ReplayClient(server.address) as client:
        yield client


def switches(thread: int) -> list[str]:
    """How often a thread of this process has begun to wait, and has been made to; empty while it does not wait."""
    lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    waits = any(line.startswith("State:") and "sleeping" in line for line in lines)
    return [line for line in lines if "ctxt_switches" in line] if waits else []


def hears_a_signal_in(wait: Callable[[], object]) -> bool:
    """Whether a signal that another thread receives ends the wait."""

    def hear(number: int, frame: object) -> None:
        raise Heard

    waiting = threading.get_native_id()

    def send() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        before: list[str] = []
        while before != (before := switches(waiting)) or not before:  # until the other thread waits
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, hear)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    sender = threading.Thread(target=send)
    try:
        sender.start()
        wait()
    except Heard:
        return True
    finally:
        sender.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGUSR1, before)
    return False


def test_a_call_hears_a_signal(client):
    assert hears_a_signal_in(lambda: client.sample("empty", timeout=None))
    with client.sampler("empty", batch_size=1, timeout=None) as sampler:
        assert hears_a_signal_in(lambda: next(sampler))


@pytest.mark.parametrize("wait", ["insert", "flush"])
def test_a_writer_hears_a_signal(client, wait):
    writer = client.writer(max_in_flight=2)
    for _ in range(3):  # one is in the queue, two wait for room in it
        writer.insert(b"x", {"queue": 1.0})
    full = {"insert": lambda: writer.insert(b"x", {"queue": 1.0}), "flush": lambda: writer.flush(timeout=None)}
    assert hears_a_signal_in(full[wait])
    writer.close()


def test_the_trainer_hears_a_signal_while_a_version_is_written():
    written = threading.Event()
    task = BackgroundTask("test")

    def write() -> None:
        written.wait(60)

    task.start(write)
    assert hears_a_signal_in(task.wait)
    written.set()
    task.wait()
