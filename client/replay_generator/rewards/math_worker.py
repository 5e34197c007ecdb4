"""Math worker: a process that compares answers by math-verify, one line of JSON after another (math_answers.py).

    {"expected": ["72"], "got": "\\\\boxed{72}"}  ──▶  1 (the same answer) or 0

A comparison evaluates formulas that the policy has written, by sympy. Some of them, such as 9^9^9^9, would take all
memory and never end. Therefore the memory of the process is bounded, and a signal that nothing handles ends the process
if a comparison takes longer than LIMIT.
"""

import json
import logging
import resource
import signal
import sys

LIMIT = 5.0
"""The most seconds of one comparison."""
MEMORY = 4 << 30
"""The most bytes of address space of this process."""


def main() -> None:
    """Writes "ready", then reads one request a line from standard input, and writes the result of each: 1 or 0."""
    logging.disable(logging.WARNING)  # math-verify warns that its own time limits are off
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # The kinds of answers to look for: formulas in LaTeX, first those in \boxed{}, and plain expressions.
    kinds = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def parsed(text: str) -> list[object]:
        formulas: list[object] = parse(text, kinds, parsing_timeout=None)
        return formulas

    def equal(expected: str, got: str) -> bool:
        return bool(verify(parsed(expected), parsed(got), timeout_seconds=None))

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the default action ends the process, even inside of C code
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, LIMIT)  # sends SIGALRM after LIMIT seconds
        try:
            same = any(equal(answer, request["got"]) for answer in request["expected"])
        except Exception:  # answers that cannot be compared count as different
            same = False
        signal.setitimer(signal.ITIMER_REAL, 0)  # stops the timer
        print(int(same), flush=True)


if __name__ == "__main__":
    main()
