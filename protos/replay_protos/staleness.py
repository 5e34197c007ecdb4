"""Staleness: how old groups are when they are drawn, and which settings decide it.

A group begins when a generator fixes its policy version, and ends when a trainer draws it. Its staleness is the number
of policy versions that are set in between. Count the pairs (group, version that is set between its begin and its draw):

    group by group        the sum of the staleness of all groups that are drawn
    version by version    the number of groups that have begun and are not drawn when the version is set

Both are the same pairs. Over many versions, with `drawn` groups a version, therefore

    mean staleness = (under_way + waiting) / drawn                                                       `expected`

`under_way` and `waiting` are means at the moments when a version is set: groups that generators make or hold because
the table is full, and groups in the table. This is Little's law (L = λ W) with policy versions as the clock. It asks
nothing of the distribution of any time. It leaves out what begins before the first version or is drawn after the last
one, and it is too high by what is never drawn (evicted, deleted, stale). A generator that begins groups with old
weights, because they arrive late, adds as many versions as these are behind: that is the one thing that makes the
measured staleness larger than the expected one.

Two means of the sum are known without a look, of C groups at a time, a queue of K, and B groups a step:

    the trainer waits for groups, and computes a share u of the time:  under_way = C, waiting = u B
    generators wait for the trainer, so u = 1 and the queue is full:   under_way = C, waiting = K        `most`

The server does not know u, and need not: while the queue is not full, u = waiting / drawn.

[admission] grants a permit while accepted + running <= (max_staleness + version + 1) * B. When the next version is set,
version + 1 batches of B are drawn, so under_way + waiting <= max_staleness * B. So it bounds the sum, too.

What is drawn ahead (`prefetch`) waits in the trainer. It grows older there by at most as many versions as there are
batches drawn ahead. Nothing here counts that.

The source of the idea is Applied Compute, "Predicting and Controlling Staleness in Fully Asynchronous RL" (2026). The
formulas are derived here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from replay_protos.recipes import read_described


@dataclass(frozen=True)
class FreshFlow:
    """How fresh groups pass through one table: what is measured, and what is set."""

    drawn: float
    """Groups drawn for each policy version."""
    waiting: float
    """Groups in the table when a version is set."""
    under_way: float
    """Groups that generators make or hold at that moment."""
    measured: float
    """Mean staleness of the drawn groups."""
    concurrency: int | None
    """The most groups that are under way, as the generators say of themselves; None: one says nothing."""
    queue: int | None
    """The most groups that wait in the table before inserts wait, too; None: inserts never wait."""
    admitted: int | None
    """max_staleness of [admission], if it is of this table."""

    @property
    def expected(self) -> float:
        """The mean staleness that follows from the flow."""
        return (self.under_way + self.waiting) / self.drawn

    @property
    def most(self) -> float | None:
        """The mean staleness when generators wait for the trainer all the time. None: nothing bounds it."""
        full = None
        if self.concurrency is not None and self.queue is not None:
            full = (self.concurrency + self.queue) / self.drawn
        return min((bound for bound in (full, self.admitted) if bound is not None), default=None)

    def changes(self, bound: float) -> list[str]:
        """What keeps the mean staleness within `bound` even when generators wait all the time: each alone is enough.

        Empty if it is kept already.
        """
        if self.most is not None and self.most <= bound + 1e-9:
            return []
        found = [f"[admission] max_staleness = {math.floor(bound)}"]
        if self.concurrency is None or self.queue is None:
            return found
        room = bound * self.drawn
        if (slots := math.floor(room - self.queue + 1e-9)) >= 1:
            found.append(f"at most {slots} groups at a time in all (max_concurrent_groups; now {self.concurrency})")
        if (size := math.floor(room - self.concurrency + 1e-9)) >= math.ceil(self.drawn):
            found.append(f"a queue of at most {size} (rate_limiter max_size; now {self.queue})")
        if bound > 0:
            batch = math.ceil((self.concurrency + self.queue) / bound - 1e-9)
            found.append(f"at least {batch} fresh groups a step (now {self.drawn:.1f})")
        return found


def clients_there(info: Any) -> list[Any]:
    """The clients of a ServerInfo that have not ended, and were not killed some time ago."""
    return [client for client in info.clients if not client.ended and (client.open or client.age < info.long_wait)]


def fresh_flow(info: Any, table: Any) -> tuple[FreshFlow | None, str]:
    """The flow through a table of a ServerInfo, of the message or the client's record; or None, and what is missing.

    None and "" for a table of which nothing is to be said: its items may be drawn more than once, or it has seen too
    few versions.
    """
    flow = table.flow
    if not flow.versions or not flow.drawn:
        return None, ""
    config = json.loads(table.config)
    admission = info.admission
    by_permits = admission is not None and admission.table == table.name
    concurrency, silent = _concurrency(table.name, clients_there(info))
    if not by_permits and concurrency is None:
        who = f"generator {silent} does not say" if silent else "no generator is there that says"
        return None, f"{who} how many groups it makes at a time (max_concurrent_groups; client.describe)"
    return (
        FreshFlow(
            drawn=flow.drawn,
            waiting=flow.waiting,
            under_way=flow.permits if by_permits else float(concurrency or 0),
            measured=flow.staleness,
            concurrency=concurrency,
            queue=config["rate_limiter"]["max_size"],
            # A trainer that takes fewer groups than are admitted is outrun all the same.
            admitted=int(admission.max_staleness)
            if by_permits and flow.drawn > 0.9 * admission.groups_per_step
            else None,
        ),
        "",
    )


def _concurrency(table: str, clients: Iterable[Any]) -> tuple[int | None, str]:
    """The groups that all generators of a table make at a time; or None, and who does not say."""
    total = 0
    for client in clients:
        if "generator" not in client.role:
            continue
        said = read_described(client.settings)
        if table not in (said.get("tables") or [table]):
            continue
        if not isinstance(most := said.get("max_concurrent_groups"), int):
            return None, client.name
        total += most
    return (total, "") if total else (None, "")
