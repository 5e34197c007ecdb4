"""The torch GRPO trainer on the replay server; each of its modules also works by itself."""

from replay_trainer.callbacks import Callback, StepReport
from replay_trainer.config import GRPOConfig
from replay_trainer.correction import CorrectionConfig, Rejection
from replay_trainer.evaluation import TableEvaluation
from replay_trainer.grpo import GRPOTrainer
from replay_trainer.presets import PRESETS
from replay_trainer.replacement import ZeroVarianceReplacer

__all__ = [
    "PRESETS",
    "Callback",
    "CorrectionConfig",
    "GRPOConfig",
    "GRPOTrainer",
    "Rejection",
    "StepReport",
    "TableEvaluation",
    "ZeroVarianceReplacer",
]
