"""Helpers for tests of your own code: an engine with scripted answers, and the checks that every engine must pass."""

from replay_generator.testing.exercise import exercise_engine
from replay_generator.testing.scripted import EOS, Letters, ScriptedEngine, make_completion

__all__ = ["EOS", "Letters", "ScriptedEngine", "exercise_engine", "make_completion"]
