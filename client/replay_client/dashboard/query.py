"""Query: which groups of a snapshot to show, in which order, and histograms of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_client.dashboard.catalog import LISTED, Snapshot
from replay_client.dashboard.facts import COLUMNS, NOTES, FactsStore

HISTOGRAMS = ("reward_mean", "reward_std", "length_mean", "logprob_mean", "staleness", "times_sampled", "priority")
BINS = 24
SORTS = (*LISTED, *COLUMNS, "odd")
MOST_ROWS = 500
"""Rows of one answer."""
FAR = 8.0
"""Robust standard deviations from the median: a group beyond is called odd."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Query:
    """Filters and an order. Bounds are inclusive."""

    sort: str = "age"
    descending: bool = False
    bounds: tuple[tuple[str, float, float], ...] = ()
    prompt: str = ""
    finish: str = ""
    note: str = ""
    text: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Query:
        """From the parameters of a request: `min.reward_mean=0.5`. Raises ValueError for what does not exist."""
        limits: dict[str, list[float]] = {}
        for name, value in given.items():
            side, dot, column = name.partition(".")
            if dot and side in ("min", "max"):
                if column not in SORTS:
                    raise ValueError(f"{name[:60]!r}: no column of that name; columns: {', '.join(SORTS)}")
                limits.setdefault(column, [-np.inf, np.inf])[side == "max"] = float(value)
        sort, note = given.get("sort", "age"), given.get("note", "")
        if sort not in SORTS:
            raise ValueError(f"sort {sort[:40]!r}: one of {', '.join(SORTS)}")
        if note and note not in (*NOTES, "odd"):
            raise ValueError(f"note {note[:40]!r}: one of {', '.join(NOTES)}, odd")
        return cls(
            sort=sort,
            descending=given.get("descending") == "1",
            bounds=tuple((name, low, high) for name, (low, high) in sorted(limits.items())),
            prompt=given.get("prompt", "").lower(),
            finish=given.get("finish", ""),
            note=note,
            text=given.get("text", "").lower(),
        )


class View:
    """A snapshot with the facts known of it now."""

    def __init__(self, snapshot: Snapshot, facts: FactsStore) -> None:
        self.snapshot = snapshot
        self._facts = facts
        self._slots = snapshot.slots(facts)
        self._read = self._slots >= 0
        self._columns: dict[str, Floats] = {}

    @property
    def read(self) -> int:
        """Groups whose payload has been read."""
        return int(self._read.sum())

    def column(self, name: str) -> Floats:
        """(N,) NaN where it is not known."""
        if name in self.snapshot.columns:
            return self.snapshot.columns[name]
        if name not in self._columns:
            if name == "odd":
                values = np.fmax(*(_distance(self.column(each)) for each in ("length_mean", "logprob_mean")))
            else:
                values = np.where(self._read, self._facts.numbers[name][self._slots], np.nan).astype(np.float64)
            self._columns[name] = values
        return self._columns[name]

    def everything(self) -> npt.NDArray[np.int64]:
        """All rows, as they were listed."""
        return np.arange(len(self._slots))

    def select(self, query: Query) -> npt.NDArray[np.int64]:
        """Rows that match, in order; rows whose value is not known come last."""
        found = np.ones(len(self._slots), dtype=bool)
        with np.errstate(invalid="ignore"):
            for name, low, high in query.bounds:
                column = self.column(name).astype(np.float32)  # bounds come from float32 columns, as text
                found &= (column >= np.float32(low)) & (column <= np.float32(high))
        if query.finish:
            facts = self._facts
            bit = 1 << facts.reasons.index(query.finish) if query.finish in facts.reasons else 0
            found &= self._read & ((facts.finish[self._slots] & bit) != 0)
        if query.note == "odd":
            found &= self.column("odd") > FAR
        elif query.note:
            found &= self._read & ((self._facts.notes[self._slots] & 1 << NOTES.index(query.note)) != 0)
        if query.prompt or query.text:
            rows, slots = self._facts.rows, self._slots
            for row in np.flatnonzero(found):
                facts_of_row = rows[slots[row]] if slots[row] >= 0 else None
                found[row] = (
                    facts_of_row is not None
                    and (query.prompt in facts_of_row.prompt_id.lower() or query.prompt in facts_of_row.prompt.lower())
                    and (query.text in facts_of_row.text or (query.text in facts_of_row.prompt_id.lower()))
                )
        chosen = np.flatnonzero(found)
        values = self.column(query.sort)[chosen]
        return chosen[np.argsort(-values if query.descending else values, kind="stable")]

    def histograms(self, rows: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Of each of HISTOGRAMS: edges, and counts of all items and of `rows`."""
        result = {}
        for name in HISTOGRAMS:
            values = self.column(name)
            known = values[np.isfinite(values)]
            if not known.size:
                continue
            edges = _edges(known, whole=name in ("staleness", "times_sampled"))
            matching = values[rows]
            result[name] = {
                "edges": edges.tolist(),
                "all": np.histogram(known, edges)[0].tolist(),
                "matching": np.histogram(matching[np.isfinite(matching)], edges)[0].tolist(),
            }
        return result

    def facets(self) -> dict[str, dict[str, int]]:
        """How many groups have each note and each finish reason."""
        notes, finish = self._facts.notes[self._slots[self._read]], self._facts.finish[self._slots[self._read]]
        counts = {name: int(((notes >> bit) & 1).sum()) for bit, name in enumerate(NOTES)}
        with np.errstate(invalid="ignore"):
            counts["odd"] = int((self.column("odd") > FAR).sum())
        reasons = {name: int(((finish >> bit) & 1).sum()) for bit, name in enumerate(self._facts.reasons)}
        return {"notes": {n: c for n, c in counts.items() if c}, "finish": {n: c for n, c in reasons.items() if c}}

    def row(self, index: int) -> dict[str, Any]:
        """One row of the list."""
        slot = int(self._slots[index])
        document: dict[str, Any] = {"key": str(self.snapshot.keys[index]), "read": slot >= 0}
        document |= {name: float(self.column(name)[index]) for name in (*LISTED, *COLUMNS, "odd")}
        if slot >= 0:
            facts = self._facts.rows[slot]
            notes = [name for bit, name in enumerate(NOTES) if facts.notes >> bit & 1]
            if document["odd"] > FAR:
                far = _distance(self.column("length_mean"))[index] > FAR
                notes.append("odd length" if far else "odd log-prob")
            finish = sorted(facts.finish)
            document |= {"prompt_id": facts.prompt_id, "prompt": facts.prompt, "finish": finish, "notes": notes}
        return document


def _distance(values: Floats) -> Floats:
    """How many robust standard deviations each value is from the median (1.4826 * median absolute deviation)."""
    known = values[np.isfinite(values)]
    if known.size < 20:
        return np.full(values.size, np.nan)
    middle = np.median(known)
    spread = 1.4826 * np.median(np.abs(known - middle))
    return np.asarray(np.abs(values - middle) / max(spread, 0.05 * abs(middle), 1e-3))


def _edges(known: Floats, whole: bool) -> Floats:
    low, high = float(known.min()), float(known.max())
    if whole and high - low < BINS:
        return np.arange(low - 0.5, high + 1.5, dtype=np.float64)
    if not high > low:
        low, high = low - 0.5, low + 0.5
    return np.linspace(low, high, BINS + 1, dtype=np.float64)
