"""The documents that `--json` prints.

Field names are those of replay.proto. Keys of items and the id of a server are strings: they have 64 bits, and many
readers of JSON keep only 53. All other numbers are numbers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

if TYPE_CHECKING:
    from replay_client.records import CheckpointInfo, ItemInfo, Policy, ServerInfo, TableInfo

Document = dict[str, Any]


def server_document(address: str, info: ServerInfo) -> Document:
    return {
        "address": address,
        "version": info.version,
        "server_id": str(info.server_id),
        "uptime": info.uptime,
        "time": info.time,
        "storage": info.storage,
        "policy": policy_document(info.policy),
        "items": info.items,
        "bytes": info.bytes,
        "max_bytes": info.max_bytes or None,
        "resident_bytes": info.resident_bytes or None,
        "memory_available": info.memory_available or None,
        "disk_available": info.disk_available or None,
        "disk_bytes": info.disk_bytes or None,
        "commits": info.commits,
        "commit_error": info.commit_error,
        "damaged": info.damaged,
        "fell_back": info.fell_back,
        "insert_streams": info.insert_streams,
        "sample_streams": info.sample_streams,
        "admission": None if info.admission is None else _fields(info.admission),
        "tables": {name: table_document(table) for name, table in info.tables.items()},
        "long_wait": info.long_wait,
        "silences": [_fields(silence) for silence in info.silences],
        "clients": [_fields(client) for client in info.clients],
    }


def shard_documents(info: ServerInfo) -> Document:
    """Each server of several, by its name; null: it does not answer."""
    shards = {name: server_document(name, shard) for name, shard in getattr(info, "shards", {}).items()}
    return {"shards": shards | dict.fromkeys(getattr(info, "gone", ()))}


def table_document(table: TableInfo) -> Document:
    return _fields(table) | {"config": config_of(table)}


def policy_document(policy: Policy) -> Document:
    return {"version": policy.version, "weights": policy.weights, "age": policy.age, "usual": policy.usual or None}


def checkpoint_document(checkpoint: CheckpointInfo) -> Document:
    return _fields(checkpoint)


def item_document(item: ItemInfo) -> Document:
    return {
        "key": str(item.key),
        "priority": item.priority,
        "effective_priority": item.effective_priority,
        "age": item.age,
        "policy_version": item.policy_version,
        "staleness": item.staleness,
        "times_sampled": item.times_sampled,
        "bytes": item.nbytes,
    }


def config_of(table: TableInfo) -> Document:
    """The configuration of a table, with its defaults filled in."""
    config: Document = json.loads(table.config)
    return config


def _fields(message: Message) -> Document:
    """All fields of a message, and of the messages in it. No message used here has repeated fields."""
    fields: Document = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        fields[field.name] = _fields(value) if field.message_type else value
    return fields
