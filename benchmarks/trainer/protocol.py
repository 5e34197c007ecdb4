"""How the benchmark speaks to a side: a line asks for a step, a line of JSON answers."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any


class Line:
    """A side's end. Whatever its libraries print goes to standard error."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def steps(self) -> Iterator[None]:
        """One for each step that is asked for."""
        for line in sys.stdin:
            if line.strip() == "step":
                yield

    def answer(self, **values: Any) -> None:
        self._answers.write(json.dumps(values) + "\n")
        self._answers.flush()


class Meter:
    """Seconds and peak memory of a step: of the GPU where there is one, else of the process."""

    def __init__(self) -> None:
        self._start = 0.0
        self.idle = _resident()

    def start(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        self._start = time.perf_counter()

    def stop(self) -> dict[str, float]:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
            peak = float(torch.cuda.max_memory_allocated())
        else:
            peak = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return {"seconds": time.perf_counter() - self._start, "peak_bytes": peak, "idle_bytes": self.idle}


def _resident() -> float:
    """Bytes in memory now."""
    with open("/proc/self/statm") as file:
        return float(file.read().split()[1]) * resource.getpagesize()
