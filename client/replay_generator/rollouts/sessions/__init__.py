"""Sessions: rollouts of agents that ask an address which speaks the protocols of OpenAI and Anthropic."""

from __future__ import annotations

from replay_generator.config import GeneratorConfig
from replay_generator.rollouts.rollout import RolloutHook


def load_sessions(
    agent: str | None, sessions: str | None, config: GeneratorConfig, *, needs_reward: bool
) -> RolloutHook:
    """The rollout hook of an agent, or of agents elsewhere that ask an address for rollouts.

    `agent`: a command, or package.module:function; None: agents elsewhere play the rollouts. `sessions`: the address at
    which agents elsewhere ask for rollouts, as host:port. It is not used if `agent` is given. `needs_reward`: True if
    no reward function scores the rollouts, so that the agent must give a reward. Raises ValueError or OSError for an
    agent or an address that cannot be used.
    """
    from replay_generator.rollouts.sessions.agents import SessionHook, load_agent
    from replay_generator.rollouts.sessions.remote import RemoteHook

    if agent is None:
        return RemoteHook(str(sessions), config, needs_reward=needs_reward)
    return SessionHook(load_agent(agent), config, needs_reward=needs_reward)


__all__ = ["load_sessions"]
