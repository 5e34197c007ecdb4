"""Does replay pay? Tiny models, verifiable tasks, and arms that differ in what a training step is made of."""
