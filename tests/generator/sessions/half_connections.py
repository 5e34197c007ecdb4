"""A generator with few file descriptors, and strangers that take them."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

from replay_client.access import ListenAddress
from replay_generator import GeneratorConfig
from replay_generator.engines.weights import MANIFEST
from replay_generator.metrics import GeneratorMetrics
from replay_generator.policy.remote import WeightsServer, checksum_of
from replay_generator.policy.remote.fetching import Fetcher
from tests.generator.sessions.test_remote import running
from tests.kit.processes import free_port

FILES = 256
"""File descriptors of the generator."""


def main(folder: str) -> None:
    """Plays one rollout of an agent elsewhere, then loads a version of the weights, and says so in a file."""
    asyncio.run(_run(Path(folder)))


async def _run(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    version = folder / "weights" / "step-1"
    version.mkdir(parents=True)
    (version / "data.json").write_text("{}")
    names = {"data.json": checksum_of(version / "data.json")}
    (version / MANIFEST).write_text(json.dumps({"files": list(names), "checksums": names}))
    port = free_port()
    with WeightsServer(folder / "weights", ListenAddress("weights", f"127.0.0.1:{port}")) as weights:
        threading.Thread(target=weights.serve_forever, args=(0.05,), daemon=True).start()
        async with running(group_size=1) as run:
            sessions = int(run.url.rpartition(":")[2])
            _write(folder / "ports", [sessions, port])
            await run.client.inserted(1)
            root = f"http://127.0.0.1:{port}"
            config = GeneratorConfig(weights_cache=folder / "cache", weights_root=root)
            fetcher = Fetcher(config, GeneratorMetrics(solved_reward=1.0).stats)
            found = await asyncio.to_thread(fetcher.folder_of, f"{root}/step-1")
            held = [open(path) for path in Path(found).iterdir() for _ in range(FILES // 8)]  # noqa: SIM115
            _write(folder / "loaded", sorted(Path(each.name).name for each in held))
        weights.shutdown()


def _write(path: Path, data: object) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data))
    part.rename(path)


HALVES = (
    b"",
    b"P",
    b"POST /sessions HTTP/1.1\r\nHost: x\r\n",
    b"POST /sessions/x/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
    b"POST /sessions/x/end HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    b"\x16\x03\x01\x02\x00\x01",
)


def strangers(port: int, count: int) -> list[socket.socket]:
    """So many connections with half a request."""
    found = []
    for number in range(count):
        stranger = socket.create_connection(("127.0.0.1", port), timeout=60)
        found.append(stranger)
        with suppress(OSError):  # it is closed already
            stranger.sendall(HALVES[number % len(HALVES)])
    return found


if __name__ == "__main__":
    main(sys.argv[1])
