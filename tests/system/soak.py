"""`make soak`: a real server under a mixed workload for a long time; fails where anything grows that should not.

    python -m tests.system.soak [--minutes 20] [--data-dir FOLDER] [--no-shared-memory]

Every few seconds it notes the server's memory, file descriptors, threads and asyncio tasks, its disk space, and how
long calls took. The median of the last third must not be above that of the second (the first is the time to warm up)
by more than GROWTH allows, and when the workload has ended nothing may be left of it.

Before that it fills what the server remembers to recognise retries: keys, taken batches, answers. Their bounds would
not be reached within the run, and what grows towards a bound looks like a leak.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import psutil

from replay_client import AsyncReplayClient, ReplayClient
from replay_client.errors import ReplayError
from replay_client.testing import PATIENCE, until
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server.tables.buffer import MAX_ANSWERS, MAX_KNOWN_KEYS
from replay_server.tables.outstanding import MAX_ACKNOWLEDGED
from tests.kit.faults import Books, Crew

TOKEN = "soak-0123456789abcdef"
CONFIG = """
[server]
{data_dir}
shared_memory = {shared_memory}
max_bytes = "256MiB"

[admission]
fresh_groups_per_step = 64
max_staleness = 1000000
permit_ttl = 2.0

[[tables]]
name = "rollouts"
rate_limiter = {{ type = "queue", max_size = 64 }}
forward_to = "replay"

[[tables]]
name = "replay"
sampler = "prioritized"
remover = "min_heap"
max_size = 500
max_bytes = "128MiB"
max_staleness = 50

[[tables]]
name = "filling"
max_size = 8
remover = "fifo"
"""
INTERVAL = 5.0
GROWTH: dict[str, tuple[float, float]] = {
    "memory_mb": (1.05, 10.0),
    "fds": (1.0, 8.0),
    "threads": (1.0, 2.0),
    "tasks": (1.1, 10.0),
    "objects": (1.02, 20_000.0),
    "used_mb": (1.05, 10.0),
    "disk_mb": (1.3, 20.0),
    "policy_ms": (2.0, 5.0),
    "insert_ms": (2.0, 5.0),
    "sample_ms": (2.0, 10.0),
}
"""By column: the last third may be this many times the second, plus this."""


class Workload(Crew):
    """Clients of every kind, each on a thread, at a rate that leaves room for others."""

    pause = 0.2

    def __init__(self, address: str) -> None:
        self.times: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=2000))
        self.rng = random.Random(0)
        works = [self.write_small, self.write_groups, self.write_groups, self.write_large, self.train, self.lease]
        super().__init__(address, Books(), [*works, self.look, self.come_and_go, self.break_off], timeout=10.0)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.times[what].append(1e3 * (time.perf_counter() - started))

    def client(self, timeout: float = 10.0) -> ReplayClient:
        return ReplayClient(self.address, timeout, token=TOKEN)

    def write_small(self, client: ReplayClient) -> None:
        self.stopping.wait(0.02)
        payload = self.rng.randbytes(self.rng.randrange(2000))
        with self.timed("insert"):
            client.insert(payload, {"replay": self.rng.random()}, policy_version=1 << 40)

    def write_groups(self, client: ReplayClient) -> None:
        """As generators do: with permits, into the queue."""
        with client.writer(max_in_flight=8, timeout=30.0) as writer:
            while not self.stopping.wait(0.01):
                lease = client.acquire_permits(2)
                version = client.policy().version
                for _ in range(self.rng.choice([0, 1, 2])):
                    payload = bytes(self.rng.choice([500, 50_000, 50_000, 400_000]))
                    priorities = {"rollouts": self.rng.choice([0.0, 1.0])}
                    writer.insert(payload, priorities, policy_version=version, permits=lease)
                if self.rng.random() < 0.5:
                    client.release_permits(lease)  # otherwise what is left expires

    def write_large(self, client: ReplayClient) -> None:
        self.stopping.wait(0.5)
        payload = bytes(self.rng.randrange(2_000_000, 6_000_000))
        client.insert(payload, {"replay": self.rng.random()}, policy_version=client.policy().version)

    def train(self, client: ReplayClient) -> None:
        """As a trainer does: takes groups, replaces some of them, publishes."""
        with client.sampler("rollouts", batch_size=4, prefetch=2) as sampler:
            version = client.policy().version
            while not self.stopping.is_set():
                batch = next(sampler)
                with self.timed("sample"):
                    mates = client.sample("replay", 4, min_samples=1, scope=f"step-{version}", timeout=5.0)
                client.update_priorities("replay", {sample.info.key: self.rng.random() for sample in mates})
                del batch
                version += 1
                client.set_policy_version(version, f"weights-{version}")

    def lease(self, client: ReplayClient) -> None:
        self.stopping.wait(0.05)
        samples = client.sample("replay", 2, min_samples=1, lease=self.rng.choice([0.2, 10.0]), timeout=5.0)
        if self.rng.random() < 0.7:
            client.acknowledge(samples, requeue=self.rng.random() < 0.3)

    def look(self, client: ReplayClient) -> None:
        self.stopping.wait(0.1)
        with self.timed("policy"):
            client.policy()
        client.server_info()
        page = client.list_items("replay", limit=20, order_by="priority", descending=self.rng.random() < 0.5)
        client.get([item.key for item in page.items[:5]])
        client.delete("replay", [item.key for item in page.items[:1]])

    def come_and_go(self, _: ReplayClient) -> None:
        """Clients that connect, wait for something, watch, and leave in the middle of it."""
        self.stopping.wait(0.05)
        with self.client(timeout=0.3) as client:
            with suppress(ReplayError):
                client.sample("rollouts", 60, timeout=self.rng.random() * 0.1)
            next(client.watch_policy())
            sampler = client.sampler("replay", batch_size=2, prefetch=2)
            next(sampler)

    def break_off(self, _: ReplayClient) -> None:
        """Calls that end in the middle: half an item, an answer that is not read, no token, nonsense."""
        self.stopping.wait(0.1)
        metadata = [("authorization", f"Bearer {TOKEN}")]
        with grpc.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub, end = ReplayStub(channel), threading.Event()

            def half() -> Iterator[pb.InsertRequest]:
                targets = [pb.InsertTarget(table="replay")]
                yield pb.InsertRequest(keys=[1], targets=targets, payload_sizes=[5_000_000], payloads=bytes(1 << 20))
                end.wait(5)

            calls = [
                stub.InsertStream(half(), metadata=metadata),
                stub.Sample(pb.SampleRequest(table="replay", num_samples=2, timeout=1), metadata=metadata),
                stub.Sample(pb.SampleRequest(table="rollouts", num_samples=64, timeout=60), metadata=metadata),
            ]
            for bad in ([], [("authorization", "Bearer wrong")]):
                with suppress(grpc.RpcError):
                    stub.GetPolicy(pb.GetPolicyRequest(), metadata=bad, timeout=5)
            with suppress(grpc.RpcError):
                garbage = self.rng.randbytes(200)
                channel.unary_unary("/replay.v1.Replay/Insert")(garbage, metadata=metadata, timeout=5)
            time.sleep(self.rng.random() * 0.2)
            for call in calls:
                call.cancel()
            end.set()


class Server:
    """`replay serve` as a process that also writes down what it holds."""

    def __init__(self, folder: Path, data_dir: Path | None, shared_memory: bool) -> None:
        setting = f'data_dir = "{data_dir}"' if data_dir else ""
        where = '"/dev/shm"' if shared_memory else "false"
        (folder / "replay.toml").write_text(CONFIG.format(data_dir=setting, shared_memory=where))
        self.data_dir, self._notes = data_dir, folder / "notes.json"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.soak", "--serve", str(folder / "replay.toml"), str(self._notes)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"REPLAY_TOKENS": f"admin:{TOKEN}"},
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().removeprefix("listening on ").strip()
        self._ps = psutil.Process(self.process.pid)

    def measure(self) -> dict[str, float]:
        disk = sum(file.stat().st_blocks * 512 for file in self.data_dir.rglob("*")) if self.data_dir else 0
        memory = self._ps.memory_info()
        return {
            "memory_mb": (memory.rss - memory.shared) / 1e6,  # without what is mapped from files: that may go any time
            "fds": self._ps.num_fds(),
            "threads": self._ps.num_threads(),
            **self._inside(),
            "disk_mb": disk / 1e6,
            "cpu": self._ps.cpu_percent(),
        }

    def _inside(self) -> dict[str, float]:
        until(self._notes.exists, "the server does not count")
        found: dict[str, float] = json.loads(self._notes.read_text())
        return found

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(200)


class _Malloc(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]  # noqa: RUF012  # ctypes wants a list


def held() -> dict[str, float]:
    """Counts this process's asyncio tasks, Python's blocks of memory, and the MB that malloc has handed out."""
    malloc = ctypes.CDLL(None).mallinfo2
    malloc.restype = _Malloc
    info = malloc()
    return {
        "tasks": float(len(asyncio.all_tasks())),
        "objects": float(sys.getallocatedblocks()),
        "used_mb": (info.uordblks + info.hblkhd) / 1e6,
    }


def serve(config: str, notes: str) -> None:
    """What `Server` runs: the command itself, with one more task that counts."""
    import replay_cli as command
    from replay_server import ReplayServer

    run = ReplayServer.run

    async def counted(self: ReplayServer, *arguments: Callable[[], None]) -> None:
        async def count() -> None:
            while True:
                Path(notes + ".new").write_text(json.dumps(held()))
                Path(notes + ".new").rename(notes)
                await asyncio.sleep(1)

        counting = asyncio.create_task(count())
        try:
            await run(self, *arguments)
        finally:
            counting.cancel()

    ReplayServer.run = counted  # type: ignore[method-assign]
    sys.argv = ["replay", "serve", "--config", config, "--listen", "127.0.0.1:0", "--log-level", "error"]
    command.main()


def soak(minutes: float, data_dir: Path | None, shared_memory: bool = True, fill: bool = False) -> list[str]:
    """Runs it and prints what it sees; what is wrong. `fill`: first what the server remembers of retries."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), data_dir, shared_memory)
        try:
            return observe(server, minutes, fill)
        finally:
            server.process.kill()
            server.process.wait()


async def fill_retries(address: str) -> None:
    """Inserts, takes and deletes until the server has forgotten the first of each."""
    async with AsyncReplayClient(address, 60.0, token=TOKEN) as client:
        async with client.writer() as writer:
            for _ in range(MAX_KNOWN_KEYS):
                await writer.insert(b"", {"filling": 0.0})

        async def take(count: int) -> None:
            async with client.sampler("filling", batch_size=1, prefetch=16) as sampler:
                for _ in range(count):
                    await anext(sampler)

        async def delete(count: int) -> None:
            for _ in range(count):
                await client.delete("filling", [1])

        await asyncio.gather(*(take(MAX_ACKNOWLEDGED // 8) for _ in range(8)))
        await asyncio.gather(*(delete(MAX_ANSWERS // 32) for _ in range(32)))
        await client.reset("filling")


def observe(server: Server, minutes: float, fill: bool) -> list[str]:
    time.sleep(2)
    idle = server.measure()
    if fill:
        started = time.monotonic()
        asyncio.run(fill_retries(server.address))
        full = server.measure()["memory_mb"]
        print(f"{idle['memory_mb']:.0f} MB when idle, {full:.0f} MB with all that is remembered of retries "
              f"({time.monotonic() - started:.0f} s)", flush=True)  # fmt: skip
    workload = Workload(server.address)
    rows: list[dict[str, float]] = []
    started, shown = time.monotonic(), 0.0
    columns = ["minute", *GROWTH, "policy_p99", "insert_p99", "sample_p99", "live_mb", "items", "cpu"]
    print("  ".join(f"{name:>10}" for name in columns), flush=True)
    with workload.client() as client:
        problems = workload.books.violations
        while ((passed := time.monotonic() - started) < 60 * minutes or len(rows) < 6) and not problems:
            time.sleep(INTERVAL)
            info = client.server_info()
            row = server.measure() | {"minute": passed / 60, "live_mb": info.bytes / 1e6, "items": info.items}
            for what in ("policy", "insert", "sample"):
                times = sorted(workload.times[what]) or [0.0]
                row |= {f"{what}_ms": statistics.median(times), f"{what}_p99": times[int(0.99 * len(times))]}
                workload.times[what].clear()
            rows.append(row)
            if passed - shown >= 60 * minutes / 20:
                shown = passed
                print("  ".join(f"{row[name]:10.1f}" for name in columns), flush=True)
        workload.stop()
        print(f"refused: {json.dumps(dict(workload.books.totals))}")
        tables = client.server_info().tables
        print(f"inserts: { {name: table.inserts for name, table in tables.items()} }")
    return problems + growth(rows) + leftovers(server, idle)


def growth(rows: list[dict[str, float]]) -> list[str]:
    third = len(rows) // 3
    problems = []
    for name, (factor, more) in GROWTH.items():
        before, after = (statistics.median(row[name] for row in part) for part in (rows[third:-third], rows[-third:]))
        print(f"{name:>10}: median {before:.1f} in the second third, {after:.1f} in the last")
        if after > factor * before + more:
            problems.append(f"{name} grew from {before:.1f} to {after:.1f}")
    return problems


def leftovers(server: Server, idle: dict[str, float]) -> list[str]:
    """What is still there of clients that have gone, and whether the books balance. `idle`: what it measured before."""
    end = time.monotonic() + PATIENCE  # leases have ended by then
    with ReplayClient(server.address, 10.0, token=TOKEN) as client:
        while True:
            info = client.server_info()
            assert info.admission is not None
            held = {
                "streams": info.insert_streams + info.sample_streams,
                "in hand": sum(table.reserved for table in info.tables.values()),
                "waiting": sum(table.inserting.count + table.sampling.count for table in info.tables.values()),
                "permits": info.admission.running,
            }
            if not any(held.values()) or time.monotonic() > end:
                break
            time.sleep(0.5)
        problems = [f"{count} {what} are left" for what, count in held.items() if count]
        for name, table in info.tables.items():
            left = table.consumed + table.deleted + table.evicted + table.stale
            if table.inserts - left != table.size:
                problems.append(f"{name}: {table.inserts} inserts - {left} that left is not the size, {table.size}")
        client.reset("")
        info = client.server_info()
        problems += [f"{info.items} items of {info.bytes} bytes are left after a reset"] if info.items else []
    with suppress(AssertionError):  # the server notices a moment later that the last client has gone
        until(lambda: not more_than(idle, server.measure()), pause=1.0)
    measured = server.measure()
    print(f"at rest: {json.dumps({name: round(value, 1) for name, value in measured.items()})}")
    for name in more_than(idle, measured):
        problems.append(f"{measured[name]:.0f} {name} at rest, {idle[name]:.0f} before the first client")
    status = server.stop()
    return [*problems, *([f"the server ended with status {status}"] if status else [])]


def more_than(idle: dict[str, float], measured: dict[str, float]) -> list[str]:
    """Of what there is more than before the first client."""
    return [name for name in ("tasks", "fds") if measured[name] > idle[name] + 2]


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description="Runs a server under load and fails where something grows.")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--data-dir", type=Path, help="store durably there; left out: in memory")
    parser.add_argument("--no-shared-memory", action="store_true", help="send all payloads over gRPC")
    options = parser.parse_args()
    problems = soak(options.minutes, options.data_dir, not options.no_shared_memory, fill=True)
    for problem in problems:
        print(f"FAILED: {problem}")
    print("nothing grew" if not problems else f"{len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
