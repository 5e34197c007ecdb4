"""Connects verl's replay buffers to a replay server: stored groups replace groups whose rewards are all equal.

verl keeps the rows of a batch in TransferQueue, under keys `{uid}_{session}_{index}`. The rows of a uid are a group, a
session is a rollout, and each of its rows is a sequence. When a stored group replaces a group, the keys stay. The
columns from which verl computes the loss are overwritten before verl uses them:

    prompts, responses, input_ids, position_ids, response_mask, loss_mask, rollout_log_probs, rm_scores

So is each further column with a value for each token, such as the routing of experts. All other columns stay. If the
stored rollout has more or fewer sequences than the session that it replaces, rows are added or removed.

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
    from verl.utils.tensordict_utils import NonTensorData, list_of_dict_to_tensordict

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

    `sampler_kwargs` of verl's configuration has these options, which may all be left out:

    * `address`: host:port. The default is REPLAY_ADDRESS.
    * `table`: the table of the pool. The default is "replay".
    * `max_staleness`: the most steps by which a stored group may lag.
    * `max_prompt_length`, `max_response_length`: the most tokens of the prompt and of the response of a stored row.
    * `on_unavailable`: with "continue", the default, verl trains on its own batch while the server is away. "raise"
      ends the run.
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
        """The names of the columns of tensors that are neither in COLUMNS nor in _DERIVED."""
        self._token_axes: dict[str, str] = {}
        """Name of each column of `_tensors` that has a row for each token in the current batch -> its axis."""
        self._max_prompt_length: int | None = options.pop("max_prompt_length", None)
        self._max_response_length: int | None = options.pop("max_response_length", None)
        if options:
            raise ValueError(f"sampler_kwargs has {', '.join(options)}, which {type(self).__name__} does not know")
        self._run = uuid.uuid4().hex
        """The beginning of the scopes of this run's draws."""
        self._checked = False
        """True once `_check_columns` has checked a row."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Returns verl's batch after the replacement, and verl's metrics with the metrics `replay/*`."""
        batch, metrics = super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]
        if partition_id == "val":  # validation
            return batch, metrics
        self._check_columns(batch)
        version = self.pool.advance(global_steps)
        keys, groups = self._read(batch, version)
        replaced, pool_metrics = self.pool.replace(groups, scope=f"{self._run}/{global_steps}", accept=self._fits)
        for uid, sample in replaced.items():
            generated_at = global_steps - sample.info.staleness
            batch = self._overwrite(batch, keys[uid], sample.group, generated_at)
        return batch, metrics | pool_metrics

    def _check_columns(self, batch: Any) -> None:
        """Sets `_tensors` by the first row of the first batch. Raises ValueError if that row lacks one of COLUMNS."""
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
        """Returns two dicts: uid -> the keys of its rows, in the order of sessions and rows, and uid -> its group.

        A uid with images has no group. Sets `_token_axes` for this batch. `version`: the policy version of the groups.
        """
        keys: dict[str, list[str]] = defaultdict(list)
        for key in sorted(batch.keys, key=_place):
            uid = key.split("_")[0]
            keys[uid].append(key)
        columns = [*COLUMNS, "multi_modal_inputs", *self._tensors]
        rows = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=columns)
        values = {name: dict(zip(batch.keys, rows[name], strict=True)) for name in columns}
        self._token_axes = _columns_of_tokens({name: values[name] for name in self._tensors}, values)
        groups = {}
        for uid, group_keys in keys.items():
            has_images = any(plain_value(values["multi_modal_inputs"][key]) for key in group_keys)
            if not has_images:
                groups[uid] = self._group(group_keys, values, version)
        return keys, groups

    def _group(self, keys: list[str], values: Mapping[str, Mapping[str, Any]], version: int) -> RolloutGroup:
        """Makes a group of the rows of a uid.

        `keys`: the keys of these rows. `values`: column -> key -> value. `version`: the policy version of the group.
        """
        sessions = [key.split("_")[1] for key in keys]
        counts = [sessions.count(session) for session in dict.fromkeys(sessions)]  # the number of rows of each session
        scores = [values["rm_scores"][key] for key in keys]
        rewards = []
        last_row = -1
        for count in counts:
            last_row += count  # as in verl, the reward of a session is the reward of its last row
            rewards.append(float(scores[last_row].sum()))
        dtypes = {}
        columns = {}
        for column, axis in self._token_axes.items():
            tensors = [values[column][key] for key in keys]
            dtypes[column] = str(tensors[0].dtype).removeprefix("torch.")
            arrays = [_numpy(tensor) for tensor in tensors]
            dtype = narrowest(arrays)
            assert dtype is not None  # the tensors of a column have one dtype, which holds them all
            columns[column] = (axis, [array.astype(dtype) for array in arrays])
        has_rewards_before_last_token = any(int(score[:-1].count_nonzero()) for score in scores)
        if has_rewards_before_last_token:  # then the rewards of tokens do not follow from `rewards`, so store them
            columns["rm_scores"] = (_TOKEN, [_numpy(score) for score in scores])
        return group_from_rows(
            prompts=[values["prompts"][key].numpy() for key in keys],
            completions=[values["responses"][key].numpy() for key in keys],
            logprobs=[values["rollout_log_probs"][key].float().numpy() for key in keys],
            rewards=rewards,
            advantages=group_advantages(rewards),
            loss_masks=[values["response_mask"][key].numpy() for key in keys],
            columns=columns,
            policy_version=version,
            sequence_counts=counts if max(counts) > 1 else None,
            meta={_DTYPES: dtypes} if dtypes else {},
        )

    def _fits(self, group: RolloutGroup) -> bool:
        """True if a stored group can replace a group of verl's batch."""
        if group.sampled_lengths.min() == 0 or not group.prompt_lengths.all():  # a response or a prompt is empty
            return False
        if self._max_prompt_length is not None and group.prompt_lengths.max() > self._max_prompt_length:
            return False
        if self._max_response_length is not None and group.sampled_lengths.max() > self._max_response_length:
            return False
        # verl computes NaN from a log-probability that is NaN.
        if not all(np.isfinite(group.rollout_logprobs[span]).all() for span in group.sampled_spans()):
            return False
        # In verl all rows have the same columns, so the group must have each column of `_token_axes`, with its axis.
        dtypes = group.meta.get(_DTYPES, {})
        return all(group.axes.get(name) == axis and name in dtypes for name, axis in self._token_axes.items())

    def _overwrite(self, batch: Any, keys: list[str], group: RolloutGroup, step: int) -> Any:
        """Overwrites the rows `keys` with the rows of a stored group. Returns the batch with their keys and tags.

        `step`: the step at which the stored group was generated, in the count of this run.
        """
        # Session -> the key of its first row, in the order of the sessions.
        first_keys: dict[str, str] = {}
        for key in keys:
            first_keys.setdefault(_session(key), key)
        counts = [1] * group.group_size if group.sequence_counts is None else group.sequence_counts.tolist()
        new_keys = []
        for session, count in zip(first_keys, counts, strict=True):
            new_keys += [f"{session}_{i}" for i in range(count)]
        # A model of images and texts has several positions for each token, so its position_ids have axes before the
        # axis of tokens. Here the positions of a token are equal, because a stored group has no images.
        replaced_row = tq.kv_batch_get(keys=keys[:1], partition_id=batch.partition_id, select_fields=["position_ids"])
        axes = replaced_row["position_ids"][0].shape[:-1]
        rows = {}
        tags: dict[str, dict[str, Any]] = dict(zip(batch.keys, batch.tags, strict=True))
        for key, row in zip(new_keys, self._rows(group, counts, axes), strict=True):
            prompt_length = len(row["prompts"])
            response_length = len(row["responses"])
            first_key = first_keys[_session(key)]
            old_tags = tags[key] if key in tags else tags[first_key]  # an added row gets the tags of the first row
            tags[key] = old_tags | {
                "prompt_len": prompt_length,
                "response_len": response_length,
                "seq_len": prompt_length + response_length,
                "min_global_steps": step,
                "max_global_steps": step,
            }
            if key in keys:  # the row exists, and only the columns in `row` are overwritten
                rows[key] = row
                continue
            # A row that is added to a session takes all other columns from the first row of the session.
            columns = tq.kv_batch_get(keys=[first_key], partition_id=batch.partition_id)
            first_row = {name: plain_value(columns[name][0]) for name in columns.keys()}  # noqa: SIM118
            self._put(batch, {key: first_row | row}, tags)
        self._put(batch, rows, tags)
        removed = [key for key in keys if key not in new_keys]
        if removed:
            tq.kv_clear(keys=removed, partition_id=batch.partition_id)
        batch_keys = _replaced_keys(batch.keys, keys, new_keys)
        return dataclasses.replace(batch, keys=batch_keys, tags=[tags[key] for key in batch_keys])

    def _put(self, batch: Any, rows: Mapping[str, Any], tags: Mapping[str, Any]) -> None:
        """Writes rows and their tags into TransferQueue.

        `rows`: key of a row -> the columns to write. `tags`: the tags by key, also those of other rows.
        """
        tq.kv_batch_put(
            keys=list(rows),
            partition_id=batch.partition_id,
            fields=list_of_dict_to_tensordict(list(rows.values())),
            tags=[tags[key] for key in rows],
        )

    def _rows(self, group: RolloutGroup, counts: list[int], axes: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        """Yields the columns of each row of a stored group.

        `counts`: the number of rows of each rollout. `axes`: the sizes of the axes of position_ids before the axis of
        tokens.
        """
        rewards = np.repeat(group.rewards, counts)  # the reward of the rollout of each row
        sources = zip(group.prompts(), group.sampled_spans(), rewards, strict=True)
        for k, (prompt_ids, span, reward) in enumerate(sources):
            prompt = torch.tensor(prompt_ids, dtype=torch.int64)
            response = torch.tensor(group.completion_ids[span], dtype=torch.int64)
            mask = torch.tensor(group.trained_mask[span], dtype=torch.int64)
            if "rm_scores" in group.extras:  # `_group` stores them if other tokens than the last one have rewards
                scores = torch.tensor(row_of(group, "rm_scores", k))
            else:
                scores = torch.zeros(len(response))
                scores[-1] = float(reward)  # verl has the reward of a response on its last token
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
            for name in self._token_axes:
                row[name] = torch.tensor(row_of(group, name, k), dtype=getattr(torch, dtypes[name]))
            yield row


def _replaced_keys(batch_keys: list[str], old_keys: list[str], new_keys: list[str]) -> list[str]:
    """The keys of a batch after `new_keys` have replaced `old_keys`.

    If there are the same keys as before, their order stays. Otherwise the new keys stand together, at the place of the
    first old key.
    """
    if set(new_keys) == set(old_keys):
        return list(batch_keys)
    position = min(batch_keys.index(key) for key in old_keys)
    before = [key for key in batch_keys[:position] if key not in old_keys]
    after = [key for key in batch_keys[position:] if key not in old_keys]
    return [*before, *new_keys, *after]


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
    """Returns name -> axis for those of `columns` that have a row for each token.

    verl does not describe its columns, and agent loops add columns. So a column counts as a column of tokens if its
    value has as many rows as there are tokens, in every row of the batch. `columns`, `values`: column -> key -> value.
    `values` also has the columns `prompts` and `responses`.
    """
    axes = {}
    for name, tensors in columns.items():
        lengths = [len(tensor) for tensor in tensors.values()]
        response_lengths = [len(values["responses"][key]) for key in tensors]
        prompt_lengths = [len(values["prompts"][key]) for key in tensors]
        whole_lengths = [sum(pair) for pair in zip(prompt_lengths, response_lengths, strict=True)]
        if lengths == whole_lengths:
            axes[name] = _WHOLE
        elif lengths == response_lengths:
            axes[name] = _TOKEN
    return axes


def _numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """The numbers of a tensor as an array. Numbers in bfloat16 become float32, because numpy has no bfloat16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.detach().cpu().numpy()


def _filtering(sampler_kwargs: Any, is_async: bool) -> dict[str, Any]:
    """The options that verl would pass to its own buffer for `algorithm.filter_groups` and `sync_refill_failed_groups`.

    `is_async`: True leaves out the options that only the synchronous buffer has. Raises ValueError for filtering
    without a metric.
    """
    # `sampler_kwargs` is a part of verl's configuration, and knows the root of the whole configuration.
    whole = sampler_kwargs._get_root() if isinstance(sampler_kwargs, DictConfig) else OmegaConf.create()
    filter_options = OmegaConf.select(whole, "algorithm.filter_groups") or {}
    refill = bool(OmegaConf.select(whole, "trainer.v1.sampler.sync_refill_failed_groups"))
    metric = None
    if filter_options.get("enable"):
        metric = filter_options.get("metric")
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
        "max_inflight_gen_batches": filter_options.get("max_inflight_gen_batches", 1),
    }


def plain_value(value: Any) -> Any:
    """The value in a column. tensordict wraps some values that are no tensors."""
    # Other values have an attribute `data` too: that of a number of numpy is its memory.
    return value.data if isinstance(value, NonTensorData) else value


class ServerReplayBuffer(_WithPool, ReplayBuffer):  # type: ignore[misc]  # verl has no types that mypy reads
    """The buffer of verl's synchronous trainer with a pool."""


class ServerReplayBufferAsync(_WithPool, ReplayBufferAsync):  # type: ignore[misc]
    """The buffer of verl's asynchronous trainers with a pool."""
