"""Partitions: with fsdp each rank writes and reads its own rows of each tensor, and no rank reads a whole checkpoint.

    <output_dir>/step-12.rank-1-of-2.<run>.tmp                 each rank writes its file here
    <output_dir>/step-12/optimizer/rank-1-of-2.safetensors     the first rank moves all files here, before the manifest

A file has the tensors "<parameter>/<entry>" of the optimizer, each with the rows of that rank. `trainer.pt` has their
full shapes, and the rest of the state. FSDP2 gives rank r of n the rows from r * ceil(rows / n) on: ceil(rows / n)
rows, or as many as are left. So a run can resume with another number of ranks: each rank computes which files have its
rows, and opens only these files. docs/record/trainer.md says why torch.distributed.checkpoint is not used here.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from replay_generator.policy.remote import checksum_of
from replay_trainer.ranks import Ranks
from replay_trainer.weights import RANKS_FOLDER, to_disk, writing

_LEFTOVERS = "step-*.rank-*-of-*.*.tmp"


class RankFiles:
    """Writes the files of all ranks. Every rank has a RankFiles. All ranks call `why_not_shared` and `write`
    together."""

    def __init__(self, ranks: Ranks, output_dir: Path) -> None:
        self._ranks = ranks.apart()  # `write` may run on another thread
        self._output_dir = output_dir
        # A rank of a killed run may still be writing. This random name keeps its files apart from those of this run.
        self._run = ranks.from_first(secrets.token_hex(4))

    def why_not_shared(self) -> str:
        """The rank that does not see the output_dir of the first rank, and the remedy; "" if all ranks see it."""
        path = self._path(0, 0)  # an empty file for this test
        if self._ranks.is_first:
            path.touch()
        self._ranks.wait()
        # For each rank: (True if it sees the file, its output_dir).
        views = self._ranks.all((path.exists(), str(self._output_dir)))
        if self._ranks.is_first:
            path.unlink()
        for rank, (exists, folder) in enumerate(views):
            if not exists:
                return (
                    f"rank {rank} does not see in {folder} what the first rank writes to {views[0][1]}: with fsdp each "
                    f"rank writes a part of a training checkpoint, so output_dir must be a folder that all ranks share"
                )
        return ""

    def remove_leftovers(self) -> None:
        """Removes the files that killed runs left behind. Only the first rank calls this, while no rank writes."""
        for path in self._output_dir.glob(_LEFTOVERS):
            path.unlink(missing_ok=True)

    def write(self, version: int, rows: dict[str, Tensor]) -> dict[str, tuple[Path, str]]:
        """Writes this rank's file, and waits until the other ranks have written theirs. Any thread may call it.

        Returns for the file of each rank: its name in the folder of the version -> (its path now, its checksum). Raises
        RuntimeError on every rank if any rank could not write.
        """
        path = self._path(version, self._ranks.index)
        checksum = ""
        reason = ""
        assert all(tensor.device.type == "cpu" for tensor in rows.values()), "the next step may change the tensors"
        try:
            with writing(path, SafetensorError):
                save_file(rows, path)
                to_disk(path)
            checksum = checksum_of(path)
        except Exception as error:  # sent to all ranks, which wait for this rank
            reason = f"{type(error).__name__}: {error}"
            with suppress(OSError):  # the disk may be gone; a later run removes the file
                path.unlink(missing_ok=True)
        parts = self._ranks.all((checksum, reason))
        assert len(parts) == self._ranks.size, (len(parts), self._ranks.size)
        for rank, (_, reason) in enumerate(parts):
            if reason:
                raise RuntimeError(f"rank {rank} could not write its part of the training checkpoint: {reason}")
        files = {}
        for rank, (checksum, _) in enumerate(parts):
            files[_name(rank, len(parts))] = (self._path(version, rank), checksum)
        return files

    def _path(self, version: int, rank: int) -> Path:
        return self._output_dir / f"step-{version}.rank-{rank}-of-{self._ranks.size}.{self._run}.tmp"


class StoredRows:
    """A tensor whose rows are spread over the files of a training checkpoint. A slice reads only the files with its
    rows."""

    def __init__(self, open_file: Callable[[int], Any], ranks: int, name: str, shape: list[int]) -> None:
        """`open_file` returns the open file of a rank. `ranks`: the number of ranks that wrote the checkpoint. `name`
        and `shape`: those of the whole tensor."""
        self.shape = torch.Size(shape)
        self._open_file = open_file
        self._ranks = ranks
        self._name = name

    def __getitem__(self, rows: slice) -> Tensor:
        """These rows of the whole tensor, joined from the files that have them. `rows` has no step."""
        start, stop, _ = rows.indices(self.shape[0])
        share = math.ceil(self.shape[0] / self._ranks)
        parts: list[Tensor] = []
        for rank in range(self._ranks):
            # The file of this rank begins with row rank * share. `first` and `end` count from there.
            first = max(start - rank * share, 0)
            end = min(stop - rank * share, share)
            if first < end:
                parts.append(self._open_file(rank).get_slice(self._name)[first:end])
        if not parts:  # no rows, but with the dtype and the other axes of the tensor
            parts.append(self._open_file(0).get_slice(self._name)[0:0])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def take_rows(optimizer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, list[int]]]:
    """Splits a state of the optimizer into three parts.

    Returns the state without its partitioned tensors, this rank's rows of the partitioned tensors, and the full shapes
    of the partitioned tensors. The keys of rows and shapes are "<parameter>/<entry>".
    """
    whole: dict[str, Any] = optimizer | {"state": {}}
    rows = {}
    shapes = {}
    for name, entries in optimizer["state"].items():
        whole["state"][name] = {}
        for entry, value in entries.items():
            if isinstance(value, DTensor):
                assert all(placement.is_shard(0) for placement in value.placements), (name, value.placements)
                rows[f"{name}/{entry}"] = value.to_local()
                shapes[f"{name}/{entry}"] = list(value.shape)
            else:
                whole["state"][name][entry] = value
    return whole, rows, shapes


def put_rows(optimizer: dict[str, Any], folder: Path, ranks: int, shapes: dict[str, list[int]]) -> None:
    """Puts StoredRows of the training checkpoint in `folder` in the places from which `take_rows` took tensors out.

    `ranks` and `shapes`: the number of ranks that wrote the checkpoint, and the full shapes that `take_rows` returned.
    """
    # Opens the file of a rank when a tensor is first read from it, and only once.
    open_file = cache(lambda rank: safe_open(folder / _name(rank, ranks), "pt"))
    for key, shape in shapes.items():
        name, entry = key.rsplit("/", 1)
        optimizer["state"][name][entry] = StoredRows(open_file, ranks, key, shape)


def read_rows(stored: Any, like: Tensor) -> Tensor:
    """This rank's rows of `stored`: a tensor, a slice of a file, or StoredRows, with the full shape of `like`."""
    if not isinstance(like, DTensor):
        # A tensor without axes, such as the scale of a layer, has no slice.
        return stored if isinstance(stored, Tensor) else torch.as_tensor(stored[:])
    local = like.to_local()
    mesh = like.device_mesh
    assert mesh.ndim == 1, mesh
    assert all(placement.is_shard(0) for placement in like.placements), like.placements
    rows = math.ceil(like.shape[0] / mesh.size())
    start = min(mesh.get_local_rank() * rows, like.shape[0])  # the last ranks may have no rows
    own_rows: Tensor = stored[start : start + local.shape[0]]
    assert own_rows.shape == local.shape, (own_rows.shape, local.shape)
    return own_rows


def load_weights_of_rank(folder: Path, model: nn.Module) -> None:
    """Copies this rank's part of a published folder into a partitioned model.

    Raises ValueError for a tensor that the folder lacks, or that has another shape in the folder.
    """
    aliases: dict[int, list[str]] = defaultdict(list)
    tensors: dict[int, Tensor] = {}
    # Tied tensors are one object with several names (with `keep_vars`), and the file has only one of these names.
    for name, tensor in model.state_dict(keep_vars=True).items():
        aliases[id(tensor)].append(name)
        tensors[id(tensor)] = tensor
    opened: list[Any] = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    files = {name: file for file in opened for name in list(file.keys())}
    for identity, names in aliases.items():
        tensor = tensors[identity]
        stored_names = [name for name in names if name in files]
        if not stored_names:
            raise ValueError(f"{folder} is of a run with another model: it lacks the weights {names[0]!r}")
        name = stored_names[0]
        if tensor.dim():
            stored = files[name].get_slice(name)
            shape = list(stored.get_shape())
        else:  # a tensor without axes has no slice
            stored = files[name].get_tensor(name)
            shape = []
        here = list(tensor.shape)
        if shape != here:
            raise ValueError(
                f"{folder} is of a run with another model: {names[0]!r} has the shape {shape} (here {here})"
            )
        own = read_rows(stored, tensor) if tensor.dim() else stored
        # The tensor in which this rank holds its part: `to_local` of a DTensor makes no copy.
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        with torch.no_grad():
            local.copy_(own)


def optimizer_state_of_rank(state: dict[str, Any], policy: nn.Module) -> dict[str, Any]:
    """This rank's part of the optimizer's state: its rows for partitioned parameters, and all rows for other
    parameters.

    The tensors of `state` may be in a memory-mapped file: only this rank's part of a partitioned tensor is then read.
    """
    parameters = dict(policy.named_parameters(remove_duplicate=False))
    parts: dict[str, dict[str, Any]] = {}
    for name, entries in state["state"].items():
        parts[name] = {entry: _part_of_rank(value, parameters[name]) for entry, value in entries.items()}
    return state | {"state": parts}


def _part_of_rank(value: Any, parameter: Tensor) -> Any:
    """This rank's part of an entry of the optimizer's state."""
    if not isinstance(value, Tensor | StoredRows):
        return value
    # `clone`: the tensor may be a part of a memory-mapped file, and the optimizer changes its tensors in place.
    if value.shape != parameter.shape:  # one value for the whole parameter, such as the number of steps
        return value.clone() if isinstance(value, Tensor) else value
    own = read_rows(value, parameter)
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(
        own.clone().to(parameter.to_local().device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _name(rank: int, ranks: int) -> str:
    return f"{RANKS_FOLDER}/rank-{rank}-of-{ranks}.safetensors"
