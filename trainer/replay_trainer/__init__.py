"""The torch GRPO trainer on the replay server; each of its modules also works by itself."""

from replay_trainer.grpo import GRPOConfig, GRPOTrainer
from replay_trainer.replacement import ZeroVarianceReplacer

__all__ = ["GRPOConfig", "GRPOTrainer", "ZeroVarianceReplacer"]
