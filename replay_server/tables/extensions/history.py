"""History: the states that a trainer can go back to, and the rows that tables have consumed since then.

A trainer that goes back to an older state has to train again on the rows that it consumed after that state. But a
consumed row is gone. So a table with `retain_consumed = n` retains its consumed rows for a while. The trainer names
each of its full states to the server, as soon as all rows that the state was trained on are consumed. Rows consumed
since the n-th last named state are retained. Older rows are discarded. Going back to a state returns the rows that were
consumed after the state.

        state 1 ──consumes a, b──▶ state 2 ──consumes c──▶ now                  retained with n = 2: a, b, c
                                      ◀──── back to 2: c returns ────┘            retained then: a, b; states 1, 2

A retained row is a reserved row whose batch was acknowledged. The history is its owner now (columns.py). The row keeps
its slot, its facts and its item. So returning the row changes only its state, as requeueing a batch does. A selector
that follows the order of insertion then gives the row before all newer rows. Consumed rows are numbered: each gets the
next number, and the moment of a state is the number of the last row before the state. So one comparison tells whether a
row was consumed after a state, also after a restart.

* If no table has `retain_consumed`, or before the first state is named, nothing is retained and nothing is remembered.
* A row that has returned is retained no longer, so it does not return twice.
* When the trainer has gone back to a state, this state stays known. Later states are forgotten.
* The bytes of retained rows count for the server. When the server needs room, it discards retained rows first.
* Going back undoes versions. Items that these versions generated leave all tables. Further items of an undone version
  are refused until the trainer comes to that version again: from then on old and new items cannot be told apart.
* Nothing else is rolled back: priorities stay as they are, and items that left in other ways stay gone.
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
    """A training checkpoint of the trainer. It contains the training on all rows that were consumed before it."""

    id: str
    version: int
    moment: int
    """The number of the last row that was consumed before the trainer named the state."""


class Consumed(NamedTuple):
    """The consumption of one retained row."""

    number: int
    """The position of the row among all consumed rows."""
    permit: bool
    """True if this consumption used the permit of the item."""


class History(Extension):
    """The retained rows of all tables, and the states of the trainer that can bring them back."""

    record = b"history"

    def __init__(self, most: int, permits: Mapping[str, set[int]]) -> None:
        """`most`: the most states that are known at a time; 0: no table retains rows.

        `permits`: by name of each table that uses permits, the keys of its items whose permits are not used yet. The
        sets are shared with the admission.
        """
        self._most = most
        self._permits = permits
        self.states: list[SavedState] = []
        """From the oldest to the newest."""
        self._consumed = 0
        """The number of the row that was consumed last."""
        self.rows: dict[tuple[str, int], Consumed] = {}
        """The retained rows by name of the table and key, in the order of their consumption."""
        self.undone = 0
        """The newest policy version that a rollback has undone; 0: none.

        All versions above the current one, up to this one, are undone."""

    def concerns(self, table: TableConfig) -> bool:
        return bool(table.retain_consumed)

    @property
    def last_state(self) -> str:
        """The id of the state that the trainer named last, or went back to last; "": there is no state."""
        return self.states[-1].id if self.states else ""

    # ------------------------------------------------------------------------------------------------ retaining

    def on_acknowledge(self, table: Table, batch: SampleBatch) -> Iterable[Table]:
        """Retains the rows that the batch has used up, if there is a state that could bring them back."""
        if not self.states or batch.epoch != table.epoch:  # another epoch: a reset has removed the rows
            return ()
        consumed: list[int] = batch.keys[batch.consumed].tolist()
        table.columns.retain(consumed)
        for key in consumed:
            self._consumed += 1
            permit = key in self._permits.get(table.name, ())  # the admission removes the key after this hook
            self.rows[table.name, key] = Consumed(self._consumed, permit)
        self.kernel.items.freed = True  # an insert that waits for bytes may discard these rows
        return ()

    def discard(self, table: Table, keys: Iterable[int]) -> None:
        """Removes the rows of these keys that the table retains, for good."""
        retained = [key for key in keys if key in table.columns.retained]
        for key in retained:
            del self.rows[table.name, key]
        table.discard(retained)

    def on_reset(self, table: Table) -> None:
        """Discards all rows that the table retains."""
        self.discard(table, list(table.columns.retained))

    def _trim(self) -> None:
        """Forgets the oldest states if there are too many, and discards rows that no known state could bring back."""
        self.states = _last(self.states, self._most)
        for table in self.kernel.tables.values():
            if not table.columns.retained:
                continue
            known = _last(self.states, table.config.retain_consumed)
            oldest_moment = known[0].moment if known else self._consumed  # without a state, all rows are discarded
            retained = table.columns.retained
            self.discard(table, [key for key in retained if self.rows[table.name, key].number <= oldest_moment])

    # ------------------------------------------------------------------------------------------------ room

    def spares(self, key: int) -> int:
        if not self.rows:  # the most frequent case
            return 0
        return sum(key in table.columns.retained for table in self.kernel.tables.values())

    def spare_keys(self) -> Iterable[int]:
        return (key for _, key in self.rows)

    def free(self, needed: float) -> bool:
        """Discards retained rows, the oldest first. O(retained rows).

        Rows whose item is also in a table or in a batch stay: to discard them would free no bytes.
        """
        items = self.kernel.items
        chosen: set[int] = set()
        for _, key in self.rows:
            if key in chosen:  # two tables retain a row of the item
                continue
            item = items[key]
            only_spare_rows = item.holders == items.spare(key)
            if only_spare_rows:
                chosen.add(key)
                needed -= item.cost
                if needed <= 0:
                    break
        if not chosen:
            return False
        for table in self.kernel.tables.values():
            keys = [key for key in table.columns.retained if key in chosen]
            table.counters.retained_discarded += len(keys)
            self.discard(table, keys)
        return True

    # ------------------------------------------------------------------------------------------------ states

    def why_no_policy(self, change: PolicyChange) -> Refused | None:
        """Refuses to name a state whose id an older state has, and to go back to an unknown state.

        A rollback must also name the version of its state.
        """
        id = change.state
        if not id:
            return None
        if not change.rollback:
            if any(state.id == id for state in self.states[:-1]):  # the last state may be named again
                return invalid(f"state {id!r} was named before, and others since: choose a new id for each state")
            return None
        state = self._state(id)
        if state is None:
            why = self._why_unknown()
            return invalid(f"there is no state {id!r} to go back to: {why}; without a state only the version goes back")
        if state.version != change.version:
            return invalid(f"state {id!r} is of version {state.version}, and not of {change.version}")
        return None

    def _state(self, id: str) -> SavedState | None:
        """The state with this id; None: it is not known."""
        for state in self.states:
            if state.id == id:
                return state
        return None

    def _why_unknown(self) -> str:
        """Says why a state is not known: lists the known states, or says why there are no states."""
        if not self._most:
            return "no table of this server has retain_consumed"
        if not self.states:
            return "none was named since this server has its tables"
        known = ", ".join(f"{state.id!r} (version {state.version})" for state in self.states)
        return f"this server knows {known}"

    def on_policy(self, change: PolicyChange) -> None:
        """Goes back to the state that the trainer names in a rollback, or remembers the state that it has saved."""
        if change.state and change.rollback:
            self._go_back(change)
        elif change.state:
            self._name(change)
        elif change.version < change.before:  # a rollback without a state: no version counts as undone
            self._undo(0)

    def _name(self, change: PolicyChange) -> None:
        """The trainer has saved a state, which contains the training on all rows that were consumed until now.

        The trainer may name its last state again: that changes nothing.
        """
        if self._most and change.state != self.last_state:
            self.states.append(SavedState(change.state, change.version, self._consumed))
            self._trim()

    def _go_back(self, change: PolicyChange) -> None:
        """Returns the rows that were consumed after a state to their tables. Drops items of later versions."""
        state = self._state(change.state)
        assert state is not None
        self.states = self.states[: self.states.index(state) + 1]
        for table in self.kernel.tables.values():
            retained = table.columns.retained
            after = [key for key in retained if self.rows[table.name, key].number > state.moment]
            if after:
                self._restore(table, after)
        self._undo(max(self.undone, change.before))  # an earlier rollback may have undone even newer versions
        # Only after `_restore`: rows that returned may be dropped, too. A drop releases unused permits, and `_restore`
        # has noted which permits are unused again.
        for table in self.kernel.trained:
            table.drop_stale()
            table.drop_undone()

    def _restore(self, table: Table, keys: list[int]) -> None:
        """Returns these retained rows to the table, with the permits of their items."""
        consumed = {key: self.rows.pop((table.name, key)) for key in keys}
        for watcher in self.kernel.watchers:
            watcher.changed(keys)
            for scope in table.scopes.of(keys):  # before `table.restore`, which removes the keys from these scopes
                watcher.scope_changed(table.name, scope)
        table.restore(keys)
        if table.name in self._permits:
            self._permits[table.name].update(key for key, row in consumed.items() if row.permit)

    def _undo(self, version: int) -> None:
        """Notes that the versions after the current one, up to `version`, are undone; 0: no version is undone."""
        self.undone = version
        for table in self.kernel.trained:
            table.undone = version

    # ------------------------------------------------------------------------------------------------ state on disk

    def state_dict(self, offset: float) -> dict[str, Any]:
        """The states and the counts. Retained rows are stored in the records of their items."""
        states = [[state.id, state.version, state.moment] for state in self.states]
        return {"states": states, "consumed": self._consumed, "undone": self.undone}

    def load_state_dict(self, state: dict[str, Any] | None, offset: float, version: int) -> None:
        if state is not None:
            self.states = [SavedState(*fields) for fields in state["states"]]
            self._consumed = state["consumed"]
            self._undo(state["undone"])

    def retain_again(self, table: Table, keys: Sequence[int], numbers: Sequence[int], permits: Sequence[bool]) -> None:
        """Notes that these rows, which were just loaded into `table`, were consumed and retained before the restart.

        `numbers` and `permits` are the fields of `Consumed` for each of `keys`.
        """
        for key, number, permit in zip(keys, numbers, permits, strict=True):
            self.rows[table.name, key] = Consumed(number, permit)

    def reconcile(self) -> None:
        """Sorts the loaded rows by their consumption. Discards rows that this configuration does not retain."""
        in_order = sorted(self.rows.items(), key=lambda entry: entry[1].number)
        self.rows = dict(in_order)
        self._trim()

    def check(self) -> None:
        """As in Extension. `rows` must be the rows that the tables retain, each of them after the oldest state."""
        super().check()
        retained: set[tuple[str, int]] = set()
        for table in self.kernel.tables.values():
            retained.update((table.name, key) for key in table.columns.retained)
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


def _last(states: list[SavedState], n: int) -> list[SavedState]:
    """The last n states, or all if there are fewer."""
    return states[-n:] if n else []  # states[-0:] would be all states
