"""Imported by vLLM into its own processes (`worker_extension_cls`): they must not outlive the process that owns them.

vLLM's engine process waits for requests for ever when its owner is killed, and keeps the accelerator's memory.
Importing this module there, which the owner tells by an environment variable, starts a thread that ends it.
"""

from __future__ import annotations

import os
import signal
import threading
import time

OWNER_VARIABLE = "REPLAY_ENGINE_OWNER"
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
    parent = os.getppid()
    # With one worker it lives in the engine process, a child of the owner. With several, each is a child of the engine
    # process, into which vLLM imports no extension: its workers end it too.
    while os.getppid() == parent and (parent == owner or _alive(owner)):
        time.sleep(_POLL_SECONDS)
    if os.getppid() == parent != owner:
        os.kill(parent, signal.SIGKILL)
    os._exit(1)


if _owner := os.environ.get(OWNER_VARIABLE):
    threading.Thread(target=_follow, args=(int(_owner),), name="follow-owner", daemon=True).start()
