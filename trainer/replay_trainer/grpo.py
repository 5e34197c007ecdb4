"""GRPOTrainer: the training loop from rollout groups to published weights, on one device."""

from __future__ import annotations

import copy
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from replay_client.scoring import is_zero_variance
from replay_trainer.batching import Batch, chosen_logprobs, micro_batches, to_batch
from replay_trainer.correction import CorrectionConfig, Rejection, correct
from replay_trainer.losses import LossType, kl_loss, loss_normalizer, policy_loss
from replay_trainer.replacement import OnEmpty, ZeroVarianceReplacer
from replay_trainer.weights import load_published, publish_weights, published, version_of

if TYPE_CHECKING:
    from replay_client import ReplayClient, Sample

Metrics = dict[str, float]
"""What one step reports: step, policy_version, fresh/*, replay/*, train/*, correction/*, time/* (seconds)."""


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """What GRPOTrainer may be told; names as in TRL where the meaning is TRL's. Bad values: ValueError."""

    output_dir: str | Path
    """Where weights (step-N) and metrics.jsonl go."""
    resume: bool = False
    """Continue at the last version published in output_dir, if there is one."""
    max_steps: int = 500
    """Updates of the policy, those before a resume included."""

    rollouts_table: str = "rollouts"
    """Table that fresh groups are taken from."""
    replay_table: str = "replay"
    """Table that zero-variance groups are replaced from."""
    groups_per_step: int = 16
    """Groups one step trains on."""
    prefetch: int = 1
    """Batches of groups drawn ahead while a step computes."""
    sample_timeout: float | None = 300.0
    """Seconds to wait for a batch of fresh groups, and for the pool with on_empty="wait"; None: for ever."""
    on_empty: OnEmpty = "keep"
    """What becomes of a zero-variance group when the pool has no replacement: see ZeroVarianceReplacer."""

    learning_rate: float = 1e-6
    """Of AdamW; constant."""
    weight_decay: float = 0.0
    """Of AdamW."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    num_iterations: int = 1
    """Updates on each batch (μ of the GRPO paper), all of them one step and one policy version."""
    micro_batch_size: int = 32
    """Completions in one forward and backward; bounds memory and does not change the gradient."""

    loss_type: LossType = "dapo"
    """See replay_trainer.losses."""
    epsilon: float = 0.2
    """The ratio is clipped below 1 - epsilon."""
    epsilon_high: float | None = None
    """The ratio is clipped above 1 + epsilon_high (DAPO: 0.28); None: epsilon. For cispo the cap itself."""
    beta: float = 0.0
    """Weight of the KL to the model as it was handed over; above 0, a copy of that model is kept."""
    max_completion_length: int | None = None
    """The generator's limit in tokens; dr_grpo divides by it."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Off-policy correction, of fresh and replayed groups alike."""

    publish_every: int = 1
    """Steps from one publication of weights to the next; the last step always publishes."""
    keep_weights: int = 3
    """Published versions to keep; a generator may still be reading the one before the newest."""
    seed: int = 0
    """Of torch's random numbers."""
    device: str = "auto"
    """A torch device; auto: cuda where there is one, else cpu."""

    def __post_init__(self) -> None:
        least = {
            "max_steps": 1,
            "groups_per_step": 1,
            "prefetch": 0,
            "num_iterations": 1,
            "micro_batch_size": 1,
            "publish_every": 1,
            "keep_weights": 2,
            "learning_rate": 0,
            "weight_decay": 0,
            "beta": 0,
            "epsilon": 0,
        }
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise ValueError(f"{name} must be at least {bound}, not {getattr(self, name)}")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be above 0 (inf: no scaling), not {self.max_grad_norm}")
        if self.loss_type not in get_args(LossType):
            raise ValueError(f"loss_type must be one of {', '.join(get_args(LossType))}, not {self.loss_type!r}")
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ValueError("loss_type='cispo' needs epsilon_high, the cap of the ratio itself, such as 5.0")
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError("loss_type='dr_grpo' needs max_completion_length, the generator's limit in tokens")


def config_from(options: Mapping[str, Any]) -> GRPOConfig:
    """A GRPOConfig from plain data, such as a TOML file's: `correction` and its `rejection` are tables of their own.

    Raises ValueError for names that do not exist, with those that do.
    """
    values = dict(options)
    if isinstance(correction := values.get("correction"), Mapping):
        nested = dict(correction)
        if isinstance(rejection := nested.get("rejection"), Mapping):
            nested["rejection"] = _from_options(Rejection, rejection)
        values["correction"] = _from_options(CorrectionConfig, nested)
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


class GRPOTrainer:
    """Trains `model` on the groups of a replay server and publishes each version for the generators.

    `model` is any causal language model of transformers, `tokenizer` is saved beside its weights, `on_step`
    is called with the metrics of each step. The model stays in eval mode: dropout would put a difference
    between the log-probabilities of the sampler, the old and the new policy that no correction can see.
    """

    def __init__(
        self,
        model: Any,
        client: ReplayClient,
        config: GRPOConfig,
        tokenizer: Any = None,
        on_step: Callable[[Metrics], None] | None = None,
    ) -> None:
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(auto if config.device == "auto" else config.device)
        self.model = model.to(self.device).eval()
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if config.beta > 0 else None
        self.client = client
        self.config = config
        self.tokenizer = tokenizer
        self.on_step = on_step
        self.output_dir = Path(config.output_dir)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        self.replacer = ZeroVarianceReplacer(
            client, config.replay_table, on_empty=config.on_empty, timeout=config.sample_timeout
        )

    def train(self) -> None:
        """Train up to `max_steps`.

        Raises DeadlineExceededError when no groups come in time (it says why), FloatingPointError before an
        update that is not finite, and what `_start` raises where output_dir or the server belong to another
        run.
        """
        config = self.config
        laps = Laps()
        version = self._start()
        run = secrets.token_hex(8)  # a step that is done again after a resume may get the same groups again
        laps.lap("publish")
        with self.client.sampler(
            config.rollouts_table,
            batch_size=config.groups_per_step,
            prefetch=config.prefetch,
            timeout=config.sample_timeout,
        ) as fresh_batches:
            for step in range(version + 1, config.max_steps + 1):
                fresh = next(fresh_batches)
                laps.lap("sample")
                replacement = self.replacer.replace(fresh, scope=f"{run}/step-{step}")
                laps.lap("replace")
                batch = to_batch(replacement.groups, self.device)

                # The old policy is the one before this step's first update. Its log-probabilities come out of
                # the first pass over the batch; only where each weight depends on all they take one of their own.
                old_BT = self._logprobs(batch) if config.correction.batch_normalize else None
                for _ in range(config.num_iterations):
                    old_BT, loss, loss_metrics = self._backward(batch, old_BT)
                    grad_norm = self._update(step, loss)
                assert old_BT is not None
                correction = correct(old_BT, batch.rollout_logprobs_BT, batch.mask_BT, config.correction)
                laps.lap("update")

                metrics: Metrics = {
                    "step": step,
                    "policy_version": step,
                    **_prefixed("fresh", describe_groups(fresh)),
                    **_prefixed("replay", replacement.stats),
                    **_prefixed("train", describe_groups(replacement.samples)),
                    "train/rows": batch.num_rows,
                    "train/tokens": int(batch.mask_BT.sum()),
                    "train/loss": loss,
                    "train/grad_norm": grad_norm,
                    "train/learning_rate": config.learning_rate,
                    **_prefixed("train", loss_metrics),
                    **_prefixed("correction", correction.metrics),
                    **_prefixed("time", laps.take()),
                }
                metrics["train/tokens_per_second"] = metrics["train/tokens"] / metrics["time/step"]
                # Before publishing: a resume drops lines beyond the published version, and misses none.
                append_line(self.output_dir / "metrics.jsonl", metrics)
                if self.on_step is not None:
                    self.on_step(metrics)
                if step % config.publish_every == 0 or step == config.max_steps:
                    self._publish(step)
                laps.lap("publish")

    def _start(self) -> int:
        """The version to continue from, announced to the server: the last one published here, or a new 0.

        Raises FileExistsError if output_dir holds another run's results, RuntimeError if the server is ahead
        of us.
        """
        metrics_path = self.output_dir / "metrics.jsonl"
        folders = published(self.output_dir)
        folder = folders[-1] if folders and self.config.resume else None
        if folder is None and (folders or metrics_path.exists()):
            remedy = "move it away" if self.config.resume else "set resume=True to continue that run"
            raise FileExistsError(
                f"{self.output_dir} holds {(folders or [metrics_path])[-1].name} of an earlier run: {remedy}, or "
                f"choose another output_dir"
            )
        version = 0 if folder is None else version_of(folder)
        served = self.client.policy().version
        if served > version:
            raise RuntimeError(
                f"the server is at policy version {served}, this run at {version}: set resume=True with the "
                f"output_dir of the run that published {served}, or start the server afresh"
            )
        if folder is None:
            torch.manual_seed(self.config.seed)
            self._publish(0)
        else:
            load_published(folder, self.model, self.optimizer)
            truncate_metrics(metrics_path, version)
            # rollback: what the killed trainer had taken beyond this version will not be trained on.
            self.client.set_policy_version(version, weights=str(folder), rollback=True)
        return version

    def _publish(self, version: int) -> None:
        folder = publish_weights(
            self.model, self.tokenizer, self.output_dir, version, self.config.keep_weights, self.optimizer
        )
        self.client.set_policy_version(version, weights=str(folder))

    @torch.no_grad()
    def _logprobs(self, batch: Batch) -> Tensor:
        """(B, T) log-probabilities of the batch under the current weights."""
        logprobs_BT = torch.zeros_like(batch.rollout_logprobs_BT)
        for rows, micro in micro_batches(batch, self.config.micro_batch_size):
            logprobs_BT[rows, : micro.mask_BT.shape[1]] = chosen_logprobs(self.model, micro)
        return logprobs_BT

    def _backward(self, batch: Batch, old_BT: Tensor | None) -> tuple[Tensor, float, Metrics]:
        """Add the gradient of the whole batch; returns old log-probabilities, loss and its metrics.

        Without `old_BT` the current weights are the old ones: this very pass gives the old log-probabilities.
        """
        config = self.config
        normalizer = max(loss_normalizer(batch.mask_BT, config.loss_type), 1)
        whole = None if old_BT is None else correct(old_BT, batch.rollout_logprobs_BT, batch.mask_BT, config.correction)
        current_BT = torch.zeros_like(batch.rollout_logprobs_BT)
        total, parts = 0.0, []
        for rows, micro in micro_batches(batch, config.micro_batch_size):
            cut = (rows, slice(micro.mask_BT.shape[1]))
            logprobs_BT = chosen_logprobs(self.model, micro)
            current_BT[cut] = logprobs_BT.detach()
            if old_BT is None or whole is None:
                micro_old_BT = logprobs_BT.detach()
                correction = correct(micro_old_BT, micro.rollout_logprobs_BT, micro.mask_BT, config.correction)
                weights_BT, keep_BT = correction.weights, correction.mask
            else:
                micro_old_BT, weights_BT, keep_BT = old_BT[cut], whole.weights[cut], whole.mask[cut]
            loss, metrics = policy_loss(
                logprobs_BT,
                micro_old_BT,
                micro.advantages_B,
                micro.mask_BT,
                config.loss_type,
                config.epsilon,
                config.epsilon_high,
                weights=weights_BT,
                keep=keep_BT,
                normalizer=normalizer,
                max_completion_length=config.max_completion_length,
            )
            if self.reference is not None:
                with torch.no_grad():
                    ref_BT = chosen_logprobs(self.reference, micro)
                penalty, kl_metrics = kl_loss(
                    logprobs_BT,
                    ref_BT,
                    micro.mask_BT,
                    config.beta,
                    config.loss_type,
                    normalizer,
                    config.max_completion_length,
                )
                loss, metrics = loss + penalty, metrics | kl_metrics
            torch.autograd.backward(loss)
            total += loss.item()
            parts.append((int(micro.mask_BT.sum()), metrics))
        return (current_BT if old_BT is None else old_BT), total, _weighted_means(parts)

    def _update(self, step: int, loss: float) -> float:
        """One optimizer step with the gradient at hand; returns its norm before scaling.

        Raises FloatingPointError before any weight has changed if the loss or the norm is not finite.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"step {step}: loss {loss}, gradient norm {norm}; this update was not applied and the published "
                f"weights are intact. Look at correction/ratio_max and train/grad_norm of the steps before, and "
                f"resume with a lower learning_rate (now {self.config.learning_rate})"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


class Laps:
    """Seconds spent in each part of a step, by name."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """What passed since the last lap was spent on `name`."""
        now = time.perf_counter()
        self._seconds[name] = now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """All laps and their sum, "step"; and start afresh."""
        seconds, self._seconds = self._seconds, {}
        return {**seconds, "step": sum(seconds.values())}


def describe_groups(samples: Sequence[Sample]) -> Metrics:
    """What a batch of groups is like; NaN where it has none."""
    groups = [sample.group for sample in samples]
    rewards = [float(reward) for group in groups for reward in group.rewards]
    lengths = [int(length) for group in groups for length in group.completion_lengths]
    staleness = [sample.info.staleness for sample in samples]
    return {
        "groups": len(groups),
        "reward_mean": _mean(rewards),
        "zero_variance_fraction": _mean([float(is_zero_variance(group.rewards)) for group in groups]),
        "completion_length_mean": _mean(lengths),
        "staleness_mean": _mean(staleness),
        "staleness_max": max(staleness, default=math.nan),
        "age_mean": _mean([sample.info.age for sample in samples]),
    }


def append_line(path: Path, metrics: Metrics) -> None:
    """Add one line of JSON; what is not a finite number becomes null."""
    values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    with path.open("a") as file:
        file.write(json.dumps(values) + "\n")


def truncate_metrics(path: Path, last_step: int) -> None:
    """Drop the lines of later steps, and one that a killed process left unfinished; all or nothing."""
    if not path.exists():
        return
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    kept = path.with_name(path.name + ".tmp")
    kept.write_text("".join(line for line in lines if json.loads(line)["step"] <= last_step))
    os.replace(kept, path)


def _prefixed(prefix: str, metrics: Metrics) -> Metrics:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _weighted_means(parts: Sequence[tuple[int, Metrics]]) -> Metrics:
    """Each metric's mean over parts, weighted by their tokens; parts without tokens have nothing to say."""
    parts = [(tokens, metrics) for tokens, metrics in parts if tokens]
    total = sum(tokens for tokens, _ in parts)
    names = parts[0][1] if parts else {}
    return {name: sum(tokens * metrics[name] for tokens, metrics in parts) / total for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
