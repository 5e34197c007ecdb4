"""The GRPO trainer in PyTorch for the replay server. Each of its modules also works by itself."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import replay_client  # noqa: F401, sets up gRPC, which must happen before `grpc` is imported
from replay_trainer.config import GRPOConfig, LossConfig
from replay_trainer.correction import PRESETS, CorrectionConfig, Rejection

if TYPE_CHECKING:
    from replay_trainer.batching import PaddedBatch, from_padded, to_padded
    from replay_trainer.callbacks import Callback, Forgiving, Run, StepReport, StepSpans
    from replay_trainer.correction import correct
    from replay_trainer.evaluation import PromptEvaluation, TableEvaluation
    from replay_trainer.groups import ZeroVarianceReplacer
    from replay_trainer.grpo import GRPOTrainer
    from replay_trainer.loss_functions import LossInputs, loss_function
    from replay_trainer.losses import policy_loss
    from replay_trainer.token_staleness import without_stale_tokens

__all__ = [
    "PRESETS",
    "Callback",
    "CorrectionConfig",
    "Forgiving",
    "GRPOConfig",
    "GRPOTrainer",
    "LossConfig",
    "LossInputs",
    "PaddedBatch",
    "PromptEvaluation",
    "Rejection",
    "Run",
    "StepReport",
    "StepSpans",
    "TableEvaluation",
    "ZeroVarianceReplacer",
    "correct",
    "from_padded",
    "loss_function",
    "policy_loss",
    "to_padded",
    "without_stale_tokens",
]

_MODULES = (
    "replay_trainer.correction",
    "replay_trainer.token_staleness",
    "replay_trainer.loss_functions",
    "replay_trainer.losses",
    "replay_trainer.batching",
    "replay_trainer.callbacks",
    "replay_trainer.evaluation",
    "replay_trainer.groups",
    "replay_trainer.grpo",
)
"""The modules in which `__getattr__` looks for a name, in this order."""


def __getattr__(name: str) -> Any:
    """Returns a name of `__all__` that needs torch, and imports its module. Python calls this at the first use of the
    name.

    torch and transformers take seconds to import, and a run with options that cannot work should be refused before
    that.
    """
    if name in __all__:
        missing = [package for package in ("torch", "transformers", "safetensors") if find_spec(package) is None]
        if missing:
            raise ModuleNotFoundError(
                f"replay_trainer needs {' and '.join(missing)}: install this package with its extra 'trainer', such as "
                f"pip install '.[trainer]' in a clone of the repository",
                name=missing[0],
            )
        for module in map(import_module, _MODULES):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
