"""Admission: permits for generating groups, so that work which would be too stale is never started.

A request for n permits is granted if

    accepted + running + n <= (max_staleness + version + 1) * fresh_groups_per_step

This is the rule of AReaL (arXiv 2505.24298). `running` counts the permits that are granted and not used, and `accepted`
counts the groups that were inserted with a permit. A permit ends in one of three ways. If an insert uses the permit,
`running` falls by 1, and `accepted` rises by 1. If the permit is released, or if its grant expires, only `running`
falls. A grant that has no permit left is forgotten. The largest n that can be granted now is the capacity. A request
waits while it asks for more permits than that, or while a request before it holds it up (`Admission.progress`).

An insert needs no permit, but uses one if it names a grant. Its group counts as accepted only if the group enters the
admitted table, whose groups are trained on. If the group enters other tables only, its permit counts as released,
because no step will ever use that group.

Partial groups hold permits too (`permit_tables.py`), so `running` counts granted permits and partial groups together.
If an insert into the admitted table closes a partial group, the new group counts as accepted. If the partial group ends
in any other way, its permit counts as released.

If there are several servers, each of them grants its share of fresh_groups_per_step. The share follows from the shard
index of the server, which clients send to the server. A server grants n permits if

    accepted + running + n <= earlier + (max_staleness + 1) * share

`earlier` is the sum of the shares over all finished versions. If there is one server, `earlier` is version *
fresh_groups_per_step.

A server that drains refuses groups, so a client takes a group with a permit of this server to another server. The other
server accepts the group, and its `earlier` rises by 1. Then the client tells the draining server, whose `earlier` and
`running` fall by 1. So all servers together grant as many permits as before. If the client dies between the two calls,
the servers grant one permit too many.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from replay_protos.words import counted
from replay_server.errors import Refused, deadline, invalid, try_again
from replay_server.tables.config import AdmissionConfig, TableConfig
from replay_server.tables.extensions.extension import Extension, PolicyChange, ShardIndex
from replay_server.tables.extensions.permit_tables import closes
from replay_server.tables.table import InsertBatch, SampleBatch, Table
from replay_server.tables.waiting import Line, Pending

_MOST_GROUPS = 1 << 50
"""The most groups of a whole run. Sums of such numbers are exact as floats, and fit into the fields of ServerInfo and
of the records on disk."""


@dataclass
class Grant:
    """Permits that were granted to one request together."""

    id: int
    count: int
    """Permits that are left: they were neither used nor released."""
    expires: float
    """The time at which the grant ends, in seconds of the server's clock."""
    attempt: PendingPermits | None = None
    """The request that received the grant, or its last retry if the client has asked again; None after a restart."""


def share_of(groups: int, shard_index: ShardIndex) -> int:
    """The part of `groups` that the server with this index grants. The parts of all servers sum to `groups` exactly."""
    number, servers = shard_index
    if not servers:  # other servers grant the share of this server
        return 0
    start = number * groups // servers
    end = (number + 1) * groups // servers
    return end - start


class PendingPermits(Pending[Grant]):
    """A request for permits, which waits for capacity."""

    def __init__(self, count: int, since: float, deadline: float, request: int) -> None:
        """`request`: the id that the client gives the request and its retries; 0: no id."""
        super().__init__(since, deadline)
        self.count = count
        self.request = request


class Admission(Extension):
    """The permits of this server: the accepted groups, the open grants, and the requests that wait."""

    record = b"admission"
    mark = 1

    def __init__(
        self,
        config: AdmissionConfig,
        table: str,
        clock: Callable[[], float],
        partial_groups: Collection[int] = (),
    ) -> None:
        """`table`: the name of the admitted table, which is trained on.

        `partial_groups`: the collection in which `PermitTables` keeps the keys of the partial groups. Admission reads
        this collection whenever it needs the present keys.
        """
        self.config = config
        self.table = table
        self.marked = set()
        """The keys of accepted groups that no reader has acknowledged yet."""
        self.partial_groups = partial_groups
        self._clock = clock
        self._version: int | None = None
        """None: no version was ever set. The count of accepted groups begins at the first version."""
        self._shard_index: ShardIndex | None = None
        """None: no client has sent the index."""
        self._earlier = 0
        """The sum of this server's shares over all finished versions, in groups. It also changes when groups that were
        granted at one server count at another one."""
        self.accepted = 0
        """Groups that were inserted with a permit."""
        self.expired = 0
        """Permits whose grants have expired."""
        self._grants: dict[int, Grant] = {}
        """The grants that have permits left, by id."""
        self.line: Line[PendingPermits] = Line(clock)
        self.lines = {"permits": self.line}

    def concerns(self, table: TableConfig) -> bool:
        return table.name == self.table

    @property
    def running(self) -> int:
        """Permits that are granted and not used, and partial groups."""
        return sum(grant.count for grant in self._grants.values()) + len(self.partial_groups)

    @property
    def capacity(self) -> int:
        """The permits that could be granted now. Below 0, more are in use than a new configuration allows."""
        bound = min(self._earlier + self._full_capacity, 1 << 62)  # the field of ServerInfo has 64 bits
        return bound - self.accepted - self.running

    @property
    def _share(self) -> int:
        """The fresh groups of one step for which this server grants permits."""
        return share_of(self.config.fresh_groups_per_step, self._shard_index or ShardIndex())

    def why_no_permits(self, count: int) -> str:
        """Why `count` permits cannot be granted now: words first, then the inequality."""
        full = self._full_capacity
        if count <= full:
            remedy = "the next policy version brings more"
        else:
            remedy = f"ask for at most {full} at once"
        return (
            f"there: {max(self.capacity, 0)}, wanted: {count}; {remedy} ({self.accepted} accepted + {self.running} "
            f"running + {count} requested > {self._earlier} of earlier steps + (max_staleness "
            f"{self.config.max_staleness} + 1) * {self._share} a step = {self._earlier + full})"
        )

    @property
    def _full_capacity(self) -> int:
        """The capacity when no permit is in use and all accepted groups were used in finished steps."""
        return (self.config.max_staleness + 1) * self._share

    def acquire(
        self, count: int, deadline_at: float, request: int = 0, shard_index: ShardIndex | None = None
    ) -> PendingPermits:
        """Asks for `count` permits together. The result is done when they are granted.

        `request` becomes the id of the grant, so that a retry finds the grant even after a restart; 0: no id.
        `shard_index` is the index that a generator sends for this server. It is used until a trainer sends an index,
        because generators may start before the trainer.
        """
        if count < 1:
            raise invalid(f"count must be at least 1, not {count}")
        if self._shard_index is None:
            self._shard_index = shard_index
        pending = PendingPermits(count, self._clock(), deadline_at, request)
        for waiting in self.line:
            if request and waiting.request == request:  # this call is a retry, which takes the place of `waiting`
                waiting.fail(try_again("the client has asked for these permits again"))
        self.line.join(pending)
        grant = self._grants.get(request)  # no grant has the id 0
        if grant is not None:  # this call is a retry, and an earlier attempt was granted
            grant.attempt = pending
            pending.finish(grant)
        self.progress()
        return pending

    def release(self, grant_id: int, count: int = 0, moved: bool = False) -> int:
        """Releases `count` permits of a grant; 0: all that are left. Returns how many were released.

        `moved`: another server has accepted `count` groups with permits of this grant, which may have expired.
        """
        if moved:
            self.take_over(count)
        grant = self._grants.get(grant_id)
        if grant is None:
            return 0
        if count > grant.count and not moved:
            raise invalid(f"permit lease {grant_id:#x} has {counted(grant.count, 'permit')} left, not {count}")
        released = min(count or grant.count, grant.count)  # with `moved`, the grant may have fewer permits left
        self._end_permits(grant, released)
        self.progress()
        return released

    # ------------------------------------------------------------------------------------------------ what happens

    def why_no_policy(self, change: PolicyChange) -> Refused | None:
        """Refuses a version so high that the groups of the run would be more than _MOST_GROUPS."""
        most = _MOST_GROUPS // self.config.fresh_groups_per_step
        if change.version > most:
            return invalid(f"policy version {change.version}: must be from 0 to {most}")
        return None

    def on_insert(self, insert: InsertBatch) -> Iterable[Table]:
        """Ends the permits that the insert uses, and counts accepted groups.

        The groups of the insert are accepted if they enter the admitted table, and used permits or close a partial
        group. They are accepted even if their grant has expired in the meantime.
        """
        if insert.moved:
            # Another server has granted the permits. `accepted` rises below, so the capacity stays as it was.
            self._earlier += len(insert)
        else:
            grant = self._grants.get(insert.permits)
            if grant is not None:
                self._end_permits(grant, len(insert))
        if self.table not in insert.priorities:
            return ()
        if insert.permits or closes(insert, self.partial_groups, self.kernel):
            self.accepted += len(insert)
            self.marked.update(insert.keys)
        return ()

    def on_acknowledge(self, table: Table, batch: SampleBatch) -> Iterable[Table]:
        self.marked.difference_update(batch.keys.tolist())
        return ()

    def on_item_gone(self, keys: Sequence[int]) -> None:
        """Subtracts from `accepted` the groups that leave before a reader has acknowledged them.

        No step will use these groups, because they were dropped as stale, evicted or deleted. If they stayed accepted,
        each of them would lower the capacity for good, and enough of them would stop all generation.
        """
        unused = self.marked.intersection(keys)
        self.marked -= unused
        self.accepted -= len(unused)
        assert self.accepted >= len(self.marked), (self.accepted, len(self.marked))

    def on_policy(self, change: PolicyChange) -> None:
        """Counts the shares of the steps that the trainer has finished at `change.version`.

        A server that starts empty in the middle of a run does not know the groups that earlier steps have used. If
        `accepted` did not count these groups, the first version would grant a permit for each of them again.
        """
        if change.shard_index is not None:
            self._shard_index = change.shard_index
        used = change.version * self._share  # groups of this server that all steps until now have used
        if change.rollback:
            # The accepted groups are now those of the finished steps, and those that no reader has acknowledged.
            self._earlier = used
            self.accepted = used + len(self.marked)
        elif self._joins_later(change.version):
            # This server has not counted the steps until now.
            self._earlier = used
            self.accepted = max(self.accepted, used + len(self.marked))
        else:
            # The share may have changed since the last version, so only the new steps count with this share.
            new_steps = change.version - (self._version or 0)
            self._earlier += new_steps * self._share
        self._version = change.version

    def _joins_later(self, version: int) -> bool:
        """True if this server gets its first version, and has joined a run that began before."""
        if self._version is not None:
            return False
        if version > 1:
            return True
        # If permits were granted before the first version came, this server was there when the run began, and version 1
        # ends the first step of the run.
        permits_were_granted = self.accepted or self.running
        return not permits_were_granted

    def hand_over(self) -> int | None:
        """Hands over the groups that were accepted here beyond the shares of finished steps. Returns their number.

        The number is below 0 if fewer groups were accepted than the shares allow. The caller passes the number to
        `take_over` of another server, where these groups count from now on. Returns None, and hands over nothing, while
        permits are in use, or while the trainer has not given the share of this server to other servers yet.
        """
        if self.running:
            return None
        if self._version is not None and self._share:
            return None
        groups = self.accepted - self._earlier
        self._earlier = self.accepted
        return groups

    def take_over(self, groups: int) -> None:
        """Lowers the capacity by `groups`, which another server has accepted. If the number is below 0, raises it."""
        self._earlier -= groups
        self.progress()

    def expire(self) -> None:
        """Ends the grants whose time is over."""
        now = self._clock()
        expired = [grant for grant in self._grants.values() if grant.expires <= now]
        for grant in expired:
            self.expired += grant.count
            del self._grants[grant.id]
        self.progress()

    def time_out(self, pending: PendingPermits) -> None:
        """Ends `pending` at its deadline, with an error that says why it waited."""
        if not pending.done:
            pending.fail(deadline(f"permits: {self.why_no_permits(pending.count)}"))
            self.progress()

    def abandon(self, pending: PendingPermits) -> None:
        """Ends `pending`, whose client went away. Releases its grant, unless a retry of the client has that grant."""
        if not pending.done:
            pending.abandon()
            self.progress()
            return
        grant = pending.value
        if grant is not None and grant.attempt is pending:
            self.release(grant.id)

    def progress(self) -> None:
        """Grants permits, first come first served.

        A request for more permits than the capacity holds up the requests behind it. A request for more permits than
        the full capacity does not, because it might wait for ever.
        """
        if not len(self.line):  # the most frequent case
            return
        for pending in self.line:
            if pending.count > self.capacity:
                if pending.count > self._full_capacity:
                    continue  # the requests behind it do not wait for it
                break
            grant_id = pending.request
            if not grant_id:
                grant_id = secrets.randbits(63) | 1  # never 0, which means no grant
            assert grant_id not in self._grants, f"grant {grant_id} would be forgotten"
            expires = self._clock() + self.config.permit_ttl
            grant = Grant(grant_id, pending.count, expires, attempt=pending)
            self._grants[grant_id] = grant
            pending.finish(grant)

    def _end_permits(self, grant: Grant, count: int) -> None:
        """Ends `count` permits of the grant, or all that are left if these are fewer."""
        assert count > 0, count
        grant.count -= count
        if grant.count <= 0:
            del self._grants[grant.id]

    # ------------------------------------------------------------------------------------------------ state

    def state_dict(self, offset: float) -> dict[str, Any]:
        """As in Extension, without accepted groups that nothing would release after a restart."""
        return {
            "accepted": self.accepted - self._held_by_batches_alone(),
            "expired": self.expired,
            "began": self._version is not None,
            "shard_index": self._shard_index,
            "earlier": self._earlier,
            "leases": [(grant.id, grant.count, grant.expires + offset) for grant in self._grants.values()],
        }

    def _held_by_batches_alone(self) -> int:
        """The number of accepted groups that are in outstanding batches only, and in no table any more.

        Such items are not recorded on disk, so nothing would release their permits after a restart.
        """
        held: set[int] = set()
        for _, batch in self.kernel.batches.values():
            held.update(batch.keys.tolist())
        held &= self.marked
        count = 0
        for key in held:
            if not any(table.has_or_may_return(key) for table in self.kernel.trained):
                count += 1
        return count

    def load_state_dict(self, state: dict[str, Any] | None, offset: float, version: int) -> None:
        """As in Extension. Grants whose time is over by now end."""
        if state is None:  # the server ran without [admission]
            if version > 0:
                # Counts the groups of all finished steps as used, as after a rollback to this version.
                self.on_policy(PolicyChange(before=version, version=version, rollback=True))
            return
        self.accepted = state["accepted"]
        self.expired = state["expired"]
        self._version = version if state["began"] else None
        self._shard_index = ShardIndex(*state["shard_index"]) if state["shard_index"] else None
        self._earlier = state["earlier"]
        # The stored times are times of day. If the clock of the machine was set back since they were stored, a grant
        # would expire too late, so `latest` bounds its time.
        latest = self._clock() + self.config.permit_ttl
        self._grants = {}
        for grant_id, count, expires in state["leases"]:
            self._grants[grant_id] = Grant(grant_id, count, min(expires - offset, latest))
        self.expire()

    def reconcile(self) -> None:
        # While a server runs without [admission], items keep their marks, but the count of accepted groups is lost.
        self.accepted = max(self.accepted, len(self.marked))

    def expiries(self) -> list[float]:
        """The times at which the open grants expire, by the server's clock."""
        return [grant.expires for grant in self._grants.values()]

    def check(self) -> None:
        """As in Extension. Also asserts that no request waits that could be granted."""
        super().check()
        for grant_id, grant in self._grants.items():
            assert grant.id == grant_id, (grant_id, grant)
            assert grant.count > 0, grant
        assert self.accepted >= len(self.marked), (self.accepted, len(self.marked))
        self.line.check()
        for pending in self.line:
            assert pending.count > self.capacity, (pending.count, self.capacity)
            if pending.count <= self._full_capacity:
                break  # this request holds up all requests behind it
