"""Prompts: texts or chats from a JSON lines file, a data set or any iterable."""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgpack
import numpy as np
import numpy.typing as npt

from replay_client.errors import ReplayError
from replay_protos.labels import TagValue, labels_of

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | ..., "content": ...}, and any other field of the chat template."""


class PromptError(ReplayError):
    """A prompt cannot be completed, or its completions cannot be scored. The message names the prompt."""


class PromptRows(Protocol):
    """Rows by number: a list, or a data set of the package `datasets`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Prompt:
    """One prompt, with the row that its reward functions see."""

    prompt_id: str
    """The same for the same prompt in every epoch."""
    content: str | tuple[Message, ...]
    """A text, which is completed as it is, or the messages of a chat, which go through the tokenizer's template."""
    row: Mapping[str, Any]
    """The whole row with the prompt."""
    tags: Mapping[str, TagValue] = field(default_factory=dict)
    """Tags of its groups: the row's `tags`, if that is an object; those that are null are not there."""

    @classmethod
    def of(cls, source: Prompt | Mapping[str, Any] | str | Sequence[Message], prompt_field: str = "prompt") -> Prompt:
        """Makes a prompt of a row with a `prompt_field`, of a text, or of a list of messages.

        Its `prompt_id` is `row["prompt_id"]`, or else a hash of its content. Raises ValueError if the content is
        missing, empty, or neither a text nor messages, and for tags that no item can have.
        """
        if isinstance(source, Prompt):
            return source
        row = source if isinstance(source, Mapping) else {prompt_field: source}
        if prompt_field not in row:
            raise ValueError(
                f"a row needs the field {prompt_field!r}; this one has {', '.join(map(str, row)) or 'none'}: name one "
                f"of them with --prompt-field (prompt_field)"
            )
        content = _content(prompt_field, row[prompt_field])
        prompt_id = row.get("prompt_id")
        if prompt_id is None:
            text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)
            prompt_id = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return cls(prompt_id=str(prompt_id), content=content, row=row, tags=_tags(row.get("tags")))

    def packed(self) -> bytes:
        """The bytes for `unpacked`. Raises PromptError if the row has a value that msgpack has no type for."""
        fields = {**vars(self), "row": dict(self.row), "tags": dict(self.tags)}
        try:
            packed: bytes = msgpack.packb(fields)
        except (TypeError, ValueError, OverflowError) as error:
            raise PromptError(
                f"prompt {self.prompt_id!r} cannot be stored in a table: {error}; leave out the field of its row that "
                "is neither text, number, list nor object"
            ) from error
        return packed

    @classmethod
    def unpacked(cls, packed: bytes) -> Prompt:
        """Raises an error for what `packed` cannot have made."""
        fields = msgpack.unpackb(packed, strict_map_key=False)
        prompt_id, row = fields["prompt_id"], fields["row"]
        if not isinstance(prompt_id, str) or not isinstance(row, Mapping):
            raise ValueError(f"a prompt needs a text as its prompt_id and an object as its row, not {prompt_id!r:.80}")
        return cls(prompt_id, _content("content", fields["content"]), row, _tags(fields["tags"]))

    def as_chat(self, system: str | None = None) -> Prompt:
        """The prompt as messages. A text becomes the user's message; `system` comes first if there is no other."""
        messages = self.content
        if isinstance(messages, str):
            messages = ({"role": "user", "content": messages},)
        if system is not None and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": system}, *messages)
        return replace(self, content=messages)

    def tokenize(self, tokenizer: Any, **template: Any) -> list[int]:
        """The token ids (P,). Messages go through the tokenizer's chat template, which gets `template`.

        If the last message is the assistant's, the completion continues it. Raises PromptError.
        """
        try:
            if isinstance(self.content, str):
                return [int(token) for token in tokenizer.encode(self.content)]
            if not getattr(tokenizer, "chat_template", None):
                raise ValueError("it is a chat, and the tokenizer has no chat template: give it one, or write a text")
            goes_on = self.content[-1]["role"] == "assistant"
            ids = tokenizer.apply_chat_template(
                [dict(message) for message in self.content],
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
                return_dict=False,
                **template,
            )
            return [int(token) for token in ids]
        except Exception as error:
            raise PromptError(f"prompt {self.prompt_id!r} cannot be tokenized: {error}") from error


def _tags(given: Any) -> dict[str, TagValue]:
    """A data set may have a column `tags` of its own, such as lists of keywords: that is not meant for the server."""
    if not isinstance(given, Mapping):
        return {}
    # A data set has all fields in each row, and null where a row lacks one.
    return labels_of((), {name: value for name, value in given.items() if value is not None}).tags


def _content(name: str, value: Any) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value:
        for message in value:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise ValueError(f"each message of {name!r} needs a 'role' and a 'content', not {message!r}")
        return tuple(value)
    raise ValueError(f"{name!r} must be a text or a list of messages that is not empty, not {value!r}")


def read_prompts(path: str | os.PathLike[str], prompt_field: str = "prompt") -> list[Prompt]:
    """All prompts of a file in UTF-8 with one JSON object a line. Empty lines do not count, nor does a byte order mark.

    Raises ValueError that names file and line, for a line without a prompt and for a file without prompts.
    """
    prompts = []
    for number, row in json_lines(path):
        try:
            prompts.append(Prompt.of(row, prompt_field))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts


def load_prompts(source: str, *, prompt_field: str = "prompt", split: str = "train") -> PromptRows:
    """Prompts of a JSON lines file, of a folder that `datasets` saved, or of a data set named as on the hub.

    Raises ValueError if there are no prompts, and ImportError if the package `datasets` is needed and missing.
    """
    path = Path(source)
    if path.is_file() or path.suffix in (".jsonl", ".json"):
        return read_prompts(path, prompt_field)
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{source!r} is no file, and for a data set the package `datasets` is needed: pip install datasets"
        ) from error
    loaded = datasets.load_from_disk(source) if path.is_dir() else datasets.load_dataset(source)
    if isinstance(loaded, Mapping):
        if split not in loaded:
            raise ValueError(f"{source} has no split {split!r}, only {', '.join(loaded)}")
        loaded = loaded[split]
    if prompt_field not in loaded.column_names:
        raise ValueError(
            f"{source} has no column {prompt_field!r}, only {', '.join(loaded.column_names)}: see --prompt-field"
        )
    if not len(loaded):
        raise ValueError(f"{source} has no prompts")
    rows: PromptRows = loaded
    return rows


PromptSource = Prompt | Mapping[str, Any] | str | list[Message]
"""Whatever `Prompt.of` makes a prompt of."""


class PreparedRows:
    """Rows as prompts, each made when it is asked for: a large data set costs nothing before."""

    def __init__(
        self, rows: PromptRows, prompt_field: str = "prompt", system: str | None = None, *, chat: bool = False
    ) -> None:
        """`system`: the message of the system in each chat that has none."""
        self._rows = rows
        self._prompt_field = prompt_field
        self._chat, self._system = chat, system

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        prompt = Prompt.of(self._rows[index], self._prompt_field)
        return prompt.as_chat(self._system) if self._chat else prompt


def cycle_prompts(
    rows: PromptRows, *, seed: int = 0, epochs: int | None = None, prompt_field: str = "prompt"
) -> Iterator[Prompt]:
    """Every row once in each epoch, in an order that depends on `seed` and the epoch; `epochs` None: for ever.

    Reads the rows one by one, so a large data set starts at once. Raises ValueError if there are no rows.
    """
    if not len(rows):
        raise ValueError(f"there are no prompts to cycle through: rows is empty, {rows!r}")
    orders = (epoch_order(len(rows), seed, epoch) for epoch in (itertools.count() if epochs is None else range(epochs)))
    return (Prompt.of(rows[int(index)], prompt_field) for order in orders for index in order)


def epoch_order(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of `count` rows in this epoch: each index once. A million take some 20 ms."""
    return np.random.default_rng([*f"{seed}/{epoch}".encode()]).permutation(count)


def chat_prompts(prompts: Iterable[Prompt], system: str | None = None) -> Iterator[Prompt]:
    """All prompts as chats; see `Prompt.as_chat`."""
    return (prompt.as_chat(system) for prompt in prompts)


# JSON lines: the objects of a text file that has one in each line, as prompts and exported items have them.

_OTHER_FILES = (
    (b"\x1f\x8b", "a gzip file", "unpack it with gunzip"),
    (b"PK\x03\x04", "a zip file", "unpack it with unzip"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "unpack it with unzstd"),
    (b"PAR1", "a Parquet file", "write it as JSON lines or, to import items, let its name end with .parquet"),
    (codecs.BOM_UTF16_LE, "text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
    (codecs.BOM_UTF16_BE, "text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
)
"""The first bytes of files that people give by mistake. Each has the words of the error, with the remedy."""


def json_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file in UTF-8 with one JSON object a line, each with the number of its line.

    Empty lines do not count, nor does a byte order mark. Raises ValueError that names file and line, with the remedy,
    for anything else.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            for start, kind, remedy in _OTHER_FILES if number == 1 else ():
                if line.startswith(start):
                    raise ValueError(f"{path}, line 1: this is {kind}, and not lines of JSON in UTF-8: {remedy}")
            line = line if number > 1 else line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                row = json.loads(_decoded(line))
                if not isinstance(row, dict):
                    raise ValueError(f"a {type(row).__name__} where an object belongs")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            yield number, row


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte {error.start + 1}, {line[error.start : error.start + 1]!r}, is not UTF-8: if the file is in "
            "Latin-1, convert it with iconv -f ISO-8859-1 -t UTF-8"
        ) from error
