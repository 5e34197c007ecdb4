"""Configuration: the settings of a run, as `replay run` and the trainer write them beside its metrics."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from replay_client.settings import SETTINGS_FILE
from replay_protos.state import TOO_DEEP

PARTS = ("serve", "generate*", "train")
"""The names, without `.toml`, of the files in `output_dir/config` that are read. `*` stands for any text.

client.toml is not read, because it may name files that hold secrets."""
MOST_BYTES = 1 << 20
"""A file with more bytes is not read."""
MOST_SHOWN = 400
"""Most characters of a value, and of a name, that are shown."""
MOST_SETTINGS = 1000
"""Most settings of one file that are shown."""
MOST_DEPTH = 16
"""Most levels of tables within tables that are shown."""
HIDDEN = "set, not shown"
"""The text that is shown in place of a value that may be a secret."""
_SECRET_ENDINGS = ("key", "token", "secret", "password")
"""If the name of a setting ends with one of these, its value may be a secret."""
_ARGUMENTS = "environment_args"
"""The name of the setting with the arguments of a user's environment. Any of these arguments may be a secret."""


def configuration_of(folder: Path, root: Path) -> dict[str, str]:
    """Reads the settings of the run whose metrics are in `folder`. Returns the value of each setting as JSON, by the
    dotted name of the setting, such as `train.learning_rate`.

    A value that may be a secret is replaced by HIDDEN. `replay train` writes its settings into `folder`. `replay run`
    writes the settings of all parts into a folder `config`, which is read if it is in `folder` or beside it. Nothing
    outside of `root` is read, even if a link leads there. A file that cannot be read is left out.
    """
    settings: dict[str, str] = {}
    trainer_settings = _read(folder / SETTINGS_FILE, root)
    settings.update(_settings("train", trainer_settings))
    for run_folder in (folder, folder.parent):
        for part in PARTS:
            for file in sorted((run_folder / "config").glob(f"{part}.toml")):
                settings.update(_settings(file.stem, _read(file, root)))
    return dict(sorted(settings.items()))


def _read(file: Path, root: Path) -> Any:
    """The parsed content of a file of TOML or JSON; {} if there is no such file below `root`, or it is too large or
    damaged."""
    try:
        target = file.resolve()
        if not target.is_relative_to(root.resolve()) or not target.is_file():
            return {}
        if target.stat().st_size > MOST_BYTES:
            return {}
        text = target.read_text(encoding="utf-8")
        if file.suffix == ".toml":
            return tomllib.loads(text)
        return json.loads(text)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a link that leads to itself, or too deep a nesting
        return {}


class _Hidden:
    """Stands in place of a value that may be a secret. It is shown as HIDDEN."""


def _settings(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The first MOST_SETTINGS settings of one file, as pairs of dotted name and shown value.

    `name`: the first part of all these names. `value`: the parsed content of the file.
    """
    return islice(_flat(name, value), MOST_SETTINGS)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields the values within `value` as pairs of dotted name and shown value.

    Opens tables, and lists that have tables or lists, at most MOST_DEPTH deep. The order is that of the file. A stack
    takes the place of recursion.
    """
    stack: list[tuple[str, Any, int]] = [(name, value, 0)]
    while stack:
        name, value, depth = stack.pop()
        name = name[:MOST_SHOWN]
        inner = _inner(name, value)
        if inner is None:
            yield name, _shown(value)
        elif depth == MOST_DEPTH:
            yield name, TOO_DEEP
        else:
            for inner_name, inner_value in reversed(inner):  # so that the first one is popped first
                stack.append((inner_name, inner_value, depth + 1))


def _inner(name: str, value: Any) -> list[tuple[str, Any]] | None:
    """The dotted name and the value of each entry of a table, or of a list that has tables or lists.

    None: `value` is neither of these. In a list, a table with a `name` is called by that name, and any other entry by
    its index. In a table, a value that may be a secret is replaced by a _Hidden.
    """
    inner: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        for key, setting in value.items():
            if _is_secret(key, setting):
                setting = _Hidden()
            inner.append((_joined(name, key), setting))
        return inner
    has_inner = isinstance(value, list) and any(isinstance(entry, dict | list) for entry in value)
    if not has_inner:
        return None
    for index, entry in enumerate(value):
        label = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(label, str):
            label = str(index)
        inner.append((f"{name}.{label}", entry))
    return inner


def _shown(value: Any) -> str:
    """A value as JSON, cut after MOST_SHOWN characters, and without secrets."""
    if isinstance(value, _Hidden):
        return HIDDEN
    if isinstance(value, list):
        value = [_without_secret(entry) for entry in value]
    return json.dumps(value, ensure_ascii=False, default=str)[:MOST_SHOWN]


def _without_secret(value: Any) -> Any:
    """Replaces VALUE in a text NAME=VALUE by HIDDEN if VALUE may be a secret. Returns any other value unchanged."""
    if not isinstance(value, str):
        return value
    name, equals, text = value.partition("=")
    if equals and _is_secret(name, text):
        return f"{name}={HIDDEN}"
    return value


def _is_secret(name: str, value: Any) -> bool:
    """True if the setting `name` may have a secret as its value."""
    if value is None or isinstance(value, bool):  # the setting is absent, or only on or off
        return False
    return name == _ARGUMENTS or name.strip().lower().endswith(_SECRET_ENDINGS)


def _joined(name: str, key: str) -> str:
    """The dotted name of `key` in the table `name`.

    The file train.toml of `replay run` has a section `train`, whose settings are named `train.x`, not `train.train.x`.
    """
    if name == key:
        return name
    return f"{name}.{key}"
