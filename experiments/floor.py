"""`python -m experiments.floor`: what gRPC in Python costs by itself here, with nothing of ours but a port.

An empty service that returns small messages (on an open stream, and with a call for each), takes messages of 1 MiB (up)
and sends them (down), with gRPC's event engine and without. No server on grpc.aio can be faster than this.

Beside it stands the round trip of a bare TCP socket, on the same event loop: what a protocol of our own could reach.
Its client is an event loop too, or a thread that blocks in `recv`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from replay_protos import NO_EVENT_ENGINE

_MIB = 1 << 20
_ROUNDS, _ROUND_TRIPS, _MESSAGES = 5, 1500, 200
_SETTINGS = {"with event engine": "", "without": NO_EVENT_ENGINE}


class Echo(asyncio.Protocol):
    """A bare socket that sends back what it gets."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


async def serve() -> None:
    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def call(request: bytes, context: Any) -> bytes:
        return request

    async def up(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield b"ok"

    async def down(request: bytes, context: Any) -> AsyncIterator[bytes]:
        message = bytes(_MIB)
        while True:
            yield message

    server = grpc.aio.server()
    handlers = {
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
        "Call": grpc.unary_unary_rpc_method_handler(call),
        "Up": grpc.stream_stream_rpc_method_handler(up),
        "Down": grpc.unary_stream_rpc_method_handler(down),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Floor", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    bare = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
    print(port, bare.sockets[0].getsockname()[1], flush=True)
    await server.wait_for_termination()


async def measure(port: int, bare_port: int) -> tuple[float, ...]:
    """Round trips in ms (medians): on an open stream, of a call, and of a bare socket, by an event loop and by a thread
    that blocks; then up and down in MB/s."""
    reader, writer = await asyncio.open_connection("127.0.0.1", bare_port)

    async def on_a_socket() -> None:
        writer.write(b"x" * 400)
        await reader.readexactly(400)

    bare = await _round_trip(on_a_socket)
    writer.close()
    blocking = await asyncio.to_thread(_blocking_round_trip, bare_port)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        echo, call = channel.stream_stream("/Floor/Echo")(), channel.unary_unary("/Floor/Call")

        async def on_the_stream() -> None:
            await echo.write(b"x" * 400)
            await echo.read()

        async def with_a_call() -> None:
            await call(b"x" * 400)

        on_stream, of_call = [await _round_trip(trip) for trip in (on_the_stream, with_a_call)]
        echo.cancel()

        up, message = channel.stream_stream("/Floor/Up")(), bytes(_MIB)

        async def answers() -> None:
            for _ in range(_MESSAGES):
                await up.read()

        begin, answered = time.perf_counter(), asyncio.create_task(answers())
        for _ in range(_MESSAGES):
            await up.write(message)
        await answered
        up_rate = _MESSAGES * _MIB / 1e6 / (time.perf_counter() - begin)
        up.cancel()

        down = channel.unary_stream("/Floor/Down")(b"")
        await down.read()
        begin = time.perf_counter()
        for _ in range(_MESSAGES):
            await down.read()
        down_rate = _MESSAGES * _MIB / 1e6 / (time.perf_counter() - begin)
        down.cancel()
    return on_stream, of_call, bare, blocking, up_rate, down_rate


def _blocking_round_trip(port: int) -> float:
    times, message = [], b"x" * 400
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_ROUND_TRIPS):
            begin = time.perf_counter()
            connection.sendall(message)
            left = len(message)
            while left:
                left -= len(connection.recv(left))
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


async def _round_trip(trip: Callable[[], Awaitable[None]]) -> float:
    times = []
    for _ in range(_ROUND_TRIPS):
        begin = time.perf_counter()
        await trip()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def main() -> None:
    figures: dict[str, list[list[float]]] = {name: [] for name in _SETTINGS}
    for _ in range(_ROUNDS):
        for name, setting in _SETTINGS.items():
            environment = os.environ | {"GRPC_EXPERIMENTS": setting, "GRPC_VERBOSITY": "NONE"}
            command = [sys.executable, "-m", "experiments.floor"]
            server = subprocess.Popen([*command, "serve"], stdout=subprocess.PIPE, text=True, env=environment)
            try:
                assert server.stdout is not None
                ports = server.stdout.readline().split()
                done = subprocess.run([*command, *ports], capture_output=True, text=True, env=environment, check=True)
            finally:
                server.kill()
                server.wait()
            figures[name].append([float(word) for word in done.stdout.split()])
    for name, rounds in figures.items():
        stream, call, bare, blocking, up, down = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(
            f"{name:18} round trip {stream:.3f} ms, as a call {call:.3f} ms, bare socket {bare:.3f} ms, blocking "
            f"{blocking:.3f} ms   up {up:.0f} MB/s   down {down:.0f} MB/s"
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        asyncio.run(serve())
    elif sys.argv[1:]:
        print(*asyncio.run(measure(int(sys.argv[1]), int(sys.argv[2]))))
    else:
        main()
