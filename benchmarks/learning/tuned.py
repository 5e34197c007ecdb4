"""What was chosen before the comparison, for plain GRPO alone, on seeds that the comparison does not use."""

TUNING_SEEDS = (100, 101, 102)
RATES_TO_TRY = (5e-5, 1e-4, 2e-4)
LEARNING_RATES = {("sums", "rare"): 1e-4}
"""By task and regime: the rate with which plain has the best mean solve rate over its budget."""
BUDGETS = {"sums": 50_000, "steps": 80_000, "sort": 80_000}
"""Generated tokens of a run."""
