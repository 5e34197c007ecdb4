"""Watches the policy version of one server, across broken connections."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from replay_client.connection import Connection, Patience
from replay_client.records import Policy, policy_of
from replay_protos import replay_pb2 as pb


async def watch_policy(connection: Connection) -> AsyncGenerator[Policy]:
    """Yields the current policy, then every new one. Of several in quick succession only the newest may come."""
    patience = Patience(connection, connection.timeout)
    last: tuple[int, str] | None = None
    while True:
        call = connection.stub.WatchPolicy(pb.GetPolicyRequest())
        try:
            async for message in call:
                patience.renew()
                if (message.version, message.weights) != last:
                    last = message.version, message.weights
                    yield policy_of(message)
        except grpc.aio.AioRpcError as error:
            await patience.pause_or_raise(error)
        finally:
            call.cancel()
