"""Counts in sentences for people, for packages that may import replay_client but not replay_protos."""

from replay_protos.words import counted

__all__ = ["counted"]
