"""The server goes on if gRPC's own server ends by itself."""

import asyncio

from replay_client import AsyncReplayClient
from replay_server import LimitsSection, SecuritySection, TableConfig
from replay_server.rpc.auth import Authorizer
from replay_server.rpc.listener import Listener
from replay_server.rpc.service import ReplayService
from replay_server.rpc.tls import ServerCertificates
from replay_server.tables.buffer import ReplayBuffer


async def test_a_server_whose_grpc_has_ended_listens_anew_at_its_address():
    loop, limits, section = asyncio.get_running_loop(), LimitsSection(), SecuritySection()
    service = ReplayService(ReplayBuffer([TableConfig(name="plain")], loop.time), limits)
    listener = Listener(
        service, "127.0.0.1:0", limits, Authorizer(section, {}), ServerCertificates(section), latencies=None
    )
    await listener.start()
    stop = asyncio.Event()
    serving = asyncio.create_task(listener.serve_until(stop))
    async with AsyncReplayClient(listener.address, timeout=20.0) as client:
        key = await client.insert(b"before", {"plain": 1.0})
        first = listener._server
        await first.stop(None)
        assert (await client.get([key]))[0].payload == b"before"
        assert listener._server is not first
    stop.set()
    await serving
    await listener.stop(0)
