"""GroupLeases: fresh groups stay leased from the server until a training checkpoint contains the step that used them.

sampler ──lease──▶ held ──training checkpoint written and announced──▶ acknowledged
                    └──────the run ends, or dies───────────────────▶ requeued: a resume trains on them

A drawn group has left the queue, but the result of training on it reaches the disk only some steps later. If the
trainer dies before that, the group must come back. If the trainer dies after that, the group must not come back.
Therefore the server holds the group under the lease of its batch, and this module knows which leases have groups that a
training checkpoint contains.

* `client.auto_renew` renews the leases while steps run, because a step may take longer than a lease lasts. A dead
  trainer renews no leases, so its groups return to the table when the leases end.
* Each training checkpoint names its groups. The trainer may die between checkpoint and acknowledgement. Groups of the
  checkpoint then return to the table, and a resume consumes them.
* Each rank also writes a list file, `leases-RANK.json` in output_dir. It names the leases that are about to begin, and
  the leases that the rank holds. With this file a resume requeues the groups of a killed rank at once, instead of
  waiting for the end of its leases.
* A lease covers its whole batch. If a training checkpoint contains only some groups of a batch, the checkpoint names
  the keys of these groups. When the batch is requeued, these groups are consumed by their keys.
* A lease may have ended before it is acknowledged, or its shard may be away. A later draw may then return its groups
  once more. So these groups stay `unconfirmed` until a server has consumed them. Until then, each training checkpoint
  names them, no rank trains on them again, and each acknowledgement also tries to consume them, by lease and by key.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replay_client import LeaseRenewer, ReplayClient, Sample, SampleInfo
from replay_client.errors import ReplayError
from replay_client.words import counted
from replay_trainer.weights import write_whole

logger = logging.getLogger(__name__)

Lease = tuple[str, int]
"""The shard ("" with a single server), and the number of the lease there."""
_FILES = "leases-{}.json"
"""Name of the list file of a rank. In the place of {}: the rank, or "*" for all ranks."""
MOST_UNCONFIRMED = 4096
"""The most batches, and the most single groups, that stay unconfirmed. If there are more, the oldest are forgotten,
because a server that lost its items in a restart never confirms them."""
_REQUEUE_SECONDS = 10.0
"""The most seconds that the end of a run waits for the server to requeue groups. Without an answer, the groups return
when their leases end."""


@dataclass
class TrainedGroups:
    """Groups that a training checkpoint contains, and that no server has confirmed as consumed so far."""

    whole: dict[Lease, list[int]] = field(default_factory=dict)
    """Lease of each batch that the checkpoint contains completely -> the keys of its groups."""
    part: list[int] = field(default_factory=list)
    """The keys of the other groups of the checkpoint. Their batches also have groups that only later steps use."""

    @classmethod
    def of_ranks(cls, parts: Iterable[TrainedGroups]) -> TrainedGroups:
        """The groups of all ranks together."""
        merged = cls()
        for part in parts:
            # Several ranks may name a batch or a key, because every rank has a copy of `unconfirmed`.
            merged.whole |= part.whole
            merged.part += [key for key in part.part if key not in merged.part]
        return merged

    @property
    def keys(self) -> set[int]:
        """The keys of all the groups."""
        keys = set(self.part)
        for batch_keys in self.whole.values():
            keys.update(batch_keys)
        return keys

    def state_dict(self) -> dict[str, Any]:
        """The groups as plain containers, for the training checkpoint."""
        return {"leases": [[*lease, keys] for lease, keys in self.whole.items()], "keys": self.part}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> TrainedGroups:
        """The groups from which `state_dict` made this state."""
        return cls({(shard, lease): keys for shard, lease, keys in state["leases"]}, state["keys"])

    def without(self, keys: Iterable[int]) -> TrainedGroups:
        """The groups except those with these keys."""
        gone = set(keys)
        whole = {}
        for lease, batch_keys in self.whole.items():
            remaining = [key for key in batch_keys if key not in gone]
            if remaining:
                whole[lease] = remaining
        return TrainedGroups(whole, [key for key in self.part if key not in gone])

    def newest(self, count: int) -> TrainedGroups:
        """At most the last `count` batches of `whole`, and at most the last `count` keys of `part`."""
        newest_batches = list(self.whole.items())[-count:]
        return TrainedGroups(dict(newest_batches), self.part[-count:])


class GroupLeases:
    """The leases of one rank. `acknowledge` and `requeue_dead` also accept groups and leases of other ranks."""

    def __init__(self, client: ReplayClient, table: str, seconds: float, output_dir: Path, rank: int) -> None:
        """`table`: the table of the fresh groups. `seconds`: the time that a lease lasts unless it is renewed."""
        self.table = table
        self.seconds = seconds
        self.unconfirmed = TrainedGroups()
        """Groups that a training checkpoint contains and that no server confirmed as consumed. Only the first rank
        determines these groups; the other ranks receive a copy."""
        self._client = client
        self._output_dir = output_dir
        self._path = output_dir / _FILES.format(rank)
        self._held: dict[Lease, list[int]] = {}
        """Lease of each batch that this rank holds -> the keys of its groups."""
        self._coming: set[Lease] = set()
        """Leases that the client has announced (`expect`). This rank does not know yet if they began on the server."""
        self._settling: TrainedGroups | None = None
        """The groups of the training checkpoint that is being written; None: no checkpoint is being written."""
        self._settled_part: list[int] = []
        """`TrainedGroups.part` of the last training checkpoint that was written."""
        self._listed: set[Lease] = set()
        """The leases that the list file of this rank names."""
        self._lock = threading.Lock()
        """Guards `_held`, `_coming` and `_listed`: the client's thread calls `expect`."""
        self._renewer: LeaseRenewer | None = None
        """None before `start`."""

    def start(self) -> None:
        """Starts to renew the held leases in the background. `requeue` ends the renewals."""
        self._renewer = self._client.auto_renew(map(_stub, self._held), self.seconds, self._warn_of_lost)

    def hold(self, batch: Sequence[Sample]) -> list[Sample]:
        """Holds the lease of a batch from now on, until `settled` or `requeue` ends the hold.

        Returns the samples that are not in `unconfirmed`. The other samples must not be trained on again. They stay
        under the lease of the batch, so they are acknowledged or requeued together with the batch.
        """
        with self._lock:
            for sample in batch:
                info = sample.info
                if info.lease_id:  # 0: drawn without a lease
                    self._held.setdefault((info.shard, info.lease_id), []).append(info.key)
            # Each lease that was expected until now is the lease of this batch, or was revoked before it began.
            self._coming.clear()
            self._write_list()
        # `add` is called outside of the lock, because it waits for the client's thread, which may itself wait for the
        # lock in `expect`.
        if self._renewer is not None:
            self._renewer.add(batch)
        known = self.unconfirmed.keys
        new = [sample for sample in batch if sample.info.key not in known]
        if len(new) < len(batch):
            repeated = counted(len(batch) - len(new), "group")
            logger.warning("%s that the trainer has trained on came again: left out", repeated)
        return new

    def expect(self, samples: Sequence[Sample]) -> None:
        """Adds the lease of a batch to the list file of this rank, so that a resume finds the lease. The thread of the
        client calls this for each batch, before the lease begins."""
        with self._lock:
            self._coming.update((sample.info.shard, sample.info.lease_id) for sample in samples)
            self._write_list()

    def trained(self, left: Sequence[Sample] = ()) -> TrainedGroups:
        """Returns the groups of all steps so far, for a training checkpoint, and notes that it is being written.

        `left`: drawn groups that only later steps use.
        """
        unused = {sample.info.key for sample in left}
        # The checkpoint also names the unconfirmed groups of earlier checkpoints. `of_ranks` copies them, so that the
        # loop does not change `unconfirmed`.
        groups = TrainedGroups.of_ranks([self.unconfirmed])
        with self._lock:
            for lease, keys in self._held.items():
                if unused.isdisjoint(keys):  # the steps so far have used the whole batch
                    groups.whole[lease] = keys
                else:
                    groups.part += [key for key in keys if key not in unused]
            self._settling = groups
        return groups

    def settled(self, groups: TrainedGroups | None = None) -> None:
        """Notes that a training checkpoint is written, and that its groups are acknowledged.

        `groups`: the groups of that checkpoint; None: the groups of the last call of `trained`. Pass `groups` if
        `trained` was called for a later checkpoint since then.
        """
        settled = groups or self._settling
        if settled is None:  # no checkpoint is being written
            return
        with self._lock:
            for lease in settled.whole:
                self._held.pop(lease, None)
            self._settled_part = settled.part
            if settled is self._settling:  # otherwise a later checkpoint is still being written
                self._settling = None
            self._write_list()
        if self._renewer is not None:
            self._renewer.forget(map(_stub, settled.whole))

    def acknowledge(self, groups: TrainedGroups) -> None:
        """Acknowledges the groups of a training checkpoint by their leases. If a lease has ended, consumes its groups
        by their keys.

        The groups that no server confirms are `unconfirmed` from now on.
        """
        before = self.unconfirmed
        # `before.whole` needs no check, because `trained` has put the unconfirmed batches into `groups.whole`.
        if not groups.whole and not before.part:
            return
        # The numbers of the leases that no server acknowledged.
        missing = set(self._client.acknowledge(map(_stub, groups.whole)).missing)
        confirmed: set[int] = set()
        # The groups that were not acknowledged by their lease, in this call or in earlier calls. Those that are not
        # confirmed below are tried by their keys.
        late = TrainedGroups(dict(before.whole), before.part)
        for lease, keys in groups.whole.items():
            _, number = lease  # a random number, which no other shard has
            if number in missing:
                late.whole[lease] = keys
            else:
                confirmed.update(keys)
        # A group whose lease ended may have been drawn once more. If its later lease was acknowledged above, the group
        # is already consumed.
        to_consume = late.keys - confirmed
        if to_consume:
            result = self._client.consume(self.table, sorted(to_consume))
            confirmed |= to_consume.difference(result.missing)  # `missing`: the keys that are not in the table
        self.unconfirmed = late.without(confirmed).newest(MOST_UNCONFIRMED)
        new = late.keys - before.keys
        if new:
            # In a resume, no checkpoint of this run is being written yet. Missing groups are no reason for a warning
            # then, because the server may have lost its items since the checkpoint of the earlier run.
            resumes = self._settling is None
            logger.log(
                logging.INFO if resumes else logging.WARNING,
                "%s could not be acknowledged: the leases had ended, or the server is away. The trainer took %d of "
                "these out of table %r by their keys. It does not train on the others again, and tries again later",
                counted(len(new), "group"),
                len(new & confirmed),
                self.table,
            )

    def requeue_dead(self, groups: TrainedGroups, rolled_back: bool = False) -> bool:
        """Requeues the groups that ranks of a killed run held, except groups that the training checkpoint contains.

        Only one rank calls this method. Returns True if there was anything to do.

        `groups`: the groups of the training checkpoint. `rolled_back`: True if the server may have gone back to its
        state at the checkpoint. Then the groups that were consumed after the checkpoint are in their table again.
        Groups of the checkpoint that were acknowledged late may be there, too.
        """
        leases: list[Lease] = []
        paths = sorted(self._output_dir.glob(_FILES.format("*")))
        for path in paths:
            leases += _read(path)
        if leases:
            self._client.acknowledge(map(_stub, leases), requeue=True)
        # The groups of the checkpoint that may be in the table. Without a rollback, only those in `part` may be there.
        # Their batches were just requeued, because these batches also have groups that the checkpoint does not contain.
        contained = sorted(groups.keys) if rolled_back else groups.part
        if contained:
            missing = set(self._client.consume(self.table, contained).missing)
            # A missing group may be in a batch whose lease has not ended yet, and may return to the table later.
            missing_part = [key for key in groups.part if key in missing]
            self.unconfirmed = TrainedGroups(self.unconfirmed.whole, missing_part)
        for path in paths:
            path.unlink(missing_ok=True)
        return bool(leases or contained)

    def requeue(self) -> list[int]:
        """Requeues all groups that no training checkpoint contains. Returns the keys of all groups that this rank held.

        If the server is away, logs a warning and returns no keys.
        """
        if self._renewer is not None:
            self._renewer.close()
        with self._lock:
            held: dict[Lease, list[int]] = {}
            # A wait for a batch may have ended early, although the lease of the batch had begun on the server. So the
            # announced leases are requeued as well. The keys of their groups are not known.
            for lease in self._coming:
                held[lease] = []
            held |= self._held
        if not held:
            return []
        try:
            self._client.acknowledge(map(_stub, held), requeue=True, timeout=_REQUEUE_SECONDS)
            if self._settled_part:  # a checkpoint contains these groups, but they were requeued with their batches
                self._client.consume(self.table, self._settled_part, timeout=_REQUEUE_SECONDS)
        except ReplayError as error:
            batches = counted(len(held), "batch")
            logger.warning("the server takes %s back within %g s: %s", batches, self.seconds, error)
            return []
        with self._lock:
            self._held.clear()
            self._coming.clear()
            self._write_list()
        held_keys: list[int] = []
        for keys in held.values():
            held_keys += keys
        return held_keys

    def check(self) -> None:
        """Asserts what the docstring of the module says about the leases of this rank. Call this method while no other
        method runs."""
        with self._lock:
            assert self._held.keys().isdisjoint(self._coming), self._held.keys() & self._coming
            assert self._listed == {*self._held, *self._coming}, self._listed
            assert not self._listed or self._path.exists(), (self._path, self._listed)
            assert all(self._held.values()), "a lease without groups is held"
        assert len(self.unconfirmed.whole) <= MOST_UNCONFIRMED, len(self.unconfirmed.whole)
        assert len(self.unconfirmed.part) <= MOST_UNCONFIRMED, len(self.unconfirmed.part)

    def _write_list(self) -> None:
        """Writes the leases to the list file of this rank. Without this file, the groups of a killed rank would return
        only when their leases end."""
        leases = {*self._held, *self._coming}
        if not leases:
            self._path.unlink(missing_ok=True)
        elif leases != self._listed:  # equal in a call from `hold` if `expect` has listed the lease before
            write_whole(self._path, json.dumps(sorted(leases)))
        self._listed = leases

    def _warn_of_lost(self, lost: list[SampleInfo]) -> None:
        """Logs that the leases of these samples could not be renewed. The thread of the client calls this."""
        lost_leases = {info.lease_id for info in lost}
        logger.warning(
            "could not renew the leases of %s: the server was out of reach for %g s, or was restarted without a "
            "data_dir. The trainer keeps the groups, and another reader may get them as well",
            counted(len(lost_leases), "batch"),
            self.seconds,
        )


def _stub(lease: Lease) -> Sample:
    """A sample that only names the lease, because `acknowledge` and the renewer read nothing else of a sample."""
    shard, number = lease
    info = SampleInfo(
        key=0,
        priority=0.0,
        probability=0.0,
        age=0.0,
        policy_version=0,
        staleness=0,
        times_sampled=0,
        table_size=0,
        lease_id=number,
        shard=shard,
    )
    return Sample(info, payload=b"")


def _read(path: Path) -> list[Lease]:
    """The leases in the list file of a rank. Logs a warning and returns no leases if the file is damaged."""
    try:
        return [(str(shard), int(lease)) for shard, lease in json.loads(path.read_text())]
    except (ValueError, TypeError) as error:
        # The leases that the file named end by themselves.
        logger.warning("%s is passed over, it is damaged: %s", path, error)
        return []
