"""Counts in sentences for people, for packages that know the client and not the wire."""

from replay_protos.words import counted

__all__ = ["counted"]
