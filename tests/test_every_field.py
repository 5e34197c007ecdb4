"""Each field of ServerInfo reaches whoever looks: the record, several shards merged, `--json`, and Prometheus.

All but the record is derived from what replay.proto declares. So a field can only be forgotten there.
"""

import json
from dataclasses import fields

import pytest
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from replay_client.records import ServerInfo, server_info_of
from replay_client.shards.merging import merge_infos
from replay_protos import replay_pb2 as pb
from replay_protos.state import declared, document
from replay_server import TableConfig
from replay_server.telemetry.prometheus import server_metrics


def filled(message: Message, start: int = 1) -> Message:
    """The message with a value of its own in each field."""
    for number, field in enumerate(message.DESCRIPTOR.fields, start):
        if field.name == "config":
            message.config = TableConfig(name="table", max_bytes=10**6).model_dump_json()
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            filled(inner.add() if field.is_repeated else inner, 10 * number)
        elif field.is_repeated:
            getattr(message, field.name).append(field.name)
        elif field.cpp_type == field.CPPTYPE_STRING:
            texts = {"role": "trainer", "settings": '{"part": "1"}'}
            setattr(message, field.name, texts.get(field.name, field.name))
        else:
            setattr(message, field.name, True if field.cpp_type == field.CPPTYPE_BOOL else number)
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

    registry = CollectorRegistry()
    registry.register(Given())
    return generate_latest(registry)


def printed(info: ServerInfo) -> str:
    return json.dumps(document(info, pb.ServerInfo.DESCRIPTOR))


def has_no_metric(path: tuple[str, ...]) -> bool:
    """Whether one of the fields on the way declares why it has no metric."""
    message, reasons = pb.ServerInfo.DESCRIPTOR, ""
    for name in path:
        option = next(option for field, option in declared(message) if field.name == name)
        message, reasons = message.fields_by_name[name].message_type, reasons + option.no_metric
    return bool(reasons)


@pytest.mark.parametrize("path", paths(FULL), ids=".".join)
def test_a_field_makes_a_difference_to_whoever_looks(path):
    whole, less = server_info_of(FULL), server_info_of(without(path))
    assert printed(less) != printed(whole)
    assert printed(merge_infos({"a": less}, ())) != printed(merge_infos({"a": whole}, ())), "declare how it is merged"
    differs = exposition(without(path)) != exposition(FULL)
    assert differs != has_no_metric(path), "declare its metric, or why it has none"


def test_the_record_has_the_fields_of_the_message():
    record = server_info_of(FULL)
    assert {field.name for field in fields(record)} == {field.name for field in FULL.DESCRIPTOR.fields}
