"""Math worker: a process that compares answers by math-verify. `math_answers.py` starts the process, and sends it one
line of JSON for each comparison:

    {"expected": ["72"], "got": "\\\\boxed{72}"}  ──▶  1 (the same answer) or 0

math-verify uses sympy to evaluate formulas, which the policy has written. Some formulas, such as 9^9^9^9, would take
all memory and never end. Therefore the memory of the process is bounded. And if a comparison takes longer than LIMIT, a
signal that the process does not handle ends the process.
"""

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

    def formulas_in(text: str) -> list[object]:
        formulas: list[object] = parse(text, kinds, parsing_timeout=None)
        return formulas

    def is_same_answer(expected: str, got: str) -> bool:
        return bool(verify(formulas_in(expected), formulas_in(got), timeout_seconds=None))

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the default action ends the process, even while C code runs
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, LIMIT)  # sends SIGALRM after LIMIT seconds
        try:
            same = any(is_same_answer(expected, request["got"]) for expected in request["expected"])
        except Exception:  # answers that cannot be compared count as different
            same = False
        signal.setitimer(signal.ITIMER_REAL, 0)  # 0 stops the timer
        print(int(same), flush=True)


if __name__ == "__main__":
    main()
