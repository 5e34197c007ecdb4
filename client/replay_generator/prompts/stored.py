"""Stored prompts: the items of a table of prompts, as bytes. docs/how-to/prompts.md describes their use.

Such a table holds two kinds of items: `StoredPrompt`, from which a generator makes a group, and `PromptCursor`, which
says how many prompts are loaded. The bytes of an item are the eight bytes of MAGIC, and then a map in msgpack.
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
"""The first eight bytes of each item. The last of these bytes is the version of the format."""
CURSOR_TAG = "prompts"
"""The name of a tag that only items with a PromptCursor have."""
_PROBED = 16
"""The names of this many rows, and of the last row, show whether two generators have the same prompts."""
_MOST_ID_BYTES = 256
"""A `prompt_id` of more bytes cannot be a tag."""


@dataclass(frozen=True)
class StoredPrompt:
    """A prompt that waits for a generator, or from which a generator makes a group."""

    prompt: Prompt
    epoch: int
    position: int
    """The position of the prompt in the order of the epoch or, in a curriculum, in the file."""

    def encode(self) -> bytes:
        """Encodes this object as the bytes of an item, which `decode_item` decodes.

        Raises PromptError if the row has a value for which msgpack has no type, such as an image.
        """
        fields = {"prompt": self.prompt.packed(), "epoch": self.epoch, "position": self.position}
        return MAGIC + bytes(msgpack.packb(fields))

    def item_tags(self) -> dict[str, TagValue]:
        """Returns the tags of the item: the tags of the prompt, and the tag `prompt_id` with the prompt's id.

        This tag is left out if the id is too long for a tag, or if the prompt already has the most tags that an item
        can have. If the prompt has a tag of this name itself, that tag stays.
        """
        tags = dict(self.prompt.tags)
        prompt_id = self.prompt.prompt_id
        id_bytes = len(prompt_id.encode(errors="replace"))
        if len(tags) < MOST_TAGS and id_bytes <= _MOST_ID_BYTES:
            tags.setdefault("prompt_id", prompt_id)
        return tags


@dataclass(frozen=True)
class PromptCursor:
    """Records that the prompts before `position` of `epoch` are loaded, and that no later prompts are.

    The generator that has the cursor under a lease loads the next prompts, and then inserts the next cursor. This
    insert closes the old cursor in the same request, so that the table always has exactly one cursor.

    This is different for a curriculum, whose cursors are neither drawn nor closed. It has a first cursor and, when all
    prompts are loaded, a second one (`CurriculumPrompts`).
    """

    run: int
    """A random number, from which the keys of all prompts are computed. A table that was emptied gets a new number."""
    seed: int
    """The seed for the order of the prompts. It is the seed of the generator that inserted the first cursor."""
    rows: int
    """The number of prompts in an epoch."""
    names: str
    """A hash of the names of some of these prompts; see `names_of`."""
    epoch: int = 0
    position: int = 0

    def encode(self) -> bytes:
        """Encodes this object as the bytes of an item, which `decode_item` decodes."""
        return MAGIC + bytes(msgpack.packb({"cursor": vars(self)}))


def names_of(rows: PromptRows) -> str:
    """Returns a hash of the names of some prompts in `rows`. Rows with the same hash count as the same prompts."""
    # The hash is of up to _PROBED rows, which are spread evenly over all rows. It is also of the last row, so that the
    # hash changes if rows are appended.
    positions = {len(rows) * number // _PROBED for number in range(_PROBED)}
    positions.add(len(rows) - 1)
    names = [_name_at(rows, position) for position in sorted(positions)]
    text = "\0".join(names).encode(errors="replace")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _name_at(rows: PromptRows, position: int) -> str:
    """Returns the `prompt_id` of the prompt in a row; "": the row is no prompt."""
    try:
        return prompt_at(rows, position).prompt_id
    except PromptError:
        return ""


def key_of(*parts: object) -> int:
    """Returns the key of an item, as a hash of `parts`. So all generators compute the same key from the same parts.

    The highest bit of the key is set, so that no key of a KeySequence is the same.
    """
    text = "\0".join(map(str, parts)).encode(errors="replace")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    return (1 << 63) | (number >> 1)


def is_stored_prompt(payload: Buffer) -> bool:
    """True if the bytes begin like the items of a table of prompts, in any version of the format."""
    magic_without_version = MAGIC[:-1]
    return bytes(payload[: len(magic_without_version)]) == magic_without_version


def decode_item(payload: Buffer) -> StoredPrompt | PromptCursor:
    """Decodes the bytes of an item of a table of prompts. Raises ValueError for bytes that are no such item."""
    if bytes(payload[: len(MAGIC)]) != MAGIC:
        raise ValueError(f"not a stored prompt: {len(payload)} bytes that begin with {bytes(payload[:8])!r}")
    try:
        fields = msgpack.unpackb(payload[len(MAGIC) :], strict_map_key=False)
        if "cursor" in fields:
            cursor = PromptCursor(**fields["cursor"])
            rows_to_load = cursor.rows - cursor.position  # `check_places` refuses a negative number
            check_places(cursor.run, cursor.rows, cursor.epoch, cursor.position, rows_to_load)
            return cursor
        check_places(fields["epoch"], fields["position"])
        prompt = Prompt.unpacked(fields["prompt"])
        return StoredPrompt(prompt=prompt, epoch=fields["epoch"], position=fields["position"])
    except Exception as error:  # any client may have written these bytes
        raise ValueError(f"a stored prompt is damaged: {type(error).__name__}: {error}") from error


def check_places(*numbers: Any) -> None:
    """Raises ValueError unless all `numbers` are integers of at least 0. They may be keys, counts or positions."""
    for number in numbers:
        is_valid = type(number) is int and number >= 0
        if not is_valid:
            raise ValueError(f"keys, numbers and places must be whole numbers from 0, not {numbers!r:.80}")


def document_of(payload: Buffer) -> dict[str, Any] | None:
    """Returns the JSON document of an item of a table of prompts; None: the bytes are no such item, or damaged."""
    try:
        item = decode_item(payload)
    except ValueError:
        return None
    if isinstance(item, PromptCursor):
        return {"cursor": vars(item)}
    prompt = item.prompt
    fields = {
        "prompt_id": prompt.prompt_id,
        "content": prompt.content,
        "row": prompt.row,
        "epoch": item.epoch,
        "position": item.position,
    }
    return {"stored_prompt": fields}
