"""What replay.proto declares about the fields of ServerInfo, and how they and other values become JSON.

A field of ServerInfo, or of a message in it, has the option `field`: how shards are merged, its metric, and whether 0
means unknown. Code that passes the state of a server on reads these options, and needs no list of the fields.
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


@cache
def declared(message: Descriptor) -> tuple[tuple[FieldDescriptor, pb.Field], ...]:
    """Each field of a message, with what replay.proto declares about it."""
    return tuple((field, field.GetOptions().Extensions[pb.field]) for field in message.fields)


def document(record: Message | Any, message: Descriptor | None = None) -> Document:
    """A message, or a record with the fields of `message`, as values of JSON by the names of the fields.

    A key of an item and the id of a server are strings: they have 64 bits, and many readers of JSON keep only 53. A
    value that is 0 because it is unknown becomes None.
    """
    return {
        field.name: _value(getattr(record, field.name), field, option)
        for field, option in declared(message or record.DESCRIPTOR)
    }


def _value(value: Any, field: FieldDescriptor, option: pb.Field) -> Any:
    if value is None or (option.zero_is_unknown and not value):
        return None
    if isinstance(value, Mapping):  # a record has the tables by their names
        return {name: document(each, field.message_type) for name, each in value.items()}
    if field.is_repeated:
        return [document(each, field.message_type) if field.message_type else each for each in value]
    if field.message_type is not None:
        return document(value, field.message_type)
    if option.json:
        return json.loads(value) if value else None
    return str(value) if field.type == FieldDescriptor.TYPE_FIXED64 else value


MOST_LEVELS = 128
"""Most levels of nested lists and objects shown. msgpack reads 1,024, and json writes no more than Python can call."""
TOO_DEEP = "nested too deeply to be shown"


def plain(value: Any, levels: int = MOST_LEVELS) -> Any:
    """Converts values of msgpack and numpy into values of JSON. NaN and infinities become None.

    What is nested deeper than `levels` becomes the text TOO_DEEP.
    """
    if isinstance(value, dict | list | tuple) and not levels:
        return TOO_DEEP
    if isinstance(value, dict):
        return {str(name): plain(part, levels - 1) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, levels - 1) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | int) or value is None:
        return value
    if isinstance(value, bytes):
        return value.hex()
    return plain(value.tolist(), levels) if hasattr(value, "tolist") else str(value)
