"""Security: who may call what. Tokens, the role that each method wants, TLS, and the interceptor that refuses."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, Self

import grpc

from replay_protos.framing import SERVICE
from replay_protos.transport import PemFiles, is_loopback, readable_by_others
from replay_server.config import SecuritySection
from replay_server.rpc.health import HEALTH, REFLECTION

log = logging.getLogger("replay_server")


class Role(IntEnum):
    """What a token allows; each role also allows what those before it do."""

    READ_ONLY = 1
    """Look at everything, change nothing, take nothing out."""
    READ_WRITE = 2
    """Take part in a run: generators and trainers."""
    ADMIN = 3
    """Change the server itself, and remove what others need."""

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


ROLES = {
    "GetServerInfo": Role.READ_ONLY,
    "ListItems": Role.READ_ONLY,
    "Get": Role.READ_ONLY,
    "GetPolicy": Role.READ_ONLY,
    "WatchPolicy": Role.READ_ONLY,
    "ListCheckpoints": Role.READ_ONLY,
    "Insert": Role.READ_WRITE,
    "InsertStream": Role.READ_WRITE,
    "Sample": Role.READ_WRITE,
    "SampleStream": Role.READ_WRITE,
    "AcknowledgeSamples": Role.READ_WRITE,
    "UpdatePriorities": Role.READ_WRITE,
    "Delete": Role.READ_WRITE,
    "SetPolicyVersion": Role.READ_WRITE,
    "AcquirePermits": Role.READ_WRITE,
    "ReleasePermits": Role.READ_WRITE,
    "Checkpoint": Role.READ_WRITE,  # a trainer makes one with each of its own
    "UpdateTable": Role.ADMIN,
    "Reset": Role.ADMIN,
}
"""The role that each method wants. What is not here, such as a method of another service, wants ADMIN."""

REVOKED = "the token that this call came with does not allow it any more"
"""What a call that is ended for it is cancelled with."""
_SHORT_TOKEN = 16
_LOOK_AGAIN = 1.0
"""Seconds between two looks at the files of tokens and certificates."""


class Tokens:
    """The tokens that a server accepts. Only their hashes are kept.

    Written as `ROLE:TOKEN`, separated by white space; what follows a `#` at the begin of a line is a comment:

        # of the trainer and the generators
        read-write:5f0c...
        read-only:91ab...
    """

    def __init__(self, text: str, source: str) -> None:
        """Raises ValueError that names source and line, and never shows what is there."""
        self._roles: dict[bytes, Role] = {}
        names = {str(role): role for role in Role}
        for number, line in enumerate(text.splitlines(), start=1):
            for entry in "" if line.lstrip().startswith("#") else line.split():
                name, _, token = entry.partition(":")
                if name not in names or not token or not token.isascii() or not token.isprintable():
                    raise ValueError(
                        f"{source}, line {number}: a token is written as ROLE:TOKEN, with the role one of "
                        f"{', '.join(names)} and the token in printable ASCII"
                    )
                if len(token) < _SHORT_TOKEN:
                    log.warning("%s, line %d: the token is so short that it can be guessed", source, number)
                self._roles[_digest(token)] = names[name]
        if not self._roles:
            raise ValueError(f"{source} holds no token; write a line such as {Role.READ_WRITE}:$(openssl rand -hex 32)")

    def role_of(self, token: str) -> Role | None:
        """In a time that does not depend on how much of a token is right, nor on which it is."""
        digest, found = _digest(token), None
        for known, role in self._roles.items():
            if hmac.compare_digest(known, digest):
                found = role
        return found

    @classmethod
    def read(cls, path: Path) -> Self:
        """The tokens in a file. Raises ValueError that names it and the line, and never shows what is there."""
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ValueError(f"tokens_file {path} cannot be read: {reason}") from None
        return cls(text, f"tokens_file {path}")


class Security:
    """What a configuration asks for. Files that change are read again; where that fails, what was read before holds."""

    def __init__(self, section: SecuritySection, environment: Mapping[str, str] | None = None) -> None:
        """`environment` may name the tokens (REPLAY_TOKENS) or their file (REPLAY_TOKENS_FILE), where the section
        does not. Raises ValueError that names the file or variable."""
        environment = environment or {}
        self._section = section
        path = section.tokens_file or (environment.get("REPLAY_TOKENS_FILE") or None)
        self._tokens_file = None if path is None else Path(path)
        self.tokens: Tokens | None = None
        if self._tokens_file is not None:
            self.tokens = Tokens.read(self._tokens_file)
        elif environment.get("REPLAY_TOKENS"):
            self.tokens = Tokens(environment["REPLAY_TOKENS"], "REPLAY_TOKENS")
        self._pem = PemFiles.read(
            cert=section.tls_cert, key=section.tls_key, ca=section.tls_client_ca, ca_name="tls_client_ca"
        )
        for name, secret in (("tokens_file", self._tokens_file), ("tls_key", section.tls_key)):
            if secret is not None and readable_by_others(secret):
                log.warning("%s %s can be read by every user of this machine: chmod 600 it", name, secret)
        self._seen = {files: self._changed_at(*files) for files in (self._token_files(), self._tls_files())}
        self._looked: dict[tuple[Path, ...], float] = {}
        self._calls: dict[asyncio.Task[Any], tuple[str, Role]] = {}
        """The calls that are open, each with the token that it came with and the role that it wants."""

    def role_of(self, token: str) -> Role | None:
        """What a token allows, None if it is unknown; a file of tokens that has changed is read first."""
        assert self.tokens is not None
        if self._tokens_file is not None and self._has_changed(self._token_files()):
            try:
                self.tokens = Tokens.read(self._tokens_file)
                log.info("tokens_file %s was read again", self._tokens_file)
            except ValueError as error:
                log.error("%s; the tokens read before stay in force", error)
        return self.tokens.role_of(token)

    def admitted(self, token: str, wanted: Role) -> None:
        """The call that the current task answers may go on, until it ends or `end_revoked` does."""
        if (task := asyncio.current_task()) is not None:
            self._calls[task] = token, wanted
            task.add_done_callback(lambda task: self._calls.pop(task, None))

    async def end_revoked(self) -> None:
        """Ends open calls whose token does not allow them any more, until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_AGAIN)
            roles = {token: self.role_of(token) for token in {token for token, _ in self._calls.values()}}
            revoked = [task for task, (token, wanted) in self._calls.items() if (roles[token] or 0) < wanted]
            for task in revoked:
                task.cancel(REVOKED)
            if revoked:
                log.warning("ended %d open calls, whose tokens do not allow them any more", len(revoked))

    def credentials(self) -> grpc.ServerCredentials | None:
        """For the port; None: not encrypted."""
        if self._section.tls_cert is None:
            return None
        return grpc.dynamic_ssl_server_credentials(
            self._certificates(),
            self._new_certificates,  # type: ignore[arg-type]  # None is allowed, whatever the type stubs say
            self._section.tls_client_ca is not None,
        )

    def _certificates(self) -> grpc.ServerCertificateConfiguration:
        assert self._pem.key is not None
        assert self._pem.cert is not None
        return grpc.ssl_server_certificate_configuration([(self._pem.key, self._pem.cert)], self._pem.ca)

    def _new_certificates(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC for each handshake, on a thread of its own; None: as before."""
        if not self._has_changed(self._tls_files()):
            return None
        section = self._section
        try:
            self._pem = PemFiles.read(
                cert=section.tls_cert, key=section.tls_key, ca=section.tls_client_ca, ca_name="tls_client_ca"
            )
        except ValueError as error:
            log.error("%s; the certificates read before stay in force", error)
            return None
        log.info("tls_cert %s was read again", section.tls_cert)
        return self._certificates()

    def warn(self, address: str) -> None:
        """Says what an address that other machines reach leaves open."""
        if is_loopback(address.rpartition(":")[0]):
            return
        if self.tokens is None and self._section.tls_client_ca is None:
            log.warning(
                "listening on %s without tokens: whoever reaches it can read and change everything; set tokens_file in "
                "[security], or REPLAY_TOKENS_FILE",
                address,
            )
        if self._section.tls_cert is None:
            log.warning(
                "listening on %s without TLS: whoever sees its traffic can read everything%s; set tls_cert and tls_key "
                "in [security]",
                address,
                "" if self.tokens is None else ", tokens included",
            )

    @staticmethod
    def warn_of_metrics(address: str) -> None:
        """Says what it means that other machines reach the metrics: they want no token and know no TLS."""
        if not is_loopback(address.rpartition(":")[0]):
            log.warning(
                "metrics at http://%s/metrics, without tokens and TLS: whoever reaches it can read names, sizes "
                "and rates of tables; set metrics_address to one that only your monitoring reaches",
                address,
            )

    def _token_files(self) -> tuple[Path, ...]:
        return () if self._tokens_file is None else (self._tokens_file,)

    def _tls_files(self) -> tuple[Path, ...]:
        files = (self._section.tls_cert, self._section.tls_key, self._section.tls_client_ca)
        return tuple(path for path in files if path is not None)

    def _has_changed(self, files: tuple[Path, ...]) -> bool:
        """Whether any of `files` has changed since this last said so."""
        now = time.monotonic()
        if now - self._looked.get(files, 0.0) < _LOOK_AGAIN:
            return False
        self._looked[files] = now
        before, self._seen[files] = self._seen[files], self._changed_at(*files)
        return self._seen[files] != before

    @staticmethod
    def _changed_at(*files: Path) -> tuple[int, ...]:
        try:
            return tuple(path.stat().st_mtime_ns for path in files)
        except OSError:
            return ()  # gone for the moment in which it is replaced


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a token whose role allows them, before anything of the request is read."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._refused, self._told = 0, float("-inf")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        method: str = handler_call_details.method
        code, message = self.check(method, handler_call_details.invocation_metadata)
        if code is None:
            return await continuation(handler_call_details)

        # As a stream, whatever the method is: a handler of that kind reads nothing by itself.
        async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
            self._tell(context.peer(), method, message)
            await context.abort(code, message)
            yield b""

        return grpc.stream_stream_rpc_method_handler(refuse)

    def check(self, method: str, metadata: Any) -> tuple[grpc.StatusCode | None, str]:
        """The code and words to refuse the call with; None: it may go on."""
        service, _, name = method.removeprefix("/").partition("/")
        if service == HEALTH:  # who asks has no token: load balancers, orchestrators
            return None, ""
        given = [value for key, value in metadata if key == "authorization"]
        if not given:
            return grpc.StatusCode.UNAUTHENTICATED, (
                "this server wants a token and the call has none: set REPLAY_TOKEN or REPLAY_TOKEN_FILE, give "
                "--token-file, or pass token=... to the client"
            )
        scheme, _, token = str(given[0]).partition(" ")
        role = self._security.role_of(token) if len(given) == 1 and scheme.lower() == "bearer" else None
        if role is None:
            return grpc.StatusCode.UNAUTHENTICATED, (
                "the token is not one of this server's: check that REPLAY_TOKEN, REPLAY_TOKEN_FILE, --token-file or "
                "token=... is the current one in the server's tokens_file (or REPLAY_TOKENS)"
            )
        wanted = ROLES.get(name, Role.ADMIN) if service == SERVICE else Role.ADMIN
        if service == REFLECTION:
            wanted = Role.READ_ONLY
        if role < wanted:
            return grpc.StatusCode.PERMISSION_DENIED, (
                f"{name} needs a token of the role {wanted}, and this one is {role}: use another token, or change its "
                f"role in the server's tokens_file"
            )
        self._security.admitted(token, wanted)
        return None, ""

    def _tell(self, peer: str, method: str, why: str) -> None:
        """At most one line in some seconds, however many calls come."""
        self._refused += 1
        if (now := time.monotonic()) - self._told > 10.0:
            log.warning(
                "refused %d calls since this was last said; the last: %s from %s: %s", self._refused, method, peer, why
            )
            self._refused, self._told = 0, now


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
