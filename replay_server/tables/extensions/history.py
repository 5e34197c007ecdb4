"""History: the states that a trainer can go back to, and what tables have consumed since.

A trainer that goes back to an older state has to train again on what it consumed after that state. But a consumed row
is gone. So a table with `retain_consumed = n` retains its consumed rows for a while. The trainer names each of its full
states to the server, when everything that the state contains is consumed. What was consumed since the n-th last named
state is retained; what is older is discarded. Going back to a state returns the rows that were consumed after it.

        state 1 ──consumes a, b──▶ state 2 ──consumes c──▶ now                  retained with n = 2: a, b, c
                                      ◀──── back to 2: c returns ────┘            retained then: a, b; states 1, 2

A retained row is a reserved row whose batch was acknowledged; the history is its owner now (columns.py). It keeps its
slot, its facts and its item, so returning it changes its state alone, as requeueing a batch does. A selector that
follows the order of insertion then gives it before all newer rows. Moments are numbers: each consumed row gets the next
one, and a state has that of the last row before it. So "after the state" is one comparison, the same after a restart.

* Where no table retains, and before the first state is named, nothing is retained and nothing is remembered.
* A row returns once. A state stays known when the trainer has gone back to it; the later ones are forgotten.
* The bytes of retained rows count for the server. Retained rows are insurance and not data: what needs room gets
  theirs.
* Going back undoes versions. What they generated leaves all tables, and is refused until the trainer comes to them
  again: then nobody can tell both apart. Nothing else is rolled back: neither priorities, nor what left in other ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from replay_server.errors import Refused, invalid
from replay_server.tables.config import TableConfig
from replay_server.tables.extensions.extension import Extension, PolicyChange
from replay_server.tables.table import SampleBatch, Table


@dataclass(frozen=True)
class SavedState:
    """A training checkpoint of the trainer, which contains all that was consumed before it."""

    id: str
    version: int
    moment: int
    """The number of the last row that was consumed before."""


class Consumed(NamedTuple):
    """When a retained row was consumed."""

    number: int
    permit: bool
    """Whether its item was inserted with a permit, and was used here for the first time."""


class History(Extension):
    record = b"history"

    def __init__(self, most: int, permits: Mapping[str, set[int]]) -> None:
        """`most`: states that are known at a time. `permits`: by table that uses them the keys of items whose permits
        it has not used."""
        self._most = most
        self._permits = permits
        self.states: list[SavedState] = []
        """From the oldest to the newest."""
        self._consumed = 0
        """The number of the row that was consumed last."""
        self.rows: dict[tuple[str, int], Consumed] = {}
        """The retained rows by table and key, in the order of their consumption."""
        self.undone = 0
        """The newest policy version that was undone. Those from the current one to here do not exist any more."""

    def concerns(self, table: TableConfig) -> bool:
        return bool(table.retain_consumed)

    @property
    def last_state(self) -> str:
        """The id of the state that was named last, or gone back to; "": there is none."""
        return self.states[-1].id if self.states else ""

    # ------------------------------------------------------------------------------------------------ retaining

    def on_acknowledge(self, table: Table, batch: SampleBatch) -> Iterable[Table]:
        if not self.states or batch.epoch != table.epoch:
            return ()
        consumed: list[int] = batch.keys[batch.consumed].tolist()
        table.columns.retain(consumed)
        for key in consumed:
            self._consumed += 1
            permit = key in self._permits.get(table.name, ())
            self.rows[table.name, key] = Consumed(self._consumed, permit)
        self.kernel.items.freed = True  # for whoever needs it
        return ()

    def discard(self, table: Table, keys: Iterable[int]) -> None:
        """The retained rows among these leave for good."""
        retained = [key for key in keys if key in table.columns.retained]
        for key in retained:
            del self.rows[table.name, key]
        table.discard(retained)

    def on_reset(self, table: Table) -> None:
        self.discard(table, list(table.columns.retained))

    def _trim(self) -> None:
        """Discards what no known state could bring back."""
        self.states = self.states[-self._most :] if self._most else []
        for table in self.kernel.tables.values():
            if table.columns.retained:
                known = self.states[-table.config.retain_consumed :] if table.config.retain_consumed else []
                first = known[0].moment if known else self._consumed
                retained = table.columns.retained
                self.discard(table, [key for key in retained if self.rows[table.name, key].number <= first])

    # ------------------------------------------------------------------------------------------------ room

    def spares(self, key: int) -> int:
        return sum(key in table.columns.retained for table in self.kernel.tables.values()) if self.rows else 0

    def spare_keys(self) -> Iterable[int]:
        return (key for _, key in self.rows)

    def free(self, needed: float) -> bool:
        """Discards retained rows, the oldest first.

        Rows whose item is in a table too, or in a batch, are passed over: they cost nothing. O(retained rows).
        """
        items, chosen = self.kernel.items, set[int]()
        for _, key in self.rows:
            if key not in chosen and (item := items[key]).holders == items.spare(key):
                chosen.add(key)
                needed -= item.cost
                if needed <= 0:
                    break
        for table in self.kernel.tables.values() if chosen else ():
            keys = [key for key in table.columns.retained if key in chosen]
            table.counters.retained_discarded += len(keys)
            self.discard(table, keys)
        return bool(chosen)

    # ------------------------------------------------------------------------------------------------ states

    def why_no_policy(self, change: PolicyChange) -> Refused | None:
        if not (id := change.state):
            return None
        if not change.rollback:
            if any(state.id == id for state in self.states[:-1]):
                return invalid(f"state {id!r} was named before, and others since: choose a new id for each state")
            return None
        known = ", ".join(f"{state.id!r} (version {state.version})" for state in self.states)
        if (found := self._state(id)) is None:
            why = f"this server knows {known}" if known else "none was named since this server has its tables"
            why = why if self._most else "no table of this server has retain_consumed"
            return invalid(f"there is no state {id!r} to go back to: {why}; without a state only the version goes back")
        if found.version != change.version:
            return invalid(f"state {id!r} is of version {found.version}, and not of {change.version}")
        return None

    def _state(self, id: str) -> SavedState | None:
        return next((state for state in self.states if state.id == id), None)

    def on_policy(self, change: PolicyChange) -> None:
        if change.state and change.rollback:
            self._go_back(change)
        elif change.state:
            self._name(change)
        elif change.version < change.before:
            self._undo(0)  # only the version goes back: nothing is undone

    def _name(self, change: PolicyChange) -> None:
        """The trainer has saved a state, which contains all that was consumed until now.

        What it named last it may name again: that changes nothing.
        """
        if self._most and change.state != self.last_state:
            self.states.append(SavedState(change.state, change.version, self._consumed))
            self._trim()

    def _go_back(self, change: PolicyChange) -> None:
        """Returns to their tables what was consumed after a state, and drops what later versions generated."""
        state = self._state(change.state)
        assert state is not None
        self.states = self.states[: self.states.index(state) + 1]
        for table in self.kernel.tables.values():
            retained = table.columns.retained
            if after := [key for key in retained if self.rows[table.name, key].number > state.moment]:
                self._restore(table, after)
        self._undo(max(self.undone, change.before))
        for table in self.kernel.trained:  # now that it is known whose permits are unused again
            table.drop_stale()
            table.drop_undone()

    def _restore(self, table: Table, keys: list[int]) -> None:
        consumed = {key: self.rows.pop((table.name, key)) for key in keys}
        for watcher in self.kernel.watchers:
            watcher.changed(keys)
            for scope in table.scopes.of(keys):
                watcher.scope_changed(table.name, scope)
        table.restore(keys)
        if table.name in self._permits:
            self._permits[table.name].update(key for key, each in consumed.items() if each.permit)

    def _undo(self, version: int) -> None:
        """The versions from the current one to here do not exist any more."""
        self.undone = version
        for table in self.kernel.trained:
            table.undone = version

    # ------------------------------------------------------------------------------------------------ state on disk

    def state_dict(self, offset: float) -> dict[str, Any]:
        """Everything but the rows."""
        states = [[state.id, state.version, state.moment] for state in self.states]
        return {"states": states, "consumed": self._consumed, "undone": self.undone}

    def load_state_dict(self, state: dict[str, Any] | None, offset: float, version: int) -> None:
        if state is not None:
            self.states = [SavedState(*each) for each in state["states"]]
            self._consumed = state["consumed"]
            self._undo(state["undone"])

    def retain_again(self, table: Table, keys: Sequence[int], numbers: Sequence[int], permits: Sequence[bool]) -> None:
        """These rows, which `table` has just got, were consumed and retained before the restart."""
        for key, number, permit in zip(keys, numbers, permits, strict=True):
            self.rows[table.name, key] = Consumed(number, permit)

    def reconcile(self) -> None:
        self.rows = dict(sorted(self.rows.items(), key=lambda row: row[1].number))
        self._trim()

    def check(self) -> None:
        super().check()
        retained = {(table.name, key) for table in self.kernel.tables.values() for key in table.columns.retained}
        assert self.rows.keys() == retained, self.rows.keys() ^ retained
        numbers = [row.number for row in self.rows.values()]
        assert numbers == sorted(set(numbers)), "rows are not in the order of their consumption"
        assert not numbers or numbers[-1] <= self._consumed, (numbers[-1], self._consumed)
        assert len(self.states) <= self._most, (len(self.states), self._most)
        moments = [state.moment for state in self.states]
        assert not numbers or numbers[0] > moments[0], "a row is retained that no state could bring back"
        assert moments == sorted(moments), self.states
        assert not moments or moments[-1] <= self._consumed, (moments[-1], self._consumed)
        for table in self.kernel.trained:
            assert table.undone == self.undone, (table.name, table.undone, self.undone)
