"""Auth: tokens and certificates, the role that each gRPC method needs, and the interceptor that refuses calls.

* A call is refused before any byte of its request is read.
* Only hashes of tokens are kept. No token appears in a log or an error.
* At most one second after a token is revoked, it can open no new call. After at most two seconds its open calls end.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import grpc
from grpc_reflection.v1alpha import reflection

from replay_protos.framing import SERVICE
from replay_protos.transport import PemFiles, readable_by_others
from replay_protos.words import counted
from replay_server.config import SecurityConfig

T = TypeVar("T")
log = logging.getLogger("replay_server")


class Role(IntEnum):
    """The rights of a token. Each role also has all rights of the roles above it in this list."""

    READ_ONLY = 1
    """Look at everything, change nothing, take nothing out."""
    READ_WRITE = 2
    """Insert, sample and publish, as generators and trainers do."""
    ADMIN = 3
    """Change the server itself, and remove data that other clients need."""

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


ROLES = {
    "GetServerInfo": Role.READ_ONLY,
    "ListItems": Role.READ_ONLY,
    "Get": Role.READ_ONLY,
    "ShareMemory": Role.READ_ONLY,  # it only carries the bytes of the other methods
    "GetPolicy": Role.READ_ONLY,
    "WatchPolicy": Role.READ_ONLY,
    "ListCheckpoints": Role.READ_ONLY,
    "Insert": Role.READ_WRITE,
    "InsertStream": Role.READ_WRITE,
    "Sample": Role.READ_WRITE,
    "Draw": Role.READ_WRITE,
    "ConsumeItems": Role.READ_WRITE,
    "Multiplex": Role.READ_WRITE,  # the methods that it carries need no higher role
    "UpdatePriorities": Role.READ_WRITE,
    "Delete": Role.READ_WRITE,
    "SetPolicyVersion": Role.READ_WRITE,
    "AcquirePermits": Role.READ_WRITE,
    "ReleasePermits": Role.READ_WRITE,
    "Describe": Role.READ_WRITE,
    "Leave": Role.READ_WRITE,
    "CreateCheckpoint": Role.READ_WRITE,  # a trainer asks for a checkpoint of the server with each of its own
    "UpdateTable": Role.ADMIN,
    "Reset": Role.ADMIN,
}
"""The role that each method needs. A method that is not listed, or is of another service, needs ADMIN."""

REVOKED = "the token that this call came with does not allow it any more"
"""The message with which an open call is cancelled when its token is revoked."""
_SHORT_TOKEN = 16
"""The server warns about tokens with fewer characters."""
_SECONDS_PER_LINE = 10.0
"""Seconds between two log lines about refused calls."""


class Tokens:
    """The tokens that a server accepts. Only their hashes are kept.

    A token is written as `ROLE:TOKEN`. Tokens are separated by white space. A line that starts with `#` is a comment:

        # of the trainer and the generators
        read-write:5f0c...
        read-only:91ab...
    """

    def __init__(self, text: str, source: str) -> None:
        """Reads the tokens in `text`, which comes from `source`.

        If `text` has a wrong entry or no token, raises ValueError. The error names the source and the line, but never
        shows the text.
        """
        self._roles: dict[bytes, Role] = {}
        """The role of each token, by the token's hash."""
        roles = {str(role): role for role in Role}
        for number, line in enumerate(text.splitlines(), start=1):
            if line.lstrip().startswith("#"):
                continue
            for entry in line.split():
                name, _, token = entry.partition(":")
                if name not in roles or not token or not token.isascii() or not token.isprintable():
                    raise ValueError(
                        f"{source}, line {number}: a token is written as ROLE:TOKEN, with the role one of "
                        f"{', '.join(roles)} and the token in printable ASCII"
                    )
                if len(token) < _SHORT_TOKEN:
                    log.warning("%s, line %d: the token is so short that it can be guessed", source, number)
                self._roles[_digest(token)] = roles[name]
        if not self._roles:
            raise ValueError(f"{source} holds no token; write a line such as {Role.READ_WRITE}:$(openssl rand -hex 32)")

    def role_of(self, token: str) -> Role | None:
        """The role of a token; None if the token is unknown. Takes the same time for all tokens of the same length."""
        digest = _digest(token)
        role_of_token = None
        # The loop does not end early, so that the time that it takes does not tell which token is right.
        for known_digest, role in self._roles.items():
            if hmac.compare_digest(known_digest, digest):
                role_of_token = role
        return role_of_token

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the tokens in a file.

        If the file cannot be used, raises ValueError. The error names the file and a wrong line, but never shows the
        text.
        """
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError):
                reason = error.strerror
            else:  # the message of a UnicodeDecodeError would show bytes of the file
                reason = "it is not text"
            raise ValueError(f"tokens_file {path} cannot be read: {reason}") from None
        return cls(text, f"tokens_file {path}")


class Authorizer(grpc.aio.ServerInterceptor):
    """Decides which calls may proceed, and ends open calls whose token is revoked.

    A tokens file that has changed is read again. If it cannot be used, the tokens read before stay in force.
    """

    def __init__(self, section: SecurityConfig, environment: Mapping[str, str]) -> None:
        """Reads the tokens, if `section` or `environment` gives any.

        The first of these that is set counts: the file `section.tokens_file`, the file that the variable
        REPLAY_TOKENS_FILE names, and the tokens in the variable REPLAY_TOKENS. If the tokens cannot be used, raises
        ValueError that names the file or the variable.
        """
        path = section.tokens_file or environment.get("REPLAY_TOKENS_FILE")
        text = environment.get("REPLAY_TOKENS")
        self.tokens: Reread[Tokens] | None = None
        """None: calls need no token."""
        if path:
            self.tokens = Reread("tokens_file", partial(Tokens.read, Path(path)), Path(path))
            if readable_by_others(path):
                log.warning("tokens_file %s can be read by every user of this machine: chmod 600 it", path)
        elif text:
            known_tokens = Tokens(text, "REPLAY_TOKENS")  # not in the lambda, which would keep the text in memory
            self.tokens = Reread("REPLAY_TOKENS", lambda: known_tokens)
        self._calls: dict[asyncio.Task[Any], tuple[str, Role]] = {}
        """The token of each open call, and the role that the call needs."""
        self._refused_calls = 0
        """The number of calls that were refused since the last log line about refused calls."""
        self._logged_at = float("-inf")
        """The time of the last log line about refused calls."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Returns the handler of a call: the method's own handler, or one that refuses the call.

        gRPC asks for the handler before it reads any byte of the request.
        """
        method: str = handler_call_details.method
        code, message = self._check(method, handler_call_details.invocation_metadata)
        if code is None:
            return await continuation(handler_call_details)

        # This is a handler of streams even if the method has a single request. gRPC calls a handler of streams before
        # it reads a request, so no byte of the refused request is read.
        async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self._log_refusal(context.peer(), method, message)
            await context.abort(code, message)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _check(self, method: str, metadata: Any) -> tuple[grpc.StatusCode | None, str]:
        """Returns the code and message with which to refuse the call; (None, "") if the call may proceed.

        A call that may proceed is remembered, so that `end_revoked` can end it. `method` is the full name that gRPC
        gives to the method: "/SERVICE/METHOD".
        """
        service, _, name = method.removeprefix("/").partition("/")
        authorizations = [value for key, value in metadata if key == "authorization"]
        if not authorizations:
            return grpc.StatusCode.UNAUTHENTICATED, (
                "this server wants a token and the call has none: set REPLAY_TOKEN or REPLAY_TOKEN_FILE, give "
                "--token-file, or pass token=... to the client"
            )
        scheme, _, token = str(authorizations[0]).partition(" ")
        role = None
        if len(authorizations) == 1 and scheme.lower() == "bearer":
            role = self._role_of(token)
        if role is None:
            return grpc.StatusCode.UNAUTHENTICATED, (
                "the token is not one of this server's: check that REPLAY_TOKEN, REPLAY_TOKEN_FILE, --token-file or "
                "token=... is the current one in the server's tokens_file (or REPLAY_TOKENS)"
            )
        needed = _needed_role(service, name)
        if role < needed:
            return grpc.StatusCode.PERMISSION_DENIED, (
                f"{name} needs a token of the role {needed}, and this one is {role}: use another token, or change its "
                f"role in the server's tokens_file"
            )
        self._remember_call(token, needed)
        return None, ""

    async def end_revoked(self) -> None:
        """Ends open calls whose token no longer allows them. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(SECONDS_PER_LOOK)
            tokens = {token for token, _ in self._calls.values()}
            # The present role of each token. It is looked up only once for all calls that came with the token.
            roles = {token: self._role_of(token) for token in tokens}
            revoked: list[asyncio.Task[Any]] = []
            for task, (token, needed) in self._calls.items():
                role = roles[token]
                if role is None or role < needed:
                    revoked.append(task)
            for task in revoked:
                task.cancel(REVOKED)
            if revoked:
                log.warning("ended %d open calls, whose tokens do not allow them any more", len(revoked))

    def _role_of(self, token: str) -> Role | None:
        """The role of a token by the present content of the tokens file; None if the token is unknown."""
        assert self.tokens is not None
        self.tokens.look()
        return self.tokens.value.role_of(token)

    def _remember_call(self, token: str, needed: Role) -> None:
        """Remembers the call that the current task answers, until the task ends, so that `end_revoked` finds the call.

        gRPC answers each call in a task of its own: the task asks for the handler, calls it, and ends with the call.
        """
        task = asyncio.current_task()
        if task is not None:
            self._calls[task] = (token, needed)
            task.add_done_callback(lambda task: self._calls.pop(task, None))

    def _log_refusal(self, peer: str, method: str, why: str) -> None:
        """Counts a refused call. At most once in _SECONDS_PER_LINE, logs the count and this call, the last of them."""
        self._refused_calls += 1
        now = time.monotonic()
        if now - self._logged_at > _SECONDS_PER_LINE:
            log.warning(
                "refused %s since this was last said; the last: %s from %s: %s",
                counted(self._refused_calls, "call"),
                method,
                peer,
                why,
            )
            self._refused_calls = 0
            self._logged_at = now


def _needed_role(service: str, method: str) -> Role:
    """The role that a call of a gRPC service needs."""
    if service == SERVICE:
        return ROLES.get(method, Role.ADMIN)
    if service == reflection.SERVICE_NAME:
        return Role.READ_ONLY
    # The client uses another version of the protocol. If the call may proceed, gRPC answers that there is no such
    # method, which tells the client more than a refusal.
    if service.startswith("replay."):
        return Role.READ_ONLY
    return Role.ADMIN


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


SECONDS_PER_LOOK = 1.0
"""Seconds between two looks at the files."""


class Reread(Generic[T]):
    """A value that is read from files, and read again when they change.

    While the files cannot be used, the value that was read last stays in force.
    """

    def __init__(self, name: str, read: Callable[[], T], *files: Path | None) -> None:
        """Reads the value for the first time.

        `read` reads the value from `files`, and raises ValueError if they cannot be used. `name` is the name of the
        option in log lines. Entries of `files` that are None are left out.
        """
        self._name = name
        self._read = read
        self._files = [path for path in files if path is not None]
        self._last_state = self._state()  # taken before `read`, so that a change during `read` is noticed later
        self._looked = float("-inf")
        """The time of the last look at the files."""
        self.value = read()

    def look(self) -> bool:
        """Reads the files again if they have changed. Returns True if there is a new value.

        It looks at the files at most once in SECONDS_PER_LOOK, and returns False between two looks.
        """
        now = time.monotonic()
        if now - self._looked < SECONDS_PER_LOOK:
            return False
        self._looked = now
        state = self._state()
        if state == self._last_state:
            return False
        # This is noted even if `read` fails, so that a wrong file is reported only once, and not at every look.
        self._last_state = state
        try:
            self.value = self._read()
        except ValueError as error:
            log.error("%s; what was read before stays in force", error)
            return False
        log.info("%s %s was read again", self._name, self._files[0])
        return True

    def _state(self) -> list[tuple[int, int, int]]:
        """The time, size and inode of each file; empty if a file is missing. When a file changes, so does the result.

        The time alone is not enough. The clock of a file system moves only every few milliseconds, so a file that was
        emptied and then written may have the same time after both changes.
        """
        try:
            facts = [path.stat() for path in self._files]
        except OSError:
            return []  # a file is missing while it is being replaced
        return [(fact.st_mtime_ns, fact.st_size, fact.st_ino) for fact in facts]


class ServerCertificates:
    """The server's TLS certificate, private key and client authority. The files may change while the server runs."""

    def __init__(self, section: SecurityConfig) -> None:
        """Reads the files. If they cannot be used, raises ValueError that names the wrong file and the remedy."""
        self._section = section
        cert = section.tls_cert
        key = section.tls_key
        ca = section.tls_client_ca
        read = partial(PemFiles.read, cert=cert, key=key, ca=ca, ca_name="tls_client_ca")
        self._pem_files = Reread("tls_cert", read, cert, key, ca)
        if key is not None and readable_by_others(key):
            log.warning("tls_key %s can be read by every user of this machine: chmod 600 it", key)

    def credentials(self) -> grpc.ServerCredentials | None:
        """The credentials for gRPC's port; None if the configuration does not ask for TLS."""
        if self._section.tls_cert is None:
            return None
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._changed_configuration,  # type: ignore[arg-type]  # None is allowed, whatever the type stubs say
            require_client_authentication=self._section.tls_client_ca is not None,
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        """The certificate, its key and the client authority, as they were read last."""
        pem = self._pem_files.value
        assert pem.key is not None
        assert pem.cert is not None
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)

    def _changed_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration; None if it has not changed. gRPC calls this for each handshake, on its own thread."""
        if self._pem_files.look():
            return self._configuration()
        return None
