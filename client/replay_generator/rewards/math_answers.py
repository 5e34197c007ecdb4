"""Math answers: the final answer in a text, and whether two are the same number or formula.

    "... so 6 * 12 = 72\\n#### 72"     72
    "... hence \\boxed{\\frac{1}{2}}"    \\frac{1}{2}
    "The answer is 72."              no mark: math-verify looks for it

Plain numbers are compared here. All else goes to math-verify, in a process of its own (math_worker.py).
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from pathlib import Path

logger = logging.getLogger(__name__)

_BOX, _HASHES = "\\boxed", "####"
_THINKS, _THOUGHT = "<think>", "</think>"
_LOOKED_AT = 1000
"""Characters of the end of a text in which an answer without a mark is looked for."""
_MOST_ANSWER = 10_000
"""Characters of an answer: a longer one is none."""
_NUMBER = re.compile(r"(?:\\?\$)?\s*([-+]?[\d,]*\.?\d+)\s*\$?\.?")
_WITH_UNIT = re.compile(r"((?:\\?\$)?\s*[-+]?[\d,]*\.?\d+)\s+[A-Za-z]{2}.*")
"""What GSM8K's own evaluation reads as a number: what stands behind it is its unit."""


def check_installed() -> None:
    """Raises ImportError without the package math-verify."""
    if find_spec("math_verify") is None:
        raise ImportError(
            "math_answer needs math-verify, which is not installed: pip install 'math-verify[antlr4_13_2]'"
        )


def marked_answer(text: str) -> str | None:
    """What a text marks as its answer: in its last `\\boxed{}`, or else behind its last `####`. None: nothing."""
    start = text.rfind(_BOX)
    if start >= 0:
        return _in_braces(text[start + len(_BOX) :])
    if _HASHES in text:
        line = text.rpartition(_HASHES)[2].strip().partition("\n")[0]
        answer = line.strip("* ")  # Markdown's signs of bold text
        with_unit = _WITH_UNIT.fullmatch(answer)
        return answer if with_unit is None else with_unit[1]
    return None


def _in_braces(text: str) -> str | None:
    """What stands between the first brace and the one that closes it; without braces, the word that follows."""
    text = text.lstrip()
    if not text.startswith("{"):
        return text.split(maxsplit=1)[0].strip("$.") if text else None
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:place].strip()
    return None


def after_thoughts(text: str) -> str:
    """What the policy said behind its thoughts; "": it did not come to an end of these."""
    if _THOUGHT in text:
        return text.rpartition(_THOUGHT)[2]
    return "" if _THINKS in text else text


def same_answer(expected: Sequence[str], text: str) -> bool:
    """Whether the answer of a completion is one of those that are expected, of which each may stand in a solution.

    A completion marks its answer, or it says one in words: then math-verify takes the formula behind "answer is", or
    the last. Raises ImportError without math-verify, where plain numbers do not tell.
    """
    reply = after_thoughts(text)
    got = marked_answer(reply)
    wanted = []
    for each in expected:
        marked = marked_answer(each)
        wanted.append((each if marked is None else marked).strip())
    if got is not None:
        if not got or len(got) > _MOST_ANSWER:
            return False
        if got in wanted:
            return True
        number = _number(got)
        numbers = [_number(each) for each in wanted]
        if number is not None and None not in numbers:
            return number in numbers
    if not reply.strip():
        return False
    compared = reply[-_LOOKED_AT:] if got is None else f"\\boxed{{{got}}}"
    return _compare([each if "$" in each else f"${each}$" for each in wanted], compared)


def _number(text: str) -> Decimal | None:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    try:
        return Decimal(match[1].replace(",", ""))
    except InvalidOperation:
        return None


# ------------------------------------------------------------------------------------------------ workers

_idle: deque[subprocess.Popen[str]] = deque()
"""Workers that wait for a comparison. Each ends when this process does, because its input ends."""


def _compare(expected: Sequence[str], got: str) -> bool:
    """One comparison by math-verify. One that takes too long, or too much memory, says that they differ."""
    worker = _idle.pop() if _idle else _start()
    assert worker.stdin is not None
    assert worker.stdout is not None
    verdict = ""
    try:
        worker.stdin.write(json.dumps({"expected": list(expected), "got": got}) + "\n")
        worker.stdin.flush()
        verdict = worker.stdout.readline().strip()
    except OSError:
        pass  # it has died
    if verdict not in ("0", "1"):
        worker.kill()
        worker.wait()
        logger.warning("an answer took too long to compare, and counts as wrong: %.200r", got)
        return False
    _idle.append(worker)
    return verdict == "1"


def _start() -> subprocess.Popen[str]:
    """A worker with the packages of this process. Raises ImportError if it cannot begin."""
    check_installed()
    program = str(Path(__file__).with_name("math_worker.py"))
    path = os.pathsep.join(filter(None, sys.path))
    worker = subprocess.Popen(
        [sys.executable, program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for the generator, which ends it
        env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": path},
    )
    assert worker.stdout is not None
    if worker.stdout.readline().strip() != "ready":
        worker.kill()
        raise ImportError(f"math-verify cannot be imported: look at {sys.executable} {program}")
    return worker
