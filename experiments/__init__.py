"""Programs that answered a question once. README.md has a line for each: the question, the answer, how to run it."""
