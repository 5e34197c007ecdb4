"""Miles' data buffer on a replay server: finished groups survive the trainer, and may be trained on again.

    --fully-async --custom-async-data-buffer-path replay_adapters.miles.ServerDataBuffer

rollout worker ──put──▶ rollouts ──lease──▶ get ──▶ trainer ──▶ checkpoint
                           └──forward──▶ replay ──get──┘            │
                    trained-N.json ◀──end of drain N                │
                    acknowledged ◀──the checkpoint contains drain N─┘

This buffer makes the decisions of Miles' own buffer, at the same moments: an aborted group and a group that the dynamic
filter refuses are never stored, and a stale group is never handed out. Beyond that, the server keeps each group that
the trainer has drawn under a lease, until a checkpoint on the disk contains the step that used the group. After a
crash, the trainer gets back the groups that its checkpoint lacks, and no group that the checkpoint contains.

A drain is the sequence of `get` calls that collects the groups of one rollout of Miles. (Miles calls the generation of
a whole batch a rollout.) Miles does not tell the buffer when it saves, nor to which rollout a `get` belongs. So a call
of `get_metrics` counts as the end of a drain, drains are numbered from the checkpoint that the run began with, and
Miles' file `latest_checkpointed_iteration.txt` tells which drains a checkpoint contains.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import tempfile
import threading
import uuid
from collections import deque
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from replay_adapters.hooks import hooks_of
from replay_adapters.leased_table import LeasedTable
from replay_adapters.samples import SampleStore, samples_of
from replay_client import RolloutGroup, Sample
from replay_client.errors import ReplayError, StaleItemError
from replay_client.scoring import trained_priority
from replay_client.waits import in_daemon_thread
from replay_trainer.leases import TrainedGroups
from replay_trainer.weights import write_whole

with hooks_of("Miles"):
    from miles.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter
    from miles.rollout.fully_async_data_buffer import (
        DataBuffer,
        DataBufferConstructorInput,
        DataBufferInput,
        group_oldest_weight_version,
        iter_samples,
    )
    from miles.utils.misc import load_function
    from miles.utils.types import Sample as MilesSample

logger = logging.getLogger(__name__)

PREFIX = "rollout/fully_async/"
"""The prefix of the metrics, as in Miles' own buffer."""
_METRICS_SECONDS = 1.0
"""Seconds that each request of `get_metrics` waits for the server. The time is short, because `get_metrics` blocks the
event loop in which Miles generates."""
_READS = "reads"
"""The name of the setting in which a client of this class describes the table that it reads."""


@dataclass(frozen=True)
class BufferSettings:
    """Settings of ServerDataBuffer. Each setting is an attribute of Miles' arguments, with "replay_" before its name.
    `--custom-config-path` reads such attributes from a YAML file."""

    address: str | None = None
    """host:port; None: REPLAY_ADDRESS."""
    table: str = "rollouts"
    """The table of finished groups. Its rate limiter bounds how far generation runs ahead, in the place of
    `--async-data-buffer-capacity-factor`. Its sampler chooses the next group to train on."""
    pool: str = "replay"
    """The table to which `table` forwards its groups. The buffer reads it only if `share` is above 0."""
    share: float = 0.0
    """The share of groups that come from the pool, from 0 to 0.9. The share is lower if the pool lacks groups."""
    lease: float = 300.0
    """Seconds after which the server takes back the groups of a trainer that died and was not started again."""
    folder: str | None = None
    """The folder in which the buffer lists its leases and the groups of its drains. None: the subfolder `replay` of
    `--save`; without `--save`, a temporary folder."""

    @classmethod
    def of(cls, args: Any) -> BufferSettings:
        """The settings among Miles' arguments. Raises ValueError for a share outside 0 to 0.9."""
        values: dict[str, Any] = {}
        for setting in fields(cls):
            argument = f"replay_{setting.name}"
            if hasattr(args, argument):
                values[setting.name] = getattr(args, argument)
        settings = cls(**values)
        if not 0.0 <= settings.share <= 0.9:
            raise ValueError(f"replay_share is {settings.share}, and must be from 0 to 0.9")
        return settings


class Drains:
    """The drains of the buffer, and which of them a checkpoint of Miles contains.

    Drain N collects the groups of rollout N of Miles. When the drain ends, `end` writes a file that names its groups.
    Only after that can Miles train on these groups and save. So a run that goes on from checkpoint N finds the file of
    drain N.

    Without `--save` there are no checkpoints. Then a drain counts as used up when the second drain after it has ended,
    because Miles draws one drain ahead of training.
    """

    def __init__(self, args: Any, folder: Path) -> None:
        """`args`: Miles' arguments. `folder`: the folder of the files."""
        self._save_folder = getattr(args, "save", None) or None  # an empty setting is no folder
        # Miles' file `latest_checkpointed_iteration.txt` has the number of the last rollout in the checkpoint. Only the
        # FSDP backend writes the number of the next rollout there.
        self._excess = 1 if getattr(args, "train_backend", None) == "fsdp" else 0
        self._folder = folder
        last_loaded = self._saved_in(getattr(args, "load", None))
        start_rollout_id = getattr(args, "start_rollout_id", None)
        self.number = start_rollout_id if start_rollout_id is not None else last_loaded + 1
        """The number of the current drain."""
        self._open: deque[tuple[int, TrainedGroups]] = deque()
        """(number, groups passed to `end`) of each ended drain that is not acknowledged, oldest first."""

    def groups_of_checkpoint(self) -> TrainedGroups:
        """Reads the groups in the checkpoint from which this run begins. Leaves out the groups that were acknowledged
        before this checkpoint was written.

        Deletes the files of all other drains. The previous run may have trained on the groups of later drains, but this
        checkpoint does not contain that training.
        """
        last_contained = self.number - 1  # the last drain in the checkpoint
        path = self._path(last_contained)
        groups = TrainedGroups()
        if path.exists():
            groups = TrainedGroups.from_state_dict(json.loads(path.read_text()))
        for file in self._folder.glob("trained-*.json"):
            if file != path:
                file.unlink()
        return groups

    def end(self, groups: TrainedGroups) -> None:
        """Ends the current drain, and writes its file.

        `groups`: all groups of this drain and of earlier drains that are not acknowledged yet.
        """
        write_whole(self._path(self.number), json.dumps(groups.state_dict()))
        self._open.append((self.number, groups))
        self.number += 1

    def used_up(self) -> TrainedGroups | None:
        """The groups of the drains that a checkpoint contains by now and that are not acknowledged; None: there are no
        such drains."""
        if self._save_folder is None:
            last_used = self.number - 3  # after it, the drains `number - 2` and `number - 1` have ended
        else:
            last_used = self._saved_in(self._save_folder)
        used = [groups for number, groups in self._open if number <= last_used]
        if not used:
            return None
        return used[-1]  # the groups of the newest drain include those of the drains before it

    def forget(self, groups: TrainedGroups) -> None:
        """Forgets the drains up to that of `groups`, because the server has acknowledged their groups."""
        while self._open:
            number, groups_of_drain = self._open.popleft()
            # Delete the file of the drain before this one. The file of this drain stays, because a run that goes on
            # from the checkpoint of this drain reads it.
            self._path(number - 1).unlink(missing_ok=True)
            if groups_of_drain is groups:
                break

    def _path(self, number: int) -> Path:
        """The file that names the groups of a drain."""
        return self._folder / f"trained-{number}.json"

    def _saved_in(self, folder: str | None) -> int:
        """The number of the last rollout that the checkpoints in a folder contain; -1: there is no checkpoint, or no
        folder."""
        if not folder:
            return -1
        path = Path(folder, "latest_checkpointed_iteration.txt")
        if not path.exists():
            return -1
        text = path.read_text().strip()
        if not text.isdigit():  # the text "release" means that the checkpoint has only weights
            return -1
        return int(text) - self._excess


class ServerDataBuffer(DataBuffer):  # type: ignore[misc]  # Miles has no types that mypy reads
    """Miles' buffer of finished groups, in a table of a replay server.

    * `put` waits while the table is full, and `get` waits while it is empty. Both wait while the server is away.
    * `get` returns groups exactly as they were put, in each field of each sample, and with their prompt group.
    * Replayed groups have negative indices and rollout ids, so that Miles does not take them for rollouts of this step.
    * Only one trainer may read a table. A second trainer raises an error at its start.
    """

    def __init__(self, input: DataBufferConstructorInput) -> None:
        """Raises RuntimeError if another trainer reads the table or uses the folder, ValueError for a bad setting,
        TableNotFoundError if the server lacks a table, and ServerUnavailableError if no server answers."""
        args = input.args
        self._args = args
        settings = BufferSettings.of(args)
        self.settings = settings
        self._handle_unused = input.unused_handler_fn
        self._dynamic_filter = load_function(args.dynamic_sampling_filter_path)
        self._store = SampleStore(MilesSample, getattr(args, "reward_key", None))
        folder = _folder_of(settings, getattr(args, "save", None))
        self._name = f"miles:{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        queue = LeasedTable(
            "Miles' buffer",
            settings.table,
            folder,
            settings.lease,
            pool=settings.pool if settings.share else None,
            max_staleness=args.max_weight_staleness,
            # Each group is drawn as late as possible, because groups are chosen by priority and may become stale.
            prefetch=1,
            address=settings.address,
            name=self._name,
        )
        self._queue = queue
        self.client = queue.client
        self._pool = queue.pool
        self._leases = queue.leases
        self._reach = queue.reach
        """`LeasedTable.reach`: repeats a request until the server answers."""
        try:
            queue.lock()
            self._refuse_a_second_reader()
        except BaseException:
            queue.close(leave=False)
            raise
        self._drains = Drains(args, folder)
        # Miles' checkpoints hold no state of the server, so `state` is None. Then `resume` only acknowledges the groups
        # of the checkpoint, and requeues all other groups of the previous run.
        queue.protocol.resume(self._drains.groups_of_checkpoint(), state=None)
        self._leases.start()
        self._drawing = threading.Lock()
        """Held by `_draw`, which may run in several threads, because the thread of a cancelled `get` goes on."""
        self._ready: deque[tuple[Sample, bool]] = deque()
        """(group, True if it is from the pool) for each group that is drawn and not handed out yet. If a `get` was
        cancelled, there may be several such groups."""
        self._keys: list[int] = []
        """The keys of the fresh groups that this drain has drawn."""
        self._handed = 0
        """The number of groups that were handed out so far."""
        self._replayed = 0
        """The number of handed-out groups that came from the pool."""
        self._next_index = itertools.count(1)
        """Numbers for the negative indices of replayed groups."""
        self._version: int | None = None
        """The last version that Miles passed to `get`; None: Miles has passed no version so far."""
        self._policy_version = 0
        """The policy version of the server that corresponds to `_version`. The draw of a `get` sets it; 0 before."""
        self._metric_gatherer = MetricGatherer()
        self._counts = dict.fromkeys(_COUNTS, 0)
        """The counters of the current drain, by the names of their metrics."""
        self._consumed_staleness: list[int] = []
        """The staleness of each group that this drain has drawn and whose samples have weight versions."""

    # ----------------------------------------------------------------------------------------------------- put

    async def put(self, input: DataBufferInput) -> None:
        """Stores a finished group, unless it was aborted or the dynamic filter refuses it.

        Returns when the server has confirmed the group. If the server has a `data_dir`, the group is then on its disk.
        """
        if any(sample.status == MilesSample.Status.ABORTED for sample in iter_samples(input.group)):
            self._counts["aborted_groups_filtered"] += 1
            self._handle_unused(input.prompt_group)
            return
        verdict = call_dynamic_filter(self._dynamic_filter, self._args, input.group)
        if not verdict.keep:
            self._metric_gatherer.on_dynamic_filter_drop(reason=verdict.reason)
            return
        is_stored = await in_daemon_thread(partial(self._insert, input))
        if not is_stored:
            self._counts["stale_groups_filtered"] += 1
            self._handle_unused(input.prompt_group)

    def _insert(self, input: DataBufferInput) -> bool:
        """Inserts a group. Returns False if the table refused the group because it is stale already."""
        group = self._group_of(input)
        # A random key of 63 bits. All attempts use the same key, so that no group is stored twice.
        key = uuid.uuid4().int >> 65
        insert = partial(self.client.insert, group, {self.settings.table: trained_priority(group)}, key=key)
        try:
            self._reach(insert)
        except StaleItemError:
            return False
        return True

    def _group_of(self, input: DataBufferInput) -> RolloutGroup:
        """Converts a finished group of Miles, with its prompt group, to a RolloutGroup. `_entry` converts it back."""
        # Miles generates in place, so the samples of the prompt group are often the same objects as the samples of the
        # group. Such a sample of the prompt group is stored as its position in the group.
        positions = {id(sample): position for position, sample in enumerate(iter_samples(input.group))}
        prompts = [positions.get(id(sample), sample) for sample in input.prompt_group]
        oldest = group_oldest_weight_version(input.group)
        if oldest is None:  # the samples have no weight versions
            version = self._policy_version
        else:
            version = self._reach(partial(self._pool.version_of, oldest))
        more = {"prompts": prompts, "versioned": oldest is not None}
        return self._store.group_of(input.group, version, more)

    # ----------------------------------------------------------------------------------------------------- get

    async def get(self, current_version: int | None = None, **_: Any) -> DataBufferInput:
        """Returns the next group to train on. Waits until there is one.

        Groups beyond `--max-weight-staleness` go to the handler of unused samples, as in Miles' own buffer.
        """
        if current_version is not None:
            self._version = current_version
        while True:
            # A draw may wait. It runs in a thread, because it must not block this event loop, in which Miles generates.
            await in_daemon_thread(partial(self._draw, current_version))
            sample, replayed = self._ready.popleft()
            entry, has_version = self._entry(sample.group)
            staleness = max(0, self._policy_version - sample.info.policy_version)
            if has_version and current_version is not None:
                limit = self._args.max_weight_staleness
                self._consumed_staleness.append(staleness)
                if limit is not None and staleness > limit:
                    self._counts["stale_groups_filtered"] += 1
                    self._handle_unused(entry.prompt_group)
                    continue  # the stale group is not requeued: it is acknowledged with the other groups of its drain
            self._handed += 1
            if replayed:
                self._replayed += 1
                self._counts["replayed_groups"] += 1
                self._renumber(entry.group)
            return entry

    def _draw(self, version: int | None) -> None:
        """Draws until `_ready` has a group. `version`: the version that Miles passed to `get`, or None."""
        with self._drawing:
            self._settle()
            if version is not None:
                self._policy_version = self._reach(partial(self._pool.advance, version))
            # The replayed groups must not exceed their share if the next group that is handed out is replayed.
            share_allows_replay = self._replayed + 1 <= self.settings.share * (self._handed + 1)
            if share_allows_replay:
                for sample in self._draw_from_pool():
                    self._ready.append((sample, True))
            while not self._ready:
                for sample in self._queue.draw():
                    self._keys.append(sample.info.key)
                    why = self._why_unusable(sample.group)
                    if not self._pool.puts_aside(sample, self.settings.table, why):
                        self._ready.append((sample, False))

    def _draw_from_pool(self) -> list[Sample]:
        """Draws one group of the pool that this drain has not drawn yet. Returns an empty list if the pool has no such
        group."""
        scope = f"{self._name}/{self._drains.number}"
        draw = partial(self._pool.draw, 1, scope, self._usable, exclude=tuple(self._keys))
        return self._reach(draw)

    def _usable(self, group: RolloutGroup) -> bool:
        """True if a group has samples of Miles, and as many rollouts as this run has for a prompt."""
        if self._store.read(group) is None:
            return False
        return bool(group.group_size == self._args.n_samples_per_prompt)

    def _why_unusable(self, group: RolloutGroup) -> str:
        """The reason why Miles cannot train on a group; empty: it can."""
        if self._usable(group):
            return ""
        return f"no samples of Miles, or not n_samples_per_prompt={self._args.n_samples_per_prompt} rollouts"

    def _entry(self, group: RolloutGroup) -> tuple[DataBufferInput, bool]:
        """Converts a group back to what Miles passed to `put`. Also returns True if its samples have weight versions.

        This is the inverse of `_group_of`.
        """
        read = self._store.read(group)
        assert read is not None
        rollouts, more = read
        samples = list(iter_samples(rollouts))
        prompts = []
        for prompt in more["prompts"]:
            if isinstance(prompt, int):  # the position of a sample in the group, as `_group_of` stored it
                prompts.append(samples[prompt])
            else:
                prompts.append(prompt)
        return DataBufferInput(prompt_group=prompts, group=rollouts), more["versioned"]

    def _renumber(self, group: Any) -> None:
        """Gives a replayed group indices and rollout ids that no other group of a batch has.

        Miles sums the loss over the samples of one rollout id, so two rollouts must not share an id.
        """
        group_index = -next(self._next_index)
        for rollout in group:
            index = -next(self._next_index)
            for sample in samples_of(rollout):
                sample.group_index = group_index
                sample.index = index
                if sample.rollout_id is not None:
                    sample.rollout_id = index

    def _settle(self) -> None:
        """Acknowledges the groups that a checkpoint contains by now."""
        groups = self._drains.used_up()
        if groups is not None and self._queue.acknowledge(groups):
            self._drains.forget(groups)

    # ------------------------------------------------------------------------------------------------- metrics

    def get_metrics(self) -> dict[str, float]:
        """Ends the current drain. Returns the metrics of Miles' own buffer under their names, and four further metrics:

        `replayed_groups`: groups of this drain that came from the pool. `groups_unusable`: groups that could not be
        trained on. `held_groups`: groups under leases, which no checkpoint contains yet. `server_away`: 1 if the server
        did not answer this call, else 0. If it is 1, the metrics of the table are missing.
        """
        # Groups that are drawn and not handed out belong to the next drain.
        not_handed_out = [sample for sample, _ in self._ready]
        # `trained` returns all groups under leases, of this drain and of earlier drains, except those.
        self._drains.end(self._leases.trained(not_handed_out))
        self._keys = [sample.info.key for sample in not_handed_out]
        metrics = {PREFIX + name: float(count) for name, count in self._counts.items()}
        metrics |= self._metric_gatherer.collect()
        metrics[f"{PREFIX}groups_unusable"] = float(self._pool.take_unusable())
        staleness = self._consumed_staleness
        if staleness:
            metrics[f"{PREFIX}avg_staleness"] = sum(staleness) / len(staleness)
            metrics[f"{PREFIX}max_staleness"] = max(staleness)
        metrics |= self._queue_metrics()
        self._metric_gatherer = MetricGatherer()
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._consumed_staleness = []
        return metrics

    def _queue_metrics(self) -> dict[str, float]:
        """Requests the metrics of the table. Returns them with `server_away`.

        `buffer_*_staleness` is about the first 1000 groups that wait in the table. Other methods try again until the
        server is back. Here each of the three requests is made once, and waits at most _METRICS_SECONDS.
        """
        table = self.settings.table
        try:
            # The client describes itself in each drain, because a restarted server has forgotten which table it reads.
            self.client.describe({_READS: table}, timeout=_METRICS_SECONDS)
            info = self.client.server_info(tables=[table], timeout=_METRICS_SECONDS).tables[table]
            waiting = self.client.list_items(table, limit=1000, timeout=_METRICS_SECONDS).items
        except ReplayError:
            return {f"{PREFIX}server_away": 1.0}
        metrics = {f"{PREFIX}queue_size": float(info.size), f"{PREFIX}held_groups": float(info.reserved)}
        knows_staleness = self._version is not None  # the staleness of a group is its distance from this version
        if knows_staleness and waiting:
            staleness = [max(0, self._policy_version - item.policy_version) for item in waiting]
            metrics[f"{PREFIX}buffer_avg_staleness"] = sum(staleness) / len(staleness)
            metrics[f"{PREFIX}buffer_max_staleness"] = float(max(staleness))
        metrics[f"{PREFIX}server_away"] = 0.0
        return metrics

    # ----------------------------------------------------------------------------------------- the server, the end

    def close(self) -> None:
        """Requeues the groups that no checkpoint contains, and closes the connection.

        Miles does not call this method. When its process ends, the server takes the groups back at the end of their
        leases, or at the next start of the run.
        """
        if self._queue.closed:
            return
        self._settle()
        self._queue.close()

    def _refuse_a_second_reader(self) -> None:
        """Raises RuntimeError if another running trainer reads the table.

        If two trainers start at the same time, both may raise it, because each describes itself before it looks for the
        other.
        """
        table = self.settings.table
        self.client.describe({_READS: table})
        for other in self.client.server_info().clients:
            settings = json.loads(other.settings or "{}")
            is_running = other.open and not other.ended
            if other.name != self._name and is_running and settings.get(_READS) == table:
                raise RuntimeError(
                    f"{other.name} reads table {table!r} already, and each of two trainers would miss what the other "
                    f"takes: stop it, or give this run a table of its own with replay_table"
                )


def _folder_of(settings: BufferSettings, save: str | None) -> Path:
    """The folder of the buffer: the configured one, `replay` in Miles' `--save`, or else a new temporary folder."""
    if settings.folder:
        folder = Path(settings.folder)
    elif save:
        folder = Path(save, "replay")
    else:
        folder = Path(tempfile.mkdtemp(prefix="replay-miles-"))
    return folder.resolve()


_COUNTS = ("aborted_groups_filtered", "stale_groups_filtered", "replayed_groups")
"""The names of the metrics that count groups."""
