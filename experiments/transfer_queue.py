"""TransferQueue with its rows in a replay server, beside TransferQueue's own SimpleStorage.

    .venv-transferqueue/bin/python -m experiments.transfer_queue memory      puts and gets of both storages, in turn
    .venv-transferqueue/bin/python -m experiments.transfer_queue producer    rows a second that one process puts on disk
    .venv-transferqueue/bin/python -m experiments.transfer_queue checkpoint  save_checkpoint with many rows on disk
    .venv-transferqueue/bin/python -m experiments.transfer_queue reattach    load_checkpoint until the first rows

Both storages work for the same controller, and each operation is measured with one and then with the other, so that
ratios hold on a busy machine. For all other figures, the load of the machine and the CPU time of the processes stand
beside the seconds: what takes 1 s of CPU time takes at least 1 s. The environment needs TransferQueue.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue.client import TransferQueueClient

from benchmarks.processes import Server
from experiments.serving import serve
from replay_adapters import transfer_queue

FIELDS = 16
SIZES = {"400 B": 400, "4 kB": 4_000, "40 kB": 40_000, "106 kB": 106_000, "4 MB": 4_000_000}
ROWS = {"400 B": 256, "4 kB": 256, "40 kB": 128, "106 kB": 64, "4 MB": 4}
TABLE = 'name = "tq"\nwhen_full = "block"\nmax_size = 10_000_000\n'
PRODUCED = 128
"""Rows of each put of the producer."""


def batch(rows: int, nbytes: int) -> TensorDict:
    """Rows of FIELDS dense fields of float32, together about `nbytes` a row."""
    width = max(1, nbytes // FIELDS // 4)
    fields = {f"field{number:02}": torch.rand(rows, width) for number in range(FIELDS)}
    return TensorDict(fields, batch_size=rows)


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


class Machine:
    """Measures seconds, and beside them the load of the machine and the CPU seconds of the three processes."""

    def __init__(self, server: Server) -> None:
        controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        controller_pid = ray.get(controller.__ray_call__.remote(lambda _: os.getpid()))
        self._pids = {"client": os.getpid(), "server": server.pid, "controller": controller_pid}

    @contextmanager
    def measured(self, what: str, rows: int = 0) -> Iterator[None]:
        """Prints what the block took. `rows`: the number of rows that it puts."""
        before = {name: _cpu_seconds(pid) for name, pid in self._pids.items()}
        began = time.perf_counter()
        yield
        spent = time.perf_counter() - began
        cpu = ", ".join(f"{name} {_cpu_seconds(pid) - before[name]:.2f}" for name, pid in self._pids.items())
        rate = f", {rows / spent:.0f} rows a second" if rows else ""
        load, _, _ = os.getloadavg()
        print(f"{what}: {spent:.2f} s{rate} (CPU seconds: {cpu}; load {load:.1f})", flush=True)


def _cpu_seconds(pid: int) -> float:
    """The CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(clients: dict[str, TransferQueueClient], rounds: int) -> None:
    """Prints for each size the median of each operation, and the ratio of both storages."""
    for label, nbytes in SIZES.items():
        data = batch(ROWS[label], nbytes)
        times: dict[tuple[str, str], list[float]] = {}
        for number in range(rounds + 1):  # the first round warms up
            for name, client in clients.items():
                partition = f"{name}-{number}"
                put, metadata = seconds(partial(client.put, data, partition_id=partition))
                get, found = seconds(partial(client.get_data, metadata))
                one = metadata.select_fields(["field03"])
                get_one, _ = seconds(partial(client.get_data, one))
                clear, _ = seconds(partial(client.clear_samples, metadata))
                assert torch.equal(torch.stack(list(found["field03"].unbind())), data["field03"])
                if number:
                    measured = {"put": put, "get": get, "get one field": get_one, "clear": clear}
                    for operation, value in measured.items():
                        times.setdefault((operation, name), []).append(value)
        for operation in ("put", "get", "get one field", "clear"):
            theirs, ours = (statistics.median(times[operation, name]) for name in clients)
            load, _, _ = os.getloadavg()
            print(
                f"{label:>7} x {ROWS[label]:<4} {operation:14} SimpleStorage {theirs * 1e3:8.2f} ms   "
                f"ReplayServer {ours * 1e3:8.2f} ms   speed {theirs / ours:.2f}   load {load:.1f}",
                flush=True,
            )


def produce(client: TransferQueueClient, machine: Machine, puts: int, in_flight: int, rounds: int) -> None:
    """Prints the rows a second of one process that puts rows of 106 kB on disk, with some puts at a time."""
    data = batch(PRODUCED, SIZES["106 kB"])
    client.put(data, partition_id="warm")
    client.clear_partition("warm")
    for number in range(rounds):
        partition = f"producer{number}"
        what = f"durable producer, {puts} puts of {PRODUCED} rows of 16 fields, 106 kB, {in_flight} at a time"
        with machine.measured(what, puts * PRODUCED), ThreadPoolExecutor(in_flight) as threads:
            list(threads.map(lambda _, name=partition: client.put(data, partition_id=name), range(puts)))
        client.clear_partition(partition)


def fill(client: TransferQueueClient, machine: Machine, rows: int, nbytes: int) -> None:
    """Puts rows into the partition `kept`."""
    at_once = min(rows, max(1, (16 << 20) // nbytes))
    data = batch(at_once, nbytes)
    with machine.measured(f"put {rows} rows of {nbytes} B", rows):
        for _ in range(rows // at_once):
            client.put(data, partition_id="kept")


def save(client: TransferQueueClient, machine: Machine, folder: Path, rows: int, nbytes: int, rounds: int) -> None:
    """Prints the seconds of a checkpoint, and how many bytes it wrote."""
    fill(client, machine, rows, nbytes)
    for _ in range(rounds):
        before = _bytes_of(folder / "data")
        with machine.measured(f"save_checkpoint with {rows} rows of 16 fields, {nbytes} B"):
            tq.save_checkpoint(folder / "checkpoint")
        grown = _bytes_of(folder / "data") - before
        print(f"the checkpoint has {_bytes_of(folder / 'checkpoint')} bytes, and data_dir grew by {grown}", flush=True)


def reattach(client: TransferQueueClient, machine: Machine, folder: Path, rows: int, nbytes: int, rounds: int) -> None:
    """Prints the seconds from the load of a checkpoint to its first 64 rows."""
    fill(client, machine, rows, nbytes)
    tq.save_checkpoint(folder / "checkpoint")
    fields = [f"field{number:02}" for number in range(FIELDS)]
    for _ in range(rounds):
        client.clear_partition("kept")
        with machine.measured(f"load_checkpoint and the first 64 of {rows} rows of {nbytes} B"):
            tq.load_checkpoint(folder / "checkpoint")
            metadata = client.get_meta(data_fields=fields, batch_size=64, partition_id="kept", task_name="first")
            client.get_data(metadata)


def _bytes_of(folder: Path) -> int:
    """The bytes on the disk of the files of a folder."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "producer", "checkpoint", "reattach"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, help="rows of the checkpoint: 50,000, or 5,000 for reattach")
    parser.add_argument("--bytes", type=int, default=100_000, help="bytes of each row of the checkpoint")
    parser.add_argument("--puts", type=int, default=24, help="puts of the producer")
    parser.add_argument("--in-flight", type=int, default=1, help="puts of the producer at a time")
    parser.add_argument("--folder", type=Path, help="the folder of the server's data_dir; its disk is measured")
    parser.add_argument("--server-python", default=sys.executable, help="the Python of the server")
    options = parser.parse_args()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        config = f"[[tables]]\n{TABLE}"
        if options.what != "memory":
            config = f'[server]\ndata_dir = "{folder / "data"}"\n{config}'
        with serve(folder, config, python=options.server_python) as server:
            ours = {"address": server.address, "table": "tq"}
            backend: dict[str, Any] = {"SimpleStorage": {"num_data_storage_units": 1}}
            backend["storage_backend"] = "SimpleStorage" if options.what == "memory" else transfer_queue.NAME
            backend[transfer_queue.NAME] = ours
            settings = tq.init(OmegaConf.create({"backend": backend}))
            client = tq.get_client()
            machine = Machine(server)
            if options.what == "memory":
                second = TransferQueueClient(client_id="second", controller_info=settings.controller.zmq_info)
                second.initialize_storage_manager(transfer_queue.NAME, OmegaConf.create(ours))
                compare({"SimpleStorage": client, transfer_queue.NAME: second}, options.rounds)
                second.close()
            elif options.what == "producer":
                produce(client, machine, options.puts, options.in_flight, options.rounds)
            elif options.what == "checkpoint":
                save(client, machine, folder, options.rows or 50_000, options.bytes, options.rounds)
            else:
                reattach(client, machine, folder, options.rows or 5_000, options.bytes, options.rounds)
            tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
