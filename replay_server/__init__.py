"""The replay server: rollout groups in rate-limited priority tables behind gRPC."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# gRPC's C core writes its own lines to stderr, beside the errors that we raise. It reads this when it is loaded.
os.environ["GRPC_VERBOSITY"] = os.environ.get("GRPC_VERBOSITY", "NONE")

import replay_protos  # noqa: F401, before `grpc` is imported

if TYPE_CHECKING:
    from replay_server.config import CheckpointsSection, Config, LimitsSection, SecuritySection, ServerSection
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

_MODULES = ("replay_server.tables.config", "replay_server.config", "replay_server.server")


def __getattr__(name: str) -> Any:
    """The names above, when somebody asks for them. The command `replay` imports this package before it can handle
    Ctrl-C, and most of its subcommands need no server."""
    if name in __all__:
        for module in map(import_module, _MODULES):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
