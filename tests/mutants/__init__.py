"""The gate of mutants: small faults that are planted in the packages, and which tests find them.

Nobody imports this; it is a program beside the tests:

    python -m tests.mutants sample --seed 0       draws the mutants of sample.jsonl, once
    python -m tests.mutants reach                 learns which lines each test file runs
    python -m tests.mutants judge OUT.jsonl       plants each mutant, and runs the test files that reach its line
    python -m tests.mutants compare OLD NEW       names the mutants that OLD killed and NEW does not

Whoever moves or rewrites tests judges the same sample before and after. A mutant is stored by its function and the text
of its piece, so that it survives moves of code.
"""
