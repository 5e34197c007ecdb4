"""The client of the replay server. Imports neither torch nor the server."""

import replay_protos  # noqa: F401, before `grpc` is imported
from replay_client.access import TLS
from replay_client.aio import AsyncReplayClient
from replay_client.client import ReplayClient
from replay_client.completions import group_from_completions, group_from_rows
from replay_client.records import (
    CheckpointInfo,
    ExtendResult,
    ItemInfo,
    ItemPage,
    MutationResult,
    PermitLease,
    Policy,
    Sample,
    SampleInfo,
    ServerInfo,
    ShardedInfo,
    StoredItem,
    TableInfo,
)
from replay_client.rollout import RolloutGroup

__all__ = [
    "TLS",
    "AsyncReplayClient",
    "CheckpointInfo",
    "ExtendResult",
    "ItemInfo",
    "ItemPage",
    "MutationResult",
    "PermitLease",
    "Policy",
    "ReplayClient",
    "RolloutGroup",
    "Sample",
    "SampleInfo",
    "ServerInfo",
    "ShardedInfo",
    "StoredItem",
    "TableInfo",
    "group_from_completions",
    "group_from_rows",
]
