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
    """The tags that the groups of this prompt get.

    They are the fields of the object `tags` in the row, without null fields. Empty: the row's `tags` is no object."""

    @classmethod
    def of(cls, source: Prompt | Mapping[str, Any] | str | Sequence[Message], prompt_field: str = "prompt") -> Prompt:
        """Makes a prompt of a row with a `prompt_field`, of a text, or of a list of messages. A Prompt stays as it is.

        `prompt_field` may be a path, such as `extra_info.question`. The values of the row are converted to Python's own
        types (`plain_row`), and the messages are cleaned (`chat.clean`). The prompt's `prompt_id` is
        `row["prompt_id"]`, which must be a text or a number. If the row has no `prompt_id`, a hash of the content and
        of the row's other fields is used.

        Raises ValueError if the content is missing, empty, or neither a text nor messages. Also raises ValueError for
        values that no store can hold, such as half of a surrogate pair, for a `prompt_id` that is too long or neither
        a text nor a number, for `tools` and `chat_template_kwargs` that no template accepts, and for tags that no item
        can have.
        """
        if isinstance(source, Prompt):
            return source
        row, content, tags = _parsed(source, prompt_field)
        prompt_id = _given_id(row.get("prompt_id"))
        if not prompt_id:
            other_fields = {name: value for name, value in row.items() if name != prompt_field}
            prompt_id = _hashed_id(content, other_fields)
        return cls(prompt_id=prompt_id, content=content, row=row, tags=tags)

    def packed(self) -> bytes:
        """Packs the prompt into bytes, from which `unpacked` makes the same prompt.

        Raises PromptError if the row has a value for which msgpack has no type.
        """
        # `row` and `tags` may be mappings of other types. msgpack packs only a dict.
        fields = {**vars(self), "row": dict(self.row), "tags": dict(self.tags)}
        try:
            # msgpack calls `_packed_big_integer` for each value for which it has no type. That may raise TypeError.
            packed: bytes = msgpack.packb(fields, default=_packed_big_integer)
        except (TypeError, ValueError, OverflowError) as error:
            raise PromptError(
                f"prompt {self.prompt_id!r:.80} cannot be stored in a table: {error}; leave out the field of its row "
                "that is neither text, number, list nor object"
            ) from error
        return packed

    @classmethod
    def unpacked(cls, packed: bytes) -> Prompt:
        """Makes the prompt from bytes that `packed` returned. Raises an exception of any type for damaged bytes."""
        fields = msgpack.unpackb(packed, strict_map_key=False, ext_hook=_unpacked_big_integer)
        prompt_id = fields["prompt_id"]
        row = fields["row"]
        if not isinstance(prompt_id, str) or not isinstance(row, Mapping):
            raise ValueError(f"a prompt needs a text as its prompt_id and an object as its row, not {prompt_id!r:.80}")
        content = _checked_content("content", fields["content"])
        tags = _checked_tags(fields["tags"])
        prompt = cls(prompt_id=prompt_id, content=content, row=row, tags=tags)
        prompt.template()  # raises ValueError for arguments that no template accepts
        return prompt

    def as_chat(self, system: str | None = None) -> Prompt:
        """Returns the prompt as a chat. If the content is a text, it becomes one user message.

        `system`: the text of a system message that is put before the other messages; None: no message is added. Nothing
        is added, either, if the first message has the role `system` or `developer`.

        Raises ValueError for `tools` that no template accepts. The `tools` of a text were not checked before, because a
        text is completed without a template.
        """
        messages = self.content
        if isinstance(messages, str):
            messages = ({"role": "user", "content": messages},)
        if system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = ({"role": "system", "content": system}, *messages)
        prompt = replace(self, content=messages)
        prompt.tools()  # raises ValueError for tools that no template accepts
        return prompt

    def tools(self) -> list[Any]:
        """Returns the tools for the chat template, from the row's field `tools`. A prompt that is a text has no tools.

        Raises ValueError if the field is neither a list of tools nor the JSON of such a list.
        """
        if isinstance(self.content, str):
            return []
        return chat.tools_of(self.row.get("tools"))

    def template(self) -> dict[str, Any]:
        """Returns the row's own arguments for the chat template, from its field `chat_template_kwargs`.

        Raises ValueError if the field is neither an object nor the JSON of an object, or if it has an argument that the
        row may not set.
        """
        return chat.template_of(self.row.get("chat_template_kwargs"))

    def tokenize(self, tokenizer: Any, *, began: datetime | None = None, **template: Any) -> list[int]:
        """Returns the token ids of the prompt (P,). A chat is first rendered by the tokenizer's chat template.

        `began`: when the rollout began; None: now. `template`: arguments for the chat template. An argument in the
        row's `chat_template_kwargs` replaces the argument of the same name in `template`.

        If the last message is of the assistant, the completion continues that message. Raises PromptError if the prompt
        cannot be tokenized.
        """
        try:
            arguments = {**template, **self.template()}
            if isinstance(self.content, str):
                return chat.text_ids(tokenizer, self.content)
            rendered = chat.render(tokenizer, self.content, self.tools(), arguments, began)
            return chat.rendered_ids(tokenizer, rendered)
        except Exception as error:
            raise PromptError(f"prompt {self.prompt_id!r} cannot be tokenized: {error}") from error


_BIG_INTEGER = 1
"""The code of the extension type of msgpack by which a prompt stores integers of more than 64 bits."""


def _packed_big_integer(value: Any) -> msgpack.ExtType:
    """Packs an integer of more than 64 bits as an extension type, with the hexadecimal digits of the integer as data.

    msgpack calls this function for each value for which it has no type. Raises TypeError if `value` is no integer.
    """
    if not isinstance(value, int):
        name = type(value).__name__
        article = "an" if name[:1].lower() in "aeiou" else "a"
        raise TypeError(f"{article} {name} has no type there")
    hex_digits = b"%x" % value
    return msgpack.ExtType(_BIG_INTEGER, hex_digits)


def _unpacked_big_integer(code: int, data: bytes) -> int:
    """Returns the integer that `_packed_big_integer` has packed. Raises ValueError for any other extension type."""
    if code != _BIG_INTEGER:
        raise ValueError(f"a prompt has no extension {code}")
    return int(data, 16)


def _parsed(
    source: Mapping[str, Any] | str | Sequence[Message], prompt_field: str
) -> tuple[dict[str, Any], str | tuple[Message, ...], dict[str, TagValue]]:
    """Returns the row, the content and the tags of the prompt in `source`. Raises ValueError if it is no prompt."""
    if hasattr(source, "to_dict"):  # a row of pandas
        source = source.to_dict()
    if not isinstance(source, Mapping):  # a text or messages, which become a row with one field
        source = {prompt_field: source}
    row = plain_row(source)
    try:
        value = field_of(row, prompt_field)
    except KeyError as error:
        raise ValueError(
            f"a row needs the field {prompt_field!r}; {error.args[0]}: name one of them with --prompt-field "
            "(prompt_field)"
        ) from None
    content = _checked_content(prompt_field, value)
    # The results of these two calls are not needed here. The calls raise ValueError if the row has a bad field.
    _given_id(row.get("prompt_id"))
    _check_template_fields(content, row)
    tags = _checked_tags(row.get("tags"))
    return row, content, tags


def _check_template_fields(content: str | tuple[Message, ...], row: Mapping[str, Any]) -> None:
    """Raises ValueError if the row has `tools` or `chat_template_kwargs` that no template accepts."""
    prompt = Prompt(prompt_id="", content=content, row=row)
    prompt.tools()
    prompt.template()


def _given_id(prompt_id: Any) -> str:
    """Returns the value of a row's `prompt_id` as a text; "": the row has no `prompt_id`.

    Raises ValueError if the value is neither a text nor a number, or if it is too long.
    """
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


def _checked_tags(value: Any) -> dict[str, TagValue]:
    """Returns the tags in the value of a row's field `tags`. Raises ValueError for tags that no item can have.

    If the value is no object, returns no tags and raises no error, because such a field has another meaning in the
    user's data. For example, it may be a list of keywords.
    """
    if not isinstance(value, Mapping):
        return {}
    # In a data set, this object has each field that the `tags` of any row have. Those that this row lacks are null.
    present = {name: tag for name, tag in value.items() if tag is not None}
    return labels_of(columns=(), tags=present).tags


def _checked_content(name: str, value: Any) -> str | tuple[Message, ...]:
    """Returns the content of a prompt: a text as it is, or cleaned messages.

    `name`: the name of the field that has this `value`, for errors. Raises ValueError for a value that is no content.
    """
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value:
        try:
            messages = chat.clean(value)
            # Raises ChatError if the last message is of the assistant, and the policy cannot continue this message.
            chat.check_words(messages)
            for function in chat.functions_of(messages):
                chat.arguments_of(function)  # raises ChatError for arguments that are no object
        except chat.ChatError as error:
            raise ValueError(f"{name!r}: {error}") from error
        return tuple(messages)
    raise ValueError(f"{name!r} must be a text or a list of messages that is not empty, not {value!r:.200}")


def _hashed_id(content: str | tuple[Message, ...], other_fields: Mapping[str, Any]) -> str:
    """Returns the `prompt_id` for a prompt whose row has none: a hash of its content and of the row's other fields.

    The other fields are hashed, too, because two rows may have the same question and different answers. Null fields and
    values of unknown types are left out (`json_of`), so that a row gets the same `prompt_id` from a file of any format.
    """
    text = content if isinstance(content, str) else json_of(content)
    other_json = json_of(other_fields)
    if other_json != "{}":
        text = f"{text}\0{other_json}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read_prompts(path: str | os.PathLike[str], prompt_field: str = "prompt") -> list[Prompt]:
    """Reads all prompts of one file. The module `prompts/files.py` lists the formats of files.

    Raises ValueError, which names the file, if the file has no prompts. If a row is no prompt, raises ValueError, which
    names the file and the row. Also raises the errors of `file_rows`.
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
    """Opens the prompts of a file, of a folder, or of a data set. docs/how-to/data.md lists the forms of `source`.

    This call reads all rows of files. The rows of a data set are read later, one by one, when their prompts are needed.

    With `check`, this call raises ValueError for a row of a file that is no prompt. Without `check`, and for a data
    set, such a row raises PromptError when its prompt is needed. Also raises ValueError if there are no prompts,
    OSError if the source does not exist or cannot be read, and ImportError if a package is missing.
    """
    rows = open_rows(source, split=split, template_columns=_template_columns(prompt_field))
    first_column = _first_column(prompt_field)
    if rows.columns is not None and prompt_field not in rows.columns and first_column not in rows.columns:
        raise ValueError(f"{source} has no column {prompt_field!r}, only {', '.join(rows.columns)}: see --prompt-field")
    loaded = LoadedPrompts(rows, prompt_field)
    if check and rows.in_memory:
        loaded.check()
    return loaded


def _template_columns(prompt_field: str) -> list[str]:
    """The columns from which a chat template gets values."""
    columns = [prompt_field, _first_column(prompt_field), "tools", "chat_template_kwargs"]
    return list(dict.fromkeys(columns))  # without duplicates


def _first_column(prompt_field: str) -> str:
    """The column in which the path `prompt_field` begins: `extra_info` for `extra_info.question`."""
    name, _, _ = prompt_field.partition(".")
    return name


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
        """Makes the prompt of a row. Raises PromptError, which names file and row, if the row is no prompt."""
        return prompt_at(self._rows, index, self._prompt_field)

    def place(self, index: int) -> str:
        """The name of a row in errors: its file and its number."""
        return self._rows.place(index)

    def check(self) -> None:
        """Checks all rows. Raises ValueError, which names file and row, for the first row that is no prompt."""
        for index, row in enumerate(self._rows.each()):
            try:
                if isinstance(row, ValueError):  # `each` yields the error in place of a row that cannot be read
                    raise row
                _parsed(row, self._prompt_field)  # raises ValueError if the row is no prompt
            except ValueError as error:
                raise ValueError(_with_place(self._rows, index, error)) from error


def prompt_rows(rows: PromptRows, prompt_field: str = "prompt") -> PromptRows:
    """Makes the rows of a list, a data set, a table of pyarrow, or a DataFrame readable by number.

    Raises ValueError for a data set from which no split was chosen.
    """
    numbered: PromptRows = numbered_rows(rows, _template_columns(prompt_field))
    return numbered


def rows_in_turn(rows: Any) -> Iterable[Any]:
    """Returns an iterable over rows of any form, such as a list, a data set or a streamed data set.

    The rows of a `datasets` or pyarrow data set that can be read by number become Prompts, so that their errors name
    the row. Lists, DataFrames and other iterables give their rows as they are. Raises the errors of `prompt_rows`.
    """
    template_columns = _template_columns("prompt")
    converted = numbered_rows(rows, template_columns)
    if is_of_arrow(converted):  # a streamed data set, which `numbered_rows` returns unchanged

        def streamed_row(row: Any, number: int) -> dict[str, Any]:
            """Reads one row. Raises PromptError, which names the row, if the row cannot be read."""
            try:
                return row_of_arrow(row, template_columns)
            except ValueError as error:
                raise PromptError(f"row {number} of the streamed data set: {error}") from error

        # A generator function would end at the first PromptError. `map` continues with the next row.
        return map(streamed_row, converted, itertools.count(1))
    if isinstance(converted, ArrowRows):
        prompt_of = partial(prompt_at, converted)
        return map(prompt_of, range(len(converted)))
    return cast("Iterable[Any]", converted)


def prompt_at(rows: PromptRows, index: int, prompt_field: str = "prompt") -> Prompt:
    """Makes the prompt of a row. Raises PromptError, which names the row, if the row is no prompt."""
    row_index = int(index)  # `index` may be an integer of NumPy
    try:
        return Prompt.of(rows[row_index], prompt_field)
    except ValueError as error:
        raise PromptError(_with_place(rows, row_index, error)) from error


def _with_place(rows: PromptRows, index: int, error: Exception) -> str:
    """Puts the name of a row before the message of an error, unless the message already begins with that name."""
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
    """Makes the prompt of `source`, and tokenizes it. Returns the prompt and its token ids (P,).

    `engine`: only its tokenizer and its limits are used. `template`: arguments of the chat template. `began`: when the
    group of the prompt began; None: now. Raises PromptError if `source` is no prompt, if it cannot be tokenized, or if
    the engine cannot continue its tokens.
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
    """The prompts of rows. Each prompt is made only when it is needed, so that a run need not read all rows first."""

    def __init__(
        self, rows: PromptRows, prompt_field: str = "prompt", system: str | None = None, *, chat: bool = False
    ) -> None:
        """`chat`: makes each prompt a chat, with `system` as its system message (`Prompt.as_chat`).

        Without `chat`, `system` has no effect.
        """
        self._rows = prompt_rows(rows, prompt_field)
        self._prompt_field = prompt_field
        self._chat = chat
        self._system = system

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        """Makes the prompt of a row. Raises PromptError, which names the row, if the row is no prompt."""
        prompt = prompt_at(self._rows, index, self._prompt_field)
        if not self._chat:
            return prompt
        try:
            return prompt.as_chat(self._system)
        except ValueError as error:
            raise PromptError(_with_place(self._rows, int(index), error)) from error

    def place(self, index: int) -> str:
        """The name of a row in errors."""
        return place_of(self._rows, index)

    def check(self) -> None:
        """Checks all rows. Raises PromptError or ValueError for the first row that is no prompt."""
        if isinstance(self._rows, LoadedPrompts) and not self._chat:
            self._rows.check()  # faster than the loop below, because it converts many rows of a file at once
            return
        for index in range(len(self)):
            self[index]  # raises PromptError for a row that is no prompt


def cycle_prompts(
    rows: PromptRows, *, seed: int = 0, epochs: int | None = None, prompt_field: str = "prompt"
) -> Iterator[Prompt]:
    """Yields the prompt of every row once in each epoch, in an order that depends on `seed` and on the epoch.

    `epochs`: the number of epochs; None: the prompts never end. A row is read only when its prompt is needed, so that a
    run need not read all rows of a large data set first.

    Raises ValueError if there are no rows. If a row is no prompt, `next` raises PromptError. The call of `next` after
    that continues with the next row.
    """
    if not len(rows):
        raise ValueError(f"there are no prompts to cycle through: rows is empty, {rows!r:.80}")
    numbered = prompt_rows(rows, prompt_field)
    epoch_numbers: Iterable[int] = itertools.count() if epochs is None else range(epochs)
    # The order of an epoch is computed only when the epoch begins, because this is a generator expression.
    orders = (epoch_order(len(rows), seed, epoch) for epoch in epoch_numbers)
    indices = itertools.chain.from_iterable(orders)

    def prompt_of(index: int) -> Prompt:
        return prompt_at(numbered, index, prompt_field)

    # A generator function would end at the first PromptError. `map` continues with the next row.
    return map(prompt_of, indices)


def epoch_order(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Returns the indices of `count` rows in the order of this epoch (count,). Each index is in it once.

    For a million rows, the call takes about 20 ms.
    """
    entropy = list(f"{seed}/{epoch}".encode())  # numpy accepts a list of whole numbers as a seed
    return np.random.default_rng(entropy).permutation(count)
