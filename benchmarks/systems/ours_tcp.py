"""This server, with clients that send payloads over gRPC as if they were on another host."""

from __future__ import annotations

from benchmarks.systems.ours import OurSession


def session(address: str) -> OurSession:
    return OurSession(address, shared_memory=False)
