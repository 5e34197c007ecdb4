"""GRPOTrainer: the training loop from rollout groups to published weights, on one device or on many ranks.

    server ──fresh groups, leased──▶ collect ─▶ replace ─▶ score ─▶ pass ─▶ step ─▶ publish ──version──▶ generators
       ▲  └────groups of the pool────────────────────┘                                 │
       └──────────────── acknowledge, when a training checkpoint contains the step ◀───┘

`GRPOTrainer.step` makes one step, from its groups to its version. All ranks make a step together, each with its own
part of the groups. Every rank must reach each collective operation, or no rank may. So if a rank decides something from
its own groups, such as that memory ran out, the ranks exchange this decision before any rank acts on it.

The groups that a step takes leave the server only after the result of the step is on the disk: the server holds fresh
groups under leases until a training checkpoint that names them is written. So a killed trainer loses only time. Its
resume starts from that checkpoint, and gets the groups of later steps again. If some of its
groups make a step fail, the step is made again without these groups. An update that failed has changed no weights.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from replay_client import ReplayClient, RolloutGroup, Sample
from replay_client.errors import DeadlineExceededError, ReplayError
from replay_client.scoring import group_advantages
from replay_client.settings import SETTINGS_FILE, as_json
from replay_generator.engines import text_of
from replay_trainer import suppliers
from replay_trainer.background import ServerWaits, over
from replay_trainer.batching import Batch, to_batch
from replay_trainer.callbacks import Callback, StepReport, reporters
from replay_trainer.config import GRPOConfig
from replay_trainer.correction import Moments
from replay_trainer.groups import (
    BadGroup,
    GroupSource,
    Inspector,
    ModelLimits,
    Replacement,
    ZeroVarianceReplacer,
)
from replay_trainer.leases import GroupLeases
from replay_trainer.logprobs import LogprobModel
from replay_trainer.loss_functions import check_loss
from replay_trainer.metrics import (
    Alarms,
    GroupFacts,
    LengthRatio,
    Lengths,
    Metrics,
    StepTimers,
    describe_groups,
    describe_replayed,
    group_drifts,
    mean_and_max,
)
from replay_trainer.passes import Passes, StepFailure, correct_batch
from replay_trainer.publication import Publication
from replay_trainer.ranks import Ranks, partition
from replay_trainer.stopping import Stopped, Stopping
from replay_trainer.token_staleness import count_stale
from replay_trainer.weights import Adapter, write_whole

T = TypeVar("T")

_COUNT_SECONDS = 5.0
"""Seconds to wait for the server's count of generated tokens. Without an answer train/length_ratio is NaN."""


class GRPOTrainer:
    """Trains `model` on the groups of a replay server and publishes each version for the generators.

    `model` is any causal language model of transformers, or a peft model with a LoRA adapter. Of a peft model, only the
    adapter is trained and published. Every rank passes the same model. `tokenizer` is saved beside the weights. The
    first rank calls the `callbacks` at each step. Every `eval_every` steps, all ranks call `evaluate`, and the metrics
    that it returns on the first rank become eval/*. See TableEvaluation, or write a function that uses `trainer.model`.

    Under torchrun each rank makes its own trainer with its own client. `fsdp` partitions the model over the ranks.
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
        check_loss(config, self.device)
        self.client = client
        self.tokenizer = tokenizer
        self.evaluate = evaluate
        self.output_dir = Path(config.output_dir)
        self.fresh_per_rank = self.ranks.share(config.fresh_groups_per_step, "fresh groups of groups_per_step")
        self.replayed_per_rank = self.ranks.share(config.replayed_groups_per_step, "replay_share of groups_per_step")
        self.callbacks = [*reporters(config), *callbacks] if self.ranks.is_first else []

        # A wrapper, such as DistributedDataParallel, has the model as its attribute `module`.
        if hasattr(model, "module") and not hasattr(model, "get_input_embeddings"):
            raise ValueError(f"give GRPOTrainer the model itself, not a {type(model).__name__} around it")
        self.model = model.to(self.device)
        self.adapter = Adapter.of(self.model, config.merge_adapter)
        # peft has put the layers of the adapter into the base, so the base computes with the adapter.
        trained = self.model if self.adapter is None else self.adapter.base
        self.policy = LogprobModel(trained, config.packing, config.gradient_checkpointing, config.max_length)
        self.ranks.copy_from_first(self.policy)  # all ranks start from the same weights
        self.reference: LogprobModel | None = None
        if config.beta > 0:
            # The base model under an adapter never changes, so it needs no copy: `Passes` switches the adapter off.
            self.reference = self.policy if self.adapter else copy.deepcopy(self.policy).requires_grad_(False)
        self.partitioned = config.fsdp and self.ranks.size > 1
        """True if each rank holds only a part of the weights."""
        if self.partitioned:
            if self.adapter is not None and config.merge_adapter:
                raise ValueError("with fsdp no rank has the whole base to add the adapter to: leave merge_adapter off")
            for module in dict.fromkeys((self.policy, self.reference)):  # with an adapter, both are the same module
                if module is not None:
                    # `_no_split_modules`: the names of the classes of the model's layers.
                    partition(module, self.model._no_split_modules or (), self.device, config.bf16)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [parameter for parameter in self.policy.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.passes = Passes(self.policy, self.reference, self.adapter, config, self.ranks, self.partitioned)
        teacher = config.teacher.column if config.teacher else ""
        reads_versions = config.max_token_staleness is not None
        # `policy.max_length` is the length for which the model's rotary frequencies were chosen; None: nothing was
        # chosen, because the model has only one set of them.
        length = config.max_length if self.policy.max_length is None else self.policy.max_length
        limits = ModelLimits.of(
            self.policy.model,
            group_tokens=config.max_group_tokens,
            teacher=teacher,
            length=length,
            reads_versions=reads_versions,
        )
        self.inspector = Inspector(
            client,
            self.ranks,
            limits,
            config.replay_table,
            config.max_unusable_fraction,
            scale=config.scale_rewards,
        )
        self.replacer = ZeroVarianceReplacer(
            client,
            config.replay_table,
            config.replay_on_empty,
            config.replay_timeout,
            config.replay_max_staleness,
            inspector=self.inspector,
            scale=config.scale_rewards,
            teacher=teacher,
        )
        self.alarms = Alarms()
        self.stopped = False
        """True if `train` ended before max_steps, because of `stop`."""
        self.last_step: int | None = None
        """The last finished step of the run, 0 before the first step; None before `train` has found where to start."""
        self._stopping = Stopping(self.ranks)
        # `train` sets the next four attributes.
        self.publication: Publication
        self._source: GroupSource
        self._timers: StepTimers
        self._waits: ServerWaits
        self._is_first_step = True
        """True until a step has drawn its groups."""
        self._length_ratio = LengthRatio(whole=True)
        """`train` replaces this value, because it knows whether the run begins now."""
        self._bad: list[BadGroup] = []
        """The groups of the current step that could not be trained on, over all ranks."""

    def train(self) -> int:
        """Trains up to `max_steps`, or until `stop`. Returns the number of steps that this call made, which is 0 if a
        resumed run had made all steps already.

        Raises:

        * DeadlineExceededError if no groups come in time, or if all generators and scorers have left.
        * FloatingPointError if the weights compute numbers that are not finite. Such weights are not published.
        * RuntimeError if a larger share of groups than max_unusable_fraction cannot be trained on, or if a version
          cannot be published.
        * The errors of `Publication.start` if output_dir or the server belongs to another run.
        """
        config = self.config
        leases = GroupLeases(self.client, config.rollouts_table, config.lease, self.output_dir, self.ranks.index)
        self.publication = Publication(
            self.policy,
            self.optimizer,
            self.tokenizer,
            self.client,
            config,
            self.ranks,
            self.partitioned,
            leases,
            self._stopping,
            self.adapter,
        )
        try:
            version = self.publication.start()
        except Stopped:
            self.stopped = True
            return 0
        self.last_step = version
        self._length_ratio = LengthRatio(whole=version == 0)
        if self.ranks.is_first:
            write_whole(self.output_dir / SETTINGS_FILE, as_json(config))
        leases.start()
        # False after an error. The trainer then does not tell the server that it leaves, so that `replay doctor` can
        # report that the trainer is gone.
        on_purpose = False
        try:
            for callback in self.callbacks:
                callback.on_start(self, version)
            with self._groups(leases) as self._source:
                try:
                    for step in range(version + 1, config.max_steps + 1):
                        self.step(step)
                        self.last_step = step
                except Stopped:
                    self.stopped = True
                    self.publication.complete(self.last_step, self._source.left)
                self.publication.finish()
            on_purpose = True
        except KeyboardInterrupt:
            on_purpose = True
            raise
        finally:
            self.publication.close()
            # Requeues the groups that no training checkpoint contains, and returns the keys of all held groups.
            held_keys = leases.requeue()
            self.inspector.requeued(held_keys, config.rollouts_table)
            for callback in self.callbacks:
                callback.on_end(self)
            if on_purpose:  # the last call, because any later call would tell the server that this client runs
                self.client.leave()
        return self.last_step - version

    def stop(self) -> None:
        """Asks all ranks to stop: `train` finishes the step under way, publishes it with a training checkpoint, and
        returns. A resume goes on with the next step.

        A wait for groups ends within about a second. The step that waited is given up, and its groups are requeued. A
        signal handler, a callback or any thread may call `stop`, and a call on one rank is enough. A rank that
        exchanges values with the other ranks handles a signal only after the exchange. After `train` has returned,
        `stopped` is True if the stop ended it before max_steps.
        """
        self._stopping.ask()

    def step(self, step: int) -> None:
        """Makes one step, from groups to a version of the weights. `train` calls this method on all ranks together.

        If `stop` was called, makes no step and raises Stopped, which is a BaseException but no Exception.
        """
        self.publication.check()  # raises the error of a failed write, and sets `_stopping.agreed` if a rank was asked
        if self._stopping.agreed:
            raise Stopped
        self.replacer.oldest_version = self.config.oldest_version(step)
        with self._waits.waiting("for groups"):
            taken = self._source.collect()  # fresh groups, leased until a training checkpoint contains this step
        if self._is_first_step:  # the generators of these groups are connected by now
            self.publication.check_generators()
            self._is_first_step = False
        taken = self._replace(step, taken)  # groups of the pool replace some, or are added
        taken = self._retry_without_failing(step, taken, self._without_drifted)
        self._timers.lap("replace")
        trained = self._retry_without_failing(step, taken, partial(self._train_on, step))  # passes and optimizer steps
        self._timers.lap("update")
        self._report(step, trained)
        self._timers.lap("report")
        if step % self.config.publish_every == 0 or step == self.config.max_steps:
            self.publication.publish(step, self._source.left)  # its thread writes, announces and acknowledges
        self._timers.lap("publish")

    def decode(self, token_ids: Any) -> str:
        """The text of the tokens; without a tokenizer, their ids with spaces between them."""
        ids = [int(token) for token in token_ids]
        return text_of(self.tokenizer, ids) if self.tokenizer is not None else " ".join(map(str, ids))

    # ------------------------------------------------------------------------------------------------------- a step

    @contextmanager
    def _groups(self, leases: GroupLeases) -> Iterator[GroupSource]:
        """Opens this rank's stream of fresh batches, and yields the source of the groups of each step."""
        config = self.config
        table = config.rollouts_table
        # Each start of the trainer has a new name. So a step that is repeated after a resume may draw the same groups
        # of the pool once more.
        run = self.ranks.from_first(secrets.token_hex(8))
        self._timers = StepTimers()
        watched: suppliers.Suppliers | None = None
        seconds = config.sample_timeout
        if seconds is None:
            # The wait for a batch is cut into parts. Between two parts, `watched` checks whether any program may still
            # bring groups.
            watched = suppliers.Suppliers(self.client)
            seconds = suppliers.LOOK_SECONDS
        # The setting that the error of a wait names if the wait was too long. Without sample_timeout, there is no such
        # error.
        limit = f"sample_timeout = {seconds:g} s"
        quiet = not self.ranks.is_first
        look = self._stopping.look
        self._waits = ServerWaits(self.client, table, quiet=quiet, suppliers=watched, limit=limit, look=look)
        with self.client.sampler(
            table,
            batch_size=self.fresh_per_rank,
            prefetch=config.prefetch,
            timeout=seconds,
            lease=config.lease,
            on_lease=leases.expect,  # the client calls `expect` for each batch before the lease of the batch begins
        ) as stream:

            def fresh() -> Iterator[list[Sample]]:
                """Draws a batch whenever a step needs one, and yields its usable groups. Passes over a batch whose
                groups have all been trained on already."""
                for batch in self._waits.watch(stream):
                    new = leases.hold(batch)
                    if new:
                        self._timers.lap("sample")
                        yield self.inspector.usable(new, table)

            yield GroupSource(fresh(), self.replacer, self.ranks, run, config, self._stopping)

    def _replace(self, step: int, taken: Replacement) -> Replacement:
        """Replaces fresh groups by groups of the pool, or adds groups of the pool. Then deletes the bad groups that the
        step has drawn. Returns the groups of the step."""
        with self._waits.waiting("for groups"):
            try:
                taken = self._source.replace(step, taken)
            except DeadlineExceededError as error:
                raise over(f"replay_timeout = {self.config.replay_timeout} s", error) from None
            self._bad = self.inspector.end_draws()
        return taken

    def _without_drifted(self, taken: Replacement) -> Replacement:
        """The groups of the step, without the groups of the pool whose drift is above `replay_max_drift`."""
        limit = self.config.replay_max_drift
        if limit is None:
            return taken
        stored = [taken.samples[i].group for i in taken.replaced]  # the groups from the pool
        batch = self._to_batch(stored, replaced=range(len(stored)))
        try:
            drifts = group_drifts(batch, self.passes.logprobs(batch))
        except StepFailure as failure:
            # The indices in `failure` refer to `stored`. The caller expects indices of `taken.samples`.
            failure.groups = [taken.replaced[group] for group in failure.groups]
            raise
        drifted = [i for i, drift in zip(taken.replaced, drifts, strict=True) if drift > limit]
        return taken.without(drifted, drifted=len(drifted))

    def _to_batch(self, groups: Sequence[RolloutGroup], replaced: Sequence[int]) -> Batch:
        """Makes this rank's batch from the groups, with the advantages that `scale_rewards` asks for.

        `replaced`: the indices of the groups from the pool. `replay_rollouts` says which rollouts of these groups are
        in the batch.
        """
        scale = self.config.scale_rewards
        advantages = None
        if scale == "batch":
            # A = (r - mean of the group) / (std of all rewards of the step + 1e-4), as TRL's scale_rewards="batch".
            rewards_of_ranks = self.ranks.all([float(reward) for group in groups for reward in group.rewards])
            rewards = np.array([reward for rewards_of_rank in rewards_of_ranks for reward in rewards_of_rank])
            deviation = rewards.std(ddof=1) if rewards.size > 1 else 0.0
            divisor = np.float32(deviation + 1e-4)
            advantages = [group_advantages(group.rewards, scale="none") / divisor for group in groups]
        elif scale is not None:
            advantages = [group_advantages(group.rewards, scale=scale) for group in groups]
        batch = to_batch(
            groups,
            self.device,
            mask_truncated=self.config.mask_truncated_completions,
            advantages=advantages,
            teacher=self.config.teacher,
            oldest_version=self.replacer.oldest_version,
        )
        if self.config.replay_rollouts == "all":
            return batch
        return batch.without_wrong(replaced)

    def _train_on(self, step: int, taken: Replacement) -> TrainedStep:
        """Makes all updates of one step. Returns the step with the metrics of its last update. Raises StepFailure if
        groups make an update fail.

        The first update computes `old_BT`, the log-probabilities before the step. The later updates compare theirs with
        `old_BT`.
        """
        for parameter_group in self.optimizer.param_groups:
            parameter_group["lr"] = self.config.learning_rate_at(step)
        batch = self._to_batch(taken.groups, taken.replaced)
        old_BT = None
        for _ in range(self.config.num_iterations):
            old_BT, loss, metrics = self.passes.backward(batch, old_BT)
            grad_norm = self.passes.clip()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        assert old_BT is not None
        assert old_BT.shape == batch.mask_BT.shape, (old_BT.shape, batch.mask_BT.shape)
        return TrainedStep(taken, batch, old_BT, {"loss": loss, "grad_norm": grad_norm, **metrics})

    def _retry_without_failing(self, step: int, taken: Replacement, action: Callable[[Replacement], T]) -> T:
        """Calls `action` with the groups, and returns its result. If groups make `action` fail, rejects these groups,
        and calls `action` again with the other groups.

        Each call begins anew. But the updates that `action` made before a failure are not undone, because each of them
        was sound.
        """
        while True:
            try:
                return action(taken)
            except StepFailure as failure:
                taken = self._without_unusable(step, taken, failure)

    def _without_unusable(self, step: int, taken: Replacement, failure: StepFailure) -> Replacement:
        """Rejects and deletes the groups that caused the failure, and returns the other groups of the step. If no rank
        knows which groups caused the failure, rejects all groups of the step.

        Raises FloatingPointError if the weights are at fault and not the groups, or if no rank has groups. Raises
        RuntimeError if too many groups are bad, or if this rank failed alone.
        """
        self.optimizer.zero_grad(set_to_none=True)
        bad = failure.groups
        reason = f"step {step} failed: {failure.reason}"
        if failure.alone:
            self._note_bad(taken, bad, reason)
            self.inspector.delete()  # `end_draws` would wait for the other ranks, which wait inside the pass
            keys = ", ".join(str(taken.samples[i].info.key) for i in bad)
            raise RuntimeError(
                f"{reason}. A rank with partitioned weights cannot leave a step alone, so the run stops here. The "
                f"groups {keys} are rejected and deleted: continue with resume=True"
            ) from failure
        self.publication.probe()  # raises FloatingPointError if the weights are at fault
        some_rank_knows = any(self.ranks.all(bool(bad)))
        if not some_rank_knows:
            bad = range(len(taken.samples))
            reason += ", and no group stands out, so the step does without all of them"
        some_rank_has_groups = any(self.ranks.all(bool(bad)))
        if not some_rank_has_groups:
            raise FloatingPointError(f"{reason}: no group is left, and the weights are sound") from failure
        self._note_bad(taken, bad, reason)
        self._bad += self.inspector.end_draws()
        return taken.without(bad)

    def _note_bad(self, taken: Replacement, bad: Sequence[int], reason: str) -> None:
        """Rejects the groups of this rank with the indices `bad`."""
        for i in bad:
            table = self.config.replay_table if i in taken.replaced else self.config.rollouts_table
            self.inspector.reject(taken.samples[i].info.key, table, reason)

    def _report(self, step: int, trained: TrainedStep) -> None:
        """Evaluates the weights if the step is due, updates the priorities of the pool, and reports the step to the
        callbacks."""
        config = self.config
        taken = trained.taken
        parts = self.ranks.all(self._part(trained))
        metrics = self._describe(step, trained, parts)
        if self.evaluate is not None and config.eval_every and step % config.eval_every == 0:
            metrics |= _prefixed("eval", self.evaluate(self))
            self._timers.lap("evaluate")
        if config.update_priorities:
            with self._waits.waiting("to update priorities"):
                metrics["replay/priorities_updated"] = self._update_priorities(trained)
        if self.ranks.is_first:
            metrics["train/length_ratio"] = self._compare_lengths(parts)
        metrics |= _prefixed("time", self._timers.collect())
        metrics["train/tokens_per_second"] = metrics["train/tokens"] / metrics["time/step"]
        for callback in self.callbacks:
            record = self._record(step, parts)
            callback.on_step(self, StepReport(metrics, taken.samples, taken.replaced, record))

    def _compare_lengths(self, parts: Sequence[RankPart]) -> float:
        """Adds the completions of this step to `_length_ratio`, and returns the new ratio; NaN if the server does not
        answer in time."""
        lengths = [length for part in parts for facts in part.trained for length in facts.lengths]
        table = self.config.rollouts_table
        generated = None
        with suppress(ReplayError):
            tables = self.client.server_info(tables=[table], timeout=_COUNT_SECONDS).tables
            if table in tables:
                generated = Lengths(tables[table].completions, tables[table].completion_tokens)
        return self._length_ratio.add(lengths, generated)

    def _part(self, trained: TrainedStep) -> RankPart:
        """The facts of the step that this rank sends to the other ranks."""
        taken = trained.taken
        batch = trained.batch
        drifts = group_drifts(batch, trained.old_BT)
        assert len(drifts) == len(taken.samples), (len(drifts), len(taken.samples))
        tokens_stale, rollouts_stale = count_stale(taken.groups, self.replacer.oldest_version)
        return RankPart(
            fresh=[GroupFacts.of(sample, self.replacer.informs(sample)) for sample in taken.fresh],
            trained=[GroupFacts.of(sample, self.replacer.informs(sample)) for sample in taken.samples],
            replaced=taken.replaced,
            drifts=[drifts[i] for i in taken.replaced],
            moments=correct_batch(batch, trained.old_BT, self.config.correction).moments,
            sums={
                **_prefixed("replay", taken.counts),
                "train/rows": len(batch.rollouts.first_J),
                "train/sequences": batch.num_rows,
                "train/tokens": int(batch.mask_BT.sum()),
                "train/tokens_stale": tokens_stale,
                "train/rollouts_stale": rollouts_stale,
                "unknown masks": 0 if batch.sampling_masks is None else batch.sampling_masks.unknown(batch.mask_BT),
            },
        )

    def _record(self, step: int, parts: Sequence[RankPart]) -> dict[str, Any]:
        """The line of `StepsFile` for this step: the groups that all ranks took, and the outcome of each group."""
        trained = []
        for rank, part in enumerate(parts):
            for i, facts in enumerate(part.trained):
                source = "replayed" if i in part.replaced else "fresh"
                trained.append(_named(facts) | {"source": source, "rank": rank})
        # The keys of the groups that are in "trained" or "unusable". These groups do not belong in "left_out".
        listed_keys = {group["key"] for group in trained} | {group.key for group in self._bad}
        return {
            "step": step,
            "trained": trained,
            "left_out": [_named(facts) for part in parts for facts in part.fresh if facts.key not in listed_keys],
            "unusable": [asdict(group) for group in self._bad],
        }

    def _describe(self, step: int, trained: TrainedStep, parts: Sequence[RankPart]) -> Metrics:
        """The metrics of the step over all ranks, the same on each rank. The first rank also logs alarms about them."""
        correction = Moments.of_parts([part.moments for part in parts]).metrics()
        assert len(parts) == self.ranks.size, (len(parts), self.ranks.size)
        sums = {name: sum(part.sums[name] for part in parts) for name in parts[0].sums}
        correction["unknown_masks_fraction"] = sums.pop("unknown masks") / max(sums["train/tokens"], 1)
        if self.ranks.is_first:
            self.alarms.check(correction)
        return {
            "step": step,
            "policy_version": step,
            **_prefixed("fresh", describe_groups([facts for part in parts for facts in part.fresh])),
            **_prefixed("replay", describe_replayed([part.trained[i] for part in parts for i in part.replaced])),
            **_prefixed("replay", mean_and_max("drift", [drift for part in parts for drift in part.drifts])),
            **_prefixed("train", describe_groups([facts for part in parts for facts in part.trained])),
            **sums,
            "train/learning_rate": self.config.learning_rate_at(step),
            "train/packed": int(self.policy.route == "packed"),
            **_prefixed("correction", correction),
            **_prefixed("train", trained.metrics),
            "train/groups_unusable": len(self._bad),
        }

    def _update_priorities(self, trained: TrainedStep) -> int:
        """Updates the priorities of the groups of all ranks, as `ZeroVarianceReplacer.update_priorities` says. Returns
        the number of these groups that the table still has."""
        samples = trained.taken.samples
        batch = trained.batch
        correction = correct_batch(batch, trained.old_BT, self.config.correction)
        # The sum of min(w, 1) over the tokens of each rollout. To get the mean over the tokens of a group, the loop
        # below adds up the sums of its rollouts, and divides by the number of their tokens.
        trust_J = (correction.weights.clamp(max=1) * correction.mask).sum(dim=1).cpu().numpy()
        tokens_J = batch.rollouts.mask_JT.sum(dim=1).cpu().numpy()
        group_J = batch.group_B[batch.rollouts.first_J]  # index of the group of each rollout
        assert trust_J.shape == tokens_J.shape == group_J.shape, (trust_J.shape, tokens_J.shape, group_J.shape)
        trust = {}
        for index, sample in enumerate(samples):
            in_group_J = group_J == index
            trust[sample.info.key] = float(trust_J[in_group_J].sum() / max(tokens_J[in_group_J].sum(), 1))
        updated = self.replacer.update_priorities(trust, samples)
        return int(self.ranks.sum([updated])[0])


@dataclass(frozen=True)
class TrainedStep:
    """The state of a step on one rank after its updates."""

    taken: Replacement
    """The groups that were trained on, without the groups that made the step fail."""
    batch: Batch
    old_BT: Tensor
    """Log-probabilities before the first update."""
    metrics: Metrics
    """The metrics of loss and gradient, over all ranks."""


@dataclass(frozen=True)
class RankPart:
    """The facts about a step that the ranks exchange for its metrics."""

    fresh: list[GroupFacts]
    """The fresh groups that were taken for the step, whether it trained on them or not."""
    trained: list[GroupFacts]
    """The groups that the step trained on."""
    replaced: list[int]
    """The indices of the groups in `trained` that came from the pool."""
    drifts: list[float]
    """The drifts of the groups from the pool, in nats."""
    moments: Moments
    sums: dict[str, float]
    """Values that are added up over the ranks. All are metrics by their names, except for "unknown masks": the number
    of tokens that were drawn from a part of the vocabulary, when the trainer does not know from which part."""


def _named(facts: GroupFacts) -> dict[str, Any]:
    """The entries that identify a group in a line of StepsFile."""
    return {"key": facts.key, "prompt_id": facts.prompt_id, "policy_version": facts.policy_version}


def _prefixed(prefix: str, metrics: Mapping[str, float]) -> Metrics:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
