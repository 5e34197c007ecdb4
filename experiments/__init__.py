"""Programs that answer a question. README.md has a line for each: the question, the answer, how to run it."""
