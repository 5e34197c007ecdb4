"""GRPOConfig: what GRPOTrainer may be told, in Python or in a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from replay_trainer.correction import PRESETS, CorrectionConfig, Rejection
from replay_trainer.losses import LossConfig, LossType
from replay_trainer.replacement import OnEmpty

ZeroVariance = Literal["replace", "none", "dynamic"]
"""What becomes of groups whose rewards are all equal, so that they give no gradient.
replace: groups of the replay table take their place. none: they are trained on. dynamic: they leave, and fresh groups
are drawn until the batch is full (DAPO, arXiv 2503.14476)."""
ScaleRewards = Literal["group", "batch", "none"]
Schedule = Literal["constant", "linear", "cosine"]
Reporter = Literal["tensorboard", "wandb"]


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """What GRPOTrainer may be told; names as in TRL where the meaning is TRL's. Bad values: ValueError."""

    output_dir: str | Path
    """Where weights (step-N), metrics.jsonl and completions.jsonl go; one folder for all ranks."""
    resume: bool = False
    """Continue at the last full state saved in output_dir, if there is one."""
    max_steps: int = 500
    """Updates of the policy, those before a resume included."""

    rollouts_table: str = "rollouts"
    """Table that fresh groups are taken from."""
    replay_table: str = "replay"
    """Table that zero-variance groups are replaced from."""
    groups_per_step: int = 16
    """Groups one step trains on, of all ranks together; each rank takes its equal share."""
    prefetch: int = 1
    """Batches of groups drawn ahead while a step computes."""
    sample_timeout: float | None = 300.0
    """Seconds to wait for a batch of fresh groups, and for the pool with on_empty="wait"; None: for ever."""
    zero_variance: ZeroVariance = "replace"
    """What becomes of groups without variance: see ZeroVariance."""
    on_empty: OnEmpty = "keep"
    """With "replace", what becomes of such a group when the pool has no replacement: see ZeroVarianceReplacer."""
    max_replay_staleness: int | None = None
    """With "replace", the most policy versions a replacement may lag; None: as many as the table allows."""
    max_dynamic_batches: int = 10
    """With "dynamic", the most batches of fresh groups one step may take; then it trains on what it has. A server with
    [admission] must let in more fresh groups a step than are trained on: see there, groups_per_step."""
    update_priorities: bool = False
    """After each step, give the groups trained on new priorities in the replay table: their score times the mean of
    min(w, 1) over their tokens, so that what the correction no longer trusts sinks."""

    learning_rate: float = 1e-6
    """Of AdamW, at its highest."""
    lr_scheduler_type: Schedule = "constant"
    """How the learning rate goes on after the warm-up: to 0 at max_steps unless constant."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """Of AdamW."""
    adam_beta1: float = 0.9
    """Of AdamW."""
    adam_beta2: float = 0.999
    """Of AdamW."""
    adam_epsilon: float = 1e-8
    """Of AdamW."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; inf: never."""
    num_iterations: int = 1
    """Updates on each batch (μ of the GRPO paper), all of them one step and one policy version."""

    max_tokens_per_micro_batch: int = 16384
    """Tokens of one forward and backward; bounds memory and does not change the gradient."""
    packing: bool = True
    """Pack micro-batches into one row without padding, where the model can take it (train/packed says)."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    bf16: bool = False
    """Compute in bfloat16; weights, optimizer and log-probabilities stay in the model's own dtype and float32."""
    fsdp: bool = False
    """With several ranks, shard weights and optimizer over them (FSDP2) instead of keeping them whole on each. The
    model must still fit on each device by itself, without gradients and optimizer: it is sharded there."""

    loss_type: LossType = "dapo"
    """See replay_trainer.losses."""
    epsilon: float = 0.2
    """The ratio is clipped below 1 - epsilon."""
    epsilon_high: float | None = None
    """The ratio is clipped above 1 + epsilon_high (DAPO: 0.28); None: epsilon. For cispo the cap itself."""
    beta: float = 0.0
    """Weight of the KL to the model as it was handed over; above 0, a copy of that model is kept."""
    scale_rewards: ScaleRewards | None = None
    """Compute advantages anew from the rewards, (r - mean of the group) / (std + 1e-4), with the std of the "group" or
    of the whole "batch", or without it ("none"); None: those that the groups bring."""
    max_completion_length: int | None = None
    """The generator's limit in tokens; dr_grpo divides by it."""
    mask_truncated_completions: bool = False
    """Leave completions out of the loss that ended for their length. Their tokens count in no denominator; where that
    counts sequences, they still do, as in TRL."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Off-policy correction, of fresh and replayed groups alike. In a file, a table or the name of a preset."""

    publish_every: int = 1
    """Steps from one publication of weights to the next; the last step always publishes."""
    save_every: int = 1
    """Steps, at least, from one full state (weights, optimizer, random state) to the next. States go with publications:
    at 1, each has one. A resume starts at the last state; the first and the last publication always have one."""
    keep_weights: int = 3
    """Published versions to keep; a generator may still be reading the one before the newest."""
    checkpoint_server: bool = False
    """Have the server make a checkpoint with each full state, which remembers its name: `[checkpoints]` in the server's
    configuration says where they go and how many stay."""
    eval_every: int = 0
    """Steps from one evaluation to the next; 0: never. See GRPOTrainer's `evaluate`."""

    progress: bool = True
    """A bar on a terminal; elsewhere a line a step."""
    log_completions: bool = False
    """Write some completions of each step to completions.jsonl and, with progress, show them in a table."""
    num_completions_to_print: int = 8
    """How many, half of them from replayed groups where there are any."""
    report_to: tuple[Reporter, ...] | None = None
    """Where metrics go besides metrics.jsonl. None: to TensorBoard if it is installed, and to Weights & Biases if that
    is and WANDB_API_KEY or WANDB_MODE is set."""

    seed: int = 0
    """Of torch's random numbers."""
    device: str = "auto"
    """A torch device; auto: cuda where there is one (this rank's), else cpu."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{each.name} must be true or false, not {value!r}")
            if each.name in _LEAST and not (value is None and str(each.type).endswith("| None")):
                _check_number(each.name, value, _LEAST[each.name])
        for name in ("learning_rate", "weight_decay", "adam_epsilon", "beta", "epsilon"):
            if math.isinf(getattr(self, name)):
                raise ValueError(f"{name} must be finite, not {getattr(self, name)}")
        for name in ("adam_beta1", "adam_beta2"):
            if not getattr(self, name) < 1:
                raise ValueError(f"{name} must be below 1, not {getattr(self, name)}")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be above 0 (inf: no scaling), not {self.max_grad_norm}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                given = getattr(self, name)
                raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {given!r}")
        if isinstance(self.report_to, str):
            raise ValueError(f"report_to takes several names, such as ({self.report_to!r},), not a text")
        if unknown := set(self.report_to or ()) - set(get_args(Reporter)):
            raise ValueError(f"report_to takes {', '.join(get_args(Reporter))}, not {', '.join(map(str, unknown))}")
        if not isinstance(self.correction, CorrectionConfig):
            raise ValueError(
                f"correction must be a CorrectionConfig, such as PRESETS['icepop'](), not {self.correction!r}"
            )
        _ = self.loss  # LossConfig checks its options

    @property
    def loss(self) -> LossConfig:
        """The loss and its constants."""
        return LossConfig(self.loss_type, self.epsilon, self.epsilon_high, self.max_completion_length)

    def check_admission(self, groups_per_step: int) -> None:
        """Raises ValueError if a server with this groups_per_step in its [admission] lets in fewer fresh groups than we
        take: its generators would run out of permits, and we would wait for groups that nobody may make.
        """
        wanted, remedy = self.groups_per_step, f"{self.groups_per_step}"
        if self.zero_variance == "dynamic":
            wanted += 1
            remedy = (
                f"{self.groups_per_step} divided by the share of groups that have variance (zero_variance='dynamic' "
                f"draws until a batch is full); {self.groups_per_step * self.max_dynamic_batches} is always enough"
            )
        if groups_per_step < wanted:
            raise ValueError(
                f"the server's [admission] lets {groups_per_step} fresh groups a step be generated, and this trainer "
                f"takes {wanted} or more: it would wait for ever. Raise groups_per_step there to {remedy}"
            )

    def learning_rate_at(self, step: int) -> float:
        """Of step 1, 2, …: a function of nothing else, so that a resume has no schedule to restore."""
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        if self.lr_scheduler_type == "constant":
            return self.learning_rate
        done = (step - 1 - self.warmup_steps) / max(self.max_steps - self.warmup_steps, 1)
        factor = 1 - done if self.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * max(factor, 0.0)


_LEAST: dict[str, float] = {
    "max_steps": 1,
    "groups_per_step": 1,
    "prefetch": 0,
    "max_dynamic_batches": 1,
    "warmup_steps": 0,
    "num_iterations": 1,
    "max_tokens_per_micro_batch": 1,
    "publish_every": 1,
    "save_every": 1,
    "keep_weights": 2,
    "eval_every": 0,
    "num_completions_to_print": 1,
    "learning_rate": 0.0,
    "weight_decay": 0.0,
    "adam_beta1": 0.0,
    "adam_beta2": 0.0,
    "adam_epsilon": 0.0,
    "beta": 0.0,
    "epsilon": 0.0,
    "epsilon_high": 0.0,
    "max_grad_norm": 0.0,
    "max_completion_length": 1,
    "max_replay_staleness": 0,
    "sample_timeout": 0.0,
    "seed": 0,
}
"""Smallest values; a whole one is for whole numbers."""
_CHOICES: dict[str, tuple[Any, ...]] = {
    "zero_variance": get_args(ZeroVariance),
    "on_empty": get_args(OnEmpty),
    "lr_scheduler_type": get_args(Schedule),
    "loss_type": get_args(LossType),
    "scale_rewards": (*get_args(ScaleRewards), None),
}


def _check_number(name: str, value: object, least: float) -> None:
    whole = isinstance(least, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ValueError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}")
    if not value >= least:
        raise ValueError(f"{name} must be at least {least:g}, not {value}")


def config_from(options: Mapping[str, Any]) -> GRPOConfig:
    """A GRPOConfig from plain data, such as a TOML file's.

    `correction` is a table of its own or the name of a preset; its `rejection` is a table, or several.
    Raises ValueError for names that do not exist, with those that do.
    """
    values = dict(options)
    correction = values.get("correction")
    if isinstance(correction, str):
        if correction not in PRESETS:
            raise ValueError(f"there is no preset {correction!r} of correction; there are {', '.join(PRESETS)}")
        values["correction"] = PRESETS[correction]()
    elif isinstance(correction, Mapping):
        nested = dict(correction)
        rejection = nested.get("rejection")
        if isinstance(rejection, Mapping):
            nested["rejection"] = _from_options(Rejection, rejection)
        elif isinstance(rejection, list):
            nested["rejection"] = tuple(_from_options(Rejection, each) for each in rejection)
        values["correction"] = _from_options(CorrectionConfig, nested)
    if isinstance(values.get("report_to"), list):
        values["report_to"] = tuple(values["report_to"])
    config: GRPOConfig = _from_options(GRPOConfig, values)
    return config


def _from_options(kind: type[Any], options: Mapping[str, Any]) -> Any:
    names = [field.name for field in fields(kind)]
    if unknown := set(options) - set(names):
        raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}; it has {', '.join(names)}")
    try:
        return kind(**options)
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error
