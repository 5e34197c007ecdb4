"""Extension: what a server does beside its tables, as a part of the same changes: permits, histories, copies.

The kernel (tables, items, buffer, rules) says what happens, and knows no extension. An extension is told by its hooks,
within the operation that makes it happen. So what it does is part of the one change that clients see. Of hooks that are
called often, the kernel calls only those that an extension overrides.

* `why_…` says, and changes nothing. All others act, and none of them may fail: validate all, then apply all.
* An extension remembers of an item one small number, its `mark`, which is written in the item's record, and of the rest
  what `state_dict` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from replay_server.errors import Refused
from replay_server.tables.config import TableConfig
from replay_server.tables.items import Items
from replay_server.tables.remembered import Watcher
from replay_server.tables.table import InsertBatch, SampleBatch, Table
from replay_server.tables.waiting import Line


class ShardIndex(NamedTuple):
    """Which of the shards of a run this server is. They share the permits of a step."""

    number: int = 0
    """From 0."""
    shards: int = 1
    """0: others grant the share of this one."""


@dataclass(frozen=True)
class PolicyChange:
    """The trainer sets the version, and perhaps names the state of its own that it saves or goes back to."""

    before: int
    version: int
    rollback: bool
    shard_index: ShardIndex | None = None
    """None: as before."""
    state: str = ""


class Kernel(Protocol):
    """What an extension sees of the ReplayBuffer."""

    tables: dict[str, Table]
    items: Items
    batches: dict[int, tuple[Table, SampleBatch]]
    """The outstanding ones, by id."""
    watchers: list[Watcher]
    extensions: Sequence[Extension]
    trained: list[Table]
    """The tables that are no copies of others."""


class Extension:
    record = b""
    """The name of the record of its state; empty: it has none."""
    mark = 0
    """The mark of items in `marked`; 0: it marks none."""
    marked: set[int] = set()  # noqa: RUF012  # of extensions without marks
    """Keys of items."""
    lines: Mapping[str, Line[Any]] = {}
    """Requests that wait for the extension itself, by what they wait for."""

    @classmethod
    def of(cls, kernel: Kernel) -> Self | None:
        """The extension of this kind; None: the server has none."""
        return next((each for each in kernel.extensions if isinstance(each, cls)), None)

    def attach(self, kernel: Kernel) -> None:
        """Called once, when the tables are there and empty."""
        self.kernel = kernel

    def concerns(self, table: TableConfig) -> bool:
        """Whether the hooks about a table are called for this one."""
        return True

    # ------------------------------------------------------------------------------------------------ what happens

    def why_not(self, insert: InsertBatch) -> Refused | None:
        """Why an insert is refused, in any state of the tables."""

    def why_no_policy(self, change: PolicyChange) -> Refused | None:
        """Why a change of the policy is refused."""

    def on_insert(self, insert: InsertBatch) -> Iterable[Table]:
        """The items are there, and enter their tables next. Returns other tables that changed."""
        return ()

    def on_acknowledge(self, table: Table, batch: SampleBatch) -> Iterable[Table]:
        """A reader acknowledges a batch of the table. Rows that it used up leave next, unless they are retained.
        Returns other tables that changed."""
        return ()

    def on_lease(self, table: Table, batch: SampleBatch) -> Iterable[Table]:
        """A reader uses a batch, and may still lose it. Returns other tables that changed."""
        return ()

    def on_item_gone(self, keys: Sequence[int]) -> None:
        """Nobody can train on these items any more. Of an item it may be said twice: when only copies hold it, and when
        nothing does."""

    def on_policy(self, change: PolicyChange) -> None:
        """The policy has changed, and the tables have dropped what is too old for it."""

    def on_reset(self, table: Table) -> None:
        """The table is emptied next."""

    def progress(self) -> None:
        """The end of an operation that changed something: serves who waits for the extension."""

    # ------------------------------------------------------------------------------------------------ room

    def spares(self, key: int) -> int:
        """How many of the rows that hold an item `free` would discard."""
        return 0

    def spare_keys(self) -> Iterable[int]:
        """The items of which it would discard rows."""
        return ()

    def free(self, needed: float) -> bool:
        """Lets rows go to free so many bytes. Returns whether that frees any."""
        return False

    # ------------------------------------------------------------------------------------------------ state on disk

    def state_dict(self, offset: float) -> dict[str, Any]:
        """Times of the clock, plus `offset`."""
        return {}

    def load_state_dict(self, state: dict[str, Any] | None, offset: float, version: int) -> None:
        """`version`: the policy version that was loaded. None: the extension was not there when the state was
        written. Items are loaded afterwards."""

    def load_marked(self, keys: Sequence[int]) -> None:
        """These items, which are loaded, had its mark."""
        self.marked.update(keys)

    def reconcile(self) -> None:
        """Everything is loaded: makes it fit the configuration."""

    # ------------------------------------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Asserts what the extension states of itself, between two operations."""
        assert self.marked <= self.kernel.items.keys(), self.marked - self.kernel.items.keys()


def hooks(extensions: Iterable[Extension], name: str) -> tuple[Callable[..., Any], ...]:
    """The hooks of this name of those extensions that have it, in their order."""
    having = [each for each in extensions if getattr(type(each), name) is not getattr(Extension, name)]
    return tuple(getattr(each, name) for each in having)
