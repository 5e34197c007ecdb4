"""This server, with clients on another host whose connections are encrypted."""

from __future__ import annotations

from benchmarks.environments import CERTIFICATE
from benchmarks.systems.ours import OurSession
from replay_client import TLS


def session(address: str) -> OurSession:
    return OurSession(address, shared_memory=False, tls=TLS(ca=CERTIFICATE))
