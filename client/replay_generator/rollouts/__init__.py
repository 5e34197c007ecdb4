"""Rollouts: turns, tools, environments, and the sessions of agents."""
