"""Transport: checks addresses, certificates and keys at both ends, because gRPC's own errors say little about them."""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, repr=False)  # repr: a key must never be printed
class PemFiles:
    """Certificates and a key, as their files hold them."""

    cert: bytes | None
    """This end's certificate, then the certificates between it and the root."""
    key: bytes | None
    """The private key of that certificate."""
    ca: bytes | None
    """The authorities that the other end's certificate may come from."""

    @classmethod
    def read(cls, *, cert: PathLike | None, key: PathLike | None, ca: PathLike | None, ca_name: str = "tls_ca") -> Self:
        """Reads and checks the files at these paths. Raises ValueError that names the wrong file, never its content.

        `ca_name` is the name that errors give to the setting `ca`. The other settings are `tls_cert` and `tls_key`.
        """
        if (cert is None) != (key is None):
            here, missing = ("tls_cert", "tls_key") if key is None else ("tls_key", "tls_cert")
            raise ValueError(f"{here} is set and {missing} is not: a certificate and its key go together")
        files = cls(cert=_read("tls_cert", cert), key=_read("tls_key", key), ca=_read(ca_name, ca))
        # Only checks the files: OpenSSL loads them into this context, which is then dropped.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if cert is not None:
            _check_cert(context, cert)
            try:
                context.load_cert_chain(cert, key, password=_no_password)
            except ssl.SSLError as error:
                if error.reason == "KEY_VALUES_MISMATCH":
                    raise ValueError(f"tls_key {key} is not the key of tls_cert {cert}") from None
                # The certificate was checked before, so the key is wrong.
                raise ValueError(
                    f"tls_key {key} holds no private key that can be used; it must be in PEM format and not encrypted"
                ) from None
        if ca is not None:
            _check_cert(context, ca, ca_name)
        return files


def is_loopback(host: str) -> bool:
    """True if only programs on this machine can reach the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback  # an IPv6 address in a URL has brackets
    except ValueError:  # a name, not a number
        return host == "localhost"


_NEAR = tuple(
    ipaddress.ip_network(network)
    for network in (
        "127.0.0.0/8",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "169.254.0.0/16",
        "100.64.0.0/10",
        "::1/128",
        "fc00::/7",
        "fe80::/10",
    )
)
"""Networks that no proxy leads to: this machine's own, private and link-local ones, and the addresses that providers
share among their customers (RFC 6598)."""
_NEAR_NAMES = (".localhost", ".local", ".internal", ".svc", ".lan")
"""Ends of names that mean hosts of a private network."""
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""The variables that gRPC reads. It uses the first that is set."""


def is_near(host: str) -> bool:
    """True if the address is of this machine or of a private network, which no proxy leads to.

    A name without a dot counts as such an address.
    """
    host = host.strip("[]").lower()
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name, not a number
        name = host.rstrip(".")
        return "." not in name or name.endswith(_NEAR_NAMES)
    return any(address in network for network in _NEAR if network.version == address.version)


def proxy_remedy(host: str, variables: Sequence[str] = PROXY_VARIABLES) -> str:
    """The end of an error message: names the environment variable that sends calls to `host` through a proxy, and the
    remedy. Empty if no variable does so."""
    from urllib.request import proxy_bypass_environment  # this import loads many modules, and only an error needs it

    if is_near(host) or proxy_bypass_environment(host):  # no proxy leads to it, or no_proxy names it
        return ""
    for name in variables:
        if os.environ.get(name):
            return f"; the variable {name} sends it through a proxy: no_proxy={host} goes there directly"
    return ""


def readable_by_others(path: PathLike) -> bool:
    """True if any user of this machine may read the file."""
    return bool(Path(path).stat().st_mode & 0o004)


def _read(name: str, path: PathLike | None) -> bytes | None:
    """The content of the file that the setting `name` names. Raises ValueError if it cannot be read."""
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name} {path} cannot be read: {error.strerror}") from None


def _check_cert(context: ssl.SSLContext, path: PathLike, name: str = "tls_cert") -> None:
    """Raises ValueError if the file that the setting `name` names holds no certificate."""
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise ValueError(f"{name} {path} holds no certificate in PEM format") from None


def _no_password() -> str:
    """An empty password, so that OpenSSL does not ask for a password at the terminal."""
    return ""
