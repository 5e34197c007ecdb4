"""Chosen before the comparison, for plain GRPO alone, on seeds that the comparison does not use."""

TUNING_SEEDS = (100, 101)
RATES_TO_TRY = (1e-4, 2e-4, 3e-4)
LEARNING_RATES = {
    ("sums", "rare"): 1e-4,
    ("steps", "rare"): 1e-4,
    ("chain_sum", "pretrained"): 2e-5,
    ("two_terms", "pretrained"): 2e-5,
}
"""By task and regime: the rate with which plain has the best mean solve rate over its budget. Those of SmolLM2 are
guesses: none was tuned there."""
BUDGETS = {"sums": 30_000, "steps": 40_000, "sort": 40_000, "split": 30_000, "chain_sum": 9_000, "two_terms": 8_000}
"""Generated tokens of a run."""
