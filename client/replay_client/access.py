"""Access: finds and checks the address, token and TLS files with which a client reaches a server.

Every command and `ReplayClient.from_env()` take each setting from the first of these sources that has it:

1. an argument, or a flag of the command line,
2. the environment variable `REPLAY_<NAME>`, for example REPLAY_TLS_CA,
3. the TOML file named by `client_config` or REPLAY_CLIENT_CONFIG, whose keys are the names of the settings.

A token comes from REPLAY_TOKEN or from a file (`token_file`). It never comes from the command line, which other users
of the machine can read.

`ListenAddress` is for a program that itself listens for connections: its address, its certificate, and the token that
its clients must send.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import ssl
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import grpc
import grpc.aio

from replay_protos.settings import parse_toml
from replay_protos.transport import PathLike, PemFiles, is_loopback, is_near

logger = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:7400"
RAY_SCHEME = "ray://"
MOST_NAME = 64
"""The most characters in the name of a client."""
SETTINGS = (
    "address",
    "token",
    "token_file",
    "tls",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "tls_server_name",
    "allow_insecure_token",
    "shared_memory",
    "name",
)
"""The names of all settings."""
_SWITCHES = ("tls", "allow_insecure_token", "shared_memory")
"""The names of the settings that are on or off."""
_SWITCH_VALUES = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
"""Text in the environment -> the value of a switch."""


def joined_addresses(address: str | Sequence[str]) -> str:
    """Joins the addresses into one text with commas. A text is returned as it is.

    Raises ValueError if `address` is neither a text nor a sequence of texts.
    """
    if isinstance(address, str):
        return address
    are_texts = isinstance(address, Iterable) and all(isinstance(text, str) for text in address)
    if not are_texts:
        raise ValueError(f"address must be a text such as 127.0.0.1:7400, or a list of these, not {address!r}")
    return ",".join(address)


def split_addresses(address: str) -> dict[str, str]:
    """Splits a text with commas into its servers. Returns the host:port of each server, by the server's name.

    `NAME=host:port` gives a server its name. The name of any other server is its address, in the spelling of
    `_name_of_address`. For a ray:// address the result is empty, because only Ray knows the servers of such an address.
    Raises ValueError for a name that cannot be used or comes twice.
    """
    if address.startswith(RAY_SCHEME):
        return {}
    servers: dict[str, str] = {}
    for part in address.split(","):
        name, equals, host_and_port = part.strip().rpartition("=")
        if equals:
            check_name(name)
            if not name or "/" in name:
                raise ValueError(f"address {part!r}: a name before = is not empty, and has no /")
        else:
            name = _name_of_address(host_and_port)
        if name in servers:
            raise ValueError(f"addresses and their names must differ: {name} comes twice in {address}")
        servers[name] = host_and_port
    return servers


def _name_of_address(address: str) -> str:
    """The address in lower case, with 127.0.0.1 for localhost, so that all spellings of an address give one name."""
    host, colon, port = address.lower().rpartition(":")
    if host == "localhost":
        host = "127.0.0.1"
    return f"{host}{colon}{port}"


@dataclass(frozen=True)
class TLS:
    """The certificates with which client and server identify each other. All files are in PEM format."""

    ca: PathLike | None = None
    """Certificates of the authorities that may have signed the server's certificate. None: the public authorities that
    gRPC knows."""
    cert: PathLike | None = None
    """The client's own certificate, for a server that asks its clients for certificates."""
    key: PathLike | None = None
    """The private key of `cert`."""
    server_name: str | None = None
    """The name in the server's certificate, if the address has a different host (an IP address, a tunnel)."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads these files into credentials for gRPC. Raises ValueError that names a file that cannot be used."""
        files = PemFiles.read(cert=self.cert, key=self.key, ca=self.ca)
        return grpc.ssl_channel_credentials(files.ca, files.key, files.cert)


@dataclass(frozen=True)
class Access:
    """All settings of a client's access to a server.

    The constructor checks the settings and the files that they name. It raises ValueError, with the remedy, if one of
    them cannot be used.
    """

    address: str = DEFAULT_ADDRESS
    """host:port or NAME=host:port; several of these, separated by commas; or ray://NAMESPACE/NAME"""
    token: str | None = field(default=None, repr=False)
    """The secret that the client sends with every call. None: the server asks for no token."""
    tls: TLS | None = None
    """None: the connection is not encrypted."""
    allow_insecure_token: bool = False
    """True: the token may go unencrypted to other machines. Anyone on the network can then read it."""
    shared_memory: bool = True
    """True: payloads go through shared memory if the server is on this host. False: they always go over gRPC."""
    name: str | None = None
    """The name by which the server lists this client, if the client inserts, samples or publishes. None: host:pid.
    Empty: the server does not list this client."""
    _credentials: grpc.ChannelCredentials | None = field(init=False, repr=False, compare=False)
    """The content of the files of `tls`, read when this object is made. None: the connection is not encrypted."""

    def __post_init__(self) -> None:
        """Checks the settings, and reads the files of `tls`."""
        if self.token is not None:
            check_token(self.token, "token")
        if self.name is not None:
            check_name(self.name)
        for address in split_addresses(self.address).values():
            check_address(address, "address")
            if self.token is not None:
                check_token_way(
                    address,
                    is_encrypted=self.tls is not None,
                    is_allowed=self.allow_insecure_token,
                    remedy="Use TLS (tls=..., REPLAY_TLS_CA or --tls-ca), or say that you trust the network "
                    "(allow_insecure_token=True, REPLAY_ALLOW_INSECURE_TOKEN=1)",
                )
        credentials = None if self.tls is None else self.tls.credentials()
        object.__setattr__(self, "_credentials", credentials)  # the class is frozen, so a plain assignment would raise

    @classmethod
    def find(cls, *, environment: Mapping[str, str] | None = None, **options: Any) -> Self:
        """Makes an Access, and takes each setting from the first source that has this setting.

        The sources are `options`, then the environment, then the file. `options` may have any of SETTINGS, and
        `client_config`. An option that is None counts as absent. Raises TypeError for an unknown option, and ValueError
        that names the source of a bad setting.
        """
        if environment is None:
            environment = os.environ
        settings = _find_settings(options, environment)
        values: dict[str, Any] = {name: settings[name].value for name in SETTINGS if name in settings}
        for name in _SWITCHES:
            if name in settings:
                values[name] = _switch_value(settings[name].value, settings[name].source)
        # `cls` checks the token and the address too, but it does not know their sources. An error must name the source,
        # so check both here first.
        if "token_file" in settings:
            values["token"] = read_token(values.pop("token_file"), settings["token_file"].source)
        elif "token" in settings:
            check_token(settings["token"].value, settings["token"].source)
        address_source = settings["address"].source if "address" in settings else "address"
        for address in split_addresses(values.get("address", DEFAULT_ADDRESS)).values():
            check_address(address, address_source)
        tls_fields = {name: values.pop(f"tls_{name}", None) for name in ("ca", "cert", "key", "server_name")}
        # Each of these settings turns TLS on, unless `tls` says otherwise.
        uses_tls = values.get("tls", any(tls_fields.values()))
        values["tls"] = TLS(**tls_fields) if uses_tls else None
        return cls(**values)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `AsyncReplayClient` that give a client these settings, without the address."""
        names = ("token", "allow_insecure_token", "shared_memory", "name")
        arguments = {name: getattr(self, name) for name in names}
        # For an unencrypted connection, `AsyncReplayClient` takes False where this class has None.
        arguments["tls"] = self.tls or False
        return arguments

    def channel(self, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        """Makes a channel that sends the name of this client with every call.

        The channel belongs to the running event loop. `options` are further options of gRPC, by name.
        """
        name = own_name() if self.name is None else self.name
        if name:  # with an empty `name`, the server does not list this client
            # The server reads the name from the user agent. Every call has a user agent anyway, so the name costs
            # nothing.
            options = [*options, ("grpc.primary_user_agent", f"replay/{name}")]
        hosts = [address.rpartition(":")[0] for address in split_addresses(self.address).values()]
        # No proxy leads to this machine or to a private network, so ignore the proxy variables of the environment.
        if all(is_near(host) for host in hosts):
            options = [*options, ("grpc.enable_http_proxy", 0)]
        if self.tls is not None and self.tls.server_name:
            options = [*options, ("grpc.ssl_target_name_override", self.tls.server_name)]
        if self._credentials is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        return grpc.aio.secure_channel(self.address, self._credentials, options=options)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call: the token as an Authorization header; empty without a token."""
        # Call credentials of gRPC could send the token too, but they need TLS and use a thread for each call.
        # Interceptors of gRPC could also send the token, but they slow streams down.
        if self.token is None:
            return ()
        return (("authorization", f"Bearer {self.token}"),)


def check_address(address: str, source: str, least_port: int = 1) -> str:
    """Checks that `address` is host:port, and returns the host. Raises ValueError that names `source` if it is not.

    A `least_port` of 0 allows port 0, with which a server listens on any free port.
    """
    host, _, port = address.rpartition(":")
    is_host = host and "/" not in address  # a / comes from a URL, such as http://host:port
    is_port = port.isdecimal() and least_port <= int(port) < 1 << 16
    if not (is_host and is_port):
        raise ValueError(f"{source} must be host:port with a port from {least_port} to 65535, not {address!r}")
    return host


def check_token_way(address: str, *, is_encrypted: bool, is_allowed: bool, remedy: str) -> None:
    """Raises ValueError with the remedy if the client would send a token unencrypted to another machine.

    `address` is host:port. `is_allowed`: the user trusts the network.
    """
    if is_encrypted or is_allowed or is_loopback(address.rpartition(":")[0]):
        return
    raise ValueError(
        f"refusing to send the token to {address} unencrypted: anyone on the network could read it. {remedy}"
    )


def own_name() -> str:
    """host:pid of this process: the default name of a client."""
    host = "".join(letter for letter in socket.gethostname() if _may_be_in_name(letter))
    return f"{host[:48]}:{os.getpid()}"  # 48 letters of the host leave room for the pid within MOST_NAME


def _may_be_in_name(letter: str) -> bool:
    """True for a printable character of ASCII other than the space."""
    return "!" <= letter <= "~"


def check_name(name: str) -> None:
    """Raises ValueError unless the name has at most MOST_NAME printable ASCII characters, without spaces.

    The header of a call, in which the name is sent, cannot hold other characters.
    """
    if not isinstance(name, str) or len(name) > MOST_NAME or not all(_may_be_in_name(letter) for letter in name):
        raise ValueError(f"name must have at most {MOST_NAME} printable ASCII characters without spaces, not {name!r}")


def check_token(token: str, source: str) -> None:
    """Raises ValueError for a text that cannot be a token. The error names the source and does not show the token."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{source} must hold one token: ASCII characters that can be printed, without spaces")


def read_token(path: PathLike, source: str) -> str:
    """The token in the file at `path`. Raises ValueError that names the source and does not show the token."""
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"{source} {path} cannot be read: {reason}") from None
    check_token(token, f"{source} {path}")
    return token


class _Found(NamedTuple):
    """The value of a setting, and the source that had it."""

    value: Any
    source: str
    """The name of the source in errors: an argument, a variable of the environment, or a key and its file."""


def _find_settings(options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, _Found]:
    """Finds each setting in the first source that has it: `options`, then `environment`, then the file.

    Returns the settings by name. Raises TypeError for an unknown option. Raises ValueError for a bad file, and if one
    source has both a token and a token file.
    """
    arguments = {name: _Found(value, name) for name, value in options.items() if value is not None}
    unknown = arguments.keys() - {*SETTINGS, "client_config"}
    if unknown:
        raise TypeError(f"no setting {', '.join(sorted(unknown))}; settings: {', '.join(SETTINGS)}")
    variables: dict[str, _Found] = {}
    for name in (*SETTINGS, "client_config"):
        variable = f"REPLAY_{name.upper()}"
        if environment.get(variable):  # an empty variable counts as absent
            variables[name] = _Found(environment[variable], variable)
    settings: dict[str, _Found] = {}
    config = arguments.get("client_config") or variables.get("client_config")
    if config is not None and config.value:  # client_config="" means: no file, even if the environment names one
        settings = _read_config(config.value)
    # `settings` has the values of the file now. Variables replace these values, and then arguments replace both.
    for stronger in (variables, arguments):
        # A token also replaces a token file from a weaker source, and a token file replaces a token from there.
        if "token" in stronger or "token_file" in stronger:
            settings.pop("token", None)
            settings.pop("token_file", None)
        settings |= stronger
    if "token" in settings and "token_file" in settings:
        sources = f"{settings['token'].source} and {settings['token_file'].source}"
        raise ValueError(f"both {sources} are set: set one of them")
    return settings


def _read_config(path: PathLike) -> dict[str, _Found]:
    """Reads the settings in a TOML file, by name. Raises ValueError that names the file and the setting."""
    try:
        data = parse_toml(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"client_config {path}: {error}") from error
    unknown = data.keys() - set(SETTINGS)
    if unknown:
        raise ValueError(f"client_config {path}: no setting {', '.join(sorted(unknown))}; it has {', '.join(SETTINGS)}")
    for name, value in data.items():
        expected = bool if name in _SWITCHES else str
        if not isinstance(value, expected):
            raise ValueError(f"client_config {path}: {name} has a value of the wrong type, {type(value).__name__}")
    return {name: _Found(value, f"{name} in {path}") for name, value in data.items()}


def _switch_value(value: bool | str, source: str) -> bool:
    """Reads the value of a switch. Raises ValueError that names the source of a bad value."""
    if isinstance(value, bool):  # an argument or a value of the file; the environment has texts only
        return value
    if value.lower() not in _SWITCH_VALUES:
        raise ValueError(f"{source} must be 1 or 0, not {value!r}")
    return _SWITCH_VALUES[value.lower()]


# ------------------------------------------------------------------------------------------------ listening


@dataclass(frozen=True)
class ListenAddress:
    """An address at which a program listens, its certificate, and the token that its clients must send.

    The constructor raises ValueError for an address, a token file or a certificate that cannot be used. It also raises
    ValueError if other machines reach the address and no token is needed.
    """

    what: str
    """The name of the address, for errors and warnings, for example "--listen"."""
    address: str
    """host:port"""
    token_file: PathLike | None = None
    """The file that holds the token. None: every client that reaches the address is let in."""
    cert: PathLike | None = None
    """The file with the certificate for TLS. None: connections are not encrypted."""
    key: PathLike | None = None
    """The private key of `cert`."""
    token_setting: str = "token_file"
    """The name of the user's setting that gives `token_file`, for errors."""

    def __post_init__(self) -> None:
        """Checks the address and the files. Warns of an address that other machines reach without TLS."""
        host = check_address(self.address, self.what)
        is_only_for_this_machine = is_loopback(host)
        # Reads the files only to find errors in them. `tls` and `authorized` read the files again at each use.
        PemFiles.read(cert=self.cert, key=self.key, ca=None)
        if self.token_file is not None:
            read_token(self.token_file, self.token_setting)
        elif not is_only_for_this_machine:
            raise ValueError(f"{self.what} {self.address}: other machines reach it, so it needs a {self.token_setting}")
        if self.cert is None and not is_only_for_this_machine:
            why = "without TLS: whoever sees the traffic can read it, the token included"
            logger.warning("%s at %s %s", self.what, self.address, why)

    @property
    def socket_address(self) -> tuple[str, int]:
        """Host and port, as sockets take them."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)  # an address writes IPv6 as [::1], and a socket takes ::1

    def tls(self) -> ssl.SSLContext | None:
        """A TLS context with the certificate that is in the file now. None: connections are not encrypted."""
        if self.cert is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.cert, self.key)
        return context

    def authorized(self, authorization: str) -> bool:
        """True if this Authorization header has the token that is in the file now, or if no token is needed.

        The header may be any text.
        """
        if self.token_file is None:
            return True
        # `surrogatepass`, because a wrong header may have characters that UTF-8 cannot encode.
        token = authorization.removeprefix("Bearer ").encode(errors="surrogatepass")
        expected = read_token(self.token_file, self.token_setting).encode()
        # This comparison takes the same time for every wrong token, so nobody can guess the token from the time.
        return hmac.compare_digest(token, expected)
