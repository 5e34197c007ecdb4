"""Reads what replay.proto declares about the fields of ServerInfo, and converts ServerInfo and other values to JSON.

Each field of ServerInfo, and of the messages in it, has the option `field`. The option says how the values of several
shards are merged, which metric shows the field, and whether 0 means unknown. Code that forwards the state of a server
reads these options, so it needs no list of the fields.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from replay_protos import replay_pb2 as pb

Document = dict[str, Any]
"""A JSON object: name of a field -> its value."""


@cache
def declared(message: Descriptor) -> tuple[tuple[FieldDescriptor, pb.Field], ...]:
    """Each field of a message, with what replay.proto declares about it."""
    return tuple((field, field.GetOptions().Extensions[pb.field]) for field in message.fields)


def document(record: Message | Any, message: Descriptor | None = None) -> Document:
    """Converts `record` into a JSON object with its fields by name.

    `record` is a message, or any other object that has the fields of the message type `message`.

    The key of an item and the id of a server have 64 bits. They become strings, because many readers of JSON keep only
    53 bits of a number. A 0 that means unknown becomes None.
    """
    return {
        field.name: _value(getattr(record, field.name), field, option)
        for field, option in declared(message or record.DESCRIPTOR)
    }


def _value(value: Any, field: FieldDescriptor, option: pb.Field) -> Any:
    """The value of one field as a value of JSON."""
    if value is None or (option.zero_is_unknown and not value):
        return None
    if isinstance(value, Mapping):  # only in the client's records, which hold the tables by name
        return {name: document(record, field.message_type) for name, record in value.items()}
    if field.is_repeated:
        if field.message_type is None:
            return list(value)
        return [document(record, field.message_type) for record in value]
    if field.message_type is not None:
        return document(value, field.message_type)
    if option.json:  # a text that holds JSON
        return json.loads(value) if value else None
    if field.type == FieldDescriptor.TYPE_FIXED64:  # in ServerInfo, this is the type of keys and ids, but not of counts
        return str(value)
    return value


MOST_LEVELS = 128
"""The most levels of nested lists and objects that are shown. msgpack reads 1,024 levels, but json writes levels by
recursion, so it would fail at Python's recursion limit."""
TOO_DEEP = "nested too deeply to be shown"
"""The text in the place of a list or object that is nested more deeply."""


def plain(value: Any, levels: int = MOST_LEVELS) -> Any:
    """Converts values of msgpack and numpy into values of JSON. NaN and infinities become None.

    Lists and objects below `levels` levels become the text TOO_DEEP.
    """
    if isinstance(value, dict | list | tuple) and not levels:  # at level 0 only single values are shown
        return TOO_DEEP
    if isinstance(value, dict):
        return {str(name): plain(child, levels - 1) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child, levels - 1) for child in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | int) or value is None:
        return value
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "tolist"):  # an array or a scalar of numpy
        return plain(value.tolist(), levels)
    return str(value)
