"""GroupLeases: fresh groups stay leased from the server until a training checkpoint contains the step that used them.

sampler ──lease──▶ held ──training checkpoint written and announced──▶ acknowledged
                    └──────the run ends, or dies───────────────────▶ requeued: a resume trains on them

A group that was drawn is gone from the queue, and the result of training on it is on the disk only steps later. If the
trainer dies in between, the group must come back; if it dies after, the group must not. So the server holds the group
under the lease of its batch, and this file knows, of each lease, whether a training checkpoint contains its groups.

* `client.auto_renew` renews the leases while steps run: a step may take longer than a lease. A dead trainer renews
  none, so its groups go back by themselves.
* Each training checkpoint names its groups. A resume consumes those that went back although it contains them: the
  trainer may have died between checkpoint and acknowledgement.
* Each rank also writes its leases to `leases-RANK.json` in output_dir before they begin. With this list a resume
  requeues at once what a killed rank had, instead of waiting for the end of its leases.
* A lease that begins, or is held, is in that list. A lease is one of the two, or over.
* A batch ends as a whole. Of a batch that a training checkpoint contains in part, it names the keys, and they are
  consumed when the lease goes back.
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
from itertools import chain
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
"""Batches, and single groups, that stay unconfirmed. The oldest are forgotten first: a server that lost its items in a
restart never confirms them."""
_REQUEUE_SECONDS = 10.0
"""An end does not wait longer for a server that is away: it takes the groups back by itself."""


@dataclass
class TrainedGroups:
    """The groups that a training checkpoint contains, as far as their leases are open."""

    whole: dict[Lease, list[int]] = field(default_factory=dict)
    """The keys of each batch of which the state contains every group."""
    part: list[int] = field(default_factory=list)
    """Keys of batches of which later steps use the rest."""

    @classmethod
    def of_ranks(cls, parts: Iterable[TrainedGroups]) -> TrainedGroups:
        """All ranks' groups together."""
        merged = cls()
        for part in parts:
            merged.whole |= part.whole
            merged.part += [key for key in part.part if key not in merged.part]
        return merged

    @property
    def keys(self) -> set[int]:
        """The keys of all of them."""
        return {*self.part, *chain.from_iterable(self.whole.values())}

    def state_dict(self) -> dict[str, Any]:
        """As plain containers, for the training checkpoint."""
        return {"leases": [[*lease, keys] for lease, keys in self.whole.items()], "keys": self.part}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> TrainedGroups:
        """The groups of `state_dict`."""
        return cls({(shard, lease): keys for shard, lease, keys in state["leases"]}, state["keys"])

    def without(self, keys: Iterable[int]) -> TrainedGroups:
        """The same without the groups with these keys."""
        removed = set(keys)
        whole: dict[Lease, list[int]] = {}
        for lease, keys_of_lease in self.whole.items():
            remaining = [key for key in keys_of_lease if key not in removed]
            if remaining:
                whole[lease] = remaining
        return TrainedGroups(whole, [key for key in self.part if key not in removed])

    def newest(self, count: int) -> TrainedGroups:
        """The same with at most `count` batches, and as many keys of other batches: those that came last."""
        return TrainedGroups(dict([*self.whole.items()][-count:]), self.part[-count:])


class GroupLeases:
    """The leases of one rank. `acknowledge` and `requeue_dead` also take those of other ranks."""

    def __init__(self, client: ReplayClient, table: str, seconds: float, output_dir: Path, rank: int) -> None:
        """`table`: the table of the fresh groups. `seconds`: the time after which a lease ends unless it is renewed."""
        self.table = table
        self.seconds = seconds
        self.unconfirmed = TrainedGroups()
        """Groups that a training checkpoint contains, and that no server confirmed as consumed. The first rank finds
        them."""
        self._client = client
        self._output_dir = output_dir
        self._path = output_dir / _FILES.format(rank)
        self._held: dict[Lease, list[int]] = {}
        self._coming: set[Lease] = set()
        """Leases that are expected, and may not have begun."""
        self._settling: TrainedGroups | None = None
        """The groups in the training checkpoint under way; None: there is none."""
        self._settled_part: list[int] = []
        """`part` of the last training checkpoint."""
        self._listed: set[Lease] = set()
        """The leases that the list file of this rank names."""
        self._lock = threading.Lock()
        self._renewer: LeaseRenewer | None = None
        """Renews the leases; None before `start`."""

    def start(self) -> None:
        """Renew the leases from now on, until `requeue`."""
        self._renewer = self._client.auto_renew(map(_stub, self._held), self.seconds, self._lost)

    def hold(self, batch: Sequence[Sample]) -> list[Sample]:
        """Hold the lease that a batch came under, from now until it is settled or requeued.

        Returns the samples without those that a training checkpoint contains already. They end with their batch.
        """
        with self._lock:
            for sample in batch:
                info = sample.info
                if info.lease_id:
                    self._held.setdefault((info.shard, info.lease_id), []).append(info.key)
            # Leases that were expected before this batch, and whose batch has not come, were revoked.
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
        """The groups of all steps so far. `left`: groups that are drawn, and that only later steps use."""
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
        """Forgets the groups of the training checkpoint under way: it is written, and its groups are acknowledged.

        `groups`: the groups of an older checkpoint, if another one has begun since.
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
        """Acknowledges the groups of a training checkpoint: by their leases, or consumes them by their keys where that
        fails.

        Groups that no server confirms are `unconfirmed` from now on.
        """
        before = self.unconfirmed
        if not (groups.whole or before.part):
            return
        missing = set(self._client.acknowledge(map(_stub, groups.whole)).missing)
        late_leases: dict[Lease, list[int]] = {}
        # A group of a late lease may have come again, and be confirmed by a later lease.
        confirmed: set[int] = set()
        for lease, keys in groups.whole.items():
            _, number = lease
            if number in missing:
                late_leases[lease] = keys
            else:
                confirmed.update(keys)
        late = TrainedGroups(late_leases, before.part)
        wanted = late.keys - confirmed
        if wanted:
            lost = self._client.consume(self.table, sorted(wanted)).missing
            confirmed |= wanted.difference(lost)
        self.unconfirmed = late.without(confirmed).newest(MOST_UNCONFIRMED)
        new = late.keys - before.keys
        if new:
            # A server that has lost its items does not know the groups of a state that was loaded. That needs no
            # warning.
            logger.log(
                logging.INFO if self._settling is None else logging.WARNING,
                "%s could not be acknowledged: the leases had ended, or the server is away. The trainer took %d of "
                "these out of table %r by their keys, and neither draws nor forgets the others",
                counted(len(new), "group"),
                len(new & confirmed),
                self.table,
            )

    def requeue_dead(self, groups: TrainedGroups, rolled_back: bool = False) -> bool:
        """Requeues the groups that ranks of a killed run held, apart from those in its training checkpoint.

        `rolled_back`: groups that were consumed after the state are in their table again, perhaps with groups of the
        state that were acknowledged late. One rank calls this method. Returns True if there was anything to do.
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
            # The wait for a batch may have been ended when its lease had begun already.
            held: dict[Lease, list[int]] = {lease: [] for lease in self._coming} | self._held
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
        return [key for keys in held.values() for key in keys]

    def check(self) -> None:
        """Asserts what the module states of the leases of this rank, between two calls."""
        with self._lock:
            assert self._held.keys().isdisjoint(self._coming), self._held.keys() & self._coming
            assert self._listed == {*self._held, *self._coming}, self._listed
            assert not self._listed or self._path.exists(), (self._path, self._listed)
            assert all(self._held.values()), "a lease is held of which no group is here"
        assert len(self.unconfirmed.whole) <= MOST_UNCONFIRMED, len(self.unconfirmed.whole)
        assert len(self.unconfirmed.part) <= MOST_UNCONFIRMED, len(self.unconfirmed.part)

    def _list(self) -> None:
        """Writes the list of held leases. Without it, the groups of a killed rank go back only when leases end."""
        leases = {*self._held, *self._coming}
        if not leases:
            self._path.unlink(missing_ok=True)
        elif leases != self._listed:  # a batch that comes was listed when it was expected
            write_whole(self._path, json.dumps(sorted(leases)))
        self._listed = leases

    def _lost(self, lost: list[SampleInfo]) -> None:
        """Warns that leases could not be renewed. The thread of the client calls it."""
        logger.warning(
            "could not renew the leases of %s: the server was out of reach for %g s, or was restarted without a "
            "data_dir. The trainer keeps the groups, and another reader may get them as well",
            counted(len({info.lease_id for info in lost}), "batch"),
            self.seconds,
        )


def _stub(lease: Lease) -> Sample:
    """A sample that names its lease, and nothing else."""
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
