"""Forks: tells a forked process that it cannot use gRPC, where it would hang.

gRPC can follow a fork only while none of its threads runs. Its asyncio interface runs one as long as any channel, call
or server of it is alive, in this package or elsewhere in the process. In a process forked meanwhile every call hangs.
"""

from __future__ import annotations

import gc
import os
import threading

_POLLER = "(_poll_wrapper)"
"""The name of the thread of grpc.aio ends so; gRPC has no function that tells whether it runs."""

_count = 0
_in_use_at_fork = False
_broken = False


def count() -> int:
    """How many forks lie between the first process and this one. Cheaper than asking for the process id."""
    return _count


def check_grpc() -> None:
    """Raises RuntimeError, with the remedy, if gRPC cannot work in this process."""
    if _broken:
        raise RuntimeError(
            "gRPC was in use when this process was forked, and a client would hang here. Start the process with "
            '`spawn` (multiprocessing.get_context("spawn"), DataLoader(..., multiprocessing_context="spawn")), or '
            "close all clients and servers before the fork"
        )


def _in_use() -> bool:
    return any(thread.name.endswith(_POLLER) for thread in threading.enumerate())


def _before() -> None:
    global _in_use_at_fork
    _in_use_at_fork = _in_use()
    if _in_use_at_fork:
        # A call of gRPC that has ended is part of a reference cycle, and keeps its closed channel alive.
        gc.collect()
        _in_use_at_fork = _in_use()


def _after_in_child() -> None:
    global _count, _broken
    _count += 1
    _broken = _broken or _in_use_at_fork


os.register_at_fork(before=_before, after_in_child=_after_in_child)
