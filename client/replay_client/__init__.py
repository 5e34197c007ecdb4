"""The client of the replay server. Imports neither torch nor the server."""

import replay_protos  # noqa: F401, before `grpc` is imported
from replay_client.access import TLS
from replay_client.aio import AsyncReplayClient
from replay_client.client import Keeper, ReplayClient
from replay_client.completions import group_from_completions, group_from_rows, row_of
from replay_client.keeping import AsyncKeeper
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
from replay_client.requests import KeySequence
from replay_client.rollout import RolloutGroup

__all__ = [
    "TLS",
    "AsyncKeeper",
    "AsyncReplayClient",
    "CheckpointInfo",
    "ExtendResult",
    "ItemInfo",
    "ItemPage",
    "Keeper",
    "KeySequence",
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
    "row_of",
]
