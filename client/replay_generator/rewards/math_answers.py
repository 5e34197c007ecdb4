r"""Math answers: finds the final answer in a text, and decides whether two answers are the same number or formula.

    the text                             its final answer
    "... so 6 * 12 = 72\n#### 72"        72
    "... hence \boxed{\frac{1}{2}}"      \frac{1}{2}
    "The answer is 72."                  has no mark, so math-verify looks for it

This module compares plain numbers. The package math-verify compares all other answers, in a process of its own
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
"""If a text does not mark its answer, math-verify looks for it only in this many characters at the end of the text."""
_MOST_ANSWER = 10_000
"""The most characters of a marked answer. A longer answer counts as wrong."""
_NUMBER = re.compile(r"(?:\\?\$)?\s*([-+]?[\d,]*\.?\d+)\s*\$?\.?")
"""A number such as -1,234.5. There may be a dollar sign before it, one behind it, and a full stop at the end. Group 1
is the number alone."""
_WITH_UNIT = re.compile(r"((?:\\?\$)?\s*[-+]?[\d,]*\.?\d+)\s+[A-Za-z]{2}.*")
"""A number with a unit behind it, such as "72 apples". Group 1 is the text before the unit. The unit is ignored, as in
the evaluation that comes with GSM8K."""


def check_installed() -> None:
    """Raises ImportError if the package math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise ImportError(
            "math_answer needs math-verify, which is not installed: pip install 'math-verify[antlr4_13_2]'"
        )


def marked_answer(text: str) -> str | None:
    """The marked answer of a text: the content of its last `\\boxed{}` or, if it has none, the line behind its last
    `####`. None: the text has no marked answer."""
    start = text.rfind(_BOX)
    if start >= 0:
        behind_box = text[start + len(_BOX) :]
        return _in_braces(behind_box)
    if _HASHES in text:
        _, _, behind_hashes = text.rpartition(_HASHES)
        line, _, _ = behind_hashes.strip().partition("\n")
        answer = line.strip("* ")  # without the stars around bold text in Markdown
        with_unit = _WITH_UNIT.fullmatch(answer)
        if with_unit is None:
            return answer
        return with_unit[1]  # the answer without its unit
    return None


def _in_braces(text: str) -> str | None:
    """If the text begins with a brace, returns what is between this brace and the brace that closes it. Otherwise
    returns the first word of the text. None: the text is empty, or its brace is never closed."""
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
    """The part of a completion behind the thoughts of the policy, or the whole completion if it has no thoughts.

    "": the completion ends within the thoughts.
    """
    if _THOUGHTS_END in text:
        _, _, reply = text.rpartition(_THOUGHTS_END)
        return reply
    if _THOUGHTS_BEGIN in text:
        return ""
    return text


def same_answer(expected: Sequence[str], text: str) -> bool:
    """True if the final answer of a completion is one of the `expected` answers.

    `text`: the completion. If it does not mark its answer, math-verify takes the formula behind "answer is" or, if
    there is none, the last formula. `expected`: each may be an answer alone, or a whole solution with a marked answer.

    Raises ImportError if math-verify is needed and not installed. It is not needed if all answers are plain numbers.
    """
    reply = after_thoughts(text)
    answer = marked_answer(reply)
    right_answers = []
    for solution in expected:
        marked = marked_answer(solution)
        if marked is None:
            marked = solution  # the answer stands alone
        right_answers.append(marked.strip())
    if answer is not None:
        if not answer or len(answer) > _MOST_ANSWER:  # the mark holds nothing, or too much for an answer
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
        compared = f"\\boxed{{{answer}}}"  # math-verify knows this mark, but not ####
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
"""Worker processes that have nothing to compare now. When this process ends, the standard input of the workers ends,
and so the workers end, too."""


def _compare(expected: Sequence[str], got: str) -> bool:
    """Lets a worker process compare answers by math-verify. True if `got` is the same answer as any of `expected`.

    A comparison that takes too long or too much memory ends the worker process. Then logs a warning, and returns False.
    """
    # A worker that is not in `_idle` belongs to this thread alone.
    try:
        worker = _idle.pop()
    except IndexError:  # all workers are in use, or there is none yet
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
        pass  # the worker has ended, so it cannot read the request
    if verdict not in ("0", "1"):  # if the worker has ended, the verdict is ""
        worker.kill()
        worker.wait()
        logger.warning("an answer took too long or too much memory to compare, and counts as wrong: %.200r", got)
        return False
    _idle.append(worker)
    return verdict == "1"


def _start() -> subprocess.Popen[str]:
    """Starts a worker process, which looks for modules in the same folders as this process. Raises ImportError if the
    worker cannot import math-verify."""
    check_installed()
    program = str(Path(__file__).with_name("math_worker.py"))
    module_path = os.pathsep.join(folder for folder in sys.path if folder)
    worker = subprocess.Popen(
        [sys.executable, program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # In a session of its own, the worker gets no Ctrl-C from the terminal. It ends when this process ends.
        start_new_session=True,
        env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": module_path},
    )
    assert worker.stdout is not None
    if worker.stdout.readline().strip() != "ready":
        worker.kill()
        raise ImportError(f"math-verify cannot be imported: look at {sys.executable} {program}")
    return worker
