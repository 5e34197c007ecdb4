"""Miles' data buffer on a replay server: finished groups survive the trainer, and may be trained on again.

    --fully-async --custom-async-data-buffer-path replay_adapters.miles.ServerDataBuffer

rollout worker ──put──▶ rollouts ──lease──▶ get ──▶ trainer ──▶ checkpoint
                           └──forward──▶ replay ──get──┘            │
                    trained-N.json ◀──end of drain N                │
                    acknowledged ◀──the checkpoint contains drain N─┘

What Miles' own buffer decides, this one decides alike and at the same moment: an aborted group and one that the
dynamic filter refuses never get in, and a stale one never gets out. What is new is that a group is not gone when the
trainer has it. The server keeps it under a lease until a checkpoint on the disk contains the step that used it. A
trainer that died gets back the groups that its checkpoint lacks, and none that the checkpoint has.

Miles says neither when it saves nor which rollout a `get` belongs to. So a drain ends with `get_metrics`, drains are
counted from the checkpoint that the run began with, and `latest_checkpointed_iteration.txt` says what is saved.
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
"""Of the metrics, as in Miles' own buffer."""
_METRICS_SECONDS = 1.0
"""What `get_metrics` waits for the server: it stands in the event loop in which Miles generates."""
_READS = "reads"
"""The setting by which the server lists who reads which table."""


@dataclass(frozen=True)
class BufferSettings:
    """Settings of ServerDataBuffer: attributes of Miles' arguments with "replay_" before them, which
    `--custom-config-path` reads from a YAML file."""

    address: str | None = None
    """host:port; None: REPLAY_ADDRESS."""
    table: str = "rollouts"
    """Finished groups. Its limiter bounds how far generation runs ahead, in the place of
    `--async-data-buffer-capacity-factor`; its sampler chooses what is trained on next."""
    pool: str = "replay"
    """The table that `table` forwards to. Only a `share` above 0 reads it."""
    share: float = 0.0
    """The share of groups that comes from the pool, from 0 to 0.9, as far as the pool has some."""
    lease: float = 300.0
    """Seconds after which the server takes back the groups of a trainer that died and was not started again."""
    folder: str | None = None
    """Where the buffer notes what it has under leases. None: the folder `replay` in that of `--save`."""

    @classmethod
    def of(cls, args: Any) -> BufferSettings:
        """Raises ValueError for a share that is none."""
        named = {each.name: f"replay_{each.name}" for each in fields(cls)}
        settings = cls(**{name: getattr(args, of_args) for name, of_args in named.items() if hasattr(args, of_args)})
        if not 0.0 <= settings.share <= 0.9:
            raise ValueError(f"replay_share is {settings.share}, and must be from 0 to 0.9")
        return settings


class Drains:
    """Which drains of the buffer a checkpoint of Miles contains. Drain N feeds the training of rollout N.

    After each drain a file names its groups, before Miles can train on them and save: so a run that goes on from
    checkpoint N finds the file of drain N. Without `--save` there are no checkpoints; then a drain is used up when the
    one after the next has ended, because Miles draws one ahead of training.
    """

    def __init__(self, args: Any, folder: Path) -> None:
        self._saves = getattr(args, "save", None)
        self._behind = 1 if getattr(args, "train_backend", None) == "fsdp" else 0  # what FSDP writes is one more
        self._folder = folder
        begun = self._saved_in(getattr(args, "load", None))
        start_rollout_id = getattr(args, "start_rollout_id", None)
        self.number = start_rollout_id if start_rollout_id is not None else begun + 1
        """Of the drain under way."""
        self._open: deque[tuple[int, TrainedGroups]] = deque()

    def before(self) -> TrainedGroups:
        """The groups that the checkpoint contains from which this run begins, as far as their leases were open.

        Files of later drains go: the run before did train on their groups, and no checkpoint has it.
        """
        path, groups = self._path(self.number - 1), TrainedGroups()
        if path.exists():
            groups = TrainedGroups.from_state_dict(json.loads(path.read_text()))
        for each in self._folder.glob("trained-*.json"):
            if each != path:
                each.unlink()
        return groups

    def end(self, groups: TrainedGroups) -> None:
        """The drain under way is over, and `groups` are all that are drawn since the last checkpoint."""
        write_whole(self._path(self.number), json.dumps(groups.state_dict()))
        self._open.append((self.number, groups))
        self.number += 1

    def used_up(self) -> TrainedGroups | None:
        """The groups of the drains that a checkpoint contains by now; None: there is no new one."""
        last = self.number - 3 if self._saves is None else self._saved_in(self._saves)
        used = [entry for entry in self._open if entry[0] <= last]
        return used[-1][1] if used else None

    def forget(self, groups: TrainedGroups) -> None:
        """The server has taken `groups` for good."""
        while self._open:
            number, first = self._open.popleft()
            self._path(number - 1).unlink(missing_ok=True)
            if first is groups:
                break

    def _path(self, number: int) -> Path:
        return self._folder / f"trained-{number}.json"

    def _saved_in(self, folder: str | None) -> int:
        """The last rollout that the checkpoints of a folder contain; -1: none."""
        path = Path(folder or "", "latest_checkpointed_iteration.txt")
        if folder is None or not path.exists():
            return -1
        text = path.read_text().strip()  # "release": weights alone
        return int(text) - self._behind if text.isdigit() else -1


class ServerDataBuffer(DataBuffer):  # type: ignore[misc]  # Miles has no types that mypy reads
    """Miles' buffer of finished groups, in a table of a replay server.

    * `put` waits while the table is full, `get` while it is empty, and both while the server is away.
    * Groups come back equal to what was put, in each field of each sample, and with their prompt group.
    * Replayed groups have negative indices and rollout ids, so none is taken for a rollout of this step.
    * One trainer reads a table. A second one ends at its start.
    """

    def __init__(self, input: DataBufferConstructorInput) -> None:
        """Raises RuntimeError if another trainer reads the table or uses the folder, ValueError for a bad setting,
        TableNotFoundError if the server lacks a table, and ServerUnavailableError if none answers."""
        args = self._args = input.args
        self.settings = settings = BufferSettings.of(args)
        self._handle_unused = input.unused_handler_fn
        self._dynamic_filter = load_function(args.dynamic_sampling_filter_path)
        self._store = SampleStore(MilesSample, getattr(args, "reward_key", None))
        save = getattr(args, "save", None)
        configured_folder = settings.folder or (save and str(Path(save, "replay")))
        folder = Path(configured_folder or tempfile.mkdtemp(prefix="replay-miles-")).resolve()
        self._name = f"miles:{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self._queue = queue = LeasedTable(
            "Miles' buffer",
            settings.table,
            folder,
            settings.lease,
            pool=settings.pool if settings.share else None,
            max_staleness=args.max_weight_staleness,
            prefetch=1,  # what is chosen by priority, or may turn stale, is chosen late
            address=settings.address,
            name=self._name,
        )
        self.client, self._pool, self._leases, self._reach = queue.client, queue.pool, queue.leases, queue.reach
        try:
            queue.lock()
            self._refuse_a_second_reader()
        except BaseException:
            queue.close(leave=False)
            raise
        self._drains = Drains(args, folder)
        before = self._drains.before()
        queue.protocol.resume(before, None)
        self._leases.start()
        self._drawing = threading.Lock()
        self._ready: deque[tuple[Sample, bool]] = deque()
        """Drawn and not handed out, with whether it is one of the pool. More than one: a `get` was cancelled."""
        self._keys: list[int] = []
        """Of the groups of this drain."""
        self._handed, self._replayed = 0, 0
        self._next_index = itertools.count(1)
        self._version: int | None = None
        """Miles' version at the last `get`."""
        self._policy_version = 0
        """The same in the server's count."""
        self._metric_gatherer = MetricGatherer()
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._consumed_staleness: list[int] = []

    # ----------------------------------------------------------------------------------------------------- put

    async def put(self, input: DataBufferInput) -> None:
        """Stores a finished group, unless it was aborted or the dynamic filter refuses it.

        Returns when the server has acknowledged it; with a `data_dir` it is on the disk then.
        """
        if any(sample.status == MilesSample.Status.ABORTED for sample in iter_samples(input.group)):
            self._counts["aborted_groups_filtered"] += 1
            self._handle_unused(input.prompt_group)
            return
        verdict = call_dynamic_filter(self._dynamic_filter, self._args, input.group)
        if not verdict.keep:
            self._metric_gatherer.on_dynamic_filter_drop(reason=verdict.reason)
            return
        if not await in_daemon_thread(partial(self._insert, input)):
            self._counts["stale_groups_filtered"] += 1
            self._handle_unused(input.prompt_group)

    def _insert(self, input: DataBufferInput) -> bool:
        """Whether the table took the group; False: it is stale already."""
        group = self._group_of(input)
        key = uuid.uuid4().int >> 65  # the same at each attempt, so that no group is stored twice
        insert = partial(self.client.insert, group, {self.settings.table: trained_priority(group)}, key=key)
        try:
            self._reach(insert)
        except StaleItemError:
            return False
        return True

    def _group_of(self, input: DataBufferInput) -> RolloutGroup:
        samples = list(iter_samples(input.group))
        # Miles generates in place: the samples of the prompt group often are those of the group.
        places = {id(sample): place for place, sample in enumerate(samples)}
        prompts = [places.get(id(sample), sample) for sample in input.prompt_group]
        oldest = group_oldest_weight_version(input.group)
        version = self._reach(partial(self._pool.version_of, oldest)) if oldest is not None else self._policy_version
        return self._store.group_of(input.group, version, {"prompts": prompts, "versioned": oldest is not None})

    # ----------------------------------------------------------------------------------------------------- get

    async def get(self, current_version: int | None = None, **_: Any) -> DataBufferInput:
        """The next group to train on. Waits until there is one.

        Groups beyond `--max-weight-staleness` go to the handler of unused samples, as in Miles' own buffer.
        """
        if current_version is not None:
            self._version = current_version
        while True:
            # The event loop generates meanwhile.
            await in_daemon_thread(partial(self._draw, current_version))
            sample, replayed = self._ready.popleft()
            entry, versioned = self._entry(sample.group)
            staleness = max(0, self._policy_version - sample.info.policy_version)
            if versioned and current_version is not None:
                limit = self._args.max_weight_staleness
                self._consumed_staleness.append(staleness)
                if limit is not None and staleness > limit:
                    self._counts["stale_groups_filtered"] += 1
                    self._handle_unused(entry.prompt_group)
                    continue  # the group is dealt with: its lease ends as those of its drain
            self._handed += 1
            self._replayed += replayed
            self._counts["replayed_groups"] += replayed
            if replayed:
                self._renumber(entry.group)
            return entry

    def _draw(self, version: int | None) -> None:
        """Draw until there is a group to hand out."""
        with self._drawing:
            self._settle()
            if version is not None:
                self._policy_version = self._reach(partial(self._pool.advance, version))
            if self._replayed + 1 <= self.settings.share * (self._handed + 1):
                self._ready.extend((sample, True) for sample in self._draw_again())
            while not self._ready:
                for sample in self._queue.draw():
                    self._keys.append(sample.info.key)
                    rollouts = self._args.n_samples_per_prompt
                    why = f"no samples of Miles, or not n_samples_per_prompt={rollouts} rollouts"
                    if not self._pool.puts_aside(
                        sample, self.settings.table, "" if self._usable(sample.group) else why
                    ):
                        self._ready.append((sample, False))

    def _draw_again(self) -> list[Sample]:
        """A group of the pool that this drain does not have yet; none if the pool has none."""
        scope = f"{self._name}/{self._drains.number}"
        return self._reach(partial(self._pool.draw, 1, scope, self._usable, exclude=tuple(self._keys)))

    def _usable(self, group: RolloutGroup) -> bool:
        return self._store.read(group) is not None and group.group_size == self._args.n_samples_per_prompt

    def _entry(self, group: RolloutGroup) -> tuple[DataBufferInput, bool]:
        """A stored group as Miles put it, and whether its samples know their weight versions."""
        read = self._store.read(group)
        assert read is not None
        rollouts, more = read
        samples = list(iter_samples(rollouts))
        prompts = [samples[each] if isinstance(each, int) else each for each in more["prompts"]]
        return DataBufferInput(prompt_group=prompts, group=rollouts), more["versioned"]

    def _renumber(self, group: Any) -> None:
        """Indices that no other group of a batch has: Miles sums the loss over samples of one rollout id."""
        group_index = -next(self._next_index)
        for rollout in group:
            index = -next(self._next_index)
            for sample in samples_of(rollout):
                sample.group_index, sample.index = group_index, index
                sample.rollout_id = None if sample.rollout_id is None else index

    def _settle(self) -> None:
        """Take the groups for good that a checkpoint contains by now."""
        groups = self._drains.used_up()
        if groups is not None and self._queue.acknowledge(groups):
            self._drains.forget(groups)

    # ------------------------------------------------------------------------------------------------- metrics

    def get_metrics(self) -> dict[str, float]:
        """Ends a drain. The metrics of Miles' own buffer by their names, and of this one:

        `replayed_groups` of this drain came from the pool. `groups_unusable` could not be trained on. `held_groups`:
        those that no checkpoint contains. `server_away` is 1 if the server did not answer at this moment; the metrics
        of the queue are missing then.
        """
        self._drains.end(self._leases.trained([sample for sample, _ in self._ready]))
        self._keys = [sample.info.key for sample, _ in self._ready]
        metrics = {PREFIX + name: float(count) for name, count in self._counts.items()}
        metrics |= self._metric_gatherer.collect()
        metrics[f"{PREFIX}groups_unusable"] = float(self._pool.take_unusable())
        if consumed := self._consumed_staleness:
            metrics |= {
                f"{PREFIX}avg_staleness": sum(consumed) / len(consumed),
                f"{PREFIX}max_staleness": max(consumed),
            }
        metrics |= self._of_queue()
        self._metric_gatherer = MetricGatherer()
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._consumed_staleness = []
        return metrics

    def _of_queue(self) -> dict[str, float]:
        table = self.settings.table
        try:
            # A server that was started again has forgotten it.
            self.client.describe({_READS: table}, timeout=_METRICS_SECONDS)
            info = self.client.server_info(tables=[table], timeout=_METRICS_SECONDS).tables[table]
            waiting = self.client.list_items(table, limit=1000, timeout=_METRICS_SECONDS).items
        except ReplayError:
            return {f"{PREFIX}server_away": 1.0}
        metrics = {f"{PREFIX}queue_size": float(info.size), f"{PREFIX}held_groups": float(info.reserved)}
        if self._version is not None and waiting:
            staleness = [max(0, self._policy_version - item.policy_version) for item in waiting]
            metrics[f"{PREFIX}buffer_avg_staleness"] = sum(staleness) / len(staleness)
            metrics[f"{PREFIX}buffer_max_staleness"] = float(max(staleness))
        return metrics | {f"{PREFIX}server_away": 0.0}

    # ----------------------------------------------------------------------------------------- the server, the end

    def close(self) -> None:
        """Requeues the groups that no checkpoint contains, and closes the connection. Miles does not call it: when
        its process ends, the server takes them back with the end of their leases, or at the next start of the run."""
        if not self._queue.closed:
            self._settle()
            self._queue.close()

    def _refuse_a_second_reader(self) -> None:
        """Raises RuntimeError if a trainer that is alive reads the table. Of two that start at once, both may end."""
        table = self.settings.table
        self.client.describe({_READS: table})
        for other in self.client.server_info().clients:
            its_own = json.loads(other.settings or "{}")
            if other.name != self._name and other.open and not other.ended and its_own.get(_READS) == table:
                raise RuntimeError(
                    f"{other.name} reads table {table!r} already, and each of two trainers would miss what the other "
                    f"takes: stop it, or give this run a table of its own with replay_table"
                )


_COUNTS = ("aborted_groups_filtered", "stale_groups_filtered", "replayed_groups")
