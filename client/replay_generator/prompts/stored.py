"""Stored prompts: the items of a table of prompts, as bytes. docs/how-to/prompts.md describes their use.

Such a table holds two kinds of items: `StoredPrompt`, from which a generator makes a group, and `PromptCursor`, which
says how many prompts are loaded. Each item is eight bytes that name the format, and a map in msgpack.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgpack

from replay_client.columns import Buffer
from replay_generator.errors import PromptError
from replay_generator.prompts.prompt import Prompt, PromptRows, prompt_at
from replay_protos.labels import MOST_TAGS, TagValue

MAGIC = b"RPLYPRM\x01"
"""The first bytes of each item. The last of them is the format version."""
CURSOR_TAG = "prompts"
"""The name of a tag that only items with a PromptCursor have."""
_PROBED = 16
"""The number of rows, beside the last row, whose names show whether two generators have the same prompts."""
_MOST_NAME = 256
"""The most bytes of a `prompt_id` that can be a tag."""


@dataclass(frozen=True)
class StoredPrompt:
    """A prompt that waits for a generator, or from which a generator makes a group."""

    prompt: Prompt
    epoch: int
    position: int
    """The position of the prompt in the order of the epoch or, in a curriculum, in the file."""

    def encode(self) -> bytes:
        """The bytes for `decode_item`. Raises PromptError for a value that msgpack cannot hold, such as an image."""
        fields = {"prompt": self.prompt.packed(), "epoch": self.epoch, "position": self.position}
        return MAGIC + bytes(msgpack.packb(fields))

    def item_tags(self) -> dict[str, TagValue]:
        """The tags of the item: the tags of the prompt, and its `prompt_id` unless that is too long for a tag."""
        tags = dict(self.prompt.tags)
        name = self.prompt.prompt_id
        name_bytes = len(name.encode(errors="replace"))
        if len(tags) < MOST_TAGS and name_bytes <= _MOST_NAME:
            tags.setdefault("prompt_id", name)
        return tags


@dataclass(frozen=True)
class PromptCursor:
    """Records that the prompts before `position` of `epoch` are loaded, and that no later prompts are.

    The generator that has the cursor under a lease loads the next prompts. Its insert of the next cursor closes this
    cursor, so that there is always exactly one cursor.
    """

    run: int
    """A random number, from which the keys of all prompts follow. A table that was emptied gets a new number."""
    seed: int
    """The seed of the order of the prompts, from the generator that inserted the first cursor."""
    rows: int
    """The number of prompts in an epoch."""
    names: str
    """A hash of the names of some of these prompts; see `names_of`."""
    epoch: int = 0
    position: int = 0

    def encode(self) -> bytes:
        return MAGIC + bytes(msgpack.packb({"cursor": vars(self)}))


def names_of(rows: PromptRows) -> str:
    """A hash of the names of some prompts in `rows`. Rows with the same hash count as the same prompts."""
    # Up to _PROBED rows, evenly over all rows, and the last row. Rows that were appended change at least the last one.
    positions = {len(rows) * number // _PROBED for number in range(_PROBED)}
    positions.add(len(rows) - 1)
    names = [_name_at(rows, position) for position in sorted(positions)]
    text = "\0".join(names).encode(errors="replace")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _name_at(rows: PromptRows, position: int) -> str:
    """The `prompt_id` of the prompt in a row; "": the row is no prompt."""
    try:
        return prompt_at(rows, position).prompt_id
    except PromptError:
        return ""


def key_of(*parts: object) -> int:
    """The key of the item that these parts name. Its highest bit is set, unlike in all keys of a KeySequence."""
    text = "\0".join(map(str, parts)).encode(errors="replace")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return 1 << 63 | int.from_bytes(digest, "big") >> 1


def is_stored_prompt(payload: Buffer) -> bool:
    """True if the bytes begin like the items of a table of prompts, in any version of the format."""
    return bytes(payload[: len(MAGIC) - 1]) == MAGIC[:-1]


def decode_item(payload: Buffer) -> StoredPrompt | PromptCursor:
    """The item in these bytes. Raises ValueError for bytes that are no such item."""
    if bytes(payload[: len(MAGIC)]) != MAGIC:
        raise ValueError(f"not a stored prompt: {len(payload)} bytes that begin with {bytes(payload[:8])!r}")
    try:
        fields = msgpack.unpackb(payload[len(MAGIC) :], strict_map_key=False)
        if "cursor" in fields:
            cursor = PromptCursor(**fields["cursor"])
            # The last number is at least 0 if `position` is at most `rows`.
            check_places(cursor.run, cursor.rows, cursor.epoch, cursor.position, cursor.rows - cursor.position)
            return cursor
        check_places(fields["epoch"], fields["position"])
        return StoredPrompt(Prompt.unpacked(fields["prompt"]), fields["epoch"], fields["position"])
    except Exception as error:  # any client may have written these bytes
        raise ValueError(f"a stored prompt is damaged: {type(error).__name__}: {error}") from error


def check_places(*numbers: Any) -> None:
    """Raises ValueError unless all `numbers` are whole and at least 0."""
    for number in numbers:
        is_whole = type(number) is int and number >= 0
        if not is_whole:
            raise ValueError(f"keys, numbers and places must be whole numbers from 0, not {numbers!r:.80}")


def document_of(payload: Buffer) -> dict[str, Any] | None:
    """The JSON document of an item of a table of prompts; None: the bytes are no such item, or damaged."""
    try:
        item = decode_item(payload)
    except ValueError:
        return None
    if isinstance(item, PromptCursor):
        return {"cursor": vars(item)}
    prompt = item.prompt
    row = {"prompt_id": prompt.prompt_id, "content": prompt.content, "row": prompt.row}
    return {"stored_prompt": row | {"epoch": item.epoch, "position": item.position}}
