"""The replay server: rollout groups in rate-limited priority tables behind gRPC."""

from replay_server.config import (
    AdmissionConfig,
    Config,
    RateLimiterConfig,
    SelectorConfig,
    ServerSection,
    TableConfig,
)
from replay_server.server import ReplayServer

__all__ = [
    "AdmissionConfig",
    "Config",
    "RateLimiterConfig",
    "ReplayServer",
    "SelectorConfig",
    "ServerSection",
    "TableConfig",
]
