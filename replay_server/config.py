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

# Fixed bounds. The bounds that an operator can set are in LimitsConfig.

MAX_MESSAGE_BYTES = 16 << 20
"""Bytes of one message. gRPC refuses a larger message as soon as it has read the length of the message."""
MAX_METADATA_BYTES = 16 << 10
"""Bytes of the headers of a call."""
MAX_ROWS = 1 << 16
"""Items in one insert, samples in one batch, keys in one Get, batches in one acknowledgement, permits in one grant."""
MAX_KEYS = 1 << 20
"""Keys in one Delete, ConsumeItems or UpdatePriorities."""
MAX_EXCLUDE = 1 << 14
"""Keys that one sample request may exclude. While the request waits, each change of the table looks up all these
keys."""
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
"""Payload bytes that all answers to Get together may hold at a time. `max_bytes` does not count these bytes."""
MAX_DRAWS = 4096
"""Draws of one sample stream that wait, or whose batches are neither acknowledged nor leased."""
MAX_CLIENTS = 1024
"""Named clients that the server remembers."""
MAX_NAME = 64
"""Characters in the name of a client."""
MAX_DESCRIPTION = 4096
"""Bytes of the JSON by which a client describes its settings. Our generator and trainer send some 400 bytes."""
MAX_DESCRIPTIONS = 256 * 1024
"""Bytes of the settings of all clients together. If there are more, the server forgets the settings of the clients that
it saw longest ago."""


class ServerConfig(Model):
    """The server process: where it listens, where it keeps items, and how much memory it may use."""

    listen: str = "127.0.0.1:7400"
    """host:port on which the server listens. Port 0: a free port. 0.0.0.0: every address of this machine."""
    metrics_listen: str | None = None
    """host:port of /metrics for Prometheus and /health, over HTTP and without a token; absent: no metrics."""
    data_dir: Path | None = None
    """Folder in which items are stored durably; absent: items are kept in memory only."""
    fsync: Literal["always", "never"] = "always"
    """With "always" the server forces data to the disk before it acknowledges the data. With "never" the operating
    system decides when to write the data to the disk. A killed server process loses nothing in either case. If the
    machine fails, "always" loses no acknowledged data, and "never" goes back to the newest checkpoint."""
    max_bytes: Bytes | None = None
    """Bytes of payloads and labels (tags, names of columns) that all tables together may hold; absent: no bound."""
    max_payload_bytes: Bytes = 1 << 30
    """Bytes of the largest item that the server takes."""
    shared_memory: Literal[False] | Path = Path("/dev/shm")
    """Folder in which clients on the server's host make sockets. Through such a socket, the server sends the client
    shared memory for payloads. false: payloads travel over gRPC only. Server and client must see the same folder, also
    in containers, and run as the same user."""

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _host_and_port(cls, address: str | None) -> str | None:
        """Returns the address. Raises ValueError if it is not host:port."""
        if address is None:
            return None
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
    """Clients must send a token from this file. Absent: the environment variable REPLAY_TOKENS_FILE names the file, or
    REPLAY_TOKENS contains the tokens. If neither variable is set, clients need no token."""
    insecure: bool = False
    """True: the server may listen on an address that other machines can reach, even if clients need no token. Then
    everybody who can reach the server can read and change everything."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca asks clients for certificates, which needs tls_cert and tls_key")
        return self


class LimitsConfig(Model):
    """Bounds on what all clients use together. Each connection counts as a client. The bounds on a single request are
    constants of the server (config.py). gRPC holds at most 16 MB of unread messages for each open call."""

    max_connections: int = Field(1024, ge=1, le=1_000_000)
    """The most open connections. The server refuses further connections."""
    max_calls_per_connection: int = Field(256, ge=1, le=1_000_000)
    """The most open calls of one connection, streams included. The client delays further calls."""
    max_calls: int = Field(8192, ge=1, le=10_000_000)
    """The most open calls of all connections. The server refuses further calls."""
    max_unfinished_bytes: Bytes = 2 << 30
    """The most bytes of items that have not arrived completely. One connection may use half of these bytes. Further
    items wait. If this bound is below `max_payload_bytes`, the server uses `max_payload_bytes` as the bound, so that
    the largest item fits."""
    max_waiting_bytes: Bytes = 4 << 30
    """The most bytes of complete items that wait for their table. One connection may use half of these bytes. Further
    items that would have to wait are refused."""
    max_shared_bytes: Bytes = 512 << 20
    """The most bytes of shared memory for payloads of clients on this host. One connection may use half of these bytes.
    Further payloads travel over gRPC."""
    memory_share: float = Field(0.9, gt=0, le=1)
    """The largest share of the machine's memory, and of the memory of each control group of the server, that may be in
    use. The cache of files does not count as in use. If more is in use, the server refuses inserts, so that the system
    does not kill the server. Of the machine's memory, never more than 512 MiB have to stay free, even if the share asks
    for more. 1: no bound."""
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
        """Returns `value`. Raises ValueError if there is no table, or if the file has [tables] and not [[tables]]."""
        if not value or isinstance(value, dict):  # tomllib reads [tables] as a dict
            raise ValueError("write [[tables]], in two brackets, once for each table; there must be one at least")
        return value

    @field_validator("tables", mode="after")
    @classmethod
    def _with_named(cls, tables: tuple[TableConfig, ...], info: ValidationInfo) -> tuple[TableConfig, ...]:
        """Adds the tables that `copy_to` and `permit_tables` name, because the file need not declare them."""
        return with_named(info.data.get("admission"), tables)

    @model_validator(mode="after")
    def _checked(self) -> Self:
        """Raises ValueError if the settings of different tables or sections do not fit together."""
        by_name = {table.name: table for table in self.tables}
        if len(by_name) < len(self.tables):  # at least two tables have the same name
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
        """Reads a TOML file. The settings of the file change `defaults`, by the function `changed`.

        Without `defaults`, they change USUAL, so that a file without [[tables]] has the usual tables.

        If the file cannot be used, raises ValueError that names the file, the place in the file and the remedy.
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
    """Follows `forward_to` from table to table, beginning at `table`.

    Raises ValueError if a table on this path does not exist, or if the path is a circle.
    """
    path = [table.name]
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
    """Returns a copy of `settings`, in which the fields that `own` sets replace the fields of the same names.

    Both arguments contain sections and tables, as a file does. A field whose value has fields itself, such as a
    sampler, is replaced as a whole.
    """
    result = {**settings, **own}
    for name in settings.keys() & own.keys():
        before = settings[name]
        own_value = own[name]
        # The tables of USUAL are TableConfig objects and not mappings, so the tables in `own` replace all of them.
        if name == "tables" and isinstance(own_value, list) and all(isinstance(table, Mapping) for table in before):
            result[name] = _changed_tables(before, own_value)
        elif isinstance(before, Mapping) and isinstance(own_value, Mapping):
            result[name] = {**before, **own_value}
    return result


def _changed_tables(tables: Iterable[Mapping[str, Any]], own: list[Any]) -> list[Any]:
    """The tables, each changed by the table of the same name in `own`. All other entries of `own` follow.

    The result includes entries of `own` that are no tables, because the caller's validation reports them.
    """
    own_by_name = {table.get("name"): table for table in own if isinstance(table, dict)}
    result: list[Any] = []
    names = []
    for table in tables:
        name = table["name"]
        own_fields = own_by_name.get(name, {})
        result.append({**table, **own_fields})
        names.append(name)
    for entry in own:
        is_in_result = isinstance(entry, dict) and entry.get("name") in names
        if not is_in_result:  # it is a new table, or no table at all
            result.append(entry)
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
"""The settings that a file changes. If the file has [[tables]], its tables replace both of these tables."""
