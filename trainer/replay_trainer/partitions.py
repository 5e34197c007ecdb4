"""Partitions: with fsdp each rank writes and reads its own rows of each tensor, and no rank reads a whole checkpoint.

    <output_dir>/step-12.rank-1-of-2.<run>.tmp                 each rank writes its file here
    <output_dir>/step-12/optimizer/rank-1-of-2.safetensors     the first rank moves all files here, and then writes
                                                               the manifest

The file of a rank has the tensors "<parameter>/<entry>" of the optimizer, each with only the rows of that rank.
`trainer.pt` has the full shapes of these tensors, and the rest of the state.

FSDP2 gives each of n ranks share = ceil(rows / n) rows of a tensor: rank r has the rows from r * share up to
(r + 1) * share. The last ranks have fewer rows, or none, if the tensor ends before. So each rank can compute which
files have its rows, even if a run resumes with another number of ranks, and it opens only these files.
docs/record/trainer.md says why torch.distributed.checkpoint is not used here.
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
    """Writes the file of this rank for each training checkpoint.

    All ranks construct a RankFiles together, and call `why_not_shared` and `write` together.
    """

    def __init__(self, ranks: Ranks, output_dir: Path) -> None:
        self._ranks = ranks.apart()  # `write` may run on another thread, which needs connections of its own
        self._output_dir = output_dir
        # A rank of a killed run may still be writing. This random name keeps its files apart from those of this run.
        self._run_name = ranks.from_first(secrets.token_hex(4))

    def why_not_shared(self) -> str:
        """Checks that all ranks see the output_dir of the first rank. Returns "" if they do. Otherwise returns a text
        that names a rank that does not, and the remedy."""
        test_file = self._path(0, 0)  # the path is the same on all ranks that share output_dir
        if self._ranks.is_first:
            test_file.touch()
        self._ranks.wait()
        # For each rank: (True if the rank sees the file, the output_dir of the rank).
        views = self._ranks.all((test_file.exists(), str(self._output_dir)))
        if self._ranks.is_first:
            test_file.unlink()
        _, written_to = views[0]
        for rank, (sees_file, folder) in enumerate(views):
            if not sees_file:
                return (
                    f"rank {rank} does not see in {folder} what the first rank writes to {written_to}: with fsdp each "
                    f"rank writes a part of a training checkpoint, so output_dir must be a folder that all ranks share"
                )
        return ""

    def remove_leftovers(self) -> None:
        """Removes the files that killed runs left behind. Only the first rank calls this, while no rank writes."""
        for path in self._output_dir.glob(_LEFTOVERS):
            path.unlink(missing_ok=True)

    def write(self, version: int, rows: dict[str, Tensor]) -> dict[str, tuple[Path, str]]:
        """Writes this rank's file, and waits until the other ranks have written theirs. Any thread may call it.

        Returns the files of all ranks: the name that a file will have in the folder of the version -> (the path of the
        file now, the checksum of the file). Raises RuntimeError on every rank if any rank could not write.
        """
        path = self._path(version, self._ranks.index)
        own_checksum = ""
        own_failure = ""
        assert all(tensor.device.type == "cpu" for tensor in rows.values()), "the next step may change the tensors"
        try:
            with writing(path, SafetensorError):
                save_file(rows, path)
                to_disk(path)
            own_checksum = checksum_of(path)
        except Exception as error:  # not raised here, because the other ranks wait for this rank in `all` below
            own_failure = f"{type(error).__name__}: {error}"
            with suppress(OSError):  # the disk may be gone; a later run removes the file
                path.unlink(missing_ok=True)
        reports = self._ranks.all((own_checksum, own_failure))
        assert len(reports) == self._ranks.size, (len(reports), self._ranks.size)
        for rank, (_, failure) in enumerate(reports):
            if failure:
                raise RuntimeError(f"rank {rank} could not write its part of the training checkpoint: {failure}")
        files = {}
        for rank, (checksum, _) in enumerate(reports):
            files[_name(rank, len(reports))] = (self._path(version, rank), checksum)
        return files

    def _path(self, version: int, rank: int) -> Path:
        """The path to which a rank writes its file."""
        return self._output_dir / f"step-{version}.rank-{rank}-of-{self._ranks.size}.{self._run_name}.tmp"


class StoredRows:
    """A tensor whose rows are spread over the files of a training checkpoint.

    A slice of it, `stored[start:stop]`, reads only the files that have rows of the slice.
    """

    def __init__(self, open_file: Callable[[int], Any], ranks: int, name: str, shape: list[int]) -> None:
        """`open_file`: a function that returns the open file of a rank. `ranks`: the number of ranks that wrote the
        checkpoint. `name`: the name of the tensor in the files. `shape`: the shape of the whole tensor."""
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
            # The file of this rank begins with row rank * share of the tensor. `first` and `end` are rows of the file.
            first = max(start - rank * share, 0)
            end = min(stop - rank * share, share)
            if first < end:
                rows_of_rank = self._open_file(rank).get_slice(self._name)
                parts.append(rows_of_rank[first:end])
        if not parts:  # the slice is empty, but must have the dtype and the other axes of the tensor
            rows_of_rank = self._open_file(0).get_slice(self._name)
            parts.append(rows_of_rank[0:0])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def take_rows(optimizer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, list[int]]]:
    """Splits a state of the optimizer into three parts.

    Returns the state without its partitioned tensors, this rank's rows of the partitioned tensors, and the full shapes
    of the partitioned tensors. The keys of rows and shapes are "<parameter>/<entry>".
    """
    rest: dict[str, Any] = optimizer | {"state": {}}
    rows = {}
    shapes = {}
    for name, entries in optimizer["state"].items():
        rest["state"][name] = {}
        for entry, value in entries.items():
            if isinstance(value, DTensor):
                assert all(placement.is_shard(0) for placement in value.placements), (name, value.placements)
                rows[f"{name}/{entry}"] = value.to_local()
                shapes[f"{name}/{entry}"] = list(value.shape)
            else:
                rest["state"][name][entry] = value
    return rest, rows, shapes


def put_rows(optimizer: dict[str, Any], folder: Path, ranks: int, shapes: dict[str, list[int]]) -> None:
    """Puts a StoredRows into each place of `optimizer` from which `take_rows` took a tensor.

    `folder`: the training checkpoint, whose files have the rows. `ranks`: the number of ranks that wrote the
    checkpoint. `shapes`: the full shapes that `take_rows` returned.
    """
    # Opens the file of a rank when the first tensor is read from this file. Later reads use the same open file.
    open_file = cache(lambda rank: safe_open(folder / _name(rank, ranks), "pt"))
    for key, shape in shapes.items():
        name, entry = key.rsplit("/", 1)
        optimizer["state"][name][entry] = StoredRows(open_file, ranks, key, shape)


def read_rows(stored: Any, like: Tensor) -> Tensor:
    """Returns this rank's rows of `stored`.

    `stored`: a tensor, a slice of a file, or a StoredRows, with the full shape of `like`. `like`: the tensor of the
    model that says which rows are this rank's: all rows, if it is not partitioned.
    """
    if not isinstance(like, DTensor):
        if isinstance(stored, Tensor):  # perhaps without axes, such as the scale of a layer: `[:]` would fail
            return stored
        return torch.as_tensor(stored[:])
    local = like.to_local()
    mesh = like.device_mesh
    assert mesh.ndim == 1, mesh
    assert all(placement.is_shard(0) for placement in like.placements), like.placements
    share = math.ceil(like.shape[0] / mesh.size())
    start = min(mesh.get_local_rank() * share, like.shape[0])  # the last ranks may have no rows
    own_rows: Tensor = stored[start : start + local.shape[0]]
    assert own_rows.shape == local.shape, (own_rows.shape, local.shape)
    return own_rows


def load_weights_of_rank(folder: Path, model: nn.Module) -> None:
    """Copies this rank's part of a published folder into a partitioned model.

    Raises ValueError for a tensor that the folder lacks, or that has another shape in the folder.
    """
    # Tied weights are one tensor with several names, and the folder has the tensor under only one of these names. With
    # `keep_vars`, `state_dict` returns the same object for all names of a tensor, so these names share one `id`.
    names_by_id: dict[int, list[str]] = defaultdict(list)
    tensors_by_id: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names_by_id[id(tensor)].append(name)
        tensors_by_id[id(tensor)] = tensor
    # The name of a tensor -> the open file that has the tensor.
    files: dict[str, Any] = {}
    opened: list[Any] = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    for file in opened:
        for name in list(file.keys()):
            files[name] = file
    for identity, names in names_by_id.items():
        tensor = tensors_by_id[identity]
        stored_names = [name for name in names if name in files]
        if not stored_names:
            raise ValueError(f"{folder} is of a run with another model: it lacks the weights {names[0]!r}")
        name = stored_names[0]
        if tensor.dim():
            stored = files[name].get_slice(name)
            stored_shape = list(stored.get_shape())
        else:  # safetensors cannot slice a tensor without axes
            stored = files[name].get_tensor(name)
            stored_shape = []
        shape = list(tensor.shape)
        if stored_shape != shape:
            raise ValueError(
                f"{folder} is of a run with another model: {names[0]!r} has the shape {stored_shape} (here {shape})"
            )
        own_rows = read_rows(stored, tensor) if tensor.dim() else stored
        # `to_local` of a DTensor makes no copy: it returns the tensor in which this rank holds its part.
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        with torch.no_grad():
            local.copy_(own_rows)


def optimizer_state_of_rank(state: dict[str, Any], policy: nn.Module) -> dict[str, Any]:
    """Returns this rank's part of the optimizer's state: its own rows for partitioned parameters, and all rows for
    other parameters.

    If any parameter is partitioned, the tensors of `state` may be in a memory-mapped file. Of a partitioned tensor,
    only this rank's part is read then, and the result has copies of all tensors.
    """
    parameters = dict(policy.named_parameters(remove_duplicate=False))
    is_mapped = any(isinstance(parameter, DTensor) for parameter in parameters.values())
    parts: dict[str, dict[str, Any]] = {}
    for name, entries in state["state"].items():
        parts[name] = {entry: _part_of_rank(value, parameters[name], is_mapped) for entry, value in entries.items()}
    return state | {"state": parts}


def _part_of_rank(value: Any, parameter: Tensor, is_mapped: bool) -> Any:
    """This rank's part of one entry of the optimizer's state.

    `is_mapped`: True if the value may be in a memory-mapped file. The part is then a copy, because the optimizer
    changes its tensors in place.
    """
    if not isinstance(value, Tensor | StoredRows):
        return value
    if value.shape != parameter.shape:  # one value for the whole parameter, such as the number of steps
        return value.clone() if is_mapped and isinstance(value, Tensor) else value
    own_rows = read_rows(value, parameter)
    if not isinstance(parameter, DTensor):
        return own_rows.clone() if is_mapped else own_rows
    return DTensor.from_local(
        own_rows.to(parameter.to_local().device, copy=True),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _name(rank: int, ranks: int) -> str:
    """The name of the file of a rank in the folder of a version."""
    return f"{RANKS_FOLDER}/rank-{rank}-of-{ranks}.safetensors"
