"""Configuration of tables. Each value is checked once, here.

`replay_server/config.py` adds the sections about the server process.
"""

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
"""The largest priority, about the largest float32. A weight is priority ** exponent. Even with MAX_EXPONENT, a sum of
10^9 weights is finite in float64."""
MAX_EXPONENT = 7.0
"""The largest exponent of a priority: see MAX_PRIORITY."""
MIN_HALF_LIFE = 0.01
"""The shortest half-life, in policy versions. With a shorter one, only items of the newest version would be drawn."""
MAX_COUNT = 2**53
"""The largest count that a limiter's arithmetic in float64 keeps exact."""
MAX_INDEXED = 4
"""The most tags in the `index` of a table. Each of them costs 4 bytes per item, and some work at each insert."""
ENVIRONMENT = "environment"
"""The tag that names the environment of a group. Every table indexes it, and counts groups by its values."""
MAX_TAG_NAME = 64
"""The most bytes of the name of a tag. The names in settings have at most this many characters. This refuses no name
that an item can have, because a name has at least as many bytes as characters."""
MAX_TAG_TEXT = 256
"""The most bytes of the value of a tag, and the most characters of a value in settings."""
MAX_RETAINED_STATES = 1024
"""The most states of a trainer that a server remembers."""
MOST_REQUIRED = 16
"""The most columns that one table may require. An entry of `Columns.lacks` has this many bits, one for each column."""
TABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}\Z")
_UNITS = {"": 1, "B": 1}
"""Unit of a size, in capital letters -> the bytes of the unit. The loop adds KB, KIB, MB, MIB and so on."""
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power


def parse_bytes(value: Any) -> Any:
    """Converts a text such as `"32GiB"`, `"1.5 GB"` or `"4096"` into a number of bytes.

    Returns any other value as it is, because pydantic checks it afterwards.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write for example 4096, '512MiB' or '32GB'")
    unit = match[2].upper()
    return int(float(match[1]) * _UNITS[unit])


TagName = Annotated[str, Field(min_length=1, max_length=MAX_TAG_NAME)]
TagText = Annotated[str, Field(max_length=MAX_TAG_TEXT)]
Weight = Annotated[float, Field(ge=0, le=1e9)]
ColumnName = Annotated[str, Field(min_length=1, max_length=MOST_COLUMN_BYTES)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1, le=2**53)]


class _OneLine(ModelMetaclass):
    """Makes `TableConfig(...)` in Python fail as a configuration file does: with an error of one line.

    pydantic's own error has several lines. This metaclass catches that error, and raises a ValueError in its place. An
    `__init__` method of our models could not do this, because pydantic would call the method for nested models, too.
    The errors of nested models would then not say where in the configuration they are.
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
        """Refuses an unknown field with an error that names known fields. pydantic's own error does not name them."""
        if isinstance(value, dict):
            for name in value:
                if name not in cls.model_fields:
                    raise ValueError(unknown_name(name, cls.model_fields))
        return value


class _Tagged(Model):
    """A section whose `type` names a variant.

    A user may write only the name in the place of the section. This means the variant with its default settings.
    """

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        """Makes a section of the name alone, as in `sampler = "fifo"`."""
        return {"type": value} if isinstance(value, str) else value


class SelectorConfig(_Tagged):
    """The rule by which a table chooses the next item, to sample it (`sampler`) or to evict it (`remover`)."""

    type: Literal["fifo", "lifo", "uniform", "prioritized", "min_heap", "max_heap"]
    """The item that comes next: the oldest (`fifo`), the newest (`lifo`), any item at random (`uniform`), an item at
    random by priority (`prioritized`), or the item with the lowest (`min_heap`) or the highest priority (`max_heap`).
    If several items have this priority, the oldest of them comes next."""
    exponent: float = Field(1.0, ge=0.0, le=MAX_EXPONENT)
    """`prioritized` draws in proportion to priority ** exponent."""
    half_life: float | None = Field(None, ge=MIN_HALF_LIFE, le=MAX_COUNT)
    """The number of policy versions after which a priority counts half; absent: priorities do not age. Only for
    `prioritized`, `min_heap` and `max_heap`. For `prioritized`, it is priority ** exponent that counts half."""

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
                return selectors.Heap(columns, highest_first=self.type == "max_heap", half_life=self.half_life)
            case "uniform":
                return selectors.Uniform(columns)
            case "prioritized":
                return selectors.Prioritized(columns, exponent=self.exponent, half_life=self.half_life)


class RateLimiterConfig(_Tagged):
    """The rule by which inserting and sampling wait for each other. limiter.py has the formulas."""

    type: Literal["min_size", "sample_to_insert_ratio", "queue", "stack"]
    """`min_size`: sampling waits until the table has enough items. `sample_to_insert_ratio`: in addition, inserting and
    sampling keep a ratio. `queue`: each item is sampled once, the oldest first. `stack`: each item is sampled once, the
    newest first."""
    min_size: int = Field(1, ge=1, le=MAX_COUNT)
    """Sampling waits until the table has this many items. For `min_size` and `sample_to_insert_ratio`."""
    max_size: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Inserting waits while the table has this many items that were not sampled yet. Only for `queue` and `stack`,
    which need it."""
    samples_per_insert: float | None = Field(None, gt=0)
    """The ratio of samples to inserts. Only for `sample_to_insert_ratio`, which needs it."""
    error_buffer: float | tuple[float, float] | None = None
    """The bounds of the difference inserts * samples_per_insert - samples: a pair (min_diff, max_diff), or a number e,
    which means samples_per_insert * min_size ± e. Absent: e is 10 * max(1, samples_per_insert). Only for
    `sample_to_insert_ratio`."""

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
        if self.type == "min_size":  # the difference has no bounds, so only min_size decides
            return RateLimiter(samples_per_insert=1.0, min_size=self.min_size, min_diff=-math.inf, max_diff=math.inf)
        assert self.max_size is not None
        # A queue or stack: inserts - samples is the number of items that are not sampled yet, from 0 to max_size.
        return RateLimiter(samples_per_insert=1.0, min_size=1, min_diff=0.0, max_diff=float(self.max_size))


class BalanceConfig(Model):
    """Each draw first chooses a value of a tag, and then an item that has this value. balance.py has the formulas."""

    tag: TagName
    """The name of the tag. It is indexed without being named in `index`."""
    weights: dict[TagText, Weight] = Field(default_factory=dict, max_length=MAX_BALANCED)
    """The weight of each value, relative to the others. A value that is not named has weight 1. Items of a value with
    weight 0 are never drawn. An integer is named by its digits, as a text. The empty name `""` stands for items without
    the tag, which are one value together. If no item of a value can be drawn, its share goes to the other values."""


class TableConfig(Model):
    """One table.

    With `rate_limiter = queue`, three settings have other defaults: `sampler` and `remover` are "fifo", and
    `max_times_sampled` is 1. With `rate_limiter = stack`, the defaults are the same, except that `sampler` is "lifo".
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
    """The most bytes of payloads and labels; absent: only the bound of the server applies. Items that come back, from a
    requeued batch or because the trainer went back, may exceed `max_size` and `max_bytes` until the next insert."""
    max_times_sampled: int = Field(0, ge=0, le=MAX_COUNT)
    """An item leaves after it has been sampled this often; 0: items may be sampled without end."""
    rate_limiter: RateLimiterConfig = RateLimiterConfig(type="min_size")
    """The rule by which inserting and sampling wait for each other."""
    max_staleness: int | None = Field(None, ge=0, le=MAX_COUNT)
    """An item whose policy version lags by more than this many versions is dropped, and never delivered. Absent: no
    limit."""
    when_full: Literal["evict", "block", "reject"] = "evict"
    """The effect of an insert into a full table: the remover makes room, the insert waits, or the insert fails."""
    forward_to: str | None = None
    """The table that an item joins when it has been sampled here for the first time, unless its priority is 0."""
    copy_to: str | None = None
    """The table of copies, which an item joins when it is inserted here, for a reader such as `replay archive run`. The
    table of copies needs no declaration of its own. An insert must not name it, and never waits or fails because of
    it."""
    requires: tuple[ColumnName, ...] = Field((), max_length=MOST_REQUIRED)
    """Columns without which no item is sampled here. An item that lacks a column waits until `extend` has brought the
    column. While it waits, the item counts for the size and for the bound of a queue, but not for `min_size`."""
    seed: int | None = Field(None, ge=0)
    """The seed of the random selectors; absent: a seed from the operating system."""
    retain_consumed: int = Field(0, ge=0, le=MAX_RETAINED_STATES)
    """The number n of the trainer's last states to which it can go back. A state is a checkpoint that the trainer has
    named to the server. The table retains the items that were consumed since the oldest of these n states. 0: the table
    retains no items. Only for tables with `max_times_sampled = 1`, such as a queue or stack."""
    index: tuple[TagName, ...] = Field((), max_length=MAX_INDEXED)
    """Names of tags by which items are found in one pass over an array, without looking at each item."""
    balance: BalanceConfig | None = None
    """The tag whose values have fixed shares of the draws; absent: the sampler alone chooses. Not for a queue or
    stack."""

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
    """Returns one name as a tuple of names, and an empty value as an empty tuple. Other values stay as they are."""
    if isinstance(value, str):
        return (value,)
    return value or ()


class AdmissionConfig(Model):
    """The permits for generating groups.

    A request for n permits is granted if
    accepted + running + n <= (max_staleness + version + 1) * fresh_groups_per_step.
    extensions/admission.py explains these terms.
    """

    table: str | None = None
    """The table whose groups are trained on. Generators acquire permits for its groups. Absent: the only queue or stack
    with forward_to; if none has forward_to, the only queue or stack; if there is none, the only table."""
    fresh_groups_per_step: int = Field(ge=1, le=MAX_COUNT)
    """Fresh groups that the trainer uses for each policy version."""
    max_staleness: int = Field(ge=0, le=MAX_COUNT)
    """The most policy versions by which a group may lag when it is trained on; 0: on-policy."""
    permit_ttl: float = Field(600.0, gt=0)
    """Seconds after which a permit that was not used expires, so that another group can be generated."""
    permit_tables: Annotated[tuple[str, ...], BeforeValidator(_as_names)] = ()
    """The table of partial groups, or a list with a table for each stage, such as the stage of groups without rewards.
    These tables need no declarations of their own. An item that is inserted into such a table with a permit keeps the
    permit until it leaves. An item that takes the place of such an item takes over its permit. Absent: there is no such
    table."""


def with_named(admission: AdmissionConfig | None, tables: Sequence[TableConfig]) -> tuple[TableConfig, ...]:
    """Returns `tables` and the tables that a user need not declare: tables of copies and tables of partial groups.

    The settings of such a table follow from its use, unless the user declares the table and sets them: the oldest item
    comes first, and each item is drawn once. A table of partial groups evicts nothing, and drops groups that the
    admitted table would refuse as too old. Raises ValueError for settings that do not fit the use.
    """
    for source in tables:  # the tables as they were given, although the loop binds `tables` to longer sequences
        name = source.copy_to
        if name is None:
            continue
        targets = [table.copy_to for table in tables]
        if targets.count(name) > 1:
            raise ValueError(f"copy_to = {name!r} stands at two tables: copy each to a table of its own")
        bounds = {"max_size": 65_536, "max_bytes": 2 << 30}
        tables = _with_table(tables, name, use=f"copies of {source.name!r}", defaults=bounds)
    if admission is not None:
        for name in admission.permit_tables:
            admitted_name = admitted_table(admission, tables)
            if name == admitted_name:
                raise ValueError(
                    f"[admission] permit_tables = {name!r} is the table that is trained on: name another one"
                )
            admitted = next(table for table in tables if table.name == admitted_name)
            defaults = {"when_full": "block", "max_staleness": admitted.max_staleness}
            use = "partial groups ([admission] permit_tables)"
            tables = _with_table(tables, name, use=use, defaults=defaults)
    return tuple(tables)


def _with_table(
    tables: Sequence[TableConfig], name: str, *, use: str, defaults: dict[str, Any]
) -> Sequence[TableConfig]:
    """Returns `tables` with a table of this name, in which `defaults` are the settings that the user has not set.

    If `tables` already has a table of this name, that table gets the `defaults`. Otherwise a table is added. `use` says
    in errors what the table is for. Raises ValueError for settings that do not fit the use.
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
    """The name of the table that is trained on. Raises ValueError if it is not clear which table that is."""
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
    """The tables that may be the one that is trained on, if the configuration does not name it.

    These are the queues and stacks that forward. If no queue or stack forwards, these are all queues and stacks. If
    there is no queue or stack at all, these are all tables. Permit tables and tables of copies do not count, unless
    there are no others.
    """
    not_trained_on = {*admission.permit_tables, *(table.copy_to for table in tables)}
    others = [table for table in tables if table.name not in not_trained_on]
    if others:
        tables = others
    queues = [table for table in tables if table.rate_limiter.type in ("queue", "stack")]
    forwarding = [table for table in queues if table.forward_to is not None]
    return forwarding or queues or tables
