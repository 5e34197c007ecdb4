"""The protocol between the benchmark and a side: a line is a request for a step, and a line of JSON the answer.

`step` asks for the time and the memory of a step, `profile` for the shares of its time.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any


class Line:
    """The end of the protocol in a side. All that the libraries of the side print goes to standard error."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def requests(self) -> Iterator[str]:
        """The requests of the benchmark, one after the other: `step` or `profile`."""
        for line in sys.stdin:
            request = line.strip()
            if request in ("step", "profile"):
                yield request

    def answer(self, **values: Any) -> None:
        self._answers.write(json.dumps(values) + "\n")
        self._answers.flush()


class Meter:
    """Seconds and peak memory of a step: of the GPU if it computes there, else of the process."""

    def __init__(self, device_type: str) -> None:
        self._start = 0.0
        self._on_gpu = device_type == "cuda"
        self.idle = 0.0 if self._on_gpu else _resident()

    def start(self) -> None:
        import torch

        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        self._start = time.perf_counter()

    def stop(self) -> dict[str, float]:
        import torch

        if self._on_gpu:
            torch.cuda.synchronize()
            peak = float(torch.cuda.max_memory_allocated())
        else:
            peak = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return {"seconds": time.perf_counter() - self._start, "peak_bytes": peak, "idle_bytes": self.idle}


def device_facts(device: Any) -> dict[str, str]:
    """The device that a side computes on, and its torch."""
    import torch

    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__}


def _resident() -> float:
    """The bytes of the process that are in memory now."""
    with open("/proc/self/statm") as file:
        return float(file.read().split()[1]) * resource.getpagesize()
