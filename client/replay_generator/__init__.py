"""The generator: it completes prompts with an engine, scores the completions, and inserts them as groups."""

from replay_generator.config import GeneratorConfig, ScorerConfig, StageConfig
from replay_generator.engines.weights import WeightsDamagedError, WeightsMismatchError, WeightsNotAllowedError
from replay_generator.errors import PromptError
from replay_generator.generator import RolloutGenerator, run_generator
from replay_generator.groups.inserting import Handoff
from replay_generator.metrics import GeneratorStats
from replay_generator.policy.follower import StaleWeightsError, WeightsNotFoundError
from replay_generator.rollouts.rollout import Rollout, RolloutError, RolloutPolicy, RolloutSequence, Task
from replay_generator.stages.scorer import GroupScorer, run_scorer
from replay_generator.stages.stage import run_stage

__all__ = [
    "GeneratorConfig",
    "GeneratorStats",
    "GroupScorer",
    "Handoff",
    "PromptError",
    "Rollout",
    "RolloutError",
    "RolloutGenerator",
    "RolloutPolicy",
    "RolloutSequence",
    "ScorerConfig",
    "StageConfig",
    "StaleWeightsError",
    "Task",
    "WeightsDamagedError",
    "WeightsMismatchError",
    "WeightsNotAllowedError",
    "WeightsNotFoundError",
    "run_generator",
    "run_scorer",
    "run_stage",
]
