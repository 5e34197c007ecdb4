"""The variants of the demo: the sections of the run file, the task, and the number of steps of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from examples.demo.picture import PANELS, TOOL_PANELS

Sections = Mapping[str, Any]
"""Sections of a run file, as `replay run` reads it."""
GROUPS_PER_STEP = 16
GROUP_SIZE = 8

SUMS: Sections = {
    "generate": {
        "reward": "exact_match",
        "group_size": GROUP_SIZE,
        "max_tokens": 6,
        "priority": "advantage",
        # No partial groups: to store such short completions would cost more than to generate them again.
        "partial_groups_table": "",
        "metrics_interval": 0.5,
    },
    "train": {
        "groups_per_step": GROUPS_PER_STEP,
        "learning_rate": 2e-4,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "loss_type": "dapo",
        "correction": {"level": "token", "action": "truncate", "clip_max": 2.0},
    },
    "serve": {
        "server": {"max_bytes": "1GB"},
        "admission": {"max_staleness": 2},
        "tables": [
            {
                "name": "rollouts",
                "rate_limiter": {"type": "queue", "max_size": 4 * GROUPS_PER_STEP},
                "max_staleness": 8,
                "forward_to": "replay",
            },
            {
                "name": "replay",
                "sampler": "prioritized",
                "remover": "min_heap",
                "seed": 0,
                "max_size": 512,
                "max_times_sampled": 4,
                "max_staleness": 20,
            },
        ],
    },
}


@dataclass(frozen=True)
class Variant:
    """The settings of one demo."""

    sections: Sections = field(default_factory=lambda: SUMS)
    """The sections of its run file."""
    task: str = "sums"
    """One of task.PROBLEMS, unless the model and the prompts are made elsewhere: see `run`."""
    panels: Mapping[str, tuple[str, str]] = field(default_factory=lambda: PANELS)
    """The panels of its picture."""
    steps: int = 150
    """Training steps, unless the user says otherwise."""
    solve_rate: float = 0.4
    """Solve rate at which the warm-up ends."""


def changed(sections: Sections, changes: Sections) -> dict[str, Any]:
    """Sections with `changes`, field by field. None as a change removes the field."""
    result = dict(sections)
    for name, change in changes.items():
        before = result.get(name)
        if change is None:
            result.pop(name, None)
        elif isinstance(before, Mapping) and isinstance(change, Mapping):
            result[name] = changed(before, change)
        else:
            result[name] = change
    return result


_TOOLS: Sections = {
    "generate": {
        "max_tokens": 12,
        "chat": True,
        "rollout": "examples.demo.tools:rollout",
        # `called` has the weight 0: it counts the calls, and does not reward them.
        "reward": ["exact_match", "examples.demo.tools:called=0"],
    },
    "train": {"learning_rate": 1.5e-4},
}
_AGENT: Sections = {
    "generate": {"rollout": None, "reward": None, "agent": "examples.demo.agent:play", "tool_parser": "hermes"},
}
DEMO = Variant()
WITH_TOOL = Variant(changed(SUMS, _TOOLS), task="tools", panels=TOOL_PANELS, steps=50, solve_rate=0.1)
WITH_AGENT = Variant(changed(WITH_TOOL.sections, _AGENT), task="tools", panels=TOOL_PANELS, steps=50, solve_rate=0.1)
TASKS: dict[str, Variant] = {"sums": DEMO, "tools": WITH_TOOL, "agent": WITH_AGENT}
"""The variants by the names that users type."""
