"""Reward functions: what a completion of a prompt is worth."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

RewardFunction = Callable[[Mapping[str, Any], str], float | Awaitable[float]]
"""Takes the prompt's row and a completion's text; may be async, and then those of a group run at the same time."""


def exact_match(row: Mapping[str, Any], completion_text: str) -> float:
    """1.0 if the completion is `row["answer"]`, 0.0 if not; white space around either does not count."""
    if "answer" not in row:
        raise ValueError(f"exact_match needs an 'answer' in each row; this one has {', '.join(sorted(row))}")
    return float(completion_text.strip() == str(row["answer"]).strip())


def load_reward(name: str) -> RewardFunction:
    """The reward function of that name: "exact_match", or any function as "package.module:function"."""
    if name == "exact_match":
        return exact_match
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"reward must be 'exact_match' or 'package.module:function', not {name!r}")
    try:
        reward: RewardFunction = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise ValueError(f"reward {name!r}: {error}") from error
    except AttributeError as error:
        raise ValueError(f"reward {name!r}: module {module_name} has no {attribute}") from error
    if not callable(reward):
        raise ValueError(f"reward {name!r} is a {type(reward).__name__}, which cannot be called")
    return reward
