"""TransferQueue with its rows in a replay server, beside TransferQueue's own SimpleStorage.

    .venv-transferqueue/bin/python -m experiments.transfer_queue             in memory: puts and gets, in turn
    .venv-transferqueue/bin/python -m experiments.transfer_queue --durable   rows a second on disk; checkpoints

Both storages work for the same controller, and each operation is measured with one and then with the other, so that
ratios hold on a busy machine. The environment needs TransferQueue, and all that the server needs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue.client import TransferQueueClient

from experiments.serving import serve
from replay_adapters import transfer_queue

FIELDS = 16
SIZES = {"400 B": 400, "106 kB": 106_000, "4 MB": 4_000_000}
ROWS = {"400 B": 256, "106 kB": 64, "4 MB": 4}
TABLE = 'name = "tq"\nwhen_full = "block"\n'


def batch(rows: int, nbytes: int) -> TensorDict:
    """Rows of FIELDS dense fields of float32, together about `nbytes` a row."""
    width = max(1, nbytes // FIELDS // 4)
    fields = {f"field{number:02}": torch.rand(rows, width) for number in range(FIELDS)}
    return TensorDict(fields, batch_size=rows)


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


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
            print(
                f"{label:>7} x {ROWS[label]:<4} {operation:14} SimpleStorage {theirs * 1e3:8.2f} ms   "
                f"ReplayServer {ours * 1e3:8.2f} ms   speed {theirs / ours:.2f}",
                flush=True,
            )


def durable(client: TransferQueueClient, folder: Path, rows: int) -> None:
    """Prints the rows a second of one producer, and the seconds of a checkpoint, its load and the first rows."""
    data = batch(128, SIZES["106 kB"])
    spent, _ = seconds(lambda: [client.put(data, partition_id=f"producer{number}") for number in range(12)])
    print(f"durable producer, 16 fields, 106 kB: {12 * 128 / spent:.0f} rows a second", flush=True)
    for number in range(12):
        client.clear_partition(f"producer{number}")
    small = batch(1000, 2000)
    for _ in range(rows // 1000):
        client.put(small, partition_id="kept")
    spent, _ = seconds(lambda: tq.save_checkpoint(folder / "checkpoint"))
    print(f"save_checkpoint with {rows} rows of 16 fields: {spent:.2f} s", flush=True)
    client.clear_partition("kept")

    def load_and_read() -> None:
        tq.load_checkpoint(folder / "checkpoint")
        fields = [f"field{number:02}" for number in range(FIELDS)]
        metadata = client.get_meta(data_fields=fields, batch_size=64, partition_id="kept", task_name="first")
        client.get_data(metadata)

    spent, _ = seconds(load_and_read)
    print(f"load_checkpoint and the first 64 of {rows} rows: {spent:.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--durable", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=5000, help="rows of the checkpoint")
    options = parser.parse_args()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = f"[[tables]]\n{TABLE}"
        if options.durable:
            config = f'[server]\ndata_dir = "{folder / "data"}"\n{config}'
        with serve(folder, config) as server:
            ours = {"address": server.address, "table": "tq"}
            backend: dict[str, Any] = {"SimpleStorage": {"num_data_storage_units": 1}}
            backend["storage_backend"] = transfer_queue.NAME if options.durable else "SimpleStorage"
            backend[transfer_queue.NAME] = ours
            settings = tq.init(OmegaConf.create({"backend": backend}))
            client = tq.get_client()
            if options.durable:
                durable(client, folder, options.rows)
            else:
                second = TransferQueueClient(client_id="second", controller_info=settings.controller.zmq_info)
                second.initialize_storage_manager(transfer_queue.NAME, OmegaConf.create(ours))
                compare({"SimpleStorage": client, transfer_queue.NAME: second}, options.rounds)
                second.close()
            tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
