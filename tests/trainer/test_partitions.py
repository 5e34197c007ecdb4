"""The files in which each rank writes its own rows: any number of ranks reads them, and damage to one is noticed.

The ranks are threads here. test_ranks.py and test_killed_ranks.py run them as processes.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from replay_trainer import partitions
from replay_trainer.partitions import RankFiles, optimizer_state_of_rank, put_rows
from replay_trainer.weights import checksum_of
from tests.kit.clients import FakeClient
from tests.kit.models import assert_same_weights
from tests.kit.trainers import make_batches
from tests.trainer.test_publication import train

pytestmark = pytest.mark.timeout(300)


class ThreadRanks:
    """Ranks as threads of one process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._index = threading.local()
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    @property
    def index(self) -> int:
        index: int = self._index.value
        return index

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def apart(self) -> ThreadRanks:
        return self

    def wait(self) -> None:
        self._barrier.wait()

    def all(self, value: Any) -> list[Any]:
        self._values[self.index] = value
        self.wait()
        values = list(self._values)
        self.wait()
        return values

    def from_first(self, value: Any) -> Any:
        return self.all(value)[0]

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Calls `function` as each rank; the results in the order of ranks."""

        def run_rank(index: int) -> Any:
            self._index.value = index
            return function(index)

        with ThreadPoolExecutor(self.size) as pool:
            return [future.result() for future in [pool.submit(run_rank, index) for index in range(self.size)]]


def rows_of(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """As FSDP2 gives them to a rank."""
    share = math.ceil(len(tensor) / ranks)
    return tensor[rank * share : (rank + 1) * share].contiguous()


def write(output_dir: Path, ranks: int, tensors: dict[str, torch.Tensor]) -> dict[str, tuple[Path, str]]:
    """The files of all ranks, by their names in the folder of version 2."""
    threads = ThreadRanks(ranks)

    def write_rank(rank: int) -> Any:
        files = RankFiles(threads, output_dir)  # type: ignore[arg-type]
        return files.write(2, {name: rows_of(tensor, rank, ranks) for name, tensor in tensors.items()})

    answers = threads.run(write_rank)
    assert answers == [answers[0]] * ranks
    files: dict[str, tuple[Path, str]] = answers[0]
    return files


def put_in_place(files: dict[str, tuple[Path, str]], folder: Path) -> None:
    (folder / "optimizer").mkdir(parents=True)
    for name, (path, checksum) in files.items():
        assert checksum_of(path) == checksum
        path.rename(folder / name)


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (4, 3), (5, 2), (3, 7)])
def test_any_number_of_ranks_reads_the_rows_of_another(tmp_path, before, now):
    shapes = {"a/m": [7, 3], "b/m": [2], "c/m": [12, 1, 2], "d/m": [1, 5], "e/m": [0, 4], "f.x/m": [4]}
    tensors = {name: torch.arange(float(math.prod(shape))).reshape(shape) for name, shape in shapes.items()}
    put_in_place(write(tmp_path, before, tensors), tmp_path)
    for rank in range(now):
        optimizer: dict[str, Any] = {"state": {name.removesuffix("/m"): {} for name in shapes}}
        put_rows(optimizer, tmp_path, before, shapes)
        for name, tensor in tensors.items():
            stored = optimizer["state"][name.removesuffix("/m")]["m"]
            assert stored.shape == tensor.shape
            share = math.ceil(len(tensor) / now)
            start = min(rank * share, len(tensor))
            own = stored[start : start + len(rows_of(tensor, rank, now))]
            assert own.dtype == tensor.dtype
            assert torch.equal(own, rows_of(tensor, rank, now))
            assert torch.equal(stored[:], tensor)


def test_a_rank_opens_only_the_files_that_have_its_rows(tmp_path, monkeypatch):
    tensor = torch.arange(24.0).reshape(12, 2)
    put_in_place(write(tmp_path, 4, {"a/m": tensor}), tmp_path)
    opened, open_file = list[str](), partitions.safe_open
    monkeypatch.setattr(
        partitions, "safe_open", lambda path, kind: opened.append(path.name[5]) or open_file(path, kind)
    )
    for start, stop, files in [(0, 3, "0"), (3, 6, "1"), (6, 12, "23"), (4, 8, "12"), (12, 12, "0")]:
        optimizer: dict[str, Any] = {"state": {"a": {}}}
        put_rows(optimizer, tmp_path, 4, {"a/m": [12, 2]})
        opened.clear()
        assert torch.equal(optimizer["state"]["a"]["m"][start:stop], tensor[start:stop])
        assert "".join(opened) == files


def test_the_state_of_a_parameter_without_axes_is_read_whole():
    model = torch.nn.ParameterDict({"scale": torch.nn.Parameter(torch.tensor(2.0))})
    state = {"state": {"scale": {"step": torch.tensor(3.0), "exp_avg": torch.tensor(0.5)}}, "param_groups": []}
    assert optimizer_state_of_rank(state, model) == state


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """The mesh of a single rank, which is this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_no_tensor_of_a_partitioned_run_stays_in_the_file_that_it_is_read_from(mesh):
    spread = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    model = torch.nn.Module()
    model.whole = torch.nn.Parameter(torch.zeros(4))
    model.spread = torch.nn.Parameter(spread)
    entries = {name: {"step": torch.tensor(3.0), "exp_avg": torch.arange(4.0)} for name in ("whole", "spread")}
    own = optimizer_state_of_rank({"state": entries, "param_groups": []}, model)["state"]
    for name, entry in product(entries, ("step", "exp_avg")):
        value = own[name][entry]
        local = value.to_local() if isinstance(value, DTensor) else value
        source = entries[name][entry]
        assert torch.equal(local, source)
        assert local.data_ptr() != source.data_ptr(), (name, entry)


def test_ranks_that_do_not_share_a_folder_are_refused(tmp_path):
    def why(folders: list[Path]) -> str:
        ranks = ThreadRanks(len(folders))
        answers = ranks.run(lambda rank: RankFiles(ranks, folders[rank]).why_not_shared())  # type: ignore[arg-type]
        assert answers == [answers[0]] * len(folders)
        return str(answers[0])

    (tmp_path / "other").mkdir()
    assert why([tmp_path, tmp_path]) == ""
    other = tmp_path / "other"
    assert f"rank 1 does not see in {other} what the first rank writes to {tmp_path}: " in why([tmp_path, other])
    assert "rank 2 does not see" in why([tmp_path, tmp_path, tmp_path / "missing"])
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    files = write(tmp_path, 2, {"a/m": torch.ones(3)})
    (tmp_path / "step-3.tmp").mkdir()
    (tmp_path / "step-3.rank-notes.txt").write_text("mine")
    assert len(list(tmp_path.iterdir())) == 4
    one = ThreadRanks(1)
    one.run(lambda _: RankFiles(one, tmp_path).remove_leftovers())  # type: ignore[arg-type, func-returns-value]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3.rank-notes.txt", "step-3.tmp"]
    assert not any(path.exists() for path, _ in files.values())


OPTIONS = {"max_steps": 3, "keep_weights": 9}


def as_two_ranks_write_it(folder: Path) -> None:
    """Turns a training checkpoint of one rank into one of two: the same values, in the files of both."""
    state = torch.load(folder / "trainer.pt", weights_only=True)
    tensors = {}
    for name, entries in state["optimizer"]["state"].items():
        for entry in ("exp_avg", "exp_avg_sq"):
            tensors[f"{name}/{entry}"] = entries.pop(entry)
    state["rows"] = {"ranks": 2, "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()}}
    torch.save(state, folder / "trainer.pt")
    put_in_place(write(folder.parent, 2, tensors), folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    manifest["files"] = {str(path.relative_to(folder)): path.stat().st_size for path in paths}
    manifest["checksums"] = {str(path.relative_to(folder)): checksum_of(path) for path in paths}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after a run without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    weights: dict[str, torch.Tensor] = train(FakeClient(make_batches(3)), folder, **OPTIONS).state_dict()
    return weights


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of two steps, of which the last training checkpoint has files of two ranks."""
    train(FakeClient(make_batches(3)), tmp_path / "run", **OPTIONS | {"max_steps": 2})
    as_two_ranks_write_it(tmp_path / "run/step-2")
    return tmp_path / "run"


def resume(run_dir: Path) -> dict[str, torch.Tensor]:
    client = FakeClient(make_batches(3))
    weights: dict[str, torch.Tensor] = train(client, run_dir, resume=True, **OPTIONS).state_dict()
    return weights


def test_one_rank_resumes_what_two_wrote_and_ignores_a_file_of_another_number(run_dir, whole):
    (run_dir / "step-2/optimizer/rank-0-of-3.safetensors").write_bytes(b"foreign")
    assert_same_weights(resume(run_dir), whole)


def test_other_bytes_in_the_file_of_a_rank_are_refused(run_dir):
    damaged = run_dir / "step-2/optimizer/rank-1-of-2.safetensors"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(ValueError, match=r"step-2/optimizer/rank-1-of-2.safetensors is damaged: .* move step-2 out"):
        resume(run_dir)


@pytest.mark.parametrize("lost", ["whole", "a part"])
def test_a_state_that_lost_the_file_of_a_rank_is_passed_over(run_dir, whole, lost, caplog):
    path = run_dir / "step-2/optimizer/rank-0-of-2.safetensors"
    if lost == "whole":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-8])
    with caplog.at_level(logging.WARNING):
        assert_same_weights(resume(run_dir), whole)
    assert "step-2 has lost files or parts of them: it is passed over for step-1" in caplog.text
    # The version is written again, and nothing is left of the files of two ranks.
    assert not (run_dir / "step-2/optimizer").exists()
