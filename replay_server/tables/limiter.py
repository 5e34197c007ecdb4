"""RateLimiter decides when a table may be inserted into and sampled from.

    can_sample(n):  size >= min_size  and  inserts * spi - samples - n >= min_diff
    can_insert(n):  size + n <= min_size  or  (inserts + n) * spi - samples <= max_diff

with size = inserts - deletes, and spi = samples_per_insert. These are Reverb's inequalities (google-deepmind/reverb,
reverb/cc/rate_limiter.cc).

An item that leaves changes `size`, but usually not the difference inserts * spi - samples. In two cases, however, the
samples that the item can no longer give count as samples. Their number is spi minus the number of times that the item
was sampled, if that is above 0.

* In a queue or stack, they count for every item that leaves, because the difference is the number of places in use.
* In other tables, they count for items that are dropped as stale or undone.

Items that wait for a column do not count as `size` in can_sample, because they cannot be sampled yet. They count
everywhere else, so they take places in a queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class RateLimiter:
    """The limiter of one table, with four constants, and with three counters that begin at 0 after a reset.

    The size of the limiter is the size of the table. No counter is below 0, and `min_diff` is at most `max_diff`.
    """

    samples_per_insert: float
    min_size: int
    min_diff: float
    max_diff: float
    inserts: int = 0
    samples: float = 0
    """The number of drawn samples, plus the samples that items could no longer give when they left (`Table._drop`).

    The sum may be a fraction.
    """
    deletes: int = 0

    @property
    def size(self) -> int:
        """The number of items in the table."""
        return self.inserts - self.deletes

    def check(self, size: int) -> None:
        """Asserts that the counters fit a table with `size` items."""
        assert self.size == size, f"inserts {self.inserts} less deletes {self.deletes}, size of the table {size}"
        assert self.deletes >= 0, self.deletes
        assert self.samples >= 0, self.samples
        assert self.min_diff <= self.max_diff, (self.min_diff, self.max_diff)

    def can_insert(self, n: int) -> bool:
        """True if `n` items may be inserted at once, now."""
        return (
            self.inserts + n - self.deletes <= self.min_size
            or (self.inserts + n) * self.samples_per_insert - self.samples <= self.max_diff
        )

    def can_sample(self, n: int, waiting: int = 0) -> bool:
        """True if `n` items may be sampled at once, now. `waiting` items of the table wait for a column."""
        return (
            self.inserts - self.deletes - waiting >= self.min_size
            and self.inserts * self.samples_per_insert - self.samples - n >= self.min_diff
        )

    def most_samples(self, waiting: int = 0) -> float:
        """The number of items that may be sampled now, one after the other. It may be infinite."""
        if self.size - waiting < self.min_size:
            return 0
        most = self.inserts * self.samples_per_insert - self.samples - self.min_diff
        if math.isfinite(most):
            return max(0, math.floor(most))
        return most

    def largest_batch(self) -> float:
        """The size of the largest batch that can ever be sampled at once.

        A larger batch would wait for ever, because inserting stops before the table has enough items for the batch.
        """
        # Inserts raise the difference inserts * spi - samples up to max_diff. The first min_size items may be inserted
        # even if they raise the difference above max_diff.
        largest_difference = max(self.max_diff, self.samples_per_insert * self.min_size)
        return largest_difference - self.min_diff  # after the sample, the difference must not be below min_diff

    def why_no_insert(self, n: int) -> str:
        """Says why `n` items may not be inserted: in words, then by the inequality that does not hold.

        Call it only if `can_insert(n)` is false.
        """
        spi = self.samples_per_insert
        difference = (self.inserts + n) * spi - self.samples
        if spi == 1 and self.min_diff == 0:  # a queue or stack
            # Without the n new items, the difference is the number of items that are not sampled yet.
            words = f"it is full, {difference - n:.12g} of {self.max_diff:.12g} items are not sampled yet"
        else:
            words = "inserts are too far ahead of samples"
        return (
            f"{words} (({self.inserts} inserts + {n}) * {spi:.12g} - {self.samples:.12g} samples = {difference:.12g} "
            f"> max_diff {self.max_diff:.12g})"
        )

    def why_no_sample(self, n: int, waiting: int = 0, words: str = "") -> str:
        """Says why `n` items may not be sampled: in words, then by the inequality that does not hold.

        Call it only if `can_sample(n, waiting)` is false. `waiting` items of the table wait for columns, and `words`
        says so with the names of the columns.
        """
        ready = self.size - waiting
        if ready < self.min_size:
            size = f"size {self.size} - {words}, which leaves {ready}" if words else f"size {ready}"
            return f"items there: {ready}, wanted: {self.min_size} ({size} < min_size {self.min_size})"
        spi = self.samples_per_insert
        difference = self.inserts * spi - self.samples - n
        return (
            f"items that may be sampled now: {self.most_samples(waiting):.12g}, wanted: {n} "
            f"({self.inserts} inserts * {spi:.12g} - {self.samples:.12g} samples - {n} requested = "
            f"{difference:.12g} < min_diff {self.min_diff:.12g})"
        )


def sample_to_insert_ratio(spi: float, min_size: int, error_buffer: float | tuple[float, float] | None) -> RateLimiter:
    """Makes a limiter that keeps samples / inserts near `spi`, which is above 0.

    error_buffer: a number e keeps the difference inserts * spi - samples within spi * min_size ± e. A pair is
    (min_diff, max_diff). None: e is 10 * max(1, spi).

    Raises ValueError if the range from min_diff to max_diff is so narrow that inserts and samples would block each
    other for ever. Raises it also if min_diff is so high that sampling could not begin with min_size items.
    """
    middle = spi * min_size
    if isinstance(error_buffer, tuple):
        least, most = error_buffer
    else:
        if error_buffer is None:
            # With the narrowest range, e = max(1, spi), inserts and samples would often have to wait for each other.
            # Ten times this error leaves room.
            error = 10 * max(1.0, spi)
        else:
            error = error_buffer
        least = middle - error
        most = middle + error
    # An insert raises the difference by spi, and a sample lowers it by 1. The range must be at least twice as wide as
    # the larger of these steps.
    narrowest = 2 * max(1.0, spi)
    if not most - least >= narrowest:  # not written as `<`, because this must also reject NaN
        raise ValueError(
            f"max_diff {most:.12g} - min_diff {least:.12g} must be at least 2 * max(1, samples_per_insert) = "
            f"{narrowest:.12g}, or inserts and samples block each other: widen error_buffer"
        )
    if least > middle:  # after min_size inserts the difference is `middle`, which would not allow a sample yet
        raise ValueError(
            f"min_diff {least:.12g} is above samples_per_insert * min_size = {middle:.12g}: sampling would begin later "
            f"than min_size says; lower min_diff or raise min_size"
        )
    return RateLimiter(samples_per_insert=spi, min_size=min_size, min_diff=least, max_diff=most)
