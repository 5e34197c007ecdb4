"""Query: which groups of a snapshot to show, in which order, and histograms of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_dashboard.catalog import LISTED, Snapshot
from replay_dashboard.facts import COLUMNS, NOTES, FactsStore

HISTOGRAMS = ("reward_mean", "reward_std", "length_mean", "logprob_mean", "staleness", "times_sampled", "priority")
BINS = 24
SORTS = (*LISTED, *COLUMNS, "odd")
FAR = 8.0
"""Robust standard deviations from the median; a group beyond is odd."""
Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Query:
    """Filters and an order. Bounds are inclusive; a group must have all flags. An unknown column raises ValueError."""

    sort: str = "age"
    descending: bool = False
    bounds: tuple[str, ...] = ()
    """Each `column:low:high`."""
    flags: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    """Each NAME=VALUE, as `replay items --tag` takes it; a group must have all."""
    prompt: str = ""
    """A part of the prompt, of its name, or of a tag as NAME=VALUE; in small letters."""
    text: str = ""

    def __post_init__(self) -> None:
        for column in (self.sort, *(name for name, _, _ in self.limits())):
            if column not in SORTS:
                raise ValueError(f"no column {column[:40]!r}; columns: {', '.join(SORTS)}")
        for tag in self.tags:
            if tag.find("=") < 1:
                raise ValueError(f"tag {tag[:60]!r} is not NAME=VALUE, for example environment=math")

    def limits(self) -> list[tuple[str, float, float]]:
        parts = [bound.split(":") for bound in self.bounds]
        if bad := [part for part in parts if len(part) != 3]:
            raise ValueError(f"a bound is column:low:high, not {':'.join(bad[0])[:60]!r}")
        return [(name, float(low), float(high)) for name, low, high in parts]


class View:
    """A snapshot, joined with the facts that are known at this moment."""

    def __init__(self, snapshot: Snapshot, facts: FactsStore) -> None:
        self.snapshot = snapshot
        self._facts = facts
        self._slots = snapshot.slots(facts)
        self._is_read = self._slots >= 0
        self._numbers, self._flags = facts.numbers, facts.flags
        self._columns: dict[str, Floats] = {}
        self.read = int(self._is_read.sum())
        """Groups whose payload has been read."""

    def column(self, name: str) -> Floats:
        """The values of a column, (N,); NaN where unknown."""
        if name not in self._columns:
            if name in LISTED:
                values = self.snapshot.columns[name]
            elif name == "odd":
                values = np.fmax(self.column("odd length_mean"), self.column("odd logprob_mean"))
            elif name.startswith("odd "):
                values = _distance(self.column(name[4:]))
            else:
                values = np.where(self._is_read, self._numbers[self._slots, COLUMNS.index(name)], np.nan)
            self._columns[name] = values.astype(np.float64)
        return self._columns[name]

    def select(self, query: Query) -> Rows:
        """The rows that match, sorted; rows whose value is unknown come last."""
        found = self.snapshot.have_tags(query.tags)
        with np.errstate(invalid="ignore"):
            for name, low, high in query.limits():
                found &= (self.column(name) >= low - 1e-6 * abs(low)) & (self.column(name) <= high + 1e-6 * abs(high))
            for flag in query.flags:
                found &= self.column("odd") > FAR if flag == "odd" else self._has(flag)
        if query.prompt or query.text:
            rows = self._facts.rows
            for row in np.flatnonzero(found):
                slot = self._slots[row]
                found[row] = slot >= 0 and (
                    query.prompt
                    in " ".join([rows[slot].prompt_id, rows[slot].prompt, *self.snapshot.tags(row)]).lower()
                    and query.text in rows[slot].text
                )
        chosen = np.flatnonzero(found)
        values = self.column(query.sort)[chosen]
        return chosen[np.argsort(-values if query.descending else values, kind="stable")]

    def _has(self, flag: str) -> npt.NDArray[np.bool_]:
        names = self._facts.names
        bit = names.index(flag) if flag in names else 63
        has: npt.NDArray[np.bool_] = self._is_read & ((self._flags[self._slots] >> bit & 1) == 1)
        return has

    def histograms(self, rows: Rows | slice = slice(None), names: Sequence[str] = HISTOGRAMS) -> dict[str, Any]:
        """A histogram of each column: its edges, the counts of all items (`all`), and of `rows` (`matching`)."""
        result = {}
        for name in names:
            values, matching = (each[np.isfinite(each)] for each in (self.column(name), self.column(name)[rows]))
            if values.size:
                edges = _edges(values, whole=name in ("staleness", "times_sampled"))
                counts = {"all": np.histogram(values, edges)[0], "matching": np.histogram(matching, edges)[0]}
                result[name] = {"edges": edges, **counts}
        return result

    def flags(self) -> dict[str, int]:
        """How many groups have each flag."""
        counts = {name: int(self._has(name).sum()) for name in self._facts.names}
        counts["odd"] = int((self.column("odd") > FAR).sum())
        return {name: count for name, count in counts.items() if count}

    def row(self, index: int) -> dict[str, Any]:
        """One row of the list, as JSON."""
        slot = int(self._slots[index])
        numbers = {name: self.column(name)[index] for name in (*LISTED, *COLUMNS)}
        document = {"key": str(self.snapshot.keys[index]), "read": slot >= 0} | numbers
        document["tags"] = self.snapshot.tags(index)
        if slot >= 0:
            facts = self._facts.rows[slot]
            notes = [name for name in NOTES if name in facts.flags]
            odd = {"odd length": "odd length_mean", "odd log-prob": "odd logprob_mean"}
            notes += [name for name, column in odd.items() if self.column(column)[index] > FAR]
            reasons = sorted(name.removeprefix("ended by ") for name in facts.flags - set(NOTES))
            document |= {"prompt_id": facts.prompt_id, "prompt": facts.prompt, "notes": notes, "finish": reasons}
        return document


def _distance(values: Floats) -> Floats:
    """How many robust standard deviations each value is from the median (1.4826 * median absolute deviation)."""
    known = values[np.isfinite(values)]
    if known.size < 20:
        return np.full(values.size, np.nan)
    middle = np.median(known)
    spread = 1.4826 * np.median(np.abs(known - middle))
    return np.asarray(np.abs(values - middle) / max(spread, 0.05 * abs(middle), 1e-3))


def _edges(values: Floats, whole: bool) -> Floats:
    low, high = float(values.min()), float(values.max())
    if whole and high - low < BINS:
        return np.arange(low - 0.5, high + 1.5, dtype=np.float64)
    if not high > low:
        return np.array([low, low], dtype=np.float64)
    # Outliers share the outer bins, so that one of them does not squeeze all others into one.
    near, far = np.quantile(values, [0.01, 0.99])
    edges = np.linspace(near, far, BINS + 1, dtype=np.float64) if far > near else np.linspace(low, high, BINS + 1)
    edges[0], edges[-1] = low, high
    return edges
