"""Parts for tests of your own code: an engine that answers as you say."""

from replay_generator.testing.scripted import EOS, Letters, ScriptedEngine, make_completion

__all__ = ["EOS", "Letters", "ScriptedEngine", "make_completion"]
