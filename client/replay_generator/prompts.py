"""Prompts: texts or chats from a file, a data set or any iterable."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol

import msgpack
import numpy as np
import numpy.typing as npt

from replay_client.errors import ReplayError
from replay_generator import chat
from replay_generator.chat import Message
from replay_generator.row_files import Rows, file_rows, open_rows
from replay_generator.row_values import field_of, json_of, plain_row
from replay_protos.labels import TagValue, labels_of


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

        `prompt_field` may be a path: `extra_info.question`. The row gets values of Python (`plain_row`), and its
        messages are cleaned (`chat.clean`). Its `prompt_id` is `row["prompt_id"]`, or else a hash of its content and of
        the row's other fields. Raises ValueError if the content is missing, empty, or neither a text nor messages, for
        what no store can hold, such as half of a surrogate pair, for `tools` and `chat_template_kwargs` that no
        template takes, and for tags that no item can have.
        """
        if isinstance(source, Prompt):
            return source
        if hasattr(source, "to_dict"):  # a row of pandas
            source = source.to_dict()
        row = plain_row(source if isinstance(source, Mapping) else {prompt_field: source})
        try:
            value = field_of(row, prompt_field)
        except KeyError as error:
            raise ValueError(
                f"a row needs the field {prompt_field!r}; {error.args[0]}: name one of them with --prompt-field "
                "(prompt_field)"
            ) from None
        content = _content(prompt_field, value)
        prompt_id = row.get("prompt_id")
        if prompt_id is None:
            prompt_id = _id_of(content, {name: each for name, each in row.items() if name != prompt_field})
        prompt = cls(prompt_id=str(prompt_id), content=content, row=row, tags=_tags(row.get("tags")))
        prompt.tools()
        prompt.template()
        return prompt

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
        prompt = cls(prompt_id, _content("content", fields["content"]), row, _tags(fields["tags"]))
        prompt.template()
        return prompt

    def as_chat(self, system: str | None = None) -> Prompt:
        """The prompt as messages. A text becomes the user's message; `system` comes first if there is no other."""
        messages = self.content
        if isinstance(messages, str):
            messages = ({"role": "user", "content": messages},)
        if system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = ({"role": "system", "content": system}, *messages)
        return replace(self, content=messages)

    def tools(self) -> list[Any]:
        """The tools that the chat template is told: the row's `tools`. A text has none.

        Raises ValueError if the column holds anything else.
        """
        return [] if isinstance(self.content, str) else chat.tools_of(self.row.get("tools"))

    def template(self) -> dict[str, Any]:
        """The row's own arguments of the chat template: its `chat_template_kwargs`.

        Raises ValueError if the column holds anything else.
        """
        return chat.template_of(self.row.get("chat_template_kwargs"))

    def tokenize(self, tokenizer: Any, *, began: datetime | None = None, **template: Any) -> list[int]:
        """The token ids (P,). Messages go through the tokenizer's chat template, as `chat.render` tells them.

        The template gets `template`, and what the row says beside it. `began`: when the rollout began; None: now. If
        the last message is the assistant's, the completion continues it. Raises PromptError.
        """
        try:
            arguments = {**template, **self.template()}
            if isinstance(self.content, str):
                return chat.text_ids(tokenizer, self.content)
            rendered = chat.render(tokenizer, self.content, self.tools(), arguments, began)
            return chat.rendered_ids(tokenizer, rendered)
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
        try:
            messages = chat.clean(value)
            for function in chat.functions_of(messages):
                chat.arguments_of(function)
        except chat.ChatError as error:
            raise ValueError(f"{name!r}: {error}") from error
        return tuple(messages)
    raise ValueError(f"{name!r} must be a text or a list of messages that is not empty, not {value!r:.200}")


def _id_of(content: str | tuple[Message, ...], others: Mapping[str, Any]) -> str:
    """The name of a prompt that has none: a hash of its content, and of the other fields of its row.

    Two rows may ask the same and want different answers. Null fields do not count, nor do objects that JSON cannot
    have, so that a row has one name however it was stored.
    """
    text = content if isinstance(content, str) else json_of(content)
    said = json_of(others)
    if said != "{}":
        text = f"{text}\0{said}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read_prompts(path: str | os.PathLike[str], prompt_field: str = "prompt") -> list[Prompt]:
    """All prompts of one file: JSON lines, a JSON array or Parquet, perhaps packed by gzip; `row_files` says how.

    Raises ValueError that names file and row, for a row without a prompt and for a file without prompts.
    """
    rows = LoadedPrompts(file_rows(path, _told_columns(prompt_field)), prompt_field)
    if not len(rows):
        raise ValueError(f"{path} has no prompts")
    rows.check()
    return [rows[index] for index in range(len(rows))]


def load_prompts(
    source: str, *, prompt_field: str = "prompt", split: str = "train", check: bool = True
) -> LoadedPrompts:
    """Prompts of a file, of a folder, or of a data set named as on the hub: docs/how-to/data.md lists the forms.

    A data set is read row by row, as its prompts are asked for. All others are read at once; `check` says whether one
    bad row of them is an error here, or when it is asked for. Raises ValueError if there are no prompts, OSError, and
    ImportError if a package is needed and missing.
    """
    rows = open_rows(source, split=split, told=_told_columns(prompt_field))
    head = prompt_field.partition(".")[0]
    if rows.columns is not None and not {prompt_field, head}.intersection(rows.columns):
        raise ValueError(f"{source} has no column {prompt_field!r}, only {', '.join(rows.columns)}: see --prompt-field")
    loaded = LoadedPrompts(rows, prompt_field)
    if check and rows.in_memory:
        loaded.check()
    return loaded


def _told_columns(prompt_field: str) -> list[str]:
    """Columns that a chat template is told."""
    return list(dict.fromkeys([prompt_field, prompt_field.partition(".")[0], "tools", "chat_template_kwargs"]))


class LoadedPrompts:
    """The prompts of files and data sets, each made when it is asked for."""

    def __init__(self, rows: Rows, prompt_field: str) -> None:
        self._rows = rows
        self._prompt_field = prompt_field

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        """Raises PromptError that names file and row."""
        try:
            return Prompt.of(self._rows[int(index)], self._prompt_field)
        except ValueError as error:
            place = self._rows.place(int(index))
            said = str(error)
            raise PromptError(said if said.startswith(place) else f"{place}: {said}") from error

    def check(self) -> None:
        """Looks at all rows. Raises ValueError for the first that is no prompt."""
        for index in range(len(self)):
            try:
                self[index]
            except PromptError as error:
                raise ValueError(str(error)) from error


def prompt_at(rows: PromptRows, index: int, prompt_field: str = "prompt") -> Prompt:
    """The prompt of a row. Raises PromptError that names the row."""
    try:
        return Prompt.of(rows[int(index)], prompt_field)
    except ValueError as error:
        raise PromptError(f"row {index + 1} (index {index}) of the prompts: {error}") from error


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
        prompt = prompt_at(self._rows, index, self._prompt_field)
        return prompt.as_chat(self._system) if self._chat else prompt


def cycle_prompts(
    rows: PromptRows, *, seed: int = 0, epochs: int | None = None, prompt_field: str = "prompt"
) -> Iterator[Prompt]:
    """Every row once in each epoch, in an order that depends on `seed` and the epoch; `epochs` None: for ever.

    Reads the rows one by one, so a large data set starts at once. Raises ValueError if there are no rows. A row that is
    no prompt raises PromptError when its turn comes, and the next call goes on with the next row.
    """
    if not len(rows):
        raise ValueError(f"there are no prompts to cycle through: rows is empty, {rows!r}")
    orders = (epoch_order(len(rows), seed, epoch) for epoch in (itertools.count() if epochs is None else range(epochs)))

    def prompt_of(index: int) -> Prompt:
        return prompt_at(rows, index, prompt_field)

    # `map` goes on after an error, which a generator does not.
    return map(prompt_of, itertools.chain.from_iterable(orders))


def epoch_order(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of `count` rows in this epoch: each index once. A million take some 20 ms."""
    return np.random.default_rng([*f"{seed}/{epoch}".encode()]).permutation(count)


def chat_prompts(prompts: Iterable[Prompt], system: str | None = None) -> Iterator[Prompt]:
    """All prompts as chats; see `Prompt.as_chat`."""

    def as_chat(prompt: Prompt) -> Prompt:
        return prompt.as_chat(system)

    # `map` goes on after a prompt that cannot be made, which a generator does not.
    return map(as_chat, prompts)
