"""Refused: the error of a request that the server refuses. A refused request has changed nothing."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from enum import IntEnum, StrEnum

FEW_TABLES = 10
"""The most names of tables that one error message lists."""


class Code(IntEnum):
    """The status codes of gRPC that the server uses, with gRPC's numbers.

    They are written out here because `tables` and `storage` must not import gRPC.
    """

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class Reason(StrEnum):
    """Distinguishes the causes of errors that have the same code. The client chooses its exception by the reason."""

    NONE = ""
    """The code alone says what failed."""
    TABLE_FULL = "table-full"
    """The table is full, and configured to reject."""
    SERVER_BUSY = "server-busy"
    """A bound of the server is reached: on calls, draws, outstanding samples, bytes or memory."""
    DRAINING = "draining"
    """The shard is being emptied and takes no new keys. The client inserts into another shard."""
    LEASE_ENDED = "lease-ended"
    """The lease of a batch has ended. The request is an item that was to close this batch, or a segment that was made
    from this batch."""
    STORAGE_FAILED = "storage-failed"
    """The disk is full or fails, or a checkpoint could not be written."""
    TRY_AGAIN = "try-again"
    """The server answers, but cannot serve the request at this moment."""
    CLOSING = "closing"
    """The server stops, and ends its streams."""


class Refused(Exception):
    """Ends a request with an error. Make this exception with the functions below, which give each cause its code."""

    def __init__(self, code: Code, message: str, reason: Reason = Reason.NONE) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason


# Each function makes the exception for one cause of a refusal. The docstring states the cause.


def invalid(message: str) -> Refused:
    """The request is wrong, and would be wrong again."""
    return Refused(Code.INVALID_ARGUMENT, message)


def not_found(message: str) -> Refused:
    """The request names a table that does not exist."""
    return Refused(Code.NOT_FOUND, message)


def too_large(message: str) -> Refused:
    """The item has more bytes than the server, or one of its tables, can hold."""
    return Refused(Code.OUT_OF_RANGE, message)


def full(message: str) -> Refused:
    """A table is full."""
    return Refused(Code.RESOURCE_EXHAUSTED, message, Reason.TABLE_FULL)


def busy(message: str) -> Refused:
    """One client, or all clients together, have reached a bound of the server."""
    return Refused(Code.RESOURCE_EXHAUSTED, message, Reason.SERVER_BUSY)


def storage_failed(message: str) -> Refused:
    """The disk is full or fails."""
    return Refused(Code.RESOURCE_EXHAUSTED, message, Reason.STORAGE_FAILED)


def deadline(message: str) -> Refused:
    """A time limit has passed: the timeout of the caller, or the server's limit for a slow transfer."""
    return Refused(Code.DEADLINE_EXCEEDED, message)


def closed(message: str) -> Refused:
    """The server is shutting down."""
    return Refused(Code.ABORTED, message)


def draining(key: int) -> Refused:
    """The shard is being emptied, and `key` is not in it."""
    message = f"this server is being emptied and does not have item {key}: insert it into another shard"
    return Refused(Code.ABORTED, message, Reason.DRAINING)


def lease_ended(message: str) -> Refused:
    """The reader has lost a batch that the item was to close, or from which the segment was made."""
    return Refused(Code.ABORTED, message, Reason.LEASE_ENDED)


def unsupported(message: str) -> Refused:
    """The server cannot do this with its configuration."""
    return Refused(Code.UNIMPLEMENTED, message)


def broken(message: str) -> Refused:
    """The server or its disk has a fault; the request was right."""
    return Refused(Code.INTERNAL, message)


def try_again(message: str) -> Refused:
    """The server cannot serve the request at this moment. Clients try again by themselves."""
    return Refused(Code.UNAVAILABLE, message, Reason.TRY_AGAIN)


def listed_tables(tables: Collection[str], near: str = "") -> str:
    """The names of `tables` in words: all names if there are few, else only the names most similar to `near`."""
    if len(tables) <= FEW_TABLES:
        return f"tables: {', '.join(tables)}"
    names = difflib.get_close_matches(near[:100], tables, n=FEW_TABLES, cutoff=0.5)
    if names:
        return f"there are {len(tables)} tables, such as {', '.join(names)}"
    return f"there are {len(tables)} tables"
