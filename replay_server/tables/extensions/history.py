"""History: the states that a trainer can go back to, and the rows that tables have consumed since then.

A trainer that goes back to an older state (one of its checkpoints) has to train again on the rows that it consumed
after that state. But a table usually removes a row when it is consumed. So a table with `retain_consumed = n` retains
its consumed rows for a while. When the trainer has saved a state, and all rows that the state was trained on are
consumed, the trainer names the state to the server. The table retains the rows that were consumed since the n-th last
named state, and discards older rows. When the trainer goes back to a state, the rows that were consumed after this
state return to their tables.

        state 1 ──consumes a, b──▶ state 2 ──consumes c──▶ now                  retained with n = 2: a, b, c
                                      ◀──── back to 2: c returns ────┘            retained then: a, b; states 1, 2

A retained row is a reserved row whose batch was acknowledged (`columns.py`). The history owns the row from then on. The
row keeps its slot, its facts and its item. So a row returns as cheaply as the rows of a requeued batch do. A selector
that follows the order of insertion then gives the row before all newer rows.

Each consumed row gets the next number. The moment of a state is the number of the row that was consumed last before the
state was named. So one comparison tells whether a row was consumed after a state, also after a restart.

* If no table has `retain_consumed`, or before the first state is named, no row is retained.
* A row that has returned is retained no longer, so it does not return twice.
* When the trainer has gone back to a state, the server still knows this state, but forgets all later states.
* The bytes of retained rows count towards `max_bytes`. When the server needs room, it discards retained rows before it
  evicts or refuses items.
* Going back undoes versions. Items that these versions generated leave all tables. Further items of an undone version
  are refused until the trainer comes to that version again. Then they are accepted, because items that the old and the
  new policy of this version generated cannot be told apart.
* Nothing else is rolled back. Priorities stay as they are, and items that left for other reasons stay gone.
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
    """A checkpoint of the trainer, which was trained on all rows that were consumed before the trainer named it."""

    id: str
    version: int
    moment: int
    """The number of the last row that was consumed before the trainer named the state."""


class Consumed(NamedTuple):
    """The consumption of one retained row."""

    number: int
    """The position of the row among all consumed rows. The first row has number 1."""
    permit: bool
    """True if the item came with a permit, and no reader had acknowledged the item before this consumption."""


class History(Extension):
    """The retained rows of all tables, and the states of the trainer that can bring them back."""

    record = b"history"

    def __init__(self, most: int, permits: Mapping[str, set[int]]) -> None:
        """`most`: the most states that are known at a time; 0: no table retains rows.

        `permits`: name of the admitted table -> the keys of its items that came with a permit and that no reader has
        acknowledged yet. The set belongs to the extension Admission, and both extensions change it.
        """
        self._most_states = most
        self._permits = permits
        self.states: list[SavedState] = []
        """The known states, from the oldest to the newest."""
        self._last_number = 0
        """The number of the row that was consumed last; 0: no row was consumed."""
        self.rows: dict[tuple[str, int], Consumed] = {}
        """(name of the table, key) of each retained row -> its consumption. The entries are sorted by number."""
        self.undone = 0
        """The newest policy version that a rollback has undone; 0: none.

        All versions above the current version, up to and including this one, are undone.
        """

    def concerns(self, table: TableConfig) -> bool:
        return bool(table.retain_consumed)

    @property
    def last_state(self) -> str:
        """The id of the newest known state, which the trainer named or went back to last; "": no state is known."""
        return self.states[-1].id if self.states else ""

    # ------------------------------------------------------------------------------------------------ retaining

    def on_acknowledge(self, table: Table, batch: SampleBatch) -> Iterable[Table]:
        """Retains the rows that the batch has used up, if there is a state that could bring them back."""
        if not self.states or batch.epoch != table.epoch:  # another epoch: a reset has removed the rows
            return ()
        consumed_keys: list[int] = batch.keys[batch.consumed].tolist()
        table.columns.retain(consumed_keys)
        keys_with_permits = self._permits.get(table.name, ())  # Admission removes the keys of the batch after this hook
        for key in consumed_keys:
            self._last_number += 1
            has_permit = key in keys_with_permits
            self.rows[table.name, key] = Consumed(self._last_number, has_permit)
        self.kernel.items.freed = True  # an insert that waits for bytes may discard these rows
        return ()

    def discard(self, table: Table, keys: Iterable[int]) -> None:
        """Removes for good those rows of `keys` that the table retains."""
        retained = [key for key in keys if key in table.columns.retained]
        for key in retained:
            del self.rows[table.name, key]
        table.discard(retained)

    def on_reset(self, table: Table) -> None:
        """Discards all rows that the table retains."""
        self.discard(table, list(table.columns.retained))

    def _trim(self) -> None:
        """Forgets the oldest states if there are too many, and discards rows that no known state could bring back."""
        self.states = _last(self.states, self._most_states)
        for table in self.kernel.tables.values():
            retained = table.columns.retained
            if not retained:
                continue
            states = _last(self.states, table.config.retain_consumed)  # those for which the table retains rows
            oldest_moment = states[0].moment if states else self._last_number  # without a state, no row is retained
            too_old = [key for key in retained if self.rows[table.name, key].number <= oldest_moment]
            self.discard(table, too_old)

    # ------------------------------------------------------------------------------------------------ room

    def spares(self, key: int) -> int:
        if not self.rows:  # the most frequent case
            return 0
        return sum(key in table.columns.retained for table in self.kernel.tables.values())

    def spare_keys(self) -> Iterable[int]:
        return (key for _, key in self.rows)

    def free(self, needed: float) -> bool:
        """Discards retained rows, the oldest first. O(retained rows).

        A row stays if its item is also in a table or in a batch, because discarding the row would free no bytes.
        """
        items = self.kernel.items
        chosen: set[int] = set()
        for _, key in self.rows:
            if key in chosen:  # another table retains a row of this item, too
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
        """Refuses a new state whose id an older state has, and a rollback to an unknown state.

        A rollback to a known state is refused if it names another version than the version of the state.
        """
        id = change.state
        if not id:
            return None
        if not change.rollback:
            older_states = self.states[:-1]  # without the last state, which may be named again
            if any(state.id == id for state in older_states):
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
        if not self._most_states:
            return "no table of this server has retain_consumed"
        if not self.states:
            return "none was named since this server has its tables"
        known = ", ".join(f"{state.id!r} (version {state.version})" for state in self.states)
        return f"this server knows {known}"

    def on_policy(self, change: PolicyChange) -> None:
        """Goes back to the state that the trainer names in a rollback, or notes the state that the trainer has saved.

        After a rollback without a state, no version counts as undone.
        """
        if change.state and change.rollback:
            self._go_back(change)
        elif change.state:
            self._add_state(change)
        elif change.version < change.before:  # a rollback without a state
            self._set_undone(0)

    def _add_state(self, change: PolicyChange) -> None:
        """Notes a state that the trainer has saved. The state was trained on all rows that were consumed until now.

        If the trainer names its last state again, nothing changes.
        """
        if self._most_states and change.state != self.last_state:
            self.states.append(SavedState(id=change.state, version=change.version, moment=self._last_number))
            self._trim()

    def _go_back(self, change: PolicyChange) -> None:
        """Returns to their tables all rows that were consumed after the state of `change`.

        Forgets later states, and drops the items of the versions that this undoes.
        """
        state = self._state(change.state)
        assert state is not None
        self.states = self.states[: self.states.index(state) + 1]
        for table in self.kernel.tables.values():
            retained = table.columns.retained
            after = [key for key in retained if self.rows[table.name, key].number > state.moment]
            if after:
                self._restore(table, after)
        newest_undone = max(self.undone, change.before)  # an earlier rollback may have undone even newer versions
        self._set_undone(newest_undone)
        # The drops come after `_restore`, because rows that have returned may have to be dropped, too. If such a row
        # has a permit, `_restore` has noted its key in `_permits`, so the drop releases the permit.
        for table in self.kernel.trained:
            table.drop_stale()
            table.drop_undone()

    def _restore(self, table: Table, keys: list[int]) -> None:
        """Returns these retained rows to the table, and notes in `_permits` which of them have permits."""
        consumptions = {key: self.rows.pop((table.name, key)) for key in keys}
        for watcher in self.kernel.watchers:
            watcher.changed(keys)
            for scope in table.scopes.of(keys):  # before `table.restore`, which removes the keys from these scopes
                watcher.scope_changed(table.name, scope)
        table.restore(keys)
        if table.name in self._permits:
            with_permit = [key for key, consumption in consumptions.items() if consumption.permit]
            self._permits[table.name].update(with_permit)

    def _set_undone(self, version: int) -> None:
        """Notes that all versions after the current one, up to `version`, are undone; 0: no version is undone."""
        self.undone = version
        for table in self.kernel.trained:
            table.undone = version

    # ------------------------------------------------------------------------------------------------ state on disk

    def state_dict(self, offset: float) -> dict[str, Any]:
        """The states, the last number and the undone version. Retained rows are in the records of their items."""
        states = [[state.id, state.version, state.moment] for state in self.states]
        return {"states": states, "consumed": self._last_number, "undone": self.undone}

    def load_state_dict(self, state: dict[str, Any] | None, offset: float, version: int) -> None:
        if state is not None:
            self.states = [SavedState(*fields) for fields in state["states"]]
            self._last_number = state["consumed"]
            self._set_undone(state["undone"])

    def retain_again(self, table: Table, keys: Sequence[int], numbers: Sequence[int], permits: Sequence[bool]) -> None:
        """Notes that these rows, which were just loaded into `table`, were consumed and retained before the restart.

        `numbers` and `permits` are the fields of `Consumed` for each of `keys`.
        """
        for key, number, permit in zip(keys, numbers, permits, strict=True):
            self.rows[table.name, key] = Consumed(number, permit)

    def reconcile(self) -> None:
        """Sorts the loaded rows by their numbers. Discards rows that this configuration does not retain."""
        in_order = sorted(self.rows.items(), key=lambda entry: entry[1].number)
        self.rows = dict(in_order)
        self._trim()

    def check(self) -> None:
        """Asserts the invariants, as in Extension.

        `rows` must be exactly the rows that the tables retain. All of them were consumed after the oldest known state.
        """
        super().check()
        retained: set[tuple[str, int]] = set()
        for table in self.kernel.tables.values():
            retained.update((table.name, key) for key in table.columns.retained)
        assert self.rows.keys() == retained, self.rows.keys() ^ retained
        numbers = [consumption.number for consumption in self.rows.values()]
        assert numbers == sorted(set(numbers)), "rows are not in the order of their consumption"
        assert not numbers or numbers[-1] <= self._last_number, (numbers[-1], self._last_number)
        assert len(self.states) <= self._most_states, (len(self.states), self._most_states)
        moments = [state.moment for state in self.states]
        assert not numbers or numbers[0] > moments[0], "a row is retained that no state could bring back"
        assert moments == sorted(moments), self.states
        assert not moments or moments[-1] <= self._last_number, (moments[-1], self._last_number)
        for table in self.kernel.trained:
            assert table.undone == self.undone, (table.name, table.undone, self.undone)


def _last(states: list[SavedState], n: int) -> list[SavedState]:
    """The last n states, or all if there are fewer."""
    return states[-n:] if n else []  # states[-0:] would be all states
