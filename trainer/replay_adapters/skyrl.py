"""SkyRL's fully asynchronous trainer with a replay server: finished groups survive a crash, and may be replayed.

    class MyExp(FullyAsyncPPOExp):
        def get_trainer(self, **arguments): return ServerFullyAsyncTrainer(**arguments)

generator ──finished group──▶ SkyRL's own buffer ──▶ mini-batch ──▶ checkpoint
  │   ▲                                               ▲      │          │ deletes the copies of the
  │   │ after a restart                 stored groups │      │          │ groups that it contains
  ▼   │                                               │      ▼          ▼
table `finished`                                   table `replay`     table `finished`

SkyRL's buffer is a queue in the memory of the trainer, and SkyRL asserts that the queue agrees with its prompts, epochs
and counts. So this adapter does not replace the queue. It keeps a copy of each finished group on the server until a
checkpoint contains the group. A trainer that resumes asks for all prompts that its checkpoint does not name. If the
server has the group of such a prompt, the group is taken from the server and not generated.

Before a mini-batch becomes training input, groups of the table `replay` take the place of groups whose rewards are all
equal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from replay_adapters.finished_groups import EpochGroups, Place
from replay_adapters.group_pool import GroupPool, OnUnavailable
from replay_adapters.hooks import hooks_of
from replay_client import ReplayClient, RolloutGroup, Sample
from replay_client.waits import in_daemon_thread

with hooks_of("SkyRL"):
    from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer, GeneratedOutputGroup
    from skyrl.train.generators.base import GeneratorInterface, TrajectoryID

    from replay_adapters.skyrl_rows import columns_of, group_of, output_of


@dataclass(frozen=True)
class SkyRLSettings:
    """The argument `replay` of ServerFullyAsyncTrainer."""

    address: str | None = None
    """host:port; None: REPLAY_ADDRESS."""
    finished: str = "finished"
    """The table of finished groups that no checkpoint contains. A table that is configured as a queue is refused,
    because inserts into a queue wait for draws, and no program draws from this table."""
    pool: str | None = "replay"
    """The table of groups that were trained on. They replace groups without variance. None: nothing is replaced."""
    max_staleness: int | None = None
    """The most steps that a stored group may lag; None: SkyRL's `fully_async.max_staleness_steps`."""
    on_unavailable: OnUnavailable = "continue"
    """continue: while the server is away, train as SkyRL does without it. raise: end the run."""
    timeout: float = 60.0
    """Seconds that a call waits for a server that went away."""


class _KeepingGenerator(GeneratorInterface):  # type: ignore[misc]  # SkyRL has no types that mypy reads
    """SkyRL's generator, which stores the groups that it generates, and generates no group that is stored already."""

    def __init__(self, generator: Any, trainer: Any) -> None:
        """`trainer`: the trainer that uses the server, an instance of WithServer."""
        self._generator = generator
        self._trainer = trainer
        self._takes_disable_tqdm = "disable_tqdm" in inspect.signature(generator.generate).parameters

    def __getattr__(self, name: str) -> Any:
        """All other attributes are those of SkyRL's generator."""
        return getattr(self._generator, name)

    async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> Any:
        """The output for a batch. In training, a batch is one prompt, and its output is stored.

        If the server has the output already, it is returned. Otherwise SkyRL's generator generates the output.
        """
        generate = self._generator.generate
        if self._takes_disable_tqdm:
            generate = partial(generate, disable_tqdm=disable_tqdm)
        if not self._is_to_be_stored(input_batch.get("batch_metadata")):
            return await generate(input_batch)
        place = (self._trainer.epoch, input_batch["trajectory_ids"][0].instance_id)
        prompts = input_batch["prompts"]
        stored = await in_daemon_thread(partial(self._trainer.recalled, place, prompts))
        if stored is not None:
            return stored
        step = self._trainer.global_step  # before the generation, during which the step may change
        output = await generate(input_batch)
        await in_daemon_thread(partial(self._trainer.keep, place, output, step, prompts))
        return output

    def _is_to_be_stored(self, metadata: Any) -> bool:
        """True if the output for a batch with this metadata is to be stored."""
        if metadata is None or metadata.training_phase != "train":
            return False
        # Without checkpoints, no run is ever resumed, so no run would use the stored groups.
        return bool(self._trainer.cfg.trainer.ckpt_interval > 0)


class WithServer:
    """Adds the server to one of SkyRL's fully asynchronous trainers. The argument `replay` has the settings."""

    # SkyRL's trainer sets these.
    cfg: Any
    generator: Any
    async_train_dataloader: Any
    all_metrics: dict[str, Any]
    epoch: int
    global_step: int
    max_staleness_steps: int
    num_steps_per_epoch: int

    def __init__(self, *args: Any, replay: SkyRLSettings | None = None, **kwargs: Any) -> None:
        """Raises ValueError if SkyRL samples without log-probabilities or the table `finished` is a queue,
        TableNotFoundError if the server lacks a table, and ServerUnavailableError if no server answers."""
        super().__init__(*args, **kwargs)
        settings = replay or SkyRLSettings()
        if self.cfg.generator.sampling_params.logprobs is None:
            raise ValueError("generator.sampling_params.logprobs is None: set it to 1, groups are stored with them")
        self.client = ReplayClient.from_env(settings.timeout, address=settings.address)
        self._max_staleness = self.max_staleness_steps if settings.max_staleness is None else settings.max_staleness
        """The most steps that a stored group may lag."""
        options: dict[str, Any] = {
            "sequences": True,
            "on_unavailable": settings.on_unavailable,
            "timeout": settings.timeout,
        }
        # Each start of a run gets the same name, because a run that resumes has the same folder of checkpoints.
        run = hashlib.sha256(str(self.cfg.trainer.ckpt_path).encode()).hexdigest()[:16]
        self._finished = EpochGroups(self.client, settings.finished, run=run, **options)
        self._pool: GroupPool | None = None
        if settings.pool is not None:
            self._pool = GroupPool(self.client, settings.pool, max_staleness=self._max_staleness, **options)
        self._scope = uuid.uuid4().hex
        """The beginning of the scopes of this run's draws."""
        self._steps_of_recalled: dict[str, int] = {}
        """Uid of a group that came from the server -> the step at which the group was generated, as this run counts
        steps."""
        self._counts = dict.fromkeys(_COUNTS, 0)
        """The counters of the current step, by the names of their metrics."""
        self.generator = _KeepingGenerator(self.generator, self)

    async def train(self) -> None:
        """Runs SkyRL's training. Then deletes from the server the groups that the last checkpoint contains."""
        try:
            await super().train()  # type: ignore[misc]
            await in_daemon_thread(lambda: self._finished.forget(dict(self._finished.contained)))
        finally:
            self.client.close()

    # ------------------------------------------------------------------------------------------- finished groups

    def recalled(self, place: Place, prompts: Any) -> dict[str, Any] | None:
        """The output for a prompt, if an earlier start of the run left it on the server. None: it must be generated."""
        group = self._finished.get(place)
        if group is None:
            return None
        read = output_of(group)
        # SkyRL counts steps from 1, so `global_step` - 1 updates are done.
        lag = max(0, self._finished.version_of(self.global_step - 1) - group.policy_version)
        if read is None or read[1]["prompts"] != prompts or lag > self._max_staleness:
            # The group is of another program or of another prompt, or it is too old.
            self._finished.forget({place: self._finished.held[place]})
            self._counts["replay/groups_generated_again"] += 1
            return None
        output, _ = read
        _, uid = place
        self._steps_of_recalled[uid] = self.global_step - lag
        self._counts["replay/groups_recalled"] += 1
        return output

    def keep(self, place: Place, output: Mapping[str, Any], step: int, prompts: Any) -> None:
        """Stores the output for a prompt that was scheduled at `step`."""
        version = self._finished.version_of(step - 1)
        self._finished.store(place, group_of(output, version, prompts))

    def save_checkpoints(self) -> Any:
        """Saves SkyRL's checkpoint. The groups in this checkpoint are deleted from the server at the next
        checkpoint."""
        uids = set(self.async_train_dataloader.get_consumed_uids_list())
        folder = super().save_checkpoints()  # type: ignore[misc]
        self._finished.saved(self.epoch, uids)
        return folder

    def load_checkpoints(self) -> Any:
        """Loads SkyRL's checkpoint. Looks up the finished groups on the server, and deletes those that the checkpoint
        contains."""
        loaded = super().load_checkpoints()  # type: ignore[misc]
        step, _, uids, _, epoch = loaded
        self._finished.find()
        if epoch is None:  # SkyRL has loaded no checkpoint, or one that does not name its epoch
            epoch = step // self.num_steps_per_epoch
        self._finished.saved(epoch, uids or set())
        # The groups need not stay until the next checkpoint, because the checkpoint that was loaded is on the disk.
        self._finished.forget(dict(self._finished.contained))
        return loaded

    # ---------------------------------------------------------------------------------------------- replacement

    async def _collect_generation_mini_batch(self, *args: Any) -> Any:
        """SkyRL's mini-batch, with groups of the pool in the place of groups whose rewards are all equal."""
        groups, dropped, exhausted = await super()._collect_generation_mini_batch(*args)  # type: ignore[misc]
        if not exhausted:
            groups = await in_daemon_thread(partial(self._replaced, groups))
        return groups, dropped, exhausted

    def _replaced(self, groups: list[GeneratedOutputGroup]) -> list[GeneratedOutputGroup]:
        """The groups of a mini-batch after replacement. Adds metrics to SkyRL's."""
        self._finished.advance(self.global_step - 1)  # SkyRL counts steps from 1, so this many updates are done
        for index, group in enumerate(groups):
            # SkyRL notes the step at which it asked for a group. A group that the server had is from an earlier step.
            step = self._steps_of_recalled.pop(group.uid, group.global_step_when_scheduled)
            groups[index] = dataclasses.replace(group, global_step_when_scheduled=step)
        if self._pool:
            fresh = {index: self._rollout_group(group) for index, group in enumerate(groups)}
            # SkyRL joins the lists of all groups, so only groups whose lists have the same names are drawn.
            columns = columns_of(fresh[0])
            scope = f"{self._scope}/{self.global_step}"
            drawn, metrics = self._pool.replace(fresh, scope, lambda group: columns_of(group) == columns)
            for index, sample in drawn.items():
                groups[index] = self._in_place(groups[index], sample)
            self.all_metrics.update(metrics)
        self.all_metrics.update(self._counts)
        self._counts = dict.fromkeys(_COUNTS, 0)
        return groups

    def _rollout_group(self, group: GeneratedOutputGroup) -> RolloutGroup:
        """A group of SkyRL as a group of the pool."""
        version = self._finished.version_of(group.global_step_when_scheduled - 1)
        return group_of(group.generator_output, max(0, version), group.prompts)

    def _in_place(self, group: GeneratedOutputGroup, sample: Sample) -> GeneratedOutputGroup:
        """The stored group `sample` in the place of `group`, whose uid it gets, because SkyRL counts prompts by uid."""
        read = output_of(sample.group)
        assert read is not None  # only groups that can be read are drawn
        output, more = read
        trajectories = output.get("trajectory_ids")
        if trajectories:
            output["trajectory_ids"] = [
                TrajectoryID(group.uid, trajectory.repetition_id) for trajectory in trajectories
            ]
        return GeneratedOutputGroup(
            generator_output=output,
            uid=group.uid,
            global_step_when_scheduled=self.global_step - sample.info.staleness,
            prompts=more["prompts"],
        )


_COUNTS = ("replay/groups_recalled", "replay/groups_generated_again")
"""The metrics that count groups which were taken from the server, and groups there which were unusable and therefore
generated again."""


class ServerFullyAsyncTrainer(WithServer, FullyAsyncRayPPOTrainer):  # type: ignore[misc]
    """SkyRL's FullyAsyncRayPPOTrainer with a server."""
