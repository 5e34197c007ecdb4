"""The replay server: rollout groups in rate-limited priority tables behind gRPC."""

import os

# gRPC's C core writes its own lines to stderr, beside the errors that we raise. It reads this when it is loaded.
os.environ["GRPC_VERBOSITY"] = os.environ.get("GRPC_VERBOSITY", "NONE")

from replay_server.config import (
    AdmissionConfig,
    CheckpointsSection,
    Config,
    LimitsSection,
    RateLimiterConfig,
    SecuritySection,
    SelectorConfig,
    ServerSection,
    TableConfig,
)
from replay_server.server import ReplayServer

__all__ = [
    "AdmissionConfig",
    "CheckpointsSection",
    "Config",
    "LimitsSection",
    "RateLimiterConfig",
    "ReplayServer",
    "SecuritySection",
    "SelectorConfig",
    "ServerSection",
    "TableConfig",
]
