"""Config: everything that a TOML file or Python may set, checked once, here."""

from __future__ import annotations

import difflib
import re
import tomllib
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from replay_server import rate_limiters, selectors
from replay_server.columns import Columns
from replay_server.rate_limiters import RateLimiter
from replay_server.selectors import Selector

MAX_PRIORITY = 3.4e38
"""The largest priority (about float32's). With the largest exponent, a sum of 10^9 weights stays finite in float64."""
MAX_EXPONENT = 7.0
MAX_COUNT = 2**53
"""The largest count that a limiter's arithmetic in float64 keeps exact."""
TABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}\Z")
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"], _UNITS[f"{_letter}IB"] = 1000**_power, 1024**_power


def parse_bytes(value: Any) -> Any:
    """`"32GiB"`, `"1.5 GB"` or a plain number, as bytes."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write for example 4096, '512MiB' or '32GB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1, le=2**53)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        """Names what there is beside what there is not, which pydantic's own message does not."""
        if isinstance(value, dict) and (unknown := [name for name in value if name not in cls.model_fields]):
            near = difflib.get_close_matches(str(unknown[0]), cls.model_fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(cls.model_fields)}"
            raise ValueError(f"there is no {str(unknown[0])[:100]!r}; {hint}")
        return value


class _Tagged(_Model):
    """A variant named by `type`; its name alone is the short form."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value


class SelectorConfig(_Tagged):
    """How the next item is chosen."""

    type: Literal["fifo", "lifo", "uniform", "prioritized", "min_heap", "max_heap"]
    """The oldest, the newest, any, by priority at random, the lowest priority, the highest. Ties go to the older."""
    exponent: float = Field(1.0, ge=0.0, le=MAX_EXPONENT)
    """`prioritized` draws in proportion to priority ** exponent."""

    @model_validator(mode="after")
    def _exponent_only_where_used(self) -> Self:
        if "exponent" in self.model_fields_set and self.type != "prioritized":
            raise ValueError(f"exponent belongs to 'prioritized', not to {self.type!r}")
        return self

    def build(self, columns: Columns) -> Selector:
        """A selector over the items of `columns`."""
        match self.type:
            case "fifo" | "lifo":
                return selectors.Fifo(columns, newest_first=self.type == "lifo")
            case "min_heap" | "max_heap":
                return selectors.Heap(columns, highest_first=self.type == "max_heap")
            case "uniform":
                return selectors.Uniform(columns)
            case "prioritized":
                return selectors.Prioritized(columns, self.exponent)


class RateLimiterConfig(_Tagged):
    """When inserting and sampling wait for each other; formulas in rate_limiters.py."""

    type: Literal["min_size", "sample_to_insert_ratio", "queue", "stack"]
    """What is kept: a least size, a ratio of samples to inserts, or that each item is sampled once, in order or the
    newest first."""
    min_size: int = Field(1, ge=1, le=MAX_COUNT)
    """Sampling waits for this many items (`min_size`, `sample_to_insert_ratio`)."""
    max_size: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Inserting waits while this many items have not been sampled (`queue`, `stack`: needed)."""
    samples_per_insert: float | None = Field(None, gt=0)
    """The ratio to keep (`sample_to_insert_ratio`: needed)."""
    error_buffer: float | tuple[float, float] | None = None
    """How far the ratio may be off: e, or (min_diff, max_diff) (`sample_to_insert_ratio`)."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        allowed = {
            "min_size": {"min_size"},
            "sample_to_insert_ratio": {"min_size", "samples_per_insert", "error_buffer"},
            "queue": {"max_size"},
            "stack": {"max_size"},
        }[self.type]
        if extra := self.model_fields_set - allowed - {"type"}:
            raise ValueError(f"{self.type!r} takes {', '.join(sorted(allowed))}; not {', '.join(sorted(extra))}")
        if self.type in ("queue", "stack") and self.max_size is None:
            raise ValueError(f"{self.type!r} needs max_size, for example {{ type = {self.type!r}, max_size = 512 }}")
        if self.type == "sample_to_insert_ratio" and self.samples_per_insert is None:
            raise ValueError("'sample_to_insert_ratio' needs samples_per_insert")
        self.build()
        return self

    def build(self) -> RateLimiter:
        """A limiter that has seen nothing yet. Raises ValueError for bounds that nothing could satisfy."""
        if self.type == "sample_to_insert_ratio":
            assert self.samples_per_insert is not None
            return rate_limiters.sample_to_insert_ratio(self.samples_per_insert, self.min_size, self.error_buffer)
        if self.type == "min_size":
            return rate_limiters.min_size(self.min_size)
        assert self.max_size is not None
        return rate_limiters.queue(self.max_size)


class TableConfig(_Model):
    """One table.

    `rate_limiter = queue` also means `sampler = remover = "fifo"` and `max_times_sampled = 1`, and `stack` the same
    with "lifo" as the sampler, unless they are set.
    """

    name: str
    """What clients call it: letters, digits, '_', '-' and '.'."""
    sampler: SelectorConfig = SelectorConfig(type="uniform")
    """Which item comes next when sampling."""
    remover: SelectorConfig = SelectorConfig(type="fifo")
    """Which item goes first when the table is full."""
    max_size: int = Field(1_000_000, ge=1, le=MAX_COUNT)
    """The most items."""
    max_bytes: Bytes | None = None
    """The most payload bytes; absent: no bound but the server's."""
    max_times_sampled: int = Field(0, ge=0, le=MAX_COUNT)
    """An item leaves after it has been sampled this often; 0: never."""
    rate_limiter: RateLimiterConfig = RateLimiterConfig(type="min_size")
    """When inserting and sampling wait for each other."""
    max_staleness: int | None = Field(None, ge=0, le=MAX_COUNT)
    """An item whose policy version lags by more is dropped and never delivered; absent: no limit."""
    when_full: Literal["evict", "block", "reject"] = "evict"
    """What an insert into a full table does: let the remover make room, wait, or fail."""
    forward_to: str | None = None
    """The table that an item joins when it has been sampled here for the first time, unless its priority is 0."""
    seed: int | None = Field(None, ge=0)
    """Of the random selectors; absent: from the operating system."""

    @model_validator(mode="before")
    @classmethod
    def _queue_defaults(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        limiter = value.get("rate_limiter")
        kind = limiter.get("type") if isinstance(limiter, dict) else getattr(limiter, "type", limiter)
        if kind not in ("queue", "stack"):
            return value
        sampler = "fifo" if kind == "queue" else "lifo"
        return {"sampler": sampler, "remover": "fifo", "max_times_sampled": 1} | value

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if not TABLE_NAME.match(self.name):
            raise ValueError(f"table name {self.name!r}: letters, digits, '_', '-' and '.', at most 128 of them")
        if self.forward_to == self.name:
            raise ValueError(f"table {self.name!r} cannot forward to itself")
        if self.max_size < self.rate_limiter.min_size:
            raise ValueError(
                f"table {self.name!r} could never be sampled: max_size {self.max_size} is below the rate limiter's "
                f"min_size {self.rate_limiter.min_size}"
            )
        limit = self.rate_limiter.max_size
        if limit is not None and self.max_times_sampled != 1:
            warnings.warn(
                f"table {self.name!r}: a {self.rate_limiter.type} with max_times_sampled = {self.max_times_sampled} "
                f"keeps items that were sampled, yet admits only {limit} inserts more than samples",
                stacklevel=2,
            )
        if self.remover.type in ("prioritized", "max_heap"):
            warnings.warn(
                f"table {self.name!r}: remover {self.remover.type!r} evicts high priorities first; to keep them use "
                f"'min_heap', or 'fifo'",
                stacklevel=2,
            )
        return self


class AdmissionConfig(_Model):
    """Permits for generation: accepted + running + n <= (max_staleness + version + 1) * groups_per_step."""

    groups_per_step: int = Field(ge=1, le=MAX_COUNT)
    """Fresh groups that the trainer uses for each policy version."""
    max_staleness: int = Field(ge=0, le=MAX_COUNT)
    """Policy versions that a group may lag by when it is trained on; 0: on-policy."""
    permit_ttl: float = Field(600.0, gt=0)
    """Seconds until an unused permit goes back."""


class ServerSection(_Model):
    """The process."""

    address: str = "127.0.0.1:7400"
    """host:port where clients find the server. Port 0: a free one; 0.0.0.0: every address of this machine."""
    metrics_address: str | None = None
    """host:port where Prometheus finds the metrics, over HTTP and without a token; absent: nowhere."""
    data_dir: Path | None = None
    """Where items are stored durably; absent: memory only."""
    fsync: Literal["always", "never"] | float = 1.0
    """When the disk is told to make sure of what was written: before each acknowledgement, every so many seconds, or
    never. That a process is killed costs nothing under any of them; that the machine fails may."""
    max_bytes: Bytes | None = None
    """The most payload bytes of all tables together."""
    max_payload_bytes: Bytes = 1 << 30
    """The largest single item."""

    @field_validator("fsync", mode="before")
    @classmethod
    def _how_often(cls, value: Any) -> Any:
        seconds = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if value not in ("always", "never") and not seconds:
            raise ValueError("must be 'always', 'never' or a number of seconds above 0")
        return value

    @field_validator("address", "metrics_address")
    @classmethod
    def _host_and_port(cls, address: str | None) -> str | None:
        if address is not None:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or int(port) > 65535:
                raise ValueError("must be host:port, for example 127.0.0.1:7401, and the port at most 65535")
        return address


class SecuritySection(_Model):
    """Who may talk to the server. All files are in PEM format but the tokens' (see security.Tokens)."""

    tls_cert: Path | None = None
    """The server's certificate and those between it and the root; absent: connections are not encrypted."""
    tls_key: Path | None = None
    """Its private key."""
    tls_client_ca: Path | None = None
    """Clients must have a certificate of one of these authorities (mutual TLS)."""
    tokens_file: Path | None = None
    """Clients must have one of these tokens; absent: REPLAY_TOKENS_FILE or REPLAY_TOKENS, else no token is wanted."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca asks clients for certificates, which needs tls_cert and tls_key")
        return self


class LimitsSection(_Model):
    """What clients share; what a single request may ask for is in limits.py. Each connection counts as a client."""

    max_connections: int = Field(4096, ge=1, le=1_000_000)
    """Connections at a time; more are refused."""
    max_streams_per_connection: int = Field(1024, ge=1, le=1_000_000)
    """Calls, streams included, that one connection has open; the client keeps back more."""
    max_calls: int = Field(16_384, ge=1, le=10_000_000)
    """Calls of all connections together; more are refused."""
    max_unfinished_bytes: Bytes = 2 << 30
    """Bytes of items that are not complete yet, half of it for one connection at most; who comes later waits. At least
    the largest item (max_payload_bytes)."""
    max_waiting_bytes: Bytes = 4 << 30
    """Bytes of complete items that wait for their table, half of it for one connection at most; more are refused."""
    stall_timeout: float = Field(60.0, gt=0)
    """Seconds that a client may take for the next piece of an item that it sends, and to read one that it asked for."""


class CheckpointsSection(_Model):
    """Copies of the whole server, each in a file of its own."""

    dir: Path | None = None
    """Where they lie; absent: `checkpoints` in `data_dir`."""
    every_minutes: float | None = Field(None, gt=0, le=1e6)
    """Minutes from one to the next; absent: only those that are asked for."""
    keep: int = Field(3, ge=1)
    """How many of those without a name of their own stay; the older ones are removed."""
    on_stop: bool = False
    """Whether the server makes one when it stops."""


class Config(_Model):
    """A whole server."""

    server: ServerSection = ServerSection()
    security: SecuritySection = SecuritySection()
    limits: LimitsSection = LimitsSection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    admission: AdmissionConfig | None = None
    tables: tuple[TableConfig, ...] = Field(default=(), validate_default=True)

    @field_validator("tables", mode="before")
    @classmethod
    def _at_least_one(cls, value: Any) -> Any:
        if not value or isinstance(value, dict):
            raise ValueError("write [[tables]], in two brackets, once for each table; there must be one at least")
        return value

    @model_validator(mode="after")
    def _checked(self) -> Self:
        by_name = {table.name: table for table in self.tables}
        if len(by_name) < len(self.tables):
            raise ValueError(f"table names must differ: {', '.join(table.name for table in self.tables)}")
        for table in self.tables:
            path, step = [table.name], table
            while step.forward_to is not None:
                if step.forward_to not in by_name:
                    raise ValueError(
                        f"table {step.name!r} forwards to {step.forward_to!r}, which does not exist; "
                        f"tables: {', '.join(by_name)}"
                    )
                if step.forward_to in path:
                    raise ValueError(f"forward_to goes round in a circle: {' -> '.join([*path, step.forward_to])}")
                step = by_name[step.forward_to]
                path.append(step.name)
        if self.checkpoint_dir is None and (self.checkpoints.every_minutes or self.checkpoints.on_stop):
            raise ValueError("checkpoints need a place: set dir in [checkpoints], or data_dir in [server]")
        return self

    @property
    def checkpoint_dir(self) -> Path | None:
        """Where checkpoints are written; None: nowhere."""
        if self.checkpoints.dir is None and self.server.data_dir is not None:
            return self.server.data_dir / "checkpoints"
        return self.checkpoints.dir

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Reads a TOML file. Raises ValueError with the file, the place and the remedy."""
        try:
            data = tomllib.loads(Path(path).read_text())
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ValueError(f"{path} cannot be read: {reason}") from None
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from error
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ValueError(f"{path}: {explain(error)}") from error


def explain(error: ValidationError) -> str:
    """All that is wrong, a clause each: `tables.1.max_size: Input should be greater than or equal to 1, not 0`."""
    clauses = []
    for problem in error.errors():
        place = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        value = str(problem["input"])[:100] if isinstance(problem["input"], str | float) else problem["input"]
        shown = isinstance(value, str | float) or _is_small(value)
        # A secret written where the name of its file belongs must not come out in a log.
        given = f", not {value!r}" if shown and "security" not in problem["loc"] else ""
        if repr(value) in message:
            given = ""
        clauses.append(f"{place}: {message}{given}" if place else f"{message}{given}")
    return "; ".join(clauses)


def _is_small(value: object) -> bool:
    """Whether a value is a number that is worth showing (Python refuses to print very long ones)."""
    return isinstance(value, int) and abs(value) < 10**20


DEFAULT_TABLES = (
    TableConfig(name="rollouts", rate_limiter=RateLimiterConfig(type="queue", max_size=64), forward_to="replay"),
    TableConfig(
        name="replay",
        sampler=SelectorConfig(type="prioritized"),
        remover=SelectorConfig(type="min_heap"),
        max_size=4096,
        max_staleness=16,
    ),
)
"""The tables of `replay serve` without a configuration: a queue of fresh groups and the pool that it feeds."""
