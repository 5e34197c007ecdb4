"""The replay server: rollout groups in rate-limited priority tables behind gRPC."""

import os

# By default gRPC's C core writes its own lines to stderr, beside the errors that we raise. It reads this variable when
# it is loaded.
os.environ["GRPC_VERBOSITY"] = os.environ.get("GRPC_VERBOSITY", "NONE")

import replay_protos  # noqa: F401, before `grpc` is imported
from replay_server.config import CheckpointsConfig, Config, LimitsConfig, SecurityConfig, ServerConfig
from replay_server.server import ReplayServer
from replay_server.tables.config import (
    AdmissionConfig,
    BalanceConfig,
    RateLimiterConfig,
    SelectorConfig,
    TableConfig,
)

__all__ = [
    "AdmissionConfig",
    "BalanceConfig",
    "CheckpointsConfig",
    "Config",
    "LimitsConfig",
    "RateLimiterConfig",
    "ReplayServer",
    "SecurityConfig",
    "SelectorConfig",
    "ServerConfig",
    "TableConfig",
]
