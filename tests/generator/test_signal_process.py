"""The process of a function that asks for signals: ends and failures while it starts."""

import asyncio
import socket
import subprocess
import sys
import threading
import time

import pytest

from replay_generator.user_code import signal_process
from replay_generator.user_code.signal_process import FunctionFailedError, SignalProcess


def hang() -> None:
    """Never returns."""
    while True:
        time.sleep(1)


async def test_a_caller_cancelled_before_the_process_starts_leaves_no_process_that_hangs(monkeypatch):
    begun = threading.Event()
    cancelled = threading.Event()
    popen = subprocess.Popen

    def start_late(*args, **options) -> subprocess.Popen:
        begun.set()
        cancelled.wait()
        return popen(*args, **options)

    monkeypatch.setattr(signal_process.subprocess, "Popen", start_late)
    process = SignalProcess(hang, "signal.alarm(1)")
    call = asyncio.ensure_future(process.call_each([([], {})]))
    await asyncio.to_thread(begun.wait)
    call.cancel()
    await asyncio.wait({call})
    cancelled.set()
    has_ended = await asyncio.to_thread(process._turn.acquire, timeout=20)  # the next caller needs this lock
    process.end()
    assert has_ended


async def test_a_process_that_ends_before_it_reads_is_a_failure_of_the_function(monkeypatch):
    popen = subprocess.Popen

    def start_and_wait(*args, **options) -> subprocess.Popen:
        child = popen(*args, **options)
        child.wait()
        return child

    monkeypatch.setattr(signal_process, "_PROGRAM", "raise SystemExit(3)")
    monkeypatch.setattr(signal_process.subprocess, "Popen", start_and_wait)
    with pytest.raises(FunctionFailedError, match="ended the process that called it, with exit code 3"):
        await SignalProcess(hang, "signal.alarm(1)").call_each([([], {})])


async def test_a_process_that_cannot_be_started_leaves_no_socket_open(monkeypatch, tmp_path):
    pair = socket.socketpair()
    monkeypatch.setattr(signal_process.socket, "socketpair", lambda: pair)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        await SignalProcess(hang, "signal.alarm(1)").call_each([([], {})])
    assert [end.fileno() for end in pair] == [-1, -1]
