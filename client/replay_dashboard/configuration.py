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
"""Files of `output_dir/config` that are read. The file for clients is not read: it may say where secrets are."""
MOST_BYTES = 1 << 20
"""A larger file is not read."""
MOST_SHOWN = 400
"""Characters of one value, and of one name."""
MOST_SETTINGS = 1000
"""Further settings of a file are not shown."""
MOST_DEPTH = 16
"""Deeper tables within tables are not shown."""
HIDDEN = "set, not shown"
_SECRETS = ("key", "token", "secret", "password")
"""A setting whose name ends with one of these may be a secret."""
_ARGUMENTS = "environment_args"
"""The arguments of a user's environment: any of them may be a secret."""


def configuration_of(folder: Path, root: Path) -> dict[str, str]:
    """The settings of the run whose metrics are in `folder`, as JSON by dotted name: `train.learning_rate`.

    A value that may be a secret is replaced by HIDDEN.
    `replay run` writes the settings into `config` beside the trainer's folder, `replay train` into that folder itself.
    Reads nothing outside of `root`, and follows no link that leads there. What cannot be read is left out.
    """
    settings: dict[str, str] = {}
    own = _read(folder / SETTINGS_FILE, root)
    settings.update(_settings("train", own))
    for place in (folder, folder.parent):
        for part in PARTS:
            for file in sorted((place / "config").glob(f"{part}.toml")):
                settings.update(_settings(file.stem, _read(file, root)))
    return dict(sorted(settings.items()))


def _read(file: Path, root: Path) -> Any:
    try:
        target = file.resolve()
        if not target.is_relative_to(root.resolve()) or not target.is_file():
            return {}
        if target.stat().st_size > MOST_BYTES:
            return {}
        text = target.read_text(encoding="utf-8")
        return tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a link that leads to itself, or too deep a nesting
        return {}


class _Hidden:
    """Stands in the place of a secret."""


def _settings(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The settings of one file, by dotted name."""
    return islice(_flat(name, value), MOST_SETTINGS)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The values in tables and in lists of tables, by dotted name."""
    waiting: list[tuple[str, Any, int]] = [(name, value, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        name = name[:MOST_SHOWN]
        inner = _inner(name, value)
        if inner is None:
            yield name, _shown(value)
        elif depth == MOST_DEPTH:
            yield name, TOO_DEEP
        else:
            for inner_name, each in reversed(inner):
                waiting.append((inner_name, each, depth + 1))


def _inner(name: str, value: Any) -> list[tuple[str, Any]] | None:
    """The values in a table, or in a list that has tables or lists, by dotted name; None for any other value.

    In a list, a table with a `name` is called by that name, and anything else by its index.
    """
    if isinstance(value, dict):
        return [(_joined(name, key), _Hidden() if _is_secret(key, each) else each) for key, each in value.items()]
    if not isinstance(value, list) or not any(isinstance(each, dict | list) for each in value):
        return None
    inner = []
    for index, each in enumerate(value):
        called = each.get("name") if isinstance(each, dict) else None
        inner.append((f"{name}.{called if isinstance(called, str) else index}", each))
    return inner


def _shown(value: Any) -> str:
    if isinstance(value, _Hidden):
        return HIDDEN
    if isinstance(value, list):
        value = [_without_secret(each) for each in value]
    return json.dumps(value, ensure_ascii=False, default=str)[:MOST_SHOWN]


def _without_secret(value: Any) -> Any:
    """Hides the value in a text NAME=VALUE if it may be a secret, and returns anything else unchanged."""
    if not isinstance(value, str):
        return value
    name, equals, said = value.partition("=")
    return f"{name}={HIDDEN}" if equals and _is_secret(name, said) else value


def _is_secret(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return False
    return name == _ARGUMENTS or name.strip().lower().endswith(_SECRETS)


def _joined(name: str, key: str) -> str:
    """`train.train.x` is `train.x`: the files of `replay run` have a section of their part's name."""
    return name if name == key else f"{name}.{key}"
