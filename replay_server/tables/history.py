"""History: the states that a trainer can go back to, and what tables have consumed since.

A trainer that goes back to an older state has to train again on what it consumed after that state. But a consumed row
is gone. So a table with `keep_consumed = n` keeps its consumed rows for a while. The trainer names each of its full
states to the server, when everything that the state contains is consumed. What was consumed since the n-th last named
state is kept; what is older is let go. Going back to a state returns the rows that were consumed after it.

        state 1 ──consumes a, b──▶ state 2 ──consumes c──▶ now                      kept with n = 2: a, b, c
                                      ◀──── back to 2: c returns ────┘              kept then: a, b; states 1, 2

A kept row is a reserved row whose batch was taken (columns.py). It keeps its slot, its facts and its item, so returning
it changes its state alone, as giving a batch back does. A selector that follows the order of insertion then gives it
before all newer rows. Moments are numbers: each consumed row gets the next one, and a state has that of the last row
before it. So "after the state" is one comparison, and it is the same after a restart.

* Where no table keeps, and before the first state is named, nothing is kept and nothing is remembered.
* A row returns once. A state stays known when the trainer has gone back to it; the later ones are forgotten.
* The bytes of kept rows count for the server. Kept rows are insurance and not data: what needs room gets theirs.
* Going back undoes versions. What they generated leaves all tables, and is refused until the trainer comes to them
  again: then nobody can tell both apart. Nothing else is rolled back: neither priorities, nor what left in other ways.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from replay_server.errors import invalid
from replay_server.tables.items import Items
from replay_server.tables.remembered import Watcher
from replay_server.tables.table import Table


@dataclass(frozen=True)
class SavedState:
    """A full state of the trainer, which contains all that was consumed before it."""

    id: str
    version: int
    moment: int
    """The number of the last row that was consumed before."""


class Consumed(NamedTuple):
    """When a row that is kept was consumed."""

    number: int
    permit: bool
    """Whether its item was inserted with a permit, and was used here for the first time."""


class History:
    def __init__(self, tables: Mapping[str, Table], items: Items, watchers: Sequence[Watcher], admitted: str) -> None:
        """`admitted`: the table whose inserts need permits; "": there is no admission."""
        self._tables = tables
        self._items = items
        self._watchers = watchers
        self._admitted = admitted
        self._most = max((table.config.keep_consumed for table in tables.values()), default=0)
        self.states: list[SavedState] = []
        """From the oldest to the newest."""
        self._consumed = 0
        """The number of the row that was consumed last."""
        self.rows: dict[tuple[str, int], Consumed] = {}
        """The kept rows by table and key, in the order of their consumption."""
        self.undone = 0
        """The newest policy version that was undone. Those from the current one to here do not exist any more."""

    @property
    def last_state(self) -> str:
        """The id of the state that was named last, or gone back to; "": there is none."""
        return self.states[-1].id if self.states else ""

    # ------------------------------------------------------------------------------------------------ keeping

    def keeps(self, table: Table) -> bool:
        """Whether what `table` consumes now is kept."""
        return bool(table.config.keep_consumed and self.states)

    def keep(self, table: Table, keys: Iterable[int], permits: Collection[int]) -> None:
        """`table` has consumed and kept these rows just now. `permits`: the keys of those whose permit it used."""
        for key in keys:
            self._consumed += 1
            self.rows[table.name, key] = Consumed(self._consumed, key in permits)
        self._items.freed = True  # for whoever needs it

    def let_go(self, table: Table, keys: Sequence[int]) -> None:
        """These kept rows leave for good."""
        for key in keys:
            del self.rows[table.name, key]
        if keys:
            table.on_leave(table.columns, table.columns.return_kept(keys))

    def holds_of(self, key: int) -> int:
        """How many kept rows this item has."""
        return sum(key in table.columns.kept for table in self._tables.values()) if self.rows else 0

    def make_room(self, needed: float) -> bool:
        """Lets kept rows go, the oldest first, to free `needed` bytes. Returns whether that frees any.

        Rows whose item is in a table too, or in a batch, are passed over: they cost nothing. Of an item that is
        archived, the archive is next. O(kept rows).
        """
        chosen: set[int] = set()
        for _, key in self.rows:
            archived = self._items.archive is not None and key in self._items.archive
            if key not in chosen and (item := self._items[key]).holders == self.holds_of(key) + archived:
                chosen.add(key)
                needed -= item.cost
                if needed <= 0:
                    break
        for table in self._tables.values() if chosen else ():
            keys = [key for key in table.columns.kept if key in chosen]
            table.counters.kept_dropped += len(keys)
            self.let_go(table, keys)
        return bool(chosen)

    def reset(self, table: Table) -> None:
        """The table is emptied: what it has kept goes, too."""
        self.let_go(table, list(table.columns.kept))

    def _trim(self) -> None:
        """Lets go what no known state could bring back."""
        self.states = self.states[-self._most :] if self._most else []
        for table in self._tables.values():
            if table.columns.kept:
                known = self.states[-table.config.keep_consumed :] if table.config.keep_consumed else []
                first = known[0].moment if known else self._consumed
                kept = table.columns.kept
                self.let_go(table, [key for key in kept if self.rows[table.name, key].number <= first])

    # ------------------------------------------------------------------------------------------------ states

    def check_new(self, id: str) -> None:
        """Raises Refused if the trainer cannot name a state so."""
        if any(state.id == id for state in self.states[:-1]):
            raise invalid(f"state {id!r} was named before, and others since: choose a new id for each state")

    def name(self, id: str, version: int) -> None:
        """The trainer has saved a state, which contains all that was consumed until now.

        What it named last it may name again: that changes nothing.
        """
        if self._most and id != self.last_state:
            self.states.append(SavedState(id, version, self._consumed))
            self._trim()

    def find(self, id: str, version: int) -> SavedState:
        """The state that the trainer goes back to. Raises Refused if it is not known, or of another version."""
        for state in self.states:
            if state.id == id:
                if state.version != version:
                    raise invalid(f"state {id!r} is of version {state.version}, and not of {version}")
                return state
        known = ", ".join(f"{state.id!r} (version {state.version})" for state in self.states)
        if not self._most:
            why = "no table of this server has keep_consumed"
        else:
            why = f"this server knows {known}" if known else "none was named since this server has its tables"
        raise invalid(f"there is no state {id!r} to go back to: {why}; without a state only the version goes back")

    def go_back(self, state: SavedState, current: int) -> None:
        """Returns to their tables what was consumed after `state`, and drops what later versions generated.

        `current`: the policy version until now.
        """
        self.states = self.states[: self.states.index(state) + 1]
        self.undone = max(self.undone, current)
        # Rows that have left and are not cleared away hold items whose permits may have to go back below.
        while self._items.leaving:
            self._items.leaving.clear_slice()
        for table in self._tables.values():
            after = [key for key in table.columns.kept if self.rows[table.name, key].number > state.moment]
            if after:
                self._restore(table, after)
        for table in self._tables.values():  # now that it is known whose permits are unused again
            if table is not self._items.archive:
                table.drop_versions(state.version, self.undone)

    def _restore(self, table: Table, keys: list[int]) -> None:
        items = self._items
        consumed = {key: self.rows.pop((table.name, key)) for key in keys}
        for watcher in self._watchers:
            watcher.changed(keys)
            for scope in table.scopes.of(keys):
                watcher.scope_changed(table.name, scope)
        table.restore(keys)
        if table.name == self._admitted:
            items.unused_permits.update(key for key, each in consumed.items() if each.permit)

    def is_undone(self, version: int, current: int) -> bool:
        """Whether the policy version was undone, and the trainer, now at `current`, has not come to it again."""
        return current < version <= self.undone

    # ------------------------------------------------------------------------------------------------ state on disk

    def state_dict(self) -> dict[str, Any]:
        """Everything but the rows."""
        states = [[state.id, state.version, state.moment] for state in self.states]
        return {"states": states, "consumed": self._consumed, "undone": self.undone}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.states = [SavedState(*each) for each in state["states"]]
        self._consumed, self.undone = state["consumed"], state["undone"]

    def keep_again(self, table: Table, keys: Sequence[int], consumed: Iterable[Consumed]) -> None:
        """These rows, which `table` has just got, were consumed and kept before the restart."""
        for key, each in zip(keys, consumed, strict=True):
            self.rows[table.name, key] = each

    def reconcile(self) -> None:
        """All rows are loaded: lets go what the configuration does not keep."""
        self.rows = dict(sorted(self.rows.items(), key=lambda row: row[1].number))
        self._trim()
