"""Errors of the client: one class for each remedy, with the gRPC code in which the error travels."""

from __future__ import annotations

from typing import ClassVar

import grpc


class ReplayError(Exception):
    """Base of every error of this package.

    Programs read the `code`. The message is for people; do not parse it. If several classes share a code, the server
    also sends a `reason`, which tells them apart. The class with an empty `reason` is for a code that comes without a
    reason, or with a reason that this client does not know.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    reason: ClassVar[str] = ""


class TableNotFoundError(ReplayError):
    """The server has no table of that name. The message lists the tables of the server."""

    code = grpc.StatusCode.NOT_FOUND


class InvalidRequestError(ReplayError, ValueError):
    """The request changed nothing. It can never succeed unless it is changed."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class StaleItemError(InvalidRequestError):
    """The item's policy version lags by more than the table's `max_staleness`. The item was not inserted."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class PayloadTooLargeError(InvalidRequestError):
    """The item alone is larger than the server, or one of its tables, can ever hold."""

    code = grpc.StatusCode.OUT_OF_RANGE


class TableFullError(ReplayError):
    """The table is full and configured with `when_full = "reject"`; the item was not inserted.

    The client does not try again. The same insert succeeds once an item has left the table.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class ServerBusyError(ReplayError):
    """All clients together have reached a limit of the server.

    The limits are on calls, streams, outstanding samples, waiting bytes and memory. The request changed nothing.

    The client does not try again by itself. The same request succeeds once other requests have ended, so try again
    after a pause. A generator does so by itself.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "server-busy"


class StorageError(ReplayError):
    """The server's disk is full or fails, or a checkpoint could not be written.

    The request changed nothing. The client does not try again by itself. The same request succeeds once the disk has
    room or works again, which may need an operator. A generator waits and tries again by itself.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "storage-failed"


class DeadlineExceededError(ReplayError, TimeoutError):
    """The timeout ended while the request was waiting. The message says why the request had to wait."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class ServerUnavailableError(ReplayError, ConnectionError):
    """No server at the address answers in time, or the server answers that it cannot serve the request now.

    The message gives the reason. The request may have taken effect, or may take effect later.
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


class ClientClosedError(ServerClosedError):
    """This client was closed. Another attempt with it cannot help."""

    reason = "client-closed"  # no server sends it


class ShardDrainingError(ServerClosedError):
    """The server takes no new items, because it is being emptied before it stops. It did not store this item.

    A client of several servers inserts the item into another one.
    """

    reason = "draining"


class LeaseEndedError(ReplayError):
    """The insert names a batch (`closes`, `held`) whose lease has ended, or that was acknowledged already.

    Another reader may have the batch now. Nothing was inserted or added. Another attempt cannot help.
    """

    code = grpc.StatusCode.ABORTED
    reason = "lease-ended"


class UnsupportedError(ReplayError):
    """The server does not have this operation, or its configuration turns the operation off."""

    code = grpc.StatusCode.UNIMPLEMENTED


_CLASSES = [value for value in list(vars().values()) if isinstance(value, type) and issubclass(value, ReplayError)]
"""All classes of errors in this module."""
_CLASS_OF = {(error_class.code, error_class.reason): error_class for error_class in _CLASSES}
"""(code, reason) of an error -> its class."""
_CLASS_OF[grpc.StatusCode.PERMISSION_DENIED, ""] = AuthenticationError  # a second code of this class
STATUSES = {code.value[0]: code for code in grpc.StatusCode}
"""Number of a status code on the wire -> the status code."""
GONE = (ServerUnavailableError, ServerClosedError)
"""The errors of a server that does not answer now. The server may be back soon, and another shard may answer."""


def error_of(code: grpc.StatusCode | int, message: str, reason: str = "") -> ReplayError:
    """Makes the error for a gRPC status (an enum member or its number) and the reason that the server gave with it."""
    status = STATUSES.get(code, grpc.StatusCode.UNKNOWN) if isinstance(code, int) else code
    error_class = _CLASS_OF.get((status, reason))
    if error_class is None:  # this client does not know the reason, or no class has this status
        error_class = _CLASS_OF.get((status, ""), ReplayError)
    return error_class(message or f"the server answered {status.name} without a message")
