"""Environments of other packages as sources of rollouts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from replay_generator.prompts import Prompt
from replay_generator.rollouts import Rollout, RolloutPolicy, Task


class Environment(Protocol):
    """Tasks, and the hook of the generator that plays them. The hook is entered before the first rollout."""

    def prompts(self, seed: int = 0) -> Iterator[Prompt]:
        """A prompt for each task; over and over, in an order that depends on `seed`, unless the tasks have no end."""
        ...

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def __call__(self, task: Task, policy: RolloutPolicy) -> Rollout: ...


def load_environment(source: str, args: str | Mapping[str, Any] | None = None) -> Environment:
    """The environment "verifiers:NAME". `args`: its arguments, as a mapping or as JSON.

    Raises ValueError that says what is wrong: with the name, with the arguments, or with what the environment needs.
    """
    package, colon, name = source.partition(":")
    if package != "verifiers" or not (colon and name):
        raise ValueError(f"environment must be verifiers:NAME, not {source!r}")
    try:
        given = json.loads(args) if isinstance(args, str) else dict(args or {})
    except ValueError as error:
        raise ValueError(f"environment_args must be a JSON object, not {args!r:.200}: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f'environment_args must be a JSON object, like {{"agent": {{"max_turns": 4}}}}, not {given!r}')
    from replay_generator.environments.verifiers import VerifiersEnvironment

    return VerifiersEnvironment(name, given)


__all__ = ["Environment", "load_environment"]
