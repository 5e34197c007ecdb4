"""RecoveringAgentLoop: verl's agent loop with a replay server, so that no finished group is generated twice.

    fetch ── on the server? ──yes──▶ its rows into TransferQueue ─────────────────────┐
                  │ no                                                                 ▼
                  └──▶ verl generates ──▶ rows into TransferQueue ──▶ the server ──▶ "finished"

A worker of verl publishes a group by setting the status of its prompt to `finished`. Before that, the worker here
stores the group on the server, under the name of the fetch of the prompt (see Occurrence). If the run is killed, it
resumes from a checkpoint, and fetches the same prompts again. Groups that are on the server are then written back, with
their tags, and only the others are generated. RecoveringCheckpoints lets go of groups once a checkpoint contains them.

`actor_rollout_ref.rollout.custom.replay` of verl's configuration has the options, which RecoveryOptions lists.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from replay_adapters.hooks import hooks_of
from replay_adapters.occurrences import Fetch, Occurrence, OccurrenceGroups, Recovery
from replay_adapters.verl import plain_value
from replay_adapters.verl_rows import StoredRows, digest, group_of, rows_of
from replay_client import ReplayClient
from replay_client.settings import Seconds, Whole, settings
from replay_client.waits import in_daemon_thread

with hooks_of("verl: agent loop"):
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
    from verl.trainer.ppo.v1 import agent_loop_tq
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
    from verl.utils.import_utils import load_class_from_fqn
    from verl.utils.tensordict_utils import assign_non_tensor_stack, list_of_dict_to_tensordict

logger = logging.getLogger(__name__)

_COLUMN = "__replay_fetch__"
"""The column of a batch of prompts that tells a worker the Fetch of each prompt."""
_TAG = "replay_occurrence"
"""The tag of a prompt in TransferQueue with the text of its Occurrence. verl's checkpoint holds it."""
_TRAIN = "train"
"""verl's partition of the prompts and rows to train on."""
_MOST_INDEX_CHARACTERS = 64
"""The most characters of an index that a name holds as it is; a digest stands for a longer one."""
_MOST_CALLS = 8
"""The most calls to the server that a worker makes at once."""
_OPTIONS = "actor_rollout_ref.rollout.custom.replay"
"""The place of RecoveryOptions in verl's configuration."""
_SETTINGS = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.top_k",
    "actor_rollout_ref.rollout.top_p",
    "actor_rollout_ref.rollout.prompt_length",
    "actor_rollout_ref.rollout.response_length",
    "actor_rollout_ref.rollout.multi_turn",
    "actor_rollout_ref.rollout.agent.default_agent_loop",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
    "data.train_files",
    "reward",
)
"""The settings of verl on which the rows of a group depend. After a change, stored groups are not used."""


@settings(kw_only=True)
class RecoveryOptions:
    """The options `actor_rollout_ref.rollout.custom.replay`, and what follows from verl's own settings."""

    address: str | None = None
    """host:port; None: REPLAY_ADDRESS."""
    table: str = "finished"
    """The table of finished groups that no checkpoint contains. A table that is configured as a queue is refused,
    because no program draws from this table."""
    run: str | None = None
    """The name of the run, the same for each of its starts; None: the folder of its checkpoints."""
    max_staleness: Whole | None = None
    """The most steps by which a stored group may lag; None: as many as verl allows. Groups beyond it are generated
    again."""
    timeout: Seconds = 60.0
    """Seconds that a call waits for a server that went away. After that, training goes on without it."""

    @classmethod
    def of(cls, config: Any) -> RecoveryOptions:
        """The options in verl's configuration. Raises ValueError for an unknown one, and for an unusable value."""
        options = OmegaConf.select(config, _OPTIONS)
        values = dict(options or {})
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{_OPTIONS}: {error}") from None

    def name_of_run(self, config: Any) -> str:
        """The name of the run with this configuration of verl."""
        # The same for each start of a run, because a run that resumes has the same folder of checkpoints.
        return str(_checkpoints(config)) if self.run is None else self.run

    def groups(self, config: Any) -> OccurrenceGroups:
        """The table of the run with this configuration of verl. Raises the errors of FinishedGroups."""
        values = {}
        for name in _SETTINGS:
            value = OmegaConf.select(config, name)
            values[name] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        return OccurrenceGroups(
            ReplayClient.from_env(self.timeout, address=self.address),
            self.table,
            sequences=True,
            timeout=self.timeout,
            run=_digest(self.name_of_run(config)),
            settings=_digest(json.dumps(values, sort_keys=True, default=str)),
        )

    def bound(self, config: Any) -> int | None:
        """The most steps by which a stored group may lag; None: any number."""
        bounds = [] if self.max_staleness is None else [self.max_staleness]
        sampler = OmegaConf.select(config, "trainer.v1.sampler") or {}
        threshold = sampler.get("max_off_policy_threshold")
        is_async = OmegaConf.select(config, "trainer.v1.trainer_mode") != "sync"
        # verl counts the step of the prompt itself as 1, and drops what exceeds the threshold.
        if is_async and threshold is not None and sampler.get("max_off_policy_strategy") == "drop":
            bounds.append(threshold - 1)
        return min(bounds, default=None)


def _checkpoints(config: Any) -> Path:
    """The folder of the run's checkpoints."""
    return Path(os.getcwd(), config.trainer.default_local_dir)


def _with_run(config: Any, run: str) -> Any:
    """A copy of verl's configuration that names the run."""
    named = copy.deepcopy(config)
    OmegaConf.update(named, f"{_OPTIONS}.run", run, force_add=True)
    return named


def _digest(text: str) -> str:
    """A short text that differs for different texts."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _index(value: Any) -> str:
    """The index of a prompt as a text."""
    text = str(value)
    return text if len(text) <= _MOST_INDEX_CHARACTERS else _digest(text)


def _values(batch: Any, column: str) -> list[Any]:
    """The values of a column of prompts."""
    values = batch[column]
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


class RecoveringAgentLoop(AgentLoopManagerTQ):  # type: ignore[misc]  # verl has no types that mypy reads
    """verl's agent loop manager, whose workers store finished groups and find them again.

    Raises ValueError for an unknown option, for a table that is a queue, if RecoveringCheckpoints is not set, and for a
    trainer that does not keep its rows in TransferQueue; TableNotFoundError without the table; ServerUnavailableError
    if no server answers.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._groups: OccurrenceGroups | None = None
        """The groups on the server; None: the run writes no checkpoints, so no run would use them."""
        self._recovery: Recovery | None = None
        """None until the first prompts to train on are fetched, whose step tells the checkpoint."""
        if not config.transfer_queue.enable:
            raise ValueError(
                f"{type(self).__name__} works with verl's V1 trainers, which keep their rows in TransferQueue: set "
                "trainer.use_v1=True"
            )
        if config.trainer.save_freq <= 0:
            logger.warning("trainer.save_freq is %s: without checkpoints, no group is stored", config.trainer.save_freq)
            return
        name = config.trainer.get("checkpoint_callback_class")
        callback = load_class_from_fqn(name, "CheckpointCallback") if name else None
        if callback is None or not issubclass(callback, RecoveringCheckpoints):
            raise ValueError(
                f"trainer.checkpoint_callback_class is {name}, and stored groups would never be deleted: set it to "
                f"{__name__}.RecoveringCheckpoints, or to a subclass of it"
            )
        options = RecoveryOptions.of(config)
        self._groups = options.groups(config)
        # Workers may run in other folders than this process, so they cannot find the folder of checkpoints themselves.
        self.config = _with_run(config, options.name_of_run(config))
        self.agent_loop_workers_class = ray.remote(RecoveringWorker)

    def generate_sequences(self, prompts: Any) -> None:
        """Gives prompts to verl's workers. Prompts to train on are named, and their stored groups are looked up."""
        if self._groups is None or "validate" in prompts:
            super().generate_sequences(prompts)
            return
        if self._recovery is None:
            self._recovery = self._resume(prompts["global_steps"])
        uids = [str(uid) for uid in _values(prompts, "uid")]
        indexes = [_index(index) for index in _values(prompts, "index")]
        fetches = [self._recovery.next(uid, index) for uid, index in zip(uids, indexes, strict=True)]
        # Before a worker reads and writes the tags of a prompt. In verl's asynchronous modes its checkpoint keeps them.
        tags = [{_TAG: str(fetch.occurrence)} for fetch in fetches]
        tq.kv_batch_put(keys=uids, partition_id=_TRAIN, tags=tags)
        named = prompts.copy()  # verl's own batch stays as it is
        columns = [{"name": str(f.occurrence), "key": f.key, "renamed": f.renamed} for f in fetches]
        assign_non_tensor_stack(named, _COLUMN, columns)
        super().generate_sequences(named)

    def saved(self, step: int, durable: int, last: bool) -> None:
        """Notes that verl has written a checkpoint. `durable` and `last` are as in `Recovery.saved`."""
        if self._recovery is None:
            return
        # verl has written the checkpoint in the thread that samples, so what it has not sampled is in the checkpoint.
        waiting = _occurrences(_tags()).values()
        self._recovery.saved(step, waiting, durable, last)

    def _resume(self, step: Any) -> Recovery:
        """What the server has for a run whose first fetch is that of `step`."""
        assert self._groups is not None
        tags = _tags()
        _clear_orphans(tags)
        restored = _occurrences(tags)
        checkpoint = int(plain_value(step)) - 1  # verl counts steps from 1
        recovery = Recovery(self._groups, checkpoint, restored)
        logger.warning("resumed from step %d: %d finished groups are on the server", checkpoint, len(self._groups.held))
        return recovery


def _tags() -> dict[str, dict[str, Any]]:
    """The tags of all prompts and rows to train on, by key in TransferQueue."""
    listed = tq.kv_list(_TRAIN) or {}
    return dict(listed.get(_TRAIN, {}))


def _occurrences(tags: Mapping[str, Mapping[str, Any]]) -> dict[str, Occurrence]:
    """By uid: the names of the prompts that have one. `tags`: see `_tags`."""
    return {key: Occurrence.parse(tag[_TAG]) for key, tag in tags.items() if tag.get("is_prompt") and _TAG in tag}


def _clear_orphans(tags: Mapping[str, Mapping[str, Any]]) -> None:
    """Removes rows without a prompt from TransferQueue.

    verl writes its checkpoint before it clears the batch that it has trained on, and after it has cleared the prompts
    of this batch. So a run that resumes inherits rows that it would neither sample nor clear.
    """
    prompts = {key for key, tag in tags.items() if tag.get("is_prompt")}
    orphans = [key for key in tags if key not in prompts and key.split("_")[0] not in prompts]
    if orphans:
        tq.kv_clear(keys=orphans, partition_id=_TRAIN)


class RecoveringCheckpoints(CheckpointCallback):  # type: ignore[misc]
    """Lets go of the groups that a checkpoint contains: `trainer.checkpoint_callback_class` names it.

    A checkpoint is trusted when verl has noted it as complete and has written the next one. Until then the server keeps
    its groups. After the last step, the groups of a complete checkpoint go at once.
    """

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **more: Any
    ) -> None:
        """verl has written a checkpoint, or with `async_save` begun to write it. Logs errors, and raises none."""
        super().on_save(trainer, global_step, checkpoint_dir, async_save, **more)
        manager = getattr(trainer, "agent_loop_manager", None)
        if not isinstance(manager, RecoveringAgentLoop):
            return
        try:
            last = global_step >= trainer.total_training_steps
            manager.saved(global_step, _complete(Path(checkpoint_dir).parent), last)
        except Exception:  # an error here would end the training
            logger.exception("after the checkpoint of step %d, stored groups were not deleted", global_step)


def _complete(folder: Path) -> int:
    """The step of the newest checkpoint that verl has noted as complete; -1: none."""
    try:
        return int((folder / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return -1


@dataclass
class _OpenGroup:
    """A group that a worker generates."""

    fetch: Fetch
    stored: StoredRows


class _StoringQueue:
    """TransferQueue as verl's worker calls it: remembers the rows of groups, and stores a group before it is published.

    All other calls go to TransferQueue as they are.
    """

    def __init__(self, worker: Any) -> None:
        """`worker`: the RecoveringWorker, which stores the groups."""
        self._worker = worker
        self.open: dict[str, _OpenGroup] = {}
        """By uid: the groups that are being generated."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tq, name)

    async def async_kv_batch_put(self, keys: list[str], partition_id: str, **put: Any) -> Any:
        """Puts rows, and remembers those of open groups."""
        result = await tq.async_kv_batch_put(keys=keys, partition_id=partition_id, **put)
        columns = put.get("fields")
        tags = put.get("tags")
        if partition_id != _TRAIN or columns is None or tags is None:
            return result
        for i, key in enumerate(keys):
            uid, _, rest = key.partition("_")
            group = self.open.get(uid)
            if group is not None:
                group.stored.rows[rest] = {name: plain_value(columns[name][i]) for name in columns.keys()}  # noqa: SIM118
                group.stored.tags[rest] = dict(tags[i])
        return result

    async def async_kv_put(self, key: str, partition_id: str, **put: Any) -> Any:
        """Puts the status of a prompt. A group that becomes `finished` is stored before."""
        status = (put.get("tag") or {}).get("status")
        if partition_id == _TRAIN and status in ("finished", "failure"):
            group = self.open.pop(key, None)
            if group is not None and status == "finished":
                await self._worker.store(group)
        return await tq.async_kv_put(key=key, partition_id=partition_id, **put)


class RecoveringWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's agent loop worker, which stores the groups that it generates, and generates no group that is stored."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        options = RecoveryOptions.of(config)
        self._groups = options.groups(config)
        self._bound = options.bound(config)
        self._queue = _StoringQueue(self)
        self._calls = asyncio.Semaphore(_MOST_CALLS)
        self._warned = False
        """True once a warning has told that a group could not be stored."""
        # verl's worker calls TransferQueue by this name.
        agent_loop_tq.tq = self._queue

    async def _run_prompt(self, prompt: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Publishes the stored group of a prompt, or generates and stores one."""
        column = prompt.pop(_COLUMN, None)
        if column is None:  # validation, or a run without checkpoints
            await super()._run_prompt(prompt, *args, **kwargs)
            return
        fetch = Fetch(Occurrence.parse(column["name"]), column["key"], column["renamed"])
        uid = prompt["uid"]
        step = int(prompt["global_steps"])
        try:
            name = digest(prompt.get("raw_prompt"), prompt.get("reward_model"))
            found = None if fetch.key is None else await self._found(fetch, name, step)
        except Exception as error:  # verl would call the group a failure
            self._warn(error)
            await super()._run_prompt(prompt, *args, **kwargs)
            return
        if found is not None:
            try:
                await self._publish(uid, found, step)
            except Exception:  # as in verl's own method, because verl waits for the end of each prompt
                logger.exception("the stored group of the prompt %s could not be put into TransferQueue", uid)
                await tq.async_kv_put(key=uid, partition_id=_TRAIN, tag={"status": "failure"})
            return
        self._queue.open[uid] = _OpenGroup(fetch, StoredRows({}, {}, step, name))
        try:
            await super()._run_prompt(prompt, *args, **kwargs)
        finally:
            self._queue.open.pop(uid, None)

    async def _found(self, fetch: Fetch, prompt: str, step: int) -> StoredRows | None:
        """The stored group of a fetch; None: the group must be generated. `prompt`: the digest of the prompt.

        A group of another prompt and a group that is too old are deleted. A group under another name is renamed.
        """
        assert fetch.key is not None
        items = await self._call(self._groups.client.get, [fetch.key])
        if not items:  # the server is away, or has dropped the group
            return None
        group = items[0].group
        stored = rows_of(group)
        if stored is not None and not stored.usable(prompt, step, self._bound):
            stored = None
        if stored is not None and not fetch.renamed:
            return stored
        if stored is not None:
            renamed = await self._in_thread(partial(self._groups.store, fetch.occurrence, group))
            if not renamed:  # the group keeps its old name
                return stored
            self._groups.held.pop(fetch.occurrence)  # the driver holds the names of all groups
        await self._call(self._groups.client.delete, self._groups.table, [fetch.key])
        return stored

    async def _publish(self, uid: str, stored: StoredRows, step: int) -> None:
        """Writes a stored group into TransferQueue, under the uid that its prompt has now."""
        rows = [row | {"uid": uid} for row in stored.rows.values()]
        await tq.async_kv_batch_put(
            keys=[f"{uid}_{rest}" for rest in stored.rows],
            partition_id=_TRAIN,
            fields=list_of_dict_to_tensordict(rows),
            tags=[stored.tags[rest] for rest in stored.rows],
        )
        # verl's staleness limit looks at this step.
        tag = {"status": "finished", "global_steps": min(step, stored.step)}
        await tq.async_kv_put(key=uid, partition_id=_TRAIN, tag=tag)

    async def store(self, group: _OpenGroup) -> None:
        """Stores a group that was generated. Logs one warning if groups cannot be stored, and raises no error."""
        if not group.stored.rows:  # no session had an output
            return
        try:
            await self._in_thread(partial(self._store, group))
        except Exception as error:  # verl would call the group a failure
            self._warn(error)

    def _store(self, group: _OpenGroup) -> None:
        """Stores a group, in a thread. Raises ValueError for a group that cannot be stored."""
        version = self._groups.version_of(group.stored.step - 1)
        occurrence = group.fetch.occurrence
        self._groups.store(occurrence, group_of(group.stored, version))
        self._groups.held.pop(occurrence, None)  # the driver holds the names of all groups

    async def _call(self, method: Any, *args: Any) -> Any:
        """The result of a method of the client; None while the server is away."""
        return await self._in_thread(partial(self._groups.ask, method, *args))

    async def _in_thread(self, work: Any) -> Any:
        """The result of `work`, which runs in a thread. At most _MOST_CALLS run at once."""
        async with self._calls:
            return await in_daemon_thread(work)

    def _warn(self, error: Exception) -> None:
        """Warns once that a group is not stored."""
        if not self._warned:
            logger.warning("a finished group is not stored, and is generated again after a crash: %s", error)
        self._warned = True
