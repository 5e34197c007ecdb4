"""The generator: it completes prompts with an engine, scores the completions, and inserts them as groups."""

from replay_client.generator.config import GeneratorConfig
from replay_client.generator.generator import RolloutGenerator, run_generator
from replay_client.generator.metrics import GeneratorStats
from replay_client.generator.policy_follower import StaleWeightsError, WeightsMismatchError, WeightsNotFoundError
from replay_client.generator.prompts import PromptError
from replay_client.generator.rollouts import Rollout, RolloutError, RolloutPolicy, RolloutSequence, Task
from replay_client.generator.weights import WeightsDamagedError, WeightsNotAllowedError

__all__ = [
    "GeneratorConfig",
    "GeneratorStats",
    "PromptError",
    "Rollout",
    "RolloutError",
    "RolloutGenerator",
    "RolloutPolicy",
    "RolloutSequence",
    "StaleWeightsError",
    "Task",
    "WeightsDamagedError",
    "WeightsMismatchError",
    "WeightsNotAllowedError",
    "WeightsNotFoundError",
    "run_generator",
]
