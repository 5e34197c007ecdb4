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
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from replay_client import ReplayClient, RolloutGroup, group_from_completions
from replay_client.scoring import carries_gradient, group_advantages
from replay_trainer.integrations.pool import GroupPool

COLUMNS = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores")
"""What a stored group is made of."""
_DERIVED = {"input_ids", "position_ids", "loss_mask"}


class _WithPool:
    """Adds a pool to one of verl's buffers.

    `sampler_kwargs` of verl's configuration: `address` (host:port; left out: REPLAY_ADDRESS), `table` ("replay"),
    `max_staleness` (steps), `max_prompt_length` and `max_response_length` (tokens that a stored group may have).
    """

    def __init__(self, *args: Any, sampler_kwargs: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, sampler_kwargs=sampler_kwargs, **kwargs)  # type: ignore[call-arg]
        options = dict(sampler_kwargs or {})
        client = ReplayClient.from_env(address=options.pop("address", None))
        self.pool = GroupPool(client, options.pop("table", "replay"), max_staleness=options.pop("max_staleness", None))
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
        zero_variance = [name for name, group in groups.items() if not carries_gradient(group)]
        # Groups in which a session failed are smaller, and stay.
        size = max((group.group_size for group in groups.values()), default=0)
        places = [name for name in zero_variance if groups[name].group_size == size]
        drawn = self.pool.draw(len(places), f"{self._run}/{global_steps}", lambda group: self._fits(group, size))
        replaced = dict(zip(places, drawn, strict=False))
        for name, sample in replaced.items():
            self._overwrite(batch, keys[name], sample.group, global_steps - sample.info.staleness)
        self.pool.insert(group for name, group in groups.items() if name not in zero_variance)
        rewards = [float(group.rewards.mean()) for group in groups.values()]
        staleness = [sample.info.staleness for sample in replaced.values()]
        return batch, metrics | {
            "replay/fresh_reward": float(np.mean(rewards)) if rewards else 0.0,
            "replay/fresh_zero_variance": len(zero_variance) / max(1, len(groups)),
            "replay/groups_replaced": len(replaced),
            "replay/groups_missing": len(zero_variance) - len(replaced),
            "replay/staleness": float(np.mean(staleness)) if staleness else 0.0,
        }

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
        """The keys and the group of each uid whose rows have one prompt, and no images."""
        keys: dict[str, list[str]] = defaultdict(list)
        for key in batch.keys:
            keys[key.split("_")[0]].append(key)
        rows = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=[*COLUMNS, "multi_modal_inputs"]
        )
        values = {name: dict(zip(batch.keys, rows[name], strict=True)) for name in (*COLUMNS, "multi_modal_inputs")}
        groups = {}
        for name, members in keys.items():
            prompts = {tuple(values["prompts"][key].tolist()) for key in members}
            images = any(_plain(values["multi_modal_inputs"][key]) for key in members)
            if len(prompts) > 1 or images:
                continue
            rewards = [float(values["rm_scores"][key].sum()) for key in members]
            groups[name] = group_from_completions(
                prompt_ids=prompts.pop(),
                completions=[values["responses"][key].numpy() for key in members],
                logprobs=[values["rollout_log_probs"][key].float().numpy() for key in members],
                rewards=rewards,
                advantages=group_advantages(rewards),
                loss_mask=torch.cat([values["response_mask"][key] for key in members]).bool().numpy(),
                policy_version=version,
            )
        return keys, groups

    def _fits(self, group: RolloutGroup, size: int) -> bool:
        """Whether a stored group can stand where one of `size` rows stood."""
        lengths = (group.prompt_ids.size, int(group.completion_lengths.max()))
        return (
            group.group_size == size
            and group.completion_lengths.min() > 0
            and lengths[0] > 0
            and bool(np.isfinite(group.rollout_logprobs).all())  # verl does not bear a NaN
            and all(
                longest is None or length <= longest for length, longest in zip(lengths, self._longest, strict=True)
            )
        )

    def _overwrite(self, batch: Any, keys: list[str], group: RolloutGroup, step: int) -> None:
        """Put a stored group in the place of the rows `keys`; it was generated at `step` of this run's count."""
        prompt = torch.tensor(group.prompt_ids, dtype=torch.int64)
        mask_T = np.ones(group.num_tokens, bool) if group.loss_mask is None else group.loss_mask
        rows, end = [], 0
        for key, response_ids, reward in zip(keys, group.completions(), group.rewards, strict=True):
            tokens = slice(end, end := end + len(response_ids))
            response = torch.tensor(response_ids, dtype=torch.int64)
            mask = torch.tensor(mask_T[tokens], dtype=torch.int64)
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
                    "rollout_log_probs": torch.tensor(group.rollout_logprobs[tokens]),
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


def _plain(value: Any) -> Any:
    """The object in a column that holds no tensors; tensordict wraps some of them."""
    return getattr(value, "data", value)


class ServerReplayBuffer(_WithPool, ReplayBuffer):  # type: ignore[misc]  # verl has no types that mypy reads
    """For verl's synchronous trainer."""


class ServerReplayBufferAsync(_WithPool, ReplayBufferAsync):  # type: ignore[misc]
    """For verl's asynchronous trainers."""
