"""A client process: `python -m benchmarks.worker SYSTEM`, in the environment of that system.

It is driven over its pipes, a JSON line each way: {"do": "connect", "address": ...}, {"do": "prepare", "task": {...}},
then {"do": "go"}, whose answer is the result. Every answer is {"result": ...} or {"error": "..."}. It ends with its
input.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

from benchmarks import loops
from benchmarks.systems import Session


class Worker:
    def __init__(self, system: str) -> None:
        self._make_session = importlib.import_module(f"benchmarks.systems.{system}").session
        self._session: Session | None = None
        self._loop: loops.Loop = iter(())

    def obey(self, command: dict[str, Any]) -> Any:
        match command["do"]:
            case "connect":
                self.close()
                self._session = self._make_session(command["address"])
            case "prepare":
                assert self._session is not None, "connect first"
                task = loops.Task(**command["task"])
                self._loop = loops.LOOPS[task.operation](self._session, task)
                next(self._loop)
            case "go":
                result = next(self._loop)
                next(self._loop, None)  # lets go of what the loop opened
                return result
            case other:
                raise ValueError(f"unknown command {other!r}")
        return None

    def close(self) -> None:
        self._loop = iter(())
        if self._session is not None:
            self._session.close()
            self._session = None


def main(system: str) -> None:
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker(system)
    for line in sys.stdin:
        try:
            answer = {"result": worker.obey(json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    worker.close()


if __name__ == "__main__":
    main(sys.argv[1])
