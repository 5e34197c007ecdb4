"""Math answers: finds the final answer in a text, and tells if two answers are the same number or formula.

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

_BOX = "\\boxed"
_HASHES = "####"
_THINKS = "<think>"
_THOUGHT = "</think>"
_LOOKED_AT = 1000
"""Characters of the end of a text in which an answer without a mark is looked for."""
_MOST_ANSWER = 10_000
"""The most characters of an answer. A longer one counts as wrong."""
_NUMBER = re.compile(r"(?:\\?\$)?\s*([-+]?[\d,]*\.?\d+)\s*\$?\.?")
_WITH_UNIT = re.compile(r"((?:\\?\$)?\s*[-+]?[\d,]*\.?\d+)\s+[A-Za-z]{2}.*")
"""A number with a unit behind it. GSM8K's own evaluation reads the number alone."""


def check_installed() -> None:
    """Raises ImportError without the package math-verify."""
    if find_spec("math_verify") is None:
        raise ImportError(
            "math_answer needs math-verify, which is not installed: pip install 'math-verify[antlr4_13_2]'"
        )


def marked_answer(text: str) -> str | None:
    """The marked answer of a text: in its last `\\boxed{}`, or else behind its last `####`. None: there is none."""
    start = text.rfind(_BOX)
    if start >= 0:
        return _in_braces(text[start + len(_BOX) :])
    if _HASHES in text:
        _, _, behind = text.rpartition(_HASHES)
        line, _, _ = behind.strip().partition("\n")
        answer = line.strip("* ")  # Markdown's signs of bold text
        with_unit = _WITH_UNIT.fullmatch(answer)
        if with_unit is None:
            return answer
        return with_unit[1]
    return None


def _in_braces(text: str) -> str | None:
    """The text between the first brace and the one that closes it. Without braces: the first word. None: neither."""
    text = text.lstrip()
    if not text:
        return None
    if not text.startswith("{"):
        word = text.split(maxsplit=1)[0]
        return word.strip("$.")
    depth = 0
    for index, character in enumerate(text):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
        if depth == 0:
            return text[1:index].strip()
    return None


def after_thoughts(text: str) -> str:
    """The text behind the thoughts of the policy; "": its thoughts have no end."""
    if _THOUGHT in text:
        _, _, reply = text.rpartition(_THOUGHT)
        return reply
    if _THINKS in text:
        return ""
    return text


def same_answer(expected: Sequence[str], text: str) -> bool:
    """True if the answer of a completion is one of the `expected` ones, each of which may stand in a whole solution.

    The completion marks its answer, or has it in words. In words, math-verify takes the formula behind "answer is", or
    the last one. Raises ImportError without math-verify, if plain numbers do not decide.
    """
    reply = after_thoughts(text)
    answer = marked_answer(reply)
    right_answers = []
    for solution in expected:
        marked = marked_answer(solution)
        if marked is None:
            marked = solution
        right_answers.append(marked.strip())
    if answer is not None:
        if not answer or len(answer) > _MOST_ANSWER:
            return False
        if answer in right_answers:
            return True
        number = _number(answer)
        right_numbers = [_number(right) for right in right_answers]
        if number is not None and None not in right_numbers:
            return number in right_numbers
    if not reply.strip():
        return False
    if answer is None:
        compared = reply[-_LOOKED_AT:]
    else:
        compared = f"\\boxed{{{answer}}}"
    formulas = [right if "$" in right else f"${right}$" for right in right_answers]
    return _compare(formulas, compared)


def _number(text: str) -> Decimal | None:
    """The number that a text is; None: it is no plain number."""
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
    """The result of one comparison by math-verify. False if it takes too long, or too much memory."""
    worker = _idle.pop() if _idle else _start()
    assert worker.stdin is not None
    assert worker.stdout is not None
    request = json.dumps({"expected": list(expected), "got": got})
    verdict = ""
    try:
        worker.stdin.write(request + "\n")
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
    path = os.pathsep.join(folder for folder in sys.path if folder)
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
