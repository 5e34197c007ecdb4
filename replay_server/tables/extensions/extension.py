"""Extension: a part of the server that acts on changes of the tables, such as permits, histories and copies.

The kernel (tables, items, buffer, rules) makes the changes, and knows no extension. The kernel calls the hooks of an
extension within the operation that makes a change. So what the extension does is part of the one change that clients
see. A hook that is called often is called only if an extension overrides it.

* A hook `why_…` only answers, and changes nothing. All other hooks act, and none of them may fail, because a change is
  validated as a whole before any part of it is applied.
* An extension can mark an item with one small number, its `mark`, which is written in the item's record. Everything
  else that the extension remembers is in its `state_dict`.
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
    """The index of this server among the shards of a run. The shards share the permits of a step."""

    number: int = 0
    """From 0."""
    shards: int = 1
    """The number of shards; 0: this shard grants nothing, because other shards grant its share."""


@dataclass(frozen=True)
class PolicyChange:
    """The trainer sets the policy version. It may also name a state that it has saved or, in a rollback, goes back to.

    A state of the trainer is one of its checkpoints.
    """

    before: int
    """The version until now."""
    version: int
    """The new version."""
    rollback: bool
    """True if the trainer goes back to `version`."""
    shard_index: ShardIndex | None = None
    """None: the index stays as it was."""
    state: str = ""
    """The id of the state; empty: the trainer names none."""


class Kernel(Protocol):
    """The part of the ReplayBuffer that an extension sees."""

    tables: dict[str, Table]
    """By name."""
    items: Items
    batches: dict[int, tuple[Table, SampleBatch]]
    """The outstanding batches, by id."""
    watchers: list[Watcher]
    extensions: Sequence[Extension]
    trained: list[Table]
    """All tables except tables of copies."""


class Extension:
    """The hooks that the kernel calls. A hook that an extension does not override does nothing."""

    record = b""
    """The name of the record of the extension's state; empty: it has no state."""
    mark = 0
    """The mark of items in `marked`; 0: the extension marks no items."""
    marked: set[int] = set()  # noqa: RUF012  # extensions that mark items have a set of their own
    """Keys of the marked items."""
    lines: Mapping[str, Line[Any]] = {}
    """The lines of the requests that the extension serves, by the name of what they wait for, such as "permits"."""

    @classmethod
    def of(cls, kernel: Kernel) -> Self | None:
        """The server's extension of this class; None: the server has none."""
        for extension in kernel.extensions:
            if isinstance(extension, cls):
                return extension
        return None

    def attach(self, kernel: Kernel) -> None:
        """Gives the extension its kernel. Called once, when the tables exist and are still empty."""
        self.kernel = kernel

    def concerns(self, table: TableConfig) -> bool:
        """True if the hooks about a table are called for this table."""
        return True

    # ------------------------------------------------------------------------------------------------ what happens

    def why_not(self, insert: InsertBatch) -> Refused | None:
        """The reason to refuse an insert; None: this extension does not refuse it.

        The reason does not depend on the items that the tables hold.
        """

    def why_no_policy(self, change: PolicyChange) -> Refused | None:
        """The reason to refuse a change of the policy; None: this extension does not refuse it."""

    def on_insert(self, insert: InsertBatch) -> Iterable[Table]:
        """Called when the items of an insert are stored, before they enter their tables.

        Returns the other tables that this has changed.
        """
        return ()

    def on_acknowledge(self, table: Table, batch: SampleBatch) -> Iterable[Table]:
        """Called when a reader acknowledges a batch of the table. Returns the other tables that this has changed.

        After this call, the rows that the batch has used up leave the table, unless they are retained.
        """
        return ()

    def on_lease(self, table: Table, batch: SampleBatch) -> Iterable[Table]:
        """Called when a reader gets a lease of a batch of the table. Returns the other tables that this has changed.

        The reader uses the batch from now on, but loses it if the lease ends before the acknowledgement.
        """
        return ()

    def on_item_gone(self, keys: Sequence[int]) -> None:
        """Called when nobody can train on these items any more.

        It may be called several times for one item: first when only copies and rows that are being removed hold the
        item, and last when nothing holds it.
        """

    def on_policy(self, change: PolicyChange) -> None:
        """Called after the policy has changed, when the tables have dropped the items that are too old for it."""

    def on_reset(self, table: Table) -> None:
        """Called before a reset empties the table."""

    def progress(self) -> None:
        """Serves requests that wait for the extension. Called at the end of an operation that changed something."""

    # ------------------------------------------------------------------------------------------------ room

    def spares(self, key: int) -> int:
        """The number of rows of an item that `free` would discard."""
        return 0

    def spare_keys(self) -> Iterable[int]:
        """The keys of the items whose rows `free` would discard."""
        return ()

    def free(self, needed: float) -> bool:
        """Discards rows until this has freed `needed` bytes, or no more rows can be discarded.

        Returns True if any bytes were freed.
        """
        return False

    # ------------------------------------------------------------------------------------------------ state on disk

    def state_dict(self, offset: float) -> dict[str, Any]:
        """The state of the extension, without marks.

        A time of the server's clock means nothing after a restart. So `offset` is added to it, which makes it a time of
        day.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any] | None, offset: float, version: int) -> None:
        """Loads the state of the extension. Called before items are loaded.

        `state` None: the server ran without this extension when it wrote its state. `offset` is subtracted from times
        of day, which makes them times of the server's clock. `version`: the policy version that was loaded.
        """

    def load_marked(self, keys: Sequence[int]) -> None:
        """Marks items that were just loaded, and that had the mark of the extension before the restart."""
        self.marked.update(keys)

    def reconcile(self) -> None:
        """Makes the state fit the configuration. Called when everything is loaded."""

    # ------------------------------------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Asserts the invariants of the extension. Called between two operations."""
        assert self.marked <= self.kernel.items.keys(), self.marked - self.kernel.items.keys()


def hooks(extensions: Iterable[Extension], name: str) -> tuple[Callable[..., Any], ...]:
    """The bound methods `name` of the extensions that override this method, in the order of the extensions."""
    overridden = []
    for extension in extensions:
        is_inherited = getattr(type(extension), name) is getattr(Extension, name)
        if not is_inherited:
            overridden.append(getattr(extension, name))
    return tuple(overridden)
