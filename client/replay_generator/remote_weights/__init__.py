"""Weights without a shared disk: versions as deltas, the server that gives them, and who fetches them."""

from replay_generator.remote_weights.delta import checksum_of, write_deltas
from replay_generator.remote_weights.serving import WeightsServer
from replay_generator.sessions.door import Door

__all__ = ["Door", "WeightsServer", "checksum_of", "write_deltas"]
