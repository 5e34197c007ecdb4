"""Imported by vLLM into its own processes (`worker_extension_cls`): they must not outlive the process that owns them.

vLLM's engine process waits for requests for ever when its owner is killed, and keeps the accelerator's memory.
Importing this module there starts a thread that ends it. The owner itself must not import it: a forked process would
find it imported, and not start the thread.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

from replay_client.generator.engines.vllm import OWNER_VARIABLE

_POLL_SECONDS = 0.5


class FollowOwner:
    """Adds nothing to vLLM's worker: naming it in the engine's settings is what has this module imported."""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _follow(owner: int) -> None:
    # The process that started this one, even if it is gone already: the owner, or, where there are several workers,
    # the engine process. Into that one vLLM imports no extension, so its workers end it.
    started_by = multiprocessing.parent_process()
    parent = started_by.pid if started_by is not None and started_by.pid is not None else owner
    while os.getppid() == parent and (parent == owner or _alive(owner)):
        time.sleep(_POLL_SECONDS)
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    os._exit(1)


if _owner := os.environ.get(OWNER_VARIABLE):
    threading.Thread(target=_follow, args=(int(_owner),), name="follow-owner", daemon=True).start()
