"""Run files for tests: one that is right, and what is changed in it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import tomli_w

RUN: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6B",
    "output_dir": "runs/mine",
    "generate": {"prompts": "prompts.jsonl", "reward": "my_rewards:right"},
    "train": {"groups_per_step": 32, "max_steps": 200},
}
ABSENT = object()
"""In the place of a value: the field is taken out."""


def write_run(folder: Path, changes: Mapping[str, Any] | None = None, base: Mapping[str, Any] = RUN) -> Path:
    """Writes run.toml. `changes`: values by dotted names, like `train.max_steps`."""
    found = deepcopy(dict(base))
    for name, value in (changes or {}).items():
        *sections, field = name.split(".")
        target = found
        for section in sections:
            target = target.setdefault(section, {})
        if value is ABSENT:
            del target[field]
        else:
            target[field] = value
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(found))
    return path
