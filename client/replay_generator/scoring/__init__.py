"""Scoring: what makes groups of rollouts, and the processes that do nothing else."""
