"""Counts the groups of each value of a tag: how many were generated, lost as too old, and sampled.

The server counts the groups that reach it, and how many of them are lost as too old. A generator gives up groups that
would be too old on arrival, and reports to the server how many it gave up for each value of their tag `environment`.
Both kinds of groups are lost for the same reason, so this module adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from replay_client.records import ServerInfo, TableInfo

ENVIRONMENT = "environment"
"""The tag by which generators count the groups that they gave up."""


@dataclass
class ValueCounts:
    """The groups of one value of a tag."""

    generated: int = 0
    """Groups that a generator began, as far as is known: inserted, refused as too old, or given up."""
    stale: int = 0
    """Groups that were refused, dropped or given up as too old, before anybody drew them."""
    sampled: int = 0
    """Groups that were drawn and acknowledged. For a queue, these are the groups trained on."""


@dataclass
class TagCounts:
    """The groups of one table, by the values of a tag."""

    tag: str
    values: dict[str, ValueCounts] = field(default_factory=dict)

    @property
    def generated(self) -> int:
        return sum(counts.generated for counts in self.values.values())

    @property
    def stale(self) -> int:
        return sum(counts.stale for counts in self.values.values())


def tag_counts(info: ServerInfo, table: TableInfo) -> Iterator[TagCounts]:
    """Yields the counts of a table's groups for each tag that they have. Leaves out tags with too many values."""
    given_up = _given_up(info, table.name)
    for counted_tag in table.tags:
        if counted_tag.too_many:  # the server has no counts of its values
            if counted_tag.name == ENVIRONMENT:
                given_up = {}  # without the server's counts, the groups given up would seem to be all groups
            continue
        counts = TagCounts(counted_tag.name)
        for value in counted_tag.values:
            counts.values[value.name] = ValueCounts(generated=value.generated, stale=value.stale, sampled=value.sampled)
        if counts.tag == ENVIRONMENT:
            _add_given_up(counts, given_up)
            given_up = {}  # these groups are counted now
        yield counts
    if given_up:  # the server has no counts by environment
        counts = TagCounts(ENVIRONMENT)
        _add_given_up(counts, given_up)
        yield counts


def _add_given_up(counts: TagCounts, given_up: Mapping[str, int]) -> None:
    """Adds the groups that generators gave up to `counts`. `given_up` has their number by the value of the tag."""
    for value, groups in given_up.items():
        value_counts = counts.values.setdefault(value, ValueCounts())
        value_counts.generated += groups
        value_counts.stale += groups


def _given_up(info: ServerInfo, table: str) -> dict[str, int]:
    """The numbers of groups that the generators of this table have given up, by environment.

    A client may report values of any type, so values of a wrong type are left out.
    """
    total: dict[str, int] = {}
    for _, settings in info.settings_of("generator"):
        given_up = settings.get("given_up")
        if table not in settings.get("tables", ()) or not isinstance(given_up, dict):
            continue
        for value, groups in given_up.items():
            if isinstance(groups, int) and groups > 0:
                total[value] = total.get(value, 0) + groups
    return total
