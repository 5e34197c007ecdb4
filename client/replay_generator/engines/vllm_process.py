"""FollowOwner: ends vLLM's processes when the process that owns them has ended.

vLLM's engine process waits for requests for ever when its owner is killed, and keeps the accelerator's memory. vLLM
imports this module into its processes (`worker_extension_cls`), and the import starts a thread that ends them. The
owner must not import it: a forked process would find the module imported, and not start the thread.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

from replay_generator.engines.vllm import OWNER_VARIABLE

_POLL_SECONDS = 0.5


class FollowOwner:
    """Adds nothing to vLLM's worker. The engine's settings name it, so that vLLM imports this module."""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _follow(owner: int) -> None:
    # The process that started this one: the owner, or, with several workers, the engine process. vLLM imports no
    # extension into the engine process, so its workers end it.
    started_by = multiprocessing.parent_process()
    parent = started_by.pid if started_by is not None and started_by.pid is not None else owner
    while os.getppid() == parent and (parent == owner or _alive(owner)):
        time.sleep(_POLL_SECONDS)
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    os._exit(1)


if _owner := os.environ.get(OWNER_VARIABLE):
    threading.Thread(target=_follow, args=(int(_owner),), name="follow-owner", daemon=True).start()
