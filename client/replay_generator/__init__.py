"""The generator: it completes prompts with an engine, scores the completions, and inserts them as groups."""

from replay_generator.config import GeneratorConfig
from replay_generator.generator import RolloutGenerator, run_generator
from replay_generator.metrics import GeneratorStats
from replay_generator.policy_follower import StaleWeightsError, WeightsNotFoundError
from replay_generator.prompts import PromptError
from replay_generator.rollouts import Rollout, RolloutError, RolloutPolicy, RolloutSequence, Task
from replay_generator.scoring.config import ScorerConfig, StageConfig
from replay_generator.scoring.groups import HandOn
from replay_generator.scoring.scorer import GroupScorer, run_scorer
from replay_generator.scoring.stage import run_stage
from replay_generator.weights import WeightsDamagedError, WeightsMismatchError, WeightsNotAllowedError

__all__ = [
    "GeneratorConfig",
    "GeneratorStats",
    "GroupScorer",
    "HandOn",
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
