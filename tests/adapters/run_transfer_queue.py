"""A job with TransferQueue whose rows live in a replay server, in two processes: the first dies, the second resumes.

    python -m tests.adapters.run_transfer_queue die FOLDER       puts, saves, goes on, and kills itself
    python -m tests.adapters.run_transfer_queue resume FOLDER CYCLES REPORT
    python -m tests.adapters.run_transfer_queue values REPORT    odd values, and a silent controller

`die` clears rows of the checkpoint after the save, uses their indexes again, and leaves rows that no checkpoint lists.
REPLAY_ADDRESS names the server.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue.utils.zmq_utils import ZMQRequestType

import replay_adapters.verl_plugin  # noqa: F401
from tests.adapters.transfer_queue_plugin import OURS

PARTITION = "train"
ROWS = 64
"""Rows of the checkpoint, and of each cycle afterwards."""
FIELDS = 16


def fields_of(numbers: list[int]) -> TensorDict:
    """Rows that tell their numbers in each field: dense, jagged, scalar and without tensors."""
    columns: dict[str, Any] = {}
    for field in range(FIELDS - 3):
        columns[f"dense{field}"] = torch.tensor(numbers).view(-1, 1).expand(-1, 8 + field).to(torch.bfloat16) + field
    jagged = [torch.full((1 + number % 5,), float(number)) for number in numbers]
    columns["jagged"] = torch.nested.as_nested_tensor(jagged, layout=torch.jagged)
    columns["scalar"] = torch.tensor(numbers)
    columns["plain"] = NonTensorStack(*({"number": number, "array": np.arange(3) + number} for number in numbers))
    return TensorDict(columns, batch_size=len(numbers))


def put(numbers: list[int]) -> None:
    tags = [{"number": number} for number in numbers]
    tq.kv_batch_put(
        keys=[f"row{number}" for number in numbers], partition_id=PARTITION, fields=fields_of(numbers), tags=tags
    )


def wrong_rows(numbers: list[int]) -> list[int]:
    """The numbers of the rows that do not come back bit by bit."""
    found = tq.kv_batch_get(keys=[f"row{number}" for number in numbers], partition_id=PARTITION)
    expected = fields_of(numbers)
    wrong = set()
    for name in list(expected.keys()):
        for row, number in enumerate(numbers):
            got, wanted = found[name][row], expected[name][row]
            if name == "plain":
                got, wanted = getattr(got, "data", got), getattr(wanted, "data", wanted)
                is_same = got["number"] == wanted["number"] and np.array_equal(got["array"], wanted["array"])
            else:
                is_same = got.dtype == wanted.dtype and torch.equal(got.reshape(wanted.shape), wanted)
            if not is_same:
                wrong.add(number)
    return sorted(wrong)


def die(folder: Path) -> None:
    put(list(range(ROWS)))
    tq.kv_clear(keys=[f"row{number}" for number in range(4)], partition_id=PARTITION)  # before the checkpoint
    tq.save_checkpoint(folder)
    tq.kv_clear(keys=[f"row{number}" for number in range(4, ROWS // 2)], partition_id=PARTITION)
    for number in range(1000, 1200, 4):  # these get the indexes of the rows that were cleared
        put(list(range(number, number + 4)))
    print("died", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def resume(folder: Path, cycles: int, report: Path) -> None:
    tq.load_checkpoint(folder)
    listed = sorted(tag["number"] for tag in tq.kv_list(PARTITION)[PARTITION].values())
    first_wrong = wrong_rows(listed)
    mislabelled: list[int] = []
    for cycle in range(cycles):
        first = 2000 + ROWS * cycle
        numbers = list(range(first, first + ROWS))
        put(numbers)
        if cycle % 20 == 0:
            mislabelled += wrong_rows(numbers)
        tq.kv_clear(keys=[f"row{number}" for number in numbers], partition_id=PARTITION)
    told = {"listed": listed, "wrong": first_wrong, "mislabelled": mislabelled, "wrong_later": wrong_rows(listed)}
    report.write_text(json.dumps(told))


def values(report: Path) -> None:
    told: dict[str, Any] = {}
    put([1, 2, 3])
    for name in ("dense0", "jagged", "scalar", "plain"):
        column = tq.kv_batch_get(keys=["row1", "row2", "row3"], partition_id=PARTITION, select_fields=[name])[name]
        told[name] = type(column).__name__
    late = TensorDict({"scalar": torch.tensor([7]), "late": torch.ones(1, 2)}, batch_size=1)
    tq.kv_batch_put(keys=["row2"], partition_id=PARTITION, fields=late)
    row = tq.kv_batch_get(keys=["row2"], partition_id=PARTITION)
    told["overwritten"] = row["scalar"].reshape(-1).tolist()
    told["late"] = [list(value) for value in row["late"].unbind()[0].view(1, -1).tolist()]
    told["kept"] = row["jagged"].unbind()[0].tolist()
    try:
        tq.kv_put(key="bad", partition_id=PARTITION, fields={"bad": {1, 2}})
    except Exception as error:
        told["refused"] = str(error)
    # Two rows with the same field, and one of them has another field, which is in an item of its own.
    first = TensorDict({"first": torch.ones(2, 1)}, batch_size=2)
    tq.kv_batch_put(keys=["one", "two"], partition_id="columns", fields=first)
    second = TensorDict({"second": torch.ones(1, 1)}, batch_size=1)
    tq.kv_batch_put(keys=["two"], partition_id="columns", fields=second)
    tq.kv_clear(keys=["one", "two"], partition_id="columns")
    silences = silence_controller(2)
    put([5])
    told["wrong_after_two_silences"] = wrong_rows([5])
    told["silences_left"] = len(silences)
    silence_controller(4)
    try:
        put([6])
    except ConnectionError as error:
        told["silent"] = str(error)
    tq.kv_clear(keys=["row1", "row2", "row3", "bad", "row5", "row6"], partition_id=PARTITION)
    report.write_text(json.dumps(told))


def silence_controller(times: int) -> list[Exception]:
    """Lets the controller not answer about the next puts, this many times. Returns the silences that are left."""
    manager = tq.get_client().storage_manager
    exchange = type(manager)._exchange
    silences: list[Exception] = [TimeoutError("silent") for _ in range(times)]

    async def silent(message: list[Any], expected: Any, seconds: float) -> dict[str, Any]:
        if silences and expected == ZMQRequestType.NOTIFY_DATA_UPDATE_ACK:
            raise silences.pop()
        return await exchange(manager, message, expected, seconds)

    manager._exchange = silent
    return silences


def main(what: str, *arguments: str) -> None:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    tq.init(OmegaConf.create(OURS))
    if what == "die":
        die(Path(arguments[0]))
    elif what == "resume":
        resume(Path(arguments[0]), int(arguments[1]), Path(arguments[2]))
    else:
        values(Path(arguments[0]))
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
