"""The client of the replay server. Imports neither torch nor the server."""

import replay_protos  # noqa: F401, before `grpc` is imported
from replay_client.access import TLS
from replay_client.aio import AsyncReplayClient
from replay_client.client import LeaseRenewer, ReplayClient
from replay_client.completions import group_from_completions, group_from_rows, row_of
from replay_client.lease_renewer import AsyncLeaseRenewer
from replay_client.records import (
    CheckpointInfo,
    ExtendResult,
    ItemInfo,
    ItemPage,
    MutationResult,
    PermitGrant,
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
    "AsyncLeaseRenewer",
    "AsyncReplayClient",
    "CheckpointInfo",
    "ExtendResult",
    "ItemInfo",
    "ItemPage",
    "KeySequence",
    "LeaseRenewer",
    "MutationResult",
    "PermitGrant",
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
