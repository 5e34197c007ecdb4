"""Prompts: rows of a JSON lines file, a data set or any iterable, as texts or as the messages of a chat."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from replay_client.errors import ReplayError

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | ..., "content": ...}, and whatever else the chat template knows of."""


class PromptError(ReplayError):
    """A prompt cannot be completed or its completions cannot be scored; the message names it."""


class PromptRows(Protocol):
    """Rows by number: a list, or a data set of the package `datasets`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Prompt:
    """One prompt with whatever its reward function needs."""

    prompt_id: str
    """Names it across epochs."""
    content: str | tuple[Message, ...]
    """A text that is completed as it is, or the messages of a chat, to which the tokenizer's template is applied."""
    row: Mapping[str, Any]
    """The whole row, the prompt included."""

    @classmethod
    def of(cls, source: Prompt | Mapping[str, Any] | str | Sequence[Message], prompt_field: str = "prompt") -> Prompt:
        """A prompt of anything that is one: a row with a `prompt_field`, a text, a list of messages.

        It is named by `row["prompt_id"]` or else by a hash of its content. Raises ValueError if that is missing, empty
        or neither a text nor messages.
        """
        if isinstance(source, Prompt):
            return source
        row = source if isinstance(source, Mapping) else {prompt_field: source}
        if prompt_field not in row:
            raise ValueError(
                f"a row needs the field {prompt_field!r}; this one has {', '.join(map(str, row)) or 'none'}"
            )
        content = _content(prompt_field, row[prompt_field])
        prompt_id = row.get("prompt_id")
        if prompt_id is None:
            text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)
            prompt_id = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return cls(prompt_id=str(prompt_id), content=content, row=row)

    def as_chat(self, system: str | None = None) -> Prompt:
        """The prompt as messages: a text becomes the user's, and `system` comes before all where there is none."""
        messages = self.content
        if isinstance(messages, str):
            messages = ({"role": "user", "content": messages},)
        if system is not None and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": system}, *messages)
        return replace(self, content=messages)

    def tokenize(self, tokenizer: Any, **template: Any) -> list[int]:
        """Token ids; those of messages by the tokenizer's chat template, which `template` is passed to.

        Where the last message is the assistant's, its completion goes on with it. Raises PromptError.
        """
        try:
            if isinstance(self.content, str):
                return [int(token) for token in tokenizer.encode(self.content)]
            if not getattr(tokenizer, "chat_template", None):
                raise ValueError(
                    "it consists of messages, and the tokenizer has no chat template. Use the tokenizer of a chat "
                    "model, give this one a chat_template.jinja, or write the prompt as one text"
                )
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
    """All prompts of a file with one JSON object a line; empty lines do not count.

    Raises ValueError, naming file and line, for a line that holds no prompt, and for a file without any.
    """
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__} where an object with a {prompt_field!r} belongs")
            prompts.append(Prompt.of(row, prompt_field))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts


def load_prompts(source: str, *, prompt_field: str = "prompt", split: str = "train") -> PromptRows:
    """Prompts by where they are: a JSON lines file, a folder that `datasets` saved, or a data set's name on the hub.

    Raises ValueError if it holds no prompts, and ImportError where it needs the package `datasets` and that is missing.
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
        raise ValueError(f"{source} has no column {prompt_field!r}, only {', '.join(loaded.column_names)}")
    if not len(loaded):
        raise ValueError(f"{source} has no prompts")
    rows: PromptRows = loaded
    return rows


def cycle_prompts(
    rows: PromptRows, *, seed: int = 0, epochs: int | None = None, prompt_field: str = "prompt"
) -> Iterator[Prompt]:
    """Every row once an epoch, in an order that follows from `seed` and the epoch; `epochs` None: for ever.

    Rows are read as they are asked for, and their order is drawn with them, so that a large data set starts at once.
    """
    for epoch in range(epochs) if epochs is not None else itertools.count():
        draw = random.Random(f"{seed}/{epoch}")
        moved: dict[int, int] = {}  # Fisher and Yates, with only what is not in its own place written down
        for place in range(len(rows)):
            chosen = draw.randrange(place, len(rows))
            here = moved.pop(place, place)
            index = here if chosen == place else moved.get(chosen, chosen)
            if chosen != place:
                moved[chosen] = here
            yield Prompt.of(rows[index], prompt_field)


def chat_prompts(prompts: Iterable[Prompt], system: str | None = None) -> Iterator[Prompt]:
    """All of them as chats; see `Prompt.as_chat`."""
    return (prompt.as_chat(system) for prompt in prompts)
