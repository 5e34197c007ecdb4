"""Refused: the error of a request that changed nothing. Its client gets the code, the message and the reason."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Code(IntEnum):
    """How a request failed, with the number that gRPC has for it. `tables` and `storage` do not import gRPC."""

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


class Reason(StrEnum):
    """More about RESOURCE_EXHAUSTED and ABORTED. Clients choose the class of their error by it."""

    NONE = ""
    """No reason beside the code."""
    TABLE_FULL = "table-full"
    """The table is full, and configured to reject."""
    SERVER_BUSY = "server-busy"
    """Clients together use all of a bound of the server: calls, streams, outstanding samples, bytes."""
    DRAINING = "draining"
    """The server is to become empty, and has no item with this key: insert it elsewhere."""
    STORAGE_FAILED = "storage-failed"
    """The disk is full or fails, or a checkpoint could not be written."""


class Refused(Exception):
    def __init__(self, code: Code, message: str, reason: Reason = Reason.NONE) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason


def invalid(message: str) -> Refused:
    return Refused(Code.INVALID_ARGUMENT, message)


def not_found(message: str) -> Refused:
    return Refused(Code.NOT_FOUND, message)


def stale(message: str) -> Refused:
    return Refused(Code.FAILED_PRECONDITION, message)


def too_large(message: str) -> Refused:
    return Refused(Code.OUT_OF_RANGE, message)


def full(message: str) -> Refused:
    """A table is full."""
    return Refused(Code.RESOURCE_EXHAUSTED, message, Reason.TABLE_FULL)


def busy(message: str) -> Refused:
    """A bound that all clients share is reached."""
    return Refused(Code.RESOURCE_EXHAUSTED, message, Reason.SERVER_BUSY)


def storage_failed(message: str) -> Refused:
    """The disk is full or fails."""
    return Refused(Code.RESOURCE_EXHAUSTED, message, Reason.STORAGE_FAILED)


def deadline(message: str) -> Refused:
    return Refused(Code.DEADLINE_EXCEEDED, message)


def closed(message: str) -> Refused:
    return Refused(Code.ABORTED, message)


def draining(key: int) -> Refused:
    """The server takes no new items."""
    message = f"this server is being emptied and does not have item {key}: insert it into another shard"
    return Refused(Code.ABORTED, message, Reason.DRAINING)


def unsupported(message: str) -> Refused:
    return Refused(Code.UNIMPLEMENTED, message)


def broken(message: str) -> Refused:
    return Refused(Code.INTERNAL, message)


def try_again(message: str) -> Refused:
    """Clients try again by themselves."""
    return Refused(Code.UNAVAILABLE, message)
