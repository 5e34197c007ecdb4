"""Query: selects and sorts the groups of a snapshot that the page shows, and makes histograms of their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_dashboard.catalog import LISTED, Snapshot
from replay_dashboard.facts import COLUMNS, NOTES, Facts, FactsStore

HISTOGRAMS = ("reward_mean", "reward_std", "length_mean", "logprob_mean", "staleness", "times_sampled", "priority")
"""The columns of which the page draws histograms."""
BINS = 24
"""The number of bins of a histogram."""
SORTS = (*LISTED, *COLUMNS, "odd")
"""The columns that a query may name."""
FAR = 8.0
"""A group is odd if its mean length or log-probability is more than this many robust standard deviations from the
median."""
Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Query:
    """Filters for groups, and the order of the groups that pass all filters.

    The constructor raises ValueError for a column that is not in SORTS, and for a bound or a tag that does not have the
    form which its field states.
    """

    sort: str = "age"
    """The column by which to sort."""
    descending: bool = False
    bounds: tuple[str, ...] = ()
    """Each is `column:low:high`. A group's value in this column must be from `low` to `high`, including both."""
    flags: tuple[str, ...] = ()
    """A group must have all these flags."""
    tags: tuple[str, ...] = ()
    """Each is NAME=VALUE, as for `replay items --tag`. A group must have all these tags."""
    prompt: str = ""
    """A part of the prompt, of its name, or of a tag as NAME=VALUE; in lower case."""
    text: str = ""
    """A part of the text of the prompt or of a completion; in lower case."""

    def __post_init__(self) -> None:
        """Checks the columns, the bounds and the tags. Raises ValueError as the class says."""
        columns = [self.sort]
        columns += [name for name, _, _ in self.limits()]
        for column in columns:
            if column not in SORTS:
                raise ValueError(f"no column {column[:40]!r}; columns: {', '.join(SORTS)}")
        for tag in self.tags:
            if tag.find("=") < 1:  # there is no "=", or no name before it
                raise ValueError(f"tag {tag[:60]!r} is not NAME=VALUE, for example environment=math")

    def limits(self) -> list[tuple[str, float, float]]:
        """Reads the column, the lowest and the highest value of each bound. Raises ValueError for any other form."""
        limits = []
        for bound in self.bounds:
            parts = bound.split(":")
            if len(parts) != 3:
                raise ValueError(f"a bound is column:low:high, not {bound[:60]!r}")
            name, low, high = parts
            limits.append((name, float(low), float(high)))
        return limits


class View:
    """A snapshot, joined with the facts that are known at this moment."""

    def __init__(self, snapshot: Snapshot, facts: FactsStore) -> None:
        self.snapshot = snapshot
        self._facts = facts
        self._slots = snapshot.slots(facts)
        """(N,) The slot of each item's facts; -1: not read."""
        self._is_read = self._slots >= 0
        self._numbers = facts.numbers
        self._flags = facts.flags
        self._columns: dict[str, Floats] = {}
        """The results of `column`, by the name of the column."""
        self.read = int(self._is_read.sum())
        """The number of items whose payload has been read."""

    def column(self, name: str) -> Floats:
        """The values of a column (N,); NaN if a value is not known.

        "odd NAME" is the distance of each value of the column NAME from the median of this column, in robust standard
        deviations. "odd" is the larger one of the distances of length and log-probability.
        """
        if name not in self._columns:
            if name in LISTED:
                values = self.snapshot.columns[name]
            elif name == "odd":
                values = np.fmax(self.column("odd length_mean"), self.column("odd logprob_mean"))
            elif name.startswith("odd "):
                values = _distance(self.column(name.removeprefix("odd ")))
            else:
                # An item that was not read has slot -1. `where` replaces the number of this slot by NaN.
                numbers = self._numbers[self._slots, COLUMNS.index(name)]
                values = np.where(self._is_read, numbers, np.nan)
            self._columns[name] = values.astype(np.float64)
        return self._columns[name]

    def select(self, query: Query) -> Rows:
        """The rows that match a query, in the order that the query asks for.

        Rows whose value in the sort column is not known come last.
        """
        is_match = self.snapshot.have_tags(query.tags)
        with np.errstate(invalid="ignore"):  # a comparison with NaN, an unknown value, is False
            for name, low, high in query.limits():
                values = self.column(name)
                # Bounds are widened a little, because the page writes them with fewer digits than the columns have.
                is_match &= values >= low - 1e-6 * abs(low)
                is_match &= values <= high + 1e-6 * abs(high)
            for flag in query.flags:
                if flag == "odd":
                    is_match &= self.column("odd") > FAR
                else:
                    is_match &= self._have_flag(flag)
        if query.prompt or query.text:
            for row in np.flatnonzero(is_match):
                is_match[row] = self._has_text(row, query)
        matching_rows = np.flatnonzero(is_match)
        sort_values = self.column(query.sort)[matching_rows]
        if query.descending:
            sort_values = -sort_values  # to reverse the sorted rows instead would put NaN first
        return matching_rows[np.argsort(sort_values, kind="stable")]

    def _has_text(self, row: int, query: Query) -> bool:
        """True if the group of this row was read, and contains the `prompt` and the `text` of the query."""
        slot = self._slots[row]
        if slot < 0:
            return False
        facts = self._facts.rows[slot]
        about_prompt = " ".join([facts.prompt_id, facts.prompt, *self.snapshot.tags(row)]).lower()
        return query.prompt in about_prompt and query.text in facts.text

    def _have_flag(self, flag: str) -> npt.NDArray[np.bool_]:
        """True for each row (N,) whose group was read and has the flag."""
        names = self._facts.names
        if flag not in names:
            return np.zeros(len(self._slots), dtype=np.bool_)
        position = names.index(flag)  # the position of the flag's bit
        bits = (self._flags[self._slots] >> position) & 1
        have_flag: npt.NDArray[np.bool_] = self._is_read & (bits == 1)
        return have_flag

    def histograms(self, rows: Rows | slice = slice(None), names: Sequence[str] = HISTOGRAMS) -> dict[str, Any]:
        """Makes a histogram of each column of `names` that has a finite value, by the name of the column.

        `edges` are the edges of the bins. `all` has the number of items in each bin. `matching` has the number of items
        in each bin that are among `rows`.
        """
        result = {}
        for name in names:
            column = self.column(name)
            values = column[np.isfinite(column)]
            if not values.size:
                continue
            matching = column[rows]
            matching = matching[np.isfinite(matching)]
            is_whole = name in ("staleness", "times_sampled")
            edges = _edges(values, is_whole)
            all_counts, _ = np.histogram(values, edges)
            matching_counts, _ = np.histogram(matching, edges)
            result[name] = {"edges": edges, "all": all_counts, "matching": matching_counts}
        return result

    def flags(self) -> dict[str, int]:
        """The number of groups with each flag. Flags that no group has are left out."""
        counts = {name: int(self._have_flag(name).sum()) for name in self._facts.names}
        counts["odd"] = int((self.column("odd") > FAR).sum())
        return {name: count for name, count in counts.items() if count}

    def row(self, index: int) -> dict[str, Any]:
        """The item at the row `index` of the snapshot, as JSON.

        If the item was not read, only the values that the list of items contains are known.
        """
        slot = int(self._slots[index])
        document = {"key": str(self.snapshot.keys[index]), "read": slot >= 0}
        for name in (*LISTED, *COLUMNS):
            document[name] = self.column(name)[index]
        document["tags"] = self.snapshot.tags(index)
        if slot >= 0:
            facts = self._facts.rows[slot]
            document["prompt_id"] = facts.prompt_id
            document["prompt"] = facts.prompt
            document["notes"] = self._notes(index, facts)
            finish_flags = [flag for flag in facts.flags if flag.startswith("ended by ")]
            document["finish"] = sorted(flag.removeprefix("ended by ") for flag in finish_flags)
        return document

    def _notes(self, index: int, facts: Facts) -> list[str]:
        """The group's flags that are in NOTES, and notes that say whether its length or its log-probability is odd."""
        notes = [name for name in NOTES if name in facts.flags]
        if self.column("odd length_mean")[index] > FAR:
            notes.append("odd length")
        if self.column("odd logprob_mean")[index] > FAR:
            notes.append("odd log-prob")
        return notes


def _distance(values: Floats) -> Floats:
    """The distance of each value from the median, in robust standard deviations: 1.4826 * median absolute deviation.

    NaN if fewer than 20 values are known, because these are too few to call any of them odd.
    """
    known = values[np.isfinite(values)]
    if known.size < 20:
        return np.full(values.size, np.nan)
    middle = np.median(known)
    spread = 1.4826 * np.median(np.abs(known - middle))
    least_spread = max(0.05 * abs(middle), 1e-3)  # if almost all values are equal, small differences are not odd
    return np.asarray(np.abs(values - middle) / max(spread, least_spread))


def _edges(values: Floats, is_whole: bool) -> Floats:
    """The edges of the bins of a histogram of these values.

    `is_whole`: the values are whole numbers. Each number from the lowest to the highest then gets a bin of its own, if
    BINS bins are enough for them.
    """
    low = float(values.min())
    high = float(values.max())
    if is_whole and high - low < BINS:
        return np.arange(low - 0.5, high + 1.5, dtype=np.float64)
    if not high > low:  # all values are equal: one bin
        return np.array([low, low], dtype=np.float64)
    # The bins divide the range without outliers. The first and the last bin reach out to the outliers.
    inner_low, inner_high = np.quantile(values, [0.01, 0.99])
    if not inner_high > inner_low:
        inner_low, inner_high = low, high
    edges = np.linspace(inner_low, inner_high, BINS + 1, dtype=np.float64)
    edges[0] = low
    edges[-1] = high
    return edges
