"""GRPOConfig: the options of GRPOTrainer, in Python or in a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from replay_client.scoring import Scale
from replay_client.settings import Count, Finite, FixedPath, Share, Whole, described, settings
from replay_client.words import counted
from replay_trainer.correction import PRESETS, CorrectionConfig

ZeroVariance = Literal["replace", "none", "dynamic"]
"""The treatment of groups that carry no gradient, because all their rewards are equal.
replace: groups of the replay table replace them. none: the step trains on them. dynamic: the step leaves them out and
draws fresh groups until it has enough (DAPO, arXiv 2503.14476)."""
OnEmpty = Literal["keep", "drop", "wait"]
"""The treatment of a zero-variance group if the pool has no replacement.
keep: train on it; it adds no gradient. drop: leave it out. wait: wait for the pool to fill."""
ReplayRollouts = Literal["all", "right"]
"""The rollouts of a group of the pool that a step trains on.
all: every rollout. right: the rollouts with an advantage above 0, each with all its sequences. The step computes
nothing for the other rollouts. The advantage of a rollout decides even if the group has token_advantages."""
Schedule = Literal["constant", "linear", "cosine"]
Reporter = Literal["tensorboard", "wandb"]
BUILT_IN_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo")


@settings()
class LossConfig:
    """The type of the loss, and its constants; `replay_trainer.losses` has the formulas.

    Raises ValueError for an unknown loss type, and if the type needs a constant that is missing.
    """

    loss_type: str = "dapo"
    """grpo, bnpo, dr_grpo, dapo, cispo or gspo: see replay_trainer.losses. Or a loss of your own, as
    "package.module:function": see replay_trainer.loss_functions."""
    epsilon: Finite = 0.2
    """The ratio is clipped below 1 - epsilon."""
    epsilon_high: Annotated[float, Field(ge=0)] | None = None
    """The ratio is clipped above 1 + epsilon_high (DAPO: 0.28). None: the value of epsilon. For cispo, epsilon_high is
    the cap of the ratio itself, to which no 1 is added."""
    max_completion_length: Count | None = None
    """The most tokens that the policy writes in one rollout, over all its turns and sequences: the generator's limit.
    Required for dr_grpo, which divides by this constant, so that the gradient of a token depends neither on the length
    of its rollout nor on how the rollout is cut into sequences."""

    def __post_init__(self) -> None:
        """Refuses an unknown loss type, and a loss type without the constant that it needs."""
        if ":" not in self.loss_type and self.loss_type not in BUILT_IN_LOSSES:
            built_in = ", ".join(map(repr, BUILT_IN_LOSSES))
            raise ValueError(f"loss_type must be {built_in} or 'package.module:function', not {self.loss_type!r}")
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ValueError("loss_type='cispo' needs epsilon_high, the cap of the ratio itself, such as 5.0")
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError("loss_type='dr_grpo' needs max_completion_length, the generator's limit in tokens")

    @property
    def clip_high(self) -> float:
        """epsilon_high, or its default."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


@dataclass(frozen=True)
class Teacher:
    """The teacher that the policy is distilled from, and its weight beside the rewards."""

    column: str
    """The column of extras with the log-probabilities of the teacher: (T,) nats, axis "token". The process of the
    teacher writes this column, by `client.extend`. No step can train on a group that lacks the column."""
    weight: float
    """The weight of log teacher - log policy in the advantage of a token; above 0."""


def _correction_of(value: Any) -> Any:
    """Makes a CorrectionConfig from the name of a preset, or from a table of a configuration file.

    Returns all other values unchanged. Pydantic then refuses each value that is no CorrectionConfig.
    """
    if isinstance(value, str):  # the name of a preset
        if value not in PRESETS:
            raise ValueError(f"there is no preset {value!r} of correction; there are {', '.join(PRESETS)}")
        return PRESETS[value]()
    if isinstance(value, Mapping):  # a table of a configuration file
        return CorrectionConfig(**value)
    return value


def _reporters_of(value: Any) -> Any:
    """Splits a comma-separated text into a tuple of names. The text "none" gives an empty tuple.

    The command line and TRL pass such a text. Returns all other values unchanged.
    """
    if not isinstance(value, str):
        return value
    if value == "none":
        return ()
    return tuple(name.strip() for name in value.split(","))


@settings(kw_only=True)
class GRPOConfig(LossConfig):
    """The options of GRPOTrainer. Raises ValueError for bad values.

    If TRL's GRPOConfig has an option with the same meaning, the option has the same name here.
    """

    output_dir: FixedPath
    """Folder for weights (step-N), metrics.jsonl and completions.jsonl; the same for all ranks."""
    resume: bool = False
    """Continue from the last training checkpoint in output_dir, if there is one."""
    max_steps: Count = 500
    """Steps of the whole run, including those before a resume."""

    rollouts_table: str = "rollouts"
    """Table that fresh groups are taken from."""
    replay_table: str = "replay"
    """Table that holds the replay pool."""
    groups_per_step: Count = 16
    """Groups that one step trains on, over all ranks; every rank takes an equal part."""
    prefetch: Whole = 1
    """Batches of groups to draw ahead while a step computes."""
    lease: Annotated[float, Field(ge=1)] = 300.0
    """Seconds after which the server takes back the groups of a trainer that has died, unless a resume requeues them
    earlier. The trainer renews the leases while it runs. It ends the lease of a group when a training checkpoint
    contains the step that used the group."""
    sample_timeout: Annotated[float, Field(ge=0)] | None = None
    """Seconds to wait for a batch of fresh groups; then the run ends. None: wait without limit, and log the reason
    every half minute. Even then the run ends if no group can come any more, that is, if two things have been true for
    ten minutes: every generator and scorer that was connected has announced its end, and the server holds nothing that
    could still become a group."""
    replay_timeout: Annotated[float, Field(ge=0)] | None = 300.0
    """With replay_on_empty="wait": seconds to wait for the pool; then the run ends. None: without limit."""
    zero_variance: ZeroVariance = "replace"
    """The treatment of groups without variance: a step replaces them from the pool (replace), trains on them (none), or
    leaves them out and draws other groups (dynamic). See ZeroVariance."""
    replay_on_empty: OnEmpty = "keep"
    """With "replace": the treatment of a zero-variance group if the pool has no replacement. See OnEmpty."""
    replay_max_staleness: Whole | None = None
    """The most policy versions that a group from the pool may lag; None: as many as the table allows."""
    max_dynamic_batches: Count = 10
    """With "dynamic": the most fresh batches that one step may take; after that it trains on the groups it has. The
    [admission] fresh_groups_per_step of the server must then be larger than the fresh groups of a step."""
    max_unusable_fraction: Share = 0.1
    """Groups that cannot be trained on (token ids beyond the vocabulary, bytes that do not decode, a loss that is not
    finite, too little memory) are left out, deleted and counted (train/groups_unusable). The run stops if more than
    this share of the last 100 groups are of this kind; 0: at the first such group."""
    max_group_tokens: Count | None = None
    """The most tokens of a group, prompt and sequences together; a larger group cannot be trained on. None: memory is
    the only limit, unless the model has an embedding for each position. Then their number is a limit, too."""
    max_length: Count | None = None
    """The most tokens of a sequence: the `max_length` of the engines, vLLM's `max_model_len`. A longer sequence cannot
    be trained on. If a model has several sets of rotary frequencies (longrope, as in Phi-3 and Phi-4-mini), this length
    also chooses among them, and trainer and engines must choose the same set. None: for such a model the length with
    which vLLM serves it by default; for other models no limit."""
    replay_share: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """The share of groups_per_step that comes from the pool, from 0 to 0.9, rounded to whole groups. The other groups
    are fresh, and zero_variance says what happens to fresh groups without variance. If the pool has fewer groups, the
    step is smaller. [admission] fresh_groups_per_step of the server counts the fresh groups alone."""
    replay_rollouts: ReplayRollouts = "all"
    """The rollouts of the groups of the pool that a step trains on: see ReplayRollouts."""
    replay_start_step: Whole = 0
    """The steps up to this one take nothing from the pool. See also min_size of the table's rate limiter."""
    replay_max_drift: Annotated[float, Field(ge=0)] | None = None
    """Leave groups of the pool out if |mean over their tokens of log(π/b)| is above this many nats, where π is the
    current policy, and b is the policy that wrote the tokens. The check costs a forward pass over these groups. None:
    leave none out."""
    update_priorities: bool = False
    """After each step, set the priorities of its groups in the replay table to their score times the mean of min(w, 1)
    over their tokens. Here w is the weight of a token in the correction. The pool then returns a group less often if
    the correction no longer trusts it."""

    learning_rate: Finite = 1e-6
    """The highest learning rate of AdamW."""
    lr_scheduler_type: Schedule = "constant"
    """The learning rate after the warm-up: constant, or falling to 0 at max_steps."""
    warmup_steps: Whole = 0
    """Steps in which the learning rate rises from 0."""
    weight_decay: Finite = 0.0
    """The weight decay of AdamW."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """β1 of AdamW."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """β2 of AdamW."""
    adam_epsilon: Finite = 1e-8
    """ε of AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm; inf: no scaling."""
    num_iterations: Count = 1
    """Updates on each batch (μ of the GRPO paper). All updates on a batch are one step and make one policy version."""

    max_tokens_per_micro_batch: Count = 16384
    """Tokens of one forward and backward pass. It bounds memory and does not change the gradient."""
    packing: bool = True
    """Pack micro-batches into one row without padding, if the model can take such rows (metric train/packed)."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    bf16: bool = False
    """Compute in bfloat16. Weights and optimizer keep the dtype of the model; log-probabilities are float32."""
    fsdp: bool = False
    """With several ranks, partition weights and optimizer over them (FSDP2). Each device must still have the memory for
    the whole model, without gradients and optimizer, because the model is partitioned on the device."""

    beta: Finite = 0.0
    """Weight of the KL to the initial model; above 0, the trainer keeps a copy of that model. With an adapter, the KL
    is to the base model without the adapter, which needs no copy."""
    scale_rewards: Scale | None = None
    """Compute advantages from the rewards: (r - mean of the group) / (std + 1e-4), with the std of the "group" or of
    the whole "batch", or without division ("none"). None: use the advantages in the groups. Groups with
    `token_advantages` keep their token advantages. The trainer refuses to scale the advantages of groups for which a
    function of yours has computed them (`advantages` of the generator)."""
    teacher_weight: Finite = 0.0
    """On-policy distillation: add this weight times (log teacher - log policy) to the advantage of each token. This
    lowers the reverse KL to the teacher, token by token. Every group then needs `teacher_column`; 0: off."""
    teacher_column: Annotated[str, Field(min_length=1)] = "teacher_logprobs"
    """With teacher_weight: the column of log-probabilities that a teacher writes, with the axis "token"."""
    mask_truncated_completions: bool = False
    """Leave rollouts that the length limit ended out of the loss. A denominator that counts tokens does not count their
    tokens. A denominator that counts rollouts still counts them, as in TRL."""
    max_token_staleness: Whole | None = None
    """The most policy versions that a token may lag behind the weights a step starts with. Older tokens are left out of
    the loss, like the tokens that `mask_truncated_completions` leaves out. A group that has only older tokens counts as
    a group without variance: `zero_variance` says what happens to it. None: tokens of any age count."""
    correction: Annotated[CorrectionConfig, BeforeValidator(_correction_of)] = field(default_factory=CorrectionConfig)
    """Off-policy correction of fresh and replayed groups. In a file: a table, or the name of a preset."""

    merge_adapter: bool = False
    """Publish the whole weights of a peft model, with the adapter added to them, for engines that take no adapters.
    Each publication then needs memory for a second copy of the model. False: publish the adapter alone."""
    weights_dir: FixedPath | None = None
    """Folder for the published weights, such as one in /dev/shm; None: output_dir. Generators must see this folder.
    Training checkpoints are also written to output_dir, after the version was announced, because a folder in memory
    does not survive a reboot."""
    publish: Literal["full", "delta"] = "full"
    """delta: write each version to weights_dir in weights_dtype, and beside it the changes since the version before,
    for generators that fetch only the changes. full: write each version in the dtype of the model."""
    weights_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """With delta: the dtype that engines compute in."""
    weights_url: Annotated[str, Field(pattern=r"^https?://.*[^/]$")] | None = None
    """The address at which `replay weights serve` serves weights_dir, such as https://trainer:7410. Generators then
    fetch the weights there, and need not see the folder."""
    publish_in_background: bool = True
    """Write and announce a version while the next step runs. False: the next step waits. Either way the trainer keeps a
    copy of the weights in host memory, and after the first training checkpoint also a copy of the optimizer state."""
    publish_every: Count = 1
    """Steps between publications of weights. The last step always publishes, and so does the step at which a stop ends
    the run."""
    save_every: Count = 1
    """Least number of steps between training checkpoints (weights, optimizer, random state). A training checkpoint is
    part of a publication. At 1, every publication contains a training checkpoint. The first and the last publication
    always contain one, and so does the publication at which a stop ends the run. A resume starts from the last training
    checkpoint, so the server keeps the fresh groups of all later steps."""
    keep_weights: Annotated[int, Field(ge=2)] = 3
    """Published versions to keep. A generator may still be reading the version before the newest."""
    checkpoint_server: bool = False
    """Let the server make a checkpoint with each training checkpoint. The training checkpoint holds the name of the
    server's checkpoint. `[checkpoints]` in the configuration of the server sets the folder and the number of server
    checkpoints."""
    eval_every: Whole = 0
    """Steps between evaluations; 0: never. See `evaluate` of GRPOTrainer."""

    progress: bool = True
    """Show a bar on a terminal; elsewhere print a line for each step."""
    log_completions: bool = False
    """Write some completions of each step to completions.jsonl and, with progress, show them in a table."""
    num_completions_to_print: Count = 8
    """The number of completions to log; half of them come from replayed groups, if there are any."""
    report_to: Annotated[tuple[Reporter, ...] | None, Field(strict=False), BeforeValidator(_reporters_of)] = None
    """The reporters that get metrics besides metrics.jsonl: a list, or a text like "wandb", "tensorboard,wandb" or
    "none". None: TensorBoard if it is installed, and Weights & Biases if it is installed and WANDB_API_KEY or
    WANDB_MODE is set. If a reporter fails, the trainer warns once and goes on."""

    seed: Whole = 0
    """Seed of torch's random numbers."""
    device: str = "auto"
    """A torch device; auto: the cuda device of this rank if there is one, else cpu."""

    def __post_init__(self) -> None:
        """Refuses settings that do not fit together. Pydantic has checked each setting by itself."""
        if self.fresh_groups_per_step < 1:
            raise ValueError(
                f"groups_per_step={self.groups_per_step} with replay_share={self.replay_share} leaves no fresh group: "
                f"raise groups_per_step or lower replay_share"
            )
        weights_dir = Path(self.weights_dir or self.output_dir)
        has_own_weights_dir = weights_dir.resolve() != Path(self.output_dir).resolve()
        if (self.publish == "delta" or self.weights_url) and not has_own_weights_dir:
            raise ValueError("publish='delta' and weights_url need a weights_dir that is not output_dir")
        LossConfig.__post_init__(self)
        if self.loss_type not in BUILT_IN_LOSSES:  # a function of the user
            if self.correction.objective == "bypass_reinforce":
                raise ValueError(
                    f"with the objective 'bypass_reinforce' the loss of a token is fixed, and loss_type="
                    f"{self.loss_type!r} would not be called: choose a built-in loss_type, or another objective"
                )
            if self.correction.clip_ratio_c is not None:
                raise ValueError(
                    f"clip_ratio_c belongs to the built-in losses, and loss_type={self.loss_type!r} would not see it: "
                    f"leave it out of the correction, and clip in your function"
                )

    def described(self) -> dict[str, str]:
        """The settings that the trainer sends to the server to describe itself (`describe`)."""
        names = (
            "rollouts_table",
            "replay_table",
            "groups_per_step",
            "fresh_groups_per_step",
            "replay_share",
            "prefetch",
            "publish_every",
            "zero_variance",
        )
        own = {name: getattr(self, name) for name in names}
        if self.scale_rewards is not None:
            own["scale_rewards"] = self.scale_rewards
        return described("trainer", own)

    @property
    def replayed_groups_per_step(self) -> int:
        """The number of groups that a step takes from the pool, over all ranks, if the pool has that many.

        It is replay_share of groups_per_step, rounded to the nearest whole number.
        """
        return math.floor(self.groups_per_step * self.replay_share + 0.5)  # a half is rounded up

    @property
    def fresh_groups_per_step(self) -> int:
        """The number of fresh groups that a step takes, over all ranks. With zero_variance="dynamic", a step may take
        more."""
        return self.groups_per_step - self.replayed_groups_per_step

    @property
    def teacher(self) -> Teacher | None:
        """The teacher to distil from; None: there is none."""
        if not self.teacher_weight:
            return None
        return Teacher(self.teacher_column, self.teacher_weight)

    def oldest_version(self, step: int) -> int | None:
        """The oldest policy version whose tokens count in this step, by `max_token_staleness`; None: all tokens
        count."""
        if self.max_token_staleness is None:
            return None
        version_at_start = step - 1
        return version_at_start - self.max_token_staleness

    def check_admission(self, admitted: int) -> None:
        """Raises ValueError if the server admits fewer fresh groups for a step than a step of this trainer takes.

        `admitted`: fresh_groups_per_step in the server's [admission]. If it is too small, the generators run out of
        permits, and the trainer waits for groups that no generator may make.
        """
        fresh = self.fresh_groups_per_step
        least = fresh
        remedy = f"{fresh}"
        if self.zero_variance == "dynamic":
            # A step draws again if a group of its first batch has no variance. So `fresh` groups are not always enough.
            least = fresh + 1
            remedy += (
                f" divided by the share of groups with variance; {fresh * self.max_dynamic_batches} is always enough"
            )
        if admitted < least:
            raise ValueError(
                f"the server's [admission] lets {counted(admitted, 'fresh group')} a step be generated, and this "
                f"trainer takes {least} or more (zero_variance={self.zero_variance!r}): it would wait for "
                f"ever. Raise fresh_groups_per_step there to {remedy}"
            )

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step. The first step is step 1.

        The learning rate depends on the number of the step alone, so a resume needs no state of a schedule.
        """
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        if self.lr_scheduler_type == "constant":
            return self.learning_rate
        # Of the steps after the warm-up, the share that was finished before this step. It is 0 for the first of them.
        done = (step - 1 - self.warmup_steps) / max(self.max_steps - self.warmup_steps, 1)
        if self.lr_scheduler_type == "linear":
            factor = 1 - done
        else:
            factor = (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * max(factor, 0.0)  # the linear factor is below 0 for a step after max_steps
