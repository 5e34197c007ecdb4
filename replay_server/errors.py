"""Refused: a request that changed nothing, with the gRPC code and the words that its client will get."""

from __future__ import annotations

import grpc


class Refused(Exception):
    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, message)


def not_found(message: str) -> Refused:
    return Refused(grpc.StatusCode.NOT_FOUND, message)


def stale(message: str) -> Refused:
    return Refused(grpc.StatusCode.FAILED_PRECONDITION, message)


def too_large(message: str) -> Refused:
    return Refused(grpc.StatusCode.OUT_OF_RANGE, message)


def full(message: str) -> Refused:
    return Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, message)


def deadline(message: str) -> Refused:
    return Refused(grpc.StatusCode.DEADLINE_EXCEEDED, message)


def closed(message: str) -> Refused:
    return Refused(grpc.StatusCode.ABORTED, message)


def unsupported(message: str) -> Refused:
    return Refused(grpc.StatusCode.UNIMPLEMENTED, message)


def broken(message: str) -> Refused:
    return Refused(grpc.StatusCode.INTERNAL, message)


def try_again(message: str) -> Refused:
    """Clients do so by themselves."""
    return Refused(grpc.StatusCode.UNAVAILABLE, message)
