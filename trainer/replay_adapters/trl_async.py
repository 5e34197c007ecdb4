"""Connects TRL's AsyncGRPOTrainer to a replay server, which is its queue of rollouts.

Generators can run on any machine, and they go on when the trainer ends.

replay generate ──insert──▶ rollouts ──lease──▶ ServerRollouts.rollout_buffer ──▶ AsyncGRPOTrainer ──▶ checkpoint
      ▲                        └──forward──▶ replay ──replaces zero variance──┘         │                  │
      └────────────── policy version, folder of weights ◀── update_model_version ◀──────┘   acknowledged ◀─┘

* The trainer leases groups of the table `rollouts`. It acknowledges them when a checkpoint contains them.
* The server forwards groups of `rollouts` to the table `replay`. If all rewards of a fresh group are equal, so that it
  has no variance, the trainer trains on a group of `replay` instead.
* After an update, the trainer writes the weights into a folder, and announces the folder with a policy version.
  Generators load the weights from there.
"""

from __future__ import annotations

import json
import logging
import queue
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from replay_adapters.hooks import hooks_of
from replay_adapters.leased_table import LeasedTable
from replay_client import Policy, RolloutGroup, Sample
from replay_client.errors import GONE
from replay_client.sampling_masks import other_sampling
from replay_client.scoring import carries_gradient
from replay_client.words import counted
from replay_generator.engines import text_of
from replay_generator.engines.weights import model_facts, why_other_model
from replay_trainer.leases import TrainedGroups
from replay_trainer.resume import SavedState
from replay_trainer.weights import (
    WholeModel,
    publish_weights,
    published,
    to_disk,
    version_of,
    why_not_mergeable,
)

with hooks_of("AsyncGRPO"):
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample


@dataclass(frozen=True)
class _Group:
    """A group that was handed out to TRL. `Progress` says what the place of a sequence is."""

    sample: Sample
    """The group, as the server returned it."""
    skipped: int
    """The number of first sequences that were not handed out, because the trainer has trained on them before."""
    place_before: int
    """The last place before this group. The first sequence that is handed out has the place `place_before` + 1."""
    last_place: int
    """The place of the last sequence."""


class Progress:
    """Tracks how far TRL's AsyncGRPOTrainer has trained on the groups that it took from its queue.

    The place of a sequence is its position in the order in which TRL takes sequences. The first place is 1.

    TRL takes a sequence      ──▶  TRL collates a micro-batch       ──▶  TRL trains on the micro-batch
    give it the next place         append the micro-batch's last         set `_done` to the last place
                                   place to `_collated`                  of the micro-batch

    * TRL takes the sequences of groups one by one, and calls each of them a sample. A `Sample` of the server is a whole
      group.
    * TRL keeps the order of the queue, so each micro-batch holds the sequences that follow those of the micro-batch
      before.
    * TRL collates ahead, so `_collated` may hold the last places of several micro-batches.
    * TRL drops sequences that are too old or too long. A dropped sequence counts as done when a later one is done.
    * Only the thread of TRL's loop uses a Progress.
    """

    def __init__(self) -> None:
        self._last_place = 0
        """The place of the sequence that was handed out last."""
        self._done = 0
        """All sequences up to this place are trained on, or dropped."""
        self._groups: deque[_Group] = deque()
        """The groups with sequences that are not trained on yet, in the order in which they were handed out."""
        self._places: dict[int, int] = {}
        """`id` of the `input_ids` of a sequence -> its place. TRL passes the array `input_ids` on without a copy."""
        self._collated: deque[int] = deque()
        """The last place of each micro-batch that is collated and not trained on yet, oldest first."""
        self._skip: dict[int, int] = {}
        """Key of a group that was trained on in part before this run -> the number of its first sequences to leave
        out."""
        self._last_number = 0
        """The number of the last group. TRL knows a group by this number."""

    def watch(self, collator: Any) -> None:
        """Makes TRL's collator append the last place of each micro-batch to `_collated`, from now on."""
        collate = collator.torch_call

        def note_and_collate(examples: list[Any]) -> Any:
            """TRL calls this for each micro-batch, in place of `torch_call`."""
            rows = examples[0]  # the only element: a micro-batch, as a list with a row for each rank
            sequences = [sequence for row in rows for sequence in row.samples]
            places = [self._places[id(sequence["input_ids"])] for sequence in sequences]
            self._collated.append(max(places))
            return collate(examples)

        collator.torch_call = note_and_collate

    def skip(self, begun: dict[int, int]) -> None:
        """Notes which sequences to leave out, because the trainer has trained on them before.

        `begun`: the property `begun` of the run before, from the checkpoint from which the trainer goes on: the key of
        a group -> the number of its first sequences that the trainer has trained on.
        """
        self._skip = begun

    def begin(self, sample: Sample) -> tuple[int, int]:
        """Returns a number for a new group, and how many of its first sequences to leave out."""
        self._last_number += 1
        skipped = self._skip.pop(sample.info.key, 0)
        return self._last_number, skipped

    def hand_out(self, sample: Sample, skipped: int, rows: list[np.ndarray]) -> None:
        """Gives places to the sequences of a group, which TRL gets now, in this order.

        `skipped`: the number of first sequences of the group that TRL does not get. `rows`: the `input_ids` of each
        sequence that TRL gets.
        """
        place_before = self._last_place
        for input_ids in rows:
            self._last_place += 1
            self._places[id(input_ids)] = self._last_place
        self._groups.append(_Group(sample, skipped, place_before, self._last_place))

    def trained(self) -> None:
        """Notes that the trainer has trained on the oldest micro-batch in `_collated`."""
        self._done = self._collated.popleft()
        while self._groups and self._groups[0].last_place <= self._done:
            self._groups.popleft()
        # Forget the places up to `_done`, because Python may reuse the id of an array that was freed.
        self._places = {array_id: place for array_id, place in self._places.items() if place > self._done}

    @property
    def left(self) -> list[Sample]:
        """The groups with sequences that are not trained on yet."""
        return [group.sample for group in self._groups]

    @property
    def begun(self) -> list[tuple[int, int]]:
        """The key of each group that is trained on in part, and the number of its first sequences that are trained
        on."""
        counts = dict(self._skip)  # the groups that the run before has begun, and that were not drawn again yet
        for group in self._groups:
            trained_in_this_run = max(0, self._done - group.place_before)
            count = group.skipped + trained_in_this_run
            if count:
                counts[group.sample.info.key] = count
        return list(counts.items())


logger = logging.getLogger(__name__)

_STATE = "replay_state.json"
"""The file of a checkpoint with its `SavedState`."""
_LONG_WAIT = 30.0
"""Seconds without a group after which the trainer logs that it waits."""


class ServerRollouts(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Feeds an AsyncGRPOTrainer with the groups of a server, and publishes its weights, during one call of `train`.

    Pass this object to the trainer as `rollout_worker`, as `weight_transfer` and as a callback.

    * The groups that the trainer takes stay leased until a checkpoint of TRL contains the steps that used them.
    * TRL counts its versions anew whenever it starts. The server goes on counting from its newest version.
    * While the server is away, the trainer waits.
    * A rollout may have several sequences.
    * A group with token_advantages is rejected, because TRL has one advantage for all tokens of a sequence.
    """

    def __init__(
        self,
        address: str | None,
        output_dir: str | Path,
        *,
        table: str = "rollouts",
        pool: str | None = "replay",
        max_staleness: int | None = None,
        keep_weights: int = 2,
        lease: float = 300.0,
    ) -> None:
        """`address`: host:port; None: REPLAY_ADDRESS. `output_dir`: the folder in which generators find the weights.
        The folder keeps the `keep_weights` newest versions, and only one run at a time may use it.

        `table`: the table of fresh groups. `pool`: the table whose groups replace groups whose rewards are all equal;
        None: nothing is replaced. `max_staleness`: the same value as in AsyncGRPOConfig; no older group replaces
        another one, because TRL would drop its sequences. `lease`: seconds after which the server takes back the groups
        of a trainer that died and was not started again. Raises TableNotFoundError if the server lacks a table.
        """
        self._output_dir = Path(output_dir).resolve()
        self._keep_weights = keep_weights
        self._queue = LeasedTable(
            "the trainer",
            table,
            self._output_dir,
            lease,
            pool=pool,
            max_staleness=max_staleness,
            address=address,
        )
        self.client = self._queue.client
        self._pool = self._queue.pool
        self._leases = self._queue.leases
        self._reach = self._queue.reach
        self._protocol = self._queue.protocol
        self.rollout_buffer = _ServerQueue(self._draw)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._replaces = pool is not None
        """True if groups of the pool replace groups whose rewards are all equal."""
        self._table = table
        self._progress = Progress()
        self._trained = TrainedGroups()
        """The groups of all steps so far that no checkpoint contains."""
        self._run = uuid.uuid4().hex
        """The beginning of the scopes of this run's draws."""
        self._writer: WholeModel | None = None
        """The object that saves the weights that TRL sends. None: the trainer is not constructed yet."""
        self._tokenizer: Any = None
        self._facts: dict[str, Any] = {}
        """`model_facts` of the model that is trained."""
        self._compared = False
        """True once the models of the generators were compared with `_facts`, which happens at the first group."""
        self._sampling: dict[str, float] = {}
        """The settings of sampling for which TRL computes log-probabilities: its temperature. No setting limits the
        tokens, because TRL computes with all of them."""
        self._weights: dict[str, Tensor] = {}
        """The weights that TRL sent last, until they are published."""
        self._policy: Policy | None = None
        """The policy that this trainer found at its start or announced last; None: training has not begun."""
        self._hungry_since: float | None = None
        """The time since which TRL has waited for a group, by the monotonic clock; None: it does not wait."""
        self._ended = False
        """True if the run has ended as planned."""

    # ------------------------------------------------------------------------------------------------- the callback

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Creates the writer of the weights. It reads the model's generation_config.json at this time, because TRL
        changes the token ids in these settings to those of the tokenizer later."""
        self._writer = WholeModel(_base_of(model))

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, processing_class: Any, train_dataloader: Any, **_: Any
    ) -> None:
        """Begins a run, or continues the run of `state` with its groups and its count of versions.

        Raises RuntimeError if another trainer uses output_dir, or at a second call of `train`. Raises ValueError for a
        model with frozen weights and no adapter, and for an adapter that cannot be added to its model.
        """
        if not state.is_world_process_zero:
            return
        if self._queue.closed:
            raise RuntimeError("a ServerRollouts serves one call of train: make another one, and a trainer with it")
        self._queue.lock()
        self._facts = model_facts(model.config, processing_class)
        self._sampling = {"temperature": args.temperature}
        self._pool.vocabulary = model.config.get_text_config().vocab_size
        base = _base_of(model)
        if model is not base:
            reason = why_not_mergeable(model)
            if reason:
                raise ValueError(f"TRL adds the adapter to the weights that it sends: {reason}")
        if self._writer is None or not self._writer.has_file:  # `on_init_end` has kept no generation_config.json
            self._writer = WholeModel(base)
        self._tokenizer = processing_class
        frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
        if frozen and model is base:
            raise ValueError(
                f"TRL sends only what it trains, and {len(frozen)} of this model are frozen, such as {frozen[0]}: "
                "train all weights, or an adapter"
            )
        self._progress.watch(train_dataloader.collate_fn)
        newest = max(map(version_of, published(self._output_dir)), default=0)
        # TRL counts versions from 0 at each start. This first call fixes by how much the server's versions are higher.
        self._reach(partial(self._pool.version_of, step=0, at_least=newest))
        saved = state.stateful_callbacks.get(type(self).__name__)  # what `on_step_end` stored; None: a run begins
        if saved:
            groups = TrainedGroups.from_state_dict(saved["groups"])
            self._progress.skip(dict(saved["begun"]))
        else:
            groups = TrainedGroups()
            self._progress.skip({})
        checkpoint = _checkpoint_of(args, state)
        # No location of weights is given here, because TRL sends the weights of the checkpoint next.
        self._policy = self._protocol.resume(groups, _state_of(checkpoint), where=checkpoint)
        self._warn_of_other_reader()
        self._leases.start()

    def _warn_of_other_reader(self) -> None:
        """Logs a warning if another reader holds leases on groups of the table. Call it before the first draw."""
        leased = self._reach(self.client.server_info).tables[self._table].reserved
        if leased:
            logger.warning(
                "another reader holds %s of table %r that this one misses; those of a dead one come back",
                counted(leased, "group"),
                self._table,
            )

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Notes that TRL has trained on a micro-batch. For the last one of a step, TRL calls `on_step_end` instead."""
        if state.is_world_process_zero:
            self._progress.trained()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Notes that TRL has trained on the last micro-batch of a step. Stores the groups of all steps so far in
        `state`, because TRL may write a checkpoint next."""
        if not state.is_world_process_zero:
            return
        self._progress.trained()
        # All groups under leases, except those with sequences that are not trained on yet.
        self._trained = self._leases.trained(left=self._progress.left)
        # TRL writes `stateful_callbacks` into the checkpoint's trainer_state.json.
        state.stateful_callbacks[type(self).__name__] = {
            "groups": self._trained.state_dict(),
            "begun": self._progress.begun,
        }

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Acknowledges the groups of a checkpoint that was just written."""
        if not state.is_world_process_zero:
            return
        folder = _checkpoint_of(args, state)
        saved = self._protocol.new_state(self._current.version)
        (folder / _STATE).write_text(json.dumps(asdict(saved)))
        for path in [*folder.rglob("*"), folder, folder.parent]:
            to_disk(path)  # before the server forgets the groups that the checkpoint contains
        acknowledged = self._queue.acknowledge(self._trained)
        # A state is named only after all groups of its checkpoint are acknowledged.
        if acknowledged and self._protocol.retains:
            # Naming a state also sets the policy, so no other trainer may have set it.
            self._check_alone(self._reach(self.client.policy))
            self._protocol.name(saved, self._current.weights)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Acknowledges the groups of all steps, and notes that the run has ended as planned."""
        if state.is_world_process_zero:
            self._queue.acknowledge(self._trained)
            self._ended = True

    # ------------------------------------------------------------------------------------------- the rollout worker

    def start(self) -> None:
        """Does nothing, because generators run elsewhere. Each generator pauses by itself when it loads a version, and
        `stop` closes the connection."""

    def stop(self) -> None:
        """Requeues the groups that no checkpoint contains, and closes the connection. Generators and server go on."""
        self._queue.close(leave=self._ended)

    def check_health(self, stale_after_s: float) -> None:
        """Logs the reason of a long wait for a group. Raises RuntimeError if no group came for `stale_after_s` seconds.

        Time in which the server is away does not count.
        """
        now = time.monotonic()
        waited = 0.0 if self._hungry_since is None else now - self._hungry_since
        try:
            info = self.client.server_info(tables=[self._table], timeout=5.0).tables[self._table]
        except GONE as error:
            self._queue.waiting.wait(f"the server is away, and the trainer waits for it: {error}")
            self._hungry_since = time.monotonic()
            return
        reason = f"{self._table} has been given {counted(info.inserts, 'group')}, and holds {info.size}"
        if waited > stale_after_s:
            raise RuntimeError(
                f"no rollout came for {waited:.0f} s: {reason}. Are generators running? `replay doctor` says more"
            )
        if waited > _LONG_WAIT:
            self._queue.waiting.wait(f"no rollout came for {waited:.0f} s: {reason}")

    def update_model_version(self, model_version: int) -> None:
        """Publishes the weights that were sent last, as the version that TRL calls `model_version`.

        Raises RuntimeError if another trainer publishes to the server.
        """
        version = self._pool.version_of(model_version)
        self._check_alone(self._reach(self.client.policy))
        folder = publish_weights(
            self._writer,
            self._tokenizer,
            self._output_dir,
            version,
            self._keep_weights,
            # A probe needs a forward pass, which is not possible here if weights are partitioned.
            probe=None,
            weights=self._weights,
            facts=self._facts,
        )
        self._policy = self._reach(partial(self.client.set_policy_version, version, weights=str(folder)))
        self._weights = {}

    @property
    def _current(self) -> Policy:
        """The policy that this trainer found at its start or announced last. Use it only after training has begun."""
        assert self._policy is not None, "training has not begun"
        return self._policy

    def _check_alone(self, found: Policy) -> None:
        """Raises RuntimeError if another trainer has changed the policy that this trainer announced last."""
        policy = self._current
        unchanged = found.version == policy.version and found.weights == policy.weights
        # A lower version is no sign of another trainer, because a server that was started again without its data has
        # a lower version.
        if found.version >= policy.version and not unchanged:
            raise RuntimeError(
                f"the server is at policy version {found.version} with the weights {found.weights or 'of nobody'}, and "
                f"this trainer left it at {policy.version} with {policy.weights or 'none'}: stop another trainer of it"
            )

    # ------------------------------------------------------------------------------------------ the weight transfer

    def init_weight_transfer(self) -> None:
        """Checks that this object is a callback of the trainer; raises RuntimeError if it is not.

        Nothing else has to be prepared, because weights travel through the folder.
        """
        if self._policy is None:
            raise RuntimeError("ServerRollouts is not among the callbacks: AsyncGRPOTrainer(..., callbacks=[rollouts])")

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Copies the weights to the memory of the host, until `update_model_version` publishes them."""
        self._weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in iterator}

    pause = resume = destroy = start  # these methods do nothing, like `start`

    # ------------------------------------------------------------------------------------------------------- groups

    def _draw(self) -> list[RolloutSample]:
        """Draws the next group, and returns its sequences, or those of the group that replaces it.

        The result is empty if no group came in time, if the server is away, or if the group was rejected.
        """
        if self._hungry_since is None:
            self._hungry_since = time.monotonic()
        drawn = self._queue.draw()
        if not drawn:
            return []
        self._hungry_since = None
        [sample] = drawn  # each batch of the sampler has one group
        if self._pool.puts_aside(sample, self._table):
            # The lease of a rejected group needs no care here. It ends with the leases of the groups of this step.
            self.metrics_queue.put({"replay/groups_unusable_total": 1.0})
            return []
        self._check_model_and_sampling(sample.group)
        zero_variance = not carries_gradient(sample.group)
        replacement: list[Sample] = []
        if zero_variance and self._replaces:
            replacement = self._draw_replacement(sample.group.group_size)
        # TRL combines the values that a metric had since the last log. It logs the sum of a metric `_total`, the mean
        # of other numbers, and for pairs: the sum of the first numbers / the sum of the second numbers.
        self.metrics_queue.put(
            {
                "replay/fresh_reward": float(sample.group.rewards.mean()),
                "replay/fresh_zero_variance": (float(zero_variance), 1.0),
                "replay/groups_replaced_total": float(len(replacement)),
            }
        )
        group_number, skipped = self._progress.begin(sample)
        trained_sample = replacement[0] if replacement else sample
        rows = self._samples(trained_sample, group_number)[skipped:]
        # Pass `sample` even if a replacement is trained on, because the lease is that of the fresh group.
        self._progress.hand_out(sample, skipped, [row.input_ids for row in rows])
        return rows

    def _check_model_and_sampling(self, group: RolloutGroup) -> None:
        """Raises RuntimeError at the first group if the generators have another model. Raises ValueError if the group
        was sampled with other settings than those with which TRL computes log-probabilities."""
        if not self._compared:
            self._compared = True
            difference = why_other_model(self._reach(self.client.server_info).clients, self._facts)
            if difference:
                raise RuntimeError(difference)
        other = other_sampling(group.sampling, self._sampling)
        if other:
            name, drawn_value, own_value = other
            raise ValueError(
                f"a group of {self._table!r} was drawn with {name} {drawn_value}, "
                f"and TRL computes with {name} {own_value}: "
                "give both one temperature, no top_p, top_k or min_p, and `replay table reset` the table"
            )

    def _draw_replacement(self, size: int) -> list[Sample]:
        """A group of `size` rollouts from the pool that was not drawn for this version yet; empty if the pool has no
        such group."""
        version = 0 if self._policy is None else self._policy.version
        scope = f"{self._run}/{version}"
        accept = partial(self._fits, size)
        return self._reach(partial(self._pool.draw, count=1, scope=scope, accept=accept))

    def _fits(self, size: int, group: RolloutGroup) -> bool:
        """True if a stored group has `size` rollouts, and was sampled with the settings of this trainer."""
        return group.group_size == size and not other_sampling(group.sampling, self._sampling)

    def _samples(self, sample: Sample, group_number: int) -> list[RolloutSample]:
        """The sequences of a group, in the form in which TRL's worker would queue them.

        `group_number`: the number by which TRL knows the group.

        TRL accepts a rollout of several sequences, and calls it a conversation that forks. Each sequence has the
        advantage of the rollout, and the loss is a mean over tokens. TRL's metrics are means over the sequences that
        have metrics. So only the first sequence of each rollout gets metrics, and each rollout counts once.
        """
        group = sample.group
        prompt = np.asarray(group.prompt_ids, dtype=np.int64)
        zeros = np.zeros(len(prompt))
        # A token without a known log-probability has no importance ratio, so it is masked.
        known = np.isfinite(group.rollout_logprobs)
        mask = known & group.trained_mask
        logprobs = np.where(known, group.rollout_logprobs, 0.0)
        samples = []
        rollouts_S = group.sequence_rollouts  # the number of the rollout of each sequence
        for sequence, (k, span) in enumerate(zip(rollouts_S, group.sequence_spans(), strict=True)):
            completion = group.completion_ids[span]
            first_of_rollout = sequence == 0 or rollouts_S[sequence - 1] != k
            samples.append(
                RolloutSample(
                    prompt=[{"role": "user", "content": self._text(group.prompt_ids)}],
                    completion=[{"role": "assistant", "content": self._text(completion)}],
                    input_ids=np.concatenate([prompt, completion]).astype(np.int64),
                    completion_mask=np.concatenate([zeros, mask[span]]).astype(np.int64),
                    old_log_probs=np.concatenate([zeros, logprobs[span]]).astype(np.float32),
                    advantage=float(group.advantages[k]),
                    model_version=group.policy_version - self._pool.version_of(0),  # in TRL's count
                    group_id=group_number,
                    metrics=_metrics(group, k) if first_of_rollout else {},
                    enqueued_at=time.time() - sample.info.age,
                )
            )
        return samples

    def _text(self, token_ids: Any) -> str:
        """The text of these tokens, without special tokens."""
        return text_of(self._tokenizer, token_ids.tolist(), skip_special_tokens=True)


def _base_of(model: Any) -> Any:
    """The model of transformers that a peft model wraps; any other model itself."""
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


class _ServerQueue:
    """A queue of the sequences of one group after the other. It has the methods of `queue.Queue` that TRL's trainer
    uses."""

    def __init__(self, draw: Callable[[], list[RolloutSample]]) -> None:
        """`draw`: waits for a short time for the next group, and returns its sequences; empty if no group came."""
        self._draw = draw
        self._samples: deque[RolloutSample] = deque()

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """Returns the next sequence. Raises queue.Empty if there is none.

        If `block` is set, waits for a sequence for `timeout` seconds or a little longer; None: without limit.
        """
        end = float("inf")
        if timeout is not None:
            end = time.monotonic() + timeout
        while not self._samples:
            self._samples.extend(self._draw())
            if not self._samples and (not block or time.monotonic() >= end):
                raise queue.Empty
        return self._samples.popleft()

    def qsize(self) -> int:
        """The number of sequences that are drawn and not handed out."""
        return len(self._samples)


def _checkpoint_of(args: Any, state: TrainerState) -> Path:
    """The folder into which TRL writes the checkpoint of the step of `state`."""
    return Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def _state_of(checkpoint: Path) -> SavedState | None:
    """The state in a checkpoint. None: there is no checkpoint, or the trainer was killed before the file was
    complete."""
    try:
        return SavedState(**json.loads((checkpoint / _STATE).read_text()))
    except (OSError, ValueError):
        return None


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest complete checkpoint-N in AsyncGRPOConfig's output_dir, for `train(resume_from_checkpoint=...)`.

    A trainer that is killed while it writes a checkpoint leaves an incomplete checkpoint, which is skipped. None: there
    is no complete checkpoint.
    """
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    folders = [path for path in Path(output_dir).glob(f"{prefix}*") if path.name.removeprefix(prefix).isdigit()]
    folders.sort(key=lambda path: int(path.name.removeprefix(prefix)), reverse=True)
    for folder in folders:
        try:
            TrainerState.load_from_json(str(folder / "trainer_state.json"))  # TRL writes it last
        except (OSError, ValueError) as error:
            logger.warning("%s is passed over, it is not whole: %s", folder, error)
        else:
            return str(folder)
    return None


def _metrics(group: RolloutGroup, k: int) -> dict[str, float]:
    """The metrics of rollout `k` of a group, by the names that TRL's worker gives them.

    `reward_std` is computed with the divisor G - 1. TRL's worker divides by G, so its value is a little smaller.
    """
    return {
        "reward": float(group.rewards[k]),
        "reward_std": float(group.rewards.std(ddof=1)) if group.group_size > 1 else 0.0,
    }
