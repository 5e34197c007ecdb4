"""Each field of ServerInfo reaches whoever looks: the record, several shards merged, `--json`, and Prometheus.

A field that one of them leaves out stands in a list here, with the reason.
"""

import json
from dataclasses import fields

import pytest
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from replay_client.records import Policy, server_info_of
from replay_client.shards.merging import merge_infos
from replay_protos import replay_pb2 as pb
from replay_server import TableConfig
from replay_server.cli.documents import server_document
from replay_server.telemetry.prometheus import client_metrics, server_metrics, table_metrics

SEES_FOR_ITSELF = "Prometheus has it from elsewhere"
TOO_LONG = "the alert says that it is so, and the log and `replay doctor` say why"
NO_METRIC = {
    "ServerInfo.time": SEES_FOR_ITSELF,
    "ServerInfo.resident_bytes": f"{SEES_FOR_ITSELF}: process_resident_memory_bytes",
    "ServerInfo.disk_bytes": "the disk has its own exporter; what is left of it is a metric",
    "Policy.weights": "a path is no number",
    "AdmissionInfo.groups_per_step": "a setting",
    "AdmissionInfo.max_staleness": "a setting",
    "AdmissionInfo.table": "a setting",
    "Waiting.reason": TOO_LONG,
    "TableInfo.inserts_per_second": f"{SEES_FOR_ITSELF}: rate(replay_table_inserts_total)",
    "TableInfo.samples_per_second": f"{SEES_FOR_ITSELF}: rate(replay_table_samples_total)",
    "TableInfo.inserted": "replay_silent_seconds says whether somebody is gone, and the counter has the rate",
    "TableInfo.sampled": "replay_silent_seconds says whether somebody is gone, and the counter has the rate",
    "Silence.table": TOO_LONG,
    "Silence.usual": TOO_LONG,
    "Silence.reason": TOO_LONG,
    "ClientInfo.name": "each new process would begin a new series",
    "ClientInfo.age": "each new process would begin a new series",
    "ClientInfo.ended": "each new process would begin a new series",
    "TableInfo.limiter": "where a limiter stands says nothing without its settings; waits have metrics",
    "TableInfo.effective_priority": "of the priorities as they were given there is a metric",
}
"""The fields without a metric, and why."""


def filled(message: Message, start: int = 1) -> Message:
    """The message with a value of its own in each field."""
    for number, field in enumerate(message.DESCRIPTOR.fields, start):
        if field.name == "config":
            message.config = TableConfig(name="table", max_bytes=10**6).model_dump_json()
        elif field.message_type is not None and field.is_repeated:
            filled(getattr(message, field.name).add(), 10 * number)
        elif field.message_type is not None:
            filled(getattr(message, field.name), 10 * number)
        elif field.cpp_type == field.CPPTYPE_STRING:
            setattr(message, field.name, {"side": "trainer", "role": "trainer"}.get(field.name, field.name))
        elif field.cpp_type == field.CPPTYPE_BOOL:
            setattr(message, field.name, True)
        else:
            setattr(message, field.name, number)
    return message


def paths(message: Message, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The way to each field in the message, and to each field of the messages in it."""
    found = []
    for field in message.DESCRIPTOR.fields:
        path = (*before, field.name)
        inner = getattr(message, field.name)
        if field.message_type is None:
            found.append(path)
        else:
            found += paths(inner[0] if field.is_repeated else inner, path)
    return found


FULL = filled(pb.ServerInfo())
PATHS = paths(FULL)


def without(path: tuple[str, ...]) -> pb.ServerInfo:
    """The full info without one field."""
    info = pb.ServerInfo()
    info.CopyFrom(FULL)
    holder: Message = info
    for name in path[:-1]:
        inner = getattr(holder, name)
        holder = inner[0] if holder.DESCRIPTOR.fields_by_name[name].is_repeated else inner
    if path[-1] == "config":
        holder.config = TableConfig(name="table", max_size=7).model_dump_json()
    else:
        holder.ClearField(path[-1])
    return info


def exposition(info: pb.ServerInfo) -> bytes:
    class Given(Collector):
        def collect(self):
            yield from server_metrics(info)
            yield from client_metrics(info)
            yield from table_metrics(info)

    registry = CollectorRegistry()
    registry.register(Given())
    return generate_latest(registry)


def excused(path: tuple[str, ...], excuses: dict[str, str]) -> bool:
    """Whether one of the fields on the way is in the list."""
    kind, names = FULL.DESCRIPTOR, set()
    for name in path:
        names.add(f"{kind.name}.{name}")
        kind = kind.fields_by_name[name].message_type
    return bool(names & excuses.keys())


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_a_field_makes_a_difference_to_prometheus_or_is_excused(path):
    differs = exposition(without(path)) != exposition(FULL)
    assert differs != excused(path, NO_METRIC), "add a metric, or its excuse here; or take the excuse away"


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_a_field_makes_a_difference_to_the_document(path):
    documents = [
        json.dumps(server_document("address", server_info_of(info)), default=str) for info in (FULL, without(path))
    ]
    assert documents[0] != documents[1]


def test_the_record_has_the_fields_of_the_message():
    record = server_info_of(FULL)
    assert {field.name for field in fields(record)} == {field.name for field in FULL.DESCRIPTOR.fields}
    assert {field.name for field in fields(Policy)} == {field.name for field in pb.Policy.DESCRIPTOR.fields}


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_a_field_of_a_shard_is_in_the_merged_info(path):
    merged = [
        json.dumps(server_document("address", merge_infos({"a": server_info_of(info)}, ())), default=str)
        for info in (FULL, without(path))
    ]
    assert merged[0] != merged[1]
