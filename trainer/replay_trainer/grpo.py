"""GRPOTrainer: the training loop from rollout groups to published weights, on one device or on many ranks."""

from __future__ import annotations

import copy
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from replay_client.rollout import RolloutGroup
from replay_client.scoring import group_advantages
from replay_trainer.alarms import Alarms
from replay_trainer.batching import Batch, Ints, micro_batches, to_batch
from replay_trainer.callbacks import Callback, Metrics, StepReport, reporters
from replay_trainer.config import GRPOConfig
from replay_trainer.correction import Moments, measure, weight_totals, weights_and_mask
from replay_trainer.description import GroupFacts, describe_groups, describe_replayed
from replay_trainer.dynamic_sampling import DynamicSampler
from replay_trainer.logprobs import LogprobModel
from replay_trainer.losses import corrected_policy_loss, kl_loss, loss_normalizer
from replay_trainer.ranks import Ranks, shard, whole
from replay_trainer.replacement import Replacement, ZeroVarianceReplacer, unreplaced
from replay_trainer.weights import (
    damaged,
    load_state,
    load_weights,
    probe_tokens,
    publish_weights,
    published,
    remove,
    saved,
    server_checkpoint_of,
    version_of,
)

if TYPE_CHECKING:
    from replay_client import ReplayClient, Sample

logger = logging.getLogger(__name__)

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class GRPOTrainer:
    """Trains `model` on the groups of a replay server and publishes each version for the generators.

    `model` is any causal language model of transformers, the same on every rank; `tokenizer` is saved beside its
    weights. `callbacks` are told of each step on the first rank. `evaluate` is called on every rank each `eval_every`
    steps, and what it returns on the first becomes eval/*: see TableEvaluation, or use `trainer.model`.

    Under torchrun each rank makes a trainer with a client of its own; `fsdp` shards the model over them.
    """

    def __init__(
        self,
        model: Any,
        client: ReplayClient,
        config: GRPOConfig,
        tokenizer: Any = None,
        callbacks: Sequence[Callback] = (),
        evaluate: Callable[[GRPOTrainer], Mapping[str, float]] | None = None,
    ) -> None:
        self.config = config
        self.ranks = Ranks(config.device)
        self.device = self.ranks.device
        self.client = client
        self.tokenizer = tokenizer
        self.evaluate = evaluate
        self.output_dir = Path(config.output_dir)
        self.groups_per_rank = self.ranks.share(config.groups_per_step, "groups_per_step")
        self.callbacks = [*reporters(config), *callbacks] if self.ranks.is_first else []

        self.model = model.to(self.device)
        self.policy = LogprobModel(self.model, config.packing, config.gradient_checkpointing)
        self.ranks.copy_from_first(self.policy)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False) if config.beta > 0 else None
        self.sharded = config.fsdp and self.ranks.size > 1
        if self.sharded:
            for module in (self.policy, self.reference):
                if module is not None:
                    shard(module, self.model._no_split_modules or (), self.device, config.bf16)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [parameter for parameter in self.policy.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.replacer = ZeroVarianceReplacer(
            client, config.replay_table, config.on_empty, config.sample_timeout, config.max_replay_staleness
        )
        self.alarms = Alarms()
        self._last_saved = -config.save_every

    def train(self) -> None:
        """Train up to `max_steps`.

        Raises DeadlineExceededError when no groups come in time (it says why), FloatingPointError before an
        update that is not finite, and what `_start` raises where output_dir or the server belong to another
        run.
        """
        config, ranks = self.config, self.ranks
        version = self._start()
        run = ranks.from_first(secrets.token_hex(8))  # a step done again after a resume may get the same groups again
        laps = Laps()
        try:
            for callback in self.callbacks:
                callback.on_start(self, version)
            with self.client.sampler(
                config.rollouts_table,
                batch_size=self.groups_per_rank,
                prefetch=config.prefetch,
                timeout=config.sample_timeout,
            ) as stream:
                fresh_batches = laps.timed("sample", stream)
                fuller_batches = DynamicSampler(fresh_batches, self.groups_per_rank, config.max_dynamic_batches)
                for step in range(version + 1, config.max_steps + 1):
                    if config.zero_variance == "replace":
                        fresh = next(fresh_batches)
                        others = [key for keys in ranks.all([sample.info.key for sample in fresh]) for key in keys]
                        taken = self.replacer.replace(fresh, scope=f"{run}/step-{step}", exclude=others)
                    elif config.zero_variance == "dynamic":
                        taken = fuller_batches.next()
                    else:
                        taken = unreplaced(next(fresh_batches))
                    laps.lap("replace")

                    batch = self._to_batch(taken.groups)
                    for group in self.optimizer.param_groups:
                        group["lr"] = config.learning_rate_at(step)
                    old_BT: Tensor | None = None
                    for _ in range(config.num_iterations):
                        old_BT, loss, loss_metrics = self._backward(batch, old_BT)
                        grad_norm = self._update(step, loss)
                    assert old_BT is not None
                    laps.lap("update")

                    metrics = self._describe(step, taken, batch, old_BT)
                    metrics |= _prefixed("train", {"loss": loss, "grad_norm": grad_norm, **loss_metrics})
                    if self.evaluate is not None and config.eval_every and step % config.eval_every == 0:
                        metrics |= _prefixed("eval", self.evaluate(self))
                        laps.lap("evaluate")
                    if config.update_priorities:
                        metrics["replay/priorities_updated"] = self._update_priorities(taken.samples, batch, old_BT)
                    metrics |= _prefixed("time", laps.take())
                    metrics["train/tokens_per_second"] = metrics["train/tokens"] / metrics["time/step"]
                    for callback in self.callbacks:
                        callback.on_step(self, StepReport(metrics, taken.samples, taken.replaced))
                    if step % config.publish_every == 0 or step == config.max_steps:
                        self._publish(step)
                    laps.lap("publish")
        finally:
            for callback in self.callbacks:
                callback.on_end(self)

    def decode(self, token_ids: Any) -> str:
        """Text of tokens; their numbers where there is no tokenizer."""
        ids = [int(token) for token in token_ids]
        return str(self.tokenizer.decode(ids)) if self.tokenizer is not None else " ".join(map(str, ids))

    # ------------------------------------------------------------------------------------------------------- a step

    def _to_batch(self, groups: Sequence[RolloutGroup]) -> Batch:
        """This rank's batch, with the advantages that `scale_rewards` asks for."""
        batch = to_batch(groups, self.device, self.config.mask_truncated_completions)
        scale = self.config.scale_rewards
        if scale is None:
            return batch
        if scale == "batch":
            # A = (r - mean of the group) / (std of all rewards of the step + 1e-4), as TRL's scale_rewards="batch".
            everyone = self.ranks.all([float(reward) for group in groups for reward in group.rewards])
            rewards = np.array([reward for rewards in everyone for reward in rewards])
            divisor = (rewards.std(ddof=1) if rewards.size > 1 else 0.0) + 1e-4
            advantages = [group_advantages(group.rewards, scale="none") / np.float32(divisor) for group in groups]
        else:
            advantages = [group_advantages(group.rewards, scale=scale) for group in groups]
        flat_B = np.concatenate([np.zeros(0, np.float32), *advantages], dtype=np.float32)
        return replace(batch, advantages_B=torch.from_numpy(flat_B).to(self.device))

    def _micro_batches(self, batch: Batch) -> list[tuple[Ints, Batch]]:
        """As micro_batches. Sharded, each rank makes as many forward passes as the busiest: they meet in each layer."""
        config = self.config
        parts = list(micro_batches(batch, config.max_tokens_per_micro_batch, packed=self.policy.route == "packed"))
        if self.sharded:
            idle = max(self.ranks.all(len(parts))) - len(parts)
            parts += [(np.zeros(0, np.int64), _nothing(self.device))] * idle
        return parts

    def _forward(self, policy: LogprobModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """(B, T) log-probabilities and entropies."""
        # Sharded weights come in bfloat16 by themselves.
        autocast = self.config.bf16 and not self.sharded
        with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
            logprobs_BT, entropy_BT = policy(batch)
        return logprobs_BT, entropy_BT

    @torch.no_grad()
    def _logprobs(self, batch: Batch) -> Tensor:
        """(B, T) log-probabilities of the batch under the current weights."""
        logprobs_BT = torch.zeros_like(batch.rollout_logprobs_BT)
        for rows, micro in self._micro_batches(batch):
            _put(logprobs_BT, rows, self._forward(self.policy, micro)[0])
        return logprobs_BT

    def _backward(self, batch: Batch, old_BT: Tensor | None) -> tuple[Tensor, float, Metrics]:
        """Add the gradient of the whole step; returns old log-probabilities, and loss and its metrics of all ranks.

        Without `old_BT` the current weights are the old ones: this very pass gives the old log-probabilities, unless
        each weight depends on all of them; then they take a pass of their own.
        """
        config, ranks = self.config, self.ranks
        count = ranks.sum([loss_normalizer(batch.mask_BT, config.loss_type)])[0]
        aggregation: dict[str, Any] = {
            "loss_type": config.loss_type,
            "normalizer": max(count, 1),
            "max_completion_length": config.max_completion_length,
        }
        mean_weight = None
        if config.correction.batch_normalize:
            decoupled = config.correction.objective == "decoupled"
            source_BT = old_BT if decoupled and old_BT is not None else self._logprobs(batch)
            old_BT = source_BT if old_BT is None else old_BT
            totals = weight_totals(source_BT, batch.rollout_logprobs_BT, batch.mask_BT, config.correction)
            total, units = ranks.sum(totals)
            mean_weight = total / units if units else None

        current_BT = torch.zeros_like(batch.rollout_logprobs_BT)
        sums: dict[str, float] = {"loss": 0.0, "tokens": 0.0}
        for rows, micro in self._micro_batches(batch):
            logprobs_BT, entropy_BT = self._forward(self.policy, micro)
            _put(current_BT, rows, logprobs_BT.detach())
            T = micro.mask_BT.shape[1]
            micro_old_BT = logprobs_BT.detach() if old_BT is None or not rows.size else old_BT[rows, :T]
            loss, metrics = corrected_policy_loss(
                logprobs_BT,
                micro_old_BT,
                micro.rollout_logprobs_BT,
                micro.advantages_B,
                micro.mask_BT,
                config.correction,
                mean_weight=mean_weight,
                epsilon=config.epsilon,
                epsilon_high=config.epsilon_high,
                **aggregation,
            )
            if self.reference is not None:
                with torch.no_grad():
                    reference_BT, _ = self._forward(self.reference, micro)
                penalty, kl_metrics = kl_loss(logprobs_BT, reference_BT, micro.mask_BT, config.beta, **aggregation)
                loss, metrics = loss + penalty, metrics | kl_metrics
            # The normalizer counts all ranks: gradients are to be summed, where FSDP averages them.
            torch.autograd.backward(loss * ranks.size if self.sharded else loss)
            tokens = int(micro.mask_BT.sum())
            sums["loss"] += loss.item()
            sums["tokens"] += tokens
            metrics["entropy"] = float(entropy_BT[micro.mask_BT].mean())
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + (tokens * value if tokens else 0.0)
        if not self.sharded:
            ranks.sum_gradients(self.policy.parameters())

        names = sorted(set().union(*ranks.all(set(sums))))
        totals_by_name = dict(zip(names, ranks.sum([sums.get(name, 0.0) for name in names]), strict=True))
        loss_of_all, tokens_of_all = totals_by_name.pop("loss"), totals_by_name.pop("tokens")
        means = {name: total / tokens_of_all for name, total in totals_by_name.items() if tokens_of_all}
        return (current_BT if old_BT is None else old_BT), loss_of_all, means

    def _update(self, step: int, loss: float) -> float:
        """One optimizer step with the gradient at hand; returns its norm before scaling.

        Raises FloatingPointError before any weight has changed if the loss or the norm is not finite.
        """
        parameters = [parameter for parameter in self.policy.parameters() if parameter.grad is not None]
        norm = float(whole(nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"step {step}: loss {loss}, gradient norm {norm}; this update was not applied and the published "
                f"weights are intact. Look at correction/ratio_max and train/grad_norm of the steps before, and "
                f"resume with a lower learning_rate (now {self.config.learning_rate})"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _describe(self, step: int, taken: Replacement, batch: Batch, old_BT: Tensor) -> Metrics:
        """Metrics of the step over all ranks, the same on each of them."""
        config = self.config
        part = RankPart(
            fresh=[GroupFacts.of(sample) for sample in taken.fresh],
            trained=[GroupFacts.of(sample) for sample in taken.samples],
            replaced=taken.replaced,
            counts=taken.counts,
            moments=measure(
                old_BT,
                batch.rollout_logprobs_BT,
                batch.mask_BT,
                config.correction,
                advantages=batch.advantages_B,
            ),
            rows=batch.num_rows,
            tokens=int(batch.mask_BT.sum()),
        )
        parts = self.ranks.all(part)
        correction = Moments.of_parts([part.moments for part in parts]).metrics()
        if self.ranks.is_first:
            self.alarms.check(correction)
        return {
            "step": step,
            "policy_version": step,
            **_prefixed("fresh", describe_groups([facts for part in parts for facts in part.fresh])),
            **_prefixed("replay", {name: sum(part.counts[name] for part in parts) for name in taken.counts}),
            **_prefixed("replay", describe_replayed([part.trained[i] for part in parts for i in part.replaced])),
            **_prefixed("train", describe_groups([facts for part in parts for facts in part.trained])),
            "train/rows": sum(part.rows for part in parts),
            "train/tokens": sum(part.tokens for part in parts),
            "train/learning_rate": config.learning_rate_at(step),
            "train/packed": int(self.policy.route == "packed"),
            **_prefixed("correction", correction),
        }

    def _update_priorities(self, samples: Sequence[Sample], batch: Batch, old_BT: Tensor) -> int:
        """As ZeroVarianceReplacer.update_priorities, for what every rank trained on; returns how many there were."""
        weights_BT, keep_BT = weights_and_mask(
            old_BT, batch.rollout_logprobs_BT, batch.mask_BT, self.config.correction, advantages=batch.advantages_B
        )
        trust_B = (weights_BT.clamp(max=1) * keep_BT).sum(dim=1).cpu().numpy()
        tokens_B = batch.mask_BT.sum(dim=1).cpu().numpy()
        trust = {}
        for index, sample in enumerate(samples):
            rows = batch.group_B == index
            trust[sample.info.key] = float(trust_B[rows].sum() / max(tokens_B[rows].sum(), 1))
        return int(self.ranks.sum([self.replacer.update_priorities(trust, samples)])[0])

    # -------------------------------------------------------------------------------------- start, publish, resume

    def _start(self) -> int:
        """The version to continue from, announced to the server: the last full state here, or a new 0.

        Raises FileExistsError if output_dir holds another run's results, RuntimeError if the server is ahead
        of us, ValueError if it admits fewer groups a step than we take.
        """
        if (admission := self.client.server_info().admission) is not None:
            self.config.check_admission(admission.groups_per_step)
        metrics_path = self.output_dir / "metrics.jsonl"
        folders = saved(self.output_dir) if self.config.resume else []
        for folder in damaged(self.output_dir) if self.config.resume else []:
            logger.warning("%s has lost files or parts of them: it is passed over", folder)
        strangers = [*([metrics_path] if metrics_path.exists() else []), *published(self.output_dir)]
        if not folders and strangers:
            remedy = "move it away" if self.config.resume else "set resume=True to continue that run"
            raise FileExistsError(
                f"{self.output_dir} holds {strangers[-1].name} of an earlier run: {remedy}, or choose another "
                f"output_dir"
            )
        version = version_of(folders[-1]) if folders else 0
        newest = version_of(published(self.output_dir)[-1]) if folders else 0
        policy = self.client.policy()
        ours = bool(folders) and Path(policy.weights).parent == self.output_dir.resolve()
        if policy.version > newest and not ours:
            raise RuntimeError(
                f"the server is at policy version {policy.version}, this run at {newest}: set resume=True with the "
                f"output_dir of the run that published {policy.version}, or start the server afresh"
            )
        self.ranks.wait()  # before the first of us changes what the others look at
        if folders:
            self._load(folders[-1])
        else:
            torch.manual_seed(self.config.seed + self.ranks.index)
            self._publish(0)
        return version

    def _load(self, folder: Path) -> None:
        """Continue from a full state, and undo what was published after it."""
        version = version_of(folder)
        set_model_state_dict(
            self.policy,
            {f"model.{name}": tensor for name, tensor in load_weights(folder, self.model).items()},
            options=StateDictOptions(full_state_dict=True),
        )
        state = load_state(folder)
        if state["optimizer"] is not None:
            set_optimizer_state_dict(self.policy, self.optimizer, state["optimizer"], options=_FULL)
        if self.ranks.index < len(state["random"]):
            torch.set_rng_state(state["random"][self.ranks.index])
            if state["cuda_random"][self.ranks.index] is not None and torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda_random"][self.ranks.index])
        self._last_saved = version
        if self.ranks.is_first:
            # rollback: what the killed trainer had taken beyond this version will not be trained on.
            self.client.set_policy_version(version, weights=str(folder), rollback=True)
            for later in published(self.output_dir):
                if version_of(later) > version:
                    remove(later)
        self.ranks.wait()

    @property
    def server_checkpoint(self) -> str:
        """The server's checkpoint that belongs to the last full state, to start it from; empty: there is none."""
        folders = saved(self.output_dir)
        return server_checkpoint_of(folders[-1]) if folders else ""

    def _publish(self, version: int) -> None:
        """Write the weights, with the full state where one is due, and tell the server."""
        config = self.config
        full = version == config.max_steps or version - self._last_saved >= config.save_every
        probe = self._probe()
        weights = None
        if self.sharded:
            weights = {
                name.removeprefix("model."): tensor
                for name, tensor in get_model_state_dict(self.policy, options=_FULL).items()
            }
        state = self._state() if full else None
        if self.ranks.is_first:
            checkpoint = ""
            if full and config.checkpoint_server:
                # One that the server names is also one that it removes, when it has enough newer ones.
                checkpoint = self.client.checkpoint(timeout=config.sample_timeout)
            folder = publish_weights(
                self.model,
                self.tokenizer,
                self.output_dir,
                version,
                config.keep_weights,
                probe,
                weights=weights,
                state=state,
                server_checkpoint=checkpoint,
            )
            self.client.set_policy_version(version, weights=str(folder))
        if full:
            self._last_saved = version
        self.ranks.wait()

    def _state(self) -> dict[str, Any]:
        """What a resume needs besides weights and version; the learning rate follows from the step."""
        on_gpu = self.device.type == "cuda"
        return {
            # Before the first update there is none, and asking for it would make a step.
            "optimizer": get_optimizer_state_dict(self.policy, self.optimizer, options=_FULL)
            if self.optimizer.state
            else None,
            "random": self.ranks.all(torch.get_rng_state()),
            "cuda_random": self.ranks.all(torch.cuda.get_rng_state() if on_gpu else None),
        }

    @torch.no_grad()
    def _probe(self) -> dict[str, list[Any]]:
        """{"token_ids": [P], "logprobs": [P - 1]}: what the policy gives each token but the first, after those before.

        Log-probabilities are in nats, at temperature 1, computed in the model's own dtype.
        """
        token_ids = probe_tokens(self.model, self.tokenizer)
        logprobs_BT, _ = self.policy(to_batch([_group(token_ids)], self.device))
        return {"token_ids": token_ids, "logprobs": logprobs_BT[0].tolist()}


@dataclass(frozen=True)
class RankPart:
    """What one rank tells the others of its part of a step."""

    fresh: list[GroupFacts]
    trained: list[GroupFacts]
    replaced: list[int]
    counts: dict[str, int]
    moments: Moments
    rows: int
    tokens: int


class Laps:
    """Seconds spent in each part of a step, by name."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """What passed since the last lap was spent on `name`."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now

    def timed(self, name: str, items: Iterator[Any]) -> Iterator[Any]:
        """`items`; a lap ends with each that came."""
        for item in items:
            self.lap(name)
            yield item

    def take(self) -> dict[str, float]:
        """All laps and their sum, "step"; and start afresh."""
        seconds, self._seconds = self._seconds, {}
        return {**seconds, "step": sum(seconds.values())}


def _nothing(device: torch.device) -> Batch:
    """A batch of one token that counts for nothing."""
    return to_batch([_group([0, 0], loss_mask=np.zeros(1, np.bool_))], device)


def _group(token_ids: Sequence[int], **fields: Any) -> RolloutGroup:
    """One completion: all tokens but the first."""
    tokens = len(token_ids) - 1
    return RolloutGroup(
        prompt_ids=np.array(token_ids[:1], np.int32),
        completion_ids=np.array(token_ids[1:], np.int32),
        completion_lengths=np.array([tokens], np.int32),
        rollout_logprobs=np.zeros(tokens, np.float32),
        rewards=np.zeros(1, np.float32),
        advantages=np.zeros(1, np.float32),
        **fields,
    )


def _put(values_BT: Tensor, rows: Ints, part_BT: Tensor) -> None:
    """Writes a micro-batch's values to their rows; nothing for one that was only there to keep others company."""
    if rows.size:
        values_BT[rows, : part_BT.shape[1]] = part_BT


def _prefixed(prefix: str, metrics: Mapping[str, float]) -> Metrics:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
