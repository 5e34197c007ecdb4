"""VLLMLog: writes vLLM's own errors to a file instead of the terminal, and finds in it why an engine died.

vLLM's processes tell their owner only that one of them died. The reason is in a log of a hundred lines.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

_FOLLOWS = "EngineDeadError"
"""The error of everything that asks a dead engine: it follows from another one."""


class VLLMLog:
    """The errors that vLLM logs in this process and in those that it starts. The file goes at the end of this process,
    unless somebody has asked it for a reason."""

    def __init__(self) -> None:
        """Call it before vLLM is imported, which reads the environment then."""
        self._folder = Path(tempfile.mkdtemp(prefix="replay-vllm-"))
        self._file = self._folder / "vllm.log"
        handler = {"class": "logging.FileHandler", "filename": str(self._file), "formatter": "plain", "delay": True}
        config = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"plain": {"format": "%(asctime)s pid=%(process)d %(levelname)s %(message)s"}},
            "handlers": {"file": handler},
            "loggers": {"vllm": {"handlers": ["file"], "level": "ERROR", "propagate": False}},
        }
        (self._folder / "logging.json").write_text(json.dumps(config))
        os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(self._folder / "logging.json")
        atexit.register(self._remove, os.getpid())
        self._keep = False

    def reason(self) -> str:
        """Why an engine died, and where its log is."""
        self._keep = True
        text = self._file.read_text(errors="replace") if self._file.exists() else ""
        # The last line of each traceback: the first one that is not indented.
        errors = [match[1] for match in re.finditer(r"^Traceback .*\n(?:[ \t].*\n|\n)*(\S.*)", text, re.MULTILINE)]
        errors = [error for error in errors if _FOLLOWS not in error.partition(":")[0]]
        if not errors:
            return "its process ended without a word; was it killed, for example for its memory?"
        return f"{errors[-1]} (vLLM's log: {self._file})"

    def _remove(self, owner: int) -> None:
        if os.getpid() == owner and not self._keep:  # a forked process must leave it
            shutil.rmtree(self._folder, ignore_errors=True)


_log: VLLMLog | None = None


def vllm_log() -> VLLMLog | None:
    """The log of this process; None if the environment says where vLLM shall log to."""
    global _log
    given = ("VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_LEVEL")
    if _log is None and not any(name in os.environ for name in given):
        _log = VLLMLog()
    return _log
