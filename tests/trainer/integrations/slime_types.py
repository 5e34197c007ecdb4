"""Stands in for slime's types where there is no slime: the fields that our function uses, with slime's defaults.

REPLAY_SLIME names a folder with slime's source, of 2026-08; then the tests use slime's own types, and one compares
these with them. slime needs SGLang and Megatron to train, and is on no index.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import Any


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_routed_experts: list[list[int]] | None = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None


@dataclass
class RolloutFnTrainOutput:
    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(fn: Callable[..., Any], *args: Any, evaluation: bool) -> Any:
    """The output of a rollout function of these tests, which return slime's types."""
    return fn(*args, evaluation=evaluation)


def load_function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def install() -> None:
    """Make the copy importable as slime."""
    here = sys.modules[__name__]
    contents = {
        "slime": (),
        "slime.utils": (),
        "slime.rollout": (),
        "slime.utils.types": ("Sample",),
        "slime.utils.misc": ("load_function",),
        "slime.rollout.base_types": ("RolloutFnTrainOutput", "RolloutFnEvalOutput", "call_rollout_fn"),
    }
    for name, exported in contents.items():
        module = sys.modules.setdefault(name, ModuleType(name))
        for each in exported:
            setattr(module, each, getattr(here, each))
