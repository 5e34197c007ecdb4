"""Addresses of weights over HTTP: the rules for addresses from which a generator may fetch.

Any client that may write to the server can set the address of the weights. Therefore a generator fetches only from
addresses inside of `weights_root`, which its own user sets. An address must also have a spelling that every server and
proxy reads alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}
_PLAIN_ADDRESS = re.compile(r"https?://[A-Za-z0-9._~+=,:\[\]/-]+")
"""Matches addresses that have no user, password, query, fragment or backslash. They also have no %, because a % begins
the code of another character."""
_VERSION = re.compile(r"step-[0-9]+")
"""Matches the name of a folder with the weights of a version."""


def is_version(name: str) -> bool:
    """True if a folder with this name holds the weights of a version."""
    return _VERSION.fullmatch(name) is not None


@dataclass(frozen=True)
class WeightsAddress:
    """An address of weights, split into parts that can be compared."""

    scheme: str
    host: str
    port: int
    folders: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Self:
        """Splits an address. Raises ValueError for an address that some server or proxy could read in another way."""
        if _PLAIN_ADDRESS.fullmatch(text) is None:
            raise ValueError(
                f"{text!r:.200} is no address of weights: it needs http:// or https://, a host, and folders of "
                "letters, digits and ._~+=,:- without % and backslashes"
            )
        parts = urlsplit(text)
        path = parts.path.strip("/")
        folders = tuple(path.split("/")) if path else ()
        for folder in folders:
            if folder in ("", ".", ".."):
                raise ValueError(f"{text!r:.200} is no address of weights: each of its folders needs a name")
        port = parts.port  # raises ValueError for a port that is no number, or too large
        if not parts.hostname:
            raise ValueError(f"{text!r:.200} is no address of weights: it names no host")
        if port == 0:
            raise ValueError(f"{text!r:.200} is no address of weights: no server has port 0")
        # Addresses of the same place must be equal. So the dot at the end of a host is left out, and an address without
        # a port gets the default port of its scheme.
        return cls(parts.scheme, parts.hostname.rstrip("."), port or _PORTS[parts.scheme], folders)

    def is_inside(self, root: WeightsAddress) -> bool:
        """True if this address names a folder below `root`, on the same server."""
        if (self.scheme, self.host, self.port) != (root.scheme, root.host, root.port):
            return False
        depth = len(root.folders)
        return len(self.folders) > depth and self.folders[:depth] == root.folders
