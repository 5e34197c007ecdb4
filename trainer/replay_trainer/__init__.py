"""The GRPO trainer in PyTorch for the replay server. Each of its modules also works by itself."""

import replay_client  # noqa: F401, before `grpc` is imported
from replay_trainer.callbacks import Callback, Run, StepReport
from replay_trainer.config import GRPOConfig
from replay_trainer.correction import PRESETS, CorrectionConfig, Rejection, correct
from replay_trainer.evaluation import TableEvaluation
from replay_trainer.grpo import GRPOTrainer
from replay_trainer.losses import LossConfig, policy_loss
from replay_trainer.padded import PaddedBatch, from_padded, to_padded
from replay_trainer.replacement import ZeroVarianceReplacer

__all__ = [
    "PRESETS",
    "Callback",
    "CorrectionConfig",
    "GRPOConfig",
    "GRPOTrainer",
    "LossConfig",
    "PaddedBatch",
    "Rejection",
    "Run",
    "StepReport",
    "TableEvaluation",
    "ZeroVarianceReplacer",
    "correct",
    "from_padded",
    "policy_loss",
    "to_padded",
]
