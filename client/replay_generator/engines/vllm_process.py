"""FollowOwner: ends vLLM's processes when the process that owns them has ended.

Without this module, vLLM's engine process would wait for requests for ever after its owner was killed, and keep the
accelerator's memory. vLLM imports this module into its processes (`worker_extension_cls`). In each of them, the import
starts a thread that ends the process after the owner has ended. The owner must not import this module: a process that
is forked from the owner would then find the module imported already, and would not start the thread.
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
    """True if a process with this id runs."""
    try:
        os.kill(pid, 0)  # signal 0 only checks that the process exists
    except ProcessLookupError:
        return False
    except PermissionError:  # the process is another user's
        return True
    return True


def _follow(owner: int) -> None:
    """Waits until the owner or the parent of this process has ended. Then kills the parent, and ends this process."""
    # With one worker, the parent of this process is the owner. With several workers, the parent is the engine process.
    # vLLM does not import this module into the engine process, so the workers end the engine process too.
    parent = owner
    started_by = multiprocessing.parent_process()
    if started_by is not None and started_by.pid is not None:
        parent = started_by.pid
    # When the parent of a process ends, the system gives the process another parent, so `getppid` changes.
    while os.getppid() == parent and (parent == owner or _alive(owner)):
        time.sleep(_POLL_SECONDS)
    if os.getppid() == parent:  # the owner has ended, and the engine process has not
        os.kill(parent, signal.SIGKILL)
    os._exit(1)


_owner = os.environ.get(OWNER_VARIABLE)
if _owner:
    threading.Thread(target=_follow, args=(int(_owner),), name="follow-owner", daemon=True).start()
