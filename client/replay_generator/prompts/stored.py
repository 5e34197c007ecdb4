"""Stored prompts: the items of a table of prompts, as bytes. docs/how-to/prompts.md says who writes and reads them.

Such a table holds two kinds of items: `StoredPrompt`, which a generator makes a group of, and `PromptCursor`, which
says how far the prompts are loaded. Both are one msgpack map behind eight bytes that name the format.
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
"""The last byte is the format version."""
CURSOR_TAG = "prompts"
"""The tag of a PromptCursor. Items with it are no prompts."""
_PROBED = 16
"""Rows whose names tell one set of prompts from another."""
_MOST_NAME = 256
"""Bytes of a `prompt_id` that can be a tag."""


@dataclass(frozen=True)
class StoredPrompt:
    """A prompt that waits for a generator, or of which one is making a group."""

    prompt: Prompt
    epoch: int
    position: int
    """In the order of the epoch; of a curriculum, in the file."""

    def encode(self) -> bytes:
        """Raises PromptError if the row has a value that msgpack has no type for, such as an image."""
        fields = {"prompt": self.prompt.packed(), "epoch": self.epoch, "position": self.position}
        return MAGIC + bytes(msgpack.packb(fields))

    def item_tags(self) -> dict[str, TagValue]:
        """The tags of its item: those of the prompt, and its name where that fits."""
        tags, name = dict(self.prompt.tags), self.prompt.prompt_id
        if len(tags) < MOST_TAGS and len(name.encode(errors="replace")) <= _MOST_NAME:
            tags.setdefault("prompt_id", name)
        return tags


@dataclass(frozen=True)
class PromptCursor:
    """Says that the prompts before `position` of `epoch` are loaded, and none after them.

    Who has it under a lease loads the next ones. It closes this cursor with the next one, so there is always exactly
    one.
    """

    run: int
    """A random number, from which the keys of all prompts follow. It is new when the table was emptied."""
    seed: int
    """Of the order of the prompts. It is the one of the generator that began."""
    rows: int
    """How many prompts an epoch has."""
    names: str
    """A hash of the names of some of them."""
    epoch: int = 0
    position: int = 0

    def encode(self) -> bytes:
        return MAGIC + bytes(msgpack.packb({"cursor": vars(self)}))


def names_of(rows: PromptRows) -> str:
    """A hash that differs between sets of prompts with other names in the same places."""
    places = sorted({len(rows) * place // _PROBED for place in range(_PROBED)} | {len(rows) - 1})
    names = [_name_at(rows, place) for place in places]
    return hashlib.blake2b("\0".join(names).encode(errors="replace"), digest_size=8).hexdigest()


def _name_at(rows: PromptRows, place: int) -> str:
    """The name of a prompt; "": the row is none."""
    try:
        return prompt_at(rows, place).prompt_id
    except PromptError:
        return ""


def key_of(*parts: object) -> int:
    """The key of the item that these parts name. No client chooses a key like it at random."""
    text = "\0".join(map(str, parts)).encode(errors="replace")
    return 1 << 63 | int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def is_stored_prompt(payload: Buffer) -> bool:
    """Whether the bytes begin as the items of a table of prompts do."""
    return bytes(payload[: len(MAGIC) - 1]) == MAGIC[:-1]


def decode_item(payload: Buffer) -> StoredPrompt | PromptCursor:
    """Raises ValueError for bytes that are neither."""
    if bytes(payload[: len(MAGIC)]) != MAGIC:
        raise ValueError(f"not a stored prompt: {len(payload)} bytes that begin with {bytes(payload[:8])!r}")
    try:
        fields = msgpack.unpackb(payload[len(MAGIC) :], strict_map_key=False)
        if "cursor" in fields:
            cursor = PromptCursor(**fields["cursor"])
            check_places(cursor.run, cursor.rows, cursor.epoch, cursor.position, cursor.rows - cursor.position)
            return cursor
        check_places(fields["epoch"], fields["position"])
        return StoredPrompt(Prompt.unpacked(fields["prompt"]), fields["epoch"], fields["position"])
    except Exception as error:  # anybody may have written them
        raise ValueError(f"a stored prompt is damaged: {type(error).__name__}: {error}") from error


def check_places(*numbers: Any) -> None:
    """Raises ValueError unless all are whole numbers from 0."""
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"keys, numbers and places must be whole numbers from 0, not {numbers!r:.80}")


def document_of(payload: Buffer) -> dict[str, Any] | None:
    """An item of a table of prompts as JSON has it; None: it is none, or damaged."""
    try:
        item = decode_item(payload)
    except ValueError:
        return None
    if isinstance(item, PromptCursor):
        return {"cursor": vars(item)}
    prompt = item.prompt
    row = {"prompt_id": prompt.prompt_id, "content": prompt.content, "row": prompt.row}
    return {"stored_prompt": row | {"epoch": item.epoch, "position": item.position}}
