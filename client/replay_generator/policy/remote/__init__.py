"""Weights without a shared disk: versions as deltas, the server that offers them, and the client that fetches them."""

from replay_generator.policy.remote.delta import checksum_of, write_deltas
from replay_generator.policy.remote.serving import WeightsServer

__all__ = ["WeightsServer", "checksum_of", "write_deltas"]
