"""Functions of a user as strangers write them: they end the process, abstain, block, print, or ask for signals.

A process of its own imports some of them by name.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from signal import setitimer as imported_setitimer
from typing import Any

from replay_generator.rewards.functions import group_reward


def exits(*_: Any, **__: Any) -> float:
    sys.exit(3)


def interrupts(*_: Any, **__: Any) -> float:
    raise KeyboardInterrupt("enough")


def cancels(*_: Any, **__: Any) -> float:
    raise asyncio.CancelledError("mine")


async def exits_later(*_: Any, **__: Any) -> float:
    await asyncio.sleep(0)
    sys.exit(3)


async def interrupts_later(*_: Any, **__: Any) -> float:
    await asyncio.sleep(0)
    raise KeyboardInterrupt("enough")


async def cancels_later(*_: Any, **__: Any) -> float:
    await asyncio.sleep(0)
    raise asyncio.CancelledError("mine")


async def cancels_in_a_task(*_: Any, **__: Any) -> float:
    await asyncio.gather(cancels_later(), asyncio.sleep(0))
    return 1.0


async def exits_in_a_task(*_: Any, **__: Any) -> float:
    await asyncio.gather(exits_later(), asyncio.sleep(0))
    return 1.0


def _alarmed(number: int, frame: object) -> None:
    raise TimeoutError("too slow")


def _length_within_an_alarm(text: str) -> float:
    before = signal.signal(signal.SIGALRM, _alarmed)
    signal.setitimer(signal.ITIMER_REAL, 60.0)
    try:
        return float(len(text) % 3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def honest_grader(row: Mapping[str, Any], text: str) -> float:
    return _length_within_an_alarm(text)


def swallowing_grader(row: Mapping[str, Any], text: str) -> float:
    try:
        return _length_within_an_alarm(text)
    except ValueError:
        return 0.0


def grader_of_evaluations(row: Mapping[str, Any], text: str) -> float:
    """One of its own: that a function asks for signals is said once in a process."""
    return swallowing_grader(row, text)


def silent_grader(row: Mapping[str, Any], text: str) -> float:
    """Hides even an exit."""
    try:
        return _length_within_an_alarm(text)
    except BaseException:
        return 0.0


@group_reward
def group_grader(row: Mapping[str, Any], texts: Sequence[str]) -> list[float]:
    return [swallowing_grader(row, text) for text in texts]


@group_reward
def yielding_grader(row: Mapping[str, Any], texts: Sequence[str]) -> Iterator[float]:
    for text in texts:
        yield swallowing_grader(row, text)


class Grader:
    """A grader with a state, as an object that can be called."""

    def __init__(self, least: float) -> None:
        self.least = least

    def __call__(self, row: Mapping[str, Any], text: str) -> float:
        return max(self.least, swallowing_grader(row, text))


object_grader = Grader(0.0)


def grader_that_dies(row: Mapping[str, Any], text: str) -> float:
    if text == "die":
        signal.signal(signal.SIGALRM, _alarmed)
        os._exit(7)
    return swallowing_grader(row, text)


def grader_that_fails(row: Mapping[str, Any], text: str) -> float:
    _length_within_an_alarm(text)
    raise KeyError("answer")


def grader_that_hangs(row: Mapping[str, Any], text: str) -> float:
    signal.signal(signal.SIGALRM, _alarmed)
    if text == "hang":
        with open(row["entered"], "w") as file:
            file.write("entered")
        signal.pause()
    return swallowing_grader(row, text)


def number_tool(number: int) -> str:
    """Says a number within an alarm.

    Args:
        number: The number.
    """
    _length_within_an_alarm("")
    return f"it is {number}"


lambda_grader = lambda row, text: swallowing_grader(row, text)  # noqa: E731


def _closure() -> Any:
    def grader(row: Mapping[str, Any], text: str) -> float:
        return swallowing_grader(row, text)

    return grader


closure_grader = _closure()
wrapped_grader = functools.wraps(swallowing_grader)(lambda row, text: swallowing_grader(row, text))


def grader_with_an_imported_timer(row: Mapping[str, Any], text: str) -> float:
    """Asks for nothing else: its handler may be there already."""
    imported_setitimer(signal.ITIMER_REAL, 0.0)
    return float(len(text) % 3) if _is_main_thread_of_its_process() else -1.0


def _is_main_thread_of_its_process() -> bool:
    try:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM) or signal.SIG_DFL)
    except ValueError:
        return False
    return True


def _length_into(queue: Any, text: str) -> None:
    queue.put(_length_within_an_alarm(text))


def forking_grader(row: Mapping[str, Any], text: str) -> float:
    """Has a child of its own, in whose main thread the alarm is."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_length_into, args=(queue, text))
    child.start()
    child.join()
    return float("nan") if queue.empty() else float(queue.get())


async def exits_in_a_callback(*_: Any, **__: Any) -> float:
    asyncio.get_running_loop().call_soon(lambda: sys.exit(3))
    await asyncio.Event().wait()
    return 1.0


class Odd:
    """A value whose class ends the process whenever anybody looks at it."""

    def _exit(self) -> Any:
        sys.exit(3)

    __float__ = __repr__ = __str__ = __bool__ = _exit
    item = 1.0


class UnreadableError(Exception):
    """An error that cannot be shown, as of a class that was made by hand."""

    def __str__(self) -> str:
        sys.exit(3)

    __repr__ = __str__


def fails_without_words(*_: Any, **__: Any) -> float:
    raise UnreadableError
