"""Publication: writes policy versions, announces them to the server, and finds the one to resume from.

training loop      probe, copy to the host | next step ...                                 | probe, copy (waits)
thread, first rank                         | write, announce, acknowledge groups, clean up |
thread, other rank                         | write its rows of the checkpoint (fsdp)       |

The loop waits only for the copy to host memory. A thread writes the copy while the next step changes the weights.
There is only one copy, so only one version is written at a time. The next version waits until this one is written.

Because of the order of the thread's actions, a killed trainer loses no group and repeats no group (resume.py). The
thread writes the folder under another name, flushes it to the disk, and renames it, so a folder with its final name is
complete. Then the thread announces the version, acknowledges the groups that the training checkpoint contains, and
names the state of the checkpoint to the server. If `weights_dir` is not `output_dir`, the version is announced before
the training checkpoint is on the disk. A kill between the two leaves a version without a training checkpoint, and the
resume withdraws this version.

A run may stop after a step whose weights are published already. Then `add_state` adds the training checkpoint to the
published folder, and replaces the manifest by a manifest that names the added files.

With fsdp, the first rank writes the manifest after every rank has reported that its own file is on the disk. So a
training checkpoint in which the file of a rank is missing has no manifest, and does not count.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from replay_client import ReplayClient, Sample
from replay_client.errors import DeadlineExceededError, ReplayError, ServerUnavailableError
from replay_client.folder_lock import FolderLock
from replay_client.waits import Deadline, looking
from replay_generator.engines.rotary_frequencies import frequency_facts, why_other_frequencies
from replay_generator.engines.weights import differing_facts, folder_facts, model_facts, told_facts, why_other_model
from replay_trainer.background import BackgroundTask, HostCopy, ServerWaits
from replay_trainer.batching import bare_group, to_batch
from replay_trainer.config import GRPOConfig
from replay_trainer.leases import GroupLeases, TrainedGroups
from replay_trainer.logprobs import LogprobModel
from replay_trainer.partitions import (
    RankFiles,
    load_weights_of_rank,
    optimizer_state_of_rank,
    put_rows,
    take_rows,
)
from replay_trainer.ranks import Ranks
from replay_trainer.resume import ResumeProtocol, SavedState
from replay_trainer.stopping import Stopped, Stopping
from replay_trainer.weights import (
    Adapter,
    WholeModel,
    WithDelta,
    add_state,
    damaged,
    frequencies_of,
    load_state,
    load_weights,
    probe_tokens,
    publish_weights,
    published,
    remove,
    saved,
    version_of,
    why_damaged,
    why_other_tensors,
    writing,
)

logger = logging.getLogger(__name__)

_WHOLE = StateDictOptions(full_state_dict=True)
"""The whole state, on every rank and on its device."""
_PARTITIONED = StateDictOptions()
"""This rank's part of the state."""
_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""The whole state, only on the first rank, and in host memory."""
FIRST_TRY = 5.0
"""Seconds that the thread tries to announce a version before it writes the training checkpoint of this version."""
CHECKPOINT_SECONDS = 600.0
"""Seconds that a training checkpoint waits for the server's checkpoint, which may have hundreds of gigabytes."""
LAST_TRY = 10.0
"""Seconds that the end of a run, or a stop, waits for an announcement. The requeueing of groups at the end of a run has
the same limit."""
_NOT_ANNOUNCED = "the server does not answer, so nobody has told it of %s"
_SAME_MODEL = "resume with the model, the tokenizer and the adapter of that run, or choose another output_dir"
"""The remedy if a training checkpoint is of another model than the model to train."""


class _Report(NamedTuple):
    """The report that a rank sends to the other ranks in `Publication.check`."""

    error: str
    """The error of the rank's last write; "": the write has not failed."""
    unconfirmed: TrainedGroups
    """`GroupLeases.unconfirmed` of the rank."""
    asked: bool
    """True if the rank was asked to stop."""
    untold: bool
    """True if the rank has given up announcing its last version to the server."""


@dataclass
class Publication:
    """Writes and announces versions. Every rank has a Publication, and all ranks call its methods together."""

    policy: LogprobModel
    optimizer: torch.optim.Optimizer
    tokenizer: Any
    client: ReplayClient
    config: GRPOConfig
    ranks: Ranks
    partitioned: bool
    """True if each rank has a part of the weights."""
    leases: GroupLeases
    """The leases of the fresh groups."""
    stopping: Stopping
    adapter: Adapter | None = None
    """The adapter that is trained and published; None: whole weights are trained and published."""

    def __post_init__(self) -> None:
        config = self.config
        self.output_dir = Path(config.output_dir).resolve()
        self.weights_dir = Path(config.weights_dir or config.output_dir).resolve()
        self.lock = FolderLock(self.output_dir)
        self._last_saved = -config.save_every
        """The version of the last training checkpoint. Its first value makes a training checkpoint due at version 0."""
        self._last_published = -1
        """The last version that was passed to `publish`; -1: none."""
        self._weights_copy = HostCopy()
        self._state_copy = HostCopy()
        self._task = BackgroundTask("replay-publication")
        self._waits = ServerWaits(self.client, quiet=not self.ranks.is_first)
        self._announcing = ""
        """The version that is written and is now being announced to the server, in words; "": there is none."""
        self._untold = False
        """True if the thread has given up the announcement of the last version, because the server was away at a
        stop."""
        self._protocol: ResumeProtocol
        """The protocol for the resume of a run; set by `start`."""
        self._facts: dict[str, Any] = {}
        """`model_facts` of the model, and the facts of the adapter; set by `start`."""
        self._writer: Adapter | WholeModel
        """The object that saves versions; set by `start`. It remembers the generation_config.json from the start of the
        run, which every version gets."""
        self._rank_files = RankFiles(self.ranks, self.output_dir) if self.partitioned else None

    def start(self) -> int:
        """Restores and announces the version to continue from: the last training checkpoint, or a new version 0.

        Raises FileExistsError if output_dir holds the results of another run. Raises RuntimeError if another process
        trains in output_dir, if the server follows another run, or if a rank does not see the output_dir of the first
        rank. Raises ValueError if the server admits fewer groups a step than this run takes, or if the training
        checkpoint is damaged or of another model, tokenizer or adapter. Raises Stopped if a stop ends the wait for the
        server.
        """
        refusal = self.lock.acquire() if self.ranks.is_first else ""
        refusal = self.ranks.from_first(refusal)
        if refusal:
            raise RuntimeError(refusal)
        try:
            if self._rank_files is not None:
                reason = self._rank_files.why_not_shared()
                if reason:
                    raise RuntimeError(reason)
            return self._start()
        except BaseException:
            self.lock.release()
            raise

    def _start(self) -> int:
        """Does the work of `start`, after the folder is locked."""
        self._facts = model_facts(self.policy.model.config, self.tokenizer)
        if self.adapter is not None:
            self._facts |= self.adapter.facts
        self._writer = self.adapter or WholeModel(self.policy.model)
        with self._waits.waiting("for the server"):
            info = self.stopping.wait(self.client.server_info)
        admission = info.admission
        table = info.tables.get(self.config.rollouts_table)
        table_config = None if table is None else table.config
        self._protocol = ResumeProtocol(self.client, self.leases, table_config, renumbers=True)
        if admission is not None:
            self.config.check_admission(admission.fresh_groups_per_step)
        # The folders with a training checkpoint to resume from, oldest first; none: the run begins.
        folders = saved(self.output_dir) if self.config.resume else []
        if folders:
            self._check_model(folders[-1])
            version = version_of(folders[-1])
        else:
            self._check_unused()
            version = 0
        for folder in damaged(self.output_dir):
            if version_of(folder) > version:  # an older folder may be incomplete because its removal was cut off
                logger.warning("%s has lost files or parts of them: it is passed over for step-%d", folder, version)
        self._check_server_follows_no_other_run(resumes=bool(folders))
        self.ranks.wait()  # the first rank now changes files that the others have just read
        if self.ranks.is_first and self._rank_files is not None:
            self._rank_files.remove_leftovers()
        if folders:
            # Each rank checks a share of the files. All ranks raise the same error.
            own_damage = why_damaged(folders[-1], self.ranks.index, self.ranks.size)
            for damage in self.ranks.all(own_damage):
                if damage:
                    raise ValueError(damage)
            self._load(folders[-1])
        else:
            torch.manual_seed(self.config.seed + self.ranks.index)
            self.publish(0)
            self.finish()
        return version

    def _published(self) -> list[Path]:
        """All complete folders of output_dir and weights_dir."""
        folders: list[Path] = []
        for directory in {self.output_dir, self.weights_dir}:
            folders += published(directory)
        return folders

    def _check_unused(self) -> None:
        """Raises FileExistsError if output_dir or weights_dir holds the results of an earlier run."""
        results = self._published()
        metrics_path = self.output_dir / "metrics.jsonl"
        if metrics_path.exists():
            results.insert(0, metrics_path)
        if results:
            remedy = "move it away" if self.config.resume else "set resume=True to continue that run"
            path = results[-1]  # a published folder, if there is any
            raise FileExistsError(
                f"{path.parent} holds {path.name} of an earlier run: {remedy}, or choose another output_dir"
            )

    def _check_server_follows_no_other_run(self, resumes: bool) -> None:
        """Raises RuntimeError if the server follows another run. `resumes`: True if this run resumes."""
        # The last version that the run has published, which may be later than its last training checkpoint.
        newest = max(map(version_of, self._published())) if resumes else 0
        policy = self.client.policy()
        # The folder or address under which the server's current version is published, such as weights_dir.
        location = policy.weights.rpartition("/")[0]
        own_locations = (str(self.output_dir), str(self.weights_dir), self.config.weights_url)
        if resumes and location in own_locations:
            return
        # The location of the other run, for the error; None: the server knows no weights.
        other_location = None
        if policy.weights:
            other_location = location or policy.weights
        # A server that knows no weights follows another run, too, if it is at a later version than this run has ever
        # published.
        if other_location is not None or policy.version > newest:
            raise RuntimeError(
                f"the server is at policy version {policy.version}"
                + (f" of the run in {other_location}" if other_location is not None else "")
                + f", this run at {newest}: continue that run (resume=True with its output_dir), or, if it has ended, "
                f"empty the server with `replay table reset --all` and `replay policy set 0 --rollback`"
            )

    def _check_model(self, folder: Path) -> None:
        """Raises ValueError if the folder of a training checkpoint says that it is of another model, tokenizer or
        adapter."""
        differing = differing_facts(folder_facts(folder, self._facts), self._facts)
        if differing:
            raise ValueError(f"{folder} is of a run with another model: {differing}; {_SAME_MODEL}")
        before = frequencies_of(folder)
        now = frequency_facts(self.policy.model.config, self.policy.max_length)
        if before and now and why_other_frequencies(before, now["max_length"]):
            raise ValueError(
                f"{folder} is of a run with max_length = {before['max_length']}, and this one has max_length = "
                f"{now['max_length']}: above {now['original_length']} tokens (original_max_position_embeddings) the "
                f"model computes with other frequencies. Resume with max_length = {before['max_length']}, or choose "
                f"another output_dir"
            )

    def _load(self, folder: Path) -> None:
        """Loads a training checkpoint, takes the server back to it, and removes all later versions."""
        version = version_of(folder)
        state = load_state(folder, mapped=self.partitioned)
        stores_adapter = "adapter" in state
        trains_adapter = self.adapter is not None
        if stores_adapter != trains_adapter:
            was = "an adapter" if stores_adapter else "whole weights"
            is_now = "an adapter" if trains_adapter else "whole weights"
            raise ValueError(f"{folder} is of a run that trains {was}, and this one trains {is_now}; {_SAME_MODEL}")
        if self.adapter is not None:
            try:
                self.adapter.load(state["adapter"])
            except ValueError as error:
                raise ValueError(f"{folder} is of a run with another adapter: {error}; {_SAME_MODEL}") from None
        elif self.partitioned:
            try:
                load_weights_of_rank(folder, self.policy.model)
            except ValueError as error:
                raise ValueError(f"{error}; {_SAME_MODEL}") from None
        else:
            weights = load_weights(folder, self.policy.model)
            difference = why_other_tensors(weights, self.policy.model.state_dict())
            if difference:
                raise ValueError(f"{folder} is of a run with another model: {difference}; {_SAME_MODEL}")
            # `policy` is a LogprobModel, whose attribute `model` is the model. So its names begin with "model.".
            prefixed = {f"model.{name}": tensor for name, tensor in weights.items()}
            set_model_state_dict(self.policy, prefixed, options=_WHOLE)
        optimizer = state["optimizer"]
        if optimizer is not None:  # None: the checkpoint was made before the first update
            if "rows" in state:  # partitioned weights: the rows are in files of their own
                put_rows(optimizer, folder, **state["rows"])
            own_state = optimizer_state_of_rank(optimizer, self.policy)
            # Without partitioned weights, `own_state` is the whole state, and is in host memory.
            options = _PARTITIONED if self.partitioned else _GATHERED
            set_optimizer_state_dict(self.policy, self.optimizer, own_state, options=options)
        if self.ranks.index < len(state["random"]):  # the checkpoint may be of a run with fewer ranks
            torch.set_rng_state(state["random"][self.ranks.index])
            cuda_state = state["cuda_random"][self.ranks.index]
            if cuda_state is not None and torch.cuda.is_available():
                torch.cuda.set_rng_state(cuda_state)
        self._last_saved = version
        self._writer.go_on_from(folder)  # later versions get the generation_config.json of this folder
        location = self._location_of_restored(version, folder)
        if self.ranks.is_first:
            groups = TrainedGroups.from_state_dict(state["groups"])
            saved_state = SavedState(version=version, **state["history"])
            self._protocol.resume(groups, saved_state, location, f"step {version}")
            self._describe()
            # Later versions are removed only now, because generators may load them until the server has gone back.
            for published_folder in self._published():
                if version_of(published_folder) > version:
                    remove(published_folder)
        self.ranks.wait()

    def _location_of_restored(self, version: int, folder: Path) -> str:
        """Returns the location from which generators load the restored version: its training checkpoint `folder` or,
        with `weights_url`, its address. With `weights_url`, writes the version to weights_dir first.

        The version is written anew because the address serves weights_dir and not output_dir. If weights_dir is in
        memory, it may have lost the version.
        """
        if self.config.weights_url is None:
            return str(folder)
        probe = self.probe()
        weights = self._weights()
        if self.ranks.is_first:
            # Later versions are undone by the resume. The folder of this version is removed because `_write_to` refuses
            # a folder that exists.
            for published_folder in published(self.weights_dir):
                if version_of(published_folder) >= version:
                    remove(published_folder)
            self._weights_copy.wait()
            self._write_to(self.weights_dir, version, probe, weights)
        return self._location(folder)

    def complete(self, version: int, left: Sequence[Sample] = ()) -> None:
        """Publishes the version at which the run stops, with a training checkpoint. Does nothing if the last training
        checkpoint is of this version."""
        if self._last_saved != version:
            self.publish(version, left)

    def publish(self, version: int, left: Sequence[Sample] = ()) -> None:
        """Copies the weights to the host, and also the state if a training checkpoint is due. A thread then writes and
        announces the version.

        A training checkpoint is due after `save_every` steps, after the last step, and when the run stops. It contains
        the groups of all steps so far, without the groups that are `left` for later steps.

        The thread works while the next steps run, on one version at a time. So this call first waits until the thread
        has finished the last version that was passed to it. Raises RuntimeError on every rank if that version failed,
        and FloatingPointError if the weights compute numbers that are not finite. Then this version is neither written
        nor announced.
        """
        config = self.config
        self.finish()
        probe = self.probe()
        has_interval_passed = version - self._last_saved >= config.save_every
        is_checkpoint_due = version == config.max_steps or has_interval_passed or self.stopping.agreed
        has_weights_published = version == self._last_published
        assert version >= self._last_published, f"version {version} comes after {self._last_published}"
        assert version >= self._last_saved, f"version {version} comes after the state of {self._last_saved}"
        self._last_published = version
        self._untold = False
        weights = self._weights()
        state, rows = self._state() if is_checkpoint_due else (None, None)
        # The groups that the training checkpoint contains, of all ranks. They are acknowledged once it is written.
        groups = TrainedGroups()
        if is_checkpoint_due:
            own_groups = self.leases.trained(left)
            groups = TrainedGroups.of_ranks(self.ranks.all(own_groups))
        saved_state = None
        if state is not None:
            saved_state = self._protocol.new_state(version)
            state["groups"] = groups.state_dict()
            state["history"] = {"id": saved_state.id, "before": saved_state.before}
        if self.ranks.is_first:
            checkpoint = ""
            if is_checkpoint_due and config.checkpoint_server:
                # This call is not made in the background, because the server's checkpoint must be of this moment. The
                # server chooses the name of its checkpoint, so that it also removes the checkpoint once there are
                # enough newer ones.
                try:
                    checkpoint = self.client.create_checkpoint(timeout=CHECKPOINT_SECONDS)
                except DeadlineExceededError as error:
                    logger.warning(
                        "the training checkpoint of step %d names no checkpoint of the server: %s", version, error
                    )
            write = partial(
                self._write,
                version,
                probe,
                weights,
                state,
                rows,
                checkpoint,
                groups,
                saved_state,
                has_weights_published=has_weights_published,
            )
            self._task.start(write)
        elif rows is not None:  # a rank that is not the first writes only its own rows
            self._task.start(partial(self._write_rows, version, rows))
        if is_checkpoint_due:
            self._last_saved = version
        if not config.publish_in_background:
            self.finish()

    def check_generators(self) -> None:
        """Raises RuntimeError on every rank if a connected generator has another model or tokenizer."""
        difference = ""
        if self.ranks.is_first:
            with self._waits.waiting("for the server"):
                difference = why_other_model(self.client.server_info().clients, self._facts)
        difference = self.ranks.from_first(difference)
        if difference:
            raise RuntimeError(difference)

    def check(self) -> None:
        """Raises RuntimeError on every rank if a write has failed. Does not wait for a write that is under way.

        Also tells every rank whether any rank was asked to stop, which groups the first rank could not acknowledge, and
        whether the first rank has given up an announcement. So every rank knows the groups that are not acknowledged
        before the next step draws groups.
        """
        error = self._task.take_error()
        own_report = _Report(
            error="" if error is None else f"{type(error).__name__}: {error}",
            unconfirmed=self.leases.unconfirmed,
            asked=self.stopping.is_asked(),
            untold=self._untold,
        )
        reports = self.ranks.all(own_report)
        if not self.ranks.is_first:  # on the first rank, the thread may have set newer values since the report
            self.leases.unconfirmed = reports[0].unconfirmed
            self._untold = reports[0].untold
        self.stopping.agree(any(report.asked for report in reports))
        errors = [report.error for report in reports if report.error]
        if errors:
            reason = errors[0]
            raise RuntimeError(
                f"a version could not be published: {reason}. The run stops here, because its generators would stay at "
                f"the version before. Mend the cause, and continue with resume=True"
            ) from error

    def finish(self) -> None:
        """Waits until the last version is written and announced. Raises RuntimeError on every rank if that failed.

        After a stop, an announcement gets only LAST_TRY seconds more, because a resume announces the version again.
        """
        self._task.wait()
        self.check()
        if not self._untold:  # then the thread has acknowledged the groups of the training checkpoint
            self.leases.settled()

    def close(self) -> None:
        """Waits for the last write, logs its error if it failed, and releases the folder.

        A write may take as long as it needs. But an announcement gets only LAST_TRY seconds more, because the files of
        the version are written by then, and a resume announces the version again.
        """
        end = time.monotonic() + LAST_TRY

        def may_wait() -> bool:
            """True while the thread still writes, or while the LAST_TRY seconds are not over."""
            return not self._announcing or time.monotonic() < end

        has_ended = self._task.wait(only_while=may_wait)
        if not has_ended:
            logger.error(_NOT_ANNOUNCED, self._announcing)
        error = self._task.take_error()
        if error is not None:
            logger.error("the last version could not be published either: %s: %s", type(error).__name__, error)
        self.lock.release()

    def _write(
        self,
        version: int,
        probe: dict[str, list[Any]],
        weights: dict[str, Tensor],
        state: dict[str, Any] | None,
        rows: dict[str, Tensor] | None,
        checkpoint: str,
        groups: TrainedGroups,
        saved_state: SavedState | None,
        has_weights_published: bool,
    ) -> None:
        """Writes one version and announces it.

        Runs on a thread, so this method must not use the connections with which the training loop exchanges values
        between ranks. `state` and `saved_state` None: the version gets no training checkpoint. `checkpoint`: the name
        of the server's checkpoint; "": there is none. `groups`: the groups of the training checkpoint.
        `has_weights_published`: True if the weights of the version are published already, and only its training
        checkpoint is missing.
        """
        assert self.ranks.is_first, "one rank announces versions"
        assert (state is None) == (saved_state is None), "a training checkpoint is named, and nothing else is"
        assert state is not None or not groups.keys, "groups end with a training checkpoint"
        folder = self.weights_dir / f"step-{version}"  # the folder that generators load
        is_apart = self.weights_dir != self.output_dir
        is_announced = False
        try:
            self._weights_copy.wait()
            if is_apart and not has_weights_published:
                self._write_to(self.weights_dir, version, probe, weights)
                # The version is announced before the training checkpoint is written, so that generators need not wait
                # for the disk. If the server is away, the training checkpoint is written first, and the version is
                # announced below.
                with suppress(ServerUnavailableError, DeadlineExceededError):
                    self.client.set_policy_version(version, weights=self._location(folder), timeout=FIRST_TRY)
                    is_announced = True
        finally:
            # This call is made even after an error, because the other ranks wait for this rank in `_write_rows`.
            parts = self._write_rows(version, rows)
        full_state: dict[str, Any] = {"state": state, "server_checkpoint": checkpoint, "parts": parts}
        if has_weights_published and not is_apart:  # output_dir has this version, without a training checkpoint
            with writing(folder, RuntimeError):
                add_state(folder, **full_state)
        elif state is not None or not is_apart:  # an output_dir apart from weights_dir has only training checkpoints
            self._write_to(self.output_dir, version, probe, weights, **full_state)
        # The files are written, so from here on `close` and a stop may end the wait for the server.
        self._announcing = f"version {version} in {folder}"
        waiting = self._waits.waiting(f"to announce version {version}, which is in {folder},")
        try:
            with waiting, looking(self._look_for_a_stop()):
                if not is_announced:
                    self.client.set_policy_version(version, weights=self._location(folder))
                self.leases.acknowledge(groups)  # before the state is named: see resume.py
                if saved_state is not None:
                    self._protocol.name(saved_state, self._location(folder))
                self._describe()  # after each version, because a server that was started again has forgotten it
        except Stopped:
            self._untold = True
            logger.error(_NOT_ANNOUNCED, self._announcing)
        self._announcing = ""

    def _look_for_a_stop(self) -> Callable[[], None]:
        """Returns a function for `looking`, which is called again and again during a wait. It raises Stopped LAST_TRY
        seconds after the call that first finds that the run was asked to stop."""
        deadline: Deadline | None = None

        def look() -> None:
            """Sets the deadline once the run is asked to stop. Raises Stopped after the deadline."""
            nonlocal deadline
            if deadline is None and self.stopping.is_asked():
                deadline = Deadline(LAST_TRY)
            if deadline is not None and deadline.passed:
                raise Stopped

        return look

    def _write_to(
        self, directory: Path, version: int, probe: dict[str, list[Any]], weights: dict[str, Tensor], **full_state: Any
    ) -> None:
        """Writes one version to `directory`, which is weights_dir or output_dir. `full_state`: the arguments of
        `publish_weights` for a training checkpoint; none: only the weights are written."""
        model: Any = self._writer
        if self.config.publish == "delta" and directory == self.weights_dir:
            model = WithDelta(model, directory, self.config.weights_dtype)
        # On a full disk, safetensors raises SafetensorError and torch raises RuntimeError.
        with writing(directory / f"step-{version}", RuntimeError, SafetensorError):
            publish_weights(
                model,
                self.tokenizer,
                directory,
                version=version,
                keep=self.config.keep_weights,
                probe=probe,
                weights=weights,
                facts=self._facts,
                frequencies=frequency_facts(self.policy.model.config, self.policy.max_length),
                **full_state,
            )

    def _location(self, folder: Path) -> str:
        """The location from which generators load the version in `folder`: its address if `weights_url` is set, and
        the folder itself otherwise."""
        url = self.config.weights_url
        if url is None:
            return str(folder)
        return f"{url}/{folder.name}"

    def _describe(self) -> None:
        """Tells the server the settings and the model of this trainer, for `replay doctor`. Ignores errors, because the
        run does not depend on this call."""
        with suppress(ReplayError):
            self.client.describe(self.config.described() | {"model": told_facts(self._facts)})

    def _write_rows(self, version: int, rows: dict[str, Tensor] | None) -> dict[str, tuple[Path, str]]:
        """Writes this rank's rows, if there are any. Returns the files of all ranks, as `RankFiles.write` does."""
        self._state_copy.wait()
        if self._rank_files is None or rows is None:
            return {}
        return self._rank_files.write(version, rows)

    def _weights(self) -> dict[str, Tensor]:
        """The weights to publish, in host memory, by their names in the model. Empty on all ranks but the first."""
        if self.partitioned and self.adapter is None:
            # The gathered tensors are in host memory already, and nothing else uses them, so they need no copy.
            state: dict[str, Any] = get_model_state_dict(self.policy, options=_GATHERED)
            return {name.removeprefix("model."): tensor for name, tensor in state.items()}
        weights: dict[str, Tensor] = {}
        if self.adapter is not None and self._reads_adapter:
            weights = self.adapter.weights()  # the ranks gather a partitioned adapter together
        if not self.ranks.is_first:
            return {}
        if not weights:  # there is no adapter
            weights = dict(self.policy.model.state_dict())
        copied: dict[str, Tensor] = self._weights_copy.take(weights)
        return copied

    @property
    def _reads_adapter(self) -> bool:
        """True if this rank reads the tensors of the adapter: the first rank, or every rank if weights are
        partitioned."""
        return self.ranks.is_first or self.partitioned

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
        """Returns (state, rows): the state that a resume needs besides the weights and the version.

        If weights are partitioned, `rows` are this rank's rows of the optimizer's state, and `state` has the rest.
        Otherwise `rows` is None, and `state` has everything. The learning rate is not stored, because it follows from
        the step.
        """
        on_gpu = self.ranks.device.type == "cuda"
        optimizer = None
        rows = None
        rows_entry = {}
        # Before the first update the optimizer has no state, and torch would make an optimizer step to create it.
        if self.optimizer.state:
            options = _PARTITIONED if self.partitioned else _WHOLE
            optimizer = get_optimizer_state_dict(self.policy, self.optimizer, options=options)
            if self.partitioned:
                optimizer, rows, shapes = take_rows(optimizer)
                rows_entry["rows"] = {"ranks": self.ranks.size, "shapes": shapes}
            # Other ranks write no state of the optimizer, so they need no copy.
            if self.partitioned or self.ranks.is_first:
                optimizer, rows = self._state_copy.take([optimizer, rows])
        adapter_entry = {}
        if self.adapter is not None and self._reads_adapter:
            # `clone`, because `cpu` makes no copy of a tensor that is on the CPU already.
            adapter_entry["adapter"] = {
                name: tensor.detach().cpu().clone() for name, tensor in self.adapter.tensors().items()
            }
        state = {
            **adapter_entry,
            **rows_entry,
            "optimizer": optimizer,
            "random": self.ranks.all(torch.get_rng_state()),
            "cuda_random": self.ranks.all(torch.cuda.get_rng_state() if on_gpu else None),
        }
        return state, rows

    @torch.no_grad()
    def probe(self) -> dict[str, list[Any]]:
        """Returns {"token_ids": [P], "logprobs": [P - 1]}: P fixed tokens, and the log-probability of each token after
        the first, given the tokens before it.

        The log-probabilities are in nats, at temperature 1, and computed in the dtype of the model. Every rank calls
        this method. Raises FloatingPointError on every rank if a log-probability is not finite, which means that the
        weights are useless.
        """
        token_ids = probe_tokens(self.policy.model, self.tokenizer)
        group = bare_group(token_ids[:1], token_ids[1:])  # one sequence: the first token is its prompt
        logprobs_BT, _ = self.policy(to_batch([group], self.ranks.device))
        is_finite = bool(logprobs_BT.isfinite().all())
        if not all(self.ranks.all(is_finite)):
            raise FloatingPointError(self._why_unsound())
        assert logprobs_BT.shape == (1, len(token_ids) - 1), (logprobs_BT.shape, len(token_ids))
        return {"token_ids": token_ids, "logprobs": logprobs_BT[0].tolist()}

    def _why_unsound(self) -> str:
        """The text of the error for weights that are useless, with the version to continue from."""
        versions = self._published()
        states = saved(self.output_dir)
        if not states:  # then the run has not published version 0, because version 0 has a training checkpoint
            return "the model computes log-probabilities that are not finite before any step: its weights are damaged"
        last = max(versions, key=version_of)
        return (
            f"the weights compute log-probabilities that are not finite, so they are not published. The last good "
            f"version is {version_of(last)}, in {last}. Continue with resume=True from {states[-1]}, and a lower "
            f"learning_rate (now {self.config.learning_rate:g})"
        )
