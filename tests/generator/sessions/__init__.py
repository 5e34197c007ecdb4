"""Tests of sessions: rollouts of agents that ask an address."""
