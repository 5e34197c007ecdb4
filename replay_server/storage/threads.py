"""Threads: pools that have all their threads from the start, so that a machine without any left fails no later work."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def started_threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool of `count` threads that are there already. Raises OSError if the system gives no more threads."""
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    all_there = threading.Event()
    try:
        for _ in range(count):  # each waits, so that none serves two
            pool.submit(all_there.wait)
    except RuntimeError as error:
        raise OSError(f"the system gives this process no more threads ({error}): raise its limit") from error
    finally:
        all_there.set()
    return pool
