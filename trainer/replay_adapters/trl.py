"""TRL's GRPOTrainer with a replay server: groups from the pool replace groups whose rewards are all equal.

    generate ──▶ reward ──▶ [replace rows] ──▶ pad ──▶ log-probs, importance ratio, advantages ──▶ loss
                              ▲        │
                stored groups │        │ fresh groups that carry a gradient
                              │        ▼
                            pool on the server

This module does the step in brackets. TRL does all other steps. Rows are replaced before TRL computes anything from
them, so TRL computes all values from the new rows. There are two cases of off-policy correction:

* TRL corrects (vLLM, `vllm_importance_sampling_correction`). Its ratio then uses the stored log-probabilities.
* TRL does not correct. This module then multiplies the advantages of replaced rows by min(π_old / π_stored, clip), per
  token.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import broadcast_object_list, gather, gather_object
from torch import Tensor
from transformers import TrainerCallback

from replay_adapters.group_pool import GroupPool, OnUnavailable
from replay_adapters.hooks import hooks_of, mismatch
from replay_adapters.trl_rows import FreshRow, GeneratedRows, GenerationStep, fingerprint
from replay_client import ReplayClient, RolloutGroup, Sample, group_from_completions, group_from_rows
from replay_client.errors import ServerUnavailableError
from replay_client.scoring import carries_gradient, group_advantages, group_priority
from replay_client.settings import check_choice
from replay_server import ReplayServer, TableConfig
from replay_trainer.config import OnEmpty
from replay_trainer.correction import CorrectionConfig, correct

with hooks_of("TRL"):
    from trl import GRPOConfig, GRPOTrainer
    from trl.models.utils import disable_gradient_checkpointing


@dataclass
class ReplayGRPOConfig(GRPOConfig):  # type: ignore[misc]  # TRL has no types that mypy reads
    """TRL's GRPOConfig and the settings of replay. Raises ValueError for a value out of range."""

    replay: str | None = None
    """Address of a replay server, host:port; token and TLS come from the environment (REPLAY_TOKEN, REPLAY_TLS_CA).
    None: a server inside this process, which ends with the process."""
    replay_table: str = "replay"
    """Table of the server that holds the pool."""
    replay_buffer_size: int = 64
    """The most groups in the pool of the server inside this process. 0 turns replay off. A server at an address has its
    own max_size."""
    replay_share: float = 0.0
    """Least share of the groups of a step that come from the pool, from 0 to 0.9. 0: only groups whose rewards are all
    equal are replaced. Above 0, the fresh groups of the lowest priority are replaced too, and are stored in the
    pool."""
    replay_max_staleness: int | None = None
    """The most optimizer steps that a stored group may lag. None: only the limit of the table holds."""
    replay_on_empty: OnEmpty = "keep"
    """The treatment of a group for which the pool has no replacement. keep: TRL trains on the group. drop: the loss
    leaves the group out. wait: wait up to replay_timeout for another trainer to fill the pool."""
    replay_on_unavailable: OnUnavailable = "continue"
    """The reaction to a server that is away for replay_timeout. continue: all ranks train on fresh rows alone, and try
    to reach the server at every generation. raise: ServerUnavailableError ends the run on all ranks."""
    replay_timeout: float = 60.0
    """Seconds that a generation waits for a server that restarts. Also the seconds that replay_on_empty="wait" waits
    for groups, before DeadlineExceededError ends the run."""
    replay_same_rewards: bool = False
    """True: stored groups that other reward functions scored are left out. False: such groups are used, with a
    warning."""
    replay_clip_max: float = 2.0
    """Upper bound of the importance ratio of a replayed token. If TRL corrects (vLLM), TRL's own settings apply."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.replay_share <= 0.9:
            raise ValueError(f"replay_share must be from 0 to 0.9, not {self.replay_share}")
        if self.replay_buffer_size < 0:
            raise ValueError(f"replay_buffer_size must be at least 0, not {self.replay_buffer_size}")
        check_choice("replay_on_empty", self.replay_on_empty, get_args(OnEmpty))
        check_choice("replay_on_unavailable", self.replay_on_unavailable, get_args(OnUnavailable))
        if not self.replay_clip_max > 0:
            raise ValueError(f"replay_clip_max must be above 0, not {self.replay_clip_max}")


ATTRIBUTES = (
    "accelerator",
    "num_generations",
    "reward_weights",
    "reward_func_names",
    "temperature",
    "max_completion_length",
    "use_vllm",
    "vllm_importance_sampling_correction",
    "off_policy_mask_threshold",
    "multi_objective_aggregation",
    "scale_rewards",
    "tools",
    "_is_vlm",
    "_metrics",
    "_tokenizer",
    "_step",
    "_pending_extra_logs",
)
"""The attributes of a constructed trainer that this module reads."""

GENERATED = 8
"""The number of values that TRL's `_generate` returns: prompt_ids, completion_ids, tool_mask, completions, logprobs,
extra_fields, images, tool_images."""


logger = logging.getLogger(__name__)


class ReplayGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer with replay. It takes the arguments of GRPOTrainer, with a ReplayGRPOConfig as `args`. With a
    GRPOConfig, the settings of replay have their defaults.

    Evaluation and batches with images work as in TRL, without replay. The trainer adds metrics `replay/*`. TRL's metric
    `reward` is the reward of the rows that are trained on, and `replay/fresh_reward` is that of the generated rows.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ImportError if the installed TRL has other hooks, TableNotFoundError if the server lacks the table,
        and ServerUnavailableError if no server answers."""
        super().__init__(*args, **kwargs)
        missing = [name for name in ATTRIBUTES if not hasattr(self, name)]
        if missing:
            raise mismatch("TRL", f"a GRPOTrainer has no attribute {', '.join(missing)}")
        # A plain GRPOConfig lacks our settings, so they get their defaults.
        settings = {field.name: getattr(self.args, field.name, field.default) for field in fields(ReplayGRPOConfig)}
        self._replay = SimpleNamespace(**settings)
        self._replay_step: GenerationStep | None = None
        """The generation under way; None: no generation is under way, or one without replay is."""
        rows_of_rank = self.args.per_device_train_batch_size * self.args.steps_per_generation
        self._groups_span_ranks = bool(rows_of_rank % self.num_generations)
        """True if a group may have rows on two ranks."""
        scorers = [*self.reward_funcs]
        if type(self)._calculate_rewards is not GRPOTrainer._calculate_rewards:  # a subclass computes rewards, too
            scorers.append(type(self)._calculate_rewards)
        self._fingerprint = fingerprint(self.reward_func_names, scorers)
        """The fingerprint of the reward functions. Stored groups with another fingerprint teach another objective."""
        self._warned_of_rewards = False
        """True once a warning has told that the pool has groups of other reward functions."""
        self.pool = self._connect() if self._replay.replay_buffer_size else None
        """None: replay is turned off."""

    def _connect(self) -> GroupPool:
        """Connects to the pool. If the settings name no server, the first rank starts a server for the pool.

        Raises ValueError if this server were on another machine than some of the ranks, and the errors of `GroupPool`.
        """
        settings = self._replay
        ranks = self.accelerator.num_processes
        ranks_of_machine = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        if settings.replay is None and ranks > ranks_of_machine:
            raise ValueError(
                "replay=None starts the server on the loopback address, which other machines do not reach: start "
                "`replay serve` and give its address as `replay`"
            )
        server: ReplayServer | None = None
        client: ReplayClient | None = None
        address = settings.replay
        try:
            if address is None and self.accelerator.is_main_process:
                server = self._start_server()
                address = server.address
            # All ranks get the values of the first rank. `_run` names this run in the scopes of its draws.
            address, self._run = broadcast_object_list([address, uuid.uuid4().hex])
            if settings.replay is None:
                # The variables of the environment are for a server of the user, and not for the one that was started
                # above.
                client = ReplayClient(address)
            else:
                client = ReplayClient.from_env(address=address)
            pool = GroupPool(
                client=client,
                table=settings.replay_table,
                on_empty=settings.replay_on_empty,
                timeout=settings.replay_timeout,
                max_staleness=settings.replay_max_staleness,
                vocabulary=self.model.config.get_text_config().vocab_size,
            )
        except BaseException:
            _close(client, server)  # otherwise their threads would go on without a trainer
            raise
        self._close_replay = weakref.finalize(self, _close, client, server)
        self.add_callback(_Leave(client, server))
        return pool

    def _start_server(self) -> ReplayServer:
        """Starts a server in this process, with a pool in memory that keeps the best groups."""
        settings = self._replay
        pool_table = TableConfig(
            name=settings.replay_table,
            sampler="prioritized",
            remover="min_heap",
            max_size=settings.replay_buffer_size,
            max_staleness=settings.replay_max_staleness,
        )
        server = ReplayServer([pool_table], port=0)
        server.start()
        return server

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's method, which calls `_generate` and then computes all values of the batch.

        Before TRL's method, begins the step in which `_generate` replaces rows. After it, corrects the advantages of
        the replaced rows, stores the fresh groups, and reports metrics.
        """
        has_images = "image" in inputs[0] or "images" in inputs[0]
        if self.pool is None or not self.model.training or has_images:
            return super()._generate_and_score_completions(inputs)  # type: ignore[no-any-return]
        started = time.perf_counter()
        version = 0
        if self.accelerator.is_main_process:
            version = self.pool.advance(self.state.global_step)
        # Only the first rank asks whether the server is away, so that all ranks do without it in the same steps.
        version, away = broadcast_object_list([version, self.pool.problem is not None])
        step = GenerationStep(
            inputs=inputs,
            size=self.num_generations,
            first=self.accelerator.process_index * len(inputs),
            version=version,
            away=away,
            seconds=time.perf_counter() - started,
        )
        self._replay_step = step
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self._replay_step = None
            self.__dict__.pop("_calculate_rewards", None)  # see the end of `_generate`
        if step.fresh is None:  # the completions have images
            return output
        if step.final_rewards is not None:  # TRL has not asked for them
            raise mismatch("TRL", "it does not call _calculate_rewards after _generate")
        if not away:
            with step.timed():
                logprobs_BT = self._correct(step, output)
                fresh_rows = self._fresh_rows(step, logprobs_BT)
                self.pool.insert(self._informative_groups(step, fresh_rows))
        self._report(step)
        return output

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """TRL's method. Some of its rows, such as those of zero-variance groups, are then replaced by stored groups."""
        generated: tuple[Any, ...] = super()._generate(prompts)
        step = self._replay_step
        if step is None:
            return generated
        if len(generated) != GENERATED:
            raise mismatch("TRL", f"_generate returns {len(generated)} values, not {GENERATED}")
        prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, _ = generated
        if self._is_vlm:
            has_images = torch.tensor([images is not None], device=self.accelerator.device)
            # All ranks must return here if one rank does, because the rest of this method has collective operations.
            if gather(has_images).any():
                return generated
        # TRL, too, puts the extra fields into the examples before it computes rewards.
        for row, example in enumerate(step.inputs):
            for name, values in extra_fields.items():
                if not isinstance(values, list):
                    example[name] = values
                elif row < len(values):
                    example[name] = values[row]
        # A subclass may have overridden _calculate_rewards, so it is called as a method.
        step.rewards = self._calculate_rewards(step.inputs, prompts, completions, completion_ids).clone()
        with step.timed():
            step.fresh = GeneratedRows(prompt_ids, completion_ids, tool_mask, logprobs)
            rows = step.fresh.copy()  # the lists may belong to a rollout_func of the user, so they are not changed
            if tool_mask is None:
                trained = [bool(ids) for ids in completion_ids]
            else:
                trained = [any(mask) for mask in tool_mask]
            step.trained = gather(torch.tensor(trained, device=self.accelerator.device)).tolist()
            step.final_rewards = gather(self._replace(step, rows, prompts, completions))
        # TRL calls _calculate_rewards for the final rows next. Their rewards are known, so the method is replaced for
        # this call: an attribute of the object hides the method of the class.
        self.__dict__["_calculate_rewards"] = step.take_rewards
        # `extra_fields`, the sixth value, and the images after it stay as TRL made them.
        return rows.prompt_ids, rows.completion_ids, rows.tool_mask, completions, rows.logprobs, *generated[5:]

    # -------------------------------------------------------------------------------------------------- replacing

    def _replace(self, step: GenerationStep, rows: GeneratedRows, prompts: list[Any], completions: list[Any]) -> Tensor:
        """Replaces rows, and the texts that TRL logs for these rows. Returns the rewards (B, F) of the final rows.

        The groups of all ranks are numbered, and `g` is the number of a group. `step.present` has the groups with rows
        on this rank. `step.owned` has those of them whose replacements this rank draws.
        """
        assert self.pool is not None
        assert step.rewards is not None
        priorities: dict[int, float] = {}
        for g in step.present:
            rows_of_group = step.rows_of(g)
            priorities[g] = self._priority(step.rewards[rows_of_group], step.trained[rows_of_group])
        zero_variance = [g for g in step.owned if priorities[g] == 0]
        # Groups without variance have the lowest priority, so they are always among the replaced groups.
        wanted = max(len(zero_variance), round(self._replay.replay_share * len(step.owned)))
        if self._replay.replay_share and rows.logprobs is None and not step.away:
            # A fresh row that is replaced may have to be stored, together with its log-probabilities. TRL does not
            # compute these for a row that was replaced, so they are computed now.
            step.fresh_logprobs = self._logprobs(*self._padded(rows))
        lowest_first = sorted(step.owned, key=lambda g: priorities[g])
        replaced = lowest_first[:wanted]
        drawn: list[Sample] = []
        if not step.away:
            drawn = self.pool.draw(len(replaced), f"{self._run}/{self._step}", self._accept)
        # Not strict: the pool may have returned fewer groups than wanted.
        step.replaced = dict(zip(replaced, drawn, strict=False))
        step.stored = self._stored_groups(step)
        step.zero_variance = len(zero_variance)
        step.missing = len([g for g in zero_variance if g not in step.replaced])

        final_BF = step.rewards_BF.clone()
        for g, group in step.stored.items():
            rewards_GF = self._stored_rewards(group)
            for row, k in step.places(g):
                rows.put(row, group, k)
                final_BF[row] = rewards_GF[k]
                self._log_row(row, rows, prompts, completions)
        if self._replay.replay_on_empty == "drop":
            for g in step.present:
                if priorities[g] == 0 and g not in step.stored:
                    # The group was not replaced. The loss leaves it out, because all of its tokens are masked.
                    for row, _ in step.places(g):
                        rows.mask()[row] = [0] * len(rows.completion_ids[row])
        return final_BF

    def _stored_groups(self, step: GenerationStep) -> dict[int, RolloutGroup]:
        """The stored groups that replace groups with rows on this rank, by the number of the replaced group."""
        if not self._groups_span_ranks:
            return {g: sample.group for g, sample in step.replaced.items()}
        # Of a group that spans ranks, only the owner has drawn the replacement. The other ranks get it from the owner.
        drawn = gather_object([(g, bytes(sample.payload)) for g, sample in step.replaced.items()])
        return {g: RolloutGroup.decode(payload) for g, payload in drawn if g in step.present}

    def _priority(self, rewards_GF: Tensor, trained: list[bool]) -> float:
        """The priority of a group; 0 if the group carries no gradient with the advantages that TRL computes.

        TRL computes advantages for one or several columns of rewards. The priority is the sum of `group_priority` over
        these columns. `rewards_GF`: the rewards of G rollouts by F reward functions. `trained`: for each rollout, True
        if it has tokens to train on.
        """
        scorable_G = ~rewards_GF.isnan().all(dim=1)  # False for a rollout to which no function gave a reward
        weighted_GF = rewards_GF * self.reward_weights.to(rewards_GF.device)
        weighted_GF = weighted_GF[scorable_G].nan_to_num(nan=0.0)
        if self.multi_objective_aggregation == "sum_then_normalize":
            weighted_GF = weighted_GF.sum(dim=1, keepdim=True)
        columns = weighted_GF.T.tolist() if len(weighted_GF) else []
        mask = np.array(trained)[scorable_G.cpu().numpy()]
        groups = [_group_of_rewards(column, mask) for column in columns]
        # With "none", the advantages are the rewards minus their mean. They are 0 whenever TRL's advantages are 0.
        if not any(carries_gradient(group, "none") for group in groups):
            return 0.0
        return sum(group_priority(group.rewards, group.advantages) for group in groups)

    def _accept(self, group: RolloutGroup) -> bool:
        """True if a stored group fits into the batch."""
        # In TRL's batch, each row has a prompt, and all groups have the same size.
        if group.group_size != self.num_generations or not group.prompt_lengths.all():
            return False
        if group.sampled_lengths.min() == 0:  # a completion is empty
            return False
        if self.max_completion_length and group.sampled_lengths.max() > self.max_completion_length:
            return False
        trained = [bool(group.trained_mask[span].any()) for span in group.sampled_spans()]
        if not self._priority(self._stored_rewards(group), trained) > 0:  # also refuses NaN
            return False
        return self._has_our_objective(group)

    def _has_our_objective(self, group: RolloutGroup) -> bool:
        """True if the reward functions of this run scored a stored group, or if replay_same_rewards is False.

        Counts the groups that other reward functions scored, and warns of the first one.
        """
        if self._same_rewards(group):
            return True
        assert self._replay_step is not None
        self._replay_step.other_rewards += 1
        if not self._warned_of_rewards:
            logger.warning(
                "table %r has groups that other reward functions scored (%s; this run: %s), which teach another "
                "objective: replay_same_rewards=True leaves them out (said once; replay/other_rewards counts them)",
                self._replay.replay_table,
                ", ".join(map(str, group.meta.get("reward_funcs", ["unknown"]))),
                ", ".join(self.reward_func_names),
            )
        self._warned_of_rewards = True
        return not self._replay.replay_same_rewards

    def _same_rewards(self, group: RolloutGroup) -> bool:
        """True if the reward functions of this run scored the group."""
        return group.meta.get("rewards") == self._fingerprint

    def _stored_rewards(self, group: RolloutGroup) -> Tensor:
        """(G, F) rewards of a stored group by reward function, from which TRL computes the advantages anew."""
        rewards_GF = group.extras.get("rewards_per_func")
        if rewards_GF is None or not self._same_rewards(group):
            # Other functions scored this group. Its reward is put into the column of our first function whose weight is
            # not 0. It is divided by this weight, so that the weighted sum is the reward. All other columns have NaN,
            # as if their functions had returned nothing.
            weights = self.reward_weights.tolist()
            column = next(k for k, weight in enumerate(weights) if weight)
            rewards_GF = np.full((group.group_size, len(weights)), np.nan, np.float32)
            rewards_GF[:, column] = group.rewards / weights[column]
        return torch.tensor(rewards_GF, device=self.accelerator.device)

    def _log_row(self, row: int, rows: GeneratedRows, prompts: list[Any], completions: list[Any]) -> None:
        """Replaces the values that TRL logs for a row: its texts, and its extra columns, which become None.

        Stored groups have no extra columns.
        """
        self._log_text(row, rows.prompt_ids[row], prompts, "user")
        self._log_text(row, rows.completion_ids[row], completions, "assistant")
        for values in self._pending_extra_logs.values():
            if row < len(values):
                values[row] = None

    def _log_text(self, row: int, token_ids: list[int], texts: list[Any], role: str) -> None:
        """Replaces a text that TRL logs. The text is a string or a list of messages."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        if isinstance(texts[row], str):
            texts[row] = text
        else:
            texts[row] = [{"role": role, "content": text}]

    # ------------------------------------------------------------------------------------------------- correcting

    def _correct(self, step: GenerationStep, output: dict[str, Any]) -> Tensor | None:
        """Corrects the advantages of replaced rows, unless TRL corrects. Returns the log-probabilities (B, T) under the
        current weights; None if TRL corrects."""
        mask_BT = output["completion_mask"] * output.get("tool_mask", 1)
        replaced = [row for g in step.stored for row, _ in step.places(g)]  # the replaced rows of this rank
        if self.use_vllm and self.vllm_importance_sampling_correction:
            # TRL corrects, so only its ratio is reported. The ratio has one column if TRL computes it for whole
            # sequences, otherwise one column for each token.
            ratio = output["importance_sampling_ratio"].expand_as(mask_BT)[replaced] * mask_BT[replaced]
            step.ratio = (float(ratio.sum()), float(mask_BT[replaced].sum()))
            return None
        old_BT: Tensor | None = output.get("old_per_token_logps")
        if old_BT is None:
            # Even a rank without replaced rows computes log-probabilities, because a partitioned model needs all ranks.
            old_BT = self._logprobs(
                output["prompt_ids"],
                output["completion_ids"],
                output["prompt_mask"],
                output["completion_mask"],
            )
        # Fresh rows count as on-policy, so their log-probabilities are those under the current weights.
        stored_BT = old_BT.clone()
        for g, group in step.stored.items():
            for row, k in step.places(g):
                logprobs = group.rollout_logprobs[group.sampled_spans()[k]]
                # torch.tensor makes a copy, because the client's arrays are read-only.
                stored_BT[row, : len(logprobs)] = torch.tensor(logprobs).to(stored_BT)
        if replaced:
            config = CorrectionConfig(clip_max=self._replay.replay_clip_max)
            correction = correct(old_BT[replaced], stored_BT[replaced], mask_BT[replaced], config)
            step.ratio = (float(correction.weights.sum()), float(mask_BT[replaced].sum()))
            weights_BT = torch.ones_like(old_BT)
            weights_BT[replaced] = correction.weights.to(old_BT)
            # One advantage for each row (B,) becomes one for each token (B, T).
            output["advantages"] = output["advantages"].unsqueeze(1) * weights_BT
        if self.off_policy_mask_threshold is not None:
            # TRL uses these log-probabilities to find and mask the rows that are too far off-policy.
            output.setdefault("sampling_per_token_logps", stored_BT)
        # TRL's values for masked tokens, such as those of truncated completions, have no meaning.
        return old_BT.masked_fill(output["completion_mask"] == 0, torch.nan)

    def _logprobs(
        self, prompt_ids: Tensor, completion_ids: Tensor, prompt_mask: Tensor, completion_mask: Tensor
    ) -> Tensor:
        """The log-probabilities (B, T) of the completions under the current weights, as TRL computes them."""
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            logprobs, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                input_ids=torch.cat([prompt_ids, completion_ids], dim=1),
                attention_mask=torch.cat([prompt_mask, completion_mask], dim=1),
                logits_to_keep=completion_ids.size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        return logprobs  # type: ignore[no-any-return]

    def _padded(self, rows: GeneratedRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(prompt_ids, completion_ids, prompt_mask, completion_mask), as `_logprobs` takes them.

        Prompts are padded on the left, and completions on the right.
        """
        device = self.accelerator.device
        prompts = [torch.tensor(ids, device=device) for ids in rows.prompt_ids]
        completions = [torch.tensor(ids, device=device) for ids in rows.completion_ids]
        prompt_mask = _pad([torch.ones_like(ids) for ids in prompts], "left")
        completion_mask = _pad([torch.ones_like(ids) for ids in completions], "right")
        return _pad(prompts, "left"), _pad(completions, "right"), prompt_mask, completion_mask

    # --------------------------------------------------------------------------------------------------- storing

    def _fresh_rows(self, step: GenerationStep, logprobs_BT: Tensor | None) -> list[FreshRow]:
        """The rows that this rank generated; the rows of all ranks if groups span ranks.

        The log-probabilities of the rows are those of the sampler. If the sampler gives none, they are those of
        `step.fresh_logprobs` or, if these were not computed, of `logprobs_BT`, the result of `_correct`.
        """
        fresh = step.fresh
        assert fresh is not None
        logprobs: list[list[float]] = []
        if fresh.logprobs is not None:
            for row in fresh.logprobs:
                logprobs.append([np.nan if logprob is None else logprob for logprob in row])
        else:
            computed_BT = logprobs_BT if step.fresh_logprobs is None else step.fresh_logprobs
            assert computed_BT is not None
            for logprobs_T, ids in zip(computed_BT, fresh.completion_ids, strict=True):
                logprobs.append(logprobs_T[: len(ids)].tolist())
        masks: list[Any] = fresh.tool_mask or [None] * len(logprobs)
        rows = list(map(FreshRow, fresh.prompt_ids, fresh.completion_ids, masks, logprobs))
        if self._groups_span_ranks:
            return list(gather_object(rows))
        return rows

    def _informative_groups(self, step: GenerationStep, rows: list[FreshRow]) -> Iterator[RolloutGroup]:
        """The fresh groups that this rank owns and that a later step can learn from.

        `rows`: the result of `_fresh_rows`.
        """
        assert step.rewards is not None
        # The number, over all ranks, of the first row in `rows`.
        first = 0 if self._groups_span_ranks else step.first
        for g in step.owned:
            rewards_GF = step.rewards[step.rows_of(g)]
            a_rollout_failed = rewards_GF.isnan().all(dim=1).any()
            if a_rollout_failed or not self._priority(rewards_GF, step.trained[step.rows_of(g)]):
                continue
            first_of_group = g * step.size - first
            members = rows[first_of_group : first_of_group + step.size]
            rewards = (rewards_GF * self.reward_weights.to(rewards_GF.device)).nansum(dim=1).tolist()
            masks: list[Any] = [row.mask for row in members]
            scale: Literal["group", "none"] = "none" if self.scale_rewards == "none" else "group"
            yield group_from_rows(
                prompts=[row.prompt_ids for row in members],
                completions=[row.completion_ids for row in members],
                logprobs=[row.logprobs for row in members],
                loss_masks=None if any(mask is None for mask in masks) else masks,
                rewards=rewards,
                advantages=group_advantages(rewards, scale),
                policy_version=step.version,
                sampling={"temperature": self.temperature},
                extras={"rewards_per_func": rewards_GF.cpu().numpy()},
                axes={"rewards_per_func": "rollout"},
                meta={"reward_funcs": list(self.reward_func_names), "rewards": self._fingerprint, "run": self._run},
            )

    def _report(self, step: GenerationStep) -> None:
        """Adds the metrics over all ranks to TRL's metrics. Raises ServerUnavailableError on every rank if the server
        is away for any rank and replay_on_unavailable is "raise"."""
        assert self.pool is not None
        rewards_B = (step.rewards_BF * self.reward_weights.to(step.rewards_BF.device)).nansum(dim=1)
        staleness = [sample.info.staleness for sample in step.replaced.values()]
        away = step.away or self.pool.problem is not None
        sums = {
            "groups_replaced": len(staleness),
            "groups_missing": step.missing,
            "groups_unusable": self.pool.take_unusable(),
            "other_rewards": step.other_rewards,
            "unavailable": float(away),
        }
        means = {
            "fresh_reward": (float(rewards_B.sum()), len(rewards_B)),
            "fresh_zero_variance": (step.zero_variance, len(step.owned)),
            "staleness": (sum(staleness), len(staleness)),
            "ratio": step.ratio,
            "seconds": (step.seconds, 1),
        }
        # One reduction over the ranks sums all metrics. Each metric is a row (total, count). Sums do not use the count.
        local_rows = [(total, 1) for total in sums.values()] + [*means.values()]
        local = torch.tensor(local_rows, dtype=torch.float64)
        reduced = self.accelerator.reduce(local.to(self.accelerator.device)).tolist()
        values = {name: total for name, (total, _) in zip(sums, reduced, strict=False)}
        if values["unavailable"] and self._replay.replay_on_unavailable == "raise":
            reason = self.pool.problem or "another rank does not reach it"
            raise ServerUnavailableError(f"the replay server is away: {reason}")
        values["unavailable"] = float(values["unavailable"] > 0)
        for name, (total, count) in zip(means, reduced[len(sums) :], strict=True):
            values[name] = total / count if count else np.nan
        for name, value in values.items():
            self._metrics["train"][f"replay/{name}"].append(value)


# The names of TRL's own replay buffer, which TRL has removed, so that code written for it finds this trainer.
GRPOWithReplayBufferConfig = ReplayGRPOConfig
GRPOWithReplayBufferTrainer = ReplayGRPOTrainer


class _Leave(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Tells the server at the end of a run that this trainer has ended as planned."""

    def __init__(self, client: ReplayClient, server: ReplayServer | None) -> None:
        """`server`: the server inside this process, if there is one."""
        self._client = client
        self._server = server

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Warns if a run is resumed and its server, which was inside the process of the previous run, has ended."""
        if state.global_step and self._server is not None:
            logger.warning(
                "the run goes on after step %d with an empty pool, for its server ended with the run before: "
                "`replay serve`, with its address as `replay`, keeps the groups",
                state.global_step,
            )

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._client.leave()


def _group_of_rewards(rewards: list[float], trained: npt.NDArray[np.bool_]) -> RolloutGroup:
    """A group with these rewards, whose completions have one token each. `trained`: the loss mask of these tokens.

    `carries_gradient` and `group_priority` depend only on the rewards and the mask of such a group.
    """
    zeros = [[0]] * len(rewards)
    return group_from_completions(
        prompt_ids=[0],
        completions=zeros,
        logprobs=zeros,
        rewards=rewards,
        advantages=group_advantages(rewards),
        loss_mask=trained,
    )


def _pad(rows: list[Tensor], side: str) -> Tensor:
    """The rows as one tensor (B, T), padded with zeros on one side."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)


def _close(client: ReplayClient | None, server: ReplayServer | None) -> None:
    """Closes the client, and stops the server inside this process. None: there is no client or server.

    Called when the trainer is freed, when the process ends, or if the pool cannot be used.
    """
    if client is not None:
        client.close()
    if server is not None:
        server.stop()
