"""Configuration of tables: each value is checked once, here. `config.py` adds the sections of the process."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic._internal._model_construction import ModelMetaclass  # pydantic has no public name for it

from replay_protos.labels import MOST_COLUMN_BYTES
from replay_protos.settings import explain, unknown_name
from replay_server.tables import selectors
from replay_server.tables.columns import MAX_BALANCED, RowFacts
from replay_server.tables.limiter import RateLimiter, sample_to_insert_ratio
from replay_server.tables.selectors import Selector

MAX_PRIORITY = 3.4e38
"""The largest priority, about the largest float32. With MAX_EXPONENT, a sum of 10^9 weights stays finite in float64."""
MAX_EXPONENT = 7.0
"""The largest exponent of a priority: see MAX_PRIORITY."""
MIN_HALF_LIFE = 0.01
"""The shortest half-life, in policy versions. With a shorter one only the newest version would ever be drawn."""
MAX_COUNT = 2**53
"""The largest count that a limiter's arithmetic in float64 keeps exact."""
MAX_INDEXED = 4
"""The most tags in the `index` of a table: each costs 4 bytes an item, and some work at each insert."""
ENVIRONMENT = "environment"
"""The tag that names the environment of a group. Every table has a column for it, and counts by it."""
MAX_TAG_NAME = 64
"""Bytes of the name of a tag. Names in settings may have this many characters: no shorter bound is needed, because a
name has at least as many bytes as characters."""
MAX_TAG_TEXT = 256
"""Bytes of the value of a tag. Values in settings may have this many characters, as names may."""
MAX_RETAINED_STATES = 1024
"""The most states of a trainer that a server remembers."""
MOST_REQUIRED = 16
"""The most columns that one table may require: Columns.lacks has a bit for each."""
TABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}\Z")
_UNITS = {"": 1, "B": 1}
"""By the unit of a size, in capitals: its bytes."""
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power


def parse_bytes(value: Any) -> Any:
    """The bytes in a text such as `"32GiB"`, `"1.5 GB"` or `"4096"`. pydantic checks other values."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write for example 4096, '512MiB' or '32GB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


TagName = Annotated[str, Field(min_length=1, max_length=MAX_TAG_NAME)]
TagText = Annotated[str, Field(max_length=MAX_TAG_TEXT)]
Weight = Annotated[float, Field(ge=0, le=1e9)]
ColumnName = Annotated[str, Field(min_length=1, max_length=MOST_COLUMN_BYTES)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1, le=2**53)]


class _OneLine(ModelMetaclass):
    """Makes `TableConfig(...)` in Python fail as a configuration file does: with one line that names the remedy.

    pydantic's own error has several lines. This metaclass catches the error. An `__init__` of our models would not do:
    pydantic would call it for nested models too, and their errors would lose the place in the configuration.
    """

    def __call__(cls, *values: Any, **named: Any) -> Any:
        try:
            return super().__call__(*values, **named)
        except ValidationError as error:
            raise ValueError(f"{cls.__name__}: {explain(error)}") from None


class Model(BaseModel, metaclass=_OneLine):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        """Refuses an unknown field with an error that lists the known fields. pydantic's own message does not."""
        if isinstance(value, dict):
            for name in value:
                if name not in cls.model_fields:
                    raise ValueError(unknown_name(name, cls.model_fields))
        return value


class _Tagged(Model):
    """A section whose `type` names a variant. The name alone is short for the variant with its default settings."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        """Reads the name alone, as in `sampler = "fifo"`."""
        return {"type": value} if isinstance(value, str) else value


class SelectorConfig(_Tagged):
    """The choice of the next item."""

    type: Literal["fifo", "lifo", "uniform", "prioritized", "min_heap", "max_heap"]
    """The item that comes next. For each type in turn: the oldest, the newest, any at random, one at random by
    priority, the lowest priority, the highest priority. Ties go to the older item."""
    exponent: float = Field(1.0, ge=0.0, le=MAX_EXPONENT)
    """`prioritized` draws in proportion to priority ** exponent."""
    half_life: float | None = Field(None, ge=MIN_HALF_LIFE, le=MAX_COUNT)
    """Policy versions after which a priority counts half; absent: priorities do not age. For `prioritized` (there the
    half-life applies after the exponent), `min_heap` and `max_heap`."""

    @model_validator(mode="after")
    def _only_where_used(self) -> Self:
        """Refuses settings that the type ignores."""
        if "exponent" in self.model_fields_set and self.type != "prioritized":
            raise ValueError(f"exponent belongs to 'prioritized', not to {self.type!r}")
        if self.half_life is not None and self.type in ("fifo", "lifo", "uniform"):
            raise ValueError(f"half_life belongs to 'prioritized', 'min_heap' or 'max_heap', not to {self.type!r}")
        return self

    def build(self, columns: RowFacts) -> Selector:
        """A selector over items of `columns`."""
        match self.type:
            case "fifo" | "lifo":
                return selectors.Fifo(columns, newest_first=self.type == "lifo")
            case "min_heap" | "max_heap":
                return selectors.Heap(columns, self.type == "max_heap", self.half_life)
            case "uniform":
                return selectors.Uniform(columns)
            case "prioritized":
                return selectors.Prioritized(columns, self.exponent, self.half_life)


class RateLimiterConfig(_Tagged):
    """The rule by which inserting and sampling wait for each other; formulas in limiter.py."""

    type: Literal["min_size", "sample_to_insert_ratio", "queue", "stack"]
    """The rule. For each type in turn: the table keeps a least size; the table keeps a ratio of samples to inserts;
    each item is sampled once, the oldest first; each item is sampled once, the newest first."""
    min_size: int = Field(1, ge=1, le=MAX_COUNT)
    """Sampling waits for this many items (`min_size`, `sample_to_insert_ratio`)."""
    max_size: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Inserting waits while this many items have not been sampled (`queue`, `stack`: needed)."""
    samples_per_insert: float | None = Field(None, gt=0)
    """The ratio to keep (`sample_to_insert_ratio`: needed)."""
    error_buffer: float | tuple[float, float] | None = None
    """The deviation from the ratio that is allowed: a number e, or a pair of min_diff and max_diff
    (`sample_to_insert_ratio`)."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        """Refuses settings that the type ignores, lacks or cannot satisfy."""
        allowed = {
            "min_size": {"min_size"},
            "sample_to_insert_ratio": {"min_size", "samples_per_insert", "error_buffer"},
            "queue": {"max_size"},
            "stack": {"max_size"},
        }[self.type]
        extra = self.model_fields_set - allowed - {"type"}
        if extra:
            raise ValueError(f"{self.type!r} takes {', '.join(sorted(allowed))}; not {', '.join(sorted(extra))}")
        if self.type in ("queue", "stack") and self.max_size is None:
            raise ValueError(f"{self.type!r} needs max_size, for example {{ type = {self.type!r}, max_size = 512 }}")
        if self.type == "sample_to_insert_ratio" and self.samples_per_insert is None:
            raise ValueError("'sample_to_insert_ratio' needs samples_per_insert")
        self.build()  # raises ValueError for bounds that no table could satisfy
        return self

    def build(self) -> RateLimiter:
        """A new limiter, whose counters are 0. Raises ValueError for bounds that no table could satisfy."""
        if self.type == "sample_to_insert_ratio":
            assert self.samples_per_insert is not None
            return sample_to_insert_ratio(self.samples_per_insert, self.min_size, self.error_buffer)
        # The arguments of RateLimiter: samples_per_insert, min_size, min_diff, max_diff.
        if self.type == "min_size":  # an infinite range: only min_size decides
            return RateLimiter(1.0, self.min_size, -math.inf, math.inf)
        assert self.max_size is not None
        # A queue or stack: inserts - samples is the number of items that are not sampled yet, from 0 to max_size.
        return RateLimiter(1.0, 1, 0.0, float(self.max_size))


class BalanceConfig(Model):
    """Draws choose a value of a tag first, and then an item that has it; formulas in balance.py."""

    tag: TagName
    """The name of the tag. It is indexed without being named in `index`."""
    weights: dict[TagText, Weight] = Field(default_factory=dict, max_length=MAX_BALANCED)
    """The weight of each value, relative to the others. A value that is not named has weight 1. Items of a value with
    weight 0 are never drawn. An integer is named by its digits. The empty name `""` stands for items without the tag,
    which are one value together. If no item of a value can be drawn, its share goes to the other values."""


class TableConfig(Model):
    """One table.

    `rate_limiter = queue` also means `sampler = remover = "fifo"` and `max_times_sampled = 1`, and `stack` the same
    with "lifo" as the sampler, unless they are set.
    """

    name: str
    """The name by which clients call the table: letters, digits, '_', '-' and '.'."""
    sampler: SelectorConfig = SelectorConfig(type="uniform")
    """The choice of the next item to sample."""
    remover: SelectorConfig = SelectorConfig(type="fifo")
    """The choice of the next item to evict when the table is full, among the old items and the new one."""
    max_size: int = Field(1_000_000, ge=1, le=MAX_COUNT)
    """The most items."""
    max_bytes: Bytes | None = None
    """The most bytes of payloads and labels; absent: no bound but the server's. Items that come back, from a requeued
    batch or because the trainer went back, may exceed `max_size` and `max_bytes` until the next insert."""
    max_times_sampled: int = Field(0, ge=0, le=MAX_COUNT)
    """An item leaves after it has been sampled this often; 0: items may be sampled without end."""
    rate_limiter: RateLimiterConfig = RateLimiterConfig(type="min_size")
    """The rule by which inserting and sampling wait for each other."""
    max_staleness: int | None = Field(None, ge=0, le=MAX_COUNT)
    """An item whose policy version lags by more versions is dropped and never delivered; absent: no limit."""
    when_full: Literal["evict", "block", "reject"] = "evict"
    """The effect of an insert into a full table: the remover makes room, the insert waits, or the insert fails."""
    forward_to: str | None = None
    """The table that an item joins when it has been sampled here for the first time, unless its priority is 0."""
    copy_to: str | None = None
    """The table that an item joins when it is inserted here, for a reader such as `replay archive run`. The name here
    declares that table. An insert may not name that table, and never waits or fails because of it."""
    requires: tuple[ColumnName, ...] = Field((), max_length=MOST_REQUIRED)
    """Columns without which no item is sampled here. An item that lacks a column waits until `extend` has brought the
    column. Meanwhile the item counts for the size and for the bound of a queue, but not for `min_size`."""
    seed: int | None = Field(None, ge=0)
    """The seed of the random selectors; absent: a seed from the operating system."""
    retain_consumed: int = Field(0, ge=0, le=MAX_RETAINED_STATES)
    """The number n of states that a trainer can go back. The table retains the items consumed since the n-th last state
    that the trainer named. 0: the table retains no items. For a queue or stack."""
    index: tuple[TagName, ...] = Field((), max_length=MAX_INDEXED)
    """Names of tags by which items are found in one pass over an array, without looking at each item."""
    balance: BalanceConfig | None = None
    """Draws have fixed shares of the values of a tag; absent: the sampler alone chooses. Not for a queue or stack."""

    @model_validator(mode="before")
    @classmethod
    def _queue_defaults(cls, value: Any) -> Any:
        """Adds the settings that a queue or stack implies, unless they are set. `value`: what pydantic is to parse."""
        if not isinstance(value, dict):
            return value
        limiter = value.get("rate_limiter")
        if isinstance(limiter, dict):
            kind = limiter.get("type")
        else:
            kind = getattr(limiter, "type", limiter)  # a RateLimiterConfig, or the name alone
        if kind == "queue":
            return {"sampler": "fifo", "remover": "fifo", "max_times_sampled": 1} | value
        if kind == "stack":
            return {"sampler": "lifo", "remover": "fifo", "max_times_sampled": 1} | value
        return value

    @model_validator(mode="after")
    def _checked(self) -> Self:
        """Refuses names that are not allowed, and settings that do not fit each other."""
        if not TABLE_NAME.match(self.name):
            raise ValueError(f"table name {self.name!r}: letters, digits, '_', '-' and '.', at most 128 of them")
        for field in ("requires", "index"):
            names = getattr(self, field)
            if len(set(names)) < len(names):
                raise ValueError(f"table {self.name!r}: {field} names one twice: {', '.join(names)}")
        if self.name in (self.forward_to, self.copy_to):
            raise ValueError(f"table {self.name!r} cannot forward or copy to itself")
        if self.balance is not None and self.rate_limiter.type in ("queue", "stack"):
            raise ValueError(
                f"table {self.name!r}: balance is not for a {self.rate_limiter.type}: a full {self.rate_limiter.type} "
                f"of one value and a draw that waits for another would wait for ever; forward its items to a table "
                f"with balance"
            )
        if self.retain_consumed and self.max_times_sampled != 1:
            raise ValueError(
                f"table {self.name!r}: retain_consumed = {self.retain_consumed} is for a table whose items leave when "
                f"they are sampled: make it a queue or stack (max_times_sampled = 1), or leave retain_consumed out"
            )
        if self.max_size < self.rate_limiter.min_size:
            raise ValueError(
                f"table {self.name!r} could never be sampled: max_size {self.max_size} is below the rate limiter's "
                f"min_size {self.rate_limiter.min_size}"
            )
        return self

    @property
    def indexed(self) -> tuple[str, ...]:
        """The tags that have a column: the tags in `index`, the tag of `balance`, and `environment`."""
        names = [*self.index, ENVIRONMENT]
        if self.balance is not None:
            names.append(self.balance.tag)
        return tuple(dict.fromkeys(names))


def _as_names(value: Any) -> Any:
    """One name as a tuple of names, and None as an empty tuple. Other values stay as they are."""
    if isinstance(value, str):
        return (value,)
    return value or ()


class AdmissionConfig(Model):
    """Permits for generation: accepted + running + n <= (max_staleness + version + 1) * fresh_groups_per_step."""

    table: str | None = None
    """The table whose groups are trained on: generators acquire permits for its groups. Absent: the only queue or stack
    with forward_to, else the only queue or stack, else the only table."""
    fresh_groups_per_step: int = Field(ge=1, le=MAX_COUNT)
    """Fresh groups that the trainer uses for each policy version."""
    max_staleness: int = Field(ge=0, le=MAX_COUNT)
    """Policy versions that a group may lag by when it is trained on; 0: on-policy."""
    permit_ttl: float = Field(600.0, gt=0)
    """Seconds until an unused permit goes back."""
    permit_tables: Annotated[tuple[str, ...], BeforeValidator(_as_names)] = ()
    """The table of partial groups, or a list with a table for each stage, such as the stage of groups without rewards.
    The name here declares the table. An item that comes into such a table with a permit, or in the place of such an
    item, keeps that permit until it leaves. Absent: there is no such table."""


def with_named(admission: AdmissionConfig | None, tables: Sequence[TableConfig]) -> tuple[TableConfig, ...]:
    """Adds the tables that a user need not declare: of partial groups, and of copies.

    Settings of these tables that the user leaves out follow from the use of the table. The oldest item comes first, and
    each item is drawn once. A table of partial groups evicts nothing, and drops groups that the admitted table would
    refuse as too old. Raises ValueError for settings that do not fit the use.
    """
    for source in tables:  # the tables as they were given, although the loop binds `tables` to longer sequences
        name = source.copy_to
        if name is None:
            continue
        if [table.copy_to for table in tables].count(name) > 1:
            raise ValueError(f"copy_to = {name!r} stands at two tables: copy each to a table of its own")
        bounds = {"max_size": 65_536, "max_bytes": 2 << 30}
        tables = _with(tables, name, f"copies of {source.name!r}", bounds)
    if admission is not None:
        for name in admission.permit_tables:
            admitted = admitted_table(admission, tables)
            if name == admitted:
                raise ValueError(
                    f"[admission] permit_tables = {name!r} is the table that is trained on: name another one"
                )
            trained_on = [table for table in tables if table.name == admitted]
            defaults = {"when_full": "block", "max_staleness": trained_on[0].max_staleness}
            tables = _with(tables, name, "partial groups ([admission] permit_tables)", defaults)
    return tuple(tables)


def _with(tables: Sequence[TableConfig], name: str, use: str, defaults: dict[str, Any]) -> Sequence[TableConfig]:
    """Adds the table of this name with `defaults`, or completes the declared table of this name by `defaults`.

    `use` says in errors what the table is for.
    """
    fields: dict[str, Any] = {"sampler": "fifo", "remover": "fifo", "max_times_sampled": 1}
    fields |= defaults
    declared = [table for table in tables if table.name == name]
    if declared:  # only the settings that the user has set replace the defaults
        fields |= declared[0].model_dump(exclude_unset=True)
    else:
        fields["name"] = name
    completed = TableConfig.model_validate(fields)
    # An item must not come back, or go on to another table, after its reader has acknowledged it.
    if completed.max_times_sampled != 1 or completed.forward_to or completed.copy_to or completed.retain_consumed:
        raise ValueError(
            f"table {name!r} is of {use}: leave out max_times_sampled, forward_to, copy_to and retain_consumed"
        )
    if declared:
        return [completed if table.name == name else table for table in tables]
    return [*tables, completed]


def admitted_table(admission: AdmissionConfig, tables: Sequence[TableConfig]) -> str:
    """The name of the table that is trained on. Raises ValueError if it is not clear which one that is."""
    if admission.table is not None:
        if all(table.name != admission.table for table in tables):
            names = ", ".join(table.name for table in tables)
            raise ValueError(f"[admission] table = {admission.table!r}: there is no such table; tables: {names}")
        return admission.table
    candidates = _candidates(admission, tables)  # empty only if no table is configured
    if len(candidates) == 1:
        return candidates[0].name
    names = ", ".join(table.name for table in candidates)
    example = f"[admission] table = {candidates[0].name!r}" if candidates else "[[tables]]"
    raise ValueError(
        f"[admission] does not say which table is trained on, and {names} could be: name it, for example {example}"
    )


def _candidates(admission: AdmissionConfig, tables: Sequence[TableConfig]) -> Sequence[TableConfig]:
    """The tables of which one may be the table that is trained on.

    These are the queues and stacks that forward. If no queue or stack forwards: all queues and stacks. If there is no
    queue or stack at all: all tables. Permit tables and tables of copies do not count, unless there are no others.
    """
    not_trained_on = {*admission.permit_tables, *(table.copy_to for table in tables)}
    others = [table for table in tables if table.name not in not_trained_on]
    if others:
        tables = others
    queues = [table for table in tables if table.rate_limiter.type in ("queue", "stack")]
    forwarding = [table for table in queues if table.forward_to is not None]
    return forwarding or queues or tables
