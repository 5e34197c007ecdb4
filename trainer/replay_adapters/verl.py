"""verl's replay buffers with a replay server: stored groups replace groups whose rewards are all equal.

verl keeps the rows of a batch in TransferQueue, under keys `{uid}_{session}_{index}`. When a stored group replaces a
group, the keys stay, and the columns from which verl computes the loss are overwritten before verl uses them:

    prompts, responses, input_ids, position_ids, response_mask, loss_mask, rollout_log_probs, rm_scores

and each further column with a value for each token, such as the routing of experts. All other columns stay. A session
of several rows is a rollout of several sequences. If the stored rollout has more or fewer rows than the session that it
replaces, rows are added or removed.

verl then computes old log-probabilities and advantages in the same way for all rows. Its `algorithm.rollout_correction`
corrects by the stored log-probabilities, for which it needs `actor_rollout_ref.rollout.calculate_log_probs=True`.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replay_adapters.group_pool import GroupPool
from replay_adapters.hooks import hooks_of
from replay_adapters.samples import narrowest
from replay_client import ReplayClient, RolloutGroup, group_from_rows, row_of
from replay_client.scoring import group_advantages

with hooks_of("verl"):
    import transfer_queue as tq
    from omegaconf import DictConfig, OmegaConf
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

COLUMNS = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores")
"""The columns of verl that a stored group is made of."""
_DERIVED = {"input_ids", "position_ids", "loss_mask"}
"""The columns of verl that are computed from COLUMNS, so they are not stored."""
_WHOLE = "whole"
"""The axis of a column with a row for each token of prompt and response."""
_TOKEN = "token"
"""The axis of a column with a row for each token of the response."""
_DTYPES = "verl_dtypes"
"""The entry in the meta of a stored group with the dtypes that its columns of tokens have in verl. The group may hold
them in a narrower dtype: routing fits into uint8."""


class _WithPool:
    """Adds a pool to one of verl's buffers.

    `sampler_kwargs` of verl's configuration: `address` (host:port; left out: REPLAY_ADDRESS), `table` ("replay"),
    `max_staleness` (steps), `max_prompt_length` and `max_response_length` (the most tokens of a stored row), and
    `on_unavailable` ("continue", the default: while the server is away, train on verl's own batch; or "raise").
    """

    def __init__(self, *args: Any, sampler_kwargs: Mapping[str, Any], **kwargs: Any) -> None:
        """Raises ValueError for an unknown option, and for group filtering without a metric."""
        # verl passes the options of group filtering only to its own buffers, so this buffer reads them itself.
        filtering = _filtering(sampler_kwargs, is_async=isinstance(self, ReplayBufferAsync))
        super().__init__(*args, sampler_kwargs=sampler_kwargs, **(filtering | kwargs))  # type: ignore[call-arg]
        options = dict(sampler_kwargs or {})
        self.pool = GroupPool(
            ReplayClient.from_env(address=options.pop("address", None)),
            options.pop("table", "replay"),
            max_staleness=options.pop("max_staleness", None),
            sequences=True,
            on_unavailable=options.pop("on_unavailable", "continue"),
        )
        self._tensors: list[str] = []
        """The names of all columns of tensors beside COLUMNS and the derived ones. They may have a row for each
        token."""
        self._others: dict[str, str] = {}
        """The columns of `_tensors` that have a row for each token in the current batch: name -> axis."""
        self._max_prompt_length: int | None = options.pop("max_prompt_length", None)
        self._max_response_length: int | None = options.pop("max_response_length", None)
        if options:
            raise ValueError(f"sampler_kwargs has {', '.join(options)}, which {type(self).__name__} does not know")
        self._run = uuid.uuid4().hex
        """The beginning of the scopes of this run's draws."""
        self._checked = False
        """True once `_check_columns` has checked a row."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """verl's batch after replacement, and verl's metrics with `replay/*`."""
        batch, metrics = super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]
        if partition_id == "val":  # validation
            return batch, metrics
        self._check_columns(batch)
        version = self.pool.advance(global_steps)
        keys, groups = self._read(batch, version)
        replaced, pool_metrics = self.pool.replace(groups, f"{self._run}/{global_steps}", self._fits)
        for name, sample in replaced.items():
            batch = self._overwrite(batch, keys[name], sample.group, global_steps - sample.info.staleness)
        return batch, metrics | pool_metrics

    def _check_columns(self, batch: Any) -> None:
        """Finds the names of the further columns, once. Raises ValueError if a row lacks one of COLUMNS."""
        if self._checked or not batch.keys:
            return
        row = tq.kv_batch_get(keys=batch.keys[:1], partition_id=batch.partition_id)
        missing = set(COLUMNS) - set(row.keys())
        if missing:
            raise ValueError(
                f"verl's rows have no {', '.join(sorted(missing))}: set actor_rollout_ref.rollout.calculate_log_probs="
                "True, and compute rewards during the rollout (no colocated reward model)"
            )
        self._tensors = []
        for name in row.keys() - {*COLUMNS, *_DERIVED}:
            column = row[name]  # (1, ...), because `row` is a batch of one row
            if isinstance(column, Tensor) and column.dim() > 1 and not column.is_complex():
                self._tensors.append(name)
        self._checked = True

    def _read(self, batch: Any, version: int) -> tuple[dict[str, list[str]], dict[str, RolloutGroup]]:
        """By uid: the keys of its rows, in the order of sessions and rows, and its group. A uid with images has no
        group."""
        keys: dict[str, list[str]] = defaultdict(list)
        for key in sorted(batch.keys, key=_place):
            keys[key.split("_")[0]].append(key)  # by uid
        columns = [*COLUMNS, "multi_modal_inputs", *self._tensors]
        rows = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=columns)
        values = {name: dict(zip(batch.keys, rows[name], strict=True)) for name in columns}
        self._others = _columns_of_tokens({name: values[name] for name in self._tensors}, values)
        groups = {}
        for name, members in keys.items():
            has_images = any(_plain(values["multi_modal_inputs"][key]) for key in members)
            if not has_images:
                groups[name] = self._group(members, values, version)
        return keys, groups

    def _group(self, members: list[str], values: Mapping[str, Mapping[str, Any]], version: int) -> RolloutGroup:
        """The rows of a uid as a group."""
        sessions = [key.split("_")[1] for key in members]
        counts = [sessions.count(session) for session in dict.fromkeys(sessions)]  # the rows of each session
        scores = [values["rm_scores"][key] for key in members]
        rewards = []
        row = -1
        for count in counts:
            row += count  # as in verl, the reward of a session is that of its last row
            rewards.append(float(scores[row].sum()))
        dtypes = {}
        columns = {}
        for column, axis in self._others.items():
            tensors = [values[column][key] for key in members]
            dtypes[column] = str(tensors[0].dtype).removeprefix("torch.")
            arrays = [_numpy(tensor) for tensor in tensors]
            dtype = narrowest(arrays)
            columns[column] = (axis, [array.astype(dtype) for array in arrays])
        has_rewards_before_last_token = any(int(score[:-1].count_nonzero()) for score in scores)
        if has_rewards_before_last_token:  # so the reward of the row does not tell those of its tokens
            columns["rm_scores"] = (_TOKEN, [_numpy(score) for score in scores])
        return group_from_rows(
            prompts=[values["prompts"][key].numpy() for key in members],
            completions=[values["responses"][key].numpy() for key in members],
            logprobs=[values["rollout_log_probs"][key].float().numpy() for key in members],
            rewards=rewards,
            advantages=group_advantages(rewards),
            loss_masks=[values["response_mask"][key].numpy() for key in members],
            columns=columns,
            policy_version=version,
            sequence_counts=counts if max(counts) > 1 else None,
            meta={_DTYPES: dtypes} if dtypes else {},
        )

    def _fits(self, group: RolloutGroup) -> bool:
        """True if a stored group can stand in verl's batch."""
        if group.sampled_lengths.min() == 0 or not group.prompt_lengths.all():  # an empty response or prompt
            return False
        if self._max_prompt_length is not None and group.prompt_lengths.max() > self._max_prompt_length:
            return False
        if self._max_response_length is not None and group.sampled_lengths.max() > self._max_response_length:
            return False
        # verl computes NaN from a log-probability that is NaN.
        if not all(np.isfinite(group.rollout_logprobs[span]).all() for span in group.sampled_spans()):
            return False
        # In verl all rows have the same columns, so the group must have each further column of tokens, with its axis.
        dtypes = group.meta.get(_DTYPES, {})
        return all(group.axes.get(name) == axis and name in dtypes for name, axis in self._others.items())

    def _overwrite(self, batch: Any, keys: list[str], group: RolloutGroup, step: int) -> Any:
        """The batch with a stored group in the place of the rows `keys`.

        `step`: the step at which the stored group was generated, in the count of this run.
        """
        # The key of the first row of each session, in the order of the sessions.
        first_keys: dict[str, str] = {}
        for key in keys:
            first_keys.setdefault(_session(key), key)
        counts = [1] * group.group_size if group.sequence_counts is None else group.sequence_counts.tolist()
        new_keys = []
        for session, count in zip(first_keys, counts, strict=True):
            new_keys += [f"{session}_{i}" for i in range(count)]
        # A model of images and texts has several positions for each token. Without an image they are equal.
        replaced_row = tq.kv_batch_get(keys=keys[:1], partition_id=batch.partition_id, select_fields=["position_ids"])
        axes = replaced_row["position_ids"][0].shape[:-1]
        rows = {}
        tags: dict[str, dict[str, Any]] = dict(zip(batch.keys, batch.tags, strict=True))
        for key, row in zip(new_keys, self._rows(group, counts, axes), strict=True):
            prompt_length = len(row["prompts"])
            response_length = len(row["responses"])
            first = first_keys[_session(key)]
            tags[key] = tags.get(key, tags[first]) | {
                "prompt_len": prompt_length,
                "response_len": response_length,
                "seq_len": prompt_length + response_length,
                "min_global_steps": step,
                "max_global_steps": step,
            }
            if key in keys:  # the row exists, and only these columns of it are overwritten
                rows[key] = row
                continue
            # A row that is added to a session takes all other columns from the first row of the session.
            columns = tq.kv_batch_get(keys=[first], partition_id=batch.partition_id)
            whole_row = {name: _plain(columns[name][0]) for name in columns.keys()}  # noqa: SIM118
            self._put(batch, {key: whole_row | row}, tags)
        self._put(batch, rows, tags)
        removed = [key for key in keys if key not in new_keys]
        if removed:
            tq.kv_clear(keys=removed, partition_id=batch.partition_id)
        if set(new_keys) == set(keys):
            names = list(batch.keys)
        else:  # the rows of the group stand together, at the place of the first replaced row
            position = min(batch.keys.index(key) for key in keys)
            before = [key for key in batch.keys[:position] if key not in keys]
            after = [key for key in batch.keys[position:] if key not in keys]
            names = [*before, *new_keys, *after]
        return dataclasses.replace(batch, keys=names, tags=[tags[key] for key in names])

    def _put(self, batch: Any, rows: Mapping[str, Any], tags: Mapping[str, Any]) -> None:
        """Writes columns of rows, and their tags, by key."""
        tq.kv_batch_put(
            keys=list(rows),
            partition_id=batch.partition_id,
            fields=list_of_dict_to_tensordict(list(rows.values())),
            tags=[tags[key] for key in rows],
        )

    def _rows(self, group: RolloutGroup, counts: list[int], axes: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        """The columns of each row of a stored group. `counts`: the rows of each rollout. `axes`: the sizes of the axes
        of position_ids before the axis of tokens."""
        rewards = np.repeat(group.rewards, counts)
        spans = zip(group.prompts(), group.sampled_spans(), rewards, strict=True)
        for k, (prompt_ids, span, reward) in enumerate(spans):
            prompt = torch.tensor(prompt_ids, dtype=torch.int64)
            response = torch.tensor(group.completion_ids[span], dtype=torch.int64)
            mask = torch.tensor(group.trained_mask[span], dtype=torch.int64)
            scores = torch.zeros(len(response))
            scores[-1] = float(reward)  # verl has the reward of a response on its last token
            if "rm_scores" in group.extras:  # the group has rewards on other tokens as well: see `_group`
                scores = torch.tensor(row_of(group, "rm_scores", k))
            row = {
                "prompts": prompt,
                "responses": response,
                "input_ids": torch.cat([prompt, response]),
                "position_ids": torch.arange(len(prompt) + len(response)).repeat(*axes, 1),
                "response_mask": mask,
                "loss_mask": mask,
                "rollout_log_probs": torch.tensor(group.rollout_logprobs[span]),
                "rm_scores": scores,
            }
            dtypes = group.meta.get(_DTYPES, {})
            for name in self._others:
                row[name] = torch.tensor(row_of(group, name, k), dtype=getattr(torch, dtypes[name]))
            yield row


def _session(key: str) -> str:
    """The uid and the session of a row's key."""
    return key.rsplit("_", 1)[0]


def _place(key: str) -> tuple[str, int, int]:
    """The sort key of a row: uid, session and index."""
    uid, session, index = key.rsplit("_", 2)
    return uid, int(session), int(index)


def _columns_of_tokens(
    columns: Mapping[str, Mapping[str, Any]], values: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """The axes of the `columns` that have a row for each token, by name.

    verl does not describe its columns, and agent loops add columns. So a column counts as a column of tokens if it has
    as many rows as there are tokens, in every row of the batch. `columns` and `values`: column -> key -> value.
    """
    axes = {}
    for name, tensors in columns.items():
        lengths = [len(tensor) for tensor in tensors.values()]
        response_lengths = [len(values["responses"][key]) for key in tensors]
        prompt_lengths = [len(values["prompts"][key]) for key in tensors]
        whole_lengths = [p + r for p, r in zip(prompt_lengths, response_lengths, strict=True)]
        if lengths == whole_lengths:
            axes[name] = _WHOLE
        elif lengths == response_lengths:
            axes[name] = _TOKEN
    return axes


def _numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """The numbers of a tensor as an array. numpy has no bfloat16; float32 holds its numbers exactly."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.detach().cpu().numpy()


def _filtering(sampler_kwargs: Any, is_async: bool) -> dict[str, Any]:
    """The options that verl would pass to its own buffer for `algorithm.filter_groups` and `sync_refill_failed_groups`.

    `is_async`: leave out the options that only the synchronous buffer has. Raises ValueError for filtering without a
    metric.
    """
    # `sampler_kwargs` is a part of verl's configuration, through which the whole configuration can be read.
    whole = sampler_kwargs._get_root() if isinstance(sampler_kwargs, DictConfig) else OmegaConf.create()
    groups = OmegaConf.select(whole, "algorithm.filter_groups") or {}
    refill = bool(OmegaConf.select(whole, "trainer.v1.sampler.sync_refill_failed_groups"))
    metric = None
    if groups.get("enable"):
        metric = groups.get("metric")
        if not metric:
            raise ValueError(
                "algorithm.filter_groups is on and names no metric: set algorithm.filter_groups.metric=reward"
            )
    if metric is None and not refill:
        return {}
    filter_settings = {"filter_groups_metric": metric, "sync_refill_failed_groups": refill}
    if is_async:
        return filter_settings
    return filter_settings | {
        "train_batch_size": OmegaConf.select(whole, "data.train_batch_size"),
        "gen_batch_size": 1,  # with filtering, verl's trainer fetches one prompt at a time
        "max_inflight_gen_batches": groups.get("max_inflight_gen_batches", 1),
    }


def _plain(value: Any) -> Any:
    """The value in a column that does not hold tensors. tensordict wraps some of these values."""
    return getattr(value, "data", value)


class ServerReplayBuffer(_WithPool, ReplayBuffer):  # type: ignore[misc]  # verl has no types that mypy reads
    """The buffer of verl's synchronous trainer with a pool."""


class ServerReplayBufferAsync(_WithPool, ReplayBufferAsync):  # type: ignore[misc]
    """The buffer of verl's asynchronous trainers with a pool."""
