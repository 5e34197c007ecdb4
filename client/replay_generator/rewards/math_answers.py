"""Math answers: finds the final answer in a text, and decides if two answers are the same number or formula.

    "... so 6 * 12 = 72\\n#### 72"     72
    "... hence \\boxed{\\frac{1}{2}}"    \\frac{1}{2}
    "The answer is 72."              no mark: math-verify looks for the answer

Plain numbers are compared here. All other answers are compared by math-verify, in a process of its own
(math_worker.py).
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
_THOUGHTS_BEGIN = "<think>"
_THOUGHTS_END = "</think>"
_LAST_CHARACTERS = 1000
"""math-verify looks for an answer without a mark only in this many characters at the end of a text."""
_MOST_ANSWER = 10_000
"""The most characters of an answer. A longer one counts as wrong."""
_NUMBER = re.compile(r"(?:\\?\$)?\s*([-+]?[\d,]*\.?\d+)\s*\$?\.?")
"""A number such as -1,234.5, perhaps between or behind dollar signs, and perhaps with a full stop at the end. Group 1
is the number alone."""
_WITH_UNIT = re.compile(r"((?:\\?\$)?\s*[-+]?[\d,]*\.?\d+)\s+[A-Za-z]{2}.*")
"""A number with a unit behind it, such as "72 apples". Group 1 is the text before the unit. This module ignores the
unit, as GSM8K's own evaluation does."""


def check_installed() -> None:
    """Raises ImportError without the package math-verify."""
    if find_spec("math_verify") is None:
        raise ImportError(
            "math_answer needs math-verify, which is not installed: pip install 'math-verify[antlr4_13_2]'"
        )


def marked_answer(text: str) -> str | None:
    """The marked answer of a text: the content of its last `\\boxed{}`, or else the line behind its last `####`. None:
    the text has no marked answer."""
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
        return with_unit[1]  # the answer without its unit
    return None


def _in_braces(text: str) -> str | None:
    """The text between a brace at the beginning and the brace that closes it; if the text does not begin with a brace,
    its first word. None: the text is empty, or its brace is never closed."""
    text = text.lstrip()
    if not text:
        return None
    if not text.startswith("{"):
        word = text.split(maxsplit=1)[0]
        return word.strip("$.")  # without the dollar sign and the full stop of "$\boxed 72$."
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
    """The text behind the thoughts of the policy, or the whole text if it has no thoughts. "": the thoughts have no
    end."""
    if _THOUGHTS_END in text:
        _, _, reply = text.rpartition(_THOUGHTS_END)
        return reply
    if _THOUGHTS_BEGIN in text:
        return ""
    return text


def same_answer(expected: Sequence[str], text: str) -> bool:
    """True if the answer of a completion is one of the `expected` answers. Each of these may stand in a whole solution.

    `text`: the completion. If it does not mark its answer, math-verify takes the formula behind "answer is", or else
    the last formula. Raises ImportError without math-verify, if the answers are no plain numbers.
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
        if not answer or len(answer) > _MOST_ANSWER:  # the mark is empty, or holds too much for an answer
            return False
        if answer in right_answers:
            return True
        number = _number(answer)
        right_numbers = [_number(right) for right in right_answers]
        if number is not None and None not in right_numbers:  # all are plain numbers, so math-verify is not needed
            return number in right_numbers
    if not reply.strip():  # the policy wrote nothing behind its thoughts
        return False
    if answer is None:
        compared = reply[-_LAST_CHARACTERS:]
    else:
        compared = f"\\boxed{{{answer}}}"  # a mark that math-verify knows, also for an answer behind ####
    # math-verify reads LaTeX only between dollar signs.
    formulas = [right if "$" in right else f"${right}$" for right in right_answers]
    return _compare(formulas, compared)


def _number(text: str) -> Decimal | None:
    """The number that a text stands for; None: the text is no plain number."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    try:
        return Decimal(match[1].replace(",", ""))
    except InvalidOperation:
        return None


# ------------------------------------------------------------------------------------------------ workers

_idle: deque[subprocess.Popen[str]] = deque()
"""Worker processes that wait for a comparison. When this process ends, their input ends, and so they end too."""


def _compare(expected: Sequence[str], got: str) -> bool:
    """True if math-verify finds that `got` has the answer of one of the formulas `expected`.

    False, with a warning, if the comparison takes too long or too much memory, which ends the worker process.
    """
    # No other thread uses this worker until it is in `_idle` again.
    try:
        worker = _idle.pop()
    except IndexError:  # all workers are in use
        worker = _start()
    assert worker.stdin is not None
    assert worker.stdout is not None
    request = json.dumps({"expected": list(expected), "got": got})
    verdict = ""
    try:
        worker.stdin.write(request + "\n")
        worker.stdin.flush()
        verdict = worker.stdout.readline().strip()
    except OSError:
        pass  # the worker has ended: a comparison took too long or too much memory
    if verdict not in ("0", "1"):  # "" if the worker has ended
        worker.kill()
        worker.wait()
        logger.warning("an answer took too long to compare, and counts as wrong: %.200r", got)
        return False
    _idle.append(worker)
    return verdict == "1"


def _start() -> subprocess.Popen[str]:
    """A new worker process, with the search path of this process. Raises ImportError if it cannot import
    math-verify."""
    check_installed()
    program = str(Path(__file__).with_name("math_worker.py"))
    path = os.pathsep.join(folder for folder in sys.path if folder)
    worker = subprocess.Popen(
        [sys.executable, program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C in the terminal must reach only the generator: the worker ends with it
        env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": path},
    )
    assert worker.stdout is not None
    if worker.stdout.readline().strip() != "ready":
        worker.kill()
        raise ImportError(f"math-verify cannot be imported: look at {sys.executable} {program}")
    return worker
