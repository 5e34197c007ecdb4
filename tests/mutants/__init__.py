"""The gate of mutants: small faults that are planted in the packages, and which tests find them.

Nobody imports this; it is a program beside the tests:

    python -m tests.mutants sample --seed 0       draws the mutants of sample.jsonl, once
    python -m tests.mutants judge --likely OUT    plants each mutant, and runs the test files that import or name it
    python -m tests.mutants reach                 learns which lines each test file runs: as long as all tests take
    python -m tests.mutants judge OUT             does so with the tests that reach its line, if OUT leaves it open
    python -m tests.mutants compare OLD NEW       names the mutants that OLD killed and NEW does not

One failing test kills a mutant, so the likely files come first. Only the mutants that they leave open need the reach.
`reach` takes test files, and `judge` takes `--first`, `--count` and `--step`, so that each can be done in parts.

Whoever moves or rewrites tests judges the same sample before and after. A mutant is stored by its function and the text
of its piece, so that it survives moves of code.
"""
