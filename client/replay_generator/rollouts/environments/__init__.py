"""Environments: loads environments of other packages, which make the rollouts of a generator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replay_generator.config import GeneratorConfig
    from replay_generator.rollouts.environments.verifiers import VerifiersEnvironment


def load_environment(
    source: str, args: str | Mapping[str, Any] | None = None, config: GeneratorConfig | None = None
) -> VerifiersEnvironment:
    """Loads an environment. `source`: "verifiers:NAME", with the name of an environment of the package `verifiers`.

    `args`: the arguments of the environment, as a mapping or as JSON; None: no arguments. `config`: the settings of the
    generator, of which `max_session_turns` and `max_session_bytes` bound each rollout; None: the defaults.

    Raises ValueError if the name or the arguments are wrong, or if the environment cannot be loaded.
    """
    package, _, name = source.partition(":")
    if package != "verifiers" or not name:
        raise ValueError(f"environment must be verifiers:NAME, not {source!r}")
    try:
        if isinstance(args, str):
            arguments = json.loads(args)
        else:
            arguments = dict(args or {})
    except (ValueError, RecursionError) as error:
        raise ValueError(f"environment_args must be a JSON object, not {args!r:.200}: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(
            f'environment_args must be a JSON object, like {{"agent": {{"max_turns": 4}}}}, not {arguments!r}'
        )
    # Imported only here, because `verifiers` is an optional package.
    from replay_generator.rollouts.environments.verifiers import VerifiersEnvironment

    return VerifiersEnvironment(name, arguments, config)


__all__ = ["load_environment"]
