"""GroupLeases: fresh groups stay leased from the server until a training checkpoint contains the step that used them.

sampler ──lease──▶ held ──training checkpoint written and announced──▶ acknowledged
                    └──────the run ends, or dies───────────────────▶ requeued: a resume trains on them

A group that was drawn is gone from the queue, and the result of training on it is on the disk only steps later. If the
trainer dies in between, the group must come back; if it dies after, the group must not. So the server holds the group
under the lease of its batch. This file knows which leases have groups that a training checkpoint contains.

* `client.auto_renew` renews the leases while steps run: a step may take longer than a lease. A dead trainer renews
  none, so its groups go back by themselves.
* Each training checkpoint names its groups. A resume consumes those that went back although it contains them: the
  trainer may have died between checkpoint and acknowledgement.
* Each rank also writes its leases to `leases-RANK.json` in output_dir before they begin. With this list a resume
  requeues at once what a killed rank had, instead of waiting for the end of its leases.
* That list names the leases that are about to begin, and those that are held.
* A batch ends as a whole. If a training checkpoint contains only some groups of a batch, it names their keys, and they
  are consumed when the lease goes back.
* A lease may have ended before it is acknowledged, or its shard may be away. Its groups may then come in a draw again,
  perhaps much later. So they stay `unconfirmed` until a server has consumed them: each training checkpoint names them,
  no rank trains on them again, and each acknowledgement also tries to settle them, by lease and by key.
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
MOST_UNCONFIRMED = 4096
"""The most batches, and the most single groups, that stay unconfirmed. The oldest are forgotten first: a server that
lost its items in a restart never confirms them."""
_REQUEUE_SECONDS = 10.0
"""The end of a run does not wait longer for a server that is away. That server requeues the groups by itself."""


@dataclass
class TrainedGroups:
    """The groups that a training checkpoint contains, as far as their leases are open."""

    whole: dict[Lease, list[int]] = field(default_factory=dict)
    """The keys of each batch whose groups are all contained."""
    part: list[int] = field(default_factory=list)
    """The keys of contained groups of other batches. Later steps use the other groups of those batches."""

    @classmethod
    def of_ranks(cls, parts: Iterable[TrainedGroups]) -> TrainedGroups:
        """The groups of all ranks together."""
        merged = cls()
        for part in parts:
            merged.whole |= part.whole
            merged.part += [key for key in part.part if key not in merged.part]
        return merged

    @property
    def keys(self) -> set[int]:
        """The keys of all the groups."""
        keys = set(self.part)
        for batch in self.whole.values():
            keys.update(batch)
        return keys

    def state_dict(self) -> dict[str, Any]:
        """The groups as plain containers, for the training checkpoint."""
        return {"leases": [[*lease, keys] for lease, keys in self.whole.items()], "keys": self.part}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> TrainedGroups:
        """The groups of `state_dict`."""
        return cls({(shard, lease): keys for shard, lease, keys in state["leases"]}, state["keys"])

    def without(self, keys: Iterable[int]) -> TrainedGroups:
        """The groups except those with these keys."""
        gone = set(keys)
        whole = {}
        for lease, batch in self.whole.items():
            left = [key for key in batch if key not in gone]
            if left:
                whole[lease] = left
        return TrainedGroups(whole, [key for key in self.part if key not in gone])

    def newest(self, count: int) -> TrainedGroups:
        """The last `count` batches at most, and the last `count` keys of other batches at most."""
        newest_batches = list(self.whole.items())[-count:]
        return TrainedGroups(dict(newest_batches), self.part[-count:])


class GroupLeases:
    """The leases of one rank. `acknowledge` and `requeue_dead` also take those of other ranks."""

    def __init__(self, client: ReplayClient, table: str, seconds: float, output_dir: Path, rank: int) -> None:
        """`table`: the table of the fresh groups. `seconds`: the time that a lease lasts unless it is renewed."""
        self.table = table
        self.seconds = seconds
        self.unconfirmed = TrainedGroups()
        """Groups that a training checkpoint contains and that no server confirmed as consumed. Only the first rank has
        any."""
        self._client = client
        self._output_dir = output_dir
        self._path = output_dir / _FILES.format(rank)
        self._held: dict[Lease, list[int]] = {}
        self._coming: set[Lease] = set()
        """Leases that this rank expects. It does not know yet if they began."""
        self._settling: TrainedGroups | None = None
        """The groups of the training checkpoint that is being written; None: none is."""
        self._settled_part: list[int] = []
        """`part` of the last training checkpoint."""
        self._listed: set[Lease] = set()
        """The leases that the list file of this rank names."""
        self._lock = threading.Lock()
        self._renewer: LeaseRenewer | None = None
        """None before `start`."""

    def start(self) -> None:
        """Renews the leases from now on, until `requeue`."""
        self._renewer = self._client.auto_renew(map(_stub, self._held), self.seconds, self._lost)

    def hold(self, batch: Sequence[Sample]) -> list[Sample]:
        """Holds the lease of a batch from now until it is settled or requeued.

        Returns the samples without those that a training checkpoint contains already. They end with their batch.
        """
        with self._lock:
            for sample in batch:
                info = sample.info
                if info.lease_id:
                    self._held.setdefault((info.shard, info.lease_id), []).append(info.key)
            # Leases that were expected before this batch, and did not begin, were revoked.
            self._coming.clear()
            self._list()
        # Outside of the lock: the client's thread adds the batch, and may be in `expect`, which waits for the lock.
        if self._renewer is not None:
            self._renewer.add(batch)
        known = self.unconfirmed.keys
        new = [sample for sample in batch if sample.info.key not in known]
        if len(new) < len(batch):
            again = counted(len(batch) - len(new), "group")
            logger.warning("%s that the trainer has trained on came again: left out", again)
        return new

    def expect(self, samples: Sequence[Sample]) -> None:
        """Records the lease of a batch in the list of this rank before the lease begins, so that a resume finds it."""
        with self._lock:
            self._coming.update((sample.info.shard, sample.info.lease_id) for sample in samples)
            self._list()

    def trained(self, left: Sequence[Sample] = ()) -> TrainedGroups:
        """The groups of all steps so far. `left`: drawn groups that only later steps use."""
        unused = {sample.info.key for sample in left}
        groups = TrainedGroups.of_ranks([self.unconfirmed])
        with self._lock:
            for lease, keys in self._held.items():
                if unused.isdisjoint(keys):
                    groups.whole[lease] = keys
                else:
                    groups.part += [key for key in keys if key not in unused]
            self._settling = groups
        return groups

    def settled(self, groups: TrainedGroups | None = None) -> None:
        """Notes that a training checkpoint is written, and that its groups are acknowledged.

        `groups`: the groups of that checkpoint, if another one was begun since; None: it is the last one that began.
        """
        settled = groups or self._settling
        if settled is None:
            return
        with self._lock:
            for lease in settled.whole:
                self._held.pop(lease, None)
            self._settled_part = settled.part
            if settled is self._settling:
                self._settling = None
            self._list()
        if self._renewer is not None:
            self._renewer.forget(map(_stub, settled.whole))

    def acknowledge(self, groups: TrainedGroups) -> None:
        """Acknowledges the groups of a training checkpoint by their leases. Where a lease has ended, it consumes the
        groups by their keys.

        The groups that no server confirms are `unconfirmed` from now on.
        """
        before = self.unconfirmed
        if not groups.whole and not before.part:
            return
        missing = set(self._client.acknowledge(map(_stub, groups.whole)).missing)
        confirmed: set[int] = set()
        # The groups that no lease confirms. Groups that stayed unconfirmed before are tried again by their keys.
        late = TrainedGroups(dict(before.whole), before.part)
        for lease, keys in groups.whole.items():
            _, number = lease  # a random number, which no other shard has
            if number in missing:
                late.whole[lease] = keys
            else:
                confirmed.update(keys)
        # A group whose lease ended may have been drawn again, and the later lease was confirmed above.
        wanted = late.keys - confirmed
        if wanted:
            consumed = self._client.consume(self.table, sorted(wanted))
            confirmed |= wanted.difference(consumed.missing)
        self.unconfirmed = late.without(confirmed).newest(MOST_UNCONFIRMED)
        new = late.keys - before.keys
        if new:
            # A resume acknowledges before this run has a checkpoint of its own. Then this is no reason to worry: the
            # server may have lost its items since the checkpoint.
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
        """Requeues the groups that ranks of a killed run had, except those that its training checkpoint contains.

        `rolled_back`: the groups that were consumed after the checkpoint are in their table again, perhaps with groups
        of the checkpoint that were acknowledged late. One rank calls this. Returns True if there was anything to do.
        """
        leases: list[Lease] = []
        paths = sorted(self._output_dir.glob(_FILES.format("*")))
        for path in paths:
            leases += _read(path)
        if leases:
            self._client.acknowledge(map(_stub, leases), requeue=True)
        contained = sorted(groups.keys) if rolled_back else groups.part
        if contained:
            missing = set(self._client.consume(self.table, contained).missing)
            self.unconfirmed = TrainedGroups(self.unconfirmed.whole, [key for key in groups.part if key in missing])
        for path in paths:
            path.unlink(missing_ok=True)
        return bool(leases or contained)

    def requeue(self) -> list[int]:
        """Requeues all groups that no training checkpoint contains. Returns the keys of the requeued groups."""
        if self._renewer is not None:
            self._renewer.close()
        with self._lock:
            held: dict[Lease, list[int]] = {}
            # A wait for a batch may have ended when its lease had begun already.
            for lease in self._coming:
                held[lease] = []
            held |= self._held
        if not held:
            return []
        try:
            self._client.acknowledge(map(_stub, held), requeue=True, timeout=_REQUEUE_SECONDS)
            if self._settled_part:
                self._client.consume(self.table, self._settled_part, timeout=_REQUEUE_SECONDS)
        except ReplayError as error:
            batches = counted(len(held), "batch")
            logger.warning("the server takes %s back within %g s: %s", batches, self.seconds, error)
            return []
        with self._lock:
            self._held.clear()
            self._coming.clear()
            self._list()
        requeued: list[int] = []
        for keys in held.values():
            requeued += keys
        return requeued

    def check(self) -> None:
        """Asserts, between two calls, the statements of the module about the leases of this rank."""
        with self._lock:
            assert self._held.keys().isdisjoint(self._coming), self._held.keys() & self._coming
            assert self._listed == {*self._held, *self._coming}, self._listed
            assert not self._listed or self._path.exists(), (self._path, self._listed)
            assert all(self._held.values()), "a lease without groups is held"
        assert len(self.unconfirmed.whole) <= MOST_UNCONFIRMED, len(self.unconfirmed.whole)
        assert len(self.unconfirmed.part) <= MOST_UNCONFIRMED, len(self.unconfirmed.part)

    def _list(self) -> None:
        """Writes the list of leases. Without it the groups of a killed rank go back only when their leases end."""
        leases = {*self._held, *self._coming}
        if not leases:
            self._path.unlink(missing_ok=True)
        elif leases != self._listed:  # a batch that comes was listed when it was expected
            write_whole(self._path, json.dumps(sorted(leases)))
        self._listed = leases

    def _lost(self, lost: list[SampleInfo]) -> None:
        """Logs the loss of leases. The thread of the client calls this."""
        logger.warning(
            "could not renew the leases of %s: the server was out of reach for %g s, or was restarted without a "
            "data_dir. The trainer keeps the groups, and another reader may get them as well",
            counted(len({info.lease_id for info in lost}), "batch"),
            self.seconds,
        )


def _stub(lease: Lease) -> Sample:
    """A sample that names a lease, and nothing else: `acknowledge` and the renewer read only that."""
    shard, number = lease
    info = SampleInfo(0, 0.0, 0.0, 0.0, 0, 0, 0, 0, lease_id=number, shard=shard)
    return Sample(info, b"")


def _read(path: Path) -> list[Lease]:
    try:
        return [(str(shard), int(lease)) for shard, lease in json.loads(path.read_text())]
    except (ValueError, TypeError) as error:
        # The leases in it end by themselves.
        logger.warning("%s is passed over, it is damaged: %s", path, error)
        return []
