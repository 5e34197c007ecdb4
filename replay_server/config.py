"""Config has every setting of a server, from a TOML file or from Python. Each value is checked once, here."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from replay_protos.settings import explain, parse_toml
from replay_server.errors import listed_tables
from replay_server.tables.config import (
    AdmissionConfig,
    Bytes,
    Model,
    RateLimiterConfig,
    SelectorConfig,
    TableConfig,
    admitted_table,
    with_named,
)

# Fixed bounds. LimitsConfig has the bounds that an operator can set.

MAX_MESSAGE_BYTES = 16 << 20
"""Bytes of one message. gRPC refuses a larger message as soon as it has read the length of the message."""
MAX_METADATA_BYTES = 16 << 10
"""Bytes of the headers of a call."""
MAX_ROWS = 1 << 16
"""Items in one insert, samples in one batch, keys in one Get, batches in one acknowledgement, permits in one grant."""
MAX_KEYS = 1 << 20
"""Keys in one Delete, ConsumeItems or UpdatePriorities."""
MAX_EXCLUDE = 1 << 14
"""Keys that one sample request may exclude. While the request waits, each change of the table looks up all of them."""
MAX_SCOPE = 256
"""Characters in the name of a scope."""
MAX_WEIGHTS = 4096
"""Characters in the location of weights, which is sent to every watcher of the policy."""
MAX_STATE = 128
"""Characters in the id of a trainer's state, which is sent to every watcher of the policy."""
MAX_SERVERS = 4096
"""Servers that share the permits of a run."""
MAX_LEASE = 86_400.0
"""The longest lease of a batch, in seconds."""
MAX_ROWS_OUTSTANDING = 1 << 22
"""Samples that all clients together may have outstanding: under leases, or drawn ahead."""
MAX_BYTES_READ = 256 << 20
"""Payload bytes that all answers to Get together may hold at a time. They do not count for `max_bytes`."""
MAX_DRAWS = 4096
"""Draws of one sample stream that wait, or whose batches are neither acknowledged nor leased."""
MAX_CLIENTS = 1024
"""Named clients that the server remembers."""
MAX_NAME = 64
"""Characters in the name of a client."""
MAX_DESCRIPTION = 4096
"""Bytes of the JSON by which a client describes its settings. Our generator and trainer send some 400 bytes."""
MAX_DESCRIPTIONS = 256 * 1024
"""Bytes of the settings of all clients. If there are more, the server forgets the settings of clients seen longest
ago."""


class ServerConfig(Model):
    """The server process: where it listens, where it keeps items, and how much memory it may use."""

    listen: str = "127.0.0.1:7400"
    """host:port on which the server listens. Port 0: a free port. 0.0.0.0: every address of this machine."""
    metrics_listen: str | None = None
    """host:port of /metrics for Prometheus and /health, over HTTP and without a token; absent: no metrics."""
    data_dir: Path | None = None
    """Folder in which items are stored durably; absent: items are kept in memory only."""
    fsync: Literal["always", "never"] = "always"
    """With "always" the server forces data to the disk before it acknowledges the data. With "never" the system decides
    when. A killed server process loses nothing in either case. If the machine fails, "always" loses no acknowledged
    data, and "never" goes back to the newest checkpoint."""
    max_bytes: Bytes | None = None
    """Bytes of payloads and labels (tags, names of columns) that all tables together may hold; absent: no bound."""
    max_payload_bytes: Bytes = 1 << 30
    """Bytes of the largest item that the server takes."""
    shared_memory: Literal[False] | Path = Path("/dev/shm")
    """Folder in which clients on the server's host make sockets, to which it sends memory for payloads. false: payloads
    travel over gRPC only. Server and client must see the same folder, also in containers, and run as the same user."""

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _host_and_port(cls, address: str | None) -> str | None:
        """Raises ValueError if the address is not host:port."""
        if address is not None:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or int(port) > 65535:
                raise ValueError("must be host:port, for example 127.0.0.1:7401, and the port at most 65535")
        return address


class SecurityConfig(Model):
    """Tokens and TLS. All files are in PEM format, except `tokens_file` (see rpc.auth.Tokens)."""

    tls_cert: Path | None = None
    """The server's certificate, followed by the intermediate certificates; absent: connections are not encrypted."""
    tls_key: Path | None = None
    """The private key of `tls_cert`."""
    tls_client_ca: Path | None = None
    """Certificate authorities. A client must present a certificate that one of them signed (mutual TLS)."""
    tokens_file: Path | None = None
    """Clients must send a token from this file. Absent: REPLAY_TOKENS_FILE or REPLAY_TOKENS in the environment
    counts; without these, no token is needed."""
    insecure: bool = False
    """Listen where other machines can reach the server, although no token is needed. Then everybody who reaches the
    server can read and change everything."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca asks clients for certificates, which needs tls_cert and tls_key")
        return self


class LimitsConfig(Model):
    """Bounds on what all clients use together. Each connection counts as a client. The bounds of a single request are
    constants of the server (config.py). gRPC holds at most 16 MB of unread messages for each open call."""

    max_connections: int = Field(1024, ge=1, le=1_000_000)
    """The most open connections. The server refuses further connections."""
    max_calls_per_connection: int = Field(256, ge=1, le=1_000_000)
    """The most open calls of one connection, streams included. The client delays further calls."""
    max_calls: int = Field(8192, ge=1, le=10_000_000)
    """The most open calls of all connections. The server refuses further calls."""
    max_unfinished_bytes: Bytes = 2 << 30
    """The most bytes of items that have not arrived completely. One connection may use half of it. Further items wait.
    If this is below `max_payload_bytes`, the server uses `max_payload_bytes`, so that the largest item fits."""
    max_waiting_bytes: Bytes = 4 << 30
    """The most bytes of complete items that wait for their table. One connection may use half of it. The server refuses
    further items that would have to wait."""
    max_shared_bytes: Bytes = 512 << 20
    """The most bytes of shared memory for payloads of clients on this host. One connection may use half of it. Further
    payloads travel over gRPC."""
    memory_share: float = Field(0.9, gt=0, le=1)
    """Share of the memory of the machine, and of each control group of the server, that may be in use. The cache of
    files does not count. If more is in use, the server refuses inserts, so that the system does not kill it. On the
    machine at most 512 MiB have to stay free. 1: no bound."""
    stall_timeout: float = Field(60.0, gt=0)
    """Seconds within which a client must send the next chunk of an item, or read the next chunk of a response."""


class CheckpointsConfig(Model):
    """Checkpoints: copies of all items and tables of the server, each in one file."""

    dir: Path | None = None
    """Folder of the checkpoints; absent: `checkpoints` in `data_dir`."""
    every_minutes: float | None = Field(None, gt=0, le=1e6)
    """Minutes between two checkpoints; absent: only when a client asks for one."""
    keep: int = Field(3, ge=1)
    """The number of checkpoints to keep. The server removes older checkpoints, except those that a client named."""
    on_stop: bool = False
    """True: the server writes a checkpoint when it stops."""


class Config(Model):
    """The configuration of a whole server."""

    server: ServerConfig = ServerConfig()
    security: SecurityConfig = SecurityConfig()
    limits: LimitsConfig = LimitsConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    admission: AdmissionConfig | None = None
    tables: tuple[TableConfig, ...] = Field(default=(), validate_default=True)

    @field_validator("tables", mode="before")
    @classmethod
    def _at_least_one(cls, value: Any) -> Any:
        """Raises ValueError if there is no table, or if the file says [tables] instead of [[tables]] (a dict)."""
        if not value or isinstance(value, dict):
            raise ValueError("write [[tables]], in two brackets, once for each table; there must be one at least")
        return value

    @field_validator("tables", mode="after")
    @classmethod
    def _with_named(cls, tables: tuple[TableConfig, ...], info: ValidationInfo) -> tuple[TableConfig, ...]:
        """Adds the tables that `copy_to` and `permit_tables` name, and that the file need not declare."""
        return with_named(info.data.get("admission"), tables)

    @model_validator(mode="after")
    def _checked(self) -> Self:
        """Raises ValueError if the settings of different tables or sections do not fit together."""
        # If two tables have one name, this has fewer entries than there are tables.
        by_name = {table.name: table for table in self.tables}
        if len(by_name) < len(self.tables):
            [(name, count)] = Counter(table.name for table in self.tables).most_common(1)  # the name used most often
            raise ValueError(f"table names must differ: {count} tables are called {name!r}")
        for table in self.tables:
            _check_forwarding(table, by_name)
        if self.admission is not None:
            admitted_table(self.admission, self.tables)  # raises if it is not clear which table is trained on
        writes_checkpoints = self.checkpoints.every_minutes or self.checkpoints.on_stop
        if writes_checkpoints and self.checkpoint_dir is None:
            raise ValueError("checkpoints need a place: set dir in [checkpoints], or data_dir in [server]")
        return self

    @property
    def checkpoint_dir(self) -> Path | None:
        """Folder of the checkpoints; None if the configuration names none."""
        if self.checkpoints.dir is None and self.server.data_dir is not None:
            return self.server.data_dir / "checkpoints"
        return self.checkpoints.dir

    @classmethod
    def load(cls, path: str | Path, defaults: Mapping[str, Any] | None = None) -> Config:
        """Reads a TOML file. The settings of the file are applied to `defaults` by `changed`.

        Without `defaults` they are applied to USUAL, so that a file without [[tables]] has the usual tables.

        Raises ValueError that names the file, the place in the file and the remedy.
        """
        try:
            data = parse_toml(Path(path).read_text())
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{path} cannot be read: it is not text") from None
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from error
        try:
            return cls.model_validate(changed(defaults or USUAL, data))
        except ValidationError as error:
            raise ValueError(f"{path}: {explain(error, sections='')}") from error


def _check_forwarding(table: TableConfig, by_name: Mapping[str, TableConfig]) -> None:
    """Raises ValueError if the chain of `forward_to` that begins at `table` names a missing table, or is a circle."""
    path = [table.name]  # the names of the chain so far
    while table.forward_to is not None:
        if table.forward_to not in by_name:
            raise ValueError(
                f"table {table.name!r} forwards to {table.forward_to!r}, which does not exist; "
                f"{listed_tables(by_name, table.forward_to)}"
            )
        if table.forward_to in path:
            raise ValueError(f"forward_to goes round in a circle: {' -> '.join([*path, table.forward_to])}")
        table = by_name[table.forward_to]
        path.append(table.name)


def changed(settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The settings (sections by name, as in a file), with the fields that `own` sets in sections and tables replaced.

    A field whose value has fields itself, such as a sampler, is replaced as a whole.
    """
    result = {**settings, **own}
    for name in settings.keys() & own.keys():
        before = settings[name]
        after = own[name]
        # If `settings` are USUAL, their tables are TableConfig, not mappings: tables in `own` replace all of them.
        if name == "tables" and isinstance(after, list) and all(isinstance(table, Mapping) for table in before):
            result[name] = _changed_tables(before, after)
        elif isinstance(before, Mapping) and isinstance(after, Mapping):
            result[name] = {**before, **after}
    return result


def _changed_tables(tables: Iterable[Mapping[str, Any]], own: list[Any]) -> list[Any]:
    """The tables, each changed by the table of the same name in `own`. All other entries of `own` follow.

    Entries of `own` that are no tables are included, because the caller's validation reports them.
    """
    own_tables = {table.get("name"): table for table in own if isinstance(table, dict)}
    result: list[Any] = []
    names = []
    for table in tables:
        result.append({**table, **own_tables.get(table["name"], {})})
        names.append(table["name"])
    for table in own:
        # New tables, and entries that are no tables. The tables in `names` are in `result` already.
        if not isinstance(table, dict) or table.get("name") not in names:
            result.append(table)
    return result


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
"""The tables of a server whose file names no tables: a queue of new groups, and the pool that the queue feeds."""
USUAL: Mapping[str, Any] = {"tables": DEFAULT_TABLES}
"""The settings that a file changes. If the file has [[tables]], they replace both of these tables."""
