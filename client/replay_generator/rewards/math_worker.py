"""Math worker: a process that compares answers by math-verify. `math_answers.py` starts the process, and sends it one
line of JSON for each comparison:

    {"expected": ["72"], "got": "\\\\boxed{72}"}  ──▶  1 (the same answer) or 0

math-verify uses sympy to evaluate formulas, which the policy has written. Some formulas, such as 9^9^9^9, would take
all memory and never end. Therefore the memory of the process is bounded: a comparison that needs more ends the process.
And if a comparison takes longer than LIMIT, a signal that the process does not handle ends the process.
"""

import itertools
import json
import logging
import resource
import signal
import sys

LIMIT = 5.0
"""The most seconds that one comparison may take."""
MEMORY = 4 << 30
"""The most bytes of address space that this process may have."""


def main() -> None:
    """Writes "ready". Then reads one request from each line of standard input, and writes its result: 1 or 0."""
    # Otherwise math-verify would warn that its own time limits are off.
    logging.disable(logging.WARNING)
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # math-verify looks for formulas in LaTeX and for plain expressions. Formulas in \boxed{} come before other LaTeX.
    kinds = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    # math-verify would take each error for a difference. With `raise_on_error` it raises the error, so that a
    # MemoryError ends this process.
    def formulas_in(text: str) -> list[object]:
        """The formulas in a text; none: math-verify cannot read it. Raises MemoryError."""
        try:
            formulas: list[object] = parse(text, kinds, parsing_timeout=None, raise_on_error=True)
        except MemoryError:
            raise
        except Exception:
            return []
        return formulas

    def is_same_formula(expected: object, got: object) -> bool:
        """True if both formulas are the same. Formulas that cannot be compared are different. Raises MemoryError."""
        try:
            return bool(verify(expected, got, timeout_seconds=None, raise_on_error=True))
        except MemoryError:
            raise
        except Exception:
            return False

    def is_same_answer(expected: str, got: str) -> bool:
        """True if both texts have a formula in common. Raises MemoryError."""
        pairs = itertools.product(formulas_in(expected), formulas_in(got))
        return any(is_same_formula(*pair) for pair in pairs)

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the default action ends the process, even while C code runs
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, LIMIT)  # sends SIGALRM after LIMIT seconds
        same = any(is_same_answer(expected, request["got"]) for expected in request["expected"])
        signal.setitimer(signal.ITIMER_REAL, 0)  # 0 stops the timer
        print(int(same), flush=True)


if __name__ == "__main__":
    main()
