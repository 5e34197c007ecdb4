"""Door: an address of HTTP, with the token and the certificate that belong to it."""

from __future__ import annotations

import hmac
import logging
import ssl
from dataclasses import dataclass

from replay_client.access import check_address, read_token
from replay_protos.transport import PathLike, PemFiles, is_loopback

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Door:
    """Where something listens, and whom it lets in.

    Raises ValueError for an address, a token file or a certificate that cannot be used, and for an address that other
    machines reach without a token.
    """

    what: str
    address: str
    """host:port"""
    token_file: PathLike | None = None
    """None: everybody who reaches the address may come in."""
    cert: PathLike | None = None
    """None: connections are not encrypted."""
    key: PathLike | None = None
    token_setting: str = "token_file"
    """What a person calls `token_file`."""

    def __post_init__(self) -> None:
        is_near = is_loopback(check_address(self.address, self.what))
        PemFiles.read(cert=self.cert, key=self.key, ca=None)
        if self.token_file is not None:
            read_token(self.token_file, self.token_setting)
        elif not is_near:
            raise ValueError(f"{self.what} {self.address}: other machines reach it, so it needs a {self.token_setting}")
        if self.cert is None and not is_near:
            why = "without TLS: whoever sees the traffic can read it, the token included"
            logger.warning("%s at %s %s", self.what, self.address, why)

    @property
    def place(self) -> tuple[str, int]:
        """Host and port, as sockets take them."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)

    def tls(self) -> ssl.SSLContext | None:
        """With the certificate that is in the file now."""
        if self.cert is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.cert, self.key)
        return context

    def lets_in(self, authorization: str) -> bool:
        """Whether a request with this header has the token that is in the file now. The header may be any text."""
        if self.token_file is None:
            return True
        given = authorization.removeprefix("Bearer ").encode(errors="surrogatepass")
        return hmac.compare_digest(given, read_token(self.token_file, self.token_setting).encode())
