"""Errors of the client: one class for each remedy, with the gRPC code in which the error travels."""

from __future__ import annotations

from typing import ClassVar

import grpc


class ReplayError(Exception):
    """Base of every error of this package.

    Programs read the `code`. The message is for people; do not parse it. Several classes may share a code. The server
    then sends a second text, the `reason`, which tells the classes apart. A class with an empty `reason` stands for its
    code without a reason, or with a reason that this client does not know.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    reason: ClassVar[str] = ""


class TableNotFoundError(ReplayError):
    """The server has no table of that name. The message lists the tables of the server."""

    code = grpc.StatusCode.NOT_FOUND


class InvalidRequestError(ReplayError, ValueError):
    """The request can never succeed as it stands; nothing was changed."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class StaleItemError(InvalidRequestError):
    """The item's policy version lags by more than the table's `max_staleness`. The item was not inserted."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class PayloadTooLargeError(InvalidRequestError):
    """The item is larger than the server, or one of its tables, ever holds."""

    code = grpc.StatusCode.OUT_OF_RANGE


class TableFullError(ReplayError):
    """The table is full and configured with `when_full = "reject"`; the item was not inserted.

    The client does not try again. The same insert succeeds once an item has left the table.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class ServerBusyError(ReplayError):
    """Clients together use all that the server allows: calls, streams, outstanding samples, waiting bytes, or memory.

    The request changed nothing. The client does not try again by itself. The same request succeeds once other requests
    have ended, so try again after a pause. A generator waits.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "server-busy"


class StorageError(ReplayError):
    """The server's disk is full or fails, or a checkpoint could not be written.

    The request changed nothing. The client does not try again by itself. The same request succeeds once the disk has
    room or works again, which may need an operator. A generator waits.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "storage-failed"


class DeadlineExceededError(ReplayError, TimeoutError):
    """The wait ended before the request could proceed. The message gives the reason of the wait."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class ServerUnavailableError(ReplayError, ConnectionError):
    """No server at the address answers in time, or a server answers that it cannot serve the request now, and why.

    The request may have taken effect, or may take effect later.
    """

    code = grpc.StatusCode.UNAVAILABLE


class AuthenticationError(ReplayError):
    """The token is missing, wrong or not allowed to do this, or the server's certificate is not to be trusted."""

    code = grpc.StatusCode.UNAUTHENTICATED


class ServerClosedError(ReplayError):
    """The server is shutting down, or this client was closed.

    A server that shuts down did not carry out the request. A call that waited when the client was closed may have taken
    effect.
    """

    code = grpc.StatusCode.ABORTED


class ShardDrainingError(ServerClosedError):
    """The server takes no new items, because it is to become empty and then stop. It did not store this item.

    A client of several servers inserts the item into another one.
    """

    reason = "draining"


class LeaseEndedError(ReplayError):
    """The lease of a batch that the insert names (`closes`, `held`) has ended, or the batch was acknowledged already.

    Another reader may have the batch now. Nothing was inserted or added. Another attempt cannot help.
    """

    code = grpc.StatusCode.ABORTED
    reason = "lease-ended"


class UnsupportedError(ReplayError):
    """The server does not have this operation, or its configuration turns the operation off."""

    code = grpc.StatusCode.UNIMPLEMENTED


_KINDS = [kind for kind in list(vars().values()) if isinstance(kind, type) and issubclass(kind, ReplayError)]
"""All classes of errors in this module."""
_CLASSES = {(kind.code, kind.reason): kind for kind in _KINDS}
"""The class of an error, by its code and reason."""
_CLASSES[grpc.StatusCode.PERMISSION_DENIED, ""] = AuthenticationError  # a second code of this class
STATUSES = {code.value[0]: code for code in grpc.StatusCode}
"""The status codes by their numbers on the wire."""
GONE = (ServerUnavailableError, ServerClosedError)
"""The errors of a server that does not answer now. The server may be back soon, and another shard may answer."""


def error_of(code: grpc.StatusCode | int, message: str, reason: str = "") -> ReplayError:
    """The error for a gRPC status (an enum member or its number) and the reason that the server gave with it."""
    status = STATUSES.get(code, grpc.StatusCode.UNKNOWN) if isinstance(code, int) else code
    kind = _CLASSES.get((status, reason))
    if kind is None:  # a reason that this client does not know
        kind = _CLASSES.get((status, ""), ReplayError)
    return kind(message or f"the server answered {status.name} without a message")
