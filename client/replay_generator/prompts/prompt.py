"""Prompts: texts or chats from a file, a data set or any iterable."""

from __future__ import annotations

import hashlib
import itertools
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Protocol, cast

import msgpack
import numpy as np
import numpy.typing as npt

import replay_generator.prompts.chat as chat
from replay_generator.engines import Engine, why_unfit
from replay_generator.errors import PromptError
from replay_generator.prompts.chat import Message
from replay_generator.prompts.files import (
    ArrowRows,
    Rows,
    file_rows,
    is_of_arrow,
    numbered_rows,
    open_rows,
    place_of,
    row_of_arrow,
)
from replay_generator.prompts.values import field_of, json_of, plain_row
from replay_protos.labels import MOST_VALUE_BYTES, TagValue, labels_of


class PromptRows(Protocol):
    """Rows that are read by number, such as a list, or a data set of the package `datasets`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Prompt:
    """One prompt, with the row that reward functions get."""

    prompt_id: str
    """The name of the prompt, which is the same in every epoch."""
    content: str | tuple[Message, ...]
    """A text, which is completed as it is, or the messages of a chat, which the tokenizer's template renders."""
    row: Mapping[str, Any]
    """The whole row from which the prompt was made."""
    tags: Mapping[str, TagValue] = field(default_factory=dict)
    """The tags of groups of this prompt: the fields of the row's `tags`, if that is an object, without null fields."""

    @classmethod
    def of(cls, source: Prompt | Mapping[str, Any] | str | Sequence[Message], prompt_field: str = "prompt") -> Prompt:
        """Makes a prompt of a row with a `prompt_field`, of a text, or of a list of messages.

        `prompt_field` may be a path: `extra_info.question`. The values of the row are converted to Python's own types
        (`plain_row`), and the messages are cleaned (`chat.clean`). The prompt's `prompt_id` is `row["prompt_id"]`, a
        text or a number. If the row has no `prompt_id`, a hash of the content and of the row's other fields is used.

        Raises ValueError if the content is missing, empty, or neither a text nor messages. Also raises ValueError for
        values that no store can hold, such as half of a surrogate pair, for `tools` and `chat_template_kwargs` that no
        template accepts, and for tags that no item can have.
        """
        if isinstance(source, Prompt):
            return source
        row, content, tags = _parsed(source, prompt_field)
        prompt_id = _named(row.get("prompt_id"))
        if not prompt_id:
            other_fields = {name: value for name, value in row.items() if name != prompt_field}
            prompt_id = _id_of(content, other_fields)
        return cls(prompt_id=prompt_id, content=content, row=row, tags=tags)

    def packed(self) -> bytes:
        """The bytes for `unpacked`. Raises PromptError if the row has a value for which msgpack has no type."""
        fields = {**vars(self), "row": dict(self.row), "tags": dict(self.tags)}
        try:
            # msgpack calls `_packed_number` for values for which it has no type. The call may raise TypeError.
            packed: bytes = msgpack.packb(fields, default=_packed_number)
        except (TypeError, ValueError, OverflowError) as error:
            raise PromptError(
                f"prompt {self.prompt_id!r:.80} cannot be stored in a table: {error}; leave out the field of its row "
                "that is neither text, number, list nor object"
            ) from error
        return packed

    @classmethod
    def unpacked(cls, packed: bytes) -> Prompt:
        """The prompt in these bytes. Raises an error for bytes that `packed` cannot have made."""
        fields = msgpack.unpackb(packed, strict_map_key=False, ext_hook=_unpacked_number)
        prompt_id = fields["prompt_id"]
        row = fields["row"]
        if not isinstance(prompt_id, str) or not isinstance(row, Mapping):
            raise ValueError(f"a prompt needs a text as its prompt_id and an object as its row, not {prompt_id!r:.80}")
        prompt = cls(prompt_id, _content("content", fields["content"]), row, _tags(fields["tags"]))
        prompt.template()  # raises an error for arguments that no template accepts
        return prompt

    def as_chat(self, system: str | None = None) -> Prompt:
        """The prompt as messages. A text becomes a message of the user.

        `system`: the text of a message of the system, which is put first unless the first message is one already; None:
        no text. Raises ValueError for `tools` that no template accepts: they were not checked as long as the prompt was
        a text.
        """
        messages = self.content
        if isinstance(messages, str):
            messages = ({"role": "user", "content": messages},)
        if system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = ({"role": "system", "content": system}, *messages)
        prompt = replace(self, content=messages)
        prompt.tools()  # raises the ValueError
        return prompt

    def tools(self) -> list[Any]:
        """The tools for the chat template: the row's `tools`. A prompt that is a text has no tools.

        Raises ValueError if the column holds anything else.
        """
        if isinstance(self.content, str):
            return []
        return chat.tools_of(self.row.get("tools"))

    def template(self) -> dict[str, Any]:
        """The row's own arguments for the chat template: its `chat_template_kwargs`.

        Raises ValueError if the column holds anything else.
        """
        return chat.template_of(self.row.get("chat_template_kwargs"))

    def tokenize(self, tokenizer: Any, *, began: datetime | None = None, **template: Any) -> list[int]:
        """The token ids (P,). The tokenizer's chat template renders messages, by `chat.render`.

        The template gets the arguments `template`, replaced by those of the row. `began`: when the rollout began; None:
        now. If the last message is of the assistant, the completion continues that message. Raises PromptError.
        """
        try:
            arguments = {**template, **self.template()}
            if isinstance(self.content, str):
                return chat.text_ids(tokenizer, self.content)
            rendered = chat.render(tokenizer, self.content, self.tools(), arguments, began)
            return chat.rendered_ids(tokenizer, rendered)
        except Exception as error:
            raise PromptError(f"prompt {self.prompt_id!r} cannot be tokenized: {error}") from error


_NUMBER = 1
"""The code of the extension type, in msgpack, for whole numbers of more than 64 bits."""


def _packed_number(value: Any) -> msgpack.ExtType:
    """The extension for a whole number of more than 64 bits: its hexadecimal digits.

    msgpack calls this for each value for which it has no type. Raises TypeError for any other value.
    """
    if not isinstance(value, int):
        name = type(value).__name__
        article = "an" if name[:1].lower() in "aeiou" else "a"
        raise TypeError(f"{article} {name} has no type there")
    return msgpack.ExtType(_NUMBER, b"%x" % value)


def _unpacked_number(code: int, data: bytes) -> int:
    if code != _NUMBER:
        raise ValueError(f"a prompt has no extension {code}")
    return int(data, 16)


def _parsed(
    source: Mapping[str, Any] | str | Sequence[Message], prompt_field: str
) -> tuple[dict[str, Any], str | tuple[Message, ...], dict[str, TagValue]]:
    """The row, the content and the tags of a prompt. Raises ValueError for a row that is no prompt."""
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
    # Both calls only check the row: they raise ValueError.
    _named(row.get("prompt_id"))
    _check_columns(content, row)
    return row, content, _tags(row.get("tags"))


def _check_columns(content: str | tuple[Message, ...], row: Mapping[str, Any]) -> None:
    """Raises ValueError for `tools` or `chat_template_kwargs` that no template accepts."""
    prompt = Prompt("", content, row)
    prompt.tools()
    prompt.template()


def _named(prompt_id: Any) -> str:
    """The name in a row's `prompt_id`; "": the row has none. Raises ValueError for a value that is no name."""
    if prompt_id is None:
        return ""
    if isinstance(prompt_id, float) and prompt_id.is_integer():
        prompt_id = int(prompt_id)  # if a column has nulls, pandas converts its whole numbers to floats
    if not isinstance(prompt_id, str | int | float):
        raise ValueError(f"'prompt_id' must be a text or a number, not {prompt_id!r:.80}")
    name = str(prompt_id)
    size = len(name.encode())
    if size > MOST_VALUE_BYTES:
        raise ValueError(
            f"'prompt_id' has {size} bytes, and a name has at most {MOST_VALUE_BYTES}: leave it out, and a hash of the "
            "row is its name"
        )
    return name


def _tags(column: Any) -> dict[str, TagValue]:
    """The tags in a row's `tags`; empty: the value is not an object, such as a list of keywords, and not meant as tags.

    Raises ValueError for tags that no item can have.
    """
    if not isinstance(column, Mapping):
        return {}
    # A data set has all fields in each row, with null for the fields that the row lacks.
    present = {name: value for name, value in column.items() if value is not None}
    return labels_of((), present).tags


def _content(name: str, value: Any) -> str | tuple[Message, ...]:
    """The content of a prompt. `name`: its field, for errors. Raises ValueError for a value that is no content."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value:
        try:
            messages = chat.clean(value)
            chat.check_words(messages)  # raises ChatError for words of the assistant that cannot be continued
            for function in chat.functions_of(messages):
                chat.arguments_of(function)  # raises ChatError for arguments that are no object
        except chat.ChatError as error:
            raise ValueError(f"{name!r}: {error}") from error
        return tuple(messages)
    raise ValueError(f"{name!r} must be a text or a list of messages that is not empty, not {value!r:.200}")


def _id_of(content: str | tuple[Message, ...], others: Mapping[str, Any]) -> str:
    """The name of a prompt whose row names none: a hash of its content, and of the other fields of its row.

    The other fields count, since two rows may have the same question and different answers. Null fields and objects
    without a JSON type do not count, so that a row has the same name in whatever form it is stored.
    """
    text = content if isinstance(content, str) else json_of(content)
    other_fields = json_of(others)
    if other_fields != "{}":
        text = f"{text}\0{other_fields}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read_prompts(path: str | os.PathLike[str], prompt_field: str = "prompt") -> list[Prompt]:
    """All prompts of one file: JSON lines, a JSON array or Parquet, perhaps packed by gzip; see `prompts/files.py`.

    Raises ValueError, which names the file, for a file without prompts and, with the row, for a row without a prompt.
    """
    rows = file_rows(path, _template_columns(prompt_field))
    prompts = LoadedPrompts(rows, prompt_field)
    if not len(prompts):
        raise ValueError(f"{path} has no prompts")
    prompts.check()
    return [prompts[index] for index in range(len(prompts))]


def load_prompts(
    source: str, *, prompt_field: str = "prompt", split: str = "train", check: bool = True
) -> LoadedPrompts:
    """Prompts of a file, of a folder, or of a data set named as on the hub: docs/how-to/data.md lists the forms.

    The rows of a data set are read one by one, when their prompts are needed. The rows of files are read at once. With
    `check`, a bad row of a file raises ValueError here. All other bad rows raise PromptError when they are needed.
    Raises ValueError if there are no prompts, OSError, and ImportError if a needed package is missing.
    """
    rows = open_rows(source, split=split, template_columns=_template_columns(prompt_field))
    head = prompt_field.partition(".")[0]  # if `prompt_field` is a path, the column in which the path begins
    if rows.columns is not None and prompt_field not in rows.columns and head not in rows.columns:
        raise ValueError(f"{source} has no column {prompt_field!r}, only {', '.join(rows.columns)}: see --prompt-field")
    loaded = LoadedPrompts(rows, prompt_field)
    if check and rows.in_memory:
        loaded.check()
    return loaded


def _template_columns(prompt_field: str) -> list[str]:
    """The columns from which a chat template gets values."""
    head = prompt_field.partition(".")[0]  # if `prompt_field` is a path, the column in which the path begins
    columns = [prompt_field, head, "tools", "chat_template_kwargs"]
    return list(dict.fromkeys(columns))  # without duplicates


class LoadedPrompts:
    """The prompts of files and data sets. Each prompt is made when it is needed."""

    def __init__(self, rows: Rows, prompt_field: str) -> None:
        self._rows = rows
        self._prompt_field = prompt_field

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def in_memory(self) -> bool:
        """True if it costs little to read all rows."""
        return self._rows.in_memory

    def __getitem__(self, index: int) -> Prompt:
        """The prompt of a row. Raises PromptError, which names file and row."""
        return prompt_at(self._rows, index, self._prompt_field)

    def place(self, index: int) -> str:
        """The name of a row in errors: its file and its number."""
        return self._rows.place(index)

    def check(self) -> None:
        """Checks all rows. Raises ValueError for the first row that is no prompt, and names file and row."""
        for index, row in enumerate(self._rows.each()):
            try:
                if isinstance(row, ValueError):
                    raise row
                _parsed(row, self._prompt_field)
            except ValueError as error:
                raise ValueError(_at(self._rows, index, error)) from error


def prompt_rows(rows: PromptRows, prompt_field: str = "prompt") -> PromptRows:
    """The rows of a list, a data set, a table of pyarrow, or a DataFrame, to be read by number.

    Raises ValueError for a data set from which no split was chosen.
    """
    numbered: PromptRows = numbered_rows(rows, _template_columns(prompt_field))
    return numbered


def rows_in_turn(rows: Any) -> Iterable[Any]:
    """The rows of any iterable, such as a data set or a streamed data set. Raises the errors of `prompt_rows`.

    The rows of a `datasets` or pyarrow data set that can be read by number become Prompts, so that their errors name
    the row. Lists, DataFrames and other iterables give their rows as they are.
    """
    template_columns = _template_columns("prompt")
    numbered = numbered_rows(rows, template_columns)
    if is_of_arrow(numbered):  # a streamed data set, whose rows cannot be read by number
        return map(partial(row_of_arrow, template_columns=template_columns), numbered)
    if isinstance(numbered, ArrowRows):
        return map(partial(prompt_at, numbered), range(len(numbered)))
    return cast("Iterable[Any]", numbered)


def prompt_at(rows: PromptRows, index: int, prompt_field: str = "prompt") -> Prompt:
    """The prompt of a row. Raises PromptError, which names the row."""
    try:
        return Prompt.of(rows[int(index)], prompt_field)
    except ValueError as error:
        raise PromptError(_at(rows, int(index), error)) from error


def _at(rows: PromptRows, index: int, error: Exception) -> str:
    """The message of an error, with the name of the row before it, unless the message begins with that name."""
    place = place_of(rows, index)
    message = str(error)
    if message.startswith(place):
        return message
    return f"{place}: {message}"


PromptSource = Prompt | Mapping[str, Any] | str | list[Message]
"""The values from which `Prompt.of` makes a prompt."""


def prompt_for(
    engine: Engine, source: PromptSource, template: Mapping[str, Any], began: datetime | None = None
) -> tuple[Prompt, list[int]]:
    """The prompt and its token ids (P,).

    `engine`: only its tokenizer and its limits are used. `template`: arguments of the chat template. `began`: when the
    group of the prompt began; None: now. Raises PromptError if the source is no prompt or does not fit the engine.
    """
    try:
        prompt = Prompt.of(source)
    except ValueError as error:
        raise PromptError(f"{reprlib.repr(source)} is no prompt: {error}") from error
    prompt_ids = prompt.tokenize(engine.tokenizer, began=began, **template)
    why = why_unfit(engine, prompt_ids)
    if why:
        raise PromptError(f"prompt {prompt.prompt_id!r} has {why}")
    return prompt, prompt_ids


class PreparedRows:
    """Rows as prompts. Each prompt is made only when it is needed, so that a large data set starts at once."""

    def __init__(
        self, rows: PromptRows, prompt_field: str = "prompt", system: str | None = None, *, chat: bool = False
    ) -> None:
        """`chat`: makes chats of all prompts, with `system` as their message of the system; see `Prompt.as_chat`."""
        self._rows = prompt_rows(rows, prompt_field)
        self._prompt_field = prompt_field
        self._chat = chat
        self._system = system

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        """The prompt of a row. Raises PromptError, which names the row."""
        prompt = prompt_at(self._rows, index, self._prompt_field)
        if not self._chat:
            return prompt
        try:
            return prompt.as_chat(self._system)
        except ValueError as error:
            raise PromptError(_at(self._rows, int(index), error)) from error

    def place(self, index: int) -> str:
        """The name of a row in errors."""
        return place_of(self._rows, index)

    def check(self) -> None:
        """Checks all rows. Raises PromptError or ValueError for the first row that is no prompt."""
        if isinstance(self._rows, LoadedPrompts) and not self._chat:
            self._rows.check()  # reads the rows of files in their order, which takes less time than by number
            return
        for index in range(len(self)):
            self[index]  # raises PromptError for a row that is no prompt


def cycle_prompts(
    rows: PromptRows, *, seed: int = 0, epochs: int | None = None, prompt_field: str = "prompt"
) -> Iterator[Prompt]:
    """Yields every row once in each epoch, in an order that depends on `seed` and the epoch; `epochs` None: for ever.

    Reads the rows one by one, so that a large data set starts at once. Raises ValueError if there are no rows. For a
    row that is no prompt, `next` raises PromptError. The next call of `next` continues with the next row.
    """
    if not len(rows):
        raise ValueError(f"there are no prompts to cycle through: rows is empty, {rows!r:.80}")
    numbered = prompt_rows(rows, prompt_field)
    numbers: Iterable[int] = itertools.count() if epochs is None else range(epochs)
    orders = (epoch_order(len(rows), seed, epoch) for epoch in numbers)  # each is made when its epoch begins

    def prompt_of(index: int) -> Prompt:
        return prompt_at(numbered, index, prompt_field)

    # A generator function would end at the first error. `map` continues with the next row.
    return map(prompt_of, itertools.chain.from_iterable(orders))


def epoch_order(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of `count` rows in this epoch: (count,) with each index once. A million rows take some 20 ms."""
    entropy = list(f"{seed}/{epoch}".encode())  # numpy accepts a list of whole numbers as a seed
    return np.random.default_rng(entropy).permutation(count)


def chat_prompts(prompts: Iterable[Prompt], system: str | None = None) -> Iterator[Prompt]:
    """Yields all prompts as chats; see `Prompt.as_chat`."""

    def as_chat(prompt: Prompt) -> Prompt:
        return prompt.as_chat(system)

    # A generator function would end at the first error. `map` continues with the next prompt.
    return map(as_chat, prompts)
