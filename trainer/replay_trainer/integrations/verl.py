"""verl's replay buffers with a replay server: stored groups replace groups whose rewards are all equal.

verl keeps the rows of a batch in TransferQueue, under `{uid}_{session}_{index}`. A replaced group keeps its keys and
its other columns. What verl computes the loss from is overwritten, before verl computes anything of it:

    prompts, responses, input_ids, position_ids, response_mask, loss_mask, rollout_log_probs, rm_scores

verl then computes old log-probabilities and advantages of all rows alike. Its `algorithm.rollout_correction` corrects
them by the stored log-probabilities, and needs `actor_rollout_ref.rollout.calculate_log_probs=True`.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from replay_client import ReplayClient, RolloutGroup, group_from_rows
from replay_client.scoring import group_advantages
from replay_trainer.integrations.pool import GroupPool

COLUMNS = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores")
"""What a stored group is made of."""
_DERIVED = {"input_ids", "position_ids", "loss_mask"}


class _WithPool:
    """Adds a pool to one of verl's buffers.

    `sampler_kwargs` of verl's configuration: `address` (host:port; left out: REPLAY_ADDRESS), `table` ("replay"),
    `max_staleness` (steps), `max_prompt_length` and `max_response_length` (tokens that a stored row may have), and
    `on_unavailable` ("continue": without the server train on verl's own batch; "raise").
    """

    def __init__(self, *args: Any, sampler_kwargs: Mapping[str, Any], **kwargs: Any) -> None:
        """Raises ValueError for an unknown option, and for group filtering without a metric."""
        # verl sets these for its own buffers only, and so its options for them would do nothing.
        filtering = _filtering(sampler_kwargs, alone=isinstance(self, ReplayBufferAsync)) | kwargs
        super().__init__(*args, sampler_kwargs=sampler_kwargs, **filtering)  # type: ignore[call-arg]
        options = dict(sampler_kwargs or {})
        self.pool = GroupPool(
            ReplayClient.from_env(address=options.pop("address", None)),
            options.pop("table", "replay"),
            max_staleness=options.pop("max_staleness", None),
            on_unavailable=options.pop("on_unavailable", "continue"),
        )
        self._longest = [options.pop(name, None) for name in ("max_prompt_length", "max_response_length")]
        if options:
            raise ValueError(f"sampler_kwargs has {', '.join(options)}, which {type(self).__name__} does not know")
        self._run = uuid.uuid4().hex
        self._checked = False

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """verl's batch after replacement, and verl's metrics with `replay/*`."""
        batch, metrics = super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]
        if partition_id == "val":
            return batch, metrics
        self._check_columns(batch)
        version = self.pool.advance(global_steps)
        keys, groups = self._read(batch, version)
        replaced, ours = self.pool.replace(groups, f"{self._run}/{global_steps}", self._fits)
        for name, sample in replaced.items():
            self._overwrite(batch, keys[name], sample.group, global_steps - sample.info.staleness)
        return batch, metrics | ours

    def _check_columns(self, batch: Any) -> None:
        """Raises ValueError if a row lacks what a group is made of, or has columns of tokens that no group has."""
        if self._checked or not batch.keys:
            return
        row = tq.kv_batch_get(keys=batch.keys[:1], partition_id=batch.partition_id)
        if missing := {*COLUMNS} - {*row.keys()}:
            raise ValueError(
                f"verl's rows have no {', '.join(sorted(missing))}: set actor_rollout_ref.rollout.calculate_log_probs="
                "True, and compute rewards during the rollout (no colocated reward model)"
            )
        lengths = {len(row["responses"][0]), len(row["prompts"][0]) + len(row["responses"][0])}
        others = [
            name
            for name in row.keys() - {*COLUMNS, *_DERIVED}
            if isinstance(row[name], torch.Tensor) and row[name].dim() > 1 and row[name][0].shape[0] in lengths
        ]
        if others:
            raise ValueError(f"verl's rows have {', '.join(others)} of each token, which stored groups do not have")
        self._checked = True

    def _read(self, batch: Any, version: int) -> tuple[dict[str, list[str]], dict[str, RolloutGroup]]:
        """The keys and the group of each uid that has one row of each session, and no images."""
        keys: dict[str, list[str]] = defaultdict(list)
        for key in batch.keys:
            keys[key.split("_")[0]].append(key)
        rows = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=[*COLUMNS, "multi_modal_inputs"]
        )
        values = {name: dict(zip(batch.keys, rows[name], strict=True)) for name in (*COLUMNS, "multi_modal_inputs")}
        groups = {}
        for name, members in keys.items():
            sessions = {key.split("_")[1] for key in members}
            images = any(_plain(values["multi_modal_inputs"][key]) for key in members)
            if len(sessions) < len(members) or images:
                continue
            rewards = [float(values["rm_scores"][key].sum()) for key in members]
            groups[name] = group_from_rows(
                prompts=[values["prompts"][key].numpy() for key in members],
                completions=[values["responses"][key].numpy() for key in members],
                logprobs=[values["rollout_log_probs"][key].float().numpy() for key in members],
                rewards=rewards,
                advantages=group_advantages(rewards),
                loss_masks=[values["response_mask"][key].numpy() for key in members],
                policy_version=version,
            )
        return keys, groups

    def _fits(self, group: RolloutGroup) -> bool:
        """Whether a stored group can stand in verl's batch."""
        lengths = (int(group.prompt_lengths.max()), int(group.sampled_lengths.max()))
        known = [np.isfinite(group.rollout_logprobs[span]).all() for span in group.sampled_spans()]
        return (
            group.sampled_lengths.min() > 0
            and bool(group.prompt_lengths.all())
            and all(known)  # verl does not bear a NaN
            and all(
                longest is None or length <= longest for length, longest in zip(lengths, self._longest, strict=True)
            )
        )

    def _overwrite(self, batch: Any, keys: list[str], group: RolloutGroup, step: int) -> None:
        """Put a stored group in the place of the rows `keys`; it was generated at `step` of this run's count."""
        rows = []
        for key, prompt_ids, span, reward in zip(
            keys, group.prompts(), group.sampled_spans(), group.rewards, strict=True
        ):
            prompt = torch.tensor(prompt_ids, dtype=torch.int64)
            response = torch.tensor(group.completion_ids[span], dtype=torch.int64)
            mask = torch.tensor(group.trained_mask[span], dtype=torch.int64)
            scores = torch.zeros(len(response))
            scores[-1] = float(reward)  # where verl has a reward for the whole response
            rows.append(
                {
                    "prompts": prompt,
                    "responses": response,
                    "input_ids": torch.cat([prompt, response]),
                    "position_ids": torch.arange(len(prompt) + len(response)),
                    "response_mask": mask,
                    "loss_mask": mask,
                    "rollout_log_probs": torch.tensor(group.rollout_logprobs[span]),
                    "rm_scores": scores,
                }
            )
            batch.tags[batch.keys.index(key)] |= {
                "prompt_len": len(prompt),
                "response_len": len(response),
                "seq_len": len(prompt) + len(response),
                "min_global_steps": step,
                "max_global_steps": step,
            }
        tags = [batch.tags[batch.keys.index(key)] for key in keys]
        tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=list_of_dict_to_tensordict(rows), tags=tags)


def _filtering(sampler_kwargs: Any, alone: bool) -> dict[str, Any]:
    """What verl would tell its own buffer of `algorithm.filter_groups` and `sync_refill_failed_groups`.

    `alone`: without the settings of the synchronous buffer. Raises ValueError for filtering without a metric.
    """
    # verl hands over a part of its configuration, which knows the whole.
    whole = sampler_kwargs._get_root() if isinstance(sampler_kwargs, DictConfig) else OmegaConf.create()
    groups = OmegaConf.select(whole, "algorithm.filter_groups") or {}
    refill = bool(OmegaConf.select(whole, "trainer.v1.sampler.sync_refill_failed_groups"))
    metric = groups.get("metric") if groups.get("enable") else None
    if groups.get("enable") and not metric:
        raise ValueError("algorithm.filter_groups is on and names no metric: set algorithm.filter_groups.metric=reward")
    if metric is None and not refill:
        return {}
    told = {"filter_groups_metric": metric, "sync_refill_failed_groups": refill}
    if alone:
        return told
    return told | {
        "train_batch_size": OmegaConf.select(whole, "data.train_batch_size"),
        "gen_batch_size": 1,  # verl's trainer then fetches one prompt at a time
        "max_inflight_gen_batches": groups.get("max_inflight_gen_batches", 1),
    }


def _plain(value: Any) -> Any:
    """The object in a column that holds no tensors; tensordict wraps some of them."""
    return getattr(value, "data", value)


class ServerReplayBuffer(_WithPool, ReplayBuffer):  # type: ignore[misc]  # verl has no types that mypy reads
    """For verl's synchronous trainer."""


class ServerReplayBufferAsync(_WithPool, ReplayBufferAsync):  # type: ignore[misc]
    """For verl's asynchronous trainers."""
