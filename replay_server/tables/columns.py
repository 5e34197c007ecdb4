"""Columns: the items of one table, in numpy arrays.

There is one array for each fact about items, such as the priority. Each item has a slot, which is its index in all of
these arrays. The entries of a slot are the row of its item. A slot is always in one of five states. These methods
change the state:

    FREE                     add                             ──▶ SELECTABLE
    SELECTABLE               WaitingRows.add                 ──▶ WAITING
    WAITING                  WaitingRows.complete or .clear  ──▶ SELECTABLE
    SELECTABLE or WAITING    reserve                         ──▶ RESERVED
    RESERVED                 return_rows                     ──▶ SELECTABLE
    RESERVED                 remove_reserved                 ──▶ FREE
    SELECTABLE or WAITING    leave                           ──▶ LEAVING
    LEAVING                  free                            ──▶ FREE

A row is reserved while it may come back. It has an owner. The first owner is the batch that has used up the row and may
still be requeued. If an extension retains the row, the extension becomes the owner when that batch is acknowledged. A
reserved row counts as gone for size, lookup, listing and removal. It keeps its slot and its facts. Therefore only its
state changes when it returns, and nobody has to carry a copy of the row.

A row waits while its item lacks a column that the table requires. It counts for size, lookup, listing and removal, but
no sampler holds it. `lacks` has a bit for each required column that its item lacks.

A row that is leaving counts as gone. `leave` marks even a million rows in one pass over an array. Afterwards, the
caller calls `free` for these rows: at once if they are few, and otherwise in slices.

A tag that the table indexes has a TagColumn: one small number for each slot, and the value that each number stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from replay_protos.labels import NO_LABELS, Labels

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
KeyArray = npt.NDArray[np.uint64]


FREE, LEAVING, RESERVED, WAITING, SELECTABLE = range(5)
"""The states of a slot. Only rows in the states WAITING and SELECTABLE are "here"."""

_HASH = 0x9E3779B97F4A7C15
"""The factor of Fibonacci hashing. It spreads consecutive keys evenly over the hashes. Clients choose such keys."""
_BITS = 64
"""The number of bits of a key."""
_FEW = 16
"""Fewer keys than this are faster to look up one by one."""


def power_of_two(least: int) -> int:
    """The smallest power of two that is not below `least`, which is 1 or more."""
    return 1 << (least - 1).bit_length()


def total(values: IntArray) -> int:
    """The sum of `values` (n,)."""
    if values.size == 1:  # most changes are of one row, for which numpy's sum takes ten times as long
        return int(values.item())
    return int(values.sum())


def costs(sizes: IntArray, labels: Sequence[Labels] | None) -> IntArray:
    """The bytes of each item, as (n,), that count for the bounds of the table and of the server.

    These are the bytes of its payload, which `sizes` (n,) has, plus the bytes of its labels, which `labels` (n,) has.
    `labels` None: no item has labels.
    """
    if labels is None:
        return sizes
    label_bytes: IntArray = np.array([item_labels.nbytes for item_labels in labels])
    return sizes + label_bytes


class RowFacts:
    """The facts about items that selectors read: an array for each fact, by slot."""

    def __init__(self, current_version: int = 0) -> None:
        self.current_version = current_version
        """The trainer's policy version. The staleness of an item counts from here."""
        self.priority = np.zeros(0)
        self.policy_version = np.zeros(0, dtype=np.int64)
        self.order = np.zeros(0, dtype=np.int64)
        """The number of the insertion, from 1."""
        self._free: list[int] = []
        """The slots that are free, each once."""

    def _claim(self, n: int) -> list[int]:
        """Removes n slots, at least 1, from the free slots, and returns them."""
        assert n > 0, "the last 0 entries of a list are all of them"
        lacking = n - len(self._free)
        if lacking > 0:
            self._grow(lacking)
        chosen = self._free[-n:]
        del self._free[-n:]
        assert len(chosen) == n, (len(chosen), n)
        return chosen

    def _grow(self, least: int) -> None:
        """Adds at least `least` free slots, and at least doubles the number of slots."""
        old_length = self.order.size
        needed = old_length + max(least, old_length)
        new_length = max(64, power_of_two(needed))
        self._lengthen(new_length)
        # The new slots are listed in descending order, because `_claim` takes slots from the end of the list. So it
        # takes the lowest slots first.
        self._free.extend(range(new_length - 1, old_length - 1, -1))

    def _lengthen(self, length: int) -> None:
        """Lengthens all arrays that are attributes of this object to `length` entries. The new entries are 0."""
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                grown = np.zeros(length, dtype=column.dtype)
                grown[: column.size] = column
                setattr(self, name, grown)

    def check_free(self, free: npt.NDArray[np.bool_]) -> None:
        """Asserts that the list of free slots agrees with `free` (slots,), which is True for each free slot."""
        listed = np.array(self._free, dtype=np.int64)
        assert listed.size == np.count_nonzero(free), (listed.size, np.count_nonzero(free))
        assert free[listed].all(), "a slot in use is listed as free"
        assert np.unique(listed).size == listed.size, "a slot is listed as free twice"


MAX_BALANCED = 1024
"""The most values of a tag that one table may balance. Items without the tag count as one value, "". The number is
bounded because each value has a selector of its own."""


class TagColumn:
    """The values of one indexed tag: a code for each slot, and the value of each code.

    Items without the tag have code 0. Values are compared as text. So the number 3 is the same value as the text "3",
    and the empty text is the same as no tag. A value that no slot has any more is forgotten, and its code is used
    again. So the memory grows with the number of values in use, and not with the number of values ever seen. A slot
    that is free or leaving has no value, and code 0.
    """

    def __init__(self, name: str, slots: int = 0) -> None:
        self.name = name
        self.codes = np.zeros(slots, dtype=np.int32)
        """By slot: the code of its value."""
        self.values: list[str] = [""]
        """By code: the value; "" for code 0 and for unused codes."""
        self._codes = {"": 0}
        """By value: its code."""
        self._rows = np.zeros(16, dtype=np.int64)
        """By code: the number of slots that have the code. But the entry of code 0 means nothing."""
        self._unused: list[int] = []
        """Codes without a value, to be used again."""

    def code(self, value: str) -> int | None:
        """The code of `value`; None if no item has this value."""
        return self._codes.get(value)

    def __len__(self) -> int:
        """The number of values. The value "" of items without the tag always counts."""
        return len(self._codes)

    def set(self, slots: IntArray, labels: Sequence[Labels]) -> None:
        """Fills new slots (n,) from the labels (n,) of their items."""
        # Many items share one Labels object. Each such object is looked at only once.
        distinct = {id(item_labels): item_labels for item_labels in labels}
        code_of: dict[int, int] = {}  # id of a Labels object -> the code of its value
        for identity, item_labels in distinct.items():
            code_of[identity] = self._known_or_new_code(item_labels.text(self.name))
        if not any(code_of.values()):
            return  # no item has the tag, and a new slot has code 0 already
        # There may be a million rows, so only built-in functions run for each row.
        code_of_each = map(code_of.__getitem__, map(id, labels))
        codes = np.fromiter(code_of_each, dtype=np.int32, count=slots.size)
        self.codes[slots] = codes
        counts = np.bincount(codes)
        self._rows[: counts.size] += counts

    def _known_or_new_code(self, text: str) -> int:
        """Returns the code of a value. Gives a new value a code that no value has."""
        known = self._codes.get(text)
        if known is not None:
            return known
        if self._unused:
            code = self._unused.pop()
            self.values[code] = text
        else:
            code = len(self.values)
            self.values.append(text)
            if code == self._rows.size:  # the array is full: double it
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._codes[text] = code
        return code

    def forget(self, slots: IntArray) -> None:
        """Removes the values of these slots (n,), which are distinct. Forgets the values that no slot has any more."""
        codes = self.codes[slots]
        self.codes[slots] = 0
        if not codes.any():  # no item had the tag
            return
        counts = np.bincount(codes, minlength=1)
        counts[0] = 0  # slots without a value are not counted
        self._rows[: counts.size] -= counts
        for code in np.flatnonzero(counts).tolist():
            assert self._rows[code] >= 0, f"more slots lose the value {self.values[code]!r} than have it"
            if not self._rows[code]:
                del self._codes[self.values[code]]
                self.values[code] = ""
                self._unused.append(code)

    def have(self, slots: IntArray, value: str) -> npt.NDArray[np.bool_]:
        """A mask (n,) of the `slots` (n,) that have `value`. Slots without a value have the value ""."""
        code = self.code(value)
        if code is None:
            return np.zeros(slots.size, dtype=np.bool_)
        return np.asarray(self.codes[slots] == code)

    def lengthen(self, slots: int) -> None:
        """Makes room for `slots` slots."""
        more = np.zeros(slots - self.codes.size, dtype=np.int32)
        self.codes = np.concatenate([self.codes, more])

    def check(self, state: npt.NDArray[np.uint8]) -> None:
        """Asserts that the counts fit the codes, and that all known values are in use. `state`: by slot."""
        assert self.codes.size == state.size, (self.codes.size, state.size)
        assert not self.codes[state < RESERVED].any(), "a slot that is free or leaving has a value"
        counts = np.bincount(self.codes, minlength=self._rows.size)
        assert np.array_equal(counts[1:], self._rows[1:]), (counts.tolist(), self._rows.tolist())
        codes_of_slots = 1 + np.flatnonzero(counts[1:])
        in_use = [0, *codes_of_slots.tolist()]  # code 0 counts as in use, even if no slot has it
        assert sorted(self._codes.values()) == in_use, "a value that no slot has is not forgotten"
        assert all(self.values[code] == value for value, code in self._codes.items())
        assert sorted([*in_use, *self._unused]) == list(range(len(self.values))), "a code is lost"


class Columns(RowFacts):
    """The facts, the state and the key of each slot. Slots are reused. Arrays double when they are full.

    A key has at most one row that is here, one row that a batch reserves, and one row that is retained.

    If there are a million items, each lookup in `_slots` waits for main memory several times. `find` therefore guesses
    the slots of many keys with arrays, because then the waits of many keys overlap. Afterwards, it looks up in `_slots`
    only the keys whose guess was wrong.
    """

    def __init__(self, current_version: int = 0, indexed: Iterable[str] = ()) -> None:
        """`indexed`: the names of the tags that get a TagColumn."""
        super().__init__(current_version)
        self.tags = {name: TagColumn(name) for name in indexed}
        self._slots: dict[int, int] = {}
        """By key: the slot of its row that is here. If only rows that are leaving have the key: the slot of the newest
        of them."""
        self._leaving = 0
        """The number of slots that are leaving."""
        self._size = 0
        """The number of items that are here."""
        self.reserved: dict[int, int] = {}
        """By key: the slot of the row that a batch reserves."""
        self.retained: dict[int, int] = {}
        """By key: the slot of the row that an extension retains."""
        self.state = np.zeros(0, dtype=np.uint8)
        """FREE, LEAVING, RESERVED, WAITING or SELECTABLE."""
        self.key = np.zeros(0, dtype=np.uint64)
        self.inserted_at = np.zeros(0)
        """The time of the insert: seconds of the server's clock."""
        self.size = np.zeros(0, dtype=np.int64)
        """Bytes of the payload."""
        self.cost = np.zeros(0, dtype=np.int64)
        """Bytes that count for bounds: see `costs`."""
        self.times_sampled = np.zeros(0, dtype=np.int64)
        """The number of draws of the item from this table, without draws that were undone."""
        self.lacks = np.zeros(0, dtype=np.uint16)
        """A bit for each column that a waiting row lacks, in the order in which the table requires them."""
        self._last_row = np.zeros(0, dtype=np.int64)
        """By slot: working memory of `last_rows`. It means nothing between two calls."""
        self._guess = np.zeros(0, dtype=np.int32)
        """By hash: the slot of the key with this hash that was added or returned last; -1: there was no such key."""
        self._shift = _BITS
        """The number of low bits that `_hashes` drops from a number of _BITS bits, so that an index of `_guess`
        remains."""

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: int) -> bool:
        return self.slot(key) is not None

    def slot(self, key: int) -> int | None:
        """The slot of `key`; None if it is not here."""
        slot = self._slots.get(key)
        if self._leaving and slot is not None and self.state[slot] < WAITING:  # the row is leaving
            return None
        return slot

    def absent(self, keys: Iterable[int]) -> list[int]:
        """The `keys` that are not here."""
        if self._leaving:
            return [key for key in keys if key not in self]
        # `_slots` has no keys of leaving rows now, so it answers directly, which takes a quarter of the time.
        return [key for key in keys if key not in self._slots]

    def leaving(self, key: int) -> int | None:
        """The slot of `key` if its row is leaving; None if no row of the key is leaving, or if a new row is here."""
        slot = self._slots.get(key)
        if slot is not None and self.state[slot] == LEAVING:
            return slot
        return None

    def find(self, keys: KeyArray) -> IntArray:
        """The slots (n,) of `keys` (n,); -1 for a key that is not here."""
        if keys.size < _FEW or not self._guess.size:
            return self._look_up(keys)
        slots = self._guess[self._hashes(keys)].astype(np.int64)
        # A guess of -1 means that no key of this hash was ever added, so the key is not here.
        is_guessed = slots >= 0
        is_other = (self.key[slots] != keys) | (self.state[slots] < WAITING)  # the key is not in the slot
        wrong = np.flatnonzero(is_guessed & is_other)
        slots[wrong] = self._look_up(keys[wrong])
        return slots

    def find_with_reserved(self, keys: KeyArray) -> IntArray:
        """As `find`, and also finds the rows that batches reserve."""
        slots = self.find(keys)
        if self.reserved:
            absent = np.flatnonzero(slots < 0)
            absent_keys: list[int] = keys[absent].tolist()
            slots[absent] = [self.reserved.get(key, -1) for key in absent_keys]
        return slots

    def _look_up(self, keys: KeyArray) -> IntArray:
        """As `find`, without a guess: one lookup for each key."""
        listed: list[int] = keys.tolist()
        # `map` over built-in functions is faster than a loop.
        slots = np.fromiter(map(self._slots.get, listed, repeat(-1)), dtype=np.int64, count=len(listed))
        if self._leaving:
            # For a key that was not found, the index -1 reads the state of the last slot. This does no harm, because
            # the result is -1 in any case.
            slots[self.state[slots] < WAITING] = -1
        return slots

    def _hashes(self, keys: KeyArray) -> KeyArray:
        """The hash of each of `keys` (n,), as an index of `_guess`: the highest bits of key * _HASH modulo 2 ** 64."""
        products = keys * np.uint64(_HASH)  # numpy computes modulo 2 ** 64
        return np.asarray(products >> np.uint64(self._shift))

    def last_rows(self, slots: IntArray) -> npt.NDArray[np.bool_]:
        """A mask (n,) over `slots` (n,), in which slots may repeat: True at the last occurrence of each slot."""
        rows = np.arange(slots.size)
        self._last_row[slots] = rows  # numpy keeps the last value of a repeated index
        return np.asarray(self._last_row[slots] == rows)

    def add(self, keys: Sequence[int]) -> IntArray:
        """Gives each of `keys` a slot, and sets the slot's key and state. Returns the slots (n,).

        The caller fills the other columns.
        """
        chosen = self._claim(len(keys))
        self._slots.update(zip(keys, chosen, strict=True))
        self._size += len(keys)
        assert self._leaving or len(self._slots) == self._size, "a key is here twice"
        slots = np.array(chosen, dtype=np.int64)
        if len(keys) == 1:  # most inserts are of one row, for which arrays are slow
            key = keys[0]
            slot = chosen[0]
            self.key[slot] = key
            product = (key * _HASH) & ((1 << _BITS) - 1)  # modulo 2 ** 64, as the array arithmetic of `_hashes`
            self._guess[product >> self._shift] = slot
        else:
            self.key[slots] = keys
            self._guess[self._hashes(self.key[slots])] = slots
        self.state[slots] = SELECTABLE
        return slots

    def grow(self, key: int, nbytes: int, cost: int) -> None:
        """Adds `nbytes` to the size of each row of `key`, and `cost` to its cost. Reserved and retained rows grow, too.

        `cost` is the sum of `nbytes` and the bytes of new labels.
        """
        for slot_of in (self._slots, self.reserved, self.retained):
            slot = slot_of.get(key)
            if slot is not None:
                self.size[slot] += nbytes
                self.cost[slot] += cost

    def reserve(self, slots: IntArray) -> None:
        """Reserves rows that are here, for a batch."""
        keys: list[int] = self.key[slots].tolist()
        for key in keys:
            assert key not in self.reserved, f"two batches reserve {key}"
            self.reserved[key] = self._slots.pop(key)
        self._size -= len(keys)
        self.state[slots] = RESERVED

    def return_rows(self, keys: Sequence[int]) -> IntArray:
        """Ends the reservation of `keys`: their rows are here again. Returns their slots (n,).

        The rows must have owners of one kind: either batches own all of these rows, or an extension does.
        """
        if keys and keys[0] in self.retained:
            owned = self.retained
        else:
            owned = self.reserved
        slots = np.array([owned.pop(key) for key in keys], dtype=np.int64)
        self._slots.update(zip(keys, slots.tolist(), strict=True))
        self._size += len(keys)
        assert self._leaving or len(self._slots) == self._size, "a row returns, and its key is here already"
        # Since a key was added, another key with the same hash may have replaced its guess. So set the guess again.
        self._guess[self._hashes(self.key[slots])] = slots
        self.state[slots] = SELECTABLE
        return slots

    def leave(self, slots: IntArray) -> None:
        """Marks these rows, which are here, as leaving: they count as gone. The caller calls `free` for them later."""
        self._size -= slots.size
        self._leaving += slots.size
        assert self._size >= 0, "rows leave that were not here"
        self.state[slots] = LEAVING
        for tag in self.tags.values():
            tag.forget(slots)

    def free(self, slots: IntArray) -> list[int]:
        """Frees slots that are leaving. Returns their keys."""
        self._leaving -= slots.size
        assert self._leaving >= 0, "slots are freed that were not leaving"
        keys: list[int] = self.key[slots].tolist()
        freed: list[int] = slots.tolist()
        for key, slot in zip(keys, freed, strict=True):
            if self._slots.get(key) == slot:  # otherwise the item was inserted again, and has another slot
                del self._slots[key]
        self.state[slots] = FREE
        self._free.extend(freed)
        return keys

    def retain(self, keys: Iterable[int]) -> None:
        """Makes an extension the owner of the rows of `keys`, which batches have reserved until now."""
        for key in keys:
            self.retained[key] = self.reserved.pop(key)

    def remove_reserved(self, keys: Iterable[int]) -> None:
        """Frees the slots of the rows of `keys` that a batch reserves. Rows that are retained by now stay.

        The caller acknowledges the batch.
        """
        freed = [self.reserved.pop(key) for key in keys if key in self.reserved]
        slots = np.array(freed, dtype=np.int64)
        self.state[slots] = FREE
        for tag in self.tags.values():
            tag.forget(slots)
        self._free.extend(freed)

    def occupied(self) -> IntArray:
        """The slots of all rows that are here, ascending.

        For a million rows this takes 1 ms. A loop over the rows would take 50 ms.
        """
        return np.flatnonzero(self.state >= WAITING)

    def used(self) -> IntArray:
        """The slots of all rows that are here, oldest first."""
        slots = self.occupied()
        return slots[np.argsort(self.order[slots], kind="stable")]

    def _grow(self, least: int) -> None:
        """Adds at least `least` free slots, and builds the guesses anew for the new number of slots."""
        # `_lengthen` lengthens all arrays, but `_guess` has a length of its own. So empty `_guess` until it is built
        # anew below.
        self._guess = np.zeros(0, dtype=np.int32)
        super()._grow(least)
        length = self.key.size
        for tag in self.tags.values():
            tag.lengthen(length)
        assert length & (length - 1) == 0, f"hashes choose among a power of two, not {length}"
        # `_guess` has four entries for each slot, so an index has log2(4 * length) = length.bit_length() + 1 bits.
        self._shift = _BITS - (length.bit_length() + 1)
        self._guess = np.full(4 * length, -1, dtype=np.int32)
        slots = self.occupied()
        self._guess[self._hashes(self.key[slots])] = slots

    def check_counts(self) -> None:
        """Asserts that the counts fit the states of the slots. It takes one pass over an array."""
        counts = np.bincount(self.state, minlength=SELECTABLE + 1).tolist()
        assert self._size == counts[WAITING] + counts[SELECTABLE], (self._size, counts)
        assert self._leaving == counts[LEAVING], (self._leaving, counts)
        assert len(self.reserved) + len(self.retained) == counts[RESERVED], (self.reserved, self.retained, counts)
        assert len(self._free) == counts[FREE], (len(self._free), counts)

    def check(self) -> None:
        """Asserts that the states of the slots, the counts, the lookups and the tags agree.

        It takes some passes over arrays, and no loop over the slots.
        """
        self.check_counts()
        self.check_free(self.state == FREE)
        for slot_of in (self.reserved, self.retained):
            slots = np.fromiter(slot_of.values(), dtype=np.int64, count=len(slot_of))
            assert self.key[slots].tolist() == list(slot_of), "a reservation names the slot of another key"
            assert (self.state[slots] == RESERVED).all(), "a reservation names a slot that is not reserved"
        here = self.occupied()
        assert np.array_equal(self.find(self.key[here]), here), "a key leads to the slot of another key"
        if not self._leaving:
            assert len(self._slots) == self._size, (len(self._slots), self._size)
        for tag in self.tags.values():
            tag.check(self.state)

    def check_each_key(self) -> None:
        """Asserts that the lookup of each key leads to its slot, without a guess. It takes one lookup for each item."""
        here = self.occupied()
        assert np.array_equal(self._look_up(self.key[here]), here)


class WaitingRows:
    """The rows of a table that wait because their items lack columns that the table requires.

    The labels of an item name its columns, so the server does not have to decode the payload.
    """

    def __init__(self, columns: Columns, requires: Sequence[str]) -> None:
        """`requires`: the names of the required columns. In `Columns.lacks`, the bit 1 << i is for the column i."""
        self._columns = columns
        self._requires = requires
        self._bit_numbers = np.arange(len(requires), dtype=np.uint16)
        self.count = 0
        """The number of rows that wait."""
        self._lacking = np.zeros(len(requires), dtype=np.int64)
        """By required column: the number of rows that wait for it."""

    def add(self, slots: IntArray, labels: Sequence[Labels] | None) -> IntArray:
        """Makes each of the rows (n,) wait if its item lacks a required column. Returns the slots of the other rows.

        `labels` (n,) are the labels of the items; None: no item has labels.
        """
        if labels is None:
            labels = [NO_LABELS] * slots.size
        # Most items have the same columns, so there are few different sets of columns.
        distinct = {item_labels.columns for item_labels in labels}
        lacks_of = {columns: self._lacks(columns) for columns in distinct}
        lacks = np.array([lacks_of[item_labels.columns] for item_labels in labels], dtype=np.uint16)
        waits = lacks > 0
        waiting = slots[waits]
        self._columns.state[waiting] = WAITING
        self._columns.lacks[waiting] = lacks[waits]
        self._count_rows(waiting, sign=1)
        return slots[~waits]

    def remove(self, slots: IntArray) -> IntArray:
        """Stops counting the rows among `slots` (n,) that wait. Returns the slots of the other rows.

        The table removes all of these rows from its selectors, and changes their states itself afterwards.
        """
        waits = self._columns.state[slots] == WAITING
        self._count_rows(slots[waits], sign=-1)
        return np.asarray(slots[~waits])

    def complete(self, slot: int, labels: Labels) -> bool:
        """Notes the new labels of the item of a waiting row. Ends the wait if the item now has all required columns.

        Returns True if the wait has ended.
        """
        columns = self._columns
        slots = np.array([slot])
        assert columns.state[slot] == WAITING, slot
        self._count_rows(slots, sign=-1)  # while `columns.lacks` still has the old bits of the row
        lacks = self._lacks(labels.columns)
        if lacks:
            columns.lacks[slot] = lacks
            self._count_rows(slots, sign=1)
            return False
        columns.state[slot] = SELECTABLE
        return True

    def clear(self) -> None:
        """Ends the wait of all rows, whatever they lack. The counts stay, because the caller replaces this object."""
        columns = self._columns
        columns.state[columns.state == WAITING] = SELECTABLE

    def lacking(self) -> dict[str, int]:
        """Name of each column that rows wait for -> the number of these rows."""
        rows_by_column = {}
        for name, rows in zip(self._requires, self._lacking.tolist(), strict=True):
            if rows:
                rows_by_column[name] = rows
        return rows_by_column

    def lacking_of(self, slots: IntArray) -> list[list[str]]:
        """For each of `slots` (n,): the names of the columns that its row waits for. Empty if the row does not wait."""
        lacks = np.where(self._columns.state[slots] == WAITING, self._columns.lacks[slots], 0)
        names = np.array(self._requires, dtype=object)
        return [names[mask].tolist() for mask in self._bits(lacks)]

    def words(self) -> str:
        """The wait in words, such as "14 wait for teacher_logprobs"; "" if no row waits."""
        if not self.count:
            return ""
        return f"{self.count} wait for {', '.join(self.lacking())}"

    def _lacks(self, columns: frozenset[str]) -> int:
        """The required columns that an item with these `columns` lacks, as the bits of `Columns.lacks`."""
        bits = 0
        for number, name in enumerate(self._requires):
            if name not in columns:
                bits |= 1 << number
        return bits

    def _count_rows(self, slots: IntArray, sign: int) -> None:
        """Counts the rows of `slots` (n,) as rows that begin to wait (`sign` 1) or end their wait (-1)."""
        self.count += sign * slots.size
        assert self.count >= 0, "rows end their wait that did not wait"
        is_lacking = self._bits(self._columns.lacks[slots])  # (n, required columns)
        self._lacking += sign * is_lacking.sum(axis=0)

    def _bits(self, lacks: npt.NDArray[np.uint16]) -> npt.NDArray[np.bool_]:
        """The bits of `lacks` (n,) as (n, required columns): True where a row lacks the column."""
        shifted = lacks[:, None] >> self._bit_numbers  # (n, required columns): the bit of each column is the lowest one
        return np.asarray((shifted & 1) > 0)

    def check(self) -> None:
        """Asserts that the counts fit the rows that wait."""
        waiting = np.flatnonzero(self._columns.state == WAITING)
        assert self.count == waiting.size, (self.count, waiting.size)
        lacks = self._bits(self._columns.lacks[waiting])
        assert lacks.any(axis=1).all(), "a row waits that lacks nothing"
        assert np.array_equal(self._lacking, lacks.sum(axis=0)), (self._lacking, lacks.sum(axis=0))
